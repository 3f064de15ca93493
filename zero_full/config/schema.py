"""Every key a configuration may have: its type, its default and what this package does with it.

Names and defaults are DeepSpeed's, so that its JSON files work unchanged. A key without a remark is
honoured. A remark stands beside the key and nowhere else: `idle` is for a key without effect here, which
costs a line of warning, and `missing` for a feature whose silent absence would change the training, which
is an error. A remark speaks up only for a value that differs from the default, so a file that spells out
what happens anyway stays quiet.
"""

import math
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError


class ConfigError(ValueError):
    """The configuration cannot be used; the text names every key at fault and the remedy."""


@dataclass(frozen=True)
class Remark:
    """What the user must hear about a key. `switch` is the key inside a section that turns it on."""

    text: str
    refuses: bool
    switch: str = ""
    when: Callable[[Any], bool] | None = None
    below_stage: int = 99  # a later stage has what this is about

    def applies(self, value: Any, default: Any) -> bool:
        """Whether this value asks for what the remark is about."""
        if self.switch:
            return bool(value.get(self.switch))
        return self.when(value) if self.when else value != default


def idle(text: str, switch: str = "") -> Remark:
    """A remark for a key that changes nothing here: one line of warning."""
    return Remark(text, refuses=False, switch=switch)


def missing(text: str, switch: str = "", when: Callable[[Any], bool] | None = None) -> Remark:
    """A remark for a feature that is not here and would be missed: an error."""
    return Remark(text, refuses=True, switch=switch, when=when)


def expected(what: str) -> PydanticCustomError:
    """The error of a value that is not what it should be."""
    return PydanticCustomError("expected", "{what}", {"what": what})


def whole(least: int) -> BeforeValidator:
    """Whole numbers of at least `least`; 5e8 is one, true is not."""

    def check(value: object) -> int:
        is_number = hasattr(value, "__index__") and not isinstance(value, bool)
        number = operator.index(value) if is_number else None  # type: ignore[arg-type]
        if isinstance(value, float) and value.is_integer():
            number = int(value)
        if number is None or number < least:
            raise expected(f"a whole number of at least {least}")
        return number

    return BeforeValidator(check)


