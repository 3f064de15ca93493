"""Step 0, on several ranks. Plain data parallelism: everyone holds everything.

This is the bill that ZeRO cuts: 16 bytes per parameter on every rank, however many ranks there are.
"""

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from zero_min.adam import Adam, Groups, clip_by_global_norm
from zero_min.comm import Comm

OWNED: WeakSet[nn.Module] = WeakSet()  # models with hooks of ours


def trainable_groups(model: nn.Module, groups: Groups | None) -> list[dict[str, Any]]:
    """The parameter groups without their frozen members, after a check of what sharding relies on."""
    names = {p: name for name, p in model.named_parameters()}
    groups = groups if groups is not None else [{"params": list(model.parameters())}]
    result: list[dict[str, Any]] = []
    seen: set[Tensor] = set()
    for group in groups:
        params = [p for p in group["params"] if p.requires_grad]
        strangers = [tuple(p.shape) for p in params if p not in names]
        if strangers:
            raise ValueError(f"a parameter of shape {strangers[0]} is in a group but not in the model")
        for p in params:
            if p in seen:
                raise ValueError(f"parameter {names[p]!r} is listed twice in the groups")
            if p.dtype != params[0].dtype:
                raise ValueError(
                    f"one group mixes dtypes: {names[params[0]]!r} is {params[0].dtype}, {names[p]!r} is "
                    f"{p.dtype}; give each dtype a group of its own"
                )
            seen.add(p)
        result.append({**group, "params": params})
    return result


def master_of(slice_: Tensor) -> Tensor:
    """What Adam steps: the parameters themselves in fp32, an fp32 copy (the master) of 16-bit ones."""
    return slice_ if slice_.dtype in (torch.float32, torch.float64) else slice_.detach().float()


def claim(model: nn.Module) -> None:
    """A model whose backward calls our hooks can have one trainer only; refuse a second."""
    if model in OWNED:
        raise ValueError(
            f"this {type(model).__name__} has a trainer already: make a new model for a new trainer"
        )
    OWNED.add(model)


def gradient_or_zeros(p: Tensor) -> Tensor:
    """The gradient; zeros where there is none, because the parameter may be used on another rank."""
    return torch.zeros_like(p, dtype=p.grad_dtype) if p.grad is None else p.grad


class Stage0:
    """Nothing is sharded: every rank holds parameters, gradients and Adam's state in full."""

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        groups: Groups | None = None,
        optimizer: type[Adam] = Adam,
        max_grad_norm: float | None = None,
        **options: Any,
    ) -> None:
        self.model, self.comm, self.max_grad_norm = model, comm, max_grad_norm
        param_groups = trainable_groups(model, groups)
        self.params: list[Tensor] = [p for group in param_groups for p in group["params"]]
        for p in self.params:
            p.data = comm.broadcast(p.data.contiguous())  # everyone starts from rank 0's values
        self.masters = {p: master_of(p) for p in self.params}  # what Adam steps
        masters = [{**group, "params": [self.masters[p] for p in group["params"]]} for group in param_groups]
        self.optimizer = optimizer(masters, **options)

    def backward(self, loss: Tensor) -> None:
        """Add this micro-batch's gradients; nothing travels yet."""
        loss.backward()

    # --8<-- [start:stage0_step]
    @torch.no_grad()
    def step(self) -> float | None:
        """Average the gradients, then make the same Adam step on every rank. Returns the clipped norm."""
        self.reduce_gradients()
        norm = self.clip_gradients()
        self.update()
        return norm

    def reduce_gradients(self) -> None:
        """Give everyone the averaged gradient of everything."""
        for p, master in self.masters.items():
            # --8<-- [start:ex_average]
            p.grad = gradient_or_zeros(p)
            self.comm.all_reduce(p.grad).div_(self.comm.world_size)  # 2(N-1)/N n
            # --8<-- [end:ex_average]
            if master is not p:
                master.grad = p.grad.to(master.dtype)

    def clip_gradients(self) -> float | None:
        """If there is a limit, scale the gradients down to it. Everyone has them all, so nobody is asked."""
        if self.max_grad_norm is None:
            return None
        return clip_by_global_norm(self.master_gradients(), self.max_grad_norm)

    def update(self) -> None:
        """Everyone steps everything, and so ends with the same values."""
        self.optimizer.step()
        for p, master in self.masters.items():
            if master is not p:
                p.copy_(master)
                master.grad = None

    # --8<-- [end:stage0_step]

    def master_gradients(self) -> list[Tensor]:
        """What Adam is about to use: here, on every rank, everything."""
        return [master.grad for master in self.masters.values() if master.grad is not None]

    def zero_grad(self) -> None:
        """Let go of the gradients."""
        for p, master in self.masters.items():
            p.grad = master.grad = None

    def holdings(self) -> dict[str, list[Tensor | None]]:
        """What this rank keeps, by kind."""
        return {
            "parameters": list(self.model.parameters()),
            "gradients": [p.grad for p in self.params],
            "optimizer": [*self.copies(), *self.optimizer.state()],
        }

    def copies(self) -> list[Tensor]:
        """The masters that are tensors of their own."""
        return [master for p, master in self.masters.items() if master is not p]

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of a checkpoint."""
        model = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        masters = [master.clone() for master in self.copies()]
        return {"model": model, "masters": masters, "adam": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this rank's part."""
        self.model.load_state_dict(state["model"])
        for master, saved in zip(self.copies(), state["masters"], strict=True):
            master.copy_(saved)
        self.optimizer.load_state_dict(state["adam"])
