"""`ZeroOptimizer`: wraps any elementwise optimizer, and steps this rank's slices of the parameters only.

It takes the place of the optimizer that it wraps: same `param_groups` (so LR schedulers work), `step`,
`zero_grad` and `state_dict`. The ZeRO stage is a setting of the parts that this class is built from.

[Note: a step] A step is five functions over values:

    collect   reduce gradients that backward left unreduced; adopt what user code did since the last step, or
              raise
    agree     sum one vector over the ranks: gradient norm, flags, and a check that all ranks do the same
    decide    apply or skip, and the factor of the gradients, from values that are equal on all ranks
    update    the stepper updates this rank's slices, part by part
    publish   all-gather the new parameters where they are kept whole

Options change the step at these points. A run without an option executes none of its code.

    delayed updates      completed before `collect`, and begun in place of `update`   `delayed_update.py`
    offloaded state      waits for its copies in `collect` and `publish`              `copy_waits.py`
"""

import logging
import sys
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils.hooks import RemovableHandle

from zero_full._compat import (
    OPT_CALLED,
    clean_name,
    global_step_hooks,
    load_hooks,
    runs_step_hooks,
    state_dict_hooks,
    step_hooks,
)
from zero_full.comm.lane import Pending, lane_for
from zero_full.comm.topology import this_rank
from zero_full.errors import CommunicationError, DesyncError, DisagreementError, NotFiniteError
from zero_full.offload import DeviceTier, Offload, ParamStore
from zero_full.optim.step import loss_of
from zero_full.precision.scaler import StaticScale
from zero_full.settings import Settings
from zero_full.shard.contents.rank_state import (
    check_facts,
    check_same_rank,
    facts_of,
    load_facts,
    rank_part,
)
from zero_full.shard.contents.state import Contents, NewState, RankPart
from zero_full.shard.deal.dealer import Sharded
from zero_full.shard.group.gradients import Found
from zero_full.shard.group.master import adopt_changed
from zero_full.shard.group.offloaded_storages import OffloadedStorages
from zero_full.shard.group.parameter_group import ParameterGroup, TrainedGroup, cut_state, holdings
from zero_full.shard.group.parameters import GatherState, Member
from zero_full.shard.group.process_groups import Communicators
from zero_full.shard.group.registry import register, unregister
from zero_full.shard.group.released import OFFLOADED
from zero_full.shard.guards.guard import Guard
from zero_full.shard.guards.local_steps import LocalSteps, check_thawed
from zero_full.shard.guards.model_watch import ModelWatch, ParameterWrites, ParamGroups
from zero_full.shard.guards.unfinished_step import UnfinishedStep
from zero_full.shard.passes.backward import Accumulation, BackwardPass
from zero_full.shard.passes.gather import ParameterGatherer
from zero_full.shard.passes.reduce import GradientReducer
from zero_full.shard.step.agreement import (
    Agreed,
    Agreement,
    Contribution,
    actions_of,
    check_all_used,
    raise_on_all_ranks,
)
from zero_full.shard.step.background_work import BackgroundWork, raise_failure
from zero_full.shard.step.copy_waits import all_gather_after_copy, await_gradients, await_parameters
from zero_full.shard.step.delayed_update import LACKS_LAST_UPDATE, DelayedUpdates, Update
from zero_full.shard.step.peers import PartPeers
from zero_full.shard.step.report import NonFinite, StepReport
from zero_full.shard.step.stop_signals import SIGNALS, StopSignals
from zero_full.shard.step.update import Steppers
from zero_full.shard.step.wrapped_optimizer import (
    AFTER,
    BEFORE,
    NO_OPTIMIZER,
    NoOptimizer,
    OptimizerProxy,
    RedirectedOptimizer,
    raise_on_gradients,
    run_hooks,
    zero_in_place,
)

log = logging.getLogger("zero_full")
STEP = "step"  # the call that the ranks compare, besides "grad_norm"


@dataclass(frozen=True)
class Collected:
    """This rank's input to the exchange of a step."""

    scale: float  # the loss scale of the gradients
    averaged: bool  # True: averaged gradients; False: each rank's own
    changed: list[Tensor]  # bools on the device: whether user code wrote to a slice of parameters
    failure: Exception | None  # why this rank cannot step; raised after the exchange, where other ranks wait


@dataclass(frozen=True)
class Decision:
    """The decision about a step, equal on all ranks."""

    applies: bool  # False: the step is skipped
    finite: bool  # no gradient of any rank is inf or NaN
    norm: float | None  # of the averaged gradients, unscaled; None: not needed
    used: set[Member]  # parameters that have a gradient on any rank
    clip: float  # the largest norm after clipping; 0: no clipping
    publishes: bool = False  # parameters have new values, to be sent to every rank


