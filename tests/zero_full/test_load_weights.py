"""load_weights: each rank reads its rows; any world, stage and precision; what is wrong changes nothing."""

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import run_in
from tests.zero_full.exported import BF16, Other, Untied, Zoo, engine_of, failure_of_load, masters, save
from tests.zero_full.runs import assert_same
from zero_full.checkpoint import load_weights, save_weights, weights

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A folder with another model's weights, written without zero_full."""
    safetensors.torch.save_model(Other(), str(tmp_path / ONE_FILE))
    return tmp_path


# What is right -----------------------------------------------------------------------------------


def load(comm: Any, path: Path, stage: int, keys: Any) -> dict[str, dict[str, Tensor]]:
    """Train, load, and step once without moving: what is not in the masters would not survive that."""
    engine = engine_of(stage, keys, steps=1)
    optimizer = engine.optimizer
    assert load_weights(engine.module, optimizer, path) == ([], [])
    loaded = {"values": engine.module_state_dict(), "masters": masters(engine)}
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    engine.module.eval()  # no running statistics
    engine.backward(engine(torch.arange(6)))
    engine.step()
    return {**loaded, "after": engine.module_state_dict()}


@pytest.mark.rotates
@pytest.mark.pairwise
@pytest.mark.parametrize("saved_by", [(3, 3, {}), (2, 2, BF16)], ids=str)
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 2, 3])
@pytest.mark.parametrize(("world_size", "keys"), [(1, {}), (2, BF16), (4, {})], ids=str)
def test_weights_load_at_any_world_stage_and_precision(
    tmp_path: Path, saved_by: Any, stage: int, world_size: int, keys: Any
) -> None:
    from_stage, from_world, from_keys = saved_by
    want = run_in("processes", save, from_world, tmp_path, from_stage, from_keys)[0]
    dtype = torch.bfloat16 if keys else torch.float32
    rounded = {n: t.to(dtype) if t.is_floating_point() else t for n, t in want.items()}
    for found in run_in("processes", load, world_size, tmp_path, stage, keys):
        assert_same(found["values"], rounded)
        assert_same(found["after"], rounded)
        assert_same(found["masters"], {n: want[n].float() for n in found["masters"]})


@pytest.mark.parametrize("place", ["", INDEX])
def test_several_files_load_from_their_folder_or_index(tmp_path: Path, place: str) -> None:
    want = run_in("processes", save_in_pieces, 2, tmp_path)[0]
    for found in run_in("processes", load, 3, tmp_path / place, 3, {}):
        assert_same(found["values"], want)


def save_in_pieces(comm: Any, folder: Path) -> dict[str, Tensor]:
    return save(comm, folder, 3, {}, max_shard_bytes=400)


def load_options(comm: Any, path: Path, kind: str) -> tuple[dict[str, Tensor], Any, Tensor]:
    model = {"untied": Untied, "partial": Zoo, "renamed": Zoo}[kind]
    engine = engine_of(3, {}, model)

    def names(name: str) -> str | None:
        return None if name.startswith("frozen") else f"model.{name}"

    options: dict[str, Any] = {"partial": {"strict": False}, "renamed": {"names": names}}.get(kind, {})
    with zero_full.GatheredParameters([engine.module.words.weight], modifier_rank=0):
        unmatched = load_weights(engine.module, engine.optimizer, path, **options)
        shown = engine.module.words.weight.detach().clone()
    return engine.module_state_dict(), unmatched, shown


def test_the_engine_takes_what_the_functions_take() -> None:
    for name, function in {"save_weights": save_weights, "load_weights": load_weights}.items():
        mine = inspect.signature(getattr(zero_full.Engine, name)).parameters
        theirs = inspect.signature(function).parameters
        assert [*mine.values()][1:] == [*theirs.values()][2:] and len(mine) >= 4, name


def test_tied_weights_load_into_two_parameters(plain: Path) -> None:
    want = Other().state_dict()
    for found, _, shown in run_in("processes", load_options, 2, plain, "untied"):
        assert_same(found, want)
        assert torch.equal(shown, want["words.weight"])  # what was gathered shows the new values


