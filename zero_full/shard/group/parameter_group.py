"""A parameter group: parameters that are sharded together, with their gradients and this rank's master.

    parameters   the flat buffer: whole on every rank, or gathered for use                `parameters.py`
    gradients    from autograd to this rank's slice of the average                        `gradients.py`
    master       this rank's slice, which the optimizer steps, and its state              `master.py`

At stages 0 to 2 a group is a gradient bucket, at stage 3 the parameters of a unit (a module and its
submodules). `passes` decides when a group is gathered and reduced, `step` when its master is stepped.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_full.optim.step import Piece
from zero_full.precision.dtypes import Dtypes
from zero_full.shard.group.dtensors import local_of
from zero_full.shard.group.gradients import FlatGradients
from zero_full.shard.group.master import Master, StateByParameter
from zero_full.shard.group.parameters import FlatParameters, GatherState, Member


class ParameterGroup:
    """Parameters of one flat buffer. The base class is for frozen ones, which stage 3 gathers as well."""

    def __init__(self, parameters: FlatParameters) -> None:
        self.parameters = parameters
        self.members, self.kind, self.layout = parameters.members, parameters.kind, parameters.layout
        self.shard_comm, self.replica_comm = parameters.shard_comm, parameters.replica_comm
        self.name = parameters.name

    def fill(self, member: Member, value: Tensor) -> None:
        """Set a parameter's values. Every rank must do the same."""
        self.parameters.fill(member, value)


class TrainedGroup(ParameterGroup):
    """A parameter group that the optimizer steps."""

    def __init__(self, gradients: FlatGradients, master: Master) -> None:
        super().__init__(gradients.parameters)
        self.gradients, self.master = gradients, master
        self.asleep = self.kind.asleep  # see [Note: asleep] in `gradients.py`

    def fill(self, member: Member, value: Tensor) -> None:
        """Set the values of a parameter and its master. Every rank must do the same."""
        self.master.fill(member, value)

    def wake(self) -> None:
        """Make a master for a group that was asleep, because its parameters are trained from now on."""
        self.asleep = False
        self.master.wake()


def cut_state(
    base: torch.optim.Optimizer, trained: Iterable[TrainedGroup], dtypes: Dtypes
) -> StateByParameter:
    """Replace the optimizer's state by state of pieces, and cut existing state of whole parameters.

    An entry of the parameter's dtype is converted to the dtype that state of the piece's master has, or will
    have: until a group wakes up, its "master" is the parameter itself.
    """
    is_adam = isinstance(base, torch.optim.Adam)  # and AdamW
    before, state = base.state, StateByParameter()
    for group in trained:
        for member in group.members:
            state.know(member.param)
        for member, piece in group.master.pieces.items():
            state.add(piece.master, member.param)
            if known := before.get(member.param):
                dtype = dtypes.moments_of(group.master.dtype) if is_adam else group.master.dtype
                state[piece.master] = {k: _cut(v, group, member, piece, dtype) for k, v in known.items()}
    base.state = state  # type: ignore[assignment]
    return state


def _cut(value: Any, group: TrainedGroup, member: Member, piece: Piece, dtype: torch.dtype) -> Any:
    """Copy this rank's elements of a state entry of the whole parameter; return other entries unchanged."""
    if not isinstance(value, Tensor) or value.shape != member.param.shape or not value.dim():
        return value
    value = local_of(value)
    start, stop = piece.param_range
    mine = value.reshape(-1)[start:stop].reshape(piece.master.shape)
    kept = dtype if value.dtype == group.kind.dtype else value.dtype
    return mine.to(piece.master.device, kept, copy=True)


def holdings(
    groups: Sequence[ParameterGroup],
    trained: Sequence[TrainedGroup],
    states: Mapping[Any, Mapping[str, Any]],
    others: Sequence[Tensor],
    on_host: Iterable[Tensor],
) -> dict[str, list[Tensor]]:
    """Return every tensor that a rank holds, by kind. `counters` are the optimizer's step numbers.

    State in host memory or in a file is listed under its own kind. `groups`: the groups to list parameters
    of. `others` and `on_host`: tensors on the device and on the host that belong to no single group.
    """
    state = [v for s in states.values() for v in s.values() if isinstance(v, Tensor)]
    masters = [group.master for group in trained]
    separate = [master.values for master in masters if master.is_separate]
    separate += [bits for master in masters if master.changes is not None for bits in master.changes.held()]
    kind = next((master.tier.kind for master in masters if master.tier.is_offloaded), "optimizer")
    offloaded = set(offloaded_ids(trained, states))
    tensors = [*separate, *(t for t in state if t.dim()), *others]
    here, in_tier = ([t for t in tensors if (id(t) in offloaded) is away] for away in (False, True))
    on_host = [*(tensor for master in masters for tensor in master.staging), *on_host]
    in_tiers = {kind: in_tier + on_host} if kind == "host" else {kind: in_tier, "host": on_host}
    flats = [group.parameters for group in groups]
    whole = [flat.full for flat in flats if flat.state is not GatherState.SHARDED]
    copies = [flat.node_copy for flat in flats if flat.node_copy is not None]
    any_offloaded = any(master.tier.is_offloaded for master in masters)
    all_offloaded = bool(masters) and all(master.tier.is_offloaded for master in masters)
    found = {
        "parameters": whole + copies,
        "gradients": [tensor for group in trained for tensor in group.gradients.device_memory()],
        **({} if all_offloaded else {"optimizer": here}),
        **(in_tiers if any_offloaded else {}),
        "counters": [t for t in state if not t.dim()],
    }
    for flat in flats:
        if flat.released_at_rest:
            found.setdefault(flat.slice.kind, []).append(flat.shard)
    return found


def offloaded_ids(trained: Iterable[TrainedGroup], states: Mapping[Any, Mapping[str, Any]]) -> Iterator[int]:
    """Yield the ids of masters and state tensors that are offloaded."""
    for master in (group.master for group in trained if group.master.tier.is_offloaded):
        yield id(master.values)
        yield from (id(v) for p in master.pieces.values() for v in states.get(p.master, {}).values())
