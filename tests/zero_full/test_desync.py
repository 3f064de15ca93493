"""Ranks that part ways, come late, fail or die: everyone ends, and says what it was waiting for."""

import gc
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn  # torch imports it late; its default arguments would keep a job's group alive
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL, RankError
from tests.zero_full.runs import Net, assert_same, config, data, run, train
from zero_full.comm.communicator import Communicator
from zero_full.comm.desync import CallCheck
from zero_full.errors import CommunicationError, DesyncError

CPU = torch.device("cpu")
CHECK = {"check_collectives": True, "timeout_s": 10}


def checked(timeout_s: float = 10) -> Communicator:
    return Communicator(dist.group.WORLD, CPU, check_timeout_s=timeout_s)


def said(body: Callable[[], Any]) -> str:
    """What `body` says of ranks that differ, or what it returns."""
    try:
        return str(body())
    except (DesyncError, zero_full.DisagreementError) as error:
        return f"{type(error).__name__}: {error}"


# Different calls ---------------------------------------------------------------------------------


def usual(by: Communicator) -> None:
    by.all_gather(torch.zeros(12), "layer a")


def other_label(by: Communicator) -> None:
    by.all_gather(torch.zeros(12), "layer b")


def other_size(by: Communicator) -> None:
    by.all_gather(torch.zeros(24), "layer a")


def other_dtype(by: Communicator) -> None:
    by.all_gather(torch.zeros(12, dtype=torch.bfloat16), "layer a")


def other_kind(by: Communicator) -> None:
    by.all_reduce(torch.zeros(12), 1, "layer a")


def other_numbers(by: Communicator) -> None:
    by.sum_numbers(torch.zeros(2), "norm")


def part_ways(comm: Any, last_ranks: Callable[[Communicator], None]) -> str:
    by = checked()
    usual(by)
    return said(lambda: (last_ranks if comm.rank == comm.world_size - 1 else usual)(by))


@pytest.mark.parametrize(
    ("other", "theirs"),
    [
        (other_label, "all_gather of layer b: 12 x float32"),
        (other_size, "all_gather of layer a: 24 x float32"),
        (other_dtype, "all_gather of layer a: 12 x bfloat16"),
        (other_kind, "all_reduce of layer a: 12 x float32"),
        (other_numbers, "sum of norm: 2 x float32"),
    ],
)
@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_names_both_sides_of_a_difference(
    world: int, other: Callable[[Communicator], None], theirs: str
) -> None:
    answers = POOL.run(part_ways, world, other, collective=5)
    assert len(set(answers)) == 1
    lines = answers[0].splitlines()
    assert re.fullmatch(r"DesyncError: the ranks disagree at collective call \d+:", lines[0])
    ours = [f"  rank {rank}: all_gather of layer a: 12 x float32" for rank in range(world - 1)]
    assert lines[1:] == [*ours, f"  rank {world - 1}: {theirs}"]


# Absent and late ---------------------------------------------------------------------------------


def last_rank_comes(comm: Any, late: float | None, calls_before: int) -> tuple[str, float]:
    """One rank comes after so many seconds, or never; the others wait a second."""
    by = checked(timeout_s=1)
    for _ in range(calls_before):
        usual(by)
    start = time.monotonic()
    if comm.rank == comm.world_size - 1:
        if late is None:
            return "never came", 0.0
        time.sleep(late)
    return said(lambda: other_label(by)), time.monotonic() - start


def test_a_rank_that_never_comes_is_named_with_where_it_was_last_seen() -> None:
    *others, (absent, _) = POOL.run(last_rank_comes, 3, None, 1)
    assert absent == "never came"
    for said_here, seconds in others:
        assert "  rank 0: call 3, all_gather of layer b: 12 x float32" in said_here.splitlines()
        last = "rank 2: did not come within 1 s; last seen at call 2, all_gather of layer a: 12 x float32"
        assert said_here.splitlines()[-1].strip() == last
        assert 1 <= seconds < 5


def test_a_rank_that_comes_late_fails_with_the_same_words() -> None:
    answers = POOL.run(last_rank_comes, 3, 2.0, 1, collective=5)
    assert len({text for text, _ in answers}) == 1
    assert "rank 2: did not come within 1 s" in answers[0][0]
    assert answers[2][1] < 5


