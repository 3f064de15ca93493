"""What one rank tells of itself while it trains: its collectives, its passes and steps, and what it holds.

The recorder hears of a collective from the ledger that all communicators of an engine share, of a backward
pass from `BackwardPass`, of a step from the optimizer's hooks, of a forward from the engine. None of them
does anything for it unless there is one.

On an accelerator nobody waits for the device: times are when the host has queued the work.
"""

import logging
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from zero_full._compat import default_store, keys_under
from zero_full.comm.forked import only_here
from zero_full.comm.ledger import CollectiveCall
from zero_full.comm.topology import this_rank
from zero_full.errors import RecordingError
from zero_full.flight.black_box import BlackBox
from zero_full.flight.parts import CLOSED, LEFT, VERSION, all_done, folder_of, ranks_in
from zero_full.flight.timeline import put_together
from zero_full.shard.access.held_bytes import HeldBytes
from zero_full.shard.step.optimizer import ZeroOptimizer

log = logging.getLogger("zero_full")
STEPS = 3
FEW = 16  # ranks: of so many each one that fails puts together what there is, of more only the first
SEEN = "what each rank did last: python -m zero_full replay %s"
LATER = "%s could not be put together (%s); later it can: python -m zero_full replay %s"


class FlightRecorder:
    """Records one rank of an engine until `close`, or the end of a `with` block, or a failed collective."""

    def __init__(
        self, path: str | Path, optimizer: ZeroOptimizer, about: Mapping[str, Any], steps: int
    ) -> None:
        """`about`: of the run, for whoever reads the recording. OSError if nothing can be written there."""
        self.path, self.rank = Path(path).absolute(), this_rank()
        groups = optimizer.groups
        self.places = {id(group): place for place, group in enumerate(groups.communicators)}
        self.held_bytes, self.held = HeldBytes(optimizer), dict[str, int]()
        self.numbers, self.begun_at = count(), time.perf_counter_ns()
        self.home, self.lock = threading.get_ident(), threading.Lock()
        whole = {
            **about,
            "version": VERSION,
            "run": _run_id(),
            "rank": self.rank,
            "ranks": dist.get_world_size() if dist.is_initialized() else 1,
            "host": socket.gethostname(),
            "started": time.time(),
            "device": groups.dense.shard.device.type,
            "groups": [group.ranks for group in groups.communicators],
            "keeps": steps,
        }
        self.box = BlackBox(self.path, self.rank, whole, steps)
        self.chapter = -1  # the file that knows what was held last
        self.open: dict[str, int] = {}  # passes, by kind
        self.traffic, self.backward = groups.traffic, optimizer.reducer.backward
        self.hooks = [
            optimizer.register_step_pre_hook(lambda *_: self.begin("step")),
            optimizer.register_step_post_hook(lambda *_: self.end_step()),
        ]
        self.at = (self.backward.at_begin, self._backward_begins), (self.backward.at_end, self._backward_ends)
        for calls, call in self.at:
            calls.append(call)
        self.traffic.listener = self
        self.finish = weakref.finalize(self, only_here(_finish), self.box)  # also when the process ends

    @property
    def closed(self) -> bool:
        """Whether nothing is recorded any more."""
        return not self.finish.alive

    def __enter__(self) -> "FlightRecorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("" if error is None else f"{kind.__name__ if kind else ''}: {error}")

    def close(self, failure: str = "") -> None:
        """End the recording. The file is complete when the last rank has ended its own."""
        self._end(failure or CLOSED)
        for hook in self.hooks:
            hook.remove()
        for calls, call in self.at:
            if call in calls:
                calls.remove(call)

    def _end(self, how: str) -> None:
        """Nothing is written any more. What is called meanwhile, perhaps on another thread, does nothing."""
        if self.finish.detach() is not None:
            self.traffic.listener = None
            _finish(self.box, how)

    # What is told ----------------------------------------------------------------------------------

    def _now(self) -> int:
        return (time.perf_counter_ns() - self.begun_at) // 1000

    def _begin(self, what: str, more: Mapping[str, Any]) -> int:
        number = next(self.numbers)
        with self.lock:  # so that what was held last is what the file says
            line: dict[str, Any] = {"n": number, "t": self._now(), "what": what, **more}
            held, chapter = self.held_bytes.now(), self.box.turns
            if held != self.held or chapter != self.chapter:
                self.held, self.chapter = held, chapter
                line["held"] = held
            self.box.write(line)
        return number

    def collective(self, call: CollectiveCall, make: Callable[[], None]) -> None:
        """Make a call, and note when it began and ended; where it fails, that is the recording's end."""
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
            log.error(SEEN, self.path)
            self._end(reason)

    def begin(self, what: str) -> None:
        """A pass or a step begins. One of the same kind that has not ended has failed."""
        self.end(what)
        if not self.closed:
            self.open[what] = self._begin(what, {})

    def end(self, what: str) -> None:
        """It ends; if nobody knows when it began, nothing is said."""
        number = self.open.pop(what, None)
        if number is not None and not self.closed:
            self.box.write({"n": number, "t": self._now()})

    def _backward_begins(self) -> None:
        self.begin("backward")

    def _backward_ends(self) -> None:
        self.end("backward")

    def end_step(self) -> None:
        """A step of the optimizer is over: what it keeps is counted anew."""
        self.end("step")
        if not self.closed:
            self.held_bytes.settle()
            self.begin("between")
            self.end("between")
            with self.lock:
                self.box.write({"step": self.box.step, "t": self._now()}, ends_step=True)


def _finish(box: BlackBox, how: str = LEFT) -> None:
    """This rank has ended; the last one of those that share this folder puts the recording together.

    So do those that do not end by `close`: the others may never end.
    """
    box.finish(how)
    folder = folder_of(box.path)
    try:
        alone = how != CLOSED and (not box.path.exists() or len(ranks_in(folder)) <= FEW)
        if alone or all_done(folder, box.about["ranks"]):
            put_together(box.path)
    except FileNotFoundError:  # another rank was as fast, and has done it
        pass
    except (OSError, RecordingError) as error:
        log.warning(LATER, box.path, error, box.path)


def _run_id() -> str:
    """The same on all ranks, and no other recording's: all ranks begin their recordings in the same order."""
    mine = f"{time.time_ns():x}"
    if not dist.is_initialized():
        return mine
    store: Any = keys_under("zero_full/recordings", default_store())
    number = store.add(f"begun by {this_rank()}", 1)
    return str(store.compare_set(f"run {number}", "", mine).decode())
