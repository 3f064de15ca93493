"""What this rank owns of a flat parameter: the master that the optimizer steps, in pieces of parameters.

    master   this rank's slice, in the type in which it is stepped. It is the memory of the parameters' slice
             itself where the types are the same, and both state and slice wait beside the model
    pieces   windows into the master, one for each parameter of which this rank owns something
    tier     where the master waits, and with it the optimizer's state
    flow     what copies between there and the device, if these are two places. Then `sent` is the host's copy
             of the parameters' slice as it was sent, and `mark` says whether the device still has that

What of it is saved, and how it is put together again, is in `state.py`.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from zero_full._compat import version_of
from zero_full.comm.lane import Pending
from zero_full.errors import CopyError
from zero_full.kernels.reference import unless_written
from zero_full.offload import Flow, Tier
from zero_full.optim.step import Piece
from zero_full.precision.dtypes import Dtypes
from zero_full.shard.group.checksum import fingerprint
from zero_full.shard.group.gradients import SPARSE, Bucket
from zero_full.shard.group.optimizer_state import StateByParameter
from zero_full.shard.group.parameters import FlatParameter, GatherState, Member


class Owned:
    """One rank's slice of a flat parameter, as the optimizer steps it."""

    def __init__(
        self, flat: FlatParameter, bucket: Bucket, dtypes: Dtypes, tier: Tier, flow: Flow | None = None
    ) -> None:
        self.flat, self.bucket, self.tier = flat, bucket, tier
        self.flow = None if flat.slice.apart else flow  # a slice elsewhere is copied when it is gathered
        self.dtype = dtypes.master_of(flat.dtype)
        self.sending: Pending | None = None  # the parameters' slice, on its way to the device
        self.mark: Tensor | None = None  # of what was sent; None: nobody knows what the device has
        self.copies: Tensor | None = None  # of the parameters' slice, where it is stepped; only meanwhile
        # What somebody may have kept, and of what it is.
        self.shown: list[tuple[ReferenceType[Tensor], Tensor]] = []
        self.is_updating = False  # a delayed update writes to the master: see `delayed_update.py`
        values = flat.take_unrounded()
        self._let_master_be(flat.shard if bucket.asleep else self._master_of(values))

    def _master_of(self, values: Tensor) -> Tensor:
        if self.dtype == self.flat.dtype and not (self.tier.apart or self.flat.slice.apart):
            return self.flat.shard
        return self.tier.room(values.numel(), self.dtype, self.flat.kind.device).copy_(values)

    def _let_master_be(self, master: Tensor) -> None:
        self.master, self.pieces = master, dict[Member, Piece]()
        for fragment in self.flat.fragments():
            member = self.flat.members[fragment.index]
            mine = self.flat.piece_of(master, member)
            assert mine is not None
            shape = member.param.shape
            self.pieces[member] = Piece(member.name, shape, fragment.param_range, member.group, mine)
        self.sent, self.mark = master, None
        self.travels: list[Tensor] = []  # the host's memory of what is copied
        if self.flow is not None and self.is_separate:
            if self.has_copies or self.tier.moves:
                self.sent = self.flow.room(master.numel(), self.flat.dtype, self.flat.shard.device)
                self.travels.append(self.sent)
            if self.bucket.down is not None:
                self.travels.append(self.bucket.down.memory)
        self.note_versions()

    @property
    def is_separate(self) -> bool:
        """Whether the master has memory of its own."""
        return self.master is not self.flat.shard

    @property
    def has_copies(self) -> bool:
        """Whether parameters are of another type than what is stepped."""
        return self.is_separate and self.flat.dtype != self.dtype

    def leave(self) -> None:
        """The run is over: nothing of the tier's memory is held."""
        self.master = self.sent = self.master[:0].clone()
        self.pieces, self.travels, self.shown = {}, [], []

    def wake(self) -> None:
        """Masters appear: see [Note: asleep] in `gradients.py`. The pieces are others now."""
        self._let_master_be(self._master_of(self.flat.shard))

    # A step --------------------------------------------------------------------------------------

    def fetch(self, used: Container[Member], fuses: bool) -> list[Piece]:
        """The pieces of these parameters with their gradients, where they are stepped.

        `fuses`: the stepper takes gradients in any type, and minds the copies of another type.
        """
        pieces = {member: piece for member, piece in self.pieces.items() if member in used}
        if fuses:
            self.refuse_sparse()
        self.copies = None
        if self.flow is not None:  # what was written was taken when the step began
            self.copies = self.sent if fuses and self.has_copies else None
        elif fuses and self.has_copies:
            self.copies = self.flat.slice.fetch(self.master.device)
        else:
            self.follow_parameters()
        gradients = self._gradients(None if fuses else self.dtype)
        for member, piece in pieces.items():
            piece.gradient = member.param.grad if gradients is None else self.flat.piece_of(gradients, member)
            if gradients is None and piece.gradient is not None:
                piece.gradient = self.tier.fetch(piece.gradient)
            piece.copy = None if self.copies is None else self.flat.piece_of(self.copies, member)
        return [piece for piece in pieces.values() if piece.gradient is not None]  # some was cleared by hand

    def _has_copies(self, fuses: bool) -> bool:
        return fuses and self.is_separate and self.flat.dtype != self.dtype

    def read_ahead(self, fuses: bool) -> bool:
        """Bring nearer what `fetch` will need. Returns whether there is room for it."""
        return not self._has_copies(fuses) or self.flat.slice.begin(ahead=True)

    def refuse_sparse(self) -> None:
        """Raise if a gradient, which may be the one that autograd has left, is sparse."""
        for member in self.flat.members if self.bucket.uses_param_grad else ():
            if member.param.grad is not None and member.param.grad.layout != torch.strided:
                raise TypeError(SPARSE.format(member.name))

    def _gradients(self, dtype: torch.dtype | None) -> Tensor | None:
        """This rank's slice of the averaged gradients; None: they are in `param.grad`."""
        if self.bucket.uses_param_grad:
            return None
        mine = self.bucket.averaged_slice()
        assert mine is not None
        fetched = mine if self.bucket.is_down else self.tier.fetch(mine)
        return fetched if dtype is None else fetched.to(dtype)

    def put_away(self) -> None:
        """After a step: this rank's slice of the parameters becomes what the pieces are now."""
        for piece in self.pieces.values():
            piece.gradient = piece.copy = None
        self.flat.node_copy = None
        if self.flow is not None:
            self._send(self.flow)
        else:
            self.flat.slice.update(self.master if self.copies is None else self.copies)
        self.copies = None
        self.note_versions()

    # What is shown -------------------------------------------------------------------------------

    def show(self, source: Tensor) -> Tensor:
        """A master or state of it as one row. What is written to that counts, also if somebody keeps it."""
        row = source.detach().reshape(-1)
        if self.tier.apart:
            self.shown = [(kept, of) for kept, of in self.shown if kept() is not None]
            self.shown.append((ref(row), source))
        return row

    def show_again(self) -> None:
        """A step may have given masters and state other memory: what is still kept is a window into that."""
        for kept, source in self.shown:
            row = kept()
            if row is not None:
                row.data = source.detach().reshape(-1)

    # On the way to the device and back -----------------------------------------------------------

    def _send(self, flow: Flow) -> None:
        """The device gets the parameters' slice as it is now. It is there after `settle`."""
        if not self.is_separate:
            return
        if self.sent is not self.master and self.copies is None:
            self.sent.copy_(self.master)
        self.mark, self.sending = None, flow.send_up(self.flat.shard, self.sent)

    def settle(self) -> None:
        """Until the device has what was sent. What has failed is told each time, until something is sent."""
        if self.sending is not None:
            try:
                self.sending.wait()
            except Exception as error:
                raise CopyError(
                    f"parameters {self.flat.name} have not come from the host to {self.flat.shard.device} "
                    f"after a step: {error}. The model is not what was trained: load a checkpoint"
                ) from error
            self.sending, self.mark = None, fingerprint(self.flat.shard)

    def take_written(self) -> None:
        """The master takes what somebody has written to the device's slice since it was sent, if anything."""
        flow = self.flow
        if flow is None or not self.is_separate:
            return
        self.settle()
        shard = self.flat.shard
        if self.mark is not None and bool(fingerprint(shard) == self.mark):
            return
        flow.fetch(self.sent, shard)
        if self.has_copies and not _rounds_to(self.master, self.sent):
            self.master.copy_(unless_written(self.master, self.sent))
        elif self.sent is not self.master and not self.has_copies:
            self.master.copy_(self.sent)
        self.mark = fingerprint(shard)
        self.note_versions()

    # Values --------------------------------------------------------------------------------------

    def copy_master(self) -> None:
        """This rank's slice of the parameters becomes what its master says.

        A node's copy stays: all ranks drop theirs together, or only some would gather from the node.
        """
        if self.flow is not None:
            self._send(self.flow)
            self.settle()
        elif self.is_separate:
            self.flat.shard.copy_(self.master)
        self.note_versions()

    def note_versions(self) -> None:
        """Writes until now are known: the master and the parameters agree."""
        self.version = version_of(self.master)
        self.param_versions = [version_of(member.param) for member in self.flat.members]

    def master_was_written(self) -> bool:
        """Whether somebody has written to the master since writes were noted, as far as torch counts it."""
        return not self.is_updating and version_of(self.master) != self.version

    @torch.no_grad()
    def follow_master(self, parameters_count: bool = False) -> bool:
        """This rank's slice of the parameters takes what somebody has written to the master, if anything.

        `parameters_count`: they were written, too, so far as torch does not count it.
        """
        if not self.is_separate or not self.master_was_written():
            return False
        pairs = zip(self.flat.members, self.param_versions, strict=True)
        is_counted = not self.flat.released_at_rest
        if parameters_count or any(is_counted and version_of(m.param) != version for m, version in pairs):
            raise RuntimeError(
                f"{self.flat.name}: parameters were written, and so was the fp32 copy of them or of their "
                "neighbours, which safe_get_local_fp32_param shows: write only the ones or the other from "
                "one step to the next"
            )
        self.copy_master()
        return True

    @torch.no_grad()
    def follow_parameters(self, released: bool = False) -> None:
        """Masters take what somebody has written to this rank's slice of the parameters, or the reverse.

        `released`: even if it is a unit's, which nobody can write to but `GatheredParameters`.
        """
        if self.follow_master(parameters_count=released):
            return
        if not self.is_separate or self.is_updating or (self.flat.released_at_rest and not released):
            return
        if self.flow is not None:
            return self.take_written()
        slice_, master = self.flat.shard.to(self.master.device), self.master
        if slice_.dtype == master.dtype:
            master.copy_(slice_)
        elif not _rounds_to(master, slice_):
            master.copy_(unless_written(master, slice_))
        self.note_versions()

    def fill(self, member: Member, value: Tensor) -> None:
        """Give a parameter and its master new values. Every rank must do the same."""
        self.follow_master()
        self.flat.fill(member, value)
        if self.is_separate:
            self.flat.write(self.master, member, value)
        self.note_versions()


