"""`safe_get_*` and `safe_set_*`: what is behind a parameter, whole or this rank's elements."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_full
from tests.worlds import run_each, run_in
from tests.zero_full.runs import Net, assert_close, config, data, reference, said_by

KEYS = [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "loss_scale": 128.0}}]


def read_everything(comm: Any, stage: int, keys: dict[str, Any]) -> dict[str, Tensor | None]:
    """Two steps, then what can be read between a third backward and its step."""
    engine, _, _, _ = zero_full.initialize(model=Net(), config=config(stage, **keys))
    weight = engine.layers[2].weight
    found: dict[str, Tensor | None] = {
        "state before": zero_full.safe_get_full_optimizer_state(weight, "exp_avg")
    }
    for step in range(3):
        engine.backward(engine(data(step, 0, comm.rank, weight.dtype)))
        if step == 2:
            found["grad"] = zero_full.safe_get_full_grad(weight)
            found["local grad"] = zero_full.safe_get_local_grad(weight)
        engine.step()
    found["grad after"] = zero_full.safe_get_full_grad(weight)
    found["param"] = zero_full.safe_get_full_fp32_param(weight)
    found["local param"] = zero_full.safe_get_local_fp32_param(weight).clone()
    found["exp_avg"] = zero_full.safe_get_full_optimizer_state(weight, "exp_avg")
    found["local exp_avg"] = zero_full.safe_get_local_optimizer_state(weight, "exp_avg")
    found["step"] = zero_full.safe_get_full_optimizer_state(weight, "step")
    found["value"] = weight.detach().clone()
    return found


def averaged_gradient(world_size: int) -> Tensor:
    """What the third backward averages to, by plain PyTorch."""
    model = Net()
    model.load_state_dict(reference(world_size, steps=2))
    for rank in range(world_size):
        (model(data(2, 0, rank)) / world_size).backward()
    assert model.layers[2].weight.grad is not None
    return model.layers[2].weight.grad


@pytest.mark.pairwise
@pytest.mark.parametrize("keys", KEYS, ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_everything_can_be_read_whole_and_in_parts(world_size: int, stage: int, keys: dict[str, Any]) -> None:
    outcomes = run_in("processes", read_everything, world_size, stage, keys)
    low = bool(keys)
    for found in outcomes:
        assert found["state before"] is None and found["grad after"] is None
        assert found["grad"] is not None and found["param"] is not None and found["exp_avg"] is not None
        assert_close({"g": found["grad"]}, {"g": averaged_gradient(world_size)}, 0.02 if low else 1e-6)
        assert found["param"].dtype == torch.float32 and found["param"].shape == (13, 13)
        assert torch.equal(found["param"].to(found["value"].dtype), found["value"])  # type: ignore[union-attr]
        assert found["step"] == 3
    shared = 1 if stage == 0 else world_size
    for whole, part in [("grad", "local grad"), ("param", "local param"), ("exp_avg", "local exp_avg")]:
        together = torch.cat([found[part] for found in outcomes[:shared]])  # type: ignore[misc]
        assert torch.equal(together, outcomes[0][whole].reshape(-1))  # type: ignore[union-attr]


def write_everything(comm: Any, stage: int, keys: dict[str, Any]) -> dict[str, Tensor | None]:
    """Set what is behind a parameter, read it back, and step with it."""
    engine, _, _, _ = zero_full.initialize(
        model=Net(),
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.5),
        config=config(stage, **keys),
    )
    weight = engine.layers[2].weight
    engine.backward(engine(data(0, 0, comm.rank, weight.dtype)))
    engine.step()
    value, momentum, grad = (torch.arange(169.0).view(13, 13) / scale for scale in (64, 32, 128))
    zero_full.safe_set_full_fp32_param(weight, value)
    zero_full.safe_set_full_optimizer_state(weight, momentum, "momentum_buffer")
    engine.backward(engine(data(1, 0, comm.rank, weight.dtype)))
    zero_full.safe_set_full_grad(weight, grad)
    read = {
        "param": zero_full.safe_get_full_fp32_param(weight),
        "grad": zero_full.safe_get_full_grad(weight),
        "momentum": zero_full.safe_get_full_optimizer_state(weight, "momentum_buffer"),
        "value": weight.detach().float().clone(),
    }
    engine.step()
    want = value - (0.5 * momentum + grad)
    return {**read, "off": (zero_full.safe_get_full_fp32_param(weight) - want).abs().max()}


@pytest.mark.pairwise
@pytest.mark.parametrize("keys", KEYS, ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_everything_can_be_written_and_is_used(world_size: int, stage: int, keys: dict[str, Any]) -> None:
    numbers = torch.arange(169.0).view(13, 13)
    for found in run_in("processes", write_everything, world_size, stage, keys):
        for name, scale in [("param", 64), ("momentum", 32), ("grad", 128)]:
            assert torch.equal(found[name], numbers / scale), name
        assert (found["value"] - numbers / 64).abs().max() <= (0.01 if keys else 0)
        assert found["off"] <= 1e-6


WAITING = {"offload_optimizer": {"device": "cpu"}}
WINDOWS: list[tuple[int, str, dict[str, Any]]] = [
    (stage, kind, {**keys, "zero_optimization": zero})
    for stage in (0, 1, 2, 3)
    for keys in KEYS[:2]
    for kind in ("SGD", "AdamW")
    for zero in (({}, WAITING) if stage else ({},))
]


def write_in_place(comm: Any, stage: int, kind: str, keys: dict[str, Any]) -> list[Tensor]:
    """Write to this rank's window of the master three times: to a new one, to a kept one, and gathered.

    The optimizer moves nothing, so what is found afterwards is what was written.
    """
    keys = config(stage, optimizer={"type": kind, "params": {"lr": 0.0, "weight_decay": 0.0}}, **keys)
    keys["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    engine, *_ = zero_full.initialize(model=Net(), config=keys)
    weight, numbers = engine.module.layers[2].weight, torch.arange(169.0).view(13, 13) / 1000
    window = zero_full.safe_get_local_fp32_param(weight)
    found = []
    for step in range(3):
        if step == 2:
            window = zero_full.safe_get_local_fp32_param(weight)
        place = engine.optimizer.sharded.places[weight][0].master.pieces
        mine = [piece.param_range for member, piece in place.items() if member.param is weight]
        assert window is not None
        window.copy_((numbers + step).view(-1)[slice(*mine[0])] if mine else window)
        if step == 2 and stage == 3:
            with zero_full.GatheredParameters([weight], modifier_rank=0):
                assert (weight - numbers - step).abs().max() <= 0.01
        dtype = next(iter(engine.optimizer.sharded.flats)).dtype
        engine.backward(engine(data(step, 0, comm.rank, dtype)))
        engine.step()
        found.append(zero_full.safe_get_full_fp32_param(weight))
        found.append(engine.module_state_dict()["layers.2.weight"].float())
    engine.destroy()
    return found


@pytest.mark.rotates
def test_what_is_written_to_a_window_of_the_master_counts() -> None:
    numbers = torch.arange(169.0).view(13, 13) / 1000
    for (stage, kind, keys), ranks in zip(WINDOWS, run_each(write_in_place, 2, WINDOWS), strict=True):
        for found in ranks:
            for step, (master, value) in enumerate(zip(found[::2], found[1::2], strict=True)):
                assert torch.equal(master, numbers + step), (stage, kind, keys)
                assert (value - numbers - step).abs().max() <= 0.01, (stage, kind, keys)


def write_both(comm: Any, stage: int, way: str) -> str:
    engine, *_ = zero_full.initialize(model=Net(), config=config(stage, bf16={"enabled": True}))
    weight = engine.module.layers[2].weight
    window = zero_full.safe_get_local_fp32_param(weight)
    assert window is not None

    def write_and_step() -> None:
        gathers = way == "gathered"
        with zero_full.GatheredParameters([weight], 0) if gathers else nullcontext(), torch.no_grad():
            window.fill_(0.5)
            if way == "assigned":
                weight.data = torch.full_like(weight, 0.25)
            else:
                weight.fill_(0.25)
        engine.backward(engine(data(0, 0, comm.rank, torch.bfloat16)))
        engine.step()

    said = said_by(write_and_step)
    engine.destroy()
    return said


def test_writes_to_a_parameter_and_to_its_master_are_an_error() -> None:
    cases = [(1, "in place"), (2, "in place"), (1, "assigned"), (1, "gathered"), (3, "gathered")]
    for ranks in run_each(write_both, 2, cases):
        assert any("safe_get_local_fp32_param" in said for said in ranks), ranks


def assign_before_step(comm: Any) -> list[Tensor]:
    """Write to a master, then assign a tensor to the neighbour's `data`, between backward and a step."""
    keys = config(1, optimizer={"type": "SGD", "params": {"lr": 0.0}}, bf16={"enabled": True})
    keys["zero_optimization"]["reduce_bucket_size"] = 10_000  # one group
    engine, *_ = zero_full.initialize(model=Net(), config=keys)
    layer = engine.module.layers[2]
    window = zero_full.safe_get_local_fp32_param(layer.weight)
    assert window is not None
    engine.backward(engine(data(0, 0, comm.rank, torch.bfloat16)))
    window.fill_(0.5)
    layer.bias.data = torch.full_like(layer.bias, 0.25)
    engine.step()
    found = [layer.weight.detach().float(), layer.bias.detach().float()]
    engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_tensor_that_is_assigned_after_a_write_to_a_master_counts(world: int) -> None:
    for weight, bias in run_each(assign_before_step, world, [()])[0]:
        assert torch.all(weight == 0.5) and torch.all(bias == 0.25)


