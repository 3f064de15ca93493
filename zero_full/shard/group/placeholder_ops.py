"""Torch functions that are allowed on placeholders, because they do not read values."""

from typing import Any

import torch
from torch import Tensor

from zero_full._compat import BESIDE_VALUES, has_compatible_type, without_overrides

# `__torch_function__` gets a property's getter.
PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf", "is_sparse"),
    *("is_cuda", "is_cpu", "is_meta", "is_quantized", "grad", "nbytes", "itemsize"),
    *BESIDE_VALUES,
)
METHODS = (
    *("size", "dim", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex"),
    *("untyped_storage", "data_ptr", "storage_offset", "is_contiguous"),  # used by memory reports
)
# New tensors, which take dtype, device and shape from the placeholder.
LIKE = tuple(
    getattr(torch, f"{name}_like") for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
)
NEW = tuple(getattr(Tensor, f"new_{name}") for name in ("empty", "zeros", "ones", "full", "tensor"))
CONVERSIONS = tuple(  # called by module.to(...)
    getattr(Tensor, name) for name in ("to", "type", "cpu", "cuda", "float", "double", "half", "bfloat16")
)
HARMLESS = {
    *(getattr(Tensor, name).__get__ for name in PROPERTIES),
    *(getattr(Tensor, name) for name in METHODS),
    *(*LIKE, *NEW, torch.is_floating_point, torch.is_complex, torch.numel),
    *(Tensor.data.__set__, has_compatible_type),  # type: ignore[attr-defined]
    *(Tensor.requires_grad_, Tensor.detach_),  # called by `zero_grad(set_to_none=False)`
}


def plainly(func: Any, args: Any, kwargs: Any) -> Any:
    """Call the function with every tensor subclass treated as a plain tensor."""
    with without_overrides():
        return func(*args, **(kwargs or {}))
