"""All-gather and release of parameters at stage 3: hooks on the modules that need them.

    forward    before a module: gather its parameters, and prefetch the next ones. After it: release
    backward   when the gradients of a module's outputs arrive: gather, and prefetch. When the gradients of
               its inputs are done: reduce its parameters' gradients, and release

[Note: backward done] A module's inputs pass through an identity function, the mark. Its backward runs when
the module's backward is done. All ranks get there in the same order, whichever parameters they have used. So
this is where gradients are reduced, once no other call of the module is due. Two uses of parameters have no
mark: a call with no inputs that require gradients, and a use by another module. Then gradients are reduced,
and parameters released, when the whole backward ends. The same holds for a module with several calls under
no_grad in a training forward, which re-entrant checkpointing may recompute one by one. All of these
conditions depend only on the calls of forward, which are the same on all ranks.

[Note: prefetch] The order of the units is recorded. From then on the next units are gathered while this one
computes, if collectives run on a lane of their own. If the order changes, nothing is prefetched, and the new
order is recorded. Correctness does not depend on the order. Slices in a file are read even further ahead, as
far as their buffers reach.

[Note: inner modules] User code may call an inner module alone: `model.encoder(x)`, a layer inside a unit, a
module that shares its weight with a distant one. So every module that holds a parameter of a unit has a hook,
too. If no module around it has gathered the unit, the hook gathers it for its own call.
"""

import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero_full._compat import current_backward, identity_of, own_parameters, transform_stack
from zero_full.comm.lane import InlineLane, Lane
from zero_full.nested import mapped, tensors_in
from zero_full.offload import ParamStore
from zero_full.settings import Gathering
from zero_full.shard.group.parameter_group import ParameterGroup
from zero_full.shard.group.parameters import GatherState
from zero_full.shard.passes.module_hooks import Hook, InnerHook
from zero_full.shard.passes.reduce import GradientReducer

log = logging.getLogger("zero_full")
READ_FAILED_ELSEWHERE = (
    "another rank cannot read its offloaded parameters from their file. Its message says why"
)
INTERRUPTED = (
    "{} has cut a forward or backward pass short, so ranks may be waiting in different all-gathers of "
    "parameters. End all of them, and resume from a checkpoint"
)
DEPTH = 4  # levels of nested objects that are searched for output tensors: distributions, caches, ...
AHEAD = 2**20  # elements to prefetch where all-gathers are messages of CPU ranks
Gatherer = Callable[[], "ParameterGatherer | None"]  # a weak reference: see `ParameterGatherer.me`


class UnitState:
    """State of a stage-3 unit: its parameter groups, and the calls of its modules in the running pass."""

    def __init__(self, groups: Sequence[ParameterGroup], joined: bool = False) -> None:
        """`joined`: several modules share the groups, see [Note: joined units] in `deal/units.py`."""
        self.groups, self.joined = list(groups), joined
        self.reduces = list(groups)  # groups to reduce when backward of all modules is complete
        self.numel = sum(group.layout.total for group in groups)  # without groups that are added later
        self.open: set[Site] = set()  # modules with a call whose backward is not complete
        self.has_unmarked_use = False  # the parameters have a use without a mark
        self.later: int | None = None  # elements that the rest of forward gathers; None: not known yet


class Site:
    """A module and the unit with the parameters that it needs."""

    def __init__(self, name: str, module: nn.Module, unit: UnitState) -> None:
        self.name, self.module, self.unit, self.groups = name, module, unit, unit.groups
        self.active: list[Call | None] = []  # calls in forward, a stack; None: a call that gathers nothing
        self.backwards_due = 0  # calls with a mark that have not completed backward
        self.no_grad_calls = 0  # calls under no_grad in a training forward, which checkpointing may recompute
        self.marked = 0  # calls with a mark that runs when their backward is done


@dataclass(eq=False)
class Call:
    """One forward call of a site, which needs the parameters again in its backward."""

    site: Site
    used: Sequence[ParameterGroup]  # groups that forward uses
    needed: Sequence[ParameterGroup] = ()  # groups that its running backward uses


