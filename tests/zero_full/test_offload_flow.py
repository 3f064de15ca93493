"""What is copied between a device and the host: when, how much, and what happens when it goes wrong.

The CPU's memory is the device here, and copies are slow: see `tests/slow_copies.py`.
"""

import gc
import random
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.hostile.lasting import left
from tests.slow_copies import Copied, Copies, slow_copies
from tests.worlds import POOL, RankError, run_each
from tests.zero_full.runs import Net, data
from tests.zero_full.test_offload_optimizer import KEYS, SLOW, on_host
from zero_full.offload import CopyError
from zero_full.optim.fused_adam import FusedAdam
from zero_full.shard.checksum import fingerprint
from zero_full.shard.settings import Settings

WORLDS = [(1, 1), (1, 2), (2, 1), (2, 2), (2, 3)]  # ranks, stage
SOME = ["fp32", "bf16", "fp16"]


def engine_of(stage: int, host: bool = True, **keys: Any) -> Any:
    """An engine, and its optimizer is at `engine.optimizer`."""
    return zero_full.initialize(model=Net(), config=on_host(stage, host, **keys))[0]


def one_step(engine: Any, step: int, rank: int) -> None:
    """All micro-batches of a step."""
    for micro in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(data(step, micro, rank, engine.module.layers[0].weight.dtype)))
        engine.step()


# What people do between steps --------------------------------------------------------------------


class Habits:
    """A run of a few steps with things in between, chosen by a seed: the same on every rank."""

    def __init__(self, comm: Any, stage: int, host: bool, keys: dict[str, Any]) -> None:
        self.comm, self.stage = comm, stage
        self.engine = engine_of(stage, host, **keys)
        self.params = dict(self.engine.module.named_parameters())
        self.scaled = self.engine.loss_scale() != 1
        self.batch, self.seen = 0, dict[str, Any]()

    def backward(self, factor: float = 1.0) -> None:
        """One micro-batch."""
        self.batch += 1
        dtype = torch.bfloat16 if self.engine.bfloat16_enabled() else torch.float32
        dtype = torch.float16 if self.engine.fp16_enabled() else dtype
        self.engine.backward(self.engine(data(self.batch, 0, self.comm.rank, dtype)) * factor)

    def twice(self) -> None:
        """Two backward passes for one step."""
        self.backward()
        self.backward()

    def read(self) -> None:
        """Gradients, while they may be on their way."""
        self.backward()
        for name, param in self.params.items():
            self.seen[f"{self.batch} {name}"] = zero_full.safe_get_full_grad(param)

    def set_gradient(self) -> None:
        """One gradient becomes another one, which counts in the norm."""
        self.backward()
        param = self.params["layers.2.weight"]
        zero_full.safe_set_full_grad(param, torch.full(param.shape, 0.5))

    def assign_gradient(self) -> None:
        """The same by `grad`, which a loss scale forbids."""
        self.backward()
        if not self.scaled:
            param = self.params["layers.4.weight"]
            param.grad = torch.full(param.shape, 0.25, dtype=param.dtype)

    def clear(self) -> None:
        """One gradient is nothing any more, and one is zero."""
        self.backward()
        self.params["layers.0.weight"].grad = None
        gradient = self.params["layers.4.bias"].grad
        if gradient is not None:
            gradient.zero_()

    def zero(self) -> None:
        """All of them are zero, then there are others; or they were not wanted at all."""
        self.backward()
        self.engine.optimizer.zero_grad(set_to_none=False)
        self.backward()
        self.engine.optimizer.zero_grad()
        self.backward()

    def overflow(self) -> None:
        """This step is skipped."""
        self.backward(float("inf") if self.comm.rank == 0 else 1.0)

    def write(self) -> None:
        """Parameters are written, as far as torch counts it, and where it does not."""
        if self.stage < 3:
            with torch.no_grad():
                self.params["layers.0.weight"][0].fill_(0.25)
                self.params["layers.2.weight"].data[1].fill_(0.5)
                swapped = self.params["layers.4.weight"].data[:, :2].flip(1)
                self.params["layers.4.weight"].data[:, :2] = swapped
                self.params["layers.4.bias"].data = torch.full_like(self.params["layers.4.bias"], 0.125)
        else:
            param = self.params["layers.0.weight"]
            with zero_full.GatheredParameters([param], modifier_rank=0), torch.no_grad():
                if self.comm.rank == 0:
                    param[0].fill_(0.25)
        self.backward()

    def write_master(self) -> None:
        """By the functions for it."""
        param = self.params["layers.2.bias"]
        zero_full.safe_set_full_fp32_param(param, torch.full(param.shape, 0.1))
        self.backward()

    def resume(self) -> None:
        """Saved, and loaded after another step."""
        saved = self.engine.state_dict()
        self.backward()
        self.engine.step()
        self.engine.load_state_dict(saved)
        self.backward()

    def park(self) -> None:
        """State is away for a while."""
        self.engine.offload_states()
        self.engine.reload_states()
        self.backward()

    ALL = (
        *(
            twice,
            read,
            set_gradient,
            assign_gradient,
            clear,
            zero,
            overflow,
            write,
            write_master,
            resume,
            park,
        ),
    )

    def run(self, seed: int) -> dict[str, Any]:
        """All that it leaves."""
        chosen: list[Callable[[Habits], None]] = random.Random(seed).sample(self.ALL, 6)
        for number, habit in enumerate(chosen):
            habit(self)
            self.engine.step()
            self.seen[f"norm {number}"] = self.engine.get_global_grad_norm()
        self.seen |= self.engine.module_state_dict()
        state = self.engine.optimizer.state_dict()
        self.seen |= {key: each["values"] for key, each in state["tensors"].items()}
        self.engine.destroy()
        return self.seen


def habits(comm: Any, stage: int, precision: str, seed: int) -> list[str]:
    """What is not the same with and without offloading."""
    keys = KEYS[precision] | {"gradient_clipping": 0.1, "gradient_accumulation_steps": 1}
    if precision == "bf16":
        keys["bf16"] = {"enabled": True, "check_grad_overflow": True}
    beside = Habits(comm, stage, False, keys).run(seed)
    with slow_copies(SLOW):
        away = Habits(comm, stage, True, keys).run(seed)
    assert list(beside) == list(away)

    def same(one: Any, other: Any) -> bool:
        if isinstance(one, Tensor):
            return torch.equal(one.nan_to_num(), other.nan_to_num())
        return one != one or one == pytest.approx(other, rel=1e-12)  # fp64, added up by buckets or not

    return [key for key in beside if not same(beside[key], away[key])]


@pytest.mark.parametrize(("world", "stage"), WORLDS)
def test_habits_change_no_bit(world: int, stage: int) -> None:
    cases = [(stage, precision, seed) for precision in SOME for seed in range(4)]
    for case, found in zip(cases, run_each(habits, world, cases), strict=True):
        assert found == [[]] * world, case
