"""Sums of squares: of them the norm of all gradients is made, which is also the overflow check."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from zero_full.kernels.load import compiled_for, operators

COMPILED = (torch.float32, torch.bfloat16, torch.float16)


def squared_norm(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum of squares in fp64, which no finite number of 32 bits can make overflow.

    Tensors without values, on the meta device, count as zeros.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for tensor in (t for t in tensors if not t.is_meta):
        kinds.setdefault(tensor.dtype, []).append(tensor)
    for dtype, alike in kinds.items():
        if dtype in COMPILED and compiled_for(device):
            in_order = [tensor.contiguous() for tensor in alike]
            total = total + operators(device).unscale_norm_check(in_order, 1.0)[0]
        else:
            total = total + _by_torch(alike, device)
    return total


def _by_torch(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The same by torch: on a CPU in fp32 first, which is twenty times faster and rarely overflows."""
    if device.type == "cpu":  # elsewhere reading the answer would stall the device
        wide = (t.float() if t.dtype.itemsize < 4 else t for t in tensors)
        quick = torch.stack([torch.linalg.vector_norm(t).double() for t in wide]).square().sum()
        if quick.isfinite():
            return quick
    exact = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in tensors]
    return torch.stack(exact).square().sum()
