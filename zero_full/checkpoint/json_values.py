"""Convert plain data to JSON and back without loss, for checkpoint values other than parameters. No pickle.

Plain data are numbers, strings, bytes, None, lists, tuples, sets, deques, dicts, tensors and numpy arrays. A
parameter comes back as a tensor. Any other value is an error that names its location. Instances of other
classes are not plain data, because loading them would mean running code.
"""

import base64
import json
import math
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zero_full.checkpoint.safetensors_writer import CODES
from zero_full.errors import CheckpointError
from zero_full.shard.group.checksum import digest
from zero_full.shard.group.released import ReleasedTensor

KIND, VALUE = "~", "is"  # keys that tag a type unknown to JSON: {"~": "tuple", "is": [...]}
SEQUENCES: dict[type, str] = {tuple: "tuple", torch.Size: "size", set: "set", frozenset: "frozenset"}
MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
SCALARS = (torch.float32, torch.float64, torch.int64, torch.int32)  # dtypes that decimal text holds exactly
MAX_DEPTH = 100  # levels of nesting; self-referencing or malicious data has more
MAX_BITS = 10_000  # of an integer; Python cannot parse much longer ones


class Encoder:
    """Encoder of plain data to JSON values. Collects the tensors in `tensors`, to be stored separately."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def encode(self, value: Any, where: str, depth: int = 0) -> Any:
        """Return `value` in a form that `json.dumps` accepts.

        Raises CheckpointError, which names the value by `where`, if it is not plain data.
        """
        kind = type(value)
        if depth > MAX_DEPTH:
            raise CheckpointError(
                f"{where[:100]}... is nested more than {MAX_DEPTH} levels deep, or contains itself, which a "
                "checkpoint cannot store. Make it flatter"
            )
        if kind is int and value.bit_length() > MAX_BITS:
            raise CheckpointError(f"{where} is an integer of {value.bit_length()} bits. Save it as bytes")
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {KIND: "float", VALUE: str(value)}
        if kind is list:
            return [self.encode(each, f"{where}[{i}]", depth + 1) for i, each in enumerate(value)]
        if kind in SEQUENCES:
            return {KIND: SEQUENCES[kind], VALUE: self._members(value, where, depth)}
        if kind is deque:
            return {KIND: "deque", VALUE: [value.maxlen, self._members(value, where, depth)]}
        if kind in MAPPINGS:
            return self._mapping(value, MAPPINGS[kind], where, depth)
        return self._encode_object(value, where)

    def _members(self, value: Iterable[Any], where: str, depth: int) -> list[Any]:
        encoded = [self.encode(each, f"{where}[...]", depth + 1) for each in value]
        return sorted(encoded, key=json.dumps) if isinstance(value, (set, frozenset)) else encoded

    def _mapping(self, value: Mapping[Any, Any], kind: str, where: str, depth: int) -> Any:
        deeper = depth + 1
        if kind == "dict" and KIND not in value and all(type(key) is str for key in value):
            return {key: self.encode(each, f"{where}[{key!r}]", deeper) for key, each in value.items()}
        pairs = [
            [self.encode(k, f"a key of {where}", deeper), self.encode(v, f"{where}[{k!r}]", deeper)]
            for k, v in value.items()
        ]
        return {KIND: kind, VALUE: pairs}

    def _encode_object(self, value: Any, where: str) -> Any:
        if type(value) in (Tensor, Parameter):
            return self._tensor(value.detach(), where)
        if isinstance(value, ReleasedTensor):
            raise CheckpointError(
                f"{where} is a sharded parameter, whose values are not gathered. Copy it inside "
                "zero_full.GatheredParameters, on every rank"
            )
        if type(value) is bytes:
            return {KIND: "bytes", VALUE: base64.b64encode(value).decode()}
        if type(value) is complex:
            return {KIND: "complex", VALUE: [str(value.real), str(value.imag)]}
        if isinstance(value, (torch.dtype, torch.device)):
            return {KIND: type(value).__name__, VALUE: str(value).removeprefix("torch.")}
        numpy: Any = sys.modules.get("numpy")
        is_array = numpy is not None and type(value) is numpy.ndarray
        is_scalar = numpy is not None and isinstance(value, numpy.generic)
        if (is_array or is_scalar) and value.dtype.kind in "biufc":
            content = [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]
            return {KIND: "array" if is_array else "scalar", VALUE: content}
        raise _unsupported(where, f"{type(value).__module__}.{type(value).__qualname__}")

    def _tensor(self, value: Tensor, where: str) -> Any:
        if value.layout != torch.strided or value.is_quantized or value.is_meta or value.dtype not in CODES:
            raise _unsupported(where, f"tensor of {value.dtype}, {value.layout}, on {value.device}")
        if not value.dim() and value.dtype in SCALARS:
            return {KIND: "number", VALUE: [str(value.dtype).removeprefix("torch."), str(value.item())]}
        self.tensors.append(value)
        return {KIND: "tensor", VALUE: len(self.tensors) - 1}


def _unsupported(where: str, kind: str) -> CheckpointError:
    return CheckpointError(
        f"{where} is a {kind}, which a checkpoint cannot store: it stores plain data and no objects of other "
        "classes. Convert it to numbers, strings, lists, dicts or tensors, or leave it out"
    )


def fingerprint(value: Any) -> str:
    """Return a string that is equal for two values only if they are equal bit for bit."""
    encoder = Encoder()
    text = json.dumps(encoder.encode(value, "a state"))
    return text + "".join(digest(tensor).hex() for tensor in encoder.tensors)


def decode(encoded: Any, tensor: Callable[[int], Tensor], depth: int = 0) -> Any:
    """Return the plain data that `Encoder.encode` has encoded.

    `tensor` returns a tensor by its index in `Encoder.tensors`. Damaged input raises ValueError, KeyError or
    another exception of the decoding functions.
    """
    if depth > MAX_DEPTH + 2:  # a rank's JSON file adds two levels of its own
        raise ValueError("nested too deeply")
    if isinstance(encoded, list):
        return [decode(each, tensor, depth + 1) for each in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if KIND not in encoded:
        return {key: decode(each, tensor, depth + 1) for key, each in encoded.items()}
    kind, value = encoded[KIND], encoded[VALUE]
    if kind in SEQUENCES.values():
        made = (decode(each, tensor, depth + 1) for each in value)
        return next(cls for cls, name in SEQUENCES.items() if name == kind)(made)
    if kind in MAPPINGS.values():
        pairs = [(decode(k, tensor, depth + 1), decode(v, tensor, depth + 1)) for k, v in value]
        return next(cls for cls, name in MAPPINGS.items() if name == kind)(dict(pairs))
    if kind == "deque":
        return deque((decode(each, tensor, depth + 1) for each in value[1]), value[0])
    return DECODERS[kind](value) if kind != "tensor" else tensor(value)


def _array(value: Any) -> Any:
    import numpy  # imported only if the file holds arrays

    dtype, shape, numbers = value
    made = numpy.dtype(str(dtype))
    if made.kind not in "biufc":
        raise ValueError(f"{dtype} is not a dtype of numbers")
    return numpy.frombuffer(base64.b64decode(numbers), made).reshape(shape).copy()


def _dtype(name: str) -> torch.dtype:
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is not a dtype of torch")
    return found


def _number(value: Any) -> Tensor:
    dtype = _dtype(value[0])
    if dtype not in SCALARS:
        raise ValueError(f"a number cannot have dtype {dtype}")
    return torch.tensor(float(value[1]) if dtype.is_floating_point else int(value[1]), dtype=dtype)


DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "number": _number,
    "bytes": base64.b64decode,
    "complex": lambda value: complex(float(value[0]), float(value[1])),
    "dtype": _dtype,
    "device": torch.device,
    "array": _array,
    "scalar": lambda value: _array(value)[()],
}
