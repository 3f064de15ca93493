"""Ranks that send messages: all-gathers that are posted, so that several are on the wire at a time."""

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL
from tests.zero_full.runs import config, data
from tests.zero_full.stage3_runs import RELEASED, Tower, seeded
from zero_full.comm.communicator import Communicator, Posted
from zero_full.comm.lane import Lane, ThreadLane
from zero_full.comm.shared_memory import SharedMemory
from zero_full.comm.transport import own_slice
from zero_full.shard.group.parameters import FlatParameters, GatherState
from zero_full.shard.passes import gather

CPU = torch.device("cpu")
SIZES, DTYPES = (1, 7, 1000, 300_000), (torch.float32, torch.bfloat16, torch.uint8)


def whole_of(rank: int, world: int, number: int) -> tuple[Tensor, Tensor]:
    """A buffer with this rank's slice only, and what it has to be."""
    numel, dtype = SIZES[number % len(SIZES)], DTYPES[number % len(DTYPES)]
    want = torch.cat([torch.full((numel,), (17 * number + r) % 100).to(dtype) for r in range(world)])
    whole = torch.zeros_like(want)
    own_slice(whole, rank, world).copy_(own_slice(want, rank, world))
    return whole, want


def many_posted(comm: Any, calls: int) -> tuple[int, int]:
    """All-gathers, up to four at a time, posted or by a lane, on ranks that dawdle; how many were right."""
    by = Communicator(dist.group.WORLD, CPU, shared_memory=False)
    lane, mine = ThreadLane(), random.Random(comm.rank)
    under_way: list[tuple[Any, Tensor, Tensor]] = []
    right = 0

    def finish(most: int) -> None:
        nonlocal right
        while len(under_way) > most:
            pending, got, want = under_way.pop(0)
            pending.wait()
            pending.wait()  # as after an interrupt
            right += torch.equal(got, want)

    for number in range(calls):
        time.sleep(mine.choice([0, 0, 0.001]))
        whole, want = whole_of(comm.rank, comm.world_size, number)
        if mine.random() < 0.7:  # ranks differ: the messages are the same
            lane.drain()
            pending: Any = by.post_all_gather(whole, "this")
        else:
            pending = lane.submit(partial(by.all_gather, whole, "this"), [whole], [])
        under_way.append((pending, whole, want))
        finish(mine.randrange(5))
    finish(0)
    lane.close()
    return right, by.traffic.sent["all_gather"]


