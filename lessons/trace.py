"""A trace of a file's functions: each call's arguments, what each line changed, and the result, by rank.

`record` watches every thread while a test runs. Values are kept under the path that leads to them from a
name of the function, say `self.flats[0].grad`, so that two traces can be compared value by value.
"""

import ast
import inspect
import math
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

SECONDS = 2.0  # of recording; what is called later is not in the trace
DEEP = 5  # attributes and elements that a path may pass through
MANY = 64  # elements of a list that are looked at
LARGE = 2**14  # elements of a tensor that is kept as two sums
HOOKS = ("register_hook", "register_forward_hook", "register_post_accumulate_grad_hook")
Values = dict[str, Any]  # by path


class Address(int):
    """Where something lies in memory. It differs between two runs, so it is no value to compare."""


@dataclass(frozen=True)
class Numbers:
    """A tensor as it was at one moment."""

    shape: tuple[int, ...]
    dtype: str
    values: list[Any]  # flat
    nbytes: int  # of its memory
    follows: bool = field(default=False, compare=False)  # whether autograd follows it
    address: int = field(default=0, compare=False)  # 0 if there is nothing at it

    @property
    def near(self) -> float:
        """How far apart two numbers of this type may be, relative to the largest."""
        return {"float64": 1e-9, "float32": 1e-5}.get(self.dtype, 0.02 if "float" in self.dtype else 0.0)


@dataclass
class Did:
    """A call that a function made of something outside its file: a collective, a hook, a method."""

    line: int
    name: str
    given: Values
    result: Values = field(default_factory=dict)  # of a collective: what came back from the ranks


@dataclass
class Call:
    """One call of a function in the file."""

    function: str  # with its class, "Stage1.reduce_gradients"; a function inside of it has a name behind it
    path: Path
    rank: int | None  # None outside of a world
    world: int  # worlds are counted as they begin
    entry: Values
    lines: list[tuple[int, Values]] = field(default_factory=list)  # after each line, what it has changed
    exit: Values = field(default_factory=dict)
    returned: Values = field(default_factory=dict)
    raised: str | None = None
    did: list[Did] = field(default_factory=list)
    ended: bool = False
    line: int = 0  # the last that ran
    yields: bool = False  # a call makes a generator, and runs nothing yet


def values_of(value: Any, path: str, found: Values, seen: set[int], deep: int = DEEP) -> None:
    """Everything that can be compared in a value, by path; objects are entered once."""
    if isinstance(value, torch.Tensor):
        found[path] = _numbers(value)
        if value.is_leaf and value.dtype.is_floating_point:
            found[f"{path}.grad"] = None if value.grad is None else _numbers(value.grad)
    elif isinstance(value, Address):
        return
    elif value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        found[path] = value
    elif deep == 0 or id(value) in seen:
        return
    elif isinstance(value, (list, tuple, range)):
        seen.add(id(value))
        found[f"len({path})"] = len(value)
        for i, each in enumerate(value[:MANY]):
            values_of(each, f"{path}[{i}]", found, seen, deep - 1)
    elif isinstance(value, dict):
        seen.add(id(value))
        found[f"len({path})"] = len(value)
        for i, (name, each) in enumerate(list(value.items())[:MANY]):
            key = repr(name) if isinstance(name, (str, int)) and type(name) is not Address else f"key {i}"
            values_of(each, f"{path}[{key}]", found, seen, deep - 1)
    elif isinstance(value, nn.Module):
        seen.add(id(value))
        made = "_parameters" in vars(value)  # not yet, while its own `__init__` runs
        for name, each in list(value.named_parameters())[:MANY] if made else []:
            values_of(each, f"{path}.{name}", found, seen, 0)
    elif _is_ours(value):
        seen.add(id(value))
        for name, each in list(getattr(value, "__dict__", {}).items()):
            values_of(each, f"{path}.{name}", found, seen, deep - 1)


def _is_ours(value: Any) -> bool:
    """Whether it is an object of zero_min or of a test, with values of interest: no telephone, no ledger."""
    first, _, module = type(value).__module__.partition(".")
    return (
        first in ("zero_min", "tests", "types")
        and hasattr(value, "__dict__")
        and not module.endswith("comm")
        and module not in ("ledger", "ring")
    )


