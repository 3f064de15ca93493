"""What all ranks must know before a step: the gradients' norm, and which parameters have a gradient at all.

One vector is summed over the ranks and read once by the host. In it are

    squares    of the gradients that this rank owns, and how many slices that do not count are not finite:
               a sum that is inf or NaN says that somebody has a gradient that is. So the norm is the
               overflow check
    stops      how many ranks have been asked to stop, by a signal
    alarms     how many ranks know that what goes on beside the training has failed
    late       how many buckets have gradients that came when they had left: they are reduced, then all
               ranks agree again
    marks      a number made of what this rank is about to do, and its square: all marks are the same if
               and only if the sum of squares is what it is for equal numbers
    slices     the same of what was written by hand to slices, which ranks that repeat a slice compare: first
               these numbers are summed over a slice's neighbours, then squared, then summed over repetitions
    spoilt     how many of the NaNs that released parameters show are none any more. Such a write is an error
               where it is made, but for what goes round Python: the memory itself, compiled code
    flags      for each parameter whether this rank has a gradient of it. As in torch, a parameter that has
               none on any rank is left alone: no decay, no momentum

State that is cut into slices has its squares summed over the ranks that share it; whoever repeats the same
slices (`across`) only takes part in the rest. Gradients that nobody has averaged are others on each of these:
their squares are summed over all, and the norm is the root of the mean over the ranks.
"""

import zlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from zero_full.errors import DisagreementError
from zero_full.offload import Waiting
from zero_full.precision.norms import all_finite, has_fp64, leaves_overflow, squared_norm
from zero_full.shard.group.checksum import digest
from zero_full.shard.group.gradients import Bucket
from zero_full.shard.group.hand_written import BY_HAND, REMEDY, HandWritten
from zero_full.shard.group.parameters import Member, nothing
from zero_full.shard.group.process_groups import Groups, Pair

SQUARES = 2  # numbers that are of slices; those behind are of ranks
STOPS, ALARMS, LATE, MARKS, SLICES, SPOILT, FLAGS = 2, 3, 4, 5, 7, 9, 10  # places of these numbers
MARK_BITS = 20  # so that a sum of squares over thousands of ranks is exact in fp64
SLICE_BITS = 16  # here it is the sum over a slice's neighbours that is squared
NOTHING = "nothing"
WRITTEN, ERROR = "parameters written in place", "error"  # among what ranks do
SPOILT_BY = (
    "a parameter was written while it was sharded, on some rank, by its memory (untyped_storage()) or by "
    "compiled code, so the new values are lost: write inside zero_full.GatheredParameters(parameters, "
    "modifier_rank=0)"
)
ALIKE = (
    "Every rank must run the same modules in the same order, and do the same to gradients, learning rates "
    "and other options of the optimizer"
)
Doings = Sequence[tuple[str, Any]]  # what, and how


@dataclass(frozen=True)
class Agreement:
    """What all ranks know after they have met."""

    norm: float | None  # of the gradients, as they are; None: nobody has asked
    used: Container[Member]  # parameters that have a gradient on any rank
    stops: bool = False  # whether any rank has been asked to stop
    alarm: bool = False  # whether something beside the training has failed on any rank
    late: bool = False  # whether gradients of any rank are still to be reduced


@dataclass(frozen=True)
class Said:
    """What one rank says of itself."""

    used: set[Member]  # parameters that have a gradient here
    doings: Doings
    stops: bool  # whether it has been asked to stop
    alarm: bool  # whether it knows that something beside the training has failed
    averaged: bool = True  # whether gradients are, or each rank's own
    by_hand: HandWritten = field(default_factory=HandWritten)
    late: int = 0  # buckets of which gradients are still to be reduced


def agree(groups: Groups, buckets: Sequence[Bucket], said: Said, needs_norm: bool) -> Agreement:
    """Exchange norm, marks and flags, or raise if marks differ. Every rank must call this.

    A rank whose doings are an error has nothing to say about its gradients.
    """
    counts = needs_norm and not any(what == ERROR for what, _ in said.doings)
    dense = [bucket for bucket in buckets if not bucket.kind.expert]
    sides = [_Side(groups.dense, dense, said, counts)]
    if groups.expert is not None:
        experts = [bucket for bucket in buckets if bucket.kind.expert]
        sides.append(_Side(groups.expert, experts, said, counts))
    alone = groups.model is None or groups.model.size == 1
    if not needs_norm and alone and not any(side.has_peers for side in sides):
        return Agreement(None, said.used, said.stops, said.alarm, said.late > 0)
    squared, poison, stops, alarms, late, *rest = _add_up(groups, sides, exactly=False)
    if needs_norm and not isfinite(squared) and not poison and leaves_overflow(sides[0].numbers.device):
        squared, poison, _, _, _, *rest = _add_up(groups, sides, exactly=True)
    everyones: set[Member] = set()
    for side in sides:
        everyones |= side.read(rest[: side.length])
        rest = rest[side.length :]
    ranks = 1 if said.averaged else groups.data_ranks
    norm = float("nan") if poison else float(squared / ranks) ** 0.5
    return Agreement(norm if needs_norm else None, everyones, stops > 0, alarms > 0, late > 0)


