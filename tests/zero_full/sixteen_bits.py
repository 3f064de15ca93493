"""Mixed precision in plain PyTorch on one process, and what a rank of the real thing shows beside it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import zero_full
from tests.zero_full.runs import Net, data, fragments

STAGES = (0, 1, 2)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precise(NamedTuple):
    """Parameters as the model has them, and their masters; of the real thing this rank's pieces of those."""

    parameters: dict[str, Tensor]
    masters: Mapping[str, Any]


def by_hand(
    dtype: torch.dtype,
    world_size: int,
    scales: Sequence[float],
    micro_batches: int = 1,
    rounded: bool = False,
) -> Precise:
    """16-bit parameters and gradients; sums over ranks and micro-batches, master and AdamW in fp32.

    One loss scale for each step. `rounded`: the average, too, travels in 16 bits, as an all-reduce sends it.
    """
    model = Net()
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=0.01, weight_decay=0.1)
    model.to(dtype)
    for step, scale in enumerate(scales):
        for master in masters.values():
            master.grad = torch.zeros_like(master)
        for micro in range(micro_batches):
            for rank in range(world_size):
                model.zero_grad()
                (model(data(step, micro, rank, dtype)) / micro_batches * scale).backward()
                for name, p in model.named_parameters():
                    masters[name].grad += p.grad.float()
        for master in masters.values():
            master.grad /= world_size
            if rounded:
                master.grad = master.grad.to(dtype).float()
            master.grad /= scale
        optimizer.step()
        for name, p in model.named_parameters():
            p.data.copy_(masters[name])
    return Precise({name: p.detach().clone() for name, p in model.named_parameters()}, masters)


def pieces(engine: zero_full.Engine) -> dict[str, tuple[tuple[int, int], Tensor]]:
    """This rank's part of every master: (its range of elements, its values)."""
    saved = fragments(engine)
    return {name: (fragment["range"], fragment["master"].reshape(-1)) for name, fragment in saved.items()}


def together(parts: Iterable[Mapping[str, tuple[tuple[int, int], Tensor]]]) -> dict[str, Tensor]:
    """Whole masters, flat, out of every rank's pieces. What nobody has is NaN."""
    whole = {name: torch.full((p.numel(),), torch.nan) for name, p in Net().named_parameters()}
    for part in parts:
        for name, ((start, stop), values) in part.items():
            whole[name][start:stop] = values.float()
    return whole


class Line(nn.Module):
    """The gradient is the input."""

    def __init__(self, numel: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        return (self.weight * x.to(self.weight.dtype)).float().sum()


def snapshot(engine: zero_full.Engine) -> dict[str, Tensor]:
    """Copies of all that a step may change: parameters, masters, optimizer state and its counters."""
    found = {f"parameter {name}": p.detach().clone() for name, p in engine.named_parameters()}
    for name, fragment in fragments(engine).items():
        found[f"master {name}"] = fragment["master"]
        found |= {f"{key} of {name}": v for key, v in fragment["state"].items() if isinstance(v, Tensor)}
    return found
