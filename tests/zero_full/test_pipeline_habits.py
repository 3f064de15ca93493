"""A learning rate for each layer of a pipeline, layers that are called twice, and when a stage averages."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_full
from tests.slow_copies import slow_copies
from tests.worlds import POOL, run_each
from tests.zero_full.pipeline_runs import Whole, batch, loss_of, specs
from tests.zero_full.runs import said_by
from zero_full import LayerSpec, PipelineModule
from zero_full.checkpoint.object_state import StageSchedule, divided_anew
from zero_full.pipeline.stage import Stage
from zero_full.shard.passes.reduce import GradientReducer

WIDTH, MICRO_BATCHES = 4, 4


def config(schedule: str = "1f1b", **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1},
        "pipeline": {"schedule": schedule},
        **more,
    }


# A learning rate for each layer ---------------------------------------------------------------------


def rate_of(name: str) -> float:
    """The rate that a script gives a layer: of `layers.3.weight` 0.03."""
    return 0.01 * (1 + int(name.split(".")[1]))


def by_layer(module: nn.Module) -> list[dict[str, Any]]:
    """A parameter group for each layer of this rank."""
    groups: dict[float, list[nn.Parameter]] = {}
    for name, param in module.named_parameters():
        groups.setdefault(rate_of(name), []).append(param)
    return [{"params": params, "lr": rate} for rate, params in groups.items()]


def falling(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps: 1 / (1 + steps))


def in_parts(optimizer: Any) -> Any:
    """The same rates, by two schedules of which each keeps the rates of all groups."""
    parts = [falling(optimizer), torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps: 1 / (2 + steps))]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[1])


def engine_of(stages: int | None, rates: Any = by_layer, schedule: Any = falling) -> Any:
    """A pipeline of so many stages, or an ordinary engine of the same layers."""
    if stages is None:
        module: Any = Whole(0, tied=False)
    else:
        module = PipelineModule(
            specs(tied=False), num_stages=stages, loss_fn=loss_of, partition_method="uniform", base_seed=0
        )
    made = {key: value for key, value in config().items() if stages is not None or key != "pipeline"}
    optimizer = torch.optim.AdamW(rates(module))
    return zero_full.initialize(model=module, optimizer=optimizer, config=made, lr_scheduler=schedule)[0]


def train(engine: Any, step: int) -> None:
    width = dist.get_world_size() // engine.num_stages
    engine.train_batch(iter(batch(step, dist.get_rank() % width)))


def rates(engine: Any) -> dict[str, float]:
    """The rate of each layer, of all ranks, divided by the layer's first rate."""
    names = {param: name for name, param in engine.module.named_parameters()}
    mine = {
        names[param]: group["lr"] / rate_of(names[param])
        for group in engine.optimizer.param_groups
        for param in group["params"]
    }
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return {name: rate for each in everyones for name, rate in each.items()}


def saved_by_layer(comm: Any, folder: Path, schedule: Any) -> dict[str, float]:
    engine = engine_of(2, schedule=schedule)
    for step in range(2):
        train(engine, step)
    engine.save_checkpoint(folder)
    found = rates(engine)
    engine.destroy()
    return found


def loaded_by_layer(
    comm: Any, stages: int | None, folder: Path, schedule: Any, with_state: bool
) -> list[dict[str, float]]:
    """The rates after a load, and after another step where a pipeline goes on."""
    engine = engine_of(stages, schedule=schedule)
    engine.load_checkpoint(folder, load_optimizer_states=with_state)
    assert engine.lr_scheduler.get_last_lr() == [group["lr"] for group in engine.optimizer.param_groups]
    found = [rates(engine)]
    if stages is not None:
        train(engine, 2)
        found.append(rates(engine))
    engine.destroy()
    return found


def one_group(comm: Any, folder: Path) -> str:
    engine = engine_of(2, rates=lambda module: module.parameters())
    with pytest.raises(zero_full.CheckpointError) as caught:
        engine.load_checkpoint(folder)
    engine.destroy()
    return str(caught.value)


