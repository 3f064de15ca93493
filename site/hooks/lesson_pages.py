"""The lessons' texts as pages: what lessons/step*/lesson.md says, ready for the site."""

import re

from places import ROOT, page_of, relative, relinked, shown, unfolded

from lessons import contents, repository
from lessons.registry import LESSONS, Lesson
from lessons.verdict import EXPLAINS, Paragraph, paragraphs

WOVEN = re.compile(r"^<!-- /?weave.*?-->\n?", re.MULTILINE)


def pages() -> dict[str, str]:
    """Every lesson's page, and their list."""
    home = "lessons/README.md"
    listed = relinked(WOVEN.sub("", (ROOT / home).read_text(encoding="utf-8")), home, "lessons/index.md")
    return {
        "lessons/index.md": listed,
        **{f"lessons/{lesson.folder}/lesson.md": _page(lesson) for lesson in LESSONS},
    }


def pictures() -> list[str]:
    """Drawings that other pages may show as files."""
    return [shown(path) for path in sorted((ROOT / "lessons").rglob("*.svg"))]


def _page(lesson: Lesson) -> str:
    home = shown(lesson.path / "lesson.md")
    woven = WOVEN.sub("", (lesson.path / "lesson.md").read_text(encoding="utf-8"))
    places = paragraphs(lesson)
    text = unfolded(EXPLAINS.sub(lambda found: _marks([places[n] for n in found[1].split(", ")]), woven))
    title, _, rest = text.partition("\n")
    return f"{title}\n\n{_facts(lesson, home)}\n{relinked(rest, home, home)}"


def _marks(explained: list[Paragraph]) -> str:
    """What a link to a paragraph leads to."""
    return "".join(f'<div id="{paragraph.mark}"></div>' for paragraph in explained) + "\n\n"


def _facts(lesson: Lesson, page: str) -> str:
    """One line below the title: what belongs to this lesson."""
    code = ", ".join(f"[`{x}`]({relative(page_of(x) or '', page)})" for x in lesson.sources)
    parts = [f"{contents.minutes(lesson)} minutes to read", f"Code: {code}"]
    if lesson.notebook.exists():
        there = relative(page_of(shown(lesson.notebook)) or "", page)
        elsewhere = repository.links(lesson.notebook.stem).items()
        opens = "".join(f", in [{place}]({address})" for place, address in elsewhere)
        parts.append(f"Notebook: [`{lesson.notebook.name}`]({there}){opens}")
    parts.append(f"Exercise: `python -m lessons start {lesson.number}`")
    return '<p class="facts" markdown="span">' + " · ".join(parts) + "</p>\n"
