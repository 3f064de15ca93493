"""`make gpu-day`, without a GPU: how parts are run, kept and shown; and all of it, rehearsed."""

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import rotation
from tests.gpu.day import archive, operators, page, parts, rehearsal, run
from tests.gpu.day.parts import Part

ROOT = Path(__file__).parents[2]
BARE = {  # what a bare machine has, and what the packed wheels bring
    *("torch", "pytest", "hypothesis", "rich", "safetensors", "matplotlib", "pydantic", "numpy"),
    "_pytest",
}
BELOW = {"annotated_types", "typing_extensions", "pydantic_core"}  # of those


# A day of small parts ----------------------------------------------------------------------------


@pytest.fixture
def day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs scripts as parts: (exit code, results by part). The folder stays the same in a test."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv(archive.VARIABLE, raising=False)

    def of(scripts: dict[str, str], *given: str, minutes: float = 0.5) -> tuple[int, dict[str, Any]]:
        made = []
        for name, script in scripts.items():
            (tmp_path / f"part_{name}.py").write_text(script)
            made.append(Part(name, f"The {name} one", "", minutes, f"part_{name}"))
        code = run.main(["--folder", str(tmp_path / "out"), *given], made)
        found = {part.name: run.result_of(part, tmp_path / "out") for part in made}
        return code, {name: result for name, result in found.items() if result is not None}

    return of


GOOD = "print('words'); print('{\"n\": 1}'); print('| a | b |')"


def test_rows_and_tables_are_kept_and_the_rest_is_in_the_log(day: Any, tmp_path: Path) -> None:
    code, found = day({"good": GOOD})
    assert code == 0
    assert (found["good"]["state"], found["good"]["rows"], found["good"]["tables"]) == (
        "done",
        [{"n": 1}],
        ["| a | b |"],
    )
    assert (tmp_path / "out" / "good.log").read_text().startswith("words\n")


def test_a_part_that_fails_is_named_and_the_others_run(day: Any, capsys: Any) -> None:
    scripts = {"bad": "print('{\"n\": 1}'); raise SystemExit('out of luck')", "good": GOOD}
    code, found = day(scripts)
    assert code == 1 and found["good"]["state"] == "done"
    assert (found["bad"]["state"], found["bad"]["code"], found["bad"]["rows"]) == ("failed", 1, [{"n": 1}])
    said = capsys.readouterr().out
    assert "FAILED: bad, see" in said and "    out of luck" in said


def test_a_killed_part_is_marked_and_run_again_after_what_has_never_run(day: Any, capsys: Any) -> None:
    killed = "import os, signal\nprint('{\"n\": 1}', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    code, found = day({"killed": killed, "good": GOOD}, "--only", "killed")
    assert code == 1
    assert (found["killed"]["state"], found["killed"]["code"], found["killed"]["rows"]) == (
        "failed",
        -9,
        [{"n": 1}],
    )
    capsys.readouterr()
    code, found = day({"killed": GOOD, "good": GOOD})
    assert code == 0 and found["killed"]["state"] == "done"
    said = capsys.readouterr().out
    assert said.index("good: done") < said.index("killed: done")


def test_what_is_done_is_not_run_again_unless_asked_for(day: Any) -> None:
    day({"good": GOOD})
    code, found = day({"good": "raise SystemExit(1)"})
    assert code == 0 and found["good"]["state"] == "done"
    assert day({"good": "raise SystemExit(1)"}, "--again")[0] == 1


