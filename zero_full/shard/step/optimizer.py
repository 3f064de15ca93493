"""`ZeroOptimizer`: any elementwise optimizer, stepping only this rank's slices.

It stands where the optimizer it wraps stood: same `param_groups` (so schedulers work), `step`,
`zero_grad`, `state_dict`. Which stage it is, is a setting of its parts.
"""

import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils.hooks import RemovableHandle

from zero_full._compat import load_hooks, mark_stepped, state_dict_hooks
from zero_full.comm.lane import lane_for
from zero_full.errors import NotFiniteError
from zero_full.offload import Waiting
from zero_full.optim.step import loss_of
from zero_full.precision.scaler import StaticScale
from zero_full.settings import Settings
from zero_full.shard.contents.rank_state import load_own_part, own_part
from zero_full.shard.contents.state import Contents
from zero_full.shard.deal.dealer import Sharded
from zero_full.shard.group import master as owned_state
from zero_full.shard.group.grad_placeholder import Found
from zero_full.shard.group.gradients import Bucket
from zero_full.shard.group.offloaded_storages import OffloadedStorages
from zero_full.shard.group.optimizer_state import OFFLOADED
from zero_full.shard.group.parameters import FlatParameter, GatherState, Member
from zero_full.shard.group.process_groups import Groups
from zero_full.shard.group.registry import register
from zero_full.shard.guards.local_steps import meet, refuse_frozen, refuse_thawed, refuse_writes
from zero_full.shard.guards.model_watch import ModelWatch, ParameterWrites
from zero_full.shard.guards.unfinished_step import UnfinishedStep
from zero_full.shard.passes.gather import ParameterGatherer
from zero_full.shard.passes.grad_state import KeptGradients
from zero_full.shard.passes.reduce import GradientReducer
from zero_full.shard.step.agreement import Said, agree, doings_of, refuse_lost, refuse_unused
from zero_full.shard.step.background_work import Beside, raise_failure
from zero_full.shard.step.copy_waits import await_gradients, await_parameters, collect
from zero_full.shard.step.delayed_update import DelayedUpdates
from zero_full.shard.step.optimizer_proxy import InItsPlace
from zero_full.shard.step.report import NonFinite, StepReport
from zero_full.shard.step.stop_signals import SIGNALS, StopSignals
from zero_full.shard.step.teardown import leave_model
from zero_full.shard.step.update import Steppers
from zero_full.shard.step.wrapped_optimizer import (
    AFTER,
    BEFORE,
    Base,
    NoOptimizer,
    listed_in,
    refuse_gradients,
    refuse_unusable,
    run_hooks,
    zero_in_place,
)

log = logging.getLogger("zero_full")
CLOSED = "step after destroy: initialize the model again"


