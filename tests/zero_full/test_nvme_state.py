"""State that waits in a file: what a step holds in memory, and what becomes of it when the disk fails."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL
from tests.zero_full.runs import Net, config, data
from zero_full.offload import BlockTier, spill_file
from zero_full.offload.nvme_state import OpenNvmeTier

PART = 100  # elements


def engine_of(path: Path | str, stage: int = 1, in_memory: int = 0, **keys: Any) -> Any:
    """An engine whose state waits in a file; so many elements of it, or two parts, are in memory."""
    torch.manual_seed(0)
    zero = {"stage": stage, "reduce_bucket_size": PART, "sub_group_size": PART}
    zero |= {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 100} if stage == 3 else {}
    zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(path), "max_in_cpu": in_memory}
    return zero_full.initialize(model=Net(), config=config(stage, zero_optimization=zero, **keys))[0]


def tier_of(engine: Any) -> OpenNvmeTier:
    tier = engine.optimizer.settings.tier
    assert isinstance(tier, OpenNvmeTier)
    return tier


def go(engine: Any, *steps: int, rank: int = 0) -> None:
    dtype = next(engine.parameters()).dtype
    for step in steps:
        engine.backward(engine(data(step, 0, rank, dtype)))
        engine.step()


@contextmanager
def files_no_longer_than(size: int) -> Iterator[None]:
    """Real errors of the system for whatever is written beyond this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def in_the_file(tensor: Tensor) -> bool:
    """Whether this memory belongs to a file that has no name any more."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split(maxsplit=5)
        begin, end = (int(number, 16) for number in span.split("-"))
        if begin <= tensor.data_ptr() < end:
            return "zero_full" in name and "deleted" in name
    return False


# Memory ----------------------------------------------------------------------------------------------


def what_is_held(comm: Any, stage: int, path: str) -> tuple[int, int, int, bool, int]:
    engine = engine_of(path, stage)
    go(engine, 0, 1, 2, rank=comm.rank)
    tier, kept = tier_of(engine), engine.optimizer.holdings()["disk"]
    resting = {block for block in tier.blocks.values() if block not in tier.places.begins}
    at_rest = bool(resting) and all(
        in_the_file(tensor) is (tier.blocks[group] in resting)
        for group in engine.optimizer.trained
        for tensor in engine.optimizer.steppers.tensors_of(group)
        if tensor.numel()
    )
    largest = max(block.padded_size for block in tier.blocks.values())
    before = tier.read_bytes, tier.written_bytes
    go(engine, 3, rank=comm.rank)
    moved = tier.read_bytes - before[0], tier.written_bytes - before[1]
    state = sum(tensor.nbytes for tensor in kept)
    size = sum(block.padded_size for block in tier.blocks.values())
    count_of_blocks = len(tier.blocks)
    assert state <= size <= state + count_of_blocks * (4096 + 64 * 20)
    assert 0 < moved[0] == sum(block.padded_size for block in resting) < size
    assert moved[1] == size - sum(block.padded_size for block in tier.places.begins)
    buffers = sum(memory.numel() for memory in tier.held())
    engine.destroy()
    return buffers, largest, state, at_rest, count_of_blocks


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_parts_are_in_memory_and_all_else_in_the_file(stage: int, tmp_path: Path) -> None:
    for buffers, largest, _, at_rest, blocks_there in POOL.run(what_is_held, 2, stage, str(tmp_path)):
        assert at_rest and blocks_there > 2
        assert buffers <= 2 * 3 * largest  # at stage 3 several units are a part
    assert not list(tmp_path.iterdir())


GROWTH = """
import sys, torch, torch._dynamo, zero_full  # the optimizer imports the compiler, too
from pathlib import Path
from torch import nn
from zero_full.freed_memory import return_freed_memory
from zero_full.offload import BlockTier

def anonymous():
    return_freed_memory()  # not what malloc keeps of what is freed
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(40)])
settings = zero_full.Settings(tier=BlockTier(path=sys.argv[1], part_numel=600_000, state_numel=1_200_000))
shard = zero_full.assemble.shard  # with all that it imports
before = anonymous()
optimizer = shard(model, torch.optim.AdamW(model.parameters()), settings)
seen = []
for step in range(4):
    model(torch.ones(4, 512)).sum().backward()
    optimizer.step()
    seen.append(anonymous() - before)
    optimizer.zero_grad()
