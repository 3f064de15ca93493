"""The exchange before a step: gradient norm, overflow check, parameters in use, and ranks that diverge.

One vector is summed over the ranks (all-reduce) and read once by the host. It has these parts:

    squares    three numbers. First the sum of squares of the gradients that this rank owns; if the total is
               inf or NaN, so is a gradient of some rank, so the norm is the overflow check. Then the number
               of slices that are not finite, of those that do not enter the norm. Then the squares of
               gradients that all `tensor` ranks have: see [Note: model parallel]
    stops      ranks that have received a signal to stop
    alarms     ranks that know of failed background work
    late       groups with gradients that arrived after their reduction. They are reduced, then the exchange
               is repeated
    changed    groups whose slices user code has written to: see [Note: writes to parameters] in `master.py`
    marks      a hash of what this rank is about to do, and its square. With n ranks, all hashes are equal if
               and only if n times the sum of squares equals the square of the sum (Cauchy-Schwarz)
    slices     the same for values that user code wrote to slices, which only replicas of a slice must have
               equal. The hashes are summed over the `shard` group, then squared, then summed over replicas
    overwritten
               placeholders of released parameters that are not NaN any more. Python raises at such a write;
               this catches writes to the memory itself and by compiled code
    flags      for each parameter, the ranks that have a gradient of it. As in torch, a parameter without a
               gradient on any rank is not updated: no weight decay, no momentum

Squares are summed over the `shard` group only, because replicas own the same averaged slices.
Gradients that are not averaged differ between replicas: their squares are summed over all ranks, and the norm
is the root of the mean over the ranks.

Ranks that hold different parts of the model add up squares and ranks only, and compare less: see
[Note: model parallel].
"""

import zlib
from collections.abc import Container, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import compress
from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor

from zero_full.comm.topology import this_rank
from zero_full.errors import DisagreementError
from zero_full.optim.step import copy_on
from zero_full.precision.norms import all_finite, has_fp64, leaves_overflow, squared_norm
from zero_full.shard.group.checksum import digest
from zero_full.shard.group.gradients import names_of
from zero_full.shard.group.hand_written import BY_HAND, REMEDY, HandWritten
from zero_full.shard.group.parameter_group import TrainedGroup
from zero_full.shard.group.parameters import Member, placeholder_scalar
from zero_full.shard.group.process_groups import Communicators, Pair

SQUARES = 3  # numbers about slices, at the front of the vector; the others are about ranks
# Offsets in the vector.
REPEATED, STOPS, ALARMS, LATE, CHANGED, MARKS, SLICES, OVERWRITTEN, FLAGS = 2, 3, 4, 5, 6, 7, 9, 11, 12
MARK_BITS = 20  # so that a sum of squares over thousands of ranks is exact in fp64
SLICE_BITS = 16  # fewer, because the sum of these hashes over the `shard` group is squared
NOTHING = "nothing"
WRITTEN, ERROR = "parameters written in place", "error"  # keys of `Actions`
PLAIN = {bool, int, float, str, type(None)}  # types of options whose `repr` is equal on every rank
OVERWRITTEN_BY = (
    "on some rank a parameter was written while it was sharded, through its untyped_storage() or by compiled "
    "code, so the new values are lost. Write inside zero_full.GatheredParameters(parameters, modifier_rank=0)"
)
ALIKE = (
    "Every rank must run the same modules in the same order, and make the same changes to gradients, "
    "learning rates and other options of the optimizer"
)
Actions = Sequence[tuple[str, Any]]  # key and value of everything that must be equal on all ranks


