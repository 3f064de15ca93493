"""The bill: bytes a rank holds and bytes a rank sends, measured rather than estimated.

Two independent measurements meet here.

* `held` adds up the storages of the tensors their owner names ("parameters", "gradients", ...).
* `Ledger.watch` listens to every torch operation of this thread and remembers each storage that
  comes out of one, so `live` finds memory that nobody admits to. In a healthy stage the two agree.

Traffic is written down by `Comm`, one entry a collective: the bytes *this* rank has to send.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def held(tensors: Iterable[Tensor | None]) -> int:
    """Bytes behind these tensors; storage that several of them share is counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t is not None}
    return sum(storage.nbytes() for storage in storages.values())


@dataclass(frozen=True)
class Event:
    """One line of a rank's diary: what happened, how many bytes it sent or moved, what was live then."""

    what: str
    sent: int
    live: int


class Ledger:
    """One rank's bytes: `sent` by collective, `moved` between its own memories, `live` and `peak`.

    `events` is the diary of all that, in order.
    """

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.events: list[Event] = []
        self.moved: Counter[str] = Counter()
        self.peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def live(self) -> int:
        """Bytes of every storage this rank created under `watch` and has not let go of."""
        storages = [ref() for ref in list(self._storages.values())]
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def total_sent(self) -> int:
        """Bytes this rank sent, all collectives together."""
        return sum(self.sent.values())

    def note(self, what: str, sent: int = 0) -> None:
        """Write one event into the diary."""
        self.events.append(Event(what, sent, self.live()))

    def charge(self, collective: str, nbytes: int) -> None:
        """Add the bytes this rank sends in one collective."""
        self.sent[collective] += nbytes
        self.note(collective, nbytes)

    def move(self, where: str, nbytes: int) -> None:
        """Add bytes copied between two memories of this rank, say "device to host"."""
        self.moved[where] += nbytes
        self.note(where, nbytes)

    def clear_traffic(self) -> None:
        """Forget what was sent so far, so that the next numbers are one step's."""
        self.sent.clear()
        self.moved.clear()
        self.events.clear()

    @contextmanager
    def watch(self) -> Iterator["Ledger"]:
        """Count every storage that operations of this thread create inside the `with`."""
        with _Watch(self):
            yield self

    def _saw(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, partial(self._gone, key))

    def _gone(self, key: int, _: object) -> None:
        self._storages.pop(key, None)


def tensors_in(items: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among these, and in lists and tuples among them."""
    for item in items:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from tensors_in(item)


class Listener(TorchDispatchMode):
    """Hears the operations of its thread, so each rank of a `run_world` has its own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and importing the compiler takes longer than a lesson's cell


class _Watch(Listener):
    """Shows a ledger what comes out of each operation."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # A storage that came in is somebody's already, perhaps another rank's: never charge the reader.
        came_in = {id(t.untyped_storage()) for t in tensors_in((*args, *kwargs.values()))}
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor([...]) is born here
            came_in = set()
        if func is torch.ops.aten.from_file.default:  # a mapped file is not memory
            return result
        for tensor in tensors_in((result,)):
            if id(tensor.untyped_storage()) not in came_in:
                self.ledger._saw(tensor)
        self.ledger.peak = max(self.ledger.peak, self.ledger.live())
        return result
