"""Who looks at a run whose last update is still under way, or changes it, or asks for what cannot be."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import zero_full
from tests.slow_copies import slow_copies
from tests.worlds import POOL, run_each
from tests.zero_full.delaying import KEYS, engine_of, of_engine, one_step, waiting
from tests.zero_full.runs import Net, config, data
from zero_full.config import resolve
from zero_full.errors import ConfigError
from zero_full.offload import BlockTier, HostTier
from zero_full.optim.fused_adam import FusedAdamStep

# Who looks in between ----------------------------------------------------------------------------


def resumed(
    comm: Any, stage: int, folder: str, copies: bool, by_hand: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """The run that has saved in the middle, and one that goes on from there."""

    def go_on(engine: Any) -> list[Tensor]:
        for step in range(6, 9):
            one_step(engine, step, comm.rank)
        found = of_engine(engine)
        engine.destroy()
        return found

    with slow_copies(1e7) if copies else nullcontext():
        first = engine_of(stage, 5, **KEYS["bf16"])
        for step in range(6):
            one_step(first, step, comm.rank)
        assert first.optimizer.delayed.current is not None
        state = first.state_dict() if by_hand else None
        if state is None:
            first.save_checkpoint(folder)
        assert first.optimizer.delayed.current is None
        saved = go_on(first)
        second = engine_of(stage, 5, **KEYS["bf16"])
        one_step(second, 0, comm.rank)
        if state is None:
            second.load_checkpoint(folder)
        else:
            second.load_state_dict(state)
        return saved, go_on(second)


@pytest.mark.parametrize(
    ("stage", "copies", "by_hand"), [(1, False, False), (3, False, True), (3, True, False)]
)
def test_who_saves_and_who_goes_on_from_there_are_the_same(
    stage: int, copies: bool, by_hand: bool, tmp_path: Path
) -> None:
    for saved, loaded in POOL.run(resumed, 2, stage, str(tmp_path), copies, by_hand):
        assert all(map(torch.equal, saved, loaded))


def ended(comm: Any, stage: int) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters after destroy, and after an update that was finished by hand."""
    found = []
    for by_hand in (True, False):
        engine = engine_of(stage, 1)
        for step in range(4):
            one_step(engine, step, comm.rank)
        loss = engine(data(4, 0, comm.rank))
        if by_hand:
            engine.optimizer.finish_update()  # what the pass has gathered was not written by anybody
            engine.optimizer.finish_update()  # there is none any more
            with pytest.raises(RuntimeError):
                loss.backward()
        model = engine.module
        engine.destroy(gather=stage == 3)
        found.append([p.detach().clone() for p in model.parameters()])
    return found[0], found[1]


@pytest.mark.parametrize("stage", [1, 3])
def test_the_last_update_counts(stage: int) -> None:
    for by_hand, at_the_end in POOL.run(ended, 2, stage):
        assert all(map(torch.equal, by_hand, at_the_end))


