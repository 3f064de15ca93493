"""Generate from a sharded model: gather once, call the model without hooks, release.

A token is one forward, so at stage 3 a call of `generate` would gather all parameters once per token. Inside
`generating` they stay whole. The module hooks that gather are removed, so a call costs what it costs in plain
torch. If not all of them fit, as many units as fit stay whole (`budget.py`), and hooks gather the others for
each call. At stages 0 to 2 parameters are whole anyway.

Nothing of a step changes, so training goes on bit for bit as without it.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from zero_full.comm.topology import this_rank
from zero_full.formatting import human
from zero_full.generation.adapters import adapter_layers, merged_adapters
from zero_full.generation.budget import budget, whole_bytes
from zero_full.shard.access.gathered_parameters import whole_groups
from zero_full.shard.group.parameter_group import ParameterGroup
from zero_full.shard.group.released import OFFLOADED
from zero_full.shard.guards.guard import Guard
from zero_full.shard.passes.module_hooks import removed
from zero_full.shard.step.agreement import raise_on_all_ranks
from zero_full.shard.step.optimizer import ZeroOptimizer

log = logging.getLogger("zero_full")
CALL, LEAVING = "engine.generation()", "leaving engine.generation()"


class NoTraining(Guard):
    """Raises for a training forward or a step inside `generating`."""

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        self.unfinished = optimizer.unfinished

    def check(self) -> None:
        """Raise RuntimeError in a step, and with autograd on."""
        if self.unfinished.inside or torch.is_grad_enabled():
            raise RuntimeError(
                f"training inside {CALL}, whose values are for generation only. Leave the block first"
            )

    def before_forward(self, module: nn.Module, args: object) -> None:
        """Check as a forward pre-hook of the model."""
        self.check()


@contextmanager
def generating(
    module: nn.Module, optimizer: ZeroOptimizer, memory: int | None, merge_adapters: bool, problem: str
) -> Iterator[nn.Module]:
    """Context for generation: see `Engine.generation`, which finds the `problem`, if any."""
    call = f"engine.generation(memory={memory}, merge_adapters={merge_adapters})"
    problem = problem or _problem(optimizer, memory, merge_adapters)
    if problem:  # the others, if they have none, learn that this rank does not come
        optimizer.announce_call(f"{CALL}, which raised: {problem}")
        raise RuntimeError(problem)
    optimizer.on_every_rank(call)
    optimizer.check_ranks_equal(call)
    optimizer.finish_update()
    layers = [layer for _, layer in adapter_layers(module)] if merge_adapters else []
    groups = [group for group in optimizer.sharded.groups if group.parameters.released_at_rest]
    chosen = groups
    if memory is not None:
        chosen = _within(groups, memory)
    elif groups and not layers:  # a merge needs whole weights
        chosen = _fitting(optimizer, groups)
    with ExitStack() as leaving:
        _allocate(optimizer, chosen)
        leaving.enter_context(whole_groups(optimizer, chosen, as_in_forward=True))
        if optimizer.gatherer is not None and len(chosen) == len(groups):
            leaving.enter_context(removed(optimizer.gatherer.hooks))
        leaving.callback(_set_modes, [(each, each.training) for each in module.modules()])
        guard = NoTraining(optimizer)
        optimizer.guards.append(guard)
        leaving.callback(optimizer.guards.remove, guard)
        # The engine's forward checks the guards, and the module may be called by itself.
        leaving.callback(module.register_forward_pre_hook(guard.before_forward).remove)
        leaving.enter_context(torch.no_grad())
        if layers:
            leaving.enter_context(merged_adapters(layers, optimizer))
        module.eval()
        try:
            yield module
        except BaseException as error:
            optimizer.announce_call(f"{LEAVING} by {type(error).__name__}: {error}")
            raise
        optimizer.on_every_rank(LEAVING)


def _problem(optimizer: ZeroOptimizer, memory: int | None, merge_adapters: bool) -> str:
    """Return the message why this rank cannot generate now, or ""."""
    if memory is not None and memory < 0:
        return f"memory must be a number of bytes, 0 or more, or None for as much as fits, not {memory!r}"
    if memory is not None and merge_adapters:
        return "merge_adapters needs the whole model. Leave out memory"
    if optimizer.contents.has_dtensors and merge_adapters:
        return "merge_adapters with a model that tensor parallelism has cut is not supported. Leave it out"
    if optimizer.offloaded.copies or optimizer.states_offloaded:
        return OFFLOADED
    if optimizer.reducer.backward.running:
        return f"{CALL} inside a backward pass. Call it between steps"
    return ""


def _fitting(optimizer: ZeroOptimizer, groups: Sequence[ParameterGroup]) -> list[ParameterGroup]:
    """Choose the groups that fit into the ranks' free memory: see `budget.py`."""
    # Gathered already, in a block around this one.
    here = [group for group in groups if group.parameters.users]
    others = [group for group in groups if not group.parameters.users]
    if not others:
        return here
    chosen = here + _within(others, budget(optimizer.communicators, others))
    if len(chosen) < len(groups) and this_rank() == 0:
        log.warning(
            "%s keeps %s of the %s of parameters gathered, because no more fit into the free memory beside a "
            "cache. The others are gathered in each call, so every rank must call the model equally often. "
            "Pass memory=BYTES to choose",
            CALL,
            human(whole_bytes(chosen)),
            human(whole_bytes(groups)),
        )
    return chosen


def _within(groups: Sequence[ParameterGroup], memory: int) -> list[ParameterGroup]:
    """Choose groups that take at most `memory` bytes together."""
    chosen = []
    for group in groups:
        if (size := group.parameters.full.nbytes) <= memory:
            memory -= size
            chosen.append(group)
    return chosen


def _allocate(optimizer: ZeroOptimizer, groups: Sequence[ParameterGroup]) -> None:
    """Allocate the memory of these groups. If one rank has too little, every rank raises before a gather."""
    if optimizer.gatherer is None:
        return
    taken, problem = list[ParameterGroup](), ""
    try:
        for group in groups:
            if not group.parameters.full.untyped_storage().nbytes():
                _allocate_one(group)
                taken.append(group)
    except (RuntimeError, MemoryError) as error:
        size = whole_bytes(groups)
        problem = (
            f"{CALL} needs {size} bytes for whole parameters, and a rank could not allocate them "
            f"({str(error).partition(chr(10))[0]}). Pass memory=BYTES to keep only a part of them whole"
        )
    try:
        raise_on_all_ranks(optimizer.communicators, problem)
    except BaseException:
        for group in taken:
            group.parameters.full.untyped_storage().resize_(0)
        raise


def _allocate_one(group: ParameterGroup) -> None:
    group.parameters.full.untyped_storage().resize_(group.parameters.full.nbytes)


def _set_modes(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training
