"""Defects that others have had, by the numbers under which they are known. Each must stay away from here."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_full
from tests.worlds import run_in
from tests.zero_full.runs import Net, assert_close, assert_same, config, data, reference, run
from tests.zero_full.sixteen_bits import STAGES, Line, snapshot

SGD = {"type": "SGD", "params": {"lr": 1.0}}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 8.0}},
}


def movements(comm: Any, stage: int, keys: dict[str, Any], gradients: list[list[float]]) -> list[list[float]]:
    """How far SGD with lr 1 moves the weights in each step; a step's gradients are its micro-batches'."""
    engine, _, _, _ = zero_full.initialize(model=Line(), config=config(stage, optimizer=SGD, **keys))
    moved = []
    for step in gradients:
        before = engine.module.weight.detach().clone()
        for gradient in step:
            engine.backward(engine(torch.full((3,), gradient)), scale_wrt_gas=False)
            engine.step()
        moved.append((before - engine.module.weight.detach()).tolist())
    return moved


@pytest.mark.pairwise
@pytest.mark.parametrize("clip", [0.0, 0.5 * 3**0.5 + 0.01])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_2_6_1_the_step_in_which_the_scale_grows_unscales_with_the_scale_of_backward(
    world_size: int, stage: int, clip: float
) -> None:
    # DeepSpeed updates the scale first: this step's gradients come out halved, and so does their norm.
    section = {"enabled": True, "initial_scale_power": 3, "loss_scale_window": 1}
    keys = {"fp16": section, "gradient_clipping": clip}
    for moved in run_in("processes", movements, world_size, stage, keys, [[0.5]] * 5):
        assert moved == [[0.5] * 3] * 5


def masters_of(optimizer: Any) -> list[Tensor]:
    return [piece.master for group in optimizer.trained for piece in group.master.pieces.values()]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_2_6_2_no_optimizer_step_runs_at_construction(stage: int, precision: str) -> None:
    # A step with zero gradients to 'initialise states' decays the weights and spoils Adam's first step.
    model = Line()
    nn.init.ones_(model.weight)
    adam = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
    keys = config(stage, optimizer=adam, **PRECISIONS[precision])
    engine, optimizer, _, _ = zero_full.initialize(model=model, config=keys)
    assert not optimizer.state and torch.equal(model.weight.detach().float(), torch.ones(3))
    assert all(torch.equal(t, torch.ones(3)) for t in masters_of(optimizer))
    engine.backward(engine(torch.full((3,), 0.5)))
    engine.step()
    (master,) = masters_of(optimizer)
    assert master.detach().tolist() == pytest.approx([1 - 0.01 * 0.1 - 0.01] * 3, abs=1e-6)
    assert int(optimizer.state[model.weight]["step"]) == 1


def until_exhausted(comm: Any, stage: int) -> list[float]:
    """The scales until the error."""
    section = {"enabled": True, "initial_scale_power": 3}
    engine, _, _, _ = zero_full.initialize(model=Line(), config=config(stage, fp16=section))
    scales = []
    with pytest.raises(zero_full.ScaleExhaustedError):
        for _ in range(99):
            scales.append(engine.loss_scale())
            engine.backward(engine(torch.full((3,), 1e5)))  # inf in fp16
            engine.step()
    return scales


@pytest.mark.parametrize("world_size", [1, 2])
def test_2_6_3_at_the_smallest_scale_every_stage_does_the_same(world_size: int) -> None:
    # ZeRO's scaler raises, the one of DeepSpeed's FP16 optimizers goes on for ever.
    for stage in STAGES:
        for scales in run_in("processes", until_exhausted, world_size, stage):
            assert scales == [8, 8, 4, 2, 1]


@pytest.mark.rotates
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_966_all_stages_and_a_single_process_get_the_same_model(world_size: int) -> None:
    # "ZeRO 0, 1, 2, 3 produce different results"
    outcomes = [run(world_size, config(stage), steps=8) for stage in STAGES]
    for outcome in outcomes:
        assert_same(outcome[0].parameters, outcomes[0][0].parameters)
    assert_close(outcomes[0][0].parameters, reference(world_size, steps=8))
    for stage in STAGES:  # stage 2 adds up in another order
        outcome = run(world_size, config(stage, gradient_accumulation_steps=3), steps=8)
        assert_close(outcome[0].parameters, reference(world_size, steps=8, micro_batches=3))


@pytest.mark.rotates
@pytest.mark.parametrize(
    "stage, precision", [(0, "bf16"), (1, "bf16"), (1, "fp16"), (2, "bf16"), (2, "fp32")]
)
def test_6351_the_bucket_size_changes_no_bit(stage: int, precision: str) -> None:
    # "reduce_bucket_size changes convergence"
    outcomes = []
    for size in (1, 150, 300, 500_000_000):
        zero = {"reduce_bucket_size": size}
        keys = {**PRECISIONS[precision], "gradient_accumulation_steps": 2, "zero_optimization": zero}
        outcomes.append(run(2, config(stage, **keys), steps=6)[1].parameters)
    for parameters in outcomes[1:]:
        assert_same(parameters, outcomes[0])


class Deep(nn.Module):
    """Eight layers, 16 parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        return self.layers(x).float().square().mean()


