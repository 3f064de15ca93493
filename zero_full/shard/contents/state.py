"""What there is of a run, as ranges of named tensors: one description for state dicts, checkpoints and loads.

A chunk is what this rank has of a tensor, flattened. Its key says what it is:

    parameters/NAME        a parameter; of what is trained its master, which is the most exact there is
    state/ENTRY/NAME       what the optimizer keeps of it, element by element: state/exp_avg/layers.0.weight
    buffers/NAME           any other tensor of the module's state dict
    own/RANK/NAME          what a rank alone has, see [Note: a rank's own state] in `optim/step.py`

Where ranks hold different parameters of one name, the first word tells whose: `parameters@expert1/NAME`.
What the optimizer keeps of a parameter as a whole, such as `step`, is no chunk but one of its numbers.

A load is done in two steps: `check` finds what is wrong before anything has changed, `fill` changes it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from zero_full._compat import plain
from zero_full.optim.step import Piece, Stepper, Whole
from zero_full.precision.dtypes import Dtypes
from zero_full.shard.deal.dealer import Sharded
from zero_full.shard.group.parameters import FlatParameter
from zero_full.shard.group.process_groups import Groups

PARAMETERS, STATE, BUFFERS, OWN = "parameters", "state", "buffers", "own"
STEP = "step"  # a number, also of a parameter that has no dimensions


@dataclass(frozen=True, eq=False)
class Chunk:
    """What this rank has of a tensor."""

    key: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int  # of these elements, in the flattened tensor
    values: Tensor  # these elements, in one dimension: the memory itself, unless `scattered`
    holder: tuple[int, int] = (0, 1)  # which of how many ranks that have the same elements
    scattered: Tensor | None = None  # whole tensors whose elements do not lie in order: these are a copy
    differs: bool = False  # each of these ranks has other values

    @property
    def stop(self) -> int:
        """Behind these elements, in the flattened tensor."""
        return self.start + self.values.numel()

    def share(self) -> "Chunk":
        """What this rank saves of it, so that ranks that have the same save it once."""
        place, holders = self.holder
        if holders == 1 or (self.differs and place == 0):
            return self
        if self.differs:  # the first one's count
            return replace(self, values=self.values[:0])
        numel = self.values.numel()
        first, last = -(-numel * place // holders), -(-numel * (place + 1) // holders)
        return replace(self, start=self.start + first, values=self.values[first:last])


class Values(Protocol):
    """Where a load gets its values from."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of each tensor, by key."""

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """In which they are stored."""

    @property
    def numbers(self) -> Mapping[str, Mapping[str, Any]]:
        """What the optimizer keeps of each parameter as a whole, by `parameters/NAME`."""

    def check(self, chunks: Sequence[Chunk]) -> None:
        """Raise unless these can be read."""

    def read(self, chunks: Sequence[Chunk]) -> None:
        """Put values into the chunks, converted to their types."""


# What there is -----------------------------------------------------------------------------------


def state_key(key: str, entry: str) -> str:
    """The key of an entry of the optimizer's state, from that of its parameter."""
    kind, _, name = key.partition("/")
    return f"{STATE}{kind.removeprefix(PARAMETERS)}/{entry}/{name}"


def entry_of(key: str) -> tuple[str, str] | None:
    """The reverse: the parameter's key and the entry; None if it is no key of the optimizer's state."""
    kind, _, rest = key.partition("/")
    entry, _, name = rest.partition("/")
    if kind.partition("@")[0] != STATE:
        return None
    return f"{PARAMETERS}{kind.removeprefix(STATE)}/{name}", entry