@dataclass(frozen=True)
class Contribution:
    """One rank's contribution to the exchange."""

    used: set[Member]  # parameters that have a gradient on this rank
    actions: Actions  # equal on every rank, unless ranks diverge
    stops: bool  # this rank has received a signal to stop
    alarm: bool  # this rank knows that background work has failed
    frozen: Set[Member] = frozenset()  # parameters that were frozen in a backward pass
    averaged: bool = True  # False: the gradients are each rank's own
    needs_norm: bool = False  # for this exchange, even if the settings need none
    by_hand: HandWritten = field(default_factory=HandWritten)
    late: int = 0  # groups with gradients that must still be reduced
    changed: Sequence[Tensor] = ()  # bools on the device: user code has written to a slice of parameters
    failed: bool = False  # this rank cannot step, and may have no valid gradients
    repeated_writes: str = ""  # what user code has written to parameters that all `tensor` ranks have whole


@dataclass(frozen=True)
class Agreed:
    """The result of the exchange, equal on all ranks."""

    norm: float | None  # of the gradients, with their loss scale; None: not needed
    used: set[Member]  # parameters that have a gradient on any rank
    stops: bool = False  # any rank has received a signal to stop
    alarm: bool = False  # background work has failed on any rank
    late: bool = False  # any rank has gradients that must still be reduced
    changed: bool = False  # user code has written to the slices of parameters of any rank


class Agreement:
    """The all-reduce before a step, for the parameter groups that take part in steps."""

    def __init__(
        self, communicators: Communicators, trained: Sequence[TrainedGroup], needs_norm: bool
    ) -> None:
        self.communicators, self.needs_norm = communicators, needs_norm
        dense = [group for group in trained if not group.kind.expert]
        self.sides = [_Side(communicators.dense, dense)]
        if communicators.expert is not None:
            experts = [group for group in trained if group.kind.expert]
            self.sides.append(_Side(communicators.expert, experts))
        self.model_parallel: ModelParallelAgreement | None = None
        if any(each.size > 1 for each in communicators.model_parallel):
            self.model_parallel = ModelParallelAgreement(communicators)
        if communicators.tensor is not None and communicators.tensor.size > 1:
            for side in self.sides:
                side.repeated = [group for group in side.groups if not group.kind.is_split]
        self.has_peers = self.model_parallel is not None or any(side.has_peers for side in self.sides)

    def exchange(self, mine: Contribution) -> Agreed:
        """Sum norm, marks and flags over the ranks; raise if marks differ. Every rank must call this."""
        # Gradients that are not averaged are always checked: one rank's NaN must skip the step on all ranks.
        needs_norm = self.needs_norm or mine.needs_norm or not mine.averaged
        if not (needs_norm or self.has_peers):
            is_changed = any(map(bool, mine.changed))
            return Agreed(None, mine.used, mine.stops, mine.alarm, mine.late > 0, is_changed)
        communicators, sides = self.communicators, self.sides
        # A rank with an error may have no valid gradients. It contributes zero, and all ranks raise anyway.
        counts = needs_norm and not mine.failed
        squared, nonfinite, _, stops, alarms, late, changed, *rest = self._add_up(mine, counts, exactly=False)
        if self.model_parallel is not None and self.model_parallel.differ:
            self._raise_together(self.model_parallel, rest, mine)
        used: set[Member] = set()
        for side in sides:  # first: it raises on ranks that need the norm and on others, if they disagree
            used |= side.read(rest[: side.length], mine)
            rest = rest[side.length :]
        # The squares may overflow where the gradients do not. All ranks see the same sum, so all repeat it.
        if needs_norm and not isfinite(squared) and not nonfinite and leaves_overflow(sides[0].sum_device):
            squared, nonfinite, *_ = self._add_up(mine, counts, exactly=True)
        if not needs_norm:
            return Agreed(None, used, stops > 0, alarms > 0, late > 0, changed > 0)
        ranks = 1 if mine.averaged else communicators.data_ranks
        norm = float("nan") if nonfinite else float(squared / ranks) ** 0.5
        return Agreed(norm, used, stops > 0, alarms > 0, late > 0, changed > 0)

    def _raise_together(
        self, parts: "ModelParallelAgreement", rest: Sequence[float], mine: Contribution
    ) -> None:
        """Raise the disagreements of all parts of the model on every rank. Every rank must call this.

        rest  marks and flags of this rank's part, by side
        """
        problems = parts.problems()
        for side in self.sides:
            try:
                side.read(rest[: side.length], mine)
            except (DisagreementError, RuntimeError) as error:
                problems.append(str(error))
            rest = rest[side.length :]
        if messages := gather_messages(self.communicators, problems, "where ranks diverge"):
            raise DisagreementError("; ".join(sorted(messages)))

    def _add_up(self, mine: Contribution, counts: bool, exactly: bool) -> list[float]:
        """Return the sums over all ranks: the head of the vector, then marks and flags by side.

        The head has squares, stops, alarms, and the numbers of late and of changed groups.
        """
        communicators = self.communicators
        if len(self.sides) == 1 and self.model_parallel is None:
            total = self.sides[0].add_up(mine, counts, exactly)
        else:
            vectors = [side.add_up(mine, counts, exactly) for side in self.sides]
            squares = torch.stack([vector[:SQUARES] for vector in vectors])
            # Expert ranks hold different experts, tensor and pipe ranks different parameters. All have
            # squares to add. Dense gradients are equal on all expert ranks.
            if communicators.between_experts is not None:
                communicators.between_experts.sum_numbers(squares[1], "squared gradient norm")
            head = torch.cat([squares.sum(0), vectors[0][STOPS:MARKS]])  # every rank has the dense side
            if self.model_parallel is not None:
                diverges = torch.stack(
                    [side.diverges(vector) for side, vector in zip(self.sides, vectors, strict=True)]
                )
                head = self.model_parallel.add_up(head, diverges.any(), mine)
            total = torch.cat([head, *(vector[MARKS:] for vector in vectors)])
            if self.model_parallel is not None:
                total = torch.cat([total, self.model_parallel.flags])
        numbers: list[float] = total.tolist()
        if self.model_parallel is not None:
            self.model_parallel.diverging, self.model_parallel.differing, self.model_parallel.batches = (
                numbers[-3:]
            )
        return numbers


