"""Parameters in one flat buffer: whole on every rank, or sharded and gathered for use (stage 3).

[Note: released parameters] A flat buffer keeps one storage for life. Releasing it resizes the storage to 0
bytes, and gathering resizes it back and fills it. So views of it that autograd has saved for backward become
valid again. While the buffer is released, its parameters are one NaN expanded to their shapes, so shapes and
sizes are always right. Using the values raises, see [Note: released]. `shard`, this rank's slice, is never
released. It may be offloaded, see `offload/param_store.py`.

[Note: node copies] This is ZeRO++'s secondary partition (hpZ). If `node` is given, the ranks of a node keep
the parameters that forward has gathered, sharded among them, until the parameters change. Backward then
all-gathers within the node, without messages between nodes.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache, cached_property, partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from zero_full._compat import identity_of, version_of, without_overrides
from zero_full.comm.lane import Lane, Pending
from zero_full.layout import FlatLayout, Fragment, LocalBlock
from zero_full.offload import ParamSlice, ParamStore
from zero_full.precision.dtypes import NAMES
from zero_full.shard.group.checksum import checksum
from zero_full.shard.group.process_groups import Pair
from zero_full.shard.group.released import OFFLOADED, released_class

ALIGNMENT = 8  # elements: 16 bytes of 16-bit numbers, the alignment of vectorized loads


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter in a flat buffer."""

    name: str
    param: Parameter
    group: int  # index of the optimizer's parameter group; FROZEN if there is none
    index: int  # index in the buffer
    shape: torch.Size  # of the tensor that this rank holds: the parameter's, or that of its local tensor
    block: LocalBlock | None = None  # place of that tensor in a DTensor that is cut, see `dtensor_groups.py`

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return tuple(self.shape) if self.block is None else self.block.shape


FROZEN = -1
_dtype_of = attrgetter("dtype")


@dataclass(frozen=True)
class Kind:
    """Common properties of the parameters of one flat buffer."""

    dtype: torch.dtype  # in the user's model
    run_dtype: torch.dtype  # during training
    device: torch.device
    expert: bool = False
    in_norm: bool = True  # False: another rank of `tensor` or `pipe` counts the same gradients in the norm
    trained: bool = True
    asleep: bool = False  # in an optimizer group, but frozen at first
    released_at_rest: bool = False  # gathered for use only
    is_dtensor: bool = False  # see [Note: DTensors] in `dtensor_groups.py`
    is_split: bool = False  # other tensor-parallel ranks hold other parts of the parameters


class GatherState(Enum):
    """How much of a flat buffer is in memory on this rank."""

    SHARDED = auto()  # the storage is empty; only this rank's slice has memory
    GATHERING = auto()  # the storage has its full size, and the all-gather is queued on a lane
    WHOLE = auto()  # the storage has all values, and the parameters are windows into it


@cache
def placeholder_scalar(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the scalar behind released parameters of this dtype and device: NaN, or the lowest integer."""
    if dtype.is_floating_point or dtype.is_complex:
        value = float("nan")
    else:
        value = 0 if dtype == torch.bool else torch.iinfo(dtype).min
    return torch.full((), value, dtype=dtype, device=device)


for _dtype in NAMES.values():  # made now, so that they do not show as memory of the first run
    placeholder_scalar(_dtype, torch.device("cpu"))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


def as_bytes(tensor: Tensor) -> Tensor:
    """View one-byte elements as uint8, because gloo supports neither bool nor float8."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def is_released(param: Tensor) -> bool:
    """Return whether this parameter is released: its storage is that of the placeholder scalar."""
    shown, absent = param.untyped_storage(), placeholder_scalar(param.dtype, param.device).untyped_storage()
    return identity_of(shown) == identity_of(absent)


def layout_of(numels: Sequence[int], pair: Pair) -> FlatLayout:
    """Return the layout of parameters of these sizes in a flat buffer that is sharded over these ranks."""
    return FlatLayout(tuple(numels), pair.shard_comm.size, ALIGNMENT, copies=pair.replica_comm.size)


def _memory_of(tensors: Sequence[Tensor]) -> tuple[list[int], list[torch.dtype]]:
    return list(map(Tensor.data_ptr, tensors)), list(map(_dtype_of, tensors))


def _kind_of(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)} on {tensor.device}"