def test_mistakes_name_the_parameter_and_the_remedy() -> None:
    engine, _, _, _ = zero_full.initialize(model=Net(), config=config(1))
    weight = engine.layers[2].weight
    with pytest.raises(ValueError, match="belongs to no zero_full engine"):
        zero_full.safe_get_full_fp32_param(torch.nn.Parameter(torch.ones(1)))
    with pytest.raises(ValueError, match=r"layers.2.weight has shape \(13, 13\), got \(3,\)"):
        zero_full.safe_set_full_fp32_param(weight, torch.ones(3))
    with pytest.raises(
        RuntimeError, match=r"layers.2.weight has no averaged gradient now.*after the last backward"
    ):
        zero_full.safe_set_local_grad(weight, torch.ones(13, 13))
    with pytest.raises(KeyError, match="no optimizer state before the first step"):
        zero_full.safe_set_full_optimizer_state(weight, torch.ones(13, 13), "exp_avg")
    engine.backward(engine(data(0, 0, 0)))
    engine.step()
    with pytest.raises(
        KeyError, match=r"no state 'momentum' for layers.2.weight, only step, exp_avg, exp_avg_sq"
    ):
        zero_full.safe_get_full_optimizer_state(weight, "momentum")
    one, text = torch.ones(1), "this rank owns 169 elements of layers.2.weight, got a tensor of 1"
    with pytest.raises(ValueError, match=text):
        zero_full.safe_set_local_fp32_param(weight, one)  # it would have been written to each element
    with pytest.raises(ValueError, match=text):
        zero_full.safe_set_local_optimizer_state(weight, one, "exp_avg")
    with pytest.raises(ValueError, match=text):
        zero_full.safe_set_local_grad(weight, one)