class Order:
    """The recorded order of units in one kind of pass, and the position of the prefetch in it."""

    def __init__(self) -> None:
        self.known: list[UnitState] = []  # order of the last pass
        self.seen: list[UnitState] = []  # order of this pass so far
        self.begun = 0  # index in `known` of the first unit that was neither reached nor prefetched
        self.ahead = 0  # elements that were prefetched and not reached yet

    def begin(self) -> bool:
        """Begin a new pass. Returns whether the last pass had another order than the one before it."""
        changed = bool(self.known and self.seen) and self.seen != self.known
        self.known, self.seen = self.seen or self.known, []
        self.begun = self.ahead = 0
        return changed

    def is_at(self, unit: UnitState) -> bool:
        """Return whether this is another module of the joined unit that was reached last."""
        return unit.joined and bool(self.seen) and self.seen[-1] is unit

    def reached(self, unit: UnitState) -> bool:
        """Note that a unit is reached. Returns whether this unit is the one that the known order has here."""
        place = len(self.seen)
        self.seen.append(unit)
        as_known = place < len(self.known) and self.known[place] is unit
        if as_known and place < self.begun:
            self.ahead -= unit.numel
        else:  # not prefetched, or another order: prefetching begins anew behind this unit
            self.begun, self.ahead = place + 1, 0
        return as_known

    def coming(self) -> Sequence[UnitState]:
        """Return all units of the known order that were neither reached nor prefetched."""
        return self.known[self.begun :]


