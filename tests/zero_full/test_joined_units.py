"""Small consecutive units of stage 3 that share one buffer: which ones, and how long they stay gathered."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL
from tests.zero_full.runs import config
from zero_full.shard.deal.units import choose_units, join_small
from zero_full.shard.group.gradients import FlatGradients
from zero_full.shard.group.parameters import FlatParameters, is_released

WIDTH, LAYERS, TOGETHER = 4, 64, 8
RELEASED = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}


class Outer(nn.Module):
    """A module with a parameter of its own, and another module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The inner module's output, scaled."""
        scaled: Tensor = self.inner(x) * self.weight
        return scaled


class Tower(nn.Module):
    """Small layers; `watch(number)` is called before each of them, and after the last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.watch: Any = lambda number: None

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        for number, layer in enumerate(self.layers):
            self.watch(number)
            x = x + layer(x)
        self.watch(LAYERS)
        return x.square().mean()


def names_of(model: nn.Module, limit: int, **chosen: Any) -> list[str]:
    units = join_small(choose_units(model, 1, **chosen), limit)
    return [" ".join(name for name, _ in unit.modules) for unit in units]


# Which units ---------------------------------------------------------------------------------------


def test_consecutive_small_units_join_up_to_the_limit() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(6)])
    assert names_of(model, 64) == names_of(model, 79) == ["0 1 2 3", "4", "5"]
    assert names_of(model, 80) == ["0 1 2 3 4", "5"]
    assert names_of(model, 0) == names_of(model, 63) == ["0", "1", "2", "3", "4", "5"]


def test_norms_bring_no_large_neighbour_and_no_module_of_another_parent() -> None:
    first, second = ({name: nn.LayerNorm(4) for name in names} for names in ("abcd", "ab"))
    model = nn.ModuleList([nn.ModuleDict({**first, "large": nn.Linear(8, 8)}), nn.ModuleDict(second)])
    assert names_of(model, 100) == ["0.a 0.b 0.c 0.d", "0.large", "1.a", "1.b"]


def test_a_unit_around_another_one_and_those_of_the_user_join_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Outer(), *[nn.Linear(4, 4) for _ in range(5)])
    assert names_of(model, 100) == ["0", "1", "1.inner", "2 3 4 5 6"]
    assert names_of(model, 100, wrap=lambda name, module: name == "2") == [
        "0",
        "1",
        "1.inner",
        "2",
        "3 4 5 6",
    ]
    zero_full.set_z3_leaf_modules(model, [Outer])
    assert names_of(model, 100) == ["0", "1", "2 3 4 5 6"]


# While training ------------------------------------------------------------------------------------


def engine_of(**zero: Any) -> zero_full.Engine:
    keys = config(3, zero_optimization={**RELEASED, **zero})
    return zero_full.initialize(model=Tower(), config=keys)[0]


def gathered_in_forward(comm: Any, zero: dict[str, Any], passes: int) -> list[list[int]]:
    """The layers that are not released before each layer and after the last, in the last pass."""
    engine = engine_of(overlap_comm=False, **zero)
    layers, found = engine.module.layers, list[list[int]]()
    engine.module.watch = lambda number: found.append(
        [n for n, layer in enumerate(layers) if not is_released(layer.weight)]
    )
    for _ in range(passes):
        found.clear()
        loss = engine(torch.ones(2, WIDTH))
        assert all(is_released(layer.weight) for layer in layers)  # the model's forward is over
        engine.backward(loss)
        assert all(is_released(layer.weight) for layer in layers) and not engine.optimizer.gatherer.live
        engine.step()
    return found


@pytest.mark.parametrize("passes", [1, 3])
def test_a_joined_unit_stays_gathered_until_a_module_of_another_one_is_called(passes: int) -> None:
    first = (TOGETHER * (number // TOGETHER) for number in range(LAYERS))
    expected = [[], *([*range(begin, begin + TOGETHER)] for begin in first)]
    assert POOL.run(gathered_in_forward, 2, {}, passes) == [expected, expected]


def test_without_prefetch_nothing_joins() -> None:
    nothing: list[list[int]] = [[] for _ in range(LAYERS + 1)]
    zero = {"stage3_prefetch_bucket_size": 0}
    assert POOL.run(gathered_in_forward, 2, zero, 2) == [nothing, nothing]


def collectives(comm: Any, zero: dict[str, Any]) -> tuple[int, int]:
    """How many gathers and reductions there are in a step, once the order is known."""
    engine = engine_of(**zero)
    gather, reduce = FlatParameters.all_gather, FlatGradients.reduce
    with (
        mock.patch.object(FlatParameters, "all_gather", autospec=True, side_effect=gather) as gathers,
        mock.patch.object(FlatGradients, "reduce", autospec=True, side_effect=reduce) as reductions,
    ):
        for _ in range(3):
            gathers.reset_mock()
            reductions.reset_mock()
            engine.backward(engine(torch.ones(2, WIDTH)))
            engine.step()
    return gathers.call_count, reductions.call_count


@pytest.mark.parametrize(("budget", "units"), [(50_000_000, LAYERS // TOGETHER), (0, LAYERS)])
def test_joined_units_are_gathered_and_reduced_in_one_collective(budget: int, units: int) -> None:
    for found in POOL.run(collectives, 2, {"stage3_prefetch_bucket_size": budget}):
        assert found == (2 * units, units)


def alone_and_failed(comm: Any) -> None:
    """Calls outside of the model's forward, and forwards that raise, leave nothing gathered."""
    engine = engine_of()
    layers, x = engine.module.layers, torch.ones(2, WIDTH)
    with torch.no_grad():
        before = layers[0](x)
    assert is_released(layers[0].weight) and not engine.optimizer.gatherer.live
    engine.backward(engine(x))
    engine.step()
    with torch.no_grad():
        assert not torch.equal(layers[0](x), before)  # the present values

    def fail(number: int) -> None:
        if number == 5:
            raise KeyError("layer 5")

    engine.module.watch = fail
    with pytest.raises(KeyError):
        engine(x)
    assert all(is_released(layer.weight) for layer in layers) and not engine.optimizer.gatherer.live