def write_while_reading(comm: Any, stage: int, bf16: bool) -> tuple[str, str]:
    """What is told when one rank, and then all ranks, write inside a block for reading."""
    told, values = list[str](), list[list[Tensor]]()
    for writes in ((), (1,), (0, 1)):
        engine, *_ = zero_full.initialize(model=Net(), config=config(stage, bf16={"enabled": bf16}))
        params = list(engine.module.parameters())
        dtype = params[0].dtype
        for step in range(2):
            engine.backward(engine(data(step, 0, comm.rank, dtype)))
            engine.step()
            if step == 0 and writes:
                raises = pytest.raises(RuntimeError)
                with raises as caught, zero_full.GatheredParameters(params), torch.no_grad():
                    for param in params if comm.rank in writes else ():
                        param.fill_(3.0)
                told.append(str(caught.value))
                if writes == (0, 1) and "stay" in told[-1]:
                    assert all(torch.all(param == 3.0) for param in params)
        values.append([*engine.module_state_dict().values()])
        engine.destroy()
    assert all(map(torch.equal, values[0], values[1]))  # what one rank wrote is nowhere
    return told[0], told[1]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_one_rank_writes_while_it_reads_is_not_spread(stage: int) -> None:
    for ranks in run_each(write_while_reading, 2, [(stage, False), (stage, True)]):
        for one, everyone in ranks:
            assert "layers.2.weight" in one and "the change was undone" in one and "stay" not in one
            assert "on every rank, so no rank has the values from before" in everyone


