"""Dispatch mode that runs operations on recorded tensors on the meta device, and records them."""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from zero_full._compat import TorchDispatchMode, without_functions
from zero_full.construct.generators import CPU
from zero_full.construct.recorded_tensor import RecorderProtocol
from zero_full.construct.recording import META, Recording, draws_numbers, generator_in, is_recorded, written
from zero_full.construct.torch_functions import Shells, to_recorded, to_twins
from zero_full.errors import NoValuesError
from zero_full.nested import mapped, tensors_in


class Operations(TorchDispatchMode):
    """Dispatch mode that records operations on meta tensors, and runs others unchanged."""

    def __init__(self, recorder: RecorderProtocol) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder, self.recording = recorder, recorder.recording
        self.is_on = True
        self.depth = 0  # number of torch functions in progress

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.is_on:
            return func(*args, **kwargs)
        if self.depth:
            return self._record(func, args, kwargs)
        with without_functions():  # a constructor such as `torch.Tensor(2, 3)`, not a torch function
            shells: Shells = {}
            args, kwargs = to_twins(self.recorder, args, shells), to_twins(self.recorder, kwargs, shells)
            return to_recorded(self.recorder, self._record(func, args, kwargs), shells)

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = list(tensors_in((args, kwargs)))
        recorded = [tensor for tensor in tensors if tensor.device == META]
        device = kwargs.get("device")
        if device is not None and _makes_recorded(func, args, tensors, recorded, device):
            kwargs = {**kwargs, "device": META}
        elif not recorded and device != META:
            if draws_numbers(func) and self.recording.streams.has_pending_draws(generator_in((args, kwargs))):
                raise no_values_error(self.recording, f"{func} on a tensor of device='cpu'", ())
            return func(*args, **kwargs)
        out = _on_meta(self.recording, func, args, kwargs)
        if torch.Tag.inplace_view not in func.tags:  # in-place views change the shape, not the values
            self.recording.add(func, args, kwargs, out, tensors)
        return out


def _makes_recorded(
    func: Any, args: Any, tensors: list[Tensor], recorded: list[Tensor], device: torch.device
) -> bool:
    """Return whether an operation with an explicit device still makes a recorded tensor.

    These are uninitialized tensors (`torch.Tensor(2, 3)`), random ones, and ones made like a recorded tensor.
    """
    if tensors:
        return bool(recorded) and func.name() != "aten::_to_copy"
    made_empty = func.name() == "aten::empty.memory_format" and 0 not in args[0]
    return device == CPU and (draws_numbers(func) or made_empty)


def _on_meta(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the meta device, to get the shapes of its results."""
    given = args, kwargs
    if any(tensor.device != META for tensor, _ in written(func, args, kwargs)):
        raise no_values_error(recording, f"{func} into a tensor of device='cpu'", given)
    with suppress(RuntimeError):  # some operations reject a mix of real and meta tensors
        out = func(*args, **kwargs)
        if all(tensor.device == META for tensor in tensors_in(out)):
            return out  # others would return an uninitialized real tensor
    args, kwargs = mapped(lambda leaf: leaf.to(META) if isinstance(leaf, Tensor) else leaf, given)
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if isinstance(error, NotImplementedError) or "meta tensor" in str(error).lower():
            raise no_values_error(recording, str(func), given) from error
        raise


def no_values_error(recording: Recording, what: str, given: Any) -> NoValuesError:
    """Make the error for an operation that would read values of recorded tensors."""
    names = recording.names_of(map(recording.value_of, filter(is_recorded, tensors_in(given))))
    return NoValuesError(
        f"{what} needs values of {names}, as .item() and `if tensor` do. There are none before "
        "zero_full.initialize. After construction, do it inside zero_full.GatheredParameters, which accepts "
        "buffers as well. In a constructor, make the tensors that it reads with device='cpu'."
    )
