"""Bonus step. Tensor parallelism: the layers themselves are cut, and every rank computes a part of each.

All ranks read the same text. Of two layers that follow each other the first is cut by its outputs, the
second by its inputs. Each rank computes its part of what lies between, and nobody has to exchange it. What
the second layer computes on each rank is one term of a sum, and an all-reduce adds the terms up. So a block
has two all-reduces in forward, after its attention and after its two-layer network, and two in backward.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zero_min.adam import Adam
from zero_min.comm import Comm
from zero_min.gpt import GPT, Attention
from zero_min.stage0 import gradient_or_zeros


class Enter(torch.autograd.Function):
    """The way into layers that are cut: every rank has the same x, and computes its part with it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        """Nothing is exchanged: x is there already."""
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """`grad` is what this rank's part says about x. The gradient of x is the sum of what all say."""
        # --8<-- [start:ex_enter]
        return ctx.comm.all_reduce(grad.clone(memory_format=torch.contiguous_format)), None  # 2(N-1)/N n
        # --8<-- [end:ex_enter]


class Leave(torch.autograd.Function):
    """The way out of layers that are cut: every rank has one term of a sum, and gets the sum."""

    @staticmethod
    def forward(ctx: Any, term: Tensor, comm: Comm) -> Tensor:
        """The sum of every rank's term."""
        ctx.comm = comm  # as in Enter
        # --8<-- [start:ex_leave]
        return comm.all_reduce(term.clone(memory_format=torch.contiguous_format))  # 2(N-1)/N n
        # --8<-- [end:ex_leave]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """`grad`, of the sum, is the same on every rank. What is the gradient of this rank's term?"""
        # --8<-- [start:ex_back]
        return grad, None  # a term goes into the sum as it is; nothing is exchanged
        # --8<-- [end:ex_back]


def enter(x: Tensor, comm: Comm) -> Tensor:
    """x as it is; its gradient will be the sum over the ranks."""
    used: Tensor = Enter.apply(x, comm)  # type: ignore[no-untyped-call]
    return used


def leave(term: Tensor, comm: Comm) -> Tensor:
    """The sum of the ranks' terms."""
    total: Tensor = Leave.apply(term, comm)  # type: ignore[no-untyped-call]
    return total


def part_of(tensor: Tensor, dim: int, comm: Comm) -> nn.Parameter:
    """This rank's part of a tensor that is cut along one dimension, with memory of its own."""
    if tensor.shape[dim] % comm.world_size:
        raise ValueError(f"{comm.world_size} ranks cannot cut {tensor.shape[dim]} rows or columns evenly")
    return nn.Parameter(tensor.detach().chunk(comm.world_size, dim)[comm.rank].clone())


class ColumnLinear(nn.Module):
    """A linear layer that is cut by its outputs: from all of x this rank computes its part of y."""

    def __init__(self, weight: Tensor, bias: Tensor, comm: Comm) -> None:
        super().__init__()
        self.comm = comm
        # --8<-- [start:ex_columns]
        self.weight = part_of(weight, 0, comm)  # (out, in) -> (out/N, in): a row of it makes one output
        self.bias = part_of(bias, 0, comm)  # (out,) -> (out/N,)
        # --8<-- [end:ex_columns]

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in), whole. Returns (..., out/N)."""
        return F.linear(enter(x, self.comm), self.weight, self.bias)


class RowLinear(nn.Module):
    """A linear layer that is cut by its inputs: from its part of x this rank computes a term of all of y."""

    def __init__(self, weight: Tensor, bias: Tensor, comm: Comm) -> None:
        super().__init__()
        self.comm = comm
        self.weight = part_of(weight, 1, comm)  # (out, in) -> (out, in/N)
        self.bias = nn.Parameter(bias.detach().clone())  # whole, and the same on every rank

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in/N), this rank's part. Returns (..., out), the same on every rank."""
        # --8<-- [start:ex_rows]
        total = leave(F.linear(x, self.weight), self.comm)
        return total + self.bias  # once; inside the sum it would count N times
        # --8<-- [end:ex_rows]


