"""`python -m zero_full migrate`: a script with our names, nothing else changed, and what is left to do."""

import ast
import difflib
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch.distributed as dist

import zero_full
from zero_full.__main__ import main
from zero_full.config import implied_world
from zero_full.examples import from_deepspeed
from zero_full.migrate import check, migrate
from zero_full.migrate import name_table as names

SCRIPTS = Path(__file__).with_name("deepspeed_scripts")
WAS = ("import zero_full as deepspeed  # was: import deepspeed", "import deepspeed")


def parts(name: str) -> tuple[str, str, list[str]]:
    """A script, what becomes of it, and how what is left to do begins."""
    script, expected, findings = (SCRIPTS / f"{name}.txt").read_text().split("=====\n")
    return script, expected, findings.splitlines()


def test_what_is_here_is_not_called_missing() -> None:
    ours = set(zero_full.__all__)
    assert [path for path in names.INSTEAD if path.rpartition(".")[2] in ours] == []


def test_an_optimizer_that_has_not_landed_is_told_before_the_run() -> None:
    errors, _ = check({"train_batch_size": 1, "optimizer": {"type": "MuAdam", "params": {}}}, 1)
    assert errors == ["optimizer.type: zero_full does not have MuAdam yet. The nearest is Adam"]


@pytest.mark.parametrize("ends", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("name", sorted(path.stem for path in SCRIPTS.iterdir()))
def test_scripts_become_what_is_expected(name: str, ends: str) -> None:
    script, expected, findings = (
        part.replace("\n", ends) if isinstance(part, str) else part for part in parts(name)
    )
    made = migrate(str(script))
    assert made.result == expected, "\n".join(
        difflib.ndiff(str(expected).split(ends), made.result.split(ends))
    )
    said = [f"{finding.line}: {finding.text}" for finding in made.findings]
    assert len(said) == len(findings), said
    assert [text[: len(start)] for text, start in zip(said, findings, strict=True)] == findings
    ast.parse(made.result)
    assert migrate(made.result).result == made.result
    lines = made.result.split(ends)
    for finding in made.findings:
        assert difflib.get_close_matches(
            str(script).split(ends)[finding.line - 1], [lines[made.moved(finding.line) - 1]]
        )


def test_an_import_that_may_never_be_run_is_a_remark() -> None:
    script, _, _ = parts("branches")
    said = [(remark.line, remark.text.partition(" has no")[0]) for remark in migrate(script).remarks]
    moe, pipe = (
        "deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer",
        "deepspeed.runtime.pipe",
    )
    expected = [
        (11, moe),
        (13, f"{pipe}.PipelineModule"),
        (13, f"{pipe}.ProcessTopology"),
        (22, "deepspeed.moe.layer"),
    ]
    assert said == expected
    text = migrate(script).remarks[0].text
    assert "This import stays, and fails if it is run. Instead: write the layer in plain torch" in text


def test_the_example_goes_back_and_forth() -> None:
    ours = Path(from_deepspeed.__file__).read_text()
    assert WAS[0] in ours
    theirs = ours.replace(*WAS)
    made = migrate(theirs)
    assert made.findings == [] and made.remarks == []
    assert made.result == ours.replace(WAS[0], "import zero_full").replace("deepspeed.init", "zero_full.init")


def test_every_name_of_the_table_is_there() -> None:
    for old, new in names.NAMES.items():
        module, _, name = new.rpartition(".")
        assert hasattr(import_module(module), name), new
        assert names.target_of(old) == new
    assert not [name for name in names.NOT_IN_TORCH if hasattr(dist, name)]
    for alias, path in names.ALIASES.items():
        assert names.target_of(path), alias
    known = {*names.NAMES, *names.MODULES}
    assert not known & names.INSTEAD.keys() - {
        "deepspeed",
        "deepspeed.accelerator",
        "deepspeed.comm",
        "deepspeed.ops.adam",
        "deepspeed.runtime.lr_schedules",
    }


def test_what_is_written_can_be_run_and_keeps_everything_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    source = "# -*- coding: latin-1 -*-\nimport deepspeed\ns = 'é'\nprint(deepspeed.zero.Init.__name__, s)"
    script.write_bytes(source.encode("latin-1"))
    script.chmod(0o751)
    (tmp_path / "link.py").symlink_to("train.py")
    assert main(["migrate", str(script)]) == 0
    assert script.read_bytes() == source.encode("latin-1")
    printed = capsys.readouterr().out
    assert "-import deepspeed\n" in printed and "+import zero_full\n" in printed
    assert printed.endswith("nothing left to do by hand\n")
    assert main(["migrate", "--write", str(tmp_path / "link.py")]) == 0
    assert (tmp_path / "link.py").is_symlink() and script.stat().st_mode & 0o777 == 0o751
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.py", "train.py"]
    env = {**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env, check=False)
    assert done.stdout == "Init é\n", done.stderr
    capsys.readouterr()
    assert main(["migrate", str(script)]) == 0
    assert "no name to change" in capsys.readouterr().out


def test_configurations_are_checked_for_the_ranks_they_were_written_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(
        '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "aio": {"queue_depth": 4}, /* x */ }'
    )
    bad.write_text(json.dumps({"train_batch_size": 6, "amp": {"enabled": True}, "zero_optimisation": {}}))
    assert main(["migrate", str(good)]) == 0
    printed = capsys.readouterr().out
    assert (
        f"{good}: no mistake found on 8 ranks" in printed
        and f"{good}:1: remark: aio.queue_depth = " in printed
    )
    assert f"{good}:1: remark: gradient_clipping is not in the configuration" in printed
    assert main(["migrate", str(good), str(bad)]) == 1
    printed = capsys.readouterr().out
    assert f"{bad}:1: amp.enabled = true is not supported: DeepSpeed removed it in 0.19.8" in printed
    assert f"{bad}:1: zero_optimisation: unknown key" in printed and printed.endswith(
        "2 left to do by hand\n"
    )
    assert main(["migrate", "--world", "5", str(good)]) == 1
    assert "64 is not a multiple of" in capsys.readouterr().out
    bad.write_text("{")
    assert main(["migrate", str(bad)]) == 1
    assert f"{bad}:1: this is not JSON" in capsys.readouterr().out


def test_ranks_are_guessed_from_what_a_configuration_says() -> None:
    assert implied_world({"zero_optimization": {"mics_shard_size": 4}}) == 4
    assert implied_world({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}) == 1
    assert implied_world({"train_batch_size": "auto", "zero_optimization": 3}) == 1
    assert implied_world([1]) == 1
    batch = {"train_batch_size": 3.2e7, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    assert implied_world(batch) == 8_000_000
    assert implied_world({**batch, "train_batch_size": 32.5}) == 1
    assert check({"fp16": {"enabled": True}}, None) == ([], [])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.py", b"def f(:\n", "a.py, line 1: not valid Python"),
        ("a.py", b"\0", "a.py: not valid|a.py, line"),
        ("a.py", b"\xff\xfe", "a.py cannot be read"),
        ("a.py", None, "a.py cannot be read: .*No such file"),
        ("a.json", None, "there is no configuration file"),
        ("a.ipynb", b"{}", "a.ipynb: expected a script"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_wrong_argument(
    name: str, content: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit) as caught:
        main(["migrate", str(tmp_path / name)])
    assert caught.value.code == 2
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))
