"""State of the running backward pass: its begin and end, its loss, and its place in gradient accumulation.

[Note: recomputed parts] Re-entrant activation checkpointing runs small backward passes inside the outer one.
Autograd gives each a number (graph task id) of its own. Here "the pass" is always the outer one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zero_full._compat import current_backward, queue_backward_callback
from zero_full.nested import leaves, mapped
from zero_full.precision.scaler import StaticScale

NOT_SCALED = (
    "a backward pass has brought gradients without the loss scale, and a step would divide them by it. Call "
    "engine.backward(loss) or engine.scale(loss).backward() (without an engine "
    "optimizer.scale(loss).backward()), or call the whole model and let it return its loss"
)


NOT_CAPTURED = (
    "a CUDA graph cannot capture this pass: Python hooks reduce the gradients and gather the parameters, and "
    "a graph does not replay them. Capture parts of the model (torch.cuda.make_graphed_callables, at stages "
    "0 to 2), or none"
)


class Accumulation:
    """Gradient accumulation: the micro-batches of a step, the divisor of their gradients, and their loss.

    micro_batches  of a step; the last one is the accumulation boundary
    managed        count micro-batches; False: user code decides in each call of `step`
    plain_divisor  divisor of gradients of a plain `loss.backward()`; None: the number of micro-batches
    is_decided     False: `plain_divisor` is not configured: raise if a step has several micro-batches
    """

    def __init__(
        self,
        micro_batches: int = 1,
        managed: bool = True,
        plain_divisor: float | None = 1.0,
        is_decided: bool = True,
    ) -> None:
        self.micro_batches, self.managed = micro_batches, managed
        self._plain_divisor, self._is_decided = plain_divisor, is_decided
        self.micro_steps = 0  # micro-batches so far
        self.boundary: bool | None = None  # of the current micro-batch, set by user code; None: by counting
        self._was_set_false = False  # user code has set `boundary` to False since the last step
        self.step_raised = False  # the engine's step has raised before it has counted
        self.loss: Tensor | None = None  # sum of this step's losses, not finite if any of them is not
        self._plain_losses = 0  # number of these from a plain `loss.backward()`, which did not divide them
        self._lacks_loss = False  # a loss of this step is unknown

    def is_boundary(self) -> bool:
        """Return whether the backward pass of the current micro-batch is the step's last."""
        if self.boundary is not None:
            return self.boundary
        return self.managed and (self.micro_steps + 1) % self.micro_batches == 0

    def set_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the current micro-batch is the step's last; None: go back to counting."""
        self.boundary = is_boundary
        self._was_set_false = self._was_set_false or is_boundary is False

    def end_step(self) -> None:
        """End a step: forget that `set_boundary` was called with False."""
        self._was_set_false = False

    def adds_up(self) -> bool:
        """Return whether a step may have several micro-batches. Equal on all ranks, [Note: what travels]."""
        return self.micro_batches > 1 or not self.managed or self._was_set_false

    def plain_divisor(self) -> float:
        """Return the divisor of gradients of a plain `loss.backward()`; raise if it is not configured."""
        steps = self.micro_batches
        if steps > 1 and not self._is_decided:
            raise RuntimeError(
                f"loss.backward() with gradient_accumulation_steps {steps}: it is not configured who divides "
                f'the loss by {steps}. Set "plain_backward_divides" to true if zero_full divides (as '
                "DeepSpeed does since 0.18.3), to false if your loop does. Or call engine.backward(loss), "
                "which always divides"
            )
        return float(steps) if self._plain_divisor is None else self._plain_divisor

    def add_loss(self, loss: Tensor) -> None:
        """Add a loss of this step, divided by the number of its micro-batches."""
        loss = loss.detach().float()
        self.loss = loss if self.loss is None else self.loss + loss

    def add_plain_loss(self, loss: Tensor | None) -> None:
        """Add a loss from a plain `loss.backward()`, of which the user's own divisor is unknown.

        None: the loss was made from several outputs, so its value is unknown.
        """
        if loss is None:
            self._lacks_loss = True
        else:
            self._plain_losses += 1
            self.add_loss(loss)

    def step_loss(self) -> Tensor | None:
        """Return this step's loss on this rank, the mean over its micro-batches; None if unknown."""
        # Losses of the engine's `backward` are divided already, so that their sum is the mean.
        return None if self._lacks_loss or self.loss is None else self.loss / max(1, self._plain_losses)

    def discard(self) -> None:
        """Forget the losses, because their gradients were discarded. A step that has raised begins anew."""
        self.forget_losses()
        if self.step_raised and self.managed and self.boundary is None:
            self.micro_steps -= self.micro_steps % self.micro_batches
        self.step_raised = False

    def forget_losses(self) -> None:
        """Forget the losses: a new step begins."""
        self.loss, self._plain_losses, self._lacks_loss = None, 0, False


