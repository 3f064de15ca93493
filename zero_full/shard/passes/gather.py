"""When parameters are gathered and released: hooks on the modules that need them.

    forward    before a module: gather, and begin to gather what comes next; after it: release
    backward   before a module's outputs pass their gradients on: gather, and begin the next; when its
               inputs have theirs: reduce its parameters' gradients, release

[Note: backward done] The inputs of a module pass through an identity whose backward runs when that of the
module is done. All ranks get there in the same order, whichever parameters they have used: that is where
gradients leave, when no other call of the module is due. A call whose inputs need no gradients has no such
mark, so nothing tells when its gradients are complete, and neither does a use of the parameters by another
module. What is used like this leaves, and is released, when backward ends. So does a module that has several
calls without gradients in a training forward, which re-entrant checkpointing may repeat one by one. All this
follows from the calls of forward, which are the same on all ranks.

[Note: prefetch] The order of the sites is recorded. From then on those that come next are gathered while
this one is at work, if there is a lane beside it. Where the order changes nothing is prefetched, and the new
one is recorded; nothing else depends on it. Slices that wait in a file are read still further ahead, as far
as their buffers reach.

[Note: inner modules] A module may be called by itself: `model.encoder(x)`, a layer out of a unit, one that
shares its weight with a module far away. Every module that holds a parameter of a unit looks whether the unit
is gathered; if no module around it has done so, it gathers the unit for its own call.
"""

import logging
import sys
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero_full._compat import identity_of, inside_transform
from zero_full.comm.lane import Inline, Lane
from zero_full.nested import mapped, tensors_in
from zero_full.offload import Shelf
from zero_full.settings import Gathering
from zero_full.shard.group.parameters import FlatParameter, GatherState
from zero_full.shard.passes.autograd_marks import BackwardDone, after_backward, before_backward
from zero_full.shard.passes.backward import refuse_capture
from zero_full.shard.passes.module_hooks import Hook, InnerHook
from zero_full.shard.passes.module_sites import Call, Order, Site
from zero_full.shard.passes.reduce import GradientReducer

log = logging.getLogger("zero_full")
LOST_ELSEWHERE = "parameters that wait in a file cannot be read on another rank: see there"
DEPTH = 4  # of objects in objects: outputs may be distributions, caches and others that hold tensors


