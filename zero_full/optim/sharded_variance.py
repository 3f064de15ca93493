"""The sharded variance of 0/1 Adam at stage 1, whose other state is whole on every rank.

[Note: sharded variance] A one-bit average gives every rank the whole result, so parameters, momentum and
local steps are whole on each. The variance changes only in steps with exact gradients and can be sharded.
Each rank keeps its shard in fp32 and the root of the whole in bf16, by which a step divides. When the
variance is due each rank updates its shard, and an all-gather distributes the new roots.

For n elements on N ranks that is 2n + 4n/N bytes instead of 4n, and 2n (N - 1)/N more bytes to send when the
variance is due. A step equals that of stage 0 to within the rounding of bf16, 1 part in 256. Gradients are
not reduce-scattered, because the momentum needs the exact gradient whole.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from zero_full.optim.one_bit import BufferLayout
from zero_full.optim.step import Peers, Piece

Corrected = Callable[[Piece], float]  # the bias correction of a piece's variance


class ShardedVariance:
    """This rank's shard of the variance, and the roots of all of it. See [Note: sharded variance]."""

    def __init__(self, layout: BufferLayout, peers: Peers) -> None:
        self.layout, self.peers = layout, peers
        rank, ranks = peers.place
        part = -(-layout.numel // ranks)
        self.start, self.stop = min(rank * part, layout.numel), min((rank + 1) * part, layout.numel)
        self.values = torch.zeros(self.stop - self.start, dtype=torch.float32, device=layout.device)
        self.roots = torch.zeros(part * ranks, dtype=torch.bfloat16, device=layout.device)

    def shards(self) -> Iterator[tuple[Piece, int, Tensor]]:
        """This rank's shard by pieces: the piece, the first of its elements, the values."""
        for piece, (start, stop) in zip(self.layout.pieces, self.layout.ranges, strict=True):
            first, last = max(start, self.start), min(stop, self.stop)
            if first < last:
                yield piece, first - start, self.values[first - self.start : last - self.start]

    def update(
        self, gradient_of: Callable[[Piece], Tensor | None], beta_of: Callable[[Piece], float]
    ) -> None:
        """Update this rank's shard with the averaged gradients of the pieces that have one."""
        for piece, first, values in self.shards():
            if (gradient := gradient_of(piece)) is not None:
                mine = gradient.reshape(-1)[first : first + values.numel()].float()
                values.mul_(beta_of(piece)).addcmul_(mine, mine, value=1 - beta_of(piece))

    def gather_roots(self, corrected: Corrected) -> None:
        """Distribute the new roots by an all-gather. Every rank must call this."""
        for piece, first, values in self.shards():
            at = self.layout.range_of[piece][0] + first
            self.roots[at : at + values.numel()].copy_((values / corrected(piece)).sqrt_())
        self.peers.all_gather(self.roots, "roots of the variance")

    def root(self, piece: Piece) -> Tensor:
        """The root of the variance of a whole piece, in fp32."""
        start, stop = self.layout.range_of[piece]
        return self.roots[start:stop].view(piece.master.shape).float()

    def load(self, whole: Mapping[Piece, Tensor], corrected: Corrected) -> None:
        """Take this rank's shard of these variances. Those of other pieces become zero."""
        self.values.zero_()
        self.roots.zero_()
        for piece, first, values in self.shards():
            if piece in whole:
                values.copy_(whole[piece].reshape(-1)[first : first + values.numel()])
        for piece, (start, stop) in zip(self.layout.pieces, self.layout.ranges, strict=True):
            if piece in whole:
                self.roots[start:stop].copy_((whole[piece].reshape(-1) / corrected(piece)).sqrt_())
