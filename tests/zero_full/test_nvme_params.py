"""Parameters that wait in a file: what is in memory, how far ahead they are read, and disks that fail."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_full
from tests.worlds import POOL
from tests.zero_full.runs import config, data
from tests.zero_full.stage3_runs import Tower, seeded, whole_bytes
from tests.zero_full.test_nvme_state import count, open_files
from zero_full.offload.nvme_params import NvmeParamSlice, NvmeParamStore


def engine_of(path: Path | str, state: str = "none", **keys: Any) -> Any:
    """An engine whose parameters wait in a file."""
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    zero |= {"stage3_max_reuse_distance": 0, "overlap_comm": True, **keys.pop("zero", {})}
    place = {"device": "nvme", "nvme_path": str(path)}
    zero["offload_param"] = {**place, "max_in_cpu": 0, **keys.pop("offload_param", {})}
    zero["offload_optimizer"] = {**place, "device": state}
    return zero_full.initialize(model=seeded(Tower), config=config(3, zero_optimization=zero, **keys))[0]


def shelf_of(engine: Any) -> NvmeParamStore:
    param_store = engine.optimizer.sharded.param_store
    assert isinstance(param_store, NvmeParamStore)
    return param_store


def slices_of(engine: Any) -> list[NvmeParamSlice]:
    return [flat.slice for flat in engine.optimizer.sharded.flats]


def settle(engine: Any) -> None:
    """Until what was written behind is there."""
    for slice_ in slices_of(engine):
        assert slice_.values.numel()


def go(engine: Any, *steps: int, rank: int = 0) -> None:
    dtype = engine.optimizer.sharded.flats[0].dtype
    for step in steps:
        engine.backward(engine(data(step, 0, rank, dtype)))
        engine.step()


# Memory ----------------------------------------------------------------------------------------------


def bytes_moved(comm: Any, path: str, keys: dict[str, Any]) -> None:
    """Every slice is read in forward and in backward, and written once; the fused step reads its copy."""
    engine = engine_of(path, **keys)
    param_store, slices = shelf_of(engine), slices_of(engine)
    assert len(slices) == 8
    go(engine, 0, rank=comm.rank)
    settle(engine)
    before = param_store.read_bytes, param_store.written_bytes
    go(engine, 1, rank=comm.rank)
    settle(engine)
    size = sum(slice_.padded_size for slice_ in slices)
    assert param_store.read_bytes - before[0] == size * (3 if keys else 2)
    assert param_store.written_bytes - before[1] == size
    holdings = engine.optimizer.holdings()
    assert not holdings["parameters"], "nothing is gathered"
    assert sum(t.numel() for t in holdings["disk"]) == sum(
        f.layout.shard_numel for f in engine.optimizer.sharded.flats
    )
    engine.destroy()


@pytest.mark.parametrize("keys", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 2])
def test_each_slice_is_read_once_a_pass_and_written_once(
    world: int, keys: dict[str, Any], tmp_path: Path
) -> None:
    POOL.run(bytes_moved, world, str(tmp_path), keys)
    assert not list(tmp_path.iterdir())


def how_far_ahead(comm: Any, path: str, count: int) -> tuple[list[int], int]:
    """Slices that are under way whenever a unit's forward begins; elements in buffers at the most."""
    engine = engine_of(path, offload_param={"buffer_count": count, "buffer_size": 1100})
    param_store = shelf_of(engine)
    go(engine, 0, 1, rank=comm.rank)
    seen, most = [], 0

    def look(module: Any, inputs: Any) -> None:
        nonlocal most
        seen.append(sum(slice_.reading is not None for slice_ in param_store.prefetched))
        most = max(most, param_store.buffers.numel)

    for block in engine.module.blocks:
        block.up.register_forward_pre_hook(look)
    go(engine, 2, rank=comm.rank)
    assert not param_store.prefetched
    settle(engine)
    assert param_store.buffers.numel == sum(buffer.numel for buffer in param_store.buffers.free), (
        "all are given back"
    )
    engine.destroy()
    return seen, most


def test_slices_are_read_as_far_ahead_as_buffers_reach(tmp_path: Path) -> None:
    """A slice of 1,080 elements takes two pages, which are 2,048."""
    for buffers, ahead in (8, 3), (20, 6):
        ((seen, most),) = POOL.run(how_far_ahead, 1, str(tmp_path), buffers)
        assert max(seen) in (ahead - 1, ahead) and most <= buffers * 1100, (seen, most)
        assert seen[-1] == 0


