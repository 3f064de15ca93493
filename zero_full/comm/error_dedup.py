"""An error that every rank raises is printed by one of them, if nobody catches it.

Whoever catches the error sees no difference, and who does not ends with code 1. What changes is what Python
prints then: the first of the ranks with the same error prints it, the others wait for that and are silent.
One that has waited in vain, because the first has caught its own, prints it after all. torchrun's report says
the reason, too. A `sys.excepthook` that somebody else has set stays, and prints what it likes.
"""

import json
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from itertools import dropwhile, takewhile
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch

from zero_full._compat import default_store, is_own_excepthook, keys_under
from zero_full.comm.topology import this_rank
from zero_full.formatting import printable

PACKAGE = Path(__file__).resolve().parents[1]
TORCH, PYTHON = Path(torch.__file__).resolve().parent, Path(sysconfig.get_path("stdlib")).resolve()
PATIENCE_S = 5.0  # with the rank that is to print
HEARD_S = 1.0  # with those that wait for it: the store may end with this process
LOOK_S = 0.02
MARK = "zero_full_told_once"  # on an error
Raised = TypeVar("Raised", bound=BaseException)


class Shared(NamedTuple):
    """What is known of an error that these ranks have."""

    ranks: Sequence[int]  # the first one prints it
    store: Any


def told_once(error: Raised, ranks: Sequence[int]) -> Raised:
    """The error, which these ranks raise alike; the first of them is to print it."""
    is_here = isinstance(sys.excepthook, OneTells)
    if len(ranks) > 1 and (is_here or is_own_excepthook(sys.excepthook)):
        with suppress(Exception):  # without a store each prints its own, which is better than another error
            place = f"zero_full/told/{'-'.join(map(str, ranks))}"
            setattr(error, MARK, Shared(ranks, keys_under(place, default_store())))
            sys.excepthook = sys.excepthook if is_here else OneTells(sys.excepthook)
    return error


class OneTells:
    """Takes the place of `sys.excepthook` when there is such an error. All others are for `before`."""

    def __init__(self, before: Any) -> None:
        self.before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print the error, or nothing."""
        shared: Shared | None = getattr(error, MARK, None)
        if shared is None:
            return self.before(kind, error, trace)  # type: ignore[no-any-return]
        first, rank, says_all = shared.ranks[0], this_rank(), _says_all(error)
        message = (
            traceback.format_exception_only(kind, error) if says_all else traceback.format_exception(error)
        )
        report = Report()
        report.write("".join(message))  # before anybody is waited for: torchrun may end this process
        if rank != first and _is_told(shared):
            return report.write(f"{kind.__name__}, printed by rank {first}")
        if says_all:
            told = f"(printed once, by rank {rank}, for {len(shared.ranks)} ranks)"
            lines = [*traceback.format_list(_users(trace)), *message, told]
            print(printable("".join(lines)), file=sys.stderr, flush=True)
        else:
            self.before(kind, error, trace)
        if rank == first:
            _say_told(shared)


def _says_all(error: BaseException) -> bool:
    """Whether it was raised for the user, with a text that needs no traceback; so was what has led to it.

    What comes out of a function of the user's that was called on the way needs one.
    """
    if _calls_back(error.__traceback__):
        return False
    last = traceback.extract_tb(error.__traceback__)[-1:]
    is_ours = any(
        PACKAGE in Path(at.filename).parents and (at.line or "").startswith("raise ") for at in last
    )
    says_all = is_ours or isinstance(error, OSError) or type(error).__module__.split(".")[0] == "zero_full"
    return says_all and (error.__cause__ is None or _says_all(error.__cause__))


def _users(trace: TracebackType | None) -> list[traceback.FrameSummary]:
    """The lines that have led to the call of this package."""
    theirs = takewhile(lambda frame: not _is_ours(frame), traceback.extract_tb(trace))
    return [frame for frame in theirs if Path(frame.filename).exists()]  # not how Python starts a module


def _calls_back(trace: TracebackType | None) -> bool:
    """Whether a function of the user's has run within the call of this package."""
    frames = dropwhile(lambda frame: not _is_ours(frame), traceback.extract_tb(trace))
    return any(not (_is_ours(frame) or _is_library(frame)) for frame in frames)


def _is_ours(frame: traceback.FrameSummary) -> bool:
    place = Path(frame.filename).resolve()
    return PACKAGE in place.parents and PACKAGE / "examples" not in place.parents


def _is_library(frame: traceback.FrameSummary) -> bool:
    """Whether it is torch's or Python's own, which this package uses."""
    place = Path(frame.filename).resolve()
    is_pythons = PYTHON in place.parents and "site-packages" not in place.parts
    return is_pythons or TORCH in place.parents or not place.exists()  # of <frozen ...> there is no file


def _is_told(shared: Shared) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    with suppress(Exception):  # of a store that has gone
        while not shared.store.check(["told"]):
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_S)
        shared.store.add("heard", 1)
        return True
    return False


def _say_told(shared: Shared) -> None:
    deadline = time.monotonic() + HEARD_S
    with suppress(Exception):
        shared.store.set("told", "")
        while shared.store.add("heard", 0) < len(shared.ranks) - 1 and time.monotonic() < deadline:
            time.sleep(LOOK_S)


class Report:
    """The file whose text torchrun shows at its end. There is none without torchrun, or if it is taken."""

    def __init__(self) -> None:
        name = os.environ.get("TORCHELASTIC_ERROR_FILE")
        self.file = Path(name) if name and not Path(name).exists() else None

    def write(self, text: str) -> None:
        """This text, in place of what was written before."""
        if self.file is not None:
            more = {"py_callstack": text, "timestamp": str(int(time.time()))}
            with suppress(OSError):
                self.file.write_text(json.dumps({"message": {"message": text, "extraInfo": more}}))
