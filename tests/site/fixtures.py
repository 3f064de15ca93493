"""One headless Chromium for all tests of the site: Debian's, driven by Playwright, which downloads nothing.

A test module takes these fixtures with `pytest_plugins = ["tests.site.fixtures"]`.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.site.browser import HINT, SWITCH, Open, program, watch


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The browser. Without one the tests fail: CI must not skip them because somebody forgot something."""
    if os.environ.get(SWITCH) == "1":
        pytest.skip(f"{SWITCH}=1")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.fail(HINT, pytrace=False)
    path = program()
    if path is None:
        pytest.fail(HINT, pytrace=False)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path)
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any, site: Path) -> Iterator[Open]:
    """`open_page("calculator.html", width=390)`: the page from the file system.

    Whatever its console calls an error, and every request that leaves this machine, fails the test.
    """
    troubles: list[str] = []
    contexts: list[Any] = []

    def opened(path: str, *, width: int = 1440, scheme: str = "light", base: str = "", **options: Any) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, **options
        )
        contexts.append(context)
        page = context.new_page()
        watch(page, troubles)
        page.goto(f"{base or site.as_uri()}/{path}")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not troubles, troubles
