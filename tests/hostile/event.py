"""What an event is: something that happens to a model, its gradients or its optimizer in the middle of a run.

An event does the same to plain torch and to zero_full. Where zero_full refuses, `refused` is what the error
must say; everywhere else the result must be plain torch's.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Refusal = Callable[[int, str], str | None]  # (stage, numbers) -> what the error says; None: there is none


def never(stage: int, numbers: str) -> str | None:
    return None


def always(text: str) -> Refusal:
    return lambda stage, numbers: text


def at_stage_3(text: str) -> Refusal:
    return lambda stage, numbers: text if stage == 3 else None


def in_fp16(text: str) -> Refusal:
    return lambda stage, numbers: text if numbers == "fp16" else None


def weight_of(player: Any) -> nn.Parameter:
    return player.module.layers[2].weight


class Event:
    """Nothing happens."""

    refused: Refusal = staticmethod(never)

    def construct(self, model: nn.Module) -> None:
        """Before initialize."""

    def between(self, player: Any) -> None:
        """Between two steps."""

    def zero_grad(self, player: Any) -> bool:
        """In the place of zero_grad; True: it was."""
        return False

    def before(self, player: Any) -> None:
        """Between zero_grad and forward."""

    def call(self, player: Any, x: Tensor) -> Tensor:
        """The forward."""
        return player.call(x)

    def after_backward(self, player: Any) -> None:
        """Between backward and step."""

    def step(self, player: Any) -> bool:
        """In the place of step; True: it was."""
        return False


EVENTS: dict[str, Event] = {"nothing": Event()}


def event(name: str, moment: str, refused: Refusal = never) -> Callable[[Any], Any]:
    """Add an event that is one function at one moment."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        made = Event()
        made.refused = refused  # type: ignore[method-assign]
        setattr(made, moment, function)
        EVENTS[name] = made
        return function

    return add