class FlatParameters:
    """A flat buffer of parameters, and this rank's slice of it. See [Note: released parameters]."""

    def __init__(
        self,
        members: Sequence[Member],
        kind: Kind,
        pair: Pair,
        deferred: bool = False,
        param_store: ParamStore | None = None,
    ) -> None:
        """`deferred` is True if `fill` will set the values later. Every rank must pass the same.

        `param_store`: the store of this rank's slice while the buffer is released; None: the model's device.
        """
        self.members, self.kind = list(members), kind
        self.params = [member.param for member in members]
        self.shapes = [member.shape for member in self.members]
        self.shard_comm, self.replica_comm = pair.shard_comm, pair.replica_comm
        self.gather_slices, self.node = pair.gather, pair.node
        self.gather_exactly = pair.gather_exactly  # if `gather_slices` quantizes
        self.gather_ranks = pair.gather_ranks
        self.dtype = kind.run_dtype
        self.layout = layout_of([m.shape.numel() for m in members], pair)
        self.name = members[0].name if len(members) == 1 else f"{members[0].name} ... {members[-1].name}"
        param_store = (
            (param_store or ParamStore()).of(self.layout.shard_numel)
            if kind.released_at_rest
            else ParamStore()
        )
        self.released_at_rest = kind.released_at_rest and (
            self.shard_comm.size > 1 or param_store.is_offloaded
        )
        self.state, self.users = GatherState.WHOLE, 0  # `users`: calls that need the values now
        self.hidden = False  # the parameters are placeholders
        self.awaits_reload = False  # this rank's slice is empty until `engine.reload_states()`
        self.versions: list[int] = []  # version counters of the parameters when they became whole
        self.adopted = False  # user code has assigned to `param.data` since master and parameters were equal
        self.lent = False  # user code may keep views of the values
        # Fingerprints of values that user code may read and must not write, one dict for each block.
        self.readers: list[dict[Member, tuple[int, int]]] = []
        self.pending: Pending | None = None  # the all-gather that is queued
        self.owner_stream: Any = None  # the stream that the memory of the gathered values belongs to
        self.node_copy: Tensor | None = None  # see [Note: node copies]
        self.unrounded: Tensor | None = None  # this rank's slice in the model's dtype, for the master
        self.slice = self._reserve(param_store) if deferred else self._broadcast(param_store)
        self.windows = self._cut_windows()
        scalar = placeholder_scalar(self.dtype, self.kind.device)
        self.placeholders = [scalar.expand(shape) for shape in self.shapes]
        self.show()
        self.release()

    def _broadcast(self, param_store: ParamStore) -> ParamSlice:
        """Copy the parameters into the buffer, and broadcast the first rank's values to all ranks."""
        original = torch.zeros(self.layout.total, dtype=self.kind.dtype, device=self.kind.device)
        for member in self.members:
            window = original[self.layout.windows[member.index]].view(member.shape)
            window.copy_(self.values_of(member.param))
        for communicator in (self.shard_comm, self.replica_comm):
            communicator.broadcast(as_bytes(original), f"parameters {self.name}")
        self.full = original.to(self.dtype)
        if self.kind.trained and self.dtype != self.kind.dtype:
            self.unrounded = self.shard_comm.slice_of(original)
        mine = self.shard_comm.slice_of(self.full)
        return param_store.add(mine) if self.released_at_rest else ParamSlice(mine)

    def _reserve(self, param_store: ParamStore) -> ParamSlice:
        """Allocate zeros for this rank's slice, and for the whole buffer if it is not gathered for use."""
        make = torch.empty if self.released_at_rest else torch.zeros
        self.full = make(self.layout.total, dtype=self.dtype, device=self.kind.device)
        mine = self.shard_comm.slice_of(self.full)
        if self.released_at_rest:
            return param_store.add_zeros(mine.numel(), mine.dtype, mine.device)
        return ParamSlice(mine)

    @property
    def shard(self) -> Tensor:
        """This rank's slice, readable and writable, on the device of its store."""
        return self.slice.values

    def take_unrounded(self) -> Tensor:
        """Return this rank's slice in the model's own precision, once, for the initial master weights."""
        values, self.unrounded = self.unrounded, None
        return self.shard if values is None else values

    def _cut_windows(self) -> list[Tensor]:
        pairs = zip(self.layout.windows, self.shapes, strict=True)
        return [self.full[window].view(shape) for window, shape in pairs]

    # Whole and sharded ---------------------------------------------------------------------------

    def values_of(self, param: Parameter) -> Tensor:
        """Return the tensor that this rank holds of a parameter."""
        return param.data

    def point(self, param: Parameter, values: Tensor) -> None:
        """Give a parameter other memory, with other values."""
        param.data = values

    def shown(self, member: Member) -> Tensor:
        """Return the parameter's values in the buffer, for user code."""
        return self.windows[member.index]

    def show(self) -> None:
        """Point the parameters to their windows in the buffer, and restore their own classes."""
        for param, window in zip(self.params, self.windows, strict=True):
            if self.hidden:
                param.__class__ = param.present  # type: ignore[attr-defined]
            param.data = window
        self.hidden = False
        self.versions = list(map(version_of, self.params))

    def note_versions(self, of: Container[Member]) -> None:
        """Note the version counters of these members: writes until now were adopted or discarded."""
        self.versions = [
            version_of(member.param) if member in of else version
            for member, version in zip(self.members, self.versions, strict=True)
        ]

    def written(self) -> list[str]:
        """Return the names of parameters that were written after they became whole, by version counters."""
        pairs = zip(self.members, self.versions, strict=True)
        return [member.name for member, version in pairs if version_of(member.param) != version]

    def hide(self) -> None:
        """Point the parameters to placeholders of their shapes, and make use of their values raise."""
        if self.hidden:
            return
        self.hidden = True
        for member, placeholder in zip(self.members, self.placeholders, strict=True):
            param = member.param
            param.data = placeholder
            param.released_name = member.name  # type: ignore[attr-defined]
            param.__class__ = released_class(type(param))

    def reassigned(self) -> list[tuple[Member, Tensor]]:
        """Find parameters that user code gave other memory (`param.data = x`, `module.to(...)`).

        Returns them with their windows. Raises RuntimeError while they are released, because the values
        would be lost.
        """
        places = self.placeholders if self.hidden else self.windows
        with without_overrides():
            if _memory_of(self.params) == _memory_of(places):  # the usual case, in C
                return []
            pairs = zip(self.members, places, strict=True)
            found = [pair for pair in pairs if _memory_of([pair[0].param]) != _memory_of([pair[1]])]
        if self.hidden:
            raise self.assigned_while_released(found[0][0])
        return found

    def assigned_while_released(self, member: Member) -> RuntimeError:
        """Return the error for a parameter that user code gave other memory while it was released."""
        return RuntimeError(
            f"{member.name} was assigned a tensor while it was sharded or offloaded, by param.data = ... "
            f"or a conversion of the module. It is {_kind_of(self.values_of(member.param))} now. Do that "
            "inside zero_full.GatheredParameters(parameters, modifier_rank=0), or before initialize"
        )

    @torch.no_grad()
    def adopt_assigned(self) -> list[Member]:
        """Adopt the values of tensors that user code assigned to `param.data`. Returns the parameters."""
        adopted = []
        for member, window in self.reassigned():
            given = self.values_of(member.param)
            if (given.shape, given.dtype, given.device) != (window.shape, window.dtype, window.device):
                raise RuntimeError(
                    f"{member.name} was {_kind_of(window)} at initialize and is {_kind_of(given)} now. "
                    "Convert the model before initialize, or choose its precision by the keys bf16 and fp16"
                )
            if given.numel() and not given.data_ptr():
                raise RuntimeError(
                    f"{member.name} was assigned a tensor without memory, such as a DTensor, by param.data = "
                    "... Assign a plain tensor (full_tensor() of a DTensor). Use parallelize_module before "
                    "initialize"
                )
            window.copy_(given)
            self.point(member.param, window)
            adopted.append(member)
        self.adopted = self.adopted or bool(adopted)
        return adopted

    @torch.no_grad()
    def all_gather(self, owner_stream: Any = None, exactly: bool = False) -> None:
        """All-gather the ranks' slices into the buffer, and wait. Every rank must call this.

        With a node copy it gathers within the node only. `owner_stream`: the stream that the buffer's memory
        belongs to, if the current one is a lane's. `exactly`: without quantization, also if training does.
        """
        exact = self.gather_exactly if exactly else None
        # All ranks make and drop node copies at the same places, or they would enter different collectives.
        if self.node is not None and self.node_copy is not None and exact is None:
            self.node.slice_of(self.full).copy_(self.node_copy)
            self.node.all_gather(self.full, f"parameters {self.name}")
            return
        if self.released_at_rest:
            self.slice.copy_to(self.shard_comm.slice_of(self.full), owner_stream)
        full = self.full if self.dtype.itemsize > 1 else as_bytes(self.full)
        (exact or self.gather_slices)(full, f"parameters {self.name}")

    @property
    def posts_messages(self) -> bool:
        """Whether an all-gather can be messages without a thread. Equal on all ranks."""
        return (
            self.gather_ranks is not None and self.gather_ranks.sends_messages and not self.slice.is_offloaded
        )

    @torch.no_grad()
    def post(self, lane: Lane | None = None) -> Pending | None:
        """Begin the all-gather by posting its messages, and return it; None if `all_gather` must be used.

        Several can be on the wire at a time. `lane`: has jobs of the same communicator, which come first;
        None: this is one of them.
        """
        if self.gather_ranks is None or not self.posts_messages or not self.gather_ranks.can_post:
            return None
        if lane is not None:
            lane.drain()  # only their order tells messages apart
        if self.released_at_rest:
            self.slice.copy_to(self.shard_comm.slice_of(self.full))
        full = self.full if self.dtype.itemsize > 1 else as_bytes(self.full)
        return self.gather_ranks.post_all_gather(full, f"parameters {self.name}")

    def keep_node_copy(self) -> None:
        """Copy this rank's part of the node copy out of the buffer, before forward releases it."""
        if self.node is not None and self.state is GatherState.WHOLE and self.node_copy is None:
            self.node_copy = self.node.slice_of(self.full).clone()

    def read_ahead(self) -> bool:
        """Begin to read the slice from its file for a later gather. Returns False if no buffer is free."""
        return (
            self.state is not GatherState.SHARDED or self.node_copy is not None or self.slice.start_read(True)
        )

    def begin_gather(self, lane: Lane, exactly: bool = False) -> None:
        """Queue the all-gather of the sharded values on a lane. `exactly`: see `all_gather`."""
        if self.awaits_reload:
            raise RuntimeError(OFFLOADED)
        self.reassigned()  # raises for a parameter that was assigned a tensor while it was released
        # Allocated on the caller's stream. `release` returns it to the allocator of that stream.
        self.full.untyped_storage().resize_(self.full.nbytes)
        self.owner_stream = lane.producer()
        used = [] if self.node_copy is None or exactly else [self.node_copy]
        if self.slice.is_offloaded and not used:
            self.slice.start_read()
        try:
            self.pending = self.post(lane)
            if self.pending is None:
                self.pending = lane.submit(
                    partial(self.all_gather, self.owner_stream, exactly), used, [self.owner_stream]
                )
        except Exception:  # after an interrupt messages may still arrive
            self.full.untyped_storage().resize_(0)
            raise
        self.state = GatherState.GATHERING

    def finish_gather(self) -> None:
        """Wait for the queued all-gather, and show the values; free the memory if it has failed.

        After an interrupt (KeyboardInterrupt) it is still under way, and is waited for at the next use.
        """
        assert self.pending is not None
        try:
            self.pending.wait()
        except Exception:
            self.full.untyped_storage().resize_(0)
            self.state, self.pending = GatherState.SHARDED, None
            raise
        self.show()
        self.state, self.pending = GatherState.WHOLE, None

    def release(self) -> None:
        """Free the gathered values, unless a module is using them.

        Raises RuntimeError if user code has written to them, because such writes are lost.
        """
        if not self.released_at_rest or self.users or self.state is GatherState.SHARDED:
            return
        if self.state is GatherState.GATHERING:  # the collective is still writing to the memory
            self.finish_gather()
        lost = list[str]()
        if not self.hidden:  # look for writes by user code before `hide` changes `param.data`
            if moved := self.reassigned():
                lost += [member.name for member, _ in moved]
            if list(map(version_of, self.params)) != self.versions:
                lost += self.written()
            self.hide()
        if self.lent:  # views that user code has kept stay valid: they keep the old memory alone
            with torch.inference_mode(False):  # else autograd could not use the parameters in a later forward
                self.lent, self.full = False, torch.empty_like(self.full)
                self.windows = self._cut_windows()
        self.full.untyped_storage().resize_(0)
        self.state = GatherState.SHARDED
        if lost:
            raise RuntimeError(
                f"{', '.join(dict.fromkeys(lost))} was written while it was gathered for a forward or for "
                "other parameters, so its new values are lost. Write inside "
                "zero_full.GatheredParameters([this parameter], modifier_rank=0)"
            )

    # Single parameters ---------------------------------------------------------------------------

    @cached_property
    def fragments(self) -> dict[int, Fragment]:
        """The fragments of parameters that this rank owns, by index of the parameter."""
        return {fragment.index: fragment for fragment in self.layout.fragments(self.shard_comm.rank)}

    def piece_of(self, flat: Tensor, member: Member) -> Tensor | None:
        """Return a parameter's window in a flat tensor of this rank's slice; None if it owns no element.

        If the buffer is not sharded it has the parameter's own shape.
        """
        form = self._form_of.get(member.index)
        if form is None:
            return None
        shape, stride, start = form  # one `as_strided` takes a third of the time of a slice and a view
        return flat.as_strided(shape, stride, flat.storage_offset() + start)

    @cached_property
    def _form_of(self) -> dict[int, tuple[Sequence[int], Sequence[int], int]]:
        """Shape, strides and start of each parameter's piece in this rank's slice, by index."""
        forms: dict[int, tuple[Sequence[int], Sequence[int], int]] = {}
        for index, fragment in self.fragments.items():
            low, high = fragment.flat_range
            has_shape = self.layout.world == 1 or not self.shapes[index]
            shape = self.shapes[index] if has_shape else (high - low,)
            start = low - self.layout.slice_of(self.shard_comm.rank).start
            forms[index] = shape, contiguous_strides(shape), start
        return forms

    def place_in_slice(self, member: Member) -> tuple[int, int]:
        """Return the first element in this rank's slice, and the number, of a parameter's fragment."""
        fragment = self.fragments[member.index]
        return fragment.flat_range[0] - self.layout.slice_of(self.shard_comm.rank).start, fragment.numel

    def cut(self, flat: Tensor, fragment: Fragment) -> Tensor:
        """Return a fragment's window in a flat tensor of this rank's slice."""
        start = self.layout.slice_of(self.shard_comm.rank).start
        low, high = fragment.flat_range
        return flat[low - start : high - start]

    def fill(self, member: Member, value: Tensor) -> None:
        """Set a parameter's values, of which this rank keeps its part. Every rank must do the same."""
        self.node_copy = None  # it has the old values
        if self.state is GatherState.GATHERING:  # a prefetch, which would have the old values on some ranks
            self.finish_gather()
        if self.state is GatherState.WHOLE:
            self.windows[member.index].copy_(value)
        if not self.released_at_rest:
            increment_version(member.param)  # so that the next step compares the values between ranks
        self.write(self.shard, member, value)
        for known in self.readers:
            if member in known:
                known[member] = self.fingerprint(member)

    def fingerprint(self, member: Member) -> tuple[int, int]:
        """Return a parameter's version counter, and a checksum for writes that the counter misses."""
        return version_of(member.param), checksum(self.windows[member.index])

    def write(self, flat: Tensor, member: Member, value: Tensor) -> None:
        """Copy this rank's part of a parameter into a flat tensor of its slice."""
        fragment = self.fragments.get(member.index)
        if fragment is not None:
            start, stop = fragment.param_range
            self.cut(flat, fragment).copy_(value.reshape(-1)[start:stop])