def test_what_does_not_match_may_be_left_alone(tmp_path: Path) -> None:
    given = {"scale": torch.tensor(7.0), "body.0.weight": torch.ones(13, 8), "extra": torch.ones(1)}
    safetensors.torch.save_file(given, tmp_path / ONE_FILE)
    mine = Zoo().state_dict()
    for found, unmatched, _ in run_in("processes", load_options, 2, tmp_path, "partial"):
        assert unmatched.missing == [name for name in mine if name not in given]
        assert unmatched.unexpected == ["extra"]
        assert_same(found, {name: given.get(name, value) for name, value in mine.items()})


def test_names_are_translated(tmp_path: Path) -> None:
    theirs, mine = Other().state_dict(), Zoo().state_dict()
    kept = {f"model.{n}": t.clone() for n, t in theirs.items() if not n.startswith("frozen")}
    safetensors.torch.save_file(kept, tmp_path / ONE_FILE)
    for found, _, _ in run_in("processes", load_options, 2, tmp_path, "renamed"):
        assert_same(found, {n: (mine if n.startswith("frozen") else theirs)[n] for n in mine})


def load_between_forward_and_backward(comm: Any, path: Path) -> dict[str, Tensor]:
    zero = {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}
    engine = engine_of(3, {"zero_optimization": {**zero, "stage3_max_reuse_distance": 0}}, steps=1)
    loss = engine(torch.arange(6))
    assert any(values.node_copy is not None for values in engine.optimizer.sharded.flats)
    load_weights(engine.module, engine.optimizer, path)
    del loss
    return engine.module_state_dict()


def test_second_slices_are_not_kept(plain: Path) -> None:
    for found in run_in("processes", load_between_forward_and_backward, 4, plain):
        assert_same(found, Other().state_dict())


# Only what is needed -----------------------------------------------------------------------------


