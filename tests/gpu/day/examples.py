"""The scripts of `zero_full.examples`, started as their texts say."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from tests.gpu.day.rows import parser_for, say

ROOT = Path(__file__).parents[3]
PACKAGE = "zero_full.examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node")
ANSWER = re.compile(r"loss ([\d.]+)|([\d.]+)% right")
SECONDS = 120


def scripts(tiny: bool, weights: Path) -> dict[str, list[str]]:
    """What Python is called with, by name. A rehearsal takes the shortest, on one rank."""
    ranks = "1" if tiny else "2"
    many, train, export = [*TORCHRUN, ranks], f"{PACKAGE}.from_deepspeed", f"{PACKAGE}.export_and_reload"
    trained = {
        "from_deepspeed, 2 ranks, bf16, stage 3": [*many, "-m", train, "--dtype", "bf16", "--stage", "3"],
        "from_deepspeed, 2 ranks, fp16, stage 2": [*many, "-m", train, "--dtype", "fp16", "--stage", "2"],
        "from_deepspeed, alone, stage 1": ["-m", train, "--stage", "1"],
    }
    return {
        **({} if tiny else trained),
        f"export_and_reload, by torchrun on {ranks}": [*many, "-m", export, "--out", str(weights)],
        "reloaded by plain PyTorch": ["-m", export, "--reload", str(weights)],
    }


def main() -> int:
    """A row for each; 1 if one fails, or if what was exported gives another loss."""
    asked = parser_for(__doc__).parse_args()
    wrong, losses = 0, []
    with tempfile.TemporaryDirectory() as scratch:
        for name, arguments in scripts(asked.tiny, Path(scratch) / "weights").items():
            began = perf_counter()
            done = subprocess.run(
                [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS
            )
            printed = done.stdout.strip().rpartition("\n")[2]
            fine = done.returncode == 0 and bool(ANSWER.search(printed))
            wrong += not fine
            told = {} if fine else {"why": (done.stdout + done.stderr)[-1500:]}
            say(script=name, printed=printed, seconds=round(perf_counter() - began, 1), fine=fine, **told)
            losses += re.findall(r"^loss ([\d.]+)", printed)
    if len(losses) == 2:
        same = abs(float(losses[0]) - float(losses[1])) < 1e-4
        say(claim="the exported weights give the same loss in plain PyTorch", fine=same)
        wrong += not same
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
