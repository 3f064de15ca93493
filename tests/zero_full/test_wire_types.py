"""A rank that does not use a bucket's parameters sends what the others send, in 16 bits, too."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_full
from tests.worlds import POOL
from zero_full import Settings
from zero_full.precision import Dtypes

WAYS = ("micro_batches", "unmanaged", "boundary", "no_sync", "reentrant", "plain")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TWICE = ("micro_batches", "unmanaged", "boundary", "no_sync", "plain")


class Tower(nn.Module):
    """A tower for pictures, which the first rank has, and a trunk for all."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.tower = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.trunk = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        for p in self.parameters():
            p.data.copy_(torch.randn(p.shape, generator=generator) * 0.4)
        self.reentrant = reentrant

    def forward(self, x: Tensor, sees: bool) -> Tensor:
        """The loss."""
        if sees:
            x = x.requires_grad_()
            x = checkpoint(self.tower, x, use_reentrant=True) if self.reentrant else self.tower(x)
        return self.trunk(x).float().square().mean()


def data(step: int, micro: int, rank: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))


def sees(rank: int, micro: int, way: str) -> bool:
    """The first rank alone, and where there are two micro-batches in one of them only."""
    return rank == 0 and micro == 0


def config(stage: int, dtype: str, way: str) -> dict[str, Any]:
    keys: dict[str, Any] = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    if dtype == "fp16":
        keys["fp16"]["loss_scale"] = 128
    if way == "micro_batches":
        keys["gradient_accumulation_steps"] = 2
    if way == "unmanaged":
        keys["managed_gradient_accumulation"] = False
    zero = {"stage": stage, "reduce_bucket_size": 100}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": zero,
        **keys,
    }


def moved(stage: int, dtype: str, way: str, rank: int) -> Tensor:
    """How far two steps move all parameters, at every rank the same, whole and in fp32."""
    model = Tower(way == "reentrant")
    before = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    if way == "plain":  # a loop without an engine, whose passes add up
        return after_plain_loop(model, stage, dtype, rank) - before
    engine, *_ = zero_full.initialize(model=model, config=config(stage, dtype, way))
    count = 2 if way in TWICE else 1
    for step in range(2):
        for micro in range(count):
            x = data(step, micro, rank).to(DTYPES[dtype])
            if way == "boundary":
                engine.set_gradient_accumulation_boundary(micro == count - 1)
            if way == "no_sync" and micro == 0:
                with engine.no_sync():
                    engine.backward(engine(x, sees(rank, micro, way)))
                continue
            engine.backward(engine(x, sees(rank, micro, way)))
            if way != "unmanaged" or micro == count - 1:
                engine.step()
    names = [name for name, _ in engine.module.named_parameters()]
    whole = engine.module_state_dict()
    engine.destroy()
    return torch.cat([whole[name].float().flatten() for name in names]) - before


def after_plain_loop(model: Tower, stage: int, dtype: str, rank: int) -> Tensor:
    base = torch.optim.SGD(model.parameters(), lr=0.5)
    dtypes = Dtypes(parameter=None if dtype == "fp32" else DTYPES[dtype])
    made = zero_full.assemble.shard(model, base, Settings(stage=stage, dtypes=dtypes, bucket_numel=100))
    for step in range(2):
        for micro in range(2):
            made.scale(
                model(data(step, micro, rank).to(DTYPES[dtype]), sees(rank, micro, "plain"))
            ).backward()
        made.step()
        made.zero_grad()
    after = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    made.close(gather=False)
    return after


def wanted(way: str, ranks: int) -> Tensor:
    """The same in plain torch, on one process, in fp32."""
    model = Tower(reentrant=False)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    count = 2 if way in TWICE else 1
    shares = count if way == "micro_batches" else 1  # others add up
    for step in range(2):
        optimizer.zero_grad()
        for micro, rank in product(range(count), range(ranks)):
            (model(data(step, micro, rank), sees(rank, micro, way)) / ranks / shares).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]) - before


def all_moved(comm: Any, stages: list[int]) -> dict[str, tuple[float, float]]:
    """By case: how far off the parameters' way is, as a part of it; and its sum, to compare ranks."""
    found = {}
    for stage, dtype, way in product(stages, DTYPES, WAYS):
        got, want = moved(stage, dtype, way, comm.rank), wanted(way, comm.world_size)
        found[f"{stage} {dtype} {way}"] = float((got - want).norm() / want.norm()), float(got.double().sum())
    return found


@pytest.mark.rotates
def test_ranks_that_use_other_parameters_move_as_plain_torch_does() -> None:
    for world in (2, 3):
        ranks = POOL.run(all_moved, world, [0, 1, 2])
        for case in ranks[0]:
            offs, sums = zip(*(rank[case] for rank in ranks), strict=True)
            assert max(offs) < (1e-5 if "fp32" in case else 0.04), (case, offs)
            assert len(set(sums)) == 1, (case, "ranks differ", sums)
