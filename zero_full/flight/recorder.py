"""The recorder of one rank: its collectives, passes, steps and memory, while it trains.

The traffic ledger of an engine's communicators calls the recorder for each collective, `BackwardPass` for
each backward pass, the optimizer's hooks for each step, and the engine for each forward. It registers itself
with them when it is created, so a run without a recorder pays nothing.

On an accelerator the recorder does not synchronize: times are when the host has queued the work.
"""

import logging
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from zero_full._compat import default_store, prefix_store
from zero_full.comm.fork_safety import in_this_process_only
from zero_full.comm.topology import this_rank
from zero_full.comm.traffic import CollectiveCall
from zero_full.errors import RecordingError
from zero_full.flight.black_box import BlackBox
from zero_full.flight.rank_files import CLOSED, LEFT, VERSION, all_done, files_in, folders_of
from zero_full.flight.timeline import merge
from zero_full.shard.access.held_bytes import HeldBytes
from zero_full.shard.step.optimizer import ZeroOptimizer

log = logging.getLogger("zero_full")
STEPS = 3  # to keep, by default
FEW = 16  # ranks; up to this many, every failing rank merges all files; of more, only the first one
REPLAY = "to see the last calls of each rank: python -m zero_full replay %s"
NOT_MERGED = "%s could not be merged (%s). Merge it later: python -m zero_full replay %s"


class FlightRecorder:
    """Records one rank of an engine until `close`, or the end of a `with` block, or a failed collective."""

    def __init__(
        self, path: str | Path, optimizer: ZeroOptimizer, about: Mapping[str, Any], steps: int
    ) -> None:
        """Begin to record. `about`: facts of the run. OSError if `path` cannot be written."""
        self.path, self.rank = Path(path).absolute(), this_rank()
        communicators = optimizer.communicators
        self.places = {id(group): place for place, group in enumerate(communicators.all)}
        self.held_bytes, self.held = HeldBytes(optimizer), dict[str, int]()
        self.numbers, self.begun_at = count(), time.perf_counter_ns()
        self.home, self.lock = threading.get_ident(), threading.Lock()
        whole = {
            **about,
            "version": VERSION,
            "run": _run_id(self.path),
            "rank": self.rank,
            "ranks": dist.get_world_size() if dist.is_initialized() else 1,
            "host": socket.gethostname(),
            "started": time.time(),
            "device": communicators.device.type,
            "groups": [communicator.ranks for communicator in communicators.all],
            "keeps": steps,
        }
        self.box = BlackBox(self.path, self.rank, whole, steps)
        self.chapter = -1  # the turn of the file that has the last `held`
        self.open: dict[str, int] = {}  # by kind of pass: the number of the event that has not ended
        self.traffic, self.backward = communicators.traffic, optimizer.reducer.backward
        self.hooks = [
            optimizer.register_step_pre_hook(lambda *_: self.begin("step")),
            optimizer.register_step_post_hook(lambda *_: self.end_step()),
        ]
        self.at = (
            (self.backward.at_begin, partial(self.begin, "backward")),
            (self.backward.at_end, partial(self.end, "backward")),
        )
        for calls, call in self.at:
            calls.append(call)
        self.traffic.listener = self
        finish = in_this_process_only(_finish)
        self.finish = weakref.finalize(self, finish, self.box)  # also when the process ends

    @property
    def closed(self) -> bool:
        """Whether the recording has ended."""
        return not self.finish.alive

    def __enter__(self) -> "FlightRecorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("" if error is None else f"{kind.__name__ if kind else ''}: {error}")

    def close(self, failure: str = "") -> None:
        """End the recording. The file is complete once every rank has ended its own."""
        self._end(failure or CLOSED)
        for hook in self.hooks:
            hook.remove()
        for calls, call in self.at:
            if call in calls:
                calls.remove(call)

    def _end(self, how: str) -> None:
        """End the recording, and write `how` it ended. Calls in progress on other threads then do nothing."""
        if self.finish.detach() is not None:
            self.traffic.listener = None
            _finish(self.box, how)

    # Events ----------------------------------------------------------------------------------------

    def _now(self) -> int:
        return (time.perf_counter_ns() - self.begun_at) // 1000

    def _begin(self, what: str, more: Mapping[str, Any]) -> int:
        number = next(self.numbers)
        with self.lock:  # `held` must be the last value in the file
            line: dict[str, Any] = {"n": number, "t": self._now(), "what": what, **more}
            held, chapter = self.held_bytes.now(), self.box.turns
            if held != self.held or chapter != self.chapter:
                self.held, self.chapter = held, chapter
                line["held"] = held
            self.box.write(line)
        return number

    def collective(self, call: CollectiveCall, make: Callable[[], None]) -> None:
        """Run the collective `make`, and write when it began and ended. If it fails, end the recording."""
        more: dict[str, Any] = {"name": call.name, "group": self.places.get(id(call.by), -1)}
        more |= {"call": call.number} | ({"sent": call.sent} if call.sent else {})
        if threading.get_ident() != self.home and not self.backward.inside_autograd():
            more["beside"] = True
        number = self._begin(call.kind, more)
        try:
            make()
        except BaseException as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            self.box.write({"n": number, "t": self._now(), "failed": f"{type(error).__name__}: {reason}"})
            self._fail(str(error) or type(error).__name__)
            raise
        self.box.write({"n": number, "t": self._now()})

    def _fail(self, reason: str) -> None:
        if not self.closed:
            log.error(REPLAY, self.path)
            self._end(reason)

    def begin(self, what: str) -> None:
        """Record the begin of a pass or a step. An earlier one without an end has failed: end it."""
        self.end(what)
        if not self.closed:
            self.open[what] = self._begin(what, {})

    def end(self, what: str) -> None:
        """Record the end of a pass or a step, if its begin was recorded."""
        number = self.open.pop(what, None)
        if number is not None and not self.closed:
            self.box.write({"n": number, "t": self._now()})

    def during(self, what: str) -> "PassRecord":
        """Return a reusable context manager that records its block as a pass of this kind."""
        return PassRecord(self, what)

    def end_step(self) -> None:
        """Record the end of a step of the optimizer, and the memory that the rank holds between steps."""
        self.end("step")
        if not self.closed:
            self.held_bytes.settle()
            self.begin("between")
            self.end("between")
            with self.lock:
                self.box.write({"step": self.box.step, "t": self._now()}, ends_step=True)


