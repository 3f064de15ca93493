"""Accumulation: who divides the loss, who counts micro-batches, what a rank sees of gradients in between."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL, run_each
from tests.zero_full.runs import Net, assert_close, config, data, reference
from tests.zero_full.stage3_runs import RELEASED

SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
MICRO_BATCHES = 2
FP16 = {"fp16": {"enabled": True, "loss_scale": 64.0}}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


WAYS: dict[str, tuple[bool | None, Callable[[zero_full.Engine, Tensor], Any]]] = {
    "engine.backward": (None, lambda engine, loss: engine.backward(loss)),
    "engine.scale": (None, lambda engine, loss: engine.scale(loss).backward()),
    "autograd.backward of engine.scale": (
        None,
        lambda engine, loss: torch.autograd.backward(engine.scale(loss)),
    ),
    "true": (True, lambda engine, loss: loss.backward()),
    "true, of two losses": (True, lambda engine, loss: torch.autograd.backward([loss / 2, loss / 2])),
    "false, the loop has divided": (False, lambda engine, loss: (loss / MICRO_BATCHES).backward()),
    "true, but engine.backward": (True, lambda engine, loss: engine.backward(loss)),
    "false, but engine.backward": (False, lambda engine, loss: engine.backward(loss)),
    "false, but engine.scale": (False, lambda engine, loss: engine.scale(loss).backward()),
    "true, but engine.scale": (True, lambda engine, loss: engine.scale(loss).backward()),
}


def accumulated(comm: Any, stage: int, way: str, managed: bool, ramped: bool = False) -> dict[str, Tensor]:
    """`ramped`: begin with one micro-batch a step, and ask for more later."""
    divides, backward = WAYS[way]
    keys = {**SGD, "plain_backward_divides": divides, "managed_gradient_accumulation": managed}
    zero = RELEASED if stage == 3 else {}
    steps = 1 if ramped else MICRO_BATCHES
    more = config(stage, gradient_accumulation_steps=steps, zero_optimization=zero, **keys)
    engine, *_ = zero_full.initialize(model=Net(), config=more)
    engine.set_train_batch_size(MICRO_BATCHES * engine.train_micro_batch_size_per_gpu() * engine.world_size)
    for step in range(4):
        for micro in range(MICRO_BATCHES):
            backward(engine, engine(data(step, micro, comm.rank)))
            if managed:
                engine.step()
        if not managed:
            engine.step()
    assert engine.global_steps == 4
    return engine.module_state_dict()


@pytest.mark.rotates
@pytest.mark.parametrize("managed", [True, False])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_loss_is_divided_once_whoever_does_it(stage: int, managed: bool) -> None:
    want = reference(2, micro_batches=MICRO_BATCHES, make=sgd)
    for way in WAYS:
        for got in POOL.run(accumulated, 2, stage, way, managed):
            assert_close(got, want)


@pytest.mark.rotates
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_loss_is_divided_once_after_the_batch_has_grown(world_size: int) -> None:
    want = reference(world_size, micro_batches=MICRO_BATCHES, make=sgd)
    cases = [(stage, way, True, True) for stage in range(4) for way in WAYS]
    for found in run_each(accumulated, world_size, cases):
        for got in found:
            assert_close(got, want)


@pytest.mark.parametrize("keys", [{}, FP16], ids=["fp32", "fp16"])
def test_a_plain_backward_of_which_nobody_has_said_who_divides_raises_with_both_remedies(
    keys: dict[str, Any],
) -> None:
    engine, *_ = zero_full.initialize(model=Net(), config=config(1, gradient_accumulation_steps=3, **keys))
    x = data(0, 0, 0, next(engine.module.parameters()).dtype)
    with pytest.raises(RuntimeError, match="gradient_accumulation_steps 3") as caught:
        engine(x).backward()
    assert "plain_backward_divides" in str(caught.value) and "engine.backward(loss)" in str(caught.value)
    engine.zero_grad()
    for _ in range(3):
        engine.backward(engine(x))
        engine.step()
    assert engine.global_steps == 1


def test_one_micro_batch_needs_no_answer() -> None:
    engine, optimizer, _, _ = zero_full.initialize(model=Net(), config=config(1))
    engine(data(0, 0, 0)).backward()
    optimizer.step()
    assert engine.was_step_applied() and engine.global_steps == 1


def test_with_unmanaged_accumulation_the_samples_are_those_that_were_seen() -> None:
    keys = config(1, gradient_accumulation_steps=4, managed_gradient_accumulation=False)
    engine, *_ = zero_full.initialize(model=Net(), config=keys)
    for passes in (1, 3):
        for micro in range(passes):
            engine.backward(engine(data(0, micro, 0)))
        engine.step()
    assert (engine.global_steps, engine.global_samples) == (2, 20)
    with pytest.raises(RuntimeError, match="managed_gradient_accumulation is false"):
        engine.set_gradient_accumulation_boundary(True)


# fp16: the loss scale ----------------------------------------------------------------------------


def past_the_engine(call: str) -> str:
    """What is said of a backward pass whose forward has gone past the engine."""
    engine, *_ = zero_full.initialize(model=Net(), config=config(1, **FP16))
    x = data(0, 0, 0, torch.float16)
    loss = engine.module(x) if call == "module" else engine.module.layers(x).float().square().mean()
    try:
        loss.backward()
        engine.step()
    except RuntimeError as error:
        return str(error)
    plain = Net()
    plain(data(0, 0, 0)).backward()
    want = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    return f"{(engine.get_global_grad_norm() or 0) / float(want):.2f}"


def test_forward_through_the_module_has_its_loss_scaled() -> None:
    assert past_the_engine("module") == "1.00"


def test_forward_through_a_part_without_the_loss_scale_is_refused() -> None:
    assert "gradients without the loss scale" in past_the_engine("part")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gradient_of_the_inputs_alone_does_not_come_back_scaled(ranks: int) -> None:
    want = torch.autograd.grad(Net()(x := data(0, 0, 0).requires_grad_()), x)[0]
    for said, got in POOL.run(gradient_of_inputs, ranks):
        assert "engine.loss_scale()" in said
        torch.testing.assert_close(got, want, rtol=0.02, atol=2e-3)


def gradient_of_inputs(comm: Any) -> tuple[str, Tensor]:
    engine, *_ = zero_full.initialize(model=Net(), config=config(1, **FP16))
    x, said = data(0, 0, 0, torch.float16).requires_grad_(), ""
    try:
        torch.autograd.grad(engine(x), x)
    except RuntimeError as error:
        said = str(error)
    (scaled,) = torch.autograd.grad(engine.scale(engine(x)), x)
    engine.zero_grad()
    engine.backward(engine(data(0, 0, comm.rank, torch.float16)))
    engine.step()
    assert engine.was_step_applied()
    return said, scaled.float() / engine.loss_scale()


# What a rank sees between micro-batches ----------------------------------------------------------


def seen(comm: Any, stage: int) -> list[Tensor | None]:
    """layers.2.bias's gradient: in no_sync, after it, after the step; and of a frozen parameter."""
    model = Net()
    model.layers[0].bias.requires_grad_(False)
    engine, *_ = zero_full.initialize(model=model, config=config(stage, **SGD))
    bias, found = engine.module.layers[2].bias, []
    with engine.no_sync():
        engine(data(0, 0, comm.rank)).backward()
        found.append(zero_full.safe_get_full_grad(bias))
    engine(data(0, 1, comm.rank)).backward()
    found.append(zero_full.safe_get_full_grad(bias))
    zero_full.safe_update_full_grad_vectorized(
        list(engine.module.parameters()),
        lambda gradient, param: torch.full(param.shape, 0.5) if gradient is None else gradient * 2,
    )
    found.append(zero_full.safe_get_full_grad(bias))
    frozen = engine.module.layers[0].bias
    found += [
        zero_full.safe_get_full_grad(frozen),
        zero_full.safe_get_full_fp32_param(frozen),
        zero_full.safe_get_local_grad(frozen),
        zero_full.safe_get_full_optimizer_state(frozen, "momentum_buffer"),
    ]
    engine.step()
    return found


