"""What else may hold or have cut a model: a sentence that names it; and what else may be gathered."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import zero_full
from tests.worlds import POOL
from tests.zero_full.runs import Net, config, data


def tensor_parallel(model: Any) -> nn.Module:
    return parallelize_module(model, init_device_mesh("cpu", (2,)), {"layers.0": ColwiseParallel()})


def sharded_by_torch(model: Any) -> nn.Module:
    fully_shard(model)
    return model


WRAPPED: dict[str, Any] = {
    "DistributedDataParallel": (DistributedDataParallel, "wrapped in DistributedDataParallel"),
    "FSDP": (sharded_by_torch, "layers.0.weight is a DTensor.*fully_shard"),
    "tensor parallel": (tensor_parallel, "layers.0.weight is a DTensor.*parallelize_module"),
}


def wrapped(comm: Any, name: str, stage: int) -> None:
    make, sentence = WRAPPED[name]
    with pytest.raises(ValueError, match=sentence):
        zero_full.initialize(model=make(Net()), config=config(stage))


def around(comm: Any, stage: int) -> None:
    """A wrapper that is kept around the module, and called."""
    model = Net()
    outer = DistributedDataParallel(model)
    engine, *_ = zero_full.initialize(model=model, config=config(stage))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="DistributedDataParallel wraps a model"):
            outer(data(0, 0, comm.rank))
    engine.backward(engine(data(0, 0, comm.rank)))
    engine.step()
    assert engine.global_steps == 1
    engine.destroy()


def all_of_them(comm: Any) -> None:
    for stage in (1, 3):
        for name in WRAPPED:
            wrapped(comm, name, stage)
        around(comm, stage)


def test_a_model_that_another_wrapper_holds_is_refused_by_its_name() -> None:
    POOL.run(all_of_them, 2)


def test_torchs_grad_scaler_is_refused_by_its_name() -> None:
    engine, optimizer, *_ = zero_full.initialize(model=Net(), config=config(1))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(engine.module.layers(data(0, 0, 0)).square().mean()).backward()
    with pytest.raises(RuntimeError, match="GradScaler cannot step this optimizer"):
        scaler.step(optimizer)
    off = torch.amp.GradScaler("cpu", enabled=False)
    optimizer.zero_grad()
    engine(data(0, 0, 0)).backward()
    off.step(optimizer)
    engine.destroy()


def gathered(comm: Any) -> None:
    for stage in (None, 1, 3):
        model = Net()
        zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
        engine = stage and zero_full.initialize(model=model, config=config(1, zero_optimization=zero))[0]
        first: Any = model.layers[0]
        for given in ([first.weight, None], first, [first, [model.layers[2].bias, None]], first.weight):
            with zero_full.GatheredParameters(given, modifier_rank=0):
                assert not first.weight.isnan().any()
        for nothing in (None, [], [None]):
            with zero_full.GatheredParameters(nothing):
                pass
        with pytest.raises(TypeError, match="not 'weight'"):
            zero_full.GatheredParameters(["weight"])
        if engine:
            engine.destroy()


def test_parameters_to_gather_may_be_absent_nested_or_a_module() -> None:
    POOL.run(gathered, 2)
