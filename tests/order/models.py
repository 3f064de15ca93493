"""Models of a few layers, each with something that a runtime may get wrong."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.order.device import DEVICE
from tests.order.trace import Recorder, SimStream

WIDTH, DEPTH = 6, 4


class Layer(nn.Module):
    """A linear layer."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return torch.tanh(self.linear(x)) + x


class Model(nn.Module):
    """Layers. The mean square of what comes out is the loss.

    tied         the last layer has the first one's weight
    recomputed   activations are computed again for backward
    changing     every second call leaves out the last layers, so that what was prefetched is not used
    borrowing    the last layer's weight is read by the model itself, too
    two streams  the last two layers run beside each other, one on a stream of the user's
    uneven       the second rank leaves out the last layer
    again        the first layer is called twice; one parameter a bucket, so that no second one hides a loss
    """

    def __init__(self, kind: str, me: int, recorder: Recorder, depth: int = DEPTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(bias=kind != "again") for _ in range(depth))
        self.kind, self.me, self.calls = kind, me, 0
        self.kept: list[Tensor] = []  # what two streams use: an allocator knows of one only
        self.beside = recorder.stream("the user's") if kind == "two streams" else None
        if kind == "tied":
            self.layers[-1].linear.weight = self.layers[0].linear.weight
        generator = torch.Generator().manual_seed(0)
        for p in self.parameters():
            p.data.copy_(torch.randn(p.shape, generator=generator) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        self.calls += 1
        upto = len(self.layers)
        if self.kind == "changing" and self.calls % 2 == 0:
            upto -= 2
        if self.kind == "uneven" and self.me == 1:
            upto -= 1
        if self.kind == "again":
            x = self.layers[0](x)
        if self.kind == "borrowing":
            x = x @ self.layers[-1].linear.weight
        for number, layer in enumerate(self.layers[:upto]):
            if self.kind == "recomputed":
                # Not compared: inside some functions torch itself looks at where tensors really are.
                x = checkpoint(layer, x, use_reentrant=False, determinism_check="none")
            elif self.beside is not None and number >= DEPTH - 2:
                return self._side_by_side(self.beside, x).float().square().mean()
            else:
                x = layer(x)
        return x.float().square().mean()

    def _side_by_side(self, stream: SimStream, x: Tensor) -> Tensor:
        """Two layers of the same input: one on this stream, one on another. As torch's autograd does it.

        What is made last has its backward first.
        """
        recorder, (here, there) = stream.recorder, self.layers[-2:]
        stay = here(_Meeting.apply(x, stream))  # type: ignore[no-untyped-call]
        stream.wait_stream(recorder.current())
        away = there(_Switch.apply(x, stream, self.kept, True))  # type: ignore[no-untyped-call]
        away = _Switch.apply(away, stream, self.kept, False)  # type: ignore[no-untyped-call]
        recorder.current().wait_stream(stream)
        return stay + away  # type: ignore[no-any-return]


class _Meeting(torch.autograd.Function):
    """The identity; in backward this stream's gradient is added to the other stream's, and waits for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stream: SimStream) -> Tensor:
        """The same values."""
        ctx.stream = stream
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """The same values."""
        ctx.stream.recorder.current().wait_stream(ctx.stream)
        return grads[0], None


class _Switch(torch.autograd.Function):
    """What follows is queued on another stream, or here again; in backward the other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stream: SimStream, kept: list[Tensor], enters: bool) -> Tensor:
        """The same values."""
        ctx.stream, ctx.kept, ctx.enters = stream, kept, enters
        kept.append(x.detach())
        stream.__enter__() if enters else stream.__exit__()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """The same values."""
        ctx.kept.append(grads[0])
        if ctx.enters:
            ctx.stream.__exit__()
        else:
            ctx.stream.wait_stream(ctx.stream.recorder.current())
            ctx.stream.__enter__()
        return grads[0], None, None, None


def data(step: int, micro: int, dtype: torch.dtype) -> Tensor:
    """Numbers by a formula: a generator would go on from one playback to the next."""
    numbers = torch.arange(1 + micro, 1 + micro + 3 * WIDTH, device=DEVICE)
    return numbers.mul(1 + step).sin().view(3, WIDTH).to(dtype)
