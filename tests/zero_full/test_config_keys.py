"""Every key of DeepSpeed's JSON: known, with its default, and honest about what it does here."""

import json
from typing import Any

import pytest

from tests.zero_full.test_config import error_of, nested, with_batch
from zero_full.config import Config, resolve
from zero_full.config.messages import entries


def in_full(top_level: str, zero: str) -> dict[str, Any]:
    """Two JSON texts as one table of dotted keys; the second is about zero_optimization."""
    return json.loads(top_level) | {f"zero_optimization.{k}": v for k, v in json.loads(zero).items()}


DEFAULTS: dict[str, Any] = in_full(
    """{
  "managed_gradient_accumulation": true, "plain_backward_divides": null, "steps_per_print": null,
  "optimizer": null, "scheduler": null,
  "gradient_clipping": 1.0, "prescale_gradients": false, "gradient_predivide_factor": 1.0,
  "gradient_allreduce_op": "mean", "communication_data_type": null, "sparse_gradients": false,
  "seq_parallel_communication_data_type": "fp32", "disable_allgather": false, "dump_state": false,
  "wall_clock_breakdown": false, "memory_breakdown": false, "zero_allow_untested_optimizer": false,
  "zero_force_ds_cpu_optimizer": true, "dataloader_drop_last": false, "graph_harvesting": false,
  "log_level": null, "amp": {}, "compile": {}, "data_types.grad_accum_dtype": null,
  "data_types.param_dtype": null, "data_types.buffer_dtype": null, "checkpoint.tag_validation": "Warn",
  "data_types.keep_in_fp32_modules": "auto", "disable_python_gc": false,
  "checkpoint.load_universal": false, "checkpoint.use_node_local_storage": false,
  "checkpoint.parallel_write.pipeline_stage": false, "torch_autocast.enabled": false,
  "torch_autocast.dtype": null, "torch_autocast.lower_precision_safe_modules": null, "fp16.enabled": false,
  "fp16.auto_cast": false, "fp16.loss_scale": 0, "fp16.initial_scale_power": 16,
  "fp16.loss_scale_window": 1000, "fp16.hysteresis": 2, "fp16.consecutive_hysteresis": false,
  "fp16.min_loss_scale": 1, "fp16.fp16_master_weights_and_grads": false, "bf16.enabled": false,
  "bf16.immediate_grad_update": false, "bf16.check_grad_overflow": true,
  "bf16.bf16_master_weights_and_grads": false, "bf16.bf16_optimizer_states": false,
  "debug.check_collectives": false, "debug.timeout_s": 10.0, "tensorboard.enabled": false,
  "tensorboard.output_path": "", "tensorboard.job_name": "DeepSpeedJobName", "csv_monitor.enabled": false,
  "csv_monitor.output_path": "", "csv_monitor.job_name": "DeepSpeedJobName", "wandb.enabled": false,
  "wandb.group": null, "wandb.team": null, "wandb.project": "deepspeed", "hybrid_engine.enabled": false,
  "hybrid_engine.max_out_tokens": 512, "hybrid_engine.inference_tp_size": 1,
  "hybrid_engine.release_inference_cache": false, "hybrid_engine.pin_parameters": true,
  "hybrid_engine.tp_gather_partition_size": 8
}""",
    """{
  "stage": 0, "contiguous_gradients": true, "reduce_scatter": true, "reduce_bucket_size": 500000000,
  "use_multi_rank_bucket_allreduce": true, "allgather_partitions": true,
  "allgather_bucket_size": 500000000, "overlap_comm": null, "load_from_fp32_weights": true,
  "elastic_checkpoint": false, "offload_param": null, "offload_optimizer": null, "zenflow": null,
  "sub_group_size": 1000000000, "stage3_prefetch_bucket_size": 50000000,
  "stage3_param_persistence_threshold": 100000, "stage3_model_persistence_threshold": 9223372036854775807,
  "stage3_max_live_parameters": 1000000000, "stage3_max_reuse_distance": 1000000000,
  "stage3_gather_16bit_weights_on_model_save": false, "stage3_module_granularity_threshold": 0,
  "stage3_use_all_reduce_for_fetch_params": false, "stage3_allgather_sequential": false,
  "ignore_unused_parameters": true, "legacy_stage1": false, "round_robin_gradients": false,
  "zero_hpz_partition_size": 1, "zero_quantized_weights": false,
  "zero_quantized_nontrainable_weights": false, "zero_quantized_gradients": false,
  "zeropp_loco_param": null, "mics_shard_size": -1, "mics_hierarchical_params_gather": false,
  "memory_efficient_linear": true, "pipeline_loading_checkpoint": false, "override_module_apply": true,
  "log_trace_cache_warnings": false, "enable_sanity_checks": false,
  "save_muon_momentum_buffer_in_memory": false, "cpu_offload": null,
  "leaf_module.classes": ["MixtralSparseMoeBlock", "Qwen2MoeSparseMoeBlock", "Qwen3MoeSparseMoeBlock"],
  "leaf_module.names": [], "leaf_module.name_suffixes": [],
  "parameter_alignment": false, "compute_grad_norm": true,
  "cpu_offload_param": null, "cpu_offload_use_pin_memory": null,
  "stage3_gather_fp16_weights_on_model_save": false
}""",
)
OFFLOAD_PARAM: dict[str, Any] = json.loads(
    """{
  "device": "none", "nvme_path": null, "buffer_count": 5, "buffer_size": 100000000,
  "max_in_cpu": 1000000000, "pin_memory": true
}"""
)
OFFLOAD_OPTIMIZER: dict[str, Any] = json.loads(
    """{
  "device": "none", "nvme_path": null, "buffer_count": 4, "pin_memory": true, "ratio": 1.0,
  "pipeline_read": false, "pipeline_write": false, "fast_init": false, "super_offload": false,
  "cpuadam_cores_perc": 0.8
}"""
)
OWN = {"delay_update_after": None, "max_in_cpu": 2**25}  # that DeepSpeed has not


