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

if TYPE_CHECKING:  # `as` marks a name as exported
    from zero_full.checkpoint import Extras as Extras
    from zero_full.checkpoint import LoadOptions as LoadOptions
    from zero_full.checkpoint import SaveOptions as SaveOptions
    from zero_full.checkpoint import load_checkpoint as load_checkpoint
    from zero_full.checkpoint import load_weights as load_weights
    from zero_full.checkpoint import save_checkpoint as save_checkpoint
    from zero_full.checkpoint import save_weights as save_weights
    from zero_full.checkpoint import wait_for_checkpoint as wait_for_checkpoint
    from zero_full.comm import Topology as Topology
    from zero_full.config import Config as Config
    from zero_full.construct import Init as Init
    from zero_full.construct import OnDevice as OnDevice
    from zero_full.engine.engine import Engine as Engine
    from zero_full.engine.loader import RepeatingLoader as RepeatingLoader
    from zero_full.engine.loader import leave_signals as leave_signals
    from zero_full.engine.loader import synced as synced
    from zero_full.errors import CheckpointError as CheckpointError
    from zero_full.errors import CommunicationError as CommunicationError
    from zero_full.errors import ConfigError as ConfigError
    from zero_full.errors import DesyncError as DesyncError
    from zero_full.errors import DisagreementError as DisagreementError
    from zero_full.errors import PlanError as PlanError
    from zero_full.errors import ScaleExhaustedError as ScaleExhaustedError
    from zero_full.initialization import initialize as initialize
    from zero_full.offload import BlockTier as BlockTier
    from zero_full.offload import DeviceTier as DeviceTier
    from zero_full.offload import HostTier as HostTier
    from zero_full.optim import Average as Average
    from zero_full.optim import Lamb as Lamb
    from zero_full.optim import Lion as Lion
    from zero_full.optim import Muon as Muon
    from zero_full.optim import OneBitAdam as OneBitAdam
    from zero_full.optim import OneBitLamb as OneBitLamb
    from zero_full.optim import OwnerRule as OwnerRule
    from zero_full.optim import Peers as Peers
    from zero_full.optim import Piece as Piece
    from zero_full.optim import Stepper as Stepper
    from zero_full.optim import Whole as Whole
    from zero_full.optim import WholeRule as WholeRule
    from zero_full.optim import ZeroOneAdam as ZeroOneAdam
    from zero_full.optim import muon_groups as muon_groups
    from zero_full.plan import Plan as Plan
    from zero_full.plan import plan_stages as plan_stages
    from zero_full.precision import Dtypes as Dtypes
    from zero_full.precision import DynamicScale as DynamicScale
    from zero_full.precision import StaticScale as StaticScale
    from zero_full.settings import Gathering as Gathering
    from zero_full.settings import Settings as Settings
    from zero_full.shard.access.gathered_parameters import GatheredParameters as GatheredParameters
    from zero_full.shard.access.gathered_parameters import (
        register_external_parameter as register_external_parameter,
    )
    from zero_full.shard.access.gathered_parameters import (
        unwrap_model_for_generation as unwrap_model_for_generation,
    )
    from zero_full.shard.access.tensors import consolidated_state_dict as consolidated_state_dict
    from zero_full.shard.access.tensors import safe_get_full_fp32_param as safe_get_full_fp32_param
    from zero_full.shard.access.tensors import safe_get_full_grad as safe_get_full_grad
    from zero_full.shard.access.tensors import safe_get_full_optimizer_state as safe_get_full_optimizer_state
    from zero_full.shard.access.tensors import safe_get_local_fp32_param as safe_get_local_fp32_param
    from zero_full.shard.access.tensors import safe_get_local_grad as safe_get_local_grad
    from zero_full.shard.access.tensors import (
        safe_get_local_optimizer_state as safe_get_local_optimizer_state,
    )
    from zero_full.shard.access.tensors import safe_set_full_fp32_param as safe_set_full_fp32_param
    from zero_full.shard.access.tensors import safe_set_full_grad as safe_set_full_grad
    from zero_full.shard.access.tensors import safe_set_full_optimizer_state as safe_set_full_optimizer_state
    from zero_full.shard.access.tensors import safe_set_local_fp32_param as safe_set_local_fp32_param
    from zero_full.shard.access.tensors import safe_set_local_grad as safe_set_local_grad
    from zero_full.shard.access.tensors import (
        safe_set_local_optimizer_state as safe_set_local_optimizer_state,
    )
    from zero_full.shard.access.tensors import (
        safe_update_full_grad_vectorized as safe_update_full_grad_vectorized,
    )
    from zero_full.shard.deal.leaf_modules import get_z3_leaf_modules as get_z3_leaf_modules
    from zero_full.shard.deal.leaf_modules import set_z3_leaf_module as set_z3_leaf_module
    from zero_full.shard.deal.leaf_modules import set_z3_leaf_modules as set_z3_leaf_modules
    from zero_full.shard.deal.leaf_modules import set_z3_leaf_modules_by_name as set_z3_leaf_modules_by_name
    from zero_full.shard.deal.leaf_modules import (
        set_z3_leaf_modules_by_suffix as set_z3_leaf_modules_by_suffix,
    )
    from zero_full.shard.deal.leaf_modules import unset_z3_leaf_modules as unset_z3_leaf_modules
    from zero_full.shard.deal.leaf_modules import z3_leaf_module as z3_leaf_module
    from zero_full.shard.step.optimizer import ZeroOptimizer as ZeroOptimizer
    from zero_full.shard.step.report import StepReport as StepReport
    from zero_full.start.launch import add_config_arguments as add_config_arguments
    from zero_full.start.launch import init_distributed as init_distributed

