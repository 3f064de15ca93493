"""Whole parameters on their way, in a plan: the first rank is played, and the one that has most to do."""

from collections.abc import Container, Mapping, Sequence

import torch
from torch import Tensor

from zero_full.comm.communicator import Communicator
from zero_full.comm.fake_ranks import PretendedGroup
from zero_full.comm.lane import Lane
from zero_full.optim.step import Piece, Whole, WholeRule
from zero_full.plan.watch import Watch
from zero_full.shard.group.master import Owned
from zero_full.shard.group.parameters import Member
from zero_full.shard.step.peers import Owners, PartPeers, Round

AT_WORK = 3  # how often what is worked on is in memory: as it came, as it is now, and as it will be next


class PlannedRule:
    """A rule, as one rank follows it. What it makes of pieces is for `kind`."""

    def __init__(self, rule: WholeRule, watch: Watch, kind: str | None, is_first: bool) -> None:
        self.rule, self.watch, self.kind, self.is_first = rule, watch, kind, is_first
        self.wire, self.concerns, self.work = rule.wire, rule.concerns, rule.work
        self.of_whole = rule.of_whole

    def bring(self, piece: Piece) -> Tensor:
        """Only the first rank has pieces."""
        if not self.is_first:
            return torch.empty_like(piece.master, dtype=self.wire)
        with self.watch.of(self.kind):
            return self.rule.bring(piece)

    def take(self, piece: Piece, values: Tensor) -> None:
        """As above."""
        if self.is_first:
            with self.watch.of(self.kind):
                self.rule.take(piece, values)


class AllRanks:
    """What stands in for the other ranks in a part of a step, and counts the bytes that each rank sends."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.sent: dict[Communicator, list[int]] = {}  # by rank

    def peers(self, part: Sequence[Owned], used: Container[Member], lane: Lane, owners: Owners) -> PartPeers:
        """Of this part."""
        return PlannedPeers(self, part, used, lane, owners)


class PlannedPeers(PartPeers):
    """Plays the first rank, and then the busiest one, if that is another."""

    def __init__(
        self,
        everyone: AllRanks,
        part: Sequence[Owned],
        used: Container[Member],
        lane: Lane,
        owners: Owners,
    ) -> None:
        super().__init__(part, used, lane, owners)
        self.everyone = everyone
        self.kind = None if any(owned.tier.apart for owned in part) else "update"

    def travel(
        self, rounds: Sequence[Round], ranks: Communicator, rule: WholeRule, mine: Mapping[str, Piece]
    ) -> None:
        """The memory that it takes is for the update."""
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
                sent[start] += numel * rule.wire.itemsize  # there
                sent[owner] += numel * rule.wire.itemsize  # and back


def _busiest(rounds: Sequence[Round], world: int) -> int:
    """The rank through whose memory most goes: what it sends and is sent, and its largest parameter."""
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
