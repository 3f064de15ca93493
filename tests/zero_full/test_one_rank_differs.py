"""One rank comes to a step in another state than the others: every rank raises, and training can go on."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_full
from tests.worlds import run_each
from tests.zero_full.runs import Net, config, data
from zero_full.assemble import SWITCH


class Failing(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ArithmeticError("out of luck")


class Half(Net):
    """Its backward raises half way, if it shall."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        x = Failing.apply(x) if self.fails else x  # type: ignore[no-untyped-call]
        return self.layers[4](self.layers[3](self.layers[2](x))).float().square().mean()


def made(stage: int, shared_memory: str, **keys: Any) -> Any:
    os.environ[SWITCH] = shared_memory
    try:
        zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
        return zero_full.initialize(model=Half(), config=config(1, zero_optimization=zero, **keys))[0]
    finally:
        del os.environ[SWITCH]


def alone(comm: Any, stage: int, what: str, shared_memory: str) -> tuple[list[str], bool]:
    """The errors of this rank, and whether its parameters are those of a run without the second step."""
    engine, plain, errors = made(stage, shared_memory), made(stage, shared_memory), []
    if what == "has none":
        engine.optimizer.step()  # without gradients on any rank: it leaves nothing behind
    for number in range(4):
        differs = number == 1 and comm.rank == 0
        engine.module.fails = differs and what == "fails"
        try:
            if not (differs and what == "has none"):
                loss = engine(data(number, 0, comm.rank))
                try:
                    engine.backward(loss)
                except ArithmeticError:
                    errors.append("out of luck")
            engine.step()
        except zero_full.DisagreementError as error:
            errors.append(str(error))
            engine.zero_grad()
        if number != 1:
            plain.backward(plain(data(number, 0, comm.rank)))
            plain.step()
    ours, theirs = engine.module_state_dict(), plain.module_state_dict()
    is_equal = all(torch.equal(ours[name], theirs[name]) for name in theirs)
    engine.destroy()
    plain.destroy()
    return errors, is_equal


@pytest.mark.rotates
@pytest.mark.parametrize("shared_memory", ["on", "off"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_it_is_an_error_on_all_and_they_go_on(world_size: int, shared_memory: str) -> None:
    cases = [(stage, "fails", shared_memory) for stage in range(4)]
    cases += [(stage, "has none", shared_memory) for stage in range(3)]  # at stage 3 its forward gathers
    for case, found in zip(cases, run_each(alone, world_size, cases), strict=True):
        has_failed = "a backward pass of this step has failed"
        named = has_failed if case[1] == "fails" else "a backward pass before the step"
        for rank, (errors, is_equal) in enumerate(found):
            assert errors[:-1] == (["out of luck"] if case[1] == "fails" and rank == 0 else []), (
                case,
                errors,
            )
            assert named in errors[-1] and "(rank 0)" in errors[-1], (case, errors)
            assert is_equal, case


def skips_a_batch(comm: Any, stage: int, micro_batches: int, shared_memory: str) -> tuple[list[str], bool]:
    """Rank 0's first backward pass of the second step fails. All ranks discard the gradients, and go on.

    With several micro-batches they do so where `step` raises.
    """
    keys = {"gradient_accumulation_steps": micro_batches}
    engine, plain, errors = made(stage, shared_memory, **keys), made(stage, shared_memory, **keys), []
    for number in range(4):
        for micro in range(micro_batches):
            engine.module.fails = (number, micro, comm.rank) == (1, 0, 0)
            loss = engine(data(number, micro, comm.rank))
            try:
                engine.backward(loss)
            except ArithmeticError:
                errors.append("out of luck")
            try:
                if number == 1 and micro_batches == 1:
                    engine.zero_grad()
                else:
                    engine.step()
            except zero_full.DisagreementError as error:
                errors.append(str(error))
                engine.zero_grad()
            if number != 1:
                plain.backward(plain(data(number, micro, comm.rank)))
                plain.step()
    ours, theirs = engine.module_state_dict(), plain.module_state_dict()
    is_equal = all(torch.equal(ours[name], theirs[name]) for name in theirs)
    is_equal = is_equal and engine.global_steps == plain.global_steps == 3
    engine.destroy()
    plain.destroy()
    return errors, is_equal


@pytest.mark.rotates
@pytest.mark.parametrize("shared_memory", ["on", "off"])
def test_all_ranks_can_skip_a_batch_that_failed_on_one(shared_memory: str) -> None:
    cases = [(stage, micro, shared_memory) for stage in range(4) for micro in (1, 2)]
    for case, found in zip(cases, run_each(skips_a_batch, 2, cases), strict=True):
        for rank, (errors, is_equal) in enumerate(found):
            assert errors[:1] == ["out of luck"] if rank == 0 else "out of luck" not in errors, (case, errors)
            told = errors[1 - rank :]
            assert len(told) == case[1] - 1, (case, errors)
            assert not told or "a backward pass of this step has failed" in told[0], (case, errors)
            assert is_equal, case
