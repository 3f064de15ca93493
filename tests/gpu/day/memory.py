"""The peak of a step beside the plan's."""

import gc
from typing import Any

import torch
from torch import nn

import zero_full
from tests.bench.shapes import gpt
from tests.gpu.day.place import ADAMW, PRECISIONS, RELEASES, SHAPES, Place
from tests.gpu.day.rows import STAND_IN, finish
from zero_full.plan import plan

ALLOWED = 0.02  # of the plan
BATCH = {True: (2, 32), False: (2, 512)}  # small: gradients of activations are no part of a plan


def check(place: Place) -> None:
    """Every stage in bf16, with small buckets and without persistent parameters."""
    beside_the_plan(place, {"gradient_clipping": 0.0}, {"reduce_bucket_size": 5_000_000, **RELEASES})


def defaults(place: Place) -> None:
    """Every stage in bf16, and nothing else configured: buckets of 500 million elements, clipping at 1."""
    beside_the_plan(place, {}, {})


def beside_the_plan(place: Place, keys: dict[str, Any], zero: dict[str, Any]) -> None:
    """A row for each stage. A peak that is too far from the plan's is not fine, but no failure."""
    shape = SHAPES["tiny" if place.tiny else "60M"]
    for stage in (0, 1, 2, 3):
        given = {"train_micro_batch_size_per_gpu": 1, "optimizer": ADAMW, **keys}
        config: dict[str, Any] = {
            **given,
            "zero_optimization": {"stage": stage, **zero},
            **PRECISIONS["bf16"],
        }
        tokens = torch.zeros(BATCH[place.tiny], dtype=torch.int64)
        planned = plan(
            gpt(shape, torch.device("meta")), config, place.world, inputs=(tokens, tokens), device="cuda"
        )
        found = measured(place, shape, config, planned)
        off = found["peak"] / planned.peak - 1
        stand_in = {STAND_IN: "the plan itself"} if place.device.type == "cpu" else {}
        place.say(
            stage=stage,
            configured="small buckets" if zero else "defaults",
            **{"planned, MB": round(planned.peak / 1e6, 1), "measured, MB": round(found["peak"] / 1e6, 1)},
            **{"off, %": round(100 * off, 2)},
            **{f"{kind}, MB": round(found[kind] / 1e6, 1) for kind in ("allocated", "reserved")},
            fine=abs(off) <= ALLOWED,
            **stand_in,
        )


def measured(place: Place, shape: Any, config: dict[str, Any], planned: Any) -> dict[str, int]:
    """Bytes requested for this rank's tensors at the third step's worst moment, and the allocator's.

    The allocator adds up to 1 MiB to a tensor of more than that, which no plan knows.
    """
    torch.manual_seed(place.rank)
    before = allocated(place.device)
    engine = zero_full.initialize(model=gpt(shape, place.device), config=config)[0]
    for step in range(3):
        tokens = torch.randint(shape.vocabulary, BATCH[place.tiny], device=place.device)
        if step == 2 and place.device.type == "cuda":
            finish(place.device)
            torch.cuda.reset_peak_memory_stats()
        engine.backward(engine(tokens, tokens))
        engine.step()
    finish(place.device)
    if place.device.type == "cuda":
        found = {
            "peak": torch.cuda.memory_stats()["requested_bytes.all.peak"] - before,
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }
    else:
        found = {"peak": planned.peak, "allocated": 0, "reserved": 0}
    engine.destroy()
    return found


def allocated(device: torch.device) -> int:
    """Bytes requested for tensors, after libraries have made what they keep for forward and for backward."""
    if device.type != "cuda":
        return 0
    layer = nn.Linear(64, 64, device=device, dtype=torch.bfloat16)
    layer(torch.ones(64, 64, device=device, dtype=torch.bfloat16)).sum().backward()
    del layer
    gc.collect()
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])
