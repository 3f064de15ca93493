"""Bonus step. Muon under ZeRO: a rule that must see whole matrices, on slices that are cut anywhere.

Muon moves a hidden matrix along its momentum after making that orthogonal: its singular values become about
1. Half of a matrix, made orthogonal, is not half of the matrix made orthogonal. So in every step each matrix
visits one rank, its owner: all send it their pieces of the momentum, it works on the whole, and everyone gets
back what belongs to their pieces. AdamW moves the rest of the model, and all but the update is stage 2's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero_min.adam import AdamW, Groups
from zero_min.comm import Comm
from zero_min.stage2 import Stage2, overlap

BETA = 0.95  # of the momentum
A, B, C = 3.4445, -4.7750, 2.0315  # s -> A s + B s^3 + C s^5 brings every s in (0, 1] near to 1, step by step


def orthogonalize(matrix: Tensor, steps: int = 5) -> Tensor:
    """The same singular vectors, but singular values that are all about 1; in bf16. (r, c) -> (r, c)"""
    # --8<-- [start:ex_orthogonalize]
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16()
    x = x.T if is_tall else x  # (small, large)
    x = x / x.norm().clamp(min=1e-7)  # no singular value is above 1 now
    for _ in range(steps):
        gram = x @ x.T  # (small, small)
        factor = torch.addmm(gram, gram, gram, beta=B, alpha=C)  # B gram + C gram gram
        x = torch.addmm(x, factor, x, beta=A)  # A x + factor x
    return x.T if is_tall else x
    # --8<-- [end:ex_orthogonalize]


def work(shape: Sequence[int]) -> int:
    """Multiplications in one of the steps above: two products as long as the matrix, and one small square."""
    # --8<-- [start:ex_work]
    small, large = sorted(shape)
    return small * small * (2 * large + small)
    # --8<-- [end:ex_work]


def choose_owners(shapes: Sequence[Sequence[int]], world_size: int) -> list[int]:
    """Who works on each matrix: the one with the most work first, each to the rank that has least so far."""
    # --8<-- [start:ex_owners]
    loads, owners = [0] * world_size, [0] * len(shapes)
    for i in sorted(range(len(shapes)), key=lambda i: -work(shapes[i])):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += work(shapes[i])
    return owners
    # --8<-- [end:ex_owners]


class MuonState(AdamW):
    """What a rank remembers of its slices: AdamW's two averages, but of hidden matrices only the momentum."""

    def __init__(self, groups: Groups, **options: Any) -> None:
        matrices, *rest = groups
        super().__init__(rest, **options)
        (slice_,) = matrices["params"]
        self.momentum = self.m[slice_] = torch.zeros_like(slice_)

    def state_dict(self) -> dict[str, Any]:
        """As AdamW's, and the momentum."""
        return {**super().state_dict(), "momentum": self.momentum.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`'s answer."""
        super().load_state_dict(state)
        self.momentum.copy_(state["momentum"])


def hidden_matrices(model: nn.Module) -> list[Tensor]:
    """What Muon is for: two dimensions, and no embedding (nor an output layer that shares its weight)."""
    embeddings = {p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    return [p for p in model.parameters() if p.requires_grad and p.dim() == 2 and p not in embeddings]


class Stage2Muon(Stage2):
    """Stage 2, but Muon moves the hidden matrices, by `lr`; AdamW moves the rest, by `adam_lr`."""

    def __init__(
        self, model: nn.Module, comm: Comm, lr: float = 0.02, adam_lr: float = 3e-4, **rest: Any
    ) -> None:
        matrices = hidden_matrices(model)
        if not matrices:
            raise ValueError("this model has no hidden matrix, so there is nothing for Muon: use Stage2")
        others = [p for p in model.parameters() if p not in set(matrices)]
        groups = [{"params": matrices}, {"params": others}]
        super().__init__(model, comm, groups, MuonState, lr=adam_lr, **rest)
        self.lr, self.group = lr, self.flats[0]
        self.owners = choose_owners([p.shape for p in self.group.params], comm.world_size)

    def matrices_of(self, owner: int) -> list[int]:
        """Which matrices a rank works on."""
        return [i for i, each in enumerate(self.owners) if each == owner]

    def pieces(self, rank: int, owner: int) -> list[slice]:
        """What a rank has of each matrix that `owner` works on, as places in the rank's slice."""
        size = self.group.mine.numel()
        spans = [(self.group.starts[i], self.group.params[i].numel()) for i in self.matrices_of(owner)]
        cuts = [overlap(start, start + numel, rank, size) for start, numel in spans]
        return [slice(low - rank * size, high - rank * size) for low, high in cuts]

    # --8<-- [start:muon_update]
    def update(self) -> None:
        """AdamW moves its slices, Muon its own; then all slices are exchanged."""
        self.optimizer.step()
        g, average = self.group.master.grad, self.optimizer.m[self.group.master]
        average.lerp_(g, 1 - BETA)  # element by element, like Adam's: a slice is enough
        self.move(self.visit(g.lerp(average, BETA)))  # Nesterov: a look ahead
        self.gather_parameters()

    # --8<-- [end:muon_update]

    def visit(self, mine: Tensor) -> list[Tensor]:
        """Send my pieces to the owners, work on the matrices I own, get my pieces back, owner by owner."""
        N, rank = self.comm.world_size, self.comm.rank
        # --8<-- [start:ex_there]
        mine = mine.bfloat16()  # the work begins with this rounding, so nothing is lost
        outgoing = [torch.cat([mine[:0], *(mine[place] for place in self.pieces(rank, j))]) for j in range(N)]
        lengths = [[place.stop - place.start for place in self.pieces(r, rank)] for r in range(N)]
        brought = self.comm.all_to_all(outgoing, [sum(each) for each in lengths])
        # --8<-- [end:ex_there]
        # --8<-- [start:ex_back]
        theirs = [list(part.split(each)) for part, each in zip(brought, lengths, strict=True)]
        for k, i in enumerate(self.matrices_of(rank)):
            whole = torch.cat([pieces[k] for pieces in theirs]).view(self.group.params[i].shape)
            made = orthogonalize(whole).reshape(-1)
            for pieces, new in zip(theirs, made.split([each[k] for each in lengths]), strict=True):
                pieces[k] = new
        back = [torch.cat([mine[:0], *pieces]) for pieces in theirs]
        return self.comm.all_to_all(back, [part.numel() for part in outgoing])
        # --8<-- [end:ex_back]

    def move(self, updates: Sequence[Tensor]) -> None:
        """Each piece moves by the rate, of a tall matrix by more: its update is small for its size."""
        for owner, update in enumerate(updates):
            places = self.pieces(self.comm.rank, owner)
            news = update.split([place.stop - place.start for place in places])
            for i, place, new in zip(self.matrices_of(owner), places, news, strict=True):
                rows, columns = self.group.params[i].shape
                self.group.master[place].add_(new, alpha=-self.lr * max(1, rows / columns) ** 0.5)
