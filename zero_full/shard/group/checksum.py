"""Digests, fingerprints and checksums of tensors, to compare them between ranks or over time."""

import ctypes
import hashlib
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def digest(tensor: Tensor) -> bytes:
    """Hash shape, dtype and values: digests are equal on two ranks only if the tensors are."""
    header = f"{tuple(tensor.shape)} {tensor.dtype}".encode()
    whole = _in_one_piece(tensor)
    return hashlib.blake2b(_bytes_of(whole), digest_size=16, key=hashlib.blake2b(header).digest()).digest()


def digest_of(named: Iterable[tuple[str, Tensor]]) -> str:
    """Hash several tensors and their names into one digest."""
    return hashlib.blake2b(repr([(name, digest(t)) for name, t in named]).encode(), digest_size=8).hexdigest()


MIX = (-1640531535, -2048144789, -1028477387)  # odd 32-bit constants, as int32
CHUNK = 2**23  # 32-bit words at a time
HEAD = 2**31 - 1  # mask of a word without its sign bit, for a logical right shift of int32


def fingerprint(tensor: Tensor) -> Tensor:
    """Compute a 64-bit fingerprint on the tensor's device, to detect changes without waiting for the device.

    Each 32-bit word is mixed with its index by the finalizer of MurmurHash3, and the results are summed. A
    change of one word always changes the sum. A change of several is missed with a probability of 2**-32.
    """
    words = _words_of(tensor.detach(), 4)
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


COLUMNS = 8191  # a prime: no two words of a column are a power of two apart, as rows of a matrix may be


def column_sums(tensor: Tensor) -> Tensor:
    """Sum the tensor's 64-bit words by column of a table that is `COLUMNS` wide, to detect changes.

    It reads the tensor once, in one operation, and needs no memory but for the sums. A change of one word
    always changes the sums. Changes of several are missed only if they cancel in every column.
    """
    words = _words_of(tensor.detach(), 8)
    whole = words.numel() - words.numel() % COLUMNS
    if not whole:
        return words.clone()
    sums = words[:whole].view(-1, COLUMNS).sum(0)
    sums[: words.numel() - whole].add_(words[whole:])
    return sums


WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by bytes


def _words_of(tensor: Tensor, most: int) -> Tensor:
    """View the tensor as integers of at most this many bytes, as its size and its place in memory allow."""
    start = tensor.storage_offset() * tensor.dtype.itemsize
    fits = (size for size in WORDS if size <= most and tensor.nbytes % size == 0 and start % size == 0)
    return tensor.view(WORDS[next(fits)])


def _wrapped(number: int) -> int:
    """Wrap an integer to signed 32 bits."""
    return (number + 2**31) % 2**32 - 2**31


def checksum(tensor: Tensor) -> int:
    """Compute a checksum to detect changes, five times as fast as a digest.

    It is 0 for empty, sparse and quantized tensors. On the CPU it also detects a change of order. On an
    accelerator it does not, because the device computes an order-independent hash.
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
