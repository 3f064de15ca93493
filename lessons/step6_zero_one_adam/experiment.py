"""Step 6, measured: what one bit loses, what an error remembers, when ranks talk, and what that saves.

Run it with `python -m lessons run 6`. The training runs take most of a minute.
"""

from dataclasses import dataclass
from functools import cache, partial
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from lessons.cells import columns, run_cell
from lessons.colours import BROWN, OLIVE, VIOLET
from lessons.plots import label, new_figure, save
from zero_min import OneBitAdam, Stage1, WorldError, ZeroOneAdam, run_world
from zero_min.comm import Comm
from zero_min.compression import CompressedMean, compress, unpack_signs
from zero_min.formula import compressed_round, padded
from zero_min.gpt import GPT, GPTConfig, batch, load_text
from zero_min.ledger import held
from zero_min.zero_one_adam import Interval

SMALL = GPTConfig(context=32, layers=2, width=32)  # of the bills
CONFIG = GPTConfig(context=32, layers=2, heads=2, width=48)  # of the training runs
LR, WARM_UP, BATCH = 2e-3, 20, 8
KAPPA = 64
COLOURS = {"Adam": BROWN, "1-bit Adam": OLIVE, "0/1 Adam": VIOLET}


def run_it() -> str:
    """The output of the lesson's cell."""
    return run_cell(6, "Run it")


def broken() -> str:
    """The output of the lesson's broken cell."""
    return run_cell(6, "Break it")


def _said(x: Tensor, error: Tensor, sizes: list[int], l1: bool = False) -> Tensor:
    """What the others hear of x plus the error."""
    packed, scales = compress(x, error, sizes, l1)
    pieces = unpack_signs(packed, x.dtype).split([*sizes, len(x) - sum(sizes)])
    return torch.cat([scale * piece for scale, piece in zip([*scales.tolist(), 0], pieces, strict=True)])


def _numbers(values: Tensor) -> list[str]:
    return [f"{value:+.2f}" for value in values.tolist()]


def said_and_error() -> str:
    """Two rounds of eight values: what is wanted, what is said, what is remembered."""
    x = torch.tensor([2.0, -0.5, 0.25, 0.0, -0.1, 1.0, -1.0, 0.5], dtype=torch.float64)
    error = torch.zeros_like(x)
    rows: list[list[object]] = []
    for step in (1, 2):
        wanted = x + error
        said = _said(x, error, [8])
        for name, values in (("wanted", wanted), ("said", said), ("error", error)):
            rows.append([f"round {step}: {name}", *_numbers(values)])
        largest = float((said + error - wanted).abs().max())
        rows.append(["  said + error = wanted", "yes" if largest < 1e-12 else "no", *[""] * 7])
    return columns(rows)


def late_not_lost() -> str:
    """The same eight values again and again: what was said, on average, with and without the error."""
    x = torch.tensor([2.0, -0.5, 0.25, 0.0, -0.1, 1.0, -1.0, 0.5], dtype=torch.float64)
    rows: list[list[object]] = [["the truth", *_numbers(x)]]
    for rounds in (1, 10, 100, 1000):
        error, heard = torch.zeros_like(x), torch.zeros_like(x)
        for _ in range(rounds):
            heard += _said(x, error, [8])
        rows.append([f"mean of {rounds} rounds", *_numbers(heard / rounds)])
    return columns(rows)


def _left(x: Tensor, rounds: int, l1: bool) -> float:
    """The size of what has not been said after these rounds, in sizes of x."""
    error = torch.zeros_like(x)
    for _ in range(rounds):
        compress(x, error, [len(x)], l1)
    return float(error.norm() / x.norm())


