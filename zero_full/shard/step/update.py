"""The update of a step: choose the stepper of this rank's pieces, and step them part by part."""

from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import closing
from math import inf

from torch import Tensor
from torch.optim import Optimizer

from zero_full._compat import clean_name
from zero_full.comm.lane import Lane
from zero_full.offload import CopyThreads, Tier
from zero_full.optim.elementwise import own_stepper
from zero_full.optim.fused_adam import FusedAdamStep
from zero_full.optim.step import Peers, Piece, Stepper, TorchStep
from zero_full.precision.dtypes import Dtypes
from zero_full.settings import Settings
from zero_full.shard.group.parameter_group import TrainedGroup
from zero_full.shard.group.parameters import Member
from zero_full.shard.step.peers import Owners, PartPeers, deal_owners
from zero_full.shard.step.wrapped_optimizer import RedirectedOptimizer


class Steppers:
    """The steppers of one optimizer, and the loop over the parts of a step."""

    def __init__(
        self,
        base: RedirectedOptimizer,
        dtypes: Dtypes,
        lane: Lane,
        tier: Tier,
        trained: Sequence[TrainedGroup],
    ) -> None:
        self.optimizer: Optimizer = base.optimizer
        self.own = own_stepper(self.optimizer, base.own_step)
        self.by_torch = TorchStep(self.optimizer, base.own_step)
        self.fused_adam = FusedAdamStep(self.optimizer, base.own_step, dtypes)
        self.lane, self.tier, self.trained = lane, tier, trained
        # State or parameter slices are in files and must be read ahead.
        self.reads_ahead = type(tier).load_parts is not Tier.load_parts or any(
            group.parameters.slice.is_offloaded for group in trained
        )
        self.updates = 0  # steps with reads ahead: equal on all ranks, which exchange messages in that order
        self.owners: Owners = {}  # ranks that keep state of whole parameters: see [Note: whole parameters]
        self.no_peers = Peers()  # for steppers that do not communicate
        self.peers_of: Callable[[Sequence[TrainedGroup], Container[Member], Lane, Owners], Peers] = PartPeers

    @property
    def kept(self) -> Stepper:
        """The stepper that has state of its own for a checkpoint."""
        return self.fused_adam if self.own is None else self.own

    def averages(self) -> bool:
        """Return whether the gradients of the next step must be averaged: see [Note: own gradients]."""
        return self.own is None or self.own.averages

    def concerned(self, used: set[Member]) -> set[Member]:
        """Return the parameters that a step with own gradients changes: `used`, and all that have state.

        A parameter without a gradient counts as one with a zero gradient, because its momentum goes on.
        """
        known = self.optimizer.state
        pairs = (pair for group in self.trained for pair in group.master.pieces.items())
        return {member for member, piece in pairs if member in used or known.get(piece.master)}

    def attach(self) -> None:
        """Give all pieces that are trained to the optimizer's own stepper, if it has one."""
        if self.own is not None:
            awake = [group for group in self.trained if not group.asleep]
            members = {member for group in awake for member in group.members}
            pieces = [piece for group in awake for piece in group.master.pieces.values()]
            pieces.sort(
                key=lambda piece: clean_name(piece.name)
            )  # an order that does not depend on the buckets
            if self.own.whole_rule is not None:
                deal_owners(self.owners, awake, self.own.whole_rule)
            self.own.attach(pieces, self.peers_of(awake, members, self.lane, self.owners))

    def choose(self, stepped: Iterable[TrainedGroup]) -> Stepper:
        """Choose the optimizer's own stepper, or else the fastest that is equivalent to its `step`."""
        if self.own is not None:
            return self.own
        kinds = set()
        for group in stepped:
            values = group.master.values
            kinds.add((values.dtype, group.gradients.accumulate, values.device))
        return self.fused_adam if self.fused_adam.takes(kinds) else self.by_torch

    def parts(
        self,
        stepper: Stepper,
        stepped: Sequence[TrainedGroup],
        settings: Settings,
        copy_threads: CopyThreads | None,
    ) -> Sequence[Sequence[TrainedGroup]]:
        """Split the groups into parts that are stepped together.

        With host-device copies each group is a part, so that its copy overlaps the step of the next one. A
        stepper that communicates gets larger parts, because it exchanges messages for each.
        """
        # Tensor-parallel ranks must exchange as many messages, and their slices may have different sizes.
        if not stepper.takes_parts or (self.own is not None and any(g.kind.is_split for g in stepped)):
            return [stepped]
        if copy_threads is None and settings.part_numel is None and not self.tier.is_offloaded:
            return [stepped]
        one_by_one = copy_threads is not None and self.own is None and not self.tier.moves
        return join_groups(stepped, 1 if one_by_one else settings.part_numel)

    def step(
        self,
        stepper: Stepper,
        parts: Sequence[Sequence[TrainedGroup]],
        used: Container[Member],
        factor: float,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Step part after part. Parameters that are not `used`, as no rank has a gradient, do not change.

        `on_change` is called when the stepper can no longer raise an error that skips the step on all ranks.
        """
        try:
            if not stepper.is_alone:
                stepper.begin([piece for group in self.trained for piece in group.master.pieces.values()])
            on_change()
            if self.reads_ahead:
                self._step_in_turn(stepper, parts, used, factor)
            else:
                for part in parts:
                    self._step_part(stepper, part, used, factor)
        finally:
            if not stepper.is_alone:
                stepper.end()
            for group in self.trained:  # a tier may have moved masters and state
                if group.master.shown:
                    group.master.show_again()

    def _step_in_turn(
        self,
        stepper: Stepper,
        parts: Sequence[Sequence[TrainedGroup]],
        used: Container[Member],
        factor: float,
    ) -> None:
        """Step parts while the state and parameter slices of the next ones are read from files."""
        self.updates += 1
        if self.tier.alternates and self.updates % 2 == 0:
            parts = parts[::-1]
        with closing(self.tier.load_parts(parts, self.tensors_of)) as turns:
            # `done` groups are stepped; the reads of the first `begun` have begun, as far as buffers allow.
            stepped, done, begun = [group for part in parts for group in part], 0, 0
            for part in turns:
                begun = max(begun, done)
                while begun < len(stepped) and stepped[begun].master.read_ahead(stepper.fuses):
                    begun += 1
                self._step_part(stepper, part, used, factor)
                done += len(part)

    def tensors_of(self, group: TrainedGroup) -> list[Tensor]:
        """List the tensors of a slice that a tier stores: first the master, then elementwise state."""
        masters = [piece.master for piece in group.master.pieces.values()]
        states = (self.optimizer.state.get(master, {}).values() for master in masters)
        kept = [value for state in states for value in state if isinstance(value, Tensor) and value.dim()]
        return [group.master.values, *masters, *kept]

    def _step_part(
        self, stepper: Stepper, part: Sequence[TrainedGroup], used: Container[Member], factor: float
    ) -> None:
        """Step these parameter groups and write the results back. Their optimizer state is in memory."""
        pieces: list[Piece] = []
        for group in part:
            pieces += group.master.fetch(used, stepper.fuses, stepper.adopts, stepper.marks_changes)
        state = self.optimizer.state
        for piece in pieces:
            piece.state = state[piece.master]
        if part:
            peers = self.no_peers if stepper.is_alone else self.peers_of(part, used, self.lane, self.owners)
            stepper.step(pieces, factor, peers)
        for group in part:
            group.master.put_away()


def join_groups(stepped: Sequence[TrainedGroup], limit: int | None) -> list[list[TrainedGroup]]:
    """Join neighbouring groups of one tier into parts of up to `limit` elements, at least one group each.

    None: no limit.
    """
    together: list[list[TrainedGroup]] = []
    room: float = 0
    for group in stepped:
        numel = group.layout.shard_numel
        if (
            not together
            or numel > room
            or group.master.tier.is_offloaded != together[-1][-1].master.tier.is_offloaded
        ):
            together.append([])
            room = inf if limit is None else limit
        together[-1].append(group)
        room -= numel
    return together
