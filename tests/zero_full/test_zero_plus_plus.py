"""ZeRO++ at stage 3: quantised weights and gradients, second slices; what crosses between nodes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL
from zero_full.comm.quantized import BLOCK

WIDTH, LAYERS = 64, 8
BLOCKS_OF_SCALES = 4  # bytes


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def config(**zero: Any) -> dict[str, Any]:
    fixed = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0,
        "zero_optimization": {**fixed, **zero},
    }


def train(comm: Any, steps: int, zero: dict[str, Any]) -> tuple[list[float], dict[str, int], int]:
    """Losses, the bytes sent in the last step, and the bytes of parameters held after it."""
    torch.manual_seed(0)
    engine, optimizer, _, _ = zero_full.initialize(model=Tower(), config=config(**zero))
    losses, before = [], {}
    for step in range(steps):
        before = engine.traffic()
        generator = torch.Generator().manual_seed(100 * step + comm.rank)
        loss = engine(torch.randn(4, WIDTH, generator=generator).bfloat16())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    sent = {kind: total - before.get(kind, 0) for kind, total in engine.traffic().items()}
    held = sum(tensor.nbytes for tensor in optimizer.holdings()["parameters"])
    engine.destroy()
    return losses, sent, held


NUMEL = LAYERS * WIDTH * WIDTH
PLUS_PLUS = {"zero_hpz_partition_size": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True}


def scales(bits: int, parts: int) -> int:
    """Bytes of scales when every unit's slice for one of `parts` ranks is quantised by itself, filled up."""
    integers = WIDTH * WIDTH // parts * bits // 8
    size = integers + BLOCKS_OF_SCALES * -(-WIDTH * WIDTH // parts // BLOCK)
    return LAYERS * (-(-size // 16) * 16 - integers)


@pytest.mark.rotates
@pytest.mark.parametrize("overlap", [False, True])
def test_between_two_nodes_a_quarter_of_the_bytes_travels(overlap: bool) -> None:
    answers = POOL.run(train, 4, 3, {**PLUS_PLUS, "overlap_comm": overlap})
    between = [sum(n for kind, n in sent.items() if "between" in kind) for _, sent, _ in answers]
    # Forward gathers one byte a weight, backward nothing, gradients half a byte: a rank sends its part.
    weights = NUMEL // 4 + scales(8, 4)
    gradients = NUMEL // 4 // 2 + scales(4, 4)
    assert between == [weights + gradients] * 4


def test_plain_stage_3_sends_four_times_that_between_nodes() -> None:
    """The unit is what a 16-bit gather carries across: ZeRO counts 3 of them, ZeRO++ 0.75."""
    _, sent, _ = POOL.run(train, 4, 3, {"overlap_comm": False})[0]
    assert sent == {"all_gather": 2 * 3 * 2 * NUMEL // 4, "reduce_scatter": 3 * 2 * NUMEL // 4}
    unit = 2 * NUMEL // 4  # bytes a rank sends to the other node: its slice, in 16 bits
    zero, plus_plus = 3 * unit, NUMEL // 4 + NUMEL // 8
    assert plus_plus / zero == 0.25


@pytest.mark.rotates
@pytest.mark.parametrize(
    "zero", [{}, *({key: value} for key, value in PLUS_PLUS.items()), PLUS_PLUS], ids=str
)
def test_training_goes_as_it_does_at_stage_2(zero: dict[str, Any]) -> None:
    losses = [loss for loss, _, _ in POOL.run(train, 4, 20, zero)]
    plain = [loss for loss, _, _ in POOL.run(train, 4, 20, {"stage": 2})]
    exact = not any("quantized" in key for key in zero)
    for mine, theirs in zip(losses, plain, strict=True):
        assert mine == (theirs if exact else pytest.approx(theirs, rel=0.1))
        assert mine[-1] < 0.8 * mine[0]


def test_second_slices_are_half_of_the_parameters_and_gone_after_the_step() -> None:
    (_, _, held), *_ = POOL.run(train, 4, 2, {"zero_hpz_partition_size": 2})
    assert held == 2 * NUMEL // 4


def second_slices_at_the_end_of_forward(comm: Any) -> list[int]:
    torch.manual_seed(0)
    engine, optimizer, _, _ = zero_full.initialize(model=Tower(), config=config(zero_hpz_partition_size=2))
    engine(torch.randn(4, WIDTH).bfloat16())
    kept = [values.node_copy.numel() for values in optimizer.sharded.flats if values.node_copy is not None]
    engine.destroy()
    return kept


def test_a_node_keeps_what_forward_has_gathered() -> None:
    assert POOL.run(second_slices_at_the_end_of_forward, 4) == [[WIDTH * WIDTH // 2] * LAYERS] * 4


def test_a_node_size_that_does_not_divide_the_world_is_refused() -> None:
    with pytest.raises(zero_full.ConfigError, match="zero_hpz_partition_size: 3 does not divide the 4 ranks"):
        zero_full.config.resolve(config(zero_hpz_partition_size=3), 4)


class WithIntegers(Tower):
    """A frozen int8 table, as quantised base models have."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(-127, 127, dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.table.clone()
        return super().forward(x)


def table_in_forward(comm: Any) -> Tensor:
    engine, _, _, _ = zero_full.initialize(model=WithIntegers(), config=config(**PLUS_PLUS))
    engine(torch.ones(4, WIDTH).bfloat16())
    seen = engine.module.seen
    engine.destroy()
    return seen


def test_integers_are_never_rounded() -> None:
    for seen in POOL.run(table_in_forward, 4):
        assert seen.tolist() == list(range(-127, 127))


def groups_opened(comm: Any, zero: dict[str, Any]) -> tuple[int, int, int]:
    """Process groups that an engine adds, communicators of its own that use them, and what destroy leaves."""
    before = len(torch.distributed.distributed_c10d._world.pg_map)
    engine, optimizer, _, _ = zero_full.initialize(model=Tower(), config=config(**zero))
    opened = len(torch.distributed.distributed_c10d._world.pg_map) - before
    used = len({id(each.group) for each in optimizer.communicators.all if each.size > 1})
    engine.destroy()
    return opened, used, len(torch.distributed.distributed_c10d._world.pg_map) - before


PLAIN = {"zero_hpz_partition_size": 2}
OPENED = [(PLUS_PLUS, False, 2), (PLUS_PLUS, True, 6), (PLAIN, True, 4), ({"mics_shard_size": 2}, True, 3)]


@pytest.mark.parametrize(("zero", "overlap", "most"), OPENED)
def test_every_group_is_opened_once_used_and_closed_with_the_engine(
    zero: dict[str, Any], overlap: bool, most: int
) -> None:
    for opened, used, left in POOL.run(groups_opened, 4, {**zero, "overlap_comm": overlap}):
        assert used == most + (not overlap) and opened == most  # without overlap the user's own is used, too
        assert left == 0


def written_between_passes(comm: Any, zero: dict[str, Any]) -> float:
    """The last rank alone writes to its part of a weight between a forward and its backward."""
    torch.manual_seed(0)
    engine, _, _, _ = zero_full.initialize(model=Tower(), config=config(**zero))
    generator = torch.Generator().manual_seed(comm.rank)
    loss = engine(torch.randn(4, WIDTH, generator=generator).bfloat16())
    weight = engine.module.layers[-1].weight
    mine = zero_full.safe_get_local_fp32_param(weight)
    if comm.rank == comm.world_size - 1 and mine is not None:
        zero_full.safe_set_local_fp32_param(weight, torch.full_like(mine, 0.25))
    engine.backward(loss)
    engine.step()
    total = float(zero_full.safe_get_full_fp32_param(weight).double().sum())
    engine.destroy()
    return total


def test_one_ranks_write_between_passes_waits_for_the_step_with_a_node_copy() -> None:
    plain, node = (POOL.run(written_between_passes, 4, zero) for zero in ({}, {"zero_hpz_partition_size": 2}))
    assert len(set(node)) == len(set(plain)) == 1
    assert node[0] == pytest.approx(plain[0], rel=1e-3)
