"""`check N`: the shared suite on the learner's file, and then the bill of what they built."""

from typing import Any

import pytest

from lessons.bill import measure, timeline
from lessons.exercise import LessonError, read_work, shown, tasks, unanswered
from lessons.registry import ROOT, ROWS, Lesson, Parts

FAILED = 1


class Reporter:
    """A pytest plugin that counts what passed and keeps the reason of what failed."""

    def __init__(self) -> None:
        self.passed = 0
        self.failures: list[tuple[str, str]] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Pytest calls this after each phase of each test."""
        if report.passed and report.when == "call":
            self.passed += 1
        if report.failed:
            self.failures.append((report.nodeid.rpartition("::")[2], _reason(report)))

    def pytest_collectreport(self, report: Any) -> None:
        """Pytest calls this after reading each file."""
        if report.failed:
            self.failures.append((report.nodeid, _reason(report)))


def _reason(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr)


def check(lesson: Lesson) -> int:
    """Judge the work file; print what is wrong, or the measured bill. Returns an exit status."""
    read_work(lesson)
    blanks = unanswered(lesson)
    print(f"lesson {lesson.number}: {lesson.title}\nchecking {shown(lesson.work)}")
    if not (ROOT / "tests").is_dir():
        raise LessonError("the tests are not here: run this from a checkout of the repository")
    reporter = Reporter()
    arguments = ["--impl", "mine", "--file", str(lesson.work), "--stage", str(lesson.stage)]
    selected = [f"tests/lessons/test_task_step{lesson.number}.py", "tests/conformance/test_conformance.py"]
    paths = [str(ROOT / path) for path in selected]
    quiet = [
        "-p",
        "no:terminal",
        "-p",
        "no:cacheprovider",
        "-x",
        "--rootdir",
        str(ROOT),
        "-m",
        "not slow",
        "-k",
        "not real_processes",
    ]
    status = pytest.main([*paths, *arguments, *quiet], plugins=[reporter])
    if status != 0:
        _print_failure(lesson, reporter, blanks)
        return FAILED
    print(f"passed: all {reporter.passed} checks\n")
    _print_bill(lesson)
    return 0


def _print_failure(lesson: Lesson, reporter: Reporter, blanks: list[str]) -> None:
    name, reason = reporter.failures[0] if reporter.failures else ("pytest", "could not run")
    print(f"passed: {reporter.passed} checks, then stopped at the first failure\nfailed: {name}\n")
    for line in reason.splitlines()[:12]:
        print(f"  {line}")
    if blanks:
        print(f"\ntasks still to do: {', '.join(blanks)}")
    print(f"help: python -m lessons hint {lesson.number}")


def _print_bill(lesson: Lesson) -> None:
    from tests.trainers import load_file

    row = next(row for row in ROWS if row.lesson == lesson.number)
    bill = measure(row, parts=Parts(load_file(str(lesson.work))))
    print(f"your {row.name} with 4 ranks and {bill.numel:,} parameters, bytes:")
    for kind, formula in bill.formula_held.items():
        print(f"  {kind + ' on each rank':<26}{bill.ranks[0].held[kind]:>12,}   formula {formula:>12,}")
    print(f"  {'sent by all in a step':<26}{bill.sent:>12,}   formula {bill.formula_sent:>12,}")
    print(f"\none step, rank by rank (bytes):\n{timeline(bill)}")


def progress(lesson: Lesson) -> str:
    """One word on how far the learner is."""
    try:
        left = unanswered(lesson)
    except LessonError as error:
        return "not started" if "does not exist" in str(error) else "has a syntax error"
    done = len(tasks(lesson)) - len(left)
    return f"{done} of {len(tasks(lesson))} tasks filled in"