def test_every_key_of_deepspeed_is_known_with_its_default() -> None:
    ours = {entry.key: entry.value for entry in entries(Config())}
    assert {key: ours[key] for key in DEFAULTS} == DEFAULTS
    offload = {"offload_param": {}, "offload_optimizer": {}}
    zero = resolve(with_batch({"zero_optimization": offload}), 1).config.zero_optimization
    assert zero.offload_param is not None and zero.offload_param.model_dump() == OFFLOAD_PARAM
    assert zero.offload_optimizer is not None and zero.offload_optimizer.model_dump() == {
        **OFFLOAD_OPTIMIZER,
        **OWN,
    }


@pytest.mark.parametrize("key", DEFAULTS)
def test_a_key_that_spells_out_its_default_is_quiet(key: str) -> None:
    resolved = resolve(with_batch(nested(key, DEFAULTS[key])), 2)
    assert resolved.warnings == ()
    assert resolved.origins[key] == ("derived" if key == "zero_optimization.overlap_comm" else "user")


IDLE: dict[str, Any] = in_full(  # set to this, a key costs one line of warning
    """{
  "disable_allgather": true, "zero_force_ds_cpu_optimizer": false, "disable_python_gc": true,
  "memory_breakdown": true, "dump_state": true, "log_level": "info", "vocabulary_size": 50257,
  "seq_parallel_communication_data_type": "bf16", "use_data_before_expert_parallelism": true,
  "pipeline.seed_layers": true, "pipeline.pipe_partitioned": false, "pipeline.grad_partitioned": false,
  "pipeline.use_reentrant": false, "activation_checkpointing": {"partition_activations": true},
  "flops_profiler.enabled": true, "comms_logger.enabled": true, "comet.enabled": true,
  "trackio.enabled": true, "monitor_config": {"tensorboard": {"enabled": true}},
  "torch_autocast.lower_precision_safe_modules": ["torch.nn.Linear"],
  "aio.thread_count": 1, "aio.queue_depth": 4,
  "aio.single_submit": true, "aio.overlap_events": false, "aio.use_gds": true,
  "datastates_ckpt": {"a": 1}, "weight_quantization": {"a": 1},
  "timers": {"throughput": {}}, "bf16.immediate_grad_update": true, "checkpoint.load_universal": true,
  "checkpoint.tag_validation": "Fail", "hybrid_engine.max_out_tokens": 1024,
  "hybrid_engine.tp_gather_partition_size": 4,
  "checkpoint.parallel_write.pipeline_stage": true, "checkpoint.writer": {"type": "fast"},
  "checkpoint.checkpoint_serialization": false
}""",
    """{
  "use_multi_rank_bucket_allreduce": false, "allgather_partitions": false,
  "allgather_bucket_size": 50000000, "load_from_fp32_weights": false, "elastic_checkpoint": true,
  "legacy_stage1": true, "enable_sanity_checks": true, "parameter_alignment": true,
  "compute_grad_norm": false,
  "sub_group_size": 1000000000000, "cpu_offload_use_pin_memory": true, "memory_efficient_linear": false,
  "stage3_prefetch_bucket_size": 1, "stage3_param_persistence_threshold": 1,
  "stage3_model_persistence_threshold": 1, "stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 1,
  "stage3_gather_16bit_weights_on_model_save": true, "stage3_module_granularity_threshold": 1,
  "stage3_use_all_reduce_for_fetch_params": true, "stage3_allgather_sequential": true,
  "stage3_partition_stream_chunk_size": 1, "mics_hierarchical_params_gather": true,
  "pipeline_loading_checkpoint": true, "override_module_apply": false, "log_trace_cache_warnings": true,
  "save_muon_momentum_buffer_in_memory": true, "leaf_module.names": ["moe"],
  "leaf_module.classes": [], "leaf_module.name_suffixes": ["moe"],
  "zero_hpz_partition_size": 2, "zero_quantized_weights": true, "zero_quantized_gradients": true,
  "stage3_gather_fp16_weights_on_model_save": true,
  "offload_optimizer.buffer_count": 5,
  "offload_optimizer.pipeline_read": true, "offload_optimizer.pipeline_write": true,
  "offload_optimizer.fast_init": true, "offload_optimizer.super_offload": true,
  "offload_optimizer.cpuadam_cores_perc": 0.5
}""",
)
MISSING: dict[str, Any] = in_full(  # set to this, a key is an error
    """{
  "sequence_parallel_size": 2,
  "data_types.param_dtype": "bf16",
  "compile.deepcompile": true, "checkpoint.use_node_local_storage": true,
  "tensor_parallel.autotp_size": 2, "tensor_parallel.tp_size": 2, "tensor_parallel.tp.tp_size": 2,
  "expert_parallel.enabled": true, "hybrid_engine.inference_tp_size": 2,
  "autotuning.enabled": true, "data_efficiency.enabled": true,
  "data_types.keep_in_fp32_modules": ["norm"]
}""",
    """{
  "zenflow": {}, "zero_quantized_nontrainable_weights": true, "cpu_offload_param": true
}""",
)
REMOVED = {  # by DeepSpeed itself: (since, a value that asks for it, values that do not)
    "nebula": ("0.19.7", {"enabled": True}, [{}, {"enabled": False}, {"enabled": 0, "a": 1}, None, False]),
    "quantize_training": ("0.19.7", {"enabled": 1}, [{"enabled": False}, {"quantize_groups": 1}]),
    "sparse_attention": ("0.19.7", {"mode": "fixed"}, [{}, {"enabled": False, "mode": "fixed"}, False]),
    "compression_training": (
        "0.19.7",
        {"weight_quantization": {"shared_parameters": {"enabled": True}}},
        [{"weight_quantization": {"shared_parameters": {"enabled": False}}, "layer_reduction": {}}],
    ),
    "amp": ("0.19.8", {"enabled": True, "opt_level": "O1"}, [{}, {"enabled": False}, {"opt_level": "O1"}]),
    "eigenvalue": ("0.19.8", {"enabled": True}, [{"enabled": False, "verbose": True}]),
    "progressive_layer_drop": ("0.19.8", {"enabled": True}, [{"enabled": False, "theta": 0.5}]),
    "curriculum_learning": ("0.19.8", {"enabled": True}, [{"enabled": False}, None]),
    "graph_harvesting": ("0.19.8", True, [False, 0]),
    "sparse_gradients": ("0.19.8", True, [False, 0]),
    "elasticity": ("0.19.8", {"enabled": True}, [{"enabled": False, "version": 0.1}]),
    "zero_optimization.zeropp_loco_param": ("0.19.8", {"err_beta": 0.8}, [None, {}, False]),
}