def numbers_on(device: torch.device, values: Sequence[float]) -> Tensor:
    """These numbers there. The host does not wait for the device, as it would to copy ordinary memory."""
    here = torch.tensor(values, dtype=torch.float64, device="cpu")
    if device.type == "cpu":
        return here
    if not has_fp64(device):
        here = here.float()
    return here.pin_memory().to(device, non_blocking=True)


def _add_up(groups: Groups, sides: Sequence["_Side"], exactly: bool) -> list[float]:
    """Everyone's squares, stops, alarms and late buckets, then marks and flags of each side."""
    for side in sides:
        side.add_up(exactly)
    squares = torch.stack([side.numbers[:SQUARES] for side in sides])
    if groups.between_experts is not None:
        groups.between_experts.sum_numbers(squares[1], "squared gradient norm")
    total = torch.cat([squares.sum(0), sides[0].numbers[STOPS:MARKS]])  # every rank has the dense side
    if groups.model is not None:
        groups.model.sum_numbers(total, "squared gradient norm")
    numbers: list[float] = torch.cat([total, *(side.numbers[MARKS:] for side in sides)]).tolist()
    for communicator in groups.communicators:  # the device has been waited for: what failed there is known
        communicator.check("norm and parameters in use")
    return numbers


class _Side:
    """The buckets of one pair of groups."""

    def __init__(self, pair: Pair, buckets: Sequence[Bucket], said: Said, counts: bool) -> None:
        self.pair, self.buckets, self.counts = pair, list(buckets), counts
        self.repeated = SQUARES if said.averaged else 0  # so many numbers are the same for all of `across`
        self.has_peers = pair.shard.size > 1 or pair.across.size > 1
        self.members = [member for bucket in buckets for member in bucket.members]
        self.length = FLAGS - MARKS + len(self.members)
        self.doings = [*said.doings, *said.by_hand.of_all(self.members)]
        self.slices = said.by_hand.of_slices(self.members)
        mark = _mark_of(self.doings, MARK_BITS)
        of_slices = _mark_of([pair.shard.rank, self.slices], SLICE_BITS) if self.slices else 0.0
        marks = [mark, mark * mark, of_slices, of_slices * of_slices]
        flags = (float(member in said.used) for member in self.members)
        self.said = [float(said.stops), float(said.alarm), float(said.late), *marks, 0.0, *flags]
        released = [bucket.flat for bucket in buckets if bucket.flat.released_at_rest]
        kinds = {(flat.dtype, flat.kind.device) for flat in released if flat.kind.device.type != "meta"}
        self.absent = [nothing(*kind) for kind in kinds]
        self.numbers = torch.empty(0)

    def add_up(self, exactly: bool) -> None:
        """Sum over the ranks that share this state and, but for the squares, over those that repeat it."""
        device = self.pair.shard.device
        if device.type == "meta":  # a plan's numbers have values nevertheless
            device = torch.device("cpu")
        home = device if has_fp64(device) else torch.device("cpu")
        self.numbers = numbers_on(home, [*(self._on_host() if self.counts else (0.0, 0.0)), *self.said])
        if self.absent:
            self.numbers[SPOILT] = (~torch.stack([value.isnan() for value in self.absent])).sum()
        if self.counts:
            self.numbers[0] += squared_norm(_gradients(self.buckets, in_norm=True), device, exactly)
            self.numbers[1] += ~all_finite(_gradients(self.buckets, in_norm=False), device)
        what = "norm and parameters in use"
        self.pair.shard.sum_numbers(self.numbers, what)
        if self.pair.shard.size > 1 and self.pair.across.size > 1:
            self.numbers[SLICES + 1] = self.numbers[SLICES].square()
        self.pair.across.sum_numbers(self.numbers[self.repeated :], what)

    def _on_host(self) -> tuple[float, float]:
        """Squares, and how many are not finite, of what was summed on the host, in the buckets' order."""
        squares, poison = 0.0, 0.0
        for bucket in self.buckets:
            if bucket.down is not None and bucket.is_down and bucket.slice_is_valid:
                squared = bucket.down.squared()
                if bucket.kind.in_norm:
                    squares += squared
                else:
                    poison += not isfinite(squared)
        return squares, poison

    def read(self, numbers: Sequence[float]) -> set[Member]:
        """The parameters with a gradient; raise if ranks would do different things."""
        marks, squared, slices, squared_slices, spoilt, *flags = numbers
        if spoilt:
            for absent in self.absent:
                absent.fill_(float("nan"))
            raise RuntimeError(SPOILT_BY)
        ranks = self.pair.shard.size * self.pair.across.size
        if ranks * int(squared) != int(marks) ** 2:
            self._look_closer()
        copies = self.pair.across.size
        if copies > 1 and copies * int(squared_slices) != int(slices) ** 2:
            self._compare_slices()
        return {member for member, flag in zip(self.members, flags, strict=True) if flag}

    def _look_closer(self) -> None:
        everyones = self.pair.everyones(dict(self.doings), "what ranks would do")
        keys = list(dict.fromkeys(key for each in everyones for key in each))
        differing = [key for key in keys if len({repr(each.get(key)) for each in everyones}) > 1]
        if differing == [WRITTEN]:
            self._compare_parameters()  # some may only have written there and back, as rank 0 to evaluate
            return
        told = "; ".join(
            f"{key}: "
            + ", ".join(f"{each.get(key, NOTHING)} (rank {rank})" for rank, each in enumerate(everyones))
            for key in differing
        )
        remedy = REMEDY if all(key.endswith(BY_HAND) for key in differing) else ALIKE
        raise DisagreementError(f"the ranks would not take the same step: {told}. {remedy}")

    def _compare_slices(self) -> None:
        """Raise on every rank if ranks that repeat a slice have written different values to it."""
        everyones = self.pair.everyones(dict(self.slices), "what was written to slices")
        size, told = self.pair.shard.size, list[str]()
        for first in range(size):  # of this slice
            copies = {rank: everyones[rank] for rank in range(first, len(everyones), size)}
            for key in dict.fromkeys(key for each in copies.values() for key in each):
                if len({each.get(key) for each in copies.values()}) > 1:
                    values = ", ".join(
                        f"{each.get(key, NOTHING)} (rank {rank})" for rank, each in copies.items()
                    )
                    told.append(f"{key}: {values}")
        if told:
            raise DisagreementError(
                f"ranks that keep the same slice have written different values to it: {'; '.join(told)}. "
                f"{REMEDY}"
            )

    def _compare_parameters(self) -> None:
        whole = [bucket.flat for bucket in self.buckets if not bucket.flat.released_at_rest]
        hashes = {m.name: digest(m.param) for flat in whole for m in flat.members}
        everyones = self.pair.everyones(hashes, "parameters")
        differing = [name for name in hashes if len({each[name] for each in everyones}) > 1]
        if differing:
            raise DisagreementError(
                f"{', '.join(differing)} differ between ranks, because they were written since the last "
                "step, on some ranks only or with other values: write them on every rank alike, or inside "
                "zero_full.GatheredParameters(parameters, modifier_rank=0)"
            )


