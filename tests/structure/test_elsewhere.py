"""What macOS and Windows do not have is missing here: everything is imported, and lessons and training run.

A process of its own hides Linux's modules and functions after the libraries are imported, which have their
own ways on every system.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HIDE = """
import importlib, mmap, os, pkgutil, signal, sys
import torch, torch.multiprocessing, torch.utils.data
import rich.console, rich.progress, rich.table
import matplotlib.figure, matplotlib.backends.backend_agg, pydantic, safetensors.torch, pytest

for name in ("fcntl", "grp", "posix", "pty", "pwd", "resource", "termios"):
    sys.modules[name] = None
missing = {
    os: "confstr fork forkpty geteuid getuid memfd_create pidfd_open fdatasync posix_fallocate pread preadv "
    "pwrite pwritev sched_getaffinity statvfs sysconf uname O_CLOEXEC O_DIRECT O_DIRECTORY O_NOFOLLOW",
    signal: "SIGALRM SIGHUP SIGKILL SIGUSR1 SIGUSR2 siginterrupt pthread_sigmask",
    mmap: "MAP_ANONYMOUS MAP_PRIVATE MAP_SHARED PROT_READ PROT_WRITE",
}
for module, names in missing.items():
    for name in names.split():
        delattr(module, name)
"""
IMPORT = """
count = 0
for package in ("zero_min", "lessons", "zero_full"):
    for each in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if each.name.rpartition(".")[2] != "__main__" and each.name != "lessons.judge":
            try:
                importlib.import_module(each.name)
            except ModuleNotFoundError as error:  # of a framework that an integration or its example is for
                if error.name not in ("accelerate", "lightning", "ray", "transformers"):
                    raise
            count += 1
import zero_full
for name in zero_full.__all__:
    getattr(zero_full, name)
print("imported", count)
"""
LEARN = """
import lessons.__main__
assert lessons.__main__.main(["bill"]) == 0
assert lessons.__main__.main(["list"]) == 0
"""
TRAIN = """
from zero_full.doctor import bandwidth
from zero_full.kernels import builder, library_cache, load
from zero_full.shard.step.stop_signals import StopSignals

torch.manual_seed(0)
model, config = torch.nn.Linear(8, 8), {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}}
config["zero_optimization"] = {"stage": STAGE, "offload_optimizer": {"device": "cpu"}}
engine, *_ = zero_full.initialize(model=model, config=config)
losses = []
for _ in range(3):
    loss = engine(torch.ones(4, 8)).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
assert losses[2] < losses[1] < losses[0], losses
print("operators:", load.load(torch.device("cpu")).reason)
refused = {
    "save": lambda: engine.save_checkpoint(FOLDER),
    "build": lambda: builder.build("cpu", library_cache.BUILT),
    "measure": lambda: bandwidth.disk_rows("."),
}
for what in refused.values():
    try:
        what()
    except (OSError, builder.BuildError, zero_full.CheckpointError, bandwidth.MeasureError) as error:
        print("refused:", error)
watching = StopSignals()
watching.watch([signal.SIGTERM])
watching.leave()
"""


def run(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", HIDE + code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.rotates
def test_everything_is_imported_and_the_lessons_speak_without_what_only_linux_has() -> None:
    said = run(IMPORT + LEARN)
    assert int(said.split()[1]) > 100
    assert "measured and formula agree as integers" in said


@pytest.mark.rotates
def test_zero_full_trains_without_it_and_says_what_it_cannot_do(tmp_path: Path) -> None:
    said = run("import zero_full\nSTAGE = 2\nFOLDER = " + repr(str(tmp_path / "saved")) + TRAIN)
    assert "operators: operators are compiled on Linux and macOS only" in said
    refused = [line for line in said.splitlines() if line.startswith("refused: ")]
    assert len(refused) == 3, said
    assert "on Linux and macOS only" in refused[0]
    assert "compiled on Linux and macOS only" in refused[1]
    assert "cannot be measured" in refused[2]
