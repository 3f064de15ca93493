"""CPU and wall seconds of each command on small files, of `import zero_full`, and of mistakes in arguments.

    python -m tests.bench.commands
    python -m tests.bench.commands --before ../another_checkout

Each run is a new process, which finds compiled bytecode, as after an installation. Times are medians; CPU
time has that of child processes. A row's first run is not counted.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tests.bench import interleave

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}
# Writes the checkpoint and the recording that `inspect`, `export` and `replay` read, and is migrated.
TRAIN = """
import torch
import zero_full

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)).bfloat16()
engine, *_ = zero_full.initialize(model=model, config="ds.json")
engine.record("step.json")
for _ in range(2):
    engine.backward(engine(torch.randn(2, 64).bfloat16()).sum())
    engine.step()
engine.save_checkpoint("checkpoints")
engine.destroy()
"""
MODELS = "import torch\n\ndef tiny():\n    return torch.nn.Linear(64, 64)\n"
IMPORTS = {
    "import torch": "import torch",
    "import zero_full, and use initialize": "import zero_full; zero_full.initialize",
}
PLAN = "plan --model models:tiny --world 8 --config"
FIT = "fit --world 8 --memory 80GB --hf-config"
COMMANDS = {
    "zero_full": [
        *("doctor", "check ds.json", "check ds.json --quick", "check none.json", "migrate train.py ds.json"),
        *("inspect checkpoints", "inspect checkpoints --verify", "inspect none", "export none out"),
        *("replay step.json", "replay none.json", f"{PLAN} ds.json", f"{PLAN} none.json"),
        *(f"{FIT} config.json", f"{FIT} none.json", "as-deepspeed none.py"),
    ],
    "lessons": ["list", "hint 1", "verify none", "check 99", "golf 99", "bill", "clock 1"],
}
ROWS = {name: ["-c", code] for name, code in IMPORTS.items()} | {
    f"{package} {arguments}": ["-m", package, *arguments.split()]
    for package, commands in COMMANDS.items()
    for arguments in commands
}


def environment(checkout: Path) -> dict[str, str]:
    """The environment of a command of this checkout, in which Python writes bytecode."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return {**env, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}


def make_files(rows: Sequence[str], folder: Path) -> None:
    """Write the files that these rows' commands are given."""
    (folder / "ds.json").write_text(json.dumps(CONFIG))
    (folder / "models.py").write_text(MODELS)
    (folder / "train.py").write_text(TRAIN)
    published = ROOT / "tests" / "zero_full" / "hf_configs" / "gemma-2b.json"
    (folder / "config.json").write_text(published.read_text())
    if any(name in row for row in rows for name in ("checkpoints", "step.json")):
        subprocess.run([sys.executable, "train.py"], cwd=folder, env=environment(ROOT), check=True)


def seconds(arguments: Sequence[str], folder: Path, env: dict[str, str]) -> tuple[float, float]:
    """CPU and wall seconds of one run."""
    from resource import RUSAGE_CHILDREN, getrusage  # not on Windows

    before, start = getrusage(RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=folder, env=env, capture_output=True, check=False)
    after, wall = getrusage(RUSAGE_CHILDREN), time.perf_counter() - start
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def measure(rows: Sequence[str], rounds: int, checkouts: Sequence[Path], folder: Path) -> list[list[str]]:
    """The table's lines: for each row CPU and wall seconds with the files of each checkout."""
    make_files(rows, folder)
    environments = [environment(checkout) for checkout in checkouts]
    lines = []
    for row in rows:
        found = [[seconds(ROWS[row], folder, env) for env in environments] for _ in range(rounds + 1)][1:]
        of_checkouts = [zip(*runs, strict=True) for runs in zip(*found, strict=True)]
        lines.append([row, *(f"{median(times):.2f}" for kinds in of_checkouts for times in kinds)])
    return lines


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--before", type=Path, help="a checkout of this project, to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--rows", nargs="+", default=[""], help="rows that contain one of these", metavar="TEXT"
    )
    options = parser.parse_args()
    rows = [row for row in ROWS if any(text in row for text in options.rows)]
    checkouts = [ROOT] if options.before is None else [options.before.resolve(), ROOT]
    head = ["CPU s", "wall s"] if len(checkouts) == 1 else ["CPU s before", "wall s", "CPU s now", "wall s"]
    print(interleave.heading())
    with tempfile.TemporaryDirectory() as folder:
        print(interleave.table(["", *head], measure(rows, options.rounds, checkouts, Path(folder))))


if __name__ == "__main__":
    main()
