"""Reduction of gradients during backward: hooks on the parameters, and the begin and end of a pass.

All ranks reduce the same groups in the same order, although their gradients may arrive in different orders. A
group is reduced when it and all groups before it in the list are complete. The rest follows at the end of
backward.

At stage 3 a module's backward hook reports that its parameters' gradients are complete. See `complete` and
`gather.py`.

A parameter that is used in two recomputed parts (see [Note: recomputed parts]) gets two gradients, which
autograd adds up. Once a recomputed part is seen, groups are reduced only at the end of the whole pass.
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

from zero_full._compat import current_backward, post_accumulate_grad_hooks, without_overrides
from zero_full.comm.lane import Lane, Pending
from zero_full.precision.scaler import StaticScale
from zero_full.settings import Settings
from zero_full.shard.group.gradients import UNSCALED, Found, GradientPlaceholders, Spares, names_of
from zero_full.shard.group.hand_written import CLEARED, GRADIENT, HandWritten
from zero_full.shard.group.parameter_group import ParameterGroup, TrainedGroup
from zero_full.shard.group.parameters import Member
from zero_full.shard.passes.backward import BackwardPass

# Gradient buffers at a time that are being filled or reduced; one more on lanes where waiting stops the host.
IN_FLIGHT = 2
SCALED = (
    "the backward pass reached no parameter (torch.autograd.grad, or inputs that require gradients), and its "
    "gradients are multiplied by the loss scale. Start from engine.scale(loss), and divide the gradients by "
    "engine.loss_scale()"
)
NOT_AVERAGED = (
    "torch.autograd.grad has returned this rank's own gradients, of %s for example: they are not averaged "
    "over the ranks. Average them with torch.distributed.all_reduce, or call backward, which averages "
    "(logged once)"
)
log = logging.getLogger("zero_full")
EPSILON = 1e-6  # added to the norm for clipping, as in torch
Reducer = Callable[[], "GradientReducer | None"]  # a weak reference: see `GradientReducer.me`


def _before_accumulation(
    reducer: Reducer, weak: Callable[[], Tensor | None], has_peers: bool, grad: Tensor
) -> None:
    """Tensor hook: prepare `param.grad` for a gradient that autograd is about to accumulate or return."""
    alive, param = reducer(), weak()
    if alive is None or param is None:
        return
    running = alive.backward.running
    if not running:
        alive.move_hooks_last([param])  # `begin` does it for the others
    if has_peers and alive.not_arrived is None and not alive.has_warned:
        alive.not_arrived = param  # until it arrives. A gradient of `torch.autograd.grad` never does
        if not running:
            alive.backward.when_autograd_ends(alive.warn_not_averaged)
    if alive.placeholders.shown:
        alive.lift_placeholders()


def _arrived(reducer: Reducer, param: Tensor) -> None:
    """Post-accumulate hook: handle `param.grad`, which autograd has completed."""
    alive = reducer()
    if alive is not None:
        alive.arrived(param)


class GradientState:
    """Loss scale and clipping factor that the averaged gradients carry from one step to the next.

    Without `zero_grad`, backward adds to the gradients of the last step, as in torch.
    """

    def __init__(
        self,
        groups: Sequence[TrainedGroup],
        scaler: StaticScale,
        backward: BackwardPass,
        averages: Callable[[], bool],
    ) -> None:
        """`averages`: returns whether the next step needs averaged gradients."""
        self.groups, self.scaler, self.backward, self.averages = groups, scaler, backward, averages
        self.scale_left: float | None = None  # loss scale left in the gradients by the last step
        self.unclipped = 1.0  # clipping factor that the last step applied while reading, not to the tensors
        self.passes = 0  # number of backward passes until the last step
        self.are_local = False  # the last step used each rank's own gradients, not averages
        self.next_clip: float | None = None  # largest gradient norm of the next step; None: the settings'

    @property
    def scale(self) -> float:
        """The loss scale in the gradients now."""
        return self.scaler.scale if self.scale_left is None else self.scale_left

    @property
    def are_new(self) -> bool:
        """Whether a backward pass has brought gradients since the last step, skipped or not."""
        return self.passes != self.backward.count

    def begin_step(self) -> tuple[float, bool]:
        """Return the step's loss scale, and True for averaged gradients or False for each rank's own.

        Raises RuntimeError if a backward pass has mixed gradients of two scales, or averaged and own ones.
        """
        scale = self.scaler.scale
        if self.scale_left is not None and self.scale_left != scale and self.are_new:
            raise RuntimeError(
                f"backward added gradients with loss scale {scale:g} to gradients of the last step with loss "
                f"scale {self.scale_left:g}. Call zero_grad after every step"
            )
        return scale, self._decide_averaged()

    def factor(self, norm: float | None, clip: float) -> float:
        """Return the factor of a step's gradients: 1 / scale, times `clip` / norm if that is below 1."""
        factor = 1.0 / self.scale
        return factor * min(1.0, clip / (norm + EPSILON)) if clip > 0 and norm is not None else factor

    def _decide_averaged(self) -> bool:
        """Return whether the next step needs averaged gradients; raise if the last one left own ones."""
        averaged = self.averages()
        if self.are_local and averaged:
            raise RuntimeError(
                "the last step was a local step of a 1-bit or 0/1 optimizer, and its gradients are still in "
                "the buffers: each rank's own, not averaged. The next step needs averaged gradients. Call "
                "zero_grad after every step"
            )
        self.are_local = not averaged
        return averaged

    def begin_pass(self) -> None:
        """Apply the last step's clipping to its gradients, because backward adds to clipped ones in torch."""
        if self.are_local:
            self._decide_averaged()
        if self.unclipped != 1.0:
            self.multiply(self.unclipped)
            self.unclipped = 1.0

    def multiply(self, factor: float) -> None:
        """Multiply all averaged gradients in place."""
        for group in self.groups:
            for gradient in () if group.asleep else group.gradients.averaged_gradients():
                gradient.mul_(factor)

    def note_step(self, factor: float, multiplied: bool) -> None:
        """Note the factor of a step's gradients. `multiplied`: it was applied to the tensors."""
        scale = self.scale
        self.scale_left = 1.0 if multiplied else scale
        self.unclipped = 1.0 if multiplied else factor * scale

    def end_step(self) -> None:
        """Note that a step was applied or skipped, so that later passes count as new ones."""
        self.passes = self.backward.count
        for group in self.groups:
            group.gradients.local_ends.clear()

    def forget(self) -> None:
        """Reset the factors, because the gradients are discarded, and a norm chosen to clip new ones."""
        if self.next_clip is not None and self.are_new:
            self.next_clip = None
        self.scale_left, self.unclipped, self.are_local = None, 1.0, False