class ParameterGatherer:
    """Hooks that gather and release parameters around the calls of all sites of a model."""

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Site],
        lane: Lane,
        limits: Gathering,
        reducer: GradientReducer,
        param_store: ParamStore,
    ) -> None:
        self.lane, self.limits, self.reducer, self.param_store = lane, limits, reducer, param_store
        # Hooks get a weak reference: Python's garbage collector cannot free a cycle through a tensor's hooks.
        self.me = weakref.ref(self)
        self.prefetches = not isinstance(lane, InlineLane)
        self.training, self.inference, self.backward = Order(), Order(), Order()
        self.order: Order | None = None  # the order of the running pass; None: between passes
        self.reported = False  # the change of order was logged
        self.order_checksum = 0  # checksum of the gathered groups in their order, equal on every rank
        self.live = 0  # elements that are gathered now
        self.gathered: set[ParameterGroup] = set()
        self.lingering: UnitState | None = None  # a joined unit that stays gathered for its next module
        self.calls: set[Call] = set()  # calls in backward
        self.sites = {site.module: site for site in sites}
        self.unit_of = {group: site.unit for site in sites for group in site.groups}
        ranks = min((group.shard_comm.size for group in self.unit_of), default=1)
        self.reach = param_store.prefetch_numel * ranks  # elements to prefetch at most, by the buffers
        # All-gathers are messages that need no thread. Equal on all ranks.
        self.posts_messages = any(group.parameters.posts_messages for group in self.unit_of)
        self.interrupted = ""  # the error of `_begin` after an interrupt
        self.root = self.sites.setdefault(model, Site("", model, UnitState([])))
        self.hooks: list[RemovableHandle] = []
        self.hooked: list[Site] = []  # all sites with hooks, also of inner modules
        for site in self.sites.values():
            self._install(site, Hook, self.before_forward, self.after_forward)
        self._install_inner(model)
        reducer.backward.at_end.append(self.end_backward)

    def _install(
        self, site: Site, kind: type[Hook], before: Callable[..., Any], after: Callable[..., Any]
    ) -> None:
        """Register forward hooks that run first before the site's forward, and always after it."""
        module = site.module
        handles = (
            module.register_forward_pre_hook(kind(module, before, site), prepend=True, with_kwargs=True),
            module.register_forward_hook(kind(module, after, site), always_call=True),
        )
        if kind is InnerHook:
            InnerHook.renumber(handles[0], first=True)
            InnerHook.renumber(handles[1], first=False)
        self.hooks += handles
        self.hooked.append(site)

    def _install_inner(self, model: nn.Module) -> None:
        """Install hooks on modules inside of sites. See [Note: inner modules]."""
        unit_with = {m.param: unit for group, unit in self.unit_of.items() for m in group.members}
        for name, module in model.named_modules():
            held = dict.fromkeys(unit_with[p] for p in own_parameters(module) if p in unit_with)
            if module in self.sites:
                groups = self.sites[module].groups
                groups += [group for unit in held for group in unit.groups if group not in groups]
            elif held:
                unit = UnitState([group for unit in held for group in unit.groups])
                unit.reduces = []  # other modules may add to the same gradients, so the outer site reduces
                site = Site(name, module, unit)
                self._install(site, InnerHook, self.inner_before_forward, self.inner_after_forward)

    def add(self, module: nn.Module, group: ParameterGroup) -> None:
        """Gather these parameters also for `module` from now on."""
        if module not in self.sites:
            self.sites[module] = Site(type(module).__name__, module, UnitState([]))
            self._install(self.sites[module], Hook, self.before_forward, self.after_forward)
        if group not in self.sites[module].groups:
            self.sites[module].groups.append(group)

    # Gather and release --------------------------------------------------------------------------

    def gather(self, group: ParameterGroup, exactly: bool = False) -> None:
        """Gather the parameters, and wait for them. All ranks must gather in the same order."""
        self._begin(group, exactly)
        if group.parameters.state is GatherState.GATHERING:
            group.parameters.finish_gather()

    def gather_exactly(self, group: ParameterGroup) -> None:
        """Gather the parameters as `gather` does, but without quantization, even if training quantizes."""
        if group.parameters.gather_exactly is not None:
            self.release(group)  # forward may have left rounded values
        self.gather(group, exactly=True)

    def _begin(self, group: ParameterGroup, exactly: bool = False) -> None:
        """Queue the all-gather of a group on the lane, if it is sharded."""
        if group.parameters.state is not GatherState.SHARDED:
            return
        if self.interrupted:
            raise RuntimeError(self.interrupted)
        if self.reducer.backward.accelerator is not None:
            self.reducer.backward.check_not_capturing()
        self.order_checksum = crc32(group.name.encode(), self.order_checksum)
        group.parameters.begin_gather(self.lane, exactly)
        self.live += group.layout.total
        self.gathered.add(group)

    def release(self, group: ParameterGroup) -> None:
        """Release the parameters, unless a module is using them."""
        if self.interrupted and group.parameters.state is GatherState.GATHERING:
            return  # it may never end
        group.parameters.release()
        if group.parameters.state is GatherState.SHARDED and group in self.gathered:
            self.gathered.remove(group)
            self.live -= group.layout.total

    def _leave(self, unit: UnitState, groups: Sequence[ParameterGroup], keep: bool = False) -> None:
        """End a call's use of these groups, and release them unless another call uses them or `keep`."""
        for group in groups:
            group.parameters.users -= 1
            # The module may run on another stream than the one that owns the memory. That stream must wait
            # for it before the memory is reused.
            if group.parameters.owner_stream is not None:
                self.lane.order(self.lane.producer(), group.parameters.owner_stream)
        if keep:
            return
        # Only within a pass, because its end releases what is left.
        if unit.joined and (self.root.active or self.reducer.backward.running):
            if self.lingering is not unit:
                self._release_lingering()
                self.lingering = unit
            return
        for group in groups:
            self.release(group)

    def _release_lingering(self) -> None:
        """Release the joined unit that was kept gathered for its next module, as another unit is called."""
        unit, self.lingering = self.lingering, None
        for group in () if unit is None else unit.groups:
            self.release(group)

    def release_all(self) -> None:
        """Release all parameters that no module is using."""
        for group in list(self.gathered):
            self.release(group)

    def _need(self, unit: UnitState, order: Order | None) -> Sequence[ParameterGroup]:
        """Gather a unit for a call, and prefetch the next units in this order. Returns the unit's groups.

        `order`: of the running pass; None: do not record the call.
        """
        if self.lingering is not None and self.lingering is not unit:
            self._release_lingering()
        groups = tuple(unit.groups)
        as_known = order is not None and not order.is_at(unit) and order.reached(unit)
        # Queue this unit's all-gathers first, then the prefetch, and wait last: the lane runs in order.
        for group in groups:
            self._begin(group)
        if order is not None and as_known:
            if self.prefetches:
                self._prefetch(order)
            if self.param_store.can_fail:  # it reads from a file
                self._read_ahead(order)
        for group in groups:
            if group.parameters.state is GatherState.GATHERING:
                group.parameters.finish_gather()
        for group in groups:  # only now: if one gather fails, no call uses the others
            group.parameters.users += 1
        return groups

    def _read_ahead(self, order: Order) -> None:
        """Begin to read the slices of later units from their file, until no buffer is free."""
        for group in (group for unit in order.coming() for group in unit.groups):
            if not group.parameters.read_ahead():
                return

    def check_reads(self) -> None:
        """Raise on all ranks of the shard group if one of them failed to read a slice from its file."""
        if not self.param_store.can_fail:
            return
        # The largest group of ranks: an error concerns all that gather from the rank that had it.
        group = max(self.unit_of, key=lambda group: group.shard_comm.size)
        with torch.inference_mode(False):  # the lane's thread writes it outside of inference mode
            flags = torch.zeros(group.shard_comm.size, dtype=torch.uint8, device=group.kind.device)
            group.shard_comm.slice_of(flags).fill_(bool(self.param_store.lost))
        ask = partial(group.parameters.gather_slices, flags, "what could not be read")
        self.lane.submit(ask, [flags], [self.lane.producer()]).wait()
        if flags.any():
            raise RuntimeError(self.param_store.lost or READ_FAILED_ELSEWHERE)

    def _log_new_order(self) -> None:
        """Log once that the order of calls has changed."""
        if not self.reported:
            self.reported = True
            log.info(
                "the order of the modules' calls has changed: no prefetch until two passes have the same "
                "order"
            )

    def _prefetch(self, order: Order) -> None:
        """Prefetch the next units until enough elements are on the way: at least one unit of any size.

        Where a thread of the CPU gathers, only one unit: it is busy all the time anyway. Each further unit
        would need memory of its own, and new pages cost more time than the gather. Messages need no thread,
        but time to arrive, so several units are on the wire at a time.
        """
        enough = min(self.limits.prefetch_numel, self.reach)
        if self.lane.stops_host:
            enough = min(enough, AHEAD if self.posts_messages else 1)
        while order.ahead < enough and order.begun < len(order.known):
            following = order.known[order.begun]
            if following.numel > self.limits.max_live - self.live:
                return  # limits and gathered elements are equal on all ranks, so all stop at this unit
            order.begun += 1
            order.ahead += following.numel
            for group in following.groups:
                self._begin(group)

    # Forward -------------------------------------------------------------------------------------

    def inner_before_forward(self, site: Site, args: Any, kwargs: Any) -> Any:
        """Call `before_forward`, unless a module around this one has gathered already."""
        for group in site.groups:
            if not group.parameters.users:
                return self.before_forward(site, args, kwargs)
        site.active.append(None)
        return None

    def inner_after_forward(self, site: Site, args: Any, output: Any) -> None:
        """Call `after_forward`, if this module has gathered itself."""
        if site.active and site.active[-1] is None:
            site.active.pop()
        else:
            self.after_forward(site, args, output)

    def before_forward(self, site: Site, args: Any, kwargs: Any) -> Any:
        """Gather the site's parameters, and mark its inputs to detect the end of its backward."""
        if transform_stack() is not None and self._is_transformed(site):
            site.active.append(None)
            return None
        recomputed, trains = current_backward() >= 0, torch.is_grad_enabled()
        if site is self.root and not recomputed:
            self.reducer.complete_failed()  # other ranks may wait for it before they come to this forward
            self.order = self.training if trains else self.inference
            if self.order.begin():
                self._log_new_order()
        call = Call(site, self._need(site.unit, None if recomputed else self.order))
        site.active.append(call)
        if not recomputed and trains:  # see [Note: backward done]
            for group in site.groups:
                unit = self.unit_of.get(group)
                if unit is not None and unit is not site.unit:
                    unit.has_unmarked_use = True
        elif not recomputed and self.order is self.training:
            site.no_grad_calls += 1
            site.unit.open.add(site)
        # A recomputed call has the mark of the first one, except with re-entrant checkpointing, which runs
        # the first one under no_grad.
        if trains and not (recomputed and site.backwards_due):
            return self._mark_inputs(call, args, kwargs, recomputed)
        return None

    def _is_transformed(self, site: Site) -> bool:
        """Return True, or raise if the site's parameters are sharded: called inside a torch.func transform.

        There the end of backward cannot be detected.
        """
        for group in site.groups:
            if group.parameters.released_at_rest and not group.parameters.users:
                raise RuntimeError(
                    f"torch.func transforms {site.name or 'the model'}, whose {group.name} is sharded. Call "
                    "it inside zero_full.GatheredParameters(list(model.parameters()))"
                )
        return True

    def _mark_inputs(self, call: Call, args: Any, kwargs: Any, recomputed: bool) -> Any:
        """Return the inputs, with a mark on those that require gradients. See [Note: backward done]."""
        # Rebuilding a list or dict would hide the module's writes to it from the caller. So look inside of
        # containers only if no tensor argument requires gradients.
        inputs, nested = list[Tensor](), False
        for value in (*args, *kwargs.values()):
            if not isinstance(value, Tensor):
                nested = True
            elif value.requires_grad:
                inputs.append(value)
        if nested and not inputs:
            inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
        if not inputs:
            call.site.unit.has_unmarked_use = True
            return None
        call.site.unit.open.add(call.site)
        call.site.backwards_due += 1
        call.site.marked += not recomputed
        if len(inputs) == 1 and inputs[0].layout == torch.strided:
            # A view costs half as much as an autograd function, and the module may write to it in place.
            passed = inputs[0].view_as(inputs[0])
            assert passed.grad_fn is not None
            passed.grad_fn.register_hook(partial(self.after_backward, self.me, call))
            if len(args) == 1 and args[0] is inputs[0] and not kwargs:
                return (passed,), kwargs
            return mapped(lambda leaf: passed if leaf is inputs[0] else leaf, (args, kwargs))
        outputs = BackwardDone.apply(self.me, call, *inputs)  # type: ignore[no-untyped-call]
        behind = dict(zip(map(id, inputs), outputs, strict=True))
        return mapped(lambda leaf: behind.get(id(leaf), leaf), (args, kwargs))

    def after_forward(self, site: Site, args: Any, output: Any) -> None:
        """Release the parameters, or keep them for a backward that is near; hook the outputs."""
        call = site.active.pop() if site.active else None
        if call is None:
            return  # the gather has failed: this hook is called also after an exception
        outputs = [output] if isinstance(output, Tensor) else tensors_in(output, DEPTH)
        is_watched = self._watch(call, outputs)
        if current_backward() >= 0:  # recomputed: its backward follows
            return self._leave(site.unit, call.used, keep=True)
        if site is self.root:
            self._end_forward()
        # The rest of forward gathers `later` elements, and its backward the same again, until this module's
        # backward needs the parameters.
        later = site.unit.later
        is_near = is_watched and later is not None and 2 * later < self.limits.max_reuse
        keep = is_near and self.live <= self.limits.max_live
        for group in site.groups if is_watched and not keep else ():
            if group.parameters.node is not None:
                group.parameters.keep_node_copy()
        self._leave(site.unit, call.used, keep)
        # In training the step raises for a failed read. An exception of this forward is raised as it is.
        if site is self.root and not torch.is_grad_enabled() and sys.exc_info()[0] is None:
            self.check_reads()

    def _end_forward(self) -> None:
        """Note how much forward gathers after each site, and release prefetched parameters."""
        if self.order is self.training:
            later = 0
            for unit in reversed(self.training.seen):
                unit.later = later
                later += unit.numel
        self.order = None
        self._release_lingering()
        # Prefetched and not reached, because this forward has failed or taken another way. If they stayed,
        # a later use would see the present values, also after a step has changed the parameters.
        for group in list(self.gathered):
            if group.parameters.state is GatherState.GATHERING:
                self.release(group)
        if self.param_store.is_offloaded:
            self.param_store.cancel_prefetches()

    def interrupt(self, error: BaseException) -> None:
        """End the calls of a pass that an interrupt has cut short. After it torch runs no hooks.

        `error`: an exception that is no `Exception`, such as KeyboardInterrupt. With several ranks, later
        all-gathers raise: ranks may have been interrupted at different places, so theirs may be others.
        """
        for site in self.hooked:
            for call in site.active:
                for group in () if call is None else call.used:
                    group.parameters.users -= 1
            site.active.clear()
        self.order = None
        if any(group.shard_comm.size > 1 for group in self.unit_of):
            self.interrupted = INTERRUPTED.format(type(error).__name__)

    def _watch(self, call: Call, outputs: Iterable[Tensor]) -> bool:
        """Hook the outputs that backward reaches, and find those that are views of parameters.

        Other modules read such a view, so from now on the root gathers its parameters as well. Returns
        whether any output got a hook.
        """
        is_watched, storages = False, set()
        for tensor in outputs:
            if tensor.layout is torch.strided:  # else it has no storage, and is no view of a parameter
                storages.add(identity_of(tensor.untyped_storage()))
            # A leaf may be a parameter, on which hooks would stay for life.
            if tensor.requires_grad and not tensor.is_leaf and torch.is_grad_enabled():
                tensor.register_hook(partial(self.before_backward, self.me, call))
                is_watched = True
        for group in call.site.groups:
            if not group.parameters.released_at_rest or group in self.root.groups:
                continue
            if identity_of(group.parameters.full.untyped_storage()) in storages:
                self.root.groups.append(group)
                if group in self.unit_of:
                    self.unit_of[group].has_unmarked_use = True
                if self.root.active and (running := self.root.active[-1]) is not None:
                    group.parameters.users += 1  # until the root's forward is done
                    running.used = (*running.used, group)
        return is_watched

    # Backward ------------------------------------------------------------------------------------

    @staticmethod
    def before_backward(gatherer: Gatherer, call: Call, grad: Tensor) -> None:
        """Tensor hook on a call's outputs: gather the call's parameters."""
        self, site = gatherer(), call.site
        if self is None:
            return
        if torch.is_grad_enabled() and any(group.parameters.users == 0 for group in site.groups):
            raise RuntimeError(
                f"backward with create_graph=True needs the parameters of {site.name or 'the model'} again "
                "after they were released. Run forward and both backward passes inside "
                "zero_full.GatheredParameters(list(model.parameters()))"
            )
        if call.needed:  # a hook on another output of the call was first
            return
        if not self.reducer.backward.running:
            self.reducer.begin()
        if self.order is not self.backward:
            # In the first backward, prefetch in the reverse order of forward.
            self.backward.known = self.backward.known or self.training.seen[::-1]
            self.order = self.backward
            if self.order.begin():
                self._log_new_order()
        call.needed = self._need(site.unit, self.order)
        self.calls.add(call)

    @staticmethod
    def after_backward(gatherer: Gatherer, call: Call, *grads: Any) -> None:
        """Hook on the mark of a call's inputs: release its parameters, and reduce complete gradients."""
        self, site, unit = gatherer(), call.site, call.site.unit
        if self is None:
            return
        # Not below 0: `forget` resets the number, and a graph that is kept may run backward again.
        site.backwards_due = max(0, site.backwards_due - 1)
        self.calls.discard(call)
        needed, call.needed = call.needed, ()
        self._leave(unit, needed)
        is_recomputed_once = site.no_grad_calls == 1 and not site.marked  # by re-entrant checkpointing
        if site.backwards_due == 0 and (not site.no_grad_calls or is_recomputed_once):
            unit.open.discard(site)
            if not unit.open and not unit.has_unmarked_use:  # see [Note: backward done]
                for group in unit.reduces:
                    self.reducer.complete(group)

    def end_backward(self) -> None:
        """Release the parameters of calls without a mark, at the end of backward."""
        calls, self.calls = self.calls, set()
        for call in calls:
            needed, call.needed = call.needed, ()
            self._leave(call.site.unit, needed)
        self.order = self.lingering = None
        self.release_all()
        if self.param_store.is_offloaded:
            self.param_store.cancel_prefetches()
        self.forget(also_due=False)

    def forget(self, also_due: bool = True) -> None:
        """Expect no more backwards of earlier calls, after a step or after `reducer.forget`.

        `also_due`: also of sites with calls that have not completed backward.
        """
        for site in self.sites.values():
            if also_due or not site.backwards_due:
                site.backwards_due = site.no_grad_calls = site.marked = 0
                site.unit.open.discard(site)
        for unit in (site.unit for site in self.sites.values()):
            if not unit.open:
                unit.has_unmarked_use = False

    def check_copy(self) -> None:
        """Raise RuntimeError if parameters are released, because a copy of the module would have NaN."""
        released = [group for group in self.unit_of if group.parameters.state is not GatherState.WHOLE]
        if released:
            raise RuntimeError(
                f"the module cannot be copied or pickled while {released[0].name} is sharded. Do it inside "
                "zero_full.GatheredParameters(list(module.parameters())), or save engine.module_state_dict()"
            )

    def close(self) -> None:
        """Remove the hooks from the modules."""
        for hook in self.hooks:
            hook.remove()


class BackwardDone(torch.autograd.Function):
    """Identity function with a backward that runs when a call's backward is complete: the mark."""

    @staticmethod
    def forward(ctx: Any, gatherer: Gatherer, call: Call, *inputs: Tensor) -> Any:
        """Return the inputs unchanged."""
        ctx.gatherer, ctx.call = gatherer, call
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradients unchanged, after the call's parameters were released."""
        ParameterGatherer.after_backward(ctx.gatherer, ctx.call)
        return None, None, *grads
