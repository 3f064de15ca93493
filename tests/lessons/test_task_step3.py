"""Lesson 3's tasks, one claim at a time; a learner's file takes the place of zero_min.stage3."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero_min import WorldError, run_world, stage3
from zero_min.comm import Comm

VALUES = [1.0, 2.0, 3.0, 4.0, 5.0]


def sliced(comm: Comm, shape: tuple[int, ...] = (5,)) -> tuple[nn.Parameter, Any]:
    """A parameter that differs between ranks, and what looks after it. Rank 0 has 1, 2, 3, ..."""
    numel = math.prod(shape)
    param = nn.Parameter((torch.arange(1.0, numel + 1) + 10 * comm.rank).view(shape))
    s = stage3.Sliced("weight", param, comm)
    got = s.mine.untyped_storage().nbytes()  # reading a view of memory that is gone would end the process
    size = 4 * -(-numel // comm.world_size)
    assert got == size, f"bytes behind the own slice: expected {size} (a copy: .clone()), got {got}"
    return param, s


def test_slice_is_a_copy_that_does_not_go_with_the_whole() -> None:
    got = run_world(lambda comm: sliced(comm)[1].mine.untyped_storage().nbytes(), 2)
    assert got == [12, 12], f"bytes behind the own slices of 3 floats: expected [12, 12], got {got}"


@pytest.mark.parametrize("world", [2, 3])
def test_slice_cuts_equally_and_pads_with_zeros(world: int) -> None:
    got = run_world(lambda comm: sliced(comm)[1].mine.tolist(), world)
    size = -(-5 // world)
    padded = VALUES + [0.0] * (size * world - 5)
    expected = [padded[rank * size : (rank + 1) * size] for rank in range(world)]
    assert got == expected, f"own slices of 1..5 on {world} ranks: expected {expected}, got {got}"


def test_slice_starts_everyone_from_rank_0s_values() -> None:
    got = run_world(lambda comm: sliced(comm)[1].mine.tolist(), 2)[1]
    assert got == [4.0, 5.0, 0.0], f"rank 1's slice: expected rank 0's [4.0, 5.0, 0.0], got {got}"


def test_gather_makes_the_parameter_whole_in_its_shape() -> None:
    def body(comm: Comm) -> tuple[list[int], list[float], int]:
        param, s = sliced(comm, shape=(2, 3))
        s.gather()
        return list(param.shape), param.flatten().tolist(), comm.ledger.sent["all_gather"]

    for rank, (shape, values, sent) in enumerate(run_world(body, 4)):
        assert shape == [2, 3], f"rank {rank}: expected shape [2, 3], got {shape}"
        assert values == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], f"rank {rank}: expected 1..6, got {values}"
        assert sent == 24, f"rank {rank}: expected 3 x 8 bytes sent by the all_gather, got {sent}"


def test_gather_brings_new_values_after_a_step() -> None:
    def body(comm: Comm) -> list[float]:
        param, s = sliced(comm)
        s.mine.mul_(2)
        s.gather()
        return param.tolist()

    for rank, got in enumerate(run_world(body, 2)):
        assert got == [2.0, 4.0, 6.0, 8.0, 10.0], f"rank {rank}: expected the doubled slices, got {got}"


def test_gather_refills_the_same_storage() -> None:
    def body(comm: Comm) -> tuple[bool, list[float]]:
        param, s = sliced(comm)
        storage = s.flat.untyped_storage()._cdata
        s.gather()
        saved = param.detach().view(5)  # what autograd keeps for backward
        s.release()
        s.gather()
        same = s.flat.untyped_storage()._cdata == storage and param.data_ptr() == saved.data_ptr()
        return same, saved.tolist() if same else []

    for rank, (same, values) in enumerate(run_world(body, 2)):
        assert same, f"rank {rank}: expected one storage for life (resize_), got a new one"
        assert values == VALUES, f"rank {rank}: expected a saved view to read {VALUES}, got {values}"


def test_gather_names_the_weight_so_that_ranks_that_part_ways_notice() -> None:
    def body(comm: Comm) -> None:
        s = sliced(comm)[1]
        s.name = f"layer{comm.rank}.weight"
        s.gather()

    with pytest.raises(WorldError) as caught:
        run_world(body, 2)
    got = str(caught.value)
    assert "of layer1.weight" in got, f"expected an error that names each rank's weight (label), got {got}"


def test_release_keeps_the_shape_and_reads_nan() -> None:
    def body(comm: Comm) -> tuple[list[int], bool, int]:
        param = nn.Parameter(torch.ones(2, 3))
        stage3.Sliced("weight", param, comm)
        return list(param.shape), bool(param.isnan().all()), param.untyped_storage().nbytes()

    for rank, (shape, nan, nbytes) in enumerate(run_world(body, 2)):
        assert shape == [2, 3], f"rank {rank}: expected the released shape [2, 3], got {shape}"
        assert nan, f"rank {rank}: expected a released parameter to read NaN, got other values"
        assert nbytes == 4, f"rank {rank}: expected one NaN of 4 bytes behind it, got {nbytes} bytes"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_release_keeps_the_dtype(dtype: torch.dtype) -> None:
    def body(comm: Comm) -> torch.dtype:
        param = nn.Parameter(torch.ones(3, dtype=dtype))
        stage3.Sliced("weight", param, comm)
        return param.dtype

    got = run_world(body, 2)
    assert got == [dtype] * 2, f"a released parameter of {dtype}: expected {dtype}, got {got}"


def test_release_gives_the_memory_back() -> None:
    def body(comm: Comm) -> list[int]:
        _, s = sliced(comm)
        sizes = [s.flat.untyped_storage().nbytes()]
        s.gather()
        sizes.append(s.flat.untyped_storage().nbytes())
        s.release()
        return [*sizes, s.flat.untyped_storage().nbytes()]

    got = run_world(body, 2)[0]
    expected = [0, 24, 0]
    assert got == expected, f"bytes released, gathered, released: expected {expected}, got {got}"


def reduce(comm: Comm, times: int) -> tuple[list[float], Tensor | None, int]:
    """Ranks 0, 1, ... bring gradients of 1, 2, ... times the element's number."""
    param, s = sliced(comm)
    s.gather()
    for _ in range(times):
        param.grad = torch.tensor(VALUES) * (comm.rank + 1)
        s.reduce_gradient()
    return s.grad.tolist(), param.grad, comm.ledger.sent["reduce_scatter"]


def test_reduce_gives_each_rank_the_average_of_its_slice() -> None:
    got = [answer[0] for answer in run_world(reduce, 2, 1)]
    expected = [[1.5, 3.0, 4.5], [6.0, 7.5, 0.0]]
    assert got == expected, f"own gradients of 2 ranks: expected {expected}, got {got}"


def test_reduce_adds_micro_batches_up() -> None:
    got = [answer[0] for answer in run_world(reduce, 2, 3)]
    expected = [[4.5, 9.0, 13.5], [18.0, 22.5, 0.0]]
    assert got == expected, f"own gradients after 3 micro-batches: expected {expected}, got {got}"


def test_reduce_frees_the_whole_gradient() -> None:
    got = [answer[1] for answer in run_world(reduce, 2, 1)]
    assert got == [None, None], f"the parameter's gradient afterwards: expected None, got {got}"


def test_reduce_sends_only_what_others_own() -> None:
    got = [answer[2] for answer in run_world(reduce, 2, 1)]
    assert got == [12, 12], f"bytes sent by rank 0 and 1: expected [12, 12], got {got}"