class PassRecord:
    """Reusable context manager: its block is a pass in a recording. Does nothing once the recording ended."""

    def __init__(self, recorder: FlightRecorder, what: str) -> None:
        self.recorder, self.what = recorder, what

    def __enter__(self) -> None:
        self.recorder.begin(self.what)

    def __exit__(self, *error: object) -> None:
        self.recorder.end(self.what)


def _finish(box: BlackBox, how: str = LEFT) -> None:
    """End this rank's part; merge the parts into a recording if this rank is the last of its folder.

    A rank that did not end by `close` merges as well, because the others may never end. If another rank has
    begun the next recording into this path, this one's folder is deleted and nothing is merged.
    """
    try:
        box.finish(how)
        alone = how != CLOSED and (not box.path.exists() or len(files_in(box.folder)) <= FEW)
        if folders_of(box.path)[-1:] == [box.folder] and (alone or all_done(box.folder)):
            merge(box.path)
    except FileNotFoundError:  # another rank has merged the parts, and removed their folder
        pass
    except (OSError, RecordingError) as error:
        log.warning(NOT_MERGED, box.path, error, box.path)


def _run_id(path: Path) -> str:
    """Return an id of this recording, equal on all ranks. A later recording into `path` has a larger id."""
    mine = time.time_ns()
    if not dist.is_initialized():
        return f"{mine:x}"
    store: Any = prefix_store(f"zero_full/recordings/{path}", default_store())
    number = store.add(f"begun by {this_rank()}", 1)
    if number > 1:  # another rank, with another clock, may have made the last one
        mine = max(mine, int(store.get(f"run {number - 1}"), 16) + 1)
    return str(store.compare_set(f"run {number}", "", f"{mine:x}").decode())
