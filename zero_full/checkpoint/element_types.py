"""Types of elements in checkpoints, by their codes in safetensors files. Without torch."""

from typing import NamedTuple


class ElementType(NamedTuple):
    """The dtype of a stored tensor, described without torch."""

    name: str  # of torch's dtype
    itemsize: int  # bytes

    def __str__(self) -> str:
        return self.name


ELEMENT_TYPES = {
    "F64": ElementType("float64", 8),
    "F32": ElementType("float32", 4),
    "F16": ElementType("float16", 2),
    "BF16": ElementType("bfloat16", 2),
    "F8_E4M3": ElementType("float8_e4m3fn", 1),
    "F8_E5M2": ElementType("float8_e5m2", 1),
    "C64": ElementType("complex64", 8),
    "I64": ElementType("int64", 8),
    "I32": ElementType("int32", 4),
    "I16": ElementType("int16", 2),
    "I8": ElementType("int8", 1),
    "U64": ElementType("uint64", 8),
    "U32": ElementType("uint32", 4),
    "U16": ElementType("uint16", 2),
    "U8": ElementType("uint8", 1),
    "BOOL": ElementType("bool", 1),
}
