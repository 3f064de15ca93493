"""Whole parameters of a model whose parameters are sharded: to read them, to write them, to save them."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from copy import deepcopy
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from zero_full._compat import version_of
from zero_full.comm.topology import this_rank
from zero_full.formatting import listed
from zero_full.shard.contents.state import Chunk, OwnPart, kept, put_back
from zero_full.shard.group.checksum import checksum
from zero_full.shard.group.parameters import FlatParameter, Member, is_released
from zero_full.shard.group.recorded import record_of
from zero_full.shard.group.registry import owner_of
from zero_full.shard.guards.local_steps import refuse_apart
from zero_full.shard.step.optimizer import ZeroOptimizer

LEAVING = "leaving GatheredParameters"


def whole_parameters(optimizer: ZeroOptimizer) -> Iterator[tuple[Member, Tensor]]:
    """Yield every parameter, whole until the next one is asked for. Every rank must iterate to the end."""
    if optimizer.gatherer is not None or optimizer.settings.tier.delay_after is not None:
        optimizer.on_every_rank("module_state_dict")
    refuse_apart(optimizer, "reading whole parameters")
    if optimizer.gatherer is not None:
        optimizer.gatherer.refuse_lost()
    optimizer.catch_up()
    for flat in optimizer.flats():
        with _gathered(optimizer, [flat]):
            yield from zip(flat.members, flat.windows, strict=True)


@contextmanager
def _gathered(optimizer: ZeroOptimizer, several: Iterable[FlatParameter]) -> Iterator[None]:
    taken: list[FlatParameter] = []
    gatherer = optimizer.gatherer
    try:
        for flat in several:
            if gatherer is not None:
                gatherer.gather(flat)
            flat.users += 1
            taken.append(flat)
        if gatherer is not None and taken:
            gatherer.refuse_lost()
        yield
    finally:
        for flat in taken:
            flat.users -= 1
            if gatherer is not None:
                gatherer.release(flat)


# The module's state dict -------------------------------------------------------------------------


def copy_on_cpu(tensor: Tensor) -> Tensor:
    """A copy on the CPU, for a state dict: the tensor itself may be released."""
    return tensor.detach().to("cpu", copy=True)


def whole_state_dict(
    module: nn.Module, optimizer: ZeroOptimizer, keep: Callable[[Tensor], Tensor] = copy_on_cpu
) -> dict[str, Any]:
    """The module's state dict with whole parameters, gathered a unit at a time. Every rank must call this."""
    state = names_and_values(module)
    names: dict[Any, list[str]] = {}
    for name, value in state.items():
        names.setdefault(value if isinstance(value, Tensor) else name, []).append(name)
    made: dict[str, Any] = {}
    for member, whole in whole_parameters(optimizer):
        if member.param in names:
            made.update(dict.fromkeys(names[member.param], keep(whole)))
    for name, value in state.items():
        if name not in made:
            made[name] = keep(value) if isinstance(value, Tensor) else value
    return {name: made[name] for name in state}


def load_whole_state_dict(
    module: nn.Module, optimizer: ZeroOptimizer, state: Mapping[str, Any], strict: bool
) -> None:
    """Take this rank's slices out of a whole state dict, which must be the same on every rank."""
    refuse_apart(optimizer, "loading parameters")
    optimizer.catch_up()
    mine, places = names_and_values(module), optimizer.parts.places
    names = {name for name, value in mine.items() if _is_in(value, places)}
    _check_names(mine, state, strict)
    for name in names & state.keys():
        if state[name].shape != mine[name].shape:
            shapes = f"{tuple(mine[name].shape)}, but {tuple(state[name].shape)} in the state dict"
            raise ValueError(f"{name} has shape {shapes}")
        optimizer.parts.fill(mine[name], state[name])
    with _unguarded():
        module.load_state_dict({k: v for k, v in state.items() if k in mine and k not in names}, strict=False)