def _rounds_to(master: Tensor, slice_: Tensor) -> bool:
    """Whether it is known, without waiting for a device, that the slice is what the master rounds to."""
    if slice_.device.type != "cpu":
        return False
    return torch.equal(master.to(slice_.dtype).view(torch.int16), slice_.view(torch.int16))


# All that a rank owns ----------------------------------------------------------------------------


def cut_state(base: torch.optim.Optimizer, owned: Iterable[Owned], dtypes: Dtypes) -> StateByParameter:
    """The optimizer's state becomes that of pieces; what it knows already of whole parameters is cut.

    What has the parameter's type gets the type that state of the piece's master has, or will have: of a
    bucket that is asleep, the master is still the parameter.
    """
    is_adam = isinstance(base, torch.optim.Adam)  # and AdamW
    before, state = base.state, StateByParameter()
    for each in owned:
        for member in each.flat.members:
            state.know(member.param)
        for member, piece in each.pieces.items():
            state.add(piece.master, member.param)
            if known := before.get(member.param):
                dtype = dtypes.moments_of(each.dtype) if is_adam else each.dtype
                state[piece.master] = {k: _cut(v, each.flat, member, piece, dtype) for k, v in known.items()}
    base.state = state  # type: ignore[assignment]
    return state


def _cut(value: Any, flat: FlatParameter, member: Member, piece: Piece, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor) or value.shape != member.param.shape or not value.dim():
        return value
    start, stop = piece.param_range
    mine = value.reshape(-1)[start:stop].reshape(piece.master.shape)
    kept = dtype if value.dtype == flat.kind.dtype else value.dtype
    return mine.to(piece.master.device, kept, copy=True)