@pytest.mark.parametrize("schedule", [falling, in_parts])
def test_stages_with_other_parameter_groups_save_and_load_at_other_stages(
    schedule: Any, tmp_path: Path
) -> None:
    first = POOL.run(saved_by_layer, 4, tmp_path, schedule)[0]
    assert len(first) == 14 and [*first.values()] == pytest.approx([1 / 3] * 14)
    cases = [
        (stages, tmp_path, schedule, with_state) for stages in (2, 4, None) for with_state in (True, False)
    ]
    for (stages, *_), ranks in zip(cases, run_each(loaded_by_layer, 4, cases), strict=True):
        found = ranks[0]
        assert found[0] == first
        if stages is not None:
            assert [*found[1].values()] == pytest.approx([1 / 4] * 14)
    for message in POOL.run(one_group, 4, tmp_path):
        assert "are in the optimizer's parameter group 0, but were saved in groups with different" in message


def warmup(optimizer: Any) -> Any:
    """All stages begin with the rate 0, and have other rates after a step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps: min(1.0, steps / 4))


def of_stage(optimizer: Any) -> Any:
    """All stages begin with the same rate, and then have one that falls faster on the second stage."""
    by = 1 + dist.get_rank()
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps: 1 / (1 + by * steps))


def scheduled(comm: Any, equal: bool, schedule: Any) -> str:
    """What is raised once one stage changes its rate by hand, after three batches with a schedule."""

    def rates_of(module: nn.Module) -> list[dict[str, Any]]:
        return [{**group, "lr": 0.1} if equal else group for group in by_layer(module)]

    engine = engine_of(2, rates=rates_of, schedule=schedule)
    for step in range(3):
        train(engine, step)
    if comm.rank == 1:
        engine.optimizer.param_groups[0]["lr"] *= 2
    said = said_by(lambda: train(engine, 3))
    engine.destroy()
    return said


def test_a_schedule_may_have_other_rates_on_another_stage() -> None:
    cases = [(False, warmup), (True, of_stage), (True, warmup)]
    for ranks in run_each(scheduled, 2, cases):
        for said in ranks:
            assert "lr: 0.0" in said and "(by the schedule, after 3 steps)" in said, said


def test_the_lists_of_a_schedule_go_with_the_groups() -> None:
    """Two stages, of two groups and one, become one group and two."""

    def made(*limits: float) -> Any:
        groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": 10 * limit} for limit in limits]
        return torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(groups), min_lr=[*limits])

    def divided(members: list[list[str]], own: Any, *stages: Any) -> Any:
        named = (["a"], ["b"]), (["c"],)
        saved = [StageSchedule(m, each.state_dict()) for m, each in zip(named, stages, strict=True)]
        own.load_state_dict(divided_anew(saved, members, own.state_dict()))
        return own

    first, second = made(0.1, 0.2), made(0.3)
    for each in (first, second):
        for loss in range(3):
            each.step(float(loss))
    again = divided([["c"], ["b", "x"], ["new"]], made(1.0, 2.0, 4.0), first, second)
    assert again.min_lrs == [0.3, 0.2, 4.0] and again.get_last_lr() == [3.0, 2.0, 40.0]
    assert again.num_bad_epochs == 2
    with pytest.raises(ValueError, match="min_lrs of a and of c, which are in parameter group 0, differ"):
        divided([["a", "c"]], made(1.0), first, second)
    second.step(5.0)
    with pytest.raises(ValueError, match="its last_epoch differs between pipeline stages"):
        divided([["a"]], made(1.0), first, second)


# Called twice ---------------------------------------------------------------------------------------


class Twice(nn.Module):
    """A layer that calls its block twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x))


