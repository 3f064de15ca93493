"""`python -m zero_full check`: a verdict on every key of a file, and the engine's own words for it."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zero_full.__main__ import main
from zero_full.check.check_command import check_file
from zero_full.config import check, resolve
from zero_full.config.json_parser import Parsed, parse
from zero_full.errors import ConfigError
from zero_full.plan import plan

FILES = sorted((Path(__file__).parent / "deepspeed_configs").glob("*.json"))  # as public scripts have them


def at(text: str, line: int, column: int) -> str:
    """What stands there."""
    return text.splitlines()[line - 1][column - 1 :]


def test_there_are_thirty_of_them() -> None:
    assert len(FILES) == 30


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_verdicts_are_the_engine_s_and_no_key_is_passed_over(path: Path) -> None:
    text = path.read_text()
    checked = check(text, None)
    told: dict[str, list[str]] = {"refused": [], "no effect": [], "assumed": []}
    for verdict in checked.verdicts:
        told.setdefault(verdict.kind, []).append(verdict.text)
    try:
        resolved = resolve(path, checked.world)
        assert sorted(resolved.warnings) == sorted(told["no effect"])
        assert list(resolved.assumed) == told["assumed"]
        assert told["refused"] == told.get("unfilled", []) == []
    except ConfigError as error:
        raised = told["refused"] + told.get("unfilled", [])
        assert all(text in str(error) for text in raised) and raised
        if checked.config is not None:
            assert len(str(error).splitlines()) == len(raised) + 1
    if checked.config is None:
        return
    seen = {verdict.path[:length] for verdict in checked.verdicts for length in range(len(verdict.path) + 1)}
    keys = {key for key in parse(text).positions if all(isinstance(name, str) for name in key)}
    assert keys <= seen
    for verdict in checked.verdicts:
        if verdict.path in keys and verdict.path:
            assert at(text, verdict.line, verdict.column).startswith(f'"{verdict.path[-1]}"')


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(), inside, max_size=3),
    max_leaves=9,
)


@given(value=values, indent=st.sampled_from([None, 0, 2]), in_ascii=st.booleans())
def test_the_parser_reads_what_json_writes(value: Any, indent: int | None, in_ascii: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=in_ascii)
    parsed = parse(text)
    assert parsed.value == value and not parsed.repeated
    keys_are_where_they_are_said_to_be(text, parsed)


def keys_are_where_they_are_said_to_be(text: str, parsed: Parsed) -> None:
    for path, place in parsed.positions.items():
        if path and isinstance(path[-1], str):
            start = at_offset(text, place.line, place.column)
            assert json.JSONDecoder().raw_decode(text, start)[0] == path[-1]


def at_offset(text: str, line: int, column: int) -> int:
    return sum(len(each) + 1 for each in text.split("\n")[: line - 1]) + column - 1


def checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str, *options: str
) -> tuple[int, str]:
    path = tmp_path / "ds.json"
    path.write_text(config)
    code = main(["check", str(path), *options])
    return code, capsys.readouterr().out.replace(str(path), "ds.json")


WARNED = """{ "gradient_clipping": 0.5,
  "train_batch_size": 16,
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
  "memory_breakdown": true, "zero_optimization": {"stage": 2, "sub_group_size": 5}
}"""
WRONG = """{
  "train_batch_size": 15,
  "optimizer": {"type": "adamw", "params": {"lr": 1e-3, "beta": 1, "eps": "auto", "betas": [0.9, 2]}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic", "warmup_min_lr": "x"}},
  "bf16": {"enabled": "true"}, "memory_breakdown": true
}"""


def test_warnings_are_ok(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = checked(tmp_path, capsys, WARNED, "--world", "8")
    assert code == 0 and printed.splitlines()[-1] == "ok, 2 warnings"
    assert "ds.json:4:3: warning: memory_breakdown = true has no effect: " in printed
    assert "ds.json:4:63: warning: zero_optimization.sub_group_size = 5 has no effect: only" in printed


def test_all_mistakes_are_told_at_once_also_those_that_torch_knows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed = checked(tmp_path, capsys, WRONG, "--world", "8")
    starts = [
        'ds.json: remark: "auto" is filled in by Hugging Face\'s Trainer: optimizer.params.eps. Without',
        "ds.json:1:1: warning: gradient_clipping is not in the configuration: ",
        "ds.json:2:3: mistake: train_batch_size: 15 is not a multiple of gradient_accumulation_steps 1 * ",
        "ds.json:3:57: mistake: optimizer.params.beta: AdamW has no such argument",
        "ds.json:3:83: mistake: optimizer.params.betas[1] must be a number from 0 up to",
        "ds.json:4:48: mistake: scheduler.params.warmup_type: warmup_type must be 'log' or 'linear'",
        "ds.json:4:72: mistake: scheduler.params.warmup_min_lr: warmup_min_lr must be a number",
        'ds.json:5:12: mistake: bf16.enabled: got "true", expected true or false',
        "ds.json:5:32: warning: memory_breakdown = true has no effect",
        "6 mistakes, 1 key to fill in, 2 warnings",
    ]
    lines = printed.splitlines()
    assert code == 1 and len(lines) == len(starts)
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True)), printed


@pytest.mark.parametrize(
    ("config", "mistake"),
    [
        ('{"optimizer": {"type": "AdamV"}}', "1:16: mistake: optimizer.type: no optimizer is named 'AdamV'"),
        (
            '{"optimizer": {"type": "OneBitAdam"}, "zero_optimization": {"stage": 2}}',
            "1:16: mistake: optimizer.type: OneBitAdam cannot run at stage 2",
        ),
        (
            '{"optimizer": {"type": "ZeroOneAdam"}, "zero_optimization": {"stage": 1, "mics_shard_size": 2}}',
            "1:16: mistake: optimizer.type: ZeroOneAdam does not support this run: it averages",
        ),
        (
            '{"optimizer": {"type": "LBFGS"}, "zero_optimization": {"stage": 1}}',
            "1:16: mistake: optimizer.type: LBFGS cannot step here: its step() needs a closure",
        ),
        (
            '{"optimizer": {"type": "SGD"}, "bf16": {"enabled": true, "bf16_master_weights_and_grads": true, '
            '"stochastic_rounding": true}}',
            "1:97: mistake: bf16.stochastic_rounding does not support",
        ),
        (
            '{"optimizer": {"type": "SparseAdam"}}',
            "1:16: mistake: optimizer.type: SparseAdam does not support dense gradients",
        ),
        ('{"scheduler": {"type": "Cosine"}}', "1:16: mistake: scheduler.type: no schedule is named 'Cosine'"),
        ("[]", "1:1: mistake: a configuration must be an object"),
        ('{"fp16": {"enabled": True}}', "1:22: mistake: this is not JSON: expected a value; write true"),
    ],
    ids=lambda text: text[:30],
)
def test_mistakes_that_stop_the_run_later_are_told_here(
    config: str, mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed = checked(tmp_path, capsys, config, "--world", "4")
    assert code == 1 and f"ds.json:{mistake}" in printed and "1 mistake" in printed.splitlines()[-1]


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("Muon", {}),
        ("AdamW", {"fused": True}),
        ("AdamW", {"capturable": True}),
        ("NAdam", {"capturable": True}),
    ],
)
def test_what_can_be_trained_is_ok_and_is_planned(kind: str, params: dict[str, Any], tmp_path: Path) -> None:
    """Muon must know the model; on tensors without values torch steps neither fused nor for a graph."""
    config = {"zero_optimization": {"stage": 2}, "gradient_clipping": 1}
    optimizer = {"type": kind, "params": {"lr": 1e-4}}
    expected = plan(nn.Linear(8, 8), {**config, "optimizer": optimizer}, 8)
    optimizer["params"] = {"lr": 1e-4, **params}
    (tmp_path / "ds.json").write_text(json.dumps({**config, "optimizer": optimizer}))
    assert check_file(tmp_path / "ds.json", 8).tally == "ok"
    planned = plan(nn.Linear(8, 8), {**config, "optimizer": optimizer}, 8)
    assert planned.moments == expected.moments > 0


def test_what_stops_a_run_on_several_ranks_is_told_unless_it_is_for_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"zero_optimization": {"stage": 2}, "gradient_clipping": 1, "optimizer": {"type": "Adafactor"}}
    code, printed = checked(tmp_path, capsys, json.dumps(config))
    assert code == 1 and "1 mistake on 1 rank" in printed
    assert "mistake: optimizer.type: on several ranks: Adafactor cannot step on pieces" in printed
    assert checked(tmp_path, capsys, json.dumps(config), "--world", "1") == (0, "ok\n")
    batch = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4}
    assert checked(tmp_path, capsys, json.dumps({**config, **batch}))[0] == 0


@pytest.mark.parametrize("groups", [{}, {"mics_shard_size": 8}, {"mics_shard_size": 500_000}])
def test_many_ranks_take_no_longer_than_few(groups: dict[str, int], tmp_path: Path) -> None:
    zero = {"stage": 3, "zero_hpz_partition_size": 4, **groups}
    batch = {"train_batch_size": 8e6, "train_micro_batch_size_per_gpu": 4.0, "gradient_accumulation_steps": 2}
    config = {**batch, "zero_optimization": zero, "gradient_clipping": 1, "optimizer": {"type": "AdamW"}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    begin = time.monotonic()
    found = check_file(path, None)
    assert (found.world, found.tally) == (1_000_000, "ok") and time.monotonic() - begin < 5
    path.write_text(json.dumps({**config, "optimizer": {"type": "Adafactor"}}))
    assert "optimizer.type: Adafactor cannot step on pieces" in check_file(path, None).printed[-1].text


def test_what_torch_was_not_asked_about_is_not_ok(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '{"optimizer": {"type": "AdamV", "params": {"lr": 1}}, "scheduler": {"type": "WarmupLR"}}'
    )
    kinds = {".".join(map(str, v.path)): v.kind for v in check_file(path, 2).verdicts}
    assert (kinds["optimizer.type"], kinds["optimizer.params.lr"]) == ("refused", "unread")
    assert kinds["scheduler.type"] == "ok"
    with pytest.raises(ConfigError, match="world_size: got 0"):
        check_file(path, 0)


def test_a_value_that_nobody_knows_is_no_reason_for_a_second_mistake() -> None:
    """What depends on a key that cannot be used is not judged."""
    config = {
        "fp16": {"enabled": "auto", "loss_scale": 0, "hysteresis": 3},
        "zero_optimization": {"stage": "2", "sub_group_size": 5, "offload_optimizer": {"device": "cpu"}},
    }
    verdicts = {v.path: v.kind for v in check(json.dumps(config), 2).verdicts}
    wrong = {("fp16", "enabled"): "unfilled", ("zero_optimization", "stage"): "refused"}
    assert {path: kind for path, kind in verdicts.items() if kind in wrong.values()} == wrong
    assert verdicts["fp16", "hysteresis"] == verdicts["zero_optimization", "sub_group_size"] == "ok"


def test_programs_get_every_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = checked(tmp_path, capsys, WARNED, "--json")
    answer = json.loads(printed)
    assert code == 0 and answer["world"] == 1 and answer["tally"] == "ok, 2 warnings"
    kinds = {".".join(each["path"]): each["kind"] for each in answer["verdicts"]}
    assert kinds["optimizer.params.lr"] == kinds["optimizer.type"] == "ok"
    assert kinds["memory_breakdown"] == "no effect" and len(kinds) == 7


def test_without_torch_it_says_what_it_has_not_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zero_full.check.dry_run", None)
    code, printed = checked(tmp_path, capsys, WARNED, "--world", "8")
    assert code == 0 and printed.splitlines()[-1] == "ok, 2 warnings, 2 keys not looked at"
    assert "ds.json:3:17: not looked at: optimizer.type: " in printed


def test_a_file_that_is_not_there_is_a_wrong_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["check", "nowhere.json"])
    assert caught.value.code == 2 and "there is no configuration file nowhere.json" in capsys.readouterr().err


def test_a_value_that_is_refused_is_not_also_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = {"type": "StepLR", "params": {"step_size": "auto", "gamma": 0.5}}
    optimizer = {"type": "AdamW", "params": {"lr": "auto"}}
    config = {"train_batch_size": 2, "gradient_clipping": 1, "optimizer": optimizer, "scheduler": schedule}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    assert main(["check", str(tmp_path / "ds.json"), "--world", "2"]) == 1
    said = capsys.readouterr().out
    assert said.endswith("\n1 mistake, 1 key to fill in\n") and "nor Accelerate fills in" in said
    schedule["params"].pop("step_size")  # type: ignore[attr-defined]
    (tmp_path / "ds.json").write_text(json.dumps(config))
    assert main(["check", str(tmp_path / "ds.json"), "--world", "2"]) == 1
    assert "step_size is missing" in capsys.readouterr().out
