"""Step 4, measured: what 16 bits cannot hold, and what a master, a scale and fp32 sums do about it.

Run it with `python -m lessons run 4`.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.nn import functional as F

from lessons.cells import columns, run_cell
from lessons.colours import BROWN, OLIVE, SLATE, VIOLET
from lessons.plots import label, new_figure, save
from zero_min import (
    AdamW,
    DynamicScale,
    MixedPrecision,
    Stage0,
    Stage1,
    Stage2,
    Stage3,
    StaticScale,
    formula,
    run_world,
)
from zero_min.comm import Comm
from zero_min.gpt import GPT, GPTConfig, batch, load_text
from zero_min.ledger import held
from zero_min.precision import Report

CONFIG = GPTConfig(context=32, layers=2, width=32)
KINDS = ("parameters", "gradients", "optimizer")
KNOWN = (1, 1, 1, 0, 0, 0, 0, 1, 1)  # 1: this step overflowed
MICRO_BATCHES = (1, 4, 16, 64, 256, 1024)
VOCABULARY, TOKENS = 50_000, 8192  # of a language model of usual size
SCALE = 2.0**16


def run_it() -> str:
    """The output of the lesson's cell."""
    return run_cell(4, "Run it")


def broken() -> str:
    """The error of the lesson's broken cell."""
    return run_cell(4, "Break it")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def numbers() -> str:
    """The largest and smallest numbers of three types, and the gaps between neighbours around 1."""
    rows: list[list[object]] = [["", "bits", "largest", "smallest normal", "smallest > 0", "gap after 1"]]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        info = torch.finfo(dtype)
        cells = [info.max, info.smallest_normal, info.smallest_normal * info.eps, info.eps]
        rows.append([_name(dtype), info.bits, *(f"{cell:.1e}" for cell in cells)])
    return columns(rows)


def vanishing() -> str:
    """A weight of 1 that should lose 0.0006 a thousand times."""
    rows: list[list[object]] = [["the weight is kept in", "after 1", "after 100", "after 1000"]]
    for name, kept, seen in (
        ("float32", torch.float32, torch.float32),
        ("float16", torch.float16, torch.float16),
        ("bfloat16", torch.bfloat16, torch.bfloat16),
        ("float32, used in bfloat16", torch.float32, torch.bfloat16),
    ):
        weight, values = torch.ones((), dtype=kept), []
        for step in range(1, 1001):
            weight -= 6e-4
            if step in (1, 100, 1000):
                values.append(f"{float(weight.to(seen)):.4f}")
        rows.append([name, *values])
    return columns(rows)


def rounded_by_chance(numbers: Tensor, generator: torch.Generator) -> Tensor:
    """One of the two bf16 neighbours: the chance of each is how near the number is to it."""
    cut_off = 2**16  # bf16 has the upper 16 bits of fp32
    drawn = torch.randint(cut_off, numbers.shape, generator=generator, dtype=torch.int32)
    return ((numbers.view(torch.int32) + drawn) & -cut_off).view(torch.float32)  # it may carry


def chance() -> str:
    """A thousand weights of 1 in bf16 that should lose 0.0006 a thousand times, rounded in two ways."""
    rows: list[list[object]] = [["mean of 1,000 weights", "after 1", "after 100", "after 1000", "spread"]]
    for name, by_chance in (("to the nearest", False), ("by chance", True)):
        generator, weights, means = torch.Generator().manual_seed(0), torch.ones(1000), []
        for step in range(1, 1001):
            moved = weights - 6e-4
            weights = rounded_by_chance(moved, generator) if by_chance else moved.bfloat16().float()
            if step in (1, 100, 1000):
                means.append(f"{float(weights.mean()):.4f}")
        rows.append([name, *means, f"{float(weights.std()):.4f}"])
    return columns(rows)


