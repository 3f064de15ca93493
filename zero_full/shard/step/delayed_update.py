"""Updates that the host makes beside the next forward and backward pass, and that count one step late.

[Note: delayed updates] With `delay_after` of a host tier, steps are ordinary until the optimizer has made so
many updates. From then on `step`

    completes the update that the call before it has begun: parameters get their new values, on every rank
    begins its own, with its own gradients, learning rate and other options, and returns

so a forward pass sees all updates but the last one. Gradients are kept aside, because the next pass writes
over them. A step that is skipped begins no update. Masters and the optimizer's state are written meanwhile:
nobody reads them before the update is complete. What asks all ranks for them completes it, and it counts
from there on, earlier than it would have; what one rank asks for alone is refused.

Who writes to parameters by hand in the meantime would see that lost, or the update: it is an error. A
failure, on whatever rank, is raised on all of them where the update is completed, and the run cannot go on.
"""

import logging
import sys
import weakref
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from zero_full._compat import mark_stepped
from zero_full.comm.lane import Pending, Thread
from zero_full.errors import CommunicationError
from zero_full.formatting import listed
from zero_full.optim.step import Peers, Piece, Stepper
from zero_full.shard.group.checksum import fingerprint
from zero_full.shard.group.master import Owned
from zero_full.shard.group.parameters import Member
from zero_full.shard.step.agreement import refuse_on_all

log = logging.getLogger("zero_full")
Optimizer = Any  # a `ZeroOptimizer`, which imports this module
KEY = "offload_optimizer.delay_update_after (HostTier.delay_after)"
PENDING = (
    "{call} while an update is under way, of which this rank alone must not wait for the others "
    f"({KEY}): call finish_update() of the engine's optimizer on every rank first"
)
LACKING = (
    "the parameters lack the last update, which was made beside the step that is given up here "
    f"({KEY}): call finish_update() of the engine's optimizer on every rank before destroy, or go on from a "
    "checkpoint"
)
GIVEN_UP = "This run cannot go on: initialize the model again and load a checkpoint"


@dataclass
class Update:
    """One that has begun."""

    owned: list[Owned]
    members: set[Member]  # whose parameters change
    marks: list[Tensor | None]  # of the parameters' slices as they were; None: nobody can have written
    pending: Pending


