"""Sums of squares: of them the norm of all gradients is made, which is also the overflow check.

[Note: sums in fp32] A sum of squares in fp64 holds whatever fp32 can hold. The compiled operators make it in
one pass; torch would make a copy of the gradients in fp64 first. So without them squares are summed in fp32,
which overflows above a norm of 1.8e19: where the sum is not finite, who asked looks again, `exactly`, a piece
at a time. On a CPU that happens here; elsewhere reading the answer would stall the device, so it happens when
the host reads the norm, see `agreement.py`.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from zero_full.kernels.load import compiled_for, operators

COMPILED = (torch.float32, torch.bfloat16, torch.float16)
PIECE = 2**22  # elements copied to fp64 at a time


def squared_norm(tensors: Iterable[Tensor], device: torch.device, exactly: bool = False) -> Tensor:
    """The sum of squares, in fp64 where the device has it. See [Note: sums in fp32].

    Tensors without values, on the meta device, count as zeros.
    """
    total = torch.zeros((), dtype=torch.float64 if has_fp64(device) else torch.float32, device=device)
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for tensor in (t for t in tensors if not t.is_meta):
        kinds.setdefault(tensor.dtype, []).append(tensor)
    for dtype, alike in kinds.items():
        if dtype in COMPILED and compiled_for(device):
            in_order = [tensor.contiguous() for tensor in alike]
            total = total + operators(device).unscale_norm_check(in_order, 1.0)[0]
        elif exactly:
            total = total + _exactly(alike, total.dtype)
        else:
            total = total + _by_torch(alike, total.dtype)
    return total


def all_finite(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Whether no element is inf or NaN, as a tensor that the host need not read: one pass, no copy."""
    ends = [end for t in tensors if t.numel() and not t.is_meta for end in torch.aminmax(t)]
    if not ends:
        return torch.ones((), dtype=torch.bool, device=device)
    return torch.stack([end.isfinite() for end in ends]).all()


def has_fp64(device: torch.device) -> bool:
    """Whether tensors there can have 64-bit floats. Apple's GPUs have none, and not all of Intel's do."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


def leaves_overflow(device: torch.device) -> bool:
    """Whether a sum that is not finite may be one of finite numbers. See [Note: sums in fp32]."""
    return device.type != "cpu"


def _by_torch(tensors: Sequence[Tensor], wide: torch.dtype) -> Tensor:
    """By torch, in fp32: on a CPU twenty times faster than in fp64, and again exactly if that overflows."""
    in_fp32 = (torch.float32 if t.dtype.itemsize < 4 else t.dtype for t in tensors)
    norms = [torch.linalg.vector_norm(t, dtype=d).to(wide) for t, d in zip(tensors, in_fp32, strict=True)]
    quick = torch.stack(norms).square().sum()
    if not leaves_overflow(quick.device) and not quick.isfinite():
        return _exactly(tensors, wide)
    return quick


def _exactly(tensors: Sequence[Tensor], wide: torch.dtype) -> Tensor:
    pieces = [piece for t in tensors for piece in t.reshape(-1).split(PIECE)]
    return torch.stack([torch.linalg.vector_norm(piece, dtype=wide) for piece in pieces]).square().sum()
