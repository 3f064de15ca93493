"""Validation of the arguments of `initialize`, before anything is built."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from zero_full.comm.topology import Topology
from zero_full.construct import has_values
from zero_full.formatting import listed
from zero_full.shard.group.dtensors import local_of
from zero_full.shard.group.master import StateByParameter
from zero_full.shard.guards.model_watch import invalid_option
from zero_full.shard.step.wrapped_optimizer import NoOptimizer

# These average gradients themselves, which would then be averaged twice.
WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


def check_arguments(
    model: Any, optimizer: Any, lr_scheduler: Any, wrap: Any, groups: Mapping[str, Any]
) -> None:
    """Raise TypeError or ValueError for an argument of the wrong type, or two that exclude each other."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be an nn.Module, not {_kind(model)}")
    _check_type(
        "optimizer",
        optimizer,
        isinstance(optimizer, Optimizer) or callable(optimizer),
        "an optimizer, or a class or function that returns one",
    )
    is_schedule = callable(lr_scheduler) or hasattr(lr_scheduler, "step")
    _check_type("lr_scheduler", lr_scheduler, is_schedule, "a schedule, or a function that returns one")
    _check_type("wrap", wrap, callable(wrap), "a function of a module's name and the module")
    given = [name for name, value in groups.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} exclude each other: pass one of them")
    for name, kind in (("process_group", dist.ProcessGroup), ("mesh", DeviceMesh), ("topology", Topology)):
        # A rank outside the group gets its own error later.
        is_valid = isinstance(groups[name], kind) or groups[name] == dist.GroupMember.NON_GROUP_MEMBER
        _check_type(name, groups[name], is_valid, f"a {kind.__name__}")
    has_method = hasattr(groups["mpu"], "get_data_parallel_group")
    _check_type("mpu", groups["mpu"], has_method, "an object with get_data_parallel_group()")


def _check_type(name: str, value: Any, is_valid: bool, expected: str) -> None:
    """Raise TypeError for an invalid argument, unless it is None."""
    if value is not None and not is_valid:
        raise TypeError(f"{name} must be {expected}, not {_kind(value)}")


def check_model(model: nn.Module) -> None:
    """Raise if the model's parameters cannot be sharded: wrapped, lazy, viewed by buffers."""
    for name, module in model.named_modules():
        if type(module).__name__ in WRAPPERS and type(module).__module__.startswith("torch."):
            raise ValueError(
                f"{name or 'the model'} is wrapped in {type(module).__name__}, which averages or shards "
                "itself. Pass the wrapped module"
            )
    for name, param in model.named_parameters():
        if is_lazy(param):
            raise ValueError(
                f"{name} has no shape yet, because its module is lazy. Run a batch through the model on "
                "every rank before initialize"
            )
    _check_views(model)


def _check_views(model: nn.Module) -> None:
    """Raise if a buffer is a view of a parameter: parameters move to other memory, and it would not."""
    named = [
        (name, p) for name, p in model.named_parameters() if has_values(p) and not is_lazy(p) and p.numel()
    ]
    owner = {local_of(param).untyped_storage().data_ptr(): name for name, param in named}
    for name, buffer in model.named_buffers():
        if not has_values(buffer) or not buffer.numel():
            continue
        viewed = owner.get(local_of(buffer).untyped_storage().data_ptr())
        if viewed is not None:
            raise ValueError(
                f"buffer {name} is a view of parameter {viewed}, whose memory initialize replaces. Clone the "
                "buffer, or compute it in forward"
            )


def check_training_data(data: Any) -> None:
    """Raise TypeError if `data` is neither a dataset nor iterable."""
    has_items = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    _check_type("training_data", data, has_items or hasattr(data, "__iter__"), "a dataset")


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise if the optimizer cannot train the model: wrapped before, unusable options, other parameters."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer: the function must return an optimizer, not {_kind(optimizer)}")
    state: Any = optimizer.state
    if isinstance(state, StateByParameter):
        raise ValueError(
            "this optimizer belongs to another engine, whose shards it steps. Create a new one from the "
            "model's parameters"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    needs_closure = closure is not None and closure.default is inspect.Parameter.empty  # as torch's LBFGS
    if needs_closure and not hasattr(optimizer, "zero_full_stepper"):
        name = type(optimizer).__name__
        raise TypeError(
            f"{name} cannot step here: its step() needs a closure, which it may call many times, but the "
            f"engine runs one backward pass per step. Use another optimizer. Or use stage 0, call initialize "
            f"without an optimizer, and call {name}.step(closure) in the loop"
        )
    problem = invalid_option(optimizer.param_groups)
    if problem:
        raise ValueError(problem)
    in_model = set(model.parameters())
    given = dict.fromkeys(param for group in optimizer.param_groups for param in group["params"])
    unknown = [f"one of shape {tuple(param.shape)}" for param in given if param not in in_model]
    missing = untrained_parameters(optimizer, model)
    if unknown and missing and len(unknown) < len(given):
        raise ValueError(
            f"the optimizer has {len(unknown)} parameters that are not in the model ({listed(unknown)}), and "
            f"lacks {listed(missing)}, which require gradients. Perhaps the model was changed after the "
            "optimizer was created: create it from the parameters of the model that initialize gets"
        )


def check_scale(
    optimizer: Optimizer, model: nn.Module, type_of: Callable[[torch.dtype], torch.dtype]
) -> None:
    """Raise if fp16 parameters would be trained without a loss scale.

    type_of  maps the dtype of a model's parameter to its dtype during training
    """
    given = {param for group in optimizer.param_groups for param in group["params"]}
    named = ((name, p) for name, p in model.named_parameters() if p in given and p.requires_grad)
    in_fp16 = [name for name, p in named if type_of(p.dtype) == torch.float16]
    if in_fp16 and not isinstance(optimizer, NoOptimizer):
        raise ValueError(
            f"fp16 is not enabled, but the model has fp16 parameters ({listed(in_fp16)}): without a loss "
            'scale small gradients would underflow to zero. Set "fp16": {"enabled": true} (its loss_scale '
            'may be 1) or "bf16": {"enabled": true}, or pass model.float()'
        )


def untrained_parameters(optimizer: Optimizer, model: nn.Module) -> list[str]:
    """Return the names of parameters that require gradients and are in no group of the optimizer."""
    in_groups = {param for group in optimizer.param_groups for param in group["params"]}
    return [name for name, p in model.named_parameters() if p.requires_grad and p not in in_groups]


def check_schedule(schedule: Any, optimizer: Optimizer) -> None:
    """Raise if a schedule would move the learning rate of another optimizer."""
    driven = getattr(schedule, "optimizer", None)
    if isinstance(driven, Optimizer) and driven is not optimizer:
        raise ValueError(
            f"lr_scheduler drives another optimizer ({type(driven).__name__}) than the one passed to "
            "initialize. Create it from that optimizer, or pass a function of the optimizer"
        )


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:40]!r}" if isinstance(value, str) else type(value).__name__
