"""What the compressed optimizers send, counted and by closed forms, and what that is worth on a slow link.

    python -m tests.bench.compression bytes
    python -m tests.bench.compression link --size 3M --rounds 5

`bytes`: zero_full's own count of every step of a short training, compared with `volume.py`'s closed form of
that step; then the closed form for trainings too long to run here, which is said.

`link`: seconds a step on ranks that can only reach each other through cables of a given rate (`link.py`: one
network namespace a rank, `tc` at both ends), in turns, medians. Shared memory is off: it would be a way
around the cable. Where links cannot be limited, the same steps are timed over the loopback, and what a limit
would cost is only computed, as bytes over rate, and labelled so. The last line is JSON.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import zero_full
from tests.bench import interleave, limited_steps, link, volume
from tests.bench.interleave import Ratio
from tests.bench.limited_steps import ADAM, ADAM_ROW, ALONE, DDP, EVERY, IN_16, ONE_BIT_ROW, Found
from tests.worlds import Pool
from zero_min.gpt import GPT, GPTConfig, batch, load_text

COUNTED = GPTConfig(context=32, layers=2, heads=2, width=48)
STEPS = 324  # the published BERT-Large training, 1/500 as long, and an interval that doubles 16 times as fast
ONE_BIT = {"freeze_step": 49}
ZERO_ONE = {"var_freeze_step": 25, "var_update_scaler": 1, "local_step_scaler": 65, "local_step_clipper": 16}
TARGET = 0.25  # of Adam's step, on the slowest link


# Bytes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counting:
    """An optimizer of a JSON file, and the kinds of its steps by the closed form."""

    type: str
    params: dict[str, Any]
    kinds: Callable[[int], Iterator[str]]


COUNTS = {
    "Adam": Counting("AdamW", ADAM, volume.adam),
    "1-bit Adam": Counting(
        "OneBitAdam", {**ADAM, **ONE_BIT}, lambda steps: volume.one_bit_adam(steps, **ONE_BIT)
    ),
    "0/1 Adam": Counting(
        "ZeroOneAdam", {**ADAM, **ZERO_ONE}, lambda steps: volume.zero_one_adam(steps, **ZERO_ONE)
    ),
}


@dataclass
class Counted:
    """Of one optimizer on so many ranks: what rank 0 sent in each step, and what the closed form says."""

    model: volume.Model
    sent: list[int] = field(default_factory=list)
    formula: list[int] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)

    @property
    def wrong(self) -> list[int]:
        """The steps that sent something else."""
        pairs = zip(self.sent, self.formula, strict=True)
        return [step for step, (mine, theirs) in enumerate(pairs, 1) if mine != theirs]

    @property
    def talks(self) -> int:
        """Steps in which anything was sent."""
        return sum(nbytes > 0 for nbytes in self.sent)


def count(comm: Any, name: str, steps: int) -> Counted:
    """Train, and read the count after every step."""
    row, model = COUNTS[name], GPT(COUNTED)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": row.type, "params": row.params},
    }
    engine = zero_full.initialize(model=model, config=config)[0]
    found = Counted(volume.Model(volume.sizes_of(model), comm.world_size))
    generator = torch.Generator().manual_seed(comm.rank)
    before = sum(engine.traffic().values())
    for kind in row.kinds(steps):
        engine.backward(engine(*batch(load_text(), 2, COUNTED.context, generator)))
        engine.step()
        after = sum(engine.traffic().values())
        found.sent.append(after - before)
        found.formula.append(found.model.sent(kind))
        found.kinds[kind] += 1
        before = after
    engine.destroy(gather=True)
    return found


def counted(worlds: list[int], steps: int, limit: float) -> dict[int, dict[str, Counted]]:
    """By ranks and optimizer."""
    pool = Pool()
    try:
        return {
            world: {name: pool.run(count, world, name, steps, limit=limit)[0] for name in COUNTS}
            for world in worlds
        }
    finally:
        pool.stop()


KINDS = [volume.EXACT, volume.ONE_BIT, volume.SILENT]


def bytes_report(found: dict[str, Counted]) -> str:
    """The table of one number of ranks."""
    head = ["optimizer", *KINDS, "B/p and step, counted", "closed form", "steps that differ"]
    head += ["/ fp32 all-reduce", "/ fp16", "/ 1-bit Adam", "rounds / 1-bit Adam"]
    base, rows = found["1-bit Adam"], []
    for name, one in found.items():
        steps, numel, total = len(one.sent), one.model.numel, sum(one.sent)
        rounds = [str(one.kinds[kind]) for kind in KINDS]
        per = [f"{sum(each) / steps / numel:.4f}" for each in (one.sent, one.formula)]
        whole = [*(one.model.exact(width) * steps for width in (4, 2)), sum(base.sent)]
        over = [f"{total / each:.3f}" for each in whole]
        rows.append([name, *rounds, *per, str(len(one.wrong)), *over, f"{one.talks / base.talks:.3f}"])
    return f"{base.model.numel:,} parameters.\n\n{interleave.table(head, rows)}"


def published_report() -> tuple[str, list[Ratio]]:
    """What 0/1 Adam's authors trained, by the closed form: nothing here is counted."""
    head = ["training", "optimizer", *KINDS, "bits per parameter and step", "volume / 1-bit Adam", "rounds"]
    rows, found = [], []
    for training, one in volume.PUBLISHED.items():
        rounds = one.rounds()
        base = rounds["1-bit Adam"]
        for name, kinds in rounds.items():
            share = volume.bits(kinds) / volume.bits(base)
            talks = (one.steps - kinds[volume.SILENT]) / (one.steps - base[volume.SILENT])
            numbers = [f"{kinds[kind]:,}" for kind in KINDS]
            rows.append(
                [training, name, *numbers, f"{volume.bits(kinds):.3f}", f"{share:.3f}", f"{talks:.3f}"]
            )
            if name == "0/1 Adam":
                found.append(Ratio(f"{training}: volume, 0/1 Adam / 1-bit Adam", share, share, share))
                found.append(Ratio(f"{training}: rounds, 0/1 Adam / 1-bit Adam", talks, talks, talks))
    return interleave.table(head, rows), found


