"""Runs the example in a process of its own, with a Ray of its own."""

import json
import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
Rows = list[dict[str, Any]]


def rows(out: Path, kill_at: int, return_at: int, *options: object) -> tuple[Rows, Rows]:
    """The losses of a run that loses a node, as its first worker has written them, and of one process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "15"  # of a worker whose node was lost meanwhile
    environment["RAY_raylet_start_wait_time_s"] = "300"  # on a machine with other work
    command = [sys.executable, "-m", "tests.ray_train.lose_a_node", str(out), str(kill_at), str(return_at)]
    command += map(str, options)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-5000:]
    found = [
        [json.loads(line) for line in (out / name / "losses.jsonl").read_text().splitlines()]
        for name in ("ray", "alone")
    ]
    return found[0], found[1]


def check(run: Rows, alone: Rows, save_every: int, workers: list[int]) -> None:
    """The run had these numbers of workers, went on from the last checkpoint each time, and lost nothing."""
    parts = [[*part] for _, part in groupby(run, lambda row: row["workers"])]
    assert [part[0]["workers"] for part in parts] == workers
    begins = 1
    for part in parts:
        assert [row["step"] for row in part] == list(range(begins, part[-1]["step"] + 1))
        begins = part[-1]["step"] // save_every * save_every + 1
    assert [row["step"] for row in alone] == list(range(1, run[-1]["step"] + 1))
    wanted = {row["step"]: row["loss"] for row in alone}
    assert [row for row in run if abs(row["loss"] - wanted[row["step"]]) > 1e-5] == []
