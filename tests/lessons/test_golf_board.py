"""The public board of golf: what is on it is true, and what is forged or breaks a rule is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import golf_page
import places
import pytest

from lessons import golf, golf_board, golf_rules, registry
from lessons.__main__ import main
from lessons.exercise import LessonError
from lessons.golf_board import BOARD, OURS, RULES, START, Entry, difference, entries, read, refused, replay
from lessons.registry import COURSES

Capture = pytest.CaptureFixture[str]
CODE = START.read_text(encoding="utf-8").replace("It works, and costs too much", "Mine")
COST = {"peak": 100, "sent": 200, "calls": 3}
FILES = sorted(BOARD.glob("*.json"))


def entry(name: str = "Ada", code: str = CODE, **other: Any) -> Entry:
    """Somebody's entry for course 1."""
    made = Entry(RULES, "1", name, "2026-11-26", 90.0, COST, code.splitlines())
    return dataclasses.replace(made, **other)


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A board of our own, which is empty, and a work/ folder; nothing is played."""
    monkeypatch.setattr(golf_board, "BOARD", tmp_path / "board")
    monkeypatch.setattr(registry, "WORK", tmp_path / "work")
    monkeypatch.setattr(golf_board, "judged", lambda *_: {"cost": COST, "score": 90.0, "told": ""})
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "golf1.py").write_text(CODE, encoding="utf-8")
    return tmp_path / "board"


def test_all_entries_keep_the_rules_and_each_course_has_its_start() -> None:
    found = entries()
    assert [
        why for each, path in ((read(path), path) for path in FILES) if (why := refused(each, path, found))
    ] == []
    starts = [each for each in found if each.name == OURS]
    assert [each.course for each in starts] == list(COURSES) and all(each.is_start for each in starts)


@pytest.mark.rotates
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_an_entry_claims_is_what_it_costs(path: Path) -> None:
    rows, fine = replay([path])
    assert fine, rows


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({"cost": {**COST, "peak": 101}, "score": 90.0, "told": ""}, "it claims peak 100, and has 101"),
        ({"cost": {**COST, "calls": 40}, "score": 90.0, "told": ""}, "it claims calls 3, and has 40"),
        ({"cost": COST, "score": 91.5, "told": ""}, "it claims a score of 90.0, and has 91.5"),
        ({"cost": COST, "score": 90.0, "told": "no number may exceed"}, "no number may exceed"),
        ({"told": "stopped after 120 s"}, "stopped after 120 s"),
        ({"cost": COST, "score": 90.0, "told": ""}, ""),
    ],
)
def test_a_claim_is_compared_number_by_number(found: dict[str, Any], why: str) -> None:
    assert difference(entry(), found) == why


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("import os", "imports os"),
        ("from lessons import golf", "imports lessons"),
        ("x = open('/tmp/x')", "uses open"),
        ("self.comm.ledger.clear_traffic()", "uses .ledger"),
        ("self.comm._counted.clear()", "uses ._counted, which is private"),
        ("self.comm.world.mail", "uses .world"),
        ("self.comm.__class__ = Free", "uses .__class__"),
        ("setattr(self.comm, 'rank', 0)", "uses setattr"),
        ("L = zero_min.Ledger; L.live = lambda self: 0", "changes .live, which belongs to the meter"),
        ("torch.cat = print", "changes torch.cat, which all ranks share"),
        ("zero_min.STAGES[9] = p", "changes zero_min.STAGES[9], which all ranks share"),
        ("zero_min.STAGES.update(x=p)", "calls zero_min.STAGES.update, which changes what all ranks share"),
        ("self.numbers = p.numpy()", "uses .numpy"),
        ("from torch.utils._python_dispatch import _disable_current_modes", "imports torch.utils._python"),
        ("def broken(:", "it is not Python"),
    ],
)
def test_a_line_that_breaks_a_rule_is_named(line: str, why: str) -> None:
    code = f"import torch\nimport zero_min\n{line}\n"
    told = golf_rules.broken(code)
    assert any(each.startswith("line 3: ") and why in each for each in told), told
    assert why in refused(entry(code=code), entry(code=code).path, [])


def test_what_schedules_need_is_allowed() -> None:
    kept = (
        registry.ROOT / f"zero_min/{name}.py" for name in ("stage1", "stage2", "stage3", "prefetch", "adam")
    )
    for path in (START, *kept):
        assert golf_rules.broken(path.read_text(encoding="utf-8")) == [], path


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"rules": 0}, "it was played by rules 0"),
        ({"name": "A" * 41}, "is no name for the board"),
        ({"name": "\u202eevil"}, "is no name for the board"),
        ({"name": "///"}, "is no name for the board"),
        ({"name": "Ádá"}, "course 1 has an entry of 'ada' already"),
        ({"name": "Eve", "code": START.read_text(encoding="utf-8")}, "the file with which the course begins"),
        ({"name": OURS}, "is the name of the file with which the course begins"),
        ({"name": "Bob"}, ""),
    ],
)
def test_what_cannot_be_on_the_board_is_refused_with_the_reason(changed: dict[str, Any], why: str) -> None:
    mine = entry(**changed)
    told = refused(mine, mine.path, [entry(name="ada"), mine])
    assert why in told and bool(told) == bool(why)


def test_a_file_with_another_name_or_content_is_refused(tmp_path: Path) -> None:
    mine = entry()
    assert refused(mine, tmp_path / "other.json", [mine]) == "its file must be called 1_ada.json"
    for text in ("{", "[]", json.dumps({"kind": golf_board.KIND, **dataclasses.asdict(mine), "course": "9"})):
        (tmp_path / "1_ada.json").write_text(text, encoding="utf-8")
        with pytest.raises(LessonError, match=r"1_ada\.json is not an entry of the board"):
            read(tmp_path / "1_ada.json")


def test_an_entry_is_written_once_and_can_be_read(board: Path, capsys: Capture) -> None:
    assert main(["golf", "1", "--submit", "Ada"]) == 0
    assert "1_ada.json: course 1, 90.0. Open a pull request" in capsys.readouterr().out
    written = read(board / "1_ada.json")
    assert (written.name, written.score, written.cost, written.source) == ("Ada", 90.0, COST, CODE)
    assert main(["golf", "1", "--submit", "ADA"]) == 2
    assert "course 1 has an entry of 'Ada' already: one for each name" in capsys.readouterr().err
    assert main(["golf", "--board"]) == 0 and "Ada" in capsys.readouterr().out
    assert main(["golf", "--replay"]) == 0 and "counts" in capsys.readouterr().out
    golf_board.write(dataclasses.replace(written, score=80.0))
    assert main(["golf", "--replay", str(board / "1_ada.json")]) == 1
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "does not count: it claims a score of 80.0, and has 90.0" in said


def test_the_start_cannot_be_handed_in(board: Path, capsys: Capture) -> None:
    (registry.WORK / "golf1.py").write_text(START.read_text(encoding="utf-8"), encoding="utf-8")
    assert main(["golf", "1", "--submit", "Ada"]) == 2
    assert "not written: it is the file with which the course begins" in capsys.readouterr().err
    assert main(["golf", "2", "--submit", "Ada"]) == 2
    assert "golf2.py does not exist yet: python -m lessons golf 2" in capsys.readouterr().err
    assert not board.exists()


def test_each_rank_has_names_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "schedule.py"
    file.write_text(
        "shared = []\nclass Schedule:\n    def __init__(self, *_):\n        self.shared = shared\n"
    )
    make = golf.schedule_of(file)
    ranks: list[Any] = [make(None, None, 0.1) for _ in range(2)]  # type: ignore[arg-type]
    assert ranks[0].shared is not ranks[1].shared


def test_the_page_shows_names_as_they_are_and_stops_at_a_broken_rule(board: Path) -> None:
    golf_board.write(entry(name="<b>|*x*", code=CODE + "# ```\n"))
    text = golf_page.render("board", "golf.md")
    assert "&#60;b&#62;&#124;&#42;x&#42;" in text and "<b>" not in text
    assert "````python" in text
    golf_board.write(entry(name="Eve", code="import os\n"))
    with pytest.raises(places.SiteError, match=r"1_eve\.json: it breaks the rules: line 1: imports os"):
        golf_page.render("board", "golf.md")
