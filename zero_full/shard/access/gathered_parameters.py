"""Whole parameters of a sharded model: `GatheredParameters`, state dicts, and the hooks that guard them."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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

from zero_full._compat import own_parameters, version_of
from zero_full.comm.topology import this_rank
from zero_full.errors import DisagreementError
from zero_full.formatting import listed
from zero_full.shard.contents.state import Chunk, RankPart, as_dict, copy_back
from zero_full.shard.group.checksum import checksum
from zero_full.shard.group.dtensors import is_dtensor, like, local_of, part_of, whole_of
from zero_full.shard.group.parameter_group import ParameterGroup, TrainedGroup
from zero_full.shard.group.parameters import Member, as_bytes, is_released
from zero_full.shard.group.process_groups import Pair
from zero_full.shard.group.registry import owner_of, record_of
from zero_full.shard.group.released import OFFLOADED
from zero_full.shard.step.agreement import gather_messages
from zero_full.shard.step.optimizer import ZeroOptimizer

LEAVING = "leaving GatheredParameters"


def whole_parameters(optimizer: ZeroOptimizer) -> Iterator[tuple[Member, Tensor]]:
    """Yield every parameter with its whole values, which are valid until the next iteration.

    Every rank must iterate to the end, because each group is all-gathered.
    """
    if optimizer.gatherer is not None or optimizer.settings.tier.delay_after is not None:
        optimizer.on_every_rank("module_state_dict")
    optimizer.check_ranks_equal("reading whole parameters")
    if optimizer.gatherer is not None:
        optimizer.gatherer.check_reads()
    optimizer.catch_up()
    for group in optimizer.sharded.groups:
        with whole_groups(optimizer, [group]):
            for member in group.members:
                yield member, group.parameters.shown(member)


@contextmanager
def whole_groups(
    optimizer: ZeroOptimizer, several: Iterable[ParameterGroup], as_in_forward: bool = False
) -> Iterator[None]:
    """Gather these groups within the context. Every rank must pass the same groups in the same order.

    as_in_forward  True: with the values of a forward, which `zero_quantized_weights` rounds
    """
    taken: list[ParameterGroup] = []
    gatherer = optimizer.gatherer
    try:
        for group in several:
            if gatherer is not None:
                (gatherer.gather if as_in_forward else gatherer.gather_exactly)(group)
            group.parameters.users += 1
            taken.append(group)
        if gatherer is not None and taken:
            gatherer.check_reads()
        yield
    finally:
        for group in taken:
            group.parameters.users -= 1
            if gatherer is not None:
                gatherer.release(group)


# The module's state dict -------------------------------------------------------------------------


def copy_on_cpu(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU for a state dict, because the tensor itself may be released."""
    return tensor.detach().to("cpu", copy=True)


def whole_state_dict(
    module: nn.Module, optimizer: ZeroOptimizer, keep: Callable[[Tensor], Tensor] = copy_on_cpu
) -> dict[str, Any]:
    """Return the module's state dict with whole parameters. Every rank must call this.

    One group is gathered at a time. `keep` returns the value to store for a whole tensor. If it raises at
    stage 3, this rank goes on gathering, as the others wait for its collectives. Then every rank raises.
    """
    failure: Exception | None = None
    state = names_and_values(module)
    names: dict[Any, list[str]] = {}
    for name, value in state.items():
        names.setdefault(value if isinstance(value, Tensor) else name, []).append(name)
    made: dict[str, Any] = {}
    for member, whole in whole_parameters(optimizer):
        if member.block is not None:
            whole = whole.full_tensor()  # type: ignore[attr-defined]
        if member.param in names and failure is None:
            try:
                made.update(dict.fromkeys(names[member.param], keep(local_of(whole))))
            except Exception as error:
                if optimizer.gatherer is None:
                    raise
                failure = error
    if optimizer.gatherer is not None:
        problem = "" if failure is None else f"rank {this_rank()}: {type(failure).__name__}: {failure}"
        told = gather_messages(optimizer.communicators, [problem] if problem else [], "a state dict")
        if failure is not None:
            raise failure
        if told:
            raise RuntimeError(f"module_state_dict has failed on another rank: {'; '.join(told)}")
    for name, value in state.items():
        if name not in made:
            made[name] = keep(whole_of(value)) if isinstance(value, Tensor) else value
    return {name: made[name] for name in state}


