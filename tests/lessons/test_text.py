"""The lessons' texts: nothing in them is stale, nothing is missing, and every question has one home."""

import re
import textwrap
from fractions import Fraction
from pathlib import Path

import pytest

from lessons import draw, weave
from lessons.registry import LESSONS, ROOT, Lesson

each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=[lesson.folder for lesson in LESSONS])
QUESTIONS = {
    0: 2,
    Fraction(1, 2): 3,
    1: 4,
    2: 7,
    3: 5,
    4: 2,
    5: 1,
    6: 3,
    7: 3,
    8: 3,
    9: 3,
    10: 3,
    11: 3,
}  # how many each lesson answers
PARTS = [
    "bill",
    "predict",
    "changes",
    "run it",
    "formula",
    "exercise",
    "break it",
    "question",
    "when not",
    "zero_full",
    "processes",
]


def text_of(lesson: Lesson) -> str:
    return (lesson.path / "lesson.md").read_text()


@pytest.mark.rotates
@each_lesson
def test_code_numbers_and_drawings_are_fresh(lesson: Lesson) -> None:
    for path, content in weave.woven(lesson).items():
        assert path.read_text() == content, f"{path.relative_to(ROOT)} is stale: make weave"


def test_the_readme_and_the_notebooks_are_fresh() -> None:
    for path, content in weave.front().items():
        assert path.read_text(encoding="utf-8") == content, f"{path.relative_to(ROOT)} is stale: make weave"


@each_lesson
def test_a_lesson_has_all_its_parts_in_order(lesson: Lesson) -> None:
    headings = [line.lower() for line in text_of(lesson).splitlines() if line.startswith("## ")]
    found = [next((i for i, heading in enumerate(headings) if part in heading), None) for part in PARTS]
    assert None not in found, dict(zip(PARTS, found, strict=True))
    assert found == sorted(found)


@each_lesson
def test_a_lesson_takes_twenty_to_forty_minutes(lesson: Lesson) -> None:
    prose = re.sub(r"```.*?```", "", text_of(lesson), flags=re.DOTALL)
    assert 1200 <= len(prose.split()) <= 4000  # 100 careful words a minute, plus the exercises


def test_questions_are_numbered_by_lesson_and_all_are_listed() -> None:
    listed = (ROOT / "lessons" / "README.md").read_text(encoding="utf-8")
    for lesson in LESSONS:
        asked = text_of(lesson).partition("\n## Questions\n")[2].partition("\n## ")[0]
        numbers = re.findall(r"^### (\S+) ", asked, flags=re.MULTILINE)
        assert numbers == [f"{lesson.number}.{i}." for i in range(1, QUESTIONS[lesson.number] + 1)]
        assert all(f"* {number} [" in listed for number in numbers)


@each_lesson
def test_links_and_pictures_exist(lesson: Lesson) -> None:
    for target in re.findall(r"\]\(([^)#]+)", text_of(lesson)):
        if "://" not in target:
            assert (lesson.path / target).exists(), target
    assert re.search(r"!\[.{40,}\]\(ranks.svg\)", text_of(lesson)), "the drawing needs a real description"


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.md")), ids=lambda path: path.name)
def test_top_level_pages_have_no_dead_links(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
        if "://" not in target:
            assert (ROOT / target).exists(), target


def test_every_python_block_is_valid_python(subtests: pytest.Subtests) -> None:
    for lesson in LESSONS:
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", text_of(lesson), flags=re.DOTALL)):
            with subtests.test(lesson=lesson.number, block=number):
                compile(
                    "def block():\n" + textwrap.indent(block, "    ") + "\n    pass", lesson.folder, "exec"
                )


def test_a_drawing_shows_who_holds_what() -> None:
    filled = {number: draw.stage(number).count('fill="#') for number in range(4)}
    assert filled == {0: 48, 1: 36, 2: 24, 3: 12}  # of 3 kinds x 4 ranks x 4 quarters


def test_the_ring_s_drawing_ends_with_everybody_s_numbers_everywhere() -> None:
    rows = [
        re.findall(r">(\d)</text>", row) for row in re.split(r">(?:start|round \d)</text>", draw.ring())[1:]
    ]
    assert [sum(map(int, row)) for row in rows] == [16, 20, 28, 40, 52, 60, 64]
    assert set(rows[0]) == {"1"} and set(rows[-1]) == {"4"}
    edges = [row.count("stroke-width") for row in draw.ring().split('text-anchor="end"')[1:]]
    assert edges == [0, *[4] * 6]  # in each round everybody receives one piece
