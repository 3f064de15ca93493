"""Storages with contents that are temporarily on another device.

A storage keeps its identity and is resized to 0 bytes. So all of its views are valid again after it returns.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from zero_full._compat import identity_of


class OffloadedStorages:
    """Offloaded tensors: their storages, which are empty, and copies of the contents."""

    def __init__(self) -> None:
        self.copies: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}  # by the storage's identity

    def move(self, tensor: Tensor, device: torch.device, pin_memory: bool) -> None:
        """Copy the storage of `tensor` to that device, and free its own memory."""
        storage = tensor.untyped_storage()
        if identity_of(storage) in self.copies or not storage.nbytes():
            return
        pin = pin_memory and device.type == "cpu" and storage.device.type != "cpu"
        copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device, pin_memory=pin)
        copy.copy_(_bytes_of(storage))
        self.copies[identity_of(storage)] = storage, copy
        storage.resize_(0)

    def bring_back(self) -> None:
        """Restore all storages."""
        while self.copies:
            _restore(*self.copies.popitem()[1])

    @contextmanager
    def present(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Restore the values of these tensors within a block that reads them. Writes are lost."""
        found = {identity_of(tensor.untyped_storage()) for tensor in tensors}
        moved = [self.copies[each] for each in found if each in self.copies]
        try:
            for storage, copy in moved:
                _restore(storage, copy)
            yield
        finally:
            for storage, _ in moved:
                storage.resize_(0)


def _restore(storage: torch.UntypedStorage, copy: Tensor) -> None:
    storage.resize_(copy.numel())
    _bytes_of(storage).copy_(copy)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