def holdings(
    flats: Sequence[FlatParameter],
    owned: Sequence[Owned],
    states: Mapping[Any, Mapping[str, Any]],
    beside: Sequence[Tensor],
    away: Iterable[Tensor],
) -> dict[str, list[Tensor]]:
    """Every tensor that a rank keeps, by kind. Counters are the optimizer's step numbers.

    What waits on the host or on a disk is told apart from what the optimizer keeps on the device. `beside`
    and `away`: what there is here and on the host that is neither a master nor state of a piece.
    """
    state = [v for s in states.values() for v in s.values() if isinstance(v, Tensor)]
    masters = [each.master for each in owned if each.is_separate]
    kind = next((each.tier.kind for each in owned if each.tier.apart), "optimizer")
    elsewhere = set(held_elsewhere(owned, states))
    kept = [*masters, *(t for t in state if t.dim()), *beside]
    here, there = ([t for t in kept if (id(t) in elsewhere) is far] for far in (False, True))
    away = [*(tensor for each in owned for tensor in each.travels), *away]
    waiting = {kind: there + away} if kind == "host" else {kind: there, "host": away}
    whole = [flat.full for flat in flats if flat.state is not GatherState.SHARDED]
    copies = [flat.node_copy for flat in flats if flat.node_copy is not None]
    is_apart, is_beside = ({each.tier.apart for each in owned} >= {kind} for kind in (True, False))
    found = {
        "parameters": whole + copies,
        "gradients": [tensor for each in owned for tensor in each.bucket.gradient_memory()],
        **({"optimizer": here} if is_beside or not is_apart else {}),
        **(waiting if is_apart else {}),
        "counters": [t for t in state if not t.dim()],
    }
    for flat in flats:
        if flat.released_at_rest:
            found.setdefault(flat.slice.kind, []).append(flat.shard)
    return found


def held_elsewhere(owned: Iterable[Owned], states: Mapping[Any, Mapping[str, Any]]) -> Iterator[int]:
    """The identities of masters and state that are not on the parameters' device."""
    for each in owned:
        if each.tier.apart:
            yield id(each.master)
            yield from (id(v) for p in each.pieces.values() for v in states.get(p.master, {}).values())