@pytest.mark.rotates
@pytest.mark.parametrize("stage, precision", [(0, "fp32"), (1, "bf16"), (2, "fp32")])
def test_5545_overlap_is_no_data_race(stage: int, precision: str) -> None:
    # "overlap_comm: gradients are overwritten while they are reduced"
    outcomes = []
    for overlap in (False, True, True):
        zero = {"overlap_comm": overlap, "reduce_bucket_size": 20}
        more = config(stage, **PRECISIONS[precision], zero_optimization=zero)
        outcomes.append(run(2, more, steps=30, model=Deep))
    for ranks in outcomes:
        assert_same(ranks[0].parameters, outcomes[0][0].parameters)
        assert_same(ranks[1].parameters, outcomes[0][0].parameters)
        assert ranks[0].losses == outcomes[0][0].losses


def two_losses(model: Callable[[Tensor], Tensor], step: int, micro: int, rank: int) -> list[Tensor]:
    return [model(data(step, micro + 10 * number, rank)) * factor for number, factor in ((0, 1.0), (1, 0.3))]


def several_backward_passes(comm: Any, stage: int, way: str) -> dict[str, Tensor]:
    """Two losses in each of two micro-batches, each with a backward pass of its own."""
    micro_batches = 2
    steps = 1 if way == "no_sync" else micro_batches
    keys = config(stage, gradient_accumulation_steps=steps, plain_backward_divides=False)
    engine, optimizer, _, _ = zero_full.initialize(model=Net(), config=keys)
    for step in range(3):
        for micro in range(micro_batches):
            first, second = (loss / micro_batches for loss in two_losses(engine, step, micro, comm.rank))
            if way == "no_sync" and micro == 0:
                with engine.no_sync():
                    engine.backward(first)
                    engine.backward(second)
                continue
            if way == "plain":
                first.backward()
                second.backward()
            elif way == "retained":
                engine.backward(first, retain_graph=True, scale_wrt_gas=False)
                engine.backward(first, scale_wrt_gas=False)
                engine.backward(second, scale_wrt_gas=False)
            else:
                engine.backward(first, scale_wrt_gas=False)
                engine.backward(second, scale_wrt_gas=False)
            engine.step()
        assert optimizer.last is not None and optimizer.last.applied
    return {name: p.detach().clone() for name, p in engine.named_parameters()}


def both_losses_by_hand(world_size: int, way: str) -> dict[str, Tensor]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            for rank in range(world_size):
                first, second = two_losses(model, step, micro, rank)
                ((first * (2 if way == "retained" else 1) + second) / (2 * world_size)).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.rotates
