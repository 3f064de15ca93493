"""Read files of torch.save without executing code from them.

[Note: a pickle is a program] A pickle names functions and classes, calls them, and sets attributes of the
results. This unpickler resolves only the names in `ADMITTED`. They map to inert classes of this module that
only store their arguments, to immutable types, and to constants. So every pickle results in containers,
numbers, strings and `SavedTensor`s, or in an error. No function of torch is called.

torch.load is not used, not even with weights_only=True, for two reasons. Its list of safe globals belongs to
the whole process: other libraries add to it, and ranks that are threads would remove each other's entries.
And it maps files into memory, where truncation of the file crashes the process.
"""

import io
import pickle
import struct
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch

from zero_full._compat import REBUILD_PARAMETER, REBUILD_TENSOR, REBUILD_WITH_ATTRIBUTES
from zero_full.checkpoint.safetensors_writer import CODES
from zero_full.checkpoint.torch_file import REMEDY, SavedTensor, TorchArchive
from zero_full.errors import CheckpointError
from zero_full.formatting import shown


class _Inert:
    """Base of the classes that a pickle may name.

    A pickle can try to set attributes of any class that it names and any object that it makes. It calls
    `__setstate__` for that, which raises here. On a class, that call lacks an instance and raises as well.
    """

    def __setstate__(self, state: object) -> None:
        raise UnpicklingError(f"{type(self).__name__} has no state")


# Objects of DeepSpeed ------------------------------------------------------------------------------


class SavedObject(_Inert):
    """The saved attributes of a DeepSpeed object. The subclass stands for the object's original class."""

    attributes: Mapping[str, Any]

    def __new__(cls) -> "SavedObject":
        """Make an object without attributes. A pickle sets them afterwards."""
        made = super().__new__(cls)
        made.attributes = {}
        return made

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, dict):
            raise UnpicklingError(f"{type(self).__name__} has no such state")
        self.attributes = state


class SavedStaticScaler(SavedObject):
    """A static loss scaler of DeepSpeed."""


class SavedDynamicScaler(SavedObject):
    """A dynamic loss scaler of DeepSpeed."""


# Tensors -------------------------------------------------------------------------------------------


class _SavedStorage(NamedTuple):
    """A tensor storage: its member in the zip file and its declared dtype."""

    archive: TorchArchive
    member: str
    dtype: torch.dtype


class _TensorMaker(_Inert):
    """Stands for torch's rebuild function of a tensor: makes a `SavedTensor`, a view of a storage."""

    def __new__(cls, storage: Any, offset: int, size: Any, stride: Any, *rest: Any) -> Any:
        more = list(rest[2:])  # after `requires_grad` and `backward_hooks`
        dtype = more.pop(0) if more and isinstance(more[0], torch.dtype) else None
        if type(storage) is not _SavedStorage or any(more):
            raise UnpicklingError("a tensor of an unknown kind")
        return SavedTensor(
            storage.archive, storage.member, dtype or storage.dtype, tuple(size), tuple(stride), offset
        )


class _ParameterMaker(_Inert):
    """Stands for torch's rebuild function of a parameter: returns its tensor."""

    def __new__(cls, data: Any, *rest: Any) -> Any:
        if type(data) is not SavedTensor:
            raise UnpicklingError("a parameter that is no tensor")
        return data


class _AttributesMaker(_Inert):
    """Stands for torch's rebuild function of a tensor with attributes, which are dropped."""

    def __new__(cls, make: Any, kind: Any, args: Any, state: Any) -> Any:
        if make not in (_TensorMaker, _ParameterMaker) or kind != TENSOR:
            raise UnpicklingError("a tensor of an unknown class")
        return make(*args)


# Bytes, counts, and numbers of numpy ----------------------------------------------------------------


class _CounterMaker(_Inert):
    """A stand-in for `collections.Counter`. A pickle could modify the real class."""

    def __new__(cls, counts: dict[Any, int]) -> Any:
        return Counter(dict(counts))


class _NoBytes(_Inert):
    """Stands for `bytes`, which pickles call only for b""."""

    def __new__(cls) -> Any:
        return b""