def comes_while_the_other_gives_up(comm: Any) -> str:
    by = checked(timeout_s=1)
    usual(by)
    slow = CallCheck._describe

    def write_slowly(self: CallCheck, number: int, call: str) -> str:
        time.sleep(0.4)
        return slow(self, number, call)

    if comm.rank == 1:
        time.sleep(1.3)  # after the other's patience, before it has written its complaint
    with mock.patch.object(CallCheck, "_describe", write_slowly):
        return said(lambda: usual(by))


def test_a_rank_that_comes_in_the_last_moment_has_the_same_fate_as_the_others() -> None:
    first, second = POOL.run(comes_while_the_other_gives_up, 2, collective=5)
    assert first == second


# Several groups, several engines -----------------------------------------------------------------


def two_groups_of_the_same_ranks(comm: Any) -> str:
    one, two = checked(), checked()
    for call in range(6):
        usual(one)
        if call:
            other_size(two)
    return said(lambda: (usual if comm.rank == 0 else other_label)(two))


def test_groups_of_the_same_ranks_are_compared_each_with_itself() -> None:
    for answer in POOL.run(two_groups_of_the_same_ranks, 2):
        assert answer.startswith("DesyncError: the ranks disagree at collective call 7:")


def goes_on_after_a_difference(comm: Any) -> list[str]:
    by = checked()
    said(lambda: (usual if comm.rank == 0 else other_label)(by))
    return [said(partial(usual, each)) for each in (by, checked())]


def test_a_difference_that_was_caught_does_not_poison_later_calls() -> None:
    assert POOL.run(goes_on_after_a_difference, 2) == [["None", "None"]] * 2


def keys_in_the_store(comm: Any) -> list[int]:
    by, found = checked(), []
    assert by.call_check is not None
    for _ in range(3):
        for _ in range(10):
            usual(by)
        comm.barrier()
        found.append(int(by.call_check.store.num_keys()))
        comm.barrier()
    return found


def asked_of_the_store(comm: Any) -> int:
    """How often a rank that need not wait talks to the store in a call."""
    by, asked = checked(), list[str]()
    assert by.call_check is not None
    usual(by)
    store = mock.Mock(wraps=by.call_check.store)
    by.call_check.store = store
    if comm.rank == comm.world_size - 1:
        time.sleep(0.5)
    usual(by)
    asked += [name for name, *_ in store.method_calls]
    return len(asked)


def test_a_check_asks_the_store_as_often_however_many_ranks_there_are() -> None:
    assert POOL.run(asked_of_the_store, 2)[-1] == POOL.run(asked_of_the_store, 4)[-1]


def test_the_store_does_not_grow_with_the_number_of_calls() -> None:
    first, *later = POOL.run(keys_in_the_store, 2)[0]
    assert later == [first, first]


# Through the engine ------------------------------------------------------------------------------


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers.append(nn.Linear(3, 3))


def differs(comm: Any, how: str) -> str:
    keys: dict[str, Any] = {"debug": CHECK}
    if how == "buckets" and comm.rank == 1:
        keys["zero_optimization"] = {"reduce_bucket_size": 200}
    model = Wider if how == "model" and comm.rank == 1 else Net
    return said(lambda: train(comm, config(2, **keys), steps=1, model=model))


@pytest.mark.parametrize("how", ["model", "buckets"])
def test_ranks_with_different_models_or_buckets_fail_together_at_the_start(how: str) -> None:
    for answer in POOL.run(differs, 3, how, collective=10):
        assert answer.startswith("DisagreementError: models, optimizers or arguments differ between ranks:\n")
        if how == "buckets":
            assert "zero_optimization.reduce_bucket_size: 100 on ranks 0, 2; 200 on rank 1" in answer
        else:
            assert (
                "parameter 6: absent on ranks 0, 2; layers.5.weight, torch.float32 of shape (3, 3)" in answer
            )


class Skipping(Net):
    """Rank 1 steps over its middle layer, so it makes the same calls: a lawful difference."""

    def forward(self, x: Tensor) -> Tensor:
        layers = [self.layers[0], self.layers[4]] if dist.get_rank() == 1 else self.layers
        for layer in layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_check_changes_no_bit_and_lets_lawful_runs_pass(stage: int, overlap: bool) -> None:
    zero = {"overlap_comm": overlap}
    plain = run(3, config(stage, zero_optimization=zero), model=Skipping)
    check = run(3, config(stage, zero_optimization=zero, debug=CHECK), model=Skipping)
    assert_same(check[0].parameters, plain[0].parameters)
    assert check[1].losses == plain[1].losses and check[2].traffic == plain[2].traffic