def test_0_and_1_are_booleans() -> None:
    keys = [entry.key for entry in entries(Config()) if isinstance(entry.default, bool)]
    assert len(keys) > 40
    for key in keys:
        for value in (False, True):
            said = []
            for given in (value, int(value)):
                try:
                    config = resolve(with_batch(nested(key, given)), 2).config
                    said.append({entry.key: entry.value for entry in entries(config)}[key])
                except ValueError as error:
                    said.append(str(error))
            assert said[0] == said[1] and type(said[0]) is type(said[1]), key


@pytest.mark.parametrize("key", REMOVED)
def test_what_deepspeed_has_removed_is_refused_with_the_version_unless_it_is_off(key: str) -> None:
    version, on, off = REMOVED[key]
    error = error_of(with_batch(nested(key, on)))
    assert error.startswith(key) and f" is not supported: DeepSpeed removed it in {version}; " in error
    for value in off:
        assert resolve(with_batch(nested(key, value)), 2).warnings == (), value


@pytest.mark.parametrize("key", IDLE)
def test_a_key_without_effect_costs_one_line_that_names_it(key: str) -> None:
    (warning,) = resolve(with_batch(nested(key, IDLE[key])), 2).warnings
    assert warning.startswith(f"{key} = ") and " has no effect: " in warning
    assert "\n" not in warning