def _numbers(tensor: torch.Tensor) -> Numbers | None:
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape, nbytes = tuple(tensor.shape), tensor.untyped_storage().nbytes()
    last = sum((n - 1) * stride for n, stride in zip(shape, tensor.stride(), strict=True))
    if tensor.numel() and nbytes < (tensor.storage_offset() + last + 1) * tensor.element_size():
        return Numbers(shape, dtype, [], nbytes)  # its memory is given back
    with torch.no_grad():
        flat = tensor.detach().reshape(-1)
        if flat.numel() > LARGE:
            flat = torch.stack([flat.double().sum(), flat.double().abs().sum()])
        address = tensor.data_ptr() if tensor.numel() else 0
        return Numbers(shape, dtype, flat.tolist(), nbytes, tensor.requires_grad, address)


class _Recorder:
    """Keeps the calls of the functions in `paths`; `trace` is what `sys.settrace` is given."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = {str(path): path for path in paths}
        self.names = {str(path): _functions(path) for path in paths}
        self.calls: list[Call] = []
        self.worlds = 0
        self.of_thread = threading.local()
        self.until = math.inf  # begins with the first call
        self.lock = threading.Lock()

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Decide, for a function that begins, whether its lines are recorded."""
        code = frame.f_code
        if code.co_filename in self.paths:
            return self._function(frame, code)
        if code.co_name == "run" and code.co_filename.endswith("thread_comm.py"):
            self.of_thread.rank, self.of_thread.world = frame.f_locals["rank"], self.worlds
        elif code.co_name == "run_world":
            self.worlds += 1
        return self._did(frame, code.co_name)

    def _did(self, frame: FrameType, name: str) -> Any:
        """Note a call that a recorded function makes itself."""
        stack = getattr(self.of_thread, "stack", ())
        caller = frame.f_back
        while caller is not None and caller.f_code.co_name.startswith("<"):
            caller = caller.f_back
        if not stack or caller is not stack[-1][0] or time.monotonic() > self.until:
            return None
        file = Path(frame.f_code.co_filename)
        ours = file.name != "ledger.py" and ("zero_min" in file.parts or file.name.startswith("test_task"))
        if not ours and name not in HOOKS:
            return None
        given: Values = {}
        code = frame.f_code
        for each in code.co_varnames[: code.co_argcount]:
            if each != "self":
                values_of(frame.f_locals.get(each), each, given, set(), 2)
        did = Did(caller.f_lineno, name, given)
        stack[-1][1].did.append(did)

        def back(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "return":
                values_of(argument, "the result", did.result, set(), 2)
            return back

        return back if file.name == "comm.py" else None

    def _function(self, frame: FrameType, code: CodeType) -> Any:
        name = self.names[code.co_filename].get(code.co_firstlineno)
        if name is None or code.co_name.startswith("<"):
            return None
        self._did_own(frame, name)
        if time.monotonic() > self.until:
            return None
        rank, world = getattr(self.of_thread, "rank", None), getattr(self.of_thread, "world", 0)
        if threading.current_thread() is threading.main_thread():
            rank, world = None, self.worlds
        if not self.calls:
            self.until = time.monotonic() + SECONDS
        before = self._now(frame)
        path = self.paths[code.co_filename]
        yields = bool(code.co_flags & inspect.CO_GENERATOR)
        call = Call(name, path, rank, world, before, line=frame.f_lineno, yields=yields)
        with self.lock:
            self.calls.append(call)
        if not hasattr(self.of_thread, "stack"):
            self.of_thread.stack = []
        self.of_thread.stack.append((frame, call))

        def local(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal before
            if event == "exception":
                call.raised = f"{argument[0].__name__}: {argument[1]}"
                return local
            if time.monotonic() < self.until:
                now = self._now(frame)
                changed = {path: new for path, new in now.items() if before.get(path, ...) != new}
                call.lines.append((call.line, changed))
                before = now
            if event == "line":
                call.line, call.raised = frame.f_lineno, None
            if event == "return":
                roots = _arguments(code)
                call.exit = {path: new for path, new in before.items() if root_of(path) in roots}
                values_of(argument, "the result", call.returned, set())
                call.ended = time.monotonic() < self.until
                self.of_thread.stack.pop()
            return local

        return local

    def own(self, draw: Any) -> Any:
        """Random numbers that depend on the rank only. Ranks share a generator, so two runs would differ."""

        def drawn(tensor: torch.Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
            if generator is None:
                generator = getattr(self.of_thread, "generator", None) or torch.Generator()
                if not hasattr(self.of_thread, "generator"):
                    generator.manual_seed(getattr(self.of_thread, "rank", 0))
                self.of_thread.generator = generator
            return draw(tensor, *args, generator=generator, **kwargs)

        return drawn

    def _did_own(self, frame: FrameType, name: str) -> None:
        stack = getattr(self.of_thread, "stack", ())
        if stack and frame.f_back is stack[-1][0] and frame.f_back is not None:
            given = {path: each for path, each in self._now(frame).items() if root_of(path) != "self"}
            stack[-1][1].did.append(Did(frame.f_back.f_lineno, name.rpartition(".")[2], given))

    @staticmethod
    def _now(frame: FrameType) -> Values:
        found: Values = {}
        first = [*_arguments(frame.f_code)]
        names = frame.f_locals
        for name in [*first, *(each for each in names if each not in first)]:
            if name in names:
                values_of(names[name], name, found, set())
        return found


def _arguments(code: CodeType) -> tuple[str, ...]:
    """The names that a function is given, by its caller or from around it."""
    return (*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], *code.co_freevars)


def root_of(path: str) -> str:
    """The name that a path begins with."""
    return path.removeprefix("len(").partition(".")[0].partition("[")[0].rstrip(")")


def _functions(path: Path) -> dict[int, str]:
    """The full name of each function, by the line that its code begins in."""
    found: dict[int, str] = {}

    def look(node: ast.AST, around: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = around
            if isinstance(child, (ast.ClassDef, ast.FunctionDef)):
                name = f"{around}.{child.name}" if around else child.name
            if isinstance(child, ast.FunctionDef):
                first = min([child.lineno, *(each.lineno for each in child.decorator_list)])
                found[first] = name
            look(child, name)

    look(ast.parse(path.read_text(encoding="utf-8")), "")
    return found


def _zeroed(make: Any) -> Any:
    """Memory with zeros in it, in the place of memory with anything in it, which differs between two runs."""

    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor: torch.Tensor = make(*args, **kwargs)
        return tensor.detach().zero_().requires_grad_(tensor.requires_grad)

    return made


def _as_address(ask: Any) -> Any:
    return lambda owner: Address(ask(owner))


def _grown_zeroed(resize: Any) -> Any:
    """The same for memory that a storage gets when it grows."""

    def made(storage: Any, size: int) -> Any:
        grows = size > storage.nbytes()
        resize(storage, size)
        return storage.fill_(0) if grows else storage

    return made


@contextmanager
def record(paths: Sequence[Path]) -> Iterator[list[Call]]:
    """Inside the `with`, the calls of functions in these files, of all threads that begin there."""
    recorder = _Recorder(paths)
    before = sys.gettrace()
    draws = [(torch.Tensor, name, recorder.own) for name in ("uniform_", "normal_")]
    empty = [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]
    grown = (torch.UntypedStorage, "resize_", _grown_zeroed)
    places = [(owner, "data_ptr", _as_address) for owner in (torch.Tensor, torch.UntypedStorage)]
    changed = [*draws, grown, *places, *((place, name, _zeroed) for place, name in empty)]
    kept = [(place, name, getattr(place, name)) for place, name, _ in changed]
    for (place, name, plain), (_, _, other) in zip(kept, changed, strict=True):
        setattr(place, name, other(plain))
    threading.settrace(recorder.trace)
    sys.settrace(recorder.trace)
    try:
        yield recorder.calls
    finally:
        for place, name, plain in kept:
            setattr(place, name, plain)
        sys.settrace(before)
        threading.settrace(None)  # type: ignore[arg-type]
