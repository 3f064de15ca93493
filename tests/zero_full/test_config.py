"""A DeepSpeed JSON works unchanged; a mistake in it is named with its key and the remedy."""

import ast
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zero_full.config
from zero_full.config import Config, resolve
from zero_full.config.messages import entries
from zero_full.errors import ConfigError

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def nested(key: str, value: Any) -> dict[str, Any]:
    """`("a.b", 1)` as {"a": {"b": 1}}."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def with_batch(config: dict[str, Any]) -> dict[str, Any]:
    return {TRAIN: 8, **config}


def errors_of(config: Any, world_size: int = 2) -> list[str]:
    """What the error says, a line each, without its headline."""
    with pytest.raises(ConfigError) as caught:
        resolve(config, world_size)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def error_of(config: Any, world_size: int = 2) -> str:
    errors = errors_of(config, world_size)
    assert len(errors) == 1, errors
    return errors[0]


def specification_example(dtype: str) -> dict[str, Any]:
    return {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {
            "enabled": dtype == "fp16",
            "fp16_master_weights_and_grads": False,
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": 15,
        },
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": 2,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 50000000,
            "reduce_bucket_size": 50000000,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "cpu_offload": False,
        },
    }


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_specifications_example_works_and_warns_of_the_one_idle_key(dtype: str) -> None:
    resolved = resolve(specification_example(dtype), 4)
    config = resolved.config
    assert (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (4, 1)
    assert (config.bf16.enabled, config.fp16.enabled) == (dtype == "bf16", dtype == "fp16")
    assert config.fp16.initial_scale_power == 15 and config.fp16.loss_scale == 0.0
    assert config.zero_optimization.stage == 2 and config.zero_optimization.overlap_comm is True
    assert config.optimizer is not None and config.optimizer.params["betas"] == [0.8, 0.999]
    (warning,) = resolved.warnings
    assert warning.startswith("zero_optimization.allgather_bucket_size = 50000000 has no effect: ")


def test_what_is_supported_says_nothing() -> None:
    zero = {
        **{"stage": 1, "round_robin_gradients": True, "ignore_unused_parameters": False},
        **{"reduce_scatter": False, "overlap_comm": True, "contiguous_gradients": False},
        **{"reduce_bucket_size": 1e6, "mics_shard_size": 2},
    }
    config = {
        **{"zero_optimization": zero, "gradient_predivide_factor": 2, "communication_data_type": "fp32"},
        **{"wall_clock_breakdown": True, "steps_per_print": 10, "data_types": {"grad_accum_dtype": "fp32"}},
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
    }
    assert resolve(with_batch(config), 4).warnings == ()


sizes = st.integers(1, 64)


@given(micro=sizes, steps=sizes, world=sizes, given_keys=st.sets(st.sampled_from([TRAIN, MICRO, STEPS])))
def test_one_or_two_batch_sizes_give_the_third(
    micro: int, steps: int, world: int, given_keys: set[str]
) -> None:
    whole = {TRAIN: micro * steps * world, MICRO: micro, STEPS: steps}
    config = {key: whole[key] for key in given_keys}
    resolved = resolve(config, world)
    train, micro_, steps_ = (getattr(resolved.config, key) for key in (TRAIN, MICRO, STEPS))
    if not given_keys & {TRAIN, MICRO}:  # who brings no data to be cut into batches needs neither
        assert (train, micro_, steps_) == (0, 0, steps if given_keys else 1)
        return
    assert train == micro_ * steps_ * world
    assert all(getattr(resolved.config, key) == value for key, value in config.items())
    if STEPS not in given_keys and len(given_keys) == 1:
        assert steps_ == 1
    for key in whole:
        assert resolved.origins[key] == ("user" if key in given_keys else "derived")


@given(train=st.integers(1, 200), micro=st.integers(1, 9), steps=st.integers(1, 9), world=st.integers(1, 9))
def test_batch_sizes_that_do_not_fit_show_the_arithmetic(
    train: int, micro: int, steps: int, world: int
) -> None:
    for config, unit in (
        ({TRAIN: train}, world),
        ({TRAIN: train, MICRO: micro}, micro * world),
        ({TRAIN: train, STEPS: steps}, steps * world),
    ):
        if train % unit:
            error = error_of(config, world)
            assert f"{TRAIN}: {train}" in error and f"world size {world} = {unit}" in error
        else:
            resolve(config, world)
    if train != micro * steps * world:
        error = error_of({TRAIN: train, MICRO: micro, STEPS: steps}, world)
        assert f"{TRAIN}: {train} is not" in error and f"= {micro * steps * world}" in error


@pytest.mark.parametrize("key", [TRAIN, MICRO, STEPS])
@pytest.mark.parametrize("value", [True, False, 0, -4, 1.5, "8", math.nan, math.inf, [8]])
def test_a_batch_size_is_a_whole_number_above_0(key: str, value: Any) -> None:
    error = error_of({MICRO: 1, key: value})
    assert error.startswith(f"{key}: got ") and error.endswith("expected a whole number of at least 1")


def test_null_leaves_a_batch_size_out() -> None:
    resolved = resolve({TRAIN: 8, MICRO: None, STEPS: None}, 2)
    assert resolved.config.train_micro_batch_size_per_gpu == 4
    assert resolved.origins[MICRO] == "derived"


def test_whole_floats_are_whole_numbers() -> None:
    zero = resolve(with_batch({"zero_optimization": {"reduce_bucket_size": 5e7}}), 2).config.zero_optimization
    assert zero.reduce_bucket_size == 50_000_000 and type(zero.reduce_bucket_size) is int


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"zero_optimisation": {}}, "zero_optimisation: unknown key; did you mean zero_optimization?"),
        ({"fp16": {"hysterisis": 1}}, "fp16.hysterisis: unknown key; did you mean fp16.hysteresis?"),
        (
            {"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}},
            "zero_optimization.offload_optimizer.devise: unknown key; "
            "did you mean zero_optimization.offload_optimizer.device?",
        ),
        ({"stage": 2}, "stage: unknown here; it belongs at zero_optimization.stage"),
        (
            {"zero_optimization": {"gradient_clipping": 1}},
            "zero_optimization.gradient_clipping: unknown here; "
            "it belongs at gradient_clipping at the top level",
        ),
        (
            {"optimizer": {"type": "Adam", "lr": 1}},
            "optimizer.lr: unknown key; put arguments of the optimizer into optimizer.params",
        ),
        (
            {"data_types": {"x": 1}},
            "data_types.x: unknown key, and no key has a similar name; "
            "the keys here are grad_accum_dtype, param_dtype, buffer_dtype, keep_in_fp32_modules; remove it",
        ),
        ({"xyzzy": 1}, "xyzzy: unknown key, and no key has a similar name; remove it"),
    ],
)
def test_an_unknown_key_is_named_with_where_it_may_belong(config: dict[str, Any], error: str) -> None:
    assert error_of(with_batch(config)) == error


@pytest.mark.parametrize(
    ("key", "value", "expectation"),
    [
        ("zero_optimization.stage", 4, "one of 0, 1, 2 or 3"),
        ("zero_optimization.stage", True, "a whole number of at least 0"),
        ("zero_optimization.reduce_bucket_size", "5e8", "a whole number of at least 1"),
        ("zero_optimization.overlap_comm", "yes", "true or false"),
        ("zero_optimization", True, 'an object such as {"stage": ...}'),
        ("fp16", True, 'an object such as {"enabled": ...}'),
        ("fp16.enabled", "true", "true or false"),
        ("fp16.enabled", 2, "true or false"),
        ("nebula.enabled", "false", "true or false"),
        ("tensor_parallel.autotp_size", "2", "a whole number"),
        ("tensor_parallel.tp.tp_size", "2", "a whole number"),
        ("fp16.loss_scale", -1, "a number of 0 or more"),
        ("gradient_clipping", "1.0", "a number of 0 or more"),
        ("gradient_clipping", True, "a number of 0 or more"),
        ("gradient_clipping", math.nan, "a number of 0 or more"),
        ("gradient_predivide_factor", 0, "a number above 0"),
        ("gradient_allreduce_op", "max", "one of 'mean' or 'sum'"),
        ("communication_data_type", "int8", "one of 'fp16', 'bf16' or 'fp32'"),
        ("optimizer.type", 3, "a string"),
        ("torch_autocast.lower_precision_safe_modules", "Linear", "a list"),
        ("flops_profiler", True, "an object"),
        ("steps_per_print", 0, "a whole number of at least 1"),
        ("debug.timeout_s", 0, "a number above 0"),
        ("debug.timeout_s", 1e30, "a number from 0.001 to 1e+06"),
        ("gradient_predivide_factor", 1e-320, "a number from 1e-06 to 1e+06"),
        ("gradient_clipping", 1e-320, "a number from 1.17549e-38 to 3.40282e+38, or 0"),
        ("gradient_accumulation_steps", 10**30, "a whole number of at most 2147483647"),
        ("zero_optimization.reduce_bucket_size", 1e30, f"a whole number of at most {sys.maxsize}"),
        ("fp16.loss_scale", math.inf, "a number from 1.17549e-38 to 8.50706e+37, or 0"),
        ("fp16.initial_scale_power", 2000, "a whole number of at most 126"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_expected(key: str, value: Any, expectation: str) -> None:
    errors = errors_of(with_batch(nested(key, value)))
    assert errors == [f"{key}: got {json.dumps(value)}, expected {expectation}"]


@pytest.mark.parametrize(
    "key",
    [
        *(TRAIN, MICRO, "gradient_clipping", "fp16.enabled", "zero_optimization.reduce_bucket_size"),
        *("optimizer.params.lr", "scheduler.params.warmup_num_steps"),
    ],
)
def test_auto_is_for_hugging_face(key: str) -> None:
    config: dict[str, Any] = with_batch(nested(key, "auto"))
    for section in ("optimizer", "scheduler"):
        if section in config:
            config[section]["type"] = "Adam"
    error = error_of(config)
    assert error.startswith(f"{key}: only Hugging Face's Trainer") and "set a value: " in error


def test_all_errors_are_reported_together_and_what_is_bad_hides_nothing() -> None:
    config = {
        **{TRAIN: 9, "colour": 1, "gradient_clipping": -1, "amp": {"enabled": True}},
        **{"optimizer": {"type": 1, "params": {"lr": "auto"}}, "fp16": {"enabled": True}},
        **{"bfloat16": {"enabled": True}, "zero_optimization": {"zenflow": {}, "mics_shard_size": 3}},
    }
    starts = [
        *("optimizer.type: got 1", "gradient_clipping: got -1", "colour: unknown key", "amp.enabled = true"),
        *("zero_optimization.zenflow = {}", "fp16.enabled: bf16.enabled is true"),
        *(
            "zero_optimization.mics_shard_size: 3 does not divide the world size 2",
            f"{TRAIN}: 9 is not a mult",
        ),
    ]
    errors = errors_of(config)
    assert len(errors) == len(starts)
    assert all(error.startswith(start) for error, start in zip(errors, starts, strict=True))
    assert "gradients of earlier steps; remove it" in errors[4]


@pytest.mark.parametrize(
    ("config", "key", "words"),
    [
        ({"optimizer": {}}, "optimizer.type", ["missing", "remove optimizer"]),
        (
            {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}},
            "optimizer.params.max_grad_norm",
            ["set gradient_clipping"],
        ),
        (
            {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
            "bf16.bf16_optimizer_states",
            ["requires bf16.bf16_master_weights_and_grads"],
        ),
        (
            {
                "optimizer": {"type": "Muon"},
                "bf16": {
                    "enabled": True,
                    "bf16_master_weights_and_grads": True,
                    "bf16_optimizer_states": True,
                },
            },
            "bf16.bf16_optimizer_states",
            ["Muon", "remove it"],
        ),
        (
            {"zero_optimization": {"mics_shard_size": 0}},
            "zero_optimization.mics_shard_size",
            ["0 does not divide the world size 2", "-1"],
        ),
        (
            {"fp16": {"enabled": True, "min_loss_scale": 8, "initial_scale_power": 2}},
            "fp16.min_loss_scale",
            ["8 is above the initial loss scale 4", "fp16.initial_scale_power 2"],
        ),
        ({"bf16": {}, "bfloat16": {}}, "bfloat16", ["an alias of bf16", "remove one"]),
    ],
)
def test_what_cannot_be_had_together_says_what_to_do(
    config: dict[str, Any], key: str, words: list[str]
) -> None:
    error = error_of(with_batch(config))
    assert error.startswith(f"{key}: ") and all(word in error for word in words)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"prescale_gradients": True, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor = 2.0"),
        ({"zero_optimization": {"mics_shard_size": 2}}, "zero_optimization.mics_shard_size = 2"),
    ],
)
def test_a_key_that_another_makes_void_is_a_warning(config: dict[str, Any], key: str) -> None:
    (warning,) = resolve(with_batch(config), 2).warnings
    assert warning.startswith(f"{key} has no effect: ")


def test_second_names_are_accepted_and_used_in_what_is_said() -> None:
    config = {"bfloat16": {"enabled": True}, "zero_optimization": {"max_live_parameters": 7}}
    resolved = resolve(with_batch(config), 2)
    assert resolved.config.bf16.enabled and resolved.origins["bf16.enabled"] == "user"
    assert resolved.config.zero_optimization.stage3_max_live_parameters == 7
    assert resolved.warnings == (
        "zero_optimization.max_live_parameters = 7 has no effect: only stage 3 uses it",
    )
    error = error_of(with_batch({"bfloat16": {"enabled": 3}}))
    assert error == "bfloat16.enabled: got 3, expected true or false"


@pytest.mark.parametrize("name", ["fp16", "FP16", "half", "float16", "torch.float16"])
def test_a_precision_has_several_names(name: str) -> None:
    assert resolve(with_batch({"communication_data_type": name}), 2).config.communication_data_type == "fp16"


def test_infinity_means_never_print() -> None:
    assert resolve(with_batch({"steps_per_print": math.inf}), 2).config.steps_per_print is None


def test_a_config_resolves_and_what_the_user_gave_stays_as_it_was() -> None:
    config = Config(train_batch_size=8)
    resolved = resolve(config, 2)
    assert resolved.config.train_micro_batch_size_per_gpu == 4 and config.train_micro_batch_size_per_gpu == 0
    assert resolve(resolved.config, 2).config == resolved.config
    with pytest.raises(ValueError, match="frozen"):
        resolved.config.train_batch_size = 9  # type: ignore[misc]
    raw = with_batch({"bfloat16": {"enabled": True}, "zero_optimization": {"max_live_parameters": 7}})
    before = json.dumps(raw)
    resolve(raw, 2)
    assert json.dumps(raw) == before


def test_every_value_has_an_origin_and_the_table_shows_the_ones_that_matter() -> None:
    resolved = resolve(specification_example("bf16"), 4)
    assert {entry.key for entry in entries(resolved.config)} <= set(resolved.origins)
    lines = resolved.table([("world", "4", "ranks")]).splitlines()
    rows = [line.split("  ") for line in lines]
    cells = {row[0]: (next(c for c in row[1:] if c).strip(), row[-1].strip()) for row in rows}
    assert cells["key"] == ("value", "from") and cells["world"] == ("4", "ranks")
    assert cells["optimizer.params.lr"] == ("0.001", "user")
    assert cells[MICRO] == ("4", "derived")
    assert cells["gradient_allreduce_op"] == ('"mean"', "default")
    assert cells["zero_optimization.stage"] == ("2", "user")
    assert "zero_optimization.sub_group_size" not in cells and "fp16.loss_scale_window" not in cells
    assert len({line.rindex(f"  {row[-1].strip()}") for line, row in zip(lines, rows, strict=True)}) == 1


def test_the_configuration_needs_no_torch() -> None:
    for path in Path(zero_full.config.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [alias.name for alias in getattr(node, "names", [])] if isinstance(node, ast.Import) else []
            )
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] == "torch"], path.name


def test_a_room_is_an_attribute_whatever_was_imported_before() -> None:
    """Also without torch, as a script may check its configuration on any machine."""
    script = (
        "import sys, zero_full\n"
        "assert zero_full.config.resolve and zero_full.errors.CheckpointError\n"
        "assert 'torch' not in sys.modules\n"
        "assert not hasattr(zero_full, 'nothing') and not hasattr(zero_full, '_nothing')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
