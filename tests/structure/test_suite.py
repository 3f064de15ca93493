"""How the suite is run: pairs of values, parts that rotate, and a queue of files for several processes."""

import os
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest

from tests import rotation, suite
from tests.pairwise import pairs, pairwise

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("sizes", [(2, 3), (3, 3, 3), (2, 5, 3, 4), (1, 6, 1), (8, 21, 4)], ids=str)
def test_every_pair_of_values_is_in_fewer_rows(sizes: tuple[int, ...]) -> None:
    rows = list(product(*map(range, sizes)))
    chosen = pairwise(rows)
    assert set(chosen) <= set(rows) and chosen == sorted(chosen)
    for one, other in combinations(range(len(sizes)), 2):
        assert {(row[one], row[other]) for row in chosen} == set(
            product(range(sizes[one]), range(sizes[other]))
        )
    two_longest = sorted(sizes)[-1] * sorted(sizes)[-2]
    assert two_longest <= len(chosen) <= 1.3 * two_longest


def test_only_pairs_of_possible_rows_are_asked_for() -> None:
    rows = [row for row in product("abc", (1, 2), "xyz") if row[:2] != ("a", 1)]
    assert set().union(*map(pairs, pairwise(rows))) == set().union(*map(pairs, rows))


MATRIX = """
import pytest

def one_is_skipped(a, b, c):
    return (a, b) == (0, 0)

@pytest.mark.pairwise(skips=one_is_skipped)
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("c", range(3))
def test_it(a, b, c):
    assert True
"""


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    paths["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they would be imported for nothing
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env={**os.environ, **paths, **environment},
        capture_output=True,
        text=True,
    )


def test_a_marked_test_is_run_for_every_pair_and_the_rest_is_slow(tmp_path: Path) -> None:
    (tmp_path / "test_matrix.py").write_text(MATRIX)
    quick = run(tmp_path, "pytest", "-v", "-p", "tests.conftest", "-m", "not slow").stdout
    found = {
        row for row in product(range(3), repeat=3) if f"[{'-'.join(map(str, row[::-1]))}] PASSED" in quick
    }
    assert 9 <= len(found) < 20
    for row in product(range(3), repeat=3):
        missing = pairs(row) - set().union(*map(pairs, found))
        assert not missing or row[:2] == (0, 0)


@pytest.mark.parametrize("seed", ["0", "7", "1012"])
def test_the_seed_decides_whose_turn_it_is(seed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rotation.VARIABLE, seed)
    monkeypatch.setattr(rotation, "seed", rotation.seed.__wrapped__)
    assert rotation.chosen("abcde") == "abcde"[int(seed) % 5]
    quick = [each for each in rotation.one_of("abcde") if isinstance(each, str)]
    assert quick == [rotation.chosen("abcde")] and f"{rotation.VARIABLE}={seed}" in rotation.in_words()


def test_every_case_of_a_rotating_test_has_one_turn_and_tests_have_it_at_different_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tests = [f"tests/test_{letter}.py::test_it" for letter in "abcdefgh"]
    turns: dict[tuple[str, int], list[int]] = {(test, case): [] for test in tests for case in range(5)}
    for seed in range(rotation.TURNS):
        monkeypatch.setattr(rotation, "seed", lambda seed=seed: seed)
        for (test, case), seeds in turns.items():
            if rotation.has_turn(test, case):
                seeds.append(seed)
    assert all(len(seeds) == 1 for seeds in turns.values())
    assert len({turns[test, 0][0] for test in tests}) == rotation.TURNS


def test_without_the_variable_the_seed_is_the_commit_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(rotation.VARIABLE, raising=False)
    assert rotation.seed.__wrapped__() == rotation.seed.__wrapped__()
    monkeypatch.setattr(rotation, "ROOT", tmp_path)  # no repository: the date
    assert rotation.seed.__wrapped__() in range(1000)


NOTING = """
import os
from pathlib import Path

def test_{name}():
    with Path("seen").open("a") as seen:
        print("{name}", os.environ["ZERO_FULL_TEST_SEED"], file=seen)
    assert {holds}
"""


def test_the_processes_run_every_file_once_and_a_failure_fails_the_whole(tmp_path: Path) -> None:
    names, fails = [], "tests_zero_full_b"
    for folder, letter in product(("tests/zero_full", "tests/site", "tests/notebooks"), "abcde"):
        name = f"{folder}/{letter}".replace("/", "_")
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / f"test_{name}.py").write_text(NOTING.format(name=name, holds=name != fails))
        names.append(name)
    done = run(tmp_path, "tests.suite", "-q", "tests", ZERO_FULL_TEST_SEED="5")
    seen = (tmp_path / "seen").read_text().splitlines()
    assert sorted(seen) == sorted(f"{name} 5" for name in names)
    first, *lines, ended, total = done.stdout.splitlines()
    assert done.returncode == 1 and "seed 5" in first and "ended with code 1" in ended
    assert "14 passed" in total and "1 failed" in total
    assert all(line[:3] in ("1: ", "2: ", "3: ") for line in lines[:-1]) and f"::test_{fails}" in lines[-1]


def test_an_error_while_tests_are_collected_fails_the_whole(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import a_module_that_is_missing")
    done = run(tmp_path, "tests.suite", "-q")
    assert done.returncode == 1 and "ended with code 2" in done.stdout


def test_a_process_that_dies_fails_the_whole() -> None:
    said = suite.summary([["3 passed in 1.00s\n"], ["Segmentation fault\n"]], [0, -11], 61.0)
    assert said == "process 2 ended with code -11\n3 passed in 1 min 1 s"


def test_tests_are_counted_where_a_library_prints_at_the_end_of_the_process() -> None:
    counts = "1 failed, 3 passed, 2 deselected in 77.67s (0:01:17)\n"
    said = suite.summary([["..F.\n", counts, "nanobind: leaked 4 instances!\n"], [counts]], [1, 0], 61.0)
    assert said == "process 1 ended with code 1\n2 failed, 6 passed in 1 min 1 s"
