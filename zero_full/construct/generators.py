"""Random numbers that are recorded now and drawn later. See [Note: recording and replay] in `deferred`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from secrets import randbits
from threading import Lock

import torch
from torch import Generator, Tensor

PATIENCE = 300  # seconds to wait while another thread uses torch's generator

_torchs_generator = Lock()  # one for the process, as the generator is


class Stream:
    """A generator's random numbers."""

    def __init__(self, generator: Generator) -> None:
        self.generator, self.before, self.is_own = generator, generator.get_state(), True
        self.marks: set[int] = set()
        self.returned_to: set[int] = set()
        self.first = self.mark()
        self.end: Tensor | int | None = None  # what the constructor has set it to in the end
        self.left = self.before

    def mark(self) -> int:
        """Bring the generator to a state that nobody else sets."""
        self.last = randbits(62)
        self.generator.manual_seed(self.last)
        self.marks.add(self.last)
        return self.last

    def at_mark(self) -> bool:
        """Whether its next numbers depend on draws that are only recorded."""
        return self.generator.initial_seed() in self.marks

    def news(self) -> Tensor | int | None:
        """What it was set to since the last draw: a state, or a mark to return to."""
        seed = self.generator.initial_seed()
        if seed == self.last:
            return None
        if seed not in self.marks:
            return self.generator.get_state()
        self.returned_to.add(seed)
        return seed

    def start_from(self, state: Tensor) -> None:
        """At replay, draw what a generator in this state would."""
        self.is_own = self.is_own and torch.equal(state, self.before)
        self.before = state

    def close(self) -> None:
        """Leave no mark in the generator."""
        self.end = self.news()
        if self.at_mark():
            self.generator.set_state(self.before)
        self.left = self.generator.get_state()


@dataclass(frozen=True)
class Draw:
    """Where an operation's random numbers come from."""

    stream: Stream
    start: Tensor | int | None  # what the generator was set to before
    mark: int  # stands for the generator's state afterwards


class Streams:
    """The generators that a construction draws from: torch's own and what it was given."""

    def __init__(self) -> None:
        self.main = Stream(torch.default_generator)
        self._all = {id(torch.default_generator): self.main}

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._all.values())

    def of(self, generator: Generator) -> Stream:
        """A generator's stream; from now on, its numbers are only recorded."""
        if id(generator) not in self._all:
            self._all[id(generator)] = Stream(generator)
        return self._all[id(generator)]

    def has_marked(self, generator: Generator) -> bool:
        """Whether it cannot give real numbers, because those before are only recorded."""
        return id(generator) in self._all and self._all[id(generator)].at_mark()

    def draw(self, generator: Generator) -> Draw:
        """Record that numbers are drawn."""
        stream = self.of(generator)
        return Draw(stream, stream.news(), stream.mark())

    def close(self) -> None:
        """Construction is over: leave no marks."""
        for stream in self:
            stream.close()


@contextmanager
def alone_with_torchs_generator() -> Iterator[None]:
    """Hold torch's generator against other ranks that are threads of this process."""
    if not _torchs_generator.acquire(timeout=PATIENCE):
        raise RuntimeError(f"another thread has been constructing its model for {PATIENCE} s")
    try:
        yield
    finally:
        _torchs_generator.release()


@contextmanager
def as_torchs_generator(generator: Generator) -> Iterator[None]:
    """For operations that take no generator."""
    with alone_with_torchs_generator():
        kept = torch.get_rng_state()
        torch.set_rng_state(generator.get_state())
        try:
            yield
        finally:
            generator.set_state(torch.get_rng_state())
            torch.set_rng_state(kept)
