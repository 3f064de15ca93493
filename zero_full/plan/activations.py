"""Measure the activations that a forward pass saves for backward."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero_full._compat import FakeTensorMode, identity_of, without_fake_tensor_log
from zero_full.errors import PlanError
from zero_full.nested import mapped
from zero_full.plan.user_frames import raised
from zero_full.precision.dtypes import Dtypes
from zero_full.shard.group.dtensors import is_dtensor, largest_shape, like, local_of


def activations(model: nn.Module, inputs: Sequence[Tensor], dtypes: Dtypes) -> int:
    """Return the bytes that a forward pass saves for backward, with its inputs and outputs.

    Uses fake tensors instead of meta tensors. On the meta device, attention uses a kernel that saves all
    scores, unlike on a CPU or a GPU.
    """
    seen: dict[int, torch.UntypedStorage] = {}
    weights: dict[int, torch.UntypedStorage] = {}

    def record(into: dict[int, torch.UntypedStorage], value: Any) -> Any:
        if isinstance(value, Tensor):
            storage = local_of(value).untyped_storage()
            into[identity_of(storage)] = storage  # kept alive, so that its identity is not reused
        return value

    with FakeTensorMode(), torch.device("cpu"):
        state = {name: _like(t, dtypes.of(t.dtype, name)) for name, t in model.named_parameters()}
        buffers = dtypes.of_buffers(model)
        state |= {name: _like(t, buffers[name]) for name, t in model.named_buffers()}
        fake_inputs = tuple(_like(t, t.dtype) for t in inputs)
        mapped(partial(record, weights), state)
        mapped(partial(record, seen), fake_inputs)
        with torch.autograd.graph.saved_tensors_hooks(partial(record, seen), lambda saved: saved):
            outputs = _forward(model, state, fake_inputs)
        mapped(partial(record, seen), outputs)
    return sum(storage.nbytes() for key, storage in seen.items() if key not in weights)


def _like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    shape = largest_shape(tensor) if is_dtensor(tensor) else tensor.shape
    made = torch.empty(shape, dtype=dtype)
    return (like(tensor, made) if is_dtensor(tensor) else made).requires_grad_(tensor.requires_grad)


def _forward(model: nn.Module, state: dict[str, Tensor], given: tuple[Tensor, ...]) -> Any:
    try:
        with without_fake_tensor_log():
            return torch.func.functional_call(model, state, given)
    except Exception as error:
        shapes = ", ".join(f"{'x'.join(map(str, t.shape))}:{t.dtype}".replace("torch.", "") for t in given)
        raise PlanError(
            f"the model's forward failed on {shapes} with {raised(error)}\n"
            "A plan runs forward without values, so forward must not depend on them. Without a batch, "
            "everything except activations is planned."
        ) from error
