"""Folders that are full, broken, shared or somebody else's, and whose states are whose."""

import errno
import os
import resource
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero_full
from tests.worlds import POOL
from tests.zero_full.checkpoint_runs import Layout, Rich, go
from tests.zero_full.damaged import Failing, copied, refusal, state_of
from tests.zero_full.dying import check_folder, contents_of, engine_of, save, step
from zero_full.checkpoint import complete
from zero_full.checkpoint.folder import STALE, unfinished
from zero_full.comm.topology import Topology


def names_in(folder: Path) -> list[str]:
    """What is in a folder."""
    return sorted(path.name for path in folder.iterdir())


REASONS = (errno.ENOSPC, errno.EIO, errno.EROFS)

# Calls of the system that fail ----------------------------------------------------------------------------


def saves_while(comm: Any, victim: int, place: Path, every: int) -> list[str]:
    """What is wrong after saves of which one call has failed: each one, or one in so many."""
    base, folder, wrong = place / "base", place / "run", list[str]()
    engine = engine_of(keep_last=1)
    save(engine, base, "oldest")
    step(engine)
    save(engine, base, "old")
    step(engine)
    save(engine, place / "reference", "new")
    before, references = state_of(engine), [{}, contents_of(base), contents_of(place / "reference")]
    for at in count(step=every):
        dist.barrier()
        if comm.rank == 0:
            copied(base, folder)
        dist.barrier()
        reason = REASONS[at % len(REASONS)]
        with Failing(at if comm.rank == victim else None, reason) as failing:
            said = refusal(lambda: save(engine, folder, "new"))
        told: list[Any] = [None, None]
        dist.all_gather_object(told, (failing.has_failed, said))
        if not any(failed for failed, _ in told):
            return wrong if at > 4 else ["hardly a call was made"]
        name = failing.calls[-1:]
        if told[0][1] != told[1][1] or (said and (os.strerror(reason) not in said or str(place) not in said)):
            wrong.append(f"call {at}, {name}: {told}")
        if state_of(engine) != before:
            wrong.append(f"call {at}, {name}: the run has changed")
        newest = check_folder(folder, references, at_least=1 if said else 2)
        if said and unfinished(folder):
            wrong.append(f"call {at}, {name}: {names_in(folder)}, step {newest}")
        dist.barrier()
        save(engine, folder, "new")
        if check_folder(folder, references, at_least=2) != 2 or names_in(folder) != ["latest", "new"]:
            wrong.append(f"call {at}, {name}: {names_in(folder)} after another save")
    raise AssertionError


@pytest.mark.parametrize("victim", [0, 1])
def test_calls_of_a_save_may_fail(victim: int, tmp_path: Path) -> None:
    assert POOL.run(saves_while, 2, victim, tmp_path, 4) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_any_call_of_a_save_may_fail(victim: int, tmp_path: Path) -> None:
    assert POOL.run(saves_while, 2, victim, tmp_path, 1) == [[], []]


def loads_while(comm: Any, victim: int, place: Path) -> list[str]:
    """What is wrong after loads of which one call has failed."""
    engine, wrong = engine_of(more=20), list[str]()
    step(engine)
    save(engine, place, "saved")
    want = state_of(engine)
    changed_already = 0
    for at in count():
        step(engine)
        before = state_of(engine)
        names = ("open", "preadv")
        with Failing(at if comm.rank == victim else None, errno.EIO, names) as failing:
            said = refusal(lambda: engine.load_checkpoint(place))
        told: list[Any] = [None, None]
        dist.all_gather_object(told, (failing.has_failed, said))
        if not any(failed for failed, _ in told):
            return wrong if 0 < changed_already < at // 2 else [f"{changed_already} of {at} came late"]
        if told[0][1] != told[1][1] or "Input/output error" not in said or str(place) not in said:
            wrong.append(f"call {at}: {told}")
        if state_of(engine) != before and "Some parameters are changed already" not in said:
            wrong.append(f"call {at}: the run has changed: {said}")
        changed_already += "changed already" in said
        engine.load_checkpoint(place)
        if state_of(engine) != want:
            wrong.append(f"call {at}: another load does not help")
    raise AssertionError


