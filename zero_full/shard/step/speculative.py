"""Speculative host steps: step a slice during backward into other memory, and swap it in if it applies.

[Note: early steps] The last layers' gradients are on the host long before those of the first layers. The step
of a slice depends on other gradients in two ways only: whether all are finite, and whether their norm is
clipped. So the host steps the slice during backward, on the guess that they are finite and not clipped. The
results go to other memory. Once the norm is known there are two cases. If the guess was right, this memory
and the slice's own swap roles. Otherwise the results are dropped, and the slice is stepped as usual. Nothing
has to be rolled back, so the result is equal bit for bit.

So a slice has all of its memory twice, for life: master, optimizer state, and the copy of the parameters that
is sent to the device. The tier allocates both masters and both copies, in the arena and therefore page-locked
if wanted, because either may be sent. If the limit does not allow two for every slice, slices get them in the
order of their gradients until it is reached. The others are stepped in `update`.

A guess is right if the step has the same factor and group options and includes all of the slice's parameters.
Also, user code must not have written to gradients, masters, state or parameters in the meantime.
"""

import logging
from collections.abc import Callable, Container, Mapping, Sequence
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
    is_made: bool = False  # the results are complete
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
        # The other memory of each slice that has some, for the tensors of `_own`.
        self.others: dict[TrainedGroup, list[Tensor]] = {}
        self.has_warned = False  # the warning was logged
        self.stops = False  # jobs that have not begun return at once
        self.right = self.wrong = 0  # numbers of guesses

    def held(self) -> list[Tensor]:
        """Return the separate memory of speculative steps, which holds no slice's current values."""
        return [tensor for other in list(self.others.values()) for tensor in other]

    def close(self) -> None:
        """Drop pending speculative steps, end the thread and free memory."""
        self.drop()
        self.lane.close()
        self.others.clear()

    # Guessing ------------------------------------------------------------------------------------

    def begin(self, group: TrainedGroup, stepper: Stepper, factor: float) -> None:
        """Begin to step a slice, because the copy of its last gradients to the host was queued."""
        self._drop(group)
        down = group.gradients.down
        has_state = all(self.optimizer.state.get(piece.master) for piece in group.master.pieces.values())
        if down is None or not (stepper.is_alone and stepper.fuses and group.master.pieces and has_state):
            return
        other = self._other(group)
        if other is None:
            return
        options = [_comparable(self.optimizer.param_groups[number]) for number in _groups_of(group)]
        guess = self.guesses[group] = SpeculativeStep(stepper, factor, options, down.memory)
        take = partial(self._take, group, guess, stepper.with_these_options(), down.arrived, other)
        guess.pending = self.lane.submit(take, [], [])

    def _take(
        self,
        group: TrainedGroup,
        guess: SpeculativeStep,
        stepper: Stepper,
        arrived: Callable[[], Tensor],
        other: Sequence[Tensor],
    ) -> None:
        """Step the slice into its other memory; runs on the lane.

        `stepper` has the group options of the guess: user code may change them at the same time.
        """
        if self.stops:
            return
        with torch.no_grad():
            gradients = arrived()
            # Before anything is copied: a write by user code from here on makes the guess wrong.
            guess.seen = _versions(gradients, self._tensors(group))
            guess.before = self._numbers(group)
            own = self._own(group)
            # User code may have replaced tensors of the state: then no guess is made.
            if list(map(_kind, own)) != list(map(_kind, other)):
                return
            for there, tensor in zip(other, own, strict=True):
                there.copy_(tensor)
            pieces = self._pieces(group, gradients, dict(zip(map(id, own), other, strict=True)))
            stepper.step(list(pieces.values()), guess.factor, Peers())
            guess.numbers = {member: _numbers(piece.state) for member, piece in pieces.items()}
            guess.is_made = True  # last

    def _tensors(self, group: TrainedGroup) -> list[Tensor]:
        """List the tensors that a step changes, with the masters of single parameters."""
        sent = [group.master.sent] if group.master.sent is not group.master.values else []
        return [*self.tensors_of(group), *sent]

    def _own(self, group: TrainedGroup) -> list[Tensor]:
        """List the tensors with own memory: first the slice's master, last the copy for the device."""
        views = {id(piece.master) for piece in group.master.pieces.values()}
        return [tensor for tensor in self._tensors(group) if id(tensor) not in views]

    def _numbers(self, group: TrainedGroup) -> list[dict[str, Any]]:
        """Return copies of the scalar state (such as `step`) of the slice's pieces."""
        states = (self.optimizer.state[piece.master] for piece in group.master.pieces.values())
        return [_comparable(_numbers(state)) for state in states]

    def _other(self, group: TrainedGroup) -> list[Tensor] | None:
        """Return the slice's other memory, made in its first step; None if the limit does not allow it."""
        own = self._own(group)
        other = self.others.get(group)
        if other is not None and list(map(_kind, own)) == list(map(_kind, other)):
            return other
        if self.most is not None and not self._allows(group, _bytes_of(own), self.most):
            return None
        master = group.master
        self.others[group] = other = [
            master.tier.allocate(tensor.numel(), tensor.dtype, group.parameters.kind.device)
            if tensor is master.values or tensor is master.sent
            else torch.empty_like(tensor)
            for tensor in own
        ]
        return other

    def _allows(self, group: TrainedGroup, size: int, most: int) -> bool:
        """Return whether the limit allows the slice a second copy of its memory. Once allowed, it stays."""
        others = sum(_bytes_of(other) for slice_, other in self.others.items() if slice_ is not group)
        if 2 * (others + size) <= most:
            return True
        if 2 * size > most and not self.has_warned:
            self.has_warned = True
            log.warning(TOO_LITTLE, f"{most:,}", group.name, f"{2 * size:,}")
        return False

    def _pieces(
        self, group: TrainedGroup, gradients: Tensor, there: Mapping[int, Tensor]
    ) -> dict[Member, Piece]:
        """Make the slice's pieces from its other memory. `there` maps ids of own tensors to it."""
        made, values = {}, there[id(group.master.values)]
        for member, piece in group.master.pieces.items():
            known = self.optimizer.state[piece.master]
            state = {key: there.get(id(value), _copy(value)) for key, value in known.items()}
            copy = (
                group.parameters.piece_of(there[id(group.master.sent)], member)
                if group.master.has_copies
                else None
            )
            gradient = group.parameters.piece_of(gradients, member)
            master = group.parameters.piece_of(values, member)
            assert master is not None
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
            self.wrong += guess.is_made
            return False
        self._swap(group)
        group.master.copies = group.master.sent if group.master.has_copies else None
        for member, numbers in guess.numbers.items():
            _restore(self.optimizer.state[group.master.pieces[member].master], numbers)
        self.right += 1
        return True

    def _swap(self, group: TrainedGroup) -> None:
        """Make the results the slice's own, and its own memory the other one."""
        other, values = self.others[group], group.master.values
        for place, tensor in enumerate(self._own(group)):
            tensor.data, other[place] = other[place], tensor.data
        for member, piece in group.master.pieces.items():
            view = group.parameters.piece_of(values, member)
            assert view is not None
            piece.master.data = view

    def _was_right(
        self,
        group: TrainedGroup,
        guess: SpeculativeStep,
        stepper: Stepper,
        used: Container[Member],
        factor: float,
    ) -> bool:
        """Return whether the step is the one that was guessed, and none of its inputs was written."""
        if not guess.is_made or (guess.stepper, guess.factor) != (stepper, factor):
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

    def _drop(self, group: TrainedGroup) -> None:
        guess = self.guesses.pop(group, None)
        if guess is not None:
            with suppress(Exception):
                guess.pending.wait()

    def drop(self) -> None:
        """Drop all speculative steps, after waiting for their jobs. The next pass may begin new ones."""
        self.stops = True
        for group in list(self.guesses):
            self._drop(group)
        self.stops = False


def _bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


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
