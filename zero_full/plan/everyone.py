"""Plan the exchange of whole parameters (such as for Muon): simulate the first rank and the busiest one."""

from collections.abc import Container, Mapping, Sequence

import torch
from torch import Tensor

from zero_full.comm.communicator import Communicator
from zero_full.comm.fake_ranks import PretendedGroup
from zero_full.comm.lane import Lane
from zero_full.optim.step import Piece, Whole, WholeRule
from zero_full.plan.watch import Watch
from zero_full.shard.group.parameter_group import TrainedGroup
from zero_full.shard.group.parameters import Member
from zero_full.shard.step.peers import Owners, PartPeers, Round

AT_WORK = 3  # copies in memory of the parameter being updated: input, current value, next value


class PlannedRule:
    """A whole-parameter rule as one simulated rank runs it. Memory of its pieces counts as `kind`."""

    def __init__(self, rule: WholeRule, watch: Watch, kind: str | None, is_first: bool) -> None:
        self.rule, self.watch, self.kind, self.is_first = rule, watch, kind, is_first
        self.wire, self.concerns, self.work = rule.wire, rule.concerns, rule.work
        self.of_whole = rule.of_whole

    def bring(self, piece: Piece) -> Tensor:
        """Return the piece's contribution: an empty tensor, except on the first rank."""
        if not self.is_first:
            return torch.empty_like(piece.master, dtype=self.wire)
        with self.watch.of(self.kind):
            return self.rule.bring(piece)

    def take(self, piece: Piece, values: Tensor) -> None:
        """Apply the result to the piece, on the first rank only."""
        if self.is_first:
            with self.watch.of(self.kind):
                self.rule.take(piece, values)


class AllRanks:
    """Simulation of all ranks in the exchange, which counts the bytes that each rank sends."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.sent: dict[Communicator, list[int]] = {}  # by rank

    def peers(
        self, part: Sequence[TrainedGroup], used: Container[Member], lane: Lane, owners: Owners
    ) -> PartPeers:
        """Return the simulated peers for this part of the step."""
        return PlannedPeers(self, part, used, lane, owners)


class PlannedPeers(PartPeers):
    """Simulated peers: run the exchange as the first rank, and again as the busiest rank if it is another."""

    def __init__(
        self,
        everyone: AllRanks,
        part: Sequence[TrainedGroup],
        used: Container[Member],
        lane: Lane,
        owners: Owners,
    ) -> None:
        super().__init__(part, used, lane, owners)
        self.everyone = everyone
        self.kind = None if any(group.master.tier.apart for group in part) else "update"

    def travel(
        self, rounds: Sequence[Round], ranks: Communicator, rule: WholeRule, mine: Mapping[str, Piece]
    ) -> None:
        """Run the exchange. Its memory counts as `update`."""
        everyone, other = self.everyone, _busiest(rounds, ranks.size)
        with everyone.watch.of("update"):
            planned = PlannedRule(rule, everyone.watch, self.kind, is_first=True)
            super().travel(rounds, ranks, planned, mine)
            if other != ranks.rank:
                by = Communicator(PretendedGroup(ranks.ranks, ranks.ranks[other]), ranks.device)
                pieces = {whole.name: _stand_in(whole, numel) for whole, numel in _shares(rounds, other)}
                planned = PlannedRule(rule, everyone.watch, self.kind, is_first=False)
                super().travel(rounds, by, planned, pieces)
        sent = everyone.sent.setdefault(ranks, [0] * ranks.size)
        for one in rounds:
            for (start, owner), numel in one.ways.items():
                sent[start] += numel * rule.wire.itemsize  # to the owner
                sent[owner] += numel * rule.wire.itemsize  # the result, back from the owner


def _busiest(rounds: Sequence[Round], world: int) -> int:
    """Return the rank with the most memory traffic: bytes sent and received, and its largest parameter."""
    most, largest = [0] * world, [0] * world
    for one in rounds:
        for way, numel in one.ways.items():
            for rank in way:
                most[rank] += numel
        for parcel in one.parcels:
            largest[parcel.owner] = max(largest[parcel.owner], parcel.whole.shape.numel())
    return max(range(world), key=lambda rank: most[rank] + AT_WORK * largest[rank])


def _shares(rounds: Sequence[Round], rank: int) -> list[tuple[Whole, int]]:
    return [
        (parcel.whole, numel)
        for each in rounds
        for parcel in each.parcels
        for owner, numel in parcel.shares
        if owner == rank
    ]


def _stand_in(whole: Whole, numel: int) -> Piece:
    master = torch.empty((), device="meta").expand(numel)
    return Piece(whole.name, whole.shape, (0, numel), whole.group, master)
