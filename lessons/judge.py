"""Runs the tests of one lesson with the learner's files in zero_min's place. Started by `check`."""

# ruff: noqa: E402  the learner's files must be in place before zero_min is imported
from lessons import interrupt, replace

if __name__ == "__main__":
    interrupt.end_silently()
replace.install()

import contextlib
import importlib
import io
import json
import sys
import textwrap
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch  # it takes seconds, which are not the learner's

from lessons.exercise import blank_in, find_lesson, tasks_named
from lessons.first_difference import find
from lessons.last_words import LIMIT, SHORT, Watch
from lessons.registry import IN_ORDER, RELEASED, ROOT, Lesson
from lessons.verdict import Failure, Verdict, failure_of, verdict

FAILED = 1
LONG = 2.0  # seconds: a failure that took longer is not run again for evidence
QUIET = [word for name in ("terminal", "cacheprovider", "faulthandler") for word in ("-p", f"no:{name}")]


def last_line(error: BaseException) -> Path | None:
    """The file of the line that has raised this, or its first cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return Path(at.tb_frame.f_code.co_filename) if at else None


class Reporter:
    """A pytest plugin that counts what passed, keeps the reason of what failed, and limits each test."""

    def __init__(
        self,
        watch: Watch,
        works: list[Path],
        dots: bool = False,
        lesson: Lesson | None = None,
        limit: float = SHORT,  # seconds for a task test
    ) -> None:
        self.limit = limit
        self.watch, self.works, self.dots, self.lesson = watch, works, dots, lesson
        self.passed, self.held = 0, ""  # how many tests passed, and the last of them
        self.not_judged: dict[str, str] = {}  # in a release: tests that need what a later lesson builds
        self.failures: list[Failure] = []

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        """Tracebacks without values of arguments: to show a tensor whose memory is gone would be a crash."""
        parser.addoption("--tb", dest="tbstyle", default="native")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Pytest calls this before each test."""
        self.watch.start(nodeid.rpartition("::")[2], self.limit if "test_task_step" in nodeid else LIMIT)

    def pytest_runtest_logfinish(self) -> None:
        """Pytest calls this after each test."""
        self.watch.stop()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Pytest calls this after each phase of each test."""
        if report.passed and report.when == "call":
            self.passed, self.held = self.passed + 1, report.nodeid.rpartition("::")[2]
            if self.dots:
                print(".", end="", flush=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        """Pytest asks what to make of a test that has run."""
        report = yield
        other = self._blank_elsewhere(call.excinfo.value) if call.excinfo else None
        if report.skipped and call.excinfo and last_line(call.excinfo.value) in self.works:
            report.outcome = "failed"  # only a test may skip itself, not the code that it judges
            self.pytest_exception_interact(item, call)
        if other is not None:
            self.not_judged[item.name] = other
            report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"needs lesson {other}")
        return report

    def _blank_elsewhere(self, error: BaseException) -> str | None:
        """In a release: the other lesson that is blank there, and whose blank this test has met."""
        found = blank_in(error) if RELEASED is not None and self.lesson is not None else None
        place = last_line(error)
        if found is None or self.lesson is None or place is None:
            return None
        if not place.is_relative_to(ROOT / "zero_min"):  # a hand-in that raises what a blank would
            return None
        return found[0] if found[0] != str(self.lesson.number) else None

    def pytest_exception_interact(self, node: Any, call: Any) -> None:
        """Pytest calls this when a test, or reading a file of them, raises."""
        if node.name in self.not_judged:
            return
        error, took = call.excinfo.value, call.stop - call.start
        self.failures.append(failure_of(node.name, error, self.works, node.nodeid, took))


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
    oracles = [] if RELEASED is not None else lesson.oracles
    return run_tests(reporter, "--impl", "mine", *lesson.tests, *oracles, *few, "-x")


def judged(
    lesson: Lesson, reporter: Reporter, blanks: Sequence[str] = (), failure: Failure | None = None
) -> Verdict:
    """What a failure means, the first or another one, with evidence from a run beside the answer."""
    failure, evidence = failure or reporter.failures[0], None
    unwritten = failure.error == "NotImplementedError"
    if not unwritten and "::" in failure.node and failure.seconds < LONG:
        options = [] if "tests/lessons/" in failure.node else ["--impl", "mine", *_options(lesson)]
        options = options or ["--noconftest"]

        def rerun() -> bool:
            again = Reporter(
                reporter.watch, reporter.works, limit=LIMIT
            )  # it is recorded, which takes longer
            torch.manual_seed(0)  # the same beginning for both
            with contextlib.redirect_stdout(io.StringIO()):
                return run_tests(again, str(ROOT / failure.node), *options)

        with contextlib.suppress(Exception):  # evidence is more than was asked for: check goes on without
            evidence = find(lesson, failure.test, reporter.works, rerun)
    held = reporter.held if failure is reporter.failures[-1] else ""
    return verdict(lesson, failure, blanks, evidence, held)


def _options(lesson: Lesson) -> list[str]:
    """What stands behind the files in a lesson's tests."""
    first = next((i for i, word in enumerate(lesson.tests) if word.startswith("--")), len(lesson.tests))
    return list(lesson.tests[first:])


