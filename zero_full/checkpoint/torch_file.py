"""Read the zip files that torch.save writes: a pickle, and one member with the raw bytes of each storage.

This module reads bytes on demand: only the requested range of a member. The module `unpickle` reads the
pickle, which describes the tensors.
"""

import zipfile
import zlib
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from zero_full.errors import CheckpointError
from zero_full.nested import Leaf

REMEDY = "Copy it again from where it was written, or load another tag"
CHUNK = 1 << 24  # bytes per read while a checksum is computed
HEADER = 30  # bytes of a zip member's header before its name


class TorchArchive:
    """A zip file of torch.save. It is reopened for each read, so that thousands need no file descriptors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.members: dict[str, zipfile.ZipInfo] = {}
        self._checked = set[str]()
        self._is_confirmed = False
        try:
            with path.open("rb") as file, zipfile.ZipFile(file) as archive:
                self.size = file.seek(0, 2)
                infos = archive.infolist()
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist. {REMEDY}") from None
        except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            raise CheckpointError(
                f"{path} is truncated, or not a file of torch.save since torch 1.6 ({error}). {REMEDY}"
            ) from error
        pickles = [info.filename for info in infos if info.filename.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise CheckpointError(f"{path} is a zip file, but not one of torch.save. {REMEDY}")
        root = pickles[0].removesuffix("data.pkl")
        self.members = {info.filename.removeprefix(root): info for info in infos}
        if "byteorder" in self.members and self.bytes_of("byteorder") != b"little":
            raise CheckpointError(
                f"{path} was written by a machine of another byte order and cannot be read on this one. "
                "Convert it to safetensors on such a machine"
            )

    @property
    def checksum(self) -> int:
        """A checksum over the members' names, sizes and CRCs. (torch.save can be set to write no CRCs.)"""
        found = [(name, info.file_size, info.CRC) for name, info in sorted(self.members.items())]
        return zlib.crc32(repr(found).encode())

    def size_of(self, member: str) -> int:
        """Return the size of a member in bytes. Raises CheckpointError if it is missing or incomplete."""
        info = self.members.get(member)
        if info is None:
            raise CheckpointError(f"{self.path} lacks {member!r}, which its pickle names. {REMEDY}")
        end = info.header_offset + HEADER + info.file_size
        if info.compress_type != zipfile.ZIP_STORED or end > self.size:
            raise CheckpointError(f"{self.path}: {member!r} is damaged. {REMEDY}")
        return info.file_size

    def bytes_of(self, member: str) -> bytes:
        """Return all bytes of a small member, after its checksum was verified."""
        self.check(member)
        return bytes(self.read(member, 0, self.size_of(member)))

    def read(self, member: str, start: int, stop: int) -> bytearray:
        """Read the bytes from `start` up to `stop` of a member."""
        info, content, header = self.members[member], bytearray(stop - start), bytearray(HEADER)
        try:
            with self.path.open("rb") as file:
                file.seek(info.header_offset)
                _fill(file, header)
                # The member's own header says where its data begin.
                names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
                file.seek(info.header_offset + HEADER + names + start)
                _fill(file, content)
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}. {REMEDY}") from error
        return content

    def confirm(self) -> None:
        """Raise CheckpointError if the file is gone or its size has changed. Later calls skip the check."""
        if not self._is_confirmed:
            try:
                size = self.path.stat().st_size
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read: {error}. {REMEDY}") from error
            if size != self.size:
                raise CheckpointError(f"{self.path} has changed since it was opened. Load again")
            self._is_confirmed = True

    def check(self, member: str) -> None:
        """Verify the checksum of a member, unless torch.save has written none."""
        size, expected = self.size_of(member), self.members[member].CRC
        if member in self._checked:
            return
        found = 0
        for start in range(0, size, CHUNK):
            found = zlib.crc32(self.read(member, start, min(start + CHUNK, size)), found)
        if expected and found != expected:
            raise CheckpointError(f"{self.path}: the checksum of {member!r} does not match. {REMEDY}")
        self._checked.add(member)


def _fill(file: BufferedReader, content: bytearray) -> None:
    if file.readinto(content) < len(content):
        raise EOFError("it ends too early")


@dataclass(frozen=True)
class SavedTensor(Leaf):
    """A tensor in a file of torch.save, read on demand."""

    archive: TorchArchive
    member: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # of the first element in the storage, in elements

    def __post_init__(self) -> None:
        numbers = (*self.shape, *self.stride, self.offset)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise UnpicklingError(f"a tensor of shape {self.shape} with strides {self.stride}")
        if len(self.shape) != len(self.stride):
            raise UnpicklingError(f"a tensor with {len(self.shape)} sizes and {len(self.stride)} strides")
        if (self.offset + self._span) * self.dtype.itemsize > self.archive.size_of(self.member):
            raise UnpicklingError(f"a tensor of shape {self.shape} that does not lie within its storage")

    def __setstate__(self, state: object) -> None:
        raise UnpicklingError("a tensor's place is not changed")  # a malicious pickle could try

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def place(self) -> tuple[object, ...]:
        """The location in the storage, equal for tensors with the same elements: tied parameters."""
        return self.member, self.offset, self.shape, self.stride

    @property
    def _span(self) -> int:
        """The number of storage elements from the tensor's first to its last one, inclusive."""
        if not self.numel:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    def read(self, start: int, stop: int) -> Tensor:
        """Read a range of the flattened tensor. A tensor that is not contiguous is read as a whole."""
        if start == stop:
            return torch.empty(0, dtype=self.dtype)
        if not torch.empty_strided(self.shape, self.stride, device="meta").is_contiguous():
            everything = self._elements(0, self._span).as_strided(self.shape, self.stride)
            return everything.reshape(-1)[start:stop]
        return self._elements(start, stop)

    def _elements(self, start: int, stop: int) -> Tensor:
        """Read a range of the storage, counted from the tensor's first element."""
        size = self.dtype.itemsize
        first, last = (self.offset + start) * size, (self.offset + stop) * size
        return torch.frombuffer(self.archive.read(self.member, first, last), dtype=self.dtype)

    def whole(self) -> Tensor:
        """Read the whole tensor, in its shape."""
        return self.read(0, self.numel).view(self.shape)

    def check(self) -> None:
        """Verify the checksum of the tensor's storage."""
        self.archive.check(self.member)
