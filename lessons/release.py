"""`release DIR [N ...]`: a folder to give to students, with exercises of these lessons and without answers.

No file is listed by hand: the folder gets what its commands and tests import, without the tasks' lines.
Then every file of it is searched for every line of those answers, and one that is found is an error.
"""

import ast
import difflib
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from lessons import exercise
from lessons.exercise import LessonError, find_lesson, region_lines, shown, task_regions
from lessons.registry import IN_ORDER, ROOT, Lesson

LONG = 28  # characters; a shorter line may stand anywhere and gives nothing away
COMMANDS = (  # of lessons; what they import comes along
    "__main__",
    "judge",
    "replaced",
    "clock",
    "one_gpu",
    "watch",
    "graded_cells",
)
WITHHELD = (  # these hold or need answers
    "museum",
    "bug",
    "golf",
    "golf_board",
    "golf_rules",
    "train",
    "release",
    "weave",
    "verify",
    "marks",
    "templates",
)
NEEDED = ("torch", "rich", "matplotlib", "pytest")
BLOCK = re.compile(r"<!-- weave: (\w+) (.+?) -->\n(.*?)<!-- /weave -->", re.DOTALL)
FOLDED = re.compile(r"<details>.*?</details>\n*", re.DOTALL)
# Lines that name commands which a release does not have.
SHOWN = re.compile(r"python -m lessons (diff|solution|bug) |When it passes, play \[ZeRO golf\]")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
README = """# Lessons {numbers}

Install once, in a virtual environment, in this folder: `python -m pip install -e .`

```text
python -m lessons list         # your lessons, where to read, and how far you are
python -m lessons start {first}      # writes the exercise into work/
python -m lessons check {first}      # says what holds, and what the first failure means
python -m lessons hint {first}       # a hint for the next blank task
python -m lessons run {first}        # the lesson's experiment, once your file has passed
python -m lessons bill         # bytes per parameter of what you have built
python -m lessons handin {all} --name "Your Name"
```

Answers are not here. A lesson that builds on an earlier one of this list uses your own file of it, as soon as
that has passed.
"""


def release(folder: Path, numbers: Sequence[str] = ()) -> str:
    """Write the folder; returns what to tell the instructor."""
    if folder.exists():
        raise LessonError(f"{folder} exists already: remove it, or name another folder")
    given = [find_lesson(number) for number in numbers] or IN_ORDER
    lessons = [lesson for lesson in IN_ORDER if lesson in given]
    files = _texts(lessons)
    told = list(leaks(files, blanked(lessons)))
    if told:
        raise LessonError("a release would hold lines of answers:\n" + "\n".join(told))
    for path, text in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    shutil.copytree(ROOT / "zero_min" / "data", folder / "zero_min" / "data")
    named = ", ".join(str(lesson.number) for lesson in lessons)
    return f"{folder} holds lessons {named}, {len(files)} files, and no answer of: {_names(blanked(lessons))}"


def _names(lessons: Sequence[Lesson]) -> str:
    return ", ".join(str(lesson.number) for lesson in lessons)


def blanked(lessons: Sequence[Lesson]) -> list[Lesson]:
    """Whose tasks are blank: those that are assigned, and all that come after. Earlier ones keep answers."""
    return [x for x in IN_ORDER if x in lessons or x.number > lessons[-1].number]


def answers(lessons: Sequence[Lesson]) -> dict[str, str]:
    """Every long line of these answers, with and without its comment, and whose it is.

    Without those that stand in an answer which is given: what lesson 1 gathers is what lesson 5 gathers.
    """
    given = _lines([lesson for lesson in IN_ORDER if lesson not in lessons])
    return {line: whose for line, whose in _lines(lessons).items() if line not in given}


def _lines(lessons: Sequence[Lesson]) -> dict[str, str]:
    found = {}
    for lesson in lessons:
        for answer, _ in lesson.files:
            for region in task_regions(answer.read_text(encoding="utf-8")):
                for line in region_lines(answer, region.name):
                    for text in (line.strip(), line.partition("  #")[0].strip()):
                        if len(text) >= LONG:
                            found[text] = f"lesson {lesson.number}, task {region.task}"
    return found


def leaks(files: dict[str, str], lessons: Sequence[Lesson]) -> Iterator[str]:
    """Places in these texts that hold a line of an answer."""
    known = answers(lessons)
    for path, text in files.items():
        for number, line in enumerate(text.splitlines(), 1):
            for answer, whose in known.items():
                if answer in line:
                    yield f"{path}, line {number}: {answer} ({whose})"


def _texts(lessons: Sequence[Lesson]) -> dict[str, str]:
    """All text files of the folder, by their paths."""
    known = answers(blanked(lessons))
    sources = {ROOT / source: x.number for x in blanked(lessons) for source in x.sources}
    files = {}
    for path in sorted(_code(lessons)):
        text = path.read_text(encoding="utf-8")
        if path in sources:
            number = sources[path]
            text = exercise.emptied(text, lambda task, number=number: exercise.blank_line(number, task))
        files[shown(path)] = text
    for path in _assets(lessons):
        files[shown(path)] = path.read_text(encoding="utf-8")
    for lesson in lessons:
        page = lesson.path / "lesson.md"
        files[shown(page)] = page_without_answers(page.read_text(encoding="utf-8"), known)
    files = {
        path: _linked(path, text, files) if path.endswith(".md") else text for path, text in files.items()
    }
    numbers = [str(lesson.number) for lesson in lessons]
    words = {"numbers": ", ".join(numbers), "first": numbers[0], "all": " ".join(numbers)}
    files["README.md"] = README.format(**words)
    files["release.json"] = json.dumps({"lessons": numbers}) + "\n"
    files["pyproject.toml"] = _pyproject()
    return files