__version__ = "0.1.0"
_NAMES = {  # by module, for imports at run time
    "zero_full.checkpoint": (
        "Extras LoadOptions SaveOptions load_checkpoint load_weights save_checkpoint save_weights "
        "wait_for_checkpoint"
    ),
    "zero_full.comm": "Topology",
    "zero_full.config": "Config",
    "zero_full.construct": "Init OnDevice",
    "zero_full.engine.engine": "Engine",
    "zero_full.engine.loader": "RepeatingLoader leave_signals synced",
    "zero_full.errors": (
        "CheckpointError CommunicationError ConfigError DesyncError DisagreementError PlanError "
        "ScaleExhaustedError"
    ),
    "zero_full.initialization": "initialize",
    "zero_full.offload": "BlockTier DeviceTier HostTier",
    "zero_full.optim": (
        "Average Lamb Lion Muon OneBitAdam OneBitLamb OwnerRule Peers Piece Stepper Whole WholeRule "
        "ZeroOneAdam muon_groups"
    ),
    "zero_full.plan": "Plan plan_stages",
    "zero_full.precision": "Dtypes DynamicScale StaticScale",
    "zero_full.settings": "Gathering Settings",
    "zero_full.shard.access.gathered_parameters": (
        "GatheredParameters register_external_parameter unwrap_model_for_generation"
    ),
    "zero_full.shard.access.tensors": (
        "consolidated_state_dict safe_get_full_fp32_param safe_get_full_grad "
        "safe_get_full_optimizer_state safe_get_local_fp32_param safe_get_local_grad "
        "safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad "
        "safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad "
        "safe_set_local_optimizer_state safe_update_full_grad_vectorized"
    ),
    "zero_full.shard.deal.leaf_modules": (
        "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name "
        "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module"
    ),
    "zero_full.shard.step.optimizer": "ZeroOptimizer",
    "zero_full.shard.step.report": "StepReport",
    "zero_full.start.launch": "add_config_arguments init_distributed",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name == "assemble":  # a module, not a name of one
        return import_module("zero_full.assemble")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'zero_full' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value
