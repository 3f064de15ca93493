"""Validation of the arguments of `initialize`, before anything is built: one sentence for each mistake."""

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
from zero_full.shard.group.optimizer_state import StateByParameter
from zero_full.shard.step.wrapped_optimizer import NoOptimizer, invalid_option

# These average gradients themselves, which would then be averaged twice.
WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


def check_arguments(
    model: Any, optimizer: Any, lr_scheduler: Any, wrap: Any, groups: Mapping[str, Any]
) -> None:
    """Raise TypeError or ValueError for an argument of the wrong type, or two that exclude each other."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"initialize needs a model, an nn.Module, and got {_kind(model)}")
    if not (optimizer is None or isinstance(optimizer, Optimizer) or callable(optimizer)):
        raise TypeError(
            f"optimizer must be an optimizer, or a class or function that makes one, not {_kind(optimizer)}"
        )
    if not (lr_scheduler is None or callable(lr_scheduler) or hasattr(lr_scheduler, "step")):
        raise TypeError(
            f"lr_scheduler must be a schedule, or a function that makes one, not {_kind(lr_scheduler)}"
        )
    if not (wrap is None or callable(wrap)):
        raise TypeError(f"wrap must be a function of a module's name and the module, not {_kind(wrap)}")
    given = [name for name, value in groups.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} say the same thing twice: pass one of them")
    for name, kind in (
        ("process_group", dist.ProcessGroup),
        ("mesh", DeviceMesh),
        ("topology", Topology),
    ):
        value = groups[name]
        fine = value is None or isinstance(value, kind) or value == dist.GroupMember.NON_GROUP_MEMBER
        if not fine:  # a rank outside the group gets its own error later
            raise TypeError(f"{name} must be a {kind.__name__}, not {_kind(value)}")
    if groups["mpu"] is not None and not hasattr(groups["mpu"], "get_data_parallel_group"):
        raise TypeError(f"mpu must have get_data_parallel_group(), and {_kind(groups['mpu'])} has not")


def check_model(model: nn.Module) -> None:
    """Raise if the model's parameters cannot be sharded: wrapped, lazy, DTensors, viewed by buffers."""
    for name, module in model.named_modules():
        if type(module).__name__ in WRAPPERS and type(module).__module__.startswith("torch."):
            raise ValueError(
                f"{name or 'the model'} is wrapped in {type(module).__name__}, which averages or shards by "
                "itself: pass the module that is inside"
            )
    for name, param in model.named_parameters():
        if is_lazy(param):
            raise ValueError(
                f"{name} has no shape yet, because its module is lazy: run a batch through the model before "
                "initialize, on every rank"
            )
        if type(param.data) is not torch.Tensor and hasattr(param, "device_mesh"):
            raise ValueError(
                f"{name} is a DTensor: parallelize_module, fully_shard or from_pretrained(tp_plan=...) has "
                "sharded it already. Pass the model as it was constructed"
            )
    _check_views(model)


def _check_views(model: nn.Module) -> None:
    """Raise for a buffer in a parameter's memory: parameters move to flat buffers, and it would not."""
    named = [
        (name, p) for name, p in model.named_parameters() if has_values(p) and not is_lazy(p) and p.numel()
    ]
    owner = {param.untyped_storage().data_ptr(): name for name, param in named}
    for name, buffer in model.named_buffers():
        if not has_values(buffer) or not buffer.numel():
            continue
        whose = owner.get(buffer.untyped_storage().data_ptr())
        if whose is not None:
            raise ValueError(
                f"the buffer {name} is a view of the parameter {whose}, and would not follow it any more: "
                "give the buffer memory of its own (clone()), or compute it in forward"
            )


def check_training_data(data: Any) -> None:
    """Raise TypeError if `data` is neither a dataset nor iterable."""
    has_items = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if not (data is None or has_items or hasattr(data, "__iter__")):
        raise TypeError(f"training_data must be a dataset, not {_kind(data)}")


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise if the optimizer cannot train the model: wrapped before, unusable options, other parameters."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"the function that was passed as optimizer must return one, not {_kind(optimizer)}")
    state: Any = optimizer.state
    if isinstance(state, StateByParameter):
        raise ValueError(
            "this optimizer was given to an engine before, and steps pieces of that one's parameters: make a "
            "new one of the model's parameters"
        )
    if _needs_closure(optimizer) and not hasattr(optimizer, "zero_full_stepper"):
        name = type(optimizer).__name__
        raise TypeError(
            f"{name} cannot step here: its step() needs a closure and may call it many times, and a step "
            f"here has one backward pass. Use another optimizer, or stage 0 with {name} outside of the "
            f"engine: call initialize without an optimizer, and {name}.step(closure) in the loop"
        )
    problem = invalid_option(optimizer.param_groups)
    if problem:
        raise ValueError(problem)
    in_model = set(model.parameters())
    given = dict.fromkeys(param for group in optimizer.param_groups for param in group["params"])
    strange = [f"one of shape {tuple(param.shape)}" for param in given if param not in in_model]
    forgotten = untrained(optimizer, model)
    if strange and forgotten and len(strange) < len(given):
        raise ValueError(
            f"the optimizer has {len(strange)} parameters that are not in the model ({listed(strange)}), "
            f"and not {listed(forgotten)}, which require gradients: was the model changed after the "
            "optimizer was made? Make it of the parameters of the model that initialize gets"
        )


def _needs_closure(optimizer: Optimizer) -> bool:
    """Whether `step` has a closure that cannot be left out, as torch's LBFGS has."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def check_scale(
    optimizer: Optimizer, model: nn.Module, type_of: Callable[[torch.dtype], torch.dtype]
) -> None:
    """Raise if a run without a loss scale would train fp16 parameters.

    type_of  maps the dtype of a model's parameter to its dtype during training
    """
    given = {param for group in optimizer.param_groups for param in group["params"]}
    named = ((name, p) for name, p in model.named_parameters() if p in given and p.requires_grad)
    in_fp16 = [name for name, p in named if type_of(p.dtype) == torch.float16]
    if in_fp16 and not isinstance(optimizer, NoOptimizer):
        raise ValueError(
            f"the model has {listed(in_fp16)} in fp16, and the configuration does not: without a loss scale "
            'small gradients would become zero. Set "fp16": {"enabled": true} (its loss_scale may be 1) or '
            '"bf16": {"enabled": true}, or pass model.float()'
        )


def untrained(optimizer: Optimizer, model: nn.Module) -> list[str]:
    """Return the names of parameters that require gradients and are in no group of the optimizer."""
    listed_ones = {param for group in optimizer.param_groups for param in group["params"]}
    return [name for name, p in model.named_parameters() if p.requires_grad and p not in listed_ones]


def check_schedule(schedule: Any, optimizer: Optimizer) -> None:
    """Raise if a schedule would move the learning rate of another optimizer."""
    drives = getattr(schedule, "optimizer", None)
    if isinstance(drives, Optimizer) and drives is not optimizer:
        raise ValueError(
            f"lr_scheduler drives another optimizer ({type(drives).__name__}) than the one that is trained: "
            "make it from the optimizer that initialize gets, or pass a function of the optimizer"
        )


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:40]!r}" if isinstance(value, str) else type(value).__name__