SLOW = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print('{"child": %d}' % child.pid, flush=True)
time.sleep(60)
"""


def test_a_part_is_stopped_after_two_and_a_half_times_its_minutes_and_keeps_its_rows(day: Any) -> None:
    code, found = day({"slow": SLOW}, minutes=0.04)
    assert code == 1 and found["slow"]["state"] == "stopped"
    assert 60 * 0.04 * parts.OVERRUN <= found["slow"]["seconds"] < 30
    (row,) = found["slow"]["rows"]
    status = Path(f"/proc/{row['child']}/status")  # what it had started was ended, too
    assert not status.exists() or "zombie" in status.read_text()


def test_a_part_that_no_longer_fits_is_left_and_said(tmp_path: Path, capsys: Any) -> None:
    long = Part("long", "", "", 5.0, "nothing")
    code = run.main(["--folder", str(tmp_path), "--minutes", "1"], [long])
    assert code == 2 and "not run: long; the same command goes on with them" in capsys.readouterr().out


def test_what_was_killed_with_everything_is_not_complete(tmp_path: Path) -> None:
    part = Part("x", "", "", 0.5, "nothing")
    run.keep({"part": "x", "state": "running", "rows": [{}]}, tmp_path)
    assert not run.is_done(part, tmp_path) and run.to_run([part], tmp_path, again=False) == [part]
    assert run.state_of(part, tmp_path) == "was killed while it ran, 1 row"


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="there is no part nothing"):
        run.main(["--folder", str(tmp_path), "--only", "nothing"])


def test_every_part_can_be_run_in_one_call() -> None:
    assert all(parts.OVERRUN * part.minutes < parts.CALL for part in parts.ALL)
    assert len({part.name for part in parts.ALL}) == len(parts.ALL)


class AsExpected:
    """A day whose parts take as long as they are expected to, on a clock of its own."""

    rehearse = False

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 0.0

    def run(self, part: Part, seconds: float) -> dict[str, Any]:
        assert seconds >= part.seconds(rehearse=False)
        self.now += part.seconds(rehearse=False)
        done = {"part": part.name, "state": "done", "rows": [], "seconds": 0.0}
        run.keep(done, self.folder)
        return done


def test_a_day_as_expected_fits_into_three_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is skipped at the end of a call, because it no longer fits, comes in the next one."""
    day = AsExpected(tmp_path)
    monkeypatch.setattr(run.time, "monotonic", lambda: day.now)
    for number in range(1, 4):
        began = day.now
        run.run_all(parts.ALL, day, run.arguments(["--minutes", str(parts.CALL)]))  # type: ignore[arg-type]
        assert day.now - began <= 60 * parts.CALL
        done = [part for part in parts.ALL if run.is_done(part, tmp_path)]
        assert number > 1 or len(done) < len(parts.ALL)
    assert len(done) == len(parts.ALL) and day.now <= 60 * parts.DAY


def test_what_decides_the_rest_comes_first() -> None:
    names = [part.name for part in parts.ALL]
    asked = ["machine", "one-rank", "two-ranks", "steps", "offload", "largest", "operators", "sanitizer"]
    assert names[0] == "machine" and sorted(asked, key=names.index) == asked
    assert all("ZERO_FULL_KERNELS" in part.environment for part in parts.ALL if part.name != "machine")
    by_name = {part.name: part.environment for part in parts.ALL}
    assert by_name["one-rank"] == by_name["steps"] == {"ZERO_FULL_KERNELS": "auto"}
    assert by_name["steps-operators"] == {"ZERO_FULL_KERNELS": "all"}


# Calls that are killed, and the archive ----------------------------------------------------------


def test_the_archive_is_written_before_and_after_every_part(day: Any, tmp_path: Path) -> None:
    show = "import json, os, zipfile; packed = zipfile.ZipFile(os.environ['GPU_DAY'] + '/gpu-day.zip')\n"
    show += "print(json.dumps({'seen': packed.namelist()}))"
    _, found = day({"good": GOOD, "second": show})
    assert {"good.json", "good.log", "second.json"} <= {*found["second"]["rows"][0]["seen"]}
    with zipfile.ZipFile(tmp_path / "out" / archive.NAME) as packed:
        assert json.loads(packed.read("second.json"))["state"] == "done"


def test_a_call_goes_on_from_the_archive_of_another_machine(
    day: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(archive.VARIABLE, str(tmp_path / "brought back"))
    killed = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL); import time; time.sleep(60)"
    names = ["good", "killed", "last"]
    for name, script in zip(names, (GOOD, killed, GOOD), strict=True):
        (tmp_path / f"part_{name}.py").write_text(script)
    call = [sys.executable, "-c", ONE_CALL, str(tmp_path / "out"), *names]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    assert subprocess.run(call, env=environment, cwd=ROOT).returncode == -signal.SIGKILL
    brought = tmp_path / "brought back" / archive.NAME
    shutil.rmtree(tmp_path / "out")  # another machine
    (tmp_path / "out").mkdir()
    shutil.copyfile(brought, tmp_path / "out" / archive.NAME)
    code, found = day({"good": "raise SystemExit(1)", "killed": GOOD, "last": GOOD})
    assert code == 0 and [found[name]["state"] for name in names] == ["done"] * 3
    said = capsys.readouterr().out
    assert "which has 2 parts" in said and said.index("last: done") < said.index("killed: done")
    assert {*archive.load(brought, tmp_path / "merged", rehearsal=False)} == {*names}