class Failing(Net):
    """On rank 1, the second forward does what `how` says."""

    how: Callable[[], Any]

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if dist.get_rank() == 1 and self.calls == 2:
            type(self).how()
        return super().forward(x)


def a_bug() -> None:
    raise KeyError("a bug in the user's model")


def a_long_pause() -> None:
    time.sleep(3.5)
    raise KeyError("only now")


def death() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def one_fails(comm: Any, how: Callable[[], None], keys: dict[str, Any]) -> tuple[str, float]:
    """How this rank ended, and after how many seconds."""
    Failing.how = staticmethod(how)
    start = time.monotonic()
    answer = how_it_ends(comm.rank, keys), time.monotonic() - start
    gc.collect()  # the last reference to a group closes its connections, as the end of a process would
    return answer


def how_it_ends(rank: int, keys: dict[str, Any]) -> str:
    engine, _, _, _ = zero_full.initialize(model=Failing(), config=config(2, **keys))
    try:
        for step in range(3):
            engine.backward(engine(data(step, 0, rank)))
            engine.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        with suppress(CommunicationError):  # what is under way cannot end well
            engine.destroy()
    return "fine"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_bug_in_one_ranks_model_ends_the_others_with_what_they_waited_for(overlap: bool) -> None:
    keys = {"zero_optimization": {"overlap_comm": overlap}}
    answers = POOL.run(one_fails, 3, a_bug, keys, collective=20)
    assert answers[1][0].startswith("KeyError")
    for rank in (0, 2):
        text, seconds = answers[rank]
        assert text.startswith(f"CommunicationError: rank {rank}: reduce_scatter of gradients layers.4")
        assert "check_collectives" in text and "another rank has failed first" in text
        assert seconds < 15


@pytest.mark.parametrize(
    "zero",
    [{}, {"mics_shard_size": 2}, {"overlap_comm": True}],
    ids=["the user's group", "groups of MiCS", "groups for overlap"],
)
def test_a_rank_that_hangs_ends_the_others_at_the_users_timeout(zero: dict[str, Any]) -> None:
    answers = POOL.run(one_fails, 2, a_long_pause, {"zero_optimization": zero}, collective=2, limit=15)
    text, seconds = answers[0]
    assert text.startswith("CommunicationError: rank 0: reduce_scatter of gradients layers.4")
    assert "imed out" in text and seconds >= 2


def test_with_the_check_on_the_rank_with_the_bug_is_named() -> None:
    answers = POOL.run(one_fails, 3, a_bug, {"debug": {**CHECK, "timeout_s": 2}}, collective=20)
    for rank in (0, 2):
        text, seconds = answers[rank]
        assert text.startswith("DesyncError") and seconds < 15
        assert "  rank 1: did not come within 2 s; last seen at call" in text
        assert f"  rank {rank}: call" in text and "reduce_scatter of gradients layers.4" in text


def absent_at_the_start(comm: Any, keys: dict[str, Any]) -> str:
    if comm.rank == 1:
        return "left"
    try:
        zero_full.initialize(model=Net(), config=config(1, **keys))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


@pytest.mark.parametrize("keys", [{}, {"debug": {**CHECK, "timeout_s": 2}}], ids=["plain", "checked"])
def test_a_rank_that_never_calls_initialize_ends_the_others(keys: dict[str, Any]) -> None:
    first, left, third = POOL.run(absent_at_the_start, 3, keys, collective=5)
    assert left == "left"
    for text in (first, third):
        if keys:
            assert "ranks [1] have not called initialize within 2 s" in text
        else:
            assert re.match(r"CommunicationError: rank \d: all_gather_object in initialize", text)


def one_is_killed(comm: Any) -> None:
    Failing.how = staticmethod(death)
    train(comm, config(2), model=Failing)


def test_a_rank_that_is_killed_ends_the_others_at_once() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1: the process died") as caught:
        POOL.run(one_is_killed, 3, collective=30)
    for rank in (0, 2):
        wanted = rf"^rank {rank}: CommunicationError: rank {rank}: reduce_scatter of gradients layers.4"
        assert re.search(wanted, str(caught.value), re.MULTILINE)
    assert time.monotonic() - start < 25


def test_an_error_without_words_is_reported_like_any_other() -> None:
    def fail() -> None:
        raise RuntimeError

    with pytest.raises(CommunicationError, match="rank 0: sum of norm on 1 ranks failed: RuntimeError"):
        Communicator(None, CPU)._call("sum", "norm", torch.zeros(1), 0, fail)
