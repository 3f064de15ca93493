"""What stands in a notebook's output: a box for a guess, a slider; and the colours of all plots."""

import html
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lessons import colours
from lessons.notebook import Shown, fold, predict, slider

pytest_plugins = ["tests.site.fixtures"]

ROOT = Path(__file__).parents[2]
FRAMES = [1, 1000, "some"]


def both() -> Shown:
    """A box whose measured part has a slider in it."""
    return predict(
        "bytes", 12.5, "Count <twice>.", slider("N", FRAMES, lambda value: f"at {value} & more", at=1)
    )


def test_what_was_measured_is_folded_and_the_script_stands_there_once() -> None:
    made = both().html
    before, _, after = made.partition("<details>")
    assert "12.5" not in html.unescape(re.sub(r'data-truth="[^"]*"', "", before))
    assert "Measured: 12.5 bytes." in after and "at 1000 &amp; more" in after
    assert made.count("<script>") == 1 and "\n\n" not in made
    assert "&lt;twice&gt;" in made


def test_a_slider_begins_where_it_is_asked_to() -> None:
    made = slider("N", FRAMES, str, at=1).html
    assert re.findall(r'data-value="([^"]*)"( hidden)?', made) == [
        ("1", " hidden"),
        ("1,000", ""),
        ("some", " hidden"),
    ]


def test_a_picture_that_stands_there_twice_has_parts_of_its_own() -> None:
    part = Shown('<svg><path id="a"/><use href="#a"/><g style="fill: url(#a)"/></svg>', "a part")
    made = slider("N", [1, 2], lambda value: part).html
    names = re.findall(r'id="([^"]+)"', made)
    assert len(set(names)) == 2
    for name in names:
        assert f'href="#{name}"' in made and f"url(#{name})" in made


def test_without_html_the_words_are_there() -> None:
    assert repr(both()).startswith("Guess first, in bytes. Measured: 12.5. N 1: at 1 & more")
    assert repr(fold("Show it", "this")) == "this"


@pytest.fixture
def page(browser: Any) -> Any:
    opened = browser.new_page()
    opened.set_content(both().html)
    yield opened
    opened.close()


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("guess", "said", "is_open"),
    [
        ("12.5", "Right.", True),
        ("25/2", "Right.", True),
        ("12,5", "Right.", True),
        ("12", "Measured is more. Count <twice>.", False),
        ("1,000", "Measured is less. Count <twice>.", False),
        ("", "Write a number.", False),
        ("ten", "Write a number.", False),
        ("1/0", "Write a number.", False),
    ],
)
def test_a_guess_is_answered_and_the_right_one_opens(page: Any, guess: str, said: str, is_open: bool) -> None:
    page.get_by_label("Your guess").fill(guess)
    page.get_by_label("Your guess").press("Enter")
    assert page.locator("output").first.inner_text() == said
    assert page.locator("details").evaluate("it => it.open") is is_open


def test_a_slider_shows_one_frame(page: Any) -> None:
    page.locator("summary").click()
    assert page.locator(".zero-frames > div:visible").all_inner_texts() == ["at 1000 & more"]
    page.locator("input[type=range]").press("ArrowRight")
    assert page.locator(".zero-frames > div:visible").all_inner_texts() == ["at some & more"]
    assert page.locator(".zero-slider output").inner_text() == "some"
    assert page.locator("input[type=range]").get_attribute("aria-valuetext") == "some"


def test_style_sheets_have_the_colours_of_the_table() -> None:
    sheets = [
        *(ROOT / "site" / "docs" / "assets" / "css").glob("*.css"),
        ROOT / "lessons/watch_page/page.css",
    ]
    table = {name: colour.lower() for name, colour in colours.MEANINGS.items()}
    defined = Counter()
    for sheet in sheets:
        rules = re.sub(r"/\*.*?\*/", "", sheet.read_text(), flags=re.DOTALL)
        for name, colour in re.findall(r"--(\w+): ([^;]+);", rules):
            if name in table:  # light or dark
                defined[sheet.name, name] += 1
                assert colour == table[name], f"{sheet.name}: {name} is {colour}"
        bare = re.sub(r"--\w+: [^;]+;", "", rules)
        assert not [colour for colour in table.values() if colour in bare], f"{sheet.name} names a colour"
    kinds = ("parameters", "gradients", "optimizer", "activations")
    assert {(sheet, name) for sheet in ("site.css", "page.css") for name in kinds} <= defined.keys()
    assert {sheet for sheet, _ in defined} == {"site.css", "page.css"} and set(defined.values()) == {1}


def test_no_colour_has_two_meanings() -> None:
    named = [*colours.MEANINGS.values(), *colours.SERIES]
    assert len(named) == len(set(named))


def test_python_names_a_colour_only_in_the_table() -> None:
    table = re.compile("|".join((*colours.MEANINGS.values(), *colours.SERIES)), re.IGNORECASE)
    places = [
        *(ROOT / "lessons").rglob("*.py"),
        *(ROOT / "site").rglob("*.py"),
        *(ROOT / "notebooks").glob("*.ipynb"),
    ]
    found = [path.name for path in places if path.name != "colours.py" and table.search(path.read_text())]
    assert not found
