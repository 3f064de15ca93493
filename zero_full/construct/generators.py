"""Random numbers that are recorded now and drawn later. See [Note: recording and replay] in `deferred`.

[Note: a generator between recordings] Drawing on the meta device leaves a generator alone. While operations
are recorded, it is at a *mark* instead: a random seed that nobody else sets, which stands for "as after that
draw". When the recording pauses, the generator gets back the state that it had, with a *stamp* that stands
for the mark: another `initial_seed()`, which changes no number that it gives. So three cases differ when the
recording goes on:

    stamped, as we left it   nobody has used the generator: go on as after that draw
    stamped, another state   somebody has drawn from it, and missed the numbers that are only recorded
    not stamped              somebody has set it: go on from there

The stamp goes when replay knows the state after the last draw.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from secrets import randbits
from threading import Lock

import torch
from torch import Generator, Tensor

from zero_full._compat import with_initial_seed
from zero_full.shard.group.checksum import digest

PATIENCE = 300  # seconds to wait while another thread uses torch's generator
STAMP = int.from_bytes(b"zero", "little") << 32  # what stamps begin with; more than 62 bits, as no mark has
CPU = torch.device("cpu")
log = logging.getLogger("zero_full")

_torchs_generator = Lock()  # one for the process, as the generator is
_stamps = count()  # no two alike in a process, or one rank would take another's for its own


class RandomStream:
    """A generator's random numbers. See [Note: a generator between recordings]."""

    def __init__(self, generator: Generator) -> None:
        self.generator, self.before, self.is_own = generator, generator.get_state(), True
        seed = generator.initial_seed()
        self.seed = 0 if _is_stamp(seed) else seed  # a stamp is left by a model that nobody has initialized
        self.marks: set[int] = set()
        self.returned_to: set[int] = set()
        self.first = self.mark()
        self.shown = self.left = self.before
        self.numbers_left = b""
        self.resume_at: int | None = None  # a mark
        self.stamps: dict[int, tuple[int | None, bytes]] = {}  # the mark, and what numbers were left with it
        self.has_strayed = False  # somebody has drawn from it while it showed a state of before

    def mark(self) -> int:
        """Bring the generator to a state that nobody else sets."""
        self.last = randbits(62)
        self.generator.manual_seed(self.last)
        self.marks.add(self.last)
        self.has_strayed = False
        return self.last

    def at_mark(self) -> bool:
        """Whether its next numbers depend on draws that are only recorded."""
        return self.generator.initial_seed() in self.marks

    def place(self) -> Tensor | int:
        """What the generator's next numbers follow: a draw's mark, or a state that it was set to since."""
        seed = self.generator.initial_seed()
        if seed not in self.marks:
            return self.generator.get_state()
        if seed != self.last:
            self.returned_to.add(seed)
        return seed

    def start_from(self, state: Tensor) -> None:
        """Make replay begin from this state."""
        self.is_own = self.is_own and torch.equal(state, self.before)
        self.before = state

    def pause(self) -> None:
        """Leave no mark in the generator."""
        self.resume_at = None
        if self.at_mark():
            self.place()
            self.resume_at, stamp = self.generator.initial_seed(), STAMP + next(_stamps)
            on_cpu = self.generator.device == CPU  # the only kind whose states can be stamped
            self.generator.set_state(with_initial_seed(self.shown, stamp) if on_cpu else self.shown)
            self.stamps[stamp] = self.resume_at, self._numbers()
        self.left, self.numbers_left = self.generator.get_state(), self._numbers()

    def look(self) -> int | None:
        """The mark of the draw that its next numbers follow; None: somebody has set it or used it."""
        self.shown, stamp = self.generator.get_state(), self.generator.initial_seed()
        if not torch.equal(self.shown, self.left):
            # A stamp that is not ours is another rank's, if ranks are threads: they share torch's generator.
            mark, numbers = self.stamps.get(stamp, (self.resume_at, self.numbers_left))
            self.has_strayed = _is_stamp(stamp) and numbers != self._numbers()
            self.resume_at = mark if _is_stamp(stamp) and not self.has_strayed else None
        return self.resume_at

    def resume(self) -> None:
        """Go on where recorded construction has left it, unless it has been set or used since."""
        mark = self.look()
        if mark is not None:
            self.generator.manual_seed(mark)

    def settle(self, mark: int | None, state: Tensor) -> None:
        """The state at a mark is known: take the generator there, if it is ours and nobody has used it."""
        now = self.look()
        if now is not None and now == mark and self.is_own:
            self.generator.set_state(state)
        elif self.has_strayed:
            log.warning(
                "random numbers were drawn between zero_full.Init and initialize without torch.manual_seed: "
                "they are some that construction draws, too, and not those that follow"
            )
        if _is_stamp(self.generator.initial_seed()):
            self.generator.set_state(with_initial_seed(self.generator.get_state(), self.seed))
        self.left, self.resume_at = self.generator.get_state(), None

    def _numbers(self) -> bytes:
        """A digest that is the same for generators that give the same numbers."""
        state = self.generator.get_state()
        return digest(with_initial_seed(state, 0) if self.generator.device == CPU else state)


