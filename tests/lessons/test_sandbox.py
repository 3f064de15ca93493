"""The sandbox of hand-ins: right answers run in it as elsewhere, and no way out of it leads to the judge."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import zero_min
from lessons import exercise, outside, sandbox
from lessons.grade import grade, most
from lessons.registry import IN_ORDER, LESSONS, Lesson
from lessons.release import release
from tests import rotation
from tests.lessons.test_other_forms import FORMS
from zero_min import formula

STAGE1 = LESSONS[1]
CHEATS = {  # what is put at the end of a file, and a word of the reason
    "the key by __path__": ("import zero_min\nKEY = zero_min.__path__", "__path__"),
    "the key by getattr": ("import zero_min\nKEY = getattr(zero_min, '__path__')", "__path__"),
    "a patched pytest": ("import pytest\npytest.main = lambda *a, **k: 0", "imports pytest"),
    "a patched judge": ("from lessons import evidence\nevidence.same = print", "imports lessons"),
    "a written claims file": ("import sys\nopen(sys.argv[4], 'a').write('{}')", "imports sys"),
    "through torch": ("torch.sys.modules['_pytest'] = None", "uses sys"),
    "by name": ("__import__('os')._exit(0)", "uses __import__"),
    "torch compares all as equal": ("torch.equal = lambda a, b: True", "sets .equal of torch"),
    "the same by setattr": ("setattr(torch, 'equal', lambda a, b: True)", "sets .equal of torch"),
    "the same by partial": (
        "from functools import partial\npartial(setattr, torch)('equal', print)",
        "sets .equal of torch",
    ),
    "the same by a loop": ("for torch.equal in [print]: pass", "sets .equal of torch"),
    "the same by update_wrapper": (
        "import functools\nfunctools.update_wrapper(torch, torch, assigned=('equal',))",
        "update_wrapper",
    ),
    "the same by a class's function": (
        "from zero_min.precision import DynamicScale\nDynamicScale.load_state_dict(torch, {'equal': print})",
        "without a DynamicScale",
    ),
    "the same by a pattern": ("match torch:\n    case object(__dict__=d): d['equal'] = print", "__dict__"),
    "names put together": ("getattr(torch, 's' + 'ys').exit(0)", "uses sys"),
    "a name that lies": (
        "class Name(str):\n    def startswith(self, x): return False\ngetattr(torch, Name('_C'))",
        "uses ._C",
    ),
    "an object equal to all": (
        "class Any2(float):\n    def __eq__(self, other): return True",
        "defines __eq__",
    ),
    "the same without a class": ("type(type(5))('X', (), {'__eq__': print})", "type of a class"),
    "a tensor equal to all": ("class T(torch.Tensor):\n    __torch_function__ = print", "__torch_function__"),
    "a mode over torch": ("from torch.overrides import TorchFunctionMode", "imports torch.overrides"),
    "a ledger that counts nothing": (
        "from zero_min.ledger import Ledger\nLedger.charge = print",
        "sets .charge of Ledger",
    ),
    "a telephone of its own": ("Comm.all_gather = print", "sets .all_gather of Comm"),
    "other formulas": (
        "from zero_min import formula\nformula.held = print",
        "sets .held of zero_min.formula",
    ),
    "settrace": ("import sys\nsys.settrace(print)", "imports sys"),
    "atexit": ("import atexit", "imports atexit"),
    "os._exit": ("import os\nos._exit(0)", "imports os"),
    "os by random": ("import random\nrandom._os.abort()", "uses ._os"),
    "sys by a lesson": ("from zero_min.comm import sys", "uses sys"),
    "a frame by an error": (
        "class C:\n    def __enter__(self): return self\n"
        "    def __exit__(self, kind, error, at): getattr(at, 'tb_' + 'frame')\nwith C(): 1 / 0",
        "tb_frame",
    ),
    "globals of a function": ("getattr(torch.optim.Adam.step, '__glo' + 'bals__')", "__globals__"),
    "a file by numpy": ("torch.zeros(3).numpy().tofile('claims.jsonl')", "uses .numpy"),
    "a file by torch": ("torch.from_file('claims.jsonl', shared=True, size=8)", "not its own file"),
    "a file by a storage": (
        "torch.UntypedStorage.from_file('claims.jsonl', True, 8)",
        "not its own file",
    ),
    "a file by a path": ("from pathlib import Path\nPath('claims').mkdir()", "not its own file"),
    "a pickle": ("torch.save([1], 'claims.jsonl')", "uses .save"),
    "strings that are evaluated": ("from typing import get_type_hints", "get_type_hints"),
    "hooks of all modules": (
        "torch.nn.modules.module.register_module_forward_hook(print)",
        "torch.nn.modules",
    ),
    "a test that skips itself": ("import unittest\nraise unittest.SkipTest", "imports unittest"),
    "processes of its own": ("from os import fork", "imports os"),
}


def right(lesson: Lesson) -> dict[str, str]:
    """The lesson's answers."""
    return {answer.name: exercise.unmarked(answer.read_text(encoding="utf-8")) for answer, _ in lesson.files}


