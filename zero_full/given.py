"""What `initialize` was given, before anything is made of it: one sentence for each mistake."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from zero_full.comm.topology import Topology
from zero_full.engine import Engine

# Whoever averages gradients himself would do so a second time.
WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


def check_arguments(
    model: Any, optimizer: Any, lr_scheduler: Any, wrap: Any, groups: Mapping[str, Any]
) -> None:
    """Raise TypeError or ValueError for what cannot be meant."""
    if isinstance(model, Engine):
        raise TypeError("the model is an engine already: initialize gets the module itself, engine.module")
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
        if not fine:  # who is no member hears of it later
            raise TypeError(f"{name} must be a {kind.__name__}, not {_kind(value)}")
    if groups["mpu"] is not None and not hasattr(groups["mpu"], "get_data_parallel_group"):
        raise TypeError(f"mpu must have get_data_parallel_group(), and {_kind(groups['mpu'])} has not")


def check_model(model: nn.Module) -> None:
    """Raise if the model cannot be laid out as it is."""
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
                f"{name} is a DTensor, sharded by somebody else already: pass the model as it was constructed"
            )


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
