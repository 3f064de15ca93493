"""What plans say of memory on the host: what is copied, what is page-locked, and room for early steps."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import zero_full
from tests.slow_copies import slow_copies
from tests.worlds import POOL
from tests.zero_full.planned import BF16, Odd
from tests.zero_full.runs import WIDTH, config
from tests.zero_full.test_host_memory import CUDA, HOST, PAGE, Cuda
from zero_full import assemble
from zero_full.offload import HostTier
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


def locked(comm: Any, given: dict[str, Any]) -> tuple[int, int, int]:
    """Page-locked bytes in a run, after destroy, and what is left of that when nobody has the slices."""
    cuda, param_store, locks = Cuda(), HostTier.param_store, HostTier.locks
    beside: list[int] = []  # elements for which there is no room in the arena

    def allocate(tier: HostTier, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        beside.append(numel)
        return torch.empty(numel, dtype=dtype)

    with (
        slow_copies(),
        mock.patch.object(torch.cuda, "cudart", lambda: cuda),
        mock.patch.object(torch.cuda, "synchronize", lambda: None),
        mock.patch.object(assemble, "host_memory", lambda *known: host_memory(*known[:3], CUDA)),
        mock.patch.object(HostTier, "param_store", lambda self, device: param_store(self, CUDA)),
        mock.patch.object(HostTier, "allocate", allocate),
        mock.patch.object(HostTier, "locks", lambda self, device: locks(self, CUDA)),
    ):
        engine, *_ = zero_full.initialize(model=Odd(), config=given)
        engine.backward(engine(torch.randn(5, WIDTH)))
        engine.step()
        found = sum(cuda.registered.values())
        assert not any(beside)
        engine.destroy()
    return found, sum(cuda.registered.values()), len(cuda.registered)


@pytest.mark.parametrize("place", list(PINNED))
def test_as_much_is_page_locked_as_was_planned(place: str) -> None:
    zero = {"stage3_param_persistence_threshold": 0, **PINNED[place]}
    given = config(3, zero_optimization=zero)
    planned = plan(Odd(), given, 2).pinned
    assert (planned > 0) is (place != "neither")
    for found, after, left_over in POOL.run(locked, 2, given):
        assert (found, after, left_over) == (planned, 0, 0)


def test_a_plan_has_room_for_steps_on_a_guess() -> None:
    """Twice masters, moments and copies of parameters, less the moments that nobody needs then."""
    zero = {"offload_optimizer": {"device": "cpu", "super_offload": True}}
    for stage in (1, 2, 3):
        early, late = (
            plan(Odd(), config(stage, zero_optimization=each, **BF16), 2).host for each in (zero, HOST)
        )
        beside = plan(Odd(), config(stage, **BF16), 2)
        held = beside.master * 3 // 2 + beside.moments
        assert 2 * held - beside.moments <= early - late <= 2 * held - beside.moments + 8 * 2 * PAGE
        on_cpu = [
            plan(Odd(), config(stage, zero_optimization=each), 2, device="cpu") for each in (zero, HOST)
        ]
        assert on_cpu[0] == on_cpu[1]
