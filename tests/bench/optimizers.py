"""How well optimizers train: a small GPT on characters, from several seeds, on 2 ranks through zero_full.

    python -m tests.bench.optimizers
    python -m tests.bench.optimizers --tune --seeds 100

Each row is an optimizer as a JSON file names it. A seed decides the first weights and all batches, and is the
same in every row. What is told is the loss on text that nobody trained on, always the same of it; both ranks
compute it and must agree to the bit, so that ranks that have drifted apart are seen. 0/1 Adam's ranks are
apart on purpose between two meetings: it is looked at right after one.

All rows clip gradients at a norm of 1, warm up and end at a tenth of their learning rate, by a cosine. Rows
with large batches take fewer and larger steps, and are compared with each other. `--tune` trains each
row with multiples of its learning rate, on seeds that the comparison does not use: the rates below are the
best of those. The last line is JSON, with all curves.
"""

import argparse
import os
import sys
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

import torch

import zero_full
from tests.bench import interleave
from tests.worlds import Pool
from zero_min.gpt import GPT, GPTConfig, batch, load_text

WORLD, LOOK = 2, 20  # steps between two looks at the validation loss
CONFIG = GPTConfig(context=32, layers=2, heads=2, width=48)
WARMUP = 20
TUNED = (0.5, 1.0, 2.0)
RATES = ("lr", "muon_lr", "adam_lr")  # what `--tune` multiplies
BETAS = {"betas": [0.9, 0.99]}


@dataclass(frozen=True)
class Row:
    """An optimizer, its options, and how it is used."""

    type: str
    params: dict[str, Any]
    compared_with: str
    batch: int = 8  # sequences of a rank
    steps: int = 400


ZERO_ONE = {
    "lr": 4e-3,
    **BETAS,
    "var_freeze_step": 200,
    "local_step_scaler": 50,
    "local_step_clipper": 4,
}
LARGE = {"batch": 64, "steps": 160}
ROWS = {
    "Adam": Row("AdamW", {"lr": 4e-3, **BETAS}, "Adam"),
    "Muon": Row("Muon", {"muon_lr": 4e-2, "adam_lr": 8e-3}, "Adam"),
    "1-bit Adam": Row("OneBitAdam", {"lr": 4e-3, **BETAS, "freeze_step": 100}, "Adam"),
    "0/1 Adam": Row("ZeroOneAdam", {**ZERO_ONE, "var_update_scaler": 16}, "Adam"),  # DeepSpeed's default
    "0/1 Adam, scaler 64": Row("ZeroOneAdam", {**ZERO_ONE, "var_update_scaler": 64}, "Adam"),
    "Adam, large batch": Row("AdamW", {"lr": 4e-3, **BETAS}, "Adam, large batch", **LARGE),
    "LAMB, large batch": Row("Lamb", {"lr": 8e-2, **BETAS}, "Adam, large batch", **LARGE),
    "1-bit LAMB, large batch": Row(
        "OneBitLamb", {"lr": 8e-2, **BETAS, "freeze_step": 40}, "Adam, large batch", **LARGE
    ),
}


@dataclass
class Found:
    """One row: a curve for each seed, as pairs of steps and losses, and bytes per parameter and step."""

    steps: list[int] = field(default_factory=list)
    curves: list[list[float]] = field(default_factory=list)
    sent: float = 0.0
    numel: int = 0

    @property
    def ends(self) -> list[float]:
        """The last loss of each seed."""
        return [curve[-1] for curve in self.curves]


def train(comm: Any, row: Row, seed: int) -> Found:
    """One seed of a row, as one rank sees it."""
    return trained(engine_of(row, seed), comm, row, seed)


def engine_of(row: Row, seed: int) -> zero_full.Engine:
    """A new one."""
    config = {
        "train_micro_batch_size_per_gpu": row.batch,
        "gradient_clipping": 1.0,
        "optimizer": {"type": row.type, "params": row.params},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": row.steps, "warmup_num_steps": WARMUP, "cos_min_ratio": 0.1},
        },
    }
    return zero_full.initialize(model=GPT(CONFIG, seed), config=config)[0]


