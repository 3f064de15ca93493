"""Recording sessions: periods in which a thread's operations are recorded. See [Note: recording and replay].

A session lasts as long as an `Init` context or, after that, one operation on a recorded tensor. While a
session is *paused*, torch works as usual.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zero_full._compat import TorchDispatchMode, default_device_context, without_functions, without_overrides
from zero_full.construct.early_gather import gathered
from zero_full.construct.generators import CPU, default_generator_lock
from zero_full.construct.recorded_tensor import DEVICE, ON_SHELL, SHAPE_AND_DTYPE, Recorded
from zero_full.construct.recording import META, Recording, draws_numbers, generator_in, is_recorded, written
from zero_full.construct.torch_functions import FunctionCall, Shells, to_recorded, to_twins
from zero_full.errors import NoValuesError
from zero_full.nested import mapped, tensors_in

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Recorder:
    """Owner of a recording, which starts sessions to continue it."""

    def __init__(self) -> None:
        self.recording: Recording = Recording()
        self.is_replayed = False

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run and record a torch function on a recorded tensor."""
        session = local.session
        if session is not None and session.is_on and session.recorder is self:
            return session.do(func, args, kwargs)  # called by torch's own code, inside a session
        with Session(self):
            return func(*args, **kwargs)

    def gathered(self, tensors: Sequence[Tensor], rank: int | None) -> AbstractContextManager[None]:
        """Return a context in which these tensors have values."""
        return gathered(tensors, rank, paused)

    def has_constructed(self, model: nn.Module) -> bool:
        """Return whether some modules of this model were constructed in this recording."""
        return any(module in self.recording.names.modules for module in model.modules())

    def has_constructed_more(self, model: nn.Module) -> bool:
        """Return whether this recording has constructed modules outside of this model."""
        inside = set(map(id, model.modules()))
        return any(id(module) not in inside for module in self.recording.names.modules)

    def mark_replayed(self) -> None:
        """Mark the recording as replayed, so that later constructions start a new one."""
        self.is_replayed = True
        self.recording.names.release_owner()


