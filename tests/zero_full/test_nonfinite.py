"""What is said when gradients are inf or NaN: which parameter, from which rank, was it the loss itself?"""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_full
from tests.worlds import run_each, run_in
from tests.zero_full.runs import Net, config, data
from tests.zero_full.sixteen_bits import STAGES, Line

NAN, INF = float("nan"), float("inf")
NAMES = [name for name, _ in Net().named_parameters()]
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"gradient_clipping": 1.0},
    "bf16": {"bf16": {"enabled": True}},
    "fp16 static": {"fp16": {"enabled": True, "loss_scale": 64.0}},
    "fp16 dynamic": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
FINE = "the loss is finite on every rank that knows it"


def where_it_is(ranks: list[int]) -> str:
    return "rank " + str(ranks[0]) if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def hooked(
    comm: Any, stage: int, keys: dict[str, Any], name: str, element: int, ranks: list[int]
) -> tuple[str, bool, float | None]:
    """One fine step, and one in which one element of a gradient is NaN on these ranks."""
    engine, optimizer, _, _ = zero_full.initialize(model=Net(), config=config(stage, **keys))
    poison = torch.zeros(dict(engine.named_parameters())[name].numel())
    poison[element] = NAN

    def spoil(grad: Tensor) -> Tensor:
        return grad + poison.view_as(grad).to(grad.dtype)

    for step in range(2):
        if step and comm.rank in ranks:
            dict(engine.named_parameters())[name].register_hook(spoil)
        engine.backward(engine(data(step, 0, comm.rank, next(engine.parameters()).dtype)))
        engine.step()
        assert engine.was_step_applied() == (step == 0)
    found = optimizer.report.finding, engine.was_step_applied(), engine.get_global_grad_norm()
    engine.destroy()
    return found


@pytest.mark.rotates
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_nan_in_one_gradient_names_the_parameter_and_the_rank(world_size: int, stage: int) -> None:
    ranks = [world_size - 1]
    cases = [
        (stage, keys, name, element, ranks)
        for keys, name in zip(PRECISIONS.values(), NAMES[: len(PRECISIONS)], strict=True)
        for element in (0, -1)  # another rank may own it than has it
    ]
    for (_, keys, name, _, _), by_rank in zip(cases, run_each(hooked, world_size, cases), strict=True):
        for finding, _, norm in by_rank:
            assert finding == f"gradients of {name} are inf or NaN on {where_it_is(ranks)}; {FINE}", keys
            assert norm is not None and norm != norm


@pytest.mark.parametrize("stage", STAGES)
def test_all_ranks_that_have_one_are_named(stage: int) -> None:
    some = ([0], [0, 2], [0, 1, 2])
    cases = [(stage, {"bf16": {"enabled": True}}, NAMES[3], 1, ranks) for ranks in some]
    for ranks, by_rank in zip(some, run_each(hooked, 3, cases), strict=True):
        for finding, _, _ in by_rank:
            assert finding == f"gradients of {NAMES[3]} are inf or NaN on {where_it_is(ranks)}; {FINE}"


def bad_loss(comm: Any, stage: int, keys: dict[str, Any], bad: float, ranks: list[int], plain: bool) -> str:
    """The loss itself is not finite on these ranks."""
    keys = config(stage, **keys)
    engine, optimizer, _, _ = zero_full.initialize(model=Net(), config=keys)
    micro_batches = engine.gradient_accumulation_steps()
    for micro in range(micro_batches):
        x = data(0, micro, comm.rank, next(engine.parameters()).dtype)
        if comm.rank in ranks and micro == 0:
            x = x + bad
        loss = engine(x)
        _ = loss.backward() if plain else engine.backward(loss)
        engine.step()
    assert not engine.was_step_applied()
    engine.destroy()
    return str(optimizer.report.finding)


