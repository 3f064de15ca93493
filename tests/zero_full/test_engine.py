"""The engine: DeepSpeed's calls and PyTorch's loop, what counts as a step, and what it answers."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import zero_full
from tests.worlds import run_in
from tests.zero_full.runs import Net, assert_close, config, data, reference, run


def engine_of(**keys: Any) -> zero_full.Engine:
    engine, _, _, _ = zero_full.initialize(model=Net(), config=config(keys.pop("stage", 1), **keys))
    return engine


def test_a_step_is_every_nth_micro_batch() -> None:
    engine = engine_of(gradient_accumulation_steps=2)
    steps = []
    for micro in range(4):
        assert engine.is_gradient_accumulation_boundary() == (micro % 2 == 1)
        engine.backward(engine(data(0, micro, 0)))
        engine.step()
        steps.append((engine.micro_steps, engine.global_steps, engine.was_step_applied()))
    assert steps == [(1, 0, False), (2, 1, True), (3, 1, False), (4, 2, True)]
    assert engine.global_samples == 20


def test_the_user_may_say_where_the_boundary_is() -> None:
    engine = engine_of()
    before = engine.module.layers[0].weight.detach().clone()
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(engine(data(0, 0, 0)))
    engine.step()
    assert torch.equal(engine.module.layers[0].weight, before) and engine.global_steps == 0
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(data(0, 1, 0)))
    engine.step()
    assert not torch.equal(engine.module.layers[0].weight, before) and engine.global_steps == 1


def test_backward_divides_by_the_micro_batches_and_says_so() -> None:
    engine = engine_of(gradient_accumulation_steps=4)
    loss = engine(data(0, 0, 0))
    assert float(engine.backward(loss).detach()) == pytest.approx(float(loss.detach()) / 4)
    loss = engine(data(0, 0, 0))
    assert float(engine.backward(loss, scale_wrt_gas=False).detach()) == float(loss.detach())


def test_what_is_not_a_scalar_loss_is_refused() -> None:
    engine = engine_of()
    with pytest.raises(ValueError, match="scalar loss, not a tensor of shape \\(2,\\)"):
        engine.backward(torch.ones(2, requires_grad=True))
    with pytest.raises(ValueError, match="scalar loss"):
        engine.backward(3.0)  # type: ignore[arg-type]


def test_step_inside_no_sync_is_refused() -> None:
    engine = engine_of()
    with engine.no_sync(), pytest.raises(RuntimeError, match="inside no_sync"):
        engine.step()


def test_a_failed_backward_leaves_an_engine_that_works() -> None:
    def fail(grad: Tensor) -> Tensor:
        raise ArithmeticError("no")

    engine = engine_of()
    x = data(0, 0, 0).requires_grad_(True)
    x.register_hook(fail)
    with pytest.raises(ArithmeticError):
        engine.backward(engine(x))
    engine.zero_grad()
    for step in range(4):
        engine.backward(engine(data(step, 0, 0)))
        engine.step()
    assert_close(dict(engine.module.named_parameters()), reference(1))


def test_the_getters_answer() -> None:
    engine = engine_of(stage=2, gradient_accumulation_steps=3, gradient_clipping=0.5, bf16={"enabled": True})
    assert engine.train_batch_size() == 15
    assert engine.train_micro_batch_size_per_gpu() == 5
    assert engine.gradient_accumulation_steps() == 3
    assert engine.get_batch_info() == (15, 5, 3)
    assert engine.get_lr() == [0.01] and engine.get_mom() == [(0.9, 0.999)]
    assert engine.zero_optimization_stage() == 2 and engine.zero_optimization()
    assert engine.bfloat16_enabled() and not engine.fp16_enabled()
    assert engine.gradient_clipping() == 0.5 and engine.loss_scale() == 1 and not engine.dynamic_loss_scale()
    assert engine.global_rank == 0 and engine.local_rank == 0 and engine.world_size == 1
    assert engine.get_global_grad_norm() is None and not engine.was_step_applied()


def test_the_batch_size_changes_between_steps() -> None:
    engine = engine_of()
    engine.set_train_batch_size(10)
    assert engine.gradient_accumulation_steps() == 2
    with pytest.raises(ValueError, match="12 is not a multiple of 5"):
        engine.set_train_batch_size(12)
    engine.backward(engine(data(0, 0, 0)))
    engine.step()
    with pytest.raises(RuntimeError, match="between steps"):
        engine.set_train_batch_size(5)


def test_what_the_engine_does_not_know_the_module_does() -> None:
    engine = engine_of()
    assert engine.layers is engine.module.layers
    assert [name for name, _ in engine.named_parameters()] == [name for name, _ in Net().named_parameters()]
    assert engine.eval() is engine and not engine.module.training
    assert engine.train().module.training
    with pytest.raises(AttributeError, match="neither Engine nor Net has an attribute 'no_such_thing'"):
        _ = engine.no_such_thing
    engine.module.temperature = 1.0
    engine.temperature, engine.of_the_loop, engine.skipped_steps = 2.0, 3, 4
    assert engine.module.temperature == engine.temperature == 2.0  # the module computes with it
    assert not hasattr(engine.module, "of_the_loop") and not hasattr(engine.module, "skipped_steps")
    with pytest.raises(AttributeError, match=r"gradient_clipping is a method: to assign 1.0 to it"):
        engine.gradient_clipping = 1.0  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize("given", ["instance", "class", "function", "config", "groups"])
def test_an_optimizer_may_be_an_instance_a_class_a_function_or_a_section(given: str) -> None:
    model = Net()
    keys = config(1)
    arguments: dict[str, Any] = {}
    if given == "instance":
        arguments["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    elif given == "class":
        keys.pop("optimizer")
        arguments["optimizer"] = torch.optim.SGD
    elif given == "function":
        arguments["optimizer"] = lambda params: torch.optim.SGD(params, lr=0.1)
    elif given == "groups":
        arguments["model_parameters"] = [{"params": list(model.parameters()), "lr": 0.1}]
    engine, optimizer, _, _ = zero_full.initialize(model=model, config=keys, **arguments)
    engine.backward(engine(data(0, 0, 0)))
    engine.step()
    kind = torch.optim.AdamW if given in ("config", "groups") else torch.optim.SGD
    assert type(optimizer.base) is kind and engine.was_step_applied()


OPTIMIZERS = ["SGD", "Adagrad", "RMSprop", "NAdam", "Lion", "Adam", "Adamax", "Rprop"]


@pytest.mark.rotates
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_elementwise_optimizer_runs_on_slices(name: str, stage: int) -> None:
    from zero_full.optim import build_optimizer

    section = {"type": name, "params": {"lr": 0.01}}
    want = reference(3, make=lambda params: build_optimizer(name, {"lr": 0.01}, [{"params": list(params)}]))
    for outcome in run(3, config(stage, optimizer=section)):
        assert_close(outcome.parameters, want, 1e-5)


def sharded_lbfgs(comm: Any) -> str:
    model = Net()
    with pytest.raises(TypeError) as refused:
        zero_full.initialize(model=model, optimizer=torch.optim.LBFGS(model.parameters()), config=config(1))
    return str(refused.value)


def test_an_optimizer_that_needs_whole_tensors_is_refused_with_the_reason() -> None:
    assert all("LBFGS" in text for text in run_in("processes", sharded_lbfgs, 2))


class Normalised(torch.optim.Optimizer):
    """Needs the whole tensor: moves by the gradient over its norm."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p -= 0.01 * p.grad / p.grad.norm()


