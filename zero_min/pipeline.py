"""Bonus step. Pipeline parallelism: every rank has some of the layers, and micro-batches pass through them.

A batch is cut into micro-batches. A rank receives a micro-batch's activations from the rank before it, runs
its own layers and sends the result on; backward, gradients come the other way. In which order a rank does its
forwards and backwards is a schedule. It decides how many activations wait for their backward. How long ranks
stand idle, the bubble, depends on the number of micro-batches only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zero_min.adam import Adam
from zero_min.comm import Comm
from zero_min.gpt import GPT
from zero_min.stage0 import gradient_or_zeros

Order = list[tuple[str, int]]  # ("F", 2): the forward of micro-batch 2; ("B", 2): its backward


def cut_layers(layers: int, ranks: int) -> list[range]:
    """Which layers each rank has: neighbours, and as equal numbers as possible; the first ranks have more."""
    # --8<-- [start:ex_layers]
    size, more = divmod(layers, ranks)
    starts = [rank * size + min(rank, more) for rank in range(ranks + 1)]
    return [range(start, end) for start, end in pairwise(starts)]
    # --8<-- [end:ex_layers]


def gpipe(rank: int, ranks: int, micro_batches: int) -> Order:
    """All forwards, then all backwards."""
    # --8<-- [start:ex_gpipe]
    return [(what, i) for what in "FB" for i in range(micro_batches)]
    # --8<-- [end:ex_gpipe]


def one_f_one_b(rank: int, ranks: int, micro_batches: int) -> Order:
    """As few forwards as the ranks behind need to have work, then a forward and a backward in turn."""
    # --8<-- [start:ex_one_f_one_b]
    ahead = min(ranks - 1 - rank, micro_batches)
    order = [("F", i) for i in range(ahead)]
    for i in range(micro_batches - ahead):
        order += [("F", ahead + i), ("B", i)]
    return order + [("B", i) for i in range(micro_batches - ahead, micro_batches)]
    # --8<-- [end:ex_one_f_one_b]


class Stage(nn.Module):
    """One rank's layers of a GPT. The first stage embeds characters, the last one computes the loss."""

    def __init__(self, model: GPT, rank: int, ranks: int) -> None:
        super().__init__()
        if not 1 <= ranks <= len(model.blocks):
            raise ValueError(
                f"{ranks} ranks cannot share {len(model.blocks)} blocks: each needs one at least"
            )
        self.first, self.last = rank == 0, rank == ranks - 1
        self.blocks = nn.ModuleList(model.blocks[i] for i in cut_layers(len(model.blocks), ranks)[rank])
        if self.first:
            self.characters, self.positions = model.characters, model.positions
        if self.last:
            self.norm, self.head = model.norm, model.head  # whose weight is tied to that of `characters`

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """x: (B, T) characters on the first stage, else (B, T, C). Returns (B, T, C), at the end the loss."""
        if self.first:
            x = self.characters(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        if self.last:
            x = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())
        return x


