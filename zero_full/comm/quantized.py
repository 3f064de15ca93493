"""Fewer bytes on the wire (ZeRO++): numbers travel as integers of 8 or 4 bits, a block of them at a scale.

[Note: nodes] The ranks of one node talk fast, those of different nodes slowly, so both collectives here
take two hops. A gather first crosses the nodes, between ranks of the same number on their nodes, and then
hands on inside the node what has come: each slice enters each node once, where a flat gather may send it
to every rank there. A reduction first sums inside the node and then crosses. Only a reduction rounds
twice: what is gathered is passed on as it came.

What crosses, in bytes: all that the ranks of one node send on `outer`. There are N nodes, and the unit is
what a node must be sent to hold M 16-bit numbers of which it holds its own part: 2 M (N - 1) / N bytes,
which the paper calls M. So 16-bit ZeRO-3 costs 3 (two gathers, one reduction), and here the forward gather
costs 0.5, a backward gather inside the node 0, the reduction 0.25; and 4 bytes more for each block, and up to
15 that fill up a slice, so that each begins at a multiple of 16.
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

Gather = Callable[[Tensor, str], None]  # fill in the others' slices
BLOCK = 2048  # numbers that share a scale: its four bytes are 1/512 of eight bits each, 1/256 of four
QUANTIZABLE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Nodes:
    """Ranks on nodes of equal size: rank r is number r % inner.size of node r // inner.size.

    `inner` are the ranks of this node, `outer` those of the same number on all nodes. See [Note: nodes].
    """

    inner: Communicator
    outer: Communicator

    @classmethod
    def flat(cls, world: Communicator) -> "Nodes":
        """Nodes of one rank each, so that everything takes one hop."""
        return cls(Communicator(None, world.device), world)

    @property
    def size(self) -> int:
        """How many ranks there are."""
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
        """Fill in the slices of all ranks, rounded; this rank's too, so that all ranks hold the same bits.

        Who needs the exact values keeps them elsewhere. A rank that is alone rounds nothing.
        """
        nodes = self.nodes
        if nodes.size == 1:
            return
        mine = own_slice(whole, nodes.rank, nodes.size)
        size = payload_bytes(mine.numel(), self.bits, self.block)
        # By number on the node, then by node.
        sent = empty_payloads((nodes.inner.size, nodes.outer.size), size, whole.device)
        column = sent[nodes.inner.rank]
        operators(whole.device).quantize_blocks(mine, column[nodes.outer.rank, :size], self.bits, self.block)
        nodes.outer.all_gather(column.view(-1), what)
        nodes.inner.all_gather(sent.view(-1), what)
        targets = whole.view(nodes.outer.size, nodes.inner.size, mine.numel()).transpose(0, 1)
        operators(whole.device).dequantize_blocks(sent[..., :size], targets, self.bits, self.block, False)

    def or_exactly(self, exactly: Gather) -> Gather:
        """A gather that uses this one for floats of 32 and 16 bits, and `exactly` for all else."""

        def all_gather(whole: Tensor, what: str) -> None:
            (self.all_gather if whole.dtype in QUANTIZABLE else exactly)(whole, what)

        return all_gather


def empty_payloads(rows: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """Room for payloads, one a row; each row is filled up with zeros."""
    room = torch.empty(*rows, -(-size // ALIGNED) * ALIGNED, dtype=torch.uint8, device=device)
    room[..., size:].zero_()
    return room


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
        """Send piece r, of one row or more, to rank r; return the sum of all pieces for this rank."""
        total = pieces[comm.rank].to(torch.float32, copy=True)
        if comm.size == 1:
            return total
        rows, numel = total.shape
        size = payload_bytes(numel, self.bits, self.block)
        sent = empty_payloads((comm.size, rows), size, total.device)
        received = torch.empty_like(sent)
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
