"""Checkpoints that somebody has damaged, by accident or on purpose, and whether a run is what it was."""

import json
import os
import random
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zero_full
from tests.zero_full.dying import CALLS, Killer
from zero_full.checkpoint.folder import _canonical
from zero_full.checkpoint.rng_state import rng_states
from zero_full.errors import CheckpointError, DesyncError

DATA = "rank_00000.safetensors", "rank_00001.safetensors"
JSON = "rank_00000.json", "rank_00001.json"
MANIFEST = "manifest.json"


def bits(value: Any) -> Any:
    """Equal only if everything in it is, to the last bit."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, Mapping):
        return {key: bits(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(each) for each in value]
    return repr(value)


def state_of(engine: zero_full.Engine, *others: Any) -> Any:
    """All that a load could change on this rank."""
    kept = [each.state_dict() for each in (*engine.kept.values(), *others)]
    return bits([engine.state_dict(), rng_states(), kept])


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Another bit in a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def cut(path: Path, size: int) -> None:
    """A file of another size."""
    os.truncate(path, path.stat().st_size + size if size else 0)


def replaced_by_link(path: Path) -> None:
    """A file that lies elsewhere."""
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to("../elsewhere")


def forge(
    folder: Path,
    edit: Callable[[Any], Any],
    rank: int = 0,
    manifest: Callable[[Any], Any] = lambda told: None,
) -> None:
    """Change a rank's JSON and the manifest, with checksums that are right: who does so means harm."""
    path, about = folder / JSON[rank], folder / MANIFEST
    told, whole = json.loads(path.read_text()), json.loads(about.read_text())["manifest"]
    edit(told)
    text = json.dumps(told).encode()
    path.write_bytes(text)
    whole["files"][path.name] = {"bytes": len(text), "crc32": zlib.crc32(text)}
    manifest(whole)
    about.write_text(json.dumps({"crc32": zlib.crc32(_canonical(whole)), "manifest": whole}))


class Failing(Killer):
    """Counts calls of the system; the one of this number fails."""

    def __init__(self, at: int | None, reason: int, names: Sequence[str] = CALLS) -> None:
        super().__init__(at, names)
        self.reason = reason

    @property
    def has_failed(self) -> bool:
        return self.at is not None and len(self.calls) > self.at

    def _end(self, name: str, given: tuple[Any, ...]) -> None:
        self.calls.append(name)
        raise OSError(self.reason, os.strerror(self.reason))


def sample(seed: int, size: int, count: int) -> list[tuple[int, int]]:
    """So many bytes of a file, each with one of its bits."""
    drawn = random.Random(seed)
    return [(at, drawn.randrange(8)) for at in sorted(drawn.sample(range(size), min(count, size)))]


def copied(folder: Path, to: Path) -> Path:
    """A copy, in place of an older one."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to)
    return to


def refusal(call: Callable[[], Any]) -> str:
    """What a CheckpointError or DesyncError says; "" if there is none."""
    try:
        call()
    except (CheckpointError, DesyncError) as error:
        return str(error)
    return ""