class ParameterGatherer:
    """Gathers and releases parameters around the calls of all sites of a model."""

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Site],
        lane: Lane,
        limits: Gathering,
        reducer: GradientReducer,
        shelf: Shelf,
    ) -> None:
        self.lane, self.limits, self.reducer, self.shelf = lane, limits, reducer, shelf
        self.me = weakref.ref(self)  # for hooks: Python finds no circle that goes through a tensor
        self.prefetches = not isinstance(lane, Inline)
        self.training, self.inference, self.backward = Order(), Order(), Order()
        self.order: Order | None = None  # None: between passes
        self.reported = False
        self.trail = 0  # a number for what was gathered, in which order: the same on every rank
        self.live = 0  # elements gathered
        self.gathered: set[FlatParameter] = set()
        self.calls: set[Call] = set()  # whose backward is under way
        self.sites = {site.module: site for site in sites}
        self.home = {flat: site for site in sites for flat in site.reduces}
        ranks = min((flat.ranks.size for site in sites for flat in site.flats), default=1)
        self.reach = shelf.reach * ranks  # elements whose slices find a place in the shelf's buffers
        self.root = self.sites.setdefault(model, Site("", model, []))
        self.hooks: list[RemovableHandle] = []
        for site in self.sites.values():
            self._install(site, Hook)
        self._install_inner(model)
        reducer.backward.at_end.append(self.end_backward)

    def _install(self, site: Site, kind: type[Hook], prefix: str = "") -> None:
        module = site.module
        before = kind(module, getattr(self, f"{prefix}before_forward"), site)
        after = kind(module, getattr(self, f"{prefix}after_forward"), site)
        handles = (
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            module.register_forward_hook(after, always_call=True),
        )
        if kind is InnerHook:
            InnerHook.renumber(handles[0], first=True)
            InnerHook.renumber(handles[1], first=False)
        self.hooks += handles

    def _install_inner(self, model: nn.Module) -> None:
        """See [Note: inner modules]."""
        site_of = {m.param: site for site in self.sites.values() for v in site.flats for m in v.members}
        for name, module in model.named_modules():
            held = dict.fromkeys(site_of[p] for p in module.parameters(recurse=False) if p in site_of)
            elsewhere = [flat for site in held if site.module is not module for flat in site.flats]
            if elsewhere and module in self.sites:
                self.sites[module].flats += [v for v in elsewhere if v not in self.sites[module].flats]
            elif elsewhere:
                inner = Site(name, module, elsewhere)
                inner.reduces = []  # others may add to the same gradients: these leave when backward ends
                self._install(inner, InnerHook, "inner_")

    def add(self, module: nn.Module, flat: FlatParameter) -> None:
        """Gather these parameters for `module`, too, from now on."""
        if module not in self.sites:
            self.sites[module] = Site(type(module).__name__, module, [])
            self._install(self.sites[module], Hook)
        if flat not in self.sites[module].flats:
            self.sites[module].flats.append(flat)

    # Gather and release --------------------------------------------------------------------------

    def gather(self, flat: FlatParameter) -> None:
        """Gather the parameters, and wait until they are whole."""
        self._begin(flat)
        flat.finish_gather(self.lane)

    def _begin(self, flat: FlatParameter) -> None:
        if flat.state is GatherState.SHARDED:
            refuse_capture()
            self.trail = crc32(flat.name.encode(), self.trail)
            flat.begin_gather(self.lane)
            self.live += flat.layout.total
            self.gathered.add(flat)

    def release(self, flat: FlatParameter) -> None:
        """Release the parameters, unless a module is at work with them."""
        flat.release()
        if flat.state is GatherState.SHARDED and flat in self.gathered:
            self.gathered.remove(flat)
            self.live -= flat.layout.total

    def _done_with(self, flat: FlatParameter) -> None:
        """A module has used the parameters, on whatever stream it runs: their memory is free after that."""
        flat.users -= 1
        self.lane.order(self.lane.producer(), flat.home)

    def release_all(self) -> None:
        """Release all parameters that no module is at work with."""
        for flat in list(self.gathered):
            self.release(flat)

    def _need(self, site: Site) -> None:
        as_known = self.order is not None and self.order.reached(site)
        for flat in site.flats:
            self._begin(flat)
        if self.prefetches and as_known:
            self._prefetch()
        if self.shelf.apart and as_known:
            self._read_ahead()
        for flat in site.flats:
            flat.finish_gather(self.lane)

    def _read_ahead(self) -> None:
        """Begin to read what is gathered after that, until there is no room for more."""
        assert self.order is not None
        for flat in (flat for site in self.order.coming() for flat in site.flats):
            if not flat.read_ahead():
                return

    def refuse_lost(self) -> None:
        """Raise on all ranks that gather together if one of them could not read its part of anything."""
        if not self.shelf.can_lose:
            return
        flats = (flat for site in self.sites.values() for flat in site.flats)
        flat = max(flats, key=lambda flat: flat.ranks.size)
        with torch.inference_mode(False):  # the lane's thread is not in it
            flags = torch.zeros(flat.ranks.size, dtype=torch.uint8, device=flat.kind.device)
            flat.ranks.slice_of(flags).fill_(bool(self.shelf.lost))
        ask = partial(flat.gather_slices, flags, "what could not be read")
        self.lane.submit(ask, [flags], [self.lane.producer()]).wait()
        if flags.any():
            raise RuntimeError(self.shelf.lost or LOST_ELSEWHERE)

    def _prefetch(self) -> None:
        """Begin what comes next until enough is on its way: at least one site, however large.

        On a CPU no more than one: the worker that gathers is never idle, and each site more would have memory
        of its own, whose fresh pages cost more than what is written to them.
        """
        order = self.order
        assert order is not None
        enough = min(self.limits.prefetch_numel, self.reach, 1 if self.lane.stops_host else sys.maxsize)
        while order.ahead < enough and (following := order.next()) is not None:
            if following.numel > self.limits.max_live - self.live:
                return
            order.begin_early(following)
            for flat in following.flats:
                self._begin(flat)

    # Forward -------------------------------------------------------------------------------------

    def inner_before_forward(self, site: Site, args: Any, kwargs: Any) -> Any:
        """Do as `before_forward`, unless a module around this one has gathered already."""
        if all(flat.users for flat in site.flats) or self._is_transformed(site):
            site.active.append(None)
            return None
        return self.before_forward(site, args, kwargs)

    def inner_after_forward(self, site: Site, args: Any, output: Any) -> None:
        """Do as `after_forward`, if this module has gathered itself."""
        if site.active and site.active[-1] is None:
            site.active.pop()
        else:
            self.after_forward(site, args, output)

    def before_forward(self, site: Site, args: Any, kwargs: Any) -> Any:
        """Gather; mark the inputs, to know when backward is done."""
        if self._is_transformed(site):
            site.active.append(None)
            return None
        recomputed = self.reducer.backward.inside_autograd()
        if site is self.root and not recomputed:
            self._begin_pass(self.training if torch.is_grad_enabled() else self.inference)
        if recomputed:
            for flat in site.flats:
                self.gather(flat)
        else:
            self._need(site)
        for flat in site.flats:
            flat.users += 1
        call = Call(site)
        site.active.append(call)
        if not recomputed:
            self._note_use(site)
        if torch.is_grad_enabled() and not (recomputed and site.backwards_due):
            return self._mark_inputs(call, args, kwargs, recomputed)
        return None

    def _note_use(self, site: Site) -> None:
        """See [Note: backward done]."""
        if torch.is_grad_enabled():
            self._note_unseen(flat for flat in site.flats if self.home.get(flat) is not site)
        elif self.order is self.training:
            site.silent += 1

    def _note_unseen(self, flats: Iterable[FlatParameter]) -> None:
        for flat in flats:
            if flat in self.home:
                self.home[flat].is_used_unseen = True

    def _is_transformed(self, site: Site) -> bool:
        """Whether a transform of torch.func runs this forward; then nothing tells when its backward ends."""
        if not inside_transform():
            return False
        for flat in site.flats:
            if flat.released_at_rest and not flat.users:
                raise RuntimeError(
                    f"torch.func transforms {site.name or 'the model'}, whose {flat.name} is sharded: stay "
                    "inside zero_full.GatheredParameters(list(model.parameters())) meanwhile"
                )
        return True

    def _mark_inputs(self, call: Call, args: Any, kwargs: Any, recomputed: bool) -> Any:
        """The inputs, with a mark behind all that need gradients. See [Note: backward done]."""
        # A list or dict that the module writes to must stay the caller's: look inside only if need be.
        direct = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.requires_grad]
        inputs = direct or [t for t in tensors_in((args, kwargs)) if t.requires_grad]
        if not inputs:
            call.site.is_used_unseen = True
            return None
        call.site.backwards_due += 1
        call.site.marked += not recomputed
        if len(inputs) == 1 and inputs[0].layout == torch.strided:
            # Half as expensive as a function of our own, and the module may write to its input.
            passed = inputs[0].view_as(inputs[0])
            assert passed.grad_fn is not None
            passed.grad_fn.register_hook(partial(after_backward, self.me, call))
            if len(args) == 1 and args[0] is inputs[0] and not kwargs:
                return (passed,), kwargs
            return mapped(lambda leaf: passed if leaf is inputs[0] else leaf, (args, kwargs))
        outputs = BackwardDone.apply(self.me, call, *inputs)  # type: ignore[no-untyped-call]
        behind = dict(zip(map(id, inputs), outputs, strict=True))
        return mapped(lambda leaf: behind.get(id(leaf), leaf), (args, kwargs))

    def after_forward(self, site: Site, args: Any, output: Any) -> None:
        """Release, or keep for a backward that comes soon; notice when that begins."""
        call = site.active.pop() if site.active else None
        if call is None:
            return  # its gathering has failed
        for flat in site.flats:
            self._done_with(flat)
        trains = torch.is_grad_enabled() and self._watch(call, output)
        self._notice_escapes(site, output)
        if self.reducer.backward.inside_autograd():  # recomputed: its backward follows
            return
        if site is self.root:
            self._end_forward()
        if not (trains and self._is_worth_keeping(site)):
            for flat in site.flats:
                if trains:
                    flat.keep_node_copy()
                self.release(flat)
        # Of a training pass the step tells; and what has failed in this forward is told by itself.
        if site is self.root and not torch.is_grad_enabled() and sys.exc_info()[0] is None:
            self.refuse_lost()

    def _begin_pass(self, order: Order) -> None:
        if order.begin() and not self.reported:
            self.reported = True
            log.info(
                "modules are not reached in the same order every time: what comes next is not prefetched"
            )
        self.order = order

    def _end_forward(self) -> None:
        if self.order is self.training:
            later = 0
            for site in reversed(self.training.seen):
                site.later = later
                later += site.numel
        self.order = None
        # Begun early and not reached, as this forward has failed or gone another way: it would keep the
        # values of now, whatever becomes of the parameters until somebody needs them.
        for flat in [flat for flat in self.gathered if flat.state is GatherState.GATHERING]:
            self.release(flat)
        self.shelf.give_up_ahead()

    def _is_worth_keeping(self, site: Site) -> bool:
        """Whether backward needs it soon: what is gathered in between is less than `max_reuse`."""
        soon = site.later is not None and 2 * site.later < self.limits.max_reuse
        return soon and self.live <= self.limits.max_live

    def _watch(self, call: Call, output: Any) -> bool:
        """Notice when backward reaches an output. Returns whether it can."""
        hook = partial(before_backward, self.me, call)
        # A leaf is a parameter, which would keep its hooks for life: see `_notice_escapes` for those.
        watched = [t for t in tensors_in(output, DEPTH) if t.requires_grad and not t.is_leaf]
        for tensor in watched:
            tensor.register_hook(hook)
        return bool(watched)

    def _notice_escapes(self, site: Site, output: Any) -> None:
        """An output that is a view of a parameter is used elsewhere: the model needs that one, too."""
        if not any(flat.released_at_rest for flat in site.flats):
            return
        storages = {identity_of(t.untyped_storage()) for t in tensors_in(output, DEPTH)}
        for flat in site.flats:
            if (
                flat.released_at_rest
                and identity_of(flat.full.untyped_storage()) in storages
                and flat not in self.root.flats
            ):
                self.root.flats.append(flat)
                self._note_unseen([flat])
                if self.root.active:
                    flat.users += 1  # until the model is done

    # Backward ------------------------------------------------------------------------------------

    def before_backward(self, call: Call) -> None:
        """Gather, as backward has reached the outputs of a call."""
        if call.needed:
            return
        if not self.reducer.backward.running:
            self.reducer.begin()
        if self.order is not self.backward:
            self.backward.known = self.backward.known or self.training.seen[::-1]
            self._begin_pass(self.backward)
        self._need(call.site)
        call.needed = list(call.site.flats)
        self.calls.add(call)
        for flat in call.needed:
            flat.users += 1

    def after_backward(self, call: Call) -> None:
        """Reduce gradients and release parameters, as the backward of a call is done."""
        site = call.site
        site.backwards_due = max(0, site.backwards_due - 1)
        self._leave(call)
        if site.backwards_due == 0 and site.tells():
            for flat in site.reduces:
                self.reducer.complete(flat)

    def _leave(self, call: Call) -> None:
        self.calls.discard(call)
        needed, call.needed = call.needed, []
        for flat in needed:
            self._done_with(flat)
            self.release(flat)

    def end_backward(self) -> None:
        """Release what had no mark, as the backward pass ends."""
        for call in list(self.calls):
            self._leave(call)
        self.order = None
        self.release_all()
        self.shelf.give_up_ahead()
        for site in self.sites.values():
            if not site.backwards_due:
                site.forget()

    def forget(self) -> None:
        """Expect no more backwards of earlier calls: for after a step, and after `reducer.forget`."""
        for site in self.sites.values():
            site.forget()

    def refuse_copy(self) -> None:
        """RuntimeError if parameters are released: a copy of the module would have NaN in their place."""
        released = [v for site in self.sites.values() for v in site.flats if v.state is not GatherState.WHOLE]
        if released:
            raise RuntimeError(
                f"the module cannot be copied or pickled while {released[0].name} is sharded: stay inside "
                "zero_full.GatheredParameters(list(module.parameters())), or save engine.module_state_dict()"
            )

    def close(self) -> None:
        """Take the hooks off the modules."""
        for hook in self.hooks:
            hook.remove()
