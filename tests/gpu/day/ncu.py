"""Four kernels under NVIDIA's ncu: how long each takes, and how much of the memory's bandwidth it uses.

    python -m tests.gpu.day.ncu            starts ncu
    python -m tests.gpu.day.ncu --profiled runs the operators, twice: under ncu

The second launch of a kernel counts: the first one loads it. The card's clocks are left as they are.
"""

import csv
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tests.gpu import samples
from tests.gpu.day.rows import STAND_IN, parser_for, say
from zero_full.kernels import load, toolchain

ROOT = Path(__file__).parents[3]
KERNELS = {  # the operator of each
    "adam_kernel": "adam_step",
    "unscale_kernel": "unscale_norm_check",
    "quantize_kernel": "quantize_blocks",
    "pack_kernel": "sign_pack",
}
NUMEL = 2**26
METRICS = {  # ncu's names, in base units
    "gpu__time_duration.sum": "ns",
    "dram__bytes_read.sum": "bytes read",
    "dram__bytes_write.sum": "bytes written",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "% of memory bandwidth",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "% of warps active",
    "launch__registers_per_thread": "registers a thread",
}
SECONDS = 90
INSTEAD = """#!/bin/sh
# Stands in for ncu where there is no GPU: it profiles nothing.
echo '==PROF== Connected'
echo '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
for kernel in adam_kernel unscale_kernel quantize_kernel pack_kernel; do
  echo "\\"0\\",\\"$kernel\\",\\"gpu__time_duration.sum\\",\\"ns\\",\\"1,000\\""
done
"""


def program() -> str | None:
    """Find ncu on the path, or beside the CUDA toolkit."""
    try:
        homes = [Path(toolchain.toolchain("cuda").nvcc or "").resolve().parents[1]]
    except toolchain.BuildError:
        homes = []
    places = [os.environ.get("PATH", ""), *(str(home / "bin") for home in homes)]
    return shutil.which("ncu", path=os.pathsep.join(places))


def command(ncu: str) -> list[str]:
    """ncu's arguments, and the program that it watches."""
    watched = ["--kernel-name", f"regex:^({'|'.join(KERNELS)})$", "--metrics", ",".join(METRICS)]
    printed = ["--csv", "--print-units", "base", "--clock-control", "none"]
    return [ncu, *watched, *printed, sys.executable, "-m", "tests.gpu.day.ncu", "--profiled"]


def measured(output: str) -> dict[str, dict[str, float]]:
    """Read ncu's table: by kernel, the metrics of its last launch."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    found: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(lines):
        kernel = next((name for name in KERNELS if re.search(rf"\b{name}\b", row["Kernel Name"])), None)
        if kernel is not None and row["Metric Name"] in METRICS:
            value = float(row["Metric Value"].replace(",", ""))
            found.setdefault(kernel, {})[METRICS[row["Metric Name"]]] = value
    return found


def run_operators(numel: int) -> None:
    """Call each of the four operators twice on one large tensor."""
    made = {
        "adam_step": samples.adam_step([numel]),
        "unscale_norm_check": samples.unscale([numel]),
        "quantize_blocks": samples.quantize(numel),
        "sign_pack": samples.sign_pack(numel),
    }
    operators = load.operators(samples.GPU)
    for name in KERNELS.values():
        tensors = samples.placed(made[name], samples.GPU)
        for _ in range(2):
            getattr(operators, name)(*tensors, **made[name].options)
            torch.cuda.synchronize()


def stand_in(folder: Path) -> str:
    """Write a program of ncu's name that prints a table of what it did not measure."""
    file = folder / "ncu"
    file.write_text(INSTEAD)
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


def profile(ncu: str) -> tuple[dict[str, dict[str, float]], str]:
    """Run ncu. Returns the metrics by kernel, and the end of the output."""
    try:
        done = subprocess.run(command(ncu), cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {}, f"it did not end within {SECONDS} s"
    return measured(done.stdout), done.stdout[-1500:] + done.stderr[-1500:]


def main() -> int:
    """A row for each kernel; 1 if ncu is missing or has not seen all of them."""
    parser = parser_for(__doc__)
    parser.add_argument("--profiled", action="store_true", help="run the operators, and start no ncu")
    asked = parser.parse_args()
    if asked.profiled:
        run_operators(NUMEL)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        marked = {STAND_IN: "a script that measures nothing"} if asked.device == "cpu" else {}
        ncu = stand_in(Path(scratch)) if marked else program()
        if ncu is None:
            say(kernel="all", fine=False, why="ncu is not installed")
            return 1
        found, output = profile(ncu)
        for kernel in KERNELS:
            say(kernel=kernel, numel=NUMEL, **found.get(kernel, {}), fine=kernel in found, **marked)
    missing = [*KERNELS.keys() - found.keys()]
    if missing:
        say(missing=", ".join(missing), why=output)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
