"""Step 6, first optimizer. 1-bit Adam: freeze the variance, then send only signs of the momentum.

The variance is not linear in the gradient, so it cannot be compressed. But after a warm-up it hardly
changes. From then on each rank adds its own gradient to the momentum, and the ranks average one bit of it.
Nothing is sharded here: this trades memory for traffic, the other way round than ZeRO.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zero_min.comm import Comm, WorldError
from zero_min.compression import CompressedMean
from zero_min.stage0 import gradient_or_zeros, trainable_groups
from zero_min.stage1 import FlatGroup, flatten_dense_tensors_aligned


class OneBitAdam:
    """Adam whose momentum travels compressed after `freeze_step` steps."""

    saved: tuple[str, ...] = ("steps", "variances")  # plain numbers that a checkpoint needs

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        freeze_step: int = 100,
        l1: bool = False,
    ) -> None:
        if freeze_step < 1:
            raise ValueError(f"freeze_step must be at least 1, not {freeze_step}: without a variance no step")
        self.model, self.comm, self.lr, self.betas = model, comm, lr, betas
        self.eps, self.weight_decay, self.freeze_step = eps, weight_decay, freeze_step
        (group,) = trainable_groups(model, None)
        if any(p.dtype not in (torch.float32, torch.float64) for p in group["params"]):
            raise ValueError("1-bit and 0/1 Adam step the parameters themselves: keep the model in fp32")
        self.group = FlatGroup(group["params"], comm, lambda mine: mine)
        self.x = self.group.flat  # all parameters; the model's are windows into it
        self.m, self.v = torch.zeros_like(self.x), torch.zeros_like(self.x)
        self.compressed = CompressedMean(comm, [p.numel() for p in self.group.params], self.x, l1)
        self.steps, self.variances = 0, 0  # v has its own count: it is not updated in every step

    def backward(self, loss: Tensor) -> None:
        """Add this micro-batch's gradients; nothing travels yet."""
        loss.backward()

    def gradient(self) -> Tensor:
        """This rank's whole gradient as one flat tensor."""
        grads = [gradient_or_zeros(p) for p in self.group.params]
        flat = flatten_dense_tensors_aligned(grads, self.comm.world_size)
        if not flat.isfinite().all():  # found before it spreads to everybody
            raise WorldError(f"rank {self.comm.rank}: its gradient contains inf or NaN")
        return flat

    # --8<-- [start:one_bit_step]
    @torch.no_grad()
    def step(self) -> None:
        """Average everything while v is learned; afterwards one bit of the momentum."""
        self.steps += 1
        g = self.gradient()
        if self.steps <= self.freeze_step:
            self.learn_variance(g)
        else:
            self.remember(g)
            self.m = self.quiet(self.compressed(self.m))
        self.move()

    def learn_variance(self, g: Tensor) -> None:
        """An ordinary Adam step's averages, of the gradient averaged in full precision."""
        self.variances += 1
        self.comm.all_reduce(g).div_(self.comm.world_size)  # 2(N-1)/N n
        self.v.mul_(self.betas[1]).addcmul_(g, g, value=1 - self.betas[1])
        self.remember(g)

    def remember(self, g: Tensor) -> None:
        """The momentum's share of this gradient."""
        self.m.mul_(self.betas[0]).add_(g, alpha=1 - self.betas[0])

    def rate(self) -> float:
        """The learning rate, corrected for a momentum that started at zero."""
        return self.lr / (1 - self.betas[0] ** self.steps)

    def spread(self) -> Tensor:
        """The root of the variance, corrected for the updates that v has really had."""
        return (self.v / (1 - self.betas[1] ** self.variances)).sqrt_().add_(self.eps)

    def move(self) -> None:
        """x steps along m over the spread, and shrinks by the decay."""
        self.x.mul_(1 - self.lr * self.weight_decay).addcdiv_(self.m, self.spread(), value=-self.rate())

    def quiet(self, m: Tensor) -> Tensor:
        """One bit cannot say zero: where v is zero no gradient was ever seen, so let nothing move."""
        return m.mul_(self.v > 0)

    # --8<-- [end:one_bit_step]

    def zero_grad(self) -> None:
        """Let go of the gradients."""
        for p in self.group.params:
            p.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """What the optimizer keeps between steps, by name."""
        errors = {"worker_error": self.compressed.worker_error, "server_error": self.compressed.server_error}
        return {"m": self.m, "v": self.v, **errors}

    def holdings(self) -> dict[str, list[Tensor | None]]:
        """What this rank keeps, by kind."""
        return {
            "parameters": [self.x, *self.model.parameters()],
            "gradients": [p.grad for p in self.group.params],
            "optimizer": list(self.tensors().values()),
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's checkpoint: everything, for errors and local steps differ from rank to rank."""
        model = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        numbers = {name: getattr(self, name) for name in self.saved}
        return {
            "model": model,
            "numbers": numbers,
            "tensors": {k: t.clone() for k, t in self.tensors().items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where this rank stopped, in whatever phase that was."""
        self.model.load_state_dict(state["model"])
        vars(self).update(state["numbers"])
        for name, tensor in self.tensors().items():
            tensor.copy_(state["tensors"][name])
