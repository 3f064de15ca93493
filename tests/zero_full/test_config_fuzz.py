"""Every key with every nasty value: a configuration that can be used, or a sentence that has the key."""

import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.zero_full.test_config import nested, with_batch
from zero_full.config import resolve
from zero_full.config.messages import known_keys
from zero_full.optim import build_optimizer, build_scheduler
from zero_full.optim.schedules import OURS
from zero_full.start.from_config import scaler_of, settings_of


def deep(level: int = 10**4) -> Any:
    value: Any = []
    for _ in range(level):
        value = [value]
    return value


def endless() -> Any:
    value: dict[str, Any] = {}
    value["again"] = value
    return value


NASTY = [
    *(None, True, False, 0, 1, -1, 10**30, 10**5000, 0.5, 1e-320, 1e30, 1e300),
    *(math.nan, math.inf, -math.inf, "", "auto", "true", "1e-3", [], [None], [0.9], [0.9, 0.99, 0.5]),
    *([math.nan, 0.9], ["a", 1], {}, {"": None}, {1: 2}, {"enabled": "no"}, {"enabled": None}, (0.5, 0.5)),
    *(b"x", object(), torch.tensor([1.0, 2.0]), torch.tensor(math.nan), deep(), endless(), {"x": deep()}),
]
LIMIT = 3  # steps of a schedule


def optimizer(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [nn.Parameter(torch.ones(2))], **options} for _ in range(2)])


def cases_of_the_schema() -> Iterator[tuple[str, Any, Callable[[], object]]]:
    for key in [*known_keys(), "bfloat16.enabled", "zero_optimization.prefetch_bucket_size"]:
        for value in NASTY:
            yield key, value, lambda key=key, value=value: use(nested(key, value))


def use(keys: dict[str, Any]) -> None:
    """What a run asks of a configuration before it has a model."""
    for section in ("optimizer", "scheduler"):
        if isinstance(keys.get(section), dict) and keys[section].keys() in ({"params"}, {"legacy_fusion"}):
            keys[section]["type"] = "Adam" if section == "optimizer" else "WarmupLR"
    resolved = resolve({"gradient_accumulation_steps": 1, **with_batch(keys)}, 2)
    assert resolved.table() and resolve(resolved.config, 2).config == resolved.config
    config = resolved.config
    settings_of(config)
    assert 0 < scaler_of(config).scale < math.inf and 1 / scaler_of(config).scale > 0
    parameter = nn.Parameter(torch.ones(2))
    part = config.optimizer
    if part:
        build_optimizer(part.type, part.params, [{"params": [parameter]}])
    if config.scheduler:
        step(build_scheduler(config.scheduler.type, config.scheduler.params, optimizer()))


def step(schedule: Any) -> None:
    for _ in range(LIMIT):
        schedule.step()
        for group in schedule.optimizer.param_groups:
            assert math.isfinite(group["lr"]) and all(0 <= beta < 1 for beta in group.get("betas", ()))


REQUIRED = {"total_num_steps": 9, "cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "step_size": 2, "gamma": 0.5}


def cases_of_arguments() -> Iterator[tuple[str, Any, Callable[[], object]]]:
    """Of optimizers, groups and schedules, which may come from a script, too."""
    for kind in ("Adam", "SGD", "Lion", "RMSprop", "Rprop"):
        target = type(build_optimizer(kind, {}, [{"params": [nn.Parameter(torch.ones(2))]}]))
        of_group = list(inspect.signature(target).parameters)[1:]
        for key in [*of_group, "adam_w_mode", "torch_adam", "bias_correction", "max_grad_norm"]:
            for value in NASTY:
                yield key, value, lambda k=kind, key=key, v=value: train(k, {key: v}, {})
                if key in of_group:
                    yield key, value, lambda k=kind, key=key, v=value: train(k, {}, {key: v})
    for name, target in {**OURS, "StepLR": torch.optim.lr_scheduler.StepLR}.items():
        known = inspect.signature(target).parameters
        given = {key: value for key, value in REQUIRED.items() if key in known}
        for key in list(known)[1:]:
            for value in NASTY:
                yield (
                    key,
                    value,
                    lambda n=name, p={**given, key: value}: step(build_scheduler(n, p, optimizer())),
                )


def train(kind: str, params: dict[str, Any], group: dict[str, Any]) -> None:
    parameter = nn.Parameter(torch.ones(2))
    made = build_optimizer(kind, params, [{"params": (p for p in [parameter]), **group}])
    assert made.param_groups[0]["params"] == [parameter]
    if not ({"capturable", "differentiable"} & {*params, *group}):  # these want more than an optimizer
        parameter.grad = torch.ones(2)
        made.step()
        huge = [
            v for v in [*params.values(), *group.values()] if isinstance(v, int | float) and abs(v) > 1e20
        ]
        assert huge or bool(parameter.detach().isfinite().all())


@pytest.mark.rotates
def test_nothing_nasty_gets_further_than_a_sentence_with_its_key() -> None:
    tried = refused = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for key, value, attempt in [*cases_of_the_schema(), *cases_of_arguments()]:
            tried += 1
            try:
                attempt()
            except (ValueError, TypeError) as error:
                refused += 1
                assert key in str(error), f"{key} = {repr_of(value)}: {error!r}"
                assert len(str(error).splitlines()[-1]) < 500
            except BaseException as error:
                raise AssertionError(f"{key} = {repr_of(value)}: {error!r}") from error
    assert refused > tried / 2 > 1000


def repr_of(value: Any) -> str:
    return type(value).__name__ if isinstance(value, list | dict | int) else repr(value)
