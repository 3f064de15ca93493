"""Parameters in one flat buffer: whole on every rank, or gathered while they are needed.

[Note: released parameters] A flat buffer that is released has one storage for life, which shrinks to nothing
and is filled again: views that autograd has saved of it come back to life with it. Meanwhile its parameters
show one NaN, expanded to their shape: shapes and sizes are always right. Using the values is an error, see
[Note: released]. `shard`, this rank's slice, always stays: here or elsewhere, see `offload/param_store.py`.

[Note: node copies] Where a `node` is given, its ranks keep what forward has gathered, each its part, until
the parameters change. Backward gathers from there, and nothing crosses between nodes.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from zero_full._compat import identity_of, version_of, without_overrides
from zero_full.comm.lane import Lane, Pending
from zero_full.layout import FlatLayout, Fragment
from zero_full.offload import Shelf, Slice
from zero_full.precision.dtypes import NAMES, Dtypes
from zero_full.shard.group.process_groups import Pair
from zero_full.shard.group.released import mark_released, unmark_released

ALIGNMENT = 8  # elements: 16 bytes of 16-bit numbers, which is what kernels like to start at


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter in a flat buffer."""

    name: str
    param: Parameter
    group: int  # which of the optimizer's parameter groups; FROZEN if none
    index: int  # which of the buffer's parameters


FROZEN = -1


@dataclass(frozen=True)
class Kind:
    """What the parameters of one flat buffer have in common."""

    dtype: torch.dtype  # the model's
    device: torch.device
    expert: bool = False
    in_norm: bool = True  # False: another tensor-parallel rank counts the same values in the norm
    trained: bool = True
    asleep: bool = False  # to be trained, but frozen at first
    released_at_rest: bool = False  # gathered for use only


class GatherState(Enum):
    """Where a flat buffer is in its life."""

    SHARDED = auto()
    GATHERING = auto()
    WHOLE = auto()


@cache
def nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a released parameter shows."""
    return torch.full((), _lacking(dtype), dtype=dtype, device=device)


def _lacking(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


for _dtype in NAMES.values():  # made now: what a run has in memory is then all its own
    nothing(_dtype, torch.device("cpu"))


def as_bytes(tensor: Tensor) -> Tensor:
    """What gloo can send of it: it knows neither bool nor float8."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def is_released(param: Tensor) -> bool:
    """Whether this parameter shows that it is not there."""
    shown, absent = param.untyped_storage(), nothing(param.dtype, param.device).untyped_storage()
    return identity_of(shown) == identity_of(absent)


def layout_of(numels: Sequence[int], pair: Pair) -> FlatLayout:
    """How parameters of these sizes lie in a flat buffer that is cut over these ranks."""
    return FlatLayout(tuple(numels), pair.shard.size, ALIGNMENT, copies=pair.across.size)


def _kind_of(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)} on {tensor.device}"


