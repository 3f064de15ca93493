"""Communication of a stepper with the ranks that own the other pieces of the same parameters.

[Note: whole parameters] A rule that needs whole parameters gets each on one rank, its owner. All ranks know
the list of parameters, their layout and their cost. So all compute the same assignment to owners and the same
message sizes, without communication.

    there   an all-to-all sends the contributions of all pieces to the owners
    work    each owner assembles its parameters, one after the other, and computes on them
    back    an all-to-all with the reverse sizes returns the results to the ranks that own the pieces

An owner's own piece is not sent. The owner is the rank with the largest piece, unless it would have more work
than others. Owners that keep state (`OwnerRule`) are assigned once. With overlap there are several rounds:
one round's parameters are sent while the owners compute on another's.
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain

import torch
from torch import Tensor

from zero_full.comm.communicator import Communicator
from zero_full.comm.compressed import CompressedReduce
from zero_full.comm.lane import Done, InlineLane, Lane, Pending
from zero_full.comm.transport import Splits
from zero_full.layout import Share, assign_work
from zero_full.optim.step import OwnerRule, Peers, Piece, Totals, Whole, WholeRule, copy_on, indices_on
from zero_full.shard.group.parameter_group import TrainedGroup
from zero_full.shard.group.parameters import Member

ROUNDS = 4  # enough that most messages overlap computation


Owners = dict[str, int]  # parameter name -> rank in its process group that keeps its state


def deal_owners(owners: Owners, everything: Sequence[TrainedGroup], rule: OwnerRule) -> None:
    """Assign an owner to each parameter that has none yet. All ranks compute the same assignment."""
    new = [(m, group.parameters) for group in everything for m in group.members if m.name not in owners]
    wholes = [(Whole(m.name, m.shape, m.group), m, flat) for m, flat in new if m.shape.numel()]
    wholes = [each for each in wholes if rule.concerns(each[0])]
    for comm in dict.fromkeys(flat.shard_comm for _, _, flat in wholes):
        theirs = [
            (whole, flat.layout.shares(m.index)) for whole, m, flat in wholes if flat.shard_comm is comm
        ]
        works = [rule.work(whole) for whole, _ in theirs]
        dealt = assign_work(works, [shares for _, shares in theirs], comm.size)
        owners |= {whole.name: owner for (whole, _), (owner, _) in zip(theirs, dealt, strict=True)}


class PartPeers(Peers):
    """The peers for one part of a step. All ranks number its parameters equally, also without pieces."""

    def __init__(
        self,
        part: Sequence[TrainedGroup],
        used: Container[Member],
        lane: Lane,
        owners: Owners | None = None,
        tensor: Communicator | None = None,
    ) -> None:
        """`tensor` has the ranks that hold the other parts of split parameters."""
        self.tensor = tensor
        self.lane, self.part, self.owners = lane, part, owners or {}
        self.members = [(m, group.parameters) for group in part for m in group.members if m in used]

    def totals(self, pieces: Sequence[Piece], rows: Tensor) -> Totals:
        """Sum rows of numbers over the ranks that own pieces of the same parameter."""
        named = [(member.name, flat.shard_comm) for member, flat in self.members]
        place = {name: number for number, (name, _) in enumerate(named)}
        mine = indices_on(rows.device, [place[piece.name] for piece in pieces])
        totals = torch.zeros(len(named), *rows.shape[1:], dtype=rows.dtype, device=rows.device)
        totals[mine] = rows
        # A row of zeros for parameters of which this rank has no piece, so that all ranks send equal sizes.
        for comm in dict.fromkeys(each for _, each in named):
            if comm.size > 1:
                numbers = [number for number, (_, each) in enumerate(named) if each is comm]
                theirs = indices_on(rows.device, numbers)
                rows_there = copy_on(comm.device, totals[theirs])
                summed = comm.sum_numbers(rows_there, "numbers about whole parameters")
                totals[theirs] = summed.to(totals.device)
        split = [number for number, (_, flat) in enumerate(self.members) if flat.kind.is_split]
        if self.tensor is not None and split:
            theirs = indices_on(rows.device, split)
            rows_there = copy_on(self.tensor.device, totals[theirs])
            summed = self.tensor.sum_numbers(rows_there, "numbers about whole parameters")
            totals[theirs] = summed.to(totals.device)
        return Totals([member.param for member, _ in self.members], totals, mine)

    def compressed(
        self, numel: int, tensors: Sequence[tuple[int, int]] | None = None, mask: Tensor | None = None
    ) -> CompressedReduce:
        """Make a compressed all-reduce over the replicas of this rank's state."""
        return CompressedReduce(self.alike, numel, tensors, mask)

    @property
    def alike(self) -> Communicator:
        """The ranks that are replicas of the same state."""
        (comm,) = {group.replica_comm for group in self.part}
        return comm

    @property
    def place(self) -> tuple[int, int]:
        """This rank's index among the replicas, and their number."""
        return self.alike.rank, self.alike.size

    def all_gather(self, whole: Tensor, what: str) -> None:
        """All-gather among the replicas. `what` names the tensor in errors."""
        self.alike.all_gather(whole, what)

    def by_whole(self, pieces: Sequence[Piece], rule: WholeRule) -> None:
        """Apply a rule to whole parameters, each on its owner. See [Note: whole parameters]."""
        mine = {piece.name: piece for piece in pieces}
        known = [(Whole(m.name, m.shape, m.group), m, flat) for m, flat in self.members]
        known = [each for each in known if each[1].shape.numel() and rule.concerns(each[0])]
        for comm in dict.fromkeys(flat.shard_comm for _, _, flat in known):
            theirs = [
                (whole, flat.layout.shares(member.index))
                for whole, member, flat in known
                # A single rank may lack a piece, if user code cleared its gradient.
                if flat.shard_comm is comm and (comm.size > 1 or whole.name in mine)
            ]
            self.travel(self._rounds(theirs, comm.size, rule), comm, rule, mine)

    def _rounds(
        self, known: Sequence[tuple[Whole, list[Share]]], world: int, rule: WholeRule
    ) -> list["Round"]:
        """Assign parameters to owners and rounds. All ranks compute the same assignment."""
        count = 1 if isinstance(self.lane, InlineLane) else max(1, min(ROUNDS, len(known) // world))
        works, shares = [rule.work(whole) for whole, _ in known], [lies for _, lies in known]
        dealt = assign_work(works, shares, world, count)
        rounds: list[list[Parcel]] = [[] for _ in range(count)]
        for (whole, lies), (owner, number) in zip(known, dealt, strict=True):
            rounds[number].append(Parcel(whole, self.owners.get(whole.name, owner), lies))
        return [Round(parcels, world) for parcels in rounds if parcels]

    def travel(
        self, rounds: Sequence["Round"], comm: Communicator, rule: WholeRule, mine: Mapping[str, Piece]
    ) -> None:
        """Run the rounds as a pipeline: send the next round, compute on this one, receive the previous one.

        All ranks queue the collectives in the same order: there 0, there 1, back 0, there 2, back 1, ...
        """
        ahead: Trip | None = None  # sent, not computed yet
        behind: Trip | None = None  # computed, results on the way back
        for trip in chain((Trip(each, comm, rule, mine, self.lane) for each in rounds), [None]):
            if trip is not None:
                trip.leave()
            if ahead is not None:
                ahead.work()
                if behind is not None:
                    behind.come_back()
                behind = ahead
            ahead = trip
        if behind is not None:
            behind.come_back()


@dataclass(frozen=True)
class Parcel:
    """A whole parameter, its owner, and its layout over the ranks."""

    whole: Whole
    owner: int  # rank in the process group
    shares: Sequence[Share]  # (rank, elements), in the order of the elements


@dataclass(frozen=True)
class Round:
    """Whole parameters that are sent in one all-to-all."""

    parcels: Sequence[Parcel]
    size: int  # number of ranks

    @cached_property
    def ways(self) -> Counter[tuple[int, int]]:
        """Elements sent, by (sending rank, owner)."""
        ways = Counter[tuple[int, int]]()
        for parcel in self.parcels:
            for rank, numel in parcel.shares:
                if rank != parcel.owner:
                    ways[rank, parcel.owner] += numel
        return ways

    def splits(self, rank: int) -> Splits:
        """Return the elements that a rank sends to each owner, and receives from each rank as an owner."""
        sent = [self.ways[rank, other] for other in range(self.size)]
        received = [self.ways[other, rank] for other in range(self.size)]
        return Splits(sent, received, max(self.ways.values(), default=0))

    def from_rank(self, rank: int) -> list[tuple[Parcel, int]]:
        """List the parameters and elements that a rank sends, in the order of the owners."""
        found = [
            (each, numel)
            for each in self.parcels
            for other, numel in each.shares
            if other == rank != each.owner
        ]
        return sorted(found, key=lambda one: one[0].owner)

    def to_rank(self, rank: int) -> list[tuple[int, Parcel, int]]:
        """List the senders, parameters and elements that an owner receives, in the order of the ranks."""
        found = [
            (other, each, numel)
            for each in self.parcels
            for other, numel in each.shares
            if other != rank == each.owner
        ]
        return sorted(found, key=lambda one: one[0])


class Trip:
    """One rank's part in a round: its buffers and its two all-to-alls."""

    def __init__(
        self, one: Round, comm: Communicator, rule: WholeRule, mine: Mapping[str, Piece], lane: Lane
    ) -> None:
        self.round, self.comm, self.rule, self.mine, self.lane = one, comm, rule, mine, lane
        self.splits, self.what = one.splits(comm.rank), f"whole parameters {one.parcels[0].whole.name} ..."
        self.pending: Pending = Done()

    def leave(self) -> None:
        """Send this rank's contributions to the owners."""
        sent, received, rank = self.splits.sent, self.splits.received, self.comm.rank
        make = partial(torch.empty, dtype=self.rule.wire, device=self.comm.device)
        self.sent, self.received = make(sum(sent)), make(sum(received))
        outgoing, incoming = self.round.from_rank(rank), self.round.to_rank(rank)
        windows = self.sent.split([numel for _, numel in outgoing])
        self.own = [(self.mine[p.whole.name], w) for (p, _), w in zip(outgoing, windows, strict=True)]
        windows = self.received.split([numel for *_, numel in incoming])
        self.others = {(r, p.whole.name): w for (r, p, _), w in zip(incoming, windows, strict=True)}
        for piece, window in self.own:
            window.copy_(self.rule.bring(piece))
        self._send(self.sent, self.received, self.splits)

    def work(self) -> None:
        """Wait for the contributions to this rank's parameters, compute, and send the results back."""
        self.pending.wait()
        for parcel in self.round.parcels:
            if parcel.owner == self.comm.rank:
                self._work_on(parcel)
        # `_work_on` wrote the results over the contributions, so the same two buffers serve the way back.
        back = Splits(self.splits.received, self.splits.sent, self.splits.most)
        self._send(self.received, self.sent, back)

    def come_back(self) -> None:
        """Wait for the results for this rank's pieces, and update them."""
        self.pending.wait()
        for piece, window in self.own:
            self.rule.take(piece, window.to(piece.master.device))

    def _work_on(self, parcel: Parcel) -> None:
        """Assemble a whole parameter from its pieces, compute, and write the results over the pieces."""
        whole, rule, device = parcel.whole, self.rule, self.comm.device
        parts = [self.others.get((rank, whole.name)) for rank, _ in parcel.shares]
        mine = self.mine.get(whole.name)  # a rank has one piece of a parameter at most
        brought = [part for part in parts if part is not None]
        if mine is not None:
            brought.insert(parts.index(None), rule.bring(mine).to(device))
        values = brought[0] if len(brought) == 1 else torch.cat(brought)
        made = rule.of_whole(whole, values.view(whole.shape)).reshape(-1)
        for part, new in zip(parts, made.split([numel for _, numel in parcel.shares]), strict=True):
            if part is not None:
                part.copy_(new)
            elif mine is not None:
                rule.take(mine, new.to(mine.master.device))

    def _send(self, sent: Tensor, received: Tensor, splits: Splits) -> None:
        if splits.most:  # equal on all ranks: either all send in this round, or none
            job = partial(self.comm.all_to_all_uneven, sent, received, splits, self.what)
            self.pending = self.lane.submit(job, [sent, received], [self.lane.producer()])