def bf16_alone() -> str:
    """Adam on a thousand weights between 0.5 and 1.5 that should all become 1; how far off they end."""
    rows: list[list[object]] = [["lr", "float32", "with a master", "bfloat16 alone", "alone, by chance"]]
    start = torch.linspace(0.5, 1.5, 1000)
    for lr in (1e-2, 3e-3, 1e-3):
        ends: list[object] = []
        for kept, seen, by_chance in (
            (torch.float32, torch.float32, False),
            (torch.float32, torch.bfloat16, False),
            (torch.bfloat16, torch.bfloat16, False),
            (torch.float32, torch.bfloat16, True),  # the weight's fp32 has the bits of bf16 after each step
        ):
            generator = torch.Generator().manual_seed(0)
            weight = (start.bfloat16() if by_chance else start).to(kept, copy=True)
            adam = AdamW([{"params": [weight]}], lr=lr)
            for _ in range(round(1 / lr)):
                weight.grad = (weight.to(seen) - 1).to(kept)  # the model sees the rounded weight
                adam.step()
                if by_chance:
                    weight.copy_(rounded_by_chance(weight, generator))
            ends.append(f"{float((weight.to(seen).float() - 1).abs().mean()):.3f}")
        rows.append([f"{lr:g} x {round(1 / lr):,} steps", *ends])
    return columns(rows)


@cache
def _gpt_gradients() -> Tensor:
    """The small GPT's gradients in fp32, those that are not exactly zero."""
    model = GPT(CONFIG)
    generator = torch.Generator().manual_seed(0)
    model(*batch(load_text(), 4, CONFIG.context, generator)).backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return flat[flat != 0]