def best_once() -> str:
    """What is still unsaid after one round and after 2,000, by each of the two scales."""
    gauss = torch.randn(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = {
        "Gaussian": gauss,
        "Gaussian, cubed: a heavy tail": gauss**3,
        "a 1 in each 1,024, else zeros": (torch.arange(4096) % 1024 == 0).double(),
    }
    rows: list[list[object]] = [["", "1 round: rms", "mean abs", "2,000 rounds: rms", "mean abs"]]
    for name, x in values.items():
        once = [f"{_left(x, 1, l1):.2f}" for l1 in (False, True)]
        rows.append([name, *once, *(f"{_left(x, 2000, l1):.1f}" for l1 in (False, True))])
    return columns(rows)


def long_run() -> str:
    """What a rank sends in 100,000 steps of which none is silent, on average of a step."""
    steps, N = 100_000, 4
    sizes = [p.numel() for p in GPT(SMALL).parameters()]
    interval, exact = Interval(16), 0
    for step in range(1, steps + 1):
        if interval.due(step):
            exact += 1
            interval.count()
    each = {"exact": 8 * (N - 1) / N, "one bit": compressed_round(sizes, N) / N / sum(sizes)}
    counts = {"exact": exact, "one bit": steps - exact}
    rows: list[list[object]] = [["rounds", "how many", "bytes of a round", "mean of a step"]]
    parts = {kind: counts[kind] * each[kind] / steps for kind in each}
    for kind in each:
        rows.append([kind, f"{counts[kind]:,}", f"{each[kind]:.4f}", f"{parts[kind]:.4f}"])
    return columns([*rows, ["together", f"{steps:,}", "", f"{sum(parts.values()):.4f}"]])


def scales() -> str:
    """Two tensors of different sizes under one scale, and under one scale each."""
    generator = torch.Generator().manual_seed(0)
    large, small = (torch.randn(4096, generator=generator) * size for size in (1.0, 0.01))
    x = torch.cat([large, small])
    rows: list[list[object]] = [["", "scale, large", "scale, small", "error, large", "error, small"]]
    for name, sizes, l1 in (
        ("one for both, rms", [8192], False),
        ("one each, rms", [4096, 4096], False),
        ("one each, mean absolute", [4096, 4096], True),
    ):
        error = torch.zeros_like(x)
        said = _said(x, error, sizes, l1)
        wrong = [
            part.norm() / truth.norm() for part, truth in zip(error.chunk(2), (large, small), strict=True)
        ]
        told = [float(part.abs()[0]) for part in said.chunk(2)]
        rows.append([name, *(f"{scale:.4f}" for scale in told), *(f"{float(w):.1%}" for w in wrong)])
    return columns(rows)


def zero() -> str:
    """The mean of zeros, heard by everyone, beside a value that is not zero."""

    def listen(comm: Comm) -> list[str]:
        heard = CompressedMean(comm, [8], torch.zeros(8))(torch.tensor([4.0, *[0.0] * 7]))
        return _numbers(heard)

    rows = [["said", *_numbers(torch.tensor([4.0, *[0.0] * 7]))], ["heard", *run_world(listen, 2)[0]]]
    return columns(rows)


def schedule() -> str:
    """How many rounds are exact, and how far they lie apart at the end, with kappa = 16."""
    interval, exact = Interval(16), 0
    rows: list[list[object]] = [["by step", "exact rounds", "all steps / exact rounds", "interval then"]]
    for step in range(1, 100_001):
        if interval.due(step):
            exact += 1
            interval.count()
        if step in (100, 1000, 10_000, 100_000):
            rows.append([f"{step:,}", exact, f"{step / exact:.1f}", interval.length])
    return columns(rows)


def own_updates() -> str:
    """v under a gradient that is always 1: uncorrected, corrected by steps, and by v's own updates."""
    rows: list[list[object]] = [["step", "updates of v", "v", "by steps", "by own updates", "steps too long"]]
    interval, v, updates = Interval(16), 0.0, 0
    for step in range(1, 10_001):
        if interval.due(step):
            v, updates = 0.999 * v + 0.001, updates + 1
            interval.count()
        if step in (10, 100, 1000, 10_000):
            by_own = v / (1 - 0.999**updates)
            by_steps = v / (1 - 0.999**step)
            rows.append([step, updates, f"{v:.3f}", f"{by_steps:.3f}", f"{by_own:.3f}", f"{v**-0.5:.1f} x"])
    return columns(rows)


def _one_round(comm: Comm) -> tuple[list[int], int, int]:
    model = GPT(SMALL)
    sizes = [p.numel() for p in model.parameters()]
    x = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(comm.rank))
    CompressedMean(comm, sizes, x)(x)
    compressed = comm.ledger.total_sent()
    comm.ledger.clear_traffic()
    comm.all_reduce(x)
    return sizes, compressed, comm.ledger.total_sent()


def volume(world: int = 4) -> str:
    """Bytes per parameter that a rank sends to average one tensor, exactly and with one bit."""
    rows: list[list[object]] = [["ranks", "exact", "one bit", "formula", "of it scales", "exact / one bit"]]
    for n in sorted({2, world}):
        ranks = run_world(_one_round, n)
        sizes = ranks[0][0]
        bits, exact = (sum(rank[i] for rank in ranks) / n / sum(sizes) for i in (1, 2))
        formula = compressed_round(sizes, n) / n / sum(sizes)
        scales_only = 2 * (n - 1) * 4 * len(sizes) / sum(sizes)
        cells = [f"{each:.4f}" for each in (exact, bits, formula, scales_only)]
        rows.append([n, *cells, f"{exact / bits:.1f}"])
    return columns(rows)


