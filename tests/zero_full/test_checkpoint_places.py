"""An export writes into its folder and a load reads from it, wherever names and links would lead."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.worlds import POOL
from tests.zero_full.exported import Other, engine_of
from zero_full.checkpoint import load_weights, save_16bit_model, save_weights
from zero_full.checkpoint.safetensors_writer import WeightFiles
from zero_full.errors import CheckpointError

Write = Callable[..., Any]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TARGETS = {  # what a link may have been laid at, and the call that would follow it
    SINGLE: (save_weights, {}),
    "model-00002-of-00003.safetensors": (save_weights, {"max_shard_bytes": 900}),
    INDEX: (save_weights, {"max_shard_bytes": 900}),
    "pytorch_model.bin": (save_16bit_model, {}),
    "16.safetensors": (save_16bit_model, {"save_filename": "16.safetensors"}),
}


@pytest.mark.parametrize("name", TARGETS)
def test_an_export_follows_no_link(tmp_path: Path, name: str) -> None:
    write, options = TARGETS[name]
    (tmp_path / "precious").write_text("precious")
    folder = tmp_path / "folder"
    folder.mkdir()
    for link in (folder / f"{name}.part", folder / name):
        link.symlink_to("../precious")
    engine = engine_of(2, {})
    write(engine.module, engine.optimizer, folder, **options)
    assert (tmp_path / "precious").read_text() == "precious"
    assert (folder / name).is_file() and not any(path.is_symlink() for path in folder.iterdir())


def test_a_link_that_appears_while_writing_is_not_followed_either(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    part = tmp_path / f"{SINGLE}.part"
    engine, write = engine_of(2, {}), WeightFiles.write

    def raced(self: Any, name: str, tensor: torch.Tensor) -> None:
        part.unlink()
        part.symlink_to("precious")
        write(self, name, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightFiles, "write", raced)
        with pytest.raises(CheckpointError, match="symbolic link"):
            save_weights(engine.module, engine.optimizer, tmp_path)
    assert (tmp_path / "precious").read_text() == "precious"


def refusals(comm: Any, folder: Path) -> int:
    """How many names are refused before anything is written or gathered."""
    engine, count = engine_of(2, {}), 0
    before = engine.traffic()
    names = ["../x", "/tmp/x", "a/b", "a\\b", "", ".", "..", "x\0y"]
    for write, argument in ((save_weights, "filename"), (save_16bit_model, "save_filename")):
        for name in names:
            with pytest.raises(ValueError, match=f"^{argument}: .* is not a plain file name"):
                write(engine.module, engine.optimizer, folder, **{argument: name})
            count += 1
    assert engine.traffic() == before
    return count


def test_names_that_lead_out_of_the_folder_are_refused_first(tmp_path: Path) -> None:
    assert POOL.run(refusals, 2, tmp_path / "new") == [16, 16]
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of weights that nobody should read."""
    place = tmp_path_factory.mktemp("outside") / "secret.safetensors"
    safetensors.torch.save_model(Other(), str(place))
    return place


@pytest.mark.parametrize("how", ["up", "absolute", "a link", "a link up", "down", "empty"])
def test_an_index_names_files_beside_it_and_no_others(tmp_path: Path, outside: Path, how: str) -> None:
    name = {
        "up": os.path.relpath(outside, tmp_path),
        "absolute": str(outside),
        "a link": "a.safetensors",
        "a link up": "b.safetensors",
        "down": "below/c.safetensors",
        "empty": "",
    }[how]
    (tmp_path / "a.safetensors").symlink_to(outside)
    (tmp_path / "b.safetensors").symlink_to(os.path.relpath(outside, tmp_path))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"scale": name}}))
    engine = engine_of(2, {})
    before = engine.module_state_dict()
    with pytest.raises(CheckpointError, match=r"index.json names .*, which is not a file in its folder"):
        load_weights(engine.module, engine.optimizer, tmp_path, strict=False)
    assert all(torch.equal(value, before[key]) for key, value in engine.module_state_dict().items())


def test_links_inside_the_folder_and_those_of_hugging_faces_cache_are_read(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b/blobs", tmp_path / "models--a--b/snapshots/0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    engine = engine_of(0, {}, Other)
    save_weights(engine.module, engine.optimizer, blobs, max_shard_bytes=900)
    for number, file in enumerate(sorted(blobs.iterdir())):
        os.link(file, blobs / f"sha{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/sha{number}")
        (blobs / file.name).unlink()
        (blobs / file.name).symlink_to(f"sha{number}")
    want = engine.module_state_dict()
    for folder in (snapshot, blobs):
        other = engine_of(0, {})
        load_weights(other.module, other.optimizer, folder)
        assert all(torch.equal(value, want[key]) for key, value in other.module_state_dict().items())