class Pipeline:
    """A GPT whose blocks are dealt to the ranks. All ranks are given the same batches."""

    def __init__(
        self,
        model: GPT,
        comm: Comm,
        micro_batches: int,
        schedule: Callable[[int, int, int], Order] = one_f_one_b,
        **options: Any,
    ) -> None:
        self.comm, self.micro_batches, self.width = comm, micro_batches, model.config.width
        self.stage = Stage(model, comm.rank, comm.world_size)
        self.order = schedule(comm.rank, comm.world_size, micro_batches)
        self.kept: dict[int, tuple[Any, Tensor]] = {}  # input and output, until the backward
        self.most_kept = 0
        self.losses: list[Tensor] = []  # on the last stage
        self.optimizer = Adam([{"params": list(self.stage.parameters())}], **options)

    # --8<-- [start:pipeline_batch]
    def run(self, tokens: Tensor, targets: Tensor) -> float | None:
        """Gradients of the whole batch, in micro-batches; on the last stage also its loss."""
        if len(tokens) % self.micro_batches:
            raise ValueError(
                f"{len(tokens)} rows cannot be cut into {self.micro_batches} equal micro-batches"
            )
        self.tokens, self.targets = (x.chunk(self.micro_batches) for x in (tokens, targets))
        self.losses = []
        for what, i in self.order:
            if what == "F":
                self.forward(i)
            else:
                self.backward(i)
            self.most_kept = max(self.most_kept, len(self.kept))
        self.tie()
        return float(torch.stack(self.losses).mean()) if self.losses else None

    # --8<-- [end:pipeline_batch]

    def forward(self, i: int) -> None:
        """Run my layers on micro-batch i, send the result on, and keep what the backward needs."""
        tokens, rank = self.tokens[i], self.comm.rank
        like = torch.empty(*tokens.shape, self.width, dtype=next(self.stage.parameters()).dtype)
        # --8<-- [start:ex_forward]
        x = tokens if self.stage.first else self.comm.receive(like, rank - 1).requires_grad_()
        y = self.stage(x, self.targets[i])
        if not self.stage.last:
            self.comm.send(y, rank + 1)  # n
        self.kept[i] = x, y
        # --8<-- [end:ex_forward]
        if self.stage.last:
            self.losses.append(y.detach())

    def backward(self, i: int) -> None:
        """Add micro-batch i to my gradients, and send the gradient of its input back."""
        rank = self.comm.rank
        # --8<-- [start:ex_backward]
        x, y = self.kept.pop(i)
        if self.stage.last:
            (y / self.micro_batches).backward()
        else:
            y.backward(self.comm.receive(y, rank + 1))
        if not self.stage.first:
            self.comm.send(x.grad, rank - 1)  # n
        # --8<-- [end:ex_backward]

    def tie(self) -> None:
        """The embedding is also the output layer: its copies on both ends need the sum of their gradients."""
        first, last, rank = 0, self.comm.world_size - 1, self.comm.rank
        if first == last or rank not in (first, last):
            return
        weight = self.stage.characters.weight if rank == first else self.stage.head.weight
        other, grad = first + last - rank, gradient_or_zeros(weight)
        # --8<-- [start:ex_tie]
        self.comm.send(grad, other)  # n
        grad += self.comm.receive(grad, other)
        # --8<-- [end:ex_tie]

    def step(self) -> None:
        """Everyone steps their own layers."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Let go of the gradients."""
        for p in self.stage.parameters():
            p.grad = None

    def holdings(self) -> dict[str, list[Tensor | None]]:
        """What this rank keeps between steps, by kind."""
        params = list(self.stage.parameters())
        return {
            "parameters": [*params],
            "gradients": [p.grad for p in params],
            "optimizer": [*self.optimizer.state()],
        }


@dataclass(frozen=True)
class Box:
    """A forward or a backward of one micro-batch, from when to when."""

    what: str
    micro_batch: int
    start: float
    end: float


def replay(orders: Sequence[Order], forward: float = 1.0, backward: float = 2.0) -> list[list[Box]]:
    """When each rank does what, if it waits for messages only, and these take no time."""
    ended: dict[tuple[str, int, int], float] = {}  # of ("F", micro-batch, rank)
    rows: list[list[Box]] = [[] for _ in orders]
    left = [list(order) for order in orders]
    while any(left):
        done = len(ended)
        for rank, order in enumerate(left):
            while order:
                what, i = order[0]
                needs = [("F", i, rank - 1)] if what == "F" else [("F", i, rank), ("B", i, rank + 1)]
                needs = [need for need in needs if 0 <= need[2] < len(orders)]
                if any(need not in ended for need in needs):
                    break
                free = rows[rank][-1].end if rows[rank] else 0.0
                start = max([free, *(ended[need] for need in needs)])
                ended[what, i, rank] = end = start + (forward if what == "F" else backward)
                rows[rank].append(Box(what, i, start, end))
                order.pop(0)
        if len(ended) == done:
            stuck = ", ".join(f"rank {rank} at {order[0]}" for rank, order in enumerate(left) if order)
            raise ValueError(f"each rank waits for another one: {stuck}")
    return rows


def bubble(rows: Sequence[Sequence[Box]]) -> float:
    """The share of all ranks' time in which they stand idle, from the start to the end of the last box."""
    # --8<-- [start:ex_bubble]
    end = max(box.end for row in rows for box in row)
    busy = sum(box.end - box.start for row in rows for box in row)
    return 1 - busy / (len(rows) * end)
    # --8<-- [end:ex_bubble]