class Session:
    """A period in which a thread's operations are recorded. Without a recorder it starts a new recording."""

    recorder: Recorder

    def __init__(self, recorder: Recorder | None, constructs: bool = False) -> None:
        self.earlier, self.constructs = recorder, constructs or recorder is None
        self.is_on = self.is_over = False
        self.place = default_device_context(META)
        self.on_end: Callable[[], None] = lambda: None

    def __enter__(self) -> "Session":
        self.outer = local.session
        self.usual_device = torch.get_default_device() if self.outer is None else self.outer.place.device
        if self.constructs and self.usual_device == META:
            raise RuntimeError(
                "zero_full.Init inside torch.device('meta') records nothing. Remove the latter."
            )
        self.modes = ExitStack()
        self._lock_generator()
        self.recorder = self.earlier or Recorder()
        if self.earlier is not None:
            self.recorder.recording.streams.resume()
        self.operations = _Operations(self.recorder)
        for mode in (self.place, _Functions(self), self.operations):
            self.modes.enter_context(mode)
        local.session = self
        self._switch(True)
        return self

    def __exit__(self, *failure: Any) -> None:
        local.session = self.outer
        self.modes.close()
        self.end()

    def end(self) -> None:
        """Stop recording permanently."""
        if self.is_on:
            self.pause()
        if not self.is_over:
            self.is_over = True
            self.on_end()

    def resume(self) -> None:
        """Resume recording after `pause`."""
        self._lock_generator()
        self.recorder.recording.streams.resume()
        self._switch(True)

    def pause(self) -> None:
        """Pause recording, so that torch works as usual."""
        self._switch(False)
        self.recorder.recording.streams.pause()
        self.generator_lock.__exit__(None, None, None)

    def _lock_generator(self) -> None:
        self.generator_lock = default_generator_lock()
        self.generator_lock.__enter__()

    def _switch(self, on: bool) -> None:
        self.recorder.recording.is_construction = self.constructs
        self.place.device = META if on else self.usual_device
        self.is_on = self.operations.is_on = on

    def do(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a torch function on the twins of recorded tensors."""
        first = args[0] if args else None
        if isinstance(first, Recorded):
            if func in SHAPE_AND_DTYPE or func in DEVICE:
                return func(first._record.twin, *args[1:], **kwargs)
            if func in ON_SHELL:
                with without_overrides():
                    return func(*args, **kwargs)
        shells: Shells = {}
        args = tuple([to_twins(self.recorder, arg, shells) for arg in args])
        kwargs = {key: to_twins(self.recorder, arg, shells) for key, arg in kwargs.items()}
        call = FunctionCall(func, args, kwargs, shells, self.recorder, self.constructs)
        self.operations.depth += 1
        try:
            out = call.run()
        except RuntimeError as error:
            if "meta" not in str(error) or not shells or isinstance(error, NoValuesError):
                raise
            what = f"{func.__name__} ({error})"
            raise _no_values_error(self.recorder.recording, what, (args, kwargs)) from error
        finally:
            self.operations.depth -= 1
        with without_functions():
            return call.to_recorded(out)


class _Operations(TorchDispatchMode):
    """Dispatch mode that records operations on meta tensors, and runs others unchanged."""

    def __init__(self, recorder: Recorder) -> None:
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
                raise NoValuesError(
                    f"{func} on a tensor with values would draw random numbers before earlier draws of the "
                    "same generator, which zero_full.Init has recorded for zero_full.initialize. Pass "
                    "another one (generator=torch.Generator()), or draw before or after zero_full.Init."
                )
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
        raise _no_values_error(recording, f"{func} into a tensor of device='cpu'", given)
    with suppress(RuntimeError):  # some operations reject a mix of real and meta tensors
        out = func(*args, **kwargs)
        if all(tensor.device == META for tensor in tensors_in(out)):
            return out  # others would return an uninitialized real tensor
    args, kwargs = mapped(lambda leaf: leaf.to(META) if isinstance(leaf, Tensor) else leaf, given)
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if isinstance(error, NotImplementedError) or "meta tensor" in str(error).lower():
            raise _no_values_error(recording, str(func), given) from error
        raise


def _no_values_error(recording: Recording, what: str, given: Any) -> NoValuesError:
    """Make the error for an operation that would read values of recorded tensors."""
    names = recording.names_of(map(recording.value_of, filter(is_recorded, tensors_in(given))))
    return NoValuesError(
        f"{what} needs values of {names}, as .item() and `if tensor` do. There are none before "
        "zero_full.initialize. After construction, do it inside zero_full.GatheredParameters, which accepts "
        "buffers as well. In a constructor, make the tensors that it reads with device='cpu'."
    )


class _Functions(TorchFunctionMode):
    """Torch function mode that passes every call to the session."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self.session.do(func, args, kwargs) if self.session.is_on else func(*args, **kwargs)


class _Local(threading.local):
    session: Session | None = None  # session of this thread
    latest: "weakref.ref[Recorder] | None" = None
    pauses = 0  # number of `paused` contexts

    def __init__(self) -> None:
        self.undo: list[Callable[[], None]] = []  # functions that undo the changes by `initialize`


local = _Local()  # thread-local, as torch's callbacks pass no context; ranks may be threads


def latest() -> Recorder | None:
    """Return this thread's last recorder if its model is not initialized yet, else None."""
    found = local.latest() if local.latest is not None else None
    return None if found is None or found.is_replayed else found


@contextmanager
def recorder() -> Iterator[Recording]:
    """Record the construction of models inside the context. See [Note: recording and replay].

    With an explicit `device="cpu"`, tensors of known values such as `torch.zeros` stay real. Uninitialized
    and random tensors are recorded nevertheless. torch's default generator advances at replay, not here.
    """
    with Session(None) as session:
        yield session.recorder.recording


@contextmanager
def paused() -> Iterator[None]:
    """Pause recording in this thread. If a model is initialized inside the context, the session ends."""
    session = local.session if local.session is not None and local.session.is_on else None
    local.pauses += 1
    try:
        if session is not None:
            session.pause()
        yield
    finally:
        local.pauses -= 1
        if session is not None and session.recorder.is_replayed:
            session.end()
        elif session is not None:
            session.resume()


def outside_recording(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorator: run a function without recording. If it raises, undo its changes to recorded models."""

    @wraps(function)
    def outside(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        before, local.undo = local.undo, []
        try:
            with paused():
                return function(*args, **kwargs)
        except BaseException:
            for undo in local.undo:
                undo()
            raise
        finally:
            local.undo = before

    return outside
