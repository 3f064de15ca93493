"""The squared norm of gradients, which is also the overflow check, and a check for inf and NaN.

[Note: sums in fp32] A sum of squares in fp64 cannot overflow for gradients in fp32. The compiled operators
compute it in one pass; torch would copy the gradients to fp64 first. So without compiled operators the sum is
in fp32, which overflows above a norm of 1.8e19. A sum that is not finite is then repeated with `exactly`, in
fp64, a piece at a time. On a CPU this happens here. On an accelerator reading the sum would stall the device,
so it happens when the host reads the norm, in `agreement.py`.
"""

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from zero_full.kernels.load import compiled_for, operators
from zero_full.kernels.ops import DTYPES

PIECE = 2**22  # elements that are copied to fp64 at a time


def squared_norm(tensors: Iterable[Tensor], device: torch.device, exactly: bool = False) -> Tensor:
    """Sum the squares of all elements, in fp64 where the device has it. See [Note: sums in fp32].

    Tensors on the meta device count as zeros.
    """
    total = torch.zeros((), dtype=torch.float64 if has_fp64(device) else torch.float32, device=device)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if not tensor.is_meta:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for dtype, same in by_dtype.items():
        if dtype in DTYPES and compiled_for(device):
            in_order = list(map(Tensor.contiguous, same))
            total = total + operators(device).unscale_norm_check(in_order, 1.0)[0]
        elif exactly:
            total = total + _exactly(same, total.dtype)
        else:
            total = total + _by_torch(same, total.dtype)
    return total


def all_finite(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return whether no element is inf or NaN, as a tensor on the device: one pass over memory, no copy."""
    ends: list[Tensor] = []  # the smallest and the largest element of each tensor: NaN if any element is
    for tensor in tensors:
        if tensor.numel() and not tensor.is_meta:
            ends += torch.aminmax(tensor)
    if not ends:
        return torch.ones((), dtype=torch.bool, device=device)
    return torch.stack(ends).isfinite().all()


@functools.cache
def has_fp64(device: torch.device) -> bool:
    """Return whether the device has 64-bit floats. Apple's GPUs do not, and only some of Intel's do."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


def leaves_overflow(device: torch.device) -> bool:
    """Return whether `squared_norm` on this device may be inf though all elements are finite.

    See [Note: sums in fp32].
    """
    return device.type != "cpu"


def _by_torch(tensors: Sequence[Tensor], wide: torch.dtype) -> Tensor:
    """Sum squares with torch in fp32, 20 times as fast on a CPU as fp64; in fp64 if fp32 overflows."""
    in_fp32 = (torch.float32 if t.dtype.itemsize < 4 else t.dtype for t in tensors)
    norms = [torch.linalg.vector_norm(t, dtype=d).to(wide) for t, d in zip(tensors, in_fp32, strict=True)]
    quick = torch.stack(norms).square().sum()
    if not leaves_overflow(quick.device) and not quick.isfinite():
        return _exactly(tensors, wide)
    return quick


def _exactly(tensors: Sequence[Tensor], wide: torch.dtype) -> Tensor:
    pieces = [piece for t in tensors for piece in t.reshape(-1).split(PIECE)]
    return torch.stack([torch.linalg.vector_norm(piece, dtype=wide) for piece in pieces]).square().sum()
