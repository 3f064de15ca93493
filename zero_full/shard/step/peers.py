"""What a stepper can ask the ranks that have the other pieces of the same parameters.

[Note: whole parameters] A rule that needs whole parameters gets each on one rank, its owner. All ranks know
which parameters there are, where they lie and how much work each is, so all deal them in the same way and
know, without asking, how much travels between any two of them.

    there   an all-to-all brings the owners what the others have to say of their parameters' pieces
    work    each owner puts its parameters together, one after the other
    back    an all-to-all on the same ways brings every rank what was made of its pieces

What an owner itself has of a parameter does not travel, and its parameters are those of which it has most,
unless it would have more to do than others then. Owners that keep state (`OwnerRule`) are dealt once. Where
collectives run beside the computation, all this is
done in rounds: one round's parameters travel while the owners work on another's.
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
from zero_full.comm.lane import Done, Inline, Lane, Pending
from zero_full.comm.transport import Splits
from zero_full.layout import Share, deal_work
from zero_full.optim.step import OwnerRule, Peers, Piece, Totals, Whole, WholeRule
from zero_full.shard.group.master import Owned
from zero_full.shard.group.parameters import Member

ROUNDS = 4  # enough that most of what travels does so beside work


Owners = dict[str, int]  # by the parameter's name: the rank, in its process group, that keeps state of it


def deal_owners(owners: Owners, everything: Sequence[Owned], rule: OwnerRule) -> None:
    """Give each parameter that has no owner yet one. All ranks find the same."""
    new = [(m, owned.flat) for owned in everything for m in owned.flat.members if m.name not in owners]
    wholes = [(Whole(m.name, m.param.shape, m.group), m, flat) for m, flat in new if m.param.numel()]
    wholes = [each for each in wholes if rule.concerns(each[0])]
    for ranks in dict.fromkeys(flat.ranks for _, _, flat in wholes):
        theirs = [(whole, flat.layout.shares(m.index)) for whole, m, flat in wholes if flat.ranks is ranks]
        works = [rule.work(whole) for whole, _ in theirs]
        dealt = deal_work(works, [shares for _, shares in theirs], ranks.size)
        owners |= {whole.name: owner for (whole, _), (owner, _) in zip(theirs, dealt, strict=True)}


class PartPeers(Peers):
    """Of a part of a step. All ranks number the parameters in the same way, whichever pieces they own."""

    def __init__(
        self, part: Sequence[Owned], used: Container[Member], lane: Lane, owners: Owners | None = None
    ) -> None:
        self.lane, self.part, self.owners = lane, part, owners or {}
        self.members = [(m, owned.flat) for owned in part for m in owned.flat.members if m in used]

    def totals(self, pieces: Sequence[Piece], rows: Tensor) -> Totals:
        """Sums over the ranks that have the other pieces."""
        named = [(member.name, flat.ranks) for member, flat in self.members]
        place = {name: number for number, (name, _) in enumerate(named)}
        mine = [place[piece.name] for piece in pieces]
        totals = torch.zeros(len(named), *rows.shape[1:], dtype=rows.dtype, device=rows.device)
        totals[mine] = rows
        for ranks in dict.fromkeys(ranks for _, ranks in named):
            if ranks.size > 1:
                theirs = [number for number, (_, each) in enumerate(named) if each is ranks]
                summed = ranks.sum_numbers(totals[theirs].to(ranks.device), "numbers about whole parameters")
                totals[theirs] = summed.to(totals.device)
        return Totals([member.param for member, _ in self.members], totals, mine)

    def compressed(
        self, numel: int, tensors: Sequence[tuple[int, int]] | None = None, mask: Tensor | None = None
    ) -> CompressedReduce:
        """Over the ranks that repeat the same state, each with gradients of its own."""
        return CompressedReduce(self.alike, numel, tensors, mask)

    @property
    def alike(self) -> Communicator:
        """The ranks that repeat the same state."""
        (ranks,) = {owned.flat.across for owned in self.part}
        return ranks

    @property
    def place(self) -> tuple[int, int]:
        """Which of these it is."""
        return self.alike.rank, self.alike.size

    def all_gather(self, whole: Tensor, what: str) -> None:
        """Among these."""
        self.alike.all_gather(whole, what)

    def by_whole(self, pieces: Sequence[Piece], rule: WholeRule) -> None:
        """See [Note: whole parameters]."""
        mine = {piece.name: piece for piece in pieces}
        known = [(Whole(m.name, m.param.shape, m.group), m, flat) for m, flat in self.members]
        known = [each for each in known if each[1].param.numel() and rule.concerns(each[0])]
        for ranks in dict.fromkeys(flat.ranks for _, _, flat in known):
            theirs = [
                (whole, flat.layout.shares(member.index))
                for whole, member, flat in known
                if flat.ranks is ranks and (ranks.size > 1 or whole.name in mine)  # some was cleared by hand
            ]
            self.travel(self._rounds(theirs, ranks.size, rule), ranks, rule, mine)

    def _rounds(
        self, known: Sequence[tuple[Whole, list[Share]]], world: int, rule: WholeRule
    ) -> list["Round"]:
        """What is done at a time. All ranks find the same."""
        count = 1 if isinstance(self.lane, Inline) else max(1, min(ROUNDS, len(known) // world))
        works, shares = [rule.work(whole) for whole, _ in known], [lies for _, lies in known]
        dealt = deal_work(works, shares, world, count)
        rounds: list[list[Parcel]] = [[] for _ in range(count)]
        for (whole, lies), (owner, number) in zip(known, dealt, strict=True):
            rounds[number].append(Parcel(whole, self.owners.get(whole.name, owner), lies))
        return [Round(parcels, world) for parcels in rounds if parcels]

    def travel(
        self, rounds: Sequence["Round"], ranks: Communicator, rule: WholeRule, mine: Mapping[str, Piece]
    ) -> None:
        """A round leaves before the one before it is worked on, and comes back while the next one is."""
        ahead: Trip | None = None
        behind: Trip | None = None
        for trip in chain((Trip(each, ranks, rule, mine, self.lane) for each in rounds), [None]):
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
    """A whole parameter, its owner, and where it lies."""

    whole: Whole
    owner: int
    shares: Sequence[Share]


@dataclass(frozen=True)
class Round:
    """Whole parameters that travel together."""

    parcels: Sequence[Parcel]
    size: int  # how many ranks there are

    @cached_property
    def ways(self) -> Counter[tuple[int, int]]:
        """How many elements go from one rank to another, which owns them."""
        ways = Counter[tuple[int, int]]()
        for parcel in self.parcels:
            for rank, numel in parcel.shares:
                if rank != parcel.owner:
                    ways[rank, parcel.owner] += numel
        return ways

    def splits(self, rank: int) -> Splits:
        """What one rank sends to the owners, and is sent as an owner."""
        sent = [self.ways[rank, other] for other in range(self.size)]
        received = [self.ways[other, rank] for other in range(self.size)]
        return Splits(sent, received, max(self.ways.values(), default=0))

    def from_rank(self, rank: int) -> list[tuple[Parcel, int]]:
        """What it has of others' parameters, owner by owner, and how many elements."""
        found = [
            (each, numel)
            for each in self.parcels
            for other, numel in each.shares
            if other == rank != each.owner
        ]
        return sorted(found, key=lambda one: one[0].owner)

    def to_rank(self, rank: int) -> list[tuple[int, Parcel, int]]:
        """What others have of its parameters, rank by rank, and how many elements."""
        found = [
            (other, each, numel)
            for each in self.parcels
            for other, numel in each.shares
            if other != rank == each.owner
        ]
        return sorted(found, key=lambda one: one[0])


