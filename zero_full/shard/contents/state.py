"""The tensors of a run as ranges of named tensors, for state dicts, checkpoints and loads.

A chunk is this rank's range of a tensor, flattened. `keys.py` describes its key. Optimizer state of a
parameter as a whole, such as `step`, is not a chunk but one of its numbers.

A load has two phases: `check` raises before anything has changed, `read` changes the values.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from zero_full._compat import clean_name
from zero_full.layout import LocalBlock
from zero_full.optim.step import Piece, Stepper, Whole
from zero_full.precision.dtypes import Dtypes
from zero_full.shard.contents.keys import BUFFERS, OWN, PARAMETERS, STEP, entry_of, state_key
from zero_full.shard.deal.dealer import Sharded
from zero_full.shard.group.dtensors import block_of, is_dtensor, local_of
from zero_full.shard.group.parameter_group import ParameterGroup
from zero_full.shard.group.process_groups import Communicators


@dataclass(frozen=True, eq=False)
class Chunk:
    """This rank's range of a tensor."""

    key: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int  # first element in the flattened tensor, or in the flattened block
    values: Tensor  # the elements, in one dimension: the tensor's own memory, unless `scattered`
    holder: tuple[int, int] = (0, 1)  # this rank's index among the ranks with the same range, their number
    scattered: Tensor | None = None  # the whole tensor if it is not contiguous; then `values` is a copy
    differs: bool = False  # these ranks have different values
    block: LocalBlock | None = None  # the range is one of this block, flattened; None: of the tensor itself

    @property
    def stop(self) -> int:
        """The end of the range in the flattened tensor or block."""
        return self.start + self.values.numel()

    def runs(self) -> Iterable[tuple[int, int]]:
        """Return the ranges of the flattened tensor with this chunk's elements, in order."""
        return [(self.start, self.stop)] if self.block is None else self.block.runs(self.start, self.stop)

    def share(self) -> "Chunk":
        """Return the part that this rank saves, so that ranks with the same range save it once together."""
        place, holders = self.holder
        if holders == 1 or (self.differs and place == 0):
            return self
        if self.differs:  # the first rank's values are saved, the others' are dropped
            return replace(self, values=self.values[:0])
        numel = self.values.numel()
        first, last = -(-numel * place // holders), -(-numel * (place + 1) // holders)
        return replace(self, start=self.start + first, values=self.values[first:last])


class Values(Protocol):
    """The source of a load: a checkpoint, or one rank's state dict."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the whole tensors, by key."""

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """The dtypes of the stored tensors, by key."""

    @property
    def numbers(self) -> Mapping[str, Mapping[str, Any]]:
        """Optimizer state of each parameter as a whole, by `parameters/NAME`."""

    def check(self, chunks: Sequence[Chunk]) -> None:
        """Raise if these chunks cannot be read."""

    def read(self, chunks: Sequence[Chunk]) -> None:
        """Copy values into the chunks, converted to their dtypes."""


# Present tensors ---------------------------------------------------------------------------------


class Contents:
    """This rank's chunks of all tensors of a run."""

    def __init__(
        self,
        base: torch.optim.Optimizer,
        sharded: Sharded,
        communicators: Communicators,
        dtypes: Dtypes,
        stepper: Stepper,
        owners: Mapping[str, int],
    ) -> None:
        """`stepper` knows which state differs between ranks.

        `owners`: by parameter, the rank that keeps its state; see [Note: state of whole parameters].
        """
        self.base, self.sharded, self.communicators, self.dtypes = base, sharded, communicators, dtypes
        self.stepper, self.owners = stepper, owners
        # DTensors know their place in the whole parameter, so parameters of one name are parts of one.
        self.has_dtensors = any(group.kind.is_dtensor for group in sharded.groups) or any(
            map(is_dtensor, sharded.whole)
        )

    def part(self, expert: bool) -> str:
        """Return the suffix that distinguishes parameters of the same name on different ranks, or ""."""
        tensor, experts = self.communicators.tensor, self.communicators.between_experts
        is_named = tensor is not None and tensor.size > 1 and not self.has_dtensors
        part = f"@model{tensor.rank}" if tensor is not None and is_named else ""  # its name in files
        return part + (f"@expert{experts.rank}" if expert and experts is not None else "")

    def _key(self, group: ParameterGroup, name: str) -> str:
        return f"{PARAMETERS}{self.part(group.kind.expert)}/{clean_name(name)}"

    def key_of(self, tensor: Tensor, name: str) -> str:
        """Return the key of one of the model's tensors, even if this rank has no element of it."""
        if tensor in self.sharded.places:
            group, member = self.sharded.places[tensor]  # type: ignore[index]
            return self._key(group, member.name)
        kind = PARAMETERS if isinstance(tensor, Parameter) else BUFFERS
        return f"{kind}{self.part(expert=self.communicators.expert is not None)}/{clean_name(name)}"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all parameters in flat buffers, by key."""
        return {
            self._key(group, m.name): m.whole_shape for group in self.sharded.groups for m in group.members
        }

    def pieces(self) -> Iterator[tuple[str, Piece, "Origin"]]:
        """Yield the key, the piece and the origin of every piece that this rank steps."""
        for group in self.sharded.trained:
            holder = self._holder(group)
            for member, piece in group.master.pieces.items():
                yield self._key(group, piece.name), piece, Origin(holder, member.whole_shape, member.block)

    def _holder(self, group: ParameterGroup) -> tuple[int, int]:
        """Return the `Chunk.holder` of this rank's slice of a group."""
        return self._among_tensor(group.replica_comm.rank, group.replica_comm.size, group.kind.is_split)

    def _among_tensor(self, place: int, holders: int, is_split: bool) -> tuple[int, int]:
        """Return a `Chunk.holder` that counts tensor-parallel ranks too, if each has all of the tensor."""
        tensor = self.communicators.tensor
        if tensor is None or is_split or not self.has_dtensors:
            return place, holders
        return place * tensor.size + tensor.rank, holders * tensor.size

    def masters(self) -> Iterator[Chunk]:
        """Yield the master weights."""
        for key, piece, origin in self.pieces():
            yield origin.chunk(key, piece, _flat(self.stepper.common(piece)))

    def state(self) -> Iterator[Chunk]:
        """Yield elementwise and whole-parameter optimizer state; raise ValueError for other shapes."""
        for key, piece, origin in self.pieces():
            for entry, value in self.base.state.get(piece.master, {}).items():
                if entry in self.stepper.whole_entries:
                    if piece.param_range[0] == 0:  # ranks with other pieces have equal values
                        yield _whole_chunk(state_key(key, entry), value, origin.holder)
                elif not _is_number(entry, value, piece):
                    chunk = _state_chunk(state_key(key, entry), piece, value, origin)
                    yield replace(chunk, differs=entry in self.stepper.own_entries)
        for key, _, state, holder in self.whole_states():
            for entry, value in state.items():
                if entry not in self.stepper.whole_entries:
                    raise ValueError(
                        f"{entry} of {key.partition('/')[2]} is state of a whole parameter, but is not in "
                        "whole_entries of its rule"
                    )
                yield _whole_chunk(state_key(key, entry), value, holder)

    def whole_states(self) -> Iterator[tuple[str, ParameterGroup, dict[str, Tensor], tuple[int, int]]]:
        """Yield the state of parameters that this rank owns as a whole: key, group, state, holder."""
        rule = self.stepper.whole_rule
        if rule is None:
            return
        for group in self.sharded.trained:
            for member in group.members if not group.asleep else ():
                if self.owners.get(member.name) == group.shard_comm.rank:
                    whole = Whole(member.name, member.shape, member.group)
                    yield self._key(group, member.name), group, rule.state(whole), self._holder(group)

    def cut_state(self) -> Iterator[Chunk]:
        """Yield elementwise state that the optimizer shards by itself, in its own ranges."""
        keys = {id(piece): key for key, piece, _ in self.pieces()}
        for piece, entry, start, values in self.stepper.cut_state():
            yield Chunk(state_key(keys[id(piece)], entry), tuple(piece.shape), start, _flat(values))

    def own(self, rank: int) -> Iterator[Chunk]:
        """Yield the state that only this rank has, such as compression errors."""
        for name, tensor in self.stepper.own_tensors().items():
            yield Chunk(f"{OWN}/{rank}/{name}", tuple(tensor.shape), 0, _flat(tensor))

    def numbers(self, every: bool) -> dict[str, dict[str, Any]]:
        """Return the optimizer's numbers by parameter, such as `step`.

        `every`: for each piece of this rank; else each parameter's come from one rank only.
        """
        numbers = {}
        for key, piece, origin in self.pieces():
            state = self.base.state.get(piece.master, {})
            mine = {entry: value for entry, value in state.items() if _is_number(entry, value, piece)}
            if mine and (every or (origin.holder[0] == 0 and piece.param_range[0] == 0)):
                numbers[key] = {
                    k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in mine.items()
                }
        return numbers

    def frozen(self) -> Iterator[Chunk]:
        """Yield the frozen parameters that are sharded."""
        for group in self.sharded.frozen:
            flat, holder = group.parameters, self._holder(group)
            for fragment in flat.fragments.values():
                member = flat.members[fragment.index]
                key, mine = self._key(group, member.name), flat.cut(flat.shard, fragment).detach()
                start, shape = fragment.param_range[0], member.whole_shape
                yield Chunk(key, shape, start, mine, holder, block=member.block)

    def whole(self, named: Mapping[str, Any]) -> Iterator[Chunk]:
        """Yield a state dict's tensors that every rank has whole."""
        communicators = self.communicators
        pair = communicators.expert if communicators.expert is not None else communicators.dense
        place = pair.shard_comm.rank * pair.replica_comm.size + pair.replica_comm.rank
        for name, tensor in named.items():
            if isinstance(tensor, Tensor) and tensor not in self.sharded.places:
                block, here = block_of(tensor), local_of(tensor)
                ranks = pair.shard_comm.size * pair.replica_comm.size
                holder = self._among_tensor(place, ranks, block is not None)
                key, scattered = self.key_of(tensor, name), None if here.is_contiguous() else here
                yield Chunk(key, tuple(tensor.shape), 0, _flat(here), holder, scattered, block=block)


@dataclass(frozen=True)
class Origin:
    """The place of a piece in the whole parameter, and the ranks with the same elements."""

    holder: tuple[int, int]  # see `Chunk.holder`
    shape: tuple[int, ...]  # of the whole parameter
    block: LocalBlock | None  # of which the piece is a range; None: of the parameter itself

    def chunk(self, key: str, piece: Piece, values: Tensor) -> Chunk:
        """Make the chunk of a value for each element of the piece."""
        return Chunk(key, self.shape, piece.param_range[0], values, self.holder, block=self.block)


def _whole_chunk(key: str, value: Any, holder: tuple[int, int]) -> Chunk:
    """Make the chunk of state of a whole parameter; raise ValueError if it is no tensor."""
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{key.partition('/')[2]} is in whole_entries of its rule, so it must be a tensor, not a "
            f"{type(value).__name__}. Keep a number as a tensor of no dimensions"
        )
    return Chunk(key, tuple(value.shape), 0, _flat(value), holder)


