"""The lessons. A new step adds itself here, and its row of the demo in `rows.py`.

Nothing here imports torch, so that `list` and `hint` answer at once.
"""

import json
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

ROOT = Path(__file__).parent.parent
WORK = ROOT / "work"
RELEASE = ROOT / "release.json"  # only in a folder that `release` has made: which lessons are assigned


def assigned() -> list[str] | None:
    """The numbers of the lessons in a release; None in the repository, which has all and their answers."""
    if not RELEASE.exists():
        return None
    found: list[str] = json.loads(RELEASE.read_text(encoding="utf-8"))["lessons"]
    return found


RELEASED = assigned()
COURSES = {  # of golf, by number
    "1": "nobody needs all of Adam's averages",
    "2": "gradients leave while backward runs, in two micro-batches",
    "3": "parameters come and go",
}


@dataclass(frozen=True)
class Lesson:
    """One step of the staircase."""

    number: int | Fraction  # 1/2 lies between 0 and 1
    folder: str
    title: str
    sources: tuple[str, ...]  # the files of zero_min whose marked regions are the exercise
    stage: int | None  # whose drawing it shows; None has a drawing of its own (`draw.OF_NO_STAGE`)
    presumes: str
    tests: tuple[str, ...] = ()  # what `check` runs after the lesson's own task tests
    oracles: tuple[str, ...] = ()  # tests that hold the answers in another form: a release goes without

    @property
    def modules(self) -> list[str]:
        """The modules that the learner's files replace."""
        return [f"zero_min.{Path(source).stem}" for source in self.sources]

    @property
    def path(self) -> Path:
        """The lesson's folder."""
        return ROOT / "lessons" / self.folder

    @property
    def page(self) -> Path:
        """Where to read it: the page of the built site, or the text it is made from."""
        built = ROOT / "build" / "site" / "lessons" / self.folder / "lesson.html"
        return built if built.exists() else self.path / "lesson.md"

    @property
    def notebook(self) -> Path:
        """The notebook of the same step."""
        words = re.sub(r"^step\d+(_\d+)?_", "", self.folder)
        return ROOT / "notebooks" / f"{int(self.number):02}{'b' if self.number % 1 else ''}_{words}.ipynb"

    @property
    def label(self) -> str:
        """The number as file names have it: 1, or 1_2 for a half."""
        return str(self.number).replace("/", "_")

    @property
    def files(self) -> list[tuple[Path, Path]]:
        """(answer, learner's file) for every source."""
        return [(ROOT / source, WORK / Path(source).name) for source in self.sources]


def _conformance(stage: int) -> tuple[str, ...]:
    return ("tests/conformance/test_conformance.py", "--stage", str(stage))


LESSONS = [
    Lesson(
        0,
        "step0_adam",
        "Adam, and where sixteen bytes per parameter go",
        ("zero_min/adam.py", "zero_min/stage0.py"),
        0,
        "to have trained a network with torch once",
        ("tests/zero_min/test_adam.py", *_conformance(0)),
    ),
    Lesson(
        1,
        "step1_optimizer_state",
        "Stage 1: shard the optimizer's state",
        ("zero_min/stage1.py",),
        1,
        "lesson 0",
        ("tests/zero_min/test_partition.py", *_conformance(1)),
    ),
    Lesson(
        2,
        "step2_gradients",
        "Stage 2: shard the gradients, while backward runs",
        ("zero_min/stage2.py",),
        2,
        "lesson 1",
        _conformance(2),
    ),
    Lesson(
        3,
        "step3_parameters",
        "Stage 3: shard the parameters",
        ("zero_min/stage3.py", "zero_min/prefetch.py"),
        3,
        "lesson 2",
        (
            "tests/zero_min/test_sliced.py",
            "tests/zero_min/test_stage3.py",
            "tests/zero_min/test_prefetch.py",
            *_conformance(3),
        ),
    ),
    Lesson(
        4,
        "step4_precision",
        "Precision: 16 bits, a master and a loss scale",
        ("zero_min/precision.py",),
        2,
        "lesson 2",
        ("tests/zero_min/test_precision.py",),
    ),
    Lesson(
        5,
        "step5_offload",
        "Offload: let the state wait elsewhere",
        ("zero_min/offload.py",),
        2,
        "lessons 2 and 4",
        ("tests/zero_min/test_offload.py",),
    ),
    Lesson(
        6,
        "step6_zero_one_adam",
        "0/1 Adam: one bit a value",
        ("zero_min/compression.py", "zero_min/zero_one_adam.py"),
        0,
        "lessons 0 and 1",
        ("tests/zero_min/test_zero_one_adam.py",),
        ("tests/zero_min/test_plain_zero_one_adam.py",),
    ),
    Lesson(
        7,
        "step7_muon",
        "Bonus: Muon, a rule that must see whole matrices",
        ("zero_min/muon.py",),
        2,
        "lesson 2",
        ("tests/zero_min/test_muon.py",),
    ),
    Lesson(
        8,
        "step8_tensor_parallel",
        "Bonus: tensor parallelism, a part of every layer on each rank",
        ("zero_min/tensor_parallel.py",),
        None,
        "lessons 0 and 1/2",
        ("tests/zero_min/test_tensor_parallel.py",),
    ),
    Lesson(
        9,
        "step9_pipeline",
        "Bonus: pipeline parallelism, some of the layers on each rank",
        ("zero_min/pipeline.py",),
        None,
        "lessons 0 and 1/2",
        ("tests/zero_min/test_pipeline.py",),
    ),
    Lesson(
        10,
        "step10_activations",
        "Bonus: activations, what a forward keeps and how to keep less",
        ("zero_min/activations.py",),
        None,
        "lessons 0 and 5",
        ("tests/zero_min/test_activations.py",),
    ),
    Lesson(
        11,
        "step11_one_gpu",
        "Bonus: one GPU, from the bytes of the bill to those of the card",
        ("zero_min/allocator.py",),
        None,
        "lesson 2",
        ("tests/zero_min/test_allocator.py",),
    ),
    Lesson(
        Fraction(1, 2),
        "step1_2_ring",
        "Build the telephone: a ring of send and receive",
        ("zero_min/ring.py",),
        None,
        "lesson 0",
        ("tests/zero_min/test_ring.py",),
    ),
]
if RELEASED is not None:
    LESSONS = [lesson for lesson in LESSONS if str(lesson.number) in RELEASED]
IN_ORDER = sorted(LESSONS, key=lambda lesson: lesson.number)  # as they are read