def _gradients(buckets: Sequence[Bucket], in_norm: bool) -> list[Tensor]:
    here = [bucket for bucket in buckets if bucket.kind.in_norm == in_norm and not bucket.is_down]
    return [tensor for bucket in here for tensor in bucket.averaged_gradients()]


def _mark_of(what: Any, bits: int) -> float:
    return float(zlib.crc32(repr(what).encode()) >> (32 - bits))


def doings_of(
    param_groups: Sequence[Mapping[str, Any]], so_far: Doings, written: str, failure: Exception | None
) -> Doings:
    """What every rank must do alike in this step. `written`: a digest of what parameters were given."""
    doings: list[tuple[str, Any]] = [*so_far, (WRITTEN, written)]
    for number, group in enumerate(param_groups):
        named = ((key, _comparable(value)) for key, value in group.items() if key != "params")
        doings += [(f"{key} of group {number}", value) for key, value in named if value is not None]
    if failure is not None:
        doings.append((ERROR, str(failure)))
    return doings


def _comparable(value: Any) -> Any:
    """An option in a form that has the same text on every rank, or None if there is none."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and value.device.type == "cpu" else None
    if isinstance(value, (tuple, list)):
        return tuple(map(_comparable, value))
    return value if isinstance(value, (bool, int, float, str)) else None


def refuse_unused(groups: Groups, buckets: Sequence[Bucket], used: Container[Member]) -> None:
    """Raise on every rank if any rank lacks the gradient of a parameter that is trained."""
    members = (m for bucket in buckets for m in bucket.members if m.param.requires_grad)
    unused = told_by_all(groups, [m.name for m in members if m not in used], "unused parameters")
    if unused:
        raise ValueError(
            f"no gradient for {', '.join(sorted(unused))} in this step, on some rank at least. Freeze "
            "what is not trained, or set zero_optimization.ignore_unused_parameters to true"
        )


def refuse_lost(groups: Groups, waiting: Waiting) -> None:
    """Raise on every rank if some of what waits elsewhere is gone on any rank. Every rank must call this."""
    if waiting.can_lose:
        refuse_on_all(groups, waiting.lost)


def refuse_on_all(groups: Groups, problem: str) -> None:
    """Raise on every rank if any rank has a problem, in words. Every rank must call this."""
    if told := told_by_all(groups, [problem] if problem else [], "what went wrong"):
        raise RuntimeError("; ".join(sorted(told)))


def told_by_all(groups: Groups, mine: Sequence[str], what: str) -> list[str]:
    """What any rank has to tell, each once, in the order of ranks. Every rank must call this."""
    device = groups.dense.shard.device
    count = numbers_on(torch.device("cpu") if device.type == "meta" else device, [len(mine)])
    for group in groups.everyone:
        group.sum_numbers(count, what)
    told = list(mine)
    if count.item():
        for group in groups.everyone:
            told = [one for each in group.gather_objects(told, what) for one in each]
    return list(dict.fromkeys(told))
