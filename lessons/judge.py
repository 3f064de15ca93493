"""Runs the tests of one lesson with the learner's files in zero_min's place. Started by `check`."""

# ruff: noqa: E402  the learner's files must be in place before zero_min is imported
from lessons import replace

replace.install()

import importlib
import sys
import textwrap
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401  it takes seconds, which are not the learner's

from lessons.exercise import find_lesson
from lessons.last_words import Watch
from lessons.registry import IN_ORDER, ROOT, Lesson
from lessons.verdict import Failure, failure_of, verdict

FAILED = 1
QUIET = [word for name in ("terminal", "cacheprovider", "faulthandler") for word in ("-p", f"no:{name}")]


class Reporter:
    """A pytest plugin that counts what passed, keeps the reason of what failed, and limits each test."""

    def __init__(self, watch: Watch, works: list[Path], dots: bool = False) -> None:
        self.watch, self.works, self.dots = watch, works, dots
        self.passed = 0
        self.failures: list[Failure] = []

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        """Tracebacks without values of arguments: to show a tensor whose memory is gone would be a crash."""
        parser.addoption("--tb", dest="tbstyle", default="native")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Pytest calls this before each test."""
        self.watch.start(nodeid.rpartition("::")[2])

    def pytest_runtest_logfinish(self) -> None:
        """Pytest calls this after each test."""
        self.watch.stop()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Pytest calls this after each phase of each test."""
        if report.passed and report.when == "call":
            self.passed += 1
            if self.dots:
                print(".", end="", flush=True)

    def pytest_exception_interact(self, node: Any, call: Any) -> None:
        """Pytest calls this when a test, or reading a file of them, raises."""
        self.failures.append(failure_of(node.name, call.excinfo.value, self.works))


def run_tests(reporter: Reporter, *arguments: str) -> bool:
    """Whether all passed; what did not is in the reporter."""
    status = pytest.main([*arguments, *QUIET, "--rootdir", str(ROOT)], plugins=[reporter])
    if status not in (pytest.ExitCode.OK, FAILED) and not reporter.failures:
        why = "the tests could not run: is this a checkout of the repository?"
        reporter.failures.append(Failure("pytest", "Failed", why))
    return status == pytest.ExitCode.OK


def run_task_tests(reporter: Reporter, lesson: Lesson, *stop: str) -> bool:
    """The lesson's own tests."""
    file = ROOT / f"tests/lessons/test_task_step{lesson.label}.py"
    return run_tests(reporter, str(file), "--noconftest", *stop)


def run_contract(reporter: Reporter, lesson: Lesson) -> bool:
    """What every implementation must establish, up to the first failure, without the long tail."""
    few = ["-m", "not slow and not thorough", "-k", "not process"]
    return run_tests(reporter, "--impl", "mine", *lesson.tests, *few, "-x")


def judge(lesson: Lesson, works: list[Path], blanks: list[str], watch: Watch) -> int:
    """Run the task tests, then the contract; print the first failure, or the measured bill."""
    reporter = Reporter(watch, works, dots=True)
    passed = run_task_tests(reporter, lesson, "-x")
    if passed:
        print("\ntask tests passed; now the contract", flush=True)
        passed = run_contract(reporter, lesson)
    print()
    if not passed:
        print(f"passed: {reporter.passed} checks, then stopped at the first failure")
        print(verdict(lesson, reporter.failures[0], blanks).text(lesson))
        if blanks:
            print(f"tasks still to do: {', '.join(blanks)}")
        return FAILED
    print(f"passed: all {reporter.passed} checks\n")
    with watch.over("the bill"):
        _print_bill(lesson)
    following = [other.number for other in IN_ORDER if other.number > lesson.number]
    more = f", then start {following[0]}" if following else ""
    print(f"\nnext: python -m lessons diff {lesson.number}, or bug {lesson.number} to find a mistake{more}")
    return 0


def judge_tasks(lesson: Lesson, works: list[Path], watch: Watch) -> int:
    """Run the task tests only, all of them, and print what each failure says."""
    reporter = Reporter(watch, works)
    run_task_tests(reporter, lesson)
    print(f"passed: {reporter.passed}, failed: {len(reporter.failures)}")
    for failure in reporter.failures:
        said = failure.message.splitlines()[0]
        print(f"\n{failure.test}\n{textwrap.indent(textwrap.fill(said, 96), '  ')}")
    return FAILED if reporter.failures else 0


def symptom(lesson: Lesson, works: list[Path], watch: Watch) -> int:
    """Print what the first failing task test found, and nothing about what it means: for `bug`."""
    reporter = Reporter(watch, works)
    run_task_tests(reporter, lesson, "-x")
    for failure in reporter.failures:
        print(f"{failure.test}\n{textwrap.indent(failure.message, '  ')}")
    return FAILED if reporter.failures else 0


def _print_bill(lesson: Lesson) -> None:
    from lessons.bill import measure, timeline
    from lessons.rows import ROWS

    rows = [row for row in ROWS if row.lesson == lesson.number]
    if not rows:  # a lesson that is about no stage has a bill of its own
        print(importlib.import_module(f"lessons.{lesson.folder}.experiment").bill())
        return
    bill = measure(rows[0])
    print(f"your {bill.row.name} with 4 ranks and {bill.numel:,} parameters, bytes:")
    for kind, formula in bill.formula_held.items():
        print(f"  {kind + ' on each rank':<28}{bill.ranks[0].held[kind]:>12,}   formula {formula:>12,}")
    steps = f"sent by all in {bill.row.steps} steps"
    print(f"  {steps:<28}{bill.sent_in_all:>12,}   formula {bill.formula_sent:>12,}")
    print(f"\none step, rank by rank (bytes):\n{timeline(bill)}")


def main() -> int:
    """Judge a lesson: FILE for last words, N, the blank tasks. FILE --tasks N and --symptom N do less."""
    watch = Watch(Path(sys.argv[1]))
    try:
        with watch.over("import"):
            import zero_min  # noqa: F401
    except Exception:  # whatever the learner's file does wrong at import
        lines = traceback.format_exc().splitlines()
        print("your file cannot be imported:\n  " + "\n  ".join(lines[-3:]))
        return FAILED
    works = [Path(place) for place in replace.places().values()]
    if sys.argv[2] == "--tasks":
        return judge_tasks(find_lesson(sys.argv[3]), works, watch)
    if sys.argv[2] == "--symptom":
        return symptom(find_lesson(sys.argv[3]), works, watch)
    return judge(find_lesson(sys.argv[2]), works, sys.argv[3:], watch)


if __name__ == "__main__":
    sys.exit(main())
