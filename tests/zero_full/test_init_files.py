"""Initial values in mapped files, as safetensors reads them: a rank reads its slices, and none copies all."""

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL
from tests.zero_full.test_deferred import LiveBytes
from zero_full import GatheredParameters, Init

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
LAYERS, SIZE = 3, 2048  # layers of 16 MiB, as the kernel may look at 2 MiB at once


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)))


def values(scale: float = 1.0) -> dict[str, Tensor]:
    torch.manual_seed(7)
    return {f"{i}.weight": torch.randn(SIZE, SIZE) * scale for i in range(LAYERS)}


def bytes_read(file: Path) -> int:
    """Bytes of the file that are in this process's page table, so that it has looked at them."""
    found, is_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            is_file = line.endswith(str(file))
        elif is_file and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def others(full: nn.Module, expected: dict[str, Tensor]) -> list[str]:
    """Names of parameters that differ from these values."""
    with GatheredParameters(list(full.parameters())):
        return [name for name, p in full.named_parameters() if not torch.equal(p, expected[name])]


def assigned(comm: Any, folder: Path) -> dict[str, Any]:
    """What is read and held where each rank assigns tensors of a file, which may be a file of its own."""
    shared, mine = folder / "shared.safetensors", folder / f"rank{comm.rank}.safetensors"
    if comm.rank == 0:
        save_file(values(), shared)
    dist.barrier()
    shutil.copyfile(shared, mine)
    found: dict[str, Any] = {}

    def run(name: str, file: Path, expected: dict[str, Tensor]) -> None:
        loaded = load_file(file)
        with Init():
            deferred = model()
            deferred.load_state_dict(loaded, assign=True)
        with torch.no_grad():
            if name == "one rank has changed a tensor in memory" and comm.rank == 1:
                deferred[2].weight.data.mul_(3)
            if name == "all ranks have":
                deferred[2].weight.data.mul_(3)
        engine, *_ = zero_full.initialize(model=deferred, config=CONFIG)
        found[name] = others(engine.module, expected)
        if name == "the same file":
            found["read"] = bytes_read(file) / file.stat().st_size
        engine.destroy()

    run("the same file", shared, values())
    run("equal files", mine, values())
    run("one rank has changed a tensor in memory", shared, values())
    tripled = values()
    tripled["2.weight"].mul_(3)
    run("all ranks have", shared, tripled)
    if comm.rank == 1:
        save_file(values(2), mine)
    run("unequal files", mine, values())
    return found


@pytest.mark.rotates
def test_a_rank_reads_its_slices_of_a_shared_file_and_gets_the_first_rank_s_values(tmp_path: Path) -> None:
    for found in POOL.run(assigned, 2, tmp_path):
        assert 0.4 < found.pop("read") < 0.65
        assert not any(found.values()), found


def copied(comm: Any, folder: Path) -> dict[str, Any]:
    """What rank 0 holds before `initialize` if it copies a file's tensors to parameters."""
    file = folder / "weights.safetensors"
    if comm.rank == 0:
        save_file(values(), file)
    dist.barrier()
    found: dict[str, Any] = {}
    for name in ("copied", "copied and changed"):
        with Init():
            deferred = model()
        state = load_file(file) if comm.rank == 0 else {}
        with LiveBytes() as live:
            live.known.update(id(tensor.untyped_storage()) for tensor in state.values())  # not memory
            for i, layer in enumerate(deferred):
                with GatheredParameters([layer.weight], modifier_rank=0), torch.no_grad():
                    if comm.rank == 0:
                        layer.load_state_dict({"weight": state[f"{i}.weight"]})
                        if name == "copied and changed" and i == 1:
                            layer.weight[3].add_(1)
            time.sleep(0.3)  # gloo's thread lets go of the last tensor that it has sent
            found[f"{name}: layers in memory"] = live.now // (SIZE * SIZE * 4)
        del state
        expected = values()
        if name == "copied and changed":
            expected["1.weight"][3].add_(1)
        engine, *_ = zero_full.initialize(model=deferred, config=CONFIG)
        found[name] = others(engine.module, expected)
        engine.destroy()
    return found


def test_what_the_modifier_rank_copies_from_a_file_stays_there(tmp_path: Path) -> None:
    for rank, found in enumerate(POOL.run(copied, 2, tmp_path)):
        in_memory = [found.pop(f"{name}: layers in memory") for name in ("copied", "copied and changed")]
        assert in_memory == ([0, 1] if rank == 0 else [0, 0])
        assert not any(found.values()), found