class DelayedUpdates:
    """See [Note: delayed updates]."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        planned = optimizer.groups.dense.shard.device.type == "meta"
        self.after: int | None = None if planned else optimizer.settings.tier.delay_after
        self.lane = Thread("zero_full-delayed-update")
        self.current: Update | None = None
        self.taken: int | None = None  # updates until now; None: to be looked up
        self.aside: dict[Owned, Tensor] = {}  # the gradients of the current one
        self.broken = ""  # in words, why there will be none any more
        optimizer.own_state.settled = partial(_wait, weakref.ref(self))  # who copies the state copies no run
        awake = [owned for owned in optimizer.owned if not owned.bucket.asleep]
        if self.after is not None and awake:
            _refuse(optimizer.steppers.choose(awake), optimizer.base)

    # Beginning -----------------------------------------------------------------------------------

    def is_due(self, stepper: Stepper) -> bool:
        """Whether the update that is to be made now is a late one. Every rank must ask, once for each."""
        if self.after is None:
            return False
        _refuse(stepper, self.optimizer.base)
        if self.taken is None:
            self.taken = self._look_up()
        self.taken += 1
        return self.taken > self.after

    def _look_up(self) -> int:
        """The most steps that any parameter has taken, on any rank."""
        states = self.optimizer.base.state.values()
        most = max((int(state.get("step", 0)) for state in states), default=0)
        for group in self.optimizer.groups.everyone:
            most = max(group.gather_objects(most, "updates until now"))
        return int(most)

    def begin(
        self, stepper: Stepper, stepped: Sequence[Owned], used: Container[Member], factor: float
    ) -> None:
        """Let the host step these, and do not wait for it."""
        self.optimizer.unfinished.change()
        pieces = [piece for owned in stepped for piece in self._pieces(owned, stepper, used)]
        marks = [self._mark(owned) for owned in stepped]
        for owned in stepped:
            owned.is_updating = True
        step = partial(stepper.with_these_options().step, pieces, factor, Peers())
        members = {member for owned in stepped for member in owned.flat.members if member in used}
        self.optimizer.gradients.note_step(factor, multiplied=not stepper.fuses)
        mark_stepped(self.optimizer.base)
        self.optimizer.writes.forget()
        self.current = Update(list(stepped), members, marks, self.lane.submit(step, [], []))

    def _pieces(self, owned: Owned, stepper: Stepper, used: Container[Member]) -> Iterator[Piece]:
        """A slice's pieces, whose gradients nobody else will write to.

        Where nothing is copied the stepper must not write parameters, which are in use: they follow later.
        """
        owned.refuse_sparse()
        fetched = owned.fetch(used, stepper.fuses and owned.flow is not None)
        for member, piece in owned.pieces.items():
            if any(piece is each for each in fetched):
                assert piece.gradient is not None
                state = self.optimizer.base.state[piece.master]
                yield replace(piece, gradient=self._kept(owned, member, piece.gradient), state=state)
            piece.gradient = piece.copy = None

    def _kept(self, owned: Owned, member: Member, gradient: Tensor) -> Tensor:
        """A copy, in memory that is the same in every step."""
        room = self.aside.get(owned)
        if room is None or room.dtype != gradient.dtype:
            shard = owned.flat.shard
            room = self.aside[owned] = owned.tier.room(shard.numel(), gradient.dtype, shard.device)
        place = owned.flat.piece_of(room, member)
        assert place is not None
        return place.copy_(gradient.reshape(place.shape))

    def _mark(self, owned: Owned) -> Tensor | None:
        if owned.flow is not None:
            return owned.mark
        return None if owned.flat.released_at_rest else fingerprint(owned.flat.shard)

    # Completing ----------------------------------------------------------------------------------

    def wait(self) -> None:
        """Until the host has done its work, which does not count yet. A failure is told by `finish`."""
        if self.current is not None:
            with suppress(Exception):
                self.current.pending.wait()

    def finish(self) -> None:
        """Complete the update, if one is under way. Every rank must call this."""
        if self.broken:
            raise RuntimeError(self.broken)
        update, optimizer = self.current, self.optimizer
        if update is None:
            return
        if optimizer.unfinished.is_cut_short:  # all values are to be loaded: this update is given up
            return self._give_up(update)
        if optimizer.reducer.backward.running:
            raise RuntimeError("an update cannot be completed in the middle of a backward pass")
        try:
            refuse_on_all(optimizer.groups, self._problem(update))
        except RuntimeError as error:
            self.broken = str(error)
            raise
        if optimizer.gatherer is not None:  # a forward pass without a backward may have left some gathered
            optimizer.gatherer.release_all()
        optimizer.unfinished.run(partial(optimizer.unfinished.change_by, partial(self._complete, update)))

    def _complete(self, update: Update) -> None:
        optimizer, self.current = self.optimizer, None
        for owned in update.owned:
            owned.is_updating = False
            owned.put_away()
        # As after any step: a graph from before must not run backward with other values.
        increment_version([member.param for member in update.members])
        for owned in update.owned:
            owned.note_versions()
        optimizer.writes.forget_of(update.members)
        optimizer.send(optimizer.awake)

    def _give_up(self, update: Update) -> None:
        self.wait()
        self.current = None
        for owned in update.owned:
            owned.is_updating = False

    def _problem(self, update: Update) -> str:
        """In words, why the update cannot count; "" if it can."""
        try:
            update.pending.wait()
        except Exception as error:
            rank = self.optimizer.groups.dense.shard.rank
            return f"the update beside the last passes has failed on rank {rank}: {error!r}. {GIVEN_UP}"
        self.optimizer.take_back_moved()
        members = {member.name for member in update.members}
        written = [name for name in self.optimizer.writes.names() if name in members]
        if not written:
            marks = zip(update.owned, update.marks, strict=True)
            pairs = ((owned.flat, mark) for owned, mark in marks if mark is not None)
            written = [flat.name for flat, mark in pairs if not bool(fingerprint(flat.shard) == mark)]
        if not written:
            return ""
        return (
            f"{listed(written)}: parameters were written while an update of them was under way ({KEY}), and "
            "one of the two would be lost. Call finish_update() of the engine's optimizer on every rank "
            f"before, or write inside zero_full.GatheredParameters(..., modifier_rank=0). {GIVEN_UP}"
        )

    def refuse(self, call: str) -> None:
        """RuntimeError if an update is under way, and `call` is what one rank may call alone."""
        if self.current is not None:
            raise RuntimeError(PENDING.format(call=call))

    # The end -------------------------------------------------------------------------------------

    def end(self) -> None:
        """The last update counts, too. Where it cannot, that is raised, or told if there is an error already.

        Who gives a step up because of an error may be alone, and then nobody comes to complete it with.
        """
        if self.broken or self.current is None:
            return
        backward, gradients = self.optimizer.reducer.backward, self.optimizer.gradients
        failed, raising = backward.failed or backward.running, sys.exc_info()[0] is not None
        in_a_step = failed or (self.optimizer.reducer.began and gradients.are_new)
        if not failed and not (raising and in_a_step):
            try:
                with torch.no_grad():
                    return self.finish()
            except CommunicationError:
                raising = True  # it has been, on all ranks
        if not raising:
            raise RuntimeError(f"destroy after a backward pass that has failed: {LACKING}")
        log.warning("%s", LACKING)

    def close(self) -> None:
        """Nothing is under way any more."""
        self.wait()
        self.current = None
        self.lane.close()
        self.aside.clear()


def _wait(updates: "weakref.ref[DelayedUpdates]") -> None:
    alive = updates()
    if alive is not None:
        alive.wait()


def _refuse(stepper: Stepper, base: torch.optim.Optimizer) -> None:
    if not stepper.is_alone:
        raise ValueError(
            f"{KEY}: only torch's Adam and AdamW are stepped so, where this host has the compiled operators, "
            "and without a step of their own, amsgrad, fused=False and the like, and not this "
            f"{type(base).__name__}: leave it out"
        )
