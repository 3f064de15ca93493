"""Where the peak memory of a rank is: the most resident memory during each part of a step.

    python -m tests.bench.real_models_peak --rows "zero_full 2" "zero_full 3" DDP

A loop of `real_models` on gloo ranks with one thread each. Each row runs twice. First with the C library's
defaults, with which a process keeps freed memory for later. Then freed memory goes back to the system at once
(MALLOC_MMAP_THRESHOLD_), and the peak is that of tensors. MiB above what was resident before the model was
built, of the rank with the most. The last line is JSON.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench import interleave
from tests.bench.real_models_rank import MODELS, Job, Meter, by_loop, prepare
from tests.worlds import free_port

SETTINGS = {"default": {}, "returned at once": {"MALLOC_MMAP_THRESHOLD_": "65536"}}
ROWS = ("zero_full 2", "zero_full 3", "DDP", "FSDP2")
PARTS = ("initialize", "forward", "backward", "update")
SCRIPT = "from tests.bench.real_models_peak import rank_main; rank_main()"


class Marks(Meter):
    """The most memory in each part of each step, and what is left after it, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.most: dict[str, list[int]] = {}
        self.left: dict[str, list[int]] = {}

    def part_ended(self, name: str) -> None:
        """Note both, and begin anew."""
        self.most.setdefault(name, []).append(self.resident("VmHWM") - self.before)
        self.left.setdefault(name, []).append(self.resident("VmRSS") - self.before)
        Path("/proc/self/clear_refs").write_text("5")


def rank_main() -> None:
    """The life of one process: its job is the argument."""
    answers, sys.stdout = sys.stdout, sys.stderr
    prepare("loop")
    meter = Marks()
    by_loop(Job(**json.loads(sys.argv[1])), int(os.environ["RANK"]), meter)
    print(json.dumps([meter.most, meter.left]), file=answers, flush=True)
    os._exit(0)


def measured(job: Job, more: dict[str, str]) -> list[int]:
    """Bytes: the most of each part in the last step, and what is left after it."""
    port = str(free_port())
    env = {**os.environ, **more, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env |= {"WORLD_SIZE": str(job.ranks), "LOCAL_WORLD_SIZE": str(job.ranks)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(asdict(job))],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(job.ranks)
    ]
    found: list[Any] = [json.loads(process.communicate()[0]) for process in ranks]
    most = [max(one[0][part][-1] for one in found) for part in PARTS]
    return [*most, max(one[1][PARTS[-1]][-1] for one in found)]


def main() -> None:
    """Measure, print a table, end with one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="GPT2-124M")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    asked = parser.parse_args()
    if importlib.util.find_spec("transformers") is None:
        print("nothing measured: transformers is not installed (pip install -e '.[hf]')\n\n{}")
        return
    print(interleave.heading())
    lines, numbers = [], {}
    for row in asked.rows:
        job = Job(asked.model, asked.dtype, "loop", row, asked.ranks, asked.tokens, 1, 2)
        for setting, more in SETTINGS.items():
            mib = [round(size / 2**20) for size in measured(job, more)]
            lines.append([row, setting, *map(str, mib)])
            numbers[f"{row}, {setting}"] = mib
    print(f"{asked.model}, {asked.dtype}, {asked.ranks} ranks, a batch of 1 x {asked.tokens}; MiB\n")
    head = ["row", "freed memory", *(f"{part}: most" for part in PARTS), "between steps"]
    print(interleave.table(head, lines))
    print("\n" + json.dumps({"mib": numbers, "versions": interleave.versions()}))


if __name__ == "__main__":
    main()
