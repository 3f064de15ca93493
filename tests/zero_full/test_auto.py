"""Configurations as they are found: with "auto", for Accelerate, LLaMA-Factory and Axolotl."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from zero_full.__main__ import main
from zero_full.check.check_command import check_text
from zero_full.config import ConfigError, auto_keys, drop_auto, fill_auto, resolve
from zero_full.config.auto import STAND_INS, fill_text
from zero_full.config.messages import entries
from zero_full.config.schema import Config, OffloadOptimizerConfig, OffloadParamConfig, ZeroConfig

Tree = dict[str, Any]
AUTO = "auto"
BATCH = dict.fromkeys(
    (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    ),
    AUTO,
)
SCALE = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2}
FP16 = {"fp16": {"enabled": AUTO, **SCALE, "min_loss_scale": 1}}
BF16 = {"bf16": {"enabled": AUTO}}
BF16_ON = {"bf16": {"enabled": True}, "fp16": {"enabled": AUTO, "auto_cast": False, **SCALE}}
LATE = dict.fromkeys(
    ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), AUTO
)
LIVE = {"sub_group_size": 1e9, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}
BUCKETS = {"allgather_partitions": True, "allgather_bucket_size": 5e8, "reduce_scatter": True}
AT_2 = {"stage": 2, **BUCKETS, "overlap_comm": True, "reduce_bucket_size": 5e8, "contiguous_gradients": True}
AT_3 = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, **LIVE, **LATE}
GATHER = {"stage3_gather_16bit_weights_on_model_save": True}
CPU, NONE = {"device": "cpu", "pin_memory": True}, {"device": "none", "nvme_path": None}
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": AUTO, "weight_decay": AUTO}}}
SWITCHED = {"lr": AUTO, "weight_decay": AUTO, "torch_adam": True, "adam_w_mode": True}
OF_DEEPSPEED = {"optimizer": {"type": "AdamW", "params": SWITCHED}}
OF_TRAINER = {
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), AUTO)}
}
WARMUP = {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO}
CONSTANT = {"scheduler": {"type": "WarmupLR", "params": WARMUP}}
DECAY = {"scheduler": {"type": "WarmupDecayLR", "params": {**WARMUP, "total_num_steps": AUTO}}}
QUIET = {"steps_per_print": float("inf"), "wall_clock_breakdown": False}


def zero(*parts: Tree, **more: Any) -> Tree:
    """The section "zero_optimization"."""
    return {"zero_optimization": {key: value for part in (*parts, more) for key, value in part.items()}}


RUN = {**BATCH, **QUIET}
FACTORY = {**BATCH, "zero_allow_untested_optimizer": True, **FP16, **BF16}
AXOLOTL = {**BATCH, "wall_clock_breakdown": False}
FOUND: dict[str, Tree] = {
    "accelerate_stage1": {**FP16, **ADAM, **DECAY, **zero(stage=1, reduce_bucket_size=AUTO), **RUN},
    "accelerate_stage2": {**FP16, **OF_DEEPSPEED, **DECAY, **zero(AT_2), **RUN},
    "accelerate_stage2_offload": {**FP16, **ADAM, **DECAY, **zero(AT_2, offload_optimizer=CPU), **RUN},
    "accelerate_stage3": {**FP16, **ADAM, **DECAY, **zero(AT_3, GATHER), **RUN},
    "accelerate_stage3_offload": {
        **{**FP16, **ADAM, **DECAY, **RUN},
        **zero(AT_3, offload_optimizer=CPU, offload_param=CPU, **dict.fromkeys(GATHER, AUTO)),
    },
    "accelerate_tests_zero2": {
        **{**FP16, **BF16, **OF_DEEPSPEED, **CONSTANT, **RUN},
        **zero(AT_2, offload_optimizer=NONE, offload_param=NONE),
    },
    "accelerate_tests_zero3": {
        **{**FP16, **BF16, **OF_DEEPSPEED, **DECAY, **RUN},
        **zero(AT_3, GATHER, offload_optimizer=NONE, offload_param=NONE),
    },
    "accelerate_model_only": {**BF16, **zero(AT_3, GATHER, offload_param=NONE), **BATCH},
    "accelerate_plugin_fills": {
        **{**BATCH, **FP16},
        **zero(stage=AUTO, offload_optimizer=dict.fromkeys(NONE, AUTO), offload_param={"device": AUTO}),
    },
    "factory_z0": {**FACTORY, **zero(AT_2, stage=0, round_robin_gradients=True)},
    "factory_z2": {**FACTORY, **zero(AT_2, round_robin_gradients=True)},
    "factory_z2_offload": {**FACTORY, **zero(AT_2, offload_optimizer=CPU, round_robin_gradients=True)},
    "factory_z2_autotp": {**FACTORY, **zero(AT_2), "tensor_parallel": {"autotp_size": 4}},
    "factory_z3": {**FACTORY, **zero(AT_3, GATHER, overlap_comm=False)},
    "factory_z3_offload": {**FACTORY, **zero(AT_3, GATHER, offload_optimizer=CPU, offload_param=CPU)},
    "factory_z3_commented": {**FACTORY, **zero(AT_3, GATHER), "_comment": "for 8 GPUs", "cuda_aware": True},
    "axolotl_zero1": {**AXOLOTL, **BF16_ON, **zero(stage=1, overlap_comm=True)},
    "axolotl_zero1_compile": {
        **{**AXOLOTL, **BF16_ON, **zero(stage=1, overlap_comm=True)},
        "compile": {"disable": False, "backend": "inductor"},
    },
    "axolotl_zero1_deepcompile": {**AXOLOTL, **BF16_ON, **zero(stage=1), "compile": {"deepcompile": True}},
    "axolotl_zero2": {
        **{**AXOLOTL, **BF16_ON},
        **zero(stage=2, offload_optimizer=CPU, contiguous_gradients=True, overlap_comm=True),
    },
    "axolotl_zero3": {**AXOLOTL, **BF16_ON, **zero(AT_3, GATHER)},
    "axolotl_zero3_bf16": {**AXOLOTL, "bf16": {"enabled": True}, **zero(AT_3, GATHER)},
    "axolotl_zero3_offload_all": {
        **{**AXOLOTL, "bf16": {"enabled": True}},
        **zero(AT_3, GATHER, offload_optimizer=CPU, offload_param=CPU),
    },
    "axolotl_zero3_offload_params": {
        **{**AXOLOTL, "bf16": {"enabled": True}},
        **zero(AT_3, GATHER, offload_param=CPU),
    },
    "trainer_all": {**FP16, **BF16, **OF_TRAINER, **DECAY, **zero(AT_3, GATHER), **BATCH},
}  # fmt: skip
REFUSED = {  # what would train differently from what the file says
    "factory_z2_autotp": "tensor_parallel.autotp_size = 4 is not supported: automatic tensor parallelism",
    "axolotl_zero1_deepcompile": "compile.deepcompile = true is not supported: graph passes",
}


@pytest.mark.parametrize("name", FOUND)
def test_a_file_is_judged_by_the_rest_and_passes_once_filled(name: str) -> None:
    text = json.dumps(FOUND[name], indent=2)
    checked, open_keys = check_text(text, 2), auto_keys(FOUND[name])
    assert checked.count("unfilled") == len(open_keys) > 0
    wrong = [each.text for each in checked.verdicts if each.kind == "refused"]
    assert len(wrong) == (name in REFUSED) and all(each.startswith(REFUSED[name]) for each in wrong)
    assert all(key in checked.remark for key in open_keys)
    filled = fill_auto(FOUND[name], {key: STAND_INS[key] for key in open_keys})
    assert not auto_keys(filled)
    if name in REFUSED:
        with pytest.raises(ConfigError, match="is not supported"):
            resolve(filled, 2)
    else:
        assert f"ok once {len(open_keys)} keys are filled in" in checked.tally
        assert "mistake" not in check_text(json.dumps(filled), 2).tally
        resolve(filled, 2)
        resolve(drop_auto(FOUND[name]), 2)  # with the defaults
        with pytest.raises(ConfigError, match="can fill in") as caught:
            resolve(FOUND[name], 2)
        assert len(str(caught.value).splitlines()) == 1 + len(open_keys)


def test_most_pass() -> None:
    assert (len(FOUND), len(REFUSED)) == (25, 2)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["check", *map(str, arguments)])
    return code, capsys.readouterr().out


def test_values_are_filled_in_and_written_with_comments_and_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "ds.json", tmp_path / "out.json"
    text = '{ # mine\n  "fp16": {"enabled": "auto"}, // x\n "gradient_clipping": "auto", "log_level": ""}'
    file.write_text(text)
    code, said = run(capsys, file, "--fill", "gradient_clipping=0.5", "--write", out)
    assert code == 0 and "by Hugging Face's Trainer and Accelerate: fp16.enabled. " in said
    assert said.splitlines()[-1].startswith("ok once 1 key is filled in, 1 warning on 1 rank")
    assert out.read_text() == text.replace('clipping": "auto"', 'clipping": 0.5')
    out.chmod(0o640)
    code, said = run(capsys, out, "--fill", "fp16.enabled=true", "--write", out)
    assert code == 0 and said.splitlines()[-1].startswith("ok, 1 warning") and f"{out}: written" in said
    assert resolve(out, 1).config.fp16.enabled and out.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ds.json", "out.json"]
    code, said = run(capsys, file, "--fill", "fp16.enabled=yes", "--write", file)
    assert code == 1 and f'{file}:2:12: mistake: fp16.enabled: got "yes", expected true or false' in said
    assert said.splitlines()[-1].startswith("1 mistake, 1 key to fill in, 1 warning")
    assert file.read_text() == text and f"{file}: not written, because of a mistake" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fill", "enabled=true"], "enabled: the configuration has no such key; did you mean fp16.enabled"),
        (["--fill", "zzz=1"], '--fill zzz: the configuration has no such key; "auto" is in fp16.enabled'),
        (["--fill", "gradient_clipping=1"], 'gradient_clipping is 0.5 in the configuration, not "auto"'),
        (["--fill", "fp16.enabled"], "--fill fp16.enabled: write KEY=VALUE"),
        (["--fill", "a=1", "--fill", "a=2"], "--fill a=2: a is given twice"),
        (["--write", "x.json"], "--write x.json without --fill"),
        (["--fill", "fp16.enabled=true", "--write", "nowhere/x.json"], "nowhere/x.json cannot be written"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"fp16": {"enabled": "auto"}, "gradient_clipping": 0.5}')
    with pytest.raises(SystemExit) as caught:
        main(["check", str(file), *arguments])
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_what_nobody_fills_in_is_a_mistake() -> None:
    text = (
        '{"gradient_clipping": 1, "zero_optimization": {"sub_group_size": "auto"}, "steps_per_print": "auto"}'
    )
    checked = check_text(text, 1)
    assert checked.tally == "2 mistakes" and not checked.remark
    assert all("neither Hugging Face's Trainer nor Accelerate fills in" in v.text for v in checked.printed)
    assert fill_text("[", {}) == "[" and auto_keys({"data_types": {"keep_in_fp32_modules": "auto"}}) == []
    with pytest.raises(ConfigError, match='no key of the configuration is "auto"'):
        fill_auto({"gradient_clipping": 1}, {"gradient_clipping": 2})


def test_the_stand_ins_are_the_defaults() -> None:
    """Those of optimizers and schedules have none here, and batch sizes no stand-in."""
    parts = {"offload_optimizer": OffloadOptimizerConfig(), "offload_param": OffloadParamConfig()}
    defaults = {entry.key: entry.value for entry in entries(Config(zero_optimization=ZeroConfig(**parts)))}
    others = [key for key, value in STAND_INS.items() if (value or 0) != (defaults.get(key) or 0)]
    assert [key for key in others if ".params." not in key] == ["zero_optimization.stage"]


def test_comments_and_keys_that_deepspeed_ignores_warn() -> None:
    config = {
        **{
            "_comment": {"by": "me"},
            "cuda_visible_devices": "0,1",
            "cuda_aware": False,
            "gradient_clipping": 1.0,
        },
        "zero_optimization": {"_why": 1},
    }
    warned = resolve(config, 1).warnings
    assert [each.split(" = ")[0] for each in warned] == [
        *("zero_optimization._why", "_comment", "cuda_visible_devices", "cuda_aware"),
    ]
    assert all("has no effect" in each for each in warned)
    kinds = {".".join(map(str, v.path)): v.kind for v in check_text(json.dumps(config), 1).verdicts}
    assert kinds["_comment.by"] == "unread" and kinds["cuda_aware"] == "no effect"


def tiny() -> nn.Module:
    """A model for `plan`."""
    return nn.Linear(64, 64)


def test_a_plan_says_what_it_assumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(FOUND["trainer_all"]))
    command = ["plan", "--model", f"{__name__}:tiny", "--config", str(file), "--world", "2", "--json"]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["parameters"] == 64 * 65 * 4
    assert 'remark: "auto" is planned as fp16.enabled=false, bf16.enabled=false, ' in shown.err
    assert "zero_optimization.reduce_bucket_size=500000000" in shown.err and "params" not in shown.err
    assert main([*command, "--fill", "bf16.enabled=true"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["parameters"] == 64 * 65 * 2 and "bf16" not in shown.err
    with pytest.raises(SystemExit):
        main([*command, "--fill", "stage=2"])
    assert "--fill stage: the configuration has no such key" in capsys.readouterr().err
