"""A forked child ends nothing of its parent's; and a rank that fails says why to those that wait for it."""

import gc
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import zero_full
from tests import rotation
from tests.worlds import POOL
from tests.zero_full.runs import Net, config, data

ROOT = Path(__file__).parents[2]


def in_child(engine: Any, how: str) -> None:
    """What a child may do with what it has inherited."""
    if how == "destroy":
        engine.destroy()
    elif how == "use":
        try:
            engine.module_state_dict()
            engine.step()
        except (zero_full.CommunicationError, RuntimeError) as error:
            if "forked process" in str(error) or "without gradients" in str(error):
                os._exit(0)
        os._exit(3)
    elif how == "collect":
        del engine
        gc.unfreeze()
        gc.collect()
    os._exit(0)


def parents(comm: Any, stage: int, keys: dict[str, Any]) -> int:
    """Steps that the parent has taken after each kind of child."""
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {}), **keys}
    engine, *_ = zero_full.initialize(model=Net(), config=config(1, zero_optimization=zero))
    for step, how in enumerate(("destroy", "collect", "use", "leave")):
        engine.backward(engine(data(step, 0, comm.rank)))
        engine.step()
        child = os.fork()
        if child == 0:
            in_child(engine, how)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0, how
        engine.backward(engine(data(step, 1, comm.rank)))
        engine.step()
    engine.module_state_dict()
    steps = int(engine.global_steps)
    engine.destroy()
    return steps


@pytest.mark.rotates
@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_forked_child_ends_nothing_of_its_parents(tmp_path: Path) -> None:
    host = {"offload_optimizer": {"device": "cpu"}}
    disk = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    for stage, keys in ((1, {}), (3, {}), (2, host), (3, disk)):
        assert POOL.run(parents, 2, stage, keys, collective=10) == [8, 8]


SCRIPT = """
    import sys, torch, zero_full
    from torch import nn

    zero_full.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0,
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 3}}
    engine, *_ = zero_full.initialize(model=model, config=config)
    for step in range(3):
        loss = engine(torch.ones(2, 8)).sum()
        if rank == 1 and step == 1:
            raise ValueError("the data of rank 1 is broken")
        engine.backward(loss)
        engine.step()
"""


@pytest.mark.rotates
@pytest.mark.parametrize("shared_memory", rotation.one_of(["on", "off"]))
def test_ranks_that_wait_for_one_that_has_failed_hear_its_error(shared_memory: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(dedent(SCRIPT))
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "ZERO_FULL_SHARED_MEMORY": shared_memory},
    )
    first = [line for line in ran.stderr.splitlines() if "rank 1 ended with" in line]
    assert first and "ValueError: the data of rank 1 is broken" in first[0], ran.stderr