ONE_CALL = """
import sys
from tests.gpu.day import run
from tests.gpu.day.parts import Part
folder, *names = sys.argv[1:]
run.main(["--folder", folder], [Part(name, name, "", 0.5, f"part_{name}") for name in names])
"""


def test_a_part_that_outlives_its_killed_call_is_ended_by_the_next(day: Any, tmp_path: Path) -> None:
    sleeping = "import time\nprint('{}', flush=True); time.sleep(60)"
    left, other = (
        subprocess.Popen(
            [sys.executable, "-c", sleeping],
            env={**os.environ, run.FOLDER: str(folder)},
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        for folder in (tmp_path / "out", tmp_path)
    )
    try:
        for each in (left, other):
            assert each.stdout is not None and each.stdout.readline()
        day({"good": GOOD})
        assert left.wait(10) == -signal.SIGKILL and other.poll() is None, "another folder's parts run on"
    finally:
        for each in (left, other):
            each.kill()
            each.wait()


def test_an_archive_takes_the_newer_result_and_none_of_a_rehearsal(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    for name, (mine, theirs) in {"old": (1, 2), "new": (2, 1), "missing": (0, 1)}.items():
        for folder, hour in ((here, mine), (there, theirs)):
            if hour:
                began = f"2030-01-01T0{hour}:00:00+00:00"
                kept = {"part": name, "state": "done", "rehearsal": False, "began": began, "rows": [hour]}
                run.keep(kept, folder)
    run.keep({"part": "x", "state": "done", "rehearsal": True, "began": "2030-01-01T09:00:00+00:00"}, there)
    assert archive.save(there) == []
    assert archive.load(there / archive.NAME, here, rehearsal=False) == ["missing", "old"]
    rows = {file.stem: json.loads(file.read_text())["rows"] for file in here.glob("*.json")}
    assert rows == {"old": [2], "new": [2], "missing": [1]}


def test_an_archive_leaves_out_the_largest_files_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "traces").mkdir()
    run.keep({"part": "x", "state": "done", "rehearsal": False, "began": "2030-01-01T00:00:00"}, tmp_path)
    for name, size in {"large": 3000, "small": 1000, "larger": 4000}.items():
        (tmp_path / "traces" / f"{name}.json.gz").write_bytes(bytes(size))
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wheel.py").write_text("")
    monkeypatch.setattr(archive, "LIMIT", 4500)
    assert archive.save(tmp_path) == ["traces/larger.json.gz"]
    with zipfile.ZipFile(tmp_path / archive.NAME) as packed:
        assert packed.namelist() == ["x.json", "traces/small.json.gz", "traces/large.json.gz"]


def test_carried_libraries_are_found_and_compiled_ones_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators.tempfile, "gettempdir", lambda: str(tmp_path))
    carried, folder = tmp_path / "carried", tmp_path / "folder"
    for place in (carried, folder):
        place.mkdir()
    (carried / "zf_cpu.so").write_bytes(b"carried")
    cache = operators.private_cache([carried, folder / operators.COMPILED])
    assert cache.stat().st_mode & 0o777 == 0o700
    (cache / "zf_cuda.so").write_bytes(b"compiled")  # by a part
    operators.keep_compiled(cache, {"zf_cpu.so"}, folder)
    shutil.rmtree(cache)  # another machine
    cache = operators.private_cache([carried, folder / operators.COMPILED])
    kept = {file.name: file.read_bytes() for file in cache.iterdir()}
    assert kept == {"zf_cpu.so": b"carried", "zf_cuda.so": b"compiled"}


# The page ----------------------------------------------------------------------------------------


def result(
    name: str, rehearsal: bool = False, state: str = "done", rows: Iterable[Any] = ()
) -> dict[str, Any]:
    kept = {"part": name, "state": state, "rehearsal": rehearsal, "began": "2030-01-02T03:04:05"}
    return {**kept, "card": "A card", "command": "python -m x", "rows": list(rows), "tables": [], "code": 0}


def test_the_page_shows_what_was_found_and_names_what_was_not_run() -> None:
    told = {"value": 1.2, "low": 1.1, "high": 1.3, "target": 1.11, "met": False}
    rows = [{"a": 1, "fine": True}, {"a": 2, "fine": False}, {"ratios": {"x / copy": told}}]
    text = page.page({"machine": result("machine", rows=rows)}, rehearsal=False)
    assert "2030-01-02, A card: done, 2 of 3 rows are not as expected" in text
    assert "| a | fine |\n| --- | --- |\n| 1 | yes |\n| 2 | NO |\n" in text
    assert "NOT met" in text
    not_run = text.partition("## Not run")[2]
    assert all(f"* {part.title}\n" in not_run for part in parts.ALL if part.name != "machine")
    assert "Nothing has been measured" not in text


