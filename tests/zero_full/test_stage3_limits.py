"""Stage 3 in numbers: memory, traffic, time, other ways to cut, and a peer."""

import gc
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zero_full
from tests.conformance.expected import padded
from tests.worlds import POOL
from tests.zero_full.runs import assert_close, config, data
from tests.zero_full.stage3_runs import (
    KEPT,
    RELEASED,
    SGD,
    WIDTH,
    Block,
    Tower,
    assert_stage_3_is_stage_2,
    one_step,
    played,
    seeded,
)
from tests.zero_full.test_experts import CLIP, STEPS, WORLD, WithExpert, sgd, topology_of
from tests.zero_full.test_stage3 import Recomputed
from tests.zero_full.test_stage3_calls import GPT, UsesElsewhere

BLOCK = [2 * WIDTH * WIDTH, 2 * WIDTH, 2 * WIDTH * WIDTH, WIDTH]


def engine_of(make: Callable[[], nn.Module], zero: dict[str, Any], **keys: Any) -> zero_full.Engine:
    return zero_full.initialize(model=seeded(make), config=config(3, zero_optimization=zero, **keys))[0]


# Memory ------------------------------------------------------------------------------------------


class Rooted(Tower):
    """The model holds a parameter itself: it is whole as long as the model is at work."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        return super().forward(x * self.scale)


def peaks(
    comm: Any, make: Callable[[], nn.Module], zero: dict[str, Any], stops_host: bool = True
) -> list[int]:
    """The most elements that are gathered in forward, in backward and in evaluation."""
    engine, most = engine_of(make, zero), 0
    engine.optimizer.gatherer.lane.stops_host = stops_host  # False: as on an accelerator
    gatherer = engine.optimizer.gatherer
    begin = gatherer._begin

    def begin_and_look(values: Any) -> None:
        nonlocal most
        begin(values)
        held = sum(v.full.untyped_storage().nbytes() for v in engine.optimizer.sharded.flats) // 4
        assert held == gatherer.live == sum(v.layout.total for v in gatherer.gathered)
        most = max(most, held)

    gatherer._begin = begin_and_look
    found = []
    for step in range(3):
        most, found = 0, []
        with torch.no_grad():
            engine(data(step, 1, comm.rank))
        found.append(most)
        most = 0
        loss = engine(data(step, 0, comm.rank))
        found.append(most)
        most = 0
        engine.backward(loss)
        found.append(most)
        assert gatherer.live == 0
        engine.step()
        assert gatherer.live == 0
        assert not any(v.full.untyped_storage().nbytes() for v in engine.optimizer.sharded.flats)
    return found


@pytest.mark.rotates
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_one_unit_is_gathered_at_a_time_and_those_ahead_until_enough_are(
    world_size: int, overlap: bool
) -> None:
    block, root = padded(BLOCK, world_size), padded([WIDTH], world_size)
    ahead_of = {0: 0, 1: 1, block: 1, block + 1: 2, 3 * block: 3} if overlap else {50_000_000: 0}
    cases = [(False, *case) for case in ahead_of.items()] + [(True, 50_000_000, int(overlap))]
    for stops_host, allowed, ahead in cases:
        most = (1 + ahead) * block + root
        zero = {**RELEASED, "overlap_comm": overlap, "stage3_prefetch_bucket_size": allowed}
        for found in POOL.run(peaks, world_size, Rooted, zero, stops_host):
            assert found == [most] * 3


def test_a_recomputed_part_is_gathered_as_a_whole_and_no_more() -> None:
    for _, forward, backward in POOL.run(peaks, 2, partial(Recomputed, "pairs", False), RELEASED):
        assert forward == padded(BLOCK, 2) and backward <= 2 * padded(BLOCK, 2)


def gradients_at_a_time(comm: Any, make: Callable[[], nn.Module]) -> int:
    """In how many units backward has whole gradients at a time."""
    engine, most = engine_of(make, RELEASED), 0

    def look(grad: Tensor) -> None:
        nonlocal most
        gradients = [group.gradients for group in engine.optimizer.trained]
        waiting = {g for g in gradients if g.local_grads is not None or g.arrived}
        most = max(most, len(waiting))

    def watch(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(look)

    for block in engine.module.blocks:
        block.register_forward_hook(watch)
    one_step(engine, 0, comm.rank)
    return most


@pytest.mark.parametrize(
    "make",
    [Tower, partial(Recomputed, "each", False), partial(Recomputed, "each", True)],
    ids=["plain", "recomputed", "re-entrant"],
)
def test_gradients_leave_as_soon_as_backward_has_passed_their_unit(make: Callable[[], nn.Module]) -> None:
    assert max(POOL.run(gradients_at_a_time, 2, make)) <= 1


def leaks(comm: Any, make: Callable[[], nn.Module], zero: dict[str, Any]) -> tuple[list[int], list[int], int]:
    """(tensors, bytes of their storages) after 10 and after 50 steps; bytes the process has grown by."""
    engine, tensors, sizes, resident = engine_of(make, zero), [], [], []
    for step in range(50):
        with torch.no_grad():
            engine(data(step, 1, comm.rank))
        engine(data(step, 2, comm.rank))  # nobody asks for its gradients
        one_step(engine, step, comm.rank)
        if step in (9, 49):
            gc.collect()
            alive = [each for each in gc.get_objects() if isinstance(each, Tensor)]
            storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in alive}
            tensors.append(len(alive))
            sizes.append(sum(storages.values()))
            del alive
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            resident.append(pages * 4096)
    hooks = max(len(p._backward_hooks or ()) for p in engine.module.parameters())
    assert hooks == 1  # ours
    return tensors, sizes, resident[1] - resident[0]


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("make", "zero"),
    [
        pytest.param(Tower, {**RELEASED, "overlap_comm": True}, id="released"),
        pytest.param(partial(UsesElsewhere, "weight"), RELEASED, id="weight given away"),
        pytest.param(Tower, KEPT, id="kept", marks=pytest.mark.slow),
        pytest.param(partial(Recomputed, "each", True), RELEASED, id="checkpoints", marks=pytest.mark.slow),
    ],
)
def test_fifty_steps_leave_nothing_behind(make: Callable[[], nn.Module], zero: dict[str, Any]) -> None:
    for tensors, sizes, growth in POOL.run(leaks, 2, make, zero):
        assert tensors[0] == tensors[1] and sizes[0] == sizes[1]
        assert growth < 4 * 2**20


# Traffic -----------------------------------------------------------------------------------------


def sent(comm: Any, zero: dict[str, Any], micro_batches: int, make: Any = Rooted) -> list[int]:
    """Bytes that this rank sends in each of three steps."""
    engine, found = engine_of(make, zero, gradient_accumulation_steps=micro_batches), []
    for step in range(3):
        engine.optimizer.communicators.traffic.clear()
        one_step(engine, step, comm.rank)
        found.append(sum(engine.traffic().values()))
    return found


@pytest.mark.pairwise
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_sends_each_parameter_three_times_or_twice(
    world_size: int, micro_batches: int, overlap: bool
) -> None:
    once = 4 * (8 * padded(BLOCK, world_size) + padded([WIDTH], world_size)) * (world_size - 1) // world_size
    for found in POOL.run(sent, world_size, {**RELEASED, "overlap_comm": overlap}, micro_batches):
        assert found == [3 * micro_batches * once] * 3
    for found in POOL.run(sent, world_size, {**KEPT, "overlap_comm": overlap}, micro_batches):
        assert found[1:] == [2 * micro_batches * once] * 2


@pytest.mark.parametrize("how", ["each", "pairs", "all"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_recomputed_is_not_gathered_once_more(reentrant: bool, how: str) -> None:
    once = 4 * 8 * padded(BLOCK, 2) // 2
    for found in POOL.run(sent, 2, RELEASED, 1, partial(Recomputed, how, reentrant)):
        assert found == [3 * once] * 3


# Time --------------------------------------------------------------------------------------------


class Deep(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        for layer in self.layers:
            x = x + 0.01 * layer(x)
        return x.square().mean()


def seconds_per_step(comm: Any, depth: int, joined: bool) -> float:
    keys = RELEASED if joined else {**RELEASED, "stage3_prefetch_bucket_size": 0}
    engine = engine_of(partial(Deep, depth), keys)
    units = sum(values.released_at_rest for values in engine.optimizer.sharded.flats)
    assert units < 12 if joined else units == depth
    taken = []
    for _ in range(2):  # the first makes what all keep
        start = time.process_time()  # of the processor: a busy machine makes all else longer
        engine.backward(engine(torch.ones(2, 4)))
        engine.step()
        taken.append(time.process_time() - start)
    return min(taken)


@pytest.mark.rotates
@pytest.mark.parametrize("joined", [True, False])
def test_a_thousand_layers_take_four_times_as_long_as_a_quarter_of_them(joined: bool) -> None:
    few, many = (max(POOL.run(seconds_per_step, 2, depth, joined)) for depth in (250, 1000))
    assert many < 10 * few, f"{few:.3f} s and {many:.3f} s"  # work for each pair of layers would be 16 times


# Other ways to cut -------------------------------------------------------------------------------

CUTS: dict[str, dict[str, Any]] = {
    "small sub-groups": {"sub_group_size": 1},
    "few live parameters": {"stage3_max_live_parameters": 1},
    "no prefetch": {"stage3_prefetch_bucket_size": 0},
    "blocks named": {"leaf_module": {"classes": ["Block"]}},
    "some whole": {"stage3_param_persistence_threshold": 32},
    "all-reduce": {"reduce_scatter": False},
    "late gradients": {"contiguous_gradients": False},
}


@pytest.mark.rotates
@pytest.mark.parametrize("zero", CUTS.values(), ids=CUTS.keys())
def test_how_parameters_are_cut_changes_nothing(zero: dict[str, Any]) -> None:
    ways = ["released, overlapping", "kept"]
    assert_stage_3_is_stage_2(Tower, ways=ways, zero_optimization=zero, gradient_accumulation_steps=2)


@pytest.mark.rotates
@pytest.mark.parametrize("keys", [{}, {"gradient_accumulation_steps": 2, "bf16": {"enabled": True}}], ids=str)
def test_shards_that_are_repeated(keys: dict[str, Any]) -> None:
    ways = ["released, overlapping", "kept"]
    assert_stage_3_is_stage_2(GPT, world_size=4, ways=ways, zero_optimization={"mics_shard_size": 2}, **keys)


def test_shards_that_are_repeated_end_where_unsharded_ones_end() -> None:
    want = POOL.run(played, 4, GPT, one_step, config(0, **SGD), 3)
    keys = config(3, zero_optimization={**RELEASED, "mics_shard_size": 2}, **SGD)
    for got, plain in zip(POOL.run(played, 4, GPT, one_step, keys, 3), want, strict=True):
        assert got.losses == pytest.approx(plain.losses, rel=1e-6)
        assert_close(got.parameters, plain.parameters, 1e-6)


class ExpertTower(WithExpert):
    """Blocks before the expert's layer."""

    def __init__(self, expert: int, experts: int) -> None:
        super().__init__(expert, experts)
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    def loss_of(self, x: Tensor) -> Tensor:
        """Of the dense part."""
        for block in self.blocks:
            x = block(x)
        return super().loss_of(x)


