"""Fake exchange of whole parameters (such as for Muon): as the first rank, and as the busiest one."""

from collections.abc import Container, Mapping, Sequence

import torch
from torch import Tensor

from zero_full.comm.communicator import Communicator
from zero_full.comm.fake_ranks import FakeGroup
from zero_full.comm.lane import Lane
from zero_full.optim.step import Piece, WholeRule
from zero_full.plan.memory_tracker import MemoryTracker
from zero_full.shard.group.parameter_group import TrainedGroup
from zero_full.shard.group.parameters import Member
from zero_full.shard.step.peers import Owners, PartPeers, Round

COPIES_IN_USE = 3  # copies of the parameter that is being updated: input, current value, next value


class FakeRule:
    """A whole-parameter rule as one simulated rank runs it. Memory of its pieces counts as `kind`."""

    def __init__(self, rule: WholeRule, tracker: MemoryTracker, kind: str | None, is_first: bool) -> None:
        self.rule, self.tracker, self.kind, self.is_first = rule, tracker, kind, is_first
        self.wire, self.concerns, self.work = rule.wire, rule.concerns, rule.work
        self.of_whole = rule.of_whole

    def bring(self, piece: Piece) -> Tensor:
        """Return the piece's contribution: an empty tensor, except on the first rank."""
        if not self.is_first:
            return torch.empty_like(piece.master, dtype=self.wire)
        with self.tracker.counting(self.kind):
            return self.rule.bring(piece)

    def take(self, piece: Piece, values: Tensor) -> None:
        """Apply the result to the piece, on the first rank only."""
        if self.is_first:
            with self.tracker.counting(self.kind):
                self.rule.take(piece, values)


class FakePeers(PartPeers):
    """Fake peers: run the exchange as the first rank, and again as the busiest rank if it is another."""

    def __init__(
        self,
        tracker: MemoryTracker,
        sent: dict[Communicator, list[int]],
        part: Sequence[TrainedGroup],
        used: Container[Member],
        lane: Lane,
        owners: Owners,
        tensor: Communicator | None = None,
    ) -> None:
        """`sent` counts the bytes that each rank sends; `travel` adds to it."""
        super().__init__(part, used, lane, owners, tensor)
        self.tracker, self.sent = tracker, sent
        self.kind = None if any(group.master.tier.is_offloaded for group in part) else "update"

    def travel(
        self, rounds: Sequence[Round], comm: Communicator, rule: WholeRule, mine: Mapping[str, Piece]
    ) -> None:
        """Run the rounds as the first rank and, if it is another, as the busiest one.

        Their memory counts as `update`.
        """
        other = _busiest(rounds, comm.size)
        with self.tracker.counting("update"):
            fake = FakeRule(rule, self.tracker, self.kind, is_first=True)
            super().travel(rounds, comm, fake, mine)
            if other != comm.rank:
                by = Communicator(FakeGroup(comm.ranks, comm.ranks[other]), comm.device)
                fake = FakeRule(rule, self.tracker, self.kind, is_first=False)
                super().travel(rounds, by, fake, _pieces_of(rounds, other))
        sent = self.sent.setdefault(comm, [0] * comm.size)
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
    return max(range(world), key=lambda rank: most[rank] + COPIES_IN_USE * largest[rank])


def _pieces_of(rounds: Sequence[Round], rank: int) -> dict[str, Piece]:
    """Return a rank's pieces by the parameter's name. Their masters have no memory."""
    shares = (
        (parcel.whole, numel)
        for each in rounds
        for parcel in each.parcels
        for owner, numel in parcel.shares
        if owner == rank
    )
    empty = torch.empty((), device="meta")
    return {w.name: Piece(w.name, w.shape, (0, n), w.group, empty.expand(n)) for w, n in shares}
