"""When gradients are reduced: hooks on the parameters, and the beginning and end of a backward pass.

All ranks reduce the same buckets in the same order, whatever the order in which their gradients appear:
a bucket leaves when it and all before it are complete, and what is left leaves at the end of backward.

At stage 3 modules tell when their parameters' gradients are complete (see `gather.py`): `complete`.

A parameter used in two recomputed parts (see [Note: recomputed parts]) gets its gradient in two helpings.
Once such a part is seen, buckets wait for the end of the large pass.
"""

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from zero_full._compat import is_last_hook
from zero_full.comm.lane import Lane, Pending
from zero_full.settings import Settings
from zero_full.shard.group.grad_placeholder import UNSCALED, Found, ShownGradients, names_of
from zero_full.shard.group.gradients import Bucket
from zero_full.shard.group.hand_written import CLEARED, GRADIENT, HandWritten
from zero_full.shard.group.parameters import FlatParameter, Member
from zero_full.shard.passes.backward import BackwardPass

IN_FLIGHT = 2  # gradient buffers at a time, being filled or reduced; where waiting stops the host, one more
SCALED = (
    "a pass through the model's loss has brought gradients to no parameter (torch.autograd.grad, or inputs "
    "that require gradients), and what it has brought is multiplied by the loss scale: start from "
    "engine.scale(loss), and divide by engine.loss_scale()"
)


NOT_AVERAGED = (
    "torch.autograd.grad has returned gradients (of %s, for one) that are this rank's own: nothing averages "
    "them over the ranks. Average them with torch.distributed.all_reduce, or call backward, whose gradients "
    "are averaged (this is said once)"
)
log = logging.getLogger("zero_full")


def _before_accumulation(
    reducer: "weakref.ref[GradientReducer]", param: "weakref.ref[Tensor]", grad: Tensor
) -> None:
    alive, mine = reducer(), param()
    if alive is not None and mine is not None and not alive.backward.running:
        alive.come_last(mine)  # the others' turn is when the pass has begun
    if alive is not None and mine is not None and not alive.has_told:
        alive.reach(mine)
    if alive is not None and alive.gradients.shown:
        alive.make_room()


def _arrived(reducer: "weakref.ref[GradientReducer]", param: Tensor) -> None:
    alive = reducer()
    if alive is not None:
        alive.arrived(param)


