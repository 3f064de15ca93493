"""Table of DeepSpeed's names with their counterparts in zero_full, or advice for names without one.

The command `python -m zero_full migrate` and its page on the site use the same table. Names are those of
DeepSpeed 0.19, in the modules of its documentation. `ALIASES` are other import paths of the same objects.
"""

ACCESS = [
    f"safe_{verb}_{extent}_{what}"
    for verb in ("get", "set")
    for extent in ("full", "local")
    for what in ("fp32_param", "grad", "optimizer_state")
]
LEAVES = [
    *("set_z3_leaf_modules", "unset_z3_leaf_modules", "get_z3_leaf_modules", "z3_leaf_module"),
    *("set_z3_leaf_module", "set_z3_leaf_modules_by_name", "set_z3_leaf_modules_by_suffix"),
]
SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
PLACES = {  # DeepSpeed's module -> (zero_full's module, names that stay the same)
    "deepspeed": (
        "zero_full",
        ["initialize", "init_distributed", "add_config_arguments", "OnDevice", "get_accelerator"],
    ),
    "deepspeed.accelerator": ("zero_full", ["get_accelerator"]),
    "deepspeed.ops.adam": ("zero_full.optim", ["FusedAdam"]),
    "deepspeed.zero": (
        "zero_full",
        ["Init", "GatheredParameters", "register_external_parameter", "unwrap_model_for_generation"],
    ),
    "deepspeed.utils": (
        "zero_full",
        [*ACCESS, "safe_update_full_grad_vectorized", *LEAVES, "RepeatingLoader"],
    ),
    "deepspeed.runtime.lr_schedules": ("zero_full.optim", SCHEDULES),
}
NAMES = {
    **{f"{old}.{name}": f"{new}.{name}" for old, (new, names) in PLACES.items() for name in names},
    "deepspeed.comm.init_distributed": "zero_full.init_distributed",
    "deepspeed.DeepSpeedEngine": "zero_full.Engine",
    "deepspeed.DeepSpeedConfigError": "zero_full.ConfigError",
    "deepspeed.ops.adam.DeepSpeedCPUAdam": "zero_full.optim.FusedAdam",
    "deepspeed.ops.lion.FusedLion": "zero_full.optim.Lion",
    "deepspeed.ops.lion.DeepSpeedCPULion": "zero_full.optim.Lion",
}
MODULES = {
    **{old: new for old, (new, _) in PLACES.items()},
    "deepspeed.comm": "torch.distributed",  # except the names in NOT_IN_TORCH
}
ALIASES = {
    "deepspeed.runtime.zero": "deepspeed.zero",
    "deepspeed.runtime.zero.partition_parameters": "deepspeed.zero",
    "deepspeed.comm.comm": "deepspeed.comm",
    "deepspeed.runtime.engine": "deepspeed",
    "deepspeed.accelerator.real_accelerator": "deepspeed.accelerator",
    "deepspeed.ops.adam.fused_adam": "deepspeed.ops.adam",
    "deepspeed.ops.adam.cpu_adam": "deepspeed.ops.adam",
    "deepspeed.runtime.zero.partition_parameters.get_accelerator": "deepspeed.get_accelerator",
    "deepspeed.runtime.config.DeepSpeedConfigError": "deepspeed.DeepSpeedConfigError",
    "deepspeed.runtime.dataloader.RepeatingLoader": "deepspeed.utils.RepeatingLoader",
    "deepspeed.utils.z3_leaf_module": "deepspeed.utils",  # a module with the name of a function in it
    "deepspeed.utils.tensor_fragment": "deepspeed.utils",
}
NOT_IN_TORCH = {
    *("configure", "get_local_rank", "get_world_group", "get_all_ranks_from_group", "initialize_mesh_device"),
    *("log_summary", "reset_log", "has_comm_data", "get_comm_operation_count", "get_logged_comm_ops"),
    *("inference_all_reduce", "allgather_fn", "reduce_scatter_fn", "has_all_gather_into_tensor", "timed_op"),
    *("has_reduce_scatter_tensor", "has_all_reduce_coalesced", "has_coalescing_manager", "mpi_discovery"),
    *("init_deepspeed_backend", "set_backend", "enable_symm_mem_for_group", "in_aml", "in_aws_sm", "in_dlts"),
}

