"""How stage 3 keeps one parameter: what gather and release promise; lesson 3 gives both to the learner."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from zero_min import WorldError, run_world, stage3
from zero_min.comm import Comm

VALUES = [1.0, 2.0, 3.0, 4.0, 5.0]


def sliced(comm: Comm, shape: tuple[int, ...] = (5,)) -> tuple[nn.Parameter, Any]:
    """A parameter that differs between ranks, and what looks after it. Rank 0 has 1, 2, 3, ..."""
    param = nn.Parameter((torch.arange(1.0, math.prod(shape) + 1) + 10 * comm.rank).view(shape))
    return param, stage3.Sliced("weight", param, comm)


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
