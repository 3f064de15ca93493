"""Recording sessions: periods in which a thread's operations are recorded. See [Note: recording and replay].

A session lasts as long as an `Init` context or, after that, one operation on a recorded tensor. While a
session *rests*, torch works as usual.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zero_full._compat import default_device_context, without_functions, without_overrides
from zero_full.construct.deferred import META, Recording
from zero_full.construct.edits import gathered
from zero_full.construct.functions import FunctionCall, Shells, bare
from zero_full.construct.generators import alone_with_torchs_generator
from zero_full.construct.operations import Operations, no_values
from zero_full.construct.recorded import ABOUT_VALUES, DEVICE, OF_THE_SHELL, Recorded
from zero_full.errors import NoValuesError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Recorder:
    """Owner of a recording, which starts sessions to continue it."""

    def __init__(self) -> None:
        self.recording: Recording = Recording()
        self.is_played = False

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run and record a torch function on a recorded tensor."""
        session = here.session
        if session is not None and session.is_on and session.recorder is self:
            return session.do(func, args, kwargs)  # called by torch's own code, inside a session
        with Session(self):
            return func(*args, **kwargs)

    def gathered(self, tensors: Sequence[Tensor], rank: int | None) -> AbstractContextManager[None]:
        """Return a context in which these tensors have values."""
        return gathered(tensors, rank, resting)

    def name_of(self, twin: Tensor) -> str:
        """Return a tensor's name in its model, for error messages."""
        return self.recording.name_of(twin)

    def has_made(self, model: nn.Module) -> bool:
        """Return whether some modules of this model were constructed in this recording."""
        return any(module in self.recording.names.modules for module in model.modules())

    def has_made_more(self, model: nn.Module) -> bool:
        """Return whether this recording has constructed modules outside of this model."""
        inside = set(map(id, model.modules()))
        return any(id(module) not in inside for module in self.recording.names.modules)

    def has_played(self) -> None:
        """Mark the recording as replayed, so that later constructions start a new one."""
        self.is_played = True
        self.recording.names.let_go()


class Session:
    """A period in which a thread's operations are recorded. Without a recorder it starts a new recording."""

    def __init__(self, recorder: Recorder | None, constructs: bool = False) -> None:
        self._recorder, self.constructs = recorder, constructs or recorder is None
        self.is_on = self.is_over = False
        self.place = default_device_context(META)
        self.at_the_end: Callable[[], None] = lambda: None

    def __enter__(self) -> "Session":
        """Start recording."""
        self.outer = here.session
        self.usual_device = torch.get_default_device() if self.outer is None else self.outer.place.device
        if self.constructs and self.usual_device == META:
            raise RuntimeError("zero_full.Init inside torch.device('meta') records nothing: leave that out")
        self.modes = ExitStack()
        self._alone()
        if self._recorder is None:
            self._recorder = Recorder()
        else:
            self.recorder.recording.streams.resume()
        self.operations = Operations(self.recorder)
        for mode in (self.place, _Functions(self), self.operations):
            self.modes.enter_context(mode)
        here.session = self
        self._switch(True)
        return self

    def __exit__(self, *failure: Any) -> None:
        """End the session."""
        here.session = self.outer
        self.modes.close()
        self.end()

    def end(self) -> None:
        """Stop recording permanently."""
        if self.is_on:
            self.rest()
        if not self.is_over:
            self.is_over = True
            self.at_the_end()

    def go_on(self) -> None:
        """Resume recording after `rest`."""
        self._alone()
        self.recorder.recording.streams.resume()
        self._switch(True)

    def rest(self) -> None:
        """Pause recording, so that torch works as usual."""
        self._switch(False)
        self.recorder.recording.streams.pause()
        self.alone.__exit__(None, None, None)

    def _alone(self) -> None:
        self.alone = alone_with_torchs_generator()
        self.alone.__enter__()

    def _switch(self, on: bool) -> None:
        self.recorder.recording.is_construction = self.constructs
        self.place.device = META if on else self.usual_device
        self.is_on = self.operations.is_on = on

    @property
    def recorder(self) -> Recorder:
        """The recorder of this session."""
        assert self._recorder is not None
        return self._recorder

    def do(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a torch function on the twins of recorded tensors."""
        first = args[0] if args else None
        if isinstance(first, Recorded):
            if func in ABOUT_VALUES or func in DEVICE:
                return func(first._record.twin, *args[1:], **kwargs)
            if func in OF_THE_SHELL:
                with without_overrides():
                    return func(*args, **kwargs)
        shells: Shells = {}
        args = tuple([bare(self.recorder, arg, shells) for arg in args])
        kwargs = {key: bare(self.recorder, arg, shells) for key, arg in kwargs.items()}
        call = FunctionCall(func, args, kwargs, shells, self.recorder, self.constructs)
        self.operations.depth += 1
        try:
            out = call.run()
        except RuntimeError as error:
            if "meta" not in str(error) or not shells or isinstance(error, NoValuesError):
                raise
            raise no_values(self.recorder.recording, f"{func.__name__} ({error})", (args, kwargs)) from error
        finally:
            self.operations.depth -= 1
        with without_functions():
            return call.dressed(out)


class _Functions(TorchFunctionMode):
    """Torch function mode that passes every call to the session."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self.session.do(func, args, kwargs) if self.session.is_on else func(*args, **kwargs)


class _Here(threading.local):
    session: Session | None = None  # session of this thread
    latest: "weakref.ref[Recorder] | None" = None
    rests = 0  # number of `resting` contexts

    def __init__(self) -> None:
        self.undo: list[Callable[[], None]] = []  # functions that undo the changes by `initialize`


here = _Here()  # thread-local, as torch's callbacks pass no context; ranks may be threads


def latest() -> Recorder | None:
    """Return this thread's last recorder if its model is not initialized yet, else None."""
    found = here.latest() if here.latest is not None else None
    return None if found is None or found.is_played else found


@contextmanager
def recorder() -> Iterator[Recording]:
    """Record the construction of models inside the context. See [Note: recording and replay].

    With an explicit `device="cpu"`, tensors of known values such as `torch.zeros` stay real. Uninitialized
    and random tensors are recorded nevertheless. torch's default generator advances at replay, not here.
    """
    with Session(None) as session:
        yield session.recorder.recording


@contextmanager
def resting() -> Iterator[None]:
    """Pause recording in this thread. If a model is initialized inside the context, the session ends."""
    session = here.session if here.session is not None and here.session.is_on else None
    here.rests += 1
    try:
        if session is not None:
            session.rest()
        yield
    finally:
        here.rests -= 1
        if session is not None and session.recorder.is_played:
            session.end()
        elif session is not None:
            session.go_on()


def outside_recording(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorator: run a function without recording. If it raises, undo its changes to recorded models."""

    @wraps(function)
    def outside(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        before, here.undo = here.undo, []
        try:
            with resting():
                return function(*args, **kwargs)
        except BaseException:
            for undo in here.undo:
                undo()
            raise
        finally:
            here.undo = before

    return outside
