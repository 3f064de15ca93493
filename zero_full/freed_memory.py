"""What glibc does with freed memory: keep the pages for the next allocation, or return them to the system.

Its thresholds follow the largest block that the process has freed so far, from 128 KiB up to 32 MiB. So a
process that has freed small blocks only returns the gradients of every step, and backward takes new pages,
each of which the system clears: with 10M parameters in bf16 a fifth of a step.
"""

import ctypes
from contextlib import suppress

import torch

LARGEST = 2**25 - 2**16  # bytes; glibc's thresholds follow blocks of up to 32 MiB, with their header


def keep_freed_memory() -> None:
    """Make glibc keep freed blocks of up to 32 MiB, by freeing one of that size, of which no page was used.

    No effect if the process sets a threshold itself (`MALLOC_MMAP_THRESHOLD_`), or uses another allocator.
    """
    with suppress(RuntimeError):  # a limit on the process's memory: then it must not keep any
        torch.empty(LARGEST, dtype=torch.uint8, device="cpu")


def return_freed_memory() -> None:
    """Return freed memory to the system now.

    glibc keeps what is free at the end of a thread's arena, at most 64 MiB, for that thread's next blocks.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
