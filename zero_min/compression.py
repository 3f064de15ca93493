"""Step 6, first half. One bit a value, and an error that is not forgotten.

`CompressedMean` averages a tensor over all ranks and sends only signs, eight to a byte, and one scale:
1/16 of what fp16 sends, 1/32 of fp32. What the signs got wrong is kept and added the next time, so errors
do not pile up, they only arrive late.
"""

import torch
from torch import Tensor

from zero_min.comm import Comm, WorldError

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


def compress(x: Tensor, error: Tensor, real: int, l1: bool = False) -> tuple[Tensor, Tensor]:
    """Signs and one scale for x plus the remembered error, which becomes what they get wrong now.

    Only the first `real` elements count, the rest is padding. The scale is the root mean square, or with
    `l1` the mean absolute value, which is the best single number in the sense of least squares.
    """
    # --8<-- [start:ex_compress]
    wanted = x + error
    size = max(real, 1)
    scale = wanted[:real].abs().sum() / size if l1 else wanted[:real].norm() / size**0.5
    scale = scale.float().to(x.dtype)  # it travels as fp32, so the error is counted with what arrives
    packed = pack_signs(wanted)
    error.copy_(wanted - scale * unpack_signs(packed, x.dtype))
    error[real:] = 0
    return packed, scale
    # --8<-- [end:ex_compress]


class CompressedMean:
    """The mean over ranks of a tensor of fixed length, with errors remembered on both ends."""

    def __init__(self, comm: Comm, numel: int, like: Tensor, l1: bool = False) -> None:
        self.comm, self.numel, self.l1 = comm, numel, l1
        N = comm.world_size
        self.chunk = -(-numel // (8 * N)) * 8  # each rank serves one chunk, a whole number of bytes
        self.worker_error = like.new_zeros(N * self.chunk)
        self.server_error = like.new_zeros(self.chunk)
        self.real_here = min(max(numel - comm.rank * self.chunk, 0), self.chunk)

    def __call__(self, x: Tensor) -> Tensor:
        """Sends 2(N-1) times chunk/8 + 4 bytes. With one rank there is nothing to send or to lose."""
        if self.comm.world_size == 1:
            return x.clone()
        padded = x.new_zeros(self.worker_error.numel())
        padded[: self.numel] = x
        packed, scale = compress(padded, self.worker_error, self.numel, self.l1)
        parts = [_with_scale(signs, scale) for signs in packed.chunk(self.comm.world_size)]
        received = self.comm.all_to_all(parts)  # everyone's signs of the chunk that I serve
        mean = sum((self._open(part, x.dtype, r) for r, part in enumerate(received)), x.new_zeros(self.chunk))
        packed, scale = compress(mean / self.comm.world_size, self.server_error, self.real_here, self.l1)
        mine = _with_scale(packed, scale)
        answers = mine.new_empty(self.comm.world_size * mine.numel())
        self.comm.all_gather(answers, mine)
        parts = list(answers.chunk(self.comm.world_size))
        return torch.cat([self._open(part, x.dtype, r) for r, part in enumerate(parts)])[: self.numel]

    def _open(self, part: Tensor, dtype: torch.dtype, rank: int) -> Tensor:
        scale = part[-4:].clone().view(torch.float32).to(dtype)
        if not scale.isfinite():
            raise WorldError(f"rank {rank} sent a scale of {scale.item()}: its gradients contain inf or NaN")
        return scale * unpack_signs(part[:-4], dtype)

    def forget(self) -> None:
        """Errors of one quantity must not be added to another."""
        self.worker_error.zero_()
        self.server_error.zero_()


def _with_scale(packed: Tensor, scale: Tensor) -> Tensor:
    return torch.cat([packed, scale.float().view(1).view(torch.uint8)])
