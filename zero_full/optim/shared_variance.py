"""The variance where each rank keeps only its part of it: stage 1 of an optimizer whose other state is whole.

[Note: shared variance] Averages at one bit tell every rank everything, so parameters, momentum and walks must
be whole on each. The variance need not be: it changes only in steps with exact gradients. Each rank keeps its
N-th part in fp32, and all have the root of the whole in bf16, which is what a step divides by. When the
variance is due each rank updates its part, and one all-gather brings everyone the new roots.

For n elements on N ranks that is 2n + 4n/N bytes in the place of 4n, and 2n (N - 1)/N bytes more to send when
the variance is due. A step is as long as at stage 0 to within the rounding of bf16, 1 part in 256. Nothing is
reduced and scattered: the momentum needs the exact gradient whole as well.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from zero_full.optim.one_bit import Fused
from zero_full.optim.step import Peers, Piece

Corrected = Callable[[Piece], float]  # by what a piece's variance is divided


class SharedVariance:
    """See [Note: shared variance]."""

    def __init__(self, fused: Fused, peers: Peers) -> None:
        self.fused, self.peers = fused, peers
        rank, ranks = peers.place
        part = -(-fused.numel // ranks)
        self.start, self.stop = min(rank * part, fused.numel), min((rank + 1) * part, fused.numel)
        self.values = torch.zeros(self.stop - self.start, dtype=torch.float32, device=fused.device)
        self.roots = torch.zeros(part * ranks, dtype=torch.bfloat16, device=fused.device)

    def parts(self) -> Iterator[tuple[Piece, int, Tensor]]:
        """What this rank keeps: of which piece, from which of its elements on, and the values."""
        for piece, (start, stop) in zip(self.fused.pieces, self.fused.ranges, strict=True):
            first, last = max(start, self.start), min(stop, self.stop)
            if first < last:
                yield piece, first - start, self.values[first - self.start : last - self.start]

    def learn(self, gradient_of: Callable[[Piece], Tensor | None], beta_of: Callable[[Piece], float]) -> None:
        """This rank's part takes the averaged gradients of those pieces that have one."""
        for piece, first, values in self.parts():
            if (gradient := gradient_of(piece)) is not None:
                mine = gradient.reshape(-1)[first : first + values.numel()].float()
                values.mul_(beta_of(piece)).addcmul_(mine, mine, value=1 - beta_of(piece))

    def tell(self, corrected: Corrected) -> None:
        """Everyone has the new roots. Every rank must call this."""
        for piece, first, values in self.parts():
            at = self.fused.ranges[self.fused.place[id(piece)]][0] + first
            self.roots[at : at + values.numel()].copy_((values / corrected(piece)).sqrt_())
        self.peers.all_gather(self.roots, "roots of the variance")

    def root(self, piece: Piece) -> Tensor:
        """Of the whole piece."""
        start, stop = self.fused.ranges[self.fused.place[id(piece)]]
        return self.roots[start:stop].view(piece.master.shape).float()

    def absorb(self, whole: Mapping[int, Tensor], corrected: Corrected) -> None:
        """Take over variances of whole pieces, by their ids; what is not there is zero."""
        self.values.zero_()
        self.roots.zero_()
        for piece, first, values in self.parts():
            if id(piece) in whole:
                values.copy_(whole[id(piece)].reshape(-1)[first : first + values.numel()])
        for piece, (start, stop) in zip(self.fused.pieces, self.fused.ranges, strict=True):
            if id(piece) in whole:
                self.roots[start:stop].copy_((whole[id(piece)].reshape(-1) / corrected(piece)).sqrt_())
