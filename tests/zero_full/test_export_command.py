"""`python -m zero_full export`: any checkpoint as safetensors, in little memory, complete or not there."""

import errno
import json
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from tests.zero_full.memory_source import MemorySource, values_of_all_kinds
from zero_full.__main__ import main
from zero_full.checkpoint import consolidate, export_checkpoint, export_inspect, safetensors_writer
from zero_full.errors import CheckpointError
from zero_full.formatting import parse_size

DTYPES = {None: torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MemorySource:
    """What any folder is opened as."""
    about = {"world_size": 4, "stage": 3, "step": 20}
    made = MemorySource(tmp_path / "saved/step20", values_of_all_kinds(), about=about, frozen=["tied.frozen"])
    made.aliases = {"head": "words", "head.again": "words", "tied.frozen": "frozen.weight"}

    def open_checkpoint(folder: str | Path, tag: str | None) -> MemorySource:
        if tag not in (None, "step20"):
            raise CheckpointError(f"{folder} has no checkpoint {tag}; it has step20")
        return made

    monkeypatch.setattr(consolidate, "open_checkpoint", open_checkpoint)
    monkeypatch.setattr(export_inspect, "open_checkpoint", open_checkpoint)
    monkeypatch.setattr("zero_full.early_checks.check_checkpoint_folder", lambda folder: None)
    return made


def run(capsys: Capture, *arguments: object) -> tuple[int, str, str]:
    """(exit code, what is printed, what is complained of) of a command."""
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def everything_in(folder: Path) -> dict[str, Tensor]:
    return {
        k: v
        for file in sorted(folder.glob("*.safetensors"))
        for k, v in safetensors.torch.load_file(file).items()
    }


def wanted(source: MemorySource, dtype: torch.dtype, default: bool) -> dict[str, Tensor]:
    """What the files should hold, by name."""
    want = {}
    for key, value in source.values.items():
        kind, _, name = key.partition("/")
        if kind != "state":
            keeps = not value.is_floating_point() or (default and value.dtype == torch.float64)
            want[name] = value if keeps else value.to(dtype)
    return want


def assert_equal(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


# What is written ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", ["5GB", "300B"])
def test_every_parameter_and_buffer_is_in_the_files(
    tmp_path: Path, source: MemorySource, capsys: Capture, dtype: str | None, size: str
) -> None:
    chosen = [] if dtype is None else ["--dtype", dtype]
    code, out, err = run(capsys, "export", "saved", tmp_path / "out", "--max-shard-size", size, *chosen)
    assert (code, err) == (0, "") and source.closed == 1
    want = wanted(source, DTYPES[dtype], dtype is None)
    assert_equal(everything_in(tmp_path / "out"), want)
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == sorted(re.findall(r"-> .*/(\S+)$", out, re.MULTILINE))
    if size == "5GB":
        assert written == ["model.safetensors"]
    else:
        index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
        assert len(written) > 3 and index["weight_map"].keys() == want.keys()
    assert "frozen" not in out


@pytest.mark.parametrize("pieces", [1, 2, 7])
@pytest.mark.parametrize("chunk", [1, 8, 30, 10**6])
def test_chunks_and_pieces_leave_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: int, chunk: int
) -> None:
    monkeypatch.setattr(consolidate, "CHUNK", chunk)
    source, told = MemorySource(tmp_path, values_of_all_kinds(), pieces), []
    wish = consolidate.ExportOptions(torch.float32)
    exported = consolidate.consolidate(source, tmp_path / "out", wish, told.append)
    assert_equal(everything_in(tmp_path / "out"), wanted(source, torch.float32, False))
    assert source.largest <= max(chunk, 8)
    assert sum(told) == consolidate.size_to_read(source, wish)
    assert exported.nbytes == sum(v.nbytes for v in everything_in(tmp_path / "out").values())


def test_tied_weights_are_stored_once_and_named_in_the_header(tmp_path: Path, source: MemorySource) -> None:
    assert export_checkpoint("saved", tmp_path / "out").files == [tmp_path / "out/model.safetensors"]
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", **source.aliases}
    model = torch.nn.Module()
    model.words = torch.nn.Parameter(torch.zeros(11, 8))
    model.head = model.words
    missing, _ = safetensors.torch.load_model(model, tmp_path / "out/model.safetensors", strict=False)
    assert not missing and torch.equal(model.head, source.values["parameters/words"])


def test_frozen_parameters_can_be_left_out(tmp_path: Path, source: MemorySource, capsys: Capture) -> None:
    code, out, _ = run(capsys, "export", "saved", tmp_path, "--exclude-frozen", "--tag", "step20")
    assert code == 0 and "left out, because frozen: frozen.weight\n" in out
    want = wanted(source, torch.float32, True)
    del want["frozen.weight"]  # which the checkpoint calls frozen by its other name
    assert_equal(everything_in(tmp_path), want)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "tied.frozen" not in file.metadata()


def test_what_the_checkpoint_lacks_is_an_error_unless_it_is_not_wanted(
    tmp_path: Path, source: MemorySource, capsys: Capture
) -> None:
    source.shared["excluded"] = ["base.weight", "base.bias"]
    code, out, err = run(capsys, "export", "saved", tmp_path / "out")
    assert (code, out) == (1, "") and "frozen parameters base.weight, base.bias. --exclude-frozen" in err
    assert not (tmp_path / "out").exists()
    code, out, _ = run(capsys, "export", "saved", tmp_path / "out", "--exclude-frozen")
    assert code == 0 and "frozen: frozen.weight, base.weight, base.bias\n" in out


def test_what_is_no_tensor_is_told(tmp_path: Path, source: MemorySource, capsys: Capture) -> None:
    source.shared["others"] = {"body._extra_state": {"a": 1}}
    assert (
        "because no tensors (get_extra_state): body._extra_state\n" in run(capsys, "export", "x", tmp_path)[1]
    )
    assert export_checkpoint("x", tmp_path / "again").others == ["body._extra_state"]


def test_files_do_not_tell_in_which_order_tensors_were_stored(tmp_path: Path) -> None:
    values = {f"parameters/layers.{n}.weight": torch.full((3,), float(n)) for n in (2, 10, 1, 0)}
    values |= {"buffers/x": torch.ones(1), "parameters/a": torch.ones(1)}
    contents = []
    for name, keys in (("one", list(values)), ("other", list(values)[::-1])):
        source = MemorySource(tmp_path, {key: values[key] for key in keys})
        aliases = {"b.2": "a", "b.10": "a"}
        source.aliases = aliases if name == "one" else dict(reversed(aliases.items()))
        files = consolidate.consolidate(
            source, tmp_path / name, consolidate.ExportOptions(max_shard_bytes=25)
        ).files
        contents.append([file.read_bytes() for file in files])
    assert contents[0] == contents[1] and len(contents[0]) == 4
    weight_map = json.loads(contents[0][-1])["weight_map"]
    assert list(weight_map) == ["a", *(f"layers.{n}.weight" for n in (0, 1, 2, 10)), "x"]


# What is wrong -----------------------------------------------------------------------------------


def no_frozen(source: MemorySource, out: Path) -> None:
    del source.shared["frozen"]


def all_frozen(source: MemorySource, out: Path) -> None:
    source.shared["frozen"] = [key.partition("/")[2] for key in source.tensors]


def only_state(source: MemorySource, out: Path) -> None:
    source.tensors = {key: stored for key, stored in source.tensors.items() if key.startswith("state")}


def experts(source: MemorySource, out: Path) -> None:
    source.tensors["parameters@model1/words"] = source.tensors["parameters/words"]


def one_name(source: MemorySource, out: Path) -> None:
    source.tensors["buffers/words"] = source.tensors["parameters/words"]


def stored_twice(source: MemorySource, out: Path) -> None:
    source.aliases["scale"] = "words"


def unknown_type(source: MemorySource, out: Path) -> None:
    values = {"parameters/odd": torch.ones(2, dtype=torch.complex128)}
    source.tensors["parameters/odd"] = MemorySource(out, values).tensors["parameters/odd"]


def too_large(source: MemorySource, out: Path) -> None:
    source.values["parameters/words"][3, 3] = -70000.0


def flipped(source: MemorySource, out: Path) -> None:
    source.damaged["parameters/words", 40] = "rank2.bin is damaged: its checksum differs"


def is_file(source: MemorySource, out: Path) -> None:
    out.touch()


def below_file(source: MemorySource, out: Path) -> None:
    out.parent.joinpath("file").touch()


def exists(source: MemorySource, out: Path) -> None:
    out.mkdir()
    (out / "model.safetensors").write_text("precious")


def exists_in_pieces(source: MemorySource, out: Path) -> None:
    out.mkdir()
    (out / "model-00001-of-00002.safetensors").write_text("precious")


def nothing(source: MemorySource, out: Path) -> None:
    """The arguments alone are wrong."""


WRONG: dict[str, tuple[Callable[[MemorySource, Path], None], str, str]] = {
    "nobody knows what is frozen": (
        no_frozen,
        "--exclude-frozen",
        "does not say which parameters are frozen",
    ),
    "all is frozen": (all_frozen, "--exclude-frozen", "step20 has nothing to export: .* frozen"),
    "no parameters": (only_state, "", "has nothing to export: it has no parameters"),
    "experts": (experts, "", r"has experts .* \(parameters@model1/words\): .*module_state_dict\(\)"),
    "one name": (one_name, "", "has buffers/words and parameters/words, which have the same name"),
    "tied and stored": (stored_twice, "", "stores scale, but says"),
    "unknown type": (unknown_type, "", "odd is torch.complex128, which safetensors does not support"),
    "too large": (
        too_large,
        "--dtype fp16",
        r"words has values as large as 7e\+04, which overflow torch.float16",
    ),
    "flipped byte": (flipped, "", "rank2.bin is damaged: its checksum differs"),
    "a file": (is_file, "", "out is a file name"),
    "below a file": (below_file, "OUT/file/new", "Not a directory"),
    "a file's name": (nothing, "OUT/new.safetensors", "new.safetensors is a file name"),
    "exists": (exists, "", "model.safetensors exists already. Export into another folder"),
    "exists in pieces": (exists_in_pieces, "", "model-00001-of-00002.safetensors exists already"),
    "unknown tag": (nothing, "--tag step7", "saved has no checkpoint step7; it has step20"),
}


@pytest.mark.parametrize("how", WRONG)
def test_what_is_wrong_is_one_sentence_and_nothing_is_written(
    tmp_path: Path, source: MemorySource, capsys: Capture, how: str
) -> None:
    spoil, more, want = WRONG[how]
    out = tmp_path / "out"
    spoil(source, out)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    words = more.replace("OUT", str(tmp_path)).split()
    place = [words.pop(0)] if words and not words[0].startswith("--") else [out]
    code, printed, err = run(capsys, "export", "saved", *place, *words)
    assert (code, printed) == (1, "") and re.fullmatch(f"error: .*{want}.*\n", err), err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_disk_that_is_full_leaves_nothing(tmp_path: Path, source: MemorySource, capsys: Capture) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
    try:
        code, _, err = run(capsys, "export", "saved", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 1 and re.fullmatch(
        r"error: \S+model.safetensors.part: File too large while writing \S+\n", err
    )
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_told_before_anything_is_read(
    tmp_path: Path, source: MemorySource, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Room:
        total, free = 10**6, 100

    monkeypatch.setattr(consolidate, "disk_usage", lambda path: Room)
    code, _, err = run(capsys, "export", "saved", tmp_path / "a/b")
    assert code == 1 and source.largest == 0
    assert re.search(rf"the export needs 1.\d\d kB, but {tmp_path} has only 100 B", err)
    monkeypatch.setattr(Room, "total", 0)  # a file system that does not know
    assert run(capsys, "export", "saved", tmp_path / "a/b")[0] == 0


def test_a_folder_that_may_not_be_written(
    tmp_path: Path, source: MemorySource, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> None:  # the tests may run as root, whom no permission stops
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(safetensors_writer, "new_part", refused)
    code, _, err = run(capsys, "export", "saved", tmp_path)
    assert (code, err) == (1, f"error: {tmp_path}/model.safetensors: Read-only file system\n")


def test_an_export_that_is_interrupted_leaves_nothing(
    tmp_path: Path, source: MemorySource, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors_writer.WeightFiles, "write_part", interrupted)
    code, _, err = run(capsys, "export", "saved", tmp_path)
    assert (code, err) == (130, "interrupted\n") and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", ["5XB", "0", "-1GB", "GB", "", "1e9", "9" * 400])
def test_a_size_that_is_none_is_told(capsys: Capture, size: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["export", "saved", "out", f"--max-shard-size={size}"])
    assert caught.value.code == 2 and "write it as in 5GB, 500MB or 2GiB" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["export", "saved", "out", "--max-shard-size=5"])  # bytes would be a file for each tensor
    assert "--max-shard-size 5 has no unit: write it as in 5GB" in capsys.readouterr().err


def test_sizes_are_what_people_write() -> None:
    sizes = {"5GB": 5 * 10**9, "1.5 gib": 1.5 * 2**30, "200k": 200_000, "4096": 4096, " 7 B ": 7}
    assert {text: parse_size(text) for text in sizes} == sizes


def test_wishes_that_make_no_sense() -> None:
    for wrong in ({"dtype": torch.int8}, {"max_shard_bytes": 0}):
        with pytest.raises(ValueError, match="must be positive and dtype floating-point"):
            export_checkpoint("saved", "nowhere", **wrong)


def test_what_is_quick_says_nothing(tmp_path: Path, source: MemorySource, capsys: Capture) -> None:
    assert run(capsys, "export", "saved", tmp_path)[2] == ""