class Contents:
    """What one rank has of a run's tensors."""

    def __init__(self, base: torch.optim.Optimizer, parts: Sharded, groups: Groups, dtypes: Dtypes) -> None:
        self.base, self.parts, self.groups, self.dtypes = base, parts, groups, dtypes
        self.stepper = Stepper()  # that knows what of it differs from rank to rank
        self.owners: Mapping[str, int] = {}  # of whole parameters: see [Note: state of whole parameters]

    def part(self, expert: bool) -> str:
        """What tells parameters of one name on different ranks apart; "" where there are none such."""
        model, experts = self.groups.model, self.groups.between_experts
        part = "" if model is None or model.size == 1 else f"@model{model.rank}"
        return part + (f"@expert{experts.rank}" if expert and experts is not None else "")

    def _key(self, flat: FlatParameter, name: str) -> str:
        return f"{PARAMETERS}{self.part(flat.kind.expert)}/{plain(name)}"

    def key_of(self, tensor: Tensor, name: str) -> str:
        """The key of one of the model's tensors, of which this rank may have nothing."""
        if tensor in self.parts.places:
            owned, member = self.parts.places[tensor]  # type: ignore[index]
            return self._key(owned if isinstance(owned, FlatParameter) else owned.flat, member.name)
        kind = PARAMETERS if isinstance(tensor, Parameter) else BUFFERS
        return f"{kind}{self.part(expert=self.groups.expert is not None)}/{plain(name)}"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter that is cut, whoever has it, by key."""
        return {
            self._key(flat, m.name): tuple(m.param.shape) for flat in self.parts.flats for m in flat.members
        }

    def pieces(self) -> Iterator[tuple[str, Piece, tuple[int, int]]]:
        """Every piece that this rank steps, with its parameter's key and who else has the same."""
        for owned in self.parts.owned:
            holder = owned.flat.across.rank, owned.flat.across.size
            for piece in owned.pieces.values():
                yield self._key(owned.flat, piece.name), piece, holder

    def masters(self) -> Iterator[Chunk]:
        """What is trained."""
        for key, piece, holder in self.pieces():
            common = _flat(self.stepper.common(piece))
            yield Chunk(key, tuple(piece.shape), piece.param_range[0], common, holder)

    def state(self) -> Iterator[Chunk]:
        """What the optimizer keeps for each element; ValueError if it keeps something of another shape."""
        for key, piece, holder in self.pieces():
            for entry, value in self.base.state.get(piece.master, {}).items():
                if entry in self.stepper.whole_entries:
                    if piece.param_range[0] == 0:  # others have the same
                        yield _whole_chunk(state_key(key, entry), value, holder)
                elif not _is_number(entry, value, piece):
                    chunk = _state_chunk(state_key(key, entry), piece, value, holder)
                    yield replace(chunk, differs=entry in self.stepper.own_entries)
        for key, _, state, holder in self.whole_states():
            for entry, value in state.items():
                if entry not in self.stepper.whole_entries:
                    raise ValueError(
                        f"{entry} of {key.partition('/')[2]} is not in whole_entries of its rule"
                    )
                yield _whole_chunk(state_key(key, entry), value, holder)

    def whole_states(self) -> Iterator[tuple[str, FlatParameter, dict[str, Tensor], tuple[int, int]]]:
        """What this rank keeps of whole parameters as their owner: key, where it lies, state, holder."""
        rule = self.stepper.whole_rule
        if rule is None:
            return
        for owned in self.parts.owned:
            flat = owned.flat
            for member in flat.members if not owned.bucket.asleep else ():
                if self.owners.get(member.name) == flat.ranks.rank:
                    whole = Whole(member.name, member.param.shape, member.group)
                    holder = flat.across.rank, flat.across.size
                    yield self._key(flat, member.name), flat, rule.state(whole), holder

    def cut_state(self) -> Iterator[Chunk]:
        """What the optimizer keeps for each element, and each rank of another part of the elements."""
        keys = {id(piece): key for key, piece, _ in self.pieces()}
        for piece, entry, start, values in self.stepper.cut_state():
            yield Chunk(state_key(keys[id(piece)], entry), tuple(piece.shape), start, _flat(values))

    def own(self, rank: int) -> Iterator[Chunk]:
        """What this rank alone has."""
        for name, tensor in self.stepper.own_tensors().items():
            yield Chunk(f"{OWN}/{rank}/{name}", tuple(tensor.shape), 0, _flat(tensor))

    def numbers(self, every: bool) -> dict[str, dict[str, Any]]:
        """What the optimizer keeps of whole parameters.

        Of each piece of this rank, if `every`; else each parameter's from one rank only.
        """
        numbers = {}
        for key, piece, (place, _) in self.pieces():
            state = self.base.state.get(piece.master, {})
            mine = {entry: value for entry, value in state.items() if _is_number(entry, value, piece)}
            if mine and (every or (place == 0 and piece.param_range[0] == 0)):
                numbers[key] = {
                    k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in mine.items()
                }
        return numbers

    def frozen(self) -> Iterator[Chunk]:
        """What nobody trains and is cut all the same."""
        for flat in self.parts.frozen:
            holder = flat.across.rank, flat.across.size
            for fragment in flat.fragments():
                member = flat.members[fragment.index]
                shape, mine = tuple(member.param.shape), flat.cut(flat.shard, fragment)
                key = self._key(flat, member.name)
                yield Chunk(key, shape, fragment.param_range[0], mine.detach(), holder)

    def whole(self, named: Mapping[str, Any]) -> Iterator[Chunk]:
        """Those of a state dict's tensors that every rank has."""
        groups = self.groups
        pair = groups.expert if groups.expert is not None else groups.dense
        place = pair.shard.rank * pair.across.size + pair.across.rank
        for name, tensor in named.items():
            if isinstance(tensor, Tensor) and tensor not in self.parts.places:
                holder = place, pair.shard.size * pair.across.size
                key, scattered = self.key_of(tensor, name), None if tensor.is_contiguous() else tensor
                yield Chunk(key, tuple(tensor.shape), 0, _flat(tensor), holder, scattered)


