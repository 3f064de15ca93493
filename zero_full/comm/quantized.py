"""ZeRO++: collectives of block-quantized tensors, with 8- or 4-bit integers and one scale per block.

[Note: nodes] Communication inside a node is fast and between nodes slow, so both collectives take two hops.
An all-gather first crosses nodes, between ranks of the same local rank, and then passes the payloads on
inside each node. So each slice enters each node once, where a flat all-gather may send it to every rank of
the node. A reduce-scatter first sums inside the node and then crosses nodes. Only the reduce-scatter rounds
twice: an all-gather passes payloads on unchanged.

Bytes between nodes, counted as all that the ranks of one node send on `outer`. With N nodes the unit is what
a node must receive to hold M 16-bit numbers of which it holds its own part: 2 M (N - 1) / N bytes, which the
paper calls M. So 16-bit ZeRO-3 costs 3 (two gathers, one reduction). Here the forward gather costs 0.5, a
backward gather inside the node 0, and the reduction 0.25. Scales add 4 bytes per block, and padding up to 15
bytes per slice, so that each slice begins at a multiple of 16.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_full.comm.chunks import ALIGNED
from zero_full.comm.communicator import Communicator
from zero_full.comm.transport import own_slice
from zero_full.kernels.load import operators
from zero_full.kernels.reference import payload_bytes
from zero_full.layout.flat import rounded_up

Gather = Callable[[Tensor, str], None]  # an all-gather of a flat buffer, and what it is for
BLOCK = 2048  # numbers that share a scale: its four bytes are 1/512 of eight bits each, 1/256 of four
QUANTIZABLE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Nodes:
    """Ranks on nodes of equal size: rank r has the local rank r % inner.size on node r // inner.size.

    `inner`: the ranks of this node. `outer`: those of the same local rank on all nodes. See [Note: nodes].
    """

    inner: Communicator
    outer: Communicator

    @classmethod
    def flat(cls, world: Communicator) -> "Nodes":
        """Return nodes of one rank each, so that each collective takes one hop."""
        return cls(Communicator(None, world.device), world)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.inner.size * self.outer.size

    @property
    def rank(self) -> int:
        """This rank among all `size`."""
        return self.outer.rank * self.inner.size + self.inner.rank


class QuantizedGather:
    """An all-gather of eight-bit integers (`zero_quantized_weights`)."""

    def __init__(self, nodes: Nodes, bits: int = 8, block: int = BLOCK) -> None:
        self.nodes, self.bits, self.block = nodes, bits, block

    def all_gather(self, whole: Tensor, what: str) -> None:
        """Fill in the slices of all ranks, rounded: also this rank's, so that all ranks hold the same bits.

        A caller that needs the exact values must keep a copy. A single rank rounds nothing.
        """
        nodes = self.nodes
        if nodes.size == 1:
            return
        mine = own_slice(whole, nodes.rank, nodes.size)
        size = payload_bytes(mine.numel(), self.bits, self.block)
        # Rows by local rank, then by node, so that each hop gathers contiguous memory.
        sent = empty_payloads((nodes.inner.size, nodes.outer.size), size, whole.device)
        column = sent[nodes.inner.rank]
        operators(whole.device).quantize_blocks(mine, column[nodes.outer.rank, :size], self.bits, self.block)
        nodes.outer.all_gather(column.view(-1), what)
        nodes.inner.all_gather(sent.view(-1), what)
        targets = whole.view(nodes.outer.size, nodes.inner.size, mine.numel()).transpose(0, 1)
        operators(whole.device).dequantize_blocks(sent[..., :size], targets, self.bits, self.block, False)

    def or_exactly(self, exactly: Gather) -> Gather:
        """Return an all-gather that quantizes 32- and 16-bit floats and calls `exactly` for other types."""

        def all_gather(whole: Tensor, what: str) -> None:
            (self.all_gather if whole.dtype in QUANTIZABLE else exactly)(whole, what)

        return all_gather


def empty_payloads(rows: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """Allocate memory for payloads, one per row, padded with zeros to a multiple of `ALIGNED`."""
    room = torch.empty(*rows, rounded_up(size, ALIGNED), dtype=torch.uint8, device=device)
    room[..., size:].zero_()
    return room


class TwoHopReduce:
    """A reduce-scatter of four-bit integers (`zero_quantized_gradients`)."""

    def __init__(self, nodes: Nodes, bits: int = 4, block: int = BLOCK) -> None:
        self.nodes, self.bits, self.block = nodes, bits, block

    def reduce_scatter(self, whole: Tensor, out: Tensor, divisor: float, what: str) -> None:
        """Sum this rank's slice of `whole` over all ranks into `out`, in fp32, divided.

        A rank's own contribution is not rounded. `out` may lie in `whole`.
        """
        nodes = self.nodes
        slices = whole.view(nodes.outer.size, nodes.inner.size, whole.numel() // nodes.size)
        by_node = self._hop(nodes.inner, slices.transpose(0, 1), what)
        total = self._hop(nodes.outer, by_node[:, None], what)
        if divisor != 1:
            total.div_(divisor)
        out.copy_(total[0])

    def _hop(self, comm: Communicator, pieces: Tensor, what: str) -> Tensor:
        """Send piece r, of one or more rows, to rank r. Returns the sum of the pieces for this rank."""
        total = pieces[comm.rank].to(torch.float32, copy=True)
        if comm.size == 1:
            return total
        rows, numel = total.shape
        size = payload_bytes(numel, self.bits, self.block)
        sent = empty_payloads((comm.size, rows), size, total.device)
        received = torch.empty_like(sent)
        # The slices before and behind this rank's own piece, which stays exact.
        others = [some for some in (slice(comm.rank), slice(comm.rank + 1, None)) if len(pieces[some])]
        for some in others:
            numbers = pieces[some] if pieces.dtype in QUANTIZABLE else pieces[some].float()
            operators(total.device).quantize_blocks(numbers, sent[some, :, :size], self.bits, self.block)
        comm.all_to_all(sent.view(-1), received.view(-1), what)
        for some in others:
            operators(total.device).dequantize_blocks(
                received[some, :, :size], total, self.bits, self.block, True
            )
        return total