class BackwardPass:
    """The backward pass of this rank. It calls the functions in `at_begin` and `at_end`."""

    def __init__(self, accumulation: Accumulation, scaler: StaticScale, device: torch.device) -> None:
        self.accumulation, self.scaler = accumulation, scaler
        # torch's module for an accelerator, whose streams may be captured into a graph; None: no accelerator
        self.accelerator = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
        self.at_begin: list[Callable[[], None]] = []
        self.at_end: list[Callable[[], None]] = []
        self.running = False
        self.failed = False  # a pass has raised since gradients were discarded, and left a part of its own
        # The pass is the step's last (accumulation boundary). A rank without any pass steps with the others,
        # so it begins with the value that their last pass has.
        self.is_boundary = accumulation.managed
        self.count = 0  # number of passes that produced gradients
        self.divided = False  # the loss was divided by the number of micro-batches...
        self.scaled = False  # ...and multiplied by the loss scale, by the engine or `scale`
        self.scaled_at_outputs = False  # or gradients were scaled when they reached the model's outputs
        self.divisor: float | None = None  # divisor of the gradients; None: no gradient has arrived yet
        self.graph_task: int | None = None  # autograd's id of the pass; None: not known yet
        # Number of the pass that reached a loss, and the loss; None: it reached several.
        self._reached: tuple[int, Tensor | None] | None = None

    def check_not_capturing(self) -> None:
        """Raise RuntimeError during a graph capture, because a replay would not run our hooks."""
        module = self.accelerator
        is_capturing = getattr(module, "is_current_stream_capturing", None)
        if module is not None and is_capturing is not None and module.is_initialized() and is_capturing():
            raise RuntimeError(NOT_CAPTURED)

    def begin(self, divided: bool, scaled: bool) -> None:
        """Start the pass: by a call of the engine, a hook on the model's output, or its first gradient."""
        for act in self.at_begin:
            act()
        now = current_backward()
        self.graph_task = now if now >= 0 else None
        self.running, self.divided, self.scaled, self.scaled_at_outputs = True, divided, scaled, False
        self.divisor = None
        self.is_boundary = self.accumulation.is_boundary()

    def end(self) -> None:
        """End the pass, and call `at_end`."""
        if current_backward() < 0 or (self._reached and self._reached[0] == self.graph_task):
            self._reached = None  # else it was a recomputed part
        self.running, self.graph_task = False, None
        for act in self.at_end:
            act()

    def fail(self) -> None:
        """End the pass after an exception, and note that it failed if it was running."""
        self.failed = self.failed or self.running
        self.end()

    # What autograd does --------------------------------------------------------------------------

    @staticmethod
    def inside_autograd() -> bool:
        """Return whether autograd is running in this thread, so that a forward is a recomputation."""
        return current_backward() >= 0

    def when_autograd_ends(self, act: Callable[[], None]) -> None:
        """Run `act` at the end of the autograd pass that this is called from; never outside of one."""
        if current_backward() >= 0:
            queue_backward_callback(act)

    def is_running_here(self) -> bool:
        """Return whether autograd is running this pass, and not a recomputed part of it."""
        return self.running and self.graph_task in (None, current_backward())

    def note_loss(self, loss: Tensor) -> None:
        """Note that autograd has reached a model output that is a loss."""
        now = current_backward()
        if self._reached is None or self._reached[0] != now:
            self._reached = now, loss
        elif self._reached[1] is not loss:
            self._reached = now, None
            # `note_gradient` has noted the first loss.
            if self.running and self.graph_task == now and self.divisor is not None:
                self._note_reached()

    def note_gradient(self) -> float:
        """Note a gradient, and return its divisor. Raises if it lacks the loss scale."""
        if self.graph_task is None:  # autograd has an id only once it is running
            self.graph_task = current_backward()
        if not (self.scaled or self.scaled_at_outputs) and self.scaler.scale != 1:
            raise RuntimeError(NOT_SCALED)
        if self.divisor is None:
            self.divisor = 1.0 if self.divided else self.accumulation.plain_divisor()
            self.count += 1
            if self._reached is not None and not self.divided:
                self._note_reached()
        return self.divisor

    def _note_reached(self) -> None:
        if self._reached is not None and self._reached[0] == self.graph_task and not self.divided:
            self.accumulation.add_plain_loss(self._reached[1])


# The losses of a pass ----------------------------------------------------------------------------


def watch_losses(backward: BackwardPass, outputs: Any) -> Any:
    """Call `backward.note_loss(loss)` when autograd reaches a loss among the outputs. Returns the outputs.

    A loss is a tensor without dimensions that requires gradients. If the outputs have several, each is
    replaced by a view of its own. One loss may be computed from another, whose gradients then flow from the
    first to the second and do not pass the second one's view.
    """
    if isinstance(outputs, Tensor):
        is_loss = outputs.requires_grad and outputs.dim() == 0
        return _watched(backward, False, outputs) if is_loss else outputs
    several = sum(map(_is_loss, leaves(outputs))) > 1
    return mapped(partial(_watched, backward, several), outputs)


def _watched(backward: BackwardPass, several: bool, output: Any) -> Any:
    if not _is_loss(output):
        return output
    output, loss = output.view_as(output) if several else output, output.detach()
    output.register_hook(lambda grad: backward.note_loss(loss))
    return output


def _is_loss(output: Any) -> bool:
    return isinstance(output, Tensor) and output.requires_grad and output.dim() == 0
