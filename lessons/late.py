"""When a hand-in arrived, and what a late one loses.

A hand-in holds the time at which it was made, by the clock of the student's own computer, which can be set to
anything. The authority is who received the file: the learning platform, or the server that took a push. Their
times come in a CSV file.
"""

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from fractions import Fraction
from pathlib import Path

from lessons.exercise import LessonError

UTC = timezone.utc
DAY = timedelta(days=1)
STUDENT = "the student's clock"


def now() -> str:
    """The time in UTC, as hand-ins and progress write it down."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def moment(text: str, end_of_day: bool = False) -> datetime:
    """A time as ISO 8601 writes it; UTC if it names no zone. LessonError if it is none.

    `end_of_day`: a date without a time is the whole of this day.
    """
    try:
        found = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
    except ValueError:
        example = "2026-12-01, 2026-12-01T18:00 or 2026-12-01T18:00+01:00"
        raise LessonError(f"{text!r} is no date. Write {example}; without a zone it is UTC") from None
    if end_of_day and len(text.strip()) == len("2026-12-01"):
        found += DAY
    return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)


@dataclass(frozen=True)
class Policy:
    """When work is due, and how much of its points a late one loses."""

    due: datetime | None = None
    percent: float = 0.0  # of the points, for each day that has begun
    cap: float = 100.0  # percent, at most
    grace: float = 0.0  # minutes after `due` that still count as in time

    def days(self, received: datetime | None) -> int:
        """The days late, each that has begun, counted from `due`."""
        if self.due is None or received is None or received <= self.due + timedelta(minutes=self.grace):
            return 0
        return math.ceil((received - self.due) / DAY)

    def left(self, points: float, days: int) -> float:
        """What remains of points after so many days."""
        off = min(Fraction(str(self.percent)) * days, Fraction(str(self.cap)))
        return round(float(Fraction(str(points)) * max(100 - off, Fraction()) / 100), 2)


def received_times(file: Path) -> Mapping[str, datetime]:
    """When each hand-in arrived, by the file's or student's name. LessonError if the CSV does not say it."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            rows = [*csv.DictReader(lines)]
    except OSError as error:
        raise LessonError(f"{file} cannot be read: {error}") from error
    keys = [key for key in ("file", "name") if rows and key in rows[0]]
    if not keys or "received" not in rows[0]:
        raise LessonError(
            f"{file} needs a header line with `received` and `file` or `name`, and rows below it"
        )
    found = {}
    for number, row in enumerate(rows, 2):
        try:
            when = moment(row["received"] or "")
        except LessonError as error:
            raise LessonError(f"{file}, line {number}: {error}") from error
        found |= {Path(row[key]).name if key == "file" else row[key]: when for key in keys if row[key]}
    return found