class _TextBytes(_Inert):
    """Stands for `_codecs.encode`, by which old pickle protocols write bytes."""

    def __new__(cls, text: str, encoding: str) -> Any:
        return text.encode({"latin1": "latin-1"}[encoding])


class _NumpyType(_Inert):
    """Stands for `numpy.dtype`: the `struct` format of a number."""

    format: str

    def __new__(cls, code: str, *rest: Any) -> "_NumpyType":
        made = super().__new__(cls)
        made.format = NUMPY_FORMATS[code]
        return made

    def __setstate__(self, state: Any) -> None:
        if state[1] not in ("<", "|", "="):
            raise UnpicklingError(f"a number with the byte order {state[1]!r}, which is not little-endian")


class _NumpyNumber(_Inert):
    """Stands for `numpy.core.multiarray.scalar`: returns a Python number."""

    def __new__(cls, kind: Any, content: bytes) -> Any:
        if type(kind) is not _NumpyType:
            raise UnpicklingError("a number of an unknown type")
        return struct.unpack(f"<{kind.format}", content)[0]


# Names that a pickle may use -----------------------------------------------------------------------

TENSOR = "torch.Tensor"
NUMPY_FORMATS = {
    **{"f2": "e", "f4": "f", "f8": "d", "b1": "?"},
    **{"i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q"},
}
STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
}
ADMITTED: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "collections.Counter": _CounterMaker,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.bytes": _NoBytes,
    "_codecs.encode": _TextBytes,
    "torch.Size": tuple,
    "torch.device": torch.device,
    **{str(dtype): dtype for dtype in (*CODES, torch.complex128)},
    **{f"torch.{name}Storage": dtype for name, dtype in STORAGES.items()},
    "torch.storage.UntypedStorage": torch.uint8,
    **dict.fromkeys(REBUILD_TENSOR, _TensorMaker),
    **dict.fromkeys(REBUILD_PARAMETER, _ParameterMaker),
    REBUILD_WITH_ATTRIBUTES: _AttributesMaker,
    "torch.Tensor": TENSOR,
    "numpy.dtype": _NumpyType,
    "numpy.core.multiarray.scalar": _NumpyNumber,
    "numpy._core.multiarray.scalar": _NumpyNumber,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": SavedStaticScaler,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": SavedDynamicScaler,
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
    "deepspeed.utils.tensor_fragment.fragment_address": SavedObject,
    "deepspeed.runtime.bf16_optimizer.fragment_address": SavedObject,  # its module in 2022
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape": SavedObject,
}


class _Restricted(pickle.Unpickler):
    """An unpickler that resolves only the names in `ADMITTED`. See [Note: a pickle is a program]."""

    def __init__(self, archive: TorchArchive) -> None:
        super().__init__(io.BytesIO(archive.bytes_of("data.pkl")))
        self.archive = archive

    def find_class(self, module: str, name: str) -> Any:
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if full not in ADMITTED:
            raise CheckpointError(
                f"{self.archive.path} holds {shown(full, str)}. Only tensors, plain containers and classes "
                "that DeepSpeed saves are read: creating other objects can run any code. If it is in your "
                "client_state, load the checkpoint with the program that has written it, and save it without "
                "the object"
            )
        return ADMITTED[full]

    def persistent_load(self, pid: Any) -> Any:
        """Return the storage that a persistent id of torch.save names."""
        kind, dtype, key, _, count = pid
        if kind != "storage" or (type(dtype), type(key), type(count)) != (torch.dtype, str, int):
            raise UnpicklingError("a storage of an unknown kind")
        storage = _SavedStorage(self.archive, f"data/{key}", dtype)
        if count * dtype.itemsize > self.archive.size_of(storage.member):
            raise UnpicklingError(f"storage {key} has fewer than {count} elements")
        return storage


def load_saved(path: Path) -> Any:
    """Return the object that torch.save has written, with a `SavedTensor` in place of each tensor.

    Raises CheckpointError if the file is damaged or holds an object of any other class.
    """
    archive = TorchArchive(path)
    try:
        return _Restricted(archive).load()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path}: its pickle is damaged ({shown(error, str)}). {REMEDY}") from error
