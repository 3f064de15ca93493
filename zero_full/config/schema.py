"""Schema of the configuration: the type, default and remark of every key.

Names and defaults are DeepSpeed's, so that its JSON files work unchanged. A key without a remark
(`remarks.py`) is honoured. Remarks stand only beside their keys. A key's type defines the accepted values
(`values.py`).
"""

import sys
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

from zero_full.config.remarks import Remark, idle, is_on, missing, more_than_one, names_some, removed
from zero_full.config.values import (
    Amount,
    BatchSize,
    Count,
    Divisor,
    Dtype,
    Flag,
    Object,
    Scale,
    ScalePower,
    Seconds,
    Section,
    Share,
    Size,
    SmallestScale,
    auto_is_none,
    capital,
    infinity_is_none,
    lower,
    names_or_auto,
    whole_number,
)

STAGE3 = Remark("only stage 3 uses it", refuses=False, below_stage=3)
UNITS = idle("the modules that are gathered as one are chosen by size; name others in leaf_module")
ONLY_CPU_OFFLOAD = idle('deprecated, and not read without "cpu_offload": true; see offload_optimizer')
ZENFLOW = missing(
    "most of its updates use gradients of earlier steps",
    'remove it: offload_optimizer with device "cpu" steps every element by the gradient of its own step',
)
ONE_NUMBER = idle(
    "a process has one thread count, which is not only for steps: set OMP_NUM_THREADS to the host's cores "
    "divided by its ranks, which `python -m zero_full doctor` shows"
)
OLD_OFFLOAD_PARAM = missing("deprecated", 'write "offload_param": {"device": "cpu"}', when=is_on)
BLOCKS = idle("each thread transfers one block at a time: see intra_op_parallelism and block_size")
EARLY_STEPS = idle("the host steps after backward, because beginning earlier did not make a step shorter")
OVERLAPPED = idle("reads, steps and writes always overlap; max_in_cpu is the state that stays in memory")
TP_SIZES = ("autotp_size", "tp_size", "tp.tp_size")
AUTO_TP = missing("automatic tensor parallelism is not implemented", "use 1", *TP_SIZES, when=more_than_one)
OTHER_MONITOR = idle("not implemented: use jsonl_monitor, csv_monitor, tensorboard or wandb", "enabled")
NO_SECTION = idle("DeepSpeed does not read it either: tensorboard and the others belong at the top level")


class Strict(BaseModel):
    """Base of all sections: unknown keys, type coercion and later changes raise."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class OptimizerConfig(Strict):
    """The optimizer's name and keyword arguments."""

    type: str
    params: Object = {}
    legacy_fusion: Annotated[Flag, idle("LAMB has one implementation here")] = False


class SchedulerConfig(Strict):
    """The learning rate scheduler's name and keyword arguments."""

    type: str
    params: Object = {}


class DataTypesConfig(Strict):
    """Dtypes that differ from the model's."""

    grad_accum_dtype: Dtype | None = None
    param_dtype: Annotated[Dtype | None, missing('parameters follow "bf16" and "fp16"', "remove it")] = None
    buffer_dtype: Dtype | None = None
    keep_in_fp32_modules: Annotated[
        list[str] | Literal["auto"],
        BeforeValidator(names_or_auto),
        missing("all buffers have one dtype", 'use "buffer_dtype": "fp32"', when=names_some),
    ] = "auto"


class FP16Config(Strict):
    """Mixed precision in fp16. A loss scale of 0 means dynamic loss scaling."""

    enabled: Flag = False
    auto_cast: Flag = False
    loss_scale: Scale = 0.0
    initial_scale_power: ScalePower = 16
    loss_scale_window: Count = 1000
    hysteresis: Count = 2
    consecutive_hysteresis: Flag = False
    min_loss_scale: SmallestScale = 1
    fp16_master_weights_and_grads: Flag = False


