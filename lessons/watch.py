"""The learner's file on four ranks, line by line, as one HTML file that is stepped forwards and backwards.

Each rank is a thread, and Python tells it of every line that it is about to run in the learner's file; what
other files do is not shown. The ranks are put beside each other from one collective to the next, because
between two collectives nobody waits for anybody. Where ranks do different things at one time (a pipeline),
each goes on line by line until it waits for a message. `python -m lessons watch N` writes the file.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import zero_min
from lessons.exercise import LessonError, find_lesson, shown
from lessons.registry import ROOT, Lesson
from lessons.rows import ROWS, Row
from zero_min.comm import Comm, WorldError, caller
from zero_min.gpt import load_text
from zero_min.ledger import Ledger, held
from zero_min.thread_comm import ThreadComm, run_world

__tracebackhide__ = True  # in an error about waiting ranks the line that called is the trainer's
RANKS, BATCH, WIDTHS = 4, 2, (8, 8, 8, 4)
BUCKET = 64  # elements, so that stage 2 has several buckets
MOST_LINES = 4000  # of a rank; what comes after is not shown
SECONDS = 5.0  # until a rank that waits gives up, and four times that until a loop is taken for endless
KINDS = ("parameters", "gradients", "optimizer")
CONSTRUCTOR = "constructor"  # the phase before the step: the page opens after it
PAGE = Path(__file__).with_name("watch_page")


class Layers(nn.Module):
    """A few layers without biases: small, because every line is shown."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(WIDTHS))
        for p in self.parameters():
            nn.init.normal_(p, std=0.2, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """Any loss will do."""
        for layer in self.layers:
            x = layer(x.to(next(self.parameters()).dtype)).tanh()
        return x.square().mean()


@dataclass(frozen=True)
class Line:
    """A line that is about to run, and what the rank holds then: bytes by kind, and of all that is live."""

    file: int
    number: int
    phase: str
    memory: tuple[int, ...]


@dataclass(frozen=True)
class Meeting:
    """A collective that a rank has called, or a `receive`: where, and the bytes for each rank."""

    what: str
    where: str
    to: tuple[int, ...]
    source: int = -1  # of a `receive`: whom it waits for


@dataclass(frozen=True)
class Sent:
    """A message: how many lines its sender had come to, to whom it goes, and its bytes."""

    lines: int
    to: int
    size: int


@dataclass
class Watcher:
    """What one rank did: its lines up to the first collective, up to the second, and so on."""

    files: Sequence[str]
    lines: list[list[Line]] = field(default_factory=lambda: [[]])
    meetings: list[Meeting] = field(default_factory=list)
    mail: list[Sent] = field(default_factory=list)
    received: int = 0  # messages that it has got
    phase: str = CONSTRUCTOR
    end: str = ""  # how it ended, if it did
    stopped: bool = False  # it would have gone on, but another rank could not
    trainer: Any = None
    ledger: Ledger = field(default_factory=Ledger)
    count: int = 0
    deadline: float = 0.0
    closed: bool = False  # the run is over: a rank that still runs is told to stop

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        """Python calls this for every function, and for every line of those that we care for."""
        name = frame.f_code.co_filename
        if name not in self.files:
            return None
        if event == "line":
            self._about_to_run(self.files.index(name), frame.f_lineno)
        return self.trace

    def _about_to_run(self, file: int, number: int) -> None:
        self.count += 1
        if self.closed or time.monotonic() > self.deadline:
            raise WorldError(f"line {number} still runs after {4 * SECONDS:g} s: a loop that never ends?")
        last = self.lines[-1][-1] if self.lines[-1] else None
        if self.count <= MOST_LINES and (last is None or (last.file, last.number) != (file, number)):
            self.lines[-1].append(Line(file, number, self.phase, self._memory()))

    def _memory(self) -> tuple[int, ...]:
        try:
            kinds = {kind: held(tensors) for kind, tensors in self.trainer.holdings().items()}
        except Exception:  # in the middle of a line's work, or in unfinished code, it may not be possible
            kinds = {}
        return (*(kinds.get(kind, 0) for kind in KINDS), self.ledger.live())

    def close(self) -> "Watcher":
        """What was recorded until now, which a rank in an endless loop does not change any more."""
        self.closed = True
        lines = [list(stretch) for stretch in self.lines]
        return replace(self, lines=lines, meetings=list(self.meetings), mail=list(self.mail))

    def meet(self, what: str, to: Sequence[int], source: int = -1) -> None:
        """A collective is called, or something is waited for; from here on lines are those after it."""
        self.meetings.append(Meeting(what, caller(), tuple(to), source))
        self.lines.append([])


class WatchedComm(ThreadComm):
    """A rank's telephone that writes down who is sent how much."""

    def __init__(self, comm: ThreadComm, watcher: Watcher) -> None:
        super().__init__(comm.rank, comm.world)
        self.ledger, self.watcher = watcher.ledger, watcher
        self.posted = [0] * comm.world_size  # bytes sent to each rank since this one has last received

    def send(self, tensor: Tensor, to: int) -> None:
        """As ever, added to what the next arrows show."""
        super().send(tensor, to)
        self.posted[to] += tensor.nbytes
        self.watcher.mail.append(Sent(sum(map(len, self.watcher.lines)), to, tensor.nbytes))

    def receive(self, like: Tensor, source: int) -> Tensor:
        """As ever, written down."""
        self.watcher.meet("receive", self.posted, source)
        self.posted = [0] * self.world_size
        got = super().receive(like, source)
        self.watcher.received += 1
        return got

    def _meets(self, what: str, to: Sequence[int]) -> None:
        self.watcher.meet(what, [0 if rank == self.rank else n for rank, n in enumerate(to)])

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """As ever, written down."""
        self._meets("all_reduce", [2 * tensor.nbytes // self.world_size] * self.world_size)
        return super().all_reduce(tensor)

    def reduce_scatter(self, parts: Sequence[Tensor], label: str = "") -> Tensor:
        """As ever, written down."""
        self._meets("reduce_scatter", [part.nbytes for part in parts])
        return super().reduce_scatter(parts, label)

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        """As ever, written down."""
        self._meets("all_to_all", [part.nbytes for part in parts])
        return super().all_to_all(parts, sizes)

    def all_gather(self, whole: Tensor, mine: Tensor, label: str = "") -> Tensor:
        """As ever, written down."""
        self._meets("all_gather", [mine.nbytes] * self.world_size)
        return super().all_gather(whole, mine, label)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """As ever, written down."""
        self._meets("broadcast", [tensor.nbytes * (self.rank == source)] * self.world_size)
        return super().broadcast(tensor, source)

    def barrier(self) -> None:
        """As ever, written down."""
        self._meets("barrier", [0] * self.world_size)
        super().barrier()


Body = Callable[[Comm, Watcher], None]  # what a rank does


def _one_rank(comm: ThreadComm, body: Body, watchers: Sequence[Watcher]) -> None:
    watcher = watchers[comm.rank]
    watcher.deadline = time.monotonic() + 4 * SECONDS
    sys.settrace(watcher.trace)
    try:
        with watcher.ledger.watch():
            body(WatchedComm(comm, watcher), watcher)
        watcher.end = "has ended"
    except WorldError as error:
        if "still runs" in str(error):
            watcher.end = str(error)
        watcher.stopped = not watcher.end
        raise
    except BaseException as error:
        watcher.end = f"raised {type(error).__name__}: {error}"
        raise
    finally:
        sys.settrace(None)
        _let_others_come(watchers)


def _let_others_come(watchers: Sequence[Watcher]) -> None:
    """Whoever ends wakes those who wait: first let them come to where they will wait."""
    before: list[tuple[int, int]] = []
    for _ in range(20):
        now = [(w.count, len(w.meetings)) for w in watchers]
        if now == before:
            return
        before = now
        time.sleep(0.1)


def _body(lesson: Lesson) -> Body:
    """A step of the lesson's trainer; of a lesson without a row in the demo, what its experiment shows."""
    row = next((row for row in ROWS if row.lesson == lesson.number), None)
    if row is not None:
        return lambda comm, watcher: _train(comm, row, watcher)
    body: Body | None = getattr(experiment_of(lesson), "watched", None)
    if body is None:
        raise LessonError(
            f"lesson {lesson.number} cannot be watched: it has no row in the demo, and its experiment no "
            f"function `watched`. See python -m lessons run {lesson.number}"
        )
    return body


def experiment_of(lesson: Lesson) -> Any:
    """The module with what the lesson measures."""
    return importlib.import_module(f"lessons.{lesson.folder}.experiment")


def _train(comm: Comm, row: Row, watcher: Watcher) -> None:
    generator = torch.Generator().manual_seed(comm.rank)
    model = Layers()
    if row.lesson == 2:
        watcher.trainer = trainer = zero_min.Stage2(model, comm, bucket_size=BUCKET)
    else:
        watcher.trainer = trainer = row.trainer(model, comm, 1e-2, row.steps)
    steps = row.steps if row.steps > 2 else 1  # more where they differ
    for step in range(1, steps + 1):
        of = f" of step {step}" if steps > 1 else ""
        watcher.phase = f"zero_grad{of}"
        trainer.zero_grad()
        watcher.phase = f"forward{of}"
        loss = trainer.model(torch.randn(BATCH, WIDTHS[0], generator=generator))
        watcher.phase = f"backward{of}"
        trainer.backward(loss)
        del loss
        watcher.phase = f"update{of}"
        trainer.step()


# From ranks to moments ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """All ranks at once: the line of each, counted from its first; who waits; the collective that happens."""

    at: tuple[int, ...]
    waits: tuple[bool, ...]
    meeting: int = -1
    arrived: tuple[tuple[int, int, int], ...] = ()  # messages: from whom, to whom, bytes


def moments(watchers: Sequence[Watcher], broken: bool) -> list[Moment]:
    """From one collective to the next everybody goes line by line; who is there first waits.

    Where a broken run's ranks do not come together, it ends.
    """
    made: list[Moment] = []
    done = [0] * len(watchers)  # lines before this stretch
    for stretch in range(max(len(w.lines) for w in watchers)):
        mine = [w.lines[stretch] if stretch < len(w.lines) else [] for w in watchers]
        there = [stretch < len(w.meetings) for w in watchers]
        for step in range(max(map(len, mine))):
            at = tuple(
                max(0, n + min(step, len(lines) - 1)) if lines else max(0, n - 1)
                for n, lines in zip(done, mine, strict=True)
            )
            waits = tuple(
                step >= len(lines) and is_there for lines, is_there in zip(mine, there, strict=True)
            )
            made.append(Moment(at, waits))
        done = [n + len(lines) for n, lines in zip(done, mine, strict=True)]
        at = tuple(max(0, n - 1) for n in done)
        called = {w.meetings[stretch].what for w, came in zip(watchers, there, strict=True) if came}
        together = all(there) and len(called) == 1
        if together:
            made.append(Moment(at, (False,) * len(watchers), stretch))
        elif called and broken:
            return [*made, Moment(at, tuple(there))]
    return made


def moments_by_mail(watchers: Sequence[Watcher]) -> list[Moment]:
    """Each rank goes line by line, as fast as all others, and waits where its message is not sent yet."""
    ranks, made = range(len(watchers)), list[Moment]()
    ends = [sum(map(len, w.lines)) for w in watchers]
    stops = [[sum(map(len, w.lines[: n + 1])) for n in range(len(w.meetings))] for w in watchers]
    at, got = [0 for _ in ranks], [0 for _ in ranks]  # lines that each rank has come to, and its messages
    taken = [[0 for _ in ranks] for _ in ranks]  # messages, by sender and receiver
    while True:
        now, waits, arrived = list(at), [False for _ in ranks], list[tuple[int, int, int]]()
        for rank, watcher in enumerate(watchers):
            if got[rank] == len(stops[rank]) or at[rank] < stops[rank][got[rank]]:
                now[rank] = min(at[rank] + 1, ends[rank])
                continue
            source = watcher.meetings[got[rank]].source
            letters = [each for each in watchers[source].mail if each.to == rank][taken[source][rank] :]
            waits[rank] = not letters or at[source] <= letters[0].lines  # until the line behind has begun
            if not waits[rank]:
                arrived.append((source, rank, letters[0].size))
        if now == at and not arrived and made:  # all have ended, or wait for ever
            return [*made, replace(made[-1], waits=tuple(waits), arrived=())] if any(waits) else made
        for source, rank, _ in arrived:
            taken[source][rank] += 1
            got[rank] += 1
        at = now
        made.append(Moment(tuple(max(0, n - 1) for n in at), tuple(waits), -1, tuple(arrived)))


def waits_for(watchers: Sequence[Watcher]) -> list[list[int]]:
    """For each rank those that it waits for at the end, in vain."""
    furthest = max(len(w.meetings) for w in watchers)
    behind = [rank for rank, w in enumerate(watchers) if len(w.meetings) < furthest]
    culprits = [rank for rank in behind if not watchers[rank].stopped] or behind
    found: list[list[int]] = []
    for rank, w in enumerate(watchers):
        if w.end or not w.meetings:
            found.append([])
        elif w.meetings[-1].source >= 0:
            found.append([w.meetings[-1].source] if w.received < len(w.meetings) else [])
        else:
            found.append([] if rank in behind else culprits)
    return found


def last_words(watchers: Sequence[Watcher], error: str) -> list[str]:
    """How each rank ended if not all ended well: who waits for whom."""
    if not error:
        return []
    furthest = max(len(w.meetings) for w in watchers)
    said = []
    for rank, (w, others) in enumerate(zip(watchers, waits_for(watchers), strict=True)):
        place = f"{w.meetings[-1].what} ({w.meetings[-1].where})" if w.meetings else ""
        last = f"; its last call: {place}" if place else ""
        whom = " for " + " and ".join(f"rank {other}" for other in others) if others else ""
        if w.end:
            said.append(f"rank {rank} {w.end}{last}")
        elif others or len(w.meetings) == furthest > 0:
            said.append(f"rank {rank} waits in {place}{whom}")
        elif w.stopped:
            said.append(f"rank {rank} was stopped on its way{last}")
        else:
            lines = [line for stretch in w.lines for line in stretch]
            at = f"{Path(w.files[lines[-1].file]).name}:{lines[-1].number}" if lines else "no line of yours"
            said.append(f"rank {rank} has not come: it is at {at}{last}")
    return said


# The file ----------------------------------------------------------------------------------------


def first_of_the_step(watchers: Sequence[Watcher], shown_moments: Sequence[Moment]) -> int:
    """The first moment with a line of the step; 0 if no rank has come so far."""
    lines = [[line for stretch in w.lines for line in stretch] for w in watchers]
    for number, moment in enumerate(shown_moments):
        now = [mine[at] for mine, at in zip(lines, moment.at, strict=True) if mine]
        if any(line.phase != CONSTRUCTOR for line in now):
            return number
    return 0


def data(lesson: Lesson, watchers: Sequence[Watcher], error: str) -> dict[str, Any]:
    """What the page needs. Memories and phases are numbered: many lines have the same."""
    has_row = any(row.lesson == lesson.number for row in ROWS)
    by_mail = not has_row and getattr(experiment_of(lesson), "RANKS_DIFFER", False)
    shown_moments = moments_by_mail(watchers) if by_mail else moments(watchers, error != "")
    memories: dict[tuple[int, ...], int] = {}
    phases: dict[str, int] = {}

    def numbers(line: Line) -> list[int]:
        phase = phases.setdefault(line.phase, len(phases))
        return [line.file, line.number, phase, memories.setdefault(line.memory, len(memories))]

    ranks = [
        {
            "lines": [numbers(line) for stretch in w.lines for line in stretch],
            "meetings": [[m.what, m.where, m.to] for m in w.meetings],
            "end": w.end,
        }
        for w in watchers
    ]
    files = [{"name": shown(Path(f)), "text": Path(f).read_text(encoding="utf-8")} for f in watchers[0].files]
    return {
        "lesson": str(lesson.number),
        "files": files,
        "phases": list(phases),
        "memories": list(memories),
        "ranks": ranks,
        "start": first_of_the_step(watchers, shown_moments),
        "moments": [[m.at, [int(w) for w in m.waits], m.meeting, m.arrived] for m in shown_moments],
        "end": last_words(watchers, error),
        "waitsFor": waits_for(watchers) if error else [],
        "error": error,
        "cut": any(w.count > MOST_LINES for w in watchers),
    }


def page(content: dict[str, Any]) -> str:
    """One HTML file with everything in it."""
    parts = {name: (PAGE / f"page.{name}").read_text(encoding="utf-8") for name in ("html", "css", "js")}
    json_text = json.dumps(content, separators=(",", ":")).replace("</", "<\\/")
    html = parts["html"].replace("{{title}}", escape(f"Lesson {content['lesson']} on four ranks"))
    return html.replace("{{css}}", parts["css"]).replace("{{js}}", parts["js"]).replace("{{data}}", json_text)


def watched(lesson: Lesson) -> dict[str, Any]:
    """Run what the lesson shows and return what the page needs, whether it ends or not."""
    body, error = _body(lesson), ""  # it imports the lesson's files
    files = [str(sys.modules[f"zero_min.{answer.stem}"].__file__) for answer, _ in lesson.files]
    watchers = [Watcher(files) for _ in range(RANKS)]
    load_text()  # now: it is everybody's, and no rank holds it
    try:
        run_world(_one_rank, RANKS, body, watchers, timeout=SECONDS)
    except WorldError as wrong:
        error = str(wrong)
    return data(lesson, [watcher.close() for watcher in watchers], error)


def show(number: str) -> str:
    """Write the page and say where it is."""
    lesson = find_lesson(number)
    content = watched(lesson)
    path = ROOT / "build" / "lessons" / f"watch{lesson.label}.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(content), encoding="utf-8")
    said = f"{len(content['moments'])} moments: open {path.relative_to(ROOT)} in a browser"
    return "\n".join([*content["end"], "", content["error"], "", said] if content["error"] else [said])