def judge(lesson: Lesson, works: list[Path], blanks: list[str], watch: Watch) -> int:
    """Run the task tests, then the contract; print the first failure, or the measured bill."""
    reporter = Reporter(watch, works, dots=True, lesson=lesson)
    passed = run_task_tests(reporter, lesson, "-x")
    if passed:
        print("\ntask tests passed; now the contract", flush=True)
        passed = run_contract(reporter, lesson)
    print()
    if not passed:
        print(f"passed: {reporter.passed} checks, then stopped at the first failure")
        print(judged(lesson, reporter, blanks).text(lesson))
        if blanks:
            print(f"tasks still to do: {', '.join(blanks)}")
        return FAILED
    print(f"passed: all {reporter.passed} checks")
    for line in left_out(reporter.not_judged):
        print(line)
    print()
    with watch.over("the bill"):
        _print_bill(lesson)
    following = [f"start {other.number}" for other in IN_ORDER if other.number > lesson.number]
    more = [f"diff {lesson.number}, or bug {lesson.number} to find a mistake"]
    if RELEASED is not None:  # the answer is not in a release
        more = []
    if more + following:
        print(f"\nnext: python -m lessons {', then '.join((more + following)[: len(more) + 1])}")
    return 0


def left_out(not_judged: dict[str, str]) -> list[str]:
    """What a release could not check, in words."""
    counts = Counter(not_judged.values())
    return [
        f"not checked here: {count} that need lesson {number}, which is blank"
        for number, count in counts.items()
    ]


class Recorder(Reporter):
    """Writes each claim into a file as soon as it is judged, and passes over those that are there already."""

    def __init__(self, watch: Watch, works: list[Path], lesson: Lesson, file: Path) -> None:
        super().__init__(watch, works, lesson=lesson)
        self.about, self.file = lesson, file
        kept = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self.done = {json.loads(line).get("test") for line in kept}

    def write(self, **facts: object) -> None:
        """One more line."""
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Pytest calls this when it knows all tests."""
        self.write(collected=[item.name for item in items])
        items[:] = [item for item in items if item.name not in self.done]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Pytest calls this after each phase of each test."""
        super().pytest_runtest_logreport(report)
        name, sandbox = report.nodeid.rpartition("::")[2], replace.sandbox()
        if sandbox is not None and sandbox.reached:
            self.write(reached=sandbox.reached)
        if report.passed and report.when == "call":
            self.write(test=name, passed=True)
        elif name in self.not_judged and report.skipped:
            self.write(test=name, passed=None, needs=self.not_judged[name])

    def pytest_exception_interact(self, node: Any, call: Any) -> None:
        """Pytest calls this when a test, or reading a file of them, raises."""
        before = len(self.failures)
        super().pytest_exception_interact(node, call)
        for failure in self.failures[before:]:
            said = verdict(self.about, failure).facts()
            self.write(test=failure.test, passed=False, diagnosis=said)


def judge_claims(lesson: Lesson, works: list[Path], watch: Watch, file: Path) -> int:
    """Write down what each task test says; if all hold, run the contract, and write down what that says."""
    recorder = Recorder(watch, works, lesson, file)
    kept = file.read_text(encoding="utf-8") if file.exists() else ""
    passed = run_task_tests(recorder, lesson) and '"passed": false' not in kept
    if passed:
        contract = Reporter(watch, works, lesson=lesson)
        with_all = run_contract(contract, lesson)
        said = [verdict(lesson, failure).facts() for failure in contract.failures[:1]]
        recorder.write(
            contract=with_all,
            checks=contract.passed,
            left_out=left_out(contract.not_judged),
            diagnosis=said[0] if said else None,
        )
        passed = with_all
    firsts = {(tasks_named(lesson, each.test) or [""])[0]: each for each in reversed(recorder.failures)}
    sandbox = replace.sandbox()
    if sandbox is not None and sandbox.reached:  # in the contract
        recorder.write(reached=sandbox.reached)
        passed = False
    for failure in firsts.values():
        seen = judged(lesson, recorder, failure=failure)
        if seen.evidence is not None:
            recorder.write(evidence=failure.test, diagnosis=seen.facts())
    return 0 if passed else FAILED


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
    from zero_min import WorldError

    rows = [row for row in ROWS if row.lesson == lesson.number]
    try:
        if not rows:  # a lesson that is about no stage has a bill of its own
            print(importlib.import_module(f"lessons.{lesson.folder}.experiment").bill())
            return
        bill = measure(rows[0])
    except WorldError as error:
        met = blank_in(error)
        if RELEASED is None or met is None:
            raise
        print(f"no bill here: it needs lesson {met[0]}, which is blank in this folder")
        return
    print(f"your {bill.row.name} with 4 ranks and {bill.numel:,} parameters, bytes:")
    for kind, formula in bill.formula_held.items():
        print(f"  {kind + ' on each rank':<28}{bill.ranks[0].held[kind]:>12,}   formula {formula:>12,}")
    steps = f"sent by all in {bill.row.steps} steps"
    print(f"  {steps:<28}{bill.sent_in_all:>12,}   formula {bill.formula_sent:>12,}")
    print(f"\none step, rank by rank (bytes):\n{timeline(bill)}")


def main() -> int:
    """Judge a lesson: FILE for last words, N, the blank tasks. FILE --tasks N and --symptom N do less.

    FILE --claims N JSONL writes what each claim says into a file.
    """
    watch = Watch(Path(sys.argv[1]))
    try:
        with watch.over("import"):
            import zero_min  # noqa: F401
    except Exception:  # whatever the learner's file does wrong at import
        lines = traceback.format_exc().splitlines()
        print("your file cannot be imported:\n  " + "\n  ".join(lines[-3:]))
        return FAILED
    way = sys.argv[2] if sys.argv[2].startswith("--") else ""
    lesson = find_lesson(sys.argv[3 if way else 2])
    works = [Path(place) for name, place in replace.places().items() if name in lesson.modules]
    if way == "--tasks":
        return judge_tasks(lesson, works, watch)
    if way == "--symptom":
        return symptom(lesson, works, watch)
    if way == "--claims":
        return judge_claims(lesson, works, watch, Path(sys.argv[4]))
    return judge(lesson, works, sys.argv[3:], watch)


if __name__ == "__main__":
    sys.exit(main())
