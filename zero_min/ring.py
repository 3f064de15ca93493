"""Step 1/2. Collectives made of `send` and `receive`: the ranks stand in a ring, and each talks to its right.

Cut the tensor into N pieces, one a rank. In every round each rank sends one piece to its right neighbour and
receives one from its left, so all N lines are busy all the time, and after N-1 rounds every piece has been
everywhere. Nothing here knows how many bytes that is: the ledger counts what `send` sends.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zero_min.comm import Comm
from zero_min.thread_comm import ThreadComm


def neighbours(comm: Comm) -> tuple[int, int]:
    """(left, right): whom this rank hears, and to whom it speaks."""
    # --8<-- [start:ex_neighbours]
    return (comm.rank - 1) % comm.world_size, (comm.rank + 1) % comm.world_size
    # --8<-- [end:ex_neighbours]


def reduce_scatter(comm: Comm, pieces: Sequence[Tensor]) -> Tensor:
    """The sum of everybody's piece number `rank`; `pieces` stay as they are.

    Piece j sets out at rank j + 1, is added to at every rank it visits, and comes home to rank j last.
    """
    N, rank, (left, right) = comm.world_size, comm.rank, neighbours(comm)
    # --8<-- [start:ex_reduce_scatter]
    total = pieces[(rank - 1) % N].clone()  # of the piece that sets out here
    for round in range(N - 1):
        comm.send(total, right)
        mine = pieces[(rank - 2 - round) % N]  # what the left neighbour passes on was one further left before
        total = comm.receive(mine, left) + mine
    return total
    # --8<-- [end:ex_reduce_scatter]


def all_gather(comm: Comm, pieces: Sequence[Tensor]) -> None:
    """Fill in everybody's piece. Before, only piece number `rank` is right; afterwards all are."""
    N, rank, (left, right) = comm.world_size, comm.rank, neighbours(comm)
    # --8<-- [start:ex_all_gather]
    for round in range(N - 1):
        comm.send(pieces[(rank - round) % N], right)  # my own first, then what has just come
        coming = pieces[(rank - 1 - round) % N]
        coming.copy_(comm.receive(coming, left))
    # --8<-- [end:ex_all_gather]


def all_reduce(comm: Comm, tensor: Tensor) -> Tensor:
    """The sum over all ranks, in place, on every rank; of any length."""
    # --8<-- [start:ex_all_reduce]
    pieces = tensor.view(-1).tensor_split(comm.world_size)  # views; the first may be longer by one
    pieces[comm.rank].copy_(reduce_scatter(comm, pieces))
    all_gather(comm, pieces)
    return tensor
    # --8<-- [end:ex_all_reduce]


class RingComm(ThreadComm):
    """A telephone whose collectives are these. `run_world(..., telephone=RingComm)` trains with it."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        return all_reduce(self, tensor)

    def reduce_scatter(self, parts: Sequence[Tensor], label: str = "") -> Tensor:
        """Sum part j over all ranks and give it to rank j alone."""
        return reduce_scatter(self, parts)

    def all_gather(self, whole: Tensor, mine: Tensor, label: str = "") -> Tensor:
        """Fill `whole` with every rank's `mine`, in rank order."""
        pieces = torch.chunk(whole.view(-1), self.world_size)  # equal ones
        pieces[self.rank].copy_(mine.view(-1))
        all_gather(self, pieces)
        return whole
