"""`bug N`: the answer of lesson N with one mistake in it, for the learner to find."""

import difflib
import random
from pathlib import Path

from lessons import registry
from lessons.exercise import LessonError, shown, unmarked
from lessons.museum import Mistake, mistakes, seeded
from lessons.registry import Lesson
from lessons.run_judge import run_judge
from lessons.verdict import explains


def places(lesson: Lesson) -> list[tuple[Path, Path]]:
    """(answer, file with a bug) for every source: in a folder of their own, away from the learner's files."""
    return [(answer, registry.WORK / f"bug{lesson.label}" / answer.name) for answer, _ in lesson.files]


def start(lesson: Lesson, number: int | None) -> str:
    """Write the files, by chance or with mistake `number`, and show the first claim that does not hold."""
    known = mistakes(lesson)
    if number is not None and not 1 <= number <= len(known):
        raise LessonError(f"lesson {lesson.number} has mistakes 1 to {len(known)}, not {number}")
    chosen = random.choice(known) if number is None else known[number - 1]
    texts = seeded(lesson, chosen)
    for answer, place in places(lesson):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(texts[answer], encoding="utf-8")
    files = " and ".join(shown(place) for _, place in places(lesson))
    line = "FILE:LINE" if len(lesson.files) > 1 else "LINE"
    return "\n".join(
        [
            f"one line of the answer, or a few, are wrong in {files}. This is what the tests see:\n",
            symptom(lesson),
            "\nWhich rank is wrong, which line makes it so, and why? Say the line:",
            f"python -m lessons bug {lesson.number} --answer {line}",
        ]
    )


def symptom(lesson: Lesson) -> str:
    """What the first failing test found, and no word about what it means."""
    works = [place for _, place in places(lesson)]
    stand = dict(zip(lesson.modules, map(str, works), strict=True))
    done, _ = run_judge(stand, works, "--symptom", str(lesson.number), capture_output=True)
    if not done.stdout:
        raise LessonError(f"the tests could not run:\n{done.stderr}")
    return done.stdout.rstrip()


def answer(lesson: Lesson, guess: str) -> str:
    """Whether this is a line of the mistake, as LINE or FILE:LINE; if so, what the museum says about it."""
    seen, (right, place) = _seeded_one(lesson)
    guessed, line = _guessed(lesson, guess)
    last = len(guessed.read_text(encoding="utf-8").splitlines())
    if not 1 <= line <= last:
        raise LessonError(f"--answer {guess}: {shown(guessed)} has lines 1 to {last}")
    lines = changed_lines(unmarked(right.read_text(encoding="utf-8")), place.read_text(encoding="utf-8"))
    if guessed != place or line not in lines:
        return f"line {line} of {shown(guessed)} is as it should be. Look again, or ask with another line."
    first = next(iter(lines))
    number = mistakes(lesson).index(seen) + 1
    said = [f"right: {shown(place)}, line {first}, task {seen.task}. {seen.says[0].upper()}{seen.says[1:]}."]
    said += ["instead of", *_indented(seen.right), "it says", *_indented(seen.wrong or "(nothing)")]
    paragraph = explains(lesson, seen.task, seen.found)
    said += [f"mistake {number} of {len(mistakes(lesson))} in the museum: {seen.name}", f"read: {paragraph}"]
    return "\n".join(said)


def _guessed(lesson: Lesson, guess: str) -> tuple[Path, int]:
    """The file and the line that a learner means; the file may be left out where there is one only."""
    known = {place.name: place for _, place in places(lesson)}
    name, _, line = guess.rpartition(":")
    named = [known[Path(name).name]] if Path(name).name in known else [] if name else list(known.values())
    if not line.isdecimal() or len(named) != 1:
        examples = " or ".join(f"{each}:12" for each in known) if len(known) > 1 else "12"
        raise LessonError(f"--answer {guess}: name one line, as in --answer {examples}")
    return named[0], int(line)


def _indented(code: str) -> list[str]:
    return [f"    {line.strip()}" for line in code.strip("\n").splitlines()]


def _seeded_one(lesson: Lesson) -> tuple[Mistake, tuple[Path, Path]]:
    """Which mistake stands in the files, and the right and the wrong file."""
    if not all(place.exists() for _, place in places(lesson)):
        raise LessonError(f"there is no bug to find yet: python -m lessons bug {lesson.number}")
    now = {right: place.read_text(encoding="utf-8") for right, place in places(lesson)}
    for mistake in mistakes(lesson):
        if seeded(lesson, mistake) == now:
            pairs = ((right, place) for right, place in places(lesson) if now[right] != _clean(right))
            return mistake, next(pairs)
    files = ", ".join(shown(place) for _, place in places(lesson))
    raise LessonError(f"{files} has been changed since: python -m lessons bug {lesson.number} for a new one")


def _clean(right: Path) -> str:
    return unmarked(right.read_text(encoding="utf-8"))


def changed_lines(right: str, wrong: str) -> range:
    """The lines of the wrong text that differ, from 1; where lines are missing, those around the gap."""
    matcher = difflib.SequenceMatcher(None, right.splitlines(), wrong.splitlines(), autojunk=False)
    changes = [(low, high) for tag, _, _, low, high in matcher.get_opcodes() if tag != "equal"]
    low, high = changes[0][0], changes[-1][1]
    return range(low, low + 2) if low == high else range(low + 1, high + 1)