class FlatParameter:
    """See [Note: released parameters]."""

    def __init__(
        self,
        members: Sequence[Member],
        kind: Kind,
        pair: Pair,
        dtypes: Dtypes,
        deferred: bool = False,
        shelf: Shelf | None = None,
    ) -> None:
        """`deferred`: the values come later, by `fill`. Every rank must do the same.

        `shelf`: where this rank's slice waits while the others are released; None: beside the model.
        """
        self.members, self.kind = list(members), kind
        self.ranks, self.across = pair.shard, pair.across
        self.gather_slices, self.node = pair.gather, pair.node
        self.dtype = dtypes.of(kind.dtype)
        self.layout = layout_of([m.param.numel() for m in members], pair)
        self.name = members[0].name if len(members) == 1 else f"{members[0].name} ... {members[-1].name}"
        shelf = (shelf or Shelf()).of(self.layout.shard) if kind.released_at_rest else Shelf()
        self.released_at_rest = kind.released_at_rest and (self.ranks.size > 1 or shelf.apart)
        self.state, self.users = GatherState.WHOLE, 0
        self.hidden = False  # the parameters show that they are not there
        self.versions: list[int] = []  # of the parameters, when they became whole
        self.lent = False  # somebody outside may keep views of the values
        self.pending: Pending | None = None
        self.home: Any = None  # the stream that the gathered values' memory belongs to
        self.node_copy: Tensor | None = None  # see [Note: node copies]
        self.unrounded: Tensor | None = None
        self.slice = self._reserve(shelf) if deferred else self._move_in(shelf)
        self._lay_out()

    def _move_in(self, shelf: Shelf) -> Slice:
        """Lay the parameters end to end, the first rank's values on every rank."""
        original = torch.zeros(self.layout.total, dtype=self.kind.dtype, device=self.kind.device)
        for member in self.members:
            original[self.layout.window(member.index)].view(member.param.shape).copy_(member.param.detach())
        for group in (self.ranks, self.across):
            group.broadcast(as_bytes(original), f"parameters {self.name}")
        self.full = original.to(self.dtype)
        if self.kind.trained and self.dtype != self.kind.dtype:
            self.unrounded = self.ranks.slice_of(original)
        mine = self.ranks.slice_of(self.full)
        return shelf.put(mine) if self.released_at_rest else Slice(mine)

    def _reserve(self, shelf: Shelf) -> Slice:
        """Room for this rank's slice; of a buffer that is gathered for use, nothing else is ever filled."""
        make = torch.empty if self.released_at_rest else torch.zeros
        self.full = make(self.layout.total, dtype=self.dtype, device=self.kind.device)
        mine = self.ranks.slice_of(self.full)
        if self.released_at_rest:
            return shelf.reserve(mine.numel(), mine.dtype, mine.device)
        return Slice(mine)

    @property
    def shard(self) -> Tensor:
        """This rank's slice, to be read or written now, wherever it waits."""
        return self.slice.values

    def take_unrounded(self) -> Tensor:
        """This rank's slice as the model had it, once: what 16 bits round off is not lost."""
        values, self.unrounded = self.unrounded, None
        return self.shard if values is None else values

    def _lay_out(self) -> None:
        """The parameters are windows into the flat buffer."""
        self.windows = self._cut_windows()
        absent = nothing(self.dtype, self.kind.device)
        self.nothings = [absent.expand(member.param.shape) for member in self.members]
        self.show()
        self.release()

    def _cut_windows(self) -> list[Tensor]:
        shapes = [member.param.shape for member in self.members]
        return [self.full[self.layout.window(i)].view(shape) for i, shape in enumerate(shapes)]

    # Whole and sharded ---------------------------------------------------------------------------

    def show(self) -> None:
        """The parameters are windows into the buffer."""
        self.hidden = False
        for member, window in zip(self.members, self.windows, strict=True):
            unmark_released(member.param)
            member.param.data = window
        self.note_versions()

    def note_versions(self, of: Container[Member] | None = None) -> None:
        """Writes until now are known: they have been taken over, or given up. None: those of all members."""
        before = self.versions or [0] * len(self.members)
        self.versions = [
            version_of(member.param) if of is None or member in of else version
            for member, version in zip(self.members, before, strict=True)
        ]

    def written(self) -> list[str]:
        """Parameters that somebody has written to since they are whole, as far as torch counts it."""
        pairs = zip(self.members, self.versions, strict=True)
        return [member.name for member, version in pairs if version_of(member.param) != version]

    def hide(self) -> None:
        """The parameters show that they are not there."""
        self.hidden = True
        for member, absent in zip(self.members, self.nothings, strict=True):
            member.param.data = absent
            mark_released(member.param, member.name)

    def moved(self) -> list[tuple[Member, Tensor]]:
        """Parameters that were given other memory (`param.data = x`, `module.to(...)`), and their places."""
        places = self.nothings if self.hidden else self.windows
        pairs = zip(self.members, places, strict=True)
        with without_overrides():
            return [
                (m, p) for m, p in pairs if m.param.data_ptr() != p.data_ptr() or m.param.dtype != p.dtype
            ]

    @torch.no_grad()
    def take_back_moved(self) -> list[Member]:
        """What was put in the place of a parameter becomes its value, if it is of the same kind. Whose?"""
        taken = []
        for member, window in self.moved():
            given = member.param.data
            if self.hidden:
                raise RuntimeError(
                    f"{member.name} was given other values while it was sharded or offloaded, by param.data "
                    f"= ... or a conversion of the module (it is {_kind_of(given)} now): do that inside "
                    "zero_full.GatheredParameters(parameters, modifier_rank=0), or before initialize"
                )
            if (given.shape, given.dtype, given.device) != (window.shape, window.dtype, window.device):
                raise RuntimeError(
                    f"{member.name} was {_kind_of(window)} when initialize laid it out and is "
                    f"{_kind_of(given)} now: convert a model before initialize (precision is chosen by the "
                    "keys bf16 and fp16)"
                )
            window.copy_(given)
            member.param.data = window
            taken.append(member)
        return taken

    @torch.no_grad()
    def collect(self) -> None:
        """Everyone's slice becomes everyone's. Blocks; every rank must call this."""
        if self.node is not None and self.node_copy is not None:
            self.node.slice_of(self.full).copy_(self.node_copy)
            self.node.all_gather(self.full, f"parameters {self.name}")
            return
        if self.released_at_rest:
            self.slice.copy_to(self.ranks.slice_of(self.full))
        self.gather_slices(as_bytes(self.full), f"parameters {self.name}")

    def keep_node_copy(self) -> None:
        """Before the release after forward: keep what this node needs for backward."""
        if self.node is not None and self.state is GatherState.WHOLE and self.node_copy is None:
            self.node_copy = self.node.slice_of(self.full).clone()

    def read_ahead(self) -> bool:
        """Bring the slice nearer, as it is gathered soon. Returns whether there is room for it."""
        return self.state is not GatherState.SHARDED or self.node_copy is not None or self.slice.begin(True)

    def begin_gather(self, lane: Lane) -> None:
        """Put the gathering on a lane, unless the values are here or on their way."""
        if self.state is GatherState.SHARDED:
            self.take_back_moved()
            self.full.untyped_storage().resize_(self.full.nbytes)
            self.home = lane.producer()
            used = [] if self.node_copy is None else [self.node_copy]
            if not used:
                self.slice.begin()
            try:
                self.pending = lane.submit(self.collect, used, [self.home])
            except BaseException:
                self.full.untyped_storage().resize_(0)
                raise
            self.state = GatherState.GATHERING

    def finish_gather(self, lane: Lane) -> None:
        """Until the values are here."""
        self.begin_gather(lane)
        if self.state is GatherState.GATHERING:
            self._await()
            self.show()
            self.state = GatherState.WHOLE

    def _await(self) -> None:
        pending, self.pending = self.pending, None
        assert pending is not None
        try:
            pending.wait()
        except BaseException:
            self._let_go()
            raise

    def release(self) -> None:
        """Let go of the others' slices, unless somebody is at work with them."""
        if not self.released_at_rest or self.users or self.state is GatherState.SHARDED:
            return
        if self.state is GatherState.GATHERING:
            self._await()
        self._let_go()

    def _let_go(self) -> None:
        lost = [] if self.hidden else [*(member.name for member, _ in self.moved()), *self.written()]
        self.hide()
        if self.lent:  # whoever has a view keeps the old memory, and its values
            self.lent, self.full = False, torch.empty_like(self.full)
            self.windows = self._cut_windows()
        self.full.untyped_storage().resize_(0)
        self.state = GatherState.SHARDED
        if lost:
            raise RuntimeError(
                f"{', '.join(dict.fromkeys(lost))} was written while it was gathered for a forward or for "
                "other parameters, so its new values are lost: write inside "
                "zero_full.GatheredParameters([this parameter], modifier_rank=0)"
            )

    # Single parameters ---------------------------------------------------------------------------

    def fragments(self) -> list[Fragment]:
        """What this rank owns."""
        return list(self._fragment_of.values())

    @cached_property
    def _fragment_of(self) -> dict[int, Fragment]:
        """By parameter: a rank owns at most one piece of each."""
        return {fragment.index: fragment for fragment in self.layout.fragments(self.ranks.rank)}

    def piece_of(self, flat: Tensor, member: Member) -> Tensor | None:
        """A parameter's part of a flat tensor that is as long as this rank's slice; None: it has none.

        In the parameter's own shape where nothing is cut.
        """
        fragment = self._fragment_of.get(member.index)
        if fragment is None:
            return None
        piece, shape = self.cut(flat, fragment), member.param.shape
        return piece.view(shape) if self.layout.world == 1 or not shape else piece

    def cut(self, flat: Tensor, fragment: Fragment) -> Tensor:
        """A fragment's part of a flat tensor that is as long as this rank's slice."""
        start = self.layout.slice_of(self.ranks.rank).start
        return flat[fragment.flat_range[0] - start : fragment.flat_range[1] - start]

    def fill(self, member: Member, value: Tensor) -> None:
        """Give a parameter new values, of which this rank keeps its part. Every rank must do the same."""
        self.node_copy = None
        if self.state is GatherState.WHOLE:
            self.windows[member.index].copy_(value)
        if not self.released_at_rest:
            increment_version(member.param)  # so that ranks compare what was written
        self.write(self.shard, member, value)

    def write(self, flat: Tensor, member: Member, value: Tensor) -> None:
        """Put this rank's part of a parameter into a flat tensor that is as long as its slice."""
        fragment = self._fragment_of.get(member.index)
        if fragment is not None:
            start, stop = fragment.param_range
            self.cut(flat, fragment).copy_(value.reshape(-1)[start:stop])