def _whole_chunk(key: str, value: Any, holder: tuple[int, int]) -> Chunk:
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{key.partition('/')[2]} belongs to a whole parameter (whole_entries of its rule) and is a "
            f"{type(value).__name__}: keep it as a tensor, a number as one of no dimensions"
        )
    return Chunk(key, tuple(value.shape), 0, _flat(value), holder)


def _state_chunk(key: str, piece: Piece, value: Any, holder: tuple[int, int]) -> Chunk:
    if isinstance(value, Tensor) and value.shape == piece.master.shape:
        return Chunk(key, tuple(piece.shape), piece.param_range[0], _flat(value), holder)
    if isinstance(value, Tensor) and piece.master.numel() == prod(piece.shape):
        return Chunk(key, tuple(value.shape), 0, _flat(value), holder)
    shape = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise ValueError(
        f"{key.partition('/')[2]} is neither one number nor one value for each of the elements "
        f"{piece.param_range} that this rank owns, but {shape}: nobody could load it. If it belongs to the "
        "whole parameter, let the rule's stepper name it in whole_entries"
    )


def _is_number(entry: str, value: Any, piece: Piece) -> bool:
    if not isinstance(value, Tensor):
        return isinstance(value, (bool, int, float, str, type(None)))
    return not value.dim() and (entry == STEP or bool(piece.shape))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1)


# Loading -----------------------------------------------------------------------------------------


def put_back(chunks: Iterable[Chunk]) -> None:
    """Tensors whose elements do not lie in order take what was put into the copies of them."""
    for chunk in chunks:
        if chunk.scattered is not None:
            new = chunk.values.view(chunk.shape)
            if not torch.equal(chunk.scattered, new):  # one number, shown many times, cannot be written
                chunk.scattered.detach().copy_(new)


