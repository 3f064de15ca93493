"""Accesses to the same bytes that nothing orders: a vector clock for each stream and each thread of the host.

An event has the clock of its queue, a wait joins it to another one's. What a thread asks a stream for comes
after what the thread has done and waited for. Two accesses of which one is a write, by two queues, are a race
unless the clock of the later one knows of the earlier one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tests.order.trace import Access, Item, Recorder

Clock = list[int]


@dataclass(frozen=True)
class Past:
    """An access that was."""

    queue: int
    time: int
    access: Access
    item: Item


@dataclass(frozen=True)
class Race:
    """Two accesses that nothing orders."""

    memory: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.memory}:\n  {self.first}\n  {self.second}"


def races(record: Recorder) -> list[Race]:
    """What a device may do in another order than the host has asked for, each pair of places once."""
    found: dict[tuple[str, str, str], Race] = {}
    for first, second in _conflicts(record):
        race = _told(record, first, second)
        found.setdefault((race.memory, race.first.partition("\n")[0], race.second.partition("\n")[0]), race)
    return list(found.values())


def _conflicts(record: Recorder) -> Iterator[tuple[Past, Past]]:
    size = len(record.queues)
    clocks, events = [[0] * size for _ in range(size)], dict[int, Clock]()
    pasts: list[list[Past]] = [[] for _ in record.blocks]
    for item in record.items:
        clock = clocks[item.queue]
        if item.thread != item.queue:
            _join(clock, clocks[item.thread])
        if item.kind == "wait" and item.event in events:  # else it was before anything was written down
            _join(clock, events[item.event])
        clock[item.queue] += 1
        for access in item.accesses:
            now = Past(item.queue, clock[item.queue], access, item)
            for past in pasts[access.block]:
                if _touch(past.access, access) and clock[past.queue] < past.time:
                    yield past, now
            pasts[access.block] = [p for p in pasts[access.block] if not _is_settled(p, now, clock)] + [now]
        if item.kind == "record":
            events[item.event] = list(clock)


def _join(clock: Clock, other: Clock) -> None:
    clock[:] = map(max, clock, other)


def _touch(one: Access, other: Access) -> bool:
    return (one.writes or other.writes) and one.start < other.stop and other.start < one.stop


def _is_settled(past: Past, now: Past, clock: Clock) -> bool:
    """Whether whoever comes after `now` comes after `past`, and would be told of `now` instead."""
    covers = now.access.start <= past.access.start and past.access.stop <= now.access.stop
    return covers and (now.access.writes or not past.access.writes) and past.time <= clock[past.queue]


def _told(record: Recorder, first: Past, second: Past) -> Race:
    block = record.blocks[first.access.block]
    gone = f", let go at {block.gone}" if block.gone else ""
    memory = f"{block.name or 'memory'} ({block.nbytes} bytes, made at {block.made}{gone})"
    return Race(memory, _place(record, first), _place(record, second))


def _place(record: Recorder, past: Past) -> str:
    does = {"free": "gives to others", "make": "makes"}.get(past.item.kind)
    does = does or ("writes" if past.access.writes else "reads")
    operation = past.item.call[0] if past.item.call else ""
    stack = "\n    ".join(past.item.stack[:6])
    return f"{record.queues[past.queue].name} {does} {operation}\n    {stack}"
