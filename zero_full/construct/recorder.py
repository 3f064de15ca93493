"""Sessions: the times in which a thread's operations are recorded. See [Note: recording and replay].

A session lasts as long as `Init`, or as one operation on a recorded tensor afterwards. While it *rests*,
torch works as usual.
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
    """A recording, and how it goes on."""

    def __init__(self) -> None:
        self.recording: Recording = Recording()
        self.is_played = False

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record what is done to a tensor."""
        session = here.session
        if session is not None and session.is_on and session.recorder is self:
            return session.do(func, args, kwargs)  # torch's own code does it
        with Session(self):
            return func(*args, **kwargs)

    def gathered(self, tensors: Sequence[Tensor], rank: int | None) -> AbstractContextManager[None]:
        """A context in which these tensors have values."""
        return gathered(tensors, rank, resting)

    def name_of(self, twin: Tensor) -> str:
        """What a tensor is called in its model, for an error's text."""
        return self.recording.name_of(twin)

    def has_made(self, model: nn.Module) -> bool:
        """Whether some of its modules were constructed here."""
        return any(module in self.recording.names.modules for module in model.modules())

    def has_made_more(self, model: nn.Module) -> bool:
        """Whether there are modules that are not in this model."""
        inside = set(map(id, model.modules()))
        return any(id(module) not in inside for module in self.recording.names.modules)

    def has_played(self) -> None:
        """Note that a model has got its values: what is constructed later belongs to another recording."""
        self.is_played = True
        self.recording.names.let_go()


class Session:
    """See the module's docstring. Without a recorder it begins a recording."""

    def __init__(self, recorder: Recorder | None, constructs: bool = False) -> None:
        self._recorder, self.constructs = recorder, constructs or recorder is None
        self.is_on = self.is_over = False
        self.place = default_device_context(META)
        self.at_the_end: Callable[[], None] = lambda: None

    def __enter__(self) -> "Session":
        """Begin to record."""
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
        """Stop recording for good."""
        if self.is_on:
            self.rest()
        if not self.is_over:
            self.is_over = True
            self.at_the_end()

    def go_on(self) -> None:
        """Record again after a rest."""
        self._alone()
        self.recorder.recording.streams.resume()
        self._switch(True)

    def rest(self) -> None:
        """Let torch work as usual."""
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
        """The recorder whose session this is."""
        assert self._recorder is not None
        return self._recorder

    def do(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of torch on the twins of recorded tensors."""
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
    """Hands every call of a torch function to the session."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self.session.do(func, args, kwargs) if self.session.is_on else func(*args, **kwargs)


class _Here(threading.local):
    session: Session | None = None  # of this thread
    latest: "weakref.ref[Recorder] | None" = None
    rests = 0  # how many times somebody has asked for it

    def __init__(self) -> None:
        self.undo: list[Callable[[], None]] = []  # what `initialize` has done to models


here = _Here()  # torch calls our code without an argument of ours; each thread, so each rank, has its own


def latest() -> Recorder | None:
    """The last recorder of this thread, if its model waits for initialize; else None."""
    found = here.latest() if here.latest is not None else None
    return None if found is None or found.is_played else found


@contextmanager
def recorder() -> Iterator[Recording]:
    """Construct models inside without memory for them. See [Note: recording and replay].

    With an explicit `device="cpu"`, `torch.zeros` and others whose values are known at once stay real;
    empty and random tensors are recorded all the same. torch's generator moves on at replay, not here.
    """
    with Session(None) as session:
        yield session.recorder.recording


@contextmanager
def resting() -> Iterator[None]:
    """Inside, nothing is recorded in this thread. If a model gets its values there, the session is over."""
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
    """The function, made so that `Init` records nothing of it. If it fails, models are what they were."""

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
