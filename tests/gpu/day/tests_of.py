"""Runs tests of the suite, and says how many have passed, failed and were skipped, and which failed."""

import sys
from time import perf_counter
from typing import Any

import pytest

from tests.gpu.day.rows import parser_for, say


class Counted:
    """What pytest tells this object of each test."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.reasons: dict[str, int] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test has a report for what comes before it, itself and what comes after: the worst counts."""
        before = self.outcomes.get(report.nodeid, "passed")
        if report.outcome == "failed" and before != "failed":
            say(test=report.nodeid, fine=False, why=str(report.longreprtext)[-1500:])
        self.outcomes[report.nodeid] = report.outcome if before == "passed" else before
        if report.skipped:
            reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else "expected"
            self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def count(self, outcome: str) -> int:
        """Tests that ended so."""
        return list(self.outcomes.values()).count(outcome)


def main() -> int:
    """Run; 1 if a test has failed, or if none has passed."""
    asked, rest = parser_for(__doc__).parse_known_args()
    counted, began = Counted(), perf_counter()
    code = int(
        pytest.main(
            ["-q", "--durations=10", "-x" if asked.tiny else "--maxfail=20", "-p", "no:cacheprovider", *rest],
            [counted],
        )
    )
    passed, failed = counted.count("passed"), counted.count("failed")
    fine = code == 0 and passed > 0 and failed == 0
    say(
        passed=passed,
        failed=failed,
        skipped=counted.count("skipped"),
        seconds=round(perf_counter() - began, 1),
        fine=fine,
    )
    for reason, times in counted.reasons.items():
        say(skipped=times, because=reason)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
