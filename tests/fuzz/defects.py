"""Defects that are planted in zero_full, in every rank. The search must find each."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch.distributed as dist

from zero_full import Engine, PipelineEngine, Settings, ZeroOptimizer


@contextmanager
def instead(owner: type, name: str, wrong: Callable[..., Any]) -> Iterator[None]:
    """`wrong` gets the original method, and then what that gets."""
    right = getattr(owner, name)
    with mock.patch.object(owner, name, lambda *args, **kwargs: wrong(right, *args, **kwargs)):
        yield


def _lose(right: Callable[..., Any], engine: Engine, loss: Any, **more: Any) -> Any:
    lost = engine.micro_steps % engine.gradient_accumulation_steps() == 0 and dist.get_rank() == 1
    return right(engine, loss * 0 if lost else loss, **more)


def _sleep(right: Callable[..., Any], engine: Engine, loss: Any, **more: Any) -> Any:
    time.sleep(1000 if dist.get_rank() == 1 else 0)
    return right(engine, loss, **more)


def _fail(right: Callable[..., Any], engine: Engine, loss: Any, **more: Any) -> Any:
    if dist.get_rank() == 1:
        raise ValueError("planted")
    return right(engine, loss, **more)


def _count_all(right: Callable[..., Any], engine: Engine) -> None:
    right(engine)
    engine.skipped_steps = 0


def _forget_ties(right: Callable[..., Any], engine: PipelineEngine) -> None:
    engine._ties = []
    right(engine)


PLANTED: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "gradients are summed": (Settings, "divisors", lambda right, *args: (1.0, 1.0)),
    "nothing is clipped": (
        ZeroOptimizer,
        "_update",
        lambda right, self, decision: right(self, replace(decision, norm=None)),
    ),
    "moments are not loaded": (
        Engine,
        "load_checkpoint",
        lambda right, *args: right(*args, load_optimizer_states=False),
    ),
    "skipped steps are not counted": (Engine, "_count_step", _count_all),
    "a rank's first micro-batch is lost": (Engine, "backward", _lose),
    "a rank does not go on": (Engine, "backward", _sleep),
    "a rank fails alone": (Engine, "backward", _fail),
    "tied layers of a pipeline do not add up": (PipelineEngine, "_average", _forget_ties),
}


def planted(name: str) -> AbstractContextManager[None]:
    """With this defect."""
    return instead(*PLANTED[name])
