"""Runs the example in a process of its own, with a Ray of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def rows(out: Path, *arguments: object) -> list[dict[str, Any]]:
    """The losses of a run of the example, as its first worker has written them."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "15"  # of a worker whose node was lost meanwhile
    environment["RAY_raylet_start_wait_time_s"] = "120"  # on a machine with other work
    command = [sys.executable, "-m", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads(line) for line in (out / "losses.jsonl").read_text().splitlines()]
