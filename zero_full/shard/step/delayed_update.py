"""Delayed updates: the host steps during the next forward and backward, one step late (ZeRO-Offload's DPU).

[Note: delayed updates] With `delay_after` of a host tier, the optimizer makes that many ordinary updates
first. From then on `step`

    completes the update that the previous call began: the parameters get their new values on every rank
    begins its own update, with its own gradients, learning rate and other options, and returns

So a forward pass sees all updates except the last one. Gradients are copied, because the next pass overwrites
them. A skipped step begins no update. Masters and optimizer state are written in the background and must not
be read until the update is complete. A call that reads them on all ranks completes the update first. A call
that one rank may make alone raises, because completing needs all ranks.

If user code writes to parameters in the meantime, either the write or the update would be lost, so completing
the update raises. A failure on any rank raises on all ranks at the same place, and the run cannot continue.
"""

import weakref
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from zero_full.comm.lane import Pending, ThreadLane
from zero_full.comm.topology import this_rank
from zero_full.formatting import listed
from zero_full.optim.step import Peers, Piece, Stepper
from zero_full.shard.group.checksum import column_sums
from zero_full.shard.group.master import StateByParameter
from zero_full.shard.group.parameter_group import TrainedGroup
from zero_full.shard.group.parameters import Member
from zero_full.shard.group.process_groups import Communicators

KEY = "offload_optimizer.delay_update_after (HostTier.delay_after)"
PENDING = (
    f"{{call}} while a delayed update is pending ({KEY}), which only all ranks together can complete. Call "
    "finish_update() of the engine's optimizer on every rank first"
)
LACKS_LAST_UPDATE = (
    f"the parameters lack the last delayed update ({KEY}), which is discarded with the failed step. Call "
    "finish_update() of the engine's optimizer on every rank before destroy, or continue from a checkpoint"
)
CANNOT_CONTINUE = "This run cannot continue: initialize the model again and load a checkpoint"


@dataclass
class Update:
    """An update that runs in the background, on the host."""

    groups: list[TrainedGroup]
    members: set[Member]  # parameters that it changes
    marks: list[Tensor | None]  # column sums of slices before it, by group; None: not writable by users
    pending: Pending  # the job


