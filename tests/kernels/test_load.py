"""Loading: what cannot run here is refused before the first step, with the reason; what can be mended, is."""

import contextlib
import ctypes
import logging
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_full
from tests.kernels.compilers import MISTAKE, NVCC_12_0, Compiler
from tests.zero_full.runs import Net, config
from zero_full import assemble
from zero_full.kernels import builder, library_cache, load, toolchain
from zero_full.offload import HostTier

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LIBRARY = """
static int registered = 0;
int zf_cuda_runtime() { return %(runtime)d; }
int zf_cuda_driver() { return %(driver)d; }
const char* zf_cuda_check() { return %(check)s; }
const char* zf_cuda_register() { ++registered; return %(register)s; }
int times_registered() { return registered; }
"""
GOOD = {"runtime": 13000, "driver": 13010, "check": "0", "register": "0"}
H100 = (9, 0)


def loaded_anew(device: torch.device) -> load.Loaded:
    """As the first call in a process."""
    found = load.load.__wrapped__(device)
    assert isinstance(found, load.Loaded)
    return found


@pytest.fixture
def gpu(cache: Path, nvcc: Compiler, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """The nvcc of a machine that looks as if it had two H100s, and where CUDA operators are asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: H100)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setenv("ZERO_FULL_KERNELS", "all")
    return nvcc


def put(directory: Path, devices: Sequence[tuple[int, int]] = (H100,), **answers: object) -> Path:
    """A library that gives these answers to the loader, under the name that nvcc's would have."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / str(builder.name_for("cuda", toolchain.toolchain("cuda"), devices))
    source = path.with_suffix(".c")
    source.write_text(LIBRARY % {**GOOD, **answers})
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", str(path), str(source)], check=True)
    return path


def registered(path: Path) -> int:
    """How often torch was told of a library's operators."""
    return int(ctypes.CDLL(str(path)).times_registered())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# What does not run here ----------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "an older driver": (
        {"driver": 12040},
        r"the driver is too old \(made with CUDA 13\.0, the driver supports 12\.4, torch has ",
    ),
    "no driver": ({"driver": 0}, "there is no driver"),
    "another architecture": (
        {"check": '"no kernel image is available for execution on the device"'},
        r"no kernel image is available .*\(made with CUDA 13\.0, the driver supports 13\.1",
    ),
    "what the driver cannot translate": ({"check": '"unsupported toolchain"'}, "unsupported toolchain"),
    "what torch refuses": ({"register": '"no such operator"'}, "no such operator"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_library_that_does_not_run_here_is_refused_when_it_is_loaded(
    why: str, gpu: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    answers, reason = REFUSED[why]
    path = put(library_cache.BUILT, **answers)
    gpu.become("another", MISTAKE)  # so none takes its place
    toolchain._output_of.cache_clear()
    found = loaded_anew(GPU)
    assert found.path is None and str(path) in found.reason and re.search(reason, found.reason)
    assert "none was built: this command failed" in found.reason
    assert warnings(caplog) == [f"no compiled operators for cuda, torch's own are used: {found.reason}"]
    assert registered(path) == (why == "what torch refuses")
    assert not load.compiled_for(torch.device("meta"))


def test_a_library_whose_kernel_runs_is_used(gpu: Compiler, caplog: pytest.LogCaptureFixture) -> None:
    path = put(library_cache.BUILT)
    assert load.find("cuda") == load.Loaded(path) and registered(path) == 0
    assert "one kernel as a test" in dict(load.rows())["cuda"]
    assert loaded_anew(GPU) == load.Loaded(path) and registered(path) == 1
    assert not warnings(caplog) and gpu.count() == 0


def test_the_next_best_library_is_used_where_the_best_does_not_run(gpu: Compiler, cache: Path) -> None:
    best = put(library_cache.BUILT, check='"not here"')
    gpu.become("older")
    toolchain._output_of.cache_clear()
    second = put(cache)
    os.utime(second, (1, 1))
    assert builder.find("cuda", [H100]) == [best, second]
    assert loaded_anew(GPU) == load.Loaded(second) and gpu.count() == 0


def test_the_same_compilers_are_not_asked_for_the_same_library_again(gpu: Compiler, cache: Path) -> None:
    path = put(cache, driver=12040)
    found = loaded_anew(GPU)
    assert found.path is None and "the driver is too old" in found.reason
    assert gpu.count() == 0 and path.exists()


# What is built, and when ---------------------------------------------------------------------------


def test_on_first_use_only_the_device_at_hand_is_compiled_for(gpu: Compiler) -> None:
    gpu.options["gpus"] = " ".join(map(str, NVCC_12_0))
    gpu.become("12.0")
    assert loaded_anew(GPU).path is None  # what it makes is none
    wanted = {word for line in gpu.lines() for word in line.split() if word.startswith("arch=")}
    assert wanted == {"arch=compute_90,code=sm_90"}


@pytest.mark.parametrize("part", builder.PARTS)
@pytest.mark.parametrize("wanted", ["all", "auto"])
def test_who_has_asked_for_compiled_operators_is_warned_if_there_are_none(
    wanted: str,
    part: str,
    gpu: Compiler,
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("ZERO_FULL_KERNELS", wanted)
    (gpu if part == "cuda" else compiler).become("1", MISTAKE)
    found = loaded_anew(GPU if part == "cuda" else CPU)
    assert found.path is None and "this is no C++" in found.reason
    told = f"no compiled operators for {part}, torch's own are used: {found.reason}"
    assert warnings(caplog) == ([told] if wanted == "all" else [])


def test_a_run_on_a_gpu_compiles_nothing_for_the_cpu(gpu: Compiler, compiler: Compiler) -> None:
    put(library_cache.BUILT)
    assert loaded_anew(GPU).path is not None
    assert compiler.count() == 0


@pytest.mark.parametrize("content", ["made of a newer system's library", ""])
def test_a_file_that_cannot_be_opened_is_built_anew_once(
    content: str, cache: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_library(path: Path) -> None:
        if path.read_text() != "made\n":
            raise OSError("Could not load this library") from OSError(f"{path}: version `GLIBC_9' not found")

    monkeypatch.setattr(torch.ops, "load_library", open_library)
    path = builder.build("cpu", cache)
    once = compiler.count()
    path.write_text(content)
    seen = builder.stamp(path)
    assert load.find("cpu").reason.endswith("or now with python -m zero_full build")
    assert loaded_anew(CPU) == load.Loaded(path) and compiler.count() == 2 * once
    assert loaded_anew(CPU) == load.Loaded(path)
    assert builder.build("cpu", cache, broken={path: seen}) == path  # a rank that has seen the old file, too
    assert compiler.count() == 2 * once
    path.write_text(content)
    compiler.become("another", MISTAKE)
    toolchain._output_of.cache_clear()
    reason = loaded_anew(CPU).reason
    assert "version `GLIBC_9' not found; and none was built: this command failed" in reason


def test_the_library_of_another_system_stays_where_it_is(
    cache: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(os, "confstr", lambda name: "glibc 9.9")
        theirs = builder.build("cpu", cache)
    theirs.write_text("theirs")

    def open_library(path: Path) -> None:
        if path == theirs:
            raise OSError("version `GLIBC_9.9' not found")

    monkeypatch.setattr(torch.ops, "load_library", open_library)
    mine = loaded_anew(CPU).path
    assert mine is not None and mine != theirs and theirs.read_text() == "theirs"


def test_initialize_loads_what_the_model_and_its_state_need_and_later_nothing_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[torch.device] = []

    def note(device: torch.device) -> load.Loaded:
        asked.append(device)
        return load.Loaded(None, "why\nand where")

    monkeypatch.setattr(assemble, "load", note)
    zero_full.initialize(model=Net(), config=config(2))
    assert asked == [CPU]
    asked.clear()
    kinds = dict(assemble._operators(torch.device("meta"), HostTier()))
    assert asked == [torch.device("meta"), CPU]
    assert kinds == {"on meta": "torch's own (why)", "on cpu": "torch's own (why)"}


# Switches ------------------------------------------------------------------------------------------


def run(code: str, **variables: Any) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **variables}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)


def test_without_kernels_the_doctor_says_why_and_operators_still_work(cache: Path) -> None:
    code = (
        "from pathlib import Path; from zero_full.kernels import library_cache; "
        "library_cache.BUILT = Path('/nowhere'); from zero_full.kernels import load; "
        "print(load.rows()[0]); import torch; g = [torch.tensor([3.0, 4.0])]; here = g[0].device; "
        "print(load.operators(here).unscale_norm_check(g, 1.0)[0].item(), load.load(here).reason)"
    )
    done = run(code, CXX="/bin/false", ZERO_FULL_CACHE=str(cache))
    assert done.stdout.splitlines() == [
        "('cpu', 'not used: CXX=/bin/false does not work')",
        "25.0 CXX=/bin/false does not work",
    ], done.stderr


@pytest.mark.parametrize(
    ("word", "expected"),
    [("off", "switched off by ZERO_FULL_KERNELS=off"), ("no", "must be one of auto, all, off")],
)
def test_kernels_can_be_switched_off_and_a_wrong_word_is_refused(
    word: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZERO_FULL_KERNELS", word)
    for look in (lambda: load.find("cpu"), lambda: loaded_anew(CPU)):
        try:
            said = look().reason
        except ValueError as error:
            said = str(error)
        assert expected in said