class ZeroOptimizer(InItsPlace):
    """Steps this rank's pieces of a model's parameters, in the place of the optimizer that it wraps."""

    def __init__(
        self,
        base: torch.optim.Optimizer,
        model: nn.Module,
        parts: Sharded,
        groups: Groups,
        settings: Settings,
        scaler: StaticScale,
    ) -> None:
        self.base, self.parts, self.groups = base, parts, groups
        # torch's own constructor would copy the groups; here they stay the wrapped optimizer's. This makes
        # the rest of what torch keeps: hooks, and the names that profilers show.
        self.__setstate__({})
        self.own_state = owned_state.cut_state(base, parts.owned, settings.dtypes)
        self.contents = Contents(base, parts, groups, settings.dtypes)
        self.redirected = Base(base, self)
        self.owned, self.frozen, self.buckets = parts.owned, parts.frozen, parts.buckets
        self.owned_of = {owned.flat: owned for owned in parts.owned}
        self.settings, self.scaler = settings, scaler
        self.lane = lane_for(groups.dense.shard.device, settings.overlap)
        self.waiting = Waiting(settings.tier, parts.shelf)
        self.report = NonFinite()
        self.signals = StopSignals()
        self.last: StepReport | None = None
        self.steppers = Steppers(self.redirected, settings.dtypes, self.lane, settings.tier)
        self.steppers.attach(self.owned)
        self.contents.stepper, self.contents.owners = self.steppers.kept, self.steppers.owners
        self.delayed = DelayedUpdates(self)
        self.closed = self.states_offloaded = False
        self.offloaded = OffloadedStorages()
        self.writes = ParameterWrites(m for v in self.flats() if not v.released_at_rest for m in v.members)
        self.has_peers = any(each.size > 1 for each in groups.communicators)
        self.unfinished = UnfinishedStep(self.has_peers)
        self.at_step: list[Callable[[], None]] = []  # what counts a step: its effect is complete then
        self.calls = 0  # of step
        self.said_nothing_to_do = False
        self.beside: Beside | None = None  # a checkpoint that is being written
        register(self, model.parameters())
        register(self, (m.param for flat in self.flats() for m in flat.members))
        self.listed = listed_in(self.param_groups)
        self.watch = ModelWatch(model, [m.param for m in self._members()], bool(parts.sites))
        self.reducer = GradientReducer(self.buckets, self.lane, settings)
        self.reducer.before_waking = partial(refuse_thawed, self)
        self.reducer.on_waking = self._wake
        self.reducer.backward.at_begin += [partial(self.unfinished.refuse, "backward"), self.take_back_moved]
        self.gradients = KeptGradients(scaler, self.reducer)
        self.gradients.averages = self.steppers.averages
        for bucket in self.buckets:
            bucket.averages = self.steppers.averages
        self.reducer.hands_back = isinstance(base, NoOptimizer)
        self.steppers.step_early(self.owned, partial(self.gradients.factor, None, 0.0))
        self.hooks: list[Any] = refuse_gradients(base, model, settings.stage)
        self.guards: list[RemovableHandle] = []  # on the model's state_dict
        self.gatherer: ParameterGatherer | None = None
        if parts.sites:
            beside = lane_for(groups.dense.shard.device, settings.overlap)
            limits = settings.gathering
            self.gatherer = ParameterGatherer(model, parts.sites, beside, limits, self.reducer, parts.shelf)

    def flats(self) -> list[FlatParameter]:
        """All flat buffers of parameters."""
        return self.parts.flats

    def _members(self) -> list[Member]:
        return [member for bucket in self.buckets for member in bucket.members]

    def _wake(self, bucket: Bucket) -> None:
        """A bucket has woken up: its pieces are others now."""
        owned = self.owned_of[bucket.flat]
        owned.wake()
        for member, piece in owned.pieces.items():
            self.own_state.add(piece.master, member.param)
        self.steppers.attach(self.owned)

    # Steps ---------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"ZeroOptimizer(stage {self.settings.stage}, {len(self.buckets)} buckets, {self.base!r})"

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average what is left, step this rank's slices, send them to everyone. `last` says what happened.

        `closure` is called once, before that, to run forward and backward; what it returns is returned.
        """
        loss = loss_of(closure)
        self.unfinished.refuse("step")
        self.last = None
        self.calls += 1
        self.unfinished.run(self._step)
        self.redirected.run_step_hooks(AFTER)
        return loss

    def _step(self) -> None:
        self.finish_update()
        self._take_step(*self._look_around())

    def _take_step(self, found: Found, failure: Exception | None) -> None:
        if not (self.has_peers or self.reducer.began or found.written or failure):
            return self._say_nothing_to_do()  # like torch: no gradients, no step
        self.reducer.flush()
        failure = failure or await_gradients(self.awake)
        for member, gradient in () if failure else found.written:
            self.reducer.put(member, gradient)
        self.gradients.refuse_two_scales()
        averaged = self.gradients.begin_step()
        scale, gathered = self.scaler.scale, self.gatherer.trail if self.gatherer is not None else 0
        so_far: list[tuple[str, Any]] = [
            ("call of step", self.calls),
            ("order of gathers", gathered),
            ("loss scale", scale),
        ]
        so_far += [("order of reductions", self.reducer.trail), ("signals watched", self.signals.told)]
        written = "" if self.contents.stepper.is_apart else self.writes.digest()  # there it is refused
        doings = doings_of(self.param_groups, so_far, written, failure)
        alarm = bool(self.waiting.trouble) or (self.beside is not None and self.beside.has_failed())
        stops, by_hand = self.signals.came is not None, self.reducer.written
        said = Said(self.reducer.used, doings, stops, alarm, averaged, by_hand, len(self.reducer.late))
        needs_norm = self.settings.needs_norm or not averaged
        agreed = agree(self.groups, self.awake, said, needs_norm)
        if agreed.late and failure is None:
            self.reducer.reduce_late()
            agreed = agree(self.groups, self.awake, replace(said, late=0), needs_norm)
        self.signals.requested |= agreed.stops
        if failure is not None:
            raise failure
        self.writes.forget()
        by_hand.forget()
        if agreed.alarm:
            raise_failure(self.waiting.trouble, self.beside)
        if not agreed.used:
            return self._say_nothing_to_do()  # the same, on all ranks
        if self.settings.refuse_unused:
            refuse_unused(self.groups, self.awake, self.reducer.used)
        norm = None if agreed.norm is None else agreed.norm / self.gradients.scale
        finite = norm is None or isfinite(norm)
        apply = finite or (averaged and not self.settings.check_overflow)
        if not finite:
            self.report.tell(self.buckets, self.groups.everyone, apply, self.scaler)
        try:
            if apply:
                self._update(norm, agreed.used)
        except NotFiniteError as error:  # on all ranks, and nothing has changed
            finite = apply = False
            self.report.tell_average(error, self.scaler)
        self.unfinished.change()  # also of a step that is skipped: its scale and counters
        self.last = StepReport(apply, norm, scale)
        self.report.end_step()
        self.gradients.end_step()
        self.report.learn(self.scaler, overflow=not finite)
        for act in self.at_step:
            act()

    def watch_signals(self, signals: Iterable[int] = SIGNALS) -> None:
        """Note these signals until `destroy`, instead of ending: `stop_requested`. On every rank."""
        self.signals.watch(signals)

    @property
    def stop_requested(self) -> bool:
        """Whether a watched signal has come to any rank: the same on all ranks, and found out in a step."""
        return self.signals.requested

    def _say_nothing_to_do(self) -> None:
        if not self.said_nothing_to_do:
            log.warning("optimizer.step() without gradients does nothing (this is said once)")
        self.said_nothing_to_do = True

    def _look_around(self) -> tuple[Found, Exception | None]:
        """Take in, or refuse, what was done to the model and its gradients by hand since the last step.

        A refusal is returned: other ranks, which may have no reason for one, must hear of it.
        """
        if self.closed or self.states_offloaded:
            raise RuntimeError(OFFLOADED if self.states_offloaded else CLOSED)
        if isinstance(self.base, NoOptimizer):
            self.redirected.own_step()  # which says what to do
        if self.reducer.backward.failed or self.reducer.backward.running:
            raise RuntimeError("the last backward pass has failed: call zero_grad before the next forward")
        try:
            self.redirected.run_step_hooks(BEFORE)
            self._take_back_state()
            masters = [owned.flat.name for owned in self.owned if owned.master_was_written()]
            for owned in self.owned:
                owned.follow_master()
                if self.settings.needs_norm:
                    owned.refuse_sparse()
            refuse_unusable(self.param_groups, self.listed)
            refuse_frozen(self)
            self.look_at_model()
            for owned in self.owned:
                owned.take_written()
            refuse_writes(self.contents.stepper, self.writes, masters)
            return self.gradients.take_in(), None
        except Exception as error:  # a hook of the user's may raise any
            return Found(), error

    def look_at_model(self) -> None:
        """Raise if something has become of the model that a step would ignore."""
        self.unfinished.refuse("forward")
        self.watch.check()
        self.take_back_moved()

    def take_back_moved(self) -> None:
        """Parameters that were given other memory go back to their place, with their new values."""
        for flat in self.flats():
            if not flat.released_at_rest:
                self.writes.moved.update(flat.take_back_moved())

    @property
    def awake(self) -> list[Bucket]:
        """The buckets that take part in steps."""
        return [bucket for bucket in self.buckets if not bucket.asleep]

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Let go of the gradients.

        By default their memory is freed on accelerators and kept on the CPU, where getting fresh pages
        from the system would cost more than the step. With False they become zero, as in torch.
        """
        if set_to_none is False and not self.reducer.backward.failed:
            return zero_in_place(m.param for m in self._members())
        self.reducer.forget()
        if self.gatherer is not None:
            self.gatherer.forget()
        self.steppers.early.drop()
        self.gradients.forget()
        self.report.forget()
        for bucket in self.buckets:
            on_cpu = bucket.kind.device.type == "cpu"
            bucket.forget(free=set_to_none is not None or not on_cpu)
        self.unfinished.give_up_gradients()

    def state_dict(self) -> dict[str, Any]:
        """This rank's part: ranges of parameters and state, the groups' options and the loss scale."""
        self.refuse_unfinished("state_dict")
        run_hooks((self, self.base), state_dict_hooks, BEFORE)
        self.catch_up()
        return dict(run_hooks((self, self.base), state_dict_hooks, AFTER, own_part(self)))

    def refuse_unfinished(self, call: str) -> None:
        """Raise between the backward passes of a step, and after one that was cut short."""
        self.unfinished.refuse_values(call)
        if self.reducer.began and self.gradients.are_new:
            raise RuntimeError(
                f"{call} between the backward passes of a step: their gradients would be lost. Save after "
                "step, or give the gradients up with zero_grad first"
            )

    @torch.no_grad()
    def finish_update(self) -> None:
        """Let a delayed update count now, if one is under way. Every rank must call this, between passes."""
        self.delayed.finish()

    def catch_up(self) -> None:
        """Before parameters or masters are read: what was written by hand is taken in."""
        self.finish_update()
        if self.states_offloaded or self.waiting.lost:
            raise RuntimeError(self.waiting.lost or OFFLOADED)
        self._take_back_state()
        self.take_back_moved()
        for owned in () if self.unfinished.is_cut_short else self.owned:  # else all is to be loaded
            owned.follow_parameters()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from this rank's part. Every rank must call this: parameters are gathered."""
        state_dict = run_hooks((self, self.base), load_hooks, BEFORE, state_dict)
        self.on_every_rank("load_state_dict of the optimizer")
        load_own_part(self, state_dict)
        run_hooks((self, self.base), load_hooks, AFTER)

    def scale(self, loss: Tensor, divided: bool = False) -> Tensor:
        """The loss times the loss scale: what a `backward` of your own starts from.

        `divided`: by the number of micro-batches already.
        """
        scaled = self.scaler.times(loss * 1)  # a hook on the caller's own would stay there
        scaled.register_hook(partial(self.reducer.begin_scaled, divided))
        return scaled

    @torch.no_grad()
    def on_every_rank(self, call: str) -> None:
        """Return when every rank has made this call of its user's; see `comm/user_calls.py`.

        To be called before the call's first message.
        """
        for calls in self.groups.user_calls:
            calls(call, self._settle)

    def tell_every_rank(self, call: str) -> None:
        """Let others who wait for this rank's next call know that it is this one, and go on."""
        for calls in self.groups.user_calls:
            calls.tell(call)

    def _settle(self) -> None:
        """Wait until no collective of this rank is queued."""
        for lane in (self.lane, self.gatherer.lane if self.gatherer is not None else self.lane):
            lane.submit(lambda: None, [], []).wait()

    def meet(self) -> None:
        """Let all ranks have the same parameters, in the middle of an interval of `ZeroOneAdam`'s, too.

        Every rank must call this, between steps: before the model is evaluated or exported.
        """
        self.on_every_rank("meet")
        meet(self)

    # The parts of a step -------------------------------------------------------------------------

    def _update(self, norm: float | None, used: Container[Member]) -> None:
        factor = self.gradients.factor(norm, self.settings.clip)
        used = self.steppers.concerned(self.owned, used)
        stepped = [o for o in self.owned if not o.bucket.asleep and any(m in used for m in o.flat.members)]
        stepper = self.steppers.choose(stepped)
        if self.delayed.is_due(stepper):
            return self.delayed.begin(stepper, stepped, used, factor)
        parts = self.steppers.parts(stepper, stepped, self.settings, self.parts.flow)
        on_change = partial(self._begin_to_change, 1.0 if stepper.fuses else factor)
        self.steppers.step(stepper, self.owned, parts, used, factor, on_change)
        refuse_lost(self.groups, self.waiting)
        self.gradients.note_step(factor, multiplied=not stepper.fuses)
        mark_stepped(self.base)
        # As torch's optimizers do: a graph from before this step must not run backward with other values.
        increment_version([m.param for owned in stepped for m in owned.flat.members if m in used])
        for owned in stepped:
            owned.note_versions()
        self.writes.forget()
        self.send(self.awake)

    def _begin_to_change(self, factor: float) -> None:
        self.unfinished.change()
        self.gradients.multiply(factor)

    def start_over(self) -> None:
        """All values have been loaded: nothing is left of a step that was cut short."""
        self.steppers.by_torch.end()
        self.unfinished.forget()

    def publish(self) -> None:
        """All parameters follow their masters."""
        self.delayed.taken = None  # the state may be another one
        for owned in self.owned:
            owned.copy_master()
        self.send(self.buckets)
        if self.contents.stepper.is_apart:  # what each rank has of its own was not written by hand
            self.writes.forget()

    def send(self, buckets: Sequence[Bucket]) -> None:
        """This rank's slices to everyone. Parameters that are whole have their new values afterwards.

        On an accelerator it is the current stream that waits for them, not the host. The gather does not go
        on beside the next forward, because hooks on modules would not notice every reader of a weight: a
        view that somebody has kept, a captured CUDA graph, a moving average, code that writes to it.
        """
        if self.gatherer is not None:
            self.gatherer.release_all()
        for bucket in buckets:
            bucket.flat.node_copy = None
        owned = [self.owned_of[bucket.flat] for bucket in buckets]
        whole = [each for each in owned if each.flat.state is GatherState.WHOLE]
        here = self.lane.producer()
        for pending in [self.lane.submit(partial(collect, o), [o.flat.full], [here]) for o in whole]:
            pending.wait()
        await_parameters(self.groups, owned)

    def close(self, gather: bool) -> None:
        """Leave the model without hooks, its parameters as they are or, if every rank asks for it, whole."""
        if not self.closed:
            if gather:
                self.unfinished.refuse_values("destroy(gather=True)")
                self.on_every_rank("destroy(gather=True)")
            self.signals.leave()
            if gather and self.contents.stepper.is_apart and not self.reducer.backward.failed:
                self.zero_grad()
                self.meet()
            with ExitStack() as leaving:
                leaving.callback(setattr, self, "closed", True)
                leaving.callback(leave_model, self, gather)
                if self.beside is not None:
                    leaving.callback(self.beside.close)
                self.delayed.end()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What GradScaler asks before a step. Its own division of gradients finds none, or not all."""
        raise RuntimeError(
            "torch's GradScaler cannot step this optimizer, whose gradients lie averaged in flat buffers: "
            "leave the scaler out. The key fp16 has a loss scale, and bf16 and fp32 need none"
        )

    # What this rank has --------------------------------------------------------------------------

    def holdings(self, flats: Sequence[FlatParameter] | None = None) -> dict[str, list[Tensor]]:
        """Every tensor that this rank keeps, by kind; counters are step numbers. `flats`: None for all."""
        flow, stepper = self.parts.flow, self.contents.stepper
        beside = [*stepper.held(), *(t for *_, s, _ in self.contents.whole_states() for t in s.values())]
        away = [*self.steppers.early.held(), *self.delayed.aside.values(), *self.settings.tier.held()]
        away += flow.held() if flow else []
        flats = self.flats() if flats is None else flats
        return owned_state.holdings(flats, self.owned, self.base.state, beside, away)