def test_at_stage_0_an_optimizer_sees_whole_tensors_in_their_own_shape() -> None:
    outcomes = run(2, config(0, optimizer=None), optimizer=Normalised)
    assert_close(outcomes[0].parameters, reference(2, make=Normalised))


def test_groups_cannot_be_added_later() -> None:
    engine = engine_of()
    with pytest.raises(RuntimeError, match="cannot be added after initialize"):
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_a_model_has_one_engine_at_a_time() -> None:
    model = Net()
    first, _, _, _ = zero_full.initialize(model=model, config=config(1))
    with pytest.raises(ValueError, match=r"layers.0.weight already belongs to an engine.*destroy"):
        zero_full.initialize(model=model, config=config(1))
    first.backward(first(data(0, 0, 0)))
    first.step()
    first.destroy()
    second, _, _, _ = zero_full.initialize(model=model, config=config(2, gradient_clipping=1.0))
    second.backward(second(data(1, 0, 0)))
    second.step()
    assert second.was_step_applied() and second.get_global_grad_norm() > 0


def test_an_optimizer_that_has_stepped_keeps_its_state() -> None:
    model = Net()
    base = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(2):
        base.zero_grad()
        model(data(step, 0, 0)).backward()
        base.step()
    base.zero_grad()
    engine, _, _, _ = zero_full.initialize(model=model, optimizer=base, config=config(1, optimizer=None))
    for step in range(2, 4):
        engine.backward(engine(data(step, 0, 0)))
        engine.step()
    assert_close(dict(engine.module.named_parameters()), reference(1))