@pytest.mark.parametrize("world", [2, 4])
def test_gathers_that_are_posted_and_those_of_a_lane_find_each_other(world: int) -> None:
    sent = sum((world - 1) * whole_of(0, world, number)[0].nbytes // world for number in range(60))
    assert POOL.run(many_posted, world, 60) == [(60, sent)] * world


def two_behind_each_other(comm: Any, drains: bool) -> bool:
    """Rank 0 gathers the first of two buffers on a lane whose thread is late, and posts the second."""
    by, lane = Communicator(dist.group.WORLD, CPU, shared_memory=False), ThreadLane()
    pairs = [whole_of(comm.rank, comm.world_size, number) for number in (0, 12)]  # of equal size
    (first, _), (second, _) = pairs

    def late() -> None:
        time.sleep(0.05)
        by.all_gather(first, "the first")

    pending: list[Any] = [lane.submit(late, [], []) if comm.rank == 0 else by.post_all_gather(first, "")]
    if drains:
        lane.drain()
    pending.append(by.post_all_gather(second, "the second"))
    for each in pending:
        each.wait()
    lane.close()
    return all(torch.equal(got, want) for got, want in pairs)


def test_a_gather_that_is_posted_waits_for_those_of_its_lane() -> None:
    assert POOL.run(two_behind_each_other, 2, True) == [True, True]
    assert POOL.run(two_behind_each_other, 2, False) == [False, False]


def test_a_lane_settles_once_its_jobs_are_done_and_raises_no_error_of_them() -> None:
    lane, done = ThreadLane(), list[int]()

    def fail() -> None:
        time.sleep(0.05)
        done.append(1)
        raise ValueError("its own")

    pending = lane.submit(fail, [], [])
    lane.drain()
    assert done == [1]
    lane.drain()
    with pytest.raises(ValueError, match="its own"):
        pending.wait()
    lane.close()


# A run -------------------------------------------------------------------------------------------

ZERO = {1: {"reduce_bucket_size": 1500}, 2: {"reduce_bucket_size": 1500}, 3: RELEASED}


class Dawdling(nn.Module):
    """A block before which a rank sometimes waits."""

    def __init__(self, block: nn.Module, pause: Callable[[], float]) -> None:
        super().__init__()
        self.block, self.pause = block, pause

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        time.sleep(self.pause())
        out: Tensor = self.block(x)
        return out


class Trained:
    """A run of one rank."""

    def __init__(self, comm: Any, stage: int, messages: bool, **keys: Any) -> None:
        model, rng = seeded(Tower), random.Random(comm.rank)
        model.blocks = nn.ModuleList(
            Dawdling(block, lambda: rng.choice([0, 0, 0.002])) for block in model.blocks
        )
        zero = {**ZERO[stage], "overlap_comm": True, **keys.pop("zero", {})}
        keys = config(stage, zero_optimization=zero, shared_memory=not messages, **keys)
        self.rank, self.engine = comm.rank, zero_full.initialize(model=model, config=keys)[0]

    def step(self, number: int) -> float:
        """One step on this rank's data."""
        dtype = self.engine.optimizer.sharded.flats[0].dtype
        loss = self.engine(data(number, 0, self.rank, dtype))
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach())

    def end(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """The parameters, and the bytes that were sent before they were gathered for this."""
        sent = dict(self.engine.traffic())
        values = self.engine.module_state_dict()
        self.engine.destroy()
        return values, sent


def trained(comm: Any, stage: int, messages: bool, ahead: int, keys: dict[str, Any]) -> Any:
    """Losses, parameters and traffic of four steps."""
    with mock.patch.object(gather, "AHEAD", ahead):
        run = Trained(comm, stage, messages, **keys)
        losses = [run.step(number) for number in range(4)]
        return losses, *run.end()


BF16 = {"bf16": {"enabled": True}}
CASES: list[tuple[int, int, int, dict[str, Any]]] = [  # ranks, stage, elements ahead, keys
    (2, 1, 1, {}),
    (3, 2, 1, BF16),
    (3, 3, 1, {}),
    (2, 3, 3000, {}),
    (3, 3, 10**9, BF16),
    (2, 3, 3000, {"zero": {"stage3_max_live_parameters": 4000}}),
    (2, 3, 3000, {"debug": {"check_collectives": True}}),
]


@pytest.mark.parametrize(("world", "stage", "ahead", "keys"), CASES)
def test_a_run_has_the_bits_of_one_in_shared_memory(
    world: int, stage: int, ahead: int, keys: dict[str, Any]
) -> None:
    by_memory = POOL.run(trained, world, stage, False, ahead, keys)
    for got, want in zip(POOL.run(trained, world, stage, True, ahead, keys), by_memory, strict=True):
        assert got[0] == want[0] and got[2] == want[2]
        assert all(torch.equal(got[1][name], want[1][name]) for name in want[1])


def most_gathered(comm: Any, ahead: int) -> list[int]:
    """The most units that are gathered or under way in the forward of three steps."""
    with mock.patch.object(gather, "AHEAD", ahead):
        run = Trained(comm, 3, True)
        most, begin = [0], FlatParameters.begin_gather

        def counted(self: FlatParameters, lane: Lane, exactly: bool = False) -> None:
            begin(self, lane, exactly)
            if not run.engine.optimizer.reducer.backward.running:
                flats = run.engine.optimizer.sharded.flats
                most[-1] = max(most[-1], sum(flat.state is not GatherState.SHARDED for flat in flats))

        with mock.patch.object(FlatParameters, "begin_gather", counted):
            for number in range(3):
                run.step(number)
                most.append(0)
        run.engine.destroy()
        return most[:-1]


def test_as_many_units_are_on_the_wire_as_make_the_elements_to_prefetch() -> None:
    for ahead, units in ((1, 1), (1000, 1), (1500, 2), (3000, 3)):  # a block has some 1,080 elements
        for most in POOL.run(most_gathered, 2, ahead):
            assert most[-1] == 1 + units


def recorded(comm: Any, path: Path) -> Any:
    """The same run, of which rank 1 records the second step, and in which it records nothing."""
    found = []
    for records in (False, True):
        run = Trained(comm, 3, True)
        losses = [run.step(0)]
        if records and comm.rank == 1:
            with run.engine.record(path):
                losses.append(run.step(1))
        else:
            losses.append(run.step(1))
        losses.append(run.step(2))
        found.append((losses, *run.end()))
    (losses, values, sent), (others, other_values, other_sent) = found
    return losses == others, sent == other_sent, all(torch.equal(values[k], other_values[k]) for k in values)


def test_a_rank_that_records_uses_its_lane_and_sends_the_same(tmp_path: Path) -> None:
    assert POOL.run(recorded, 2, tmp_path / "run.json") == [(True, True, True)] * 2


def beside_messages_of_the_user(comm: Any) -> tuple[list[float], float]:
    """Losses of a run without overlap, which uses the default group, and what rank 0 receives beside it."""
    run = Trained(comm, 3, True, zero={"overlap_comm": False})
    got, losses = torch.zeros(10_000), list[float]()
    for number in range(3):
        work = dist.irecv(got, 1) if comm.rank == 0 else None
        losses.append(run.step(number))
        if work is not None:
            work.wait()
        elif comm.rank == 1:
            dist.send(torch.full_like(got, 7.0), 0)
    run.end()
    return losses, float(got.sum())


def test_messages_of_the_user_are_not_taken_for_those_of_a_run() -> None:
    want = [each[0][:3] for each in POOL.run(trained, 2, 3, True, 1, {})]
    assert POOL.run(beside_messages_of_the_user, 2) == [(want[0], 70_000.0), (want[1], 0.0)]


def sets_a_value_in_forward(comm: Any, stage: int, messages: bool) -> list[float]:
    """Losses of steps in which a block sets the weight of a later one, which may be on its way already."""
    run = Trained(comm, stage, messages)
    weight, losses = run.engine.module.blocks[5].block.up.weight, list[float]()
    for number in range(3):
        value = torch.full(weight.shape, 0.1 * number)
        hook = run.engine.module.blocks[3].register_forward_pre_hook(
            lambda *_, value=value: zero_full.safe_set_full_fp32_param(weight, value)
        )
        losses.append(run.step(number))
        hook.remove()
    run.engine.destroy()
    return losses


@pytest.mark.parametrize("messages", [True, False])
def test_a_value_that_is_set_in_a_forward_counts_for_what_comes_after(messages: bool) -> None:
    want = POOL.run(sets_a_value_in_forward, 2, 2, messages)
    assert POOL.run(sets_a_value_in_forward, 2, 3, messages) == want


def undoes_in_forward(comm: Any) -> tuple[str, bool]:
    """A change in the middle of a forward that is undone, while a late thread gathers the next unit."""
    run, gathered = Trained(comm, 3, False), SharedMemory.all_gather
    run.step(0)
    block = run.engine.module.blocks[3].block

    def late(self: SharedMemory, whole: Tensor) -> None:
        time.sleep(0.1 * (comm.rank == 1 and threading.current_thread() is not threading.main_thread()))
        gathered(self, whole)

    def change(*_: Any) -> None:
        with zero_full.GatheredParameters([block.up.weight]), torch.no_grad():
            block.up.weight.add_(1)

    hook = block.down.register_forward_pre_hook(change)
    with mock.patch.object(SharedMemory, "all_gather", late), pytest.raises(RuntimeError) as caught:
        run.engine(data(1, 0, comm.rank))
    hook.remove()
    values = run.end()[0]
    return str(caught.value), all(bool(value.isfinite().all()) for value in values.values())


def test_a_change_is_undone_behind_the_gathers_that_are_under_way() -> None:
    for said, right in POOL.run(undoes_in_forward, 2):
        assert "blocks.3.block.up.weight changed inside GatheredParameters" in said and right


def fails_midway(comm: Any) -> Any:
    """A forward that fails on all ranks while gathers are under way, and a step after it."""
    plain = Trained(comm, 3, True)
    want = [plain.step(number) for number in range(3)], plain.end()[0]
    with mock.patch.object(gather, "AHEAD", 10**9):
        return want, *interrupted(comm)


def interrupted(comm: Any) -> Any:
    """The same steps, of which the third is interrupted at first."""
    run = Trained(comm, 3, True)
    losses = [run.step(0), run.step(1)]
    block = run.engine.module.blocks[3]
    broken = block.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError("on purpose")))
    with pytest.raises(ValueError, match="on purpose"):
        run.step(2)
    flats = run.engine.optimizer.sharded.flats
    released = all(flat.state is GatherState.SHARDED for flat in flats)
    broken.remove()
    losses.append(run.step(2))
    return released, (losses, run.end()[0])