class _Side:
    """The parameter groups of one pair of process groups: the dense ones, or the experts."""

    def __init__(self, pair: Pair, groups: Sequence[TrainedGroup]) -> None:
        self.pair, self.groups = pair, groups
        self.has_peers = pair.shard_comm.size > 1 or pair.replica_comm.size > 1
        self.members = [member for group in groups for member in group.members]
        self.length = FLAGS - MARKS + len(self.members)
        self.repeated: Sequence[TrainedGroup] = ()  # of parameters that all `tensor` ranks have whole
        released = [group for group in groups if group.parameters.released_at_rest]
        kinds = {(g.parameters.dtype, g.kind.device) for g in released if g.kind.device.type != "meta"}
        self.placeholders = [placeholder_scalar(*kind) for kind in kinds]
        device = pair.shard_comm.device
        if device.type == "meta":  # a dry run on the meta device needs real numbers here
            device = torch.device("cpu")
        self.device, self.sum_device = device, device if has_fp64(device) else torch.device("cpu")

    def add_up(self, mine: Contribution, counts: bool, exactly: bool) -> Tensor:
        """Return this side's vector, summed over its ranks. `counts`: include this rank's gradients."""
        pair = self.pair
        actions, mark_of_slices = self._actions(mine), 0.0
        if slices := mine.by_hand.of_slices(self.members):
            mark_of_slices = mark_of([pair.shard_comm.rank, slices], SLICE_BITS)
        mark = mark_of(actions, MARK_BITS)
        gradients, outside_norm, squares, nonfinite = self._gradients() if counts else ([], [], 0.0, 0.0)
        numbers = [squares, nonfinite, 0.0, float(mine.stops), float(mine.alarm), float(mine.late), 0.0]
        numbers += [mark, mark * mark, mark_of_slices, mark_of_slices * mark_of_slices, 0.0]
        numbers.extend(map(float, map(mine.used.__contains__, self.members)))
        vector = numbers_on(self.sum_device, numbers)
        for value in self.placeholders:
            vector[OVERWRITTEN] += ~value.isnan()
        if mine.changed:
            vector[CHANGED].add_(torch.stack([*mine.changed]).sum())
        if counts:  # device values are added on the device: only `tolist` waits for it
            vector[0] += squared_norm(gradients, self.device, exactly)
            if outside_norm:
                vector[1] += ~all_finite(outside_norm, self.device)
        if self.repeated and not mine.failed:
            vector[REPEATED] += squares_of(self.repeated, self.device)
        what = "norm and parameters in use"
        pair.shard_comm.sum_numbers(vector, what)
        if pair.replica_comm.size > 1:
            if pair.shard_comm.size > 1:
                vector[SLICES + 1] = vector[SLICES].square()
            # Replicas own the same averaged gradients: leave their squares out of the sum.
            pair.replica_comm.sum_numbers(vector[SQUARES if mine.averaged else 0 :], what)
        return vector

    def _actions(self, mine: Contribution) -> Actions:
        """Return everything that must be equal on the ranks of this side."""
        actions = [*mine.actions, *mine.by_hand.of_all(self.members)]
        if mine.frozen and (frozen := [member for member in self.members if member in mine.frozen]):
            actions.append(("frozen parameters", names_of(frozen)))
        return actions

    def _gradients(self) -> tuple[list[Tensor], list[Tensor], float, float]:
        """Return this rank's gradients on the device, in the norm and outside of it, and two sums.

        The sums are over slices in host memory: squares in the norm, non-finite slices outside of it.
        """
        gradients, outside_norm, squares, nonfinite = list[Tensor](), list[Tensor](), 0.0, 0.0
        for group in self.groups:
            mine = group.gradients
            if not mine.is_on_host:
                (gradients if group.kind.in_norm else outside_norm).extend(mine.averaged_gradients())
            elif mine.host_slice is not None and mine.slice_is_valid:
                squared = mine.host_slice.squared()
                if group.kind.in_norm:
                    squares += squared
                else:
                    nonfinite += not isfinite(squared)
        return gradients, outside_norm, squares, nonfinite

    def diverges(self, vector: Tensor) -> Tensor:
        """Return on the device whether `read` raises, or compares parameters, on the ranks of this pair."""
        ranks, copies = self.pair.shard_comm.size * self.pair.replica_comm.size, self.pair.replica_comm.size
        marks, squared, slices, squared_slices, overwritten = vector[MARKS:FLAGS]
        differs: Tensor = (ranks * squared != marks.square()) | (overwritten > 0)
        return differs if copies == 1 else differs | (copies * squared_slices != slices.square())

    def read(self, numbers: Sequence[float], mine: Contribution) -> set[Member]:
        """Return the parameters with a gradient on any rank. Raise if ranks are about to diverge."""
        marks, squared, slices, squared_slices, overwritten = numbers[:5]
        if overwritten:
            for placeholder in self.placeholders:  # repair them, so that they read as NaN again
                placeholder.fill_(float("nan"))
            raise RuntimeError(OVERWRITTEN_BY)
        ranks, copies = self.pair.shard_comm.size * self.pair.replica_comm.size, self.pair.replica_comm.size
        # The numbers are sums over all ranks, so all ranks take the same branch into the collectives below.
        if not are_equal(ranks, marks, squared):
            self._compare_actions(self._actions(mine))
        if copies > 1 and not are_equal(copies, slices, squared_slices):
            self._compare_slices(mine.by_hand.of_slices(self.members))
        return set(compress(self.members, numbers[5:]))

    def _compare_actions(self, actions: Actions) -> None:
        """Gather the planned actions of all ranks, and raise DisagreementError with those that differ."""
        everyones = dict(self.pair.gather_objects((this_rank(), dict(actions)), "what ranks would do"))
        differing = _differing(everyones)
        if differing == [WRITTEN]:
            # Some ranks may have written and restored the same values, such as rank 0 to evaluate.
            self._compare_parameters()
            return
        differences = _by_key(differing, everyones)
        remedy = REMEDY if all(key.endswith(BY_HAND) for key in differing) else ALIKE
        raise DisagreementError(f"the ranks would not take the same step: {differences}. {remedy}")

    def _compare_slices(self, slices: Sequence[tuple[str, str]]) -> None:
        """Raise on every rank if user code wrote different values to replicas of a slice."""
        everyones = self.pair.gather_objects(dict(slices), "what was written to slices")
        size, differences = self.pair.shard_comm.size, list[str]()
        for first in range(size):  # the first replica's rank; `size` ranks further on is the next one
            copies = {rank: everyones[rank] for rank in range(first, len(everyones), size)}
            for key in dict.fromkeys(key for each in copies.values() for key in each):
                if len({each.get(key) for each in copies.values()}) > 1:
                    values = ", ".join(
                        f"{each.get(key, NOTHING)} (rank {rank})" for rank, each in copies.items()
                    )
                    differences.append(f"{key}: {values}")
        if differences:
            raise DisagreementError(
                f"replicas of the same slice were set to different values: {'; '.join(differences)}. {REMEDY}"
            )

    def _compare_parameters(self) -> None:
        """Raise DisagreementError on every rank if whole parameters differ between ranks."""
        whole = [group for group in self.groups if not group.parameters.released_at_rest]
        pairs = [pair for g in whole for pair in zip(g.members, g.parameters.windows, strict=True)]
        hashes = {member.name: digest(window) for member, window in pairs}
        everyones = self.pair.gather_objects(hashes, "parameters")
        differing = [name for name in hashes if len({each[name] for each in everyones}) > 1]
        if differing:
            raise DisagreementError(
                f"{', '.join(differing)} differ between ranks: since the last step they were written on some "
                "ranks only, or with different values. Write the same values on every rank, or write inside "
                "zero_full.GatheredParameters(parameters, modifier_rank=0)"
            )