class DelayedUpdates:
    """Begins and completes delayed updates, if the tier has `delay_after`. See [Note: delayed updates]."""

    def __init__(
        self, base: torch.optim.Optimizer, state: StateByParameter, communicators: Communicators, after: int
    ) -> None:
        """`base` is the wrapped optimizer, `state` its state, and `after` the number of ordinary updates."""
        self.base, self.state, self.communicators, self.after = base, state, communicators, after
        self.lane = ThreadLane("zero_full-delayed-update")
        self.current: Update | None = None
        self.taken: int | None = None  # updates until now; None: look it up in the optimizer's state
        self.gradient_copies: dict[TrainedGroup, Tensor] = {}  # copies of the gradients of the current update
        self.broken = ""  # the message of the failure after which no update can be made
        # Called before the state is read. Weak, so that a deepcopy of the state does not copy the run.
        state.wait_for_update = partial(_wait, weakref.ref(self))

    def check(self, stepper: Stepper) -> None:
        """Raise ValueError if this stepper cannot run in the background."""
        if not stepper.is_alone:
            raise ValueError(
                f"{KEY} supports only torch's Adam and AdamW with the compiled operators, without an "
                f"overridden step, amsgrad or fused=False, and not this {type(self.base).__name__}. Remove "
                "the key"
            )

    # Beginning -----------------------------------------------------------------------------------

    def is_due(self, stepper: Stepper) -> bool:
        """Count one update, and return whether it is delayed. Every rank must call this once per update."""
        self.check(stepper)
        if self.taken is None:
            self.taken = self._look_up()
        self.taken += 1
        return self.taken > self.after

    def _look_up(self) -> int:
        """Return the most steps that any parameter has taken on any rank. Every rank must call this."""
        most = max((int(state.get("step", 0)) for state in self.base.state.values()), default=0)
        for communicator in self.communicators.everyone:
            most = max(communicator.gather_objects(most, "updates until now"))
        return int(most)

    def begin(
        self, stepper: Stepper, stepped: Sequence[TrainedGroup], used: Container[Member], factor: float
    ) -> None:
        """Begin to step these groups on the host, without waiting."""
        # All inputs are captured here: gradients are copied, and the options are those of this moment.
        pieces = [piece for group in stepped for piece in self._pieces(group, stepper, used)]
        marks = [self._mark(group) for group in stepped]
        for group in stepped:
            group.master.is_updating = True
        step = partial(stepper.with_these_options().step, pieces, factor, Peers())
        members = {member for group in stepped for member in group.members if member in used}
        self.current = Update(list(stepped), members, marks, self.lane.submit(step, [], []))

    def _pieces(self, group: TrainedGroup, stepper: Stepper, used: Container[Member]) -> Iterator[Piece]:
        """Yield a group's pieces with copies of their gradients, which later passes do not overwrite.

        If the parameters are on the host as well, the stepper must not write to them, because forward is
        using them: `take` copies the new values.
        """
        master = group.master
        group.gradients.check_dense()
        fetched = master.fetch(used, stepper.fuses and master.copy_threads is not None)
        for member, piece in master.pieces.items():
            if any(piece is each for each in fetched):
                assert piece.gradient is not None
                gradient = self._copy_of(group, member, piece.gradient)
                yield replace(piece, gradient=gradient, state=self.base.state[piece.master])
            piece.gradient = piece.copy = None

    def _copy_of(self, group: TrainedGroup, member: Member, gradient: Tensor) -> Tensor:
        """Copy a gradient into memory that is allocated once and reused in every step."""
        room = self.gradient_copies.get(group)
        if room is None or room.dtype != gradient.dtype:
            shard = group.parameters.shard
            room = self.gradient_copies[group] = group.master.tier.allocate(
                shard.numel(), gradient.dtype, shard.device
            )
        place = group.parameters.piece_of(room, member)
        assert place is not None
        return place.copy_(gradient.reshape(place.shape))

    def _mark(self, group: TrainedGroup) -> Tensor | None:
        """Return the column sums of a slice of the parameters, which show later writes by user code."""
        if group.master.copy_threads is not None:
            return group.master.synced_sums
        return None if group.parameters.released_at_rest else column_sums(group.parameters.shard)

    # Completing ----------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait for the background work, without completing the update. `failure_of` returns its error."""
        if self.current is not None:
            with suppress(Exception):
                self.current.pending.wait()

    def failure_of(self, update: Update) -> str:
        """Wait, and return the message of a failure of the background work; "" if it succeeded."""
        try:
            update.pending.wait()
        except Exception as error:
            return f"the delayed update has failed on rank {this_rank()}: {error!r}. {CANNOT_CONTINUE}"
        return ""

    def written(self, update: Update, names: Sequence[str]) -> str:
        """Return the message about parameters that user code wrote in the meantime, or "".

        `names`: parameters with writes that torch's version counters show.
        """
        members = {member.name for member in update.members}
        written = [name for name in names if name in members]
        if not written:
            pairs = zip(update.groups, update.marks, strict=True)
            marked = [(group, mark) for group, mark in pairs if mark is not None]
            differ = [(column_sums(group.parameters.shard) != mark).any() for group, mark in marked]
            flags = torch.stack(differ).tolist() if differ else []  # the host reads once
            written = [group.name for (group, _), differs in zip(marked, flags, strict=True) if differs]
        if not written:
            return ""
        return (
            f"{listed(written)}: parameters were written while a delayed update of them was pending ({KEY}), "
            "so the write or the update would be lost. Call finish_update() of the engine's optimizer on "
            "every rank first, or write inside zero_full.GatheredParameters(..., modifier_rank=0). "
            f"{CANNOT_CONTINUE}"
        )

    def take(self, update: Update) -> None:
        """Complete the update on this rank: copy the new values to its slices of the parameters."""
        self.current = None
        for group in update.groups:
            group.master.is_updating = False
            group.master.put_away()

    def discard(self, update: Update) -> None:
        """Discard the update, because all values will be loaded."""
        self.wait()
        self.current = None
        for group in update.groups:
            group.master.is_updating = False

    def check_none_pending(self, call: str) -> None:
        """Raise RuntimeError if an update is pending; for a `call` that a rank may make alone."""
        if self.current is not None:
            raise RuntimeError(PENDING.format(call=call))

    def close(self) -> None:
        """Wait for the background work, end its thread and free memory."""
        self.wait()
        self.current = None
        self.lane.close()
        self.gradient_copies.clear()


def _wait(updates: "weakref.ref[DelayedUpdates]") -> None:
    alive = updates()
    if alive is not None:
        alive.wait()
