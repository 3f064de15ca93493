"""What `verify` gives a teacher besides its table: a row for each student, and a page for each to read."""

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lessons.exercise import LessonError
from lessons.late import Policy
from lessons.verify import Found

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # with these a spreadsheet's formulas begin
Rows = list[list[Found]]


def by_student(found: Sequence[Found]) -> Rows:
    """Those of one name together, unless two files hold the same lesson: then each file by itself."""
    rows: dict[str, list[Found]] = {}
    for each in found:
        rows.setdefault(each.name or each.file, []).append(each)
    made: Rows = []
    for row in rows.values():
        lessons = [each.lesson for each in row]
        if len(set(lessons)) == len(lessons):
            made.append(row)
        else:
            files = dict.fromkeys(each.file for each in row)
            made += [[each for each in row if each.file == file] for file in files]
    return made


def write_csv(place: Path, found: Sequence[Found]) -> None:
    """A line for each student, with a column for each lesson, and for each of its tasks."""
    rows = by_student(found)
    names = [row[0].name for row in rows]
    lessons = list(dict.fromkeys(each.lesson for each in found if each.lesson))
    tasks = {
        lesson: list(dict.fromkeys(t for each in found if each.lesson == lesson for t in each.tasks))
        for lesson in lessons
    }
    header = ["name", "files", "received", "clock", "days late", "points", "points before lateness", "of"]
    header += ["points claimed"]
    for lesson in lessons:
        header += [f"lesson {lesson}", *(f"lesson {lesson}: {task}" for task in tasks[lesson])]
    lines = []
    for row in rows:
        line: list[Any] = [row[0].name, " ".join(dict.fromkeys(each.file for each in row))]
        line += [max(each.received for each in row), row[0].clock, max(each.late_days for each in row)]
        line += [_sum(row, "points"), _sum(row, "found"), sum(each.of for each in row), _sum(row, "claimed")]
        for lesson in lessons:
            here = next((each for each in row if each.lesson == lesson), None)
            line.append("" if here is None or here.found is None else f"{here.found:g}")
            line += ["" if here is None else here.tasks.get(task, "") for task in tasks[lesson]]
        notes = [f"lesson {each.lesson}: {each.note}" if each.lesson else each.note for each in row]
        if row[0].name and names.count(row[0].name) > 1:
            notes.append("another file of this name holds the same lesson")
        lines.append([*line, "; ".join(notes)])
    try:
        with place.open("w", encoding="utf-8-sig", newline="") as file:  # Excel asks for the mark
            csv.writer(file).writerows(
                [_safe(each) for each in line] for line in [[*header, "result"], *lines]
            )
    except OSError as error:
        raise LessonError(f"{place} cannot be written: {error}") from error


def _sum(row: Sequence[Found], what: str) -> str:
    numbers = [getattr(each, what) for each in row if getattr(each, what) is not None]
    return f"{round(sum(numbers), 2):g}" if numbers else ""


def _safe(cell: object) -> object:
    """A cell that no spreadsheet takes for a formula."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell


def write_feedback(folder: Path, found: Sequence[Found], policy: Policy) -> int:
    """A Markdown file for each student; returns how many."""
    rows = by_student(found)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken: set[str] = set()
        for row in rows:
            name = re.sub(r"[^\w-]+", "_", row[0].name or Path(row[0].file).stem).strip("_")[:80] or "unnamed"
            number = next(n for n in range(1, len(rows) + 2) if f"{name}_{n}".lower() not in taken)
            taken.add(f"{name}_{number}".lower())
            place = folder / f"{name}{'' if number == 1 else f'_{number}'}.md"
            place.write_text("\n".join(_page(row, policy)) + "\n", encoding="utf-8")
    except OSError as error:
        raise LessonError(f"{folder}: {error}") from error
    return len(rows)


def _page(row: Sequence[Found], policy: Policy) -> list[str]:
    lines = [f"# {_line(row[0].name or row[0].file)}", ""]
    for each in row:
        if each.found is None:
            lines += [f"{_line(each.file)}: {_line(each.note)}", ""]
            continue
        lines += [f"## Lesson {each.lesson}: {each.found:g} of {each.of} points", ""]
        if each.late_days:
            days = "1 day" if each.late_days == 1 else f"{each.late_days} days"
            lines += [
                f"{days} late (received {each.received}, {each.clock}): {each.points:g} points count.",
                "",
            ]
        elif policy.due is not None and each.received:
            lines += [f"In time (received {each.received}, {each.clock}).", ""]
        if not each.note.startswith("same"):
            lines += [f"Note: {_line(each.note)}.", ""]
        lines += _claims(each.report) if each.report else []
    return lines


def _claims(report: Mapping[str, Any]) -> list[str]:
    """What passed, task by task, and a diagnosis of what did not."""
    lines = [f"The tests did not begin:\n\n{_block(report['error'])}\n"] if report["error"] else []
    tasks = dict.fromkeys(claim["task"] for claim in report["claims"] if claim["task"])
    for task in tasks:
        claims = [claim for claim in report["claims"] if claim["task"] == task]
        held = sum(claim["passed"] is True for claim in claims)
        lines.append(f"* task `{task}`: {held} of {len(claims)} claims hold")
    contract = report["contract"]
    said = {True: "holds", False: "does not hold", None: "was not run, because a claim does not hold"}
    lines += [f"* the contract (training ends where plain Adam ends): {said[contract['passed']]}", ""]
    shown: set[str] = set()
    for claim in report["claims"]:
        if claim["passed"] is False and claim["task"] not in shown:  # the first of each task says enough
            shown.add(claim["task"])
            lines += [f"### `{claim['test']}`", "", *_diagnosis(claim["diagnosis"]), ""]
    if contract["passed"] is False and contract["diagnosis"]:
        lines += ["### The contract", "", *_diagnosis(contract["diagnosis"]), ""]
    return lines


def _diagnosis(said: Mapping[str, Any]) -> list[str]:
    lines = [_block(said["said"])]
    if said.get("means"):
        lines += ["", f"That is: {_line(said['means'])}"]
    if said.get("file") and said.get("line"):
        lines += ["", f"Where: `{said['file']}`, line {said['line']}."]
    if said.get("read"):
        lines += ["", f"Read: {_line(said['read'])}"]
    return lines


def _block(text: object) -> str:
    """Text as it is, whatever stands in it."""
    return "\n".join(f"    {line}" for line in str(text).splitlines()[:20])


def _line(text: object) -> str:
    """Text in one line, in which nothing is Markdown or HTML."""
    return re.sub(r"([\\`*_\[\]<>#|])", r"\\\1", " ".join(str(text).split()))
