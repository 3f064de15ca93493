"""Every operator under NVIDIA's compute-sanitizer.

Only our kernels are watched (`kns`: a part of their names), and only what kernels do: torch's own calls to
the driver may fail without being wrong. initcheck has to see who writes, so it watches all. Each tensor has
memory of its own, so that its end is watched.
"""

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from tests.gpu.day.rows import STAND_IN, parser_for, say
from zero_full.kernels import ops, toolchain

ROOT = Path(__file__).parents[3]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
OWN_MEMORY = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
SECONDS = 85  # of one tool: a part has two, and three minutes
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
RAN = f"{len(ops.SCHEMAS)} operators ran"
INSTEAD = f"""#!/bin/sh
# Stands in for compute-sanitizer where there is no GPU: it runs nothing.
echo "========= COMPUTE-SANITIZER"
echo "{RAN}"
case "$*" in
  *racecheck*) echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)";;
  *) echo "========= ERROR SUMMARY: 0 errors";;
esac
"""


def program() -> str | None:
    """compute-sanitizer: on the path, or where the CUDA toolkit is."""
    try:
        homes = [Path(toolchain.toolchain("cuda").nvcc or "").resolve().parents[1]]
    except toolchain.BuildError:
        homes = []
    places = [
        os.environ.get("PATH", ""),
        *(str(home / part) for home in homes for part in ("bin", "compute-sanitizer")),
    ]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(places))


def command(sanitizer: str, tool: str) -> list[str]:
    """What to run."""
    options = ["--tool", tool, "--error-exitcode", "9", "--report-api-errors", "no"]
    ours = [] if tool == "initcheck" else ["--kernel-name", "kns=zf"]
    return [sanitizer, *options, *ours, sys.executable, "-m", "tests.gpu.samples"]


def errors_in(output: str) -> int | None:
    """How many the sanitizer has counted; None if it has not come to its end."""
    found = SUMMARY.findall(output)
    return int(found[-1][0] or found[-1][1]) if found else None


def run(sanitizer: str, tool: str, seconds: float = SECONDS) -> tuple[int | None, str]:
    """(errors, None if it did not get so far, -1 if not all operators ran; what was printed)."""
    environment = {**os.environ, **OWN_MEMORY}
    try:
        done = subprocess.run(
            command(sanitizer, tool),
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return None, f"it did not end within {seconds:g} s"
    errors = errors_in(done.stdout)
    if errors == 0 and (done.returncode or RAN not in done.stdout):
        errors = -1
    return errors, done.stdout[-5000:] + done.stderr[-2000:]


def stand_in(folder: Path) -> str:
    """A program of that name which finds nothing."""
    file = folder / "compute-sanitizer"
    file.write_text(INSTEAD)
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


def main() -> int:
    """A row for each tool; 1 if one finds something or does not come to its end."""
    parser = parser_for(__doc__)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        marked = {STAND_IN: "a script that finds nothing"} if asked.device == "cpu" else {}
        sanitizer = stand_in(Path(scratch)) if marked else program()
        if sanitizer is None:
            say(tool="compute-sanitizer", fine=False, why="it is not installed")
            return 1
        wrong = 0
        for tool in asked.tools:
            began = perf_counter()
            errors, output = run(sanitizer, tool)
            wrong += errors != 0
            told = {} if errors == 0 else {"why": output[-1500:]}
            spent = round(perf_counter() - began, 1)
            say(tool=tool, errors=errors, seconds=spent, fine=errors == 0, **marked, **told)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
