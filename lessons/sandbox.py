"""Runs a hand-in with only as much of Python as an exercise needs, so that it cannot reach its tests.

An answer and the tests that judge it share a process, in which Python hides nothing. So a hand-in is compiled
differently there: each attribute that it reads or sets goes through a guard, and its builtins are a copy
without files, `exec` and what else leads outside. It cannot rebind a name of torch, of a test or of another
module, and has no way to the file into which the judge writes. `refusals` finds most of it before anything
runs. What only shows while it runs stands in `Sandbox.reached`, with its line.
"""

import ast
import builtins
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path, PurePath
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

FOLDER = "ZERO_MIN_SANDBOX"  # the environment's variable: the only folder in which a hand-in may have files
# Modules that may be imported. Names, where not all public ones are harmless.
MODULES: dict[str, set[str] | None] = {
    **dict.fromkeys(["__future__", "bisect", "collections", "collections.abc", "copy", "enum", "fractions"]),
    **dict.fromkeys(["heapq", "itertools", "math", "random", "time", "zero_min"]),
    "torch.utils": {"checkpoint"},
    "abc": {"ABC", "abstractmethod"},
    "contextlib": {"ExitStack", "closing", "contextmanager", "nullcontext", "suppress"},
    "dataclasses": {
        "KW_ONLY",
        "asdict",
        "astuple",
        "dataclass",
        "field",
        "fields",
        "is_dataclass",
        "replace",
    },
    "functools": {"cache", "cached_property", "lru_cache", "partial", "reduce"},
    "operator": {"add", "and_", "floordiv", "itemgetter", "mul", "neg", "or_", "sub", "truediv"},
    "pathlib": {"Path", "PurePath"},
    "typing": {"Any", "ClassVar", "Final", "Generic", "Literal", "NamedTuple", "Optional", "ParamSpec"}
    | {"Protocol", "Self", "TYPE_CHECKING", "TypeAlias", "TypeVar", "Union", "assert_never", "cast"},
    "warnings": {"warn"},
    "weakref": {"WeakKeyDictionary", "WeakSet", "WeakValueDictionary", "ref"},
}
TORCH = [
    "",
    ".autograd",
    ".autograd.function",
    ".autograd.graph",
    ".cuda",
    ".linalg",
    ".nn",
    ".nn.functional",
]
TORCH += [".nn.init", ".nn.parameter", ".nn.utils", ".optim", ".random", ".special", ".utils.checkpoint"]
MODULES |= {f"torch{name}": None for name in TORCH}
# Of torch: these read or write files, run other code, or make arrays that can be written to files.
OF_TORCH = {"compile", "from_dlpack", "hub", "load", "numpy", "save", "set_deterministic_debug_mode"}
GONE = {"breakpoint", "compile", "delattr", "dir", "eval", "exec", "exit", "globals", "help", "input"}
GONE |= {"locals", "memoryview", "open", "quit"}  # builtins
SPECIAL = {"__call__", "__contains__", "__enter__", "__exit__", "__getitem__", "__init__", "__iter__"}
SPECIAL |= {"__len__", "__name__", "__next__", "__post_init__", "__repr__", "__setitem__", "__str__"}
SPECIAL |= {"__all__", "__annotations__", "__doc__", "__slots__"}
PYTREE = "torch.utils._pytree"  # what lesson 3 imports
FRAMES = ("f_", "tb_", "gi_", "cr_", "ag_", "co_")  # how attributes of frames and code begin
INSIDE = {"from_file", "mkdir", "unlink"}  # need the sandbox's folder
OF_PATHS = {"exists", "mkdir", "name", "parent", "stem", "suffix", "unlink", "with_name", "with_suffix"}
OF_LEDGERS = {"live", "move", "note", "peak", "watch"}


class ReachError(PermissionError):
    """A hand-in has reached outside of its exercise."""


def refusals(source: str) -> Iterator[tuple[int, str]]:
    """Lines of a file that reach outside of the exercise, as far as they show before it runs."""
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            yield from ((line, f"imports {each.name}") for each in node.names if each.name not in MODULES)
        elif isinstance(node, ast.ImportFrom):
            yield from ((line, f"imports {name}") for name in _imported(node))
        elif isinstance(node, ast.Name) and (node.id in GONE or _is_special(node.id)):
            yield line, f"uses {node.id}"
        elif isinstance(node, ast.Attribute) and _is_hidden(node.attr):
            yield line, f"uses .{node.attr}"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_special(node.name):
            yield line, f"defines {node.name}"
        elif isinstance(node, ast.MatchClass):
            yield from ((line, f"uses .{name}") for name in node.kwd_attrs if _is_hidden(name))


def _imported(node: ast.ImportFrom) -> Iterator[str]:
    module = node.module or "."
    known = MODULES.get(module)
    for name in (each.name for each in node.names):
        if f"{module}.{name}" in MODULES:
            continue
        if node.level or name == "*" or not _is_known(module):
            yield module if module not in MODULES else f"{module}.{name}"
        elif (known is not None and name not in known) or _is_hidden(name) or name in OF_TORCH | INSIDE:
            yield f"{module}.{name}"