def rank_by_rank(qkv: Tensor, ranks: int) -> Tensor:
    """Sort the rows of q, k and v, (3 C, ...): first q, k and v of rank 0's heads, then of rank 1's."""
    # --8<-- [start:ex_heads]
    by_part = qkv.view(3, ranks, qkv.shape[0] // (3 * ranks), -1)  # q, k or v; rank; row; what is in a row
    return by_part.transpose(0, 1).reshape(qkv.shape)
    # --8<-- [end:ex_heads]


class TensorAttention(nn.Module):
    """Attention with this rank's heads only. Heads do not look at each other, so they can be dealt out."""

    def __init__(self, whole: Attention, comm: Comm) -> None:
        super().__init__()
        N = comm.world_size
        if whole.heads % N:
            raise ValueError(f"{N} ranks cannot share {whole.heads} heads: a head must stay in one piece")
        self.heads = whole.heads // N
        self.qkv = ColumnLinear(rank_by_rank(whole.qkv.weight, N), rank_by_rank(whole.qkv.bias, N), comm)
        self.out = RowLinear(whole.out.weight, whole.out.bias, comm)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, T, C), whole. Between `qkv` and `out` there is a part of C only."""
        B, T, _ = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, heads/N, T, C/heads)
        out: Tensor = self.out(y.transpose(1, 2).reshape(B, T, -1))
        return out


# --8<-- [start:tensor_parallelize]
def parallelize(model: GPT, comm: Comm) -> GPT:
    """Cut the layers of every block, in place. Embeddings, norms and the output layer stay whole."""
    block: Any
    for block in model.blocks:
        block.attention = TensorAttention(block.attention, comm)
        block.up = ColumnLinear(block.up.weight, block.up.bias, comm)
        block.down = RowLinear(block.down.weight, block.down.bias, comm)
    return model


# --8<-- [end:tensor_parallelize]


def cut_parameters(model: nn.Module) -> list[Tensor]:
    """The parameters of which this rank has a part only. All others are whole, and equal on every rank."""
    found: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, ColumnLinear):
            found += [module.weight, module.bias]
        elif isinstance(module, RowLinear):
            found.append(module.weight)
    return found


def sum_of_squares(params: Iterable[Tensor]) -> Tensor:
    """Of all their gradients: one number."""
    squares = (gradient_or_zeros(p).double().square().sum() for p in params)
    return sum(squares, torch.zeros((), dtype=torch.float64))


def global_norm(model: nn.Module, comm: Comm) -> float:
    """The norm of all gradients of the whole model, the same number on every rank."""
    cut = cut_parameters(model)
    whole = [p for p in model.parameters() if p not in set(cut)]
    # --8<-- [start:ex_norm]
    of_cut, of_whole = sum_of_squares(cut), sum_of_squares(whole)
    comm.all_reduce(of_cut)  # every rank has the same `whole`, which counts once
    return float((of_cut + of_whole).sqrt())
    # --8<-- [end:ex_norm]


class TensorParallel:
    """Every rank steps what it has with Adam: its parts, and what is whole in the same way as all others."""

    def __init__(self, model: GPT, comm: Comm, max_grad_norm: float | None = None, **options: Any) -> None:
        self.model, self.comm, self.max_grad_norm = parallelize(model, comm), comm, max_grad_norm
        self.params = list(self.model.parameters())
        self.optimizer = Adam([{"params": self.params}], **options)

    def backward(self, loss: Tensor) -> None:
        """Nothing to do afterwards: the gradients of whole parameters are equal on all ranks already."""
        loss.backward()

    @torch.no_grad()
    def step(self) -> float | None:
        """Clip by the norm of the whole model, if there is a limit, and step. Returns that norm."""
        norm = None
        if self.max_grad_norm is not None:
            norm = global_norm(self.model, self.comm)
            for grad in (p.grad for p in self.params if p.grad is not None):
                grad.mul_(min(1.0, self.max_grad_norm / (norm + 1e-6)))
        self.optimizer.step()
        return norm

    def zero_grad(self) -> None:
        """Let go of the gradients."""
        for p in self.params:
            p.grad = None

    def holdings(self) -> dict[str, list[Tensor | None]]:
        """What this rank keeps, by kind."""
        return {
            "parameters": list(self.params),
            "gradients": [p.grad for p in self.params],
            "optimizer": list(self.optimizer.state()),
        }
