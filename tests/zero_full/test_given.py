"""What `initialize` is given: one clear sentence for each mistake, and no mistake is let pass."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zero_full
from tests.worlds import POOL
from tests.zero_full.runs import Net, config, data


def own(keys: dict[str, Any] | None = None) -> dict[str, Any]:
    """A config without an optimizer."""
    made = config(1, **(keys or {}))
    del made["optimizer"]
    return made


def with_(**given: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"model": Net(), "config": config(1), **given}


def of_another_model() -> dict[str, Any]:
    model = Net()
    return {
        "model": model,
        "config": own(),
        "optimizer": torch.optim.SGD(copy.deepcopy(model).parameters(), 0.1),
    }


def of_a_head_that_was_replaced() -> dict[str, Any]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.layers[4] = nn.Linear(13, 3)
    return {"model": model, "config": own(), "optimizer": optimizer}


def with_a_view() -> dict[str, Any]:
    model = Net()
    model.register_buffer("first", model.layers[0].weight.data[0])
    return {"model": model, "config": config(1)}


def with_numbers(**numbers: Any) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.param_groups[0].update(numbers)
        return {"model": model, "config": own(), "optimizer": optimizer}

    return make


def a_schedule_of_another() -> dict[str, Any]:
    model = Net()
    mine, other = (torch.optim.SGD(model.parameters(), 0.1) for _ in range(2))
    schedule = torch.optim.lr_scheduler.StepLR(other, 1)
    return {"model": model, "config": own(), "optimizer": mine, "lr_scheduler": schedule}


def nothing_to_train() -> dict[str, Any]:
    model = Net().requires_grad_(False)
    return {"model": model, "config": own(), "optimizer": torch.optim.SGD(model.parameters(), 0.1)}


def sharded_by_another() -> dict[str, Any]:
    class FullyShardedDataParallel(nn.Module):
        __module__ = "torch.distributed.fsdp"

    model = nn.Sequential(Net(), FullyShardedDataParallel())
    return {"model": model, "config": config(1)}


MISTAKES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "optimizer of another model": (of_another_model, "the optimizer has none of this model's parameters"),
    "a replaced head": (
        of_a_head_that_was_replaced,
        r"not in the model \(one of.*lacks layers\.4\.weight, lay",
    ),
    "a buffer that is a view": (with_a_view, "buffer first is a view of parameter layers.0.weight"),
    "lr nan": (with_numbers(lr=float("nan")), "lr of the optimizer's parameter group 0 is nan"),
    "lr string": (with_numbers(lr="x"), "lr of the optimizer's parameter group 0 is 'x'"),
    "decay inf": (with_numbers(weight_decay=float("inf")), "weight_decay of the optimizer's .* is inf"),
    "no optimizer comes": (with_(optimizer=lambda params: None), "must return an optimizer, not NoneType"),
    "model_parameters": (with_(model_parameters=5), "model_parameters must be parameters, .* not 5"),
    "training_data": (with_(training_data=5), "training_data must be a dataset, not int"),
    "schedule of another optimizer": (a_schedule_of_another, r"drives another optimizer \(SGD\)"),
    "nothing to train": (nothing_to_train, "there is nothing to train: no parameter requires gradients"),
    "wrapped": (sharded_by_another, "1 is wrapped in FullyShardedDataParallel"),
    "lazy": (lambda: {"model": nn.LazyLinear(3), "config": config(1)}, "weight has no shape yet"),
    "a class for a model": (with_(model=Net), "model must be an nn.Module, not type"),
    "a string for an optimizer": (with_(optimizer="Adam"), "optimizer must be .* not str 'Adam'"),
    "a schedule's name": (with_(lr_scheduler="WarmupLR"), "lr_scheduler must be .* not str 'WarmupLR'"),
    "wrap": (with_(wrap="layers"), "wrap must be a function .* not str 'layers'"),
    "process_group": (with_(process_group="world"), "process_group must be a ProcessGroup, not str 'world'"),
    "ranks for a group": (with_(process_group=[0, 1]), "process_group must be a ProcessGroup, not list"),
    "mesh": (with_(mesh=(2, 2)), "mesh must be a DeviceMesh, not tuple"),
    "topology": (with_(topology={"data": 2}), "topology must be a Topology, not dict"),
    "mpu": (with_(mpu=3), r"mpu must be .*get_data_parallel_group\(\), not int"),
    "two of them": (with_(mpu=3, mesh=4), "mesh and mpu exclude each other"),
    "a number for a config": (with_(config=3), "config"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence(name: str) -> None:
    make, said = MISTAKES[name]
    with pytest.raises((TypeError, ValueError, RuntimeError), match=said):
        zero_full.initialize(**make())


def test_an_engine_is_no_model() -> None:
    engine, *_ = zero_full.initialize(**with_()())
    with pytest.raises(TypeError, match="the model is an engine already"):
        zero_full.initialize(model=engine, config=config(1))  # type: ignore[arg-type]


def wrapped_in_ddp(comm: Any) -> str:
    model = nn.parallel.DistributedDataParallel(Net())
    try:
        zero_full.initialize(model=model, config=config(1))
    except ValueError as error:
        return str(error)
    return "nothing"


def test_ddp_around_the_model_would_average_twice() -> None:
    assert "the model is wrapped in DistributedDataParallel" in POOL.run(wrapped_in_ddp, 2)[0]


def test_what_requires_gradients_and_is_in_no_group_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    with caplog.at_level(logging.WARNING, "zero_full"):
        zero_full.initialize(model=model, model_parameters=model.layers[0].parameters(), config=config(1))
    assert "4 parameters require gradients and are in no parameter group of the optimizer" in caplog.text
    assert "layers.2.weight, layers.2.bias, layers.4.weight, layers.4.bias" in caplog.text


@pytest.mark.parametrize(
    ("keys", "times"), [({}, 1), ({"gradient_clipping": 1.0}, 0), ({"gradient_clipping": 0}, 0)], ids=str
)
def test_clipping_that_nobody_has_asked_for_is_told_once(
    keys: dict[str, Any], times: int, caplog: pytest.LogCaptureFixture
) -> None:
    zero_full.initialize(model=Net(), optimizer=torch.optim.SGD, config=keys)
    told = "gradients are clipped to a norm of 1.0"
    assert caplog.text.count(told) == times


@pytest.mark.parametrize("divides", [None, True, False])
def test_who_divides_is_said_at_start(divides: bool | None, caplog: pytest.LogCaptureFixture) -> None:
    keys = {} if divides is None else {"plain_backward_divides": divides}
    with caplog.at_level(logging.INFO, "zero_full"):
        zero_full.initialize(model=Net(), config=config(1, gradient_accumulation_steps=4, **keys))
    assert "engine.backward(loss) divides by gradient_accumulation_steps 4; " in caplog.text
    said = {None: "is an error until", True: "so does loss.backward()", False: "loss.backward() does not"}
    assert [d for d, words in said.items() if words in caplog.text] == [divides]


def test_a_number_that_becomes_unusable_later_is_an_error_too() -> None:
    engine, optimizer, _, _ = zero_full.initialize(**with_()())
    optimizer.param_groups[0]["lr"] = float("inf")
    engine.backward(engine(data(0, 0, 0)))
    with pytest.raises(RuntimeError, match="lr of the optimizer's parameter group 0 is inf"):
        engine.step()


def test_what_wins_over_the_file_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    keys = config(1, scheduler={"type": "WarmupLR", "params": {}})
    mine = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(mine, 1)
    with caplog.at_level(logging.WARNING, "zero_full"):
        zero_full.initialize(model=model, optimizer=mine, lr_scheduler=schedule, config=keys)
    assert (
        'the optimizer passed to initialize is used instead of the configuration\'s "optimizer"'
        in caplog.text
    )
    assert (
        'the schedule passed to initialize is used instead of the configuration\'s "scheduler"' in caplog.text
    )


def test_a_schedule_without_an_optimizer_has_nothing_to_do(caplog: pytest.LogCaptureFixture) -> None:
    keys = own({"scheduler": {"type": "WarmupLR", "params": {}}})
    with caplog.at_level(logging.WARNING, "zero_full"):
        zero_full.initialize(model=Net(), config=keys)
    assert '"scheduler" (WarmupLR) has no effect' in caplog.text


def test_steps_and_losses_that_can_do_nothing_say_so(caplog: pytest.LogCaptureFixture) -> None:
    engine, optimizer, _, _ = zero_full.initialize(**with_()())
    with caplog.at_level(logging.WARNING, "zero_full"):
        optimizer.step()
        optimizer.step()
    assert caplog.text.count("optimizer.step() without gradients does nothing") == 1
    with pytest.raises(ValueError, match=r"not a state_dict\(\) of zero_full"):
        optimizer.load_state_dict(torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1).state_dict())
    loss = engine(data(0, 0, 0))
    engine.destroy()
    with pytest.raises(RuntimeError, match="backward after destroy"):
        engine.backward(loss)
    for call in (engine.state_dict, engine.offload_states, optimizer.watch_signals):
        with pytest.raises(RuntimeError, match=f"{call.__name__} after destroy"):
            call()
    with pytest.raises(RuntimeError, match="on_signal after destroy"):
        engine.on_signal("nowhere")


def test_a_sparse_gradient_by_hand_is_refused_by_name() -> None:
    engine, _, _, _ = zero_full.initialize(**with_(config=config(1, bf16={"enabled": True}))())
    engine.backward(engine(data(0, 0, 0, torch.bfloat16)))
    engine.module.layers[2].weight.grad = torch.ones(13, 13, dtype=torch.bfloat16).to_sparse()
    with pytest.raises(RuntimeError, match=r"layers\.2\.weight.*torch\.sparse_coo"):
        engine.step()
