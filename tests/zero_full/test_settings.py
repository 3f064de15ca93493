"""Settings that say how, not what: they change when and in which pieces, and nothing but rounding."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.zero_full.runs import assert_close, assert_same, config, reference, run

BIT_EQUAL: list[dict[str, Any]] = [
    {"zero_optimization": {"overlap_comm": True}},
    {"zero_optimization": {"contiguous_gradients": False}},
    {"zero_optimization": {"round_robin_gradients": True}},
    {"zero_optimization": {"reduce_bucket_size": 1}},
    {"zero_optimization": {"reduce_bucket_size": 500_000_000}},
    {"zero_optimization": {"reduce_scatter": False}},
    {"zero_optimization": {"overlap_comm": True, "contiguous_gradients": False, "reduce_bucket_size": 1}},
    {"debug": {"check_collectives": True}},
]
ROUNDED: list[dict[str, Any]] = [
    {"prescale_gradients": True},
    {"gradient_predivide_factor": 3.0},
    {"zero_optimization": {"reduce_scatter": False}, "gradient_predivide_factor": 3.0},  # f == world
    {"communication_data_type": "fp32"},
    {"data_types": {"grad_accum_dtype": "fp32"}},
]


@pytest.mark.rotates
@pytest.mark.parametrize("keys", BIT_EQUAL, ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_how_gradients_travel_changes_no_bit(stage: int, keys: dict[str, Any]) -> None:
    usual = run(3, config(stage, gradient_accumulation_steps=2))
    other = run(3, config(stage, gradient_accumulation_steps=2, **keys))
    for rank in range(3):
        assert_same(other[rank].parameters, usual[0].parameters)


@pytest.mark.rotates
@pytest.mark.parametrize("keys", ROUNDED, ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_where_the_average_divides_changes_only_rounding(stage: int, keys: dict[str, Any]) -> None:
    for outcome in run(3, config(stage, **keys)):
        assert_close(outcome.parameters, reference(3), 1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_sum_is_an_average_of_a_larger_loss(stage: int) -> None:
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.01}}}
    larger = {"optimizer": {"type": "SGD", "params": {"lr": 0.03}}}
    summed = run(3, config(stage, gradient_allreduce_op="sum", **sgd))
    averaged = run(3, config(stage, **larger))
    assert_close(summed[0].parameters, averaged[0].parameters)


def test_stages_agree_bit_for_bit() -> None:
    outcomes = [run(3, config(stage)) for stage in (0, 1, 2)]
    for outcome in outcomes[1:]:
        assert_same(outcome[0].parameters, outcomes[0][0].parameters)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_16_bits_stages_1_and_2_agree_and_stage_0_rounds_the_average_once_more(precision: str) -> None:
    outcomes = [run(3, config(stage, **{precision: {"enabled": True}})) for stage in (0, 1, 2)]
    assert_same(outcomes[1][0].parameters, outcomes[2][0].parameters)
    assert_close(outcomes[0][0].parameters, outcomes[1][0].parameters, 0.03)


@pytest.mark.rotates
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(
    stage=st.sampled_from([0, 1, 2]),
    world_size=st.integers(1, 4),
    bucket=st.sampled_from([1, 13, 100, 182, 10**6]),
    overlap=st.booleans(),
    contiguous=st.booleans(),
    micro_batches=st.integers(1, 3),
    clip=st.sampled_from([0.0, 0.3]),
)
def test_any_combination_ends_where_plain_adam_ends(
    stage: int, world_size: int, bucket: int, overlap: bool, contiguous: bool, micro_batches: int, clip: float
) -> None:
    zero = {"reduce_bucket_size": bucket, "overlap_comm": overlap, "contiguous_gradients": contiguous}
    keys = config(
        stage, zero_optimization=zero, gradient_accumulation_steps=micro_batches, gradient_clipping=clip
    )
    for outcome in run(world_size, keys):
        assert_close(outcome.parameters, reference(world_size, micro_batches=micro_batches, clip=clip), 1e-5)


@pytest.mark.parametrize("split", [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_the_split_into_micro_batches_changes_only_rounding(split: tuple[int, int]) -> None:
    import torch

    import zero_full
    from tests.zero_full.runs import Net, data

    pieces, size = split[0], 30 // split[0]
    everything = torch.cat([data(0, micro, 0) for micro in range(6)])
    engine, _, _, _ = zero_full.initialize(model=Net(), config=config(2, gradient_accumulation_steps=pieces))
    for piece in everything.split(size):
        engine.backward(engine(piece))
        engine.step()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    model(everything).backward()
    optimizer.step()
    assert_close(dict(engine.named_parameters()), dict(model.named_parameters()))
