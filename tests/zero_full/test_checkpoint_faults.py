"""What cannot be saved or loaded is an error that names it, on every rank, and changes nothing."""

import os
import re
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
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
    copied,
    cut,
    flip,
    refusal,
    replaced_by_link,
    sample,
    state_of,
)
from tests.zero_full.test_terminal import ended
from zero_full.checkpoint import open_checkpoint
from zero_full.checkpoint.description import describe, whole_of_pieces
from zero_full.checkpoint.inspection import Inspection, Neighbours

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
        "rank_00001.safetensors is missing, but rank 1",
    ),
    "json missing": (lambda f: (f / JSON[0]).unlink(), "rank_00000.json is missing, but rank 0"),
    "manifest missing": (lambda f: (f / MANIFEST).unlink(), "has no manifest.json"),
    "data of another rank": (
        lambda f: (f / DATA[0]).replace(f / DATA[1]),
        "rank_00000.safetensors is missing",
    ),
    "data flipped": (lambda f: flip(f / DATA[1], -1), "rank_00001.safetensors is damaged: the checksum of"),
    "json flipped": (lambda f: flip(f / JSON[1], 50), "rank_00001.json is damaged: its checksum"),
    "manifest flipped": (lambda f: flip(f / MANIFEST, 50), "manifest.json is damaged"),
    "data is a link": (lambda f: replaced_by_link(f / DATA[1]), "rank_00001.safetensors is not a regular"),
    "json is a link": (lambda f: replaced_by_link(f / JSON[1]), "rank_00001.json is not a regular file"),
    "manifest is a link": (lambda f: replaced_by_link(f / MANIFEST), "manifest.json is not a regular file"),
    "data is a pipe": (
        lambda f: ((f / DATA[1]).unlink(), os.mkfifo(f / DATA[1])),
        "rank_00001.safetensors is not a regular file",
    ),
    "latest is a pipe": (
        lambda f: ((f.parent / "latest").unlink(), os.mkfifo(f.parent / "latest")),
        "latest cannot be read: .*latest is not a regular file",
    ),
    "latest is a folder": (
        lambda f: ((f.parent / "latest").unlink(), (f.parent / "latest").mkdir()),
        "latest cannot be read",
    ),
    "latest is empty": (
        lambda f: cut(f.parent / "latest", 0),
        "latest names ''",
    ),
    "latest leads away": (
        lambda f: (f.parent / "latest").write_text("../x"),
        "latest names '../x'",
    ),
    "latest is long": (
        lambda f: (f.parent / "latest").write_text("x" * 5000),
        "latest is damaged: it has 5000 bytes",
    ),
    "latest is of bytes": (lambda f: (f.parent / "latest").write_bytes(b"\xff"), "latest cannot be read"),
    "latest names another": (
        lambda f: (f.parent / "latest").write_text("other"),
        f"has no checkpoint other. Complete ones: {TAG}. Incomplete ones: partial-01234567-other",
    ),
    "the folder is gone": (
        lambda f: f.rename(f.parent / "renamed"),
        f"has no checkpoint {TAG}. Complete ones: renamed",
    ),
    "the folder is a file": (
        lambda f: (f.rename(f.parent / "away"), f.write_text("")),
        "has no manifest.json",
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


def test_what_is_described_without_torch_is_what_the_reader_opens(saved: Path, tmp_path: Path) -> None:
    place = tmp_path / "run"
    for name, (damage, _) in DAMAGE.items():
        copied(saved, place)
        damage(place / TAG)
        refused = refusal(lambda: open_checkpoint(place).close())
        of_values = "the checksum of bytes" in refused  # which only --verify reads in all of the data
        assert not refused or of_values or describe(place, None) is None, name
    described = describe(saved, None)
    assert described is not None
    with closing(open_checkpoint(saved)) as source:
        assert Inspection(described, Neighbours()).as_json() == Inspection(source, Neighbours()).as_json()
        assert Inspection(described, Neighbours()).table() == Inspection(source, Neighbours()).table()
    assert ended(saved.parent, "inspect run") == ["0", "False", "False"]


@pytest.mark.parametrize(
    "pieces",
    [
        [["F32", [4], 0, 2, 0], ["F32", [4], 1, 3, 0]],
        [["F32", [4], 0, 2, 0]],
        [["F32", [4], 0, 2, 0], ["F16", [4], 2, 2, 0]],
        [["F32", [4], 0, 2, 0, [0, 0, 2]], ["F32", [4], 2, 2, 0, [0, 2, 2]]],
    ],
    ids=["overlap", "gap", "two types", "blocks"],
)
def test_pieces_that_are_no_tensor_are_left_to_the_reader(pieces: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"unpack|elements"):
        whole_of_pieces(pieces)


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


# A run that is another one ------------------------------------------------------------------------------


class Reshaped(Rich):
    """With a parameter of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(1, 5))


class Renamed(Rich):
    """With a parameter of another name."""

    def __init__(self) -> None:
        super().__init__()
        del self.unused
        self.spare = nn.Parameter(torch.ones(5))


class Retyped(Rich):
    """With a buffer of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.seen.num_batches_tracked = torch.tensor(0, dtype=torch.int32)


class Sampler:
    """An object of the loop. It does not take every state on every rank."""

    def __init__(self, place: int, takes: bool = True) -> None:
        self.place, self.takes = place, takes

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]
        if self.place == 7 and not self.takes:
            raise KeyError("epoch")


