"""What plans say of memory on the host: what is copied and what is page-locked."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.slow_copies import SlowCopier, slow_copies
from tests.worlds import POOL
from tests.zero_full.planned import BF16, Odd
from tests.zero_full.runs import WIDTH, Net, config
from tests.zero_full.test_host_memory import CUDA, HOST, Cuda
from zero_full import assemble
from zero_full.offload import HostTier
from zero_full.offload.arena import Arena
from zero_full.plan import plan
from zero_full.shard.deal.host_memory import host_memory


def copied(comm: Any, keys: dict[str, Any]) -> dict[str, int]:
    """What a step copies to the host and back, as from a device."""
    with slow_copies() as copies:
        engine, *_ = zero_full.initialize(model=Odd(), config=keys)
        for _ in range(2):
            copies.done.clear()
            for _ in range(engine.gradient_accumulation_steps()):
                engine.backward(engine(torch.randn(5, WIDTH)))
                engine.step()
        engine.destroy()
    return {way: sum(each.nbytes for each in copies.done if each.way == way) for way in ("down", "up")}


CASES: list[tuple[float, dict[str, Any]]] = [
    (1.0, {}),
    (1.0, BF16),
    (1.0, {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **BF16}),
    (0.5, {"optimizer": {"type": "Lamb", "params": {}}, **BF16}),
    (1.0, {"gradient_accumulation_steps": 5}),
]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_copies_of_a_step_are_planned(stage: int) -> None:
    for ratio, keys in CASES:
        zero = {"offload_optimizer": {"device": "cpu", "ratio": ratio, "pin_memory": ratio == 1}}
        given = config(stage, zero_optimization=zero, **keys)
        each = plan(Odd(), given, 2, device="cuda")
        for found in POOL.run(copied, 2, given):
            assert found == {"down": each.down, "up": each.up} and each.up > 0, (ratio, keys)
        asked = plan(Odd(), given, 2, device="cpu")
        assert (asked.down, asked.up, asked.pinned) == (0, 0, 0)
        assert (each.pinned > 0) is (ratio == 1) and each.host > asked.host


def test_a_plan_tells_what_is_page_locked_and_copied() -> None:
    away, beside = (plan(Odd(), config(1, zero_optimization=zero, **BF16), 2) for zero in (HOST, {}))
    for name, size in (
        ("page-locked", away.pinned),
        ("copied to the host in a step", away.down),
        ("copied to the device in a step", away.up),
    ):
        (line,) = (line for line in away.table().splitlines() if name in line)
        assert line.endswith(f" {size:,}") and size > 0
        assert name not in beside.table()


PINNED: dict[str, dict[str, Any]] = {
    "state": {"offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "half of it": {"offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 0.5}},
    "late updates": {"offload_optimizer": {"device": "cpu", "pin_memory": True, "delay_update_after": 1}},
    "state in a file": {"offload_optimizer": {"device": "nvme", "pin_memory": True}},
    "parameters": {"offload_param": {"device": "cpu", "pin_memory": True}},
    "both": {
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
    },
    "neither": {
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "offload_param": {"device": "cpu", "pin_memory": False},
    },
}


STEPS = 4


def model_of(place: str) -> nn.Module:
    """All updates of the second one are late."""
    return Net() if place == "late updates" else Odd()


def locked(
    comm: Any, place: str, given: dict[str, Any]
) -> tuple[int, int, int, list[str], dict[int, list[int]]]:
    """A run with page-locked memory.

    Page-locked bytes in it, after destroy, and what is left of that when nobody has the slices; copies to and
    from other memory of the host; rooms of the arena that were never taken.
    """
    cuda, param_store, locks = Cuda(), HostTier.param_store, HostTier.locks
    copy, pageable = SlowCopier.copy, list[str]()

    def noted(copier: SlowCopier, target: Tensor, source: Tensor, after: None) -> Any:
        host = target if copier.way == "down" else source
        begin, end = host.data_ptr(), host.data_ptr() + host.nbytes
        if not any(first <= begin and end <= first + size for first, size in cuda.registered.items()):
            pageable.append(copier.way)
        return copy(copier, target, source, after)

    beside: list[int] = []  # elements for which there is no room in the arena

    def allocate(tier: HostTier, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        beside.append(numel)
        return torch.empty(numel, dtype=dtype)

    with (
        slow_copies(),
        mock.patch.object(SlowCopier, "copy", noted),
        mock.patch.object(torch.cuda, "cudart", lambda: cuda),
        mock.patch.object(torch.cuda, "synchronize", lambda: None),
        mock.patch.object(assemble, "host_memory", lambda *known: host_memory(*known[:3], CUDA)),
        mock.patch.object(HostTier, "param_store", lambda self, device: param_store(self, CUDA)),
        mock.patch.object(HostTier, "allocate", allocate),
        mock.patch.object(HostTier, "locks", lambda self, device: locks(self, CUDA)),
    ):
        engine, optimizer, *_ = zero_full.initialize(model=model_of(place), config=given)
        dtype = optimizer.sharded.flats[0].dtype
        for _ in range(STEPS):
            engine.backward(engine(torch.randn(5, WIDTH).to(dtype)))
            engine.step()
        found = sum(cuda.registered.values())
        assert not any(beside)
        tier = optimizer.settings.tier
        arena = getattr(getattr(tier, "host", tier), "arena", Arena([]))
        idle = {size: rooms for size, rooms in arena.free.items() if rooms}
        engine.destroy()
    return found, sum(cuda.registered.values()), len(cuda.registered), pageable, idle


@pytest.mark.rotates
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("place", list(PINNED))
def test_as_much_is_page_locked_as_was_planned_and_all_copies_are_of_that(
    place: str, precision: str, tmp_path: Path
) -> None:
    sections = {key: dict(value) for key, value in PINNED[place].items()}
    for section in sections.values():
        section |= {"nvme_path": str(tmp_path)} if section["device"] == "nvme" else {}
    zero = {"stage3_param_persistence_threshold": 0, **sections}
    given = config(3, zero_optimization=zero, **(BF16 if precision == "bf16" else {}))
    planned = plan(model_of(place), given, 2).pinned
    assert (planned > 0) is (place != "neither")
    for found, after, left_over, pageable, idle in POOL.run(locked, 2, place, given):
        assert (found, after, left_over) == (planned, 0, 0)
        assert not idle, "memory that is page-locked and that nobody uses"
        assert not pageable or place == "neither"
