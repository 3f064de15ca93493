"""Track allocations and frees of tensor storages in a simulated step, by purpose."""

import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from zero_full._compat import TorchDispatchMode, identity_of, reads_value, returns_new
from zero_full.nested import tensors_in
from zero_full.shard.group.dtensors import local_of

WHOLE = 0  # number in the log of all buffers that are resized
ARRIVING = "arriving"  # purpose of gradients before autograd has completed them
ARRIVED = "arrived"  # log entry of a completed gradient, with its size


class MemoryTracker(TorchDispatchMode):
    """Dispatch mode that logs every new storage and its end.

    Tensors without dimensions are not counted. Reading a value from the meta device (`.item()`) returns 1.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.whole: dict[int, torch.UntypedStorage] = {}
        self.size_of_whole = 0
        self.kind: str | None = None  # purpose of new storages; None: do not count them
        self.log: list[tuple[str, int, int]] = []  # purpose, storage number, bytes allocated or freed
        self.alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.number_of: dict[int, int] = {}  # storages that are alive: their numbers, by identity
        self.marks: list[tuple[int, str]] = []  # position in the log, name of the moment
        self.arrived: set[int] = set()  # storage numbers of completed gradients
        self.numbers = count(WHOLE + 1)
        self.makes_new: dict[Any, bool] = {}

    def begin(self, whole: Iterable[Tensor]) -> None:
        """Clear the log. `whole` are existing buffers that are resized between empty and full.

        Their total size is logged at every copy into one of them, since a buffer grows right before a copy.
        """
        self.log.clear()
        self.alive.clear()
        self.number_of.clear()
        self.marks.clear()
        self.arrived.clear()
        self.size_of_whole = 0
        self.whole = {identity_of(t.untyped_storage()): t.untyped_storage() for t in whole}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if reads_value(func) and args[0].is_meta:
            return 1
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and identity_of(args[0].untyped_storage()) in self.whole:
            size = sum(storage.nbytes() for storage in self.whole.values())
            self.log.append(("gathered", WHOLE, size - self.size_of_whole))
            self.size_of_whole = size
        elif self._is_new(func) and self.kind is not None:
            for tensor in tensors_in(result):
                if self._is_counted(tensor):
                    self._log_new(local_of(tensor).untyped_storage(), self.kind)
        return result

    def _is_new(self, func: Any) -> bool:
        if func not in self.makes_new:
            self.makes_new[func] = returns_new(func)
        return self.makes_new[func]

    def _is_counted(self, tensor: Tensor) -> bool:
        """Return whether the tensor stands for device memory: only those on the meta device do."""
        return tensor.is_meta and tensor.dim() > 0

    def _log_new(self, storage: torch.UntypedStorage, kind: str) -> None:
        identity = identity_of(storage)
        if identity in self.number_of:  # of an operation that may return its input, such as `_unsafe_view`
            return
        number, size = next(self.numbers), storage.nbytes()
        self.log.append((kind, number, size))
        self.number_of[identity] = number
        freed = partial(self._log_freed, kind, number, size, identity)
        self.alive[number] = weakref.ref(storage, freed)

    def _log_freed(self, kind: str, number: int, size: int, identity: int, _: object) -> None:
        if self.alive.pop(number, None) is not None:
            del self.number_of[identity]
            self.log.append((kind, number, -size))

    @contextmanager
    def counting(self, kind: str | None) -> Iterator[None]:
        """Count storages made in this block, or in the decorated function, as `kind`."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def mark(self, name: str) -> None:
        """Note a moment, for `between_marks`."""
        self.marks.append((len(self.log), name))

    def arrive(self, name: str, gradient: Tensor | None) -> None:
        """Mark the moment at which autograd has completed a parameter's gradient."""
        self.mark(name)
        if gradient is None:
            return
        storage = local_of(gradient).untyped_storage()
        number = self.number_of.get(identity_of(storage))
        if number is not None and number not in self.arrived:
            self.arrived.add(number)
            self.log.append((ARRIVED, number, storage.nbytes()))

    def between_marks(self, kinds: Collection[str]) -> list[tuple[str, int]]:
        """Return each mark with the peak bytes of these purposes since the mark before.

        A completed gradient counts from its arrival on, also if it is still alive.
        """
        found, now, most, begun = list[tuple[str, int]](), 0, 0, set[int]()
        marks = iter([*self.marks, (len(self.log) + 1, "")])
        until, name = next(marks)
        for place, (kind, number, size) in enumerate(self.log):
            while place == until:
                found.append((name, most))
                most, (until, name) = now, next(marks)
            if kind == ARRIVED:
                begun.add(number)
                now += size
            elif number in self.arrived:
                now += size if number in begun else 0
            elif kind in kinds:
                now += size
            most = max(most, now)
        while name:
            found.append((name, most))
            most, (_, name) = now, next(marks)
        return found

    def alive_bytes(self) -> int:
        """Return the bytes of all counted storages that are alive now."""
        storages = (reference() for reference in self.alive.values())
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def peak(self, *kinds: str) -> int:
        """Return the peak bytes of these purposes, without storages that are still alive."""
        now = most = 0
        for each, number, size in self.log:
            if each in kinds and number not in self.alive:
                now += size
                most = max(most, now)
        return most
