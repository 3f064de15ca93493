"""What an instructor plans with: each lesson's time, tasks and points, as the lessons themselves say."""

from places import relative

from lessons import contents
from lessons.exercise import built_on, tasks
from lessons.grade import CONTRACT, TASK, most
from lessons.registry import IN_ORDER, Lesson


def render(_: str, page: str) -> str:
    """The table of lessons."""
    lines = [
        "| lesson | presumes | its code uses lessons | minutes to read | tasks | points |",
        "|---|---|---|---:|---|---:|",
        *(_row(lesson, page) for lesson in IN_ORDER),
        f"| all | | | {sum(map(contents.minutes, IN_ORDER))} | | {sum(map(most, IN_ORDER))} |",
    ]
    return "\n".join(lines)


def _row(lesson: Lesson, page: str) -> str:
    text = relative(f"lessons/{lesson.folder}/lesson.md", page)
    names = tasks(lesson)
    uses = ", ".join(str(other.number) for other in built_on(lesson)) or "none"
    points = f"{len(names)} x {TASK} + {CONTRACT} = {most(lesson)}"
    return (
        f"| {lesson.number}. [{lesson.title}]({text}) | {lesson.presumes} | {uses} "
        f"| {contents.minutes(lesson)} | {', '.join(names)} | {points} |"
    )
