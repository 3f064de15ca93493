"""What the parts of a GPU day read and search, with known answers; and what is packed for a bare machine."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.run import get_args_parser

from tests.gpu import pack
from tests.gpu.day import examples, largest, ncu, overlap, ranks, sanitizer, tiers
from tests.gpu.day.conformance import ALLOWED
from tests.gpu.day.ranks import Ended
from tests.gpu.day.streams import late, waits
from tests.zero_full.runs import assert_same, reference
from zero_full.comm.transport import Native
from zero_full.examples import export_and_reload, from_deepspeed

ROOT = Path(__file__).parents[2]


def event(name: str, start: float, length: float, kind: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": length}


def test_what_is_hidden_is_read_from_a_trace() -> None:
    events = [
        event("gemm", 0, 100),
        event("gemm", 90, 20),  # overlaps the first: until 110
        event("ncclDevKernel_AllGather", 50, 40),  # hidden: 40
        event("Memcpy DtoH (Device -> Pinned)", 100, 30, "gpu_memcpy"),  # hidden: 10, then alone: 20
        event("Memcpy HtoD (Pinned -> Device)", 120, 30, "gpu_memcpy"),  # 10 of it together with the last
        event("Memcpy DtoD (Device -> Device)", 140, 5, "gpu_memcpy"),  # no communication: hides 5
        event("aten::mm", 0, 1000, "cpu_op"),  # not on the device
        {"ph": "M", "name": "process_name"},
    ]
    found = overlap.hidden({"traceEvents": events})
    assert (found.communication, found.other, found.both) == (90, 115, 55)
    assert found.fraction == 55 / 90
    assert overlap.hidden({"traceEvents": events[:1]}).fraction is None


@pytest.mark.parametrize(
    ("output", "errors"),
    [
        ("========= ERROR SUMMARY: 0 errors\n", 0),
        ("========= Invalid __global__ read\n========= ERROR SUMMARY: 12 errors\n", 12),
        ("========= ERROR SUMMARY: 1 error\n", 1),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)\n", 3),
        ("Segmentation fault\n", None),
    ],
)
def test_the_sanitizers_errors_are_read(output: str, errors: int | None) -> None:
    assert sanitizer.errors_in(output) == errors


def test_a_sanitizer_that_ran_nothing_has_found_nothing_out(tmp_path: Path) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text('#!/bin/sh\necho "========= ERROR SUMMARY: 0 errors"\n')
    program.chmod(0o700)
    assert sanitizer.run(str(program), "memcheck")[0] == -1
    assert sanitizer.run(sanitizer.stand_in(tmp_path), "memcheck")[0] == 0


@pytest.mark.parametrize(
    ("codes", "why"),
    [
        ([0, 0], ""),
        ([largest.OUT_OF_MEMORY, None], ""),
        ([None, None], "not over within"),
        ([1, None], "said"),
    ],
)
def test_only_memory_is_a_reason_to_try_a_smaller_model(codes: list[int | None], why: str) -> None:
    told = largest.failure_of([Ended(code, 1.0, "" if code is None else "it said so") for code in codes])
    assert bool(told) == bool(why) and why in told


@pytest.mark.parametrize("most", [1, 2, 3, 7, 40, 64, 1000])
@pytest.mark.parametrize("guess", [1, 8, 60, 1500])
def test_the_search_ends_just_below_what_does_not_train(most: int, guess: int) -> None:
    asked = []

    def trains(count: int) -> bool:
        asked.append(count)
        return count <= most

    good, tries = largest.search(trains, guess)
    assert good <= most <= good * (1 + largest.NEAR) + 1
    assert tries == len(asked) == len(set(asked)) and min(asked) >= 1


def test_a_model_of_which_no_block_trains_is_none() -> None:
    assert largest.search(lambda count: False, 4)[0] == 0


UNTOUCHED = """
import os, traceback, torch

def touched(*_, **__):
    traceback.print_stack()
    os._exit(3)  # nobody can catch that