def own_state_dict(module: nn.Module, optimizer: ZeroOptimizer) -> dict[str, Any]:
    """This rank's frozen slices and whole tensors, which the optimizer's state does not have."""
    own, others = own_and_made(module)
    chunks = chain(optimizer.contents.frozen(), optimizer.contents.whole(own))
    return {"tensors": kept(chunks), "others": {name: copied(value) for name, value in others.items()}}


@torch.no_grad()
def fitting_chunks(module: nn.Module, optimizer: ZeroOptimizer, part: OwnPart) -> list[Chunk]:
    """Where the values of a rank's part go; ValueError unless they fit."""
    own, _ = own_and_made(module)
    chunks = [*optimizer.contents.frozen(), *optimizer.contents.whole(own)]
    known = {chunk.key for chunk in chunks} | optimizer.contents.shapes().keys()
    if surplus := [key for key in part.shapes if key not in known]:
        raise ValueError(f"this rank's saved part has {listed(surplus)}, which the model lacks")
    part.check(chunks)
    return chunks


def load_own_state_dict(module: nn.Module, optimizer: ZeroOptimizer, state: Mapping[str, Any]) -> None:
    """Restore what `own_state_dict` of the same rank has returned."""
    part = OwnPart(state["tensors"], {})
    chunks = fitting_chunks(module, optimizer, part)
    part.read(chunks)
    put_back(chunks)
    for flat in optimizer.frozen:
        flat.node_copy = None
    load_others(module, state["others"])


def load_others(module: nn.Module, others: Mapping[str, Any]) -> None:
    """Give modules back what they have made for their state dict."""
    with _unguarded():
        module.load_state_dict(others, strict=False)


def own_and_made(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The module's state dict: its own tensors; and what modules and hooks make for it and take back."""
    there = {*module.parameters(), *module.buffers()}
    own, made = dict[str, Any](), dict[str, Any]()
    for name, value in names_and_values(module).items():
        (own if isinstance(value, Tensor) and value in there else made)[name] = value
    return own, made


def copied(value: Any) -> Any:
    """The same, which nobody else changes."""
    return value.detach().clone() if isinstance(value, Tensor) else deepcopy(value)


def _is_in(value: Any, params: Container[Any]) -> bool:
    return isinstance(value, Tensor) and value in params


def names_and_values(module: nn.Module) -> dict[str, Any]:
    """The module's state dict with the parameters themselves, which may be released."""
    with _unguarded():
        state: dict[str, Any] = module.state_dict(keep_vars=True)
    return state


def _check_names(mine: Mapping[str, Any], given: Mapping[str, Any], strict: bool) -> None:
    missing, unexpected = sorted(mine.keys() - given.keys()), sorted(given.keys() - mine.keys())
    if strict and (missing or unexpected):
        raise ValueError(
            f"the state dict lacks {missing or 'nothing'} and has {unexpected or 'nothing'} besides"
        )


# For torch's own call of our hooks, which takes no argument from us. Each thread, so each rank, has its own.
_is_guarded = ContextVar("_is_guarded", default=True)


@contextmanager
def _unguarded() -> Iterator[None]:
    before = _is_guarded.set(False)
    try:
        yield
    finally:
        _is_guarded.reset(before)


def guard(module: nn.Module) -> list[RemovableHandle]:
    """Make `state_dict` and `load_state_dict` of a model raise while a rank alone has not what they ask for.

    That is while parameters are released, or each rank has parameters of its own. Returns the hooks.
    """
    handles = []
    for inner in module.modules():
        if next(inner.parameters(recurse=False), None) is not None:
            handles.append(inner.register_state_dict_pre_hook(partial(_refuse, "state_dict()")))
            handles.append(inner.register_load_state_dict_pre_hook(partial(_refuse, "load_state_dict(...)")))
    return handles


def _refuse(call: str, module: nn.Module, *arguments: Any) -> None:
    if not _is_guarded.get():
        return
    owners = dict.fromkeys(owner_of(p) for p in module.parameters(recurse=False))
    for owner in (owner for owner in owners if owner is not None):
        refuse_apart(owner, f"{call} of the model")
        owner.delayed.refuse(f"{call} of the model")
    released = [name for name, p in module.named_parameters(recurse=False) if is_released(p)]
    if released:
        raise RuntimeError(
            f"{call} of a {type(module).__name__} whose {', '.join(released)} is or are sharded: call "
            f"engine.{call.replace('state_dict', 'module_state_dict')} on every rank, or stay inside "
            "zero_full.GatheredParameters"
        )


# Single parameters -------------------------------------------------------------------------------


def _tensors_of(params: Any) -> Iterator[Tensor]:
    if isinstance(params, Tensor):
        yield params
    elif isinstance(params, nn.Module):
        yield from params.parameters()
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes)):
        for each in params.values() if isinstance(params, Mapping) else params:
            yield from _tensors_of(each)
    elif params is not None:
        raise TypeError(f"GatheredParameters takes parameters, modules and lists of such, not {params!r}")


