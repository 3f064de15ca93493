"""When gradients are reduced: hooks on the parameters, and the beginning and end of a backward pass.

All ranks reduce the same buckets in the same order, whatever the order in which their gradients appear:
a bucket leaves when it and all before it are complete, and what is left leaves at the end of backward.

At stage 3 modules tell when their parameters' gradients are complete (see `gatherer.py`): `complete`.

[Note: recomputed parts] Re-entrant activation checkpointing runs small backward passes inside the large
one, so a parameter used in two of them gets its gradient in two helpings. Once such a part is seen, buckets
wait for the end of the large pass.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from zero_full._compat import current_backward, when_backward_ends
from zero_full.comm.lane import Lane, Pending
from zero_full.shard.bucket import Bucket
from zero_full.shard.values import Member, Values

IN_FLIGHT = 2  # reductions that may run beside backward: more would only hold more memory


def _arrived(reducer: "weakref.ref[GradientReducer]", param: Tensor) -> None:
    alive = reducer()
    if alive is not None:
        alive.arrived(param)


class GradientReducer:
    """Watches the gradients of all buckets."""

    def __init__(self, buckets: Sequence[Bucket], lane: Lane, stage: int) -> None:
        self.buckets = [bucket for bucket in buckets if not bucket.direct]
        self.lane, self.every_backward, self.told = lane, stage >= 2, stage == 3
        self.bucket_of = {bucket.values: bucket for bucket in self.buckets}
        self.spares: list[Tensor] = []
        for bucket in self.buckets:
            bucket.spares = self.spares
        self.at_end: list[Callable[[], None]] = []  # of a backward pass
        self.boundary = True  # the engine says whether this backward is the step's last
        self.muted = False  # inside no_sync
        self.open = False  # a backward pass is running
        self.owing = False  # a backward pass has left gradients that are not reduced
        self.began = False  # there was a backward pass since the last step
        self.passes = 0  # how many backward passes there were
        self.outer: int | None = None
        self.wait_for_end = False
        self.launched: set[Bucket] = set()
        self.missing: dict[Bucket, int] = {}
        self.producers: dict[Bucket, list[object]] = {}
        self.pending: list[Pending] = []
        self.used: set[Member] = set()  # since the last step
        self.place: dict[Tensor, tuple[Bucket, Member]] = {
            m.param: (bucket, m) for bucket in buckets for m in bucket.members
        }
        # The hooks know us weakly: Python cannot see through tensors to find a circle and free it.
        hook = partial(_arrived, weakref.ref(self))
        self.hooks = [param.register_post_accumulate_grad_hook(hook) for param in self.place]

    @property
    def syncing(self) -> bool:
        """Whether this backward pass ends with reduced gradients."""
        return not self.muted and (self.every_backward or self.boundary)

    def is_running(self) -> bool:
        """Whether the backward pass that calls this (not a recomputed part of one) is known already."""
        return self.open and (self.outer is None or self.outer == current_backward())

    def begin(self) -> None:
        """A backward pass starts. Called by the engine, by a hook on the model's output, or by a gradient."""
        now = current_backward()
        self.outer = now if now >= 0 else None
        self.open, self.wait_for_end = True, False
        self.launched.clear()
        self.began = self.owing = True
        self.passes += 1
        self.missing = {bucket: len(bucket.members) for bucket in self.buckets}
        self.producers = {bucket: [] for bucket in self.buckets}
        if now >= 0:  # nobody but autograd knows when this one ends
            when_backward_ends(self.finish)

    def note_pass(self) -> None:
        """Remember the number of the large pass, which the engine cannot know before autograd has it."""
        if self.outer is None:
            self.outer = current_backward()

    def arrived(self, param: Tensor) -> None:
        """Autograd has completed a gradient."""
        bucket, member = self.place[param]
        if not self.open:
            self.begin()
        self.note_pass()
        self.used.add(member)
        if bucket.direct:
            return
        if current_backward() != self.outer and not self.told:  # see [Note: recomputed parts]
            self.wait_for_end = True
        self.producers[bucket].append(self.lane.producer())
        if bucket in self.launched:  # a second helping
            self._drain(0)
        if bucket.settings.copy_on_arrival or not self.syncing:
            bucket.take(member, final=self.syncing and not self.wait_for_end)
        self.missing[bucket] -= 1
        if self.syncing and not self.wait_for_end and not self.told:
            self._launch_complete()

    def _launch_complete(self) -> None:
        for bucket in self.buckets[len(self.launched) :]:
            if self.missing[bucket] > 0:
                return
            self._launch(bucket)

    @torch.no_grad()
    def complete(self, values: Values) -> None:
        """Stage 3: these parameters' gradients will not change any more, unless they are used elsewhere."""
        bucket = self.bucket_of.get(values)
        if bucket is not None and self.syncing:
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        self._drain(IN_FLIGHT - 1)
        self.launched.add(bucket)
        producers = self.producers.get(bucket, [])
        read = list(bucket.gradient_memory())  # now: the job lets go of some of it
        self.pending.append(self.lane.submit(bucket.reduce, read, producers))

    def _drain(self, leave: int) -> None:
        while len(self.pending) > leave:
            self.pending.pop(0).wait()

    @torch.no_grad()
    def finish(self) -> None:
        """The backward pass is over: what has not left leaves now."""
        if not self.open:
            return
        self._close()
        if self.syncing:
            self._reduce_rest()
            if self.boundary:
                self._share()

    def _close(self) -> None:
        self.open, self.outer = False, None
        for tell in self.at_end:
            tell()

    def abandon(self) -> None:
        """The backward pass has failed. What it has done is forgotten by `zero_grad`, as in torch."""
        self._close()

    @torch.no_grad()
    def flush(self) -> None:
        """Before a step: reduce whatever backward has left."""
        self.open = False
        if self.owing:
            self.launched.clear()
            self._reduce_rest()
        self._share()

    def _share(self) -> None:
        for bucket in self.buckets:
            bucket.share_own()

    def _reduce_rest(self) -> None:
        self._drain(0)
        for bucket in self.buckets:
            second_helping = bucket.own_is_valid and bool(bucket.arrived)
            if bucket not in self.launched or second_helping:
                self._launch(bucket)
        self._drain(0)
        self.spares.clear()
        self.owing = False

    def forget(self) -> None:
        """After a step, or to start over: nothing is owed."""
        pending, self.pending = self.pending, []
        for job in pending:
            job.wait()
        self.abandon()
        self.owing = self.began = False
        self.used.clear()

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self.hooks:
            hook.remove()
        self.forget()
