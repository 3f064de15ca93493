"""State on the host and slow copies: whatever people do between steps, and in all groups, no bit changes."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_full
from tests.slow_copies import slow_copies
from tests.worlds import run_each
from tests.zero_full.planned import Case, measured
from tests.zero_full.runs import assert_same, data
from tests.zero_full.test_experts import expert_run, keys_of
from tests.zero_full.test_offload_flow import WORLDS, engine_of, one_step
from tests.zero_full.test_offload_optimizer import KEYS, SLOW, waiting
from zero_full.plan import plan

SOME = ["fp32", "bf16", "fp16"]

# What people do between steps --------------------------------------------------------------------


class Habits:
    """A run of a few steps with things in between, chosen by a seed: the same on every rank."""

    def __init__(self, comm: Any, stage: int, host: bool, keys: dict[str, Any], overlap: bool) -> None:
        self.comm, self.stage = comm, stage
        self.engine = engine_of(stage, host, more={"overlap_comm": overlap}, **keys)
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

    def no_sync(self) -> None:
        """A micro-batch whose gradients wait for the next one."""
        if self.stage < 3:
            with self.engine.no_sync():
                self.backward()
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
            no_sync,
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
    overlap = seed % 2 == 1
    beside = Habits(comm, stage, False, keys, overlap).run(seed)
    with slow_copies(SLOW):
        away = Habits(comm, stage, True, keys, overlap).run(seed)
    assert list(beside) == list(away)

    def same(one: Any, other: Any) -> bool:
        if isinstance(one, Tensor):
            return torch.equal(one.nan_to_num(), other.nan_to_num())
        return one != one or one == pytest.approx(other, rel=1e-12)  # fp64, added up by buckets or not

    return [key for key in beside if not same(beside[key], away[key])]


@pytest.mark.rotates
@pytest.mark.parametrize(("world", "stage"), WORLDS)
def test_habits_change_no_bit(world: int, stage: int) -> None:
    cases = [(stage, precision, seed) for precision in SOME for seed in range(4)]
    for case, found in zip(cases, run_each(habits, world, cases), strict=True):
        assert found == [[]] * world, case


# Groups ------------------------------------------------------------------------------------------


def with_experts(comm: Any, stage: int, host: bool) -> dict[str, Any]:
    """Two kinds of groups, one norm, and a step that is skipped."""
    zero = waiting(stage, "cpu" if host else "none")["zero_optimization"]
    with slow_copies(SLOW):
        return expert_run(comm, 2, keys_of(stage, zero_optimization=zero), (1, "expert"))


@pytest.mark.parametrize("stage", [1, 2])
def test_experts_change_no_bit(stage: int) -> None:
    beside, away = run_each(with_experts, 4, [(stage, False), (stage, True)])
    for one, other in zip(beside, away, strict=True):
        assert list(map(repr, one["norms"])) == list(map(repr, other["norms"]))
        assert one["applied"] == other["applied"] == [True, False, True]
        assert_same(one["parameters"], other["parameters"])


def repeated(comm: Any, stage: int, host: bool) -> dict[str, Tensor]:
    """State on two ranks, repeated on two more, which average with them once a step."""
    keys = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.1}
    with slow_copies(SLOW):
        engine = engine_of(stage, host, more={"mics_shard_size": 2}, **keys)
        for step in range(3):
            one_step(engine, step, comm.rank)
        engine.backward(engine(data(3, 0, comm.rank)))
        engine.backward(engine(data(3, 1, comm.rank)))  # both at no boundary of their own
        engine.step()
        found = engine.module_state_dict()
        engine.destroy()
    return dict(found)


@pytest.mark.rotates
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_repeated_state_changes_no_bit(stage: int) -> None:
    beside, away = run_each(repeated, 4, [(stage, False), (stage, True)])
    for one, other in zip(beside, away, strict=True):
        assert_same(one, other)


# What is held ------------------------------------------------------------------------------------

HELD = ("parameters", "gradients", "host", "moments", "master", "sent")


def held_by_ranks(comm: Any, case: Case, folder: Path) -> dict[str, int]:
    """By kind, after a step whose gradients are not let go yet."""
    with slow_copies():
        found = measured(comm, case, folder)
    return {kind: found[kind] for kind in HELD}


@pytest.mark.rotates
@pytest.mark.parametrize(("world", "stage"), WORLDS)
def test_memory_of_device_and_host_is_what_is_planned_for_an_accelerator(
    world: int, stage: int, tmp_path: Path
) -> None:
    options, precisions = ("state on the host", "state on the host, LAMB"), ("fp32", "bf16", "no master")
    cases = [Case(world, stage, option, precision) for option in options for precision in precisions]
    given = [(case, tmp_path / str(number)) for number, case in enumerate(cases)]
    for case, ranks in zip(cases, run_each(held_by_ranks, world, given), strict=True):
        planned = plan(case.model(), case.config, world)
        most = {kind: max(rank[kind] for rank in ranks) for kind in HELD}
        assert most == {kind: getattr(planned, kind) for kind in HELD}, case
        if stage > 1:
            assert not most["gradients"], "the device keeps gradients that are on the host"
