"""Read and write what is behind a parameter: its fp32 value, its gradient, its optimizer state.

The `full` functions deal in whole tensors: every rank of the parameter's group must call them, and every
rank gets, or gives, the same. The `local` ones deal in this rank's fragment, a flat tensor with the elements
that this rank owns (perhaps none), and concern nobody else. The next step compares what was given: whole
tensors on all ranks, fragments on the ranks that repeat the same one (all of them at stage 0).

Of a parameter that the engine does not train, all that is asked for is None.

A gradient is the averaged one, unscaled, between the last backward pass and `step`. Before it is averaged
(inside `no_sync`, and between the micro-batches of a step at stages 0 and 1) it is this rank's own. Where an
optimizer averages by itself the `full` function averages it when it is asked, and the `local` one does not;
and while `ZeroOneAdam`'s ranks step apart each has parameters and momenta of its own, which all these show.
Its variance at stage 1, of which each rank keeps another part than of all else, can only be read, as a whole.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zero_full.optim.step import Piece
from zero_full.shard.group.hand_written import GRADIENT
from zero_full.shard.group.master import Owned
from zero_full.shard.group.optimizer_state import OFFLOADED
from zero_full.shard.group.parameters import Member
from zero_full.shard.group.registry import owner_of
from zero_full.shard.guards.local_steps import refuse_apart
from zero_full.shard.step.optimizer import ZeroOptimizer

MASTER = "fp32 value"
Kind = tuple[int, torch.dtype, float]  # dimensions, type, and the value of what has no dimensions


class ParameterPlace:
    """Where a parameter's parts are."""

    def __init__(self, optimizer: ZeroOptimizer, owned: Owned, member: Member) -> None:
        self.optimizer, self.owned, self.bucket, self.member = optimizer, owned, owned.bucket, member

    @property
    def piece(self) -> Piece | None:
        """What this rank owns, if it owns any of the parameter."""
        return self.owned.pieces.get(self.member)

    def is_averaged(self) -> bool:
        """Whether there is an averaged gradient now."""
        bucket = self.bucket
        ready = bucket.slice_is_valid or (bucket.uses_param_grad and self.member.param.grad is not None)
        return ready and not self.optimizer.reducer.unreduced

    def gradient(self) -> Tensor | None:
        """This rank's averaged, unscaled gradient; None if there is none now."""
        if not self.is_averaged():
            return None
        if self.piece is None:
            return torch.empty(0, dtype=self.bucket.accumulate, device=self.bucket.kind.device)
        gradient = self.bucket.gradient_of(self.member)
        if gradient is None:
            return None
        return gradient.detach().reshape(-1).to(self.bucket.kind.device) / self.optimizer.gradients.scale

    def own_gradient(self) -> Tensor | None:
        """This rank's gradient before it is averaged, whole and unscaled; None if there is none now."""
        bucket, member = self.bucket, self.member
        if bucket.local_grads is None or member not in bucket.arrived:
            return None
        window = bucket.local_grads[bucket.layout.window(member.index)].view(member.param.shape)
        return window.to(bucket.accumulate) / self.optimizer.gradients.scale

    def assemble(self, mine: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Everyone's fragments as one tensor."""
        param = self.member.param
        whole = torch.zeros(param.numel(), dtype=dtype, device=param.device)
        if mine is not None and self.piece is not None:
            start, stop = self.piece.param_range
            whole[start:stop] = mine.reshape(-1)
        return self.bucket.ranks.sum_numbers(whole, f"fragments of {self.member.name}").view(param.shape)

    def whole(self, kind: Kind, mine: Tensor | None) -> Tensor:
        """An entry of the optimizer's state, of which some rank has told the kind."""
        dims, dtype, value = kind
        if not dims:
            return torch.tensor(value, dtype=dtype)
        with self.present(mine):
            return self.assemble(mine, dtype)

    def present(self, mine: Tensor | None) -> AbstractContextManager[None]:
        """A block in which this rank's part has its values, also while states are offloaded."""
        return self.optimizer.offloaded.present([] if mine is None else [mine])

    def note(self, what: str, value: Tensor) -> None:
        """Every rank must have given the same whole tensor: see [Note: written by hand]."""
        if self.bucket.has_peers:
            self.optimizer.reducer.written.note(what, self.member, value)

    def note_slice(self, what: str, value: Tensor) -> None:
        """The ranks that repeat this rank's fragment must have given the same."""
        if self.bucket.across.size > 1:
            self.optimizer.reducer.written.note_slice(what, self.member, value)

    def cut(self, value: Tensor) -> Tensor:
        """This rank's elements of a whole tensor."""
        if value.shape != self.member.param.shape:
            raise ValueError(
                f"{self.member.name} has shape {tuple(self.member.param.shape)}, got {tuple(value.shape)}"
            )
        if self.piece is None:
            return value.reshape(-1)[:0]
        start, stop = self.piece.param_range
        return value.detach().reshape(-1)[start:stop]


def _find(
    param: Parameter, alone: str = "", needs_state: bool = True, reads: bool = False
) -> ParameterPlace | None:
    """None: an engine's parameter that nothing trains.

    `alone`: the call that is asked for, if it is one for a single rank. `needs_state`: or masters. `reads`:
    values are copied, which may be done while they are offloaded.
    """
    optimizer: ZeroOptimizer | None = owner_of(param)
    if optimizer is None:
        raise ValueError(
            "this parameter belongs to no zero_full engine (is it of the model that you have given?)"
        )
    if optimizer.states_offloaded and not reads:
        raise RuntimeError(OFFLOADED)
    if alone:
        optimizer.delayed.refuse(alone)
    elif needs_state:
        optimizer.finish_update()
    owned, member = optimizer.parts.places.get(param, (None, None))
    if not isinstance(owned, Owned) or member is None:
        return None
    if not optimizer.states_offloaded:
        if not owned.flat.released_at_rest:
            owned.flat.take_back_moved()
        owned.follow_parameters()
    return ParameterPlace(optimizer, owned, member)


def _find_together(
    param: Parameter, call: str, needs_state: bool = True, reads: bool = False
) -> ParameterPlace | None:
    """The same for a call that sends messages, when every rank has made it."""
    owner = owner_of(param)
    _, member = owner.parts.places.get(param, (None, None)) if owner is not None else (None, None)
    if owner is not None and member is not None:
        owner.on_every_rank(f"{call} of {member.name}")
    return _find(param, needs_state=needs_state, reads=reads)


def _place(param: Parameter, alone: str = "", needs_state: bool = True) -> ParameterPlace:
    """To write to."""
    place = _find(param, alone, needs_state)
    if place is None:
        raise ValueError(
            "this parameter is frozen, so there is nothing but its values: write these inside "
            "zero_full.GatheredParameters(parameter, modifier_rank=0)"
        )
    return place


def safe_get_full_fp32_param(param: Parameter) -> Tensor | None:
    """The master copy of the whole parameter. Every rank must call this."""
    place = _find_together(param, "safe_get_full_fp32_param", reads=True)
    if place is None:
        return None
    refuse_apart(place.optimizer, "safe_get_full_fp32_param")
    mine = place.piece.master if place.piece is not None else None
    with place.present(mine):
        return place.assemble(mine, place.owned.master.dtype)


def safe_get_full_grad(param: Parameter) -> Tensor | None:
    """The averaged gradient between backward and `step`, unscaled; else None. Every rank must call this."""
    place = _find_together(param, "safe_get_full_grad", needs_state=False)
    if place is None:
        return None
    place.optimizer.reducer.settle()
    if not place.is_averaged():
        return place.own_gradient()
    mine = place.gradient()
    if mine is None:
        return None
    whole = place.assemble(mine, place.bucket.accumulate)
    if not place.optimizer.steppers.averages():
        place.bucket.across.sum_numbers(whole, f"gradient of {place.member.name}").div_(
            place.bucket.across.size
        )
    return whole


def safe_get_full_optimizer_state(param: Parameter, key: str) -> Tensor | None:
    """An entry of the optimizer's state, such as "exp_avg". Every rank must call this."""
    place = _find_together(param, f"safe_get_full_optimizer_state of {key!r}", reads=True)
    if place is None:
        return None
    refuse_apart(place.optimizer, "safe_get_full_optimizer_state")
    if _is_cut(place, key):
        return _from_parts(place, key)
    state = _own_state(place)
    mine = _as_tensor(state.get(key))
    what = f"state {key} of {place.member.name}"
    known = place.bucket.ranks.gather_objects((tuple(state), _describe(mine)), what)
    owners = [(keys, kind) for keys, kind in known if keys]
    if not owners:
        return None
    keys, kind = owners[0]
    if kind is None:  # on all ranks, also where none of the parameter is owned
        raise _no_such_state(place, key, keys)
    return place.whole(kind, mine)


def consolidated_state_dict(optimizer: ZeroOptimizer) -> dict[str, Any]:
    """The state_dict that torch's own optimizer would have: whole tensors, on the CPU, of the whole model.

    The wrapped class, made for plain parameters in the same groups, can load it. Every rank must call this.
    """
    optimizer.on_every_rank("consolidated_state_dict")
    refuse_apart(optimizer, "consolidated_state_dict")
    stepper = optimizer.contents.stepper
    if stepper.whole_entries or stepper.whole_rule is not None or stepper.own_tensors():
        raise RuntimeError(
            f"{type(optimizer.base).__name__} keeps more than values for the elements of parameters, and "
            "torch's form has no place for that: use save_checkpoint"
        )
    groups, state, number = list[dict[str, Any]](), dict[int, dict[str, Tensor]](), 0
    for group in optimizer.param_groups:
        params = group["params"]
        groups.append({**group, "params": list(range(number, number + len(params)))})
        for param in params:
            place = _find(param, reads=True)
            if place is not None and (entries := _whole_entries(place)):
                state[number] = entries
            number += 1
    return {"state": state, "param_groups": groups}


def _whole_entries(place: ParameterPlace) -> dict[str, Tensor]:
    """All state of a parameter."""
    own = {key: _as_tensor(value) for key, value in _own_state(place).items()}
    mine = {key: _describe(value) for key, value in own.items()}
    known = place.bucket.ranks.gather_objects(mine, f"state of {place.member.name}")
    kinds = next((each for each in known if each), mine)
    whole = dict[str, Tensor]()
    for key, kind in kinds.items():
        if kind is not None and not _is_cut(place, key):
            whole[key] = place.whole(kind, own.get(key)).cpu()
    for key in place.optimizer.contents.stepper.cut_entries:
        if (parts := _from_parts(place, key)) is not None:
            whole[key] = parts.cpu()
    return whole


def _is_cut(place: ParameterPlace, key: str) -> bool:
    """Whether the optimizer has cut this entry by itself; all ranks say the same."""
    return key in place.optimizer.contents.stepper.cut_entries


def _from_parts(place: ParameterPlace, key: str) -> Tensor | None:
    """All ranks' parts of such an entry as one tensor; None before the first step."""
    piece, stepper = place.piece, place.optimizer.contents.stepper
    if piece is None or not place.optimizer.base.state.get(piece.master):
        return None
    whole = torch.zeros(piece.master.numel(), dtype=torch.float32, device=piece.master.device)
    for of, entry, start, values in stepper.cut_state():
        if of is piece and entry == key:
            whole[start : start + values.numel()] = values
    return place.bucket.across.sum_numbers(whole, f"parts of {place.member.name}").view(piece.shape)


def _refuse_cut(place: ParameterPlace, key: str) -> None:
    if _is_cut(place, key):
        raise RuntimeError(
            f"{key} of {place.member.name}: {type(place.optimizer.base).__name__} has cut it over the ranks "
            "by itself, and every rank has its roots as well. It can only be read, as a whole, by "
            "safe_get_full_optimizer_state on every rank; to change it, use stage 0"
        )


def _describe(mine: Tensor | None) -> Kind | None:
    """Enough for a rank that owns nothing to know what the others have."""
    return None if mine is None else (mine.dim(), mine.dtype, 0.0 if mine.dim() else mine.item())


def _own_state(place: ParameterPlace) -> Mapping[str, Any]:
    return place.optimizer.base.state.get(place.piece.master, {}) if place.piece is not None else {}


def _as_tensor(value: Any) -> Tensor | None:
    return value if value is None or isinstance(value, Tensor) else torch.tensor(float(value))


def _no_such_state(place: ParameterPlace, key: str, keys: Iterable[str]) -> KeyError:
    return KeyError(f"the optimizer keeps no {key!r} for {place.member.name}, only {', '.join(keys)}")


def _state(place: ParameterPlace, key: str) -> Tensor | None:
    state = _own_state(place)
    value = state.get(key)
    if state and value is None:
        raise _no_such_state(place, key, state)
    return _as_tensor(value)


def safe_set_full_fp32_param(param: Parameter, value: Tensor) -> None:
    """Give the whole parameter new values. Every rank must call this with the same tensor."""
    place = _place(param)
    refuse_apart(place.optimizer, "safe_set_full_fp32_param")
    place.cut(value)  # checks its shape
    place.note(MASTER, value)
    with torch.no_grad():
        place.owned.fill(place.member, value)


def safe_set_full_grad(param: Parameter, value: Tensor) -> None:
    """Give the parameter this averaged, unscaled gradient. Every rank must call this with the same tensor.

    Between backward and `step` it replaces the averaged gradient; no backward pass has to come before.
    """
    place = _place(param, needs_state=False)
    mine, reducer = place.cut(value), place.optimizer.reducer
    if reducer.unreduced or place.is_averaged():
        _set_grad(place, mine)
    else:
        reducer.give(place.member, value.detach() * place.optimizer.gradients.scale)
    place.note(GRADIENT, value)


def safe_set_full_optimizer_state(param: Parameter, value: Tensor, key: str) -> None:
    """Replace an entry of the optimizer's state. Every rank must call this with the same tensor."""
    place = _place(param)
    refuse_apart(place.optimizer, "safe_set_full_optimizer_state")
    _set_state(place, place.cut(value), key)
    place.note(key, value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[Parameter], update_func: Callable[[Tensor | None, Parameter], Tensor]
) -> None:
    """Replace averaged gradients, one by one, by what `update_func(gradient, parameter)` makes of them.

    Every rank must call this. Parameters that are not trained are passed over.
    """
    for param in param_list:
        if _find(param, needs_state=False) is not None and param.requires_grad:
            safe_set_full_grad(param, update_func(safe_get_full_grad(param), param))


def safe_get_local_fp32_param(param: Parameter) -> Tensor | None:
    """This rank's elements of the master copy. What is written to them in place counts."""
    place = _find(param, alone="safe_get_local_fp32_param")
    if place is None:
        return None
    return place.owned.master[:0] if place.piece is None else place.owned.show(place.piece.master)


def safe_get_local_grad(param: Parameter) -> Tensor | None:
    """This rank's elements of the averaged gradient between backward and `step`, unscaled; else None."""
    place = _find(param, needs_state=False)
    if place is None:
        return None
    own = None if place.is_averaged() else place.own_gradient()
    return place.gradient() if own is None else place.cut(own)


def safe_get_local_optimizer_state(param: Parameter, key: str) -> Tensor | None:
    """This rank's elements of an entry of the optimizer's state."""
    place = _find(param, alone="safe_get_local_optimizer_state")
    if place is None:
        return None
    _refuse_cut(place, key)
    value = _state(place, key)
    return None if value is None else place.owned.show(value) if value.dim() else value


def safe_set_local_fp32_param(param: Parameter, value: Tensor) -> None:
    """New values for this rank's elements. The other ranks see them after the next step.

    With `zero_hpz_partition_size` this rank, too, if forward has left a copy for backward.
    """
    place = _place(param, alone="safe_set_local_fp32_param")
    refuse_apart(place.optimizer, "safe_set_local_fp32_param")
    if place.piece is not None:
        place.piece.master.detach().reshape(-1).copy_(value.reshape(-1))
        place.owned.copy_master()
        place.note_slice(MASTER, value)


def safe_set_local_grad(param: Parameter, value: Tensor) -> None:
    """Replace this rank's elements of the averaged gradient between backward and `step`."""
    place = _place(param, needs_state=False)
    _set_grad(place, value)
    if place.optimizer.steppers.averages():  # else it is this rank's own gradient
        place.note_slice(GRADIENT, value)


def _set_grad(place: ParameterPlace, value: Tensor) -> None:
    if not place.is_averaged():  # the same on all ranks, whatever they own of it
        raise RuntimeError(
            f"{place.member.name} has no averaged gradient now: set it after the last backward of a step "
            "and before `step`, or without any backward by safe_set_full_grad on every rank"
        )
    place.optimizer.reducer.used.add(place.member)
    gradient = place.bucket.gradient_of(place.member)
    if place.piece is None or gradient is None:
        return
    gradient.detach().copy_((value * place.optimizer.gradients.scale).view(gradient.shape))


def safe_set_local_optimizer_state(param: Parameter, value: Tensor, key: str) -> None:
    """Replace this rank's elements of an entry of the optimizer's state."""
    place = _place(param, alone="safe_set_local_optimizer_state")
    refuse_apart(place.optimizer, "safe_set_local_optimizer_state")
    _set_state(place, value, key)
    if place.piece is not None:
        place.note_slice(key, value)


def _set_state(place: ParameterPlace, value: Tensor, key: str) -> None:
    _refuse_cut(place, key)
    current = _state(place, key)
    if place.piece is None:
        return
    if current is None:
        raise KeyError(f"{place.member.name} has no optimizer state before the first step")
    current.copy_(value.view(current.shape))