def load_whole_state_dict(
    module: nn.Module, optimizer: ZeroOptimizer, state: Mapping[str, Any], strict: bool
) -> None:
    """Load this rank's slices from a whole state dict, which must be the same on every rank."""
    if optimizer.gatherer is not None:
        optimizer.on_every_rank("load_module_state_dict")
    optimizer.check_ranks_equal("loading parameters")
    optimizer.catch_up()
    mine, places = names_and_values(module), optimizer.sharded.places
    names = {name for name, value in mine.items() if isinstance(value, Tensor) and value in places}
    loaded = [name for name in mine if name in names and name in state]
    problem = _mismatch(mine, state, loaded, strict)  # before anything changes
    if optimizer.gatherer is not None:
        told = gather_messages(optimizer.communicators, [problem] if problem else [], "a state dict")
        if told and not problem:
            raise DisagreementError(f"another rank cannot load its state dict: {'; '.join(told)}")
    if problem:
        raise ValueError(problem)
    if optimizer.gatherer is not None:
        _check_equal(optimizer, {name: state[name] for name in loaded}, mine)
    optimizer.loads += 1
    for name in loaded:
        optimizer.sharded.fill(mine[name], part_of(mine[name], state[name]))
    others = {k: _laid_out(mine[k], v) for k, v in state.items() if k in mine and k not in names}
    with _unguarded():
        module.load_state_dict(others, strict=False)


def _mismatch(mine: Mapping[str, Any], state: Mapping[str, Any], loaded: Iterable[str], strict: bool) -> str:
    """Return why a state dict cannot be loaded into these names and tensors; "" if it can."""
    missing, unexpected = sorted(mine.keys() - state.keys()), sorted(state.keys() - mine.keys())
    if strict and (missing or unexpected):
        return (
            f"the state dict lacks {missing or 'no keys'}, and has {unexpected or 'no keys'} that the model "
            "lacks. Load it with strict=False to ignore this"
        )
    for name in loaded:
        if state[name].shape != mine[name].shape:
            shapes = f"{tuple(mine[name].shape)}, but {tuple(state[name].shape)} in the state dict"
            return f"{name} has shape {shapes}. Load a state dict of this model"
    return ""


def _check_equal(
    optimizer: ZeroOptimizer, values: Mapping[str, Tensor], params: Mapping[str, Parameter]
) -> None:
    """Raise on every rank if ranks have different values for a sharded parameter.

    Each rank would keep its slice of other values. The next step compares parameters that are whole on every
    rank. Every rank must call this.
    """
    problems = list[str]()
    for pair in filter(None, (optimizer.communicators.dense, optimizer.communicators.expert)):
        own = dict[str, int]()
        for name, value in values.items():
            group, _ = optimizer.sharded.places[params[name]]
            is_of_pair = group.kind.expert == (pair is optimizer.communicators.expert)
            if is_of_pair and group.parameters.released_at_rest:
                own[name] = checksum(local_of(value).contiguous())
        everyones = pair.gather_objects(own, "loaded parameters")
        names = sorted({name for each in everyones for name in each})
        if differing := [n for n in names if len({each.get(n) for each in everyones}) > 1]:
            problems.append(
                f"the state dict has other values of {listed(differing)} on some ranks, or lacks them there. "
                "Nothing was loaded. Pass the same state dict on every rank"
            )
    if problems := gather_messages(optimizer.communicators, problems, "loaded parameters"):
        raise DisagreementError("; ".join(problems))


def _laid_out(tensor: Any, value: Any) -> Any:
    """Return a value in the layout of the module's `tensor`: a DTensor, if `tensor` is one."""
    return like(tensor, part_of(tensor, value)) if is_dtensor(tensor) else value


def own_state_dict(module: nn.Module, optimizer: ZeroOptimizer) -> dict[str, Any]:
    """Return this rank's frozen slices and whole tensors, which the optimizer's state dict does not have."""
    own, others = own_and_made(module)
    chunks = chain(optimizer.contents.frozen(), optimizer.contents.whole(own))
    return {"tensors": as_dict(chunks), "others": {name: copied(value) for name, value in others.items()}}