@cache
def _logit_gradients() -> Tensor:
    """What cross entropy hands back to the output layer: few tokens of a large model's batch."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, VOCABULARY, generator=generator).requires_grad_()
    targets = torch.randint(VOCABULARY, (8,), generator=generator)
    (F.cross_entropy(logits, targets, reduction="sum") / TOKENS).backward()
    assert logits.grad is not None
    return logits.grad.flatten()


def underflow() -> str:
    """How many gradients become zero or infinite when they are rounded to fp16."""
    rows: list[list[object]] = [["scale", "small GPT: zeros", "inf", "large logits: zeros", "inf"]]
    for power in (0, 8, 16, 24):
        cells = []
        for grads in (_gpt_gradients(), _logit_gradients()):
            half = (grads * 2.0**power).half()
            cells += [f"{share:.1%}" for share in ((half == 0).float().mean(), half.isinf().float().mean())]
        rows.append([f"2^{power}", *cells])
    return columns(rows)


def _scales(scaler: DynamicScale, overflows: Sequence[int]) -> list[float]:
    seen = []
    for overflow in overflows:
        scaler.update(bool(overflow))
        seen.append(scaler.scale)
    return seen


def _trace(overflows: Sequence[int], options: Sequence[dict[str, Any]]) -> str:
    rows: list[list[object]] = [["overflow in the step", *("yes" if o else "no" for o in overflows)]]
    for option in options:
        what = ", ".join(f"{name}={value}" for name, value in option.items())
        scales = _scales(DynamicScale(16, window=2, **option), overflows)
        rows.append([what, *(f"{scale:g}" for scale in scales)])
    return columns(rows)


def trace() -> str:
    """The scale after each of nine steps, starting from 16, with patience and without."""
    return _trace(KNOWN, [{"hysteresis": 2}, {"hysteresis": 1}])


def alternating() -> str:
    """Good and bad steps in turn: what it means to forgive anew after every good step."""
    options = [{"consecutive_hysteresis": forgiving} for forgiving in (False, True)]
    return _trace((1, 0, 1, 0, 1, 1), options)


def at_minimum() -> str:
    """What the scale says when it cannot be lowered any more."""
    try:
        _scales(DynamicScale(4, minimum=1, hysteresis=1), [1] * 3)
    except OverflowError as error:
        return f"OverflowError: {error}"
    raise AssertionError("the minimum was not noticed")


class UpdateFirst(MixedPrecision):
    """Learns from the step before it unscales: the mistake."""

    @torch.no_grad()
    def step(self) -> Report:
        """As `MixedPrecision.step`, two lines exchanged; nothing overflows here."""
        self.stage.reduce_gradients()
        grads = self.stage.master_gradients()
        self.scaler.update(self.anyone_overflowed(grads))
        for g in grads:
            g.div_(self.scaler.scale)  # may be twice the scale that backward used
        norm = float(torch.stack([g.norm() for g in grads]).norm())
        self.stage.update()
        return Report(True, norm, self.scaler.scale)


def _norms(comm: Comm, trainer_class: type[MixedPrecision]) -> list[float | None]:
    """Gradient norms of six steps whose true gradient is always 0.5."""
    model = nn.Linear(1, 1, bias=False).half()
    trainer = trainer_class(Stage0(model, comm, max_grad_norm=1e9), DynamicScale(8, window=2))
    norms = []
    for _ in range(6):
        trainer.zero_grad()
        trainer.backward(model(torch.full((1, 1), 0.5).half()).float().sum())
        norms.append(trainer.step().grad_norm)
    return norms


def updated_first() -> str:
    """The gradient that Adam gets, when the scale is updated after unscaling and before it."""
    rows: list[list[object]] = [["step", *range(1, 7)]]
    for name, trainer in (("unscale, then update", MixedPrecision), ("update, then unscale", UpdateFirst)):
        rows.append([name, *(f"{norm:.2f}" for norm in run_world(_norms, 2, trainer)[0] if norm is not None)])
    return columns(rows)


class Alone(MixedPrecision):
    """Each rank decides for itself: the mistake."""

    def anyone_overflowed(self, grads: list[Tensor]) -> bool:
        """Only whether *this* rank found inf or NaN."""
        return any(not bool(g.isfinite().all()) for g in grads)


def _one_overflow(comm: Comm, trainer_class: type[MixedPrecision]) -> list[object]:
    """One step in which only the last of four gradients overflows; it belongs to rank 1."""
    model = nn.Linear(4, 1, bias=False).half()
    nn.init.constant_(model.weight, 0.5)
    stage = Stage3(model, comm, lr=0.125)
    trainer = trainer_class(stage, DynamicScale(8, hysteresis=1))
    trainer.backward(model(torch.tensor([[1, 1, 1, 6e4]]).half()).float().sum())
    report = trainer.step()
    with stage.gathered():
        weights = [round(value, 3) for value in model.weight.flatten().tolist()]
    return ["yes" if report.applied else "no", f"{trainer.scaler.scale:g}", weights]


def alone() -> str:
    """Stage 3 when the ranks agree about an overflow, and when each decides alone."""
    rows: list[list[object]] = [["", "rank", "stepped", "next scale", "weights afterwards"]]
    for name, trainer in (("all agree", MixedPrecision), ("each alone", Alone)):
        for rank, seen in enumerate(run_world(_one_overflow, 2, trainer)):
            rows.append([name, rank, *seen])
    return columns(rows)


@cache
def accumulated() -> dict[torch.dtype, list[float]]:
    """The mean error of sums of many bf16 gradients, kept in bf16 and in fp32 by autograd itself."""
    errors: dict[torch.dtype, list[float]] = {torch.bfloat16: [], torch.float32: []}
    for dtype, seen in errors.items():
        generator = torch.Generator().manual_seed(0)
        p = torch.zeros(4096, dtype=torch.bfloat16, requires_grad=True)
        p.grad_dtype = dtype
        exact = torch.zeros(4096, dtype=torch.float64)
        for micro in range(1, max(MICRO_BATCHES) + 1):
            gradient = (1 + 0.5 * torch.randn(4096, generator=generator)).bfloat16()
            (p * gradient).sum().backward()
            exact += gradient.double()
            if micro in MICRO_BATCHES:
                assert p.grad is not None
                seen.append(float(((p.grad.double() - exact) / exact).abs().mean()))
    return errors


def accumulation() -> str:
    """The same as a table."""
    rows: list[list[object]] = [["micro-batches", *MICRO_BATCHES]]
    for dtype, errors in accumulated().items():
        rows.append([f"summed in {_name(dtype)}", *(f"{error:.2%}" for error in errors)])
    return columns(rows)


def born() -> str:
    """One weight of 1: AdamW as it should be, and after a step on zeros "to create the state"."""
    rows: list[list[object]] = [["", "weight before training", "steps counted", "first real move"]]
    for name, steps_at_birth in (("state made of zeros", 0), ("a step on zeros", 1)):
        weight = torch.ones(1)
        adam = AdamW([{"params": [weight]}], lr=0.01, weight_decay=0.1)
        for gradient in (0.0,) * steps_at_birth:
            weight.grad = torch.full((1,), gradient)
            adam.step()
        before, counted = float(weight), adam.steps
        weight.grad = torch.ones(1)
        adam.step()
        decayed = before * (1 - 0.01 * 0.1)
        rows.append([name, f"{before:.4f}", counted, f"{(decayed - float(weight)) / 0.01:.2f} x lr"])
    return columns(rows)


RECIPES: dict[str, tuple[torch.dtype, torch.dtype | None, formula.Bytes]] = {
    "fp32": (torch.float32, None, formula.FP32),
    "16 bit": (torch.float16, None, formula.MIXED),
    "16 bit, fp32 sums": (torch.bfloat16, torch.float32, formula.BF16),
}
STAGES: tuple[Callable[..., Any], ...] = (Stage0, Stage1, Stage2, Stage3)


def _recipe(comm: Comm, stage: int, name: str) -> tuple[list[int], dict[str, int], int]:
    """The bill of one step: the sizes of the parameters, bytes held by kind, bytes sent."""
    dtype, accumulate, _ = RECIPES[name]
    model = GPT(CONFIG).to(dtype)
    trainer = MixedPrecision(STAGES[stage](model, comm), StaticScale(8), accumulate)
    generator = torch.Generator().manual_seed(comm.rank)
    comm.ledger.clear_traffic()
    trainer.backward(model(*batch(load_text(), 1, CONFIG.context, generator)))
    trainer.step()
    kinds = {kind: held(tensors) for kind, tensors in trainer.holdings().items()}
    return [p.numel() for p in model.parameters()], kinds, comm.ledger.total_sent()


def recipes(world: int = 4) -> str:
    """Three recipes in two stages: measured bytes per parameter, beside the formula's."""
    rows: list[list[object]] = [["", *KINDS, "held", "formula", "sent", "formula"]]
    for stage in (0, 2):
        for name, (*_, each) in RECIPES.items():
            ranks = run_world(_recipe, world, stage, name)
            sizes, kinds, _ = ranks[0]
            numel, pieces = sum(sizes), [sum(sizes)]
            sent = sum(rank[2] for rank in ranks) / world
            wanted = sum(formula.held(stage, pieces, world, each).values())
            told = (formula.sent(stage, pieces, world, each=each) + formula.flag(world)) / world
            cells = [*(kinds[kind] for kind in KINDS), sum(kinds.values()), wanted, sent, told]
            rows.append([f"stage {stage}, {name}", *(f"{cell / numel:.2f}" for cell in cells)])
    return columns(rows)


