"""The page that checks a configuration says what Python says; every key of the reference can be found."""

import ast
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import checker
import config_page
import pytest
import rules_in_js
from places import SiteError

from tests.site.browser import Open
from tests.zero_full.random_configs import texts
from zero_full.check.check_command import check_file
from zero_full.config import check, rules
from zero_full.config.verdicts import VerdictKind

pytest_plugins = ["tests.site.fixtures"]

FILES = sorted((Path(__file__).parents[1] / "zero_full" / "deepspeed_configs").glob("*.json"))
ASK = """cases => cases.map(([text, world]) => {
  const found = zeroCheck.check(text, world === null ? null : BigInt(world))
  return [found.verdicts, Number(found.world)]
})"""


def cases() -> Iterator[tuple[str, int | None]]:
    """(text, ranks): 30 configurations as they are in public, 100 by chance, and what these lack."""
    generator = random.Random(0)
    for size in (32.0, 8e6, 32.5, 2**31, True):
        yield json.dumps({"train_batch_size": size, "train_micro_batch_size_per_gpu": 1}), None
    for inside in ({"tp_size": 4}, {"tp": {"tp_size": 2}}, {"tp": {"tp_size": "4"}, "tp_size": 1}, {"tp": 4}):
        yield json.dumps({"tensor_parallel": inside}), 2
    yield json.dumps({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}), 3
    comments = {"_comment": {"by": "me"}, "cuda_aware": True, "zero_optimization": {"_why": [1]}}
    offload = {"device": "auto", "nvme_path": "auto"}
    parts = {
        "stage": "auto",
        "offload_optimizer": offload,
        "offload_param": {"device": "nvme", "nvme_path": "auto"},
    }
    optimizer = {"type": "Adam", "params": {"betas": "auto", "eps": "auto", "amsgrad": "auto"}}
    for found in (
        comments,
        {"zero_optimization": parts, "optimizer": optimizer, "bfloat16": {"enabled": "auto"}},
    ):
        yield json.dumps(found), 2
    for text in (*(path.read_text() for path in FILES), *texts(0, 100)):
        yield text, generator.choice([None, 1, 2, 3, 8])


def test_the_page_s_verdicts_are_python_s(open_page: Open) -> None:
    asked, kinds = list(cases()), set()
    shown = open_page("check.html").evaluate(ASK, asked)
    for (text, world), (verdicts, ranks) in zip(asked, shown, strict=True):
        checked = check(text, world)
        expected = [{**each._asdict(), "path": list(each.path)} for each in checked.verdicts]
        assert (verdicts, ranks) == (expected, checked.world), text
        kinds |= {each.kind for each in checked.verdicts}
    assert kinds == set(get_args(VerdictKind)) and len(asked) == 142


