"""Gradients, masters and state written by hand: ranks that differ raise, as often as the step is repeated."""

import itertools
import logging
import re
from collections.abc import Callable
from logging.handlers import BufferingHandler
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_full
from tests.worlds import run_each
from tests.zero_full.runs import Net, assert_close, config, data, said_by

NUMBERS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 128.0}},
    "offload": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    "delayed": {"zero_optimization": {"offload_optimizer": {"device": "cpu", "delay_update_after": 0}}},
    "own optimizer": {"optimizer": None},
}
NAME = r"layers\.2\.weight"
UNSCALED = "which takes an unscaled gradient"


def start(stage: int, numbers: str, **keys: Any) -> Any:
    made = config(stage, **{"optimizer": {"type": "SGD", "params": {"lr": 1.0}}, **keys})
    chosen = NUMBERS[numbers]
    made["zero_optimization"] |= {
        "stage3_param_persistence_threshold": 20,
        **chosen.get("zero_optimization", {}),
    }
    made |= {key: value for key, value in chosen.items() if key != "zero_optimization"}
    model, optimizer = Net(), None
    if numbers in ("own optimizer", "delayed"):
        del made["optimizer"]
        kind = torch.optim.AdamW if numbers == "delayed" else torch.optim.RMSprop
        optimizer = kind(model.parameters(), lr=0.01)
    engine, *_ = zero_full.initialize(model=model, optimizer=optimizer, config=made)
    return engine, model.layers[2].weight


def constant(weight: Tensor, value: float) -> Tensor:
    return torch.full(weight.shape, value, dtype=weight.dtype)


def assign(rank: int, weight: nn.Parameter) -> None:
    weight.grad = constant(weight, 0.5 + rank)


def copy(rank: int, weight: nn.Parameter) -> None:
    weight.grad = constant(weight, 0.0)
    weight.grad.copy_(constant(weight, 0.5 + rank))


def permuted(rank: int, weight: nn.Parameter) -> None:
    """The same values in another order."""
    values = torch.arange(weight.numel(), dtype=weight.dtype).view(weight.shape)
    weight.grad = values.t() if rank else values


def by_function(rank: int, weight: nn.Parameter) -> None:
    zero_full.safe_set_full_grad(weight, constant(weight, 0.5 + rank).float())


def vectorized(rank: int, weight: nn.Parameter) -> None:
    update = lambda gradient, param: constant(param, 0.5 + rank).float()  # noqa: E731
    zero_full.safe_update_full_grad_vectorized([weight], update)


def on_one_rank(rank: int, weight: nn.Parameter) -> None:
    if rank == 0:
        assign(rank, weight)


def zeroed_on_one_rank(rank: int, weight: nn.Parameter) -> None:
    if rank == 0 and weight.grad is not None:
        weight.grad.zero_()


def cleared_on_one_rank(rank: int, weight: nn.Parameter) -> None:
    if rank == 0:
        weight.grad = None


WRITES = (
    assign,
    copy,
    permuted,
    by_function,
    vectorized,
    on_one_rank,
    zeroed_on_one_rank,
    cleared_on_one_rank,
)
OF_P_GRAD = (assign, copy, permuted, on_one_rank)
NEED_BACKWARD = (vectorized, zeroed_on_one_rank, cleared_on_one_rank)


def differ(
    comm: Any, stage: int, numbers: str, write: Callable[[int, nn.Parameter], None], backward: bool, step: str
) -> list[str]:
    """What two calls of step say, and the steps that are counted; then what a step in order says."""
    engine, weight = start(stage, numbers)
    if backward:
        engine.backward(engine(data(0, 0, comm.rank, weight.dtype)))
    write(comm.rank, weight)
    take = engine.step if step == "engine" else engine.optimizer.step
    before = engine.module_state_dict() if not backward else None
    said = [said_by(take), said_by(take), str(engine.global_steps)]
    if before is not None:
        after = engine.module_state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
    engine.optimizer.zero_grad()
    engine.backward(engine(data(0, 0, comm.rank, weight.dtype)))
    said.append(said_by(take))
    engine.destroy()
    return said