@pytest.mark.parametrize("way", ["engine", "plain", "retained", "no_sync"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_7981_gradients_of_several_backward_passes_before_a_step_add_up(world_size: int, way: str) -> None:
    # The second backward of a micro-batch replaced the first one's gradients.
    want = both_losses_by_hand(world_size, way)
    for stage in STAGES:
        for parameters in run_in("processes", several_backward_passes, world_size, stage, way):
            assert_close(parameters, want)


@pytest.mark.pairwise
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_7985_nothing_of_the_last_micro_batch_leaks_into_the_next_step(
    world_size: int, stage: int, precision: str
) -> None:
    # The last micro-batch's gradient stayed in the buffer and was added to the next step's.
    keys = {"gradient_accumulation_steps": 2, **PRECISIONS[precision]}
    steps = [[1.0, 0.5], [0.0, 0.0], [0.0, 0.25], [-0.5, 0.0]]
    for moved in run_in("processes", movements, world_size, stage, keys, steps):
        assert moved == [[sum(step)] * 3 for step in steps]


def after_a_step(comm: Any, stage: int) -> list[str]:
    """What is left of the gradients."""
    engine, optimizer, _, _ = zero_full.initialize(model=Net(), config=config(stage))
    engine.backward(engine(data(0, 0, comm.rank)))
    engine.step()
    left = [name for name, p in engine.named_parameters() if p.grad is not None]
    pieces = [
        (group.gradients, member, p)
        for group in optimizer.trained
        for member, p in group.master.pieces.items()
    ]
    left += [p.name for _, _, p in pieces if p.master.grad is not None or p.gradient is not None]
    left += [p.name for bucket, member, p in pieces if bucket.gradient_of(member) is not None]
    return left


def test_7985_after_a_step_there_are_no_gradients() -> None:
    for stage in STAGES:
        assert run_in("processes", after_a_step, 2, stage) == [[], []]


def muted(comm: Any, stage: int) -> tuple[dict[str, Tensor], dict[str, int], dict[str, int]]:
    """Accumulation under no_sync, with the engine's calls; and what the quiet part and the step have sent."""
    engine, optimizer, _, _ = zero_full.initialize(model=Net(), config=config(stage))
    traffic = optimizer.communicators.traffic
    for step in range(4):
        traffic.clear()
        with engine.no_sync():
            for micro in range(2):
                engine.backward(engine(data(step, micro, comm.rank)) / 3)
        quiet = engine.traffic()
        engine.backward(engine(data(step, 2, comm.rank)) / 3)
        engine.step()
    return {n: p.detach().clone() for n, p in engine.named_parameters()}, quiet, engine.traffic()


@pytest.mark.parametrize("stage", STAGES)
def test_6793_no_sync_works_at_stage_2_and_sends_once(stage: int) -> None:
    # DeepSpeed asserts that no_sync is not called at stage 2.
    once = run(2, config(stage), steps=1)[0].traffic
    for parameters, quiet, sent in run_in("processes", muted, 2, stage):
        assert_close(parameters, reference(2, micro_batches=3))
        assert not quiet and sent == once


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_open_instruct_1498_every_micro_batch_counts_not_only_the_last(world_size: int, stage: int) -> None:
    # ZeRO-2 kept only the last micro-batch's gradient.
    for overlap in (False, True):
        keys = {"gradient_accumulation_steps": 4, "zero_optimization": {"overlap_comm": overlap}}
        for moved in run_in("processes", movements, world_size, stage, keys, [[1.0, 2.0, 4.0, 8.0]] * 2):
            assert moved == [[15.0] * 3] * 2


class Recomputed(nn.Module):
    """The same layers in two recomputed parts, and once outside."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        h = self.first(x)
        for _ in range(2):
            h = self._again(h)
        return self.last(torch.tanh(self.shared(h))).square().mean()

    def _again(self, h: Tensor) -> Tensor:
        def part(h: Tensor) -> Tensor:
            return torch.tanh(self.shared(h)) + h

        return part(h) if self.reentrant is None else checkpoint(part, h, use_reentrant=self.reentrant)


def recomputed(
    comm: Any, stage: int, reentrant: bool | None, overlap: bool, plain: bool
) -> dict[str, Tensor]:
    keys = {"reduce_bucket_size": 20, "overlap_comm": overlap}
    more = config(stage, zero_optimization=keys, gradient_accumulation_steps=2, plain_backward_divides=False)
    engine, _, _, _ = zero_full.initialize(model=Recomputed(reentrant), config=more)
    for step in range(3):
        for micro in range(2):
            loss = engine(data(step, micro, comm.rank))
            _ = (loss / 2).backward() if plain else engine.backward(loss)
            engine.step()
    return {name: p.detach().clone() for name, p in engine.named_parameters()}


@pytest.mark.pairwise
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_988_recomputed_parts_may_bring_a_gradient_in_several_helpings(
    world_size: int, stage: int, overlap: bool
) -> None:
    # "The parameter has already been reduced. Gradient computed twice for this partition."
    want = run_in("processes", recomputed, world_size, 0, None, False, False)[0]
    for reentrant in (True, False):
        for got in run_in("processes", recomputed, world_size, stage, reentrant, overlap, not overlap):
            assert_close(got, want)


class Hollow(nn.Module):
    """Parameters without elements: first, last, between, and one bucket that has nothing else."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.ones(5))
        self.c, self.d = nn.Parameter(torch.zeros(3, 0)), nn.Parameter(torch.ones(2, 2))
        self.e = nn.Parameter(torch.zeros(0, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """The loss, of which all are a part."""
        empty = self.a.sum() + self.c.sum() + self.e.sum()
        return ((self.b * x[0, :5]).sum() + (self.d * x[0, 0]).sum() + empty).float().square()


def hollow(comm: Any, stage: int, keys: dict[str, Any]) -> tuple[dict[str, Tensor], list[str]]:
    engine, _, _, _ = zero_full.initialize(model=Hollow(), config=config(stage, **keys))
    before = snapshot(engine)
    for step in range(2):
        for micro in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(data(step, micro, comm.rank)))
            engine.step()
        assert engine.was_step_applied()
    after = {name: p.detach().clone() for name, p in engine.named_parameters()}
    return after, [name for name, p in after.items() if not torch.equal(p, before[f"parameter {name}"])]


@pytest.mark.rotates
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_8280_parameters_without_elements_are_no_trouble(world_size: int, stage: int) -> None:
    # Zero-sized parameters crashed the reduction.
    for keys in ({}, {"bf16": {"enabled": True}}, {"zero_optimization": {"reduce_bucket_size": 1}}):
        more = {**keys, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
        for after, changed in run_in("processes", hollow, world_size, stage, more):
            assert changed == ["b", "d"]
            shapes = {name: tuple(p.shape) for name, p in after.items()}
            assert shapes == {"a": (0,), "b": (5,), "c": (3, 0), "d": (2, 2), "e": (0, 4)}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_7220_clipping_is_torchs_and_the_norm_is_the_one_before_it(world_size: int, stage: int) -> None:
    # "Gradient norm is larger than gradient_clipping": nobody said which norm it is.
    loose = run(world_size, config(stage, gradient_clipping=1e9), steps=1)[0]
    for clip in (0.05, 1e9):
        for outcome in run(world_size, config(stage, gradient_clipping=clip)):
            assert_close(outcome.parameters, reference(world_size, clip=clip))
            assert outcome.norms[0] == loose.norms[0] and loose.norms[0] is not None
            assert loose.norms[0] > 0.05
