"""What cannot be saved or loaded is an error that names it, on every rank, and changes nothing."""

import errno
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_full
from tests.worlds import POOL
from tests.zero_full.checkpoint_runs import Layout, Rich, engine_of, go
from tests.zero_full.damaged import (
    DATA,
    JSON,
    MANIFEST,
    Failing,
    copied,
    cut,
    flip,
    refusal,
    replaced_by_link,
    sample,
    state_of,
)
from zero_full.checkpoint import complete, open_checkpoint
from zero_full.checkpoint.folder import unfinished

RUN = Layout(2, 2, "fp16")  # with a loss scale that moves
TAG = "global_step2"

DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "data cut by a byte": (lambda f: cut(f / DATA[1], -1), r"rank_00001.safetensors has \d+ bytes, not the"),
    "data cut to nothing": (lambda f: cut(f / DATA[0], 0), "rank_00000.safetensors has 0 bytes, not the"),
    "data with a byte more": (lambda f: cut(f / DATA[0], 1), r"rank_00000.safetensors has \d+ bytes, not"),
    "json cut": (lambda f: cut(f / JSON[1], -1), "rank_00001.json is damaged: its checksum"),
    "manifest cut": (lambda f: cut(f / MANIFEST, -5), "manifest.json is damaged"),
    "data missing": (
        lambda f: (f / DATA[1]).unlink(),
        "rank_00001.safetensors is missing: rank 1 has written",
    ),
    "json missing": (lambda f: (f / JSON[0]).unlink(), "rank_00000.json is missing: rank 0 has written"),
    "manifest missing": (lambda f: (f / MANIFEST).unlink(), "it was never finished, or is no checkpoint"),
    "data of another rank": (
        lambda f: os.replace(f / DATA[0], f / DATA[1]),
        "rank_00000.safetensors is missing",
    ),
    "data flipped": (lambda f: flip(f / DATA[1], -1), "rank_00001.safetensors is damaged: the checksum of"),
    "json flipped": (lambda f: flip(f / JSON[1], 50), "rank_00001.json is damaged: its checksum"),
    "manifest flipped": (lambda f: flip(f / MANIFEST, 50), "manifest.json is damaged"),
    "data is a link": (lambda f: replaced_by_link(f / DATA[1]), "rank_00001.safetensors is no file, but"),
    "json is a link": (lambda f: replaced_by_link(f / JSON[1]), "rank_00001.json is no file, but a link"),
    "manifest is a link": (lambda f: replaced_by_link(f / MANIFEST), "manifest.json is no file, but a link"),
    "data is a pipe": (
        lambda f: ((f / DATA[1]).unlink(), os.mkfifo(f / DATA[1])),
        "rank_00001.safetensors is no file",
    ),
    "latest is a pipe": (
        lambda f: ((f.parent / "latest").unlink(), os.mkfifo(f.parent / "latest")),
        "latest cannot be read: .*latest is no file",
    ),
    "latest is a folder": (
        lambda f: ((f.parent / "latest").unlink(), (f.parent / "latest").mkdir()),
        "latest cannot be read",
    ),
    "latest is empty": (
        lambda f: cut(f.parent / "latest", 0),
        "latest names '', which is no folder beside it",
    ),
    "latest leads away": (
        lambda f: (f.parent / "latest").write_text("../x"),
        "latest names '../x', which is no",
    ),
    "latest is long": (
        lambda f: (f.parent / "latest").write_text("x" * 5000),
        "latest has 5000 bytes, which",
    ),
    "latest is of bytes": (lambda f: (f.parent / "latest").write_bytes(b"\xff"), "latest cannot be read"),
    "latest names another": (
        lambda f: (f.parent / "latest").write_text("other"),
        f"has no checkpoint other. Complete ones: {TAG}; never finished: partial-01234567-other",
    ),
    "the folder is gone": (
        lambda f: f.rename(f.parent / "renamed"),
        f"has no checkpoint {TAG}. Complete ones: renamed",
    ),
    "the folder is a file": (
        lambda f: (f.rename(f.parent / "away"), f.write_text("")),
        "it was never finished, or is no",
    ),
}


def save(comm: Any, folder: Path) -> None:
    torch.manual_seed(comm.rank)
    engine = engine_of(RUN)
    go(engine, comm.rank, range(2))
    engine.save_checkpoint(folder)
    engine.destroy()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    POOL.run(save, 2, folder)
    return folder


def meets_damage(comm: Any, saved: Path, place: Path) -> list[str]:
    """What is wrong with the answers to all kinds of damage."""
    engine, wrong = engine_of(RUN), list[str]()
    go(engine, comm.rank, range(3))
    before = state_of(engine)
    for name, (damage, message) in DAMAGE.items():
        dist.barrier()
        if comm.rank == 0:
            copied(saved, place)
            (place / "partial-01234567-other").mkdir()
            damage(place / TAG)
        dist.barrier()
        said = refusal(lambda: engine.load_checkpoint(place))
        if not re.search(message, said):
            wrong.append(f"{name}: {said!r}")
        if state_of(engine) != before:
            wrong.append(f"{name}: the run has changed")
            before = state_of(engine)
    engine.load_checkpoint(saved)
    if state_of(engine) == before:
        wrong.append("a load would not have been noticed")
    engine.destroy()
    return wrong


def test_damage_is_named_on_every_rank_and_changes_nothing(saved: Path, tmp_path: Path) -> None:
    assert POOL.run(meets_damage, 2, saved, tmp_path / "run") == [[], []]


def read_all(folder: Path) -> Any:
    """Everything in a checkpoint, verified."""
    source = open_checkpoint(folder)
    try:
        told = {key: source.read_across(key, 0, t.numel) for key, t in source.tensors.items()}
        return told, source.numbers, source.shared, source.private(0)
    finally:
        source.close()


def check_bytes(saved: Path, place: Path, count: int, count_of_data: int) -> None:
    """Each byte of each file matters, but for blanks around the manifest."""
    copied(saved, place)
    for name in ("latest", f"{TAG}/{MANIFEST}", *(f"{TAG}/{each[1]}" for each in (JSON, DATA))):
        path = place / name
        whole = path.read_bytes()
        for at, bit in sample(0, len(whole), count_of_data if path.suffix == ".safetensors" else count):
            flip(path, at, bit)
            said = refusal(lambda: read_all(place))
            harmless = path.name == MANIFEST and path.read_bytes().split() == whole.split()
            assert said or harmless, (name, at, bit)
            assert str(place) in said or harmless, said
            path.write_bytes(whole)
    read_all(place)


def test_flipped_bits_are_found(saved: Path, tmp_path: Path) -> None:
    check_bytes(saved, tmp_path / "run", 60, 60)


@pytest.mark.slow
def test_a_flipped_bit_of_every_byte_is_found(saved: Path, tmp_path: Path) -> None:
    check_bytes(saved, tmp_path / "run", sys.maxsize, 1000)
