"""Read and write the tensors behind a parameter: fp32 value (master weight), gradient, optimizer state.

The `full` functions read or write whole tensors. Every rank of the parameter's group must call them, and all
get or pass the same values. Of a DTensor they return DTensors, and take DTensors or whole tensors. The
`local` functions read or write this rank's fragment: a flat tensor with the elements that this rank owns,
possibly none. They do not communicate. The next step compares written values: whole tensors on all ranks,
fragments on their replicas (all ranks at stage 0).

For a parameter that the engine does not train, the getters return None.

A gradient is the averaged one, unscaled, between the last backward pass and `step`. Before it is averaged
(inside `no_sync`, and between the micro-batches of a step at stages 0 and 1) it is this rank's own.

1-bit optimizers average by themselves. Then the `full` gradient function averages at the call, and the
`local` one does not. During `ZeroOneAdam`'s local steps each rank has its own parameters and momenta, which
the `local` functions return. Its variance at stage 1 is sharded differently and can only be read, as a whole.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zero_full.optim.step import Piece
from zero_full.shard.group.dtensors import like, part_of, whole_of
from zero_full.shard.group.hand_written import GRADIENT
from zero_full.shard.group.parameter_group import TrainedGroup
from zero_full.shard.group.parameters import Member
from zero_full.shard.group.registry import owner_of
from zero_full.shard.group.released import OFFLOADED
from zero_full.shard.step.optimizer import ZeroOptimizer

MASTER = "fp32 value"
EntryKind = tuple[int, torch.dtype, float]  # dimensions, dtype, and the value of a tensor of 0 dimensions


class ParameterPlace:
    """A trained parameter with its optimizer and group, for reading and writing its tensors."""

    def __init__(self, optimizer: ZeroOptimizer, group: TrainedGroup, member: Member) -> None:
        self.optimizer, self.group, self.member = optimizer, group, member
        self.gradients, self.master = group.gradients, group.master

    @property
    def piece(self) -> Piece | None:
        """The elements that this rank owns; None if it owns none."""
        return self.master.pieces.get(self.member)

    @property
    def state(self) -> Mapping[str, Any]:
        """This rank's part of the optimizer's state of the parameter."""
        return {} if self.piece is None else self.optimizer.base.state.get(self.piece.master, {})

    def is_averaged(self) -> bool:
        """Return whether the parameter has an averaged gradient now, equally on all ranks."""
        gradients = self.gradients
        ready = gradients.slice_is_valid or (gradients.uses_param_grad and self.member.param.grad is not None)
        return ready and not self.optimizer.reducer.unreduced

    def gradient(self) -> Tensor | None:
        """Return this rank's elements of the averaged gradient, unscaled, or None."""
        if not self.is_averaged():
            return None
        if self.piece is None:
            return torch.empty(0, dtype=self.gradients.accumulate, device=self.group.kind.device)
        gradient = self.gradients.gradient_of(self.member)
        if gradient is None:
            return None
        return gradient.detach().reshape(-1).to(self.group.kind.device) / self.optimizer.reducer.state.scale

    def own_gradient(self) -> Tensor | None:
        """Return this rank's own gradient before averaging, whole and unscaled, or None."""
        gradients, member = self.gradients, self.member
        if gradients.local_grads is None or member not in gradients.arrived:
            return None
        window = gradients.local_grads[gradients.layout.windows[member.index]].view(member.shape)
        return window.to(gradients.accumulate) / self.optimizer.reducer.state.scale

    def assemble(self, mine: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Assemble the whole tensor from the fragments of all ranks. Every rank must call this."""
        shape = self.member.shape
        whole = torch.zeros(shape.numel(), dtype=dtype, device=self.member.param.device)
        if mine is not None and self.piece is not None:
            start, stop = self.piece.param_range
            with self.optimizer.offloaded.present([mine]):
                whole[start:stop] = mine.reshape(-1)
        return self.group.shard_comm.sum_numbers(whole, f"fragments of {self.member.name}").view(shape)

    def whole(self, kind: EntryKind, mine: Tensor | None) -> Tensor:
        """Assemble a state entry of this kind from the ranks' fragments. Every rank must call this."""
        dims, dtype, value = kind
        return self.assemble(mine, dtype) if dims else torch.tensor(value, dtype=dtype)

    def part(self, value: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor, if the parameter is a DTensor; else the tensor."""
        return part_of(self.member.param, value) if self.group.kind.is_dtensor else value

    def shown(self, whole: Tensor) -> Tensor:
        """Return an assembled tensor in the form of the parameter: for a DTensor a DTensor."""
        made: Tensor = like(self.member.param, whole) if self.group.kind.is_dtensor and whole.dim() else whole
        return made

    def note(self, what: str, value: Tensor) -> None:
        """Let the next step check that all ranks wrote the same whole tensor: see [Note: written by hand]."""
        if self.gradients.has_peers:
            self.optimizer.reducer.written.note(what, self.member, value)

    def note_slice(self, what: str, value: Tensor) -> None:
        """Let the next step check that the replicas of this rank's fragment were written equally."""
        if self.group.replica_comm.size > 1:
            self.optimizer.reducer.written.note_slice(what, self.member, value)

    def check_fragment(self, value: Tensor) -> None:
        """Raise ValueError unless the tensor has as many elements as this rank owns of the parameter."""
        numel = 0 if self.piece is None else self.piece.master.numel()
        if value.numel() != numel:
            raise ValueError(
                f"this rank owns {numel} elements of {self.member.name}, got a tensor of {value.numel()}. "
                "Pass this rank's fragment, or the whole tensor to the `full` function on every rank"
            )

    def cut(self, value: Tensor) -> Tensor:
        """Return this rank's elements of a whole tensor; raise ValueError for another shape."""
        if value.shape != self.member.param.shape:
            raise ValueError(
                f"{self.member.name} has shape {tuple(self.member.param.shape)}, got {tuple(value.shape)}"
            )
        value = self.part(value)
        start, stop = (0, 0) if self.piece is None else self.piece.param_range
        return value.detach().reshape(-1)[start:stop]


def _find(
    param: Parameter, alone: str = "", needs_state: bool = True, reads: bool = False
) -> ParameterPlace | None:
    """Find a parameter, with all writes of user code adopted; None if the engine does not train it.

    `alone`: the name of a call that a rank may make alone. `needs_state`: the call uses state or masters.
    `reads`: it only copies values, which also works while they are offloaded.
    """
    optimizer: ZeroOptimizer | None = owner_of(param)
    if optimizer is None:
        raise ValueError(
            f"the parameter of shape {tuple(param.shape)} belongs to no zero_full engine. Pass a parameter "
            "of the model that initialize got"
        )
    if optimizer.states_offloaded and not reads:
        raise RuntimeError(OFFLOADED)
    if alone:
        optimizer.check_no_pending_update(alone)
    elif needs_state:
        optimizer.finish_update()
    group, member = optimizer.sharded.places.get(param, (None, None))
    if not isinstance(group, TrainedGroup) or member is None:
        return None
    if not optimizer.states_offloaded:
        if not group.parameters.released_at_rest:
            group.parameters.adopt_assigned()
        group.master.follow_parameters()
    return ParameterPlace(optimizer, group, member)


def _find_together(
    param: Parameter, call: str, needs_state: bool = True, reads: bool = False
) -> ParameterPlace | None:
    """Wait until every rank has made this call, which communicates, then find the parameter."""
    owner = owner_of(param)
    _, member = owner.sharded.places.get(param, (None, None)) if owner is not None else (None, None)
    if owner is not None and member is not None:
        owner.on_every_rank(f"{call} of {member.name}", model_parallel=False)
    return _find(param, needs_state=needs_state, reads=reads)


def _place(param: Parameter, alone: str = "", needs_state: bool = True) -> ParameterPlace:
    """Find a parameter to write to; raise ValueError if the engine does not train it."""
    place = _find(param, alone, needs_state)
    if place is None:
        raise ValueError(
            f"the parameter of shape {tuple(param.shape)} is not trained, so it has values only. Write them "
            "inside zero_full.GatheredParameters(parameter, modifier_rank=0)"
        )
    return place


def safe_get_full_fp32_param(param: Parameter) -> Tensor | None:
    """Return the master weights of the whole parameter. Every rank must call this."""
    place = _find_together(param, "safe_get_full_fp32_param", reads=True)
    if place is None:
        return None
    place.optimizer.check_ranks_equal("safe_get_full_fp32_param")
    mine = place.piece.master if place.piece is not None else None
    return place.shown(place.assemble(mine, place.master.values.dtype))


def safe_get_full_grad(param: Parameter) -> Tensor | None:
    """Return the averaged gradient, unscaled, between backward and `step`, else None.

    Every rank must call this.
    """
    place = _find_together(param, "safe_get_full_grad", needs_state=False)
    if place is None:
        return None
    place.optimizer.reducer.reduce_late_between_passes()
    if not place.is_averaged():
        own = place.own_gradient()
        return None if own is None else place.shown(own)
    mine = place.gradient()
    if mine is None:
        return None
    whole = place.assemble(mine, place.gradients.accumulate)
    if not place.optimizer.steppers.averages():
        place.group.replica_comm.sum_numbers(whole, f"gradient of {place.member.name}").div_(
            place.group.replica_comm.size
        )
    return place.shown(whole)


def safe_get_full_optimizer_state(param: Parameter, key: str) -> Tensor | None:
    """Return an entry of the optimizer's state, such as "exp_avg", as a whole. Every rank must call this."""
    place = _find_together(param, f"safe_get_full_optimizer_state of {key!r}", reads=True)
    if place is None:
        return None
    place.optimizer.check_ranks_equal("safe_get_full_optimizer_state")
    if _is_cut(place, key):
        return _from_parts(place, key)
    state = place.state
    mine = _as_tensor(state.get(key))
    # A rank that owns nothing of the parameter learns dtype and shape from the others.
    what = f"state {key} of {place.member.name}"
    known = _known(place, (tuple(state), _describe(mine)), what)
    keys, kind = next(((keys, kind) for keys, kind in known if keys), ((), None))
    if not keys:
        return None
    if kind is None:  # the same list on all ranks, so all raise
        raise _no_such_state(place, key, keys)
    return place.shown(place.whole(kind, mine))


def consolidated_state_dict(optimizer: ZeroOptimizer) -> dict[str, Any]:
    """Return the state_dict that a torch optimizer of the whole model would have, with tensors on the CPU.

    An optimizer of the wrapped class with plain parameters in the same groups can load it. State of a DTensor
    comes as a whole tensor. Of a pipeline, the model is that of this rank's stages. Every rank must call
    this.
    """
    optimizer.on_every_rank("consolidated_state_dict")
    optimizer.check_ranks_equal("consolidated_state_dict")
    stepper = optimizer.contents.stepper
    if stepper.whole_entries or stepper.whole_rule is not None or stepper.own_tensors():
        raise RuntimeError(
            f"{type(optimizer.base).__name__} has state that is not elementwise, which a state_dict of torch "
            "cannot hold. Use save_checkpoint"
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
    """Assemble all state of a parameter. Every rank must call this."""
    own = {key: _as_tensor(value) for key, value in place.state.items()}
    mine = {key: _describe(value) for key, value in own.items()}
    known = _known(place, mine, f"state of {place.member.name}")
    kinds = next((each for each in known if each), mine)
    whole = dict[str, Tensor]()
    for key, kind in kinds.items():
        if kind is not None and not _is_cut(place, key):
            whole[key] = whole_of(place.shown(place.whole(kind, own.get(key)))).cpu()
    for key in place.optimizer.contents.stepper.cut_entries:
        if (parts := _from_parts(place, key)) is not None:
            whole[key] = parts.cpu()
    return whole


def _known(place: ParameterPlace, mine: Any, what: str) -> list[Any]:
    """Gather `mine` from all ranks that have a part of the parameter. They must call this."""
    known = place.group.shard_comm.gather_objects(mine, what)
    tensor = place.optimizer.communicators.tensor
    if tensor is not None and place.group.kind.is_dtensor:  # this rank's part of a DTensor may be empty
        known += [each for some in tensor.gather_objects(known, what) for each in some]
    return known


def _is_cut(place: ParameterPlace, key: str) -> bool:
    """Return whether the optimizer shards this entry by itself; equal on all ranks."""
    return key in place.optimizer.contents.stepper.cut_entries


def _from_parts(place: ParameterPlace, key: str) -> Tensor | None:
    """Assemble an entry that the optimizer shards by itself; None before the first step."""
    piece, stepper = place.piece, place.optimizer.contents.stepper
    if piece is None or not place.optimizer.base.state.get(piece.master):
        return None
    whole = torch.zeros(piece.master.numel(), dtype=torch.float32, device=piece.master.device)
    for of, entry, start, values in stepper.cut_state():
        if of is piece and entry == key:
            whole[start : start + values.numel()] = values
    return place.group.replica_comm.sum_numbers(whole, f"parts of {place.member.name}").view(piece.shape)


def _describe(mine: Tensor | None) -> EntryKind | None:
    """Describe this rank's part for ranks that own none of the parameter."""
    return None if mine is None else (mine.dim(), mine.dtype, 0.0 if mine.dim() else mine.item())


def _as_tensor(value: Any) -> Tensor | None:
    return value if value is None or isinstance(value, Tensor) else torch.tensor(float(value))


def _no_such_state(place: ParameterPlace, key: str, keys: Iterable[str]) -> KeyError:
    return KeyError(f"the optimizer has no state {key!r} for {place.member.name}, only {', '.join(keys)}")


def _state(place: ParameterPlace, key: str) -> Tensor | None:
    """Return this rank's elements of a state entry that the optimizer does not shard by itself."""
    if _is_cut(place, key):
        raise RuntimeError(
            f"{key} of {place.member.name} is sharded by {type(place.optimizer.base).__name__} itself, which "
            "also keeps its roots on every rank. Read it by safe_get_full_optimizer_state on every rank. To "
            "write it, use stage 0"
        )
    state = place.state
    value = state.get(key)
    if state and value is None:
        raise _no_such_state(place, key, state)
    return _as_tensor(value)


def safe_set_full_fp32_param(param: Parameter, value: Tensor) -> None:
    """Set the values of the whole parameter and its master. Every rank must pass the same tensor."""
    place = _place(param)
    place.optimizer.check_ranks_equal("safe_set_full_fp32_param")
    place.cut(value)  # checks its shape
    place.note(MASTER, place.part(value))
    with torch.no_grad():
        place.master.fill(place.member, place.part(value))


def safe_set_full_grad(param: Parameter, value: Tensor) -> None:
    """Set the averaged, unscaled gradient of a parameter. Every rank must pass the same tensor.

    It replaces the gradient of backward, and may also be set without any backward pass.
    """
    place = _place(param, needs_state=False)
    mine, reducer = place.cut(value), place.optimizer.reducer
    if reducer.unreduced or place.is_averaged():
        _set_grad(place, mine)
    else:
        reducer.give(place.member, place.part(value).detach() * place.optimizer.reducer.state.scale)
    place.note(GRADIENT, place.part(value))


def safe_set_full_optimizer_state(param: Parameter, value: Tensor, key: str) -> None:
    """Replace an entry of the optimizer's state. Every rank must pass the same whole tensor."""
    place = _place(param)
    place.optimizer.check_ranks_equal("safe_set_full_optimizer_state")
    _set_state(place, place.cut(value), key)
    place.note(key, place.part(value))


def safe_update_full_grad_vectorized(
    param_list: Iterable[Parameter], update_func: Callable[[Tensor | None, Parameter], Tensor]
) -> None:
    """Replace averaged gradients, one by one, by the results of `update_func(gradient, parameter)`.

    Every rank must call this. Parameters that are not trained are skipped.
    """
    for param in param_list:
        if _find(param, needs_state=False) is not None and param.requires_grad:
            safe_set_full_grad(param, update_func(safe_get_full_grad(param), param))


def safe_get_local_fp32_param(param: Parameter) -> Tensor | None:
    """Return this rank's elements of the master weights, a view: in-place writes take effect."""
    place = _find(param, alone="safe_get_local_fp32_param")
    if place is None:
        return None
    return place.master.values[:0] if place.piece is None else place.master.show(place.piece.master)


def safe_get_local_grad(param: Parameter) -> Tensor | None:
    """Return this rank's elements of the averaged gradient, unscaled; None except from backward to `step`."""
    place = _find(param, needs_state=False)
    if place is None:
        return None
    own = None if place.is_averaged() else place.own_gradient()
    return place.gradient() if own is None else place.cut(own)


def safe_get_local_optimizer_state(param: Parameter, key: str) -> Tensor | None:
    """Return this rank's elements of an entry of the optimizer's state, as a view."""
    place = _find(param, alone="safe_get_local_optimizer_state")
    if place is None:
        return None
    value = _state(place, key)
    return None if value is None else place.master.show(value) if value.dim() else value


def safe_set_local_fp32_param(param: Parameter, value: Tensor) -> None:
    """Set this rank's elements of a parameter and its master. Other ranks see them after the next step.

    With `zero_hpz_partition_size`, this rank may also see them only then, if forward has left a node copy.
    """
    place = _place(param, alone="safe_set_local_fp32_param")
    place.optimizer.check_ranks_equal("safe_set_local_fp32_param")
    place.check_fragment(value)
    if place.piece is not None:
        place.piece.master.detach().reshape(-1).copy_(value.reshape(-1))
        place.master.copy_master()
        place.note_slice(MASTER, value)


def safe_set_local_grad(param: Parameter, value: Tensor) -> None:
    """Replace this rank's elements of the averaged gradient between backward and `step`."""
    place = _place(param, needs_state=False)
    place.check_fragment(value)
    _set_grad(place, value)
    if place.optimizer.steppers.averages():  # else it is this rank's own gradient
        place.note_slice(GRADIENT, value)


def _set_grad(place: ParameterPlace, value: Tensor) -> None:
    """Write this rank's elements of an averaged gradient, with the loss scale that it carries."""
    if not place.is_averaged():  # equal on all ranks, including those that own none of it
        raise RuntimeError(
            f"{place.member.name} has no averaged gradient now. Set it after the last backward of a step "
            "and before `step`. Without a backward, use safe_set_full_grad on every rank"
        )
    place.optimizer.reducer.used.add(place.member)
    gradient = place.gradients.gradient_of(place.member)
    if place.piece is None or gradient is None:
        return
    gradient.detach().copy_((value * place.optimizer.reducer.state.scale).view(gradient.shape))


def safe_set_local_optimizer_state(param: Parameter, value: Tensor, key: str) -> None:
    """Replace this rank's elements of an entry of the optimizer's state."""
    place = _place(param, alone="safe_set_local_optimizer_state")
    place.optimizer.check_ranks_equal("safe_set_local_optimizer_state")
    _set_state(place, value, key)
    if place.piece is not None:
        place.note_slice(key, value)


def _set_state(place: ParameterPlace, value: Tensor, key: str) -> None:
    """Write this rank's elements of an entry of the optimizer's state, in place."""
    current = _state(place, key)
    if place.piece is None:
        return
    if current is None:
        raise KeyError(
            f"{place.member.name} has no optimizer state before the first step. Call this after it"
        )
    if current.dim():
        place.check_fragment(value)
    current.copy_(value.view(current.shape))
