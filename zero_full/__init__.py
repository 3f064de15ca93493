"""ZeRO for production training: DeepSpeed's configuration keys, PyTorch's training loop.

    engine, optimizer, loader, schedule = zero_full.initialize(model=model, config="ds_config.json")
    for inputs, targets in loader:
        loss = loss_of(engine(inputs), targets)
        engine.backward(loss)
        engine.step()

Names are imported on first use, so that `python -m zero_full doctor` runs even if dependencies are missing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_full.checkpoint import (
        Extras,
        LoadOptions,
        SaveOptions,
        load_checkpoint,
        load_weights,
        save_checkpoint,
        save_weights,
        wait_for_checkpoint,
    )
    from zero_full.comm import Topology
    from zero_full.config import Config
    from zero_full.construct import Init, OnDevice
    from zero_full.engine.engine import Engine
    from zero_full.engine.loader import RepeatingLoader, leave_signals, synced
    from zero_full.errors import (
        CheckpointError,
        CommunicationError,
        ConfigError,
        DesyncError,
        DisagreementError,
        PlanError,
        ScaleExhaustedError,
    )
    from zero_full.initialization import initialize
    from zero_full.offload import BlockTier, DeviceTier, HostTier
    from zero_full.optim import (
        Average,
        Lamb,
        Lion,
        Muon,
        OneBitAdam,
        OneBitLamb,
        OwnerRule,
        Peers,
        Piece,
        Stepper,
        Whole,
        WholeRule,
        ZeroOneAdam,
        muon_groups,
    )
    from zero_full.plan import Plan, plan_stages
    from zero_full.precision import Dtypes, DynamicScale, StaticScale
    from zero_full.settings import Gathering, Settings
    from zero_full.shard.access.gathered_parameters import (
        GatheredParameters,
        register_external_parameter,
        unwrap_model_for_generation,
    )
    from zero_full.shard.access.tensors import (
        consolidated_state_dict,
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_get_local_fp32_param,
        safe_get_local_grad,
        safe_get_local_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_grad,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_grad,
        safe_set_local_optimizer_state,
        safe_update_full_grad_vectorized,
    )
    from zero_full.shard.deal.leaf_modules import (
        get_z3_leaf_modules,
        set_z3_leaf_module,
        set_z3_leaf_modules,
        set_z3_leaf_modules_by_name,
        set_z3_leaf_modules_by_suffix,
        unset_z3_leaf_modules,
        z3_leaf_module,
    )
    from zero_full.shard.step.optimizer import ZeroOptimizer
    from zero_full.shard.step.report import StepReport
    from zero_full.start.launch import add_config_arguments, init_distributed

__version__ = "0.1.0"
_WHERE = {
    "zero_full.checkpoint": (
        *("Extras", "LoadOptions", "SaveOptions", "load_checkpoint", "load_weights"),
        *("save_checkpoint", "save_weights", "wait_for_checkpoint"),
    ),
    "zero_full.comm": ("Topology",),
    "zero_full.config": ("Config",),
    "zero_full.construct": ("Init", "OnDevice"),
    "zero_full.errors": (
        *("CheckpointError", "CommunicationError", "ConfigError", "DesyncError", "DisagreementError"),
        *("PlanError", "ScaleExhaustedError"),
    ),
    "zero_full.engine.loader": ("RepeatingLoader", "leave_signals", "synced"),
    "zero_full.engine.engine": ("Engine",),
    "zero_full.initialization": ("initialize",),
    "zero_full.start.launch": ("add_config_arguments", "init_distributed"),
    "zero_full.offload": ("BlockTier", "DeviceTier", "HostTier"),
    "zero_full.optim": (
        *(
            "Average",
            "Lamb",
            "Lion",
            "Muon",
            "OneBitAdam",
            "OneBitLamb",
            "OwnerRule",
            "Peers",
            "Piece",
            "Stepper",
        ),
        *("Whole", "WholeRule", "ZeroOneAdam", "muon_groups"),
    ),
    "zero_full.plan": ("Plan", "plan_stages"),
    "zero_full.precision": ("Dtypes", "DynamicScale", "StaticScale"),
    "zero_full.settings": ("Gathering", "Settings"),
    "zero_full.shard.step.optimizer": ("ZeroOptimizer",),
    "zero_full.shard.step.report": ("StepReport",),
    "zero_full.shard.deal.leaf_modules": (
        *("get_z3_leaf_modules", "set_z3_leaf_module", "set_z3_leaf_modules", "set_z3_leaf_modules_by_name"),
        *("set_z3_leaf_modules_by_suffix", "unset_z3_leaf_modules", "z3_leaf_module"),
    ),
    "zero_full.shard.access.gathered_parameters": (
        *("GatheredParameters", "register_external_parameter", "unwrap_model_for_generation"),
    ),
    "zero_full.shard.access.tensors": (
        *("consolidated_state_dict", "safe_update_full_grad_vectorized"),
        *(
            f"safe_{verb}_{extent}_{what}"
            for verb in ("get", "set")
            for extent in ("full", "local")
            for what in ("fp32_param", "grad", "optimizer_state")
        ),
    ),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}
__all__ = [
    "Average",
    "BlockTier",
    "CheckpointError",
    "CommunicationError",
    "Config",
    "ConfigError",
    "DesyncError",
    "DeviceTier",
    "DisagreementError",
    "Dtypes",
    "DynamicScale",
    "Engine",
    "Extras",
    "GatheredParameters",
    "Gathering",
    "HostTier",
    "Init",
    "Lamb",
    "Lion",
    "LoadOptions",
    "Muon",
    "OnDevice",
    "OneBitAdam",
    "OneBitLamb",
    "OwnerRule",
    "Peers",
    "Piece",
    "Plan",
    "PlanError",
    "RepeatingLoader",
    "SaveOptions",
    "ScaleExhaustedError",
    "Settings",
    "StaticScale",
    "StepReport",
    "Stepper",
    "Topology",
    "Whole",
    "WholeRule",
    "ZeroOneAdam",
    "ZeroOptimizer",
    "add_config_arguments",
    "consolidated_state_dict",
    "get_z3_leaf_modules",
    "init_distributed",
    "initialize",
    "leave_signals",
    "load_checkpoint",
    "load_weights",
    "muon_groups",
    "plan_stages",
    "register_external_parameter",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "save_checkpoint",
    "save_weights",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "synced",
    "unset_z3_leaf_modules",
    "unwrap_model_for_generation",
    "wait_for_checkpoint",
    "z3_leaf_module",
]


def __getattr__(name: str) -> Any:
    if name == "assemble":  # a module, not a name of one
        return import_module("zero_full.assemble")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'zero_full' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value
