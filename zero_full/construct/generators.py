"""Record random draws and make them at replay. See [Note: recording and replay] in `recording`.

[Note: a generator between recordings] A draw on the meta device does not advance a generator. While
operations are recorded, the generator is at a *mark* instead: a unique random seed that stands for its state
after a draw. When the recording pauses, the generator gets its previous state back, with a *stamp* that
stands for the mark: another `initial_seed()`, which does not affect its numbers. So three cases can be
distinguished when the recording resumes:

    stamped, same state      the generator was not used: continue after that draw
    stamped, another state   user code has drawn from it, without the numbers that are only recorded
    not stamped              user code has set it: continue from the new state

The stamp is removed when replay has computed the state after the last draw.
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

TIMEOUT_S = 300  # seconds to wait while another thread uses torch's generator
STAMP = int.from_bytes(b"zero", "little") << 32  # prefix of stamps; above 62 bits, so no mark collides
CPU = torch.device("cpu")
log = logging.getLogger("zero_full")

_generator_lock = Lock()  # process-wide, like torch's default generator
_stamps = count()  # unique in the process, to tell apart ranks that are threads


class RandomStream:
    """The recorded draws from one generator. See [Note: a generator between recordings]."""

    def __init__(self, generator: Generator) -> None:
        self.generator, self.initial_state, self.is_own = generator, generator.get_state(), True
        seed = generator.initial_seed()
        self.seed = 0 if _is_stamp(seed) else seed  # a stamp remains from a model that was not initialized
        self.marks: set[int] = set()
        self.returned_to: set[int] = set()  # marks that user code has set the generator back to
        self.first = self.mark()
        self.seen_state = self.initial_state  # when the recording last resumed
        self.paused_state, self.paused_numbers = self.initial_state, b""  # when it last paused
        self.resume_at: int | None = None  # mark to resume at
        self.stamps: dict[int, tuple[int | None, bytes]] = {}  # stamp -> mark, digest of numbers
        self.drawn_out_of_order = False  # user code has drawn from it while recorded draws were pending

    def mark(self) -> int:
        """Seed the generator with a new unique mark."""
        self.last = randbits(62)
        self.generator.manual_seed(self.last)
        self.marks.add(self.last)
        self.drawn_out_of_order = False
        return self.last

    def at_mark(self) -> bool:
        """Return whether its next numbers depend on draws that are only recorded."""
        return self.generator.initial_seed() in self.marks

    def origin(self) -> Tensor | int:
        """Return the origin of the next numbers: a draw's mark, or a state set since."""
        seed = self.generator.initial_seed()
        if seed not in self.marks:
            return self.generator.get_state()
        if seed != self.last:
            self.returned_to.add(seed)
        return seed

    def start_from(self, state: Tensor) -> None:
        """Set the state from which replay starts."""
        self.is_own = self.is_own and torch.equal(state, self.initial_state)
        self.initial_state = state

    def pause(self) -> None:
        """Replace a mark in the generator by its previous state with a stamp."""
        self.resume_at = None
        if self.at_mark():
            self.origin()
            self.resume_at, stamp = self.generator.initial_seed(), STAMP + next(_stamps)
            on_cpu = self.generator.device == CPU  # only CPU generator states can be stamped
            self.generator.set_state(with_initial_seed(self.seen_state, stamp) if on_cpu else self.seen_state)
            self.stamps[stamp] = self.resume_at, self._numbers()
        self.paused_state, self.paused_numbers = self.generator.get_state(), self._numbers()

    def current_mark(self) -> int | None:
        """Return the mark of the draw before the next numbers; None if user code has set or used it."""
        self.seen_state, stamp = self.generator.get_state(), self.generator.initial_seed()
        if not torch.equal(self.seen_state, self.paused_state):
            # An unknown stamp is of another rank that is a thread: these share torch's default generator.
            mark, numbers = self.stamps.get(stamp, (self.resume_at, self.paused_numbers))
            self.drawn_out_of_order = _is_stamp(stamp) and numbers != self._numbers()
            self.resume_at = mark if _is_stamp(stamp) and not self.drawn_out_of_order else None
        return self.resume_at

    def resume(self) -> None:
        """Return to the last mark, unless user code has set or used the generator since."""
        mark = self.current_mark()
        if mark is not None:
            self.generator.manual_seed(mark)

    def set_final_state(self, mark: int | None, state: Tensor) -> None:
        """Set the generator to its known state at a mark, unless it was used or belongs to another rank."""
        now = self.current_mark()
        if now is not None and now == mark and self.is_own:
            self.generator.set_state(state)
        elif self.drawn_out_of_order:
            log.warning(
                "random numbers were drawn between zero_full.Init and initialize without torch.manual_seed. "
                "They repeat numbers of construction, which draws its own in initialize."
            )
        if _is_stamp(self.generator.initial_seed()):
            self.generator.set_state(with_initial_seed(self.generator.get_state(), self.seed))
        self.paused_state, self.resume_at = self.generator.get_state(), None

    def _numbers(self) -> bytes:
        """Return a digest that is equal for generators that produce the same numbers."""
        state = self.generator.get_state()
        return digest(with_initial_seed(state, 0) if self.generator.device == CPU else state)