class GradientReducer:
    """Watches the gradients of all buckets."""

    def __init__(self, buckets: Sequence[Bucket], lane: Lane, settings: Settings) -> None:
        self.every = list(buckets)
        self.buckets = [bucket for bucket in buckets if not (bucket.uses_param_grad or bucket.asleep)]
        self.lane, self.every_backward = lane, settings.frees_gradients
        self.by_module = settings.releases_parameters  # modules tell when gradients are complete
        self.bucket_of = {bucket.flat: bucket for bucket in buckets}
        self.trail = 0  # a digest of which buckets have left, in which order: the same on every rank
        self.patient: set[Bucket] = set()  # leave when a pass ends: all ranks know that some came late once
        self.kept_back = False  # by no_sync, since the last reduction
        self.spares: list[Tensor] = []
        for bucket in buckets:
            bucket.spares = self.spares
        self.backward = BackwardPass()
        self.before_waking: Callable[[Sequence[Member]], None] = lambda thawed: None  # may refuse it
        self.on_waking: Callable[[Bucket], None] = lambda bucket: None
        self.no_sync = False  # inside no_sync
        self.hands_back = False  # averaged gradients appear in `param.grad`, for an optimizer of the user's
        self.unreduced = False  # a backward pass has left gradients that are not reduced
        self.began = False  # there was a backward pass since the last step
        self.wait_for_end = False
        self.launched: set[Bucket] = set()
        self.missing: dict[Bucket, set[Member]] = {}  # from which the pass may still bring a gradient
        self.turns: deque[Bucket] = deque()  # that may leave before the pass ends, in order
        self.producers: dict[Bucket, list[object]] = {}
        self.pending: list[Pending] = []
        self.used: set[Member] = set()  # since the last step
        self.place: dict[Tensor, tuple[Bucket, Member]] = {
            m.param: (bucket, m) for bucket in buckets for m in bucket.members
        }
        self.gradients = ShownGradients(self._zero)
        self.written = HandWritten()
        self.reached: Member | None = None  # autograd has its gradient, which has not arrived
        self.has_told = False  # that `torch.autograd.grad` averages nothing
        self.zeroed: set[Member] = set()  # by hand, since the last pass
        self.on_clearing: Callable[[], None] = lambda: None  # nothing is left of the last step's gradients
        self.woken: set[Bucket] = set()  # since the last pass: some gradients may have come without a hook
        self.sleepers = [bucket for bucket in buckets if bucket.asleep]
        # For hooks: Python cannot see through tensors to find a circle and free it.
        self.me = weakref.ref(self)
        self.hooks: dict[Tensor, list[RemovableHandle]] = {}
        for bucket in buckets:
            if not bucket.asleep:
                self._watch(bucket)

    def _watch(self, bucket: Bucket) -> None:
        for param in (m.param for m in bucket.members):
            if param.requires_grad and param not in self.hooks:
                self.hooks[param] = [self._watch_arrival(param)]
                if not bucket.uses_param_grad:
                    before = partial(_before_accumulation, self.me, weakref.ref(param))
                    self.hooks[param].append(param.register_hook(before))

    def _watch_arrival(self, param: Tensor) -> RemovableHandle:
        handle: RemovableHandle = param.register_post_accumulate_grad_hook(partial(_arrived, self.me))
        return handle

    @contextmanager
    def keep_back(self) -> Iterator[None]:
        """Gradients of passes in this block are not reduced, but add up on this rank."""
        before, self.no_sync, self.kept_back = self.no_sync, True, True
        try:
            yield
        finally:
            self.no_sync = before

    @property
    def syncing(self) -> bool:
        """Whether this backward pass ends with reduced gradients."""
        return not self.no_sync and (self.every_backward or self.backward.is_boundary)

    # Buckets that wake up ------------------------------------------------------------------------

    def wake(self, bucket: Bucket) -> None:
        """From now on it takes part."""
        bucket.asleep = False
        self.on_waking(bucket)
        self.buckets = [b for b in self.every if not (b.uses_param_grad or b.asleep)]

    def look_at_sleepers(self) -> None:
        """Wake buckets of which a parameter is not frozen any more, and watch that parameter."""
        sleeping = [m for bucket in self.sleepers if bucket.asleep for m in bucket.members]
        if thawed := [m for m in sleeping if m.param.requires_grad]:
            self.before_waking(thawed)
        for bucket in self.sleepers:
            if bucket.asleep and any(m.param.requires_grad for m in bucket.members):
                self.wake(bucket)
                self.woken.add(bucket)
            if not bucket.asleep:
                self._watch(bucket)

    # One pass ------------------------------------------------------------------------------------

    def begin(self, divided: bool = False, scaled: bool = False) -> None:
        """A backward pass starts, as the engine knows, or a hook on what a module has returned."""
        self._start(divided, scaled)
        self._refuse_unscaled_presets()

    def begin_scaled(self, divided: bool, grad: Tensor) -> None:
        """A pass has reached a loss that was multiplied by the loss scale, perhaps before all else."""
        if not self.backward.is_at_work():
            self.begin(divided, scaled=True)
        self.backward.divided, self.backward.scaled = divided, True

    def _start(self, divided: bool, scaled: bool) -> None:
        self.backward.begin(divided, scaled)
        self.wait_for_end = False
        self.make_room()
        self.look_at_sleepers()
        self.launched.clear()
        self.zeroed.clear()
        for bucket in self.buckets:
            self._use_presets(bucket)
        self.began = self.unreduced = True
        self.missing = {bucket: _expected(bucket) for bucket in self.buckets}
        self.turns = deque(bucket for bucket in self.buckets if bucket not in self.patient)
        self.producers = {bucket: [] for bucket in self.buckets}
        for param in self.hooks:
            self.come_last(param)
        self.backward.when_autograd_ends(self.finish)

    def come_last(self, param: Tensor) -> None:
        """A user's hook on this parameter must see the gradient before it moves into a bucket."""
        hooks = self.hooks[param]
        if not is_last_hook(param, hooks[0]):
            hooks[0].remove()
            hooks[0] = self._watch_arrival(param)

    def make_room(self) -> None:
        """Autograd adds to what is in `param.grad`: take out what only stands for gradients in buckets."""
        found = self.gradients.changes()
        self.drop([*found.cleared, *(member for member, _ in found.written)])
        # What was written stays in `param.grad`, and autograd adds to it.
        shown = list(self.gradients.shown)
        self.gradients.lift()
        if not self.backward.running:
            self.backward.when_autograd_ends(lambda: self._show_again(shown))

    def _refuse_unscaled_presets(self) -> None:
        """Autograd would add gradients with a loss scale to what was written without one."""
        if self.backward.rules.scale() != 1:
            preset = names_of(m for b in self.buckets for m in b.members if m.param.grad is not None)
            if preset:
                raise RuntimeError(UNSCALED.format(preset))

    def _show_again(self, members: Sequence[Member]) -> None:
        """It was `torch.autograd.grad`, which passes a parameter's hooks and leaves no gradient there."""
        if not self.backward.running:
            self.gradients.show(m for m in members if m.param.grad is None)

    def reach(self, param: Tensor) -> None:
        """Autograd has a gradient: for `param.grad`, then it will arrive, or for `torch.autograd.grad`."""
        if self.reached is None and self.place[param][0].has_peers:
            self.reached = self.place[param][1]
            if not self.backward.running:
                self.backward.when_autograd_ends(self._tell_of_own)

    def _tell_of_own(self) -> None:
        """At the end of a pass."""
        if self.reached is not None and not self.has_told:
            self.has_told = True
            log.warning(NOT_AVERAGED, self.reached.name)
        self.reached = None

    def arrived(self, param: Tensor) -> None:
        """Autograd has completed a gradient."""
        bucket, member = self.place[param]
        self.reached = None
        if not self.backward.running:
            self._start(divided=False, scaled=False)
        divisor = self.backward.bring()
        self.used.add(member)
        if bucket.uses_param_grad:
            return
        if divisor != 1 and param.grad is not None:
            param.grad.div_(divisor)
        if not self.backward.is_at_work() and not self.by_module:  # a recomputed part
            self.wait_for_end = True
        here, before = self.lane.producer(), self.producers[bucket]
        if before:  # the buffer, and what lies in it, is the work of another stream perhaps
            self.lane.order(before[-1], here)
        before.append(here)
        if bucket in self.launched:  # late, and the bucket's memory is the job's until it is done
            self._drain(0)
        elif self.every_backward and not self.lane.stops_host:  # its buffer takes the place of an older one
            self._drain(IN_FLIGHT - 1)
        if bucket.settings.copy_on_arrival or not self.syncing:
            bucket.take(member, final=self.syncing and not self.wait_for_end)
        self.missing[bucket].discard(member)
        if self.syncing and not self.wait_for_end and not self.by_module:
            self._launch_complete()

    def _launch_complete(self) -> None:
        """In the order of the list on every rank, whichever is complete first here."""
        while self.turns and not self.missing[self.turns[0]]:
            self._launch(self.turns.popleft())

    @torch.no_grad()
    def complete(self, flat: FlatParameter) -> None:
        """Stage 3: the modules that use these parameters are done with them in this pass."""
        bucket = self.bucket_of.get(flat)
        if bucket is None or bucket.uses_param_grad or bucket.asleep or not self.syncing:
            return
        if bucket not in self.launched and bucket not in self.patient:
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        """Put the bucket's reduction on the lane: see [Note: what travels].

        Its gradients are taken away here, on backward's thread. If the job took them, one that comes while
        the job is under way would be reduced at once on some ranks, and be late on others.
        """
        self._drain(IN_FLIGHT - 1)
        self.launched.add(bucket)
        self.trail = crc32(bucket.name.encode(), self.trail)
        read = list(bucket.gradient_memory())  # before they are taken away
        job = partial(bucket.reduce, bucket.detach(), self._wire(bucket), self.backward.is_boundary)
        self.pending.append(self.lane.submit(job, read, self.producers.get(bucket, [])))

    def _wire(self, bucket: Bucket) -> torch.dtype:
        """The type in which a bucket's gradients travel: the exact one, if those of several passes add up."""
        add_up = self.kept_back or (not self.every_backward and self.backward.rules.adds_up())
        return bucket.settings.dtypes.reduce or (bucket.accumulate if add_up else bucket.flat.dtype)

    def _drain(self, leave: int) -> None:
        while len(self.pending) > leave:
            self.pending.pop(0).wait()

    @torch.no_grad()
    def finish(self) -> None:
        """The backward pass is over: what has not left leaves now."""
        if not self.backward.running:
            return
        self.backward.end()
        self._tell_of_own()
        self._take_unnoticed()
        if self.backward.gated and self.backward.divisor is None and not self.backward.scaled:
            raise RuntimeError(SCALED)
        if self.syncing:
            self._reduce_rest()
        self._show_gradients()

    def _show_gradients(self) -> None:
        members = [m for m in self.used if not self.place[m.param][0].uses_param_grad]
        if self.hands_back and self.syncing and self.backward.is_boundary:
            self.reduce_late()
            for member in members:
                self.gradients.hand_out(member, self.place[member.param][0].averaged(member))
        else:
            self.gradients.show(members)

    def _take_unnoticed(self) -> None:
        """Gradients of a bucket that woke up in this pass, whose first parameters had no hooks yet."""
        for bucket in self.woken:
            for member in bucket.members:
                if member.param.grad is not None:
                    self.used.add(member)
                    if not bucket.uses_param_grad:
                        bucket.take(member, final=False)
        self.woken.clear()

    # Between passes ------------------------------------------------------------------------------

    @torch.no_grad()
    def flush(self) -> None:
        """Before a step: reduce whatever backward has left."""
        if self.backward.running:
            self.backward.end()
        if self.unreduced:
            self.launched.clear()
            self._reduce_rest()
        for bucket in self.buckets:
            bucket.share_slice()  # if no pass knew that it was the last

    def _reduce_rest(self) -> None:
        self._drain(0)
        for bucket in sorted(
            self.buckets, key=lambda bucket: bucket in self.patient
        ):  # as where it left early
            if bucket not in self.launched:
                self._launch(bucket)
        self._drain(0)
        self.spares.clear()
        self.unreduced = self.kept_back = False

    @property
    def late(self) -> list[Bucket]:
        """The buckets of which gradients have come to this rank after they had left."""
        return [] if self.unreduced else [bucket for bucket in self.buckets if bucket.arrived]

    def settle(self) -> None:
        """Average what came late, if all else is averaged. Every rank must call this."""
        if not self.unreduced and not self.backward.running:
            self.reduce_late()

    @torch.no_grad()
    def reduce_late(self) -> None:
        """Reduce what came after its bucket had left, on any rank. Every rank must call this, between passes.

        A parameter may be used outside of its module, or once more in a recomputed part. Such a bucket leaves
        when the pass ends from now on.
        """
        pairs = dict.fromkeys((bucket.ranks, bucket.across) for bucket in self.buckets)
        for ranks, across in pairs:
            theirs = [bucket for bucket in self.buckets if (bucket.ranks, bucket.across) == (ranks, across)]
            flags = torch.tensor([float(b in self.late) for b in theirs], device=ranks.device)
            for group in (ranks, across):
                group.sum_numbers(flags, "gradients that came late")
            for bucket in (b for b, flag in zip(theirs, flags.tolist(), strict=True) if flag):
                self.patient.add(bucket)
                self._launch(bucket)
        self._drain(0)

    # By hand -------------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Before a step: parameters that nobody has watched until now may have a gradient, too."""
        self.look_at_sleepers()
        if any(m.param.grad is not None for bucket in self.woken for m in bucket.members):
            self.began = self.unreduced = True
        self._take_unnoticed()
        for bucket in self.every:
            if bucket.uses_param_grad and not bucket.asleep:
                self._use_presets(bucket)

    def _use_presets(self, bucket: Bucket) -> None:
        """As in torch, what lies in `param.grad` is a gradient, whether or not a pass has brought it."""
        preset = {m for m in bucket.members if m not in self.used and m.param.grad is not None}
        self.used |= preset
        self.began = self.began or bool(preset)

    def by_hand(self) -> Found:
        """What somebody has done to `param.grad` since backward: gradients cleared, replaced or put there."""
        found = self.gradients.changes()
        known = {member for member, _ in found.written} | self.gradients.shown.keys()
        for bucket in self.every:
            if bucket.asleep:
                refuse_frozen_gradients(m for m in bucket.members if m.param.grad is not None)
            if not bucket.uses_param_grad:
                found.written += [
                    (m, m.param.grad) for m in bucket.members if m not in known and m.param.grad is not None
                ]
        return found

    def drop(self, members: Iterable[Member]) -> None:
        """Somebody has cleared these gradients."""
        for member in members:
            self.used.discard(member)
            self._zero(member)

    @torch.no_grad()
    def put(self, member: Member, gradient: Tensor) -> None:
        """Somebody has written this gradient: it takes the averaged one's place."""
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient that was written into the grad of {member.name} is {gradient.layout}: write a "
                "dense one (to_dense())"
            )
        bucket = self.place[member.param][0]
        if bucket.has_peers:
            self.written.note(GRADIENT, member, gradient)
        member.param.grad = None
        bucket.put(member, gradient)
        self.used.add(member)
        self.began = True
        self.gradients.show([member])

    @torch.no_grad()
    def give(self, member: Member, gradient: Tensor) -> None:
        """Give the parameter a gradient where no backward pass has brought any. Every rank must call this."""
        param = member.param
        if self.place[param][0].asleep:
            refuse_frozen_gradients([member])
        if self.place[param][0].uses_param_grad:
            param.grad = torch.empty_like(param).copy_(gradient)
            self.used.add(member)
            self.began = True
        else:
            self.put(member, gradient)

    def _zero(self, member: Member) -> None:
        bucket = self.place[member.param][0]
        bucket.drop(member)
        if bucket.has_peers and bucket.slice_is_valid:  # else it is this rank's own share of a sum to come
            self.written.note(GRADIENT, member, CLEARED)
        self.zeroed.add(member)
        if self.zeroed >= self.used:
            self._zero_rest()
            self.on_clearing()

    def _zero_rest(self) -> None:
        """Clear what only other ranks have brought: whoever has cleared all that is shown means it, too.

        Each rank shows the gradients that its own passes have brought, and keeps slices of all.
        """
        averaged = [bucket for bucket in self.buckets if bucket.has_peers and bucket.slice_is_valid]
        for bucket in averaged:
            for member in bucket.members:
                if member not in self.zeroed:
                    bucket.drop(member)
        if averaged:
            self.written.note_all_cleared()

    def forget(self) -> None:
        """After a step, or to start over: nothing is owed."""
        pending, self.pending = self.pending, []
        for job in pending:
            job.wait()
        self.backward.end()
        self.backward.failed = self.unreduced = self.began = False
        self.used.clear()
        self.gradients.shown.clear()
        self.written.forget_gradients()

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hooks in self.hooks.values():
            for hook in hooks:
                hook.remove()
        self.forget()


def refuse_frozen_gradients(members: Iterable[Member]) -> None:
    """RuntimeError if there are any: they are asleep, so nothing would step them."""
    if named := names_of(members):
        raise RuntimeError(
            f"a gradient was written to {named}, frozen since initialize, so there is nothing that a step "
            "could move: unfreeze it first (requires_grad_(True)), or leave its grad None"
        )


def _expected(bucket: Bucket) -> set[Member]:
    """Whose gradients may come in a pass."""
    return {m for m in bucket.members if m.param.requires_grad}
