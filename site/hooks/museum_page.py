"""The museum of mistakes: each wrong answer, what `check` said about it, and where it is explained."""

import difflib
from collections.abc import Iterator

from places import SiteError, relative

from lessons import museum
from lessons.exercise import unmarked
from lessons.registry import IN_ORDER, Lesson
from lessons.verdict import explains


def render(_: str, page: str) -> str:
    """All lessons in the order of reading, their mistakes folded."""
    kept = museum.recorded()
    return "\n".join(line for lesson in IN_ORDER for line in _lesson(lesson, kept, page))


def _lesson(lesson: Lesson, kept: dict[str, dict[str, museum.Exhibit]], page: str) -> Iterator[str]:
    text = relative(f"lessons/{lesson.folder}/lesson.md", page)
    found = kept.get(str(lesson.number), {})
    yield f"\n## Lesson {lesson.number}\n"
    yield f"[{lesson.title}]({text}). Try one: `python -m lessons bug {lesson.number}`.\n"
    task = ""
    for number, mistake in enumerate(museum.mistakes(lesson), 1):
        seen = found.get(mistake.name)
        if seen is None:
            raise SiteError(f"{mistake.name} is not in {museum.RECORD.name}: python -m lessons.museum")
        if mistake.task != task:
            task = mistake.task
            yield f"\n### {task} {{ #lesson-{lesson.label}-{task} }}\n"
        place = explains(lesson, mistake.task, mistake.found)
        assert place is not None, f"{mistake.name}: a test asks for a paragraph of every mistake"
        yield '<details markdown="1">'
        yield f"<summary>{number}. {mistake.name}: {_escaped(mistake.says)}</summary>\n"
        yield f"```diff\n{_difference(lesson, mistake)}\n```\n"
        yield f"```text\n{seen.test}\n{seen.message}\nthat is: {seen.words}\n```\n"
        yield f"Explained in [{mistake.heading}]({text}#{place.mark}).\n"
        yield "</details>\n"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _difference(lesson: Lesson, mistake: museum.Mistake) -> str:
    """The lines that are changed, without those around them."""
    lines = []
    for answer, wrong in museum.seeded(lesson, mistake).items():
        right = unmarked(answer.read_text(encoding="utf-8"))
        compared = difflib.unified_diff(right.splitlines(), wrong.splitlines(), n=0, lineterm="")
        lines += [line for line in compared if not line.startswith(("---", "+++", "@@"))]
    margin = min(len(line) - len(line[1:].lstrip()) - 1 for line in lines if line[1:].strip())
    return "\n".join(line[0] + line[1 + margin :] for line in lines)