def test_the_page_begins_with_charts_of_what_was_found_and_of_its_range(tmp_path: Path) -> None:
    told = {"value": 0.5, "low": 0.4, "high": 0.8, "target": 1.0, "met": True}
    found = {name: result(name, rows=[{"ratios": {"x / y": told}}]) for name in ("steps", "kernels")}
    steps, speeds = page.charts(found)
    assert steps.bars == {"x / y": (0.5, 0.4, 0.8)} and speeds.bars == {"x / y": (2.0, 1.25, 2.5)}
    text = page.page(found, rehearsal=False)
    assert (
        text.startswith("# GPU\n\n")
        and "![Step time, as a ratio: x / y 0.50.](../assets/gpu/steps.svg)\n" in text
    )
    assert text.index("steps.svg") < text.index("operators.svg") < text.index("To run it:")
    page.draw(found, tmp_path, rehearsal=False)
    drawn = (tmp_path / "steps.svg").read_text()
    assert "x / y" in drawn and "prefers-color-scheme" in drawn and "#000000" not in drawn


def test_the_page_says_what_is_not_complete() -> None:
    states = {"failed": "FAILED", "stopped": "the time was over", "running": "it was killed"}
    for state, words in states.items():
        assert words in page.page({"machine": result("machine", state=state)}, rehearsal=False)


def test_a_rehearsal_is_never_shown_as_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "RECORDS", tmp_path / "records")
    folder = tmp_path / "rehearsal"
    folder.mkdir()
    (folder / "machine.json").write_text(json.dumps(result("machine", rehearsal=True)))
    with pytest.raises(SystemExit, match="these results are of a rehearsal, and this page is not: machine"):
        page.main(["--folder", str(folder)])
    assert not (tmp_path / "records").exists()
    with pytest.raises(SystemExit, match="of a GPU, and this page is not"):
        page.page({"machine": result("machine")}, rehearsal=True)


def test_an_archive_that_was_brought_back_becomes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, place in {"RECORDS": "records", "CHARTS": "charts", "PAGE": "gpu.md"}.items():
        monkeypatch.setattr(page, name, tmp_path / place)
    folder = tmp_path / "there"
    folder.mkdir()
    tables = ["| row | a |", "|---|--:|", "| x | 1 |", "| ratio | b |", "|---|--:|", "| y | 2 |"]
    run.keep({**result("machine", rows=[{"value": 7}]), "tables": []}, folder)
    run.keep({**result("steps"), "tables": tables}, folder)
    monkeypatch.setenv(archive.VARIABLE, str(tmp_path))
    archive.save(folder)
    page.main(["--archive", str(tmp_path / archive.NAME)])
    assert {file.name for file in (tmp_path / "records").iterdir()} == {"machine.json", "steps.json"}
    text = (tmp_path / "gpu.md").read_text()
    assert "| value |\n| --- |\n| 7 |" in text and "| x | 1 |\n\n| ratio | b |" in text


def test_the_committed_page_is_made_of_the_committed_records() -> None:
    found = page.results_in(page.RECORDS)
    assert page.PAGE.read_text() == page.page(found, rehearsal=False)
    assert all((page.CHARTS / f"{chart.name}.svg").exists() for chart in page.charts(found))


# On a bare machine -------------------------------------------------------------------------------


def ours(module: str) -> Path | None:
    path = ROOT / Path(*module.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.exists()), None)


