"""This rank's part of the optimizer's state, by parameter name.

Everything that a checkpoint needs to put the parts together again is in here: for every fragment the
parameter's name and shape and the range of its elements that this rank owns.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_full.shard.bucket import Bucket, Owned
from zero_full.shard.flat import FlatParameter, GatherState

State = dict[str, Any]


def fragments(buckets: Sequence[Bucket]) -> dict[str, Owned]:
    """Everything this rank owns, by parameter name."""
    return {owned.member.name: owned for bucket in buckets for owned in bucket.owned}


def cut_state(base: torch.optim.Optimizer, whole: Mapping[str, Tensor], cut: Mapping[str, Owned]) -> None:
    """An optimizer that has already stepped whole parameters keeps its state: cut it like them."""
    for name, param in whole.items():
        state = base.state.pop(param, None)
        if not state or name not in cut:
            continue
        owned = cut[name]
        start, stop = owned.fragment.param_range
        base.state[owned.master] = {
            key: value.reshape(-1)[start:stop].reshape(owned.master.shape).clone()
            if isinstance(value, Tensor) and value.shape == param.shape and value.dim()
            else value
            for key, value in state.items()
        }


def holdings(
    flats: Sequence[FlatParameter], buckets: Sequence[Bucket], states: Mapping[Any, Mapping[str, Any]]
) -> dict[str, list[Tensor]]:
    """Every tensor that a rank keeps, by kind. Counters are the optimizer's step numbers."""
    state = [v for s in states.values() for v in s.values() if isinstance(v, Tensor)]
    masters = [b.master for b in buckets if b.master is not b.flat.shard]
    whole = [v.full for v in flats if v.state is not GatherState.SHARDED]
    node_copies = [v.node_copy for v in flats if v.node_copy is not None]
    return {
        "parameters": whole + [v.shard for v in flats if v.released_at_rest] + node_copies,
        "gradients": [t for b in buckets for t in b.gradient_memory()],
        "optimizer": masters + [t for t in state if t.dim()],
        "counters": [t for t in state if not t.dim()],
    }


def refuse_unfit(state_dict: Mapping[str, Any], groups: int) -> None:
    """Raise if this is not the state of such an optimizer."""
    if "fragments" not in state_dict:
        raise ValueError(
            "this is not what the state_dict of zero_full's optimizer has returned: load a plain optimizer's "
            "state into it before initialize, which keeps it"
        )
    if len(state_dict["groups"]) != groups:
        raise ValueError(
            f"{len(state_dict['groups'])} parameter groups were saved, but the optimizer has {groups}"
        )


def save(base: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> State:
    """This rank's fragments. The tensors are copies."""
    return {
        name: {
            "shape": tuple(owned.member.param.shape),
            "range": owned.fragment.param_range,
            "master": owned.master.detach().clone(),
            "state": {key: _copy(value) for key, value in base.state.get(owned.master, {}).items()},
        }
        for name, owned in fragments(buckets).items()
    }


def load(base: torch.optim.Optimizer, buckets: Sequence[Bucket], saved: Mapping[str, Any]) -> None:
    """Put a saved part back. It must be from the same rank of a run with the same layout."""
    mine = fragments(buckets)
    _check(mine, saved)
    for name, owned in mine.items():
        owned.master.detach().copy_(saved[name]["master"])
        base.state[owned.master] = {
            key: _copy(value, owned.master.device) for key, value in saved[name]["state"].items()
        }


def _check(mine: Mapping[str, Owned], saved: Mapping[str, Any]) -> None:
    missing, surplus = sorted(mine.keys() - saved.keys()), sorted(saved.keys() - mine.keys())
    if missing or surplus:
        raise ValueError(
            f"this rank's saved part lacks {missing or 'nothing'} and has {surplus or 'nothing'} besides. "
            "Load what the same rank has saved, with the same world size, stage and bucket size"
        )
    for name, owned in mine.items():
        shape, cut = tuple(saved[name]["shape"]), tuple(saved[name]["range"])
        if shape != tuple(owned.member.param.shape):
            raise ValueError(f"{name} has shape {tuple(owned.member.param.shape)}, but was saved as {shape}")
        if cut != owned.fragment.param_range:
            raise ValueError(
                f"{name}: this rank owns elements {owned.fragment.param_range}, the saved part has {cut}. "
                "It was saved by another rank, or with another world size, stage or bucket size"
            )


def _copy(value: Any, device: torch.device | None = None) -> Any:
    if not isinstance(value, Tensor):
        return value
    # A counter (no dimensions) may live elsewhere than what it counts for.
    return (
        value.detach().clone() if device is None or not value.dim() else value.detach().to(device, copy=True)
    )