def _state_chunk(key: str, piece: Piece, value: Any, origin: Origin) -> Chunk:
    """Make the chunk of a state entry: elementwise, or of any shape if this rank owns the whole parameter."""
    if isinstance(value, Tensor) and value.shape == piece.master.shape:
        return origin.chunk(key, piece, _flat(value))
    if isinstance(value, Tensor) and piece.master.numel() == prod(piece.shape) and origin.block is None:
        return Chunk(key, tuple(value.shape), 0, _flat(value), origin.holder)
    shape = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise ValueError(
        f"{key.partition('/')[2]} is {shape}, neither one number nor one value for each of the elements "
        f"{piece.param_range} that this rank owns. So it could not be loaded at another world size. If it "
        "belongs to the whole parameter, list it in whole_entries of the rule's stepper"
    )


def _is_number(entry: str, value: Any, piece: Piece) -> bool:
    if not isinstance(value, Tensor):
        return isinstance(value, (bool, int, float, str, type(None)))
    return not value.dim() and (entry == STEP or bool(piece.shape))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1)


# Loading -----------------------------------------------------------------------------------------


def copy_back(chunks: Iterable[Chunk]) -> None:
    """Copy loaded values back to non-contiguous tensors, for which `values` was a copy."""
    for chunk in chunks:
        if chunk.scattered is not None:
            new = chunk.values.view(chunk.shape)
            if not torch.equal(chunk.scattered, new):  # an expanded tensor cannot be written, even if equal
                chunk.scattered.detach().copy_(new)