MODELS = {"reshaped": Reshaped, "renamed": Renamed, "retyped": Retyped}
SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupDecayLR": {"total_num_steps": 9, "warmup_num_steps": 2},
    "WarmupLR": {"warmup_num_steps": 5},
}


def run_of(what: str, rank: int) -> zero_full.Engine:
    """An engine after a step; `what` is special about it."""
    model, keys = MODELS.get(what, Rich)(), RUN.keys()
    if what == "SGD":
        keys["optimizer"] = {"type": "SGD", "params": {"lr": 0.01}}
    if what in SCHEDULES:
        keys["scheduler"] = {"type": what, "params": SCHEDULES[what]}
    if what == "no schedule":
        del keys["scheduler"]
    base = None
    if what.startswith("groups"):
        del keys["optimizer"]
        parts = [[p for p in model.parameters() if (p.dim() > 1) is large] for large in (True, False)]
        groups = [{"params": part, "weight_decay": 0.1} for part in parts]
        base = torch.optim.AdamW(groups[:: -1 if "swapped" in what else 1], lr=0.01)
    engine = zero_full.initialize(model=model, optimizer=base, config=keys)[0]
    if "sampler" in what:
        engine.keep_in_checkpoint(calm=Sampler(1), sampler=Sampler(2, takes=f"refused by {rank}" not in what))
    go(engine, rank, range(1))
    return engine


NO_STATE, NO_SCHEDULE = {"load_optimizer_states": False}, {"load_lr_scheduler_states": False}
LOOSELY = {"load_module_strict": False}
# Who saves, who loads, what is said, and what then helps.
OTHERS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("", "reshaped", r"unused has shape \(1, 5\), but \(5,\) in the checkpoint", {}),
    ("", "renamed", r"lacks spare; .* has unused, which the model lacks", LOOSELY),
    ("", "retyped", "seen.num_batches_tracked is torch.int32, but torch.int64 in the checkpoint", {}),
    ("", "SGD", "AdamW, and SGD cannot use it", NO_STATE),
    ("", "groups", "1 parameter groups were saved, but the optimizer has 2", NO_STATE),
    ("groups", "groups, swapped", "group 0, but was saved in group 1, .* another group's options", NO_STATE),
    ("", "WarmupDecayLR", "has the state of a WarmupLR, not of a WarmupDecayLR", NO_SCHEDULE),
    ("no schedule", "", "has no LR scheduler state", NO_SCHEDULE),
    ("", "sampler", "has no state of calm. Name it in keep_in_checkpoint", NO_STATE),
    *(
        ("sampler", f"sampler, refused by {rank}", rf"rank {rank}: sampler cannot load .*'epoch'", NO_STATE)
        for rank in (0, 1)
    ),
]


def loads_another(comm: Any, place: Path) -> list[str]:
    """What is wrong with the answers to loads into another run than the one that was saved."""
    wrong = list[str]()
    for saves, loads, message, remedy in OTHERS:
        folder = place / (saves or "plain")
        if comm.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        if not (folder / "latest").exists():
            engine = run_of(saves, comm.rank)
            go(engine, comm.rank, range(1, 2))
            for each in engine.kept.values():
                each.place = 7
            engine.save_checkpoint(folder)
            engine.destroy()
        dist.barrier()
        engine = run_of(loads, comm.rank)
        before = state_of(engine)
        said = refusal(partial(engine.load_checkpoint, folder))
        if not re.search(message, said) or not said.endswith("Nothing was loaded"):
            wrong.append(f"{loads} loads {saves}: {said!r}")
        if state_of(engine) != before:
            wrong.append(f"{loads} loads {saves}: the run has changed")
        if remedy:
            engine.load_checkpoint(folder, **remedy)
            wrong += [f"{loads} loads {saves}: not loaded"] if state_of(engine) == before else []
        engine.destroy()
    return wrong


def test_another_run_is_refused_on_every_rank_and_stays_as_it_is(tmp_path: Path) -> None:
    assert POOL.run(loads_another, 2, tmp_path) == [[], []]
