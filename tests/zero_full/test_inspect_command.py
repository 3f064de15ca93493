"""`python -m zero_full inspect`: what is in a checkpoint, what lies beside it, and whether it is whole."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.zero_full.memory_source import MemorySource, values_of_all_kinds
from zero_full.__main__ import main
from zero_full.checkpoint import export_inspect
from zero_full.checkpoint.inspection import MOST, Neighbours, neighbours
from zero_full.errors import CheckpointError

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with two checkpoints and what is left of two saves."""
    for name in ("step10", "step20", "partial-0f0f0f0f-x", "replaced-1e1e1e1e-x", ".hidden"):
        (tmp_path / "saved" / name).mkdir(parents=True)
    (tmp_path / "saved/latest").write_text("step20\n")
    return tmp_path / "saved"


@pytest.fixture
def source(root: Path, monkeypatch: pytest.MonkeyPatch) -> MemorySource:
    """What any folder is opened as."""
    about = {
        "world_size": 4,
        "stage": 3,
        "step": 20,
        "tag": "step20",
        "types": ["bf16", "fp32"],
        "torch": None,
    }
    made = MemorySource(
        root / "step20",
        values_of_all_kinds(),
        about=about,
        frozen=["frozen.weight"],
        excluded=["base.weight"],
        scaler=None,
        counters={"micro": 3},
    )
    made.aliases = {"head": "words", "other": "words"}
    made.savers = range(4)
    monkeypatch.setattr(export_inspect, "open_checkpoint", lambda folder, tag: made)
    monkeypatch.setattr("zero_full.early_checks.check_checkpoint_folder", lambda folder: None)
    return made