@contextmanager
def hearing() -> Iterator[list[str]]:
    """What is logged meanwhile."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zero_full").addHandler(handler)
    try:
        yield heard
    finally:
        logging.getLogger("zero_full").removeHandler(handler)


class NoLuckError(Exception):
    """What ends a loop."""


def given_up(comm: Any, stage: int, copies: bool, how: str) -> tuple[bool, str]:
    """Whether the last update counts after a destroy in the middle of a step, and what was said."""
    found: list[list[Tensor]] = []
    with slow_copies(1e7) if copies else nullcontext(), hearing() as heard:
        for by_hand in (True, False):
            engine = engine_of(stage, 0, gradient_accumulation_steps=2)
            for step in range(3):
                one_step(engine, step, comm.rank)
            if by_hand:
                engine.optimizer.finish_update()
            engine.backward(engine(data(3, 0, comm.rank)))
            engine.step()
            model, gather = engine.module, stage == 3
            if by_hand or how == "quietly":
                engine.destroy(gather)
            elif how == "for an error":
                with suppress(NoLuckError):
                    try:
                        raise NoLuckError
                    finally:
                        engine.destroy(gather)
            else:
                loss = engine(data(3, 1, comm.rank))
                loss.register_hook(fail)
                with suppress(NoLuckError):
                    engine.backward(loss)
                with pytest.raises(
                    RuntimeError, match="destroy after a backward pass that has failed"
                ) as said:
                    engine.destroy(gather)
                heard.append(str(said.value))
            found.append([p.detach().clone() for p in model.parameters()])
    return all(map(torch.equal, *found)), "\n".join(heard)


def fail(gradient: Tensor) -> None:
    raise NoLuckError


@pytest.mark.rotates
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("how", ["quietly", "for an error", "after a failure"])
def test_an_update_that_is_under_way_counts_in_the_middle_of_a_step_or_its_loss_is_said(
    how: str, copies: bool
) -> None:
    for by_rank in run_each(given_up, 2, [(stage, copies, how) for stage in (1, 2, 3)]):
        for counts, said in by_rank:
            assert counts == (how == "quietly") != ("the parameters lack the last delayed update" in said), (
                said
            )


def alone(comm: Any) -> list[str]:
    """What one rank is told that asks for what is being written; then what it may ask for."""
    engine = engine_of(2, 0)
    weight = engine.module.layers[0].weight
    one_step(engine, 0, comm.rank)
    calls = [
        lambda: zero_full.safe_get_local_fp32_param(weight),
        lambda: zero_full.safe_get_local_optimizer_state(weight, "exp_avg"),
        lambda: zero_full.safe_set_local_fp32_param(weight, torch.zeros(1)),
        lambda: zero_full.safe_set_local_optimizer_state(weight, torch.zeros(1), "exp_avg"),
        engine.offload_states,
        engine.module.state_dict,
    ]
    told = []
    for call in calls if comm.rank == 0 else ():
        with pytest.raises(RuntimeError) as caught:
            call()
        told.append(str(caught.value))
    engine.backward(engine(data(1, 0, comm.rank)))
    assert zero_full.safe_get_local_grad(weight) is not None
    assert zero_full.safe_get_full_grad(weight) is not None
    assert engine.optimizer.delayed.current is not None, "for gradients nobody waits"
    engine.step()
    assert engine.optimizer.state[weight]["step"] == 2, "who reads state waits"
    engine.backward(engine(data(2, 0, comm.rank)))
    engine.optimizer.delayed.lane.submit(partial(time.sleep, 0.2), [], [])
    engine.step()
    steps = [state["step"] for state in engine.optimizer.state.values()]
    assert steps == [3] * len(steps), "who reads all of it does, too"
    engine.optimizer.finish_update()
    assert zero_full.safe_get_local_fp32_param(weight) is not None
    assert engine.module.state_dict()
    engine.destroy()
    return told


def test_what_one_rank_asks_for_alone_is_refused() -> None:
    told, others = POOL.run(alone, 2)
    assert len(told) == 6 and not others
    assert all("delay_update_after" in each and "finish_update()" in each for each in told)


def written(comm: Any, stage: int, copies: bool, how: str) -> tuple[str, Tensor]:
    """What a rank hears when parameters are written while an update is under way; and what they are."""
    with slow_copies() if copies else nullcontext():
        engine = engine_of(stage, 0)
        for step in range(2):
            one_step(engine, step, comm.rank)
        weight, said = engine.module.layers[0].weight, ""
        if how == "gathered":
            with zero_full.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
                weight.fill_(0.25)
        elif how == "counted":
            with torch.no_grad():
                weight.fill_(0.25)
        else:
            weight.data.fill_(0.25)
        try:
            one_step(engine, 2, comm.rank)
            engine.optimizer.finish_update()
        except RuntimeError as error:
            said = str(error)
            with pytest.raises(RuntimeError, match="delay_update_after"):
                engine.module_state_dict()
        with zero_full.GatheredParameters([weight]):
            found = weight.detach().clone()
        engine.destroy()
        return said, found


@pytest.mark.parametrize("copies", [False, True])
def test_a_parameter_that_is_written_meanwhile_is_an_error_and_inside_the_context_it_counts(
    copies: bool,
) -> None:
    cases = [(stage, copies, how) for stage in (1, 2) for how in ("counted", "not counted")]
    for by_rank in run_each(written, 2, cases):
        for said, _ in by_rank:
            assert "delay_update_after" in said and "parameters were written" in said
    for by_rank in run_each(written, 2, [(stage, copies, "gathered") for stage in (1, 2, 3)]):
        for said, weight in by_rank:
            assert not said and not torch.equal(weight, torch.full_like(weight, 0.25))
            assert (weight - 0.25).abs().max() < 0.02, "what was written has moved by a step or two"


def failing(comm: Any) -> list[str]:
    """What a rank hears of a step that has failed on the last one."""
    engine, told = engine_of(2, 0), []
    one_step(engine, 0, comm.rank)
    with mock.patch.object(FusedAdamStep, "step", side_effect=OSError("no such luck")):
        engine.backward(engine(data(1, 0, comm.rank)))
        if comm.rank == comm.world_size - 1:
            engine.step()
            engine.optimizer.delayed.wait()
    if comm.rank < comm.world_size - 1:
        engine.step()
    for call in (
        lambda: one_step(engine, 2, comm.rank),
        engine.module_state_dict,
        engine.optimizer.finish_update,
    ):
        with pytest.raises(RuntimeError) as caught:
            call()
        told.append(str(caught.value))
    engine.destroy()
    return told


def test_a_failure_is_told_to_all_ranks() -> None:
    for told in POOL.run(failing, 2):
        assert all("failed on rank 1: OSError('no such luck')" in each for each in told)


# What is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"device": "none"}, "no update to delay"),
        ({"device": "nvme", "nvme_path": "/x"}, "only during a step"),
        ({"device": "cpu", "ratio": 0.5}, "use ratio 1"),
        ({"device": "cpu", "delay_update_after": -1}, "expected a whole number of at least 0"),
    ],
    ids=str,
)
def test_what_a_config_is_told(section: dict[str, Any], message: str) -> None:
    section = {"delay_update_after": 3, **section}
    with pytest.raises(ConfigError, match=f"delay_update_after: .*{message}"):
        resolve(config(2, zero_optimization={"stage": 2, "offload_optimizer": section}), 1)
    with pytest.raises(ConfigError, match="stage 0 keeps the optimizer"):
        resolve(
            config(
                0,
                zero_optimization={
                    "stage": 0,
                    "offload_optimizer": {"device": "cpu", "delay_update_after": 3},
                },
            ),
            1,
        )


def test_what_a_tier_is_told() -> None:
    for more, message in [
        ({"ratio": 0.5}, "ratio"),
        ({"delay_after": -1}, "a number of updates"),
    ]:
        with pytest.raises(ValueError, match=message):
            HostTier(**{"delay_after": 1, **more})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot delay updates"):
        BlockTier(path="/x", delay_after=1)


def other_optimizer(comm: Any, section: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match="delay_update_after") as caught:
        zero_full.initialize(model=Net(), config=waiting(2, 3, optimizer=section))
    return str(caught.value)


@pytest.mark.parametrize("kind", ["SGD", "Lamb", "Lion"])
def test_only_adam_is_stepped_so(kind: str) -> None:
    assert f"not this {kind}" in POOL.run(other_optimizer, 1, {"type": kind, "params": {"lr": 0.1}})[0]
