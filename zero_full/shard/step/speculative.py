"""Speculative host steps: step a slice during backward into other memory, and swap it in if it applies.

[Note: early steps] The last layers' gradients are on the host long before those of the first layers. The step
of a slice depends on other gradients in two ways only: whether all are finite, and whether their norm is
clipped. So the host steps the slice during backward, on the guess that they are finite and not clipped. The
results go to other memory. Once the norm is known there are two cases. If the guess was right, this memory
replaces the slice's own, which becomes the spare for another slice. Otherwise it is dropped, and the slice is
stepped as usual. Nothing has to be rolled back, so the result is equal bit for bit.

A slice needs two blocks of memory for life, its current one and the one for its next step, and they swap
roles. If the limit allows fewer than two for every slice, slices get a second one in the order of their
gradients until the limit is reached. The others are stepped in `update`.

A guess is right if the step has the same factor and group options and includes all of the slice's parameters.
Also, user code must not have written to gradients, masters, state or parameters in the meantime.
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
from zero_full.comm.lane import Done, Pending, ThreadLane
from zero_full.kernels.files import aligned_empty
from zero_full.offload import Block
from zero_full.optim.step import Peers, Piece, Stepper
from zero_full.shard.group.parameter_group import TrainedGroup
from zero_full.shard.group.parameters import Member

log = logging.getLogger("zero_full")
TOO_LITTLE = (
    "early_bytes of HostTier is %s: %s and slices as large are not stepped during backward, which would take "
    "%s bytes, twice the slice's host memory"
)


@dataclass
class SpeculativeStep:
    """The speculative step of one slice."""

    stepper: Stepper
    factor: float  # of the gradients
    options: list[dict[str, Any]]  # of the parameter groups that the slice belongs to
    gradients: Tensor
    pending: Pending = field(default_factory=Done)  # the job
    seen: list[int] = field(default_factory=list)  # versions and addresses of its inputs, see `_versions`
    block: Block | None = None  # layout of the results in `memory`; None: the step was not made
    memory: Tensor | None = None  # the results: master, state and parameter copy
    before: list[dict[str, Any]] = field(default_factory=list)  # scalar state (`step`) at its beginning
    numbers: dict[Member, dict[str, Any]] = field(default_factory=dict)  # scalar state at its end


class SpeculativeSteps:
    """Makes, commits and drops speculative steps. See [Note: early steps]."""

    def __init__(
        self, optimizer: Optimizer, tensors_of: Callable[[TrainedGroup], list[Tensor]], most: int | None
    ) -> None:
        """`tensors_of` lists the tensors that a step changes. `most`: limit in bytes; None: no limit."""
        self.optimizer, self.tensors_of, self.most = optimizer, tensors_of, most
        self.lane = ThreadLane("zero_full-early-steps")
        self.guesses: dict[TrainedGroup, SpeculativeStep] = {}
        self.spares: list[Tensor] = []  # blocks that no slice uses now
        self.places: dict[TrainedGroup, Tensor] = {}  # the current block of a slice, once it was swapped
        self.sizes: dict[TrainedGroup, int] = {}  # bytes of a block, for slices that may have two
        self.has_warned = False  # the warning was logged
        self.stops = False  # jobs that have not begun return at once
        self.right = self.wrong = 0  # numbers of guesses

    def held(self) -> list[Tensor]:
        """Return blocks of memory that hold no slice's current values."""
        return [*self.spares, *(g.memory for g in list(self.guesses.values()) if g.memory is not None)]

    def close(self) -> None:
        """Drop pending guesses, end the thread and free memory."""
        self.drop()
        self.lane.close()
        self.spares.clear()
        self.places.clear()
        self.sizes.clear()

    # Guessing ------------------------------------------------------------------------------------

    def begin(self, group: TrainedGroup, stepper: Stepper, factor: float) -> None:
        """Begin to step a slice, because the copy of its last gradients to the host was queued."""
        self._drop(group)
        down = group.gradients.down
        has_state = all(self.optimizer.state.get(piece.master) for piece in group.master.pieces.values())
        if down is None or not (stepper.is_alone and stepper.fuses and group.master.pieces and has_state):
            return
        options = [_comparable(self.optimizer.param_groups[number]) for number in _groups_of(group)]
        guess = self.guesses[group] = SpeculativeStep(stepper, factor, options, down.memory)
        take = partial(self._take, group, guess, stepper.with_these_options(), down.arrived)
        guess.pending = self.lane.submit(take, [], [])

    def _take(
        self, group: TrainedGroup, guess: SpeculativeStep, stepper: Stepper, arrived: Callable[[], Tensor]
    ) -> None:
        """Step the slice into other memory; runs on the lane.

        `stepper` has the group options of the guess: user code may change them at the same time.
        """
        if self.stops:
            return
        with torch.no_grad():
            gradients = arrived()
            tensors = self._tensors(group)
            # Before anything is copied: a write by user code from here on makes the guess wrong.
            guess.seen = _versions(gradients, tensors)
            guess.before = self._numbers(group)
            block = Block(tensors, None)
            memory = self._memory(group, block.padded_size)
            if memory is None:
                return
            guess.memory = memory
            windows = block.windows(tensors, memory, copy=True)
            pieces = self._pieces(group, gradients, dict(zip(map(id, tensors), windows, strict=True)))
            stepper.step(list(pieces.values()), guess.factor, Peers())
            guess.numbers = {member: _numbers(piece.state) for member, piece in pieces.items()}
            guess.block = block  # last: it marks the step as complete

    def _tensors(self, group: TrainedGroup) -> list[Tensor]:
        sent = [group.master.sent] if group.master.sent is not group.master.values else []
        return [*self.tensors_of(group), *sent]

    def _numbers(self, group: TrainedGroup) -> list[dict[str, Any]]:
        """Return copies of the scalar state (such as `step`) of the slice's pieces."""
        states = (self.optimizer.state[piece.master] for piece in group.master.pieces.values())
        return [_comparable(_numbers(state)) for state in states]

    def _memory(self, group: TrainedGroup, size: int) -> Tensor | None:
        """Take a spare block or allocate one; None if the limit does not allow it."""
        if self.most is not None and not self._allows(group, size, self.most):
            return None
        for place, spare in enumerate(self.spares):
            if spare.numel() == size:
                return self.spares.pop(place)
        return aligned_empty(size, torch.uint8)

    def _allows(self, group: TrainedGroup, size: int, most: int) -> bool:
        """Return whether the slice may have two blocks of memory. Once allowed, it stays allowed."""
        others = sum(other for slice_, other in self.sizes.items() if slice_ is not group)
        if 2 * (others + size) <= most:
            self.sizes[group] = size
            return True
        if 2 * size > most and not self.has_warned:
            self.has_warned = True
            log.warning(TOO_LITTLE, f"{most:,}", group.name, f"{2 * size:,}")
        return False

    def _pieces(
        self, group: TrainedGroup, gradients: Tensor, there: Mapping[int, Tensor]
    ) -> dict[Member, Piece]:
        """Make the slice's pieces from the other memory. `there`: its windows, by the id of the tensor."""
        made = {}
        for member, piece in group.master.pieces.items():
            known = self.optimizer.state[piece.master]
            state = {key: there.get(id(value), _copy(value)) for key, value in known.items()}
            copy = (
                group.parameters.piece_of(there[id(group.master.sent)], member)
                if group.master.has_copies
                else None
            )
            gradient = group.parameters.piece_of(gradients, member)
            master = there[id(piece.master)]
            made[member] = replace(piece, master=master, gradient=gradient, copy=copy, state=state)
        return made

    # Deciding ------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Cancel jobs that have not begun: the norm is known, so `update` can step these slices as well."""
        self.stops = True

    def commit(self, group: TrainedGroup, stepper: Stepper, used: Container[Member], factor: float) -> bool:
        """Swap in the speculative step if it is right. Returns False if the slice must still be stepped."""
        guess = self.guesses.pop(group, None)
        if guess is None:
            return False
        with suppress(Exception):  # the ordinary step that follows will raise the same error
            guess.pending.wait()
        if not self._was_right(group, guess, stepper, used, factor):
            self._recycle(guess.memory)
            self.wrong += guess.block is not None
            return False
        assert guess.block is not None and guess.memory is not None
        guess.block.put(self._tensors(group), guess.memory)
        group.master.copies = group.master.sent if group.master.has_copies else None
        # The slice's tensors have moved to the new block, so the old one is free for another slice.
        self._recycle(self.places.get(group))
        self.places[group] = guess.memory
        for member, numbers in guess.numbers.items():
            _restore(self.optimizer.state[group.master.pieces[member].master], numbers)
        self.right += 1
        return True

    def _was_right(
        self,
        group: TrainedGroup,
        guess: SpeculativeStep,
        stepper: Stepper,
        used: Container[Member],
        factor: float,
    ) -> bool:
        """Return whether the step is the one that was guessed, and none of its inputs was written."""
        if guess.block is None or (guess.stepper, guess.factor) != (stepper, factor):
            return False
        options = [self.optimizer.param_groups[number] for number in _groups_of(group)]
        gradients, members = group.gradients.averaged_slice(), group.master.pieces
        return (
            gradients is guess.gradients
            and all(member in used for member in members)
            and list(map(_comparable, options)) == guess.options
            and self._numbers(group) == guess.before
            and _versions(guess.gradients, self._tensors(group)) == guess.seen
        )

    def _recycle(self, memory: Tensor | None) -> None:
        if memory is not None:
            self.spares.append(memory)

    def _drop(self, group: TrainedGroup) -> None:
        guess = self.guesses.pop(group, None)
        if guess is not None:
            with suppress(Exception):
                guess.pending.wait()
            self._recycle(guess.memory)

    def drop(self) -> None:
        """Drop all speculative steps, after waiting for their jobs. The next pass may begin new ones."""
        self.stops = True
        for group in list(self.guesses):
            self._drop(group)
        self.stops = False


def _groups_of(group: TrainedGroup) -> list[int]:
    return sorted({piece.group for piece in group.master.pieces.values()})


def _comparable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a group's options except its parameters; lists and tensors could be changed in place later."""
    plain = {key: value for key, value in options.items() if key != "params"}
    return {key: v.tolist() if isinstance(v, Tensor) else deepcopy(v) for key, v in plain.items()}


def _versions(gradients: Tensor, tensors: list[Tensor]) -> list[int]:
    """List version counters and addresses: they change when a tensor is written or replaced."""
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
