"""The doctor says what is there, and does not fall ill itself when something is not."""

import errno
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from zero_full.__main__ import main
from zero_full.cpus import usable_cpus
from zero_full.doctor import bandwidth
from zero_full.doctor import machine as doctor
from zero_full.start.launch import FOREIGN_LAUNCHERS, init_distributed

LAUNCHER = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
LAUNCHER += [name for other in FOREIGN_LAUNCHERS for name in other.sizes]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make these imports fail."""
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


def test_a_healthy_machine_gets_0_and_all_sections(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for word in [
        "zero_full",
        torch.__version__,
        "OMP_NUM_THREADS",
        "memory",
        "accelerators",
        "gloo",
        "not needed",
    ]:
        assert word in text
    assert "adam_step" in text and "cpu compiled" in text
    assert "torchrun --nproc-per-node" in text
    assert "problem:" not in text


@pytest.mark.parametrize("width", [60, 80])
def test_it_is_as_wide_as_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    wide = doctor.report()
    monkeypatch.setenv("COLUMNS", str(width))
    told = doctor.report()
    assert told.split() == wide.split() and max(map(len, wide.splitlines())) > 80
    assert not [line for line in told.splitlines() if len(line) > width and "/" not in line]


def test_columns_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    rows = [line for line in doctor.report().splitlines() if line.startswith("  ")]
    starts = {len(line) - len(line[2:].split("  ", 1)[1].lstrip()) for line in rows}
    assert len(starts) == 1


@pytest.mark.parametrize("absent", [["torch"], ["pydantic"], ["numpy"], ["torch", "pydantic"]], ids=str)
def test_nothing_that_is_absent_makes_it_crash(
    absent: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide(monkeypatch, *absent)
    needed = [name for name in absent if name != "numpy"]
    assert doctor.main() == (1 if needed else 0)
    text = capsys.readouterr().out
    problems = [line for line in text.splitlines() if line.startswith("problem: ")]
    assert len(problems) == len(needed)
    for name, line in zip(needed, problems, strict=True):
        assert f"{name} cannot be imported" in line and "remedy: pip install" in line


def test_a_torch_that_is_broken_is_a_problem_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    assert "libcudart.so.12" in doctor.problems()[0]
    assert "libcudart.so.12" in doctor.report()


@pytest.mark.parametrize(("version", "old"), [("2.10.1", True), ("1.13.0", True), ("2.11.0+cpu", False)])
def test_an_old_torch_is_a_problem(version: str, old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert doctor.problems() == (
        [f"torch {version} is too old, remedy: pip install 'torch>=2.11'"] if old else []
    )
    assert ("OLDER than" in doctor.report()) is old


def test_an_old_pydantic_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydantic", SimpleNamespace(VERSION="1.10.2"))
    assert "pydantic 1.10.2 is too old, remedy: pip install" in doctor.problems()[0]


def test_a_torch_without_distributed_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert "no torch.distributed, remedy" in doctor.problems()[0]
    assert doctor.distributed() == [("available", "no")]
    assert doctor.report()


def test_half_a_launcher_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert doctor.problems() == []
    monkeypatch.setenv("RANK", "1")
    assert "set: RANK; not set: WORLD_SIZE, MASTER_PORT." in doctor.problems()[0]
    assert "not clear" in doctor.report()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert "RANK=1 is not a rank of WORLD_SIZE=1" in doctor.problems()[0]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert doctor.problems() == []
    assert "rank 1 of 2, set by torchrun" in doctor.report()


def test_another_launcher_is_a_problem_in_the_words_of_init_distributed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(RuntimeError) as caught:
        init_distributed()
    assert doctor.problems() == [str(caught.value)]


def fake_torch(kind: str | None, built_for: str | None, module: Any = None) -> Any:
    accelerator = SimpleNamespace(
        current_accelerator=lambda: kind and torch.device(kind),
        is_available=lambda: kind is not None,
        device_count=lambda: 2,
    )
    version = SimpleNamespace(cuda=built_for, hip=None)
    return SimpleNamespace(accelerator=accelerator, version=version, get_device_module=lambda device: module)


@pytest.mark.parametrize(
    ("kind", "known", "line"),
    [
        ("cuda", {"major": 9, "minor": 0}, "Some GPU, 16.0 GiB, compute capability 9.0"),
        ("xpu", {}, "Some GPU, 16.0 GiB"),
        ("mps", None, "no properties"),
    ],
)
def test_devices_are_listed(kind: str, known: Any, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace()
    if known is not None:
        properties = SimpleNamespace(name="Some GPU", total_memory=16 * 2**30, **known)
        module.get_device_properties = lambda index: properties
    monkeypatch.setattr(doctor, "imported", lambda name: (fake_torch(kind, "12.8", module), ""))
    assert doctor.accelerators() == [(f"{kind}:0", line), (f"{kind}:1", line)]


@pytest.mark.parametrize(
    ("built_for", "hidden", "reason"),
    [
        (None, None, "built for CPU only"),
        ("12.8", "", "CUDA_VISIBLE_DEVICES='' hides every device; unset it"),
        ("12.8", None, "built for CUDA 12.8 but finds no device"),
    ],
)
def test_no_device_has_a_reason(
    built_for: str | None, hidden: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    monkeypatch.setattr(doctor, "imported", lambda name: (fake_torch(None, built_for), ""))
    [(name, value)] = doctor.accelerators()
    assert name == "none" and reason in value


def test_systems_without_proc_or_sysconf_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "text_of", lambda path: "")
    assert "GiB" in doctor.memory() and "available" not in doctor.memory()
    monkeypatch.delattr(doctor.os, "sysconf")
    assert doctor.memory() == "unknown"
    monkeypatch.delattr(doctor.os, "sched_getaffinity", raising=False)
    assert usable_cpus() >= 1
    assert doctor.report()


QUOTAS: list[tuple[dict[str, str], int]] = [
    ({"proc/self/cgroup": "0::/job/task\n", "sys/fs/cgroup/job/cpu.max": "150000 100000\n"}, 2),
    ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "max 100000\n"}, 8),
    (
        {
            "proc/self/cgroup": "4:memory:/a\n7:cpu,cpuacct:/docker/a\n",  # its own is the outermost it sees
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        4,
    ),
    ({}, 8),
]


@pytest.mark.parametrize(("files", "count"), QUOTAS)
def test_cpus_are_those_of_the_mask_and_of_the_quota(
    files: dict[str, str], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    for name, text in files.items():
        tmp_path.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
        tmp_path.joinpath(name).write_text(text)
    assert usable_cpus(tmp_path) == count


def test_a_container_with_less_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/sys/fs/cgroup/memory.max": f"{2**29}\n"}
    monkeypatch.setattr(doctor, "text_of", lambda path: files.get(path, ""))
    assert "this container may use 0.5 GiB" in doctor.memory()


# Measuring ---------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure little."""
    for name in ("memory_rows", "disk_rows"):
        slow = getattr(bandwidth, name)
        monkeypatch.setattr(bandwidth, name, partial(slow, seconds=0.01, piece=2**16))


