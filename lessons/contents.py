"""What lessons/README.md lists: the lessons with their times and what they presume, and all questions."""

import re

from lessons.exercise import find_lesson
from lessons.registry import IN_ORDER, Lesson

WORDS_A_MINUTE = 100  # of careful reading
FENCE = re.compile(r"```.*?```", re.DOTALL)
QUESTION = re.compile(r"^### ([\d/]+)\.(\d+)\. (.+)$", re.MULTILINE)


def text_of(lesson: Lesson) -> str:
    """What the reader of a lesson reads."""
    return (lesson.path / "lesson.md").read_text(encoding="utf-8")


def minutes(lesson: Lesson) -> int:
    """How long it takes to read it without its code, to five minutes."""
    words = len(FENCE.sub("", text_of(lesson)).split())
    return 5 * round(words / WORDS_A_MINUTE / 5)


def before(number: str) -> str:
    """`before N`: what lesson N presumes and how long it takes."""
    lesson = find_lesson(number)
    return (
        f"*Before this: {lesson.presumes}. Reading takes about {minutes(lesson)} minutes, at "
        f"{WORDS_A_MINUTE} words a minute and without the code; the exercise comes on top.*"
    )


def lessons() -> str:
    """The table of all lessons."""
    lines = ["| | lesson | before it | minutes to read |", "|---|---|---|---:|"]
    for x in IN_ORDER:
        lines.append(f"| {x.number} | [{x.title}]({x.folder}/lesson.md) | {x.presumes} | {minutes(x)} |")
    return "\n".join(lines)


def questions() -> str:
    """All questions, each with a link to its answer."""
    lines = []
    for lesson in IN_ORDER:
        for number, place, question in QUESTION.findall(text_of(lesson)):
            anchor = slug(f"{number}.{place}. {question}")
            lines.append(f"* {number}.{place}. [{question}]({lesson.folder}/lesson.md#{anchor})")
    return "\n".join(lines)


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and the site make it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
