"""Small parts of DeepSpeed: ranks, copies for `torch.save`, settings without effect."""

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_full.comm.topology import this_rank
from zero_full.migrate.name_table import SCHEDULES as SCHEDULES

log = logging.getLogger("zero_full")


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """Return this process's rank; 0 in a process without process group."""
    return this_rank() if group is None else dist.get_rank(group)


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of ranks; 1 in a process without process group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_local_rank() -> int:
    """Return this process's rank on its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return a copy of nested lists, tuples and dicts, with tensors copied to `device`.

    So a file gets only the values of a tensor, not the flat buffer that it is a view of. Tensors that share
    all their memory, such as tied weights, share the copy.
    """
    return _clone(item, torch.device(device), {})


def _clone(item: Any, device: torch.device, known: dict[Any, Tensor]) -> Any:
    if isinstance(item, Tensor):
        key = (item.data_ptr(), item.dtype, item.shape, item.stride()) if item.numel() else id(item)
        if key not in known:
            known[key] = item.detach().to(device, copy=True)
        return known[key]
    if isinstance(item, list | tuple):
        copied = [_clone(each, device, known) for each in item]
        return type(item)(*copied) if hasattr(item, "_fields") else type(item)(copied)
    if isinstance(item, dict):
        return type(item)({key: _clone(value, device, known) for key, value in item.items()})
    return item


def configure_checkpointing(*given: Any, **settings: Any) -> None:
    """Accept settings of DeepSpeed's own activation checkpointing, which has no counterpart here."""
    if changed := [name for name, value in settings.items() if value not in (None, False)]:
        log.warning(
            "deepspeed.checkpointing.configure(%s) has no effect: use torch.utils.checkpoint",
            ", ".join(changed),
        )


def zero_wrapper_for_fp_tensor_constructor(construct: Callable[..., Any], *given: Any) -> Callable[..., Any]:
    """Return the constructor itself: `zero_full.Init` changes no dtype of torch's functions.

    transformers replaces this function while it constructs a model, to keep the dtype of torch.arange.
    """
    return construct