def memory(world: int = 4) -> str:
    """What 0/1 Adam keeps besides parameters and gradients, in bytes per parameter."""

    def keep(comm: Comm) -> dict[str, float]:
        trainer = ZeroOneAdam(GPT(SMALL), comm)
        return {name: held([tensor]) / trainer.x.numel() for name, tensor in trainer.tensors().items()}

    kept = run_world(keep, world)[0]
    rows: list[list[object]] = [[name, f"{nbytes:.2f}"] for name, nbytes in kept.items()]
    return columns([*rows, ["together", f"{sum(kept.values()):.2f}"], ["Adam", "8.00"]])


class _Pair(nn.Module):
    """One layer that is used and one weight that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(4, 4, bias=False), nn.Parameter(torch.ones(4))
        nn.init.ones_(self.used.weight)


class _Loud(ZeroOneAdam):
    def quiet(self, m: Tensor) -> Tensor:
        return m


def quiet() -> str:
    """A weight that never gets a gradient, when all tensors share one scale, with and without `quiet`."""

    def train(comm: Comm, optimizer: type[ZeroOneAdam]) -> list[str]:
        model = _Pair()
        trainer = optimizer(model, comm, lr=0.01, kappa=4, freeze_step=100)
        trainer.compressed = CompressedMean(comm, [20], trainer.x)  # one scale for everything
        generator = torch.Generator().manual_seed(comm.rank)
        for _ in range(20):
            trainer.zero_grad()
            trainer.backward(model.used(torch.randn(8, 4, generator=generator)).square().mean())
            trainer.step()
        return [f"{value:.3g}" for value in model.spare.tolist()]

    rows = [
        [name, *run_world(train, 2, kind)[0]] for name, kind in (("with", ZeroOneAdam), ("without", _Loud))
    ]
    return columns(rows)


def not_finite() -> str:
    """What happens when one rank's gradient is not a number."""

    def train(comm: Comm) -> None:
        model = nn.Linear(2, 1)
        trainer = OneBitAdam(model, comm, freeze_step=1)
        for step in range(2):
            loss = model(torch.ones(1, 2)).sum()
            trainer.backward(loss * float("nan") if (step, comm.rank) == (1, 1) else loss)
            trainer.step()

    try:
        run_world(train, 2)
    except WorldError as error:
        return str(error).replace(str(error).split(" of ")[0], "rank ?", 1)
    return "nothing was raised"


@dataclass(frozen=True)
class Walk:
    """One training run as rank 0 saw it."""

    validation: float
    losses: tuple[float, ...]
    sent: tuple[int, ...]  # bytes by rank 0, added up, after every step
    formula: tuple[float, ...]  # the same by the formula, for the mean rank
    numel: int


OPTIMIZERS: dict[str, Any] = {
    "Adam": Stage1,  # bit for bit stage 0, with two collectives a step instead of one a parameter
    "1-bit Adam": partial(OneBitAdam, freeze_step=100),
    "0/1 Adam": partial(ZeroOneAdam, kappa=KAPPA, freeze_step=200, local_kappa=50, local_clip=4),
}


def _bytes_of(trainer: Any, sizes: list[int], before: dict[str, int]) -> float:
    """What the formula says a rank sends in the step that was just made."""
    N = trainer.comm.world_size
    exact = 8 * (N - 1) / N * padded([sum(sizes)], N)
    if isinstance(trainer, ZeroOneAdam):
        kinds = {kind: trainer.rounds[kind] - before[kind] for kind in trainer.rounds}
        return kinds["exact"] * exact + kinds["one bit"] * compressed_round(sizes, N) / N
    if isinstance(trainer, OneBitAdam) and trainer.steps > trainer.freeze_step:
        return compressed_round(sizes, N) / N
    return exact


def _walk(comm: Comm, make: Any, steps: int, seed: int) -> Walk:
    text = load_text()
    cut = len(text) * 9 // 10
    generator = torch.Generator().manual_seed(100 * seed + comm.rank)
    model = GPT(CONFIG, seed)
    trainer = make(model, comm)
    sizes = [p.numel() for p in model.parameters()]
    comm.ledger.clear_traffic()
    losses, sent, formula = [], [], [0.0]
    for step in range(steps):
        lr = LR * min(1, (step + 1) / WARM_UP)
        if isinstance(trainer, OneBitAdam):
            trainer.lr = lr
        else:
            trainer.optimizer.groups[0]["lr"] = lr
        before = dict(getattr(trainer, "rounds", {}))
        trainer.zero_grad()
        loss = model(*batch(text[:cut], BATCH, CONFIG.context, generator))
        trainer.backward(loss)
        trainer.step()
        losses.append(loss.item())
        sent.append(comm.ledger.total_sent())
        formula.append(formula[-1] + _bytes_of(trainer, sizes, before))
    if isinstance(trainer, ZeroOneAdam):
        trainer.meet()  # all ranks with the same parameters
    generator.manual_seed(0)
    with torch.no_grad():
        last = [float(model(*batch(text[cut:], 16, CONFIG.context, generator))) for _ in range(10)]
    return Walk(mean(last), tuple(losses), tuple(sent), tuple(formula[1:]), sum(sizes))