def _is_special(name: str) -> bool:
    """True for `__eq__` and its like, except the few that an exercise needs."""
    return name.startswith("__") and name.endswith("__") and name not in SPECIAL


def _is_hidden(name: str) -> bool:
    return _is_special(name) or name.startswith(FRAMES) or name == "mro"


class _Guarded(ast.NodeTransformer):
    """Puts a guard around every attribute. Names with @ are no Python, so that a hand-in cannot call them."""

    def __init__(self) -> None:
        self.classes: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.classes.append(node.name)
        self.generic_visit(node)
        self.classes.pop()
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        name = node.attr
        if self.classes and name.startswith("__") and not name.endswith("__"):  # as Python does it
            name = f"_{self.classes[-1].lstrip('_')}{name}"
        is_read = isinstance(node.ctx, ast.Load)
        guard = ast.Name("@read" if is_read else "@set", ast.Load())
        call = ast.Call(guard, [node.value, ast.Constant(name)], [])
        if is_read:
            return _at(node, call)
        node.value = call
        return _at(node, node)

    def visit_match_case(self, node: ast.match_case) -> ast.AST:
        node.body = [self.visit(each) for each in node.body]  # a pattern is no expression
        return node


def _at(node: ast.AST, made: ast.AST) -> ast.AST:
    return ast.fix_missing_locations(ast.copy_location(made, node))


