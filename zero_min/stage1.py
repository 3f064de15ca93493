"""Step 1. ZeRO stage 1: each rank keeps Adam's state for one slice of the parameters.

Adam works element by element, so nobody needs the averages of a parameter they do not update. All
parameters of a group become one flat tensor, cut into N equal slices wherever the cut falls (a weight
may be split between two ranks). Then a step is: give every slice its averaged gradient, let its owner
step it, and collect the new slices.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero_min.adam import Adam, Groups, clip_by_global_norm
from zero_min.comm import Comm
from zero_min.stage0 import gradient_or_zeros, master_of, trainable_groups


def round_robin_reorder(tensors: Sequence[Tensor], num_partitions: int) -> tuple[list[Tensor], list[int]]:
    """Deal the tensors out like cards: 0, N, 2N, ... then 1, N+1, ...

    Backward finishes gradients in order, so neighbours should belong to different owners. The second
    value says where each original tensor went.
    """
    # --8<-- [start:ex_reorder]
    dealt = [i for start in range(num_partitions) for i in range(start, len(tensors), num_partitions)]
    new_position = [0] * len(tensors)
    for position, original in enumerate(dealt):
        new_position[original] = position
    return [tensors[i] for i in dealt], new_position
    # --8<-- [end:ex_reorder]


def flatten_dense_tensors_aligned(tensors: Sequence[Tensor], alignment: int) -> Tensor:
    """One flat copy of all tensors, padded with as few zeros as make its length divisible."""
    # --8<-- [start:ex_flatten]
    numel = sum(t.numel() for t in tensors)
    padding = -numel % alignment
    return torch.cat([t.reshape(-1) for t in tensors] + [tensors[0].new_zeros(padding)])
    # --8<-- [end:ex_flatten]


def get_data_parallel_partitions(flat: Tensor, num_partitions: int) -> list[Tensor]:
    """Cut a flat tensor into views of near-equal length; the first ones are longer by one."""
    # --8<-- [start:ex_partition]
    base, remaining = divmod(flat.numel(), num_partitions)
    parts, start = [], 0
    for rank in range(num_partitions):
        size = base + 1 if rank < remaining else base
        parts.append(flat.narrow(0, start, size))
        start += size
    return parts
    # --8<-- [end:ex_partition]


class FlatGroup:
    """One parameter group as one flat tensor; the parameters become windows into it.

    `flat` is the whole, `mine` this rank's slice of it, and `master` what Adam steps: the slice itself, or
    an fp32 copy if the slice has 16 bits.
    """

    def __init__(self, params: Sequence[Tensor], comm: Comm, place: Callable[[Tensor], Tensor]) -> None:
        self.params, _ = round_robin_reorder(params, comm.world_size)
        self.flat = flatten_dense_tensors_aligned([p.data for p in self.params], comm.world_size)
        comm.broadcast(self.flat)  # all start from rank 0's values
        self.starts: list[int] = []  # where each parameter begins in the flat tensor
        start = 0
        for p in self.params:
            p.data = self.flat.narrow(0, start, p.numel()).view(p.shape)
            self.starts.append(start)
            start += p.numel()
        self.mine = get_data_parallel_partitions(self.flat, comm.world_size)[comm.rank]
        self.master = place(self.mine)
        self.grad: Tensor | None = None  # of `mine`, in stages that keep it from backward to the step


class Stage1:
    """Adam's state is sharded; parameters and gradients are whole on every rank."""

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
        param_groups = [group for group in trainable_groups(model, groups) if group["params"]]
        self.flats: Sequence[Any] = [FlatGroup(group["params"], comm, self.place) for group in param_groups]
        masters = [{**group, "params": [f.master]} for group, f in zip(param_groups, self.flats, strict=True)]
        self.optimizer = optimizer(masters, **options)  # two averages, but only for this rank's slices

    def place(self, mine: Tensor) -> Tensor:
        """What Adam steps, and where it lives: the own slice itself, or its fp32 master."""
        return master_of(mine)

    def backward(self, loss: Tensor) -> None:
        """Add this micro-batch's gradients; nothing travels yet."""
        loss.backward()

    # --8<-- [start:stage1_step]
    @torch.no_grad()
    def step(self) -> float | None:
        """Reduce to the owners, step the own slices, gather the parameters. Returns the clipped norm."""
        self.reduce_gradients()
        norm = self.clip_gradients()
        self.update()
        return norm

    def clip_gradients(self) -> float | None:
        """If there is a limit, scale the gradients down to it. Everyone has a slice, so everyone is asked."""
        if self.max_grad_norm is None:
            return None
        return clip_by_global_norm(self.master_gradients(), self.max_grad_norm, self.comm)

    def update(self) -> None:
        """Everyone steps their own slices, then all slices are exchanged."""
        self.optimizer.step()
        self.gather_parameters()

    # --8<-- [end:stage1_step]

    def master_gradients(self) -> list[Tensor]:
        """What Adam is about to use: the own slices'."""
        return [f.master.grad for f in self.flats if f.master.grad is not None]

    def reduce_gradients(self) -> None:
        """Give each rank the averaged gradient of its own slice, and of nothing else."""
        for f in self.flats:
            # --8<-- [start:ex_reduce]
            grads = [gradient_or_zeros(p) for p in f.params]
            flat_grad = flatten_dense_tensors_aligned(grads, self.comm.world_size)
            parts = get_data_parallel_partitions(flat_grad, self.comm.world_size)
            my_grad = self.comm.reduce_scatter(parts).div_(self.comm.world_size)  # (N-1)/N n
            f.master.grad = my_grad.to(f.master.dtype)
            # --8<-- [end:ex_reduce]

    def gather_parameters(self) -> None:
        """After the step every rank has new values for its slice only: exchange them, drop its gradient."""
        for f in self.flats:
            # --8<-- [start:ex_gather]
            f.mine.copy_(f.master)
            self.comm.all_gather(f.flat, f.mine)  # (N-1)/N n
            f.master.grad = None  # used up
            # --8<-- [end:ex_gather]

    def zero_grad(self) -> None:
        """Let go of the gradients."""
        for f in self.flats:
            f.grad = f.master.grad = None
            for p in f.params:
                p.grad = None

    def holdings(self) -> dict[str, list[Tensor | None]]:
        """What this rank keeps, by kind."""
        masters = [f.master for f in self.flats if f.master is not f.mine]
        return {
            "parameters": [*(f.flat for f in self.flats), *self.model.parameters()],
            "gradients": [
                g for f in self.flats for g in (f.grad, f.master.grad, *(p.grad for p in f.params))
            ],
            "optimizer": [*masters, *self.optimizer.state()],
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of a checkpoint."""
        model = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        masters = [f.master.clone() for f in self.flats]
        return {"model": model, "masters": masters, "adam": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this rank's part, saved at the same world size."""
        self.model.load_state_dict(state["model"])
        for f, saved in zip(self.flats, state["masters"], strict=True):
            f.master.copy_(saved)
        self.optimizer.load_state_dict(state["adam"])
