"""The model of a case: blocks of one width, and the order in which forward uses them.

Nothing of the tests is imported here: a script that reproduces a mismatch has this file in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

IDS = 7  # rows of an embedding
BATCH = 4


@dataclass(frozen=True)
class Part:
    """A block of the model."""

    kind: str = "linear"
    tied: int | None = None  # its matrix is that of this part
    frozen: tuple[int, int] = (0, 0)  # from the first of these steps until before the second


@dataclass(frozen=True)
class Use:
    """One call of a part in forward, perhaps on one rank or in one micro-batch only."""

    part: int
    rank: int | None = None
    micro: int | None = None
    checkpoint: str = ""  # "reentrant" or "plain"


class Block(nn.Module):
    """One part."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "narrow":
            self.inner: nn.Module = nn.Sequential(nn.Linear(width, 3), nn.Tanh(), nn.Linear(3, width))
        elif kind == "norm":
            self.inner = nn.LayerNorm(width)
        elif kind == "embedding":
            self.inner = nn.Embedding(IDS, width)
        elif kind == "own":  # parameters of the block itself, one of them without dimensions
            self.gain, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.tensor(0.5))
        else:
            self.inner = nn.Linear(width, width, bias=kind != "empty")
        if kind == "empty":
            self.nothing = nn.Parameter(torch.ones(0, width))
        if kind == "transposed":
            self.inner.weight = nn.Parameter(self.inner.weight.detach().t().contiguous().t())

    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        """Of the same shape as `h`."""
        if self.kind == "own":
            return h * self.gain + self.shift
        if self.kind == "embedding":
            return h + self.inner(ids)
        more = self.inner(h)
        return h + torch.tanh(more + self.nothing.sum() if self.kind == "empty" else more)


class Net(nn.Module):
    """The parts in the order of their uses, and a head. Returns the loss."""

    def __init__(self, width: int, parts: Sequence[Part], uses: Sequence[Use], seed: int) -> None:
        super().__init__()
        self.uses = list(uses)
        self.parts = nn.ModuleList(Block(part.kind, width) for part in parts)
        self.head = nn.Linear(width, 3)
        for block, part in zip(self.parts, parts, strict=True):
            if part.tied is not None:
                block.inner.weight = self.parts[part.tied].inner.weight
        for number, p in enumerate(self.parameters()):
            drawn = torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * seed + number))
            p.data.copy_(drawn * (0.5 if p.dim() < 2 else 1.0 / max(p.shape) ** 0.5))

    def forward(self, x: Tensor, ids: Tensor, rank: int, micro: int) -> Tensor:
        """The loss of this rank's data."""
        h = x
        for use in self.uses:
            if use.rank in (None, rank) and use.micro in (None, micro):
                block = self.parts[use.part]
                if use.checkpoint:
                    h = checkpoint(block, h, ids, use_reentrant=use.checkpoint == "reentrant")
                else:
                    h = block(h, ids)
        return self.head(h).float().square().mean()


def cut(net: Net, parts: Sequence[Part], mesh: Any) -> None:
    """Cut layers by tensor parallelism: those with a matrix of their own that nobody else uses."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {}
    for number in cuttable(parts):
        if parts[number].kind == "narrow":  # 3 hidden features, which two ranks cut unequally
            plan[f"parts.{number}.inner.0"] = ColwiseParallel(use_local_output=False)
            plan[f"parts.{number}.inner.2"] = RowwiseParallel()
        else:
            plan[f"parts.{number}.inner"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(net, mesh, plan)


def cuttable(parts: Sequence[Part]) -> list[int]:
    """The parts that `cut` cuts."""
    targets = {part.tied for part in parts}
    return [
        number
        for number, part in enumerate(parts)
        if part.kind == "narrow" or (part.kind == "linear" and part.tied is None and number not in targets)
    ]


def whole(tensor: Any) -> Tensor:
    """The whole tensor of a DTensor; every rank of its mesh asks for it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def data(seed: int, step: int, micro: int, rank: int, width: int) -> tuple[Tensor, Tensor]:
    """Every (step, micro-batch, rank) has its own numbers."""
    generator = torch.Generator().manual_seed(((seed * 100 + step) * 10 + micro) * 10 + rank)
    x = torch.randn(BATCH, width, generator=generator)
    return x, torch.randint(IDS, (BATCH,), generator=generator)


def freeze(net: Net, parts: Sequence[Part], step: int) -> None:
    """Freeze and unfreeze what the parts want to be in this step."""
    for block, part in zip(net.parts, parts, strict=True):
        if part.frozen != (0, 0):
            block.requires_grad_(not part.frozen[0] <= step < part.frozen[1])