@torch.no_grad()
def fitting_chunks(module: nn.Module, optimizer: ZeroOptimizer, part: RankPart) -> list[Chunk]:
    """Return the chunks to load a rank's part into; raise ValueError if they do not fit."""
    own, _ = own_and_made(module)
    chunks = [*optimizer.contents.frozen(), *optimizer.contents.whole(own)]
    known = {chunk.key for chunk in chunks} | optimizer.contents.shapes().keys()
    if surplus := [key for key in part.shapes if key not in known]:
        raise ValueError(f"the saved state of this rank has {listed(surplus)}, which the model lacks")
    part.check(chunks)
    return chunks


def load_own_state_dict(module: nn.Module, optimizer: ZeroOptimizer, state: Mapping[str, Any]) -> None:
    """Restore the result of `own_state_dict` of the same rank."""
    part = RankPart(state["tensors"], {})
    chunks = fitting_chunks(module, optimizer, part)
    part.read(chunks)
    copy_back(chunks)
    for group in optimizer.sharded.frozen:
        group.parameters.node_copy = None
    load_others(module, state["others"])


def load_others(module: nn.Module, others: Mapping[str, Any]) -> None:
    """Load the entries that modules and hooks made for their state dict."""
    with _unguarded():
        module.load_state_dict(others, strict=False)


def own_and_made(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the module's state dict into its own tensors, and entries made by modules and hooks."""
    there = {*module.parameters(), *module.buffers()}
    own, made = dict[str, Any](), dict[str, Any]()
    for name, value in names_and_values(module).items():
        (own if isinstance(value, Tensor) and value in there else made)[name] = value
    return own, made


def copied(value: Any) -> Any:
    """Return an independent copy of a tensor or another value of a state dict."""
    return value.detach().clone() if isinstance(value, Tensor) else deepcopy(value)


def names_and_values(module: nn.Module) -> dict[str, Any]:
    """Return the module's state dict with the parameter objects themselves, which may be released."""
    with _unguarded():
        state: dict[str, Any] = module.state_dict(keep_vars=True)
    return state


# Read by our state_dict hooks, which torch calls without arguments of ours. A context variable, because each
# thread has its own, and ranks may be threads.
_is_guarded = ContextVar("_is_guarded", default=True)


@contextmanager
def _unguarded() -> Iterator[None]:
    """Disable the state_dict hooks of `guard` within the context."""
    before = _is_guarded.set(False)
    try:
        yield
    finally:
        _is_guarded.reset(before)


def guard(module: nn.Module) -> list[RemovableHandle]:
    """Make `state_dict` and `load_state_dict` of a model raise while this rank's values are incomplete.

    That is while parameters are released, while a delayed update is pending, or while ranks hold different
    parameters. Returns the hooks.
    """
    handles = []
    for inner in module.modules():
        if own_parameters(inner):
            handles.append(inner.register_state_dict_pre_hook(partial(_check_whole, "state_dict()")))
            handles.append(
                inner.register_load_state_dict_pre_hook(partial(_check_whole, "load_state_dict(...)"))
            )
    return handles


def _check_whole(call: str, module: nn.Module, *arguments: Any) -> None:
    """Raise RuntimeError from a state_dict hook if the module's values are incomplete on this rank."""
    if not _is_guarded.get():
        return
    owners = dict.fromkeys(owner_of(p) for p in module.parameters(recurse=False))
    for owner in (owner for owner in owners if owner is not None):
        owner.check_ranks_equal(f"{call} of the model")
        owner.check_no_pending_update(f"{call} of the model")
    released = [name for name, p in module.named_parameters(recurse=False) if is_released(p)]
    if released:
        raise RuntimeError(
            f"{call} of a {type(module).__name__} whose {', '.join(released)} is sharded. Call "
            f"engine.{call.replace('state_dict', 'module_state_dict')} on every rank, or do it inside "
            "zero_full.GatheredParameters"
        )


# Single parameters -------------------------------------------------------------------------------

Chosen = dict[ParameterGroup, list[Member]]  # parameters to gather, by group


def _tensors_of(params: Any) -> Iterator[Tensor]:
    """Yield the tensors of parameters, modules and nested iterables of both."""
    if isinstance(params, Tensor):
        yield params
    elif isinstance(params, nn.Module):
        yield from params.parameters()
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes)):
        for each in params.values() if isinstance(params, Mapping) else params:
            yield from _tensors_of(each)
    elif params is not None:
        raise TypeError(f"GatheredParameters takes parameters, modules and lists of both, not {params!r}")


