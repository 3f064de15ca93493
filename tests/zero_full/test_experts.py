"""Experts: each lives on some ranks only; its gradients come from all, and one norm is over everything."""

import logging
from collections.abc import Mapping
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL
from tests.zero_full.runs import WIDTH, config, data, norms_on_one_process
from zero_full import Topology

WORLD, STEPS = 4, 3
CLIP = 0.05


def weights(seed: int, numel: int) -> Tensor:
    return torch.randn(WIDTH, numel, generator=torch.Generator().manual_seed(seed)) * 0.3


def tokens_for(expert: int, experts: int, x: Tensor) -> Tensor:
    """The router's choice: every `experts`-th token."""
    return x[expert::experts]


class Dense(nn.Module):
    """What every rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Parameter(weights(0, 7))

    def loss_of(self, x: Tensor) -> Tensor:
        return (x @ self.dense).square().sum()


class WithExpert(Dense):
    """And one expert, which gets the tokens of all ranks of its expert group, as after an all-to-all."""

    def __init__(self, expert: int, experts: int) -> None:
        super().__init__()
        self.expert = nn.Parameter(weights(1 + expert, 5))
        self.expert.allreduce = False  # type: ignore[attr-defined]
        self.number, self.experts = expert, experts

    def forward(self, mine: Tensor, group: list[Tensor]) -> Tensor:
        routed = [tokens_for(self.number, self.experts, x) for x in group]
        return self.loss_of(mine) + sum((x @ self.expert).square().sum() for x in routed)


class WithAllExperts(Dense):
    """The same on one process."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.all_experts = nn.ParameterList([weights(1 + expert, 5) for expert in range(experts)])

    def forward(self, x: Tensor) -> Tensor:
        routed = [tokens_for(e, len(self.all_experts), x) for e in range(len(self.all_experts))]
        losses = [(tokens @ w).square().sum() for tokens, w in zip(routed, self.all_experts, strict=True)]
        return self.loss_of(x) + sum(losses)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.9)


def on_one_process(experts: int) -> tuple[WithAllExperts, list[float]]:
    """(the model after all steps, the norms)."""
    model = WithAllExperts(experts)
    return model, norms_on_one_process(model, sgd(model.parameters()), WORLD, STEPS, CLIP)