class GradientReducer:
    """Hooks on the parameters of all groups, and the reduction of their gradients."""

    def __init__(
        self,
        groups: Sequence[TrainedGroup],
        lane: Lane,
        settings: Settings,
        scaler: StaticScale,
        spares: Spares,
        backward: BackwardPass,
        *,
        averages: Callable[[], bool],
        on_begin: Callable[[], None],
        on_unfreeze: Callable[[Sequence[Member]], None],
        on_wake: Callable[[TrainedGroup], None],
        hands_back: bool,
    ) -> None:
        """
        averages     returns whether the next step needs averaged gradients
        on_begin     called when a backward pass begins; may raise
        on_unfreeze  called with parameters that were frozen until now; may raise
        on_wake      called with a group that was asleep until now
        hands_back   put averaged gradients into `param.grad`, for an optimizer that user code steps
        """
        self.all_groups = list(groups)
        self.lane, self.spares, self.backward = lane, spares, backward
        self.shards_gradients, self.shards_parameters = settings.shards_gradients, settings.shards_parameters
        self.copies_on_arrival = settings.copy_on_arrival
        self.averages = averages
        self.on_begin, self.on_unfreeze, self.on_wake = on_begin, on_unfreeze, on_wake
        self.hands_back = hands_back
        self.state = GradientState(self.all_groups, scaler, self.backward, averages)
        self.placeholders = GradientPlaceholders(self._zero)
        self.written = HandWritten()
        self.group_and_member: dict[Tensor, tuple[TrainedGroup, Member]] = {
            member.param: (group, member) for group in groups for member in group.members
        }
        self.sleepers = [group for group in groups if group.asleep]
        self._sort()
        # State of the whole run.
        self.order_checksum = 0  # checksum of the reduced groups in their order, equal on every rank
        # Groups reduced only when a pass ends, after late gradients; equal on every rank.
        self.reduced_last: set[TrainedGroup] = set()
        self.has_warned = False  # the warning about `torch.autograd.grad` was logged
        # State since the last step.
        self.began = False  # there was a backward pass, or user code wrote a gradient
        self.had_pass = False  # there was a backward pass
        self.sent_zeros = False  # there was none, and `flush` took part in the reductions of other ranks
        self.used: set[Member] = set()  # parameters with a gradient
        self.frozen: set[Member] = set()  # parameters that were frozen in a pass, equally on all ranks
        self.skipped_sync = False  # a no_sync block since the last reduction
        self.unreduced = False  # a backward pass has left gradients that are not reduced
        # State of the running pass.
        self.no_sync = False  # inside no_sync
        self.syncing = False  # the pass reduces its gradients
        self.wait_for_end = False  # reduce only when the pass ends, because a recomputed part was seen
        self.launched: set[TrainedGroup] = set()  # reductions that are queued or done
        self.missing: dict[TrainedGroup, set[Member]] = {}  # parameters without a gradient so far
        self.queue: deque[TrainedGroup] = deque()  # groups to be reduced before the pass ends, in order
        self.producers: dict[TrainedGroup, list[object]] = {}  # streams that have written gradients
        self.pending: list[Pending] = []  # queued reductions, the oldest first
        self.not_arrived: Tensor | None = None  # has a gradient that has not arrived, and would be averaged
        self.zeroed: set[Member] = set()  # gradients cleared by user code since the last pass
        self.woken: set[TrainedGroup] = set()  # groups that woke up since the last pass, without hooks yet
        # Hooks get a weak reference: Python's garbage collector cannot free a cycle through a tensor's hooks.
        self.me = weakref.ref(self)
        self.hooks: dict[Tensor, list[RemovableHandle]] = {}
        for group in groups:
            if not group.asleep:
                self._watch(group)

    def _sort(self) -> None:
        """Divide the groups by whether they have buffers to reduce or leave gradients in `param.grad`."""
        awake = [group for group in self.all_groups if not group.asleep]
        self.groups = [group for group in awake if not group.gradients.uses_param_grad]
        self.unbuffered = [group for group in awake if group.gradients.uses_param_grad]
        self.left_in_grad = {member for group in self.unbuffered for member in group.members}
        self.replicated = [group for group in self.groups if group.gradients.is_replicated]

    def _watch(self, group: TrainedGroup) -> None:
        """Register hooks on a group's trainable parameters."""
        with without_overrides():
            for param in (m.param for m in group.members):
                if param.requires_grad and param not in self.hooks:
                    self.hooks[param] = [self._watch_arrival(param)]
                    if not group.gradients.uses_param_grad:
                        has_peers = group.gradients.has_peers
                        before = partial(_before_accumulation, self.me, weakref.ref(param), has_peers)
                        self.hooks[param].append(param.register_hook(before))

    def _watch_arrival(self, param: Tensor) -> RemovableHandle:
        handle: RemovableHandle = param.register_post_accumulate_grad_hook(partial(_arrived, self.me))
        return handle

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        """Accumulate gradients of passes in this block on this rank, without reducing them (`no_sync`)."""
        before, self.no_sync, self.skipped_sync = self.no_sync, True, True
        try:
            yield
        finally:
            self.no_sync = before

    # Groups that wake up -------------------------------------------------------------------------

    def wake(self, group: TrainedGroup) -> None:
        """Train a group that was asleep from now on. Every rank must do so at the same place."""
        group.wake()
        self.on_wake(group)
        self._sort()

    def wake_unfrozen(self) -> None:
        """Wake groups with a parameter that user code has unfrozen, and watch that parameter."""
        sleeping = [m for group in self.sleepers if group.asleep for m in group.members]
        if thawed := [m for m in sleeping if m.param.requires_grad]:
            self.on_unfreeze(thawed)
        for group in self.sleepers:
            if group.asleep and any(m.param.requires_grad for m in group.members):
                self.wake(group)
                self.woken.add(group)
            if not group.asleep:
                self._watch(group)

    # One pass ------------------------------------------------------------------------------------

    def begin_scaled(self, divided: bool, grad: Tensor) -> None:
        """Note that a pass has reached a scaled loss; start the pass if this is its first hook."""
        if not self.backward.is_running_here():
            self.begin(divided, scaled=True)
        self.backward.divided, self.backward.scaled = divided, True

    def begin(self, divided: bool = False, scaled: bool = False, by_gradient: bool = False) -> None:
        """Start a backward pass: prepare all groups for it, and finish it when autograd ends.

        The engine calls this, or a hook on a module's output; for a plain `loss.backward()` the hook on its
        first gradient does (`by_gradient`). `divided` and `scaled` tell what was done to the loss.
        """
        if self.backward.accelerator is not None:
            self.backward.check_not_capturing()
        self.on_begin()
        self.complete_failed()
        if self.state.are_local or self.state.unclipped != 1:
            self.state.begin_pass()
        self.backward.begin(divided, scaled)
        self.syncing = not self.no_sync and (self.shards_gradients or self.backward.is_boundary)
        self.wait_for_end = False
        if self.placeholders.shown:  # autograd must not accumulate into placeholders
            self.lift_placeholders()
        if self.unbuffered and self.state.next_clip is not None:
            # User code has cleared all gradients that the norm was chosen for. One of this pass may be there.
            cleared = sum(member.param.grad is None for member in self.used)
            if cleared and cleared >= len(self.used) - by_gradient:
                self.state.forget()
        if self.sleepers:
            self.wake_unfrozen()
        self.launched.clear()
        self.zeroed.clear()
        self.began = self.had_pass = self.unreduced = True
        self.queue.clear()
        preset = list[Member]()  # as in torch, also gradients that user code has put there
        with without_overrides():
            for group in self.groups:
                if group not in self.reduced_last:
                    self.queue.append(group)
                self.producers[group] = []
                missing = self.missing[group] = set()
                for member in group.members:
                    (missing if member.param.requires_grad else self.frozen).add(member)
                    if member.param.grad is not None:
                        preset.append(member)
            self.move_hooks_last(self.hooks)
        self.used.update(preset)
        self.backward.when_autograd_ends(self.finish)
        if preset and self.state.scaler.scale != 1 and not by_gradient:
            raise RuntimeError(UNSCALED.format(names_of(preset)))  # autograd would add scaled ones to these

    def move_hooks_last(self, params: Iterable[Tensor]) -> None:
        """Move our hooks behind the user's, which must see a gradient before it moves to a flat buffer."""
        for param in params:
            hooks = self.hooks[param]
            if next(reversed(post_accumulate_grad_hooks(param))) != hooks[0].id:
                hooks[0].remove()
                hooks[0] = self._watch_arrival(param)

    def lift_placeholders(self) -> None:
        """Remove placeholders from `param.grad`, because autograd adds new gradients to them."""
        found = self.placeholders.changes()
        self.drop([*found.cleared, *(member for member, _ in found.written)])
        # Tensors that user code has written stay in `param.grad`, and autograd adds to them.
        shown = list(self.placeholders.shown)
        self.placeholders.lift()
        if not self.backward.running:
            self.backward.when_autograd_ends(lambda: self._show_again(shown))

    def _show_again(self, members: Sequence[Member]) -> None:
        """Restore placeholders after `torch.autograd.grad`, which calls tensor hooks and sets no `grad`."""
        if not self.backward.running:
            self.placeholders.show(m for m in members if m.param.grad is None)

    def warn_not_averaged(self) -> None:
        """Warn once, at the end of a pass, that gradients from `torch.autograd.grad` are not averaged."""
        if self.not_arrived is not None and not self.has_warned:
            self.has_warned = True
            log.warning(NOT_AVERAGED, self.group_and_member[self.not_arrived][1].name)
        self.not_arrived = None

    def arrived(self, param: Tensor) -> None:
        """Move a gradient that autograd has completed to its flat buffer, and reduce complete groups."""
        group, member = self.group_and_member[param]
        self.not_arrived = None
        backward = self.backward
        if not backward.running:
            self.begin(by_gradient=True)
        divisor = backward.divisor
        if divisor is None:
            divisor = backward.note_gradient()
        self.used.add(member)
        if group.gradients.uses_param_grad:
            return
        if divisor != 1 and param.grad is not None:
            param.grad.div_(divisor)
        if not self.shards_parameters and current_backward() != backward.graph_task:  # a recomputed part
            self.wait_for_end = True
        here, before = self.lane.producer(), self.producers[group]
        if before and here is not None:  # another stream may have written to the buffer
            self.lane.order(before[-1], here)
        before.append(here)
        if group in self.launched:  # late: the queued job uses the group's buffers until it is done
            self._drain(0)
        elif self.shards_gradients and self.pending and not self.lane.stops_host:
            self._drain(IN_FLIGHT - 1)  # free an older buffer before this group opens its own
        if self.copies_on_arrival or not self.syncing:
            group.gradients.take(member, final=self.syncing and not self.wait_for_end)
        self.missing[group].discard(member)
        if self.syncing and not self.wait_for_end and not self.shards_parameters:
            self._launch_complete()

    def _launch_complete(self) -> None:
        """Reduce complete groups in list order, equal on every rank; stop at the first incomplete one."""
        while self.queue and not self.missing[self.queue[0]]:
            self._launch(self.queue.popleft())

    @torch.no_grad()
    def complete(self, group: ParameterGroup) -> None:
        """Reduce a group at stage 3, because all modules that use it have finished their backward."""
        if not isinstance(group, TrainedGroup) or group.asleep or group.gradients.uses_param_grad:
            return
        if self.syncing and group not in self.launched and group not in self.reduced_last:
            self._launch(group)

    def _launch(self, group: TrainedGroup) -> None:
        """Queue the group's reduction on the lane: see [Note: what travels].

        Its gradients are detached here, on backward's thread. If the job detached them, a gradient that
        arrives while the job is running would be reduced now on some ranks and be late on others.
        """
        self._drain(IN_FLIGHT - 1)
        self.launched.add(group)
        self.order_checksum = crc32(group.name.encode(), self.order_checksum)
        gradients = group.gradients
        # Without a backward pass, what is in `param.grad` was written by user code and is not to be averaged.
        detached = gradients.detach() if self.had_pass else []
        # Tensors that the lane must keep alive until the job is done.
        read = list(dict(detached).values())
        for tensor in (gradients.local_grads, gradients.grad_slice):
            if tensor is not None:
                read.append(tensor)
        averages = self.averages()
        job = partial(
            gradients.reduce, detached, self._message_dtype(group), self.backward.is_boundary, averages
        )
        self.pending.append(self.lane.submit(job, read, self.producers.get(group, [])))

    def _message_dtype(self, group: TrainedGroup) -> torch.dtype:
        """Return the dtype of the messages: the accumulation dtype if gradients of several passes add up.

        It depends only on settings, passes and `no_sync`, so that it is equal on every rank.
        """
        gradients = group.gradients
        adds_up = self.skipped_sync or (not self.shards_gradients and self.backward.accumulation.adds_up())
        exact = gradients.accumulate if adds_up else group.parameters.dtype
        return gradients.settings.dtypes.reduce or exact

    def _drain(self, leave: int) -> None:
        """Wait for the oldest reductions until `leave` are pending."""
        while len(self.pending) > leave:
            self.pending.pop(0).wait()

    @torch.no_grad()
    def finish(self) -> None:
        """End the backward pass: reduce the groups that were not reduced during it, and show placeholders."""
        backward = self.backward
        if not backward.running:
            return
        backward.end()
        if self.not_arrived is not None:
            self.warn_not_averaged()
        if self.woken:
            self._take_unnoticed()
        if backward.scaled_at_outputs and backward.divisor is None and not backward.scaled:
            raise RuntimeError(SCALED)
        if self.syncing:
            self._reduce_rest()
        if self.hands_back and self.syncing and backward.is_boundary:
            self._hand_back()
            return
        self.placeholders.show(self.used - self.left_in_grad)

    def _hand_back(self) -> None:
        """Put averaged gradients into `param.grad`, for an optimizer that user code steps."""
        self.reduce_late()
        for member in self.used - self.left_in_grad:
            self.placeholders.hand_out(
                member, self.group_and_member[member.param][0].gradients.averaged(member)
            )

    def _take_unnoticed(self) -> None:
        """Take gradients of groups that woke up in this pass, which may have arrived before their hooks."""
        for group in self.woken:
            for member in group.members:
                if member.param.grad is not None:
                    self.used.add(member)
                    if not group.gradients.uses_param_grad:
                        group.gradients.take(member, final=False)
        self.woken.clear()

    # Between passes ------------------------------------------------------------------------------

    @torch.no_grad()
    def complete_failed(self) -> None:
        """Run the reductions that a failed pass has left out. Ranks where it succeeded wait for them."""
        if not (self.unreduced and (self.backward.failed or self.backward.running)):
            return
        self.backward.fail()  # a plain `loss.backward()` that has raised is still running
        if self.syncing and any(group.gradients.has_peers for group in self.groups):
            self._reduce_rest()

    @torch.no_grad()
    def flush(self) -> None:
        """Reduce gradients that backward has left unreduced, before a step.

        Without any backward pass reduce zeros, because other ranks may have had one.
        """
        if self.backward.running:
            self.backward.end()
        had_none = not (self.had_pass or self.sent_zeros)
        if self.unreduced or had_none:
            self._reduce_rest()
        self.sent_zeros = self.sent_zeros or had_none
        for group in self.replicated:
            group.gradients.average_over_replicas()  # no effect if a pass at the accumulation boundary did it

    def _reduce_rest(self) -> None:
        """Reduce all groups that are not reduced yet, also those without gradients on this rank."""
        self._drain(0)
        # During the pass `queue` had only groups that are not in `reduced_last`, on all ranks.
        for is_last in (False, True):
            for group in self.groups:
                if (group in self.reduced_last) is is_last and group not in self.launched:
                    self._launch(group)
        self._drain(0)
        self.spares.clear()
        self.unreduced = self.skipped_sync = False

    @property
    def late(self) -> list[TrainedGroup]:
        """The groups that have got gradients on this rank after their reduction."""
        late: list[TrainedGroup] = []
        for group in () if self.unreduced else self.groups:
            if group.gradients.arrived:
                late.append(group)
        return late

    def reduce_late_between_passes(self) -> None:
        """Reduce late gradients, if all others are reduced. Every rank must call this."""
        if not self.unreduced and not self.backward.running:
            self.reduce_late()

    @torch.no_grad()
    def reduce_late(self) -> None:
        """Reduce groups with late gradients on any rank. Every rank must call this.

        A parameter may be used outside of its module, or again in a recomputed part. From now on such a group
        is reduced when the pass ends (`reduced_last`).
        """
        late = set(self.late)
        pairs = dict.fromkeys((group.shard_comm, group.replica_comm) for group in self.groups)
        for pair in pairs:
            theirs = [group for group in self.groups if (group.shard_comm, group.replica_comm) == pair]
            flags = torch.tensor([float(group in late) for group in theirs], device=pair[0].device)
            # By the sum all ranks know which groups to reduce, whichever rank has the late gradients.
            for communicator in pair:
                communicator.sum_numbers(flags, "gradients that came late")
            for group in (group for group, flag in zip(theirs, flags.tolist(), strict=True) if flag):
                self.reduced_last.add(group)
                self._launch(group)
        self._drain(0)

    # By hand -------------------------------------------------------------------------------------

    def find_user_changes(self) -> Found:
        """Find gradients that user code cleared or wrote since the last backward pass, before a step.

        Cleared gradients are set to zero. Written ones are returned, for `put`. Raises RuntimeError for
        written gradients under a loss scale, and for gradients of parameters that were always frozen.
        """
        if self.sleepers or self.woken or self.unbuffered:
            self._catch_up()
        found = self.placeholders.changes()
        for group in self.sleepers:
            if group.asleep:
                check_trained(m for m in group.members if m.param.grad is not None)
        known, shown = dict(found.written), self.placeholders.shown
        with without_overrides():
            for group in self.groups:
                for member in group.members:
                    grad = member.param.grad
                    if grad is not None and shown.get(member) is not grad and member not in known:
                        found.written.append((member, grad))  # put there by user code
        if found.written and self.state.scaler.scale != 1:
            raise RuntimeError(UNSCALED.format(names_of(m for m, _ in found.written)))
        for member, _ in found.written:
            member.param.grad = None
        if found.cleared:
            self.drop(found.cleared)
        return found

    def _catch_up(self) -> None:
        """Find gradients that no hook has seen: of woken groups, and of groups that use `param.grad`."""
        if self.sleepers:
            self.wake_unfrozen()
        if self.woken:
            if any(m.param.grad is not None for group in self.woken for m in group.members):
                self.began = self.unreduced = True
            self._take_unnoticed()
        with without_overrides():
            for group in self.unbuffered:  # as in torch, also gradients that user code has put or cleared
                for member in group.members:
                    if member.param.grad is None:
                        self.used.discard(member)
                    elif member not in self.used:
                        self.used.add(member)
                        self.began = True
        if self.unbuffered and not self.used:
            self.state.forget()

    def drop(self, members: Iterable[Member]) -> None:
        """Set gradients that user code has cleared to zero."""
        for member in members:
            self.used.discard(member)
            self._zero(member)

    @torch.no_grad()
    def put(self, member: Member, gradient: Tensor) -> None:
        """Replace the averaged gradient by one that user code has written."""
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"{member.name}.grad was set to a {gradient.layout} tensor. Set it to a dense one "
                "(to_dense())"
            )
        group = self.group_and_member[member.param][0]
        if group.gradients.has_peers:
            self.written.note(GRADIENT, member, gradient)
        member.param.grad = None
        group.gradients.put(member, gradient)
        self.used.add(member)
        self.began = True
        self.placeholders.show([member])

    @torch.no_grad()
    def give(self, member: Member, gradient: Tensor) -> None:
        """Set the gradient of a parameter that has none from a backward pass. Every rank must call this."""
        param = member.param
        group = self.group_and_member[param][0]
        if group.asleep:
            check_trained([member])
        if group.gradients.uses_param_grad:
            param.grad = torch.empty_like(param).copy_(gradient)
            self.used.add(member)
            self.began = True
        else:
            self.put(member, gradient)

    def _zero(self, member: Member) -> None:
        """Set a gradient to zero that user code has cleared, and note it for the comparison between ranks."""
        gradients = self.group_and_member[member.param][0].gradients
        gradients.drop(member)
        # Without a valid slice it is one addend of an average to come, which ranks may clear independently.
        if gradients.has_peers and gradients.slice_is_valid:
            self.written.note(GRADIENT, member, CLEARED)
        self.zeroed.add(member)
        if self.zeroed >= self.used:
            self._zero_rest()
            self.state.forget()

    def _zero_rest(self) -> None:
        """Set gradients to zero that only other ranks' passes have produced.

        A rank shows placeholders for gradients of its own passes only, but keeps slices of all. User code
        that has cleared all placeholders means all gradients.
        """
        averaged = [g for g in self.groups if g.gradients.has_peers and g.gradients.slice_is_valid]
        for group in averaged:
            for member in group.members:
                if member not in self.zeroed:
                    group.gradients.drop(member)
        if averaged:
            self.written.note_all_cleared()

    def forget(self) -> None:
        """Discard the gradients of all passes, after a step or to repeat one."""
        # Wait first: the queued collectives read and write the buffers. If one fails, none stays queued.
        pending, self.pending = self.pending, []
        for job in pending:
            job.wait()
        self.backward.end()
        self.backward.failed = self.unreduced = self.began = self.had_pass = self.sent_zeros = False
        self.launched.clear()
        self.used.clear()
        self.frozen.clear()
        self.placeholders.shown.clear()
        if self.written.whole or self.written.slices:
            self.written.forget_gradients()
        self.state.forget()

    def close(self) -> None:
        """Remove the hooks from the parameters, and discard gradients."""
        for hooks in self.hooks.values():
            for hook in hooks:
                hook.remove()
        self.forget()


def check_trained(members: Iterable[Member]) -> None:
    """Raise RuntimeError if `members` is not empty: their group is asleep, so no step would use gradients."""
    if named := names_of(members):
        raise RuntimeError(
            f"a gradient was written to {named}, which has been frozen since initialize, so no step would "
            "use it. Unfreeze the parameter first (requires_grad_(True)), or leave its grad None"
        )
