"""A record computed anew, in another order that is as good, in memory that is used again at once.

Each stream and each thread does one thing after the other; a wait waits for its event; a stream does nothing
that its thread has not asked for yet. All else is free, and `choose` decides whose turn it is.

Addresses are dealt as a caching allocator deals them: in the order of the host's calls, from what the same
stream has let go of, the last first. What is let go of is filled with NaN when its stream gets there. The
host's is filled at once, and is not used again.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.order.trace import BYTES, COMPUTE, HOST, Item, Recorder, Ref, mapped

ALIGNMENT = 64  # bytes, as torch has it
NAN = 0xFF  # in all bytes: NaN in every type of numbers with a point
Choose = Callable[[Sequence[int]], int]  # of queues that can go on, the one that does


def side_first(ready: Sequence[int]) -> int:
    """What runs beside is never late."""
    return max(ready)


def side_last(ready: Sequence[int]) -> int:
    """What runs beside is always late."""
    return min(ready)


def script_first(ready: Sequence[int]) -> int:
    """The script's thread and stream are as far ahead as they can be; then comes what was made last."""
    return next((each for each in (HOST, COMPUTE) if each in ready), max(ready))


def seeded(seed: int) -> Choose:
    """Streams take turns of random lengths."""
    dice = random.Random(seed)
    last = [0]

    def choose(ready: Sequence[int]) -> int:
        if last[0] not in ready or dice.random() < 0.2:
            last[0] = dice.choice(ready)
        return last[0]

    return choose


class Player:
    """Plays a record as often as one likes."""

    def __init__(self, record: Recorder) -> None:
        self.record = record
        self.addresses = self._deal()
        self.tensors: dict[Ref, Tensor] = {}  # windows into the memory

    def _deal(self) -> list[int]:
        addresses, end = [-1] * len(self.record.blocks), 0
        free: dict[int, list[tuple[int, int]]] = {}  # by stream: address and size
        rooms: dict[int, tuple[int, int]] = {}
        made = {a.block for item in self.record.items if item.kind == "make" for a in item.accesses}
        for number, block in enumerate(self.record.blocks):
            if number not in made:
                rooms[number] = (end, _rounded(block.nbytes))
                end += rooms[number][1]
        for item in self.record.items:
            if item.kind in ("make", "free"):
                number = item.accesses[0].block
                block = self.record.blocks[number]
                need, pool = (
                    _rounded(block.nbytes),
                    [] if block.owner is None else free.setdefault(block.owner, []),
                )
                if item.kind == "free":
                    pool.append(rooms[number])
                    continue
                fitting = [room for room in reversed(pool) if need <= room[1] <= 2 * need]
                rooms[number] = fitting[0] if fitting else (end, need)
                if fitting:
                    pool.remove(fitting[0])
                else:
                    end += need
        for number, (address, _) in rooms.items():
            addresses[number] = address
        self.memory = torch.empty(end, dtype=BYTES)
        return addresses

    @torch.no_grad()
    def differences(self, choose: Choose) -> list[str]:
        """What comes out otherwise than in the record: values that the host reads, and final values."""
        self.memory.fill_(NAN)
        for number, block in enumerate(self.record.blocks):
            if block.before is not None:
                address = self.addresses[number]
                self.memory[address : address + block.nbytes].copy_(block.before)
        wrong: list[str] = []
        for number in self._order(choose):
            item = self.record.items[number]
            if item.kind == "free":
                address = self.addresses[item.accesses[0].block]
                self.memory[address : address + item.accesses[0].stop].fill_(NAN)
            elif item.kind == "op":
                self._compute(item)
            elif item.kind == "read" and not _same(self._call(item), item.seen):
                wrong.append(f"the host reads another value at {item.stack[0]}")
        return wrong

    def _order(self, choose: Choose) -> Sequence[int]:
        """The numbers of all items, as the device does them."""
        items = self.record.items
        queues: list[list[int]] = [[] for _ in self.record.queues]
        for number, item in reversed(list(enumerate(items))):
            queues[item.queue].append(number)
        known = {item.event for item in items if item.kind == "record"}
        passed, order = set[int](), list[int]()
        while any(queues):
            ready = []
            for each, queue in enumerate(queues):
                if queue:
                    item, asks = items[queue[-1]], queues[items[queue[-1]].thread]
                    asked = item.thread == each or not asks or asks[-1] > queue[-1]
                    if asked and (item.kind != "wait" or item.event in passed or item.event not in known):
                        ready.append(each)
            number = queues[choose(ready)].pop()
            if items[number].kind == "record":
                passed.add(items[number].event)
            order.append(number)
        return order

    def _tensor(self, ref: Ref) -> Tensor:
        if ref not in self.tensors:
            offset = self.addresses[ref.block] // ref.dtype.itemsize + ref.offset
            window = torch.empty(0, dtype=ref.dtype)
            self.tensors[ref] = window.set_(self.memory.untyped_storage(), offset, ref.size, ref.stride)
        return self.tensors[ref]

    def _call(self, item: Item) -> Any:
        operation, given, _ = item.call
        args, kwargs = mapped(self._tensor, Ref, given)
        return operation(*args, **kwargs)

    def _compute(self, item: Item) -> None:
        results, returned = self._call(item), item.call[2]
        if isinstance(returned, Ref):
            results, returned = [results], [returned]
        for result, ref in zip(results or (), returned or (), strict=True):
            if isinstance(ref, Ref) and result.data_ptr() != self._tensor(ref).data_ptr():
                self._tensor(ref).copy_(result)


def _rounded(nbytes: int) -> int:
    return max(-(-nbytes // ALIGNMENT) * ALIGNMENT, ALIGNMENT)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        plain = one.contiguous().reshape(-1).view(BYTES), other.contiguous().reshape(-1).view(BYTES)
        return torch.equal(*plain)
    return one == other or (one != one and other != other)
