"""A user's call that sends messages, made on one rank alone: it never meets a step's messages."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import zero_full
from tests.worlds import POOL, run_each
from tests.zero_full.runs import Net, config, data, said_by
from zero_full.comm import user_calls


def weight(engine: Any) -> Any:
    return engine.module.layers[0].weight


def gathered(engine: Any, folder: str) -> None:
    with zero_full.GatheredParameters(weight(engine)):
        pass


CALLS: dict[str, Callable[[Any, str], Any]] = {
    "module_state_dict": lambda engine, folder: engine.module_state_dict(),
    "save_weights": lambda engine, folder: engine.save_weights(folder),
    "save_16bit_model": lambda engine, folder: engine.save_16bit_model(folder),
    "load_weights": lambda engine, folder: engine.load_weights(folder),
    "save_checkpoint": lambda engine, folder: engine.save_checkpoint(folder),
    "load_checkpoint": lambda engine, folder: engine.load_checkpoint(folder),
    "load_state_dict": lambda engine, folder: engine.optimizer.load_state_dict(engine.optimizer.state_dict()),
    "GatheredParameters": gathered,
    "fp32_param": lambda engine, folder: zero_full.safe_get_full_fp32_param(weight(engine)),
    "grad": lambda engine, folder: zero_full.safe_get_full_grad(weight(engine)),
    "state": lambda engine, folder: zero_full.safe_get_full_optimizer_state(weight(engine), "exp_avg"),
    "destroy": lambda engine, folder: engine.destroy(gather=True),
    "meet": lambda engine, folder: engine.optimizer.meet(),
    "empty_partition_cache": lambda engine, folder: engine.empty_partition_cache(),
}
SHARDED_ONLY = ("module_state_dict", "empty_partition_cache")  # else every rank has the parameters


def made(stage: int, **keys: Any) -> Any:
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    adam = {"type": "Adam", "params": {"lr": 0.01}}
    keys = {**keys, "optimizer": adam, "zero_optimization": zero}
    return zero_full.initialize(model=Net(), config=config(1, **keys))[0]


def step(engine: Any, number: int, rank: int) -> None:
    engine.backward(engine(data(number, 0, rank)))
    engine.step()


def alone(comm: Any, stage: int, call: str, folder: str, keys: dict[str, Any]) -> str:
    """What ranks are told when the first one makes the call while the others train."""
    user_calls.STUCK_AFTER_S = 0.1
    engine, told = made(stage, **keys), "nothing"
    step(engine, 0, comm.rank)
    try:
        if comm.rank == 0:
            CALLS[call](engine, folder)
        for number in (1, 2):
            step(engine, number, comm.rank)
    except (zero_full.DesyncError, zero_full.CommunicationError) as error:
        told = str(error)
    with suppress(zero_full.CommunicationError):
        engine.destroy()
    return told


@pytest.mark.parametrize("stage", [1, 3])
def test_a_call_that_one_rank_makes_alone_is_an_error_on_all(stage: int, tmp_path: Path) -> None:
    cases = [(stage, call, str(tmp_path), {}) for call in CALLS]
    cases = [case for case in cases if stage == 3 or case[1] not in SHARDED_ONLY]
    for case, (first, other) in zip(cases, run_each(alone, 2, cases), strict=True):
        assert "Every rank must make this call" in first, (case, first)
        assert "rank 0 waits in" in first and "for ranks [1]" in first, (case, first)
        assert "rank 0 ended with DesyncError: rank 0 waits in" in other, (case, other)


def test_without_shared_memory_the_timeout_of_the_group_ends_it(tmp_path: Path) -> None:
    first, other = POOL.run(
        alone, 2, 3, "module_state_dict", str(tmp_path), {"shared_memory": False}, collective=3
    )
    assert "the group's timeout is over. Every rank must make this call" in first
    assert other != "nothing"


def different(comm: Any, stage: int) -> tuple[list[str], float]:
    """Ranks make different calls, and go on: nothing was sent."""
    engine, told = made(stage), list[str]()
    step(engine, 0, comm.rank)
    calls = list(CALLS)[comm.rank :: 2][:2]
    for call in calls:
        with pytest.raises(zero_full.DesyncError, match="nothing was sent") as caught:
            CALLS[call](engine, "nowhere")
        told.append(str(caught.value))
    param = weight(engine)
    error = zero_full.DesyncError if comm.rank else ValueError
    with pytest.raises(error, match="a mistake of this rank"), zero_full.GatheredParameters(param):
        if comm.rank == 0:
            raise ValueError("a mistake of this rank")
    step(engine, 1, comm.rank)
    value = float(engine.module_state_dict()["layers.0.weight"].sum())
    engine.destroy()
    return told, value


def test_ranks_that_make_different_calls_hear_of_it_and_can_go_on() -> None:
    (first, of_first), (second, of_second) = POOL.run(different, 2, 3)
    assert first == second and "rank 0: module_state_dict\n  rank 1: save_weights" in first[0]
    assert of_first == of_second


def emptied(comm: Any, empties: bool) -> list[float]:
    """Losses, with parameters that are released between forward and backward, or that stay until then."""
    engine, losses = made(3), list[float]()
    for number in range(3):
        loss = engine(data(number, 0, comm.rank))
        if empties:
            engine.empty_partition_cache()
            assert not engine.optimizer.gatherer.gathered
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.destroy()
    return losses


def test_parameters_that_all_ranks_release_between_two_passes_are_gathered_again() -> None:
    assert POOL.run(emptied, 2, True) == POOL.run(emptied, 2, False)


def typo(comm: Any, stage: int) -> list[str]:
    engine, told = made(stage), list[str]()
    step(engine, 0, comm.rank)
    for param in engine.module.parameters():
        with pytest.raises(KeyError, match=r"no state 'typo' for .*, only step, exp_avg") as caught:
            zero_full.safe_get_full_optimizer_state(param, "typo")
        told.append(str(caught.value))
        is_owned = zero_full.safe_get_local_fp32_param(param).numel() > 0
        assert bool(engine.optimizer.state[param]) is is_owned
    engine.destroy()
    return told


def test_an_entry_that_is_not_there_is_the_same_error_on_all_ranks() -> None:
    for stage in (1, 3):
        first, *others = POOL.run(typo, 3, stage)
        assert all(other == first for other in others)


def without(part: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name != key}


# What the last rank cannot do: a function or a state of the user's raises there.
FAILING: dict[str, Callable[[Any, str, Callable[..., Any]], Any]] = {
    "load_state_dict of the optimizer": lambda engine, folder, fail: engine.optimizer.load_state_dict(
        fail(engine.optimizer.state_dict())
    ),
    "load_state_dict": lambda engine, folder, fail: engine.load_state_dict(fail(engine.state_dict())),
    "save_weights": lambda engine, folder, fail: engine.save_weights(folder, names=fail),
    "load_weights": lambda engine, folder, fail: engine.load_weights(folder, names=fail),
    "module_state_dict": lambda engine, folder, fail: engine.module_state_dict(keep=fail),
}


def fails_on_one(comm: Any, stage: int, call: str, folder: str) -> str:
    """What a rank is told when the last one cannot make the call."""

    def fail(given: Any) -> Any:
        if comm.rank == 0:
            return given
        if isinstance(given, dict):  # a state, of an engine or of an optimizer
            return without(given, "lr_scheduler" if "lr_scheduler" in given else "tensors")
        raise ArithmeticError("out of luck")

    engine = made(stage)
    step(engine, 0, comm.rank)
    said = said_by(lambda: FAILING[call](engine, folder, fail))
    step(engine, 1, comm.rank)  # the ranks are still together
    engine.destroy()
    return said


def test_a_call_that_one_rank_cannot_make_is_told_on_the_others(tmp_path: Path) -> None:
    cases = [(stage, call, str(tmp_path)) for stage in (1, 3) for call in FAILING]
    cases.remove((1, "module_state_dict", str(tmp_path)))  # no rank waits there
    for (_, call, _), (other, failed) in zip(cases, run_each(fails_on_one, 2, cases), strict=True):
        assert f"{call}, which raised: {failed}" in other or f"rank 1: {failed}" in other, (call, other)