def sensible(stage: int, numbers: str, write: Any, backward: bool) -> bool:
    """Stage 0 offloads nothing; some writes need a gradient that is there."""
    return (stage > 0 or numbers not in ("offload", "delayed")) and (backward or write not in NEED_BACKWARD)


@pytest.mark.rotates
@pytest.mark.parametrize("world", [2, 3])
def test_gradients_that_differ_by_rank_are_an_error_on_every_rank_until_they_are_given_up(world: int) -> None:
    every = itertools.product((0, 1, 2, 3), NUMBERS, WRITES, (True, False), ("engine", "optimizer"))
    cases = [case for case in every if sensible(*case[:4])]
    cases = cases[:: 5 if world == 2 else 17]  # so that each value meets each other somewhere
    for case, ranks in zip(cases, run_each(differ, world, cases), strict=True):
        numbers, write = case[1:3]
        refused = (
            UNSCALED if numbers == "fp16" and write in OF_P_GRAD else f"DisagreementError.*gradient of {NAME}"
        )
        for *raised, steps, last in ranks:
            assert all(re.search(refused, said) for said in raised), (case, raised)
            assert steps == "0" and last == "nothing was said", (case, steps, last)


# What is each rank's own, and what is repeated ---------------------------------------------------


def local(comm: Any, keys: dict[str, Any], stage: int, what: str, alike: bool) -> list[str]:
    """Every rank writes its fragment; those that repeat the same one write the same, or do not."""
    engine, weight = start(stage, "fp32", optimizer={"type": "AdamW", "params": {"lr": 0.01}}, **keys)
    engine.backward(engine(data(0, 0, comm.rank)))
    engine.step()
    engine.backward(engine(data(1, 0, comm.rank)))
    value = 0.5 + (engine.optimizer.communicators.dense.shard_comm.rank if alike else comm.rank)
    if what == "gradient":
        mine = zero_full.safe_get_local_grad(weight)
        zero_full.safe_set_local_grad(weight, torch.full_like(mine, value))
    elif what == "state":
        mine = zero_full.safe_get_local_optimizer_state(weight, "exp_avg")
        if mine is not None:
            zero_full.safe_set_local_optimizer_state(weight, torch.full_like(mine, value), "exp_avg")
    else:
        zero_full.safe_set_local_fp32_param(
            weight, torch.full_like(zero_full.safe_get_local_fp32_param(weight), value)
        )
    said = [said_by(engine.step), said_by(engine.step)]
    engine.destroy()
    return said


@pytest.mark.rotates
def test_fragments_may_differ_but_not_where_ranks_repeat_the_same_one() -> None:
    hybrid = {"zero_optimization": {"mics_shard_size": 2}}
    for world, keys, stages in ((2, {}, (0, 1, 2, 3)), (4, hybrid, (1, 2, 3))):
        cases = [
            (keys, stage, what, alike)
            for stage in stages
            for what in ("gradient", "state", "fp32")
            for alike in (True, False)
        ]
        for case, ranks in zip(cases, run_each(local, world, cases), strict=True):
            _, stage, _, alike = case
            fine = alike or (stage > 0 and not keys)
            for first, second in ranks:
                if fine:
                    assert first == "nothing was said", (case, first)
                    assert "step without gradients" in second, (case, second)
                else:
                    told = f"replicas of the same slice.*{NAME}"
                    assert re.search(told, first), (case, first)
                    assert re.search(told, second), (case, second)


