"""Numbers that differ when tensors do."""

import ctypes
import hashlib
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def digest(tensor: Tensor) -> bytes:
    """A digest of shape, type and values: the same on two ranks only if these are."""
    told = f"{tuple(tensor.shape)} {tensor.dtype}".encode()
    whole = _in_one_piece(tensor)
    return hashlib.blake2b(_bytes_of(whole), digest_size=16, key=hashlib.blake2b(told).digest()).digest()


def digest_of(named: Iterable[tuple[str, Tensor]]) -> str:
    """One digest of several tensors and their names."""
    return hashlib.blake2b(repr([(name, digest(t)) for name, t in named]).encode(), digest_size=8).hexdigest()


MIX = (-1640531535, -2048144789, -1028477387)  # odd, of 32 bits
CHUNK = 2**23  # words at a time
HEAD = 2**31 - 1


def fingerprint(tensor: Tensor) -> Tensor:
    """A number, where the tensor is, to notice changes by. Nobody waits for the device.

    Each word is mixed with its place, as the last part of MurmurHash3 mixes, and all are added up: one word
    that is another is always noticed, several but for one case in 2**32.
    """
    words = _words_of(tensor.detach())
    count = min(CHUNK, words.numel())
    places = (torch.arange(count, dtype=torch.int64, device=tensor.device) * MIX[0]).to(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for low in range(0, words.numel(), CHUNK):
        part = words[low : low + CHUNK]
        mixed = (places[: part.numel()] + _wrapped(low * MIX[0])).bitwise_xor_(part)
        for shift, factor in ((16, MIX[1]), (13, MIX[2])):
            mixed.bitwise_xor_((mixed >> shift).bitwise_and_(HEAD >> (shift - 1))).mul_(factor)
        mixed.bitwise_xor_((mixed >> 16).bitwise_and_(HEAD >> 15))
        total += mixed.sum(dtype=torch.int64)
    return total


def _words_of(tensor: Tensor) -> Tensor:
    size = tensor.dtype.itemsize
    whole = tensor.nbytes % 4 == 0 and tensor.storage_offset() * size % 4 == 0
    return tensor.view(torch.int32 if whole else {1: torch.uint8, 2: torch.int16}[size])


def _wrapped(number: int) -> int:
    """As a number of 32 bits."""
    return (number + 2**31) % 2**32 - 2**31


def checksum(tensor: Tensor) -> int:
    """A number to notice changes by, five times as fast as a digest; 0 if elements do not lie side by side.

    On the CPU it also tells the same elements in another order; elsewhere the device does it, which does not.
    """
    if tensor.layout != torch.strided or tensor.is_quantized or not tensor.numel():
        return 0
    if tensor.device.type != "cpu":
        return int(torch.hash_tensor(tensor.detach()).view(torch.int64))
    whole = _in_one_piece(tensor)
    return zlib.crc32(_bytes_of(whole))


@torch.no_grad()
def _in_one_piece(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _bytes_of(whole: Tensor) -> Any:
    return (ctypes.c_char * whole.nbytes).from_address(whole.data_ptr()) if whole.numel() else b""
