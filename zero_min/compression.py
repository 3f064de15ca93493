"""Step 6, first half. One bit a value, and an error that is not forgotten.

`CompressedMean` averages a tensor over all ranks and sends only signs, eight to a byte, and a scale for
each parameter: about 1/16 of what fp16 sends, 1/32 of fp32. What the signs got wrong is kept and added
the next time, so errors do not pile up, they only arrive late.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zero_min.comm import Comm, WorldError
from zero_min.stage2 import overlap

WEIGHTS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


def pack_signs(x: Tensor) -> Tensor:
    """Eight signs a byte; a bit is set where x >= 0, so zero counts as plus. x: (8k,) -> (k,)"""
    # --8<-- [start:ex_pack]
    bits = (x >= 0).view(-1, 8).to(torch.uint8)
    return (bits * WEIGHTS.to(x.device)).sum(1, dtype=torch.uint8)
    # --8<-- [end:ex_pack]


def unpack_signs(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The signs again, as +1 and -1. packed: (k,) -> (8k,)"""
    # --8<-- [start:ex_unpack]
    bits = (packed.unsqueeze(1) & WEIGHTS.to(packed.device)) != 0
    return bits.view(-1).to(dtype) * 2 - 1
    # --8<-- [end:ex_unpack]


def spread_out(scales: Tensor, sizes: Sequence[int], length: int) -> Tensor:
    """Every element's scale: piece i has sizes[i] elements, padding up to `length` has scale zero."""
    each = scales.repeat_interleave(torch.tensor(sizes, device=scales.device))
    return torch.cat([each, each.new_zeros(length - each.numel())])


def compress(x: Tensor, error: Tensor, sizes: Sequence[int], l1: bool = False) -> tuple[Tensor, Tensor]:
    """Signs, and one scale a piece, for x plus the remembered error, which becomes what they get wrong.

    The scale is the root mean square, or with `l1` the mean absolute value, which is the best single
    number in the sense of least squares. What lies behind the pieces is padding and owes nothing.
    """
    # --8<-- [start:ex_compress]
    wanted = x + error
    pieces = wanted[: sum(sizes)].split(list(sizes))
    if l1:
        scales = torch.stack([piece.abs().sum() / max(piece.numel(), 1) for piece in pieces])
    else:
        scales = torch.stack([piece.norm() / max(piece.numel(), 1) ** 0.5 for piece in pieces])
    scales = scales.float()  # this is what travels, so the error is counted with it
    packed = pack_signs(wanted)
    error.copy_(wanted - spread_out(scales.to(x.dtype), sizes, len(x)) * unpack_signs(packed, x.dtype))
    return packed, scales
    # --8<-- [end:ex_compress]


class CompressedMean:
    """The mean over ranks of tensors that lie one behind the other, with errors remembered on both ends."""

    def __init__(self, comm: Comm, sizes: Sequence[int], like: Tensor, l1: bool = False) -> None:
        self.comm, self.sizes, self.l1 = comm, list(sizes), l1
        N = comm.world_size
        self.chunk = -(-sum(sizes) // (8 * N)) * 8  # each rank serves one chunk, a whole number of bytes
        self.lengths = [self._lengths_in(rank) for rank in range(N)]  # of every piece, chunk by chunk
        self.worker_error = like.new_zeros(N * self.chunk)
        self.server_error = like.new_zeros(self.chunk)

    def _lengths_in(self, rank: int) -> list[int]:
        """How many elements of each piece lie in the chunk that `rank` serves."""
        lengths, start = [], 0
        for size in self.sizes:
            low, high = overlap(start, start + size, rank, self.chunk)
            lengths.append(high - low)
            start += size
        return lengths

    def __call__(self, x: Tensor) -> Tensor:
        """Sends 2(N-1) times chunk/8 bytes and the scales. One rank has nothing to send or to lose."""
        if self.comm.world_size == 1:
            return x.clone()
        real = sum(self.sizes)
        padded = torch.zeros_like(self.worker_error)
        padded[:real] = x[:real]
        result = torch.zeros_like(x)
        result[:real] = self.collect(self.serve(self.send(padded)))[:real]
        return result

    def send(self, x: Tensor) -> list[Tensor]:
        """First, everyone is a worker: to each server its chunk of my signs. Returns what came to me."""
        # --8<-- [start:ex_send]
        packed, scales = compress(x, self.worker_error, self.sizes, self.l1)
        messages = [_join(signs, scales) for signs in packed.chunk(self.comm.world_size)]
        return self.comm.all_to_all(messages)
        # --8<-- [end:ex_send]

    def serve(self, received: Sequence[Tensor]) -> Tensor:
        """Second, everyone is a server: one message from each rank in, the answer for my chunk out."""
        # --8<-- [start:ex_serve]
        lengths = self.lengths[self.comm.rank]
        mean = torch.zeros_like(self.server_error)
        for sender, message in enumerate(received):
            mean += self._open(message, lengths, sender) / self.comm.world_size
        return _join(*compress(mean, self.server_error, lengths, self.l1))
        # --8<-- [end:ex_serve]

    def collect(self, answer: Tensor) -> Tensor:
        """Third: all servers' answers, opened and in rank order, are the mean, on every rank."""
        # --8<-- [start:ex_collect]
        answers = answer.new_empty(self.comm.world_size * answer.numel())
        self.comm.all_gather(answers, answer)
        parts = answers.chunk(self.comm.world_size)
        return torch.cat([self._open(part, self.lengths[r], r) for r, part in enumerate(parts)])
        # --8<-- [end:ex_collect]

    def _open(self, part: Tensor, lengths: list[int], sender: int) -> Tensor:
        signs, scales = part[: self.chunk // 8], part[self.chunk // 8 :].clone().view(torch.float32)
        if not scales.isfinite().all():
            raise WorldError(f"rank {sender} sent a scale that is not finite: look for inf or NaN there")
        dtype = self.worker_error.dtype
        return spread_out(scales.to(dtype), lengths, self.chunk) * unpack_signs(signs, dtype)

    def forget(self) -> None:
        """Errors of one quantity must not be added to another."""
        self.worker_error.zero_()
        self.server_error.zero_()


def _join(packed: Tensor, scales: Tensor) -> Tensor:
    return torch.cat([packed, scales.view(torch.uint8)])
