"""What there is: the lessons, and the rows of the demo. A new step adds itself here and nowhere else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zero_min
from zero_min import formula

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Lesson:
    """One step of the staircase."""

    number: int
    folder: str
    title: str
    source: str  # the file of zero_min whose marked regions are the exercise
    stage: int  # what the shared suite is run with when the exercise is checked

    @property
    def path(self) -> Path:
        """The lesson's folder."""
        return ROOT / "lessons" / self.folder

    @property
    def answer(self) -> Path:
        """The file the exercise is derived from."""
        return ROOT / self.source

    @property
    def work(self) -> Path:
        """The learner's file."""
        return ROOT / "work" / self.answer.name


LESSONS = [
    Lesson(0, "step0_adam", "Adam, and where sixteen bytes a parameter go", "zero_min/adam.py", 0),
    Lesson(1, "step1_optimizer_state", "Stage 1: shard the optimizer's state", "zero_min/stage1.py", 1),
    Lesson(
        2, "step2_gradients", "Stage 2: shard the gradients, while backward runs", "zero_min/stage2.py", 2
    ),
]


@dataclass(frozen=True)
class Row:
    """One line of the demo: a way to train, and what the formula says about its bytes."""

    name: str
    lesson: int
    trainer: Callable[..., Any]  # called as trainer(parts, model, comm, lr=...), parts as in `Parts`
    held: Callable[[Sequence[int], int], dict[str, int]]  # (sizes, world size) -> bytes a rank by kind
    sent: Callable[[Sequence[int], int], int]  # (sizes, world size) -> bytes all ranks send in a step


class Parts:
    """zero_min's classes by name, some of them perhaps replaced by a learner's."""

    def __init__(self, mine: Any = None) -> None:
        self.mine = mine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mine, name, None) or getattr(zero_min, name)


def _stage(number: int) -> Row:
    def trainer(parts: Any, model: Any, comm: Any, **options: Any) -> Any:
        return getattr(parts, f"Stage{number}")(model, comm, optimizer=parts.Adam, **options)

    return Row(
        f"stage {number}",
        number,
        trainer,
        lambda sizes, world_size: formula.held(number, sizes, world_size),
        lambda sizes, world_size: formula.sent(number, sizes, world_size),
    )


ROWS = [_stage(number) for number in zero_min.STAGES]