CHECKPOINTING = "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
INFERENCE = (
    "zero_full.initialize without an optimizer shards a model for forward; for fast inference save the "
    "weights and load them into another library"
)
PIPELINE = "zero_full.PipelineModule, LayerSpec and TiedLayerSpec, whose arguments are in the guide's page"
INSTEAD = {  # advice by prefix of a name; the longest prefix applies
    "deepspeed": "remove it, or do it in plain torch",
    "deepspeed.DeepSpeedConfig": "zero_full.config.resolve(config, world_size) reads and checks it",
    "deepspeed.runtime.config": "zero_full.config.resolve(config, world_size) reads and checks it",
    "deepspeed.__version__": "zero_full has versions of its own: remove the comparison",
    "deepspeed.add_tuning_arguments": "add the arguments that the script reads to its own parser",
    "deepspeed.init_inference": INFERENCE,
    "deepspeed.inference": INFERENCE,
    "deepspeed.tp_model_init": "split layers yourself, mark their parameters and pass mesh= to initialize",
    "deepspeed.module_inject": "split layers yourself, mark their parameters and pass mesh= to initialize",
    "deepspeed.accelerator": "zero_full.get_accelerator(), or torch.accelerator",
    "deepspeed.autotuning": "compare stages with python -m zero_full plan --stages",
    "deepspeed.checkpoint": "engine.load_checkpoint, or python -m zero_full inspect and export",
    "deepspeed.checkpointing": CHECKPOINTING,
    "deepspeed.runtime.activation_checkpointing": CHECKPOINTING,
    "deepspeed.comm": "torch.distributed has no such function",
    "deepspeed.comm.get_local_rank": 'engine.local_rank, or int(os.environ["LOCAL_RANK"])',
    "deepspeed.comm.get_world_group": "torch.distributed.group.WORLD",
    "deepspeed.comm.initialize_mesh_device": "torch.distributed.device_mesh.init_device_mesh",
    "deepspeed.comm.log_summary": "engine.traffic() counts the bytes that were sent",
    "deepspeed.launcher": "start with torchrun",
    "deepspeed.moe": "write the layer in plain torch, and pass topology=zero_full.Topology(expert=...)",
    "deepspeed.monitor": "engine.metrics(), or the configuration's tensorboard, csv_monitor and wandb",
    "deepspeed.ops": "use torch's operators",
    "deepspeed.ops.adagrad": 'torch.optim.Adagrad, or "optimizer": {"type": "Adagrad"} in the configuration',
    "deepspeed.ops.adam": (
        'zero_full.FusedAdam, zero_full.ZeroOneAdam or "optimizer": {"type": "Adam"} in the configuration'
    ),
    "deepspeed.ops.lamb": 'zero_full.Lamb, or "optimizer": {"type": "Lamb"} in the configuration',
    "deepspeed.runtime.fp16": (
        "zero_full.OneBitAdam, OneBitLamb or ZeroOneAdam, or their names in the configuration"
    ),
    "deepspeed.pipe": PIPELINE,
    "deepspeed.runtime.pipe": PIPELINE,
    "deepspeed.profiling": "torch.profiler, or torch.utils.flop_counter",
    "deepspeed.runtime.data_pipeline": "choose and order the data in your own sampler",
    "deepspeed.runtime.lr_schedules": "add the arguments that the script reads to its own parser",
    "deepspeed.zero.stage3": "python -m zero_full plan predicts the memory of a model",
    "deepspeed.zero.stage_1_and_2": "python -m zero_full plan predicts the memory of a model",
    "deepspeed.runtime.sequence_parallel": "there is no sequence parallelism: split sequences yourself",
    "deepspeed.sequence": "there is no sequence parallelism: split sequences yourself",
    "deepspeed.utils.groups": "make groups with torch.distributed, and pass mesh= or topology= to initialize",
    "deepspeed.utils.log_dist": "logging.getLogger(__name__); zero_full's own logger is named zero_full",
    "deepspeed.utils.logger": "logging.getLogger(__name__); zero_full's own logger is named zero_full",
    "deepspeed.utils.logging": "logging.getLogger(__name__); zero_full's own logger is named zero_full",
    "deepspeed.utils.timer": "time.perf_counter; wall_clock_breakdown logs the engine's times",
    "deepspeed.utils.zero_to_fp32": "python -m zero_full export FOLDER OUT writes whole weights",
    "deepspeed.zero.TiledLinear": "torch.nn.Linear",
    "deepspeed.zero.ZeroParamStatus": "zero_full.GatheredParameters, around whole parameters, too",
}
ENGINE = {  # advice for engine attributes, unless zero_full's engine has them
    "save_fp16_model": "engine.save_16bit_model",
    "_zero3_consolidated_16bit_state_dict": "engine.module_state_dict(), on every rank",
    "_consolidated_16bit_state_dict": "engine.module_state_dict(), on every rank",
    "zero_optimization_partition_weights": "engine.zero_optimization_stage() == 3",
    "zero_gather_16bit_weights_on_model_save": "True: save_16bit_model always gathers",
    "deepspeed_io": "a DataLoader of your own, or training_data= of initialize",
    "get_data_parallel_rank": "engine.global_rank, or your group's rank",
    "train_batch": "make the model a zero_full.PipelineModule, or call forward, backward and step in a loop",
    "eval_batch": "make the model a zero_full.PipelineModule, or call forward under torch.no_grad()",
}
PARAMETER = {  # attributes that DeepSpeed adds to parameters; tests for these are silently false here
    "ds_id": "remove the check: GatheredParameters and safe_get_... accept any parameter",
    "ds_status": "remove the check: GatheredParameters and safe_get_... accept any parameter",
    "ds_numel": "p.numel(), which is correct for released parameters as well",
    "ds_shape": "p.shape, which is correct for released parameters as well",
    "ds_tensor": "zero_full.safe_get_local_fp32_param(p)",
}
ARGUMENTS = {  # advice for arguments of initialize
    "distributed_port": "pass it to zero_full.init_distributed before",
    "mesh_param": "pass a named torch mesh as mesh=",
}
ADAM = "zero_full.optim.FusedAdam"
ADAM_RENAMED = {"adamw_mode": "adam_w_mode"}  # DeepSpeedCPUAdam's name of an argument -> FusedAdam's
ADAM_ARGUMENTS = {  # advice for arguments of DeepSpeed's Adams that FusedAdam lacks
    "fp32_optimizer_states": '"bf16_optimizer_states" in the section "bf16" of the configuration',
    "set_grad_none": "remove it: zero_grad sets gradients to None",
}
FOREIGN = {  # classes by which other libraries run DeepSpeed itself -> the library
    "HfDeepSpeedConfig": "transformers",
    "HfTrainerDeepSpeedConfig": "transformers",
    "DeepSpeedPlugin": "accelerate",
    "DeepSpeedStrategy": "Lightning",
}


def canonical(path: str) -> str:
    """Return the documented path of a DeepSpeed name."""
    for length in range(path.count(".") + 1, 0, -1):
        head, rest = ".".join(path.split(".")[:length]), path.split(".")[length:]
        if head in ALIASES and (rest or head not in NAMES):
            return ".".join([ALIASES[head], *rest])
    return path


def target_of(path: str) -> str | None:
    """Return the counterpart of a DeepSpeed name, or None."""
    path = canonical(path)
    module, _, name = path.rpartition(".")
    if path in NAMES or path in MODULES:
        return NAMES.get(path) or MODULES[path]
    return f"torch.distributed.{name}" if module == "deepspeed.comm" and name not in NOT_IN_TORCH else None


def is_module(path: str) -> bool:
    """Return whether the name maps to a module, whose own names are all in these tables."""
    return canonical(path) in MODULES


def instead_of(path: str) -> str:
    """Return advice for a name without a counterpart."""
    parts = canonical(path).split(".")
    heads = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next(INSTEAD[head] for head in heads if head in INSTEAD)