def _code(lessons: Sequence[Lesson]) -> set[Path]:
    """What the commands and these lessons' tests import, directly or not."""
    roots = [ROOT / "lessons" / f"{name}.py" for name in COMMANDS] + [ROOT / "tests" / "conftest.py"]
    for lesson in lessons:
        roots += [lesson.path / "experiment.py", ROOT / f"tests/lessons/test_task_step{lesson.label}.py"]
        roots += [ROOT / word for word in lesson.tests if word.endswith(".py")]
        roots += [answer for answer, _ in lesson.files]
    found: set[Path] = set()
    while roots:
        path = roots.pop()
        if path in found:
            continue
        found.add(path)
        roots += [file for name in _imported(path) for file in _files_of(name)]
    return found


def _imported(path: Path) -> Iterator[str]:
    """Every name after `import`, with those that may be modules of a package, and the packages around."""
    yield ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _files_of(name: str) -> Iterator[Path]:
    """The module's file and those of the packages it stands in, if they may be given."""
    parts = name.split(".")
    withheld = parts[0] == "lessons" and parts[-1] in (*WITHHELD, "mistakes")
    if parts[0] not in ("lessons", "zero_min", "tests") or withheld or name == "tests.staging":
        return
    places = [ROOT.joinpath(*parts).with_suffix(".py")]
    places += [ROOT.joinpath(*parts[:end], "__init__.py") for end in range(1, len(parts) + 1)]
    yield from (place for place in places if place.exists())


def _assets(lessons: Sequence[Lesson]) -> list[Path]:
    """What is read and not imported."""
    found = [*sorted((ROOT / "lessons" / "watch_page").iterdir()), ROOT / "LICENSE"]
    found.append(ROOT / "lessons" / "step11_one_gpu" / "recording.json")  # which `gpu` shows
    for lesson in lessons:
        found += [lesson.path / "hints.md", *sorted(lesson.path.glob("*.svg"))]
    return found


def page_without_answers(text: str, known: dict[str, str]) -> str:
    """A lesson's text: what is folded and holds an answer is gone, elsewhere dots stand for its lines."""
    text = FOLDED.sub(lambda match: "" if _holds(match[0], known) else match[0], text)
    text = BLOCK.sub(lambda match: _dotted(match) if _holds(match[3], known) else match[0], text)
    lines = ["..." if _holds(line, known) else line for line in text.splitlines() if not SHOWN.match(line)]
    return "\n".join(lines) + "\n"


def _holds(text: str, known: dict[str, str]) -> bool:
    return any(answer in text for answer in known)


def _dotted(match: "re.Match[str]") -> str:
    """A woven block of code once more, with dots where tasks are."""
    kind, references = match[1], match[2].split()
    made = []
    for reference in references:
        path, _, name = reference.partition(":")
        made.append(region_lines(ROOT / path, name, dotted=True))
    if kind == "diff":
        made = [list(difflib.unified_diff(*made, n=99, lineterm=""))[3:]]
    body = "\n".join(made[0])
    return f"```{'diff' if kind == 'diff' else 'python'}\n{body}\n```\n"


def _linked(home: str, text: str, files: dict[str, str]) -> str:
    """A text whose links to files that are not in the folder are words."""

    def kept(match: "re.Match[str]") -> str:
        target = match[3]
        if not target or ":" in target:
            return match[0]
        path = (ROOT / home).parent.joinpath(target).resolve()
        return match[0] if path.is_relative_to(ROOT) and shown(path) in files else match[2]

    return LINK.sub(kept, text)


def _pyproject() -> str:
    """What the folder needs, in the versions that the project needs."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")  # Python 3.10 has no tomllib
    wanted = re.findall(rf'^  "((?:{"|".join(NEEDED)})(?:[<>=].*?)?)",', text, re.MULTILINE)
    markers = re.findall(
        r'^  "(\w+: .*?)",$', text, re.MULTILINE
    )  # all: tests with an unknown one do not run
    python = re.findall(r"^requires-python = .*$", text, re.MULTILINE)
    return "\n".join(
        [
            "[build-system]",
            'requires = ["setuptools>=77"]',
            'build-backend = "setuptools.build_meta"\n',
            "[project]",
            'name = "zero-lessons"',
            'version = "0.1.0"',
            *python,
            f"dependencies = {json.dumps(wanted)}\n",
            "[tool.setuptools.packages.find]",
            'include = ["lessons*", "zero_min*"]\n',
            "[tool.pytest.ini_options]",
            f"markers = {json.dumps(markers)}",
            'addopts = "--strict-markers"\n',
        ]
    )