print(max(seen) // 1000, (anonymous() - before) // 1000)
"""


@pytest.mark.rotates
def test_the_state_of_a_large_model_takes_no_memory(tmp_path: Path) -> None:
    """42 MB of parameters, so 126 MB of state: in memory are gradients meanwhile, and two buffers of 6.3."""
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, tmp_path], capture_output=True, text=True, timeout=100, check=True
    )
    most, at_rest = map(int, done.stdout.split())
    assert most < 42 + 2 * 6.3 + 45, "and what malloc keeps for the next step"
    assert at_rest < 2 * 6.3 + 10


def count(what: str) -> int:
    return len(list(Path("/proc/self", what).iterdir()))


def growth(comm: Any, path: str, steps: int) -> tuple[list[int], list[int], list[int]]:
    engine = engine_of(path)
    files, sizes, threads = [], [], []
    for step in range(steps):
        go(engine, step, rank=comm.rank)
        if step >= 2:
            files.append(count("fd"))
            sizes.append(tier_of(engine).file.size)
            threads.append(count("task"))
    engine.destroy()
    return files, sizes, threads


@pytest.mark.parametrize("steps", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_many_steps_leave_no_more_files_or_space(tmp_path: Path, steps: int) -> None:
    for counts in POOL.run(growth, 2, str(tmp_path), steps):
        for each in counts:
            assert min(each) == max(each)


def open_files(folder: Path) -> int:
    found = 0
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # a thread has closed it meanwhile
            found += str(folder) in str(file.readlink())
    return found


def test_destroy_gives_everything_back(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    go(engine, 0)
    assert open_files(tmp_path) == 1 and not list(tmp_path.iterdir())
    engine.destroy()
    assert open_files(tmp_path) == 0


KILLED = """
import os, signal, sys, threading
from tests.zero_full.test_nvme_state import engine_of, go, tier_of
engine = engine_of(sys.argv[1])
go(engine, 0)
tier, write = tier_of(engine), tier_of(engine).file.write
def dying(tensor, begin):
    write(tensor, begin)
    print("in the middle", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
tier.file.write = dying
go(engine, 1)
"""


@pytest.mark.rotates
def test_nothing_is_left_of_a_process_that_was_killed_in_the_middle(tmp_path: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path], capture_output=True, text=True, timeout=100, check=False
    )
    assert killed.returncode == -signal.SIGKILL and killed.stdout == "in the middle\n", killed.stderr
    assert not list(tmp_path.iterdir())
    engine = engine_of(tmp_path)
    go(engine, 0, 1)
    engine.destroy()


# Writing by others -----------------------------------------------------------------------------------


def test_what_is_written_at_rest_counts(tmp_path: Path) -> None:
    """And is not taken for a damaged file."""
    found = []
    for place in ("none", "nvme"):
        zero = {"stage": 1, "offload_optimizer": {"device": place, "nvme_path": str(tmp_path)}}
        torch.manual_seed(0)
        engine = zero_full.initialize(model=Net(), config=config(1, zero_optimization=zero))[0]
        go(engine, 0, 1)
        weight = engine.module.layers[0].weight
        zero_full.safe_set_full_optimizer_state(weight, torch.full(weight.shape, 0.5), "exp_avg")
        local = zero_full.safe_get_local_optimizer_state(weight, "exp_avg_sq")
        assert local is not None
        local.mul_(2)
        go(engine, 2)
        engine.offload_states()
        engine.reload_states()
        go(engine, 3)
        found.append(engine.module_state_dict())
        engine.destroy()
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())


# Faults ----------------------------------------------------------------------------------------------


def disk_full(comm: Any, path: str, when: int) -> tuple[str, bool, bool]:
    """One rank cannot write, from a step on. Returns the refusal; whether all is right, here and saved."""
    zero_dir = Path(path) / "state"
    engine, other = engine_of(zero_dir), engine_of(zero_dir)
    go(other, 0, 1, 2, rank=comm.rank)
    go(engine, *range(when), rank=comm.rank)
    limit = 4096 if comm.rank == 0 else resource.RLIM_INFINITY
    with files_no_longer_than(limit):
        go(engine, when, rank=comm.rank)
    try:
        go(engine, 3, rank=comm.rank)
        refusal = ""
    except RuntimeError as error:
        refusal = str(error)
    engine.optimizer.zero_grad()
    engine.save_checkpoint(Path(path) / "saved")
    same = all(torch.equal(a, b) for a, b in zip(*map(states, (engine, other)), strict=True))
    again = engine_of(zero_dir)
    again.load_checkpoint(Path(path) / "saved")
    resumed = all(torch.equal(a, b) for a, b in zip(*map(states, (again, other)), strict=True))
    go(again, 3, rank=comm.rank)
    for each in (engine, other, again):
        each.destroy()
    return refusal, same if when == 2 else True, resumed if when == 2 else True


def states(engine: Any) -> list[Tensor]:
    state = engine.optimizer.state_dict()["tensors"]
    return [*engine.module_state_dict().values(), *(state[key]["values"] for key in sorted(state))]


@pytest.mark.parametrize("when", [0, 2], ids=["at first", "later"])
def test_a_full_disk_loses_nothing(when: int, tmp_path: Path) -> None:
    first, second = POOL.run(disk_full, 2, str(tmp_path), when)
    assert "cannot be written to" in first[0] and "a checkpoint now, after zero_grad" in first[0], first
    assert "another rank failed" in second[0]
    assert first[1:] == second[1:] == (True, True)


def damaged(comm: Any, path: str, how: str) -> list[str]:
    engine = engine_of(path)
    go(engine, 0, 1, rank=comm.rank)
    if comm.rank == 1:
        file = tier_of(engine).file._file
        if how == "truncated":
            os.ftruncate(file, 4096)
        else:
            for begin in range(0, tier_of(engine).file.size, 4096):
                os.pwrite(file, b"x", begin)
    told = []
    for act in (lambda: go(engine, 2, rank=comm.rank), lambda: go(engine, 3, rank=comm.rank)):
        try:
            act()
        except RuntimeError as error:
            told.append(str(error))
        engine.optimizer.zero_grad()
    try:
        engine.save_checkpoint(Path(path) / "saved")
    except zero_full.CheckpointError as error:
        told.append(str(error))
    engine.destroy()
    return told


@pytest.mark.parametrize(
    ("how", "why"), [("truncated", "too few to read"), ("changed", "not those that were written")]
)
def test_a_damaged_file_is_an_error_on_all_ranks(how: str, why: str, tmp_path: Path) -> None:
    for step, again, save in POOL.run(damaged, 2, str(tmp_path), how):
        assert "cannot be read" in step and why in step
        assert all("cut short by" in each and "cannot be read" in each for each in (again, save))


def refused(comm: Any, path: str, free: int | None, make: Callable[[str], Any] = engine_of) -> str:
    """Why no engine comes to be there; on rank 1 the disk seems to have so much space."""
    measured = spill_file.free_bytes
    if free is not None and comm.rank == 1:
        spill_file.free_bytes = lambda directory: free
    try:
        make(path)
    except Exception as error:
        return str(error)
    finally:
        spill_file.free_bytes = measured
    return ""


def test_too_little_space_is_told_before_anything_is_written(tmp_path: Path) -> None:
    for told in POOL.run(refused, 2, str(tmp_path), 1000):
        assert "has 1.00 kB free" in told and "needs" in told


def test_a_place_where_nothing_can_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for told in POOL.run(refused, 2, str(tmp_path / "file" / "below"), None):
        assert str(tmp_path / "file") in told


def test_a_tier_without_a_path_is_refused() -> None:
    with pytest.raises(ValueError, match="path of a directory"):
        BlockTier()
    with pytest.raises(ValueError, match="part_numel"):
        BlockTier(path="/tmp", part_numel=0)


def test_the_home_directory_is_known_by_its_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration file has no shell that would put its name there."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    engine_of("~/fast").destroy()
    assert (tmp_path / "home" / "fast").is_dir() and not (tmp_path / "~").exists()


def test_what_nobody_hears_of_is_refused_with_the_reason(tmp_path: Path) -> None:
    """Who writes through `.data` is told so, in place of a fault of the disk alone."""
    engine = engine_of(tmp_path)
    go(engine, 0, 1)
    engine.optimizer.state[engine.module.layers[0].weight]["exp_avg"].data.mul_(2)
    with pytest.raises(RuntimeError, match=r"changed through `.data`.*new run"):
        go(engine, 2)
    engine.destroy()


def test_a_step_that_fails_in_the_middle_leaves_what_there_was(tmp_path: Path) -> None:
    """A rule that raises in a part: what was saved before can be loaded, and the run goes on from it."""

    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise ValueError("enough")
            return super().step(closure)

    model = Net()
    base = Failing(model.parameters(), lr=0.1, momentum=0.9)
    zero = {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    told = config(1, zero_optimization=zero, zero_allow_untested_optimizer=True)
    told.pop("optimizer")
    engine = zero_full.initialize(model=model, optimizer=base, config=told)[0]
    go(engine, 0)
    before, saved = states(engine), engine.state_dict()
    base.fails = True
    with pytest.raises(ValueError, match="enough"):
        go(engine, 1)
    with pytest.raises(RuntimeError, match="cut short by ValueError enough"):
        engine.state_dict()
    engine.optimizer.zero_grad()
    engine.load_state_dict(saved)
    assert all(torch.equal(a, b) for a, b in zip(states(engine), before, strict=True))
    base.fails = False
    go(engine, 2)
    engine.destroy()
    assert isinstance(model, nn.Module)
