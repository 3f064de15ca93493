"""Every access is ordered by events, and every order that a device may choose gives the inline run's bits."""

import pytest
import torch

import zero_full
from tests.order.clocks import races
from tests.order.mistakes import MUON
from tests.order.models import WIDTH, data
from tests.order.playback import Choose, Player, seeded, side_first, side_last
from tests.order.runs import Case, one_step, recorded

BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 30}}
TWO, CLIPPED = {"gradient_accumulation_steps": 2}, {"gradient_clipping": 0.1}
HOST = {"offload_optimizer": {"device": "cpu"}}
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
    *(Case(stage, keys=FP16) for stage in (1, 2, 3)),
    Case(2, "recomputed", zero={"contiguous_gradients": False}),
    *(Case(3, kind, BF16) for kind in ("recomputed", "changing", "tied")),
    *(Case(stage, keys=CLIPPED, zero=MICS, ranks=4) for stage in (2, 3)),
    Case(3, keys=TWO, zero=HPZ, ranks=4),
    Case(3, keys=BF16, zero=QUANTIZED, ranks=4),
    Case(3, keys=BF16, zero=KEPT),
    *(Case(stage, keys=BF16, zero=HOST) for stage in (1, 3)),
    *(Case(stage, keys=BF16, drive=drive) for stage in (1, 3) for drive in (moved_and_back, looked_at)),
    *(Case(stage, keys=MUON | CLIPPED, steps=2, depth=8) for stage in (2, 3)),
    Case(1, keys=MUON | BF16, zero=HOST, steps=2, depth=8),
    *(Case(stage, "two streams") for stage in (2, 3)),
    *(Case(stage, "two streams", zero=TOGETHER_LATE) for stage in (1, 2)),
]
ALL = [
    Case(stage, kind, keys | CLIPPED | TWO, zero, ranks)
    for stage in range(4)
    for kind in ("plain", "tied", "recomputed", "changing", *(["borrowing"] if stage < 3 else []))
    for keys in ({}, BF16, FP16)
    for zero, ranks in [
        ({}, 2),
        ({"contiguous_gradients": False}, 3),
        ({"reduce_scatter": False}, 2),
        *([(MICS, 4), (HOST, 2)] if stage else []),
        *([(HPZ, 4), (QUANTIZED, 4), (KEPT, 2), (ALONE, 2)] if stage == 3 else []),
    ]
]


def check(case: Case, orders: list[Choose]) -> None:
    """No race; the inline run's values in each of these orders."""
    record = recorded(case)
    assert not [str(race) for race in races(record)]
    assert any(item.kind == "op" for item in record.items if item.stream), "nothing ran beside"
    player = Player(record)
    for choose in orders:
        assert not player.differences(choose)
    inline = recorded(case, overlap=False)
    assert not [str(race) for race in races(inline)]
    for name, value in record.finals.items():
        assert torch.equal(value, inline.finals[name]), name


@pytest.mark.parametrize("case", FEW, ids=str)
def test_nothing_depends_on_how_fast_streams_are(case: Case) -> None:
    check(case, [side_first, side_last, *map(seeded, range(4))])


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=str)
def test_in_every_combination(case: Case) -> None:
    check(case, [side_first, side_last, *map(seeded, range(20))])
