"""Bonus step. Activations: what a forward keeps for its backward, and two ways to keep less on the device.

Between a forward and its backward autograd keeps tensors: inputs of layers, and some results. ZeRO does not
cut them, because each rank has a batch of its own. `checkpoint` keeps only the inputs of a piece of the
model and runs that piece once more in backward. `OffloadActivations` keeps everything, but on the host.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zero_min.gpt import GPT
from zero_min.offload import Host


def addresses(model: nn.Module) -> set[int]:
    """Where the parameters' storages are. Backward needs them, too, but they are there anyway."""
    return {p.untyped_storage().data_ptr() for p in model.parameters()}


class Meter(saved_tensors_hooks):
    """Inside the `with`, counts the bytes that forwards keep: each storage once, and no parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.kept: dict[int, int] = {}  # bytes of each storage, by its address
        super().__init__(self.pack, lambda tensor: tensor)

    def pack(self, tensor: Tensor) -> Tensor:
        """Autograd calls this with each tensor that it is about to keep, and keeps what is returned."""
        # --8<-- [start:ex_meter]
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in addresses(self.model):
            self.kept[memory.data_ptr()] = memory.nbytes()
        return tensor
        # --8<-- [end:ex_meter]

    def total(self) -> int:
        """Bytes that are kept."""
        return sum(self.kept.values())


class Checkpoint(torch.autograd.Function):
    """`run(*inputs)`, a tensor, of which only the inputs are kept. Backward calls `run` once more."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], handle: Tensor, *inputs: Tensor) -> Tensor:
        """Run without autograd, which never looks inside a `forward` like this one.

        What `again` needs is kept: `ctx.run`, the state of the host's generator as `ctx.random`, the inputs.
        """
        # --8<-- [start:ex_forward]
        ctx.run, ctx.random = run, torch.get_rng_state()
        ctx.save_for_backward(*inputs)
        return run(*inputs)
        # --8<-- [end:ex_forward]

    # --8<-- [start:checkpoint_backward]
    @staticmethod
    def again(ctx: Any) -> tuple[list[Tensor], Tensor]:
        """New leaves in the place of the inputs, and the output of the same run, this time with autograd."""
        # --8<-- [start:ex_again]
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.random)
            return inputs, ctx.run(*inputs)
        # --8<-- [end:ex_again]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Add to the gradients of the parameters in `run`; return one for each argument of `forward`."""
        # --8<-- [start:ex_backward]
        inputs, output = Checkpoint.again(ctx)
        output.backward(grad)
        return None, None, *(x.grad for x in inputs)
        # --8<-- [end:ex_backward]

    # --8<-- [end:checkpoint_backward]


def checkpoint(run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Run without keeping activations. `run` must do the same when it is called again."""
    handle = torch.empty(0, requires_grad=True)  # else backward never comes if no input asks for a gradient
    output: Tensor = Checkpoint.apply(run, handle, *inputs)  # type: ignore[no-untyped-call]
    return output


class Segment(nn.Module):
    """Layers in a row that are recomputed together."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def run(self, x: Tensor) -> Tensor:
        """x: (B, T, C), as for the layers."""
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        """The same, but only x is kept."""
        return checkpoint(self.run, x)


def in_segments(model: GPT, interval: int) -> GPT:
    """Have the model recompute its blocks in backward, so many at a time."""
    blocks = list(model.blocks)
    model.blocks = nn.ModuleList(
        Segment(blocks[start : start + interval]) for start in range(0, len(blocks), interval)
    )
    return model


def best_interval(layers: int, boundary: int, block: int) -> int:
    """How many layers to recompute at a time, for the fewest bytes at once in backward.

    Each segment keeps its input of `boundary` bytes. Of the segment that is recomputed each of its layers
    keeps `block` bytes. Of two answers that are as good, the smaller.
    """
    # --8<-- [start:ex_interval]
    return min(range(1, layers + 1), key=lambda each: -(-layers // each) * boundary + each * block)
    # --8<-- [end:ex_interval]


Packed = Tensor | tuple[Tensor, torch.Size, torch.device]


class OffloadActivations(saved_tensors_hooks):
    """Inside the `with`, what forwards keep waits on the host. Parameters and small tensors stay."""

    def __init__(self, model: nn.Module, host: Host, smallest: int = 1024) -> None:  # bytes
        self.model, self.host, self.smallest = model, host, smallest
        self.flying: Tensor | None = None
        super().__init__(self.pack, self.unpack)

    def copied(self, flat: Tensor) -> Tensor:
        """A copy on the host. The copy before has landed by now, so what it read may go."""
        self.host.wait()
        self.flying = flat
        return self.host.down(flat)

    def pack(self, tensor: Tensor) -> Packed:
        """Autograd calls this with each tensor that it is about to keep, and keeps what is returned."""
        # --8<-- [start:ex_to_host]
        at = tensor.untyped_storage().data_ptr()
        if at in addresses(self.model) or tensor.nbytes < self.smallest:
            return tensor
        return self.copied(tensor.reshape(-1)), tensor.shape, tensor.device
        # --8<-- [end:ex_to_host]

    def unpack(self, packed: Packed) -> Tensor:
        """Backward calls this with what `pack` has returned, when it needs the tensor."""
        # --8<-- [start:ex_from_host]
        if isinstance(packed, Tensor):
            return packed
        landed, shape, device = packed
        self.host.wait()
        here = landed.new_empty(landed.shape, device=device)
        self.host.up(landed, here)
        return here.view(shape)
        # --8<-- [end:ex_from_host]
