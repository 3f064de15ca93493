"""Several ranks on one CUDA device: every stage, precision and overlap ends where plain Adam ends.

The same runs pass without a GPU, by host staging between CPU ranks: what is new on a GPU is the device alone.
"""

import subprocess
import sys
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_full
from tests.staging import staged_transports
from tests.worlds import POOL
from tests.zero_full.runs import Net, config, data, reference

STEPS = 4
RELEASES = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
PRECISIONS: dict[str, tuple[dict[str, Any], float]] = {  # what differs from the reference at most
    "fp32": ({}, 1e-5),
    "bf16": ({"bf16": {"enabled": True}}, 0.05),
    "fp16": ({"fp16": {"enabled": True, "initial_scale_power": 8}}, 0.01),
}
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
Parameters = dict[str, Tensor]
HERE = [  # one of each, without a GPU
    *(("staged", 2, stage, precision) for stage, precision in enumerate(["bf16", "fp32", "fp16", "fp32"])),
    ("staged", 4, 3, "bf16"),
]
THERE = [
    pytest.param("cuda:0", world, stage, precision, marks=ON_GPU)
    for world in (2, 4)
    for stage in range(4)
    for precision in PRECISIONS
]


def trained(comm: Any, place: str, stage: int, precision: str) -> list[Parameters]:
    """The parameters after training without overlap and with it, on this rank."""
    device, found = torch.device("cpu" if place == "staged" else "cuda:0"), []
    keys = {"gradient_accumulation_steps": 2, **PRECISIONS[precision][0]}
    for overlap in (False, True):
        keys["zero_optimization"] = {"overlap_comm": overlap, **RELEASES}
        with staged_transports() if place == "staged" else nullcontext():
            engine, optimizer, _, _ = zero_full.initialize(
                model=Net().to(device), config=config(stage, **keys)
            )
        used = [each.transport for each in optimizer.communicators.all if each.size > 1]
        assert {transport.name for transport in used} == {"host staging"}
        dtype = next(engine.module.parameters()).dtype
        for step in range(STEPS):
            for micro in range(2):
                engine.backward(engine(data(step, micro, comm.rank, dtype).to(device)))
                engine.step()
        found.append({name: p.cpu().clone() for name, p in engine.module_state_dict().items()})
        engine.destroy()
    return found


@cache
def runs(place: str, world: int, stage: int, precision: str) -> list[list[Parameters]]:
    patient = 60.0 if place == "staged" else 300.0  # the first kernel of each process takes long
    return POOL.run(trained, world, place, stage, precision, limit=patient, collective=patient / 2)


@pytest.mark.parametrize(("place", "world", "stage", "precision"), [*HERE, *THERE])
def test_ranks_of_one_device_end_where_plain_adam_ends(
    place: str, world: int, stage: int, precision: str
) -> None:
    want, tolerance = reference(world, STEPS, micro_batches=2), PRECISIONS[precision][1]
    everyones = runs(place, world, stage, precision)
    for rank, (inline, overlapped) in enumerate(everyones):
        for name, expected in want.items():
            off = float((inline[name].float() - expected).abs().max())
            assert off <= tolerance, f"rank {rank}, {name}: off by {off:.3g}"
            assert torch.equal(inline[name], everyones[0][0][name]), f"rank {rank} has another {name}"
            assert torch.equal(inline[name], overlapped[name]), f"rank {rank}: overlap changes {name}"


SCRIPT = """
import torch, torch.distributed as dist
import zero_full

zero_full.init_distributed()
rank = dist.get_rank()
engine, _, _, _ = zero_full.initialize(
    model=torch.nn.Linear(64, 64),
    config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}},
)
for step in range(3):
    engine.backward(engine(torch.ones(4, 64, device=engine.device)).square().mean())
    engine.step()
total = torch.ones(3, device=engine.device)
dist.all_reduce(total)
if rank == 0:
    print("found", engine.device, dist.get_backend(), int(total[0]))
engine.destroy()
"""


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="needs one CUDA device")
def test_four_processes_of_torchrun_share_a_card_and_rank_0_says_so_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", "4", str(script)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]
    assert "found cuda:0 cpu:gloo,cuda:gloo 4" in run.stdout
    assert run.stderr.count("shards are staged in host memory (gloo)") == 1