class BF16Config(Strict):
    """Mixed precision in bfloat16, which needs no loss scaling."""

    enabled: Flag = False
    immediate_grad_update: Annotated[Flag, idle("gradients are always reduced when a bucket is full")] = False
    check_grad_overflow: Flag = True
    bf16_master_weights_and_grads: Flag = False
    bf16_optimizer_states: Flag = False
    stochastic_rounding: Flag = False
    stochastic_rounding_seed: Size = 0


class AutocastConfig(Strict):
    """torch.autocast, applied by the engine."""

    enabled: Flag = False
    dtype: Dtype | None = None  # None: bf16
    lower_precision_safe_modules: Annotated[
        list[str] | None,
        idle("torch decides for each operation, and parameters are gathered in their own dtype"),
    ] = None


class PipelineConfig(Strict):
    """Pipeline parallelism of a PipelineModule, which defines the stages itself."""

    schedule: Annotated[
        Literal["1f1b", "gpipe", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"], BeforeValidator(lower)
    ] = "1f1b"
    activation_checkpoint_interval: Size = 0  # above 0: in place of the PipelineModule's
    stages: Annotated[Count | None, BeforeValidator(auto_is_none)] = None  # a number: the PipelineModule's
    partition: str = "best"  # another value must be the PipelineModule's
    seed_layers: Annotated[Flag, idle("layer N is always built with the seed base_seed + N")] = False
    pipe_partitioned: Annotated[Flag, idle("activations are not split over tensor-parallel ranks")] = True
    grad_partitioned: Annotated[Flag, idle("gradients are not split over tensor-parallel ranks")] = True
    use_reentrant: Annotated[Flag, idle("activations are recomputed without re-entrant backward")] = True


class ParallelWriteConfig(Strict):
    """Distribution of checkpoint writes with pipeline parallelism."""

    pipeline_stage: Annotated[Flag, idle("only pipeline parallelism uses it")] = False


class CheckpointConfig(Strict):
    """Saving and loading of checkpoints."""

    tag_validation: Annotated[
        Literal["Ignore", "Warn", "Fail"],
        BeforeValidator(capital),
        idle("different tags on different ranks are always an error"),
    ] = "Warn"
    load_universal: Annotated[Flag, idle("every checkpoint loads at any stage and world size")] = False
    use_node_local_storage: Annotated[Flag, missing("checkpoints need a shared folder", "remove it")] = False
    parallel_write: ParallelWriteConfig = ParallelWriteConfig()
    writer: Annotated[Section, idle("checkpoints have one writer here")] = {}
    checkpoint_serialization: Annotated[Flag, idle("checkpoints have one format here")] = True
    keep_last: Count | None = None
    drop_errors: Flag = False


class OffloadParamConfig(Strict):
    """Offloading of stage 3 parameters to host memory or NVMe."""

    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | None = None
    buffer_count: Count = 5
    buffer_size: Size = 100_000_000
    max_in_cpu: Size = 1_000_000_000
    pin_memory: Flag = True


class OffloadOptimizerConfig(Strict):
    """Offloading of the optimizer state to host memory or NVMe."""

    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | None = None
    buffer_count: Annotated[Count, OVERLAPPED] = 4
    pin_memory: Flag = True
    pipeline_read: Annotated[Flag, OVERLAPPED] = False
    pipeline_write: Annotated[Flag, OVERLAPPED] = False
    fast_init: Annotated[Flag, idle("state is created in the first step")] = False
    max_in_cpu: Size = 2**25
    ratio: Share = 1.0
    super_offload: Annotated[Flag, EARLY_STEPS] = False
    delay_update_after: Size | None = None
    cpuadam_cores_perc: Annotated[Amount, ONE_NUMBER] = 0.8


class AioConfig(Strict):
    """File I/O of state that is offloaded to NVMe."""

    block_size: Count = 2**20
    intra_op_parallelism: Count | None = None
    thread_count: Annotated[Count | None, idle("renamed to intra_op_parallelism")] = None
    queue_depth: Annotated[Count, BLOCKS] = 8
    single_submit: Annotated[Flag, BLOCKS] = False
    overlap_events: Annotated[Flag, BLOCKS] = True
    use_gds: Annotated[Flag, idle("the optimizer steps on the host: state is read into host memory")] = False


class LeafModuleConfig(Strict):
    """Modules that stage 3 gathers as a whole, by class (with or without its module), name or name suffix."""

    # Ranks use different experts, so gathering one expert at a time would deadlock.
    classes: Annotated[list[str], STAGE3] = [
        "MixtralSparseMoeBlock",
        "Qwen2MoeSparseMoeBlock",
        "Qwen3MoeSparseMoeBlock",
    ]
    names: Annotated[list[str], STAGE3] = []
    name_suffixes: Annotated[list[str], STAGE3] = []


class ZeroConfig(Strict):
    """ZeRO: sharding, offloading and communication. `overlap_comm` is None until `resolve` sets it."""

    stage: Annotated[Literal[0, 1, 2, 3], whole_number(0)] = 0
    contiguous_gradients: Flag = True
    reduce_scatter: Flag = True
    reduce_bucket_size: Count = 500_000_000
    use_multi_rank_bucket_allreduce: Annotated[Flag, idle("buckets are always reduce-scattered")] = True
    allgather_partitions: Annotated[Flag, idle("updated parameters are always all-gathered")] = True
    allgather_bucket_size: Annotated[Size, idle("all-gathers use reduce_bucket_size")] = 500_000_000
    overlap_comm: Flag | None = None
    load_from_fp32_weights: Annotated[Flag, idle("a load always uses the fp32 weights")] = True
    elastic_checkpoint: Annotated[Flag, idle("every checkpoint loads at any number of ranks")] = False
    offload_param: OffloadParamConfig | None = None
    offload_optimizer: OffloadOptimizerConfig | None = None
    zenflow: Annotated[Section | None, ZENFLOW] = None
    sub_group_size: Annotated[Size, STAGE3] = 1_000_000_000
    stage3_prefetch_bucket_size: Annotated[Size, STAGE3] = 50_000_000
    stage3_param_persistence_threshold: Annotated[Size, STAGE3] = 100_000
    stage3_model_persistence_threshold: Annotated[Size, STAGE3] = sys.maxsize
    stage3_max_live_parameters: Annotated[Size, STAGE3] = 1_000_000_000
    stage3_max_reuse_distance: Annotated[Size, STAGE3] = 1_000_000_000
    stage3_gather_16bit_weights_on_model_save: Annotated[Flag, idle("weights are always gathered")] = False
    stage3_module_granularity_threshold: Annotated[Size, UNITS] = 0
    stage3_use_all_reduce_for_fetch_params: Annotated[Flag, idle("parameters are all-gathered")] = False
    stage3_allgather_sequential: Annotated[Flag, idle("each module is one all-gather anyway")] = False
    stage3_partition_stream_chunk_size: Annotated[Size, idle("parameters are sharded in place")] = 0
    ignore_unused_parameters: Flag = True
    legacy_stage1: Annotated[Flag, idle("stage 1 has one implementation here")] = False
    round_robin_gradients: Flag = False
    parameter_alignment: Annotated[Flag, idle("every parameter starts at 16 bytes anyway")] = False
    compute_grad_norm: Annotated[Flag, idle("computed only if clipping or overflow checks need it")] = True
    zero_hpz_partition_size: Annotated[Count, STAGE3] = 1
    zero_quantized_weights: Annotated[Flag, STAGE3] = False
    zero_quantized_nontrainable_weights: Annotated[
        Flag, missing("frozen weights stay in their dtype between steps", "use false")
    ] = False
    zero_quantized_gradients: Annotated[Flag, STAGE3] = False
    zeropp_loco_param: Annotated[
        Object | None, removed("0.19.8", "quantized gradients work without it; remove it")
    ] = None
    mics_shard_size: Annotated[int, whole_number(-1)] = -1
    mics_hierarchical_params_gather: Annotated[Flag, idle("all-gathers stay in the shard group")] = False
    memory_efficient_linear: Annotated[Flag, idle("nn.Linear is not replaced")] = True
    pipeline_loading_checkpoint: Annotated[Flag, idle("each rank reads only its shards")] = False
    override_module_apply: Annotated[Flag, idle("Init also records what apply does")] = True
    log_trace_cache_warnings: Annotated[Flag, idle("a changed module order is logged once")] = False
    enable_sanity_checks: Annotated[Flag, idle("use debug.check_collectives")] = False
    save_muon_momentum_buffer_in_memory: Annotated[Flag, idle("offloaded like other optimizer state")] = False
    leaf_module: LeafModuleConfig = LeafModuleConfig()
    # Deprecated names. False requests the default. `resolve` converts a true cpu_offload.
    cpu_offload: Flag | None = None
    cpu_offload_param: Annotated[Flag | None, OLD_OFFLOAD_PARAM] = None
    cpu_offload_use_pin_memory: Annotated[Flag | None, ONLY_CPU_OFFLOAD] = None
    stage3_gather_fp16_weights_on_model_save: Annotated[Flag, idle("weights are always gathered")] = False


class MonitorConfig(Strict):
    """Metrics for TensorBoard, or in CSV files, in the folder `output_path/job_name`."""

    enabled: Flag = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


class JsonlMonitorConfig(MonitorConfig):
    """Metrics as lines of JSON, in `output_path/job_name/metrics.jsonl`."""

    job_name: str = ""


class WandbConfig(Strict):
    """Metrics for Weights & Biases."""

    enabled: Flag = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


class HybridEngineConfig(Strict):
    """`engine.generate`: gathers the parameters for each call. `pin_parameters`: all of them, once."""

    enabled: Flag = False
    max_out_tokens: Annotated[Count, idle("a cache of keys and values grows with its sequences")] = 512
    inference_tp_size: Annotated[
        Count, missing("every rank generates with whole parameters", "use 1", when=more_than_one)
    ] = 1
    release_inference_cache: Flag = False
    pin_parameters: Flag = True
    tp_gather_partition_size: Annotated[Size, idle("only an inference_tp_size above 1 uses it")] = 8


class DebugConfig(Strict):
    """Expensive checks, and recordings. `timeout_s`: seconds that a check of collectives waits for a rank."""

    check_collectives: Flag = False
    timeout_s: Seconds = 10.0
    record: str | None = None  # path of a recording
    record_steps: Count = 3  # number of steps that the recording keeps


class Config(Strict):
    """The whole configuration. The three batch sizes are 0 until `resolve` computes them."""

    train_batch_size: BatchSize = 0
    train_micro_batch_size_per_gpu: BatchSize = 0
    gradient_accumulation_steps: BatchSize = 0
    managed_gradient_accumulation: Flag = True  # false: every call of engine.step() updates
    shared_memory: Flag = True  # false: ranks of one host send messages, like ranks of several hosts
    plain_backward_divides: Flag | None = None  # loss.backward() divides the loss, like engine.backward
    steps_per_print: Annotated[Count | None, BeforeValidator(infinity_is_none)] = None
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    gradient_clipping: Amount = 1.0  # DeepSpeed's default since 0.19.3; 0.0 before
    prescale_gradients: Flag = False
    gradient_predivide_factor: Divisor = 1.0  # any factor; with reduce_scatter DeepSpeed requires 1.0
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(lower)] = "mean"
    communication_data_type: Dtype | None = None
    sparse_gradients: Annotated[Flag, removed("0.19.8", "gradients are reduced dense; remove it")] = False
    disable_allgather: Annotated[Flag, idle("updated parameters are always all-gathered")] = False
    zero_allow_untested_optimizer: Flag = False
    zero_force_ds_cpu_optimizer: Annotated[
        Flag, idle("every optimizer can step on the host, Adam with a compiled operator if there is one")
    ] = True
    dataloader_drop_last: Flag = False
    data_types: DataTypesConfig = DataTypesConfig()
    fp16: FP16Config = FP16Config()
    bf16: BF16Config = BF16Config()
    torch_autocast: AutocastConfig = AutocastConfig()
    amp: Annotated[Object, removed("0.19.8", 'use "bf16" or "fp16"', "enabled")] = {}
    zero_optimization: ZeroConfig = ZeroConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    compile: Annotated[
        Section, missing("graph passes are not implemented", "call torch.compile on the model", "deepcompile")
    ] = {}
    graph_harvesting: Annotated[Flag, removed("0.19.8", "call torch.compile on the model; remove it")] = False
    wall_clock_breakdown: Flag = False
    memory_breakdown: Annotated[Flag, idle("use torch.accelerator.memory_stats()")] = False
    disable_python_gc: Annotated[Flag, idle("call gc.disable() in your script")] = False
    dump_state: Annotated[Flag, idle("the table of the configuration shows the values")] = False
    log_level: Annotated[str | None, idle('set the level of the logger "zero_full" instead')] = None
    debug: DebugConfig = DebugConfig()
    # Other kinds of parallelism.
    sequence_parallel_size: Annotated[Count, missing("sequence parallelism is not implemented", "use 1")] = 1
    seq_parallel_communication_data_type: Annotated[Dtype, idle("only sequence parallelism uses it")] = "fp32"
    tensor_parallel: Annotated[Section, AUTO_TP] = {}
    expert_parallel: Annotated[
        Section, missing("DeepSpeed's expert parallelism is not implemented", "use false", "enabled")
    ] = {}
    use_data_before_expert_parallelism: Annotated[Flag, idle("only expert parallelism uses it")] = False
    pipeline: PipelineConfig = PipelineConfig()
    hybrid_engine: HybridEngineConfig = HybridEngineConfig()
    # Features that change the batches, the model or the optimizer during training.
    elasticity: Annotated[Object, removed("0.19.8", "set the batch sizes as numbers", "enabled")] = {}
    autotuning: Annotated[Section, missing("", "tune beforehand, and set the values found", "enabled")] = {}
    curriculum_learning: Annotated[Object, removed("0.19.8", "order data in your sampler", "enabled")] = {}
    data_efficiency: Annotated[Section, missing("", "choose the data in your sampler", "enabled")] = {}
    progressive_layer_drop: Annotated[Object, removed("0.19.8", "drop layers in your model", "enabled")] = {}
    eigenvalue: Annotated[Object, removed("0.19.8", "measure curvature in your script", "enabled")] = {}
    quantize_training: Annotated[Object, removed("0.19.7", "quantize in your model", "enabled")] = {}
    compression_training: Annotated[Object, removed("0.19.7", "compress in your model; remove it")] = {}
    sparse_attention: Annotated[Object, removed("0.19.7", "use it in your model; remove it")] = {}
    # Monitoring, and sections for parts that this package does not have.
    activation_checkpointing: Annotated[Section, idle("call torch.utils.checkpoint in your model")] = {}
    flops_profiler: Annotated[Section, idle("use torch.profiler", "enabled")] = {}
    comms_logger: Annotated[Section, idle("engine.traffic() returns the bytes sent", "enabled")] = {}
    steps_per_monitor: Count = 1  # steps from one entry in the monitors to the next
    jsonl_monitor: JsonlMonitorConfig = JsonlMonitorConfig()
    csv_monitor: MonitorConfig = MonitorConfig()
    tensorboard: MonitorConfig = MonitorConfig()
    wandb: WandbConfig = WandbConfig()
    comet: Annotated[Section, OTHER_MONITOR] = {}
    trackio: Annotated[Section, OTHER_MONITOR] = {}
    monitor_config: Annotated[Section, NO_SECTION] = {}
    aio: AioConfig = AioConfig()
    nebula: Annotated[Object, removed("0.19.7", "checkpoints have one writer; remove it", "enabled")] = {}
    datastates_ckpt: Annotated[Section, idle("checkpoints have one writer here")] = {}
    weight_quantization: Annotated[Section, idle("only inference uses it")] = {}
    timers: Annotated[Section, idle("wall_clock_breakdown turns the timers on")] = {}
    vocabulary_size: Annotated[Size | None, idle("nothing uses it")] = None
