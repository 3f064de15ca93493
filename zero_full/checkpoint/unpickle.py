"""What torch.save has written, without executing any of it.

[Note: a pickle is a program] It names functions and classes, calls them, and sets attributes of what it gets.
Here it may use the names in `ADMITTED` and no others; they stand for classes of ours that keep what they
are given, for types that cannot be changed, and for constants. So whatever a pickle does, there are
containers, numbers, texts and `SavedTensor`s in the end, or an error. Nothing of torch is called.

torch.load is not used, not even with weights_only=True: what it admits besides tensors is a list that belongs
to the whole process. Other libraries add to it, and ranks that are threads would take each other's names
away. And it maps files into memory, where a file that becomes shorter ends the process.
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
from zero_full.checkpoint.torch_file import REMEDY, SavedTensor, TorchArchive
from zero_full.errors import CheckpointError
from zero_full.formatting import shown


class Inert:
    """The base of what a pickle may name.

    A pickle can try to set attributes of all that it has named or made: `__setstate__` is asked for that, and
    a class's own is called without an instance, which is an error.
    """

    def __setstate__(self, state: object) -> None:
        raise UnpicklingError(f"{type(self).__name__} has no state")


# Objects of DeepSpeed ------------------------------------------------------------------------------


class SavedObject(Inert):
    """The attributes that an object had. Which class it was of, its class here says."""

    attributes: Mapping[str, Any]

    def __new__(cls) -> "SavedObject":
        """See the class."""
        made = super().__new__(cls)
        made.attributes = {}
        return made

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, dict):
            raise UnpicklingError(f"{type(self).__name__} has no such state")
        self.attributes = state


class SavedStaticScaler(SavedObject):
    """A loss scale that never changes."""


class SavedDynamicScaler(SavedObject):
    """A loss scale that follows overflows."""


class SavedFragment(SavedObject):
    """Where a part of a parameter lies in a flat buffer."""


class SavedSubParameters(SavedObject):
    """How a parameter is made of several, for tensor parallelism."""


# Tensors -------------------------------------------------------------------------------------------


class SavedStorage(NamedTuple):
    """The memory of tensors: its place in a file, and the type that it was declared with."""

    archive: TorchArchive
    member: str
    dtype: torch.dtype


class TensorMaker(Inert):
    """A tensor, which is a window into a storage."""

    def __new__(cls, storage: Any, offset: int, size: Any, stride: Any, *rest: Any) -> Any:
        """See the class."""
        more = list(rest[2:])  # after `requires_grad` and `backward_hooks`
        dtype = more.pop(0) if more and isinstance(more[0], torch.dtype) else None
        if type(storage) is not SavedStorage or any(more):
            raise UnpicklingError("a tensor of an unknown kind")
        return SavedTensor(
            storage.archive, storage.member, dtype or storage.dtype, tuple(size), tuple(stride), offset
        )


class ParameterMaker(Inert):
    """A parameter: the tensor itself."""

    def __new__(cls, data: Any, *rest: Any) -> Any:
        """See the class."""
        if type(data) is not SavedTensor:
            raise UnpicklingError("a parameter that is no tensor")
        return data


class AttributesMaker(Inert):
    """A tensor with attributes of its own, which are left out."""

    def __new__(cls, make: Any, kind: Any, args: Any, state: Any) -> Any:
        """See the class."""
        if make not in (TensorMaker, ParameterMaker) or kind != TENSOR:
            raise UnpicklingError("a tensor of an unknown class")
        return make(*args)


# Bytes, counts, and numbers of numpy ----------------------------------------------------------------


class CounterMaker(Inert):
    """`collections.Counter`, whose own class could be changed."""

    def __new__(cls, counts: dict[Any, int]) -> Any:
        """See the class."""
        return Counter(dict(counts))


class NoBytes(Inert):
    """`bytes`, which is called for b"" only."""

    def __new__(cls) -> Any:
        """See the class."""
        return b""


class TextBytes(Inert):
    """`_codecs.encode`: bytes, as old protocols write them."""

    def __new__(cls, text: str, encoding: str) -> Any:
        """See the class."""
        return text.encode({"latin1": "latin-1"}[encoding])


class NumpyType(Inert):
    """`numpy.dtype`: how the bytes of a number are to be read."""

    format: str

    def __new__(cls, code: str, *rest: Any) -> "NumpyType":
        """See the class."""
        made = super().__new__(cls)
        made.format = NUMPY_FORMATS[code]
        return made

    def __setstate__(self, state: Any) -> None:
        if state[1] not in ("<", "|", "="):
            raise UnpicklingError("a number of another byte order")


class NumpyNumber(Inert):
    """`numpy.core.multiarray.scalar`: a number of Python."""

    def __new__(cls, kind: Any, content: bytes) -> Any:
        """See the class."""
        if type(kind) is not NumpyType:
            raise UnpicklingError("a number of an unknown type")
        return struct.unpack(f"<{kind.format}", content)[0]


# What may be named ---------------------------------------------------------------------------------

TENSOR = "torch.Tensor"
NUMPY_FORMATS = {
    **{"f2": "e", "f4": "f", "f8": "d", "b1": "?"},
    **{"i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q"},
}
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint64,
        torch.uint32,
        torch.uint16,
        torch.uint8,
    ),
    *(torch.bool, torch.complex64, torch.complex128),
)
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
    "collections.Counter": CounterMaker,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.bytes": NoBytes,
    "_codecs.encode": TextBytes,
    "torch.Size": tuple,
    "torch.device": torch.device,
    **{str(dtype): dtype for dtype in DTYPES},
    **{f"torch.{name}Storage": dtype for name, dtype in STORAGES.items()},
    "torch.storage.UntypedStorage": torch.uint8,
    **dict.fromkeys(REBUILD_TENSOR, TensorMaker),
    **dict.fromkeys(REBUILD_PARAMETER, ParameterMaker),
    REBUILD_WITH_ATTRIBUTES: AttributesMaker,
    "torch.Tensor": TENSOR,
    "numpy.dtype": NumpyType,
    "numpy.core.multiarray.scalar": NumpyNumber,
    "numpy._core.multiarray.scalar": NumpyNumber,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": SavedStaticScaler,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": SavedDynamicScaler,
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
    "deepspeed.utils.tensor_fragment.fragment_address": SavedFragment,
    "deepspeed.runtime.bf16_optimizer.fragment_address": SavedFragment,  # where it was in 2022
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape": SavedSubParameters,
}


class _Restricted(pickle.Unpickler):
    """See [Note: a pickle is a program]."""

    def __init__(self, archive: TorchArchive) -> None:
        super().__init__(io.BytesIO(archive.bytes_of("data.pkl")))
        self.archive = archive

    def find_class(self, module: str, name: str) -> Any:
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if full not in ADMITTED:
            raise CheckpointError(
                f"{self.archive.path} holds {shown(full, str)}, which is no tensor, no plain container and "
                "none of the classes that DeepSpeed saves. Nothing of the file is read: to make "
                "such an object can run any code. If it is a part of your client_state, load the "
                "checkpoint with what has written it, and save it without that part"
            )
        return ADMITTED[full]

    def persistent_load(self, pid: Any) -> Any:
        """torch.save's way to name a storage."""
        kind, dtype, key, _, count = pid
        if (
            kind != "storage"
            or type(dtype) is not torch.dtype
            or type(key) is not str
            or type(count) is not int
        ):
            raise UnpicklingError("a storage of an unknown kind")
        storage = SavedStorage(self.archive, f"data/{key}", dtype)
        if count * dtype.itemsize > self.archive.size_of(storage.member):
            raise UnpicklingError(f"storage {key} has fewer than {count} elements")
        return storage


def load_saved(path: Path) -> Any:
    """What torch.save was given, with a `SavedTensor` for each tensor. CheckpointError for all else."""
    archive = TorchArchive(path)
    try:
        return _Restricted(archive).load()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path}: its pickle is damaged ({shown(error, str)}): {REMEDY}") from error