class ZeroOptimizer(OptimizerProxy):
    """Optimizer proxy that steps this rank's pieces of a model's parameters with the wrapped optimizer."""

    def __init__(
        self,
        base: torch.optim.Optimizer,
        model: nn.Module,
        sharded: Sharded,
        communicators: Communicators,
        settings: Settings,
        scaler: StaticScale,
        accumulation: Accumulation,
    ) -> None:
        self.base, self.sharded, self.communicators = base, sharded, communicators
        # Optimizer.__init__ would copy the param groups, which must stay the wrapped optimizer's own lists.
        # __setstate__ creates torch's other attributes: hooks, and the names that profilers show.
        self.__setstate__({})
        self.trained, self.settings, self.scaler = sharded.trained, settings, scaler
        self.accumulation = accumulation
        self.own_state = cut_state(base, sharded.trained, settings.dtypes)
        self.redirected = RedirectedOptimizer(base, self)
        device = communicators.device
        self.lane = lane_for(device, settings.overlap)
        self.offload: Offload | None = None
        if type(settings.tier) is not DeviceTier or type(sharded.param_store) is not ParamStore:
            self.offload = Offload(settings.tier, sharded.param_store)
        self.report = NonFinite()
        self.signals = StopSignals()
        self.last: StepReport | None = None
        self.steppers = Steppers(self.redirected, settings.dtypes, self.lane, settings.tier, self.trained)
        if communicators.tensor is not None:
            self.steppers.peers_of = partial(PartPeers, tensor=communicators.tensor)
        self.steppers.attach()
        self.contents = Contents(
            base, sharded, communicators, settings.dtypes, self.steppers.kept, self.steppers.owners
        )
        self.closed = self.states_offloaded = False
        self.offloaded = OffloadedStorages()
        self.has_peers = any(each.size > 1 for each in communicators.all)
        self.unfinished = UnfinishedStep(self.has_peers)
        self.at_step: list[Callable[[], None]] = []  # callbacks at the end of a step, applied or skipped
        # Makes a context for the name of a phase. While a profiler runs: a range in its trace.
        self.named_range: Callable[[str], AbstractContextManager[Any]] = nullcontext
        self.calls = 0  # calls of `step`, which the ranks compare
        self.loads = 0  # how often all values were loaded
        self.disagreed = False  # a step has raised DisagreementError, and its gradients are not discarded
        self.merges = 0  # contexts in which base weights have adapters merged into them
        self.warned_without_gradients = False
        self.background: BackgroundWork | None = None  # the asynchronous checkpoint that is being written
        register(self, model.parameters())
        register(self, (m.param for group in sharded.groups for m in group.members))
        self.watch = ModelWatch(model, [m.param for m in self._members()], bool(sharded.sites))
        self.writes = ParameterWrites(sharded.groups)
        self.guards: list[Guard] = [self.watch, self.writes]  # checked before a forward and a step
        self.step_guards: list[Guard] = [ParamGroups(base)]  # checked before a step only
        self.local_steps: LocalSteps | None = None
        if self.steppers.own is not None:
            self.local_steps = LocalSteps(base, self.steppers.own, self.trained, self.writes)
            self.step_guards.append(self.local_steps)
        self.reducer = GradientReducer(
            self.trained,
            self.lane,
            settings,
            scaler,
            sharded.spares,
            BackwardPass(accumulation, scaler, device),
            averages=self.steppers.averages,
            on_begin=self._before_backward,
            on_unfreeze=partial(check_thawed, self.contents.stepper),
            on_wake=self._wake,
            hands_back=isinstance(base, NoOptimizer),
        )
        self._note_awake()
        self.delayed: DelayedUpdates | None = None
        if settings.tier.delay_after is not None and device.type != "meta":
            self.delayed = DelayedUpdates(base, self.own_state, communicators, settings.tier.delay_after)
            if self.awake:
                self.delayed.check(self.steppers.choose(self.awake))
        self.hooks: list[Any] = raise_on_gradients(base, model, settings.stage)
        self.state_dict_guards: list[RemovableHandle] = []  # hooks on the model's state_dict
        # The gatherer has its own lane: a prefetch must not wait behind a gradient reduction.
        self.gatherer: ParameterGatherer | None = None
        if sharded.sites:
            lane = lane_for(device, settings.overlap)
            self.gatherer = ParameterGatherer(
                model, sharded.sites, lane, settings.gathering, self.reducer, sharded.param_store
            )

    def _members(self) -> list[Member]:
        return [member for group in self.trained for member in group.members]

    def _note_awake(self) -> None:
        """Note which groups take part in steps: those with a trainable parameter, now or earlier."""
        self.awake = [group for group in self.trained if not group.asleep]
        self.agreement = Agreement(self.communicators, self.awake, self.settings.needs_norm)

    def _wake(self, group: TrainedGroup) -> None:
        """Add the pieces of a group that is trained from now on to the optimizer's state."""
        for member, piece in group.master.pieces.items():
            self.own_state.add(piece.master, member.param)
        self.steppers.attach()
        self._note_awake()

    @property
    def changes(self) -> int:
        """The number of steps and loads so far. While it stays, parameters keep their values."""
        return self.calls + self.loads

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped, because gradients were not finite. DeepSpeed's name."""
        return self.last is not None and not self.last.applied

    def __repr__(self) -> str:
        return f"ZeroOptimizer(stage {self.settings.stage}, {len(self.trained)} buckets, {self.base!r})"

    # A step: see [Note: a step] ------------------------------------------------------------------

    @runs_step_hooks
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the remaining gradients, step this rank's slices and all-gather the parameters.

        `closure` is called once at the beginning, to run forward and backward, and its result is returned.
        `last` reports whether the step was applied. Every rank must call this. Hooks before the step run
        after `closure`, where an error of one rank's hook is raised on every rank.
        """
        loss = loss_of(closure) if closure is not None else None
        self.unfinished.check("step")
        self.last = None
        self.calls += 1
        is_alone = not self.unfinished.inside  # else the engine's step calls this one, and raises
        self.unfinished.run(self._step)
        if self.last is None and is_alone:
            self._warn_without_gradients()
        self._run_step_hooks(AFTER)
        return loss

    def _run_step_hooks(self, when: int) -> None:
        """Run the step hooks: those of every optimizer, of this one and of the wrapped one.

        They run once per step, also if the wrapped optimizer is stepped in several parts.
        """
        own, base = step_hooks(self), step_hooks(self.base)
        from_outside = [(self, global_step_hooks()), (self, own), (self.base, base)]
        for optimizer, hooks in from_outside if when == BEFORE else reversed(from_outside):
            for hook in list(hooks[when].values()):
                self._run_step_hook(when, optimizer, hook)

    def _run_step_hook(self, when: int, optimizer: torch.optim.Optimizer, hook: Callable[..., Any]) -> None:
        with torch.no_grad():
            answer = hook(optimizer, (optimizer,), {})
        if answer is not None and when == BEFORE:
            raise RuntimeError(
                "a pre-step hook of the optimizer has returned new arguments for step(), which takes "
                "none here. Return None from the hook"
            )

    def _step(self) -> None:
        """Run the phases of [Note: a step]."""
        if self.delayed is not None:
            self.finish_update()  # it writes the masters and state that this step's update begins from
        collected = self._collect()
        if collected is None:
            return  # like torch: no gradients, no step
        agreed = self._agree(collected)
        if not agreed.used:
            if self.reducer.sent_zeros:
                self.zero_grad()
            return
        decision = self._decide(agreed)
        if decision.applies:
            with self.named_range("update"):
                decision = self._update(decision)
        if decision.publishes:
            with self.named_range("publish"):
                self.publish(self.awake)
        self._count(decision, collected.scale)

    def _collect(self, call: str = STEP) -> Collected | None:
        """Reduce gradients that backward left unreduced, and adopt those that user code wrote or cleared.

        Returns None if there are no gradients. An error is returned in `failure` and not raised yet, because
        the other ranks are on their way into the exchange, where they learn of it.
        """
        changed: list[Tensor] = []
        found, failure = self._find_changes(changed, call)
        reducer = self.reducer
        if not (self.has_peers or reducer.began or found.written or failure):
            return None  # with peers, another rank may have gradients: always go on to the exchange
        # Also if this rank's pass has failed, or it had none: other ranks wait for it in their reductions.
        reducer.flush()
        if self.sharded.copy_threads is not None:
            failure = failure or await_gradients(self.awake)
        for member, gradient in () if failure else found.written:
            reducer.put(member, gradient)
        scale, averaged = self.reducer.state.begin_step()
        return Collected(scale, averaged, changed, failure)

    def _find_changes(self, changed: list[Tensor], call: str) -> tuple[Found, Exception | None]:
        """Find gradients that user code wrote or cleared since the last step. Returns them and any error.

        Appends to `changed` for each group whose parameters it compares: see `Master.compare`.
        """
        if self.states_offloaded:
            raise RuntimeError(OFFLOADED)
        self.check_open(call)
        if isinstance(self.base, NoOptimizer):
            raise RuntimeError(NO_OPTIMIZER)
        try:
            backward = self.reducer.backward
            if backward.failed or backward.running:
                raise RuntimeError(
                    "a backward pass of this step has failed, so its gradients are incomplete. Call "
                    "zero_grad, and repeat the forward and backward passes of this step"
                )
            if call == STEP:
                self._run_step_hooks(BEFORE)
            if self.base.state is not self.own_state:
                self._take_back_state()
            for guard in self.step_guards:
                guard.check()
            for group in self.trained:
                if group.master.is_separate:
                    group.master.follow_master()
            # After `follow_master`, which would overwrite tensors assigned to `param.data`.
            self.check_model_unchanged()
            for group in self.trained:
                if group.master.is_separate:
                    group.master.compare()
                    if group.master.changed is not None:
                        changed.append(group.master.changed)
            if self.settings.needs_norm:
                for group in self.reducer.unbuffered:
                    group.gradients.check_dense()
            return self.reducer.find_user_changes(), None
        except Exception as error:  # a user's step hook may raise any type
            return Found(), error

    def _agree(self, collected: Collected, call: str = STEP) -> Agreed:
        """Exchange norm, flags and planned actions with all ranks, and raise on every rank if they differ."""
        reducer, failure = self.reducer, collected.failure
        # Equal on all ranks in a correct program. The order of this list is the order in an error message.
        clip = self._clip
        so_far: list[tuple[str, Any]] = [
            (f"call of {call}", self.calls),
            ("order of gathers", self.gatherer.order_checksum if self.gatherer is not None else 0),
            ("loss scale", collected.scale),
            ("gradient clipping", clip),
            ("a backward pass before the step", reducer.had_pass),
            ("order of reductions", reducer.order_checksum),
            ("signals watched", self.signals.description),
        ]
        differ = self.local_steps is not None and self.contents.stepper.ranks_differ
        # During local steps parameters differ by design, and a write has raised in LocalSteps.
        written = "" if differ else self.writes.digest()
        actions = actions_of(self.base.param_groups, so_far, written, failure)
        alarm = self.offload is not None and bool(self.offload.error)
        alarm = alarm or (self.background is not None and self.background.has_failed())
        by_hand = reducer.written
        mine = Contribution(
            used=reducer.used,
            frozen=reducer.frozen,
            actions=actions,
            stops=self.signals.came is not None,
            alarm=alarm,
            averaged=collected.averaged,
            needs_norm=clip > 0 or call != STEP,
            by_hand=by_hand,
            late=len(reducer.late),
            changed=collected.changed,
            failed=failure is not None,
        )
        if written and self.communicators.tensor is not None:
            mine = replace(mine, repeated_writes=self.writes.repeated_digest())
        agreed = self._exchange(mine)
        if agreed.late and failure is None:
            # All ranks get here together: `late` is equal on all, and a failure of only some has raised.
            reducer.reduce_late()
            agreed = self._exchange(replace(mine, late=0))
        self.signals.requested |= agreed.stops
        if failure is not None:
            raise failure
        # Only now: after an error the same writes must be compared again when the step is repeated.
        self.writes.forget()
        if by_hand.whole or by_hand.slices:
            by_hand.forget()
        if agreed.alarm:
            raise_failure(self.offload.error if self.offload is not None else "", self.background)
        if agreed.changed:
            self._adopt_changed()
        return agreed

    def _exchange(self, mine: Contribution) -> Agreed:
        try:
            return self.agreement.exchange(mine)
        except DisagreementError:
            self.disagreed = True
            raise

    def _adopt_changed(self) -> None:
        """Adopt user code's writes to slices of parameters; raise on every rank if a copy failed."""
        masters, problem = [group.master for group in self.awake], ""
        if self.sharded.copy_threads is None:  # nothing is copied between device and host
            return adopt_changed(masters)
        try:
            adopt_changed(masters)
        except Exception as error:
            problem = f"rank {this_rank()} could not copy to the host what was written to parameters: {error}"
        raise_on_all_ranks(self.communicators, problem)

    def _decide(self, agreed: Agreed) -> Decision:
        """Decide to apply or skip the step, from values that are equal on all ranks."""
        if self.settings.require_all_used:
            check_all_used(self.communicators, self.awake, self.reducer.used)
        norm = None if agreed.norm is None else agreed.norm / self.reducer.state.scale
        finite = norm is None or isfinite(norm)
        checks_overflow = self.settings.check_overflow or self.reducer.state.next_clip is not None
        applies = finite or (not self.reducer.state.are_local and not checks_overflow)
        if not finite:
            loss, everyone = self.accumulation.loss, self.communicators.everyone
            self.report.log_report(self.trained, loss, everyone, applies, self.scaler)
        return Decision(applies, finite, norm, agreed.used, self._clip)

    def _update(self, decision: Decision) -> Decision:
        """Step this rank's slices. Returns the updated decision.

        The step is skipped if an average that the stepper itself computes is not finite. All ranks see that
        before any of them has changed anything.
        """
        factor = self.reducer.state.factor(decision.norm, decision.clip)
        used = decision.used
        if self.reducer.state.are_local:
            used = self.steppers.concerned(used)
        stepped = [group for group in self.awake if not used.isdisjoint(group.members)]
        stepper = self.steppers.choose(stepped)
        if self.delayed is not None and self.delayed.is_due(stepper):
            self.unfinished.change()
            self.delayed.begin(stepper, stepped, used, factor)
            self.reducer.state.note_step(factor, multiplied=not stepper.fuses)
            setattr(self.base, OPT_CALLED, True)
            self.writes.forget()
            return decision
        parts = self.steppers.parts(stepper, stepped, self.settings, self.sharded.copy_threads)
        on_change = self.unfinished.change
        if not stepper.fuses and factor != 1.0:
            on_change = partial(self._begin_to_change, factor)
        try:
            self.steppers.step(stepper, parts, used, factor, on_change)
        except NotFiniteError as error:
            self.report.log_average(error, self.scaler)
            return replace(decision, finite=False, applies=False)
        # Raise on every rank before the all-gather spreads slices of a failed read.
        if self.offload is not None and self.offload.can_fail:
            raise_on_all_ranks(self.communicators, self.offload.lost)
        self.reducer.state.note_step(factor, multiplied=not stepper.fuses)
        setattr(self.base, OPT_CALLED, True)
        # As torch's optimizers do: backward through a graph from before this step must raise, because the
        # parameters that it has saved have changed in place.
        increment_version([m.param for group in stepped for m in group.members if m in used])
        for group in stepped:  # the new counters are our own writes, not user code's
            group.master.note_versions()
        self.writes.forget()
        return replace(decision, publishes=True)

    def _begin_to_change(self, factor: float) -> None:
        self.unfinished.change()
        self.reducer.state.multiply(factor)

    def publish(self, trained: Sequence[TrainedGroup]) -> None:
        """All-gather parameters that are kept whole from the ranks' slices. Every rank must call this.

        On an accelerator the current stream waits for the new values, not the host. The all-gather does not
        overlap the next forward, because module hooks would miss some readers of a weight: a view that user
        code has kept, a captured CUDA graph, a moving average, code that writes to it.
        """
        if self.gatherer is not None:
            self.gatherer.release_all()
        whole: dict[TrainedGroup, Tensor] = {}
        for group in trained:
            group.parameters.node_copy = None  # it has the old values
            if group.parameters.state is GatherState.WHOLE:
                whole[group] = group.parameters.full
        if whole:
            gather = partial(self._gather_all, whole)
            self.lane.submit(gather, whole.values(), [self.lane.producer()]).wait()
        if self.sharded.copy_threads is not None:
            await_parameters(self.communicators, trained)

    def _gather_all(self, groups: Iterable[TrainedGroup]) -> None:
        """All-gather the parameters of these groups. Runs on the lane, as one job."""
        posted: list[Pending] = []
        for group in groups:
            if self.sharded.copy_threads is not None:
                all_gather_after_copy(group)
            elif (pending := group.parameters.post()) is not None:
                posted.append(pending)
            else:
                group.parameters.all_gather()
        for pending in posted:
            pending.wait()

    def _count(self, decision: Decision, scale: float) -> None:
        """Record a step that was applied or skipped, and update a dynamic loss scale."""
        self.unfinished.change()  # a skipped step also changes the loss scale and counters
        self.last = StepReport(decision.applies, decision.norm, scale, decision.clip)
        self.reducer.state.next_clip = None
        self.reducer.state.end_step()
        if type(self.scaler) is not StaticScale:  # a scale of the caller's own class may learn, too
            self.report.update_scale(self.scaler, overflow=not decision.finite)
        for act in self.at_step:
            act()
        self.accumulation.forget_losses()  # after `at_step`, where the loss is read

    def _warn_without_gradients(self) -> None:
        if not self.warned_without_gradients:
            log.warning("optimizer.step() without gradients does nothing (logged once)")
        self.warned_without_gradients = True

    # What user code does between steps -----------------------------------------------------------

    @property
    def _clip(self) -> float:
        """The largest gradient norm of the next step; 0: no clipping."""
        chosen = self.reducer.state.next_clip
        return self.settings.clip if chosen is None else chosen

    def clip_next_step(self, max_norm: float) -> None:
        """Clip the gradients of the next step to this norm, instead of the settings'. 0: do not clip.

        For loops that choose the norm in each step. Every rank must call this with the same value. As when
        gradients are clipped several times, the smallest norm of several calls counts; 0 revokes the calls
        before it. If gradients are discarded instead of a step, the next step is clipped as configured.
        """
        if not 0 <= max_norm < inf:
            raise ValueError(f"max_norm must be a finite norm, or 0 for no clipping, not {max_norm!r}")
        before = self.reducer.state.next_clip
        self.reducer.state.next_clip = (
            min(before, float(max_norm)) if before and max_norm else float(max_norm)
        )

    def grad_norm(self) -> float:
        """Average the gradients now, and return their norm without the loss scale, before clipping.

        This costs a collective that `last.grad_norm` after a step does not. Every rank must call this.
        Backward passes that follow before the step add to the gradients. Without gradients the norm is 0.
        """
        self.unfinished.check("grad_norm")
        if self.delayed is not None:
            self.finish_update()
        collected = self._collect("grad_norm")
        norm = None if collected is None else self._agree(collected, "grad_norm").norm
        return 0.0 if norm is None else norm / self.reducer.state.scale

    def check_model_unchanged(self) -> None:
        """Raise if user code changed the model in a way that a step would ignore."""
        self.unfinished.check("forward")
        for guard in self.guards:
            guard.check()

    def _before_backward(self) -> None:
        self.unfinished.check("backward")
        self.writes.check()

    def watch_signals(self, signals: Iterable[int] = SIGNALS) -> None:
        """Handle these signals until `destroy` by setting `stop_requested`. Every rank must call this."""
        self.check_open("watch_signals")
        self.signals.watch(signals)

    @property
    def stop_requested(self) -> bool:
        """Whether any rank has received a watched signal. It is updated in a step, equally on all ranks."""
        return self.signals.requested

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Discard the gradients.

        By default their memory is freed on accelerators. On the CPU it is kept, because new pages from the
        operating system would cost more time than the step. With False gradients become zero, as in torch.
        """
        if set_to_none is False and not self.reducer.backward.failed:
            return zero_in_place(m.param for m in self._members())
        self.reducer.complete_failed()
        self.reducer.forget()
        if self.disagreed:  # on all ranks: their later passes are compared anew
            self.disagreed, self.reducer.order_checksum = False, 0
            if self.gatherer is not None:
                self.gatherer.order_checksum = 0
        if self.gatherer is not None:
            self.gatherer.forget()
        self.accumulation.discard()
        for group in self.trained:
            gradients = group.gradients
            gradients.forget(free=set_to_none is not None or not gradients.reuses_memory)
        self.unfinished.discard_gradients()

    def scale(self, loss: Tensor, divided: bool = False) -> Tensor:
        """Return the loss times the loss scale, for user code that calls `backward` itself.

        `divided`: the loss is already divided by the number of micro-batches.
        """
        scaled = self.scaler.times(loss * 1)  # a new tensor: a hook on the caller's would stay on it
        scaled.register_hook(partial(self.reducer.begin_scaled, divided))
        return scaled

    # State ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part: ranges of parameters and state, the groups' options, the loss scale."""
        self.check_open("state_dict")
        self.check_between_steps("state_dict")
        run_hooks((self, self.base), state_dict_hooks, BEFORE)
        self.catch_up()
        part = rank_part(self.contents, self.scaler)
        return dict(run_hooks((self, self.base), state_dict_hooks, AFTER, part))

    @torch.inference_mode(False)  # steps write to the state that it makes
    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a `state_dict` of the same rank. Every rank must call this."""
        self.check_open("load_state_dict")
        call, contents = "load_state_dict of the optimizer", self.contents
        with self.announces_failure(call):
            saved = run_hooks((self, self.base), load_hooks, BEFORE, state_dict)
            self.unfinished.check_load("load_state_dict")
            if "tensors" not in saved:
                raise ValueError(
                    "this is not a state_dict() of zero_full's optimizer. Load a plain optimizer's state "
                    "into that optimizer before initialize, which keeps it"
                )
            part = RankPart(saved["tensors"], saved["numbers"])
            # All checks come before the first change, so a state that does not fit leaves the run as it was.
            check_facts(contents, saved)
            part.check([*contents.masters(), *NewState(contents, part).chunks()])
            check_same_rank(contents, saved)
        self.on_every_rank(call)
        self.finish_update()
        contents.stepper.load_own_tensors({})
        self.wake_all_but(saved["asleep"])
        state = NewState(contents, part)  # a new one: the groups that woke up have pieces now
        part.read([*contents.masters(), *state.chunks()])
        state.install()
        load_facts(contents, self.scaler, saved)
        self.zero_grad()
        contents.stepper.load_own_tensors(saved.get("own", {}))
        self.follow_masters()
        self.start_over()
        run_hooks((self, self.base), load_hooks, AFTER)

    def facts(self) -> dict[str, Any]:
        """Return the parts of the optimizer's state that are no tensors and equal on every rank."""
        return facts_of(self.contents, self.scaler)

    def wake_all_but(self, asleep: Container[str]) -> None:
        """Make masters of parameters that are asleep in this run and were trained in the saved one."""
        for group in self.trained:
            if group.asleep and any(clean_name(member.name) not in asleep for member in group.members):
                self.reducer.wake(group)

    def check_open(self, call: str) -> None:
        """Raise RuntimeError after `destroy`, which has freed state and process groups."""
        if self.closed:
            raise RuntimeError(f"{call} after destroy. Initialize the model again")

    def check_between_steps(self, call: str) -> None:
        """Raise RuntimeError between the backward passes of a step, and after a step that was cut short."""
        self.unfinished.check_values(call)
        if self.reducer.began and self.reducer.state.are_new:
            raise RuntimeError(
                f"{call} between the backward passes of a step: their gradients would be lost. Save after "
                "step, or discard the gradients with zero_grad first"
            )

    def check_ranks_equal(self, call: str) -> None:
        """Raise RuntimeError while ranks hold different parameters, and after a step that was cut short."""
        self.unfinished.check_values(call)
        if self.contents.stepper.ranks_differ:
            raise RuntimeError(
                f"{call} between local steps of 0/1 Adam, in which parameters differ between ranks. Call "
                "meet() of the engine's optimizer on every rank first, which synchronizes them "
                "(save_checkpoint does not need it)"
            )

    def check_no_pending_update(self, call: str) -> None:
        """Raise RuntimeError if a delayed update is pending; for a `call` that a rank may make alone."""
        if self.delayed is not None:
            self.delayed.check_none_pending(call)

    def catch_up(self) -> None:
        """Bring masters up to date with writes by user code, before parameters or masters are read."""
        if self.merges:
            raise RuntimeError(
                "weights cannot be read, saved or loaded inside engine.generation(merge_adapters=True): "
                "adapters are merged into base weights there. Leave the block first"
            )
        self.finish_update()
        lost = self.offload.lost if self.offload is not None else ""
        if self.states_offloaded or lost:
            raise RuntimeError(lost or OFFLOADED)
        self._take_back_state()
        self.writes.check()
        # After a step that was cut short all values will be loaded, and none is worth keeping.
        for group in () if self.unfinished.is_cut_short else self.trained:
            group.master.follow_parameters()

    def start_over(self) -> None:
        """Clear the traces of a step that was cut short, because all values have been loaded."""
        self.steppers.by_torch.end()
        self.unfinished.forget()

    def follow_masters(self) -> None:
        """Copy all masters to the parameters, and all-gather these. Every rank must call this."""
        self.loads += 1
        if self.delayed is not None:
            self.delayed.taken = None  # step counters may have been loaded: look them up again
        for group in self.trained:
            group.master.copy_master()
        self.publish(self.trained)
        if self.contents.stepper.ranks_differ:  # the ranks' own values differ, but not by writes of user code
            self.writes.forget()

    # Every rank together -------------------------------------------------------------------------

    @torch.no_grad()
    def on_every_rank(self, call: str, model_parallel: bool = True) -> None:
        """Wait until user code has made this call on every rank; see `comm/user_calls.py`.

        It must run before the call's first collective.

        model_parallel  False: only ranks that have the same parameters make this call
        """
        communicators = self.communicators
        for calls in communicators.user_calls + communicators.model_parallel_calls * model_parallel:
            calls(call, self._drain_lanes)

    def announce_call(self, call: str) -> None:
        """Announce this call to ranks that wait for this rank's next call, without waiting for them."""
        for calls in self.communicators.user_calls + self.communicators.model_parallel_calls:
            calls.announce(call)

    @contextmanager
    def announces_failure(self, call: str) -> Iterator[None]:
        """Run what a call does before its `on_every_rank`. If it raises, so do the ranks that wait there."""
        try:
            yield
        except Exception as error:
            self.announce_call(f"{call}, which raised: {type(error).__name__}: {error}")
            raise

    def _drain_lanes(self) -> None:
        """Wait until no collective of this rank is queued."""
        for lane in (self.lane, self.gatherer.lane if self.gatherer is not None else self.lane):
            lane.submit(lambda: None, [], []).wait()

    def meet(self) -> None:
        """Synchronize the parameters of all ranks, also in the middle of a local interval of `ZeroOneAdam`.

        Every rank must call this, between steps: before the model is evaluated or exported.
        """
        self.on_every_rank("meet")
        self.check_between_steps("meet")
        self.catch_up()
        if self.local_steps is not None:
            self.local_steps.check_writes()
        self.contents.stepper.meet()
        self.follow_masters()
        self.writes.forget()

    @torch.no_grad()
    def finish_update(self) -> None:
        """Complete a delayed update now, if one is pending. Every rank must call this, between passes."""
        delayed = self.delayed
        if delayed is None:
            return
        if delayed.broken:
            raise RuntimeError(delayed.broken)
        if (update := delayed.current) is None:
            return
        if self.unfinished.is_cut_short:  # all values will be loaded: discard this update
            return delayed.discard(update)
        if self.reducer.backward.running:
            raise RuntimeError(
                "a delayed update cannot be completed during a backward pass. Call finish_update() between "
                "passes"
            )
        try:
            raise_on_all_ranks(self.communicators, self._problem_of(delayed, update))
        except RuntimeError as error:
            delayed.broken = str(error)
            raise
        # A forward without backward may have left parameters gathered, with values from before the update.
        if self.gatherer is not None:
            self.gatherer.release_all()
        take = partial(self._take_update, delayed, update)
        self.unfinished.run(partial(self.unfinished.change_by, take))

    def _problem_of(self, delayed: DelayedUpdates, update: Update) -> str:
        """Return the message why a delayed update cannot be completed; "" if it can."""
        if problem := delayed.failure_of(update):
            return problem
        self.writes.check()
        return delayed.written(update, self.writes.names())

    def _take_update(self, delayed: DelayedUpdates, update: Update) -> None:
        """Complete a delayed update on this rank, and all-gather the parameters."""
        delayed.take(update)
        # As after any step: backward through a graph from before the update must raise.
        increment_version([member.param for member in update.members])
        for group in update.groups:
            group.master.note_versions()
        self.writes.forget_of(update.members)
        self.publish(self.awake)

    # The end -------------------------------------------------------------------------------------

    def close(self, gather: bool) -> None:
        """Remove hooks from the model, and free memory, threads and process groups.

        `gather`: also leave whole parameters in the model. Then every rank must call this with True.
        """
        if self.closed:
            return
        if gather:
            self.unfinished.check_values("destroy(gather=True)")
            self.on_every_rank("destroy(gather=True)")
        self.signals.leave()
        if gather and self.contents.stepper.ranks_differ and not self.reducer.backward.failed:
            self.zero_grad()
            self.meet()
        with ExitStack() as leaving:  # callbacks run in reverse order, each even if another one raises
            leaving.callback(setattr, self, "closed", True)
            leaving.callback(self._leave_model, gather)
            if self.background is not None:
                leaving.callback(self.background.close)
            if self.delayed is not None:
                self._end_update(self.delayed)

    def _end_update(self, delayed: DelayedUpdates) -> None:
        """Complete the last delayed update. If that is impossible, raise, or warn during another exception.

        A rank that abandons a step because of an error may be alone, and completing needs all ranks.
        """
        if delayed.broken or delayed.current is None:
            return
        backward = self.reducer.backward
        failed, raising = backward.failed or backward.running, sys.exc_info()[0] is not None
        in_a_step = failed or (self.reducer.began and self.reducer.state.are_new)
        if not failed and not (raising and in_a_step):
            try:
                return self.finish_update()
            except CommunicationError:
                raising = True  # the failed collective has raised on all ranks already
        if not raising:
            raise RuntimeError(f"destroy after a backward pass that has failed: {LACKS_LAST_UPDATE}")
        log.warning("%s", LACKS_LAST_UPDATE)

    def _leave_model(self, gather: bool) -> None:
        """Remove hooks from the model; with `gather` leave whole parameters. Every rank must call this."""
        if self.contents.stepper.ranks_differ and not gather and this_rank() == 0:
            log.warning(
                "destroy between local steps of 0/1 Adam leaves parameters that differ between ranks. Call "
                "meet() of the engine's optimizer before destroy, or destroy(gather=True)"
            )
        for finish in (
            self.reducer.close,
            self.zero_grad,
        ):  # a failed collective has raised where it was waited for
            with suppress(CommunicationError, DesyncError):
                finish()
        for hook in self.hooks:
            hook.remove()
        try:
            if self.gatherer is not None:
                self.gatherer.close()
                for group in self.sharded.groups if gather else ():
                    self.gatherer.gather_exactly(group)
        finally:  # threads, files and groups are closed even if a gather has failed
            self._free()

    def _free(self) -> None:
        """End threads, free memory and destroy this engine's process groups. Every rank must call this."""
        # Lanes and copies first: their threads use the memory and the process groups that go after them.
        if self.gatherer is not None:
            self.gatherer.lane.close()
        self.lane.close()
        if self.delayed is not None:
            self.delayed.close()
        if self.sharded.copy_threads is not None:
            self.sharded.copy_threads.close()
        if self.offload is not None:
            self.offload.close()
        away = [group.master for group in self.trained if group.master.tier.lost]
        self.own_state.forget({member.param for master in away for member in master.pieces})
        for master in away:
            master.leave()
        # While parameters are released, `state_dict` of the model must go on to raise.
        if all(flat.state is GatherState.WHOLE for flat in self.sharded.flats):
            for guard in self.state_dict_guards:
                guard.remove()
        unregister(self.watch.names)
        unregister(m.param for group in self.sharded.groups for m in group.members)
        self.communicators.close()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Raise when torch's GradScaler reads this before a step: its unscaling would miss gradients."""
        raise RuntimeError(
            "torch's GradScaler cannot step this optimizer, whose averaged gradients are in flat buffers. Do "
            "not use a GradScaler: fp16 has its own loss scale, and bf16 and fp32 need none"
        )

    # What this rank has --------------------------------------------------------------------------

    def holdings(self, groups: Collection[ParameterGroup] | None = None) -> dict[str, list[Tensor]]:
        """Return every tensor that this rank holds, by kind; `counters` are the optimizer's step numbers.

        `groups`: the groups to list parameters of; None: all.
        """
        copy_threads, stepper = self.sharded.copy_threads, self.contents.stepper
        others = [*stepper.held(), *(t for *_, s, _ in self.contents.whole_states() for t in s.values())]
        away = [*self.settings.tier.held()]
        if self.delayed is not None:
            away += self.delayed.gradient_copies.values()
        if copy_threads is not None:
            away += copy_threads.held()
        listed = self.sharded.groups if groups is None else groups
        return holdings([*listed], self.trained, self.base.state, others, away)
