"""Buffers whose average is compressed: what is in them, and what of it travels."""

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from zero_full.comm.communicator import Communicator
from zero_full.comm.compressed import CompressedReduce

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
MASKS: dict[str, Callable[[int], Tensor]] = {
    "some": lambda numel: torch.arange(numel) % 3 != 1,
    "the first half": lambda numel: torch.arange(numel) < numel // 2,
    "nothing": lambda numel: torch.zeros(numel, dtype=torch.bool),
    "everything": lambda numel: torch.ones(numel, dtype=torch.bool),
}


class Case(NamedTuple):
    """A buffer, and what is averaged of it."""

    numel: int
    tensors: tuple[tuple[int, int], ...] | None = None
    mask: str = ""
    dtype: torch.dtype = FP32
    l1: bool = False
    size: float = 1.0  # of the numbers


UNEVEN = ((0, 300), (300, 300), (300, 301), (301, 1000))  # one is empty, one a number
GAPS = ((3, 20), (32, 33), (33, 80), (96, 96))  # aligned, so to say, and padding behind
TINY = tuple((i, i + 1) for i in range(40))
CASES = [
    *(Case(numel) for numel in (0, 1, 2, 3, 7, 8, 9, 31, 33, 1000)),
    *(Case(1000, UNEVEN, dtype=dtype, l1=l1) for dtype, l1 in product((FP32, BF16, FP16), (False, True))),
    *(Case(100, GAPS, mask) for mask in ("", *MASKS)),
    *(Case(100, None, mask, BF16) for mask in MASKS),
    *(Case(40, TINY), Case(40, TINY, "some", l1=True), Case(40, ()), Case(2, ((0, 1), (1, 2)))),
    *(Case(1000, UNEVEN, size=size) for size in (0.0, 1e-30, 1e15)),
    Case(40_000, ((0, 9), (9, 30_000), (30_000, 39_999))),  # more than a thread takes at a time
]


def mask_of(case: Case) -> Tensor | None:
    return MASKS[case.mask](case.numel) if case.mask else None


def given(case: Case, rank: int, number: int) -> Tensor:
    """What a rank wants to have averaged in a round: a drift, and noise of its own."""
    drift = torch.Generator().manual_seed(case.numel)
    noise = torch.Generator().manual_seed(1000 + 100 * number + rank)
    common = torch.randn(case.numel, generator=drift)
    return (case.size * (common + torch.randn(case.numel, generator=noise))).to(case.dtype)


def reduce_of(comm: Communicator, case: Case) -> CompressedReduce:
    return CompressedReduce(comm, case.numel, case.tensors, mask_of(case), case.l1)


def tensors_of(case: Case) -> Tensor:
    """For each element the number of its tensor, or -1 if it does not travel."""
    numbers = torch.full((case.numel,), -1)
    for tensor, (start, stop) in enumerate([(0, case.numel)] if case.tensors is None else case.tensors):
        numbers[start:stop] = tensor
    mask = mask_of(case)
    return numbers if mask is None else numbers.masked_fill(~mask, -1)