class HalfFrozen(Net):
    """A layer is frozen, and given to no optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].requires_grad_(False)


def edit_frozen(comm: Any, stage: int) -> tuple[Tensor, str]:
    """The weight after one rank has edited it, and what an edit of rank 0 without a modifier raises."""
    net = HalfFrozen()
    optimizer = torch.optim.SGD(p for p in net.parameters() if p.requires_grad)
    keys = {key: value for key, value in config(stage).items() if key != "optimizer"}
    engine, _, _, _ = zero_full.initialize(model=net, optimizer=optimizer, config=keys)
    weight, bias = net.layers[2].weight, net.layers[2].bias
    with zero_full.GatheredParameters([weight], modifier_rank=1):
        weight.data.fill_(float(comm.rank))
    with zero_full.GatheredParameters([weight, bias]), torch.no_grad():  # on all ranks: allowed
        bias.fill_(2.0)
    told = ""
    if weight.shape == (13, 13):
        try:
            with zero_full.GatheredParameters([weight, bias]), torch.no_grad():
                if comm.rank == 0:
                    bias.fill_(3.0)
        except RuntimeError as error:
            told = str(error)
    value = weight.detach().clone()
    engine.destroy()
    return value, told


def test_a_frozen_parameter_that_all_ranks_have_whole_follows_the_modifier() -> None:
    for by_rank in run_each(edit_frozen, 3, [(stage,) for stage in (0, 1, 2, 3)]):
        for value, told in by_rank:
            assert torch.equal(value, torch.ones(13, 13))
            assert told.startswith("layers.2.bias changed inside GatheredParameters on some ranks only")


class Wide(torch.nn.Module):
    """Large enough that rounding to 8 bits shows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)).float().square().mean()


def exact_values(comm: Any) -> list[float]:
    """How far what user code sees of quantized gathers is from the values."""
    zero = {"zero_quantized_weights": True, "stage3_param_persistence_threshold": 0}
    keys = config(3, bf16={"enabled": True}, zero_optimization={**zero, "stage3_max_reuse_distance": 10**9})
    model = Wide()
    exact = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine, _, _, _ = zero_full.initialize(model=model, config=keys)

    def off(found: Any, dtype: torch.dtype = torch.bfloat16) -> float:
        return max(float((found[name].to(dtype) - exact[name].to(dtype)).abs().max()) for name in exact)

    engine(torch.ones(2, 64, dtype=torch.bfloat16))  # leaves rounded values gathered
    found = [off(engine.module_state_dict())]
    with zero_full.GatheredParameters(list(model.parameters())):
        found.append(off(dict(model.named_parameters())))
    with zero_full.GatheredParameters(list(model.parameters()), modifier_rank=0), torch.no_grad():
        model.first.bias.mul_(1)
    found.append(
        off({n: zero_full.safe_get_full_fp32_param(p) for n, p in model.named_parameters()}, torch.float32)
    )
    engine.destroy(gather=True)
    return [*found, off(dict(model.named_parameters()))]


def test_whole_values_are_exact_where_gathers_of_training_are_quantized() -> None:
    assert run_each(exact_values, 2, [()]) == [[[0.0] * 4] * 2]
