"""Step 2. ZeRO stage 2: gradients, too, are kept only by the owner of the slice.

Waiting until the end of backward would mean holding every gradient once. So the parameters are dealt
into buckets in the order backward reaches them, and as soon as a bucket's gradients are complete it is
reduced to its owners and freed, while backward still runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zero_min.comm import Comm
from zero_min.stage0 import claim, gradient_or_zeros
from zero_min.stage1 import FlatGroup, Stage1


def overlap(start: int, end: int, rank: int, slice_size: int) -> tuple[int, int]:
    """The part of [start, end) that lies in `rank`'s slice; empty if start == end in the answer."""
    # --8<-- [start:ex_overlap]
    low = max(start, rank * slice_size)
    high = min(end, (rank + 1) * slice_size)
    return low, max(low, high)
    # --8<-- [end:ex_overlap]


@dataclass(eq=False)
class Window:
    """A parameter and where it lies in its group's flat tensor."""

    param: Tensor
    group: FlatGroup
    start: int

    def part_of(self, rank: int) -> slice:
        """The elements of this parameter that `rank` owns, counted from the parameter's first."""
        low, high = overlap(self.start, self.start + self.param.numel(), rank, self.group.mine.numel())
        return slice(low - self.start, high - self.start)


@dataclass(eq=False)  # the same only if it is the same one: tensors have no == that is true or false
class Bucket:
    """Parameters whose gradients travel in one collective."""

    windows: list[Window] = field(default_factory=list)
    missing: int = 0  # gradients that this backward has not delivered yet
    reduced: bool = False


def make_buckets(flats: Sequence[FlatGroup], order: Sequence[Tensor], bucket_size: int) -> list[Bucket]:
    """Deal the parameters into buckets of at most `bucket_size` elements (one tensor may exceed it)."""
    where = {p: Window(p, f, start) for f in flats for p, start in zip(f.params, f.starts, strict=True)}
    buckets: list[Bucket] = []
    room = 0
    for p in order:
        same_dtype = bool(buckets) and buckets[-1].windows[0].param.dtype == p.dtype
        if p.numel() > room or not same_dtype:
            buckets.append(Bucket())
            room = bucket_size
        buckets[-1].windows.append(where[p])
        room -= p.numel()
    return buckets


class Stage2(Stage1):
    """Adam's state and the gradients are sharded; only the parameters are whole."""

    def __init__(
        self, model: nn.Module, comm: Comm, *args: Any, bucket_size: int = 2**16, **kwargs: Any
    ) -> None:
        claim(model)
        super().__init__(model, comm, *args, **kwargs)
        trained = {p for f in self.flats for p in f.params}
        last_first = [p for p in reversed(list(model.parameters())) if p in trained]
        self.buckets = make_buckets(self.flats, last_first, bucket_size)
        self.bucket_of = {window.param: bucket for bucket in self.buckets for window in bucket.windows}
        self._expect_gradients()
        for p in last_first:
            p.register_post_accumulate_grad_hook(self._gradient_arrived)

    def _expect_gradients(self) -> None:
        for bucket in self.buckets:
            bucket.missing, bucket.reduced = len(bucket.windows), False

    # --8<-- [start:stage2_hook]
    def _gradient_arrived(self, param: Tensor) -> None:
        """Autograd calls this in the middle of backward, when `param.grad` is complete."""
        # --8<-- [start:ex_arrived]
        self.bucket_of[param].missing -= 1
        for bucket in self.buckets:  # strictly in this order, so that all ranks reduce the same bucket
            if bucket.reduced:
                continue
            if bucket.missing > 0:
                break
            self._reduce(bucket)
        # --8<-- [end:ex_arrived]

    # --8<-- [end:stage2_hook]

    def backward(self, loss: Tensor) -> None:
        """Run backward; buckets leave as they fill, and what is left at the end leaves then."""
        loss.backward()
        self._reduce_leftovers()

    @torch.no_grad()
    def _reduce_leftovers(self) -> None:
        for bucket in self.buckets:  # a parameter that was not used counts as gradient zero
            late = any(window.param.grad is not None for window in bucket.windows)
            if late or not bucket.reduced:
                self._reduce(bucket)
        self._expect_gradients()

    def zero_grad(self) -> None:
        """Let go of the gradients, also of what a failed backward has left half done."""
        super().zero_grad()
        self._expect_gradients()

    @torch.no_grad()
    def _reduce(self, bucket: Bucket) -> None:
        """One collective: every rank receives the sum of the pieces it owns, then the bucket is freed."""
        # --8<-- [start:ex_bucket]
        grads = {w.param: gradient_or_zeros(w.param).reshape(-1) for w in bucket.windows}
        parts = [
            torch.cat([grads[w.param][w.part_of(rank)] for w in bucket.windows])
            for rank in range(self.comm.world_size)
        ]
        averages = self.comm.reduce_scatter(parts).div_(self.comm.world_size)  # (N-1)/N n
        for w in bucket.windows:
            part = w.part_of(self.comm.rank)
            size = part.stop - part.start
            self._add_to_my_gradient(w, part, averages[:size])
            averages = averages[size:]
            w.param.grad = None  # nobody but the owner remembers it
        bucket.reduced = True
        # --8<-- [end:ex_bucket]

    def _add_to_my_gradient(self, window: Window, part: slice, piece: Tensor) -> None:
        f = window.group
        if f.grad is None:
            f.grad = torch.zeros_like(f.mine, dtype=piece.dtype, device=piece.device)
        start = window.start - self.comm.rank * f.mine.numel()  # of the parameter, seen from `mine`
        f.grad[start + part.start : start + part.stop] += piece

    def reduce_gradients(self) -> None:
        """Each owner has had its averaged gradient since backward; hand it to Adam."""
        if any(bucket.missing < len(bucket.windows) for bucket in self.buckets):
            self._reduce_leftovers()  # backward was called without us, and its last buckets wait
        for f in self.flats:
            f.master.grad = torch.zeros_like(f.master) if f.grad is None else f.grad.to(f.master.dtype)
