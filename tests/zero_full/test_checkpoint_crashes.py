"""A rank that dies while it saves, at any moment, leaves the newest complete checkpoint as it was."""

import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests import rotation
from tests.zero_full.dying import (
    check_folder,
    contents_of,
    engine_of,
    prepares,
    save,
    saves_and_dies,
    step,
    two_ranks,
)

SCENARIOS: dict[str, dict[str, Any]] = {  # what is saved over what
    "new": {"tag": "new"},  # beside an older one
    "over": {"tag": "same"},  # over one of the same tag
    "replaced": {"tag": "same"},  # the same, after an earlier save of it was cut off
    "kept": {"tag": "new", "keep_last": 1},  # and older ones are removed
    "beside": {"tag": "same", "asynchronous": True},  # while the training goes on
}
LARGE = 1_000_000  # parameters


class Prepared:
    """Folders in which a save begins, and what is in each checkpoint: by the number of steps taken."""

    def __init__(self, root: Path, more: int) -> None:
        self.root, self.more = root, more
        self.calls: dict[str, list[list[str]]] = {}  # of a save that nobody ends, by scenario and rank
        self.seconds: dict[str, float] = {}
        self.references: list[dict[str, Any]] = []

    def prepare(self, scenario: str) -> None:
        """Lay down what is there before, and see what a save is that nobody ends."""
        place, done = self.root / scenario, self.root / f"{scenario}, done"
        if place.exists():
            return
        two_ranks(prepares, place, scenario, self.more)
        answers, self.seconds[scenario] = self.run(scenario, 0, None)
        assert [said for _, said in answers] == [None, None]
        self.calls[scenario] = [calls for calls, _ in answers]
        if scenario == "new":
            self.references = [contents_of(done, tag) for tag in ("oldest", "old", "new")]
        shutil.rmtree(done)
        self.prepare("new")

    def run(
        self, scenario: str, victim: int, at: int | None, kill: tuple[int, float] | None = None
    ) -> tuple[list[Any], float]:
        """A save in a copy of that folder."""
        copy = self.root / f"{scenario}, done"
        shutil.copytree(self.root / scenario, copy)
        how = {"asynchronous": False, "victim": victim, "at": at, "more": self.more, **SCENARIOS[scenario]}
        return two_ranks(saves_and_dies, copy, how, kill=kill)

    def check(self, scenario: str, victim: int, at: int | None, after: float | None = None) -> int:
        """The step of the newest checkpoint, after a rank has died at a call, or after so many seconds."""
        self.prepare(scenario)
        copy, tag = self.root / f"{scenario}, done", SCENARIOS[scenario]["tag"]
        kill = None if after is None else (victim, after)
        try:
            answers, _ = self.run(scenario, victim, at, kill)
            is_dead = answers[victim] is None
            if after is None:
                assert is_dead
                said = answers[1 - victim][1]
                assert said is not None and "Error" in said, said
            newest = check_folder(copy, self.references, at_least=1)
            self.go_on(copy, tag, newest)
            return newest
        finally:
            shutil.rmtree(copy)

    def go_on(self, folder: Path, tag: str, newest: int) -> None:
        """One rank resumes, and saves under the same tag."""
        engine = engine_of(self.more)
        engine.load_checkpoint(folder)
        assert engine.global_steps == newest
        step(engine)
        save(engine, folder, tag)
        assert contents_of(folder)["step"] == newest + 1 and not unfinished_tags(folder)
        engine.destroy()


def unfinished_tags(folder: Path) -> list[str]:
    """Folders that should be there for a moment only."""
    return [path.name for path in folder.iterdir() if path.name.startswith(("replaced", "removed"))]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Saves of a few calls."""
    return Prepared(tmp_path_factory.mktemp("small"), 0)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_rank_may_die_at_any_call(small: Prepared, scenario: str, victim: int) -> None:
    small.prepare(scenario)
    every = 8 if scenario == "beside" else 1  # who waits for a note hears of no death until its patience ends
    ends = range(0, len(small.calls[scenario][victim]), every)
    newest = [small.check(scenario, victim, at) for at in ends]
    assert newest == sorted(newest) and set(newest) == ({1, 2} if victim == 0 else {1}), newest


@pytest.mark.rotates
def test_a_rank_may_die_where_names_change(small: Prepared) -> None:
    for scenario, some in (("new", slice(-1, None)), ("replaced", slice(None)), ("kept", slice(-2, None))):
        small.prepare(scenario)
        renames = [at for at, name in enumerate(small.calls[scenario][0]) if name == "replace"]
        found = [small.check(scenario, 0, at) for at in renames[some]]
        assert found == sorted(found), (scenario, found)
    small.prepare("over")
    assert small.check("over", 1, len(small.calls["over"][1]) // 2) == 1
    assert small.check("kept", 0, len(small.calls["kept"][0]) - 1) == 2


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Saves that take a while."""
    return Prepared(tmp_path_factory.mktemp("large"), LARGE)


MOMENTS = range(100, 164)  # seeds


def at_random(large: Prepared, seeds: Iterable[int]) -> list[int]:
    """The newest checkpoint's step, after each rank has died at moments that nobody has chosen."""
    found = []
    for seed in seeds:
        drawn = random.Random(seed)
        scenario, victim = drawn.choice(list(SCENARIOS)[:4]), drawn.randrange(2)
        large.prepare(scenario)
        after = drawn.uniform(0, 1.1 * large.seconds[scenario])
        found.append(large.check(scenario, victim, None, after))
    return found


def test_a_rank_may_die_at_some_moment(large: Prepared) -> None:
    assert set(at_random(large, [rotation.chosen(MOMENTS)])) <= {1, 2}


@pytest.mark.slow
def test_a_rank_may_die_at_any_moment(large: Prepared) -> None:
    assert set(at_random(large, MOMENTS)) == {1, 2}