here = os.getpid()
for part in (torch.cuda, torch.accelerator):
    part.is_available = part.device_count = lambda: os.getpid() == here and touched()
torch.cuda._lazy_init = touched
import tests.imported
from tests.gpu.day import largest, ranks
assert largest.guessed(largest.Size(16, 2**18), 3, "cpu", 2) > 1
"""


@pytest.mark.rotates
def test_who_forks_ranks_leaves_the_device_alone() -> None:
    done = subprocess.run([sys.executable, "-c", UNTOUCHED], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_released_memory_is_spoiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.UntypedStorage, "resize_", lambda storage, size: None)  # it can be looked at
    tensor = torch.ones(3)
    with late(tensor.device, seed=0):
        tensor.untyped_storage().resize_(12)
        assert tensor.tolist() == [1, 1, 1]
        tensor.untyped_storage().resize_(0)
    assert tensor.isnan().all()


def test_reads_of_values_are_counted() -> None:
    x = torch.ones(3)
    assert waits(x.device, lambda: (x.sum().item(), bool(x[0] > 0)))["synchronisations"] == 2


def test_the_scripts_take_what_they_are_started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"from_deepspeed": from_deepspeed, "export_and_reload": export_and_reload}
    started = 0
    for arguments in examples.scripts(False, tmp_path).values():
        rest = (
            arguments[arguments.index("torch.distributed.run") + 1 :]
            if "--standalone" in arguments
            else arguments
        )
        options = get_args_parser().parse_args(rest)
        script = known[options.training_script.rpartition(".")[2]]
        monkeypatch.setattr("sys.argv", ["script", *options.training_script_args])
        monkeypatch.setattr("zero_full.init_distributed", lambda *_: (_ for _ in ()).throw(InterruptedError))
        monkeypatch.setattr(
            export_and_reload, "reload", lambda folder: (_ for _ in ()).throw(InterruptedError)
        )
        with pytest.raises(InterruptedError):
            script.main()
        started += 1
    assert started == 5


NCU = """==PROF== Connected to process 1
"ID","Kernel Name","Context","Section Name","Metric Name","Metric Unit","Metric Value"
"0","void zf::adam_kernel<float>(Slots)","1","Command","gpu__time_duration.sum","ns","9,000"
"1","void zf::adam_kernel<float>(Slots)","1","Command","gpu__time_duration.sum","ns","2,345"
"1","void zf::adam_kernel<float>(Slots)","1","Command","dram__bytes_read.sum","byte","1,000,000"
"2","void zf::some_adam_kernel_of_torch(int)","1","Command","gpu__time_duration.sum","ns","7"
"3","unscale_kernel","1","Command","gpu__time_duration.sum","ns","50.5"
"3","unscale_kernel","1","Command","another.metric","ns","1"
"""


def test_ncus_table_is_read_and_the_last_launch_of_a_kernel_counts() -> None:
    assert ncu.measured(NCU) == {
        "adam_kernel": {"ns": 2345.0, "bytes read": 1e6},
        "unscale_kernel": {"ns": 50.5},
    }
    assert "--clock-control none" in " ".join(ncu.command("ncu")), "the card's clocks are not ours"
    sources = "".join(file.read_text() for file in (ROOT / "csrc" / "cuda").glob("*.cu"))
    assert all(f" {kernel}(" in sources for kernel in ncu.KERNELS)


@pytest.mark.parametrize("spoiled", ["", "all_gather", "all_to_all", "reduce_scatter"])
def test_a_collective_that_changes_values_is_found(spoiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if spoiled:
        honest = getattr(Native, spoiled)

        def spoil(self: Native, whole: Tensor, *rest: Any) -> None:
            honest(self, whole, *rest)
            for tensor in (whole, *(each for each in rest if isinstance(each, Tensor))):
                tensor[-1:] = 5

        monkeypatch.setattr(Native, spoiled, spoil)
    asked = SimpleNamespace(ranks=1, device="cpu", tiny=True)
    assert ranks.passes("native", asked) == (not spoiled)


def test_delayed_updates_have_a_reference_that_lags_by_one_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "AFTER", tiers.STEPS)
    assert_same(tiers.delayed_reference(), reference(1, tiers.STEPS))  # never delayed: plain AdamW
    monkeypatch.setattr(tiers, "AFTER", 1)
    lagging, plain = tiers.delayed_reference(), reference(1, tiers.STEPS)
    assert max(float((lagging[name] - plain[name]).abs().max()) for name in plain) > ALLOWED["fp32"]


# What is packed ----------------------------------------------------------------------------------


def test_what_is_downloaded_is_the_packages_own_needs_for_that_machine(tmp_path: Path) -> None:
    arguments = pack.download(tmp_path)
    assert arguments[-1].startswith("pydantic") and not {"torch", "safetensors"} & {a[:11] for a in arguments}
    assert arguments[arguments.index("--python-version") + 1] == "3.12"
    assert {"manylinux_2_17_x86_64", "manylinux_2_28_x86_64"} <= set(arguments)
    assert str(ROOT / "constraints.txt") in arguments


def test_wheels_are_unpacked_where_something_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "MISSING", "json")
    assert pack.unpack(tmp_path, tmp_path / "out") is None  # nothing is missing
    monkeypatch.setattr(pack, "MISSING", "a_package_that_is_missing")
    with pytest.raises(SystemExit, match="where there is a network"):
        pack.unpack(tmp_path, tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "it-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("a_package_that_is_missing/__init__.py", "ANSWER = 42\n")
    found = pack.unpack(tmp_path, tmp_path / "out")
    assert found == tmp_path / "out"
    monkeypatch.syspath_prepend(found)
    assert __import__("a_package_that_is_missing").ANSWER == 42


def test_packing_counts_all_that_travels_and_fails_above_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = subprocess.run

    def stub(command: list[str], **how: Any) -> Any:
        if command[1:3] == ["-m", "pip"]:
            Path(command[command.index("--dest") + 1], "it.whl").write_bytes(b"x" * 2**20)
            return SimpleNamespace(returncode=0)
        return real(command, **how)

    monkeypatch.setattr(pack.subprocess, "run", stub)
    tracked = pack.size_of(tmp_path)
    assert tracked > 10**6
    assert pack.main(["--folder", str(tmp_path)]) == 0
    assert "   1.00 MiB  it.whl" in capsys.readouterr().out
    monkeypatch.setattr(pack, "LIMIT", tracked)
    assert pack.main(["--folder", str(tmp_path)]) == 1


@pytest.mark.parametrize("missing", [None, "cuda"])
def test_operators_that_were_compiled_before_are_packed(
    missing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, folder = tmp_path / "built", tmp_path / "operators"
    built.mkdir()
    printed = ""
    for part in ("cpu", "cuda"):
        library = built / f"zf_{part}-0123456789abcdef-0123456789abcdef.so"
        library.write_bytes(b"compiled")
        printed += f"{part}: not built: no nvcc\n" if part == missing else f"{part}: {library}\n"
    done = SimpleNamespace(stdout=f"cpu: compiling adam.cpp\n{printed}")
    monkeypatch.setattr(pack.subprocess, "run", lambda command, **how: done)
    if missing:
        with pytest.raises(SystemExit, match="no operators for cuda"):
            pack.build("90", "python", folder)
    else:
        pack.build("90", "python", folder)
        assert {file.name for file in folder.iterdir()} == {file.name for file in built.iterdir()}


def test_the_folder_is_ignored() -> None:
    done = subprocess.run(["git", "check-ignore", "-q", f"{pack.FOLDER}/x.whl"], cwd=ROOT)
    assert done.returncode == 0


def test_traces_of_the_profiler_have_what_is_read(tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        torch.ones(10).copy_(torch.ones(10))
    profiled.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert overlap.hidden(trace, ("cpu_op",), overlap.INSTEAD).communication > 0
