"""A checkpoint that somebody has made to do harm is an error; nothing in it is ever run or followed."""

import builtins
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_full
from tests.zero_full.checkpoint_runs import Layout, engine_of, go
from tests.zero_full.damaged import DATA, JSON, copied, forge, refusal, state_of

ALONE = Layout(1, 1)
TAG = "global_step1"
KEY = "parameters/first.weight"


def trained() -> zero_full.Engine:
    """An engine after a step."""
    torch.manual_seed(0)
    engine = engine_of(ALONE)
    go(engine, 0, range(1))
    return engine


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with all kinds of plain data, and traps beside it."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    numpy = pytest.importorskip("numpy")
    state = {
        "tensor": torch.arange(3),
        "array": numpy.arange(4),
        "tuple": (1, {2}),
        "half": torch.ones(2, 2).half(),
    }
    trained().save_checkpoint(folder, client_state=state)
    for name in ("evil.pt", "rank_00000.pkl", f"{TAG}/mp_rank_00_model_states.pt", f"{TAG}/rank_00001.json"):
        (folder / name).write_bytes(pickle.dumps(Trap()))
    return folder


class Trap:
    """Whoever unpickles this makes a folder."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("trap",)


def test_nothing_is_unpickled_or_run(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = trained()

    def refuses(*given: Any, **named: Any) -> None:
        raise AssertionError("code from a file would run")

    with monkeypatch.context() as patch:
        for place, name in (
            *((pickle, name) for name in ("load", "loads", "Unpickler", "_Unpickler")),
            *((builtins, name) for name in ("eval", "exec", "compile")),
            (torch, "load"),
            (os, "system"),
        ):
            patch.setattr(place, name, refuses)
        path, state = engine.load_checkpoint(saved)
    assert path is not None and state is not None and torch.equal(state["tensor"], torch.arange(3))


def told(value: Any) -> Callable[[Any], Any]:
    """Something else as the user's data."""
    return lambda whole: whole["plain"]["shared"]["client_state"].update(key=value)


def row(number: int, value: Any) -> Callable[[Any], Any]:
    """Another entry of a parameter's row: type, shape, start, elements, place."""
    return lambda whole: whole["tensors"][KEY].__setitem__(number, value)


def nested(levels: int, inner: Any = 0) -> Any:
    """Lists in lists."""
    for _ in range(levels):
        inner = [inner]
    return inner


def kind(name: Any, value: Any) -> Callable[[Any], Any]:
    """Data of a kind that JSON does not know."""
    return told({"~": name, "is": value})


def another(key: str) -> Callable[[Any], Any]:
    """A second row over the same bytes."""
    return lambda whole: whole["tensors"].update({key: whole["tensors"][KEY]})


