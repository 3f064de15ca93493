"""Runs the tests of one lesson with the learner's files in zero_min's place. Started by `check`."""

# ruff: noqa: E402  the learner's files must be in place before zero_min is imported
from lessons import replace

replace.install()

import sys
import textwrap
import traceback
from typing import Any

import pytest

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


def judge(number: int, blanks: list[str]) -> int:
    """Run the task tests, then the contract; print the first failure, or the measured bill."""
    from lessons.exercise import tasks
    from lessons.registry import LESSONS, ROOT

    lesson = LESSONS[number]
    reporter = Reporter()
    arguments = ["--impl", "mine", f"tests/lessons/test_task_step{number}.py", *lesson.tests]
    quiet = ["-p", "no:terminal", "-p", "no:cacheprovider", "-x", "--rootdir", str(ROOT)]
    chosen = ["-m", "not slow", "-k", "not process"]
    if pytest.main([*arguments, *quiet, *chosen], plugins=[reporter]) != 0:
        name, reason = reporter.failures[0] if reporter.failures else ("pytest", "could not run")
        _print_failure(number, reporter.passed, name, reason)
        if blanks:
            print(f"\ntasks still to do: {', '.join(blanks)}")
        print(f"help: python -m lessons hint {number} {_task_of(name, tasks(lesson), blanks)}")
        return FAILED
    print(f"passed: all {reporter.passed} checks\n")
    _print_bill(number)
    more = f", then start {number + 1}" if number + 1 < len(LESSONS) else ""
    print(f"\nnext: python -m lessons diff {number}{more}")
    return 0


def _task_of(test: str, tasks: list[str], blanks: list[str]) -> str:
    """The task that a failing test is about, if its name says so, or else the next blank."""
    named = [task for task in tasks if test.startswith(f"test_{task}_")] or blanks or tasks
    return named[0] if blanks or len(named) == 1 else f"TASK, where TASK is one of {', '.join(named)}"


def judge_tasks(number: int) -> int:
    """Run the task tests only, all of them, and print what each failure says."""
    from lessons.registry import ROOT

    reporter = Reporter()
    quiet = ["-p", "no:terminal", "-p", "no:cacheprovider", "--noconftest", "--rootdir", str(ROOT)]
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
    """Judge lesson argv[1]; the further arguments are the tasks still blank. `--tasks N` is shorter."""
    try:
        import zero_min  # noqa: F401
    except Exception:  # whatever the learner's file does wrong at import
        lines = traceback.format_exc().splitlines()
        print("your file cannot be imported:\n  " + "\n  ".join(lines[-3:]))
        return FAILED
    if sys.argv[1] == "--tasks":
        return judge_tasks(int(sys.argv[2]))
    return judge(int(sys.argv[1]), sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
