"""What the site says of the ways of a gradient and of a parameter is about functions that there are."""

import re

import pytest

from tests.structure.test_structure import tree_of
from tests.structure.ways import ROOT, count

ROW = re.compile(r"^\| `([\w/]+\.py)` \| (.+) \|$", re.MULTILINE)
AGAIN = "run python -m tests.structure.ways --before COMMIT, and keep what it prints in site/records/ways.md"


def is_defined(file: str, name: str) -> bool:
    """Whether a file of zero_full has this function; what is defined inside another one is not looked for."""
    body = tree_of(ROOT / "zero_full" / file).body
    for part in name.partition(".<locals>")[0].split("."):
        found = next((node for node in body if getattr(node, "name", "") == part), None)
        if found is None:
            return False
        body = getattr(found, "body", [])
    return True


def test_the_record_names_functions_that_there_are() -> None:
    rows = ROW.findall((ROOT / "site" / "records" / "ways.md").read_text())
    named = [(file, name) for file, names in rows for name in re.findall(r"`([^`]+)`", names)]
    assert len(named) > 50
    gone = [each for each in named if not (ROOT / "zero_full" / each[0]).exists() or not is_defined(*each)]
    assert not gone, AGAIN


@pytest.mark.rotates
def test_a_gradient_is_followed_from_autograd_to_the_sweep() -> None:
    names = [name for _, name in count("gradient")]
    way = [
        "GradientReducer.arrived",
        "FlatGradients.take",
        "FlatGradients.reduce",
        "Master.fetch",
        "fused_step",
    ]
    assert [name for name in names if name in way] == way
    assert "Engine.backward" not in names and "ZeroOptimizer._agree" not in names