@pytest.mark.usefixtures("quick")
def test_bandwidths_are_measured_on_request_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 0 and "memory to memory" not in capsys.readouterr().out
    assert main(["doctor", "--measure"]) == 0
    text = capsys.readouterr().out
    assert "memory to memory" in text and "write to" not in text
    assert main(["doctor", "--measure", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for name in ("memory to memory", f"write to {tmp_path}", f"read from {tmp_path}"):
        (line,) = (line for line in text.splitlines() if name in line)
        assert re.search(r"  [0-9.]+ [kMGT]B/s, ", line), line
    assert "thread" in text and not list(tmp_path.iterdir())


def test_what_is_written_is_read_and_is_no_more_than_half_of_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = SimpleNamespace(f_bavail=7, f_frsize=2**16)
    monkeypatch.setattr(bandwidth.os, "statvfs", lambda path: blocks)
    write, read, _ = bandwidth.disk_rows(str(tmp_path), seconds=60, piece=2**16)
    assert write[1].endswith(", 197 kB") and ", 197 kB" in read[1], "three pieces"
    blocks.f_bavail = 1
    with pytest.raises(bandwidth.MeasureError, match=r"has 65\.5 kB free, and at least 131 kB are needed"):
        bandwidth.disk_rows(str(tmp_path), piece=2**16)


def refused(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EROFS, "Read-only file system")


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("where", "call", "message"),
    [
        ("tempfile.NamedTemporaryFile", refused, "cannot be measured: .*Read-only file system"),
        ("BlockIO.write", full, "cannot be measured: .*No space left on device"),
        ("", None, "is not a directory"),
    ],
)
def test_a_disk_that_cannot_be_measured_is_a_problem(
    where: str, call: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as stack:
        if where:
            stack.enter_context(mock.patch(f"zero_full.doctor.bandwidth.{where}", call))
        place = tmp_path if where else tmp_path / "absent"
        assert main(["doctor", "--measure", str(place)]) == 1
    text = capsys.readouterr().out
    assert re.search(f"problem: {re.escape(str(place))} {message}", text)
    assert "memory to memory" in text and not list(tmp_path.iterdir())


def test_without_torch_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide(monkeypatch, "torch", "zero_full.doctor.bandwidth")
    assert doctor.main("") == 1
    assert "problem: nothing can be measured" in capsys.readouterr().out


def test_looking_imports_neither_the_configuration_nor_an_engine() -> None:
    code = (
        "import sys; from zero_full.doctor import machine; machine.report(); before = set(sys.modules); "
        "print([m for m in before if m.startswith(('zero_full.config', 'zero_full.engine.engine'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