def whole_values(comm: Any, stage: int, what: str) -> list[str]:
    engine, weight = start(stage, "bf16", optimizer={"type": "AdamW", "params": {"lr": 0.01}})
    for step in range(2):
        if step:
            value = torch.full((13, 13), 0.5 + comm.rank / 1000)  # which bf16 rounds to the same
            if what == "fp32":
                zero_full.safe_set_full_fp32_param(weight, value)
            elif what == "state":
                zero_full.safe_set_full_optimizer_state(weight, value, "exp_avg")
            elif stage < 3:
                weight.data.add_(0)  # known to no rank: not counted
                with torch.no_grad():
                    weight.add_(comm.rank)
        engine.backward(engine(data(step, 0, comm.rank, torch.bfloat16)))
        if not step:
            engine.step()
    said = [said_by(engine.step), said_by(engine.step)]
    engine.destroy()
    return said


def test_values_that_must_be_the_same_on_every_rank_are_compared_until_they_are() -> None:
    cases = [(stage, what) for stage in (0, 1, 2, 3) for what in ("fp32", "state", "in place")]
    cases.remove((3, "in place"))
    for case, ranks in zip(cases, run_each(whole_values, 2, cases), strict=True):
        told = {"fp32": f"fp32 value of {NAME}", "state": f"exp_avg of {NAME}", "in place": f"{NAME} differ"}
        for said in ranks:
            assert all(re.search("DisagreementError.*" + told[case[1]], each) for each in said), (case, said)


class Branches(Net):
    """The last layer is used on the first rank alone."""

    rank = 0

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        loss = self.layers[:4](x).float().square().mean()
        return loss if self.rank else loss + self.layers(x).float().square().mean()


def branches(comm: Any, stage: int | None, ranks: int) -> dict[str, Tensor]:
    """Gradients are cleared by the module: all that this rank has, which are not all that the model has."""
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if stage is None:
        for step in range(3):
            model.zero_grad()
            for model.rank in range(ranks):
                (model(data(step, 0, model.rank)) / ranks).backward()
            optimizer.step()
        return {name: p.detach().clone() for name, p in model.named_parameters()}
    model.rank = comm.rank
    keys = config(stage)
    del keys["optimizer"]
    engine, optimizer, *_ = zero_full.initialize(model=model, optimizer=optimizer, config=keys)
    for step in range(3):
        engine.module.zero_grad()
        engine(data(step, 0, comm.rank)).backward()
        optimizer.step()
    found = engine.module_state_dict()
    engine.destroy()
    return found


def test_clearing_what_is_shown_clears_what_other_ranks_alone_have() -> None:
    want = branches(None, None, 2)
    for ranks in run_each(branches, 2, [(stage, 2) for stage in (0, 1, 2)]):
        for got in ranks:
            assert_close(got, want)


# Without a backward pass -------------------------------------------------------------------------


def without_backward(
    comm: Any, stage: int, numbers: str, how: str, step: str
) -> tuple[list[str], float, int]:
    """What is said, how far the parameter has moved, and how many steps are counted."""
    engine, weight = start(stage, numbers)
    before = zero_full.safe_get_full_fp32_param(weight)
    gradient = constant(weight, 0.5)
    if how == "p.grad":
        weight.grad = gradient
    elif how == "function":
        zero_full.safe_set_full_grad(weight, gradient.float())
    else:  # a backward pass comes, but does not reach this parameter
        weight.grad = gradient
        engine.backward(engine.module.layers[0](data(0, 0, comm.rank, weight.dtype)).float().square().mean())
    said = [said_by(engine.step if step == "engine" else engine.optimizer.step)]
    engine.optimizer.zero_grad()
    said.append(said_by(engine.step))
    moved = float((before - zero_full.safe_get_full_fp32_param(weight)).mean())
    steps = engine.global_steps
    engine.destroy()
    return said, moved, steps