def own_gradient(passes: list[tuple[int, int]]) -> Tensor:
    """Plain torch's sum over (micro, rank)."""
    model = Net()
    for micro, rank in passes:
        model(data(0, micro, rank)).backward()
    assert model.layers[2].bias.grad is not None
    return model.layers[2].bias.grad


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_may_be_looked_at_in_no_sync_and_changed_all_at_once(stage: int) -> None:
    for rank, (local, averaged, doubled, *of_frozen) in enumerate(POOL.run(seen, 2, stage)):
        torch.testing.assert_close(local, own_gradient([(0, rank)]))
        mean = own_gradient([(micro, rank) for micro in range(2) for rank in range(2)]) / 2
        torch.testing.assert_close(averaged, mean)
        torch.testing.assert_close(doubled, 2 * mean)
        assert of_frozen == [None] * 4


# torch_autocast ----------------------------------------------------------------------------------


def autocast(comm: Any, stage: int, dtype: str) -> tuple[dict[str, Tensor], list[torch.dtype]]:
    """Parameters after four steps, and the types that met in a layer."""
    model, met = Net(), []
    model.layers[2].register_forward_hook(lambda module, args, output: met.append(output.dtype))
    keys = {"torch_autocast": {"enabled": True, "dtype": dtype}, **SGD}
    engine, *_ = zero_full.initialize(model=model, config=config(stage, **keys))
    for step in range(4):
        engine.backward(engine(data(step, 0, comm.rank)))
        engine.step()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")
    return engine.module_state_dict(), met


def autocast_by_hand(dtype: torch.dtype) -> dict[str, Tensor]:
    model = Net()
    optimizer = sgd(model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(2):
            with torch.autocast("cpu", dtype):
                loss = model(data(step, 0, rank)) / 2
            loss.backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_torch_autocast_is_torchs(stage: int, dtype: str) -> None:
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    for got, met in POOL.run(autocast, 2, stage, dtype):
        assert set(met) == {kind}
        assert_close(got, autocast_by_hand(kind), 2e-3)


class CallsItself(Net):
    """Its forward calls the model once more."""

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        """The loss."""
        return super().forward(x) + (self(x, again=False) if again else 0)


def test_autocast_ends_with_the_call_also_of_a_model_that_calls_itself() -> None:
    keys = {"torch_autocast": {"enabled": True, "dtype": "bf16"}}
    engine, *_ = zero_full.initialize(model=CallsItself(), config=config(1, **keys))
    for _ in range(2):
        engine.backward(engine(data(0, 0, 0)))
        assert not torch.is_autocast_enabled("cpu")
        engine.step()
