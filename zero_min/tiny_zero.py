"""All three stages of ZeRO on one screen. Read this first.

Every rank runs this code on data of its own. A rank holds parameters, gradients, and Adam's two averages `m`
and `v`. The stages cut one after the other of them into N slices, of which a rank keeps one:

    stage 1: Adam's averages        stage 2: and the gradients        stage 3: and the parameters

The numbers that come out are those of plain Adam on everybody's data. In here all is fp32, the parameters are
one flat tensor, and the model is a function of it; `stage1.py` to `stage3.py` do the same for real models.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from zero_min.comm import Comm

LR, BETA1, BETA2, EPS = 1e-3, 0.9, 0.999, 1e-8
Loss = Callable[[Tensor], Tensor]  # from the parameters, and from this rank's data, to a number


def my_slice(flat: Tensor, comm: Comm) -> Tensor:
    """This rank's slice of a tensor whose length is a multiple of N, as a view."""
    return flat.chunk(comm.world_size)[comm.rank]


def reduce(grad: Tensor, comm: Comm) -> Tensor:
    """Add all ranks' gradients up, slice by slice: rank j gets the mean of slice j, and of no other."""
    return comm.reduce_scatter(grad.chunk(comm.world_size)) / comm.world_size


def gather(mine: Tensor, comm: Comm) -> Tensor:
    """Everybody's slices, one behind the other: the whole tensor, on every rank."""
    return comm.all_gather(mine.new_empty(comm.world_size * len(mine)), mine)


class Adam:
    """Adam for one slice: what it remembers is as long as the slice."""

    def __init__(self, mine: Tensor) -> None:
        self.m, self.v, self.steps = torch.zeros_like(mine), torch.zeros_like(mine), 0

    def step(self, mine: Tensor, grad: Tensor) -> None:
        """Move the slice, in place."""
        self.steps += 1
        self.m.mul_(BETA1).add_(grad, alpha=1 - BETA1)
        self.v.mul_(BETA2).addcmul_(grad, grad, value=1 - BETA2)
        m_scale, v_scale = 1 / (1 - BETA1**self.steps), 1 / (1 - BETA2**self.steps)
        mine.addcdiv_(self.m, (self.v * v_scale).sqrt_().add_(EPS), value=-LR * m_scale)


def gradient(loss: Loss, flat: Tensor) -> Tensor:
    """What autograd says of this rank's data."""
    flat = flat.detach().requires_grad_()
    (grad,) = torch.autograd.grad(loss(flat), flat)
    return grad


class Stage1:
    """Every rank steps one slice, so it needs Adam's averages of one slice."""

    def __init__(self, flat: Tensor, comm: Comm) -> None:
        self.flat, self.comm = flat, comm  # whole, on every rank
        self.mine = my_slice(flat, comm)  # a view: to step it is to step the model
        self.adam = Adam(self.mine)  # 8 bytes per parameter become 8/N

    def step(self, micro_batches: list[Loss]) -> None:
        """Add the micro-batches up, then reduce, step the slice, and gather the parameters."""
        grad = torch.zeros_like(self.flat)  # whole, from the first micro-batch to the last
        for loss in micro_batches:
            grad += gradient(loss, self.flat)
        self.adam.step(self.mine, reduce(grad, self.comm))  # (N-1)/N of the gradients are sent
        self.flat.copy_(gather(self.mine, self.comm))  # (N-1)/N of the parameters are sent


class Stage2(Stage1):
    """Only a slice of the gradients is ever needed, so only a slice is kept."""

    def step(self, micro_batches: list[Loss]) -> None:
        """Reduce after each micro-batch; what a rank remembers until the step is one slice."""
        grad = torch.zeros_like(self.mine)  # 4 bytes per parameter become 4/N
        for loss in micro_batches:
            grad += reduce(gradient(loss, self.flat), self.comm)  # (N-1)/N, every time
        self.adam.step(self.mine, grad)
        self.flat.copy_(gather(self.mine, self.comm))  # (N-1)/N


class Stage3:
    """The whole parameters are needed only while the model runs, so between that there are slices only."""

    def __init__(self, flat: Tensor, comm: Comm) -> None:
        self.comm = comm
        self.mine = my_slice(flat, comm).clone()  # a copy: nobody keeps the whole. 4 bytes become 4/N
        self.adam = Adam(self.mine)

    def step(self, micro_batches: list[Loss]) -> None:
        """Gather, use, let go. Real models do this layer by layer, and twice: forward, then backward."""
        grad = torch.zeros_like(self.mine)
        for loss in micro_batches:
            flat = gather(self.mine, self.comm)  # (N-1)/N; here once, for forward and backward
            grad += reduce(gradient(loss, flat), self.comm)  # (N-1)/N
            del flat
        self.adam.step(self.mine, grad)