@cache
def _walks(name: str, steps: int, seeds: tuple[int, ...], world: int) -> tuple[Walk, ...]:
    return tuple(run_world(_walk, world, OPTIMIZERS[name], steps, seed)[0] for seed in seeds)


def seeds(steps: int = 400, seeds: tuple[int, ...] = (0, 1, 2), world: int = 2) -> dict[str, list[float]]:
    """The validation loss that each optimizer ends with, seed by seed."""
    return {name: [walk.validation for walk in _walks(name, steps, seeds, world)] for name in OPTIMIZERS}


def _smooth(values: tuple[float, ...], width: int = 20) -> list[float]:
    return [mean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


def _report(steps: int, chosen: tuple[int, ...], world: int) -> str:
    rows: list[list[object]] = [["", *(f"seed {seed}" for seed in chosen), "mean", "sent", "formula"]]
    for name, losses in seeds(steps, chosen, world).items():
        walk = _walks(name, steps, chosen, world)[0]
        told = [walk.sent[-1] / walk.numel / steps, walk.formula[-1] / walk.numel / steps]
        rows.append([name, *(f"{x:.3f}" for x in [*losses, mean(losses), *told])])
    return columns(rows)


def main(world: int = 4, steps: int = 400, chosen: tuple[int, ...] = (0, 1, 2)) -> None:
    """Train a small GPT with three optimizers from three seeds; print and plot."""
    print(f"{volume()}\n\n{schedule()}\n")
    print(f"{steps} steps on {world} ranks: validation loss; bytes per parameter that rank 0 sends in a step")
    print(_report(steps, chosen, world))
    finals = seeds(steps, chosen, world)
    noise = max(finals["Adam"]) - min(finals["Adam"])
    behind = mean(finals["0/1 Adam"]) - mean(finals["Adam"])
    print(f"Adam's seeds differ by {noise:.3f}; the mean of 0/1 Adam is {behind:+.3f} from Adam's")
    make = partial(OPTIMIZERS["0/1 Adam"], kappa=16)
    early = run_world(_walk, world, make, steps // 2, chosen[-1])[0]
    same = _walks("0/1 Adam", steps, chosen, world)[-1]
    losses = [_smooth(walk.losses)[steps // 2 - 1] for walk in (early, same)]
    print(
        f"after {steps // 2} steps of seed {chosen[-1]} the training loss is {losses[0]:.3f} with kappa = 16"
    )
    print(f"and {losses[1]:.3f} with kappa = {KAPPA}")
    figure, (left, middle, right) = new_figure(3)
    for i, (name, colour) in enumerate(COLOURS.items()):
        walks = _walks(name, steps, chosen, world)
        curves = [_smooth(walk.losses) for walk in walks]
        left.plot([mean(at) for at in zip(*curves, strict=True)], color=colour, label=name)
        places = [i - 0.15 + 0.15 * j for j in range(len(chosen))]
        middle.plot(places, finals[name], "o", color=colour, label=name)
        sent = [nbytes / walks[0].numel for nbytes in walks[0].sent]
        right.plot(sent, color=colour, label=name)
        formula = [nbytes / walks[0].numel for nbytes in walks[0].formula]
        right.plot(formula, "--", color="black", linewidth=1, label="formula" if i == 0 else None)
    left.plot(_smooth(early.losses), ":", color=VIOLET, label=f"0/1 Adam, kappa = 16, seed {chosen[-1]}")
    label(left, f"Training, {world} ranks", "step", "loss, mean of 20 steps and of the seeds")
    left.set_ylim(0.9 * min(min(_smooth(walk.losses)) for walk in walks), 4.5)
    bound = mean(finals["Adam"]) + noise + 0.02 * mean(finals["Adam"])
    middle.axhline(bound, linestyle="--", color="black", label="Adam's mean + seed noise + 2%")
    middle.set_xticks(range(len(COLOURS)), list(COLOURS))
    label(middle, "Where they end", "optimizer, a dot a seed", "validation loss")
    middle.set_ylim(0.9 * bound, 1.05 * bound)  # bytes start at zero, losses need not
    label(right, "What rank 0 has sent", "step", "bytes per parameter since the start")
    save(figure, 6)


if __name__ == "__main__":
    main()
