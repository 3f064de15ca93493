"""What the tests of all operators share: where to run them, and on what."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zero_full.kernels.load import load, operators

CPU = torch.device("cpu")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
NUMBERS = (FP32, BF16, FP16)
NAN, INF = float("nan"), float("inf")
SIZES = (0, 1, 7, 8, 9, 31, 64, 1000, 2**14 - 1, 2**14, 2**14 + 1, 100_003)


def ops() -> Any:
    """The compiled operators; here they must be there."""
    loaded = load(CPU)
    assert loaded.path is not None, f"the CPU's operators could not be built: {loaded.reason}"
    return operators(CPU)


def levels() -> list[int]:
    """The instruction sets of this machine: 2, 3, 4 for x86-64-v2 and so on."""
    best = _best_level()
    return [level for level in (2, 3, 4) if level <= best]


def _best_level() -> int:
    for level in (4, 3):
        try:
            with machine(level, 1):
                return level
        except RuntimeError:
            continue
    return 2


@contextmanager
def machine(level: int, threads: int) -> Iterator[None]:
    """On this instruction set with so many threads."""
    before = ops().cpu_isa(0), torch.get_num_threads()
    ops().cpu_isa(level)
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        ops().cpu_isa(before[0])
        torch.set_num_threads(before[1])


def bits(tensor: Tensor) -> Tensor:
    """The bytes."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.to(torch.uint8)


def same(one: Tensor, other: Tensor) -> bool:
    """All bits, but any NaN for any other: which of two NaN a sum gives, the compiler decides."""
    floating = one.is_floating_point()
    pair = (bits(each.masked_fill(each.isnan(), NAN) if floating else each) for each in (one, other))
    return torch.equal(*pair)


def same_everywhere(run: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
    """What `run` gives, after every instruction set and 1 and 2 threads have given the same bits."""
    first: Sequence[Tensor] | None = None
    for level in levels():
        for threads in (1, 2):
            with machine(level, threads):
                found = run()
            if first is None:
                first = found
            for number, (one, other) in enumerate(zip(first, found, strict=True)):
                assert same(one, other), f"result {number} differs on x86-64-v{level} with {threads} threads"
    assert first is not None
    return first


def normal(
    numel: int, dtype: torch.dtype = FP32, seed: int = 0, offset: int = 0, scale: float = 1.0
) -> Tensor:
    """Normal numbers; `offset` elements behind an aligned address."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(numel + offset, generator=generator) * scale).to(dtype)[offset:]
