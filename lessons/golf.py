"""`golf N`: the learner's schedule against a stage of zero_min: equal bits, and then what it costs.

Three numbers are compared, all of them exact: the most live bytes in a step, the bytes sent, and the
collectives. Par is what the stage of zero_min needs for the same steps, measured beside it. None of the three
may exceed par by more than a quarter; their mean is the score.
"""

import importlib.util
import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lessons import interrupt, registry

if __name__ == "__main__":
    interrupt.end_silently()

import torch
from torch import Tensor, nn

import zero_min
from lessons.exercise import LessonError, shown
from zero_min.comm import Comm
from zero_min.gpt import GPT, GPTConfig, batch, load_text
from zero_min.ledger import Ledger
from zero_min.thread_comm import ThreadComm, run_world

START = Path(__file__).with_name("golf_start.py")
MODEL, RANKS, STEPS, LR = GPTConfig(context=16, layers=3, width=32), 4, 2, 1e-3
LIMIT = 60  # seconds for a course
KEPT = 5  # scores of each course
MOST = 1.25  # of par, in each of the three
Losses = Sequence[Callable[[], Tensor]]
Make = Callable[[nn.Module, Comm, float], Any]  # (model, comm, learning rate) -> a schedule


@dataclass(frozen=True)
class Course:
    """What is to be trained, and which stage is par, with these options."""

    number: int
    title: str
    stage: int
    micro_batches: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def par(self, model: nn.Module, comm: Comm, lr: float) -> "StageSchedule":
        """Par's schedule."""
        return StageSchedule(zero_min.STAGES[self.stage](model, comm, lr=lr, **self.options))


COURSES = [
    Course(1, registry.COURSES["1"], 1),
    Course(2, registry.COURSES["2"], 2, 2, {"bucket_size": 2**13}),
    Course(3, registry.COURSES["3"], 3),
]


@dataclass(frozen=True)
class Cost:
    """Of one step, of the rank that needs most of it."""

    peak: int  # live bytes at the most
    sent: int  # bytes
    calls: int  # collectives

    def score(self, par: "Cost") -> float:
        """Par is 100, and less is better: each of the three counts alike."""
        ratios = [100 * mine / theirs for mine, theirs in zip(*map(_numbers, (self, par)), strict=True)]
        return sum(ratios) / len(ratios)

    def exceeds(self, par: "Cost") -> bool:
        """Whether one of the three is too far over par to be counted."""
        return any(mine > MOST * theirs for mine, theirs in zip(*map(_numbers, (self, par)), strict=True))


def _numbers(cost: Cost) -> list[int]:
    return [cost.peak, cost.sent, cost.calls]


class StageSchedule:
    """A stage of zero_min as a schedule."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def step(self, losses: Losses) -> None:
        """As lessons do it."""
        self.trainer.zero_grad()
        for loss in losses:
            self.trainer.backward(loss())
        self.trainer.step()

    def parameters(self) -> list[Tensor]:
        """Whole ones, gathered if need be."""
        if isinstance(self.trainer, zero_min.Stage3):
            with self.trainer.gathered() as model:
                return [p.detach().clone() for p in model.parameters()]
        return list(self.trainer.model.parameters())


class Metered(ThreadComm):
    """A telephone that counts by itself: a schedule that empties or exchanges `ledger` changes no score."""

    _counted: list[int]  # bytes of each call

    @property
    def ledger(self) -> Ledger:
        """The ledger that the schedule sees."""
        return self._ledger

    @ledger.setter
    def ledger(self, new: Ledger) -> None:
        self._ledger, charge = new, new.charge
        self._counted = getattr(self, "_counted", [])

        def counting(collective: str, nbytes: int) -> None:
            self._counted.append(nbytes)
            charge(collective, nbytes)

        new.charge = counting  # type: ignore[method-assign]


def play_rank(comm: Metered, course: Course, make: Make) -> tuple[Cost, list[Tensor]]:
    """This rank's cost of the last step, and the parameters behind it."""
    text, generator = load_text(), torch.Generator().manual_seed(comm.rank)
    memory = Ledger()  # of its own: the schedule cannot reach it

    def loss(data: tuple[Tensor, Tensor]) -> Tensor:
        found: Tensor = model(*data)
        return found / course.micro_batches

    with memory.watch():
        model = GPT(MODEL)
        schedule = make(model, comm, LR)
        for _ in range(STEPS):
            data = [batch(text, 2, MODEL.context, generator) for _ in range(course.micro_batches)]
            comm._counted.clear()
            memory.peak = memory.live()
            schedule.step([lambda one=one: loss(one) for one in data])
        comm.settle()
    cost = Cost(memory.peak, sum(comm._counted), len(comm._counted))
    return cost, [p.detach().clone() for p in schedule.parameters()]


def play(course: Course, make: Make) -> tuple[Cost, list[list[Tensor]]]:
    """The cost of the rank that needs most, and every rank's parameters."""
    ranks = run_world(play_rank, RANKS, course, make, telephone=Metered)
    costs = [asdict(cost) for cost, _ in ranks]
    most = Cost(**{what: max(cost[what] for cost in costs) for what in costs[0]})
    return most, [params for _, params in ranks]


