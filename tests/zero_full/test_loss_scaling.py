"""Who multiplies by the loss scale: every gradient is scaled once, however backward is called."""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import run_in
from tests.zero_full.runs import Net, assert_same, config, data
from tests.zero_full.sixteen_bits import STAGES

FP16 = torch.float16
SGD = {"type": "SGD", "params": {"lr": 1.0}}


PLAIN: dict[str, Any] = {"gradient_accumulation_steps": 2, "plain_backward_divides": False}


def engine_of(model: nn.Module, stage: int = 1, **keys: Any) -> zero_full.Engine:
    """fp16 with a static scale of 256, or as the keys say."""
    keys = {"fp16": {"enabled": True, "loss_scale": 256.0}, "optimizer": SGD, **keys}
    return zero_full.initialize(model=model, config=config(stage, **keys))[0]


class Several(nn.Module):
    """One weight, and outputs of the kind that is asked for. The loss is 0.5 * weight."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.kind = kind

    def forward(self) -> Any:
        """The loss, or the loss and what it was made of, or what a loss can be made of."""
        logits = self.weight * 0.5
        first, second = logits.float().sum() * 0.75, logits.float().sum() * 0.25
        outputs = {
            "loss": lambda: first + second,
            "loss and logits": lambda: {"loss": first + second, "logits": logits},
            "loss and its parts": lambda: (first + second, first, second),
            "two losses": lambda: (first, second),
            "logits": lambda: logits,
        }
        return outputs[self.kind]()


def first_of(outputs: Any) -> Tensor:
    if isinstance(outputs, Tensor):
        return outputs
    return outputs["loss"] if isinstance(outputs, dict) else outputs[0]


BACKWARD: dict[str, tuple[str, Callable[[zero_full.Engine, Any], Any]]] = {
    "engine.backward": ("loss", lambda engine, out: engine.backward(out)),
    "engine.backward of a function of the logits": ("logits", lambda engine, out: engine.backward(out.sum())),
    "engine.backward of a loss that comes with logits": (
        "loss and logits",
        lambda engine, out: engine.backward(out["loss"]),
    ),
    "engine.backward of a loss that comes with its parts": (
        "loss and its parts",
        lambda engine, out: engine.backward(out[0]),
    ),
    "engine.backward of a scaled loss": ("loss", lambda engine, out: engine.backward(engine.scale(out))),
    "engine.scale": ("loss", lambda engine, out: engine.scale(out).backward()),
    "engine.scale of a function of the logits": (
        "logits",
        lambda engine, out: engine.scale(out.sum()).backward(),
    ),
    "plain": ("loss", lambda engine, out: out.backward()),
    "plain, of a function of the loss": ("loss", lambda engine, out: ((out * 4) / 4).backward()),
    "plain, of two losses": ("two losses", lambda engine, out: (out[0] + out[1]).backward()),
    "plain, of a loss that comes with logits": (
        "loss and logits",
        lambda engine, out: out["loss"].backward(),
    ),
    "plain, of a loss that comes with its parts": (
        "loss and its parts",
        lambda engine, out: out[0].backward(),
    ),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", BACKWARD)
def test_a_gradient_is_scaled_once_whichever_way_backward_is_called(way: str, stage: int) -> None:
    kind, backward = BACKWARD[way]
    engine = engine_of(Several(kind), stage)
    for step in range(3):
        backward(engine, engine())
        assert engine.optimizer.reducer.used
        engine.step()
        assert engine.get_global_grad_norm() == 0.5, f"step {step}"
        assert float(engine.module.weight) == -0.5 * (step + 1)


@pytest.mark.parametrize("stage", STAGES)
def test_scaled_gradients_are_those_of_the_scaled_loss(stage: int) -> None:
    engine = engine_of(Net(), stage, **PLAIN)
    x = data(0, 0, 0, FP16)
    engine(x).backward()
    held = {k: [t.clone() for t in kept] for k, kept in engine.optimizer.holdings().items()}
    model = Net().to(FP16)
    (model(x) * 256.0).backward()
    want = {p.grad.float().abs().max() for p in model.parameters() if p.grad is not None}
    assert max(float(t.abs().max()) for t in held["gradients"]) == float(max(want))


@pytest.mark.parametrize("scaled", [True, False])
def test_what_is_scaled_is_one_loss_and_not_the_next_one(scaled: bool) -> None:
    engine = engine_of(Several("loss"))
    engine.scale(engine()).backward()
    if scaled:
        engine.scale(engine()).backward()
    else:
        engine().backward()
    engine.step()
    assert engine.get_global_grad_norm() == 1.0


def test_the_wrapped_optimizers_step_ends_a_scaled_step_like_the_engines() -> None:
    engine = engine_of(Several("loss"))
    for scaled in (True, False):
        loss = engine()
        (engine.scale(loss) if scaled else loss).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        assert engine.get_global_grad_norm() == 0.5


@pytest.mark.parametrize("stage", STAGES)
def test_plain_backward_through_logits_is_refused_with_the_remedy(stage: int) -> None:
    engine = engine_of(Several("logits"), stage)
    with pytest.raises(RuntimeError, match=r"engine.backward\(loss\) or engine.scale\(loss\).backward\(\)"):
        engine().sum().backward()
    engine.zero_grad()
    engine.backward(engine().sum())
    engine.step()
    assert engine.get_global_grad_norm() == 0.5


@pytest.mark.parametrize(
    "keys", [{"fp16": {}}, {"fp16": {}, "bf16": {"enabled": True}}], ids=["fp32", "bf16"]
)
def test_plain_backward_through_logits_is_fine_where_nothing_is_scaled(keys: dict[str, Any]) -> None:
    engine = engine_of(Several("logits"), gradient_clipping=9.0, **keys)
    engine().sum().backward()
    engine.step()
    assert engine.get_global_grad_norm() == 0.5


def three_ways(comm: Any, stage: int) -> list[dict[str, Tensor]]:
    """The same run with three kinds of backward, two micro-batches a step."""
    ways: list[Callable[[zero_full.Engine, Tensor], Any]] = [
        lambda engine, loss: engine.backward(loss),
        lambda engine, loss: engine.scale(loss / 2).backward(),
        lambda engine, loss: (loss / 2).backward(),
    ]
    finals = []
    for way in ways:
        engine = engine_of(Net(), stage, **PLAIN, optimizer=config(stage)["optimizer"])
        for step in range(3):
            for micro in range(2):
                way(engine, engine(data(step, micro, comm.rank, FP16)))
                engine.step()
            assert engine.was_step_applied()
        finals.append({name: p.detach().clone() for name, p in engine.named_parameters()})
        engine.destroy()
    return finals


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_all_ways_to_call_backward_train_the_same_model(world_size: int, stage: int) -> None:
    for first, second, third in run_in("processes", three_ways, world_size, stage):
        assert_same(second, first)
        assert_same(third, first)


Pair = namedtuple("Pair", ["x", "index"])


class Taker(nn.Module):
    """Takes inputs in any wrapping and notes what arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.seen: list[torch.dtype] = []

    def forward(self, batch: Any, scale: Any = None) -> Tensor:
        """A loss of whatever is in the batch."""
        values = list(batch.values()) if isinstance(batch, dict) else list(batch)
        tensors = [v for v in [*values, scale] if isinstance(v, Tensor)]
        self.seen = [t.dtype for t in tensors]
        return self.layer(tensors[0]).float().sum()


