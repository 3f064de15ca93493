"""The largest model that trains where each rank has a few GiB, as if it were a card of its own.

The number of blocks is searched between what trained and what ran out of memory, from where the plan says
that the limit is. An attempt is ranks of their own, so that what one leaves behind does not count for the
next.
"""

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_full
from tests.gpu.day.place import ADAMW, PRECISIONS, RELEASES, Place
from tests.gpu.day.ranks import Ended, together
from tests.gpu.day.rows import STAND_IN, finish, parser_for, say
from zero_full.plan import plan

OUT_OF_MEMORY = 42  # exit code of a rank
NEAR = 0.05  # the search ends when what trained and what did not are so close
ROWS = 256  # of a batch
SECONDS = 40  # of an attempt


@dataclass(frozen=True)
class Size:
    """Of a model and of a card."""

    width: int
    bytes: int


class Block(nn.Module):
    """Two layers beside what comes in, recomputed in backward. Constants: nothing is drawn, however large."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.full((4 * width, width), 1 / width))
        self.down = nn.Parameter(torch.full((width, 4 * width), 1 / width))

    def forward(self, x: Tensor) -> Tensor:
        """x: (rows, width)."""
        made: Tensor = checkpoint(self.inside, x, use_reentrant=False)
        return made

    def inside(self, x: Tensor) -> Tensor:
        """What is recomputed."""
        return x + torch.tanh(x @ self.up.t()) @ self.down.t()


class Blocks(nn.Module):
    """So many blocks, and the loss."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of what comes out."""
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def config_of(stage: int, tier: str) -> dict[str, Any]:
    """bf16 and AdamW."""
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 5_000_000, **RELEASES}
    if tier != "none":
        zero["offload_optimizer"] = {"device": tier}
    keys = {"train_micro_batch_size_per_gpu": ROWS, "gradient_clipping": 0.0, "optimizer": ADAMW}
    return {**keys, "zero_optimization": zero, **PRECISIONS["bf16"]}


def planned(count: int, size: Size, stage: int, tier: str, ranks: int) -> int:
    """Bytes of a device at the worst moment, without activations."""
    with torch.device("meta"):
        model = Blocks(count, size.width)
    return plan(model, config_of(stage, tier), ranks).peak


def guessed(size: Size, stage: int, tier: str, ranks: int) -> int:
    """How many blocks should fit: a plan grows by the same bytes for each block.

    Whoever plans may ask for the device, and this process must leave that to the ranks: a child plans.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as child:
        few, more = (child.submit(planned, n, size, stage, tier, ranks).result() for n in (4, 8))
    return max(1, int(4 + (size.bytes - few) / ((more - few) / 4)))


def attempt(count: int, size: Size, stage: int, tier: str, place: Place) -> None:
    """Two steps; a rank that runs out of memory says so by its exit code."""
    try:
        if place.device.type == "cuda":
            fraction = size.bytes / torch.cuda.get_device_properties(place.device).total_memory
            torch.cuda.set_per_process_memory_fraction(fraction)
        elif planned(count, size, stage, tier, place.world) > size.bytes:
            raise torch.OutOfMemoryError
        with zero_full.Init():
            model = Blocks(count, size.width)
        engine = zero_full.initialize(model=model, config=config_of(stage, tier))[0]
        for _ in range(2):
            engine.backward(engine(torch.ones(ROWS, size.width, dtype=torch.bfloat16, device=place.device)))
            engine.step()
        finish(place.device)
    except torch.OutOfMemoryError:
        sys.exit(OUT_OF_MEMORY)


def failure_of(ended: Sequence[Ended]) -> str:
    """What has ended an attempt, if it was something else than memory. The others are killed then."""
    bad = [one for one in ended if one.code != 0]
    if not bad or any(one.code == OUT_OF_MEMORY for one in bad):
        return ""
    said = max((one.said for one in bad), key=len)[-600:]
    return f"not over within {SECONDS} s. {said}" if all(one.code is None for one in bad) else said


def search(trains: Callable[[int], bool], guess: int) -> tuple[int, int]:
    """(the most blocks that trained, attempts). From the guess in growing steps, then by halves."""
    good, tries, step, count = 0, 0, max(1, guess // 16), guess
    bad: int | None = None
    while bad is None or bad - good > max(1, NEAR * good):
        tries += 1
        if trains(count):
            good = count
        else:
            bad = count
        if bad is None:
            count = good + step
        elif good == 0:
            count = max(bad - step, bad // 2)
        else:
            count = (good + bad) // 2
        step *= 2
    return good, tries


def main() -> int:
    """A row for each stage and tier; 1 if an attempt fails by something else than memory."""
    parser = parser_for(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--gib", type=float, default=2, help="what a rank may have")
    parser.add_argument("--stages", type=int, nargs="+", default=range(4))
    asked = parser.parse_args()
    size = Size(16, 2**18) if asked.tiny else Size(512, int(asked.gib * 2**30))
    failed = 0
    for stage, tier in ((s, t) for s in asked.stages for t in (("none", "cpu") if s else ("none",))):
        began, wrong = monotonic(), list[str]()

        def trains(count: int, stage: int = stage, tier: str = tier, wrong: list[str] = wrong) -> bool:
            ended = together(partial(attempt, count, size, stage, tier), asked, SECONDS, grace=3)
            why = failure_of(ended)
            if why:
                wrong.append(f"{count} blocks: {why}")
            return all(one.code == 0 for one in ended)

        guess = guessed(size, stage, tier, asked.ranks)
        good, tries = search(trains, guess)
        failed += bool(wrong)
        each = 8 * size.width**2
        marked = {STAND_IN: "what the plan allows"} if asked.device == "cpu" else {}
        say(
            stage=stage,
            **{"state on the host": tier == "cpu", "ranks": asked.ranks, "GiB a rank": size.bytes / 2**30},
            **{"parameters, M": round(good * each / 1e6, 3), "planned, M": round(guess * each / 1e6, 3)},
            **{"attempts": tries, "seconds": round(monotonic() - began), "fine": not wrong},
            **marked,
            **({"why": wrong[0]} if wrong else {}),
        )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