@pytest.mark.rotates
@pytest.mark.parametrize("world", [1, 2])
def test_gradients_written_without_a_backward_pass_are_a_step_as_in_torch(world: int) -> None:
    cases = [
        (stage, numbers, how, step)
        for stage in (0, 1, 2, 3)
        for numbers in ("fp32", "bf16", "fp16", "offload")
        for how in ("p.grad", "function", "unreached")
        for step in ("engine", "optimizer")
        if (stage or numbers != "offload") and not (numbers == "fp16" and how == "unreached")
    ]
    for case, ranks in zip(cases, run_each(without_backward, world, cases), strict=True):
        for (first, second), moved, steps in ranks:
            if case[1] == "fp16" and case[2] == "p.grad":
                assert UNSCALED in first and moved == steps == 0, (case, first)
            else:
                assert first == "nothing was said" and moved == pytest.approx(0.5), (case, first, moved)
                assert steps == 1 and "step without gradients" in second, (case, second)


def test_a_gradient_for_what_is_frozen_since_initialize_is_an_error() -> None:
    model = Net()
    weight = model.layers[2].weight.requires_grad_(False)
    keys = config(1, bf16={"enabled": True})
    engine, *_ = zero_full.initialize(model=model, model_parameters=list(model.parameters()), config=keys)
    engine.backward(engine(data(0, 0, 0, torch.bfloat16)))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(RuntimeError, match=f"written to {NAME}.* frozen since initialize"):
        engine.step()
    weight.grad = None
    with pytest.raises(RuntimeError, match=f"written to {NAME}.* frozen since initialize"):
        zero_full.safe_set_full_grad(weight, torch.ones(13, 13))
    engine.step()


# torch.autograd.grad -----------------------------------------------------------------------------


def backward_only(engine: Any, loss: Tensor) -> None:
    engine.backward(loss)


def plainly(engine: Any, loss: Tensor) -> None:
    (loss * engine.loss_scale()).backward() if engine.loss_scale() == 1 else engine.scale(loss).backward()


def of_inputs(engine: Any, loss: Tensor) -> None:
    """A penalty on the gradient of the inputs, which is nobody's to average."""
    x = torch.randn(5, 16, dtype=next(engine.parameters()).dtype, requires_grad=True)
    torch.autograd.grad(engine.scale(engine.module(x)), [x])
    engine.zero_grad()
    engine.backward(loss)


def recomputed(engine: Any, loss: Tensor) -> None:
    x = torch.randn(5, 16, dtype=next(engine.parameters()).dtype, requires_grad=True)
    engine.backward(checkpoint(engine.module, x, use_reentrant=True))


def in_part(engine: Any, loss: Tensor) -> None:
    weight = engine.module.layers[2].weight
    torch.autograd.backward([engine.scale(loss)], inputs=[weight])


def asks(engine: Any, loss: Tensor) -> None:
    torch.autograd.grad(engine.scale(loss), [engine.module.layers[2].weight])
    engine.backward(engine(data(0, 1, 0, next(engine.parameters()).dtype)))


WAYS = (backward_only, plainly, of_inputs, recomputed, in_part, asks)


def told(comm: Any, stage: int, numbers: str, way: Callable[[Any, Tensor], None]) -> list[str]:
    handler = BufferingHandler(1000)
    logging.getLogger("zero_full").addHandler(handler)
    try:
        engine, weight = start(stage, numbers)
        for step in range(2):
            way(engine, engine(data(step, 0, comm.rank, weight.dtype)))
            engine.step()
        engine.destroy()
    finally:
        logging.getLogger("zero_full").removeHandler(handler)
    return [text for record in handler.buffer if "autograd.grad" in (text := record.getMessage())]


@pytest.mark.rotates
@pytest.mark.parametrize("world", [1, 2])
def test_who_asks_torch_for_gradients_hears_once_that_they_are_not_averaged(world: int) -> None:
    cases = [
        (stage, numbers, way)
        for stage in (0, 1, 2, 3)
        for numbers in ("fp32", "bf16", "fp16")
        for way in WAYS
    ]
    for case, ranks in zip(cases, run_each(told, world, cases), strict=True):
        for texts in ranks:
            assert len(texts) == (case[2] is asks and world > 1), (case, texts)
            assert all("layers.2.weight" in text and "all_reduce" in text for text in texts)
