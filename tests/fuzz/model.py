"""The model of a case: blocks of one width, and the order in which forward uses them.

Nothing of the tests is imported here: a script that reproduces a mismatch has this file in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
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

    def __init__(self, kind: str, width: int, number: int) -> None:
        super().__init__()
        self.kind, self.number = kind, number
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
        self.parts = nn.ModuleList(Block(part.kind, width, number) for number, part in enumerate(parts))
        self.head = nn.Linear(width, 3)
        for block, part in zip(self.parts, parts, strict=True):
            if part.tied is not None:
                block.inner.weight = self.parts[part.tied].inner.weight
        for number, p in enumerate(self.parameters()):
            made = torch.Generator().manual_seed(1000 * seed + number)
            drawn = torch.randn(p.shape, generator=made, device="cpu")
            p.data.copy_(drawn * (0.5 if p.dim() < 2 else 1.0 / max(p.shape) ** 0.5))

    def forward(self, x: Tensor, ids: Tensor, rank: int, micro: int) -> Tensor:
        """The loss of this rank's data."""
        h = x
        for use in self.uses:
            if use.rank in (None, rank):
                h = used(use, self.parts[use.part], (h, ids, micro))[0]
        return loss_of(self.head(h))


def used(use: Use, block: nn.Module, inputs: tuple[Tensor, Tensor, Any]) -> tuple[Tensor, Tensor, Any]:
    """Call a block, if this is its micro-batch. `inputs`: h, ids and the micro-batch's number."""
    h, ids, micro = inputs
    if use.micro not in (None, int(micro)):
        return inputs
    if use.checkpoint:
        h = checkpoint(block, h, ids, use_reentrant=use.checkpoint == "reentrant")
    else:
        h = block(h, ids)
    return h, ids, micro


def loss_of(outputs: Tensor, labels: Any = None) -> Tensor:
    """The loss of the head's outputs."""
    return outputs.float().square().mean()


# The same model as a list of layers ---------------------------------------------------------------


class Layer(nn.Module):
    """One call of a part that no other layer calls."""

    def __init__(self, width: int, parts: Sequence[Part], use: Use, seed: int) -> None:
        super().__init__()
        self.block, self.use = block_of(width, parts, use.part, seed), use

    def forward(self, inputs: Any) -> Any:
        return used(self.use, self.block, inputs)


class Head(nn.Module):
    """The last layer."""

    def __init__(self, width: int, parts: Sequence[Part], seed: int) -> None:
        super().__init__()
        self.head = Net(width, parts, (), seed).head

    def forward(self, inputs: Any) -> Tensor:
        out: Tensor = self.head(inputs[0])
        return out


def block_of(width: int, parts: Sequence[Part], number: int, seed: int) -> Block:
    """A part with the values that it has in `Net`."""
    block = Net(width, parts, (), seed).parts[number]
    assert isinstance(block, Block)
    return block


def layers_of(width: int, parts: Sequence[Part], uses: Sequence[Use], seed: int) -> list[Any]:
    """The layers of a pipeline. A part that is used several times is tied."""
    from zero_full import LayerSpec, TiedLayerSpec

    made: list[Any] = []
    for use in uses:
        if [other.part for other in uses].count(use.part) > 1:
            key, call = f"part{use.part}", partial(used, use)
            made.append(TiedLayerSpec(key, block_of, width, parts, use.part, seed, forward_fn=call))
        else:
            made.append(LayerSpec(Layer, width, parts, use, seed))
    return [*made, LayerSpec(Head, width, parts, seed)]


class Layers(nn.Module):
    """The layers of a pipeline without one, with the same names of parameters."""

    def __init__(self, width: int, parts: Sequence[Part], uses: Sequence[Use], seed: int) -> None:
        super().__init__()
        self.layers, self.tied = nn.ModuleDict(), nn.ModuleDict()
        self.calls: list[Any] = []
        for number, spec in enumerate(layers_of(width, parts, uses, seed)):
            key = getattr(spec, "key", None)
            if key is None:
                self.layers[str(number)] = spec.build()
                self.calls.append(self.layers[str(number)])
                continue
            if key not in self.tied:
                self.tied[key] = spec.build()
            self.calls.append(partial(spec.forward_fn, self.tied[key]))

    def forward(self, x: Tensor, ids: Tensor, rank: int, micro: int) -> Tensor:
        """The loss of this rank's data."""
        inputs: Any = (x, ids, micro)
        for call in self.calls:
            inputs = call(inputs)
        return loss_of(inputs)


def pair(x: Tensor, ids: Tensor, micro: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """A micro-batch of a pipeline: inputs and labels, of which the loss needs none."""
    return (x, ids, torch.tensor(micro)), torch.zeros(())


def name_in_net(name: str, uses: Sequence[Use]) -> str:
    """The name in `Net` of a parameter of `layers_of`."""
    kind, place, rest = name.split(".", 2)
    if kind == "tied":
        return f"parts.{place.removeprefix('part')}.{rest}"
    if int(place) == len(uses):
        return rest
    return f"parts.{uses[int(place)].part}.{rest.removeprefix('block.')}"


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


def freeze(net: nn.Module, parts: Sequence[Part], step: int) -> None:
    """Freeze and unfreeze what the parts want to be in this step."""
    for block in net.modules():
        if isinstance(block, Block) and parts[block.number].frozen != (0, 0):
            block.requires_grad_(not is_frozen(parts[block.number], step))


def is_frozen(part: Part, step: int) -> bool:
    """Whether it is frozen in this step."""
    return part.frozen[0] <= step < part.frozen[1]
