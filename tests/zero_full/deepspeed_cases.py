"""What `deepspeed_files` has written, for tests: unpacked, opened, and changed."""

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.zero_full.deepspeed_files import FOLDER
from zero_full.checkpoint.deepspeed import open_deepspeed
from zero_full.checkpoint.deepspeed.saved_source import with_values
from zero_full.checkpoint.source import Source
from zero_full.checkpoint.unpickle import SavedObject, load_saved


def unpacked(name: str, folder: Path) -> Path:
    """The folder of a case."""
    with tarfile.open(FOLDER / f"{name}.tar.xz") as archive:
        archive.extractall(folder / name, filter="data")
    return folder / name


def opened(folder: Path, latest: str = "latest") -> Source:
    """What a file with a tag names."""
    source = open_deepspeed(folder, (folder / latest).read_text())
    assert source is not None
    return source


def truth_of(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What DeepSpeed said."""
    return load_file(folder / "truth.safetensors"), json.loads((folder / "truth.json").read_text())


def rewritten(path: Path, change: Callable[[Any], None]) -> None:
    """Save a file again, without DeepSpeed's objects, after a change."""

    def plain(nest: Any) -> Any:
        if isinstance(nest, dict):
            return {key: plain(value) for key, value in nest.items() if not isinstance(value, SavedObject)}
        return [plain(value) for value in nest] if isinstance(nest, list) else with_values(nest)

    content = plain(load_saved(path))
    change(content)
    torch.save(content, path)