def test_at_stage_3_what_only_stage_3_reads_is_quiet() -> None:
    only = [
        key for key in IDLE if "only stage 3" in resolve(with_batch(nested(key, IDLE[key])), 2).warnings[0]
    ]
    assert len(only) == 12
    keys = {key.removeprefix("zero_optimization."): IDLE[key] for key in only}
    leaf = {key.removeprefix("leaf_module."): keys.pop(key) for key in list(keys) if "leaf_module" in key}
    zero = {"stage": 3, "leaf_module": leaf, **keys}
    assert resolve(with_batch({"zero_optimization": zero}), 2).warnings == ()


@pytest.mark.parametrize("key", MISSING)
def test_a_feature_that_would_be_missed_is_an_error_that_names_it(key: str) -> None:
    error = error_of(with_batch(nested(key, MISSING[key])))
    assert error.startswith(f"{key} = ") and " is not supported: " in error
    if key.endswith(".enabled"):
        assert resolve(with_batch(nested(key, False)), 2).warnings == ()


def test_the_two_tables_above_have_every_remark_of_the_schema() -> None:
    with_all = {
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"offload_param": {}, "offload_optimizer": {}},
    }
    remarked: dict[bool, set[str]] = {True: set(), False: set()}
    for entry in entries(resolve(with_batch(with_all), 1).config):
        if entry.remark:
            switches = [f".{switch}" for switch in entry.remark.switches]
            remarked[entry.remark.refuses] |= {entry.key + switch for switch in switches or [""]}
    assert {key.removesuffix(".enabled") for key in remarked[True] - set(MISSING)} == set(REMOVED)
    assert remarked[True] >= set(MISSING)
    assert remarked[False] == set(IDLE) | {"optimizer.legacy_fusion"}
