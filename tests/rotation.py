"""Which part of a long matrix this run takes. Each commit takes another one, and `make test-all` takes all.

The seed is printed with the results. A run with that seed in ZERO_FULL_TEST_SEED takes the same parts.
"""

import os
import subprocess
from collections.abc import Sequence
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import pytest

Value = TypeVar("Value")
VARIABLE = "ZERO_FULL_TEST_SEED"
ROOT = Path(__file__).parents[1]
TURNS = 4  # a run takes one of so many parts of the cases of all `rotates` tests


@cache
def seed() -> int:
    """The variable's number; else one made of the commit; where git has none, one made of the date."""
    if given := os.environ.get(VARIABLE):
        return int(given)
    try:
        commit = subprocess.check_output(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, stderr=subprocess.DEVNULL, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return date.today().toordinal() % 1000
    return int(commit, 16) % 1000


def in_words() -> str:
    """A line for the reader of a run's results."""
    return f"rotating parts of the suite: seed {seed()}, which {VARIABLE}={seed()} repeats"


def has_turn(test: str, case: int) -> bool:
    """Whether it is this case's turn. First cases of different tests have it in different runs."""
    return (seed() + crc32(test.encode()) + case) % TURNS == 0


def chosen(values: Sequence[Value]) -> Value:
    """The value whose turn it is."""
    return values[seed() % len(values)]


def part_of(values: Sequence[Value]) -> list[Value]:
    """The part of the values whose turn it is."""
    return [*values[seed() % TURNS :: TURNS]]


def one_of(values: Sequence[Any]) -> list[Any]:
    """Parameters of a test: the value whose turn it is. The others are slow."""
    return [x if x == chosen(values) else pytest.param(x, marks=pytest.mark.slow) for x in values]
