"""Numbers as blocks of integers, to look at: what the two operators make, taken apart."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_full.kernels.reference import payload_bytes, value_bytes

SLACK = 1 + 1e-4  # what fp32 adds to half a scale


class Integers(NamedTuple):
    """`numel` numbers as a payload."""

    payload: Tensor
    numel: int
    bits: int
    block: int

    @property
    def values(self) -> Tensor:
        """The integers' bytes."""
        return self.payload[: value_bytes(self.numel, self.bits)].view(torch.int8)

    @property
    def scales(self) -> Tensor:
        """A copy, because they may begin at any byte."""
        return self.payload[value_bytes(self.numel, self.bits) :].clone().view(torch.float32)


def numbers(seed: int, numel: int, dtype: torch.dtype = torch.float32, spread: float = 0) -> Tensor:
    """Normal numbers, times up to e**spread."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(numel, generator=generator).mul(spread).exp()
    return (torch.randn(numel, generator=generator) * sizes).to(dtype)


def quantize(ops: Any, numbers: Tensor, bits: int, block: int) -> Integers:
    """By `ops`: the compiled operators or the reference."""
    size = payload_bytes(numbers.numel(), bits, block)
    payload = torch.full((size,), 0xA5, dtype=torch.uint8)
    ops.quantize_blocks(numbers, payload, bits, block)
    return Integers(payload, numbers.numel(), bits, block)


def back(ops: Any, integers: Integers, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers again."""
    out = torch.full((integers.numel,), 7.0, dtype=dtype)
    ops.dequantize_blocks(integers.payload, out, integers.bits, integers.block, False)
    return out


def scale_of_each(flat: Tensor, bits: int, block: int) -> Tensor:
    """In fp64, one a number."""
    reaches = [part.double().abs().max().expand(part.numel()) for part in flat.split(block) if part.numel()]
    return torch.cat([*reaches, torch.empty(0)]).double() / (2 ** (bits - 1) - 1)