class GatheredParameters:
    """Inside this context the parameters are whole. Every rank must enter and leave it.

    params          parameters, modules, and iterables of such; None, as a layer's bias may be, is skipped
    modifier_rank   the rank whose changes become everybody's; None: there must not be any

    With None, changes that all ranks make alike are an error, too: nobody would know whose to keep. What
    `Init` has recorded can be gathered before `initialize`, buffers included; it is on the CPU then.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self.params = list(_tensors_of(params))
        self.modifier_rank, self.enabled = modifier_rank, enabled
        self.stack: list[tuple[ZeroOptimizer, list[tuple[FlatParameter, Member]], Any]] = []
        self.recorded: AbstractContextManager[Any] = nullcontext()  # of parameters before `initialize`

    def __enter__(self) -> None:
        """Gather the parameters."""
        if not self.enabled:
            return
        recorded = [p for p in self.params if record_of(p) is not None]
        if recorded:
            self.recorded = record_of(recorded[0]).gathered(recorded, self.modifier_rank)
            self.recorded.__enter__()
        for optimizer, chosen in _by_optimizer(self.params).items():
            optimizer.on_every_rank("GatheredParameters")
            refuse_apart(optimizer, "GatheredParameters")
            if self.modifier_rank is not None:
                optimizer.finish_update()
            for flat in dict.fromkeys(flat for flat, _ in chosen):
                if flat in optimizer.owned_of:
                    optimizer.owned_of[flat].follow_master()
            context = _gathered(optimizer, dict.fromkeys(flat for flat, _ in chosen))
            context.__enter__()
            self.stack.append((optimizer, chosen, context))
            self._take_back_moved(chosen)
        self.before = self._fingerprints()

    @torch.no_grad()
    def __exit__(self, *failure: Any) -> None:
        """Keep the changes of `modifier_rank`, or make sure that there are none; release."""
        if not self.enabled:
            return
        recorded, self.recorded = self.recorded, nullcontext()
        problem, gives_up = None, True
        try:
            if failure[0] is None:
                for optimizer, chosen, _ in self.stack:
                    optimizer.on_every_rank(LEAVING)
                    self._take_back_moved(chosen)
                gives_up = False
                problem = self._refuse_changes() if self.modifier_rank is None else self._keep_changes()
            else:
                for optimizer, _, _ in self.stack:
                    optimizer.tell_every_rank(f"{LEAVING} by {failure[0].__name__}: {failure[1]}")
        finally:
            while self.stack:
                _, chosen, context = self.stack.pop()
                self._give_back(chosen, written=None if gives_up else {m for _, m in chosen})
                context.__exit__(*failure)
            recorded.__exit__(*failure)
        if problem:
            raise RuntimeError(problem)

    def _give_back(self, chosen: Sequence[tuple[FlatParameter, Member]], written: set[Member] | None) -> None:
        """Note that these members' writes are taken over; None: all are given up, after an exception."""
        for flat in dict.fromkeys(flat for flat, _ in chosen):
            flat.lent = flat.released_at_rest
            flat.note_versions(written)

    def _take_back_moved(self, chosen: Sequence[tuple[FlatParameter, Member]]) -> None:
        for flat in dict.fromkeys(flat for flat, _ in chosen):
            flat.take_back_moved()

    def _keep_changes(self) -> str | None:
        for optimizer, chosen, _ in self.stack:
            if not self._is_known(optimizer):
                return (
                    f"modifier_rank {self.modifier_rank} is not among the ranks that share these parameters"
                )
            for flat, member in chosen:
                window = flat.windows[member.index]
                if this_rank() != self.modifier_rank:
                    window.zero_()
                for group in (flat.ranks, flat.across):
                    group.sum_numbers(window, f"changes of {member.name}")
                flat.fill(member, window)
            for flat in dict.fromkeys(flat for flat, _ in chosen):
                owned = optimizer.owned_of.get(flat)
                try:
                    if owned is not None:  # what has not changed keeps the masters' last bits
                        owned.follow_parameters(released=True)
                except RuntimeError as error:
                    return str(error)
        return None

    def _is_known(self, optimizer: ZeroOptimizer) -> bool:
        """Whether exactly one rank is the one whose changes count."""
        found = torch.tensor(
            [float(this_rank() == self.modifier_rank)], device=optimizer.groups.dense.shard.device
        )
        for group in (optimizer.groups.dense.shard, optimizer.groups.dense.across):
            group.sum_numbers(found, "modifier_rank")
        return bool(found.item() == 1)

    def _fingerprints(self) -> dict[str, tuple[int, int]]:
        """By name: how often a parameter was written, and a sum over its bits, for what goes round that."""
        members = [place for _, chosen, _ in self.stack for place in chosen]
        return {
            member.name: (version_of(member.param), checksum(flat.windows[member.index]))
            for flat, member in members
        }

    def _refuse_changes(self) -> str | None:
        before, after = self.before, self._fingerprints()
        changed = sorted(name for name in before if before[name] != after[name])
        for optimizer, _, _ in self.stack:
            for group in optimizer.groups.everyone:
                changed = sorted(set().union(*group.gather_objects(changed, "changed parameters")))
        if not changed:
            return None
        for _, chosen, _ in self.stack:
            for flat in dict.fromkeys(flat for flat, _ in chosen):
                flat.collect()  # undo
        return (
            f"{', '.join(changed)} changed inside GatheredParameters, and the change was undone: pass "
            "modifier_rank, the rank whose values count"
        )


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """A context with the model (an engine's own) and whole parameters, so that generating gathers nothing.

    Every rank must enter and leave; in between ranks may call the model as often as they like.
    """
    with GatheredParameters(list(model.parameters())):
        yield model if isinstance(model, nn.Module) else model.module


def _by_optimizer(params: Iterable[Tensor]) -> dict[ZeroOptimizer, list[tuple[FlatParameter, Member]]]:
    """By optimizer, those of these parameters that it has, in the same order on every rank."""
    wanted = set(params)
    owners = dict.fromkeys(owner for p in params if (owner := owner_of(p)) is not None)
    return {
        owner: [(v, m) for v in owner.flats() for m in v.members if m.param in wanted] for owner in owners
    }


def register_external_parameter(module: nn.Module, parameter: Parameter) -> None:
    """Gather this parameter for `module`, too, which reads it although another module has it."""
    owner = owner_of(parameter)
    if owner is None:
        raise ValueError("this parameter belongs to no zero_full engine yet: call this after initialize")
    found = _by_optimizer([parameter])[owner]
    if owner.gatherer is not None and found and found[0][0].released_at_rest:
        owner.gatherer.add(module, found[0][0])
