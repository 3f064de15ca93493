"""Torch functions that need special handling on recorded tensors, which have no values yet."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero_full._compat import instance_of, without_functions
from zero_full.construct.generators import CPU
from zero_full.construct.recorded_tensor import (
    NEEDS_MEMORY,
    ON_BOTH,
    UNRECORDED_ASSIGNMENT,
    Recorded,
    RecorderProtocol,
    materialize,
    new_recorded,
    raise_no_values,
    sync_shell,
)
from zero_full.construct.recording import META, is_recorded
from zero_full.nested import mapped, tensors_in

# Functions of nn.init whose draws depend on values or cannot be observed. They are recorded as one operation.
INIT_FUNCTIONS: dict[str, Any] = {"trunc_normal": nn.init.trunc_normal_, "sparse_": nn.init.sparse_}
RESHAPING = {
    getattr(Tensor, f"{name}_")
    for name in (*("as_strided", "resize", "resize_as", "set", "squeeze", "unsqueeze"), "t", "transpose")
} | {Tensor.swapaxes_, Tensor.swapdims_}
Shells = dict[int, Recorded]  # recorded tensors by the identity of their twins


@dataclass(frozen=True)
class FunctionCall:
    """A torch function and its arguments, with twins in place of recorded tensors."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shells: Shells
    recorder: RecorderProtocol
    constructs: bool  # during construction; False: a later change

    def run(self) -> Any:
        """Call the function or its replacement."""
        special = (SPECIAL if self.shells else FROM_DATA).get(self.func)
        return special(self) if special else self.func(*self.args, **self.kwargs)

    def to_recorded(self, out: Any) -> Any:
        """Return the result with recorded tensors in place of twins. (torch functions are disabled.)"""
        if self.func in RESHAPING:
            for shell in self.shells.values():
                sync_shell(shell)
        return to_recorded(self.recorder, out, self.shells)


def to_twins(recorder: RecorderProtocol, given: Any, shells: Shells) -> Any:
    """Replace recorded tensors in a nested structure by their twins, and add them to `shells`."""

    def twin(leaf: Any) -> Any:
        if not isinstance(leaf, Recorded):
            return leaf
        behind = leaf._record
        if behind.recorder is not recorder:
            raise RuntimeError(
                f"{behind.name} is used with a tensor that was constructed in another zero_full.Init. "
                "Construct both in one, or initialize both models first."
            )
        shells[id(behind.twin)] = leaf
        return behind.twin

    return mapped(twin, given)