def test_every_rule_speaks_in_these_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or an error in its translation would not be seen."""
    heard, rule = set(), rules.Rule

    def noted(*parts: Any) -> rules.Rule:
        heard.add(sys._getframe(1).f_lineno)
        return rule(*parts)

    monkeypatch.setattr(rules, "Rule", noted)
    for text, world in cases():
        check(text, world)
    source = Path(rules.__file__).read_text()
    spoken = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Yield)]
    silent = [node.lineno for node in spoken if heard.isdisjoint(range(node.lineno, node.end_lineno + 1))]
    assert len(spoken) > 30 and not silent


@pytest.mark.slow
def test_so_they_are_for_many_more(open_page: Open) -> None:
    asked = [(text, 1 + place % 8) for place, text in enumerate(texts(1, 3000))]
    shown = open_page("check.html").evaluate(ASK, asked)
    for (text, world), (verdicts, _) in zip(asked, shown, strict=True):
        assert verdicts == [{**v._asdict(), "path": list(v.path)} for v in check(text, world).verdicts], text


def test_the_command_agrees_but_for_what_the_page_says_it_does_not_know() -> None:
    for path in FILES:
        known = {v for v in check(path.read_text(), None).verdicts if v.kind != "unknown"}
        found = check_file(path, None).verdicts
        assert known <= set(found), path.name
        assert all(v.path[0] in ("optimizer", "scheduler") for v in set(found) - known), path.name


def typed(page: Any, text: str, ranks: str = "") -> str:
    page.fill("#checker-text", text)
    page.fill("[name=ranks]", ranks)
    answer: str = page.inner_text("#checker-result .answer")
    return answer


def test_lines_have_their_verdicts_and_only_the_loud_ones_if_asked(open_page: Open) -> None:
    page = open_page("check.html", width=390)
    text = '{\n"gradient_clipping": 1,\n"fp16": {"enabled": true, "hysterisis": 1},\n"dump_state": 1\n}'
    assert typed(page, text, "8") == "On 8 ranks: 1 mistake, 1 warning."
    lines = page.locator("#checker-result li")
    assert "= default gradient_clipping" in lines.nth(1).inner_text()
    third = lines.nth(2).inner_text()
    assert "✓ ok fp16.enabled" in third and "✗ refused fp16.hysterisis: unknown key; did you mean" in third
    assert lines.nth(3).locator("a.key").get_attribute("href") == "configuration.html#dump_state"
    page.focus("[name=loud]")
    page.keyboard.press("Space")
    assert [lines.nth(place).is_visible() for place in range(5)] == [False, False, True, True, False]


def test_what_the_page_cannot_know_it_says(open_page: Open) -> None:
    page = open_page("check.html")
    said = typed(page, '{"gradient_clipping": 0, "optimizer": {"type": "AdamV"}}')
    assert (
        said == "On 1 rank: nothing wrong so far, 1 key not looked at, only python -m zero_full check knows."
    )
    assert typed(page, '{"gradient_clipping": 0}') == "On 1 rank: ok."
    assert typed(page, '{"gradient_clipping": 0', "2") == "On 2 ranks: 1 mistake."
    assert typed(page, "{}", "eight").startswith("ranks: give a whole number")
    assert page.locator("#checker-result li").count() == 0
    assert typed(page, " ") == "Paste a configuration above."


def test_a_file_is_opened_and_what_it_says_is_text(open_page: Open, tmp_path: Path) -> None:
    page, path = open_page("check.html"), tmp_path / "ds.json"
    path.write_bytes(b'\xef\xbb\xbf{\r\n"<img src=x onerror=alert(1)>": 1}')
    page.set_input_files("[name=file]", path)
    page.wait_for_selector("#checker-result li.wrong")
    assert "<img" in page.inner_text("#checker-result li.wrong") and not page.locator("article img").count()


# The reference -----------------------------------------------------------------------------------


def test_the_filter_leaves_the_keys_with_its_words_and_opens_their_folds(open_page: Open) -> None:
    page = open_page("configuration.html")
    page.fill("#key-filter input", "flops torch.profiler")
    assert page.inner_text("#key-filter span").startswith("1 of ")
    assert page.is_visible("[id='flops_profiler']") and not page.is_visible("[id='zero_optimization']")
    page.fill("#key-filter input", "")
    assert not page.is_visible("[id='flops_profiler']") and page.is_visible("[id='zero_optimization.stage']")


def test_every_key_has_an_anchor_and_a_link_opens_its_fold(open_page: Open) -> None:
    page = open_page("configuration.html#zero_optimization.cpu_offload_param", width=390)
    row = page.locator("tr", has=page.locator("[id='zero_optimization.cpu_offload_param']"))
    assert row.is_visible() and 'write "offload_param": {"device": "cpu"}' in row.inner_text()
    ids = set(page.evaluate("[...document.querySelectorAll('article [id]')].map(each => each.id)"))
    assert set(checker.messages.known_keys()) <= ids


def test_on_a_phone_the_reference_shows_what_each_key_does(open_page: Open) -> None:
    page = open_page("configuration.html", width=390)
    page.evaluate("document.querySelectorAll('details').forEach(each => (each.open = true))")
    cells = page.evaluate(
        """[...document.querySelectorAll('.keys td')].map(each => {
          const box = each.getBoundingClientRect()
          return [box.left, box.right, each.scrollWidth - each.clientWidth]
        })"""
    )
    assert len(cells) > 400
    assert all(0 <= left < right <= 390 and beyond <= 0 for left, right, beyond in cells)


def test_numbers_are_written_as_people_write_them() -> None:
    keys = {f"{section}.{key.name}": key for section, _, keys in config_page.sections() for key in keys}
    shown = {name.removeprefix("zero_optimization."): config_page._default(key) for name, key in keys.items()}
    assert shown["reduce_bucket_size"] == "`5e8`" and shown["stage3_param_persistence_threshold"] == "`1e5`"
    assert (
        shown["stage3_model_persistence_threshold"] == "unlimited" and shown["aio.block_size"] == "`1048576`"
    )


# The translation ---------------------------------------------------------------------------------


def test_a_rule_that_cannot_be_translated_stops_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules_in_js, "ROOT", tmp_path)
    monkeypatch.setattr(rules_in_js, "SOURCE", "rules.py")
    for line in (
        "yield [x for x in config]",
        "x = config.y if 1 < 2 < 3 else 0",
        "while config: pass",
        "x = -1",
    ):
        (tmp_path / "rules.py").write_text(f"def f(config):\n    {line}\n")
        with pytest.raises(SiteError, match=r"rules\.py, line 2: rules_in_js\.py cannot translate"):
            rules_in_js.translated()
    with pytest.raises(SiteError, match=r"does not know how a value of .*complex"):
        checker._steps("key", complex)


def test_numbers_for_the_page_keep_their_kind() -> None:
    value = {"a": [1, 2.0, True, None, 2**63]}
    assert checker.in_js(value) == '{"a": [1n, 2.0, true, null, 9223372036854775808n]}'
    assert json.loads(checker.in_js({"b": "\u2028"})) == {"b": "\u2028"}