def most_at_a_time(comm: Any, path: str, keys: dict[str, Any]) -> None:
    """Whatever a step, a pass or a load has under way."""
    limit = 3 * 2048
    if keys:  # a part of the step is 5 slices of 1,080 elements, each of which takes a page of 2,048
        limit = 5 * 2048
    engine = engine_of(path, offload_param={"buffer_count": 3, "buffer_size": 2048}, **keys)
    buffers, most = shelf_of(engine).buffers, 0
    take = buffers.take

    def noted(*given: Any, **named: Any) -> Any:
        nonlocal most
        taken = take(*given, **named)
        most = max(most, buffers.numel)
        return taken

    buffers.take = noted  # type: ignore[method-assign]
    go(engine, 0, 1, 2, rank=comm.rank)
    engine.load_module_state_dict(engine.module_state_dict())
    engine.load_state_dict(engine.state_dict())
    go(engine, 3, rank=comm.rank)
    assert 0 < most <= limit, most
    engine.destroy()


@pytest.mark.parametrize("keys", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_buffers_have_no_more_than_they_may(keys: dict[str, Any], tmp_path: Path) -> None:
    POOL.run(most_at_a_time, 1, str(tmp_path), keys)


GROWTH = """
import sys, torch, torch._dynamo, zero_full
from pathlib import Path
from torch import nn
from zero_full.freed_memory import return_freed_memory
from zero_full.offload import BlockTier

def anonymous():
    return_freed_memory()  # not what malloc keeps of what is freed
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

with zero_full.Init():
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(40)])
    model.requires_grad_(False)
    model[0].requires_grad_(True)
path = sys.argv[1]
settings = zero_full.Settings(stage=3, param_tier=BlockTier(path=path, buffer_numel=2_200_000),
    gathering=zero_full.Gathering(max_reuse=0, wrap=lambda name, module: isinstance(module, nn.Linear)))
x = torch.ones(4, 1024)
before = anonymous()
optimizer = zero_full.assemble.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), settings)
seen = [anonymous() - before]
for step in range(3):
    model(x).sum().backward()
    seen.append(anonymous() - before)
    optimizer.step()
    optimizer.zero_grad()
    seen.append(anonymous() - before)
print(max(seen) // 1000)
optimizer.close(gather=False)
"""


@pytest.mark.rotates
def test_a_large_model_takes_no_memory_but_buffers_and_units(tmp_path: Path) -> None:
    """168 MB of parameters; buffers for 8.8 MB of them, and 4.2 MB in each of two gathered units."""
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, tmp_path], capture_output=True, text=True, timeout=100, check=False
    )
    assert not done.returncode, done.stderr
    assert int(done.stdout) < 8.8 + 2 * 4.2 + 25, "in MB"


def growth(comm: Any, path: str, steps: int) -> list[list[int]]:
    keys = {"buffer_count": 5, "buffer_size": 4096}
    engine = engine_of(path, "nvme", bf16={"enabled": True}, offload_param=keys)
    counts: list[list[int]] = [[], [], [], []]
    for step in range(steps):
        go(engine, step, rank=comm.rank)
        if step >= 2:
            param_store = shelf_of(engine)
            found = count("fd"), count("task"), param_store.file.size, param_store.buffers.numel
            for each, number in zip(counts, found, strict=True):
                each.append(number)
    engine.destroy()
    return counts


