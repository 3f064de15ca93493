"""What this rank owns of a flat parameter: the master that the optimizer steps, in pieces of parameters.

    master   this rank's slice, in the type in which it is stepped. It is the memory of the parameters' slice
             itself where the types are the same, and both state and slice wait beside the model
    pieces   windows into the master, one for each parameter of which this rank owns something
    tier     where the master waits, and with it the optimizer's state

What of it is saved, and how it is put together again, is in `contents.py`.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_full._compat import version_of
from zero_full.kernels.reference import unless_written
from zero_full.offload import Tier
from zero_full.optim.step import Piece
from zero_full.precision.dtypes import Dtypes
from zero_full.shard.base import StateByParameter
from zero_full.shard.bucket import SPARSE, Bucket
from zero_full.shard.flat import FlatParameter, GatherState, Member


class Owned:
    """One rank's slice of a flat parameter, as the optimizer steps it."""

    def __init__(self, flat: FlatParameter, bucket: Bucket, dtypes: Dtypes, tier: Tier) -> None:
        self.flat, self.bucket, self.tier = flat, bucket, tier
        self.dtype = dtypes.master_of(flat.dtype)
        self.copies: Tensor | None = None  # of the parameters' slice, where it is stepped; only meanwhile
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
        self.note_versions()

    @property
    def is_separate(self) -> bool:
        """Whether the master has memory of its own."""
        return self.master is not self.flat.shard

    def wake(self) -> None:
        """Masters appear: see [Note: asleep] in `bucket.py`. The pieces are others now."""
        self._let_master_be(self._master_of(self.flat.shard))

    # A step --------------------------------------------------------------------------------------

    def fetch(self, used: Container[Member], fuses: bool) -> list[Piece]:
        """The pieces of these parameters with their gradients, where they are stepped.

        `fuses`: the stepper takes gradients in any type, and minds the copies of another type.
        """
        pieces = {member: piece for member, piece in self.pieces.items() if member in used}
        if fuses:
            self.refuse_sparse()
        self.copies = self.flat.slice.fetch(self.master.device) if self._has_copies(fuses) else None
        if self.copies is None:
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
        assert self.bucket.grad_slice is not None
        fetched = self.tier.fetch(self.bucket.grad_slice)
        return fetched if dtype is None else fetched.to(dtype)

    def put_away(self) -> None:
        """After a step: this rank's slice of the parameters becomes what the pieces are now."""
        for piece in self.pieces.values():
            piece.gradient = piece.copy = None
        self.flat.node_copy = None
        self.flat.slice.update(self.master if self.copies is None else self.copies)
        self.copies = None
        self.note_versions()

    # Values --------------------------------------------------------------------------------------

    def copy_master(self) -> None:
        """This rank's slice of the parameters becomes what its master says.

        A node's copy stays: all ranks drop theirs together, or only some would gather from the node.
        """
        if self.is_separate:
            self.flat.shard.copy_(self.master)
        self.note_versions()

    def note_versions(self) -> None:
        """Writes until now are known: the master and the parameters agree."""
        self.version = version_of(self.master)
        self.param_versions = [version_of(member.param) for member in self.flat.members]

    def master_was_written(self) -> bool:
        """Whether somebody has written to the master since writes were noted, as far as torch counts it."""
        return version_of(self.master) != self.version

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
        if not self.is_separate or (self.flat.released_at_rest and not released):
            return
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

    What has the parameter's type gets the type that state of the piece's master has.
    """
    is_adam = isinstance(base, torch.optim.Adam)  # and AdamW
    before, state = base.state, StateByParameter()
    for each in owned:
        for member, piece in each.pieces.items():
            state.add(piece.master, member.param)
            if known := before.get(member.param):
                master = piece.master.dtype
                dtype = dtypes.moments_of(master) if is_adam else master
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
) -> dict[str, list[Tensor]]:
    """Every tensor that a rank keeps, by kind. Counters are the optimizer's step numbers.

    What waits on the host or on a disk is there in the place of what the optimizer would keep on the device.
    `beside`: what a stepper keeps that is no state of a piece.
    """
    state = [v for s in states.values() for v in s.values() if isinstance(v, Tensor)]
    masters = [each.master for each in owned if each.is_separate]
    kind = next((each.tier.kind for each in owned if each.tier.apart), "optimizer")
    whole = [flat.full for flat in flats if flat.state is not GatherState.SHARDED]
    copies = [flat.node_copy for flat in flats if flat.node_copy is not None]
    found = {
        "parameters": whole + copies,
        "gradients": [tensor for each in owned for tensor in each.bucket.gradient_memory()],
        kind: [*masters, *(t for t in state if t.dim()), *beside],
        "counters": [t for t in state if not t.dim()],
    }
    for flat in flats:
        if flat.released_at_rest:
            found.setdefault(flat.slice.kind, []).append(flat.shard)
    return found