def _is_stamp(seed: int) -> bool:
    return seed >> 32 == STAMP >> 32


@dataclass(frozen=True)
class Draw:
    """The origin of an operation's random numbers."""

    stream: RandomStream
    start: Tensor | int  # a generator state, or the mark of the previous draw
    mark: int  # stands for the generator's state after the draw


class RandomStreams:
    """All generators that a construction draws from: torch's default one, and those in arguments."""

    def __init__(self) -> None:
        self.main = RandomStream(torch.default_generator)
        self._all = {id(torch.default_generator): self.main}

    def __iter__(self) -> Iterator[RandomStream]:
        return iter(self._all.values())

    def of(self, generator: Generator) -> RandomStream:
        """Return a generator's stream. From the first call on, its draws are recorded."""
        if id(generator) not in self._all:
            self._all[id(generator)] = RandomStream(generator)
        return self._all[id(generator)]

    def has_pending_draws(self, generator: Generator) -> bool:
        """Return whether the generator cannot draw yet, because earlier draws are only recorded."""
        return id(generator) in self._all and self._all[id(generator)].at_mark()

    def drawn_out_of_order(self, generator: Generator) -> bool:
        """Return whether user code has drawn from the generator while recorded draws were pending."""
        return id(generator) in self._all and self._all[id(generator)].drawn_out_of_order

    def draw(self, generator: Generator) -> Draw:
        """Record a draw."""
        stream = self.of(generator)
        return Draw(stream, stream.origin(), stream.mark())

    def final_marks(self) -> dict[RandomStream, int]:
        """Return the mark of the last draw of each generator that was not set or used since."""
        with default_generator_lock():
            return {stream: mark for stream in self if (mark := stream.current_mark()) is not None}

    def set_final_states(self, known: Mapping[RandomStream, tuple[int, Tensor]]) -> None:
        """Set the generators to their real states, where these marks and states are known."""
        with default_generator_lock():
            for stream in self:
                stream.set_final_state(*known.get(stream, (None, stream.initial_state)))

    def pause(self) -> None:
        """Pause all generators."""
        for stream in self:
            stream.pause()

    def resume(self) -> None:
        """Resume all generators."""
        for stream in self:
            stream.resume()


@contextmanager
def default_generator_lock() -> Iterator[None]:
    """Lock torch's default generator against other ranks that are threads of this process."""
    if not _generator_lock.acquire(timeout=TIMEOUT_S):
        raise RuntimeError(
            f"another thread has been constructing its model for {TIMEOUT_S} s, and ranks that are threads "
            "take turns. Leave its zero_full.Init sooner, or make each rank a process."
        )
    try:
        yield
    finally:
        _generator_lock.release()


@contextmanager
def as_default_generator(generator: Generator) -> Iterator[None]:
    """Run the context with torch's default generator in this state, for operations without the argument."""
    with default_generator_lock():
        kept = torch.get_rng_state()
        torch.set_rng_state(generator.get_state())
        try:
            yield
        finally:
            generator.set_state(torch.get_rng_state())
            torch.set_rng_state(kept)
