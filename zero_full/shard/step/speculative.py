"""Steps that are taken on the host before anybody has decided that they are to be taken.

[Note: early steps] A slice's gradients are on the host long before those of the first layers are. Its step
needs no others but for one thing: whether all gradients together are finite, and too large. So it is taken on
the guess that they are finite and not clipped, beside backward, in other memory. When the norm is known, and
the guess was right, that memory takes the place of the slice's own, which serves for another one; else it is
dropped, and the step is taken as ever: nothing has to be undone, so every bit is what it would have been.

Memory of a slice's own and memory to step it in change places, so a slice has two pieces for good. Where less
is allowed than two for each, slices get theirs as they come, until there is no more: the others are stepped
in their turn.

A guess is right if the step is to be taken with the same factor, the same options of the groups and all of
the slice's parameters, and nobody has written to gradients, masters, state or parameters since.
"""

import logging
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_full._compat import version_of
from zero_full.comm.lane import Done, Pending, Thread
from zero_full.kernels.files import aligned_empty
from zero_full.offload import Block
from zero_full.optim.step import Peers, Piece, Stepper
from zero_full.shard.group.master import Owned
from zero_full.shard.group.parameters import Member

log = logging.getLogger("zero_full")
TOO_LITTLE = (
    "early_bytes of HostTier is %s: %s is never stepped beside backward, nor is any slice as large, as that "
    "takes %s bytes, twice what the slice has on the host"
)


@dataclass
class Guess:
    """One slice's step, as it would be."""

    stepper: Stepper
    factor: float
    options: list[dict[str, Any]]
    gradients: Tensor
    pending: Pending = field(default_factory=Done)
    seen: list[int] = field(default_factory=list)  # versions of gradients and of all that was copied
    block: Block | None = None  # None: it was not taken
    memory: Tensor | None = None
    before: list[dict[str, Any]] = field(default_factory=list)  # numbers of the state that it began with
    numbers: dict[Member, dict[str, Any]] = field(default_factory=dict)  # and those that it came to


