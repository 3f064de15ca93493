"""Modules that a script marks, and the loader that begins anew: DeepSpeed's names, answers and errors."""

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import zero_full
from tests.worlds import POOL
from tests.zero_full.stage3_runs import WIDTH, Block, Tower, one_step, seeded, stage3
from zero_full.engine.loader import RankLoader
from zero_full.shard.deal.units import choose_units


class Experts(nn.Module):
    """Each rank takes another one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        taken = int(x[0, 0] * 1000) % 4
        return x + self.experts[taken](x) + 0 * sum(p.sum() for p in self.experts.parameters())


def tower() -> nn.Module:
    return Tower(4, Experts)


def names(model: nn.Module) -> list[str]:
    return [name for unit in choose_units(model, 1) for name, _ in unit.modules]


def test_marks_have_deepspeeds_answers_and_choose_units() -> None:
    model = tower()
    finest = names(model)
    assert zero_full.set_z3_leaf_modules(model, [Experts]) == [*model.blocks]
    assert names(model) == [f"blocks.{i}" for i in range(4)]
    assert zero_full.get_z3_leaf_modules(model) == [*model.blocks]
    assert zero_full.unset_z3_leaf_modules(model, ["Experts"]) == [*model.blocks] and names(model) == finest
    kind = f"{Experts.__module__}.Experts"
    assert zero_full.set_z3_leaf_modules(model, [kind, "Experts", Experts]) == [*model.blocks]
    assert zero_full.set_z3_leaf_modules_by_name(model, ["blocks.1", "blocks.9"], False, False) == (
        [model.blocks[1]],
        ["blocks.9"],
    )
    assert not zero_full.z3_leaf_module(model.blocks[1]) and zero_full.z3_leaf_module(model.blocks[2])
    found, missing = zero_full.set_z3_leaf_modules_by_suffix(
        model, ["experts.2", "x"], raise_if_not_found=False
    )
    assert found == [block.experts[2] for block in model.blocks] and missing == ["x"]
    assert names(model)[:4] == [
        "blocks.0",
        "blocks.1.experts.0.up",
        "blocks.1.experts.0.down",
        "blocks.1.experts.1.up",
    ]
    assert "blocks.1.experts.2" in names(model)
    assert names(copy.deepcopy(model)) == names(pickle.loads(pickle.dumps(model))) == names(model)
    zero_full.set_z3_leaf_module(model, True)
    assert names(model) == [""]  # the whole model


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda m: zero_full.set_z3_leaf_modules(m, [nn.Conv2d]),
            ValueError,
            "of Tower is of the class Conv2d",
        ),
        (lambda m: zero_full.set_z3_leaf_modules(m, []), ValueError, "of the class nothing"),
        (lambda m: zero_full.set_z3_leaf_modules(m, "Block"), TypeError, "must be a list, not 'Block'"),
        (lambda m: zero_full.set_z3_leaf_modules(m, Block), TypeError, "leaf_module_classes must be a list"),
        (lambda m: zero_full.set_z3_leaf_modules(m, [3]), TypeError, "classes or their names, not 3"),
        (lambda m: zero_full.set_z3_leaf_modules_by_name(m, ["a", "blocks"]), ValueError, "is named a"),
        (lambda m: zero_full.set_z3_leaf_modules_by_suffix(m, ["a"]), ValueError, "ends with a"),
        (lambda m: zero_full.unset_z3_leaf_modules(m, ["A", "B"]), ValueError, "of the class A or B"),
    ],
)
def test_what_fits_nothing_is_an_error(call: Any, kind: type[Exception], message: str) -> None:
    model = tower()
    with pytest.raises(kind, match=message):
        call(model)
    assert zero_full.get_z3_leaf_modules(model) == []


def test_a_mark_on_what_is_never_called_is_refused() -> None:
    model = tower()
    zero_full.set_z3_leaf_modules_by_suffix(model, ["0.experts"])
    with pytest.raises(ValueError, match=r"blocks.0.experts is marked .* a ModuleList is never called"):
        names(model)


def marked_and_trained(comm: Any) -> dict[str, Any]:
    """Ranks take different experts, which works only if all of them come together."""
    model = seeded(tower)
    zero_full.set_z3_leaf_modules(model, [Experts])
    engine, optimizer, _, _ = zero_full.initialize(model=model, config=stage3())
    units = [values.name for values in optimizer.sharded.flats if values.released_at_rest]
    losses = [one_step(engine, step, comm.rank) for step in range(2)]
    zero_full.set_z3_leaf_modules(model, [Experts])  # nothing new
    with pytest.raises(RuntimeError, match=r"Block belongs to an engine.*before initialize"):
        zero_full.set_z3_leaf_modules(model, [Block])
    return {"units": len(units), "finite": all(map(torch.isfinite, torch.tensor(losses)))}


def test_marked_modules_are_units_of_a_run_and_cannot_be_marked_later() -> None:
    assert POOL.run(marked_and_trained, 2) == [{"units": 4, "finite": True}] * 2


def test_an_item_of_leaf_module_that_fits_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    leaf = {"classes": ["Blok", "Block"], "names": ["blocks"], "name_suffixes": ["0"]}
    with caplog.at_level(logging.WARNING, "zero_full"):
        zero_full.initialize(model=Tower(), config=stage3(leaf_module=leaf))
    said = sorted(record.getMessage() for record in caplog.records)
    assert said == [
        "zero_optimization.leaf_module.classes: 'Blok' matches no module that is called",
        "zero_optimization.leaf_module.names: 'blocks' matches no module that is called",
    ]


# RepeatingLoader ---------------------------------------------------------------------------------


def take(loader: Any, count: int) -> list[list[int]]:
    return [next(loader)[0].tolist() for _ in range(count)]


def test_a_repeating_loader_begins_anew_with_another_order() -> None:
    data = TensorDataset(torch.arange(WIDTH))
    sampler: Any = DistributedSampler(data, 2, 1, shuffle=True)
    sampler.set_epoch(5)
    loader = zero_full.RepeatingLoader(DataLoader(data, 4, sampler=sampler))
    assert len(loader) == 2 and loader.batch_size == 4 and iter(loader) is loader
    seen, want = take(loader, 6), []
    for epoch in (5, 6, 7):
        sampler.set_epoch(epoch)
        want += [batch[0].tolist() for batch in DataLoader(data, 4, sampler=sampler)]
    assert seen == want and seen[:2] != seen[2:4]
    of_rank = RankLoader(data, 4, 1, 2, None, False)
    assert take(zero_full.RepeatingLoader(RankLoader(data, 4, 1, 2, None, False)), 4) == [
        batch[0].tolist() for _ in range(2) for batch in of_rank
    ]


def test_a_repeating_loader_repeats_anything_but_nothing() -> None:
    loader = zero_full.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    assert copy.copy(loader).loader == [1, 2]
    with pytest.raises(AttributeError, match="'list' object has no attribute 'batch_size'"):
        loader.batch_size  # noqa: B018
    with pytest.raises(ValueError, match="is empty"):
        next(zero_full.RepeatingLoader([]))
    with pytest.raises(ValueError, match="cannot be iterated twice"):
        take(zero_full.RepeatingLoader(torch.ones(1, 1) for _ in range(2)), 3)
