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
from tests.worlds import POOL, run_each, run_in
from tests.zero_full.runs import Net, config, data


def traces_of_a_step(model: nn.Module, stage: int, destroy: bool) -> list["weakref.ref[Any]"]:
    """The optimizer, a bucket and a communicator of an engine that took a step and went out of sight."""
    engine, optimizer, _, _ = zero_full.initialize(model=model, config=config(stage))
    engine.backward(engine(data(0, 0, 0)))
    engine.step()
    if destroy:
        engine.destroy()
    return [
        weakref.ref(each)
        for each in (optimizer, optimizer.trained[0], optimizer.communicators.dense.shard_comm)
    ]


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


def hooks_on(model: nn.Module) -> int:
    """How many hooks are on its modules and parameters."""
    kinds = ("forward_pre_hooks", "forward_hooks", "state_dict_pre_hooks", "load_state_dict_pre_hooks")
    on_modules = [getattr(module, f"_{kind}") for module in model.modules() for kind in kinds]
    on_params = [
        hooks or ()
        for p in model.parameters()
        for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)
    ]
    return sum(map(len, [*on_modules, *on_params]))


def one_life(model: nn.Module, stage: int, keys: dict[str, Any]) -> tuple[int, list["weakref.ref[Any]"]]:
    """An engine comes, takes a step and goes. (hooks meanwhile, the optimizer and all that it has kept)."""
    zero = {"stage3_param_persistence_threshold": 20} if stage == 3 else {}
    engine, optimizer, _, _ = zero_full.initialize(
        model=model, config=config(stage, zero_optimization=zero, **keys)
    )
    engine.backward(engine(data(0, 0, 0, next(model.parameters()).dtype)))
    engine.step()
    state = [value for of_one in optimizer.state.values() for value in of_one.values()]
    masters = [group.master.values for group in optimizer.trained]
    traces = [weakref.ref(each) for each in (optimizer, optimizer.reducer, *masters, *state)]
    hooks = hooks_on(model)
    engine.destroy(gather=True)
    return hooks, traces


def two_lives(comm: Any, stage: int, keys: dict[str, Any]) -> None:
    model = Net()
    first, traces = one_life(model, stage, keys)
    gc.collect()
    assert [trace() for trace in traces] == [None] * len(traces), "something is kept"
    assert first > hooks_on(model) == 0
    model.float()
    assert one_life(model, stage, keys)[0] == first, "hooks add up"


@pytest.mark.rotates
def test_a_model_keeps_no_hooks_masters_or_moments_of_an_engine_that_was_destroyed() -> None:
    precisions: list[dict[str, Any]] = [{"fp16": {"enabled": True, "auto_cast": True}}, {}]
    run_each(two_lives, 2, [(stage, keys) for stage in (0, 1, 2, 3) for keys in precisions])


def trace_of_a_dropped_engine(comm: Any) -> list[bool]:
    """With peers there are process groups behind an engine, and they have threads."""
    traces = traces_of_a_step(Net(), 1, destroy=False)
    gc.collect()
    return [trace() is None for trace in traces]


def test_an_engine_with_peers_is_freed_too_though_its_hooks_are_on_the_parameters() -> None:
    assert run_in("processes", trace_of_a_dropped_engine, 2) == [[True] * 3] * 2


@pytest.mark.rotates
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


@pytest.mark.rotates
def test_a_script_may_end_right_after_a_collective(tmp_path: Path) -> None:
    """Without `destroy_process_group`, and while a thread of gloo's still holds the collective's tensors."""
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    run = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
