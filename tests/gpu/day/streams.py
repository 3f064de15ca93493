"""Side streams: do late ones change a bit, does torch's sanitizer object, how often does the host wait?"""

import contextlib
import random
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.gpu.day.place import Place, Tower, batch_of, deterministic, engine_of, one_step
from tests.gpu.day.rows import STAND_IN, finish
from zero_full.comm import lane

STAGES = (0, 1, 2, 3)
STEPS = 4
CYCLES = 3_000_000  # at most, of a sleep on a GPU: about 2 ms
NAN = 255  # each byte of it, in every floating type


def trained(place: Place, stage: int, overlap: bool) -> dict[str, Tensor]:
    """The parameters after a few steps of two micro-batches."""
    width, layers = (16, 3) if place.tiny else (1024, 8)
    zero = {"overlap_comm": overlap, "reduce_bucket_size": 3 * width * width}
    model = Tower(width, layers, place.device)
    engine = engine_of(model, stage, zero_optimization=zero, gradient_accumulation_steps=2)
    for step in range(STEPS):
        for micro in range(2):
            one_step(engine, batch_of(place, width, 2 * step + micro))
    state = {name: p.cpu().clone() for name, p in engine.module_state_dict().items()}
    engine.destroy()
    return state


def check(place: Place) -> None:
    """Without overlap, twice; with it; and with it while side streams sleep and released memory is NaN."""
    deterministic()
    wrong = []
    for stage in STAGES:
        want = trained(place, stage, overlap=False)
        runs = {"again": contextlib.nullcontext(), "overlap": contextlib.nullcontext()}
        runs |= {
            f"overlap, late, seed {seed}": late(place.device, seed) for seed in range(1 if place.tiny else 3)
        }
        for name, around in runs.items():
            with around:
                got = trained(place, stage, overlap=name != "again")
            differ = [key for key in want if not torch.equal(got[key], want[key])]
            stand_in = {STAND_IN: "a thread"} if place.device.type == "cpu" else {}
            place.say(stage=stage, run=name, differ=len(differ), of=len(want), fine=not differ, **stand_in)
            wrong += [f"stage {stage}, {name}"] if differ else []
    if wrong:
        raise ArithmeticError(f"other bits than without overlap: {', '.join(wrong)}")


@contextlib.contextmanager
def late(device: torch.device, seed: int) -> Iterator[None]:
    """Jobs of side streams sleep before and after they work; whoever reads what was released reads NaN."""
    draws, kind = random.Random(seed), lane.ThreadLane if device.type == "cpu" else lane.StreamLane
    submit, resize = kind.submit, torch.UntypedStorage.resize_

    def nap() -> None:
        if device.type == "cpu":
            time.sleep(draws.random() / 1000)
        else:
            torch.cuda._sleep(draws.randrange(CYCLES))

    def slow_submit(self: Any, job: Callable[[], None], *given: Any, **named: Any) -> Any:
        def slow() -> None:
            nap()
            job()
            nap()

        return submit(self, slow, *given, **named)

    def spoiling_resize(storage: torch.UntypedStorage, size: int) -> Any:
        windows = storage.device.type == "cpu" and storage.is_shared()  # which other ranks look into
        if size == 0 and storage.nbytes() and not windows:
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(NAN)
        return resize(storage, size)

    with (
        mock.patch.object(kind, "submit", slow_submit),
        mock.patch.object(torch.UntypedStorage, "resize_", spoiling_resize),
    ):
        yield


def watched(place: Place) -> None:
    """A step of each stage under torch's sanitizer, which raises when two streams use a tensor unordered."""
    from torch.cuda import _sanitizer

    stand_in = {STAND_IN: "nobody watches"}
    if place.device.type == "cuda":
        _sanitizer.enable_cuda_sanitizer()
        stand_in = {}
    for stage in STAGES:
        engine = engine_of(Tower(16, 3, place.device), stage, zero_optimization={"overlap_comm": True})
        for step in range(2):
            one_step(engine, batch_of(place, 16, step))
        finish(place.device)
        engine.destroy()
        place.say(stage=stage, watched="two steps with overlap", fine=True, **stand_in)


# Host synchronisations ---------------------------------------------------------------------------


class Reads(TorchFunctionMode):
    """Counts reads of a tensor's values: what would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in READS
        return func(*args, **(kwargs or {}))


READS = (Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__float__, Tensor.__int__)


def synchronisations(place: Place) -> None:
    """In the third step, as torch warns of them; with a norm to be clipped by there is one to read.

    Those of ranks that share a card, which wait for every copy of their collectives, are not counted.
    """
    for stage in STAGES:
        for precision in ("bf16", "fp16"):
            width = 16 if place.tiny else 256
            model = Tower(width, 3, place.device)
            engine = engine_of(model, stage, precision, gradient_clipping=1.0)
            for step in range(2):
                one_step(engine, batch_of(place, width, step))
            x = batch_of(place, width, 2).to(next(engine.module.parameters()).dtype)
            finish(place.device)
            found = waits(place.device, lambda e=engine, x=x: one_step(e, x))
            engine.destroy()
            place.say(stage=stage, precision=precision, **found)


def waits(device: torch.device, step: Callable[[], None]) -> dict[str, Any]:
    """How often the host waits for the device in a step, and in which lines."""
    if device.type == "cpu":
        with Reads() as reads:
            step()
        told = "reads of a tensor's values"
        return {"synchronisations": reads.count, "fine": reads.count == 1, STAND_IN: told}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    syncs = [
        each
        for each in caught
        if "synchronizing CUDA operation" in str(each.message)
        and not each.filename.endswith("host_staging.py")
    ]
    lines = [f"{each.filename.rpartition('/')[2]}:{each.lineno}" for each in syncs]
    return {"synchronisations": len(syncs), "in": ", ".join(dict.fromkeys(lines)), "fine": len(syncs) == 1}