def to_recorded(recorder: RecorderProtocol, out: Any, shells: Shells) -> Any:
    """Replace twins in a nested structure by their recorded tensors."""

    def shell(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_meta:
            return leaf
        return shells[id(leaf)] if id(leaf) in shells else new_recorded(recorder, leaf)

    return mapped(shell, out)


def _is_meta(call: FunctionCall) -> bool:
    """Return the result of `tensor.is_meta`: False, as callers skip initialization on the meta device.

    Some functions of nn.init are recorded as one operation here, with the arguments in the caller's frame.
    """
    frame = inspect.currentframe()
    while frame and frame.f_globals.get("__name__", "").startswith("zero_full.construct."):
        frame = frame.f_back
    if not frame or frame.f_globals is not vars(nn.init):
        return False
    function = next((f for name, f in INIT_FUNCTIONS.items() if name in frame.f_code.co_name), None)
    if function is None or (function is nn.init.sparse_ and frame.f_locals["generator"] is not None):
        return False
    names = inspect.signature(function).parameters
    call.recorder.recording.add_init_function(
        function, {name: to_twins(call.recorder, frame.f_locals[name], {}) for name in names}
    )
    return True


def _needs_memory(call: FunctionCall) -> Any:
    raise_no_values(next(iter(call.shells.values())), f"Tensor.{call.func.__name__}")


def _on_both(call: FunctionCall) -> Any:
    with without_functions():
        call.func(call.shells[id(call.args[0])], *call.args[1:], **call.kwargs)
        return call.func(*call.args, **call.kwargs)


def _detach(call: FunctionCall) -> Any:
    """Detach without recording, as every parameter is made by this."""
    return instance_of(Tensor, call.args[0])


def _index(call: FunctionCall) -> Any:
    tensor, index, *rest = call.args
    return call.func(tensor, _real_index(index) if is_recorded(tensor) else index, *rest, **call.kwargs)


def _real_index(index: Any) -> Any:
    """Convert lists and arrays in an index to real tensors, so that their values are kept."""
    if isinstance(index, tuple):
        return tuple(_real_index(part) for part in index)
    is_numbers = isinstance(index, list) or (hasattr(index, "__array__") and not isinstance(index, Tensor))
    return torch.as_tensor(index, device=CPU) if is_numbers else index


# Values ----------------------------------------------------------------------------------------------


def _from_data(call: FunctionCall) -> Any:
    """Make a recorded tensor with this data, which the meta device would lose.

    A tensor without elements stays on the CPU. transformers checks `torch.tensor([]).device`, and would
    initialize nothing on the meta device.
    """
    func, args, kwargs = call.func, call.args, call.kwargs
    if func == Tensor.new_tensor:
        func, args, kwargs = torch.tensor, args[1:], {"dtype": args[0].dtype, **kwargs}
    place = torch.device(kwargs.get("device") or META)
    if place != META or any(map(is_recorded, tensors_in((args, kwargs)))):
        return func(*args, **kwargs)
    real: Tensor = func(*args, **{**kwargs, "device": CPU})
    if real.numel() == 0 and not kwargs.get("device"):
        return real
    return real.detach().to(META).requires_grad_(real.requires_grad)


def _set_data(call: FunctionCall) -> None:
    """Assign `target.data = source`, where at least one of them is recorded.

    (If the target is not recorded, torch reports the assignment only inside `Init`. `initialize` detects
    later ones.)
    """
    to_twins, source = call.args
    target, recording = call.shells.get(id(to_twins)), call.recorder.recording
    if target is None:
        raise RuntimeError(f"{next(iter(call.shells.values()))._record.name}: {UNRECORDED_ASSIGNMENT}")
    if is_recorded(source):
        if not call.constructs and recording.is_empty(source):
            raise RuntimeError(
                f"{target._record.name} would be left without values, as by to_empty. Remove to_empty: "
                "zero_full.initialize moves the model. To set values, write them before this assignment."
            )
        call.func(to_twins, source)
        with without_functions():
            sync_shell(target)
    else:
        recording.check_not_from_file("an assignment", [to_twins])
        materialize(target, source)


# Devices ---------------------------------------------------------------------------------------------


def _to(call: FunctionCall) -> Any:
    """Run `to`, `cpu` or `cuda` without moving the tensor: initialize places the model. The dtype may change.

    A move to the CPU makes no copy, as usual. A move to another device makes a copy.
    """
    tensor, *rest = call.args
    if not is_recorded(tensor):
        return call.func(*call.args, **call.kwargs)
    options = {key: arg for key, arg in call.kwargs.items() if key not in ("non_blocking", "device")}
    place: Any = call.kwargs.get("device")
    if call.func in (Tensor.cpu, Tensor.cuda):
        place = call.func.__name__
    elif rest and isinstance(rest[0], Tensor):
        place, options = rest[0].device, {"dtype": rest[0].dtype, **options, **_named(rest[1:])}
    elif rest and not isinstance(rest[0], torch.dtype):
        place, options = rest[0], options | _named(rest[2:]) | ({"dtype": rest[1]} if rest[1:] else {})
    elif rest:
        options |= {"dtype": rest[0], **_named(rest[1:])}
    kind = "cpu" if place is None else torch.device(place).type
    if kind == "meta" and not call.constructs:
        raise_no_values(call.shells[id(tensor)], "to('meta')")
    dtype = options.pop("dtype", None) or tensor.dtype
    copy = options.pop("copy", False) or kind not in ("cpu", "meta")
    return tensor.to(dtype, copy=copy, **options)


def _named(rest: list[Any]) -> dict[str, Any]:
    """Return by name the arguments that follow the first one in `to(dtype, non_blocking, copy)`."""
    return {"copy": rest[1]} if rest[1:] else {}


def _type(call: FunctionCall) -> Any:
    """Return `tensor.type()` of the shell: for the twin it would be torch.meta.FloatTensor."""
    if len(call.args) > 1 or call.kwargs:
        return call.func(*call.args, **call.kwargs)
    with without_functions():
        return call.func(call.shells[id(call.args[0])])


SPECIAL: dict[Any, Callable[[FunctionCall], Any]] = {
    **dict.fromkeys(NEEDS_MEMORY, _needs_memory),
    **dict.fromkeys(ON_BOTH, _on_both),
    **dict.fromkeys((Tensor.__getitem__, Tensor.__setitem__), _index),
    **dict.fromkeys((Tensor.to, Tensor.cpu, Tensor.cuda), _to),
    **dict.fromkeys((Tensor.detach, torch.detach), _detach),
    Tensor.is_meta.__get__: _is_meta,  # type: ignore[attr-defined]
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.new_tensor: _from_data,
    Tensor.type: _type,
}
FROM_DATA = dict.fromkeys((torch.tensor, torch.as_tensor, torch.asarray), _from_data)