def trains_experts(comm: Any, stage: int, zero: dict[str, Any]) -> tuple[dict[str, Tensor], list[float]]:
    topology, row = topology_of(comm.rank, 2)
    keys = config(stage, gradient_clipping=CLIP, zero_optimization=zero)
    model = ExpertTower(comm.rank % 2, 2)
    engine, _, _, _ = zero_full.initialize(model=model, config=keys, optimizer=sgd, topology=topology)
    norms = []
    for step in range(STEPS):
        x = [data(step, 0, rank) for rank in range(WORLD)]
        engine.backward(engine(x[comm.rank], [x[rank] for rank in row]))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return engine.module_state_dict(), norms


@pytest.mark.rotates
@pytest.mark.parametrize("overlap", [False, True])
def test_experts(overlap: bool) -> None:
    want = POOL.run(trains_experts, WORLD, 2, {})
    for got, stage_2 in zip(
        POOL.run(trains_experts, WORLD, 3, {**RELEASED, "overlap_comm": overlap}), want, strict=True
    ):
        assert got[1] == pytest.approx(stage_2[1], rel=1e-5)
        assert_close(got[0], stage_2[0], 1e-5)


# A peer ------------------------------------------------------------------------------------------


def by_fsdp2(comm: Any) -> tuple[dict[str, Tensor], list[float]]:
    model = seeded(GPT)
    mesh = init_device_mesh("cpu", (comm.world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1), []
    for step in range(5):
        loss = model(data(step, 0, comm.rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}, losses


def by_zero_full(comm: Any, zero: dict[str, Any]) -> tuple[dict[str, Tensor], list[float]]:
    engine = engine_of(GPT, zero)
    losses = [one_step(engine, step, comm.rank) for step in range(5)]
    state = engine.module_state_dict()
    return {name: state[name] for name, _ in engine.module.named_parameters()}, losses


@pytest.mark.parametrize("world_size", [2, 3])
def test_fsdp2_ends_in_the_same_place(world_size: int) -> None:
    peer = POOL.run(by_fsdp2, world_size)
    for (parameters, losses), want in zip(POOL.run(by_zero_full, world_size, RELEASED), peer, strict=True):
        assert losses == pytest.approx(want[1], rel=1e-5)
        assert_close(parameters, want[0], 1e-5)