@pytest.mark.parametrize("wrap", [list, tuple, lambda pair: Pair(*pair), lambda pair: dict(enumerate(pair))])
def test_auto_cast_casts_floating_inputs_in_any_wrapping(wrap: Callable[[Any], Any]) -> None:
    engine = engine_of(Taker(), fp16={"enabled": True, "loss_scale": 2.0, "auto_cast": True})
    batch = wrap((torch.ones(2, 4), torch.ones(2, dtype=torch.int64)))
    engine.backward(engine(batch, scale=torch.ones(1, dtype=torch.float64)))
    assert engine.module.seen == [FP16, torch.int64, FP16]


def test_without_auto_cast_inputs_arrive_as_they_are() -> None:
    engine = engine_of(Taker())
    with pytest.raises(RuntimeError, match="dtype"):
        engine([torch.ones(2, 4)])
    assert engine.module.seen == [torch.float32]


def test_a_second_step_on_top_of_unscaled_gradients_is_refused() -> None:
    engine = engine_of(Taker(), fp16={"enabled": True, "loss_scale": 2.0, "auto_cast": True})
    optimizer = engine.optimizer
    engine.backward(engine([torch.ones(2, 4)]))
    optimizer.step()
    optimizer.step()  # the same gradients again
    engine.backward(engine([torch.ones(2, 4)]))
    with pytest.raises(RuntimeError, match="Call zero_grad after every step"):
        optimizer.step()


class Noting(zero_full.StaticScale):
    """A scale of the caller's own class."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.steps = list[bool]()

    def update(self, overflow: bool) -> None:
        self.steps.append(overflow)


def test_a_scale_of_ones_own_class_hears_of_every_step() -> None:
    model, scale = Net(), Noting()
    optimizer = zero_full.assemble.shard(model, torch.optim.SGD(model.parameters(), lr=0.01), scaler=scale)
    for step in range(2):
        model(data(step, 0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert scale.steps == [False, False]
    optimizer.close(gather=False)
