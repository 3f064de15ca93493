"""The engines of a module: one for each optimizer, around the part of the module that it trains."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

import zero_full
from zero_full.engine.engine import Engine
from zero_full.shard.group.registry import owner_of

OF_DDP = {  # arguments of Lightning's DDPStrategy without a counterpart
    "find_unused_parameters": "parameters without gradients need no option here. Remove it",
    "static_graph": "the order of gradients may change here. Remove it",
    "gradient_as_bucket_view": "gradients are in buckets anyway. Remove it",
    "checkpoint_io": "every rank writes its part of a checkpoint into a folder. Remove it",
    "start_method": "processes that Lightning forks or spawns return the whole model to the first one. "
    "Remove it: Lightning then starts the script once for each device. Or start it with torchrun",
}
NO_COUNTERPART = "it is an option of DistributedDataParallel, which does not run here. Remove it"


def check_options(strategy: str, options: Mapping[str, Any]) -> None:
    """Raise TypeError for options of DDPStrategy that have no counterpart."""
    for name in options:
        raise TypeError(f"{strategy}({name}=...): {OF_DDP.get(name, NO_COUNTERPART)}")


def make_engines(
    module: nn.Module, optimizers: Sequence[Optimizer], config: Mapping[str, Any]
) -> tuple[list[Engine], list[Any]]:
    """Make an engine for each optimizer, or an engine without optimizer. Returns engines and optimizers."""
    if any(owner_of(param) is not None for param in module.parameters()):
        raise ValueError(
            f"{type(module).__name__} already belongs to an engine, such as that of another Trainer. "
            "Call release() of its strategy, or destroy(gather=True) of that engine, on every rank first"
        )
    engines, sharded = list[Engine](), list[Any]()
    for number, part in enumerate(parts_of(module, optimizers)):
        base = optimizers[number] if optimizers else None
        engine, optimizer, _, _ = zero_full.initialize(
            model=part, optimizer=base, config=dict(config), dist_init_required=False
        )
        engines.append(engine)
        sharded.append(optimizer)
    if len(engines) > 1 and any(engine.optimizer.scaler.scales for engine in engines):
        raise ValueError(
            'precision="16-mixed" needs one optimizer: each of several would have its own loss scale. Use '
            '"bf16-mixed"'
        )
    return engines, sharded


def without_sync(engines: Sequence[Engine], stage: int) -> AbstractContextManager[Any]:
    """Return a context for backward passes that keep their gradients on this rank until a later pass.

    From stage 2 on it has no effect: whole gradients would cost the memory that these stages save.
    """
    stack = ExitStack()
    for engine in engines if stage < 2 else ():
        stack.enter_context(engine.no_sync())
    return stack


def parts_of(module: nn.Module, optimizers: Sequence[Optimizer]) -> list[nn.Module]:
    """Return the part of the module that each optimizer trains, for an engine each.

    A part has the module's largest submodules whose parameters all belong to one optimizer, under their
    names in the module. Parameters that no optimizer trains belong to the first part. With one optimizer the
    part is the module.
    """
    if len(optimizers) < 2:
        return [module]
    owners: dict[Parameter, int] = {}
    names = {param: name for name, param in module.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if owners.setdefault(param, number) != number:
                raise ValueError(
                    f"{names.get(param, 'a parameter')} belongs to optimizers {owners[param]} and {number}. "
                    "Each of several optimizers needs parameters of its own: move it to one of them"
                )
    return [_part(module, "", owners, number) or nn.Module() for number in range(len(optimizers))]


def _part(module: nn.Module, path: str, owners: dict[Parameter, int], number: int) -> nn.Module | None:
    """Return the part of this module that belongs to the optimizer `number`; None if it has none."""
    found = {owners.get(param, 0) for param in module.parameters()} or {0}
    if found == {number}:
        return module
    if number not in found:
        return None
    direct = [name for name, _ in module.named_parameters(recurse=False)]
    direct += [name for name, _ in module.named_buffers(recurse=False) if name in module.state_dict()]
    if direct:
        raise ValueError(
            f"{path}{direct[0]} lies directly in a module whose parameters several optimizers train. Each "
            f"optimizer gets an engine around whole submodules: move {direct[0]} into a submodule"
        )
    part = nn.Module()
    for name, child in module.named_children():
        if (inner := _part(child, f"{path}{name}.", owners, number)) is not None:
            part.add_module(name, inner)
    return part