def bindings() -> Iterator[tuple[str, str, int]]:
    """What a cheat would like to rebind."""
    for owner in (torch, torch.Tensor, torch.nn.Module, zero_min.Comm, zero_min.Ledger, formula):
        yield from ((str(owner), name, id(value)) for name, value in vars(owner).items() if callable(value))


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """A function that runs a text as a hand-in of lesson 1."""

    def load(text: str) -> tuple[sandbox.Sandbox, ModuleType]:
        place = tmp_path / "stage1.py"
        place.write_text(text, encoding="utf-8")
        box = sandbox.Sandbox(tmp_path / "own", {"zero_min.stage1": str(place)})
        loader = sandbox.Loader("zero_min.stage1", str(place), box)
        spec = importlib.util.spec_from_file_location("zero_min.stage1", place, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        load.box = box  # type: ignore[attr-defined]
        loader.exec_module(module)
        return box, module

    return load


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_way_to_the_judge_is_closed_and_named(
    cheat: str, load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text, reason = CHEATS[cheat]
    before, source = set(bindings()), right(STAGE1)["stage1.py"] + text + "\n"
    found = outside.reaching({"stage1.py": source})
    if not found:  # it does not show before it runs
        with pytest.raises(sandbox.ReachError):
            load(source)
        found = load.box.reached
    (reached,) = [each for each in found if reason in each]
    line = len(right(STAGE1)["stage1.py"].splitlines())
    assert int(reached.removeprefix("stage1.py, line ").partition(":")[0]) > line
    assert set(bindings()) >= before
    assert not list(tmp_path.glob("claims*"))


def test_what_an_exercise_needs_is_there(load: Any, tmp_path: Path) -> None:
    text = """
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Pair(NamedTuple):
    left: int
    right: int


@dataclass
class Box:
    inside: list[int] = field(default_factory=list)
    kind: type[nn.Module] = nn.Linear

    def __post_init__(self) -> None:
        self._count, self.__secret = 0, 5

    def add(self, *more: int) -> int:
        self._count += len(more)
        self.inside += more
        return self._count * self.__secret


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x * self.weight)


box, layer = Box(), Layer()
setattr(box, "word", getattr(math, "missing", "there"))
x = torch.ones(2, requires_grad=True)
checkpoint(layer, x, use_reentrant=False).sum().backward()
layer.weight.grad.mul_(2)
layer.weight.data = layer.weight.data * 3
RESULT = box.add(1, 2), box.word, layer.weight.grad.tolist(), layer.weight.tolist(), Pair(1, 2).right
RESULT += type(box).__name__, isinstance(Box, type), hasattr(box, "no"), vars(box)["inside"]
RESULT += (partial(max, 3)(2),)
"""
    _, module = load(text)
    assert module.RESULT == (10, "there", [2.0, 2.0], [3.0, 3.0], 2, "Box", True, False, [1, 2], 3)


QUICK = [lesson for lesson in IN_ORDER if lesson.number not in (4, 5, 6, 8)]  # the others take 5 s and more
SLOW = [pytest.param(lesson, marks=pytest.mark.slow) for lesson in IN_ORDER if lesson not in QUICK]


@pytest.mark.parametrize("lesson", [*rotation.one_of(QUICK), *SLOW], ids=lambda lesson: str(lesson.number))
def test_a_right_answer_has_all_points_in_the_sandbox(lesson: Lesson, tmp_path: Path) -> None:
    works = [tmp_path / name for name in right(lesson)]
    for work, text in zip(works, right(lesson).values(), strict=True):
        work.write_text(text, encoding="utf-8")
    report = grade(lesson, works, {}, sandboxed=True)
    assert (report["points"], report["reached"], report["error"]) == (most(lesson), [], None), report


@pytest.mark.parametrize("number", FORMS)
def test_other_forms_of_an_answer_do_not_look_like_cheats(number: str) -> None:
    lesson = exercise.find_lesson(number)
    ((answer, _),) = lesson.files
    text = exercise.blank(answer, lesson.number)
    assert outside.reaching({answer.name: text}) == []
    for form in FORMS[number].values():
        assert outside.reaching({answer.name: f"def task():\n{partial(indent, margin=4)(form)}"}) == []


def indent(text: str, margin: int) -> str:
    """Each line further to the right."""
    return "\n".join(" " * margin + line for line in text.splitlines())


BLANK = 'NotImplementedError("lesson 2, task arrived: python -m lessons hint 2 arrived")'
DODGES = [f"raise {BLANK}", f"raise ValueError from {BLANK}"]  # what the blank of another lesson would raise


@pytest.mark.rotates
def test_a_claim_cannot_be_dodged_as_if_another_lesson_were_blank(tmp_path: Path) -> None:
    folder, dodge = tmp_path / "release", rotation.chosen(DODGES)
    release(folder, ["1"])
    (folder / "work").mkdir()
    source = right(STAGE1)["stage1.py"]
    assert source.count("    base, remaining") == 1
    text = source.replace("    base, remaining", f"    {dodge}\n    base, remaining")
    (folder / "work" / "stage1.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "lessons", "check", "1", "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    said = json.loads(done.stdout)
    assert said["contract"]["passed"] is None and said["points"] <= 20, done.stdout
    assert not any("needs" in claim for claim in said["claims"])