# Ranks that hold different parts of the model ----------------------------------------------------

TOLERANCE = 0.005  # of squared norms, from their mean; kernels that add in any order differ by far less
EVERYWHERE = (
    "loss scale",
    "gradient clipping",
    "a backward pass before the step",
    "signals watched",
    ERROR,
)
SAME_BATCH = (
    "Then the all-reduces inside tensor-parallel layers add up activations of different batches, and the "
    "parameters drift apart. Give all tensor-parallel ranks the same batch (choose it by the rank in the "
    'mesh dimension "data"), and the same random numbers in layers that are not cut'
)


class ModelParallelAgreement:
    """Comparison in a step between ranks that hold different parts of the model, beside the norm.

    [Note: model parallel] Each pair of process groups compares its own ranks. Here all others learn that
    the ranks of a pair diverge, and what must be equal on all parts is compared: loss scale, clipping and
    failures. Ranks of `tensor` have the same parameters, so their learning rates and other options
    must be equal as well. Pipeline stages may have their own.

    Parameters that tensor parallelism has not cut have the same gradients on all `tensor` ranks, if these got
    the same batch. So the squared norm of these gradients is compared, within a tolerance.
    """

    def __init__(self, communicators: Communicators) -> None:
        self.communicators = communicators
        self.ranks = prod(each.size for each in communicators.model_parallel)
        self.has_stages = communicators.pipe is not None and communicators.pipe.size > 1
        self.actions: dict[str, Any] = {}
        self.repeated = torch.zeros(())  # squared norm of this rank's gradients that all `tensor` ranks have
        self.flags = torch.zeros(3)  # on the device: the three numbers below
        # All are equal on all ranks, and 0 if nothing is wrong.
        self.diverging = 0.0  # parts with ranks that would not take the same step
        self.differing = 0.0  # not 0: parts would not take the same step
        self.batches = 0.0  # not 0: `tensor` ranks have different gradients

    def add_up(self, head: Tensor, diverges: Tensor, mine: Contribution) -> Tensor:
        """Sum the vector's `head` over the parts, and compare the parts. Every rank must call this."""
        self.actions = {key: value for key, value in mine.actions if self._is_equal_everywhere(key)}
        if mine.repeated_writes and not self.has_stages:
            self.actions["parameters written that are not cut"] = mine.repeated_writes
        self.repeated = repeated = head[REPEATED].clone()
        mark = torch.full_like(repeated, mark_of([*self.actions.items()], MARK_BITS))
        own = torch.stack([diverges.to(head), mark, mark.square(), repeated, repeated.square()])
        vector, what = torch.cat([head, own]), "squared gradient norm"
        tensor, pipe = self.communicators.tensor, self.communicators.pipe
        if tensor is not None:
            tensor.sum_numbers(vector, what)
            variance = tensor.size * vector[-1] - vector[-2].square()
            vector[-1] = variance > (TOLERANCE * vector[-2]).square()  # False for inf and NaN
        else:
            vector[-1] = 0.0
        if pipe is not None:
            pipe.sum_numbers(vector, what)
        differing = self.ranks * vector[-3] - vector[-4].square()
        self.flags = torch.stack([vector[-5], differing, vector[-1]])
        return vector[: head.numel()]

    def _is_equal_everywhere(self, key: str) -> bool:
        is_option = " of group " in key
        return key in EVERYWHERE or key.startswith("call of ") or (is_option and not self.has_stages)

    @property
    def differ(self) -> bool:
        """Whether any ranks disagree. Equal on all ranks."""
        return bool(self.diverging or self.differing or self.batches)

    def problems(self) -> list[str]:
        """Describe the differences between parts, on the ranks concerned. Every rank must call this."""
        known, found = {this_rank(): (self.actions, float(self.repeated))}, list[str]()
        for communicator in self.communicators.model_parallel:
            gathered = communicator.gather_objects(known, "what ranks would do")
            known = dict(sorted(item for some in gathered for item in some.items()))
            norms = {rank: f"{squares**0.5:.4g}" for rank, (_, squares) in known.items()}
            if self.batches and communicator is self.communicators.tensor and len({*norms.values()}) > 1:
                found.append(
                    "tensor-parallel ranks have different gradients of parameters that are not cut: their "
                    f"norm is {', '.join(f'{norm} (rank {rank})' for rank, norm in norms.items())}. "
                    + SAME_BATCH
                )
        actions = {rank: each for rank, (each, _) in known.items()}
        # If ranks of one part differ already, that part says which.
        if (differing := _differing(actions)) and not self.diverging:
            found.append(f"the ranks would not take the same step: {_by_key(differing, actions)}. {ALIKE}")
        return found


