"""The built site in a browser: nothing breaks, nothing is too wide, everybody can read it.

Links and anchors are checked without a browser, in test_build.py.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import notebook_pages
import pytest

from tests import rotation
from tests.site.browser import Open, watch
from tests.site.test_build import pages

pytest_plugins = ["tests.site.fixtures"]

AXE = Path(__file__).parent / "vendor" / "axe-core" / "axe.min.js"
WIDTHS = (1440, 390)
GRAVE = ("serious", "critical")
NAMED = ("landmark-unique", "empty-table-header")  # less grave, and not wanted either
NOTEBOOK = f"notebooks/{rotation.chosen(notebook_pages.names())}.html"  # the one that was run
COLOURFUL = ["index.html", NOTEBOOK, "calculator.html", "animation.html", "clock.html"]
ONE_OF_EACH_KIND = [
    "index.html",
    "lessons/step3_parameters/lesson.html",
    NOTEBOOK,
    "calculator.html",
    "fit.html",
    "animation.html",
    "clock.html",
    "configuration.html",
    "check.html",
    "architecture.html",
    "api/zero_full.html",
    "benchmarks/cpu.html",
    "source/zero_min/stage1.py.html",
]


def troubles_of(browser: Any, paths: Sequence[Path]) -> list[str]:
    """What goes wrong on these pages, and which of them are wider than a screen."""
    context = browser.new_context()
    page, troubles = context.new_page(), []
    watch(page, troubles)
    for path in paths:
        page.set_viewport_size({"width": WIDTHS[0], "height": 900})
        page.goto(path.as_uri())
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            wide = page.evaluate("document.documentElement.scrollWidth")
            if wide > width:
                troubles.append(f"{path}: {wide} pixels wide on a screen of {width}")
    context.close()
    return troubles


def test_an_old_address_leads_to_where_its_text_is_now(open_page: Open) -> None:
    for old, new in (
        ("habits.html", "guide/troubleshooting.html#what-you-may-do-between-steps"),
        ("guide/refused.html#two-ranks-on-one-device", "guide/troubleshooting.html#two-ranks-on-one-device"),
        ("guide/configuration.html#errors", "configuration.html#errors"),
        ("habits.html#what-you-keep", "guide/troubleshooting.html#state-that-you-keep"),
        ("zero_full.html#muon", "guide/optimizers.html#muon"),
    ):
        page = open_page(old)
        page.wait_for_url(f"**/{new}")
        assert page.evaluate("document.getElementById(location.hash.slice(1)) !== null")
        page.context.close()


def is_source(path: Path, site: Path) -> bool:
    """Whether it only shows a file of the repository: there are many of these, all made by one function."""
    parts = path.relative_to(site).parts
    return parts[0] == "source" and len(parts) > 2


def test_pages_load_without_errors_and_fit_narrow_and_wide_screens(browser: Any, site: Path) -> None:
    written = [path for path in pages(site) if not is_source(path, site)]
    assert len(written) > 50 and not troubles_of(browser, rotation.part_of(written))


@pytest.mark.slow
def test_so_does_every_page(browser: Any, site: Path) -> None:
    assert not troubles_of(browser, pages(site))


def violations(page: Any) -> list[str]:
    """What axe-core finds grave about a page."""
    page.add_script_tag(path=AXE)  # preload: it would ask for style sheets, which file:// does not allow
    found = page.evaluate("axe.run({ resultTypes: ['violations'], preload: false })")["violations"]
    return [
        f"{page.url} {rule['id']} ({rule['impact']}): {node['html'][:150]}: {node['failureSummary'][:300]}"
        for rule in found
        if rule["impact"] in GRAVE or rule["id"] in NAMED
        for node in rule["nodes"]
    ]


@pytest.mark.rotates
@pytest.mark.parametrize("path", ONE_OF_EACH_KIND)
def test_a_page_is_accessible(open_page: Open, path: str) -> None:
    assert not violations(open_page(path))


@pytest.mark.rotates
@pytest.mark.parametrize("path", COLOURFUL)
def test_a_colourful_page_is_accessible_in_the_dark(open_page: Open, path: str) -> None:
    assert not violations(open_page(path, scheme="dark"))


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted({*ONE_OF_EACH_KIND} - {*COLOURFUL}))
def test_so_is_any_other_page(open_page: Open, path: str) -> None:
    assert not violations(open_page(path, scheme="dark"))


@pytest.mark.slow
def test_all_other_pages_are_accessible_too(open_page: Open, site: Path) -> None:
    found = []
    for path in (path.relative_to(site).as_posix() for path in pages(site)):
        if path not in ONE_OF_EACH_KIND and not path.startswith("source/"):
            page = open_page(path)
            found += violations(page)
            page.context.close()
    assert not found


def test_a_page_without_javascript_says_what_to_do_instead(open_page: Open) -> None:
    for path in ("calculator.html", "fit.html", "animation.html", "clock.html", "check.html"):
        page = open_page(path, java_script_enabled=False)
        assert "python -m" in page.inner_text("noscript")