def bytes_main(asked: argparse.Namespace) -> None:
    """Print what was counted and what is computed."""
    found = counted(asked.worlds, asked.steps, asked.limit)
    series = {}
    for world, rows in found.items():
        print(f"\n## {asked.steps} steps on {world} ranks, counted\n\n{bytes_report(rows)}")
        series[str(world)] = {
            name: {"sent": one.sent, "formula": one.formula, "numel": one.model.numel}
            for name, one in rows.items()
        }
    table, ratios = published_report()
    print("\n## The published trainings, by the closed form, exact rounds in fp16, without scales\n")
    print(table)
    wrong = [name for rows in found.values() for name, one in rows.items() if one.wrong]
    print("\n" + interleave.json_line(ratios, steps=asked.steps, counted=series))
    if wrong:
        sys.exit(f"the closed form is not what was counted: {', '.join(wrong)}")


# Links ---------------------------------------------------------------------------------------------


def measure(plan: limited_steps.Plan, world: int, limit: float, by_link: bool) -> Found:
    """All ranks' findings as one."""
    if by_link:
        ranks = link.run(limited_steps.rank_main, world, plan, rate=plan.rate, limit=limit)
        return limited_steps.together(ranks)
    os.environ["ZERO_FULL_SHARED_MEMORY"] = "off"
    pool = Pool()
    try:
        return limited_steps.together(pool.run(limited_steps.in_pool, world, plan, limit=limit))
    finally:
        pool.stop()


def link_report(found: Found, rate: int | None) -> str:
    """The table of one rate."""
    head = ["row", "step, ms", "range", "/ Adam", "B/p sent", "that takes, ms"]
    adam = interleave.middle(found.seconds[ADAM_ROW])
    rows = []
    for name, series in found.seconds.items():
        low, high = interleave.spread(series)
        middle, sent = interleave.middle(series), found.sent.get(name)
        told = [f"{1e3 * middle:.1f}", f"{1e3 * low:.1f}-{1e3 * high:.1f}", f"{middle / adam:.2f}"]
        told.append("" if sent is None else f"{sent / found.parameters:.3f}")
        told.append("" if sent is None or rate is None else f"{8e3 * sent / rate:.1f}")
        rows.append([name, *told])
    return interleave.table(head, rows)


def computed_report(found: Found, rate: int) -> str:
    """Where links cannot be limited: what was measured without a limit, and bytes over rate on top."""
    head = ["row", "step without a limit, measured, ms", "bytes / rate, computed, ms", "together, computed"]
    rows = []
    for name, sent in found.sent.items():
        middle, wire = 1e3 * interleave.middle(found.seconds[name]), 8e3 * sent / rate
        rows.append([name, f"{middle:.1f}", f"{wire:.1f}", f"{middle + wire:.1f}"])
    return interleave.table(head, rows)