def wrong(course: Course, params: list[list[Tensor]]) -> str:
    """In words, how the parameters differ from plain training's; nothing if they have its bits.

    Micro-batches may be added up before the ranks are, or the other way round.
    """
    right = [play(course, replace(course, stage=stage, options={}).par)[1][0] for stage in (0, 2)]
    for rank, mine in enumerate(params):
        if [p.shape for p in mine] != [p.shape for p in right[0]]:
            return f"rank {rank}: parameters() returns other shapes than the model's parameters have"
        if not any(all(map(torch.equal, mine, one)) for one in right):
            most = max((a - b).abs().max().item() for a, b in zip(mine, right[0], strict=True))
            return f"rank {rank}: parameters differ from plain training's by up to {most:.2g}"
    return ""


@dataclass(frozen=True)
class Round:
    """A course that was played: what it cost, and why it does not count, if it does not."""

    cost: Cost
    par: Cost
    told: str

    @property
    def score(self) -> float:
        """In percent of par, as it is shown and compared."""
        return round(self.cost.score(self.par), 1)


def played(course: Course, make: Make) -> Round:
    """Play the course with this schedule, and with par's."""
    mine, params = play(course, make)
    theirs, _ = play(course, course.par)
    told = wrong(course, params)
    if not told and not mine.sent:
        told = "the ranks have sent nothing by `comm`, and have no other way to each other"
    if not told and mine.exceeds(theirs):
        told = f"no number may exceed {MOST:g} of par"
    return Round(mine, theirs, told)


def card(course: Course, make: Make, board: Path) -> int:
    """Play the course with this schedule, and print what it costs. Returns 1 if it is no par."""
    found = played(course, make)
    mine, theirs = found.cost, found.par
    if found.told and not mine.exceeds(theirs):
        print(f"not counted: {found.told}")
        return 1
    print(f"{'':<24}{'yours':>12}{f'par: stage {course.stage}':>16}")
    names = ["live bytes at the most", "bytes sent", "collectives"]
    for name, yours, stage in zip(names, _numbers(mine), _numbers(theirs), strict=True):
        over = " too much" if yours > MOST * stage else " over par" if yours > stage else ""
        print(f"{name:<24}{yours:>12,}{stage:>16,}  {over}".rstrip())
    if found.told:
        print(f"not counted: {found.told}")
        return 1
    print(f"{'score':<24}{found.score:>12.1f}{100.0:>16.1f}   less is better")
    print(f"your best: {', '.join(f'{one:.1f}' for one in remember(board, course, found.score, mine))}")
    return 0 if found.score <= 100 else 1


def remember(board: Path, course: Course, score: float, cost: Cost) -> list[float]:
    """Write the score down; returns the best ones of this course."""
    scores: dict[str, list[dict[str, float]]] = (
        json.loads(board.read_text(encoding="utf-8")) if board.exists() else {}
    )
    mine = scores.setdefault(str(course.number), [])
    entry = {"score": round(score, 1), **asdict(cost)}
    if entry not in mine:
        mine.append(entry)
    mine.sort(key=lambda entry: entry["score"])
    del mine[KEPT:]
    board.write_text(json.dumps(scores, indent=1), encoding="utf-8")
    return [entry["score"] for entry in mine]


def golf(number: str) -> int:
    """Write the start of the course, or play it with what is there."""
    courses = {str(course.number): course for course in COURSES}
    course, work = courses[number], registry.WORK / f"golf{number}.py"
    print(f"course {number}: {course.title}")
    if not work.exists():
        work.parent.mkdir(exist_ok=True)
        work.write_text(START.read_text(encoding="utf-8"), encoding="utf-8")
        print(f"{shown(work)} is written: plain data parallelism, far over par. Change it and play again")
        print("the rules, and where par can be beaten: site/docs/golf.md")
    command = [sys.executable, "-m", "lessons.golf", number, str(work)]
    try:
        return interrupt.run(command, LIMIT, cwd=registry.ROOT).returncode
    except subprocess.TimeoutExpired:
        raise LessonError(f"stopped after {LIMIT} s: is there a loop that never ends?") from None


def schedule_of(path: Path) -> Make:
    """The file's `Schedule`. Each rank reads the file by itself, so that ranks share none of its names."""

    def make(model: nn.Module, comm: Comm, lr: float) -> Any:
        return _module(path).Schedule(model, comm, lr)

    assert _module(path).Schedule  # an error of the file itself is raised here
    return make


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("schedule", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> int:
    """Play course argv[1] with the file argv[2], in this process. With argv[3]: write the round into it."""
    path, course = Path(sys.argv[2]), COURSES[int(sys.argv[1]) - 1]
    try:
        if len(sys.argv) > 3:
            found = played(course, schedule_of(path))
            said = {"cost": asdict(found.cost), "score": found.score, "told": found.told}
            Path(sys.argv[3]).write_text(json.dumps(said), encoding="utf-8")
            return 0
        return card(course, schedule_of(path), path.with_name("golf.json"))
    except Exception as error:  # whatever the learner's file does wrong
        for entry in traceback.extract_tb((error.__cause__ or error).__traceback__):
            if entry.filename == str(path):
                print(f"{shown(path)}, line {entry.lineno}: {entry.line}")
        print(f"not counted: {type(error).__name__}: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
