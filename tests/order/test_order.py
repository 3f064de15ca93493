"""Every access is ordered by events, and every order that a device may choose gives the inline run's bits."""

import pytest
import torch

import zero_full
from tests.order.clocks import races
from tests.order.mistakes import (
    BF16,
    HOST,
    MUON,
    PARAMS_ALONE,
    PARAMS_IN_FILE,
    PARAMS_ON_HOST,
    STATE_IN_FILE,
    TWO,
    loading,
    saving,
)
from tests.order.models import WIDTH, data
from tests.order.playback import Choose, Player, script_first, seeded, side_first, side_last
from tests.order.runs import Case, one_step, recorded
from tests.order.trace import ALLOCATOR

FP16, CLIPPED = {"fp16": {"enabled": True, "initial_scale_power": 30}}, {"gradient_clipping": 0.1}
IN_PART, DELAYED = (
    {"offload_optimizer": {"device": "cpu", **how}} for how in ({"ratio": 0.5}, {"delay_update_after": 1})
)
ALL_IN_FILES = {**PARAMS_IN_FILE, **STATE_IN_FILE}
FEW_BUFFERS = {"offload_param": {"device": "nvme", "max_in_cpu": 0, "buffer_count": 1, "buffer_size": 4096}}
HPZ, MICS = {"zero_hpz_partition_size": 2}, {"mics_shard_size": 2}
QUANTIZED = {**HPZ, "zero_quantized_weights": True, "zero_quantized_gradients": True}
KEPT = {"stage3_max_reuse_distance": 10**9}
TOGETHER_LATE = {"reduce_bucket_size": 2 * WIDTH * (WIDTH + 1), "contiguous_gradients": False}
ALONE = {"stage3_prefetch_bucket_size": 0}


def moved_and_back(engine: zero_full.Engine, step: int) -> None:
    """A step, and all state leaves the device and comes back."""
    one_step(engine, step)
    engine.offload_states()
    engine.reload_states()


def looked_at(engine: zero_full.Engine, step: int) -> None:
    """A step; everything is gathered and read; a forward without gradients, and its gathers."""
    one_step(engine, step)
    with torch.no_grad():
        with zero_full.GatheredParameters(list(engine.module.parameters())):
            sums = [parameter.sum() for parameter in engine.module.parameters()]
        engine(data(step, 9, sums[0].dtype))


FEW = [
    *(Case(stage, keys=TWO | CLIPPED) for stage in range(4)),
    *(Case(stage, keys=FP16, steps=3) for stage in (1, 2, 3)),
    Case(2, "recomputed", zero={"contiguous_gradients": False}),
    *(Case(3, kind, BF16, steps=3) for kind in ("recomputed", "changing", "tied")),
    *(Case(stage, keys=CLIPPED, zero=MICS, ranks=4) for stage in (2, 3)),
    Case(3, keys=TWO, zero=HPZ, ranks=4),
    Case(3, keys=BF16, zero=QUANTIZED, ranks=4),
    Case(3, keys=BF16, zero=KEPT),
    *(Case(stage, keys=BF16, zero=HOST) for stage in (1, 3)),
    *(Case(stage, keys=BF16, drive=drive) for stage in (1, 3) for drive in (moved_and_back, looked_at)),
    *(Case(stage, keys=MUON | CLIPPED, depth=8) for stage in (2, 3)),
    Case(1, keys=MUON | BF16, zero=HOST, depth=8),
    Case(2, keys=TWO | CLIPPED, zero=IN_PART),
    Case(2, keys=BF16, zero=DELAYED, steps=3),
    Case(2, keys=BF16, zero=HOST | MICS, ranks=4),
    Case(3, keys=BF16, zero=STATE_IN_FILE, steps=3),
    *(Case(3, keys=BF16, zero=zero, drive=loading) for zero in (PARAMS_ON_HOST, ALL_IN_FILES)),
    Case(3, keys=BF16, zero=PARAMS_ALONE, drive=looked_at),
    Case(3, "changing", BF16, HOST | FEW_BUFFERS),
    *(Case(stage, keys=BF16, zero=zero, drive=saving) for stage, zero in ((1, {}), (2, HOST))),
    *(Case(stage, "two streams") for stage in (2, 3)),
    *(Case(stage, "two streams", zero=TOGETHER_LATE) for stage in (1, 2)),
]
ALL = [
    Case(stage, kind, keys | CLIPPED | TWO, zero, ranks, steps=3)
    for stage in range(4)
    for kind in ("plain", "tied", "recomputed", "changing", *(["borrowing"] if stage < 3 else []))
    for keys in ({}, BF16, FP16)
    for zero, ranks in [
        ({}, 2),
        ({"contiguous_gradients": False}, 3),
        ({"reduce_scatter": False}, 2),
        *([(MICS, 4), (HOST, 2), (IN_PART, 2), (STATE_IN_FILE, 2)] if stage else []),
        *([(HPZ, 4), (QUANTIZED, 4), (KEPT, 2), (ALONE, 2)] if stage == 3 else []),
        *([(PARAMS_ALONE, 2), (PARAMS_ON_HOST, 2), (ALL_IN_FILES, 2)] if stage == 3 else []),
    ]
]


def check(case: Case, orders: list[Choose]) -> None:
    """No race; in each of these orders the values of the inline run, whose threads are late."""
    record = recorded(case)
    assert not [str(race) for race in races(record)]
    assert any(item.kind == "op" for item in record.items if item.queue > ALLOCATOR), "nothing ran beside"
    player = Player(record)
    for choose in orders:
        assert not player.differences(choose)
    inline = recorded(case, overlap=False, late=True)
    assert not [str(race) for race in races(inline)]
    for name, value in record.finals.items():
        assert torch.equal(value, inline.finals[name]), name


@pytest.mark.rotates
@pytest.mark.parametrize("case", FEW, ids=str)
def test_nothing_depends_on_how_fast_streams_are(case: Case) -> None:
    check(case, [side_first, side_last, script_first, *map(seeded, range(3))])


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=str)
def test_in_every_combination(case: Case) -> None:
    check(case, [side_first, side_last, script_first, *map(seeded, range(20))])