@pytest.mark.rotates
@pytest.mark.parametrize("steps", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_many_steps_leave_no_more_files_space_or_buffers(tmp_path: Path, steps: int) -> None:
    for files, threads, sizes, buffers in POOL.run(growth, 2, str(tmp_path), steps):
        assert min(threads) == max(threads) and min(sizes) == max(sizes)
        assert max(files) - min(files) <= 4, "one that is written behind is open twice"
        assert max(buffers) <= 7 * 4096, "five, and what a unit or a write may need at once"


@pytest.mark.parametrize("gather", [False, True])
def test_destroy_gives_everything_back(gather: bool, tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    go(engine, 0)
    threads = count("task")
    assert open_files(tmp_path) >= 1 and not list(tmp_path.iterdir())
    whole = engine.module_state_dict()
    engine.destroy(gather=gather)
    assert open_files(tmp_path) == 0 and count("task") < threads
    if gather:
        for name, param in engine.module.named_parameters():
            assert torch.equal(param, whole[name])


KILLED = """
import os, signal, sys
from tests.zero_full.test_nvme_params import engine_of, go, shelf_of
engine = engine_of(sys.argv[1])
go(engine, 0)
store = shelf_of(engine)
write = store.file.write
def dying(tensor, begin, after):
    write(tensor, begin, after)
    print("in the middle", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
store.file.write = dying
go(engine, 1, 2)
"""


@pytest.mark.rotates
def test_nothing_is_left_of_a_process_that_was_killed_in_the_middle(tmp_path: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path], capture_output=True, text=True, timeout=100, check=False
    )
    assert killed.returncode == -signal.SIGKILL and killed.stdout == "in the middle\n", killed.stderr
    assert not list(tmp_path.iterdir())


# Writing by others -----------------------------------------------------------------------------------


def test_what_is_written_after_it_was_read_ahead_counts(tmp_path: Path) -> None:
    """In the middle of a forward, to parameters of a unit that is being read already."""
    found = []
    for device in ("none", "nvme"):
        engine = engine_of(tmp_path, offload_param={"device": device})
        go(engine, 0, 1)
        with torch.no_grad():
            engine(data(2, 0, 0))  # the order becomes known
        last = engine.module.blocks[7].up.weight

        def write(module: Any, inputs: Any, engine: Any = engine, last: Tensor = last) -> None:
            if engine.optimizer.sharded.param_store.is_offloaded:
                assert slices_of(engine)[0].reading is not None, "the last unit's is the first"
            zero_full.safe_set_full_fp32_param(last, torch.full(last.shape, 0.125))

        handle = engine.module.blocks[4].register_forward_pre_hook(write)
        with torch.no_grad():
            found.append(engine(data(2, 0, 0)))
        handle.remove()
        go(engine, 3)
        found[-1] = {"evaluated": found[-1], **engine.module_state_dict()}
        engine.destroy()
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())


def inside(comm: Any, path: str) -> list[dict[str, Tensor]]:
    """A change that is undone, and a step, while parameters are whole."""
    found = []
    for device in ("none", "nvme"):
        engine = engine_of(path, offload_param={"device": device})
        go(engine, 0, rank=comm.rank)
        params = list(engine.module.parameters())
        if device == "nvme":  # what is undone is no change
            undone = pytest.raises(RuntimeError, match="the change was undone")
            with undone, zero_full.GatheredParameters(params), torch.no_grad():
                params[3].fill_(7)
        with zero_full.GatheredParameters(params, modifier_rank=0):
            go(engine, 1, rank=comm.rank)
            shown = {f"inside {name}": p.clone() for name, p in engine.module.named_parameters()}
        go(engine, 2, rank=comm.rank)
        found.append(shown | engine.module_state_dict())
        engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_while_parameters_are_whole(world: int, tmp_path: Path) -> None:
    for here, away in POOL.run(inside, world, str(tmp_path)):
        assert all(torch.equal(here[name], value) for name, value in away.items())


def with_other_ways(comm: Any, path: str, zero: dict[str, Any]) -> list[dict[str, Tensor]]:
    found = []
    for device in ("none", "nvme"):
        engine = engine_of(path, offload_param={"device": device}, zero=zero)
        go(engine, 0, 1, 2, rank=comm.rank)
        found.append(engine.module_state_dict())
        engine.destroy()
    return found


@pytest.mark.rotates
@pytest.mark.parametrize(
    "zero", [{"mics_shard_size": 1}, {"mics_shard_size": 2}, {"zero_hpz_partition_size": 2}], ids=str
)
def test_beside_other_ways_to_share(zero: dict[str, Any], tmp_path: Path) -> None:
    for here, away in POOL.run(with_other_ways, 4, str(tmp_path), zero):
        assert all(torch.equal(here[name], value) for name, value in away.items())


def test_a_model_that_only_serves(tmp_path: Path) -> None:
    """Frozen, on a single process, and never whole."""
    model = seeded(Tower).requires_grad_(False)
    want = model(data(0, 0, 0))
    place = {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 0}
    zero = {"stage": 3, "offload_param": place, "stage3_param_persistence_threshold": 0}
    told = config(3, zero_optimization=zero)
    del told["optimizer"]
    engine = zero_full.initialize(model=model, config=told)[0]
    for _ in range(3):
        with torch.inference_mode():
            assert torch.equal(engine(data(0, 0, 0)), want)
    assert shelf_of(engine).read_bytes == 3 * sum(slice_.padded_size for slice_ in slices_of(engine))
    assert not whole_bytes(engine)
    engine.destroy()
