"""The learner's own copies: made once, kept, and told when the original has changed."""

import json
from pathlib import Path

import pytest

from lessons import notebook_copies
from lessons.exercise import LessonError
from lessons.notebook_copies import copy_all

LINK = "[lesson](../lessons/x.md), [next](01_next.ipynb)"


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    originals = tmp_path / "notebooks"
    originals.mkdir()
    for name in ("00_first", "00b_half", "01_next"):
        cells = [{"cell_type": "markdown", "source": [LINK]}, {"cell_type": "code", "source": ["x](../y"]}]
        (originals / f"{name}.ipynb").write_text(json.dumps({"cells": cells, "metadata": {}}))
    monkeypatch.setattr(notebook_copies, "ORIGINALS", originals)
    monkeypatch.setattr(notebook_copies, "COPIES", tmp_path / "work" / "notebooks")
    return tmp_path


def test_all_are_copied_with_links_that_go_one_folder_further(folders: Path) -> None:
    said = copy_all("1/2", force=False)
    copies = sorted((folders / "work" / "notebooks").iterdir())
    assert [path.name for path in copies] == ["00_first.ipynb", "00b_half.ipynb", "01_next.ipynb"]
    words, code = json.loads(copies[1].read_text())["cells"]
    assert words["source"] == ["[lesson](../../lessons/x.md), [next](01_next.ipynb)"]
    assert code["source"] == ["x](../y"]
    assert "00b_half.ipynb" in said


def test_a_copy_stays_until_a_new_one_is_asked_for(folders: Path) -> None:
    copy_all(None, force=False)
    original, copy = (folders / place / "00_first.ipynb" for place in ("notebooks", "work/notebooks"))
    changed = json.loads(copy.read_text())
    changed["cells"].append({"cell_type": "code", "source": ["mine"]})
    copy.write_text(json.dumps(changed))
    assert "--force" not in copy_all("0", force=False)
    original.write_text(json.dumps({"cells": [], "metadata": {}}))
    assert "lessons notebook 0 --force" in copy_all("0", force=False)
    assert "mine" in copy.read_text()
    copy_all("0", force=True)
    assert json.loads(copy.read_text())["cells"] == []
    assert "--force" not in copy_all("0", force=False)


def test_what_cannot_be_is_said(folders: Path) -> None:
    with pytest.raises(LessonError, match=r"no notebook 5; there are 0, 1/2, 1"):
        copy_all("5", force=False)
    with pytest.raises(LessonError, match="--force needs a number"):
        copy_all(None, force=True)
    copy_all("0", force=False)
    (folders / "work" / "notebooks" / "00_first.ipynb").write_text("{")
    with pytest.raises(LessonError, match="not a notebook any more"):
        copy_all("0", force=False)
