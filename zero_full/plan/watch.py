"""Bytes that come and go while the runtime is at work, by what they are for."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor

from zero_full._compat import TorchDispatchMode, identity_of, reads_value, returns_new
from zero_full.nested import tensors_in

Returned = TypeVar("Returned")
WHOLE = 0  # stands in the log for all buffers that grow and shrink


class Watch(TorchDispatchMode):
    """Writes down every storage that an operation makes, and when it is gone.

    A single number counts nothing. Who asks for the value of one that has none is told 1.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.whole: dict[int, torch.UntypedStorage] = {}
        self.size_of_whole = 0
        self.kind: str | None = None  # what is made now is for; None: nothing that counts
        self.log: list[tuple[str, int, int]] = []  # for what, which storage, and bytes that came or went
        self.alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.numbers = count(WHOLE + 1)
        self.makes_new: dict[Any, bool] = {}

    def begin(self, whole: Iterable[Tensor]) -> None:
        """Forget what was. `whole` are buffers that are there already, and empty now and then.

        Their size is looked at whenever somebody copies into one: that is what one has grown for.
        """
        self.log.clear()
        self.alive.clear()
        self.size_of_whole = 0
        self.whole = {identity_of(t.untyped_storage()): t.untyped_storage() for t in whole}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if reads_value(func) and args[0].is_meta:
            return 1
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and identity_of(args[0].untyped_storage()) in self.whole:
            self._look_at_whole()
        elif self._is_new(func) and self.kind is not None:
            for tensor in tensors_in(result):
                if self._counts(tensor):
                    self._born(tensor.untyped_storage(), self.kind)
        return result

    def _is_new(self, func: Any) -> bool:
        if func not in self.makes_new:
            self.makes_new[func] = returns_new(func)
        return self.makes_new[func]

    def _counts(self, tensor: Tensor) -> bool:
        """What is not on the meta device is on nobody's."""
        return tensor.is_meta and tensor.dim() > 0

    def _look_at_whole(self) -> None:
        size = sum(storage.nbytes() for storage in self.whole.values())
        self.log.append(("gathered", WHOLE, size - self.size_of_whole))
        self.size_of_whole = size

    def _born(self, storage: torch.UntypedStorage, kind: str) -> None:
        number, size = next(self.numbers), storage.nbytes()
        self.log.append((kind, number, size))
        self.alive[number] = weakref.ref(storage, partial(self._gone, kind, number, size))

    def _gone(self, kind: str, number: int, size: int, _: object) -> None:
        if self.alive.pop(number, None) is not None:
            self.log.append((kind, number, -size))

    @contextmanager
    def of(self, kind: str | None) -> Iterator[None]:
        """What is made in this block is for that."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def around(self, kind: str | None, call: Callable[..., Returned]) -> Callable[..., Returned]:
        """The same call, with all it makes for that."""

        def watched(*given: Any) -> Returned:
            with self.of(kind):
                return call(*given)

        return watched

    def most(self, kind: str) -> int:
        """The most bytes at a time, without what is still alive."""
        now = most = 0
        for each, number, size in self.log:
            if each == kind and number not in self.alive:
                now += size
                most = max(most, now)
        return most
