"""The learner's own copies of the notebooks, in work/notebooks: `git pull` never meets what they changed."""

import hashlib
import json
from fractions import Fraction
from pathlib import Path

from lessons.exercise import LessonError, shown
from lessons.registry import ROOT, WORK

ORIGINALS, COPIES = ROOT / "notebooks", WORK / "notebooks"
MADE_FROM = "made_from"  # in the copy's metadata: which original


def copy_all(number: str | None, force: bool) -> str:
    """Copy every notebook that has no copy; say where the asked-for one is, or where they are.

    A copy that is there stays, unless `force` asks for a new one, which needs a number.
    """
    originals = sorted(ORIGINALS.glob("*.ipynb"))
    chosen = originals if number is None else [_original(number)]
    if force and number is None:
        raise LessonError("--force needs a number: python -m lessons notebook N --force")
    lines = []
    for original in originals:
        copy, asked = COPIES / original.name, original in chosen
        if not copy.exists() or (asked and force):
            COPIES.mkdir(parents=True, exist_ok=True)
            copy.write_text(_copied(original), encoding="utf-8")
        elif asked and _digest(original) != _made_from(copy):
            lines.append(
                f"{shown(original)} is another one than {shown(copy)} was made from, which stays as it is; "
                f"a new copy, without what you wrote: python -m lessons notebook {_number(original)} --force"
            )
    place = shown(COPIES / chosen[0].name if number is not None else COPIES)
    lines.append(f"yours: {place}\nopen it: make lab, or: jupyter lab {place}")
    return "\n".join(lines)


def copy_or_original(original: Path) -> Path:
    """Where the learner reads and writes this notebook."""
    copy = COPIES / original.name
    return copy if copy.exists() else original


def _original(number: str) -> Path:
    numbers = {_number(path): path for path in sorted(ORIGINALS.glob("*.ipynb"))}
    if number not in numbers:
        raise LessonError(f"there is no notebook {number}; there are {', '.join(numbers)}")
    return numbers[number]


def _number(original: Path) -> str:
    """The number as a learner writes it: 00b is 1/2."""
    digits, half = int(original.name[:2]), original.name[2] == "b"
    return str(digits + Fraction(1, 2) if half else digits)


def _digest(original: Path) -> str:
    return hashlib.sha256(original.read_bytes()).hexdigest()


def _made_from(copy: Path) -> str:
    try:
        return str(json.loads(copy.read_text(encoding="utf-8"))["metadata"].get(MADE_FROM, ""))
    except (ValueError, KeyError) as error:
        raise LessonError(f"{shown(copy)} is not a notebook any more; --force makes a new copy") from error


def _copied(original: Path) -> str:
    """The notebook, whose links to other folders start one folder deeper."""
    made = json.loads(original.read_text(encoding="utf-8"))
    for cell in made["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = [line.replace("](../", "](../../") for line in cell["source"]]
    made["metadata"][MADE_FROM] = _digest(original)
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"