def _plot_magnitudes(plot: Axes) -> None:
    for grads, name, colour in (
        (_gpt_gradients(), "small GPT, weights", VIOLET),
        (_logit_gradients(), "large model, logits", BROWN),
    ):
        powers = grads[grads != 0].abs().log2().clamp(min=-45).numpy()
        weights = [100 / len(powers)] * len(powers)
        plot.hist(powers, bins=range(-45, 3), weights=weights, color=colour, alpha=0.7, label=name)
    lowest = -25  # half of fp16's smallest number: what lies below is rounded to zero
    plot.axvline(lowest, linestyle="--", color="black", label="zero below, scale 1")
    plot.axvline(lowest - 16, linestyle=":", color="black", label="zero below, scale 2^16")
    label(plot, "Gradients in fp16", "magnitude, as a power of two", "percent of the gradients")
    plot.set_ylim(0, 1.25 * plot.get_ylim()[1])


def _plot_sums(plot: Axes) -> None:
    for (dtype, errors), colour in zip(accumulated().items(), (OLIVE, SLATE), strict=True):
        plot.plot(MICRO_BATCHES, [max(e, 1e-9) for e in errors], "o-", color=colour, label=_name(dtype))
    half_a_gap = torch.finfo(torch.bfloat16).eps / 2
    plot.axhline(half_a_gap, linestyle="--", color="black", label="formula: bf16 rounds once, 2^-8 at most")
    plot.set_xscale("log", base=2)
    plot.set_yscale("log")
    title = "Sums of bf16 gradients"
    plot.set(title=title, xlabel="micro-batches in a step", ylabel="relative error of the sum")
    plot.legend(fontsize="small")


def main(world: int = 4) -> None:
    """Print what 16 bits hold and lose, and plot gradients' sizes and the error of their sums."""
    for text in (numbers(), vanishing(), underflow(), trace(), accumulation()):
        print(text, "\n")
    print(f"bytes per parameter, {world} ranks\n{recipes(world)}")
    figure, (left, right) = new_figure(2)
    _plot_magnitudes(left)
    _plot_sums(right)
    save(figure, 4)


if __name__ == "__main__":
    main()