class NewState:
    """The optimizer's state during a load. Existing tensors are reused if they fit."""

    def __init__(self, contents: Contents, values: Values) -> None:
        self.contents, self.values = contents, values
        self.of: dict[str, dict[str, Any]] = {}  # state of a piece, by the key of its parameter
        self.of_whole: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []  # an owner's state, new state

    def chunks(self) -> Iterator[Chunk]:
        """Yield a chunk with memory for each stored entry of this rank's pieces."""
        stored: dict[str, dict[str, str]] = {}
        for key in self.values.shapes:
            if found := entry_of(key):
                stored.setdefault(found[0], {})[found[1]] = key
        stepper = self.contents.stepper
        for key, group, state, _ in self.contents.whole_states():
            made: dict[str, Tensor] = {}
            self.of_whole.append((state, made))
            for entry, place in stored.get(key, {}).items():
                if entry in stepper.whole_entries:
                    shape, dtype = self.values.shapes[place], self.values.dtypes[place]
                    made[entry] = torch.empty(shape, dtype=dtype, device=group.kind.device)
                    yield Chunk(place, shape, 0, made[entry].view(-1))
        for key, piece, origin in self.contents.pieces():
            state = self.of[key] = dict(self.values.numbers.get(key, {}))
            for entry, place in stored.get(key, {}).items():
                shape, is_whole = self.values.shapes[place], entry in stepper.whole_entries
                if is_whole and stepper.whole_rule is not None:
                    continue
                is_cut = shape == origin.shape and not is_whole
                whole = piece.master.shape if is_cut else shape
                state[entry] = self._room(piece, entry, whole, self.values.dtypes[place])
                values = state[entry].view(-1)
                yield origin.chunk(place, piece, values) if is_cut else Chunk(place, shape, 0, values)

    def _room(self, piece: Piece, entry: str, shape: Sequence[int], stored: torch.dtype) -> Tensor:
        """Return memory to load an entry into: the existing tensor if it fits, else a new one."""
        master, is_whole = piece.master, entry in self.contents.stepper.whole_entries
        if tuple(shape) != tuple(master.shape) and master.numel() != prod(piece.shape) and not is_whole:
            raise ValueError(
                f"{entry} of {piece.name} has shape {tuple(shape)} and cannot be sharded like the parameter, "
                f"of which this rank owns elements {piece.param_range}. Load it at stage 0"
            )
        known = self.contents.base.state.get(master, {}).get(entry)
        if isinstance(known, Tensor) and known.shape == torch.Size(shape) and known.is_contiguous():
            return known  # reused, because user code may have kept a view: see `Master.show`
        dtype = stored
        if isinstance(self.contents.base, torch.optim.Adam):  # and AdamW
            dtype = self.contents.dtypes.moments_of(master.dtype)
        elif stored.is_floating_point and not hasattr(self.contents.base, "zero_full_stepper"):
            dtype = master.dtype
        return torch.empty(shape, dtype=dtype, device=master.device)

    def install(self) -> None:
        """Replace the optimizer's state by the state that was read."""
        for state, new in self.of_whole:
            state.clear()
            state.update(new)
        for key, piece, _ in self.contents.pieces():
            if made := self.of.get(key):
                self.contents.base.state[piece.master] = {k: self._put(piece, k, v) for k, v in made.items()}
            else:
                self.contents.base.state.pop(piece.master, None)

    def _put(self, piece: Piece, entry: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() or (entry != STEP and not piece.shape):
            return value
        group = self.contents.base.param_groups[piece.group]
        on_device = group.get("capturable") or group.get("fused")
        return value.to(piece.master.device if on_device else "cpu", copy=True)


# A state dict of one rank ------------------------------------------------------------------------


def as_dict(chunks: Iterator[Chunk]) -> dict[str, dict[str, Any]]:
    """Copy chunks into a dict by key."""
    return {
        chunk.key: {"shape": chunk.shape, "start": chunk.start, "values": chunk.values.clone()}
        for chunk in chunks
    }


class RankPart:
    """`Values` of one rank's state dict, for a rank with the same ranges of each tensor, or smaller ones."""

    def __init__(self, tensors: Mapping[str, Mapping[str, Any]], numbers: Mapping[str, Any]) -> None:
        self.tensors, self.numbers = tensors, numbers
        self.shapes = {key: tuple(each["shape"]) for key, each in tensors.items()}
        self.dtypes = {key: each["values"].dtype for key, each in tensors.items()}

    def check(self, chunks: Sequence[Chunk]) -> None:
        """Raise ValueError if any of these chunks is missing or has another shape or range."""
        for chunk in chunks:
            name = chunk.key.partition("/")[2]
            if chunk.key not in self.tensors:
                raise ValueError(f"the saved state of this rank lacks {name}. {SAME}")
            if self.shapes[chunk.key] != chunk.shape:
                raise ValueError(
                    f"{name} has shape {chunk.shape}, but was saved as {self.shapes[chunk.key]}. {SAME}"
                )
            start = self.tensors[chunk.key]["start"]
            stop = start + self.tensors[chunk.key]["values"].numel()
            if not start <= chunk.start <= chunk.stop <= stop:
                raise ValueError(
                    f"{name}: this rank owns elements {chunk.start} to {chunk.stop}, but the saved state has "
                    f"{start} to {stop}. {SAME}"
                )

    def read(self, chunks: Sequence[Chunk]) -> None:
        """Copy values into the chunks, converted to their dtypes."""
        for chunk in chunks:
            saved = self.tensors[chunk.key]
            first = chunk.start - saved["start"]
            chunk.values.copy_(saved["values"][first : first + chunk.values.numel()])


SAME = (
    "Load the state of the same rank, with the same world size, stage and bucket size. Or use "
    "save_checkpoint and load_checkpoint, which need none of this"
)