def imported_by(module: str, path: Path) -> Iterator[str]:
    """Wherever in the file. Also `a.b` for `from a import b`, if that is a module of ours."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            whole = ".".join([*above, *([node.module] if node.module else [])])
            yield whole
            yield from (name for alias in node.names if ours(name := f"{whole}.{alias.name}"))


def reached(modules: Iterable[str]) -> dict[str, set[str]]:
    """All packages that can be imported from these modules, with the modules of ours that do it."""
    found: dict[str, set[str]] = {}
    waiting, seen = [(module, "the day") for module in modules], set()
    while waiting:
        module, by = waiting.pop()
        parts = module.split(".")
        for name in (
            ".".join(parts[:end]) for end in range(1, len(parts) + 1)
        ):  # a package's own file runs, too
            path = ours(name)
            if path is None:
                found.setdefault(parts[0], set()).add(by)
                break
            if name not in seen:
                seen.add(name)
                waiting += [(each, name) for each in imported_by(name, path)]
    return found


def test_what_a_day_runs_imports_nothing_that_a_bare_machine_lacks() -> None:
    files = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "tests" / "gpu").rglob("*.py")]
    modules = [*map(".".join, (file.parts for file in files)), *(part.module for part in parts.ALL)]
    assert len(files) > 20
    found = reached(modules)
    known = {*sys.stdlib_module_names, *BARE, *BELOW}
    assert {name: by for name, by in found.items() if name not in known} == {}
    assert "torch" in found and "pydantic" in found  # the search finds


def test_what_starts_a_day_needs_no_package_at_all() -> None:
    assert {*reached(["tests.gpu.day.__main__"])} <= {*sys.stdlib_module_names}


@pytest.mark.parametrize(
    ("given", "command"),
    [
        (["REHEARSE=1"], "-m tests.gpu.day --rehearse"),
        (["PYTHON=python3", "MINUTES=9.5"], "python3 -m tests.gpu.day --minutes 9.5"),
    ],
)
def test_make_gives_on_what_it_is_told(given: list[str], command: str) -> None:
    make = ["make", "--no-print-directory", "-n", "gpu-day", *given]
    said = subprocess.run(make, cwd=ROOT, capture_output=True, text=True)
    assert " ".join(said.stdout.split()).endswith(command)


# All of it ---------------------------------------------------------------------------------------


NAMES = [part.name for part in parts.ALL]


@pytest.mark.rotates
@pytest.mark.parametrize(
    "names",
    [[rotation.chosen(NAMES)], pytest.param(NAMES, marks=pytest.mark.slow)],
    ids=["a part", "all parts"],
)
def test_a_day_is_rehearsed(names: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every command, parser and file, and the page; on a CPU, which it says."""
    committed = page.PAGE.read_bytes()
    code = run.main(["--rehearse", "--folder", str(tmp_path), "--only", *names])
    said = capfd.readouterr().out
    assert code == 0, said
    found = page.results_in(tmp_path)
    assert [*found] == names
    for name, kept in found.items():
        assert kept["state"] == "done" and kept["rehearsal"] and kept["rows"], name
        assert (tmp_path / f"{name}.log").stat().st_size
    text = (tmp_path / "page.md").read_text()
    assert text.startswith('# Rehearsal on a CPU\n\n!!! warning "Not results"')
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == [
        "Parts",
        *(part.title for part in parts.ALL if part.name in names),
        *(["Not run"] if len(names) < len(NAMES) else []),
    ]
    for name in ("operators", "steps", "largest", "hidden") if names == NAMES else ():
        assert "REHEARSAL ON A CPU, no result" in (tmp_path / "charts" / f"{name}.svg").read_text()
    assert page.PAGE.read_bytes() == committed
    run.main(["--rehearse", "--folder", str(tmp_path), "--list"])
    assert capfd.readouterr().out.count("  done after ") == len(names)


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("names", "kills"),
    [(["build", "tiers"], 1), pytest.param(NAMES, 2, marks=pytest.mark.slow)],
    ids=["two parts", "all parts"],
)
def test_a_day_is_rehearsed_in_calls_that_are_killed(
    names: list[str], kills: int, capfd: pytest.CaptureFixture[str]
) -> None:
    only = [] if names == NAMES else ["--only", *names]
    code = rehearsal.main(["--kills", str(kills), *only])
    said = capfd.readouterr().out
    assert code == 0, said
    table = [line for line in said.splitlines() if line.startswith("| ")]
    assert len(table) >= 2 + kills + 1


def test_a_rehearsal_in_calls_notices_what_went_wrong() -> None:
    killed = rehearsal.Call(60.0, -signal.SIGKILL, ("a", "b"), ("a",), "b")
    last = rehearsal.Call(60.0, 0, ("c", "b"), ("c", "b"), "")
    assert rehearsal.faults([killed, last], 1, ["a", "b", "c"]) == []

    def faults(*calls: rehearsal.Call) -> str:
        return " ".join(rehearsal.faults(calls, 1, ["a", "b", "c"]))

    assert "run again, though no call was killed in it: a" in faults(
        killed, replace(last, begun=("a", "c", "b"))
    )
    assert "not done: c" in faults(killed, replace(last, done=("b",)))
    assert "had to be killed" in faults(replace(killed, killed_in=""), last)
    assert "longer than" in faults(killed, replace(last, seconds=60 * parts.CALL + 1))