def run(capsys: Capture, *arguments: object) -> tuple[int, str, str]:
    """(exit code, what is printed, what is complained of) of a command."""
    code = main(["inspect", *(str(argument) for argument in arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_table_says_what_there_is(
    root: Path, source: MemorySource, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    code, out, err = run(capsys, root)
    assert (code, err, source.closed) == (0, "", 1)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == str(root / "step20")
    for want in [
        *("written by a test", "tag step20", "world size 4", "stage 3", "step 20", "latest step20"),
        *("types bf16, fp32", "torch unknown", "also here step10"),
        "unfinished partial-0f0f0f0f-x, replaced-1e1e1e1e-x: saves in progress or interrupted",
        "left out the frozen parameters base.weight",
        "also in it counters",
        "tensors elements size bytes",
        "parameters 6 262 940 B 940",
        "buffers 4 19 86 B 86",
        "state/exp_avg 1 88 352 B 352",
        "state/exp_avg_sq 1 88 352 B 352",
        "together 12 457 1.73 kB 1,730",
        "words 11 x 8 float32 352 B also head, also other",
        "frozen.weight 8 x 8 bfloat16 128 B frozen",
        "scale one number float32 4 B",
        "empty 0 x 3 float32 0 B",
        "mask 2 bool 2 B",
    ]:
        assert want in lines, (want, out)
    assert lines.count("tag step20") == 1
    assert "DAMAGED" not in out and "verified" not in out  # nobody has looked


@pytest.mark.parametrize("width", [60, 80])
def test_a_table_is_as_wide_as_the_terminal(
    width: int, root: Path, source: MemorySource, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(100, 112):
        (root / f"step{number}").mkdir()
    words = []
    for columns in (1000, width):
        monkeypatch.setenv("COLUMNS", str(columns))
        _, out, _ = run(capsys, root)
        words.append(sorted(out.split()))
    assert words[0] == words[1]
    assert not [line for line in out.splitlines()[1:] if len(line) > width]


def test_sums_are_texts_in_a_narrow_terminal(
    root: Path, source: MemorySource, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    _, out, _ = run(capsys, root)
    assert re.search(r"\n  together +tensors \d", out)
    assert not [line for line in out.splitlines()[1:] if len(line) > 40]


def test_json_is_one_line_with_the_same(root: Path, source: MemorySource, capsys: Capture) -> None:
    code, out, _ = run(capsys, root, "--json")
    assert code == 0 and out.count("\n") == 1
    told = json.loads(out)
    assert told["path"] == str(root / "step20") and told["written_by"] == "a test"
    assert told["about"] == source.shared["about"]
    beside = {key: told[key] for key in ("tag", "latest", "also_here", "unfinished")}
    assert beside == {
        **{"tag": "step20", "latest": "step20"},
        **{"also_here": ["step10"], "unfinished": ["partial-0f0f0f0f-x", "replaced-1e1e1e1e-x"]},
    }
    sizes = {key: value.nbytes for key, value in source.values.items()}
    for kind, sums in told["totals"].items():
        mine = [key for key in sizes if key.startswith(f"{kind}/")]
        elements = sum(source.values[key].numel() for key in mine)
        assert sums == {
            "tensors": len(mine),
            "elements": elements,
            "bytes": sum(sizes[key] for key in mine),
        }
    assert told["tensors"]["parameters"]["words"] == {"shape": [11, 8], "dtype": "float32", "bytes": 352}
    assert told["tied"] == source.aliases and told["frozen"] == ["frozen.weight"]
    assert told["excluded"] == ["base.weight"] and (told["verified"], told["wrong"]) == (False, [])


def test_parts_of_experts_are_shown_apart(root: Path, source: MemorySource, capsys: Capture) -> None:
    for kind in ("parameters@model1", "state@model1/exp_avg"):
        source.tensors[f"{kind}/words"] = source.tensors["parameters/words"]
    totals = json.loads(run(capsys, root, "--json")[1])["totals"]
    assert {"parameters", "parameters@model1", "state/exp_avg", "state@model1/exp_avg"} <= totals.keys()


# Verifying ---------------------------------------------------------------------------------------


def test_what_is_whole_is_verified(root: Path, source: MemorySource, capsys: Capture) -> None:
    code, out, _ = run(capsys, root, "--verify")
    assert code == 0 and out.endswith("\n\nverified: 1.73 kB can be read and are what was written\n")
    told = json.loads(run(capsys, root, "--verify", "--json")[1])
    assert (told["verified"], told["wrong"]) == (True, [])


@pytest.mark.parametrize(
    "place", [("parameters/words", 87), ("state/exp_avg_sq/words", 0), ("buffers/count", 0)]
)
def test_every_piece_is_verified(
    root: Path, source: MemorySource, capsys: Capture, place: tuple[str, int]
) -> None:
    source.damaged[place] = "rank2.bin: its checksum differs"
    source.damaged["private", 3] = "rank3.json is missing"
    code, out, _ = run(capsys, root, "--verify")
    assert code == 1
    assert out.endswith("\n\nDAMAGED:\n  rank2.bin: its checksum differs\n  rank3.json is missing\n")
    assert run(capsys, root)[0] == 0
    code, out, _ = run(capsys, root, "--verify", "--json")
    assert code == 1 and json.loads(out)["wrong"] == [
        "rank2.bin: its checksum differs",
        "rank3.json is missing",
    ]


def test_what_is_wrong_is_told_once_and_long_lists_are_cut(
    root: Path, source: MemorySource, capsys: Capture
) -> None:
    values = {f"parameters/{n}": torch.ones(4) for n in range(2 * MOST)}
    source.tensors = MemorySource(root, values).tensors
    source.damaged = {(key, element): "a.bin is short" for key in values for element in (0, 3)}
    assert run(capsys, root, "--verify")[1].count("a.bin is short") == 1
    source.damaged = {(key, 0): f"{key} is short" for key in values}
    out = run(capsys, root, "--verify")[1]
    assert out.count("is short") == MOST and out.endswith(f"  and {MOST} more\n")


def test_a_disk_that_fails_is_told_like_damage(
    root: Path, source: MemorySource, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*given: Any) -> None:
        raise OSError(5, "Input/output error", "rank1.bin")

    monkeypatch.setattr(source, "verify", failing)
    code, out, _ = run(capsys, root, "--verify")
    assert code == 1 and out.endswith("DAMAGED:\n  [Errno 5] Input/output error: 'rank1.bin'\n")


# Places ------------------------------------------------------------------------------------------


def test_neighbours_are_those_of_the_folder_that_was_given(root: Path) -> None:
    saves = ["partial-0f0f0f0f-x", "replaced-1e1e1e1e-x"]
    both = Neighbours("step20", ["step10"], saves)
    assert neighbours(root, root / "step20") == both
    assert neighbours(root / "step20", root / "step20") == both
    assert neighbours(root, None) == Neighbours("step20", ["step10", "step20"], saves)
    assert neighbours(root / "gone", None) == Neighbours()
    (root / "latest").unlink()
    assert neighbours(root / "step20", root / "step20") == Neighbours()  # these may be anything
    (root / "latest_universal").write_text("step20")
    assert neighbours(root / "step20", root / "step20") == both
    (root / "latest_universal").write_bytes(b"\xff\xff")
    assert neighbours(root, root / "step20") == Neighbours(None, ["step10"], saves)


@pytest.mark.parametrize("options", [[], ["--json"], ["--verify"]])
def test_what_cannot_be_opened_is_told_with_what_is_there(
    root: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    def open_checkpoint(folder: Path, tag: str | None) -> None:
        raise CheckpointError(f"{folder} has no complete checkpoint {tag}")

    monkeypatch.setattr(export_inspect, "open_checkpoint", open_checkpoint)
    monkeypatch.setattr("zero_full.early_checks.check_checkpoint_folder", lambda folder: None)
    code, out, err = run(capsys, root, "--tag", "step7", *options)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {root} has no complete checkpoint step7\n")
    assert "step10, step20" in err and "partial-0f0f0f0f-x, replaced-1e1e1e1e-x" in err


def test_a_folder_that_may_not_be_read(root: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_checkpoint(folder: Path, tag: str | None) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(export_inspect, "open_checkpoint", open_checkpoint)
    monkeypatch.setattr("zero_full.early_checks.check_checkpoint_folder", lambda folder: None)
    assert run(capsys, root) == (1, "", f"error: {root}: Permission denied\n")


def test_names_cannot_command_the_terminal(root: Path, source: MemorySource, capsys: Capture) -> None:
    name = "a\x1b[2J\r\udc80é"
    source.tensors[f"parameters/{name}"] = source.tensors["parameters/words"]
    source.damaged["parameters/words", 0] = "file\x07 is damaged"
    out = run(capsys, root, "--verify")[1]
    assert r"a\x1b[2J\r\udc80é" in out and r"file\x07 is damaged" in out
    assert not set(out) & set("\x1b\r\x07")
    assert name in json.loads(run(capsys, root, "--json")[1])["tensors"]["parameters"]


def test_a_reader_that_has_seen_enough_is_no_traceback(
    root: Path, source: MemorySource, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stdout:  # as it closes, it would write what is left, and fail again
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["inspect", str(root)]) == 1
        stdout.write("more")
    assert capsys.readouterr().err == ""


def test_help_says_what_the_commands_do(capsys: Capture) -> None:
    for name, words in {"export": ["fp32 master weights", "5GB"], "inspect": ["checksums", "JSON"]}.items():
        with pytest.raises(SystemExit) as caught:
            main([name, "--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert caught.value.code == 0 and all(re.search(word, text) for word in words)
