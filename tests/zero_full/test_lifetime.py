"""What nobody holds any more is given back, with its buffers and its connections."""

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import zero_full
from tests.hostile.lasting import WAYS, cycles, steps
from tests.worlds import POOL, run_in
from tests.zero_full.runs import Net, config, data


def traces_of_a_step(model: nn.Module, stage: int, destroy: bool) -> list["weakref.ref[Any]"]:
    """The optimizer, a bucket and a communicator of an engine that took a step and went out of sight."""
    engine, optimizer, _, _ = zero_full.initialize(model=model, config=config(stage))
    engine.backward(engine(data(0, 0, 0)))
    engine.step()
    if destroy:
        engine.destroy()
    return [weakref.ref(each) for each in (optimizer, optimizer.buckets[0], optimizer.groups.dense.shard)]


@pytest.mark.parametrize("destroy", [True, False], ids=["destroyed", "dropped"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_engine_that_nobody_holds_is_freed_with_its_buckets(stage: int, destroy: bool) -> None:
    traces = traces_of_a_step(Net(), stage, destroy)
    gc.collect()
    assert [trace() for trace in traces] == [None] * 3


def test_a_model_that_outlives_its_destroyed_engine_does_not_keep_it_alive() -> None:
    model = Net()
    traces = traces_of_a_step(model, 1, destroy=True)
    gc.collect()
    assert [trace() for trace in traces] == [None] * 3
    assert model(data(0, 0, 0)).isfinite()


def trace_of_a_dropped_engine(comm: Any) -> list[bool]:
    """With peers there are process groups behind an engine, and they have threads."""
    traces = traces_of_a_step(Net(), 1, destroy=False)
    gc.collect()
    return [trace() is None for trace in traces]


def test_an_engine_with_peers_is_freed_too_though_its_hooks_are_on_the_parameters() -> None:
    assert run_in("processes", trace_of_a_dropped_engine, 2) == [[True] * 3] * 2


@pytest.mark.parametrize("way", ["", ", overlap_comm", ", mics_shard_size 1"])
def test_engines_that_are_destroyed_leave_no_descriptors_and_no_threads(way: str) -> None:
    """At stage 3, where there are most of them; a thread's end may be seen a moment late."""
    POOL.run(cycles, 2, 3, WAYS[way], 1)  # torch's own threads come with the first
    for before, *later in POOL.run(cycles, 2, 3, WAYS[way], 12):
        for found in later:
            assert found[0] <= before[0] + 1, "open files"
            assert found[1] <= before[1] + 1, "threads"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_fifty_engines_and_five_hundred_steps_leave_nothing_behind(way: str, stage: int) -> None:
    if stage == 0 and "mics" in way:
        pytest.skip("nothing is sharded at stage 0")
    engines, all_steps = POOL.run(cycles, 2, stage, WAYS[way], 50), POOL.run(steps, 2, stage, WAYS[way], 500)
    for (_, *of_engines), of_steps in zip(engines, all_steps, strict=True):
        for early, late in (of_engines, of_steps):
            assert all(more <= 1 for more in (late[0] - early[0], late[1] - early[1]))
            assert late[2] - early[2] <= 8, "MiB"


ENDS = """
import sys
import torch.distributed as dist
import zero_full

sys.setswitchinterval(60)  # so that who waits for the GIL gets it only where somebody lets go of it
zero_full.init_distributed()
kept = dist.group.WORLD
dist.all_gather_object([None] * dist.get_world_size(), "x" * 1000)
"""


def test_a_script_may_end_right_after_a_collective(tmp_path: Path) -> None:
    """Without `destroy_process_group`, and while a thread of gloo's still holds the collective's tensors."""
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    run = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
