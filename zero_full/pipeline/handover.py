"""The handover between two stages: tensors in a form that torch's pipelining can send.

torch sends tensors whose shapes are known beforehand, and expects a gradient for each. A `Handover`
describes the value between two stages. Tensors that need no gradient, such as masks and positions, are sent
as the bytes of a float tensor, and get gradients of zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CARRIER = torch.float32  # dtype of bytes of other dtypes


@dataclass(frozen=True)
class Slot:
    """One tensor of a handover."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    def carrier(self, device: torch.device | str) -> Tensor:
        """Return an empty tensor of the shape and dtype that is sent."""
        if self.differentiable:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        return torch.empty(self._carrier_numel(), dtype=CARRIER, device=device)

    def _carrier_numel(self) -> int:
        return -(-self._nbytes() // CARRIER.itemsize)

    def _nbytes(self) -> int:
        numel = 1
        for size in self.shape:
            numel *= size
        return numel * self.dtype.itemsize

    def pack(self, tensor: Tensor) -> Tensor:
        """Return the tensor to send for a tensor of the handover."""
        if self.differentiable:
            return tensor.contiguous()
        sent = self.carrier(tensor.device)
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
        sent.view(torch.uint8)[: raw.numel()].copy_(raw)
        return sent

    def unpack(self, sent: Tensor) -> Tensor:
        """Restore the dtype and shape of a received tensor."""
        if self.differentiable:
            return sent
        raw = sent.detach().view(torch.uint8)[: self._nbytes()]
        return raw.clone().view(self.dtype).view(self.shape)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} of shape {self.shape}"


class _Join(torch.autograd.Function):
    """Autograd function: the identity of its first input. The other inputs get gradients of zero."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *others: Tensor) -> Tensor:
        """Return the first input."""
        ctx.others, ctx.joins_output = others, output.requires_grad
        return output.clone()  # torch 2.11 detaches outputs in place, which a view does not allow

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the first input, and zeros for the others."""
        zeros = (torch.zeros_like(other) for other in ctx.others)
        return (grads[0] if ctx.joins_output else None, *zeros)


def joined(outputs: tuple[Tensor, ...], received: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Make every sent output depend on an output with a gradient, and this on every received tensor.

    `received`: tensors in the form of bytes. The zero-bubble schedules of torch 2.11 start backward from
    every output, and ask for the gradient of every received tensor.
    """
    first = next((place for place, output in enumerate(outputs) if output.requires_grad), None)
    if first is None or not torch.is_grad_enabled():
        return outputs
    made = [*outputs]
    if received:
        made[first] = _Join.apply(made[first], *received)  # type: ignore[no-untyped-call]
    for place, output in enumerate(outputs):
        if not output.requires_grad:
            made[place] = _Join.apply(output, made[first])  # type: ignore[no-untyped-call]
    return tuple(made)


@dataclass(frozen=True)
class Handover:
    """The value between two stages: a tensor, or a tuple of tensors."""

    slots: tuple[Slot, ...]
    is_tuple: bool

    @classmethod
    def of(cls, value: Any, stage: int) -> "Handover":
        """Describe the output of a stage; TypeError if it cannot be sent."""
        is_tuple = isinstance(value, (tuple, list))
        tensors = [*value] if is_tuple else [value]
        for each in tensors:
            if not isinstance(each, Tensor) or each.layout is not torch.strided:
                kind = "a sparse tensor" if isinstance(each, Tensor) else type(each).__name__
                raise TypeError(
                    f"the last layer of stage {stage} returns {'a tuple with ' if is_tuple else ''}{kind}. "
                    "Between two stages a value must be a tensor or a tuple of tensors"
                )
        slots = tuple(Slot(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
        return cls(slots, is_tuple)

    def carriers(self, device: torch.device | str, requires_grad: bool = False) -> tuple[Tensor, ...]:
        """Return empty tensors of the shapes and dtypes that are sent."""
        return tuple(slot.carrier(device).requires_grad_(requires_grad) for slot in self.slots)

    def pack(self, value: Any, stage: int) -> tuple[Tensor, ...]:
        """Return the tensors to send; ValueError if they are not as in the first micro-batch."""
        tensors = [*value] if isinstance(value, (tuple, list)) else [value]
        now = Handover.of(value, stage)
        alike = [(s.shape, s.dtype) for s in now.slots] == [(s.shape, s.dtype) for s in self.slots]
        if not alike or now.is_tuple != self.is_tuple:
            raise ValueError(
                f"the last layer of stage {stage} returns {now}, but in the first micro-batch {self}. All "
                "micro-batches of a step must have the same shapes: pad them"
            )
        late = [s for s, before in zip(now.slots, self.slots, strict=True) if not before.differentiable]
        if any(slot.differentiable for slot in late):
            raise ValueError(
                f"the last layer of stage {stage} returns a tensor that requires a gradient, but did not in "
                "the first micro-batch. Return the same kinds of tensors for each micro-batch"
            )
        return tuple(slot.pack(tensor) for slot, tensor in zip(self.slots, tensors, strict=True))

    def unpack(self, sent: tuple[Tensor, ...]) -> Any:
        """Return the value of the received tensors."""
        tensors = tuple(slot.unpack(tensor) for slot, tensor in zip(self.slots, sent, strict=True))
        return tensors if self.is_tuple else tensors[0]

    def example(self, device: torch.device) -> Any:
        """Return a value of zeros, to find the shapes of the next stage."""
        made = tuple(
            torch.zeros(slot.shape, dtype=slot.dtype, device=device).requires_grad_(slot.differentiable)
            for slot in self.slots
        )
        return made if self.is_tuple else made[0]

    def __str__(self) -> str:
        return " and ".join(map(str, self.slots)) or "nothing"
