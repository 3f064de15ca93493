"""Runs cases in processes of their own: a Lightning of one process cannot be several ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def started(ranks: int, *arguments: Any, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Start a module on this many ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [*options, "-m", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # torchrun of torch 2.13 gives restarted ranks the store of the first ones, in which gloo then finds the
    # addresses of ranks that are gone.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


def results(ranks: int, folder: Path, *cases: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
    """The results of cases, by name."""
    done = started(ranks, "tests.lightning", folder, *cases, options=options)
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def difference(one: Any, other: Any) -> float:
    """The largest relative difference of two lists of numbers; infinite if one is longer."""
    if len(one) != len(other) or not one:
        return float("inf")
    return max(abs(a - b) / max(abs(a), abs(b), 1e-2) for a, b in zip(one, other, strict=True))