def test_the_schedule_moves_with_applied_steps() -> None:
    params = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 10, "warmup_type": "linear"}
    engine = engine_of(scheduler={"type": "WarmupLR", "params": params})
    rates = []
    for step in range(4):
        rates += engine.get_lr()
        engine.backward(engine(data(step, 0, 0)))
        engine.step()
    assert rates == pytest.approx([0.0, 0.0, 0.001, 0.002])


def loader_of(comm: Any) -> list[list[int]]:
    numbers = TensorDataset(torch.arange(24).float())
    engine, _, loader, _ = zero_full.initialize(model=Net(), training_data=numbers, config=config(1))
    assert engine.training_dataloader is loader and loader is not None and len(loader) == 3
    return [[int(n) for (batch,) in loader for n in batch] for _ in range(2)]


def test_the_loader_gives_every_rank_its_own_part_shuffled_anew() -> None:
    first, second = run_in("processes", loader_of, 2)
    assert sorted(first[0] + second[0]) == list(range(24))
    assert first[0] != first[1]


def test_a_config_may_be_a_file_or_an_argument(tmp_path: Path) -> None:
    import argparse

    path = tmp_path / "config.json"
    path.write_text(json.dumps(config(2)))
    arguments = zero_full.add_config_arguments(argparse.ArgumentParser()).parse_args(
        ["--deepspeed", "--deepspeed_config", str(path)]
    )
    engine, _, _, _ = zero_full.initialize(args=arguments, model=Net())
    assert engine.zero_optimization_stage() == 2
    with pytest.raises(ValueError, match="one config and got 2"):
        zero_full.initialize(args=arguments, model=Net(), config=config(1))
    with pytest.raises(ValueError, match="one config and got 0"):
        zero_full.initialize(model=Net())


def test_a_model_is_needed_and_something_to_train() -> None:
    with pytest.raises(ValueError, match="model must be"):
        zero_full.initialize(config=config(1))
    with pytest.raises(ValueError, match="nothing to train"):
        zero_full.initialize(model=Net().requires_grad_(False), config=config(1))
    engine, optimizer, _, _ = zero_full.initialize(model=Net(), config=config(1, optimizer=None))
    with pytest.raises(RuntimeError, match="stage 1 of an engine without an optimizer"):
        engine.backward(engine(data(0, 0, 0)))
    with pytest.raises(RuntimeError, match="there is no optimizer"):
        optimizer.step()


def test_the_configuration_is_logged_with_origins_and_dtypes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="zero_full"):
        engine_of(stage=1, bf16={"enabled": True})
    text = caplog.text
    assert "zero_optimization.stage" in text and "derived" in text and "user" in text
    for kind, dtype in [("parameter", "bfloat16"), ("accumulate", "float32"), ("master", "float32")]:
        assert any(f"dtype of {kind}" in line and dtype in line for line in text.splitlines())


def test_loading_what_another_layout_saved_names_the_parameter() -> None:
    saved = engine_of().state_dict()
    tensors = saved["optimizer"]["tensors"]
    tensors["parameters/layers.0.weight"]["start"] = 7
    with pytest.raises(ValueError, match=r"layers.0.weight: this rank owns elements 0 to 208"):
        engine_of().load_state_dict(saved)
    del tensors["parameters/layers.0.weight"]
    with pytest.raises(ValueError, match=r"lacks layers.0.weight"):
        engine_of().load_state_dict(saved)


def test_new_weights_reach_the_masters() -> None:
    engine = engine_of(bf16={"enabled": True})
    before = engine.module_state_dict()
    state = {name: torch.zeros_like(p) for name, p in before.items()}
    with pytest.raises(ValueError, match=r"has shape \(\d.*Load a state dict of this model"):
        engine.load_module_state_dict({**state, [*state][-1]: torch.zeros(1)})
    assert all(torch.equal(p, before[name]) for name, p in engine.module_state_dict().items())
    engine.load_module_state_dict(state)
    engine.backward(engine(data(0, 0, 0, torch.bfloat16)))
    engine.step()
    assert max(float(p.abs().max()) for p in engine.parameters()) <= 0.011  # one step of lr 0.01 away from 0


@pytest.mark.parametrize("stage", [1, 3])
def test_a_cuda_graph_that_would_lose_the_hooks_is_refused(stage: int) -> None:
    engine, _, _, _ = zero_full.initialize(model=Net(), config=config(stage))
    loss = engine(data(0, 0, 0))
    captures = SimpleNamespace(is_initialized=lambda: True, is_current_stream_capturing=lambda: True)
    engine.optimizer.reducer.backward.accelerator = captures
    with pytest.raises(RuntimeError, match="CUDA graph"):
        loss.backward()
    engine.destroy()