class Wide(nn.Module):
    """Rows of all kinds of lengths, and one that all ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.line = nn.Parameter(torch.rand(64, 96)), nn.Parameter(torch.rand(1, 1, 4000))
        self.layers = nn.Sequential(*(nn.Linear(32, 40) for _ in range(4)))


def share_read(comm: Any, path: Path, stage: int) -> float:
    engine, given, read = engine_of(stage, {}, Wide), list[int](), weights._read

    def counting(stored: Any, start: int, stop: int) -> Tensor:
        given.append(stop - start)
        return read(stored, start, stop)

    weights._read = counting
    try:
        load_weights(engine.module, engine.optimizer, path)
    finally:
        weights._read = read
    return sum(given) / sum(p.numel() for p in engine.module.parameters())


@pytest.mark.parametrize(("stage", "share"), [(0, 1.0), (1, 0.25), (3, 0.25)])
def test_each_rank_reads_about_what_it_owns(tmp_path: Path, stage: int, share: float) -> None:
    safetensors.torch.save_file(Wide().state_dict(), tmp_path / ONE_FILE)
    shares = run_in("processes", share_read, 4, tmp_path, stage)
    assert max(shares) < share + 0.03 and sum(shares) >= 4 * share - 0.05, shares


# What is wrong -----------------------------------------------------------------------------------


def spoil(folder: Path, how: str) -> Path:
    """A path that cannot be loaded."""
    file, state = folder / ONE_FILE, {n: t.clone() for n, t in Other().state_dict().items()}
    if how == "missing":
        del state["body.0.bias"]
    elif how == "unexpected":
        state["head.bias"] = torch.ones(3)
    elif how == "shape":
        state["body.0.weight"] = torch.ones(13, 9)
    elif how == "integers":
        state["frozen.weight"] = torch.ones(8, 8, dtype=torch.int8)
    safetensors.torch.save_file(state, file)
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:-3])
    elif how == "pickled":
        torch.save(state, file)
    elif how == "absent":
        return folder / "other.safetensors"
    elif how == "folder":
        file.rename(folder / "weights.safetensors")
        return folder
    return spoil_index(folder, how) if "index" in how else file


def spoil_index(folder: Path, how: str) -> Path:
    weight_map = {"scale": "gone.safetensors" if how == "index: no file" else ONE_FILE, "x": ONE_FILE}
    text = {"index: no json": "{", "index: no map": "[]"}.get(how, json.dumps({"weight_map": weight_map}))
    (folder / INDEX).write_text(text)
    return folder / INDEX


WRONG = {
    "missing": r"model.safetensors lacks body.0.bias\. Nothing was loaded",
    "unexpected": r"model.safetensors has head.bias, which the model lacks\. Nothing was loaded",
    "shape": r"body.0.weight has shape \(13, 8\), but \(13, 9\) in .*model.safetensors",
    "integers": r"frozen.weight is torch.float32, but I8 in .*model.safetensors",
    "truncated": r"model.safetensors is not a complete safetensors file: .*not fully covered",
    "pickled": r"model.safetensors is not a complete safetensors file.*load_module_state_dict\(torch.load",
    "absent": r"other.safetensors does not exist",
    "folder": r"has neither model.safetensors nor model.safetensors.index.json",
    "index: no file": r"gone.safetensors does not exist",
    "index: no key": r"index.json says that x is in model.safetensors, but that file lacks it",
    "index: no json": r"index.json is not an index of safetensors files: JSONDecodeError",
    "index: no map": r"index.json is not an index of safetensors files: TypeError",
}


@pytest.mark.parametrize("how", WRONG)
def test_what_is_wrong_is_told_on_every_rank_and_changes_nothing(tmp_path: Path, how: str) -> None:
    path = spoil(tmp_path, how)
    told = run_in("processes", failure_of_load, 2, [path], 3)
    assert len(set(told)) == 1
    message, unchanged = told[0]
    assert re.search(WRONG[how], message, re.DOTALL), message
    assert unchanged


def test_a_file_that_one_rank_lacks_stops_all(plain: Path) -> None:
    told = run_in("processes", failure_of_load, 3, [plain, plain, plain / "gone.safetensors"], 2)
    assert len(set(told)) == 1
    message, unchanged = told[0]
    assert message.startswith(f"rank 2: {plain / 'gone.safetensors'} does not exist") and unchanged


def test_ranks_load_the_same_values(plain: Path) -> None:
    """Else each would take its rows of another model, as after a copy to one host only."""
    (plain / "a").mkdir()
    safetensors.torch.save_model(Zoo(), str(plain / "a" / ONE_FILE))
    told = run_in("processes", failure_of_load, 3, [plain, plain, plain / "a"], 3)
    assert len(set(told)) == 1
    message, unchanged = told[0]
    assert re.match(rf"ranks found different weights: {plain} \(\w+\) on ranks 0, 1; ", message), message
    assert unchanged


def test_long_lists_of_names_are_cut(tmp_path: Path) -> None:
    safetensors.torch.save_file({"scale": torch.tensor(1.0)}, tmp_path / ONE_FILE)
    ((message, unchanged),) = run_in("processes", failure_of_load, 1, [tmp_path], 0)
    assert unchanged and message.count(",") == 7 and " more" in message


def fail_to_read(comm: Any, path: Path) -> str:
    """On one rank the disk fails after the check."""
    engine = engine_of(3, {})
    read = weights._read

    def failing(*arguments: Any) -> Tensor:
        raise OSError(5, "Input/output error") if comm.rank == 1 else ValueError("not here")

    if comm.rank == 1:
        weights._read = failing
    try:
        with pytest.raises(zero_full.CheckpointError) as caught:
            load_weights(engine.module, engine.optimizer, path)
    finally:
        weights._read = read
    return str(caught.value)


def test_a_disk_that_fails_on_one_rank_fails_all(plain: Path) -> None:
    assert run_in("processes", fail_to_read, 2, plain) == ["rank 1: [Errno 5] Input/output error"] * 2