class Sandbox:
    """What a hand-in's modules may do, and what they have tried beyond it."""

    def __init__(self, folder: Path, modules: Mapping[str, str]) -> None:
        self.folder, self.modules = folder.resolve(), set(modules)
        self.places = set(modules.values())
        self.reached: list[str] = []
        self.builtins = {name: value for name, value in vars(builtins).items() if name not in GONE}
        self.builtins |= {"@read": self.read, "@set": self.settable, "__import__": self.imported}
        self.builtins |= {"getattr": self.getattr, "hasattr": self.hasattr, "setattr": self.setattr}
        self.builtins |= {"type": self._type(), "vars": self.vars}

    def code(self, source: bytes, place: str) -> CodeType:
        """The file, compiled with its guards."""
        tree = ast.parse(source, filename=place)
        for line, what in refusals(source.decode()):
            self.refuse(f"{Path(place).name}, line {line}: {what}")
        code: CodeType = compile(_Guarded().visit(tree), place, "exec")
        return code

    def refuse(self, what: str) -> None:
        """Write it down, and raise."""
        if what not in self.reached:
            self.reached.append(what)
        raise ReachError(f"this reaches outside of the exercise: {what}")

    def _refuse_here(self, what: str) -> None:
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename not in self.places:
            frame = frame.f_back
        line = f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}: " if frame else ""
        self.refuse(f"{line}{what}")

    def read(self, owner: Any, name: str) -> Any:
        """`owner.name`, if an exercise may have it."""
        if type(name) is not str or _is_hidden(name) or not self._may_read(owner, name):
            self._refuse_here(f"uses .{name} of {_shown(owner)}")
        value = getattr(owner, name)
        if isinstance(value, ModuleType) and not _is_known(value.__name__):
            self._refuse_here(f"uses {value.__name__}")
        if isinstance(value, type) and issubclass(value, type):
            self._refuse_here(f"uses {value.__name__}")
        if name in INSIDE:
            return self._inside(owner, name, value)
        if isinstance(owner, type) and isinstance(value, FunctionType):
            return self._method(owner, name, value)
        return value

    def _method(self, owner: type, name: str, value: Callable[..., Any]) -> Callable[..., Any]:
        """A function of a class. It sets attributes of its first argument, which must be of the class."""
        if isinstance(inspect.getattr_static(owner, name), staticmethod):
            return value

        def guarded(*given: Any, **options: Any) -> Any:
            if not given or not isinstance(given[0], owner):
                self._refuse_here(f"calls {owner.__name__}.{name} without a {owner.__name__}")
            return value(*given, **options)

        return guarded

    def _may_read(self, owner: Any, name: str) -> bool:
        if self._is_own(owner):
            return True
        if isinstance(owner, ModuleType):
            known = MODULES.get(owner.__name__)
            is_listed = known is None or name in known
            return (
                _is_known(owner.__name__) and is_listed and not name.startswith("_") and name not in OF_TORCH
            )
        if isinstance(owner, PurePath):
            return name in OF_PATHS
        comm, ledger = sys.modules["zero_min.comm"].Comm, sys.modules["zero_min.ledger"].Ledger
        if isinstance(owner, ledger):
            return name in OF_LEDGERS
        origin = type(owner).__module__.partition(".")[0]
        if isinstance(owner, comm) or (origin in ("tests", "lessons") and not _is_model(owner)):
            return name in {"rank", "world_size", "device", "ledger"} or (
                not name.startswith("_") and name in vars(comm)
            )
        return (not name.startswith("_") or name in SPECIAL) and name not in OF_TORCH

    def _is_own(self, owner: Any) -> bool:
        """True for objects of a class, and for classes, that the hand-in or a stage defines."""
        if isinstance(owner, super):
            return owner.__thisclass__.__module__ in self.modules
        classes = (owner if isinstance(owner, type) else type(owner)).__mro__
        kept = ("zero_min.comm", "zero_min.ledger", "zero_min.thread_comm", "zero_min.dist_comm")
        names = {each.__module__ for each in classes}
        return any(name in self.modules for name in names) or (
            any(name.startswith("zero_min.") for name in names) and not names & set(kept)
        )

    def settable(self, owner: Any, name: str) -> Any:
        """`owner`, if an exercise may set its attribute `name`."""
        import torch

        plain = not isinstance(owner, type | ModuleType) and not callable(getattr(type(owner), name, None))
        mine = self._is_own(owner) or isinstance(owner, torch.Tensor | torch.nn.Module)
        mine = mine or isinstance(owner, torch.autograd.function.FunctionCtx | SimpleNamespace)
        if not plain or not mine or type(name) is not str or _is_hidden(name):
            self._refuse_here(f"sets .{name} of {_shown(owner)}")
        return owner

    def _inside(self, owner: Any, name: str, value: Callable[..., Any]) -> Callable[..., Any]:
        """A function for files that takes only those in the sandbox's folder."""

        def guarded(*given: Any, **options: Any) -> Any:
            path = owner if isinstance(owner, PurePath) else given[0] if given else options.get("filename")
            place = Path(str(path)).resolve()
            if self.folder not in (place, *place.parents):
                self._refuse_here(f"{name}: {place} is not its own file")
            if not isinstance(owner, PurePath):
                given = (str(place), *given[1:])
            return value(*given, **options)

        return guarded

    def getattr(self, owner: Any, name: str, *default: Any) -> Any:
        """The builtin of this name."""
        try:
            return self.read(owner, name)
        except AttributeError:
            if default:
                return default[0]
            raise

    def hasattr(self, owner: Any, name: str) -> bool:
        """The builtin of this name."""
        return self.getattr(owner, name, self) is not self

    def setattr(self, owner: Any, name: str, value: Any) -> None:
        """The builtin of this name."""
        setattr(self.settable(owner, name), name, value)

    def vars(self, owner: Any) -> dict[str, Any]:
        """The builtin of this name, for objects that the hand-in has made."""
        if isinstance(owner, type | ModuleType) or not self._is_own(owner):
            self._refuse_here(f"uses vars of {_shown(owner)}")
        return vars(owner)

    def _type(self) -> type:
        """The builtin `type` without what makes classes, as `type("Any", (), {"__eq__": ...})` does."""

        class Kind(type):
            def __instancecheck__(cls, value: Any) -> bool:
                return isinstance(value, type)

        class Type(metaclass=Kind):
            def __new__(cls, value: Any) -> Any:
                found = type(value)
                if issubclass(found, type):
                    self._refuse_here("uses the type of a class")
                return found

            def __class_getitem__(cls, item: Any) -> Any:
                return type[item]

        return Type

    def imported(
        self, name: str, given: Any = None, local: Any = None, names: Any = (), level: int = 0
    ) -> ModuleType:
        """The builtin `__import__`."""
        if isinstance(names, list):  # torch's C++ imports what it needs; a statement passes a tuple or None
            return builtins.__import__(name, given, local, names, level)
        if level or not _is_known(name):
            self._refuse_here(f"imports {name}")
        module = importlib.import_module(name)
        for each in names or ():
            if not hasattr(module, each) and _is_known(f"{name}.{each}"):
                importlib.import_module(f"{name}.{each}")
            if name != PYTREE:
                self.read(module, each)
        return module if names else sys.modules[name.partition(".")[0]]


def _is_known(module: str) -> bool:
    return module in MODULES or module.startswith("zero_min.") or module == PYTREE


def _is_model(owner: Any) -> bool:
    import torch

    return isinstance(owner, torch.nn.Module)


def _shown(owner: Any) -> str:
    name = owner.__name__ if isinstance(owner, type | ModuleType) else type(owner).__name__
    return f"{'' if isinstance(owner, type | ModuleType) else 'a '}{name}"


class Loader(SourceFileLoader):
    """Loads a hand-in's file into its sandbox."""

    def __init__(self, name: str, place: str, sandbox: Sandbox) -> None:
        super().__init__(name, place)
        self.sandbox = sandbox

    def get_code(self, fullname: str) -> CodeType:
        """Python asks for what to run. Nothing is cached: a cache has no guards."""
        return self.sandbox.code(self.get_data(self.path), self.path)

    def exec_module(self, module: ModuleType) -> None:
        """Python asks to run the file."""
        vars(module)["__builtins__"] = self.sandbox.builtins
        exec(self.get_code(module.__name__), vars(module))
