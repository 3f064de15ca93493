"""The names of DeepSpeed that exist in a process after `install`, by module.

They are the names that transformers, accelerate, peft and trl use, and those that `migrate` can translate. A
name that is missing here raises AttributeError, with the advice that `migrate` gives.
"""

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from zero_full.engine.accelerator import get_accelerator
from zero_full.integrations.deepspeed import engine, optimizers, parameters, small_parts
from zero_full.migrate.name_table import ALIASES, NAMES
from zero_full.shard.step.optimizer import ZeroOptimizer

VERSION = "0.19.6"  # the version of DeepSpeed whose names and rules these are
LOG = logging.getLogger("zero_full")
COLLECTIVES = (  # of deepspeed.comm, with the arguments of torch.distributed
    *("all_gather", "all_gather_object", "all_gather_into_tensor", "all_reduce", "all_to_all_single"),
    *("barrier", "broadcast", "broadcast_object_list", "destroy_process_group", "gather", "new_group"),
    *("reduce", "reduce_scatter_tensor", "scatter", "send", "recv", "ReduceOp", "is_initialized"),
)
NAMED: dict[str, dict[str, Any]] = {  # module -> names, besides those of `migrate`
    "deepspeed": {
        "__version__": VERSION,
        "DeepSpeedEngine": engine.DeepSpeedEngine,
        "initialize": engine.initialize,
    },
    "deepspeed.checkpoint": {},
    "deepspeed.checkpoint.utils": {"clone_tensors_for_torch_save": small_parts.clone_tensors_for_torch_save},
    "deepspeed.checkpointing": {"configure": small_parts.configure_checkpointing},
    "deepspeed.comm": {
        **{name: getattr(dist, name) for name in COLLECTIVES},
        "get_rank": small_parts.get_rank,
        "get_world_size": small_parts.get_world_size,
        "get_local_rank": small_parts.get_local_rank,
    },
    "deepspeed.launcher": {},
    "deepspeed.launcher.runner": {"DEEPSPEED_ENVIRONMENT_NAME": ".deepspeed_env"},
    "deepspeed.ops": {},
    "deepspeed.ops.adagrad": {"DeepSpeedCPUAdagrad": optimizers.DeepSpeedCPUAdagrad},
    "deepspeed.ops.adam": {"DeepSpeedCPUAdam": optimizers.DeepSpeedCPUAdam},
    "deepspeed.ops.lion": {},
    "deepspeed.runtime": {},
    "deepspeed.runtime.base_optimizer": {"DeepSpeedOptimizer": ZeroOptimizer},
    "deepspeed.runtime.engine": {"DeepSpeedEngine": engine.DeepSpeedEngine},
    "deepspeed.runtime.lr_schedules": {"VALID_LR_SCHEDULES": list(small_parts.SCHEDULES)},
    "deepspeed.runtime.zero": {},
    "deepspeed.runtime.zero.partition_parameters": {
        "ZeroParamStatus": parameters.ZeroParamStatus,
        "get_accelerator": get_accelerator,
        "zero_wrapper_for_fp_tensor_constructor": small_parts.zero_wrapper_for_fp_tensor_constructor,
        "_orig_torch_arange": torch.arange,
    },
    "deepspeed.utils": {"logger": LOG, "is_initialized": dist.is_initialized},
    "deepspeed.utils.logging": {"logger": LOG},
    "deepspeed.utils.zero_to_fp32": {},
    "deepspeed.zero": {"ZeroParamStatus": parameters.ZeroParamStatus},
}


def modules() -> dict[str, dict[str, Any]]:
    """Return all modules of the stand-in, with the names of each and their values."""
    found: dict[str, dict[str, Any]] = {}
    for path, target in NAMES.items():
        place, _, name = target.rpartition(".")
        found.setdefault(path.rpartition(".")[0], {})[path.rpartition(".")[2]] = _value(place, name)
    for module, names in NAMED.items():
        found.setdefault(module, {}).update(names)
    for alias, path in ALIASES.items():
        if path in found:
            found[alias] = {**found[path], **found.get(alias, {})}
    return dict(sorted(found.items()))


def _value(module: str, name: str) -> Any:
    value: Callable[..., Any] = getattr(import_module(module), name)
    return value