def _is_stamp(seed: int) -> bool:
    return seed >> 32 == STAMP >> 32


@dataclass(frozen=True)
class Draw:
    """Where an operation's random numbers come from."""

    stream: RandomStream
    start: Tensor | int  # a state, or the mark of the draw before
    mark: int  # stands for the generator's state afterwards


class RandomStreams:
    """The generators that a construction draws from: torch's own and what it was given."""

    def __init__(self) -> None:
        self.main = RandomStream(torch.default_generator)
        self._all = {id(torch.default_generator): self.main}

    def __iter__(self) -> Iterator[RandomStream]:
        return iter(self._all.values())

    def of(self, generator: Generator) -> RandomStream:
        """A generator's stream; from now on, its numbers are only recorded."""
        if id(generator) not in self._all:
            self._all[id(generator)] = RandomStream(generator)
        return self._all[id(generator)]

    def has_marked(self, generator: Generator) -> bool:
        """Whether the generator cannot give real numbers, because those before are only recorded."""
        return id(generator) in self._all and self._all[id(generator)].at_mark()

    def has_strayed(self, generator: Generator) -> bool:
        """Whether somebody has drawn from the generator and missed numbers that are only recorded."""
        return id(generator) in self._all and self._all[id(generator)].has_strayed

    def draw(self, generator: Generator) -> Draw:
        """Record that numbers are drawn."""
        stream = self.of(generator)
        return Draw(stream, stream.place(), stream.mark())

    def ends(self) -> dict[RandomStream, int]:
        """Marks of the draws that generators follow now."""
        with alone_with_torchs_generator():
            return {stream: mark for stream in self if (mark := stream.look()) is not None}

    def settle(self, known: Mapping[RandomStream, tuple[int, Tensor]]) -> None:
        """Bring generators to their real states, where these marks and states are known."""
        with alone_with_torchs_generator():
            for stream in self:
                stream.settle(*known.get(stream, (None, stream.before)))

    def pause(self) -> None:
        """Leave no mark in any generator."""
        for stream in self:
            stream.pause()

    def resume(self) -> None:
        """Go on recording."""
        for stream in self:
            stream.resume()


@contextmanager
def alone_with_torchs_generator() -> Iterator[None]:
    """Inside, no other rank that is a thread of this process can use torch's generator."""
    if not _torchs_generator.acquire(timeout=PATIENCE):
        raise RuntimeError(f"another thread has been constructing its model for {PATIENCE} s")
    try:
        yield
    finally:
        _torchs_generator.release()


@contextmanager
def as_torchs_generator(generator: Generator) -> Iterator[None]:
    """Inside, torch's generator is in this one's state: for operations that take no generator."""
    with alone_with_torchs_generator():
        kept = torch.get_rng_state()
        torch.set_rng_state(generator.get_state())
        try:
            yield
        finally:
            generator.set_state(torch.get_rng_state())
            torch.set_rng_state(kept)