class NewState:
    """The optimizer's state while it is loaded: what is there already is used where it fits."""

    def __init__(self, contents: Contents, values: Values) -> None:
        self.contents, self.values = contents, values
        self.of: dict[str, dict[str, Any]] = {}  # by the key of the parameter
        self.of_whole: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []  # an owner's, and the new one

    def chunks(self) -> Iterator[Chunk]:
        """Room for each entry that there is of this rank's pieces."""
        stored: dict[str, dict[str, str]] = {}
        for key in self.values.shapes:
            if found := entry_of(key):
                stored.setdefault(found[0], {})[found[1]] = key
        stepper = self.contents.stepper
        for key, flat, state, _ in self.contents.whole_states():
            made: dict[str, Tensor] = {}
            self.of_whole.append((state, made))
            for entry, place in stored.get(key, {}).items():
                if entry in stepper.whole_entries:
                    shape, dtype = self.values.shapes[place], self.values.dtypes[place]
                    made[entry] = torch.empty(shape, dtype=dtype, device=flat.kind.device)
                    yield Chunk(place, shape, 0, made[entry].view(-1))
        for key, piece, _ in self.contents.pieces():
            state = self.of[key] = dict(self.values.numbers.get(key, {}))
            for entry, place in stored.get(key, {}).items():
                shape, is_whole = self.values.shapes[place], entry in stepper.whole_entries
                if is_whole and stepper.whole_rule is not None:
                    continue
                is_cut = shape == tuple(piece.shape) and not is_whole
                whole = piece.master.shape if is_cut else shape
                state[entry] = self._room(piece, entry, whole, self.values.dtypes[place])
                yield Chunk(place, shape, piece.param_range[0] if is_cut else 0, state[entry].view(-1))

    def _room(self, piece: Piece, entry: str, shape: Sequence[int], stored: torch.dtype) -> Tensor:
        master, is_whole = piece.master, entry in self.contents.stepper.whole_entries
        if tuple(shape) != tuple(master.shape) and master.numel() != prod(piece.shape) and not is_whole:
            raise ValueError(
                f"{entry} of {piece.name} has shape {tuple(shape)} and cannot be cut like the parameter, of "
                f"which this rank owns elements {piece.param_range}: load it at stage 0"
            )
        known = self.contents.base.state.get(master, {}).get(entry)
        if isinstance(known, Tensor) and known.shape == torch.Size(shape) and known.is_contiguous():
            return known  # the same, as somebody may have kept a window: see `Owned.show`
        dtype = stored
        if isinstance(self.contents.base, torch.optim.Adam):  # and AdamW
            dtype = self.contents.dtypes.moments_of(master.dtype)
        elif stored.is_floating_point and not hasattr(self.contents.base, "zero_full_stepper"):
            dtype = master.dtype
        return torch.empty(shape, dtype=dtype, device=master.device)

    def install(self) -> None:
        """The optimizer's state is what was read."""
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


def kept(chunks: Iterator[Chunk]) -> dict[str, dict[str, Any]]:
    """Copies of what this rank has."""
    return {
        chunk.key: {"shape": chunk.shape, "start": chunk.start, "values": chunk.values.clone()}
        for chunk in chunks
    }


class OwnPart:
    """What one rank has kept, as `Values`: for ranks that have the same, or less, of each tensor."""

    def __init__(self, tensors: Mapping[str, Mapping[str, Any]], numbers: Mapping[str, Any]) -> None:
        self.tensors, self.numbers = tensors, numbers
        self.shapes = {key: tuple(each["shape"]) for key, each in tensors.items()}
        self.dtypes = {key: each["values"].dtype for key, each in tensors.items()}

    def check(self, chunks: Sequence[Chunk]) -> None:
        """ValueError unless all of these are there."""
        for chunk in chunks:
            name = chunk.key.partition("/")[2]
            if chunk.key not in self.tensors:
                raise ValueError(f"this rank's saved part lacks {name}. {SAME}")
            if self.shapes[chunk.key] != chunk.shape:
                raise ValueError(f"{name} has shape {chunk.shape}, but was saved as {self.shapes[chunk.key]}")
            start = self.tensors[chunk.key]["start"]
            stop = start + self.tensors[chunk.key]["values"].numel()
            if not start <= chunk.start <= chunk.stop <= stop:
                raise ValueError(
                    f"{name}: this rank owns elements {(chunk.start, chunk.stop)}, the saved part has "
                    f"{(start, stop)}. {SAME}"
                )

    def read(self, chunks: Sequence[Chunk]) -> None:
        """Put values into the chunks, converted to their types."""
        for chunk in chunks:
            saved = self.tensors[chunk.key]
            first = chunk.start - saved["start"]
            chunk.values.copy_(saved["values"][first : first + chunk.values.numel()])


SAME = (
    "Load what the same rank has saved, with the same world size, stage and bucket size; or use "
    "save_checkpoint and load_checkpoint, which do not ask for that"
)
