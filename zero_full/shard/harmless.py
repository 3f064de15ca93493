"""What may be asked of a tensor that has no values here."""

from torch import Tensor, is_complex, is_floating_point, numel

from zero_full._compat import BESIDE_VALUES, has_compatible_type

# Properties are known by their getters.
PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf", "is_sparse"),
    *("is_cuda", "is_cpu", "is_meta", "is_quantized", "grad", "nbytes", "itemsize"),
    *BESIDE_VALUES,
)
METHODS = (
    *("size", "dim", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex"),
    *("untyped_storage", "data_ptr", "storage_offset", "is_contiguous"),  # as those use who look for memory
)
CONVERSIONS = tuple(  # module.to(...) makes them
    getattr(Tensor, name) for name in ("to", "type", "cpu", "cuda", "float", "double", "half", "bfloat16")
)
HARMLESS = {
    *(getattr(Tensor, name).__get__ for name in PROPERTIES),
    *(getattr(Tensor, name) for name in METHODS),
    *(Tensor.data.__set__, has_compatible_type, is_floating_point, is_complex, numel),  # type: ignore[attr-defined]
    *(Tensor.requires_grad_, Tensor.detach_),  # by which `zero_grad(set_to_none=False)` prepares
}
