"""zero_full on CUDA: one device for streams and precision, two for NCCL."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

import zero_full
from tests.worlds import free_port
from tests.zero_full.runs import Net, config, data, reference
from zero_full.offload.arena import Arena

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 4
RELEASES = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
PRECISIONS: dict[str, tuple[dict[str, Any], float]] = {
    "fp32": ({}, 1e-5),
    "bf16": ({"bf16": {"enabled": True}}, 0.05),
    "fp16": ({"fp16": {"enabled": True}}, 0.01),
}


def train_on(device: torch.device, rank: int, keys: dict[str, Any]) -> dict[str, Tensor]:
    engine, _, _, _ = zero_full.initialize(model=Net().to(device), config=keys)
    dtype = next(engine.parameters()).dtype
    for step in range(STEPS):
        for micro in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(data(step, micro, rank, dtype).to(device)))
            engine.step()
    state = engine.module_state_dict()
    engine.destroy()
    return {name: p.cpu().clone() for name, p in state.items()}


def off_by(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    return max(float((got[name].float() - want[name]).abs().max()) for name in want)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_device_ends_where_plain_adam_ends(stage: int, precision: str, overlap: bool) -> None:
    keys, tolerance = PRECISIONS[precision]
    zero = {"overlap_comm": overlap, **RELEASES}
    got = train_on(torch.device("cuda:0"), 0, config(stage, zero_optimization=zero, **keys))
    assert off_by(got, reference(1, STEPS)) <= tolerance


CHOICES = ("all", "off")


def with_kernels(process: int, keys: dict[str, Any], answers: Any) -> None:
    choice = CHOICES[process]
    os.environ["ZERO_FULL_KERNELS"] = choice
    answers[choice] = train_on(torch.device("cuda:0"), 0, keys)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_engine_with_compiled_operators_ends_where_it_ends_without(precision: str) -> None:
    answers = multiprocessing.Manager().dict()
    keys = config(2, gradient_clipping=0.1, **PRECISIONS[precision][0])
    multiprocessing.spawn(with_kernels, (keys, answers), nprocs=len(CHOICES))
    low = precision != "fp32"
    assert off_by(answers["all"], {name: t.float() for name, t in answers["off"].items()}) <= (
        2**-7 if low else 1e-5
    )


def rank_of_nccl(rank: int, port: int, keys: dict[str, Any], answers: Any) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    answers[rank] = train_on(torch.device("cuda", rank), rank, keys)
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a device for each rank")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_devices_end_where_plain_adam_ends(stage: int, precision: str, overlap: bool) -> None:
    keys, tolerance = PRECISIONS[precision]
    keys = config(
        stage, zero_optimization={"overlap_comm": overlap, **RELEASES}, gradient_accumulation_steps=2, **keys
    )
    answers = multiprocessing.Manager().dict()
    multiprocessing.spawn(rank_of_nccl, (free_port(), keys, answers), nprocs=2)
    for rank in range(2):
        assert off_by(answers[rank], reference(2, STEPS, micro_batches=2)) <= tolerance


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_an_asynchronous_save_has_the_values_of_the_moment_of_its_call(
    stage: int, host: bool, tmp_path: Path
) -> None:
    zero = {**RELEASES, **({"offload_optimizer": {"device": "cpu", "pin_memory": True}} if host else {})}
    engine, _, _, _ = zero_full.initialize(
        model=Net().to("cuda:0"), config=config(stage, zero_optimization=zero, bf16={"enabled": True})
    )
    for step in range(STEPS):
        engine.backward(engine(data(step, 0, 0, torch.bfloat16).to("cuda:0")))
        engine.step()
        engine.save_checkpoint(tmp_path, "waited")
        engine.save_checkpoint(tmp_path, "beside", asynchronous=True)
        engine.backward(engine(data(step, 1, 0, torch.bfloat16).to("cuda:0")))
        engine.step()
        engine.wait_for_checkpoint()
        files = [tmp_path / tag / "rank_00000.safetensors" for tag in ("waited", "beside")]
        assert files[0].read_bytes() == files[1].read_bytes()
    engine.destroy()


@pytest.mark.parametrize("ratio", [1.0, 0.5])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [1, 3])
def test_state_on_the_host_ends_where_plain_adam_ends(stage: int, precision: str, ratio: float) -> None:
    keys, tolerance = PRECISIONS[precision]
    zero = {"offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": ratio}, **RELEASES}
    got = train_on(torch.device("cuda:0"), 0, config(stage, zero_optimization=zero, **keys))
    assert off_by(got, reference(1, STEPS)) <= tolerance


def test_an_arena_is_page_locked_in_chunks_until_it_is_closed() -> None:
    sizes, there = (
        [3 * 2**20, 2**20, 40, 5 * 2**20],
        torch.arange(2**20, device="cuda:0", dtype=torch.float32),
    )
    arena = Arena(sizes, torch.cuda.cudart(), chunk=2**22)
    rooms = [arena.take(size // 4, torch.float32) for size in sizes]
    for room in rooms:
        assert room is not None and room.is_pinned()
        part = there[: room.numel()]
        room[: part.numel()].copy_(part)
        assert torch.equal(room[: part.numel()].to(there.device, non_blocking=True), part)
    arena.close()
    assert not any(room is None or room.is_pinned() for room in rooms)
