"""Tables of the site's page "Works with": cases that were run with other frameworks, and their results.

A framework's suite makes a `Row` of each of its cases and prints `page(...)`, which is kept as the record
site/records/works_with_NAME.md. A test of the suite compares the record's cases with the suite's own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

from tests.bench.interleave import table

RECORDS = Path(__file__).parents[1] / "site" / "records"
HEAD = ["case", "framework", "version", "ranks", "result"]


@dataclass(frozen=True)
class Row:
    """A case, and what came out of it."""

    framework: str  # the name of its distribution, such as "transformers"
    case: str
    ranks: str  # such as "2", or "2, then 4"
    result: str  # such as "equal to one process"

    def cells(self) -> list[str]:
        """This row of the table, with the installed version."""
        return [self.case, self.framework, version(self.framework), self.ranks, self.result]


def page(command: str, rows: Iterable[Row], others: Sequence[str] = ("torch",)) -> str:
    """Return a record: the day, the versions of further distributions, the command, and the table."""
    known = ", ".join(f"{name} {version(name)}" for name in others)
    about = f"Run on {date.today().isoformat()} on CPUs (gloo), with {known}."
    return f"{about}\n\n```\n{command}\n```\n\n{table(HEAD, [row.cells() for row in rows])}\n"


def cases_in(name: str) -> list[tuple[str, str, str]]:
    """Return (framework, case, ranks) of every row of the record works_with_NAME.md."""
    lines = (RECORDS / f"works_with_{name}.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [(framework, case, ranks) for case, framework, _, ranks, _ in rows[2:]]
