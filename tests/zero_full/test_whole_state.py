"""Rules that keep state of whole parameters, in its own shapes: trained, saved, loaded at any layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_full
from tests.worlds import POOL
from tests.zero_full.adafactor import AdafactorStep, ShardedAdafactor
from tests.zero_full.runs import Net, assert_close, config
from tests.zero_full.runs import data as data_of
from tests.zero_full.soap import Soap
from tests.zero_full.test_steppers import CUT

RULES: dict[str, Any] = {
    "adafactor": lambda params: ShardedAdafactor(params, lr=0.05, weight_decay=0.1),
    "soap": Soap,
}
PLAIN: dict[str, Any] = {**RULES, "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05, weight_decay=0.1)}
AT = [(stage, stage == 3 and cut) for stage in (0, 1, 2, 3) for cut in (False, True) if stage == 3 or not cut]


def engine_of(name: str, stage: int, cut: bool) -> Any:
    model = Net().double()
    zero = {"stage": stage, **(CUT if cut else {})}
    engine, *_ = zero_full.initialize(
        model=model, optimizer=RULES[name](model.parameters()), config=config(stage, zero_optimization=zero)
    )
    return engine


def data(step: int, rank: int) -> Tensor:
    return data_of(step, 0, rank, torch.float64)


def plain(name: str, ranks: int) -> dict[str, Tensor]:
    """Five steps of one process over everybody's data."""
    model = Net().double()
    optimizer = PLAIN[name](model.parameters())
    for step in range(5):
        optimizer.zero_grad()
        for rank in range(ranks):
            (model(data(step, rank)) / ranks).backward()
        optimizer.step()
    return {key: p.detach() for key, p in model.named_parameters()}


def trained(comm: Any, name: str, folder: str) -> list[dict[str, Tensor]]:
    """Parameters at each stage; what is saved after 3 of 5 steps, of the last stage and the first."""
    found = []
    for stage, cut in AT:
        engine = engine_of(name, stage, cut)
        for step in range(5):
            engine.backward(engine(data(step, comm.rank)))
            engine.step()
            if step == 2 and stage in (1, 3):
                engine.save_checkpoint(f"{folder}/{stage}-{cut}", "t")
        found.append(engine.module_state_dict())
        engine.destroy()
    return found


def resumed(comm: Any, name: str, folder: str, world: int) -> list[dict[str, Tensor]]:
    """From stage 1's and stage 3's files, at each stage and this world, all of the data on each rank."""
    found = []
    for saved in ("1-False", "3-False", "3-True"):
        for stage in (0, 2, 3):
            engine = engine_of(name, stage, cut=stage == 3)
            engine.load_checkpoint(f"{folder}/{saved}", "t")
            for step in (3, 4):
                engine.backward(sum(engine(data(step, rank)) for rank in range(world)) / world)
                engine.step()
            found.append(engine.module_state_dict())
            engine.destroy()
    return found


@pytest.mark.rotates
@pytest.mark.parametrize("name", RULES)
def test_it_trains_at_every_stage_and_goes_on_at_another_layout(name: str, tmp_path: Path) -> None:
    want = plain(name, 3)
    for rank in POOL.run(trained, 3, name, str(tmp_path)):
        for got in rank:
            assert_close(got, want)
    for world in (1, 2):
        for rank in POOL.run(resumed, world, name, str(tmp_path), 3):
            for got in rank:
                assert_close(got, want)


def forgetful(comm: Any, folder: str) -> list[str]:
    """What a save says of state that its rule has not declared, cut and whole."""
    said, real = [], AdafactorStep.whole_entries
    AdafactorStep.whole_entries = frozenset()  # type: ignore[assignment, misc]
    try:
        engine = engine_of("adafactor", 1, False)
        engine.backward(engine(data(0, comm.rank)))
        engine.step()
        try:
            engine.save_checkpoint(folder, "t")
        except zero_full.CheckpointError as error:
            said.append(str(error))
        engine.destroy()
    finally:
        AdafactorStep.whole_entries = real  # type: ignore[assignment, misc]
    return said


def test_state_in_a_shape_of_its_own_that_is_not_declared_cannot_be_saved(tmp_path: Path) -> None:
    for (said,) in POOL.run(forgetful, 2, str(tmp_path)):
        assert "row_var/layers." in said and "whole_entries" in said


def owners(comm: Any) -> list[int]:
    """How many parameters this rank keeps state of, and the numbers in it, counted by the engine."""
    engine = engine_of("soap", 2, False)
    engine.backward(engine(data(0, comm.rank)))
    engine.step()
    kept = [s for *_, s, _ in engine.optimizer.contents.whole_states() if s]
    counted = sum(t.numel() for t in engine.optimizer.holdings()["optimizer"])
    engine.destroy()
    return [len(kept), sum(t.numel() for s in kept for t in s.values()), counted]


def test_state_of_a_whole_parameter_is_kept_once_and_counted() -> None:
    ranks = POOL.run(owners, 3)
    assert sum(count for count, *_ in ranks) == 6, "every parameter has one owner"
    assert all(counted >= kept > 0 for _, kept, counted in ranks)
