"""The demo with few steps: the table, the picture, and that every stage ends at the same loss."""

import os
import re
import subprocess
import sys

import pytest

from lessons.registry import LESSONS, ROOT
from lessons.rows import ROWS
from tests import rotation


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_demo_trains_every_row_to_the_same_loss(world_size: int) -> None:
    picture = ROOT / "build" / "demo.png"
    picture.unlink(missing_ok=True)
    demo = ["-m", "lessons", "demo", "--steps", "3", "--world", str(world_size)]
    run = subprocess.run(
        [sys.executable, *demo],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    lines = [line for line in run.stdout.splitlines() if line.startswith("│")]
    assert len(lines) == len(ROWS)
    assert all("equal" in line for line in lines), run.stdout
    stages = [line for line in lines if re.match(r"│ stage \d ", line)]
    assert len({line.split("│")[2].strip() for line in stages}) == 1, run.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000


@pytest.mark.parametrize("lesson", rotation.one_of(LESSONS), ids=lambda lesson: lesson.folder)
def test_a_lesson_s_experiment_measures_and_draws(lesson) -> None:
    picture = ROOT / "build" / "lessons" / f"step{lesson.label}.png"
    picture.unlink(missing_ok=True)
    command = [sys.executable, "-m", "lessons", "run", str(lesson.number), "--world", "2"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(run.stdout.splitlines()) >= 5  # it says what it measured