def test_calls_of_single_modules_and_forwards_that_raise_leave_nothing_gathered() -> None:
    POOL.run(alone_and_failed, 2)


class Late(Tower):
    """The last layer reads the first one's weight, which it registers while it runs."""

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        zero_full.register_external_parameter(self.layers[-1], self.layers[0].weight)
        return super().forward(x)


def registers_inside(comm: Any) -> list[int]:
    model = Late()
    engine = zero_full.initialize(model=model, config=config(3, zero_optimization=RELEASED))[0]
    first = model.layers[0]
    handle = model.layers[-1].register_forward_pre_hook(
        lambda module, args: zero_full.register_external_parameter(module, model.layers[4].weight)
    )
    users = []
    for _ in range(3):
        engine.backward(engine(torch.ones(2, WIDTH)))
        engine.step()
        users += [group.parameters.users for group in engine.optimizer.sharded.trained]
    handle.remove()
    assert is_released(first.weight) and not engine.optimizer.gatherer.live
    return users


def test_a_parameter_that_is_registered_within_a_forward_is_given_back_as_often_as_it_was_gathered() -> None:
    for users in POOL.run(registers_inside, 2):
        assert not any(users)


def trained(comm: Any, stage: int, zero: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    keys = config(stage, zero_optimization=zero, gradient_accumulation_steps=2)
    engine = zero_full.initialize(model=Tower(), config=keys)[0]
    losses = []
    for step in range(6):
        torch.manual_seed(10 * step + comm.rank)
        loss = engine(torch.randn(3, WIDTH))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, engine.module_state_dict()


@pytest.mark.parametrize("kept", [True, False])
def test_joined_units_train_as_stage_2_does(kept: bool) -> None:
    zero = {**RELEASED, **({"stage3_max_reuse_distance": 10**9} if kept else {})}
    run = partial(POOL.run, trained, 3)
    for (losses, after), (want, plain) in zip(run(3, zero), run(2, {}), strict=True):
        assert losses == pytest.approx(want, rel=1e-6)
        for name, value in after.items():
            torch.testing.assert_close(value, plain[name], rtol=1e-5, atol=1e-7)