class EarlySteps:
    """See [Note: early steps]."""

    def __init__(
        self, optimizer: Optimizer, tensors_of: Callable[[Owned], list[Tensor]], most: int | None
    ) -> None:
        """`tensors_of` says what a step changes. `most`: bytes that these steps may need; None: any."""
        self.optimizer, self.tensors_of, self.most = optimizer, tensors_of, most
        self.lane = Thread("zero_full-early-steps")
        self.guesses: dict[Owned, Guess] = {}
        self.spares: list[Tensor] = []
        self.places: dict[Owned, Tensor] = {}  # of slices that lie in memory of ours
        self.sizes: dict[Owned, int] = {}  # of slices that have, or will have, two pieces of memory
        self.has_told = False
        self.stops = False
        self.right = self.wrong = 0  # guesses

    def held(self) -> list[Tensor]:
        """Memory that no slice has now."""
        return [*self.spares, *(g.memory for g in list(self.guesses.values()) if g.memory is not None)]

    def close(self) -> None:
        """Let go of everything."""
        self.drop()
        self.lane.close()
        self.spares.clear()
        self.places.clear()
        self.sizes.clear()

    # Guessing ------------------------------------------------------------------------------------

    def begin(self, owned: Owned, stepper: Stepper, factor: float) -> None:
        """The last gradients of a slice are on their way to the host."""
        self._drop(owned)
        down = owned.bucket.down
        has_state = all(self.optimizer.state.get(piece.master) for piece in owned.pieces.values())
        if down is None or not (stepper.is_alone and stepper.fuses and owned.pieces and has_state):
            return
        options = [_comparable(self.optimizer.param_groups[number]) for number in _groups_of(owned)]
        guess = self.guesses[owned] = Guess(stepper, factor, options, down.memory)
        take = partial(self._take, owned, guess, stepper.with_these_options(), down.arrived)
        guess.pending = self.lane.submit(take, [], [])

    def _take(self, owned: Owned, guess: Guess, stepper: Stepper, arrived: Callable[[], Tensor]) -> None:
        """On the lane, where the groups' options may be others for a moment: with those of the guess."""
        if self.stops:
            return
        with torch.no_grad():
            gradients = arrived()
            tensors = self._tensors(owned)
            guess.seen = _versions(gradients, tensors)
            guess.before = self._numbers(owned)
            block = Block(tensors, None)
            memory = self._memory(owned, block.room)
            if memory is None:
                return
            guess.memory = memory
            windows = block.windows(tensors, memory, copy=True)
            pieces = self._pieces(owned, gradients, dict(zip(map(id, tensors), windows, strict=True)))
            stepper.step(list(pieces.values()), guess.factor, Peers())
            guess.numbers = {member: _numbers(piece.state) for member, piece in pieces.items()}
            guess.block = block

    def _tensors(self, owned: Owned) -> list[Tensor]:
        sent = [owned.sent] if owned.sent is not owned.master else []
        return [*self.tensors_of(owned), *sent]

    def _numbers(self, owned: Owned) -> list[dict[str, Any]]:
        """What the optimizer keeps of whole pieces, as it is now."""
        states = (self.optimizer.state[piece.master] for piece in owned.pieces.values())
        return [_comparable(_numbers(state)) for state in states]

    def _memory(self, owned: Owned, size: int) -> Tensor | None:
        """Room for a slice's block: a spare one's, or new memory; None if there is too little."""
        if self.most is not None and not self._allows(owned, size, self.most):
            return None
        for place, spare in enumerate(self.spares):
            if spare.numel() == size:
                return self.spares.pop(place)
        return aligned_empty(size, torch.uint8)

    def _allows(self, owned: Owned, size: int, most: int) -> bool:
        """Whether a slice may have two pieces of memory: for good, from the first time on."""
        others = sum(other for slice_, other in self.sizes.items() if slice_ is not owned)
        if 2 * (others + size) <= most:
            self.sizes[owned] = size
            return True
        if 2 * size > most and not self.has_told:
            self.has_told = True
            log.warning(TOO_LITTLE, f"{most:,}", owned.flat.name, f"{2 * size:,}")
        return False

    def _pieces(self, owned: Owned, gradients: Tensor, there: Mapping[int, Tensor]) -> dict[Member, Piece]:
        """The slice's pieces, in the other memory."""
        made = {}
        for member, piece in owned.pieces.items():
            known = self.optimizer.state[piece.master]
            state = {key: there.get(id(value), _copy(value)) for key, value in known.items()}
            copy = owned.flat.piece_of(there[id(owned.sent)], member) if owned.has_copies else None
            gradient = owned.flat.piece_of(gradients, member)
            master = there[id(piece.master)]
            made[member] = replace(piece, master=master, gradient=gradient, copy=copy, state=state)
        return made

    # Deciding ------------------------------------------------------------------------------------

    def stop(self) -> None:
        """The norm is known: what has not begun is not worth it any more."""
        self.stops = True

    def commit(self, owned: Owned, stepper: Stepper, used: Container[Member], factor: float) -> bool:
        """Whether the slice has taken this step already."""
        guess = self.guesses.pop(owned, None)
        if guess is None:
            return False
        with suppress(Exception):  # who takes the step now hears of it
            guess.pending.wait()
        if not self._was_right(owned, guess, stepper, used, factor):
            self._recycle(guess.memory)
            self.wrong += guess.block is not None
            return False
        assert guess.block is not None and guess.memory is not None
        guess.block.put(self._tensors(owned), guess.memory)
        owned.copies = owned.sent if owned.has_copies else None
        self._recycle(self.places.get(owned))
        self.places[owned] = guess.memory
        for member, numbers in guess.numbers.items():
            _restore(self.optimizer.state[owned.pieces[member].master], numbers)
        self.right += 1
        return True

    def _was_right(
        self, owned: Owned, guess: Guess, stepper: Stepper, used: Container[Member], factor: float
    ) -> bool:
        if guess.block is None or (guess.stepper, guess.factor) != (stepper, factor):
            return False
        options = [self.optimizer.param_groups[number] for number in _groups_of(owned)]
        gradients, members = owned.bucket.averaged_slice(), owned.pieces
        return (
            gradients is guess.gradients
            and all(member in used for member in members)
            and list(map(_comparable, options)) == guess.options
            and self._numbers(owned) == guess.before
            and _versions(guess.gradients, self._tensors(owned)) == guess.seen
        )

    def _recycle(self, memory: Tensor | None) -> None:
        if memory is not None:
            self.spares.append(memory)

    def _drop(self, owned: Owned) -> None:
        guess = self.guesses.pop(owned, None)
        if guess is not None:
            with suppress(Exception):
                guess.pending.wait()
            self._recycle(guess.memory)

    def drop(self) -> None:
        """Nothing is guessed any more; the next pass may begin again."""
        self.stops = True
        for owned in list(self.guesses):
            self._drop(owned)
        self.stops = False


def _groups_of(owned: Owned) -> list[int]:
    return sorted({piece.group for piece in owned.pieces.values()})


def _comparable(options: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options but for its parameters, as they are now: a list may be written to, as a tensor."""
    plain = {key: value for key, value in options.items() if key != "params"}
    return {key: v.tolist() if isinstance(v, Tensor) else deepcopy(v) for key, v in plain.items()}


def _versions(gradients: Tensor, tensors: list[Tensor]) -> list[int]:
    """What changes when somebody writes, or puts others in their places."""
    return [number for tensor in [gradients, *tensors] for number in (version_of(tensor), tensor.data_ptr())]


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _numbers(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: v for key, v in state.items() if not isinstance(v, Tensor) or not v.dim()}


def _restore(state: dict[str, Any], numbers: Mapping[str, Any]) -> None:
    for key, value in numbers.items():
        if isinstance(value, Tensor) and isinstance(state.get(key), Tensor):
            state[key].copy_(value)
        else:
            state[key] = value
