"""Measure the activations of a pass: the bytes saved for backward, and the bytes at each moment of backward.

[Note: moments of a pass] Activations are freed while gradients appear, so their peaks must not be added. Two
runs share one clock: the model's own pass on fake tensors (here), and the simulated pass of the runtime
(`simulation.py`). A moment is the arrival of a parameter's gradient. Each run has its peak bytes between any
two moments, and the peak of a pass is the largest sum of the two. The simulated pass uses parameters in the
order in which gradients arrived here. A gradient counts here until it arrives, and there afterwards.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero_full._compat import FakeTensorMode, without_fake_tensor_log
from zero_full.errors import PlanError
from zero_full.nested import tensors_in
from zero_full.plan.memory_tracker import MemoryTracker
from zero_full.plan.user_frames import raised
from zero_full.plan.work import BACKWARD as BACKWARD_PASS
from zero_full.plan.work import WorkRecorder
from zero_full.precision.dtypes import Dtypes
from zero_full.shard.group.dtensors import is_dtensor, largest_shape, like, local_of

FORWARD, BACKWARD = "end of forward", "end of backward"  # moments that are no parameters
ALIVE = "alive"  # purpose of all storages


@dataclass(frozen=True)
class PassBytes:
    """Bytes of activations in one forward and backward."""

    saved: int  # between forward and backward
    # Each moment with the peak bytes since the one before. None: backward was impossible without values.
    moments: tuple[tuple[str, int], ...] | None

    @property
    def arrivals(self) -> list[str]:
        """Names of parameters in the order in which their gradients arrive; empty: unknown."""
        return [name for name, _ in self.moments or () if name not in (FORWARD, BACKWARD)]


def activations(model: nn.Module, inputs: Sequence[Tensor], dtypes: Dtypes) -> int:
    """Return the bytes that a forward pass saves for backward, with its inputs and outputs."""
    return pass_bytes(model, inputs, dtypes, has_backward=False).saved


def pass_bytes(
    model: nn.Module,
    inputs: Sequence[Tensor],
    dtypes: Dtypes,
    has_backward: bool = True,
    recorder: WorkRecorder | None = None,
) -> PassBytes:
    """Run forward and backward on fake tensors, and measure what is alive beside the model.

    Uses fake tensors instead of meta tensors. On the meta device, attention uses a kernel that saves all
    scores, unlike on a CPU or a GPU. `recorder`: records the operations of forward and of backward.
    """
    tracker = FakeTracker()
    with FakeTensorMode(), torch.device("cpu"), without_fake_tensor_log():
        state = {name: _like(t, dtypes.of(t.dtype, name)) for name, t in model.named_parameters()}
        for name, param in state.items():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(partial(_arrived, tracker, name))
        buffers = dtypes.of_buffers(model)
        state |= {name: _like(t, buffers[name]) for name, t in model.named_buffers()}
        probe = _Pass(model, tracker, has_backward, recorder)
        given = {f"model.{name}": t for name, t in state.items()}
        fake_inputs = tuple(_like(t, t.dtype) for t in inputs)
        with tracker, recorder or nullcontext(), tracker.counting(ALIVE):
            torch.func.functional_call(probe, given, fake_inputs)
        found = tracker.between_marks((ALIVE,))
    always = sum(t.nbytes for t in map(local_of, tensors_in(fake_inputs)))
    moments = tuple((name, size + always) for name, size in found) if probe.succeeded else None
    return PassBytes(probe.saved + always, moments)


class _Pass(nn.Module):
    """Runs a model forward and backward. Recomputed parts need the parameters in backward, too."""

    saved, succeeded = 0, False  # bytes alive after forward; there was a backward without an error

    def __init__(
        self, model: nn.Module, tracker: MemoryTracker, has_backward: bool, recorder: WorkRecorder | None
    ) -> None:
        super().__init__()
        self.model, self.tracker, self.has_backward = model, tracker, has_backward
        self.recorder = recorder

    def forward(self, *given: Tensor) -> None:
        """Run forward, and backward from the loss, or from all outputs if none is a loss."""
        outputs = _forward(self.model, given)
        self.saved = self.tracker.alive_bytes()
        self.tracker.mark(FORWARD)
        ends = [t for t in tensors_in(outputs) if t.requires_grad]
        ends = [t for t in ends if t.numel() == 1][:1] or ends
        if self.has_backward and run_backward(ends, self.recorder):
            self.tracker.mark(BACKWARD)
            self.succeeded = True


def run_backward(ends: Sequence[Tensor], recorder: WorkRecorder | None) -> bool:
    """Run backward from these tensors, without values. Returns whether that was possible.

    recorder  records the operations, or that they are unknown
    """
    if recorder is not None:
        recorder.begin(BACKWARD_PASS)
    why = "a backward, because no output requires a gradient"
    if ends:
        try:
            torch.autograd.backward(ends, [torch.empty_like(t) for t in ends])
            return True
        except Exception:  # of a function that needs values, for one: the plan is an upper bound
            why = "a backward that fails without values"
    if recorder is not None:
        recorder.work.unknown.add(why)
    return False


class FakeTracker(MemoryTracker):
    """Tracks fake tensors, which are on the CPU."""

    def _is_counted(self, tensor: Tensor) -> bool:
        return True


def _arrived(tracker: MemoryTracker, name: str, param: Tensor) -> None:
    param.grad = None
    tracker.mark(name)


def _like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    shape = largest_shape(tensor) if is_dtensor(tensor) else tensor.shape
    made = torch.empty(shape, dtype=dtype)
    return (like(tensor, made) if is_dtensor(tensor) else made).requires_grad_(tensor.requires_grad)


def _forward(model: nn.Module, given: tuple[Tensor, ...]) -> Any:
    try:
        return model(*given)
    except Exception as error:
        shapes = ", ".join(f"{'x'.join(map(str, t.shape))}:{t.dtype}".replace("torch.", "") for t in given)
        raise PlanError(
            f"the model's forward failed on {shapes} with {raised(error)}\n"
            "A plan runs forward without values, so forward must not depend on them. Without a batch, "
            "everything except activations is planned."
        ) from error
