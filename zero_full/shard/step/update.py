"""One step of what a rank owns: which stepper, on which pieces, how much at a time."""

import logging
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import closing
from functools import partial
from math import inf

from torch import Tensor
from torch.optim import Optimizer

from zero_full._compat import plain
from zero_full.comm.lane import Lane
from zero_full.offload import Flow, Tier
from zero_full.optim.elementwise import own_stepper
from zero_full.optim.fused_adam import FusedAdam
from zero_full.optim.step import Peers, Stepper, TorchStep
from zero_full.precision.dtypes import Dtypes
from zero_full.settings import Settings
from zero_full.shard.group.master import Owned
from zero_full.shard.group.parameters import Member
from zero_full.shard.step.peers import Owners, PartPeers, deal_owners
from zero_full.shard.step.speculative import EarlySteps
from zero_full.shard.step.wrapped_optimizer import Base

log = logging.getLogger("zero_full")
NO_EARLY_STEPS = "offload_optimizer.super_offload (HostTier.step_early) has no effect: %s"


class Steppers:
    """The steppers that an optimizer can be stepped by."""

    def __init__(self, base: Base, dtypes: Dtypes, lane: Lane, tier: Tier) -> None:
        self.optimizer: Optimizer = base.optimizer
        self.own = own_stepper(self.optimizer, base.own_step)
        self.by_torch = TorchStep(self.optimizer, base.own_step)
        self.fused_adam = FusedAdam(self.optimizer, base.own_step, dtypes)
        self.lane, self.tier = lane, tier
        self.early = EarlySteps(self.optimizer, self.tensors_of, tier.early_bytes)
        self.owners: Owners = {}  # of parameters whose owner keeps state: see [Note: whole parameters]
        self.peers_of: Callable[[Sequence[Owned], Container[Member], Lane, Owners], Peers] = PartPeers

    @property
    def kept(self) -> Stepper:
        """What remembers something that a checkpoint has."""
        return self.fused_adam if self.own is None else self.own

    def averages(self) -> bool:
        """Whether the gradients of the step to come are to be averaged: see [Note: own gradients]."""
        return self.own is None or self.own.averages

    def concerned(self, everything: Iterable[Owned], used: Container[Member]) -> Container[Member]:
        """What a step is about: `used`; and where gradients are not averaged all that has a state already.

        What has no gradient now counts as zero then, for its average goes on all the same.
        """
        if self.averages():
            return used
        known = self.optimizer.state
        pairs = (pair for owned in everything for pair in owned.pieces.items())
        return {member for member, piece in pairs if member in used or known.get(piece.master)}

    def attach(self, everything: Iterable[Owned]) -> None:
        """Tell the optimizer's own stepper what it will step."""
        if self.own is not None:
            awake = [owned for owned in everything if not owned.bucket.asleep]
            members = {member for owned in awake for member in owned.flat.members}
            pieces = [piece for owned in awake for piece in owned.pieces.values()]
            pieces.sort(key=lambda piece: plain(piece.name))  # whatever buckets they are in
            if self.own.whole_rule is not None:
                deal_owners(self.owners, awake, self.own.whole_rule)
            self.own.attach(pieces, self.peers_of(awake, members, self.lane, self.owners))

    def choose(self, stepped: Iterable[Owned]) -> Stepper:
        """The optimizer's own, if it brings one; else the fastest that does the same as its `step`."""
        if self.own is not None:
            return self.own
        kinds = {(owned.master.dtype, owned.bucket.accumulate, owned.master.device) for owned in stepped}
        return self.fused_adam if self.fused_adam.takes(kinds) else self.by_torch

    def step_early(self, everything: Iterable[Owned], factor: Callable[[], float]) -> None:
        """If the tier wants it, step each slice when its last gradients come: see `speculative.py`."""

        def begin(owned: Owned) -> None:
            self.early.begin(owned, self.choose([owned]), factor())

        awake = [owned for owned in everything if not owned.bucket.asleep]
        if not (self.tier.step_early and awake):
            return
        if all(owned.bucket.down is None for owned in awake):
            log.warning(NO_EARLY_STEPS, "nothing is copied: the model is in the host's memory already")
        elif not self.choose(awake).is_alone:
            log.warning(
                NO_EARLY_STEPS, "only torch's Adam and AdamW are stepped so, without a step of their own"
            )
        for owned in everything:
            if owned.bucket.down is not None:
                owned.bucket.down.on_last = partial(begin, owned)

    def parts(
        self, stepper: Stepper, stepped: Sequence[Owned], settings: Settings, flow: Flow | None
    ) -> list[Sequence[Owned]]:
        """What is stepped at a time.

        Where parameters are copied to the device that begins with the first bucket, unless ranks would
        have to meet once more for each.
        """
        if not stepper.takes_parts:
            return [stepped]
        one_by_one = flow is not None and self.own is None and not self.tier.moves
        return [*sub_groups(stepped, 1 if one_by_one else settings.part_numel)]

    def step(
        self,
        stepper: Stepper,
        everything: Iterable[Owned],
        parts: Sequence[Sequence[Owned]],
        used: Container[Member],
        factor: float,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Step part after part; parameters without a gradient on any rank, which are not `used`, stay.

        `on_change` is called when no stepper can refuse the step any more, which all ranks do alike.
        """
        self.early.stop()
        try:
            stepper.begin([piece for owned in everything for piece in owned.pieces.values()])
            on_change()
            with closing(self.tier.in_turn(parts, self.tensors_of)) as turns:
                stepped, done, begun = [owned for part in parts for owned in part], 0, 0
                for part in turns:
                    begun = max(begun, done)
                    while begun < len(stepped) and stepped[begun].read_ahead(stepper.fuses):
                        begun += 1
                    self._step_part(stepper, part, used, factor)
                    done += len(part)
        finally:
            stepper.end()
            self.early.drop()
            for owned in everything:
                owned.show_again()

    def tensors_of(self, owned: Owned) -> list[Tensor]:
        """What waits in a tier: a slice's master, first, and what the optimizer keeps of each element."""
        masters = [piece.master for piece in owned.pieces.values()]
        states = (self.optimizer.state.get(master, {}).values() for master in masters)
        kept = [value for state in states for value in state if isinstance(value, Tensor) and value.dim()]
        return [owned.master, *masters, *kept]

    def _step_part(
        self, stepper: Stepper, part: Sequence[Owned], used: Container[Member], factor: float
    ) -> None:
        rest = [owned for owned in part if not self.early.commit(owned, stepper, used, factor)]
        pieces = [piece for owned in rest for piece in owned.fetch(used, stepper.fuses)]
        for piece in pieces:
            piece.state = self.optimizer.state[piece.master]
        if rest:
            stepper.step(pieces, factor, self.peers_of(rest, used, self.lane, self.owners))
        for owned in part:
            owned.put_away()


def sub_groups(stepped: Sequence[Owned], limit: int | None) -> list[list[Owned]]:
    """Neighbours together that wait in one place, as many as have `limit` elements on this rank, but at least
    one; None: all of them.
    """
    together: list[list[Owned]] = []
    room: float = 0
    for owned in stepped:
        numel = owned.flat.layout.shard
        if not together or numel > room or owned.tier.apart != together[-1][-1].tier.apart:
            together.append([])
            room = inf if limit is None else limit
        together[-1].append(owned)
        room -= numel
    return together