def link_ratios(where: str, found: Found, rate: int | None) -> list[Ratio]:
    """Each compressed row's step over Adam's, and over that of torch's DDP."""
    adam, ddp = found.seconds[ADAM_ROW], found.seconds.get(DDP)
    result = []
    for name in (ONE_BIT_ROW, EVERY, IN_16):
        target = TARGET if rate == link.RATES["100 Mbit"] and name != ONE_BIT_ROW else None
        result.append(interleave.ratio(f"{where}: {name} / Adam", found.seconds[name], adam, target))
        if ddp is not None:
            result.append(interleave.ratio(f"{where}: {name} / DDP", found.seconds[name], ddp))
    return result


def whole_training(found: Found) -> dict[str, float]:
    """Seconds of a mean step of the published BERT-Large training, computed from measured medians.

    An exact round takes Adam's step, and a silent step what is left of sixteen with one round.
    """
    seconds = {name: interleave.middle(series) for name, series in found.seconds.items()}
    every = seconds[EVERY]
    times = {
        "Adam": {volume.EXACT: seconds[ADAM_ROW]},
        "1-bit Adam": {volume.EXACT: seconds[ADAM_ROW], volume.ONE_BIT: seconds[ONE_BIT_ROW]},
        "0/1 Adam": {
            volume.EXACT: seconds[ADAM_ROW],
            volume.ONE_BIT: every,
            volume.SILENT: max((16 * seconds[IN_16] - every) / 15, seconds[ALONE]),
        },
    }
    published = volume.PUBLISHED["BERT-Large"]
    return {
        name: sum(count * times[name][kind] for kind, count in kinds.items()) / published.steps
        for name, kinds in published.rounds().items()
    }


def link_main(asked: argparse.Namespace) -> None:
    """Measure every rate with every number of ranks."""
    why = link.problem()
    if why is not None:
        print(f"**No link was limited: {why}.** Times are of the loopback; what a limit costs is computed.\n")
    ratios: list[Ratio] = []
    tables: dict[str, Any] = {}
    for world in asked.worlds:
        for name, rate in link.RATES.items():
            if why is not None and rate is not None:
                continue
            plan = limited_steps.Plan(asked.size, tuple(limited_steps.ROWS), asked.rounds, rate)
            print(f"{world} ranks, {name}", file=sys.stderr)
            found = measure(plan, world, asked.limit, why is None)
            stream = f"; a stream between two of them gets {found.rate / 1e6:,.0f} Mbit/s"
            print(f"\n## {found.parameters / 1e6:.1f}M parameters, fp32, {world} ranks, {name}{stream}\n")
            print(link_report(found, rate))
            mean = whole_training(found)
            told = ", ".join(f"{who} {1e3 * seconds:.1f} ms" for who, seconds in mean.items())
            print(f"\nA mean step of the published BERT-Large schedule, computed from these medians: {told}.")
            ratios += link_ratios(f"{world} ranks, {name}", found, rate)
            medians = {row: interleave.middle(series) for row, series in found.seconds.items()}
            tables[f"{world} ranks, {name}"] = {"seconds": medians, "schedule": mean, "sent": found.sent}
            for limited, slow in link.RATES.items() if why is not None else ():
                if slow is not None:
                    print(f"\n### {world} ranks, {limited}, computed\n\n{computed_report(found, slow)}")
    print("\n" + interleave.table(interleave.RATIO_HEAD, [ratio.cells() for ratio in ratios]))
    about = {"versions": interleave.versions(), "cpus": os.cpu_count(), "limited": why is None}
    print("\n" + interleave.json_line(ratios, **about, size=asked.size, rounds=asked.rounds, links=tables))


def main() -> None:
    """Measure, print tables, end with one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=["bytes", "link"])
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], help="how many ranks")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a training whose bytes are counted")
    parser.add_argument("--size", choices=limited_steps.SIZES, default="3M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=300, help="seconds for one number of ranks and rate")
    asked = parser.parse_args()
    print(interleave.heading())
    {"bytes": bytes_main, "link": link_main}[asked.what](asked)


if __name__ == "__main__":
    main()