@pytest.mark.pairwise
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_loss_that_is_not_finite_is_named_with_its_rank(
    world_size: int, precision: str, plain: bool
) -> None:
    ranks = [world_size - 1]
    want = (
        "gradients of layers.0.weight, layers.0.bias, layers.2.weight and 3 more are inf or NaN on "
        f"{where_it_is(ranks)}; the loss itself is not finite on {where_it_is(ranks)}, so no loss scale can "
        "help: check inputs and weights"
    )
    cases = [(stage, PRECISIONS[precision], NAN, ranks, plain) for stage in STAGES]
    assert run_each(bad_loss, world_size, cases) == [[want] * world_size] * len(STAGES)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_bad_loss_in_an_earlier_micro_batch_is_not_forgotten(stage: int, plain: bool) -> None:
    keys = {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2, "plain_backward_divides": False}
    for finding in run_in("processes", bad_loss, 2, stage, keys, NAN, [1], plain):
        assert "the loss itself is not finite on rank 1" in finding


def exhausted(comm: Any, stage: int, rank: int, lossy: bool) -> tuple[str, float, list[str]]:
    """At the smallest scale one rank overflows again and again: the error, the scale, what had changed."""
    section = {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 2, "hysteresis": 2}
    engine, _, _, _ = zero_full.initialize(model=Net(), config=config(stage, fp16=section))
    before = [p.detach().clone() for p in engine.parameters()]
    if comm.rank == rank and not lossy:
        engine.module.layers[2].weight.register_hook(lambda grad: grad * INF)
    message = ""
    for step in range(3):
        x = data(step, 0, comm.rank, torch.float16)
        engine.backward(engine(x + NAN if comm.rank == rank and lossy else x))
        if step < 2:  # one is forgiven, one halves the scale
            engine.step()
            continue
        with pytest.raises(zero_full.ScaleExhaustedError) as error:
            engine.step()
        message = str(error.value)
    changed = [
        n for (n, p), old in zip(engine.named_parameters(), before, strict=True) if not torch.equal(p, old)
    ]
    return message, engine.loss_scale(), changed


@pytest.mark.pairwise
@pytest.mark.parametrize("lossy", [False, True])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_at_the_smallest_scale_every_rank_raises_with_the_whole_story(
    world_size: int, stage: int, lossy: bool
) -> None:
    rank = world_size - 1
    parameters = r"layers\.0\.weight, .* and 3 more" if lossy else r"layers\.2\.weight"
    loss = rf"the loss itself is not finite on rank {rank}" if lossy else re.escape(FINE)
    pattern = (
        r"gradients overflow at the smallest loss scale, 2\. "
        rf"Gradients of {parameters} are inf or NaN on rank {rank}; {loss}.*\. Try bf16"
    )
    for message, scale, changed in run_in("processes", exhausted, world_size, stage, rank, lossy):
        assert re.match(pattern, message), message
        assert scale == 2 and changed == []


def only_the_sum(comm: Any, stage: int, gradient: list[float]) -> str:
    engine, optimizer, _, _ = zero_full.initialize(model=Line(3), config=config(stage, gradient_clipping=1.0))
    engine.backward(engine(torch.tensor(gradient)))
    engine.step()
    assert not engine.was_step_applied()
    return str(optimizer.report.finding)


@pytest.mark.parametrize("gradient", [[2e38, 0.0, 1.0], [2e38, 2e38, 2e38], [2e38, -2e38, 0.0]], ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_no_rank_is_accused_if_only_the_sum_over_ranks_overflows(stage: int, gradient: list[float]) -> None:
    only_then = "only after the sum over the ranks (each rank's own are finite)"
    for finding in run_in("processes", only_the_sum, 2, stage, gradient):
        assert finding == f"gradients of weight are inf or NaN {only_then}; {FINE}"


@pytest.mark.parametrize("check", [True, False])
def test_the_story_is_logged(caplog: pytest.LogCaptureFixture, check: bool) -> None:
    section = {"enabled": True, "check_grad_overflow": check}
    keys = config(1, bf16=section, gradient_clipping=1.0)
    engine, _, _, _ = zero_full.initialize(model=Line(), config=keys)
    engine.backward(engine(torch.tensor([1.0, NAN, 1.0])))
    engine.step()
    verdict = "step skipped" if check else "step applied nevertheless"
    loss = "the loss itself is not finite on rank 0, so no loss scale can help: check inputs and weights"
    assert f"{verdict}: gradients of weight are inf or NaN on rank 0; {loss}" in caplog.messages
