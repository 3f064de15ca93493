"""A mistake that nobody planted is shown where it first makes a difference: line, rank, and by how much."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from lessons import trace
from lessons.first_difference import between, compare, equal, told
from lessons.registry import IN_ORDER, ROOT
from lessons.run_judge import QUICK
from tests import rotation
from tests.lessons.unplanted import MISTAKES


@pytest.mark.parametrize("number", rotation.one_of(list(MISTAKES)))
def test_the_first_difference_names_the_task_and_the_value(number: str) -> None:
    command = [sys.executable, "-m", "tests.lessons.unplanted", number]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **QUICK}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for (task, *_, part), (tasks, words) in zip(MISTAKES[number], found, strict=True):
        assert tasks == [task] and part in words, (task, tasks, words)


def test_every_lesson_has_mistakes_here() -> None:
    assert set(MISTAKES) == {str(lesson.number) for lesson in IN_ORDER}


@pytest.mark.parametrize(
    ("got", "expected", "words"),
    [
        ([2.0, 4.0], [1.0, 2.0], "each is 2 times that"),
        ([-1.0, 2.0], [1.0, -2.0], "every sign is turned"),
        ([3.0], [2.0], "larger by 1"),
        ([2.0, 3.0, 5.0], [1.0, 2.0, 4.0], "each is larger by 1"),
        ([1.0, 9.0, 3.0], [1.0, 2.0, 3.0], "only the element at 1 differs"),
        ([1.0, 2.0, 8.0, 9.0], [1.0, 2.0, 3.0, 4.0], "only the last 2 of 4 differ"),
        ([3.0, 1.0, 2.0], [1.0, 2.0, 3.0], "the same numbers, 1 places later"),
        ([2.0, 1.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0], "the same numbers in another order"),
        ([0.0, 0.0], [1.0, 2.0], "all are 0"),
        ([float("nan"), 1.0], [1.0, 1.0], "1 of 2 are not finite"),
        ([5.0, 2.0, 9.0], [1.0, 2.0, 3.0], "2 of 3 differ"),
    ],
)
def test_the_shape_of_a_difference_in_words(got: list[float], expected: list[float], words: str) -> None:
    assert between(got, expected) == words


def numbers(values: Any, **how: Any) -> trace.Numbers:
    found: trace.Values = {}
    trace.values_of(torch.tensor(values, **how), "x", found, set())
    return found["x"]


def test_values_of_other_kinds_in_words() -> None:
    assert told(None, numbers([1.0, 2.0])) == "is nothing (None), where the answer has 2 numbers, [1, 2]"
    assert (
        told(numbers([1.0]), numbers([1.0], dtype=torch.float64))
        == "is float32, where the answer has float64"
    )
    assert "the last one is missing" in told(numbers([1.0, 2.0]), numbers([1.0, 2.0, 0.0]))
    assert told(3, 2) == "is 3, where the answer has 2: larger by 1"
    assert equal(numbers([1.0, float("nan")]), numbers([1.0 + 1e-7, float("nan")]))
    assert not equal(numbers([1.0]), numbers([1.001])) and not equal(True, 1)


SOURCE = """
def halve(x, rank):
    half = x / 2
    if rank == 1:
        half = half {}
    return half
"""


def recorded(folder: Path, change: str) -> list[trace.Call]:
    """Calls of a function with this change, in two threads one after the other."""
    file = folder / f"halve{len(list(folder.iterdir()))}.py"
    file.write_text(SOURCE.format(change))
    names: dict[str, Any] = {}
    with trace.record([file]) as calls:
        exec(compile(file.read_text(), str(file), "exec"), names)
        for rank in (0, 1):
            thread = threading.Thread(target=names["halve"], args=(torch.tensor([2.0, 4.0]), rank))
            thread.start()
            thread.join()
    return calls


KEEPS = """
class Keeps:
    def __init__(self):
        self.x = torch.ones(2)

    def task(self):
        {}
"""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("yield self.x.add_(1)", "has a `yield`, so it returns a generator"),
        ("self.x = self.x + 1", "makes `self.x` another tensor, where the answer writes into the one"),
        (
            "self.x.add_(1); self.old = self.x + 1",
            "`self.old` keeps a tensor, and the answer keeps none there",
        ),
    ],
)
def test_what_is_made_or_kept_besides_is_told(line: str, words: str, tmp_path: Path) -> None:
    calls = []
    for number, text in enumerate((line, "self.x.add_(1)")):
        file = tmp_path / f"zero_min{number}.py"
        file.write_text(KEEPS.format(text))
        names: dict[str, Any] = {"torch": torch, "__name__": "zero_min.keeps"}
        with trace.record([file]) as found:
            exec(compile(file.read_text(), str(file), "exec"), names)
            list(names["Keeps"]().task() or ())
        calls.append(found)
    assert words in compare(*calls, "Keeps.task", range(20))[1]


def test_memory_that_grows_is_zeros_while_recorded() -> None:
    with trace.record([]):
        x = torch.ones(1000)
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(4000)
        assert not x.any()


def test_a_trace_is_compared_line_by_line(tmp_path: Path) -> None:
    mine, right = recorded(tmp_path, "+ 1"), recorded(tmp_path, "* 1")
    assert [call.function for call in mine] == ["halve", "halve"]
    line, words = compare(mine, right, "halve", range(10))
    assert line == 5 and "`half` is [2, 3], where the answer has [1, 2]: " in words
    assert sys.gettrace() is None or "pytest" not in repr(sys.gettrace())
    assert compare(right, right, "halve", range(10))[0] is None
