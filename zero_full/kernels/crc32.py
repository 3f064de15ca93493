"""CRC-32 checksums as zlib's: compiled where the processor has carry-less multiplication, else zlib's own."""

import ctypes
import functools
import zlib
from collections.abc import Callable

from zero_full.kernels import load

Checksum = Callable[[memoryview, int], int]  # (bytes, checksum of those before) -> checksum of all


@functools.cache
def crc32_function() -> Checksum:
    """Return the fastest function on this machine. It releases the GIL; nothing is compiled for it."""
    path = load.find("cpu").path
    return zlib.crc32 if path is None else compiled_crc32(str(path)) or zlib.crc32


def compiled_crc32(path: str) -> Checksum | None:
    """Return the function of this library, or None if this processor cannot run it."""
    library = ctypes.CDLL(path)
    if not library.zf_has_crc32():
        return None
    found = library.zf_crc32
    found.argtypes = [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int64]
    found.restype = ctypes.c_uint32

    def crc32(data: memoryview, before: int = 0) -> int:
        if data.readonly or not data:  # ctypes takes the address of writable memory only
            return zlib.crc32(data, before)
        return int(found(before, ctypes.addressof(ctypes.c_char.from_buffer(data)), data.nbytes))

    return crc32
