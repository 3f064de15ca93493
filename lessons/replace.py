"""Let a learner's file take the place of a module of zero_min, so that the same tests judge it.

`ZERO_MIN_REPLACE=zero_min.stage1=work/stage1.py` in the environment, modules separated by the path
separator, does that in every Python process that calls `install` before it imports zero_min.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from lessons.sandbox import FOLDER, Loader, Sandbox

VARIABLE = "ZERO_MIN_REPLACE"


class _Finder(MetaPathFinder):
    def __init__(self, places: Mapping[str, str], sandbox: Sandbox | None = None) -> None:
        self.places, self.sandbox = places, sandbox

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        place = self.places.get(name)
        loader = Loader(name, place, self.sandbox) if place and self.sandbox else None
        return importlib.util.spec_from_file_location(name, place, loader=loader) if place else None


def environment(places: Mapping[str, str]) -> dict[str, str]:
    """The variable that makes another process use these files, say {"zero_min.stage1": "work/stage1.py"}."""
    return {VARIABLE: os.pathsep.join(f"{name}={place}" for name, place in places.items())}


def places() -> dict[str, str]:
    """What the variable says."""
    wanted = os.environ.get(VARIABLE, "")
    return dict(item.split("=", 1) for item in wanted.split(os.pathsep) if item)


def sandbox() -> Sandbox | None:
    """What guards the files that replace modules in this process; None in a learner's own."""
    return next((each.sandbox for each in sys.meta_path if isinstance(each, _Finder)), None)


def install() -> bool:
    """Honour the variable, if it is set. Call this before zero_min is imported for the first time.

    With `sandbox.FOLDER` in the environment the files run in a sandbox, as those of a hand-in.
    """
    wanted = places()
    if wanted and "zero_min" in sys.modules:
        raise ImportError(f"{VARIABLE} is set, but zero_min has been imported already")
    if wanted:
        folder = os.environ.get(FOLDER)
        sys.meta_path.insert(0, _Finder(wanted, Sandbox(Path(folder), wanted) if folder else None))
    return bool(wanted)


@contextmanager
def swapped(wanted: Mapping[str, str]) -> Iterator[None]:
    """Inside the `with` these files stand for their modules; zero_min and the tests are imported anew."""
    finder, before = _Finder(wanted), os.environ.get(VARIABLE)
    _forget()
    sys.meta_path.insert(0, finder)
    os.environ.update(environment(wanted))
    try:
        importlib.import_module("zero_min")
        yield
    finally:
        sys.meta_path.remove(finder)
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before
        _forget()


def _forget() -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in ("zero_min", "tests"):
            del sys.modules[name]
