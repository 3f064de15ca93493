"""The GPT of the lessons in the sizes of real ones, made where it will be."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zero_min.gpt import GPT, GPTConfig


class Recomputed(nn.Module):
    """A block whose activations are computed a second time in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """What the block makes of x: (B, T, C)."""
        made: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return made


def gpt(config: GPTConfig, device: torch.device, recompute: bool = False) -> GPT:
    """The same values wherever the device is of one kind; on a CPU those of `GPT(config)`."""
    if device.type == "cpu":
        model = GPT(config)
    else:
        with torch.device("meta"):
            model = GPT(config)
        if device.type != "meta":
            model.to_empty(device=device)
            model.head.weight = model.characters.weight  # `to_empty` unties them
            generator = torch.Generator(device).manual_seed(0)
            for name, p in model.named_parameters():
                if p.dim() > 1:
                    nn.init.normal_(p, std=0.02, generator=generator)
                else:
                    nn.init.constant_(p, float("norm" in name and name.endswith("weight")))
    if recompute:
        model.blocks = nn.ModuleList(Recomputed(block) for block in model.blocks)
    return model