class Trip:
    """A round, as one rank takes part in it."""

    def __init__(
        self, one: Round, ranks: Communicator, rule: WholeRule, mine: Mapping[str, Piece], lane: Lane
    ) -> None:
        self.round, self.ranks, self.rule, self.mine, self.lane = one, ranks, rule, mine, lane
        self.splits, self.what = one.splits(ranks.rank), f"whole parameters {one.parcels[0].whole.name} ..."
        self.pending: Pending = Done()

    def leave(self) -> None:
        """What this rank has of others' parameters goes to their owners."""
        sent, received, rank = self.splits.sent, self.splits.received, self.ranks.rank
        make = partial(torch.empty, dtype=self.rule.wire, device=self.ranks.device)
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
        """When what others have of this rank's parameters is here: the work, and what is made goes back."""
        self.pending.wait()
        for parcel in self.round.parcels:
            if parcel.owner == self.ranks.rank:
                self._work_on(parcel)
        back = Splits(self.splits.received, self.splits.sent, self.splits.most)
        self._send(self.received, self.sent, back)

    def come_back(self) -> None:
        """When what was made of this rank's pieces is here: they are given it."""
        self.pending.wait()
        for piece, window in self.own:
            self.rule.take(piece, window.to(piece.master.device))

    def _work_on(self, parcel: Parcel) -> None:
        whole, rule, device = parcel.whole, self.rule, self.ranks.device
        parts = [self.others.get((rank, whole.name)) for rank, _ in parcel.shares]
        mine = self.mine.get(whole.name)  # of which a rank has one piece at most
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
        if splits.most:
            job = partial(self.ranks.all_to_all_uneven, sent, received, splits, self.what)
            self.pending = self.lane.submit(job, [sent, received], [self.lane.producer()])
