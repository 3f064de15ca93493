"""A failure is named by what it looks like, whatever the lesson."""

from pathlib import Path
from typing import Any

import pytest

from lessons import registry
from lessons.diagnose import SAID, of_error, of_facts
from lessons.evidence import Facts, WrongError, alike, same, shown
from lessons.exercise import find_lesson, unmarked
from lessons.verdict import Failure, failure_of, idle_line, verdict

FOUND: list[tuple[str, Any, Any, dict[str, Any]]] = [
    ("sum", [[3.0, 3.0], [3.0, 0.0]], [[1.5, 1.5], [1.5, 0.0]], {"world": 2, "by_rank": True}),
    ("alone", [[1.0], [2.0]], [[1.5], [1.5]], {"world": 2, "alone": [[1.0], [2.0]]}),
    ("mean of the mean", [0.75, 0.5], [1.5, 1.0], {"world": 2}),
    ("last only", [1.0, 2.0], [3.0, 6.0], {"world": 2, "micro_batches": 3}),
    ("ratio", [2.5, 5.0], [1.0, 2.0], {"world": 2}),
    ("sign", [-1.0, 2.0], [1.0, -2.0], {"world": 2}),
    ("order", [0, 1, 2, 3, 4], [0, 2, 4, 1, 3], {}),
    ("padding", [1.0, 2.0], [1.0, 2.0, 0.0], {}),
    ("padding", [1.0, 2.0, 0.0, 0.0], [1.0, 2.0, 0.0], {}),
    ("padding", [0.0, 1.0, 2.0], [1.0, 2.0], {}),
    ("cut", [3, 3, 3, 1], [3, 3, 2, 2], {}),
    ("cut", [[1.5], [2.5, 3.5]], [[1.5, 2.5], [3.5]], {"by_rank": True, "world": 2}),
    ("length", [1.0, 2.0, 3.0], [1.0, 2.0], {}),
    ("no advance", [1.0, 1.0], [0.9, 0.8], {"before": [1.0, 1.0]}),
    ("changed", [3.0, 1.0], [1.0, 1.0], {"before": [1.0, 1.0]}),
    ("not collected", [0.9, 1.0], [0.9, 0.8], {"before": [1.0, 1.0]}),
    ("foreign slice", [[1.0, 2.0], [1.0, 2.0]], [[1.0, 2.0], [3.0, 4.0]], {"by_rank": True, "world": 2}),
    ("not finite", [1.0, float("nan")], [1.0, 2.0], {}),
    ("nothing", None, [1.0], {}),
    ("nothing", [None, None], [[1.0], [2.0]], {"by_rank": True, "world": 2}),
    ("other", [1.0, 7.5], [1.0, 2.0], {}),
    ("other", "text", [1.0, 2.0], {}),
    ("everybody", ["all_reduce"], ["reduce_scatter"], {"about": "calls"}),
    ("everybody", [["all_reduce"]] * 2, [["reduce_scatter"]] * 2, {"about": "calls", "by_rank": True}),
    ("one by one", ["broadcast"] * 3, ["all_gather"], {"about": "calls"}),
    ("silent", [], ["all_gather"], {"about": "calls"}),
    ("another call", ["all_gather"], ["all_to_all"], {"about": "calls"}),
    ("too many calls", ["all_reduce"] * 2, ["all_reduce"], {"about": "calls"}),
    ("ranks differ", [["all_reduce"], []], [["all_reduce"]] * 2, {"about": "calls", "by_rank": True}),
    ("order", ["a", "b"], ["b", "a"], {"about": "calls"}),
    ("does not happen", ["gather a"], ["gather a", "gather b"], {"about": "events"}),
    ("happens too much", ["gather a", "gather b"], ["gather a"], {"about": "events"}),
    ("at another time", ["gather b"], ["gather a"], {"about": "events"}),
    ("order", ["b", "a"], ["a", "b"], {"about": "events"}),
    ("too many bytes", [8, 8], [4, 4], {"about": "bytes"}),
    ("too few bytes", [4, 0], [4, 4], {"about": "bytes"}),
    ("ranks differ", [8, 0], [4, 4], {"about": "bytes", "by_rank": True}),
    ("dtype", "torch.float32", "torch.bfloat16", {"about": "dtype"}),
    ("copy", False, True, {"about": "memory"}),
    ("view", True, False, {"about": "memory"}),
    ("view", [24, 24], [12, 12], {"about": "memory"}),
    ("memory", [0, 0], [12, 12], {"about": "memory"}),
    ("forgotten None", [[1.0], None], [None, None], {"about": "kept"}),
    ("forgotten None", 2, 0, {"about": "kept"}),
    ("let go", 0, 1, {"about": "kept"}),
    ("lookalike", [2.0], [1.0], {"lookalikes": {"you forgot the rest": [2.0]}, "world": 2}),
]
RAISED = [
    ("blank", "NotImplementedError", "lesson 1, task gather: python -m lessons hint 1 gather"),
    ("waiting ranks", "WorldError", "rank 1 never arrived (limit 60 s):"),
    ("waiting ranks", "WorldError", "the ranks made different calls:"),
    ("waiting ranks", "WorldError", "rank 1 waits for rank 0, which sends nothing (limit 60 s):"),
    ("deadlock", "WorldError", "nobody can go on, because nobody is left who could send:"),
    ("unequal parts", "ValueError", "all_gather needs equal parts: 2 ranks x 5 elements do not fill 9"),
    ("hook returns", "TypeError", "expected Variable, but hook returned 'Bucket'"),
    ("refused", "ValueError", "3 parts for 2 ranks: give every rank one, empty or not"),
    ("raises", "TypeError", "'NoneType' object is not iterable"),
]