class GatheredParameters:
    """Context in which the parameters are whole. Every rank must enter and leave it.

    params          parameters, modules, and iterables of both; None (such as a missing bias) is skipped
    modifier_rank   the rank that changes values, which all ranks get at the end; None: no rank may change any

    With None, even equal changes on all ranks raise, because it is unknown which rank's values to keep. Only
    frozen parameters that every rank has whole may be changed equally on all ranks.
    Parameters and buffers that `Init` has recorded can be gathered before `initialize`; they are on the CPU.
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
        self.stack: list[tuple[ZeroOptimizer, Chosen, Any]] = []  # with the context that gathers the groups
        self.recorded: AbstractContextManager[Any] = nullcontext()  # of parameters before `initialize`
        # See `FlatParameters.readers`. Calls that set values on every rank update it.
        self.before: dict[Member, tuple[int, int]] = {}

    def __enter__(self) -> None:
        if not self.enabled:
            return
        try:
            self._enter()
        except BaseException:
            self._release(adopts=False)
            raise

    def _enter(self) -> None:
        recorded = [p for p in self.params if record_of(p) is not None]
        if recorded:
            self.recorded = record_of(recorded[0]).recorder.gathered(recorded, self.modifier_rank)
            self.recorded.__enter__()
        for optimizer, chosen in _by_optimizer(self.params).items():
            if any(group.parameters.awaits_reload for group in chosen):
                raise RuntimeError(OFFLOADED)
            if self.modifier_rank is not None and optimizer.states_offloaded:
                raise RuntimeError(OFFLOADED)  # masters must follow the changes, and may be empty
            optimizer.on_every_rank("GatheredParameters")
            optimizer.check_ranks_equal("GatheredParameters")
            if self.modifier_rank is not None:
                self._check_modifier(optimizer, chosen)
                optimizer.finish_update()
            for group in chosen:
                if isinstance(group, TrainedGroup):  # user code must see its earlier writes to masters
                    group.master.follow_master()
            context = whole_groups(optimizer, chosen)
            context.__enter__()
            self.stack.append((optimizer, chosen, context))
            for group in chosen:
                group.parameters.adopt_assigned()
        if self.modifier_rank is None:
            for _, chosen, _ in self.stack:
                for group, members in chosen.items():
                    self.before |= {member: group.parameters.fingerprint(member) for member in members}
                    group.parameters.readers.append(self.before)
            self.versions = {p: _version(p) for _, p, _ in self._whole()}

    @torch.no_grad()
    def __exit__(self, *failure: Any) -> None:
        """Broadcast the changes of `modifier_rank`, or check that nothing changed; release the parameters."""
        if not self.enabled:
            return
        recorded, self.recorded = self.recorded, nullcontext()
        problem, adopts = None, False
        try:
            if failure[0] is None:
                for optimizer, chosen, _ in self.stack:
                    optimizer.on_every_rank(LEAVING)
                    for group in chosen:
                        group.parameters.adopt_assigned()
                adopts = True
                problem = self._undo_changes() if self.modifier_rank is None else self._keep_changes()
            else:  # no collective after an exception: the other ranks may not have raised
                for optimizer, _, _ in self.stack:
                    optimizer.announce_call(f"{LEAVING} by {failure[0].__name__}: {failure[1]}")
        finally:
            self._release(adopts, *failure)
            recorded.__exit__(*failure)
        if problem:
            raise RuntimeError(problem)

    def _release(self, adopts: bool, *failure: Any) -> None:
        """Release the parameters. `adopts`: writes to them were adopted or undone; else all are discarded."""
        while self.stack:
            _, chosen, context = self.stack.pop()
            for group, members in chosen.items():
                flat = group.parameters
                # User code may have kept views: `release` must leave them their memory.
                flat.lent = flat.released_at_rest
                flat.note_versions(set(members if adopts else group.members))
                flat.readers = [each for each in flat.readers if each is not self.before]
            context.__exit__(*(failure or (None, None, None)))
        self.before = {}

    def _keep_changes(self) -> str | None:
        """Send the values of `modifier_rank` to all ranks. Returns the message of an error, or None."""
        for optimizer, param, pair in self._whole():
            value = local_of(param).detach()
            sent = as_bytes(value.contiguous())  # a frozen parameter may have any dtype
            if not self._is_modifier(optimizer):
                sent = torch.zeros_like(sent)
            for communicator in (pair.shard_comm, pair.replica_comm):
                communicator.sum_numbers(sent, f"changes of {optimizer.sharded.whole[param][0]}")
            value.copy_(sent.view(value.dtype).view(value.shape))
        for optimizer, chosen, _ in self.stack:
            for group, members in chosen.items():
                for member in members:
                    _spread(group, member, self._is_modifier(optimizer))
            for group in chosen:
                try:
                    if isinstance(group, TrainedGroup):  # unchanged elements keep the masters' low bits
                        group.master.follow_parameters(released=True)
                except RuntimeError as error:
                    return str(error)
        return None

    def _whole(self) -> Iterator[tuple[ZeroOptimizer, Parameter, Pair]]:
        """Yield frozen parameters that every rank has whole, and the ranks that have the same values."""
        for optimizer, _, _ in self.stack:
            whole, wanted = optimizer.sharded.whole, set(self.params)
            yield from ((optimizer, param, pair) for param, (_, pair) in whole.items() if param in wanted)

    def _is_modifier(self, optimizer: ZeroOptimizer) -> bool:
        """Return whether this rank's values are kept: `modifier_rank`'s, or those of a rank of its `tensor`.

        A DTensor is changed by all ranks of `tensor` together, each its own part.
        """
        tensor = optimizer.communicators.tensor
        if tensor is not None and optimizer.contents.has_dtensors:
            return self.modifier_rank in tensor.ranks
        return this_rank() == self.modifier_rank

    def _check_modifier(self, optimizer: ZeroOptimizer, chosen: Chosen) -> None:
        """Raise on every rank if `modifier_rank` lacks one of the parameters, on any rank.

        The sum over ranks in `_keep_changes` would make such a parameter zero.
        """
        pairs: dict[Any, list[str]] = {}
        for group, members in chosen.items():
            pairs.setdefault((group.shard_comm, group.replica_comm), []).extend(
                member.name for member in members
            )
        for param, (name, pair) in optimizer.sharded.whole.items():
            if any(param is each for each in self.params):
                pairs.setdefault((pair.shard_comm, pair.replica_comm), []).append(name)
        lacking = list[str]()
        for (shard_comm, replica_comm), names in pairs.items():
            found = torch.tensor([float(self._is_modifier(optimizer))], device=shard_comm.device)
            for communicator in (shard_comm, replica_comm):
                communicator.sum_numbers(found, "modifier_rank")
            if found.item() != 1:
                lacking += names
        if lacking := gather_messages(optimizer.communicators, lacking, "modifier_rank"):
            raise RuntimeError(
                f"modifier_rank {self.modifier_rank} is not among the ranks that share {listed(lacking)}. "
                "Pass a rank that has these parameters. For experts, which differ between ranks, pass on "
                "each rank one of its own expert's group"
            )

    def _undo_changes(self) -> str | None:
        """Undo changes on any rank. Returns the error message, equal on all ranks, or None."""
        groups = [pair for _, chosen, _ in self.stack for pair in chosen.items()]
        mine = {
            member.name
            for group, members in groups
            for member in members
            if group.parameters.fingerprint(member) != self.before[member]
        }
        changed = sorted(mine)
        for optimizer, _, _ in self.stack:
            for communicator in optimizer.communicators.everyone:
                changed = sorted(set().union(*communicator.gather_objects(changed, "changed parameters")))
        if not changed:
            return self._compare_whole()
        kept = list[str]()
        for optimizer, chosen, _ in self.stack:
            # On the lane: inside a forward, the next units may be on their way on it.
            lane = optimizer.lane if optimizer.gatherer is None else optimizer.gatherer.lane
            for group, members in chosen.items():
                flat = group.parameters
                if flat.released_at_rest:  # overwrite them with the ranks' slices, which have not changed
                    gather = partial(flat.all_gather, lane.producer(), exactly=True)
                    lane.submit(gather, [flat.full], [lane.producer()]).wait()
                else:
                    kept += self._take_back(group, [m for m in members if m.name in changed], mine)
            kept = gather_messages(optimizer.communicators, kept, "changed parameters")
        undone = [name for name in changed if name not in kept]
        how = ["and the change was undone"] if undone else []
        if kept:
            how.append(
                f"{listed(kept)} on every rank, so no rank has the values from before: they stay changed, "
                "and the next step raises if ranks have different ones"
            )
        problem = (
            f"{', '.join(changed)} changed inside GatheredParameters, {'; '.join(how)}. Pass "
            "modifier_rank, the rank whose values all ranks get"
        )
        return "; ".join(filter(None, (problem, self._compare_whole())))

    def _take_back(self, group: ParameterGroup, members: list[Member], changed: Collection[str]) -> list[str]:
        """Replace parameters that are always whole by the values of a rank that has not changed them.

        This rank's slice is a part of the whole values, so a change is in the slice, too.

        changed  the names of what this rank has changed
        Returns the names of parameters that every rank has changed.
        """
        names = {this_rank(): sorted(changed)}  # by rank
        for communicator in (group.shard_comm, group.replica_comm):
            gathered = communicator.gather_objects(names, "changed parameters")
            names = {rank: theirs for each in gathered for rank, theirs in each.items()}
        lost = list[str]()
        for member in members:
            unchanged = [rank for rank in sorted(names) if member.name not in names[rank]]
            if unchanged:
                _spread(group, member, is_source=this_rank() == unchanged[0])
            else:
                lost.append(member.name)
        return lost

    def _compare_whole(self) -> str | None:
        """Return an error, equal on all ranks, if unsharded frozen parameters differ; else None."""
        mine: dict[Pair, dict[str, int]] = {}
        for optimizer, param, pair in self._whole():
            changes, (name, _) = mine.setdefault(pair, {}), optimizer.sharded.whole[param]
            if _version(param) != self.versions[param]:
                changes[name] = checksum(local_of(param).detach().contiguous().view(-1))
        problems = list[str]()
        for pair, changes in mine.items():
            everyones = pair.gather_objects(changes, "changed parameters")
            names = dict.fromkeys(name for each in everyones for name in each)
            if differing := [n for n in names if len({each.get(n) for each in everyones}) > 1]:
                problems.append(
                    f"{listed(differing)} changed inside GatheredParameters on some ranks only, or "
                    "differently, so the ranks have different values now. Pass modifier_rank, the rank whose "
                    "values all ranks get"
                )
        for optimizer, _, _ in self.stack:
            problems = gather_messages(optimizer.communicators, problems, "changed parameters")
        return "; ".join(problems) or None


def _spread(group: ParameterGroup, member: Member, is_source: bool) -> None:
    """Give a gathered parameter the values that one rank, the source, has. Every rank must call this.

    A broadcast as a sum of one rank's values and zeros. A real one would need the index of the rank in each
    group.
    """
    window = group.parameters.windows[member.index]
    if not is_source:
        window.zero_()
    for communicator in (group.shard_comm, group.replica_comm):
        communicator.sum_numbers(window, f"changes of {member.name}")
    group.parameters.fill(member, window)


def _version(param: Parameter) -> tuple[int, int]:
    """Return numbers that change when a parameter is written to or replaced, except by writes to `data`."""
    return version_of(param), local_of(param).data_ptr()


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Yield the model (that of an engine) with whole parameters, for generation without collectives.

    Every rank must enter and leave it. In between ranks may call the model a different number of times.
    """
    with GatheredParameters(list(model.parameters())):
        yield model if isinstance(model, nn.Module) else model.module


def _by_optimizer(params: Iterable[Tensor]) -> dict[ZeroOptimizer, Chosen]:
    """Sort these parameters by optimizer and group, in an order that is equal on every rank."""
    wanted = set(params)
    found: dict[ZeroOptimizer, Chosen] = {}
    for owner in dict.fromkeys(owner for p in params if (owner := owner_of(p)) is not None):
        members = {group: [m for m in group.members if m.param in wanted] for group in owner.sharded.groups}
        found[owner] = {group: chosen for group, chosen in members.items() if chosen}
    return found


def register_external_parameter(module: nn.Module, parameter: Parameter) -> None:
    """Gather this parameter also for `module`, which uses it although it belongs to another module."""
    owner = owner_of(parameter)
    if owner is None:
        raise ValueError(
            f"register_external_parameter: the parameter of shape {tuple(parameter.shape)} belongs to no "
            "zero_full engine. Call this after initialize"
        )
    group, _ = owner.sharded.places.get(parameter, (None, None))
    if owner.gatherer is not None and group is not None and group.parameters.released_at_rest:
        owner.gatherer.add(module, group)