def square(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.square().mean()


def inputs(step: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return iter([(torch.randn(2, WIDTH, generator=generator), torch.zeros(())) for _ in range(MICRO_BATCHES)])


def called_twice(comm: Any, schedule: str, is_shared: bool) -> dict[str, Tensor]:
    """The parameters after two steps. `is_shared`: neighbouring layers share a block."""
    layers: list[Any] = [LayerSpec(Twice) for _ in range(4)]
    if is_shared:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
        layers = [block for block in blocks for _ in range(2)]
    per_rank = 1 if schedule == "1f1b" else 2
    module = PipelineModule(layers, 2, None, square, "uniform", stages_per_rank=per_rank, base_seed=0)
    engine = zero_full.initialize(
        model=module, config=config(schedule, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    )[0]
    for step in range(2):
        engine.train_batch(inputs(step))
    found = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    engine.destroy()
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, found)
    return {name: value for each in everyones for name, value in each.items()}


def test_a_block_that_a_stage_calls_twice_trains_with_a_split_backward() -> None:
    cases = [(s, shared) for shared in (False, True) for s in ("1f1b", "interleaved_zero_bubble")]
    plain, split, plain_shared, split_shared = (ranks[0] for ranks in run_each(called_twice, 2, cases))
    for want, got in ((plain, split), (plain_shared, split_shared)):
        values = sorted(want)
        assert values == sorted(got) and len(values) in (16, 8)
        assert all(torch.allclose(want[name], got[name], atol=1e-6) for name in values)


# When a stage averages ------------------------------------------------------------------------------


class Slow(torch.autograd.Function):
    """The identity, whose backward takes a while."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        time.sleep(0.2)
        return grads[0]


class SlowLayer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Slow.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return out


def averaged_when(comm: Any) -> tuple[float, float]:
    """When this rank's last backward has ended, and when its gradients were averaged, by the host's clock."""
    module = PipelineModule([LayerSpec(SlowLayer) for _ in range(2)], 2, None, square, "uniform", base_seed=0)
    engine = zero_full.initialize(
        model=module, config=config(optimizer={"type": "SGD", "params": {"lr": 0.1}})
    )[0]
    ends, averages = list[float](), list[float]()
    backward, reduce = Stage.backward_one_chunk, GradientReducer._reduce_rest

    def note_backward(stage: Stage, *args: Any, **named: Any) -> None:
        backward(stage, *args, **named)
        ends.append(time.monotonic())

    def note_average(reducer: GradientReducer) -> None:
        reduce(reducer)
        averages.append(time.monotonic())

    with (
        mock.patch.object(Stage, "backward_one_chunk", note_backward),
        mock.patch.object(GradientReducer, "_reduce_rest", note_average),
    ):
        engine.train_batch(inputs(0))
    engine.destroy()
    return ends[-1], averages[-1]


def test_a_stage_averages_while_earlier_stages_still_compute() -> None:
    ranks = POOL.run(averaged_when, 4)
    first = min(end for end, _ in ranks[:2])
    assert all(average < first for _, average in ranks[2:]), ranks


# Gradients on the host -------------------------------------------------------------------------------


def offloaded_and_failed(comm: Any) -> bool:
    """Whether a failed batch leaves nothing of the averages that were copied to the host."""
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    engines = []
    for _ in range(2):
        module = PipelineModule(
            [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)], 2, None, square, "uniform", base_seed=0
        )
        keys = config(
            bf16={"enabled": True},
            zero_optimization=zero,
            optimizer={"type": "Adam", "params": {"lr": 0.1}},
        )
        engines.append(zero_full.initialize(model=module, config=keys)[0])

    def low(step: int) -> Iterator[Any]:
        return iter([(x.bfloat16(), label) for x, label in inputs(step)])

    engines[0].train_batch(low(0))
    engines[1].train_batch(low(0))
    hook = None
    if dist.get_rank() == 3:
        calls = list[int]()

        def fail_late(*_: Any) -> None:
            calls.append(1)
            if len(calls) == MICRO_BATCHES:  # the last micro-batch
                raise ArithmeticError("on purpose")

        hook = next(iter(engines[0].module.layers.values())).register_forward_pre_hook(fail_late)
    with pytest.raises(RuntimeError, match="on purpose"):
        engines[0].train_batch(low(1))
    if hook is not None:
        hook.remove()
    for engine in engines:
        engine.train_batch(low(2))
    pairs = zip(*(engine.module.parameters() for engine in engines), strict=True)
    same = all(torch.equal(one, other) for one, other in pairs)
    for engine in engines:
        engine.destroy()
    return same


def with_slow_copies(comm: Any) -> bool:
    with slow_copies(1e8):
        return offloaded_and_failed(comm)


def test_a_failed_batch_leaves_no_gradients_on_the_host() -> None:
    assert POOL.run(with_slow_copies, 4) == [True] * 4