HARM: dict[str, Callable[[Any], Any]] = {
    "an unknown kind": kind("pickle", "gASVCg=="),
    "a kind that is no text": kind([], 1),
    "a kind without a value": told({"~": "tuple"}),
    "a type that is a function": kind("dtype", "load"),
    "a type that is a module": kind("dtype", "serialization"),
    "a type by a path": kind("dtype", "nn.Module"),
    "a number of a type that is a function": kind("number", ["load", "1"]),
    "a number of a quantized type": kind("number", ["quint8", "1"]),
    "a number that is none": kind("number", ["float32", "__import__('os')"]),
    "a number beyond its type": kind("number", ["int32", "9" * 30]),
    "a number of too many digits": kind("number", ["int64", "9" * 10_000]),
    "a device that is none": kind("device", "cpu; rm -rf /"),
    "bytes that are none": kind("bytes", 5),
    "a set of lists": kind("set", [[1]]),
    "a dict with lists as keys": kind("dict", [[[1], 2]]),
    "a dict of no pairs": kind("ordered", [1, 2]),
    "a deque of a negative size": kind("deque", [-1, [1]]),
    "a size of texts": kind("size", ["a"]),
    "an array of objects": kind("array", ["|O", [1], "AAAAAAAAAAA="]),
    "an array of records": kind("array", ["f4,O", [1], "AAAAAAAAAAAAAAAA"]),
    "an array of a type that is no text": kind("array", [{"names": ["a"], "formats": ["O"]}, [1], "AA=="]),
    "an array of texts": kind("array", ["<U1", [1], "QQAAAA=="]),
    "an array of another size": kind("array", ["<f4", [1000], "AAAAAA=="]),
    "an array with a negative shape": kind("array", ["<f4", [-1, -1], "AAAAAA=="]),
    "an array that is not there": kind("array", None),
    "a tensor that is not there": kind("tensor", 99),
    "a tensor with a text for a number": kind("tensor", "0"),
    "data in too many lists": told(nested(150)),
    "data in very many lists": told(nested(800)),
    "no user's data": lambda whole: whole["plain"].pop("shared"),
    "numbers that are a list": lambda whole: whole["plain"].update(numbers=[1]),
    "aliases that are a number": lambda whole: whole["plain"]["shared"].update(aliases=7),
    "a tensor beyond the file": row(4, 1 << 40),
    "a tensor before the file": row(4, -8),
    "a tensor at a fraction": row(4, 1.5),
    "a tensor at a truth": row(4, True),
    "a tensor of very many elements": row(3, 1 << 62),
    "a tensor of negative elements": row(3, -1),
    "a tensor of fewer elements": row(3, 5),
    "a tensor of more elements": row(3, 90),
    "a tensor that begins later": row(2, 3),
    "a tensor that begins before": row(2, -3),
    "a shape that overflows": row(1, [1 << 40, 1 << 40]),
    "a shape that overflows to nothing": row(1, [1 << 32, 1 << 32]),
    "a shape with a negative size": row(1, [-7, -12]),
    "a shape of fractions": row(1, [8.4, 10]),
    "a shape of texts": row(1, ["84"]),
    "a shape that is a number": row(1, 84),
    "another shape": row(1, [12, 7]),
    "an unknown type": row(0, "F128"),
    "a type that is a list": row(0, []),
    "a type of whole numbers": row(0, "I32"),
    "a row that is short": lambda whole: whole["tensors"].update({KEY: ["F32"]}),
    "a tensor that the model lacks": another("parameters/other"),
    "a tensor that is missing": lambda whole: whole["tensors"].pop(KEY),
    "tensors that are a list": lambda whole: whole.update(tensors=[]),
    "fewer checksums": lambda whole: whole.update(blocks=[]),
    "more checksums": lambda whole: whole["blocks"].append(0),
    "checksums of texts": lambda whole: whole.update(blocks=["0"]),
    "an aside beyond the file": lambda whole: whole["aside"][0].__setitem__(2, 1 << 50),
    "an aside of a negative shape": lambda whole: whole["aside"][0].__setitem__(1, [-1, -3]),
    "an aside of a huge shape": lambda whole: whole["aside"][0].__setitem__(1, [1 << 31, 1 << 31, 4]),
    "an aside of an unknown type": lambda whole: whole["aside"][0].__setitem__(0, "load"),
    "asides that are a number": lambda whole: whole.update(aside=3),
    "random numbers' states of another size": lambda w: w["plain"]["private"]["random"].update(
        torch={"~": "tensor", "is": 0}
    ),
    "random numbers' states that are a text": lambda w: w["plain"]["private"]["random"].update(python="x"),
    "a schedule's state that is a list": lambda w: w["plain"]["shared"].update(lr_scheduler=[1]),
    "groups that are a text": lambda w: w["plain"]["shared"].update(groups="x"),
    "members that are a number": lambda w: w["plain"]["shared"].update(members=3),
    "groups of texts": lambda w: w["plain"]["shared"].update(groups=["x"]),
    "names that are a number": lambda w: w["plain"]["shared"].update(asleep=5),
    "counters that are a list": lambda w: w["plain"]["shared"].update(counters=[]),
    "no user's dict": lambda w: w["plain"]["shared"].update(client_state=[]),
    "a loss scale that is a list": lambda w: w["plain"]["shared"].update(scaler=[]),
    "buffers that are a list": lambda w: w["plain"]["private"].update(buffers=[1]),
    "a parameter's numbers that are a number": lambda w: w["plain"]["numbers"].update({KEY: 5}),
}
PLACES: dict[str, Callable[[Any], Any]] = {  # in the manifest
    "a rank that is a path": lambda told: told.update(ranks=["../../elsewhere/rank_00000"]),
    "a rank that is negative": lambda told: told.update(ranks=[-1]),
    "a rank twice": lambda told: told.update(ranks=[0, 0], about={"world_size": 2}),
    "a rank that is not there": lambda told: told.update(ranks=[0, 7], about={"world_size": 2}),
    "a rank that is a fraction": lambda told: told.update(ranks=[0.0]),
    "no ranks": lambda told: told.update(ranks=[], about={"world_size": 0}),
    "very many ranks": lambda told: told["about"].update(world_size=1 << 40),
    "ranks that are a number": lambda told: told.update(ranks=5),
    "files that are a list": lambda told: told.update(files=[]),
    "files without sizes": lambda told: told.update(files={DATA[0]: {}, JSON[0]: {}}),
    "a size that is huge": lambda told: told["files"][DATA[0]].update(bytes=1 << 60),
    "a time that is a text": lambda told: told.update(saved_at="now"),
    "another format": lambda told: told.update(format="another"),
    "another version": lambda told: told.update(version=2),
    "a version that is a list": lambda told: told.update(version=[1]),
    "nothing about it": lambda told: told.update(about=[]),
}


@pytest.fixture(scope="module")
def engine() -> zero_full.Engine:
    """One that loads all of them."""
    return trained()


def check_refused(engine: zero_full.Engine, folder: Path) -> None:
    """An error, soon, that names a file, and a run that stays as it is."""
    before, began = state_of(engine), time.monotonic()
    said = refusal(lambda: engine.load_checkpoint(folder))
    assert said and time.monotonic() - began < 5
    assert str(folder) in said or "in the checkpoint" in said, said
    assert state_of(engine) == before, said


@pytest.mark.parametrize("what", HARM)
def test_data_that_mean_harm_are_refused(
    engine: zero_full.Engine, saved: Path, tmp_path: Path, what: str
) -> None:
    folder = copied(saved, tmp_path / "run")
    forge(folder / TAG, HARM[what])
    check_refused(engine, folder)


@pytest.mark.parametrize("what", PLACES)
def test_manifests_that_mean_harm_are_refused(
    engine: zero_full.Engine, saved: Path, tmp_path: Path, what: str
) -> None:
    folder = copied(saved, tmp_path / "run")
    forge(folder / TAG, lambda whole: None, manifest=PLACES[what])
    check_refused(engine, folder)


def test_a_forged_checkpoint_without_harm_is_read(
    engine: zero_full.Engine, saved: Path, tmp_path: Path
) -> None:
    folder = copied(saved, tmp_path / "run")
    forge(folder / TAG, kind("tuple", [1, {"~": "dtype", "is": "bfloat16"}]))
    state = engine.load_checkpoint(folder)[1]
    assert state is not None and state["key"] == (1, torch.bfloat16)
