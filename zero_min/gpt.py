"""The model and the text that every lesson, demo, test and notebook trains on.

A GPT in the shape of GPT-2, small enough for a laptop, that predicts the next character of the first
chapters of "Moby-Dick" (1851, public domain; see `data/README.md`).
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TEXT = Path(__file__).parent / "data" / "moby_dick.txt"


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model; the defaults make about 0.2 million parameters."""

    vocabulary: int = 76
    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 64


class Attention(nn.Module):
    """Every position looks at itself and at what came before."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, T, C)."""
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, heads, T, C/heads)
        out: Tensor = self.out(y.transpose(1, 2).reshape(B, T, C))
        return out


class Block(nn.Module):
    """Attention, then a two-layer network, each added to the stream it reads from."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, T, C)."""
        x = x + self.attention(self.norm1(x))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x


class GPT(nn.Module):
    """Characters in, loss out. The output layer is the embedding again: a tied weight."""

    def __init__(self, config: GPTConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.characters = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.characters.weight
        # Ranks may be threads, which share the global random generator: use one of our own.
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets: (B, T). The mean loss over all of them."""
        where = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.characters(tokens) + self.positions(where)  # (B, T, C)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@cache
def load_text() -> Tensor:
    """The whole text as numbers, one a character. Everybody gets the same tensor: only read it."""
    codes = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8)
    return torch.searchsorted(codes.unique(), codes)


def batch(text: Tensor, size: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows of the text, and the same windows one character later: (B, T) each."""
    starts = torch.randint(len(text) - context - 1, (size,), generator=generator)
    windows = torch.stack([text[start : start + context + 1] for start in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]
