"""ZeRO golf: your schedule. It works, and costs too much: `python -m lessons golf N` says how much.

Change when things happen and what is kept, not what comes out: hooks decide when gradients are sent, buckets
how many are sent at a time, and you when memory is freed. Everything in `zero_min` may be used; its stages
are par.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from zero_min.adam import Adam
from zero_min.comm import Comm


class Schedule:
    """One rank's training. The model has the same values on all ranks when it comes."""

    def __init__(self, model: nn.Module, comm: Comm, lr: float) -> None:
        self.model, self.comm = model, comm
        self.params = list(model.parameters())
        self.adam = Adam([{"params": self.params}], lr=lr)

    def step(self, losses: Sequence[Callable[[], Tensor]]) -> None:
        """One step. Each function runs the model on a micro-batch; what they return adds up to the loss."""
        for loss in losses:
            loss().backward()
        with torch.no_grad():
            for p in self.params:
                assert p.grad is not None, "this model uses all of them"
                p.grad = self.comm.all_reduce(p.grad) / self.comm.world_size
        self.adam.step()
        for p in self.params:
            p.grad = None

    def parameters(self) -> list[Tensor]:
        """The whole parameters, ordered as the model's. Asked for after the last step, and not counted."""
        return [*self.params]