def test_gathers_under_way_are_waited_for_when_forward_fails() -> None:
    for want, released, got in POOL.run(fails_midway, 2):
        assert released and got[0] == want[0]
        assert all(torch.equal(got[1][name], want[1][name]) for name in want[1])


def interrupted_in(comm: Any, place: str, messages: bool) -> Any:
    """KeyboardInterrupt ends a pass on all ranks; what is in use and on its way, and what a forward says."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    run = Trained(comm, 3, messages)
    run.step(0)
    block, flats = run.engine.module.blocks[3], run.engine.optimizer.sharded.flats
    hooks = {"forward": block.register_forward_pre_hook, "backward": block.register_full_backward_pre_hook}
    hook = hooks[place](interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.step(1)
    hook.remove()
    users = sum(flat.users for flat in flats)
    under_way = any(flat.state is GatherState.GATHERING for flat in flats)
    run.engine.zero_grad()
    with pytest.raises(RuntimeError) as caught:
        run.step(1)
    run.engine.destroy()
    return users, under_way, str(caught.value)


@pytest.mark.parametrize("messages", [True, False])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_ranks_gather_nothing_more_after_an_interrupt(place: str, messages: bool) -> None:
    for users, under_way, said in POOL.run(interrupted_in, 2, place, messages):
        assert not users and under_way
        assert "KeyboardInterrupt has cut a forward or backward pass short" in said


def waits_again(comm: Any, messages: bool) -> tuple[bool, bool]:
    """A wait for a gather that is interrupted; whether any are on their way then, and are right later."""
    run = Trained(comm, 3, messages)
    run.step(0)
    want = run.engine.module_state_dict()
    job = Posted if messages else type(run.engine.optimizer.lane.submit(list, [], []))
    with mock.patch.object(job, "wait", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        run.engine(data(1, 0, comm.rank))
    under_way = [f for f in run.engine.optimizer.sharded.flats if f.state is GatherState.GATHERING]
    for flat in under_way:
        flat.finish_gather()
    members = [member for flat in under_way for member in flat.members]
    right = all(torch.equal(member.param.detach(), want[member.name]) for member in members)
    run.engine.destroy()
    return len(under_way) > 0, right


@pytest.mark.parametrize("messages", [True, False])
def test_a_gather_whose_wait_is_interrupted_keeps_its_memory_and_is_waited_for_later(messages: bool) -> None:
    assert POOL.run(waits_again, 2, messages) == [(True, True)] * 2