@pytest.mark.parametrize("victim", [0, 1])
def test_any_call_of_a_load_may_fail(victim: int, tmp_path: Path) -> None:
    assert POOL.run(loads_while, 2, victim, tmp_path) == [[], []]


def fills_the_disk(comm: Any, place: Path) -> tuple[str, list[str]]:
    """What a save says whose file cannot grow, on one rank."""
    engine = engine_of(more=200_000)
    save(engine, place, "small enough")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if comm.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        said = refusal(lambda: save(engine, place, "too large"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    dist.barrier()
    return said, names_in(place)


def test_a_file_that_cannot_grow_leaves_nothing(tmp_path: Path) -> None:
    for said, there in POOL.run(fills_the_disk, 2, tmp_path):
        assert "rank 1: [Errno 27] File too large while writing" in said, said
        assert "rank_00001.safetensors" in said and there == ["latest", "small enough"]


# What is there already ------------------------------------------------------------------------------------


@pytest.fixture
def engine() -> zero_full.Engine:
    """Of one rank."""
    return engine_of()


def test_what_is_no_checkpoint_of_this_model_is_not_replaced(
    engine: zero_full.Engine, tmp_path: Path
) -> None:
    save(engine, tmp_path, "mine")
    save(engine_of(more=3), tmp_path, "another")
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed/mp_rank_00_model_states.pt").write_bytes(b"precious")
    (tmp_path / "site").mkdir()
    (tmp_path / "site/manifest.json").write_text("{}")
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to("mine")
    (tmp_path / "broken link").symlink_to("nowhere")
    before = {path: path.lstat() for path in tmp_path.rglob("*") if path.name != "latest"}
    for tag, told in {
        "another": "a checkpoint of another model",
        "deepspeed": "not a checkpoint of zero_full",
        "site": "not a checkpoint of zero_full",
        "file": "not a checkpoint of zero_full",
        "link": "a symbolic link",
        "broken link": "a symbolic link",
    }.items():
        said = refusal(lambda tag=tag: save(engine, tmp_path, tag))
        assert f"{tag} is {told} and is not replaced. Choose another tag" in said, said
    save(engine, tmp_path, "mine")
    for path, known in before.items():
        assert path.lstat().st_ino == known.st_ino or path.is_relative_to(tmp_path / "mine"), path
    for where in (tmp_path / "file", tmp_path / "file/below"):
        assert f"while making a folder: '{where}'" in refusal(lambda where=where: save(engine, where, "x"))


def test_a_checkpoint_that_nobody_can_load_is_replaced(engine: zero_full.Engine, tmp_path: Path) -> None:
    save(engine, tmp_path, "x")
    (tmp_path / "x/manifest.json").write_text("{}")
    save(engine, tmp_path, "x")
    assert contents_of(tmp_path)["step"] == 0


def test_files_of_others_in_a_checkpoints_folder_stay(tmp_path: Path) -> None:
    engine = engine_of(keep_last=1)
    for tag in ("x", "x", "y"):
        save(engine, tmp_path, tag)
        place = tmp_path / tag
        (place / "tokenizer").mkdir(exist_ok=True)
        (place / "tokenizer/vocabulary.txt").write_text(f"of {tag}")
        (place / "rank_notes.json").write_text("{}")
    assert names_in(tmp_path) == ["latest", "x", "y"]
    assert names_in(tmp_path / "x") == ["rank_notes.json", "tokenizer"]
    assert (tmp_path / "x/tokenizer/vocabulary.txt").read_text() == "of x"
    assert contents_of(tmp_path)["step"] == 0 and list(complete(tmp_path)) == ["y"]


FOREIGN = {
    "global_step1/mp_rank_00_model_states.pt": b"DeepSpeed's",
    "partial-results/table.csv": b"mine",
    "replaced-0123456/x": b"mine",
    "removed-old/x": b"mine",
    "partial-01234567-notes": b"a file of mine",
    "notes.txt": b"mine",
    ".hidden": b"mine",
}


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_only_older_checkpoints_of_the_same_model_are_removed(keep_last: int, tmp_path: Path) -> None:
    for name, data in FOREIGN.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    engine, another = engine_of(keep_last=keep_last), engine_of(more=3, keep_last=keep_last)
    save(another, tmp_path, "another")
    save(engine, tmp_path, "a")
    (tmp_path / "best").symlink_to("e")
    for name, age in {"partial-00000000-a": 2 * STALE, "partial-00000001-b": STALE / 2}.items():
        (tmp_path / name).mkdir()
        for path in (tmp_path / name / "rank_00000.safetensors", tmp_path / name):
            path.touch()
            then = (tmp_path / "a/manifest.json").stat().st_mtime - age
            os.utime(path, (then, then))
    for tag in "bcde":
        save(engine, tmp_path, tag)
        if tag == "b":
            (tmp_path / "latest").write_text("b")
    kept = {"e", "d", "c"} if keep_last == 3 else {"e", "d"} if keep_last == 2 else {"e"}
    there = {path.name for path in tmp_path.iterdir()}
    assert there == {*kept, "another", "latest", "best", "partial-00000001-b"} | {
        n.partition("/")[0] for n in FOREIGN
    }
    assert all((tmp_path / name).read_bytes() == data for name, data in FOREIGN.items())
    assert contents_of(tmp_path, "another") and complete(tmp_path).keys() == {*kept, "another"}


def test_what_latest_names_is_kept(tmp_path: Path) -> None:
    engine = engine_of(keep_last=1)
    save(engine, tmp_path, "best")
    for tag in "ab":
        engine.save_checkpoint(tmp_path, tag=tag, save_latest=False)
    assert names_in(tmp_path) == ["b", "best", "latest"]
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "best")


def test_what_cannot_be_removed_is_told_and_the_save_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(keep_last=1)
    save(engine, tmp_path, "a")
    with pytest.MonkeyPatch.context() as patch:

        def refuses(*given: Any, **named: Any) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

        patch.setattr(os, "unlink", refuses)
        save(engine, tmp_path, "b")
    assert "could not be removed: [Errno 13] Permission denied while removing" in caplog.text
    assert list(complete(tmp_path)) == ["b"]
    save(engine, tmp_path, "c")
    assert names_in(tmp_path) == ["c", "latest"]


# Who has saved ----------------------------------------------------------------------------------------------


class Drawn:
    """An object of the loop with a large state, of which most is the same on all ranks."""

    def __init__(self, rank: int) -> None:
        self.drawn = torch.zeros(5000)
        self.drawn[2500] = rank

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


def saves_drawn(comm: Any, folder: Path) -> None:
    engine = engine_of()
    engine.keep_in_checkpoint(drawn=Drawn(comm.rank))
    engine.save_checkpoint(folder)


def test_states_of_ranks_are_compared_to_the_last_element(tmp_path: Path) -> None:
    POOL.run(saves_drawn, 2, tmp_path)
    engine = engine_of()
    engine.keep_in_checkpoint(drawn=Drawn(0))
    assert "drawn was saved with a different state on each of 2 ranks" in refusal(
        lambda: engine.load_checkpoint(tmp_path)
    )


def test_a_state_that_nobody_takes_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of()
    engine.keep_in_checkpoint(drawn=Drawn(0))
    engine.save_checkpoint(tmp_path)
    engine_of().load_checkpoint(tmp_path)
    assert "has states of drawn" in caplog.text


def two_runs(comm: Any, place: Path) -> Any:
    """Two engines on two ranks each, which save and go on side by side."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    topology, folder = Topology(data=pairs[comm.rank // 2]), place / str(comm.rank // 2)

    def made(number: int) -> zero_full.Engine:
        engine = zero_full.initialize(model=Rich(), config=Layout(2, 2).keys(), topology=topology)[0]
        engine.keep_in_checkpoint(drawn=Drawn(number))
        return engine

    torch.manual_seed(comm.rank)
    engine = made(comm.rank)
    go(engine, comm.rank, range(2))
    engine.save_checkpoint(folder)
    losses = go(engine, comm.rank, range(2, 4))
    other = made(9)
    other.load_checkpoint(folder)
    return go(other, comm.rank, range(2, 4)) == losses, int(other.kept["drawn"].drawn[2500])


def test_runs_of_some_ranks_go_on_where_they_were(tmp_path: Path) -> None:
    assert POOL.run(two_runs, 4, tmp_path) == [(True, rank) for rank in range(4)]