def squares_of(groups: Sequence[TrainedGroup], device: torch.device) -> Tensor:
    """Return the sum of squares of this rank's averaged gradients of these groups."""
    on_device, on_host = list[Tensor](), 0.0
    for mine in (group.gradients for group in groups):
        if not mine.is_on_host:
            on_device += [each for each in mine.averaged_gradients() if each.layout is torch.strided]
        elif mine.host_slice is not None and mine.slice_is_valid:
            on_host += mine.host_slice.squared()
    return squared_norm(on_device, device) + on_host


def _differing(everyones: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return the keys of planned actions that differ between ranks."""
    keys = dict.fromkeys(key for each in everyones.values() for key in each)
    return [key for key in keys if len({repr(each.get(key)) for each in everyones.values()}) > 1]


def _by_key(keys: Sequence[str], everyones: Mapping[int, Mapping[str, Any]]) -> str:
    """Format the planned actions of each rank, for an error."""
    return "; ".join(
        f"{key}: " + ", ".join(f"{each.get(key, NOTHING)} (rank {rank})" for rank, each in everyones.items())
        for key in keys
    )


# Small parts -------------------------------------------------------------------------------------


def numbers_on(device: torch.device, values: Sequence[float]) -> Tensor:
    """Copy these numbers to the device, without waiting for it."""
    on_host = device.type == "cpu"
    dtype = torch.float64 if on_host or has_fp64(device) else torch.float32
    here = torch.tensor(values, dtype=dtype, device="cpu")
    return here if on_host else copy_on(device, here)


def are_equal(count: float, total: float, squares: float) -> bool:
    """Return whether so many whole numbers are all equal, by their sum and the sum of their squares."""
    return int(count) * int(squares) == int(total) ** 2


def mark_of(what: Any, bits: int) -> float:
    """Return a hash of a value's `repr` as a number of `bits` bits: equal on ranks with equal values."""
    return float(zlib.crc32(repr(what).encode()) >> (32 - bits))


def actions_of(
    param_groups: Sequence[Mapping[str, Any]], so_far: Actions, written: str, failure: Exception | None
) -> Actions:
    """List the actions that must be equal on every rank in this step.

    `so_far`: keys and values to begin with. `written`: a digest of values that user code wrote to parameters.
    `failure` comes last, under the key `ERROR`.
    """
    actions: list[tuple[str, Any]] = [*so_far, (WRITTEN, written)]
    for number, group in enumerate(param_groups):
        actions += [(f"{key} of group {number}", value) for key, value in options_of(group).items()]
    if failure is not None:
        actions.append((ERROR, str(failure)))
    return actions


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group that can be compared between ranks."""
    options = dict[str, Any]()
    for key, value in group.items():
        if key == "params":
            continue
        kind = type(value)
        if not (kind in PLAIN or (kind is tuple and PLAIN.issuperset(map(type, value)))):
            value = _comparable(value)
        if value is not None:
            options[key] = value
    return options


def _comparable(value: Any) -> Any:
    """Convert an option to a form whose `repr` is equal on every rank, or None."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and value.device.type == "cpu" else None
    if isinstance(value, (tuple, list)):
        return tuple(map(_comparable, value))
    return value if isinstance(value, (bool, int, float, str)) else None


def check_all_used(
    communicators: Communicators, trained: Sequence[TrainedGroup], used: Container[Member]
) -> None:
    """Raise on every rank if any rank lacks the gradient of a trained parameter."""
    members = (m for group in trained for m in group.members if m.param.requires_grad)
    unused = gather_messages(communicators, [m.name for m in members if m not in used], "unused parameters")
    if unused:
        raise ValueError(
            f"{', '.join(sorted(unused))} got no gradient in this step, at least on one rank. Freeze "
            "parameters that are not trained, or set zero_optimization.ignore_unused_parameters to true"
        )


def raise_on_all_ranks(communicators: Communicators, problem: str) -> None:
    """Raise on every rank if any rank's `problem`, a message, is not empty. Every rank must call this."""
    if messages := gather_messages(communicators, [problem] if problem else [], "what went wrong"):
        raise RuntimeError("; ".join(sorted(messages)))


def gather_messages(communicators: Communicators, mine: Sequence[str], what: str) -> list[str]:
    """Collect the messages of all ranks, without duplicates, by rank. Every rank must call this.

    One number is summed first: as a rule no rank has a message, and the objects need not be gathered. A rank
    without peers sums nothing, as reading the sum would wait for the device.
    """
    if all(communicator.size == 1 for communicator in communicators.everyone):
        return list(dict.fromkeys(mine))
    device = communicators.device
    count = numbers_on(torch.device("cpu") if device.type == "meta" else device, [len(mine)])
    for communicator in communicators.everyone:
        communicator.sum_numbers(count, what)
    messages = list(mine)
    if count.item():
        for communicator in communicators.everyone:
            messages = [one for each in communicator.gather_objects(messages, what) for one in each]
    return list(dict.fromkeys(messages))
