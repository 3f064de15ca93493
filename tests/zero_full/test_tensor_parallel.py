"""Layers split over ranks: split parameters count on every rank, repeated ones once, and all ranks agree."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zero_full
from tests.worlds import POOL
from tests.zero_full.runs import WIDTH, config, data, norms_on_one_process

DATA, MODEL = 2, 2  # ranks: data x model; neighbours split the layers
STEPS = 3
CLIP = 0.05  # below the norm: what counts twice would show in the parameters, too


def weights(seed: int, numel: int) -> Tensor:
    return torch.randn(WIDTH, numel, generator=torch.Generator().manual_seed(seed)) * 0.3


class Part(nn.Module):
    """What one tensor-parallel rank has: its part of a layer, and a layer that all have.

    The parts meet only in the sum of their losses, so that no rank needs the others in its forward.
    """

    def __init__(self, tp_rank: int) -> None:
        super().__init__()
        self.part, self.repeated = nn.Parameter(weights(1 + tp_rank, 5)), nn.Parameter(weights(0, 7))
        self.part.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.part).square().mean() + (x @ self.repeated).square().mean()


class Whole(nn.Module):
    """The same on one process."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([weights(1 + tp_rank, 5) for tp_rank in range(MODEL)])
        self.repeated = nn.Parameter(weights(0, 7))

    def forward(self, x: Tensor) -> Tensor:
        losses = [(x @ w).square().mean() for w in (*self.parts, self.repeated)]
        return torch.stack(losses).sum()


def on_one_process() -> tuple[Whole, list[float]]:
    """(the model after all steps, the norms)."""
    model = Whole()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    return model, norms_on_one_process(model, optimizer, DATA, STEPS, CLIP)


def mesh_of_two(rank: int) -> dict[str, Any]:
    return {"mesh": init_device_mesh("cpu", (DATA, MODEL), mesh_dim_names=("data", "model"))}


def mesh_of_three(rank: int) -> dict[str, Any]:
    names = ("replicate", "shard", "model")
    return {"mesh": init_device_mesh("cpu", (DATA, 1, MODEL), mesh_dim_names=names)}


def megatrons_unit(rank: int) -> dict[str, Any]:
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    row, column = rows[rank // MODEL], columns[rank % MODEL]
    return {
        "mpu": SimpleNamespace(
            get_data_parallel_group=lambda: column, get_tensor_model_parallel_group=lambda: row
        )
    }


Groups = Callable[[int], dict[str, Any]]


def split_run(
    comm: Any, groups: Groups, keys: Mapping[str, Any], bad: tuple[int, str, float] | None = None
) -> dict[str, Any]:
    """`bad` (rank, parameter, value): in the second step that gradient has that value in one place."""
    model, step = Part(comm.rank % MODEL), 0

    def spoil(grad: Tensor) -> Tensor:
        assert bad is not None
        place = torch.zeros_like(grad)
        place[0, 0] = bad[2] if step == 1 else 0.0
        return grad + place

    if bad is not None and bad[0] == comm.rank:
        dict(model.named_parameters())[bad[1]].register_hook(spoil)
    engine, _, _, _ = zero_full.initialize(model=model, config=dict(keys), optimizer=sgd, **groups(comm.rank))
    norms, applied = [], []
    for step in range(STEPS):
        engine.backward(engine(data(step, 0, comm.rank // MODEL)))
        engine.step()
        norms.append(engine.get_global_grad_norm())
        applied.append(engine.was_step_applied())
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine.destroy()
    return {"parameters": parameters, "norms": norms, "applied": applied}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.9)


def keys_of(stage: int) -> dict[str, Any]:
    return config(stage, gradient_clipping=CLIP)


@pytest.mark.parametrize(
    ("stage", "groups"),
    [
        *((stage, groups) for stage in (0, 1, 2) for groups in (mesh_of_two, megatrons_unit)),
        *((stage, mesh_of_three) for stage in (1, 2)),
    ],
)
def test_norm_clipping_and_parameters_are_those_of_one_process(stage: int, groups: Groups) -> None:
    whole, norms = on_one_process()
    assert min(norms) > 2 * CLIP
    for rank, got in enumerate(POOL.run(split_run, DATA * MODEL, groups, keys_of(stage))):
        assert got["norms"] == pytest.approx(norms, rel=1e-5)
        torch.testing.assert_close(got["parameters"]["part"], whole.parts[rank % MODEL].detach())
        torch.testing.assert_close(got["parameters"]["repeated"], whole.repeated.detach())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_all_ranks_have_the_same_bits_of_the_norm_and_of_what_is_repeated(stage: int) -> None:
    first, *others = POOL.run(split_run, DATA * MODEL, mesh_of_two, keys_of(stage))
    for other in others:
        assert other["norms"] == first["norms"]
        assert torch.equal(other["parameters"]["repeated"], first["parameters"]["repeated"])


@pytest.mark.parametrize("bad", [(1, "repeated", float("nan")), (3, "repeated", float("inf"))], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_is_not_finite_where_it_is_not_counted_skips_the_step_everywhere(
    stage: int, bad: tuple[int, str, float]
) -> None:
    for got in POOL.run(split_run, DATA * MODEL, mesh_of_two, keys_of(stage), bad):
        assert got["applied"] == [True, False, True]
        assert got["norms"][1] != got["norms"][1]  # NaN, on every rank
        assert all(bool(p.isfinite().all()) for p in got["parameters"].values())


@pytest.mark.parametrize("bad", [(0, "repeated", float("nan")), (2, "part", float("inf"))], ids=str)
def test_what_is_not_finite_where_it_is_counted_skips_the_step_everywhere(
    bad: tuple[int, str, float],
) -> None:
    for got in POOL.run(split_run, DATA * MODEL, mesh_of_two, keys_of(1), bad):
        assert got["applied"] == [True, False, True]


def rows_loaded(comm: Any, groups: Groups) -> list[int]:
    rows = torch.arange(8.0).unsqueeze(1)
    keys = {**config(1), "train_micro_batch_size_per_gpu": 2}
    engine, _, loader, _ = zero_full.initialize(
        model=Part(comm.rank % MODEL), config=keys, training_data=rows, **groups(comm.rank)
    )
    assert loader is not None
    seen = sorted(int(row) for batch in loader for row in batch)
    engine.destroy()
    return seen


@pytest.mark.parametrize("groups", [mesh_of_two, mesh_of_three])
def test_ranks_that_split_layers_load_the_same_data(groups: Groups) -> None:
    seen = POOL.run(rows_loaded, DATA * MODEL, groups)
    assert seen[0] == seen[1] and seen[2] == seen[3]
    assert sorted(seen[0] + seen[2]) == list(range(8))
