"""The public names of zero_full. `__init__.py` reads them here and imports each on its first use."""

from zero_full.checkpoint import Extras as Extras
from zero_full.checkpoint import LoadOptions as LoadOptions
from zero_full.checkpoint import SaveOptions as SaveOptions
from zero_full.checkpoint import load_checkpoint as load_checkpoint
from zero_full.checkpoint import load_weights as load_weights
from zero_full.checkpoint import save_checkpoint as save_checkpoint
from zero_full.checkpoint import save_weights as save_weights
from zero_full.checkpoint import wait_for_checkpoint as wait_for_checkpoint
from zero_full.comm.topology import Topology as Topology
from zero_full.config import Config as Config
from zero_full.construct import Init as Init
from zero_full.construct import OnDevice as OnDevice
from zero_full.engine.accelerator import get_accelerator as get_accelerator
from zero_full.engine.engine import Engine as Engine
from zero_full.engine.loader import RepeatingLoader as RepeatingLoader
from zero_full.engine.loader import leave_signals as leave_signals
from zero_full.engine.loader import synced as synced
from zero_full.engine.metrics import Metrics as Metrics
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
from zero_full.optim import FusedAdam as FusedAdam
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
from zero_full.pipeline.engine import PipelineEngine as PipelineEngine
from zero_full.pipeline.module import LayerSpec as LayerSpec
from zero_full.pipeline.module import PipelineModule as PipelineModule
from zero_full.pipeline.module import TiedLayerSpec as TiedLayerSpec
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
from zero_full.shard.access.tensors import safe_get_local_optimizer_state as safe_get_local_optimizer_state
from zero_full.shard.access.tensors import safe_set_full_fp32_param as safe_set_full_fp32_param
from zero_full.shard.access.tensors import safe_set_full_grad as safe_set_full_grad
from zero_full.shard.access.tensors import safe_set_full_optimizer_state as safe_set_full_optimizer_state
from zero_full.shard.access.tensors import safe_set_local_fp32_param as safe_set_local_fp32_param
from zero_full.shard.access.tensors import safe_set_local_grad as safe_set_local_grad
from zero_full.shard.access.tensors import safe_set_local_optimizer_state as safe_set_local_optimizer_state
from zero_full.shard.access.tensors import (
    safe_update_full_grad_vectorized as safe_update_full_grad_vectorized,
)
from zero_full.shard.deal.leaf_modules import get_z3_leaf_modules as get_z3_leaf_modules
from zero_full.shard.deal.leaf_modules import set_z3_leaf_module as set_z3_leaf_module
from zero_full.shard.deal.leaf_modules import set_z3_leaf_modules as set_z3_leaf_modules
from zero_full.shard.deal.leaf_modules import set_z3_leaf_modules_by_name as set_z3_leaf_modules_by_name
from zero_full.shard.deal.leaf_modules import set_z3_leaf_modules_by_suffix as set_z3_leaf_modules_by_suffix
from zero_full.shard.deal.leaf_modules import unset_z3_leaf_modules as unset_z3_leaf_modules
from zero_full.shard.deal.leaf_modules import z3_leaf_module as z3_leaf_module
from zero_full.shard.step.optimizer import ZeroOptimizer as ZeroOptimizer
from zero_full.shard.step.report import StepReport as StepReport
from zero_full.start.launch import add_config_arguments as add_config_arguments
from zero_full.start.launch import init_distributed as init_distributed

__version__: str