@pytest.mark.parametrize(("mistake", "got", "expected", "known"), FOUND, ids=[row[0] for row in FOUND])
def test_two_sides_that_differ_have_a_name(
    mistake: str, got: Any, expected: Any, known: dict[str, Any]
) -> None:
    with pytest.raises(WrongError) as caught:
        same("what is compared", got, expected, **known)
    found = of_facts(caught.value.facts)
    assert found.mistake == mistake
    assert found.words and "{" not in found.words


@pytest.mark.parametrize(("mistake", "name", "message"), RAISED)
def test_an_error_has_a_name(mistake: str, name: str, message: str) -> None:
    assert of_error(name, message).mistake == mistake


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("gradiant = 1\ngradient", "there is no `gradient` here: is `gradiant` meant?"),
        ("lenn([])", "there is no `lenn` here: is `len` meant?"),
        ("[].appendd(1)", "there is no `appendd` here: is `append` meant?"),
        ("None.append(1)", "Python stopped in your line"),
        ("xqz", "Python stopped in your line"),
        ("1 / 0", "Python stopped in your line"),
    ],
)
def test_a_misspelt_name_is_told_with_the_one_it_is_like(line: str, said: str, tmp_path: Path) -> None:
    work = tmp_path / "stage1.py"
    with pytest.raises((NameError, AttributeError, ZeroDivisionError)) as caught:
        exec(compile(line, str(work), "exec"), {})
    failure = failure_of("test_reduce_averages", caught.value, [work])
    assert of_error(failure.error, failure.message, failure.misspelt).words == said
    elsewhere = failure_of("test_reduce_averages", caught.value, [])
    assert elsewhere.misspelt is None, "only a learner's own line may be misspelt"


def test_what_a_hook_returned_is_in_no_line_that_was_running() -> None:
    lesson = find_lesson("2")
    work = lesson.files[0][1]
    running = ((work, 1),)
    seen = verdict(lesson, Failure("test_arrived_x", "TypeError", "hook returned 'Bucket'", places=running))
    assert seen.place is None and seen.tasks == ["arrived"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("s.gather", "does nothing: `s.gather` stands alone, and `s.gather()` would call it"),
        ("s.flat == 0", "does nothing: `s.flat == 0` stands alone, and its value is not kept"),
        ("s.gather()", ""),
    ],
)
def test_a_line_that_does_nothing_is_told(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "WORK", tmp_path)
    lesson = find_lesson("3")
    for answer, work in lesson.files:
        text = unmarked(answer.read_text()).replace("            s.gather()\n", f"            {line}\n", 1)
        work.write_text(text)
    found = idle_line(lesson, "before")
    assert found.endswith(said) and bool(found) == bool(said)


def test_every_name_is_used_somewhere_here() -> None:
    assert {row[0] for row in [*FOUND, *RAISED]} == set(SAID) - {"misspelt"}


def test_the_first_cause_that_fits_is_said() -> None:
    facts = Facts("x", [1.0], [2.0], lookalikes={"no": [3.0], "the cause": [2.0]})
    assert of_facts(facts).words == "the cause"


def test_the_same_is_no_failure() -> None:
    same("numbers", [1, 2.0], (1.0, 2))
    same("near", [1.0], [1.0 + 1e-7], near=1e-6)
    same("nothing", None, None)
    assert not alike([1.0], [1.0, 2.0]) and not alike(True, 1) and not alike(None, 0)


def test_a_failure_shows_both_sides() -> None:
    with pytest.raises(WrongError, match=r"^the sum: expected \[0.3\], got nothing$"):
        same("the sum", None, [0.1 + 0.2])
    assert shown([0] * 30).endswith(", ...]")
