"""The page of a watched run, in a browser: keys, both directions, a narrow screen, no requests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lessons import watch
from lessons.registry import LESSONS
from tests.site.browser import watch as listen
from tests.site.test_browser import violations

pytest_plugins = ["tests.site.fixtures"]


@pytest.fixture(scope="module")
def runs() -> dict[str, dict[str, Any]]:
    """A run that ends well, and the same as if rank 2 had not come to its last call."""
    good = watch.watched(LESSONS[2])
    last = [good["moments"][-1][0], [1, 1, 0, 1], -1, []]
    end = [
        f"rank {rank} {'has ended' if rank == 2 else 'waits in all_gather for rank 2'}" for rank in range(4)
    ]
    return {
        "good": good,
        "hang": {
            **good,
            "moments": [*good["moments"][:-1], last],
            "end": end,
            "waitsFor": [[2], [2], [], [2]],
            "error": "E",
        },
    }


@pytest.fixture(params=[("good", 1440, "light"), ("good", 390, "dark"), ("hang", 390, "light")], ids=str)
def opened(
    request: Any, browser: Any, runs: dict[str, dict[str, Any]], tmp_path: Path
) -> Iterator[tuple[Any, str, dict[str, Any]]]:
    """A page in one of several looks, and what it shows; anything that goes wrong fails the test."""
    name, width, scheme = request.param
    path, troubles = tmp_path / "watch.html", list[str]()
    path.write_text(watch.page(runs[name]), encoding="utf-8")
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    listen(page, troubles)
    page.goto(path.as_uri())
    yield page, name, runs[name]
    context.close()
    assert not troubles


def shown(page: Any) -> list[str]:
    """The caption, every rank's line and its bytes, the wire."""
    marked = page.locator(".rank").evaluate_all("all => all.map((rank) => rank.dataset.line)")
    return [
        page.inner_text(".caption"),
        *marked,
        *page.locator(".bytes").all_inner_texts(),
        page.inner_html(".wire"),
    ]


@pytest.mark.rotates
def test_it_steps_both_ways_and_shows_what_was_recorded(opened: tuple[Any, str, dict[str, Any]]) -> None:
    page, name, run = opened
    assert page.evaluate("zeroWatch.at()") == run["start"] > 0
    before = [shown(page)]
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
        before.append(shown(page))
    assert len({tuple(map(str, each)) for each in before}) == len(before)
    for key, wanted in zip(("ArrowLeft", "ArrowUp"), (before[3], before[0]), strict=True):
        page.keyboard.press(key)
        assert key == "ArrowUp" or shown(page) == wanted
    place = page.evaluate("zeroWatch.at()")
    places = set()
    for rank, column in enumerate(page.locator(".rank").all()):
        lines, at = run["ranks"][rank]["lines"], run["moments"][place][0][rank]
        if lines:
            assert column.get_attribute("data-line") == str(lines[at][1])
            places.add(str(lines[at][1]))
    windows = page.locator(".place:visible .now")  # one for all ranks at the same line
    assert {line.get_attribute("data-line") for line in windows.all()} == places
    assert windows.count() == len(places)
    page.keyboard.press("End")
    assert page.evaluate("zeroWatch.at() === zeroWatch.last")
    assert page.is_visible(".end") == (name == "hang")
    if name == "hang":
        assert "rank 0 waits in all_gather for rank 2" in page.inner_text(".end")
        assert page.locator(".wire path.wait").count() == 3 and page.locator(".rank.waits").count() == 3
    else:
        assert "All meet in all_gather" in page.inner_text(".caption")
        assert page.locator(".wire path.travel").count() == 12
    page.keyboard.press("Home")
    assert shown(page) == before[0]
    page.keyboard.press("Home")
    assert page.evaluate("zeroWatch.at()") == 0 and "constructor" in page.inner_text(".caption")


@pytest.mark.rotates
def test_it_fits_the_screen_and_everybody_can_read_it(opened: tuple[Any, str, dict[str, Any]]) -> None:
    page, _, _ = opened
    page.keyboard.press("End")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    codes = page.locator(".place:visible .code")
    assert all(codes.evaluate_all("all => all.map((code) => code.scrollWidth <= code.clientWidth)"))
    assert not violations(page)


def test_a_page_has_everything_in_it(runs: dict[str, dict[str, Any]]) -> None:
    text = watch.page(runs["good"])
    assert "http" not in text.replace("http://www.w3.org", "") and "{{" not in text
