"""Fewer bytes on the wire (ZeRO++): numbers travel as integers of 8 or 4 bits, a block of them at a scale.

[Note: nodes] The ranks of one node talk fast, those of different nodes slowly, so both collectives here
take two hops. A gather first crosses the nodes, between ranks of the same number on their nodes, and then
hands on inside the node what has come: each slice enters each node once, where a flat gather may send it
to every rank there. A reduction first sums inside the node and then crosses. Only a reduction rounds
twice: what is gathered is passed on as it came.

What crosses, in bytes: all that the ranks of one node send on `outer`. There are N nodes, and the unit is
what a node must be sent to hold M 16-bit numbers of which it holds its own part: 2 M (N - 1) / N bytes,
which the paper calls M. So 16-bit ZeRO-3 costs 3 (two gathers, one reduction), and here the forward gather
costs 0.5, a backward gather inside the node 0, the reduction 0.25; and 4 bytes more for each block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zero_full.comm.communicator import Communicator
from zero_full.comm.transport import own_slice

BLOCK = 2048  # numbers that share a scale: its four bytes are 1/512 of eight bits each, 1/256 of four
PIECE = {"cpu": 2**17}  # numbers in work at a time: few enough for the cache...
PIECE_ELSEWHERE = 2**24  # ...or many enough that starting kernels costs little
FINITE = torch.finfo(torch.float32)


class Piece(NamedTuple):
    """Where some numbers are that begin with a block and with a byte."""

    numbers: slice
    integers: slice
    scales: slice


class Quantized(NamedTuple):
    """`numel` numbers in a flat buffer of bytes: the integers, then an fp32 scale for each block of them.

    Four-bit integers are two to a byte, the first in the low half. A block with a number that is not finite
    has the scale NaN: all of it comes out as NaN.
    """

    payload: Tensor
    numel: int
    bits: int
    block: int

    @property
    def values(self) -> Tensor:
        """The integers' bytes."""
        return self.payload[: _value_bytes(self.numel, self.bits)].view(torch.int8)

    @property
    def scales(self) -> Tensor:
        """A copy, because they may begin at any byte."""
        return self.payload[_value_bytes(self.numel, self.bits) :].clone().view(torch.float32)

    def pieces(self) -> Iterator[Piece]:
        """All of it, a piece at a time."""
        at_once = PIECE.get(self.payload.device.type, PIECE_ELSEWHERE)
        step = max(1, at_once // (2 * self.block)) * 2 * self.block  # even, so that no byte is cut
        for low in range(0, self.numel, step):
            high = min(low + step, self.numel)
            values = slice(low * self.bits // 8, _value_bytes(high, self.bits))
            yield Piece(slice(low, high), values, slice(low // self.block, -(-high // self.block)))


def payload_bytes(numel: int, bits: int, block: int) -> int:
    """What so many numbers become."""
    return _value_bytes(numel, bits) + 4 * -(-numel // block)


def _value_bytes(numel: int, bits: int) -> int:
    return -(-numel * bits // 8)


def quantize(flat: Tensor, bits: int, block: int = BLOCK, payload: Tensor | None = None) -> Quantized:
    """Round to the nearest of the 2**bits - 1 multiples of a scale that reach as far as the block does.

    No number is off by more than half a scale. Written into `payload`, if given.
    """
    if bits not in (4, 8) or block < 1:
        raise ValueError(
            f"{bits} bits in blocks of {block}: bits are 4 or 8, and a block has a number or more"
        )
    if payload is None:
        size = payload_bytes(flat.numel(), bits, block)
        payload = torch.empty(size, dtype=torch.uint8, device=flat.device)
    result = Quantized(payload, flat.numel(), bits, block)
    scales = torch.empty(-(-flat.numel() // block), dtype=torch.float32, device=flat.device)
    for piece in result.pieces():
        rows = _in_rows(flat[piece.numbers], block)
        scales[piece.scales] = fitting = _scales(rows, 2 ** (bits - 1) - 1)
        rows.div_(fitting[:, None]).round_().nan_to_num_(0)  # 0 / 0 is NaN, too
        integers = rows.to(torch.int8).flatten()[: flat[piece.numbers].numel()]
        result.values[piece.integers] = integers if bits == 8 else _pack(integers)
    payload[result.values.numel() :] = scales.view(torch.uint8)
    return result


def dequantize(quantized: Quantized, out: Tensor, add: bool = False) -> Tensor:
    """Write the numbers to `out`, or add them to what is there."""
    scales = quantized.scales
    for piece in quantized.pieces():
        target = out[piece.numbers]
        integers = quantized.values[piece.integers]
        integers = integers if quantized.bits == 8 else _unpack(integers)[: target.numel()]
        rows = _in_rows(integers, quantized.block).mul_(scales[piece.scales, None])
        numbers = rows.flatten()[: target.numel()]
        if add:
            target.add_(numbers)
        else:
            target.copy_(numbers)
    return out


def _in_rows(flat: Tensor, block: int) -> Tensor:
    """An fp32 copy with a row for each block, the last one filled up with zeros."""
    blocks = -(-flat.numel() // block)
    rows = torch.empty(blocks * block, dtype=torch.float32, device=flat.device)
    rows[: flat.numel()] = flat
    rows[flat.numel() :] = 0
    return rows.view(blocks, block)


def _scales(rows: Tensor, largest: int) -> Tensor:
    """What makes `largest` the largest integer of each row; 0 for zeros, NaN if a number is not finite."""
    reach = rows.abs().amax(dim=1)
    # Far from where numbers lose bits, and not so far that the largest integer comes back as inf.
    scales = reach.div(largest).clamp_(FINITE.tiny, FINITE.max / largest * (1 - FINITE.eps))
    return scales.masked_fill_(reach == 0, 0).masked_fill_(~reach.isfinite(), float("nan"))


def _pack(integers: Tensor) -> Tensor:
    packed, high = integers[0::2] & 15, integers[1::2]
    packed[: high.numel()] |= high << 4
    return packed


def _unpack(packed: Tensor) -> Tensor:
    """The right shift brings the sign."""
    return torch.stack((packed << 4 >> 4, packed >> 4), dim=1).flatten()


@dataclass(frozen=True)
class Nodes:
    """The ranks as nodes of equal size: rank r is number r % inner.size of node r // inner.size.

    `inner` are the ranks of this node, `outer` those of the same number on all nodes. See [Note: nodes].
    """

    inner: Communicator
    outer: Communicator

    @classmethod
    def flat(cls, world: Communicator) -> "Nodes":
        """No two ranks share a node: everything takes one hop."""
        return cls(Communicator(None, world.device), world)

    @property
    def size(self) -> int:
        """Of all ranks."""
        return self.inner.size * self.outer.size

    @property
    def rank(self) -> int:
        """This rank's number among all."""
        return self.outer.rank * self.inner.size + self.inner.rank


class QuantizedGather:
    """An all-gather of eight-bit integers (`zero_quantized_weights`)."""

    def __init__(self, nodes: Nodes, bits: int = 8, block: int = BLOCK) -> None:
        self.nodes, self.bits, self.block = nodes, bits, block

    def all_gather(self, whole: Tensor, what: str) -> None:
        """Fill in everyone's slices, rounded: this rank's, too, so that all ranks hold the same bits.

        Who needs the exact values keeps them elsewhere. A rank that is alone rounds nothing.
        """
        nodes = self.nodes
        if nodes.size == 1:
            return
        mine = own_slice(whole, nodes.rank, nodes.size)
        size = payload_bytes(mine.numel(), self.bits, self.block)
        payload = torch.empty(nodes.size * size, dtype=torch.uint8, device=whole.device)
        column = nodes.inner.own(payload)  # by number on the node, then by node
        quantize(mine, self.bits, self.block, nodes.outer.own(column))
        nodes.outer.all_gather(column, what)
        nodes.inner.all_gather(payload, what)
        for place, came in enumerate(payload.view(nodes.size, size)):
            number, node = divmod(place, nodes.outer.size)
            target = own_slice(whole, node * nodes.inner.size + number, nodes.size)
            dequantize(Quantized(came, mine.numel(), self.bits, self.block), target)


class TwoHopReduce:
    """A reduce-scatter of four-bit integers (`zero_quantized_gradients`)."""

    def __init__(self, nodes: Nodes, bits: int = 4, block: int = BLOCK) -> None:
        self.nodes, self.bits, self.block = nodes, bits, block

    def reduce_scatter(self, whole: Tensor, out: Tensor, divisor: float, what: str) -> None:
        """`out` becomes the sum of everyone's slice for this rank over `divisor`, summed in fp32.

        What a rank has for itself is not rounded. `out` may lie in `whole`.
        """
        nodes = self.nodes
        slices = whole.view(nodes.outer.size, nodes.inner.size, whole.numel() // nodes.size)
        by_node = self._hop(nodes.inner, slices.transpose(0, 1), what)
        total = self._hop(nodes.outer, by_node[:, None], what)
        if divisor != 1:
            total.div_(divisor)
        out.copy_(total[0])

    def _hop(self, comm: Communicator, pieces: Tensor, what: str) -> Tensor:
        """Piece r of everyone's goes to rank r, which sums them. A piece is a row or more of numbers."""
        total = pieces[comm.rank].to(torch.float32, copy=True)
        if comm.size == 1:
            return total
        rows, numel = total.shape
        size = payload_bytes(numel, self.bits, self.block)
        sent = torch.empty(comm.size, rows, size, dtype=torch.uint8, device=total.device)
        received = torch.empty_like(sent)
        others = [(rank, row) for rank in range(comm.size) if rank != comm.rank for row in range(rows)]
        for place in others:
            quantize(pieces[place], self.bits, self.block, sent[place])
        comm.all_to_all(sent.view(-1), received.view(-1), what)
        for rank, row in others:
            came = Quantized(received[rank, row], numel, self.bits, self.block)
            dequantize(came, total[row], add=True)
        return total