def topology_of(rank: int, experts: int) -> tuple[Topology, list[int]]:
    """(the topology, the ranks of this rank's expert group): neighbours hold different experts."""
    rows = [list(range(start, start + experts)) for start in range(0, WORLD, experts)]
    columns = [list(range(expert, WORLD, experts)) for expert in range(experts)]
    groups = {tuple(ranks): dist.new_group(ranks) for ranks in (*rows, *columns)}
    row, column = rows[rank // experts], columns[rank % experts]
    return Topology(expert=groups[tuple(row)], expert_data=groups[tuple(column)]), row


def expert_run(
    comm: Any, experts: int, keys: Mapping[str, Any], bad: tuple[int, str] | None = None
) -> dict[str, Any]:
    """`bad` (rank, parameter): in the second step that gradient is infinite in one place."""
    topology, row = topology_of(comm.rank, experts)
    model, step = WithExpert(comm.rank % experts, experts), 0

    def spoil(grad: Tensor) -> Tensor:
        place = torch.zeros_like(grad)
        place[0, 0] = float("inf") if step == 1 else 0.0
        return grad + place

    if bad is not None and bad[0] == comm.rank:
        dict(model.named_parameters())[bad[1]].register_hook(spoil)
    engine, _, _, _ = zero_full.initialize(model=model, config=dict(keys), optimizer=sgd, topology=topology)
    norms, applied = [], []
    for step in range(STEPS):  # `spoil` reads it
        x = [data(step, 0, rank) for rank in range(WORLD)]
        engine.backward(engine(x[comm.rank], [x[rank] for rank in row]))
        engine.step()
        norms.append(engine.get_global_grad_norm())
        applied.append(engine.was_step_applied())
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine.destroy()
    return {"parameters": parameters, "norms": norms, "applied": applied}


def keys_of(stage: int, **keys: Any) -> dict[str, Any]:
    return config(stage, gradient_clipping=CLIP, **keys)


@pytest.mark.rotates
@pytest.mark.parametrize(("experts", "overlap"), [(1, False), (2, False), (2, True), (4, False)])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_norm_clipping_and_parameters_are_those_of_one_process(
    experts: int, stage: int, overlap: bool
) -> None:
    whole, norms = on_one_process(experts)
    assert min(norms) > 2 * CLIP
    keys = keys_of(stage, zero_optimization={"overlap_comm": overlap})
    for rank, got in enumerate(POOL.run(expert_run, WORLD, experts, keys)):
        assert got["norms"] == pytest.approx(norms, rel=1e-5)
        torch.testing.assert_close(got["parameters"]["dense"], whole.dense.detach())
        torch.testing.assert_close(got["parameters"]["expert"], whole.all_experts[rank % experts].detach())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_all_ranks_have_the_same_bits_of_the_norm_and_of_what_they_share(stage: int) -> None:
    got = POOL.run(expert_run, WORLD, 2, keys_of(stage))
    for rank in range(1, WORLD):
        assert got[rank]["norms"] == got[0]["norms"]
        assert torch.equal(got[rank]["parameters"]["dense"], got[0]["parameters"]["dense"])
    for rank in (0, 1):
        assert torch.equal(got[rank]["parameters"]["expert"], got[rank + 2]["parameters"]["expert"])
    assert not torch.equal(got[0]["parameters"]["expert"], got[1]["parameters"]["expert"])


@pytest.mark.rotates
@pytest.mark.parametrize("bad", [(3, "expert"), (0, "expert"), (2, "dense")], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_overflow_in_one_expert_skips_the_step_everywhere(stage: int, bad: tuple[int, str]) -> None:
    for got in POOL.run(expert_run, WORLD, 2, keys_of(stage), bad):
        assert got["applied"] == [True, False, True]
        assert got["norms"][1] == float("inf")
        assert all(bool(p.isfinite().all()) for p in got["parameters"].values())


def frozen_expert(comm: Any) -> bool:
    """Whether a step changes this rank's expert. The first of two experts is frozen on its ranks."""
    topology, row = topology_of(comm.rank, 2)
    model = WithExpert(comm.rank % 2, 2)
    engine, *_ = zero_full.initialize(model=model, config=keys_of(1), optimizer=sgd, topology=topology)
    model.expert.requires_grad_(comm.rank % 2 == 1)
    before = model.expert.detach().clone()
    x = [data(0, 0, rank) for rank in range(WORLD)]
    engine.backward(engine(x[comm.rank], [x[rank] for rank in row]))
    engine.step()
    return not torch.equal(model.expert, before)


def test_an_expert_may_be_frozen_where_others_are_not() -> None:
    assert POOL.run(frozen_expert, WORLD) == [False, True, False, True]


def test_the_check_of_calls_tells_expert_groups_and_data_groups_of_the_same_ranks_apart() -> None:
    keys = keys_of(2, debug={"check_collectives": True, "timeout_s": 5})
    for got in POOL.run(expert_run, WORLD, 1, keys):
        assert got["applied"] == [True] * STEPS


def gradients_of_own(comm: Any) -> list[str]:
    """What is logged about `torch.autograd.grad`, whose first gradient is that of an expert with no copy."""
    topology, row = topology_of(comm.rank, WORLD)
    model, handler = WithExpert(comm.rank, WORLD), BufferingHandler(1000)
    engine = zero_full.initialize(model=model, config=config(2), optimizer=sgd, topology=topology)[0]
    x = [data(0, 0, rank) for rank in range(WORLD)]
    logging.getLogger("zero_full").addHandler(handler)
    torch.autograd.grad(engine(x[comm.rank], [x[rank] for rank in row]), [*model.parameters()])
    logging.getLogger("zero_full").removeHandler(handler)
    engine.destroy()
    return [record.getMessage() for record in handler.buffer]


def test_an_expert_that_no_other_rank_has_hides_no_gradient_that_is_not_averaged() -> None:
    for said in POOL.run(gradients_of_own, WORLD):
        assert len(said) == 1 and "torch.autograd.grad" in said[0] and "dense" in said[0]


def saved_and_loaded(comm: Any, folder: Path, stage: int, experts: int) -> str:
    """Two experts are saved from stage 1, and loaded at another stage; what differs, or what is said."""
    topology, row = topology_of(comm.rank, 2)
    model = WithExpert(comm.rank % 2, 2)
    model.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
    engine = zero_full.initialize(model=model, config=config(1), optimizer=sgd, topology=topology)[0]
    x = [data(0, 0, rank) for rank in range(WORLD)]
    engine.backward(engine(x[comm.rank], [x[rank] for rank in row]))
    engine.step()
    model.seen += comm.rank
    engine.save_checkpoint(folder)
    names = ("dense", "expert")
    held = [zero_full.safe_get_full_optimizer_state(getattr(model, n), "momentum_buffer") for n in names]
    topology, row = topology_of(comm.rank, experts)
    other = WithExpert(comm.rank % experts, experts)
    other.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
    engine = zero_full.initialize(model=other, config=config(stage), optimizer=sgd, topology=topology)[0]
    try:
        engine.load_checkpoint(folder)
    except zero_full.CheckpointError as error:
        return str(error)
    found = [zero_full.safe_get_full_optimizer_state(getattr(other, n), "momentum_buffer") for n in names]
    with zero_full.GatheredParameters([other.dense, other.expert]):
        same = torch.equal(other.dense, model.dense) and torch.equal(other.expert, model.expert)
    same = same and other.seen.tolist() == [comm.rank] * 3
    return "" if same and all(map(torch.equal, held, found)) else "other values"


@pytest.mark.parametrize("stage", [0, 2])
def test_each_expert_goes_on_where_it_was(stage: int, tmp_path: Path) -> None:
    assert POOL.run(saved_and_loaded, WORLD, tmp_path, stage, 2) == [""] * WORLD


def test_other_numbers_of_experts_are_an_error(tmp_path: Path) -> None:
    for said in POOL.run(saved_and_loaded, WORLD, tmp_path, 2, 4):
        assert "lacks expert" in said and "Nothing was loaded" in said, said


def modified(comm: Any, stage: int, of_own_group: bool) -> tuple[list[float], str]:
    """What `GatheredParameters` leaves of two experts and a shared parameter, and what it says."""
    topology, _ = topology_of(comm.rank, 2)
    model = WithExpert(comm.rank % 2, 2)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(2.0)
    engine, _, _, _ = zero_full.initialize(
        model=model, config=keys_of(stage), optimizer=sgd, topology=topology
    )
    modifier, said = comm.rank % 2 if of_own_group else 0, ""
    chosen = [model.expert] if of_own_group else [model.expert, model.dense]
    try:
        with zero_full.GatheredParameters(chosen, modifier_rank=modifier), torch.no_grad():
            if comm.rank == modifier:
                for param in chosen:
                    param.add_(3.0)
    except RuntimeError as error:
        said = str(error)
    left = [float(each.flatten()[0]) for each in engine.module_state_dict().values()]
    engine.destroy()
    return left, said


@pytest.mark.parametrize("stage", [1, 2])
def test_an_expert_that_the_modifier_rank_lacks_keeps_its_values(stage: int) -> None:
    for left, said in POOL.run(modified, WORLD, stage, False):
        assert left == [2.0, 2.0] and "modifier_rank 0 is not among the ranks that share expert" in said
    for left, said in POOL.run(modified, WORLD, stage, True):
        assert sorted(left) == [2.0, 5.0] and not said
