"""Error deduplication: one rank prints an uncaught error that every rank raises.

Code that catches the error sees no difference, and an uncaught one still ends the process with code 1. Only
the output changes: the first of the ranks with the same error prints it, and the others wait for that and
print nothing. A rank prints its own error after a timeout, since the first rank may have caught it. The
reason also appears in torchrun's report. A `sys.excepthook` that the user has set is kept.
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

from zero_full._compat import default_store, is_own_excepthook, prefix_store
from zero_full.comm.topology import this_rank
from zero_full.formatting import printable

PACKAGE = Path(__file__).resolve().parents[1]
TORCH, PYTHON = Path(torch.__file__).resolve().parent, Path(sysconfig.get_path("stdlib")).resolve()
TIMEOUT_S = 5.0  # how long a rank waits for the first rank to print
CONFIRM_S = 1.0  # how long the first rank waits for the others: the store may end with its process
POLL_S = 0.02  # between looks
MARK = "zero_full_print_once"  # attribute of a shared error
Raised = TypeVar("Raised", bound=BaseException)


class Shared(NamedTuple):
    """An error that several ranks raise: the ranks, and the store in which they agree who prints."""

    ranks: Sequence[int]  # the first one prints it
    store: Any


def print_once(error: Raised, ranks: Sequence[int]) -> Raised:
    """Mark an error that all these ranks raise, so that only the first one prints it. Returns the error."""
    is_here = isinstance(sys.excepthook, PrintOnceHook)
    if len(ranks) > 1 and (is_here or is_own_excepthook(sys.excepthook)):
        with suppress(Exception):  # without a store each rank prints its own
            place = f"zero_full/print_once/{'-'.join(map(str, ranks))}"
            setattr(error, MARK, Shared(ranks, prefix_store(place, default_store())))
            sys.excepthook = sys.excepthook if is_here else PrintOnceHook(sys.excepthook)
    return error


class PrintOnceHook:
    """A `sys.excepthook` for marked errors. Passes all others to the hook `before` it."""

    def __init__(self, before: Any) -> None:
        self.before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print the error on one of its ranks."""
        shared: Shared | None = getattr(error, MARK, None)
        if shared is None:
            return self.before(kind, error, trace)  # type: ignore[no-any-return]
        first, rank, is_plain = shared.ranks[0], this_rank(), _needs_no_traceback(error)
        formatted = traceback.format_exception_only if is_plain else traceback.format_exception
        message = formatted(error)
        file = _error_file()
        _write_report(file, "".join(message))  # before waiting: torchrun may end this process
        if rank != first and _has_printed(shared):
            return _write_report(file, f"{kind.__name__}, printed by rank {first}")
        if is_plain:
            note = f"(printed once, by rank {rank}, for {len(shared.ranks)} ranks)"
            lines = [*traceback.format_list(_user_frames(trace)), *message, note]
            print(printable("".join(lines)), file=sys.stderr, flush=True)
        else:
            self.before(kind, error, trace)
        if rank == first:
            _confirm_printed(shared)


def _needs_no_traceback(error: BaseException) -> bool:
    """Return whether an error and its causes carry messages for the user, and so need no traceback.

    An error from a user's function, such as a hook or a closure, needs one.
    """
    frames = traceback.extract_tb(error.__traceback__)
    called = dropwhile(lambda frame: not is_package_frame(frame), frames)
    if not all(is_package_frame(frame) or is_library_frame(frame) for frame in called):
        return False
    is_ours = any(is_package_frame(at) and (at.line or "").startswith("raise ") for at in frames[-1:])
    is_plain = is_ours or isinstance(error, OSError) or type(error).__module__.split(".")[0] == "zero_full"
    return is_plain and (error.__cause__ is None or _needs_no_traceback(error.__cause__))


def _user_frames(trace: TracebackType | None) -> list[traceback.FrameSummary]:
    """Return the stack frames of the user's code, up to its call of this package."""
    theirs = takewhile(lambda frame: not is_package_frame(frame), traceback.extract_tb(trace))
    # Frozen frames, which start a module, have no file.
    return [frame for frame in theirs if Path(frame.filename).exists()]


def is_package_frame(frame: traceback.FrameSummary) -> bool:
    """Return whether a frame belongs to this package. Its examples count as the user's code."""
    place = Path(frame.filename).resolve()
    return PACKAGE in place.parents and PACKAGE / "examples" not in place.parents


def is_library_frame(frame: traceback.FrameSummary) -> bool:
    """Return whether a frame belongs to torch or to Python's standard library."""
    place = Path(frame.filename).resolve()
    is_pythons = PYTHON in place.parents and "site-packages" not in place.parts
    return is_pythons or TORCH in place.parents or not place.exists()  # <frozen ...> has no file


def _has_printed(shared: Shared) -> bool:
    """Wait until the first rank has printed; False if it does not in time."""
    deadline = time.monotonic() + TIMEOUT_S
    with suppress(Exception):  # the store may have ended
        while time.monotonic() < deadline:
            if shared.store.check(["printed"]):
                shared.store.add("confirmed", 1)
                return True
            time.sleep(POLL_S)
    return False


def _confirm_printed(shared: Shared) -> None:
    """On the first rank: let the others end without printing, and wait until they have read it."""
    deadline = time.monotonic() + CONFIRM_S
    with suppress(Exception):
        shared.store.set("printed", "")
        while shared.store.add("confirmed", 0) < len(shared.ranks) - 1 and time.monotonic() < deadline:
            time.sleep(POLL_S)


def _error_file() -> Path | None:
    """Return torchrun's error file, which it prints at exit; None without torchrun, or if already written."""
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(name) if name and not Path(name).exists() else None


def _write_report(file: Path | None, text: str) -> None:
    if file is not None:
        more = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            file.write_text(json.dumps({"message": {"message": text, "extraInfo": more}}))