def _real(value: object, is_fine: Callable[[float], bool], what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_fine(value):
        raise expected(what)
    return float(value)


def _not_negative(value: object) -> float:
    return _real(value, lambda x: 0 <= x < math.inf, "a number of 0 or more")


def _positive(value: object) -> float:
    return _real(value, lambda x: 0 < x < math.inf, "a number above 0")


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _capital(value: object) -> object:
    return value.capitalize() if isinstance(value, str) else value


def _short_dtype(value: object) -> object:
    names = {"half": "fp16", "float16": "fp16", "bfloat16": "bf16", "float": "fp32", "float32": "fp32"}
    if not isinstance(value, str):
        return value
    bare = value.lower().removeprefix("torch.")
    return names.get(bare, bare)


def _never_is_none(value: object) -> object:
    """Some launchers write infinity for 'never print'."""
    return None if isinstance(value, float) and value == math.inf else value


Count = Annotated[int, whole(1)]
Size = Annotated[int, whole(0)]
Amount = Annotated[float, BeforeValidator(_not_negative)]
Factor = Annotated[float, BeforeValidator(_positive)]
Dtype = Annotated[Literal["fp16", "bf16", "fp32"], BeforeValidator(_short_dtype)]
Section = dict[str, Any]  # read by nobody here, so only its switch is looked at, never the keys inside

STAGE3 = Remark("only stage 3 reads it", refuses=False, below_stage=3)
UNITS = idle("units are chosen by size; name others in leaf_module")
OFFLOAD = "offloading has not landed in zero_full yet; everything stays on the device of the model"
NO_OFFLOAD = idle("only offloading reads it, and that has not landed in zero_full yet")
NO_MONITOR = idle("no metrics are written; log what the engine returns with a logger of yours", "enabled")


class Strict(BaseModel):
    """What all models share: unknown keys, guessed types and later changes are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class OptimizerConfig(Strict):
    """Which optimizer, and its keyword arguments."""

    type: str
    params: dict[str, Any] = {}
    legacy_fusion: Annotated[bool, idle("LAMB has one implementation here")] = False


class SchedulerConfig(Strict):
    """Which learning-rate schedule, and its keyword arguments."""

    type: str
    params: dict[str, Any] = {}


class DataTypesConfig(Strict):
    """Precisions that differ from the model's."""

    grad_accum_dtype: Dtype | None = None
    param_dtype: Annotated[Dtype | None, missing('parameters follow "bf16" and "fp16"; remove it')] = None
    buffer_dtype: Dtype | None = None


class FP16Config(Strict):
    """Training in half precision; a loss scale of 0 means a dynamic one."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: Amount = 0.0
    initial_scale_power: Size = 16
    loss_scale_window: Count = 1000
    hysteresis: Count = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: Count = 1
    fp16_master_weights_and_grads: bool = False


class BF16Config(Strict):
    """Training in bfloat16, which needs no loss scale."""

    enabled: bool = False
    immediate_grad_update: Annotated[bool, idle("gradients always move as soon as a bucket is full")] = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class AutocastConfig(Strict):
    """torch.autocast, run by the engine."""

    enabled: bool = False
    dtype: Dtype | None = None  # bf16 if nothing is said
    lower_precision_safe_modules: Annotated[
        list[str] | None,
        idle("torch decides for each operation; parameters and gradients travel in their own type"),
    ] = None


class ParallelWriteConfig(Strict):
    """Who writes what when the model is a pipeline."""

    pipeline_stage: Annotated[bool, idle("only pipeline parallelism reads it")] = False


class CheckpointConfig(Strict):
    """How checkpoints are saved and loaded."""

    tag_validation: Annotated[
        Literal["Ignore", "Warn", "Fail"],
        BeforeValidator(_capital),
        idle("checkpoints to go on training from have not landed"),
    ] = "Warn"
    load_universal: Annotated[
        bool, idle("checkpoints that load at another stage or world size have not landed")
    ] = False
    use_node_local_storage: Annotated[
        bool, missing("checkpoints need one folder that every node sees; remove it")
    ] = False
    parallel_write: ParallelWriteConfig = ParallelWriteConfig()
    writer: Annotated[Section, idle("checkpoints have one writer here")] = {}
    checkpoint_serialization: Annotated[bool, idle("checkpoints have one format here")] = True


class OffloadParamConfig(Strict):
    """Where the parameters of stage 3 wait."""

    device: Annotated[Literal["none", "cpu", "nvme"], missing(OFFLOAD)] = "none"
    nvme_path: str | None = None
    buffer_count: Count = 5
    buffer_size: Size = 100_000_000
    max_in_cpu: Size = 1_000_000_000
    pin_memory: bool = True


class OffloadOptimizerConfig(Strict):
    """Where the optimizer's state waits."""

    device: Annotated[Literal["none", "cpu", "nvme"], missing(OFFLOAD)] = "none"
    nvme_path: str | None = None
    buffer_count: Count = 4
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: Amount = 1.0
    super_offload: bool = False
    cpuadam_cores_perc: Amount = 0.8


class LeafModuleConfig(Strict):
    """Modules that stage 3 gathers as a whole: by class (with or without its module), name, end of name."""

    # Ranks send their tokens to different experts, so these must not be gathered one expert at a time.
    classes: Annotated[list[str], STAGE3] = [
        "MixtralSparseMoeBlock",
        "Qwen2MoeSparseMoeBlock",
        "Qwen3MoeSparseMoeBlock",
    ]
    names: Annotated[list[str], STAGE3] = []
    name_suffixes: Annotated[list[str], STAGE3] = []


class ZeroConfig(Strict):
    """What is sharded and how gradients travel. `overlap_comm` is None until `resolve` decides it."""

    stage: Annotated[Literal[0, 1, 2, 3], whole(0)] = 0
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: Count = 500_000_000
    use_multi_rank_bucket_allreduce: Annotated[bool, idle("buckets are always reduce-scattered")] = True
    allgather_partitions: Annotated[bool, idle("updated slices are always all-gathered")] = True
    allgather_bucket_size: Annotated[Size, idle("gathers follow the buckets of reduce_bucket_size")] = (
        500_000_000
    )
    overlap_comm: bool | None = None
    load_from_fp32_weights: Annotated[bool, idle("a load always takes the fp32 weights")] = True
    elastic_checkpoint: Annotated[
        bool, idle("checkpoints that load at another world size have not landed")
    ] = False
    offload_param: OffloadParamConfig | None = None
    offload_optimizer: OffloadOptimizerConfig | None = None
    zenflow: Annotated[Section | None, missing("ZenFlow has not landed in zero_full; remove it")] = None
    sub_group_size: Annotated[Size, STAGE3] = 1_000_000_000
    stage3_prefetch_bucket_size: Annotated[Size, STAGE3] = 50_000_000
    stage3_param_persistence_threshold: Annotated[Size, STAGE3] = 100_000
    stage3_model_persistence_threshold: Annotated[Size, STAGE3] = sys.maxsize
    stage3_max_live_parameters: Annotated[Size, STAGE3] = 1_000_000_000
    stage3_max_reuse_distance: Annotated[Size, STAGE3] = 1_000_000_000
    stage3_gather_16bit_weights_on_model_save: Annotated[
        bool, idle("save_16bit_model always gathers the weights")
    ] = False
    stage3_module_granularity_threshold: Annotated[Size, UNITS] = 0
    stage3_use_all_reduce_for_fetch_params: Annotated[bool, idle("parameters are always all-gathered")] = (
        False
    )
    stage3_allgather_sequential: Annotated[bool, idle("a unit is always one all-gather")] = False
    stage3_partition_stream_chunk_size: Annotated[Size, idle("slices are cut where they lie")] = 0
    ignore_unused_parameters: bool = True
    legacy_stage1: Annotated[bool, idle("stage 1 has one implementation here")] = False
    round_robin_gradients: bool = False
    zero_hpz_partition_size: Annotated[Count, STAGE3] = 1
    zero_quantized_weights: Annotated[bool, STAGE3] = False
    zero_quantized_nontrainable_weights: Annotated[
        bool, missing("frozen weights stay in their dtype between steps; use false")
    ] = False
    zero_quantized_gradients: Annotated[bool, STAGE3] = False
    zeropp_loco_param: Annotated[Section | None, idle("rounding errors are not kept")] = None
    mics_shard_size: Annotated[int, whole(-1)] = -1
    mics_hierarchical_params_gather: Annotated[
        bool, idle("gathers never leave the shard group, where one hop is enough")
    ] = False
    memory_efficient_linear: Annotated[bool, idle("nn.Linear stays as it is")] = True
    pipeline_loading_checkpoint: Annotated[bool, idle("each rank reads only its slices")] = False
    override_module_apply: Annotated[bool, idle("Init records what apply does, too")] = True
    log_trace_cache_warnings: Annotated[bool, idle("a changed order of modules is logged once")] = False
    enable_sanity_checks: Annotated[bool, idle("see debug.check_collectives for the check there is")] = False
    save_muon_momentum_buffer_in_memory: Annotated[bool, idle("there is no Muon here")] = False
    leaf_module: LeafModuleConfig = LeafModuleConfig()
    # The old names. False asks for what happens anyway.
    cpu_offload: Annotated[bool | None, missing(f"deprecated, and {OFFLOAD}; use false", when=bool)] = None
    cpu_offload_param: Annotated[bool | None, missing(f"deprecated, and {OFFLOAD}", when=bool)] = None
    cpu_offload_use_pin_memory: Annotated[bool | None, NO_OFFLOAD] = None
    stage3_gather_fp16_weights_on_model_save: Annotated[
        bool, idle("save_16bit_model always gathers the weights")
    ] = False


class DebugConfig(Strict):
    """Checks that cost time. `timeout_s`: how many seconds the check of collectives waits for a rank."""

    check_collectives: bool = False
    timeout_s: Factor = 10.0


class Config(Strict):
    """The whole configuration. The three batch sizes are 0 until `resolve` has solved them."""

    train_batch_size: Count = 0
    train_micro_batch_size_per_gpu: Count = 0
    gradient_accumulation_steps: Count = 0
    managed_gradient_accumulation: bool = True  # false: every call of engine.step() is a step
    plain_backward_divides: bool | None = (
        None  # whether loss.backward() divides as engine.backward(loss) does
    )
    steps_per_print: Annotated[Count | None, BeforeValidator(_never_is_none)] = None
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    gradient_clipping: Amount = 1.0
    prescale_gradients: bool = False
    gradient_predivide_factor: Factor = 1.0  # any factor, with reduce_scatter too; DeepSpeed wants 1.0 there
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(_lower)] = "mean"
    communication_data_type: Dtype | None = None
    sparse_gradients: Annotated[bool, missing("gradients always travel dense; use false")] = False
    disable_allgather: Annotated[bool, idle("updated slices are always all-gathered")] = False
    zero_allow_untested_optimizer: bool = False
    zero_force_ds_cpu_optimizer: Annotated[bool, NO_OFFLOAD] = True
    dataloader_drop_last: bool = False
    data_types: DataTypesConfig = DataTypesConfig()
    fp16: FP16Config = FP16Config()
    bf16: BF16Config = BF16Config()
    torch_autocast: AutocastConfig = AutocastConfig()
    amp: Annotated[Section, missing('Apex is not used here; use "bf16" or "fp16"', "enabled")] = {}
    zero_optimization: ZeroConfig = ZeroConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    compile: Annotated[
        Section, missing("graph passes have not landed; call torch.compile on the model", "deepcompile")
    ] = {}
    graph_harvesting: Annotated[bool, idle("no CUDA graphs are captured")] = False
    wall_clock_breakdown: bool = False
    memory_breakdown: Annotated[bool, idle("torch.cuda.memory_summary() prints the same facts")] = False
    dump_state: Annotated[bool, idle("the table of this configuration shows every value")] = False
    log_level: Annotated[str | None, idle('set the level of the logger "zero_full" instead')] = None
    debug: DebugConfig = DebugConfig()
    # Parallelism of other kinds.
    sequence_parallel_size: Annotated[
        Count, missing("sequence parallelism has not landed in zero_full yet; use 1")
    ] = 1
    seq_parallel_communication_data_type: Annotated[Dtype, idle("only sequence parallelism reads it")] = (
        "fp32"
    )
    tensor_parallel: Annotated[Section, missing("tensor parallelism has not landed", "autotp_size")] = {}
    expert_parallel: Annotated[Section, missing("expert parallelism has not landed", "enabled")] = {}
    use_data_before_expert_parallelism: Annotated[bool, idle("only expert parallelism reads it")] = False
    pipeline: Annotated[Section, idle("only pipeline parallelism reads it")] = {}
    hybrid_engine: Annotated[Section, missing("one engine trains and does not generate", "enabled")] = {}
    # What changes the batches, the model or the optimizer while training runs.
    elasticity: Annotated[Section, missing("give the batch sizes as numbers", "enabled")] = {}
    autotuning: Annotated[Section, missing("tune before, and give the numbers found", "enabled")] = {}
    curriculum_learning: Annotated[Section, missing("order the data in your sampler", "enabled")] = {}
    data_efficiency: Annotated[Section, missing("choose the data in your sampler", "enabled")] = {}
    progressive_layer_drop: Annotated[Section, missing("drop layers in your model", "enabled")] = {}
    eigenvalue: Annotated[Section, missing("curvature is not measured here", "enabled")] = {}
    quantize_training: Annotated[Section, missing("quantize in your model", "enabled")] = {}
    compression_training: Annotated[Section, missing("compress in your model; remove the section")] = {}
    sparse_attention: Annotated[Section, missing("use it in your model; remove the section")] = {}
    # What only looks on, or serves a part that this package does not have.
    activation_checkpointing: Annotated[
        Section, idle("call torch.utils.checkpoint in your model, it needs no settings")
    ] = {}
    flops_profiler: Annotated[Section, idle("use torch.profiler", "enabled")] = {}
    comms_logger: Annotated[Section, idle("the package keeps its own ledger of traffic", "enabled")] = {}
    tensorboard: Annotated[Section, NO_MONITOR] = {}
    wandb: Annotated[Section, NO_MONITOR] = {}
    csv_monitor: Annotated[Section, NO_MONITOR] = {}
    comet: Annotated[Section, NO_MONITOR] = {}
    aio: Annotated[Section, NO_OFFLOAD] = {}
    nebula: Annotated[Section, idle("checkpoints have one writer here", "enabled")] = {}
    datastates_ckpt: Annotated[Section, idle("checkpoints have one writer here")] = {}
    weight_quantization: Annotated[Section, idle("only inference reads it")] = {}
    timers: Annotated[Section, idle("wall_clock_breakdown turns the timers on")] = {}
    vocabulary_size: Annotated[Size | None, idle("nothing asks for it")] = None
