"""Runs the tests of one lesson with the learner's files in zero_min's place. Started by `check`."""

# ruff: noqa: E402  the learner's files must be in place before zero_min is imported
from lessons import replace

replace.install()

import sys
import textwrap
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401  it takes seconds, which are not the learner's

from lessons.last_words import Watch

FAILED = 1
QUIET = [word for name in ("terminal", "cacheprovider", "faulthandler") for word in ("-p", f"no:{name}")]


class Reporter:
    """A pytest plugin that counts what passed, keeps the reason of what failed, and limits each test."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.passed = 0
        self.failures: list[tuple[str, str]] = []

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
        if report.failed:
            self.failures.append((report.nodeid.rpartition("::")[2], _reason(report)))

    def pytest_collectreport(self, report: Any) -> None:
        """Pytest calls this after reading each file."""
        if report.failed:
            self.failures.append((report.nodeid, _reason(report)))


def _reason(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr)


def judge(number: int, blanks: list[str], watch: Watch) -> int:
    """Run the task tests, then the contract; print the first failure, or the measured bill."""
    from lessons.exercise import tasks
    from lessons.registry import LESSONS, ROOT

    lesson = LESSONS[number]
    reporter = Reporter(watch)
    arguments = ["--impl", "mine", f"tests/lessons/test_task_step{number}.py", *lesson.tests]
    quiet = [*QUIET, "-x", "--rootdir", str(ROOT)]
    chosen = ["-m", "not slow", "-k", "not process"]
    if pytest.main([*arguments, *quiet, *chosen], plugins=[reporter]) != 0:
        name, reason = reporter.failures[0] if reporter.failures else ("pytest", "could not run")
        _print_failure(number, reporter.passed, name, reason)
        if blanks:
            print(f"\ntasks still to do: {', '.join(blanks)}")
        print(f"help: python -m lessons hint {number} {_task_of(name, tasks(lesson), blanks)}")
        return FAILED
    print(f"passed: all {reporter.passed} checks\n")
    with watch.over("the bill"):
        _print_bill(number)
    more = f", then start {number + 1}" if number + 1 < len(LESSONS) else ""
    print(f"\nnext: python -m lessons diff {number}{more}")
    return 0


def _task_of(test: str, tasks: list[str], blanks: list[str]) -> str:
    """The task that a failing test is about, if its name says so, or else the next blank."""
    named = [task for task in tasks if test.startswith(f"test_{task}_")] or blanks or tasks
    return named[0] if blanks or len(named) == 1 else f"TASK, where TASK is one of {', '.join(named)}"


def judge_tasks(number: int, watch: Watch) -> int:
    """Run the task tests only, all of them, and print what each failure says."""
    from lessons.registry import ROOT

    reporter = Reporter(watch)
    quiet = [*QUIET, "--noconftest", "--rootdir", str(ROOT)]
    tests = ROOT / f"tests/lessons/test_task_step{number}.py"
    if pytest.main([str(tests), *quiet], plugins=[reporter]) not in (pytest.ExitCode.OK, FAILED):
        print(f"pytest could not run {tests.name}: is this a checkout of the repository?")
        return FAILED
    print(f"passed: {reporter.passed}, failed: {len(reporter.failures)}")
    for name, reason in reporter.failures:
        print(f"\n{name}\n{textwrap.indent(textwrap.fill(reason.splitlines()[0], 96), '  ')}")
    return FAILED if reporter.failures else 0


def _print_failure(number: int, passed: int, name: str, reason: str) -> None:
    print(f"passed: {passed} checks, then stopped at the first failure\nfailed: {name}\n")
    for line in reason.splitlines()[:14]:
        print(f"  {line}")


def _print_bill(number: int) -> None:
    from lessons.bill import measure, timeline
    from lessons.rows import ROWS

    bill = measure(next(row for row in ROWS if row.lesson == number))
    print(f"your {bill.row.name} with 4 ranks and {bill.numel:,} parameters, bytes:")
    for kind, formula in bill.formula_held.items():
        print(f"  {kind + ' on each rank':<28}{bill.ranks[0].held[kind]:>12,}   formula {formula:>12,}")
    steps = f"sent by all in {bill.row.steps} steps"
    print(f"  {steps:<28}{bill.sent_in_all:>12,}   formula {bill.formula_sent:>12,}")
    print(f"\none step, rank by rank (bytes):\n{timeline(bill)}")


def main() -> int:
    """Judge a lesson: FILE for last words, its number, the tasks still blank. FILE --tasks N is shorter."""
    watch = Watch(Path(sys.argv[1]))
    try:
        with watch.over("import"):
            import zero_min  # noqa: F401
    except Exception:  # whatever the learner's file does wrong at import
        lines = traceback.format_exc().splitlines()
        print("your file cannot be imported:\n  " + "\n  ".join(lines[-3:]))
        return FAILED
    if sys.argv[2] == "--tasks":
        return judge_tasks(int(sys.argv[3]), watch)
    return judge(int(sys.argv[2]), sys.argv[3:], watch)


if __name__ == "__main__":
    sys.exit(main())
