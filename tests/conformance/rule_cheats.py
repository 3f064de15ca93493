"""Rules that are nearly right. Each takes the place of what a rule of zero_full steps by."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from tests.trainers import Subject, Trainer
from zero_full.optim import Lamb, Muon, OneBitAdam, OneBitLamb, Peers, Piece, Whole, WholeRule, ZeroOneAdam
from zero_full.optim.lamb import LambStep
from zero_full.optim.muon import MuonStep
from zero_full.optim.one_bit import OneBitAdamStep
from zero_full.optim.one_bit_lamb import OneBitLambStep
from zero_full.optim.zero_one_adam import ZeroOneAdamStep
from zero_min.comm import Comm


class Nobody(Peers):
    """Asks no other rank: what is here of a matrix passes for one."""

    def by_whole(self, pieces: Sequence[Piece], rule: WholeRule) -> None:
        for piece in (piece for piece in pieces if rule.concerns(piece.whole)):
            shape = piece.shape if piece.master.numel() == piece.shape.numel() else (1, -1)
            rule.take(piece, rule.of_whole(piece.whole, rule.bring(piece).view(shape)).reshape(-1))


class MuonOfSlices(MuonStep):
    """Makes slices of matrices orthogonal."""

    def step(self, pieces: Sequence[Piece], factor: float, peers: Peers) -> None:
        super().step(pieces, factor, Nobody())


class LambOfSlices(LambStep):
    """Takes norms of slices."""

    def step(self, pieces: Sequence[Piece], factor: float, peers: Peers) -> None:
        super().step(pieces, factor, Nobody())


class There:
    """Brings all matrices to their owners, and back, for nothing."""

    wire = torch.float32

    def concerns(self, whole: Whole) -> bool:
        return len(whole.shape) == 2

    def work(self, whole: Whole) -> int:
        return 1

    def bring(self, piece: Piece) -> Tensor:
        return piece.master.reshape(-1).to(self.wire)

    def of_whole(self, whole: Whole, values: Tensor) -> Tensor:
        return values

    def take(self, piece: Piece, values: Tensor) -> None: ...


class MuonThatTellsMore(MuonStep):
    """Computes right, and sends parameters beside momenta."""

    def step(self, pieces: Sequence[Piece], factor: float, peers: Peers) -> None:
        super().step(pieces, factor, peers)
        peers.by_whole(pieces, There())


class OneBitAdamThatForgets(OneBitAdamStep):
    """Has no error feedback."""

    def average(self, flat: Tensor, what: str) -> Tensor:
        mean = super().average(flat, what)
        self.errors.zero_()
        return mean


class OneBitLambThatForgets(OneBitLambStep):
    """Has none, either."""

    def average(self, flat: Tensor, what: str) -> Tensor:
        mean = super().average(flat, what)
        self.errors.zero_()
        return mean


class ZeroOneAdamThatForgets(ZeroOneAdamStep):
    """Has none, either."""

    def average(self, flat: Tensor, what: str) -> Tensor:
        mean = super().average(flat, what)
        self.errors.zero_()
        return mean


class ZeroOneAdamThatStaysApart(ZeroOneAdamStep):
    """Goes on from where it is, and not from where all have met."""

    def _synchronize(self, local: Any, momenta: Tensor) -> None:
        own = [piece.master.clone() for piece in self.layout.pieces]
        super()._synchronize(local, momenta)
        for piece, value in zip(self.layout.pieces, own, strict=True):
            piece.master.copy_(value)


class OneBitAdamThatLosesErrors(OneBitAdamStep):
    """Goes on without what it had not said when it was saved."""

    def load_own_tensors(self, tensors: Any) -> None:
        super().load_own_tensors({})


CHEATS: dict[str, tuple[Any, Any]] = {
    each.__name__: (rule, each)
    for rule, each in (
        (Lamb, LambOfSlices),
        (Muon, MuonOfSlices),
        (Muon, MuonThatTellsMore),
        (OneBitAdam, OneBitAdamThatForgets),
        (OneBitAdam, OneBitAdamThatLosesErrors),
        (OneBitLamb, OneBitLambThatForgets),
        (ZeroOneAdam, ZeroOneAdamThatForgets),
        (ZeroOneAdam, ZeroOneAdamThatStaysApart),
    )
}


@dataclass(frozen=True)
class RuleCheat(Subject):
    """zero_full with a cheat in the place of what a rule steps by."""

    name: str = ""

    def build(self, model: nn.Module, comm: Comm, groups: Any = None, **options: Any) -> Trainer:
        """The engine asks its optimizer once what it steps by."""
        rule, cheat = CHEATS[self.name]
        with mock.patch.object(rule, "zero_full_stepper", lambda optimizer: cheat(optimizer)):
            return super().build(model, comm, groups, **options)
