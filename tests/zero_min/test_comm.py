"""The collectives, on threads and on processes, and what happens when ranks disagree."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import Tensor

from tests.worlds import POOL, RankError, run_in
from zero_min import run_world
from zero_min.comm import Comm, WorldError

PLACES = ["threads", "processes"]


def numbers(rank: int, n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.arange(n, dtype=dtype) + 10 * rank


def every_collective(comm: Comm) -> dict[str, Tensor]:
    N, rank = comm.world_size, comm.rank
    whole = torch.zeros(3 * N, dtype=torch.float64)
    parts = [numbers(rank, 1 + j) for j in range(N)]  # part j has j + 1 elements
    return {
        "all_reduce": comm.all_reduce(numbers(rank, 5)),
        "reduce_scatter": comm.reduce_scatter(parts),
        "all_gather": comm.all_gather(whole, numbers(rank, 3)),
        "all_to_all": torch.cat(comm.all_to_all(parts)),
        "broadcast": comm.broadcast(numbers(rank, 2), source=N - 1),
        "sent": torch.tensor(list(comm.ledger.sent.values())),
    }


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("N", [1, 2, 3, 4])
def test_collectives_do_what_they_say(place: str, N: int) -> None:
    for rank, got in enumerate(run_in(place, every_collective, N)):
        offsets = 10 * sum(range(N))
        assert torch.equal(got["all_reduce"], N * numbers(0, 5) + offsets)
        assert torch.equal(got["reduce_scatter"], N * numbers(0, 1 + rank) + offsets)
        assert torch.equal(got["all_gather"], torch.cat([numbers(r, 3) for r in range(N)]))
        assert torch.equal(got["all_to_all"], torch.cat([numbers(r, 1 + rank) for r in range(N)]))
        assert torch.equal(got["broadcast"], numbers(N - 1, 2))


@pytest.mark.parametrize("N", [1, 2, 3, 4])
def test_threads_and_processes_send_the_same_bytes(N: int) -> None:
    sent = [[got["sent"].tolist() for got in run_in(place, every_collective, N)] for place in PLACES]
    assert sent[0] == sent[1]
    all_reduce = [each[0] for each in sent[0]]
    assert sum(all_reduce) == 2 * (N - 1) * 5 * 8  # all ranks together: twice the tensor, N-1 times


COLLECTIVES = {
    "all_reduce": lambda comm, t: comm.all_reduce(t),
    "reduce_scatter": lambda comm, t: comm.reduce_scatter([t, t]),
    "all_to_all": lambda comm, t: comm.all_to_all([t, t]),
    "all_gather": lambda comm, t: comm.all_gather(torch.zeros(24), t),
    "all_gather, into it": lambda comm, t: comm.all_gather(t, torch.zeros(6)),
    "broadcast": lambda comm, t: comm.broadcast(t),
}


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize(("nbytes", "remedy"), [(0, "resize_ it first"), (12, "bytes, not elements")])
def test_memory_that_is_not_there_is_refused(name: str, nbytes: int, remedy: str) -> None:
    def call(comm: Comm) -> None:
        tensor = torch.zeros(12)
        tensor.untyped_storage().resize_(nbytes)
        COLLECTIVES[name](comm, tensor)

    message = rf"{name.partition(',')[0]}: a storage has {nbytes} bytes, 48 are needed: .*{remedy}"
    with pytest.raises(WorldError, match=message):
        run_world(call, 2)


def test_a_view_needs_only_the_memory_up_to_its_end() -> None:
    def call(comm: Comm) -> list[float]:
        flat = torch.arange(12.0)
        front = flat[:6]
        flat.untyped_storage().resize_(24)
        comm.all_gather(torch.zeros(12), flat[3:6].repeat(2))
        return comm.all_reduce(front).tolist()

    assert run_world(call, 2) == [[0.0, 2.0, 4.0, 6.0, 8.0, 10.0]] * 2


def gather_in_place(comm: Comm) -> Tensor:
    whole = torch.zeros(2 * comm.world_size)
    mine = whole[2 * comm.rank : 2 * comm.rank + 2]
    mine += comm.rank + 1
    return comm.all_gather(whole, mine)


@pytest.mark.parametrize("place", PLACES)
def test_all_gather_may_fill_the_tensor_it_reads(place: str) -> None:
    for got in run_in(place, gather_in_place, 3):
        assert got.tolist() == [1, 1, 2, 2, 3, 3]


def wait_again(comm: Comm) -> list[float]:
    """One rank waits twice; the second time nothing travels, and nobody is met."""
    whole = torch.zeros(2 * comm.world_size)
    handle = comm.start_all_gather(whole, torch.full((2,), comm.rank + 1.0))
    handle.wait()
    got = whole.tolist()
    whole.zero_()
    if comm.rank == 0:
        handle.wait()
    comm.barrier()
    return got + whole.tolist()


@pytest.mark.parametrize("place", PLACES)
def test_a_handle_is_waited_for_once(place: str) -> None:
    assert run_in(place, wait_again, 2) == [[1, 1, 2, 2, 0, 0, 0, 0]] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sixteen_bit_sums_are_rounded_once(dtype: torch.dtype) -> None:
    def add(comm: Comm) -> Tensor:
        return comm.reduce_scatter([torch.full((1,), 1.0 if comm.rank else 256.0, dtype=dtype)] * 4)

    # 256 + 1 + 1 + 1 = 259; adding one by one in bf16 would stay at 256.
    want = torch.tensor(259.0).to(dtype)
    assert all(got.item() == want.item() for got in run_world(add, 4))


def test_unequal_parts_and_strided_tensors_are_refused_with_the_remedy() -> None:
    with pytest.raises(WorldError, match=r"2 ranks x 2 elements do not fill 5; pad"):
        run_world(lambda comm: comm.all_gather(torch.zeros(5), torch.zeros(2)), 2)
    with pytest.raises(WorldError, match=r"all_reduce needs contiguous memory.*\.contiguous\(\)"):
        run_world(lambda comm: comm.all_reduce(torch.zeros(2, 3).t()), 2)


def test_every_rank_needs_a_part() -> None:
    with pytest.raises(WorldError, match="1 parts for 2 ranks: give every rank one"):
        run_world(lambda comm: comm.reduce_scatter([torch.zeros(1)]), 2)


def test_an_exception_in_one_rank_ends_the_world_and_names_it() -> None:
    def body(comm: Comm) -> None:
        if comm.rank == 2:
            raise KeyError("lost")
        comm.all_reduce(torch.zeros(1))

    start = time.monotonic()
    with pytest.raises(WorldError, match=r"rank 2 of 4: KeyError: 'lost'") as caught:
        run_world(body, 4)
    assert isinstance(caught.value.__cause__, KeyError)
    assert time.monotonic() - start < 5  # nobody waited for the timeout


def test_different_calls_are_named_on_both_sides() -> None:
    def body(comm: Comm) -> None:
        if comm.rank == 0:
            comm.all_reduce(torch.zeros(3))
        else:
            comm.all_gather(torch.zeros(4), torch.zeros(2))

    with pytest.raises(WorldError, match="made different calls") as caught:
        run_world(body, 2)
    message = str(caught.value)
    assert "rank 0: all_reduce([3] float32) at test_comm.py:" in message
    assert "rank 1: all_gather([2] float32) at test_comm.py:" in message


@pytest.mark.parametrize("shape", [(4,), (3, 1)])
def test_different_shapes_are_different_calls(shape: tuple[int, ...]) -> None:
    def body(comm: Comm) -> None:
        comm.all_reduce(torch.zeros((3,) if comm.rank else shape))

    with pytest.raises(WorldError, match="made different calls"):
        run_world(body, 2)


def test_a_rank_that_returns_early_is_named_at_once() -> None:
    def body(comm: Comm) -> None:
        comm.barrier()
        if comm.rank != 1:
            comm.all_reduce(torch.zeros(1))

    start = time.monotonic()
    with pytest.raises(WorldError, match=r"rank \[1\] never arrived") as caught:
        run_world(body, 3)
    assert "rank 1: returned; its last call: barrier()" in str(caught.value)
    assert re.search(r"rank [02]: waits in all_reduce\(\[1\] float32\) at test_comm.py", str(caught.value))
    assert time.monotonic() - start < 5


def test_a_rank_that_never_arrives_is_named_after_the_timeout() -> None:
    free = threading.Event()

    def body(comm: Comm) -> None:
        if comm.rank == 1:
            free.wait(30)
        comm.all_reduce(torch.zeros(1))

    start = time.monotonic()
    with pytest.raises(WorldError, match=r"rank \[1\] never arrived \(limit 0.3 s\)") as caught:
        run_world(body, 3, timeout=0.3)
    free.set()
    assert time.monotonic() - start < 5  # the busy rank is not waited for
    assert "rank 1: had not come yet; its last call: has made no collective call yet" in str(caught.value)


def test_an_interrupt_wakes_ranks_that_wait_for_each_other() -> None:
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    free = threading.Event()
    woken: list[str] = []

    def body(comm: Comm) -> None:
        try:
            if comm.rank == 0:
                signal.raise_signal(signal.SIGINT)  # as a notebook's stop button does
                free.wait(5)
            comm.barrier()
        except WorldError:
            woken.append("rank")
            raise

    try:
        with pytest.raises(KeyboardInterrupt):
            run_world(body, 2)
    finally:
        signal.signal(signal.SIGINT, usual)
        free.set()
    for _ in range(100):
        if woken:
            break
        time.sleep(0.05)
    assert woken


def test_a_thousand_collectives_and_a_hundred_worlds_leave_nothing_behind() -> None:
    def body(comm: Comm) -> float:
        total = torch.ones(2)
        for _ in range(250):
            comm.all_reduce(total).div_(comm.world_size)
        return float(total.sum())

    before = threading.active_count()
    assert run_world(body, 4) == [2.0] * 4
    for _ in range(100):
        run_world(lambda comm: comm.barrier(), 3)
    assert threading.active_count() == before


def test_a_world_needs_a_rank() -> None:
    with pytest.raises(ValueError, match="at least one rank, got world_size=0"):
        run_world(lambda comm: None, 0)


def processes_disagree(comm: Comm) -> None:
    if comm.rank == 0:
        comm.all_reduce(torch.zeros(3))
    else:
        comm.barrier()
        comm.barrier()


def process_is_absent(comm: Comm) -> None:
    comm.barrier()
    if comm.rank == 1:
        time.sleep(8)
    comm.all_reduce(torch.zeros(3))


def process_dies(comm: Comm) -> None:
    comm.barrier()
    if comm.rank == 1:
        os._exit(3)
    comm.all_reduce(torch.zeros(3))


def test_processes_that_disagree_say_where_each_stands() -> None:
    with pytest.raises(RankError) as caught:
        POOL.run(processes_disagree, 2, collective=3)
    message = str(caught.value)
    assert "call 1, all_reduce([3] float32) at test_comm.py" in message
    assert "barrier() at test_comm.py" in message


def test_a_process_that_never_arrives_is_named() -> None:
    with pytest.raises(RankError) as caught:
        POOL.run(process_is_absent, 2, collective=2)
    assert "rank 1: was not heard of (absent or dead)" in str(caught.value)


def test_a_killed_process_ends_the_others_and_the_pool_recovers() -> None:
    with pytest.raises(RankError, match="rank 1: the process died"):
        POOL.run(process_dies, 3, collective=5)
    assert POOL.run(gather_in_place, 2)[0].tolist() == [1, 1, 2, 2]


JOIN = "from zero_min import DistComm; DistComm.from_env(timeout=20)"


def test_a_port_in_use_is_named_with_the_remedy() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        run = subprocess.run(
            [sys.executable, "-c", JOIN],
            env={**os.environ, **place},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert run.returncode != 0
    assert f"cannot use 127.0.0.1:{port}" in run.stderr
    assert "torchrun --master-port" in run.stderr


def test_a_missing_launcher_is_named() -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    run = subprocess.run([sys.executable, "-c", JOIN], env=env, capture_output=True, text=True, timeout=60)
    assert "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set: start this with torchrun" in run.stderr


def test_a_rank_that_comes_when_another_has_returned_waits_for_nobody() -> None:
    def body(comm: Comm) -> None:
        if comm.rank == 1:
            while 0 not in comm.world.finished:  # type: ignore[attr-defined]
                time.sleep(0.01)
            comm.all_reduce(torch.zeros(1))

    start = time.monotonic()
    with pytest.raises(WorldError, match=r"rank \[0\] never arrived"):
        run_world(body, 2)
    assert time.monotonic() - start < 5