def trained(engine: zero_full.Engine, comm: Any, row: Row, seed: int) -> Found:
    """What its training from a seed finds. The engine is destroyed."""
    text, model = load_text(), engine.module
    cut = len(text) * 9 // 10
    generator = torch.Generator().manual_seed(1000 * seed + comm.rank)
    found = Found(curves=[[]], numel=sum(p.numel() for p in model.parameters()))
    before = sum(engine.traffic().values())
    for step in range(1, row.steps + 1):
        engine.backward(engine(*batch(text[:cut], row.batch, CONFIG.context, generator)))
        engine.step()
        if step % LOOK == 0:
            found.steps.append(step)
            found.curves[0].append(validation(model, text[cut:]))
    found.sent = (sum(engine.traffic().values()) - before) / row.steps / found.numel
    engine.destroy(gather=True)
    return found


def validation(model: GPT, text: torch.Tensor) -> float:
    """The mean loss of the same windows every time."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return mean(float(model(*batch(text, 64, CONFIG.context, generator))) for _ in range(5))


def measure(rows: dict[str, Row], seeds: list[int], limit: float) -> dict[str, Found]:
    """Every row from every seed."""
    pool, result = Pool(), {name: Found() for name in rows}
    try:
        for name, row in rows.items():
            for seed in seeds:
                print(f"{name}, seed {seed}", file=sys.stderr)
                ranks: list[Found] = pool.run(train, WORLD, row, seed, limit=limit, collective=limit)
                one = agreed(ranks, f"{name}, seed {seed}")
                result[name] = replace(one, curves=result[name].curves + one.curves)
    finally:
        pool.stop()
    return result


def agreed(ranks: list[Found], where: str) -> Found:
    """What all ranks have found. RuntimeError if two saw another loss."""
    if any(rank.curves != ranks[0].curves for rank in ranks):
        raise RuntimeError(f"{where}: the ranks have different models")
    return ranks[0]


def rate_of(row: Row) -> str:
    """Its learning rate, or both of Muon's."""
    return ", ".join(f"{row.params[name]:g}" for name in RATES if name in row.params)


def report(found: dict[str, Found]) -> str:
    """The table: how far a row's mean is from that of the row it is compared with, and all seeds' range."""
    rows = []
    for name, one in found.items():
        row, ends = ROWS[name], one.ends
        told = [name, rate_of(row), str(row.batch * WORLD), str(row.steps)]
        base = found.get(row.compared_with)
        apart = "" if base is None or base is one else f"{mean(ends) - mean(base.ends):+.3f}"
        seeds = f"{min(ends):.3f} to {max(ends):.3f}"
        rows.append([*told, f"{mean(ends):.3f}", seeds, apart, f"{one.sent:.3f}"])
    head = ["optimizer", "lr", "batch", "steps", "mean", "seeds", "- Adam's", "B/p and step"]
    return interleave.table(head, rows)


def tune(seeds: list[int], names: list[str], limit: float) -> None:
    """Print the last loss of every row with multiples of its learning rate."""
    rows = []
    for name in names:
        row, line = ROWS[name], [name]
        for factor in TUNED:
            rates = {key: factor * row.params[key] for key in RATES if key in row.params}
            tried = replace(row, params={**row.params, **rates})
            line.append(f"{mean(measure({name: tried}, seeds, limit)[name].ends):.3f}")
        rows.append(line)
    print(interleave.table(["optimizer", *(f"lr x {factor:g}" for factor in TUNED)], rows))


def main() -> None:
    """Train, print a table, end with one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--tune", action="store_true", help="multiples of each learning rate instead")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one seed of one row")
    asked = parser.parse_args()
    print(interleave.heading())
    if asked.tune:
        tune(asked.seeds, asked.rows, asked.limit)
        return
    found = measure({name: ROWS[name] for name in asked.rows}, asked.seeds, asked.limit)
    numel = next(iter(found.values())).numel
    print(f"{numel:,} parameters, {WORLD} ranks, loss on text that was not trained on\n")
    print(report(found))
    curves = {
        name: {"steps": one.steps, "losses": [[round(loss, 4) for loss in curve] for curve in one.curves]}
        for name, one in found.items()
    }
    about = {"versions": interleave.versions(), "cpus": os.cpu_count(), "seeds": asked.seeds}
    print("\n" + interleave.json_line([], **about, curves=curves))


if __name__ == "__main__":
    main()
