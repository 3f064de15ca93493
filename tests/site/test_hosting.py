"""The one setting of the project's address: what a site has with it, and has not without."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("material", reason="pip install -e '.[site]'")

import animation
import calculator
import clock
import hosting
import lesson_pages
import notebook_pages
import places
import source_pages
from mkdocs.commands.build import build
from mkdocs.config import load_config

from lessons import repository
from tests.site.browser import Open, served
from tests.site.test_browser import violations
from tests.site.test_build import ROOT, dead, pages, read

pytest_plugins = ["tests.site.fixtures"]
SOMEWHERE = "https://github.com/Somebody/something"
PAGES = "https://somebody.github.io/something/"
LAUNCH = "guide/launch.md"
TOLD = re.compile(r'<meta (?:property|name)="((?:og|twitter):[\w:]+)" content="([^"]*)">')


@pytest.fixture(scope="module")
def hosted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A site of two pages with the address set, below a server's folder of the repository's name."""
    docs, out = tmp_path_factory.mktemp("docs"), tmp_path_factory.mktemp("server") / "something"
    (docs / "guide").mkdir()
    (docs / "index.md").write_text('# Home\n\nA *first* sentence with "marks" & more.\n')
    (docs / LAUNCH).write_text("# Launch\n\n| a |\n|---|\n| b |\n")
    (docs / "assets").symlink_to(ROOT / "site" / "docs" / "assets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repository, "REPOSITORY", SOMEWHERE)
        for module, name in ((lesson_pages, "pages"), (source_pages, "pages"), (notebook_pages, "folders")):
            patch.setattr(module, name, dict)
        for script in (animation, calculator, clock):
            patch.setattr(script, "data", str)
        given: dict[str, Any] = {"docs_dir": str(docs), "site_dir": str(out), "nav": ["index.md", LAUNCH]}
        build(load_config(str(ROOT / "site" / "mkdocs.yml"), exclude_docs="", not_in_nav="", **given))
    yield out


def properties(page: Path) -> dict[str, str]:
    """What a page says to those who show a link to it."""
    return dict(TOLD.findall(page.read_text()))


def test_with_an_address_pages_link_to_the_repository_and_to_their_files(hosted: Path) -> None:
    page = read(hosted / "guide" / "launch.html")
    assert SOMEWHERE in page.links and f"{SOMEWHERE}/edit/main/site/docs/guide/launch.md" in page.links
    asks_github_for_stars = 'data-md-component="source"'
    assert asks_github_for_stars not in (hosted / "index.html").read_text()


def test_with_an_address_others_are_told_whole_addresses(hosted: Path) -> None:
    told = properties(hosted / "index.html")
    assert told["og:url"] == f"{PAGES}index.html" and told["og:image"] == f"{PAGES}assets/card.png"
    assert told["og:title"] == "ZeRO, from the first byte" and told["twitter:card"] == "summary_large_image"
    assert told["og:description"] == "A first sentence with &quot;marks&quot; &amp; more."
    assert f"<loc>{PAGES}guide/launch.html</loc>" in (hosted / "sitemap.xml").read_text()
    told = properties(hosted / "guide" / "launch.html")
    assert told["og:title"] == "Launch" and told["og:description"].startswith("Learn ZeRO")


def test_a_server_has_a_page_for_what_it_does_not_find(hosted: Path, site: Path, open_page: Open) -> None:
    missing = read(hosted / "404.html")
    ours = [link for link in missing.links if not link.startswith(("http", "#"))]
    assert len(ours) > 4 and all(link.startswith("/something/") for link in [*ours, *missing.loads])
    wanted = [link.removeprefix("/something/") for link in re.findall(r"'([\w/]+\.html)' \| url", template())]
    assert len(wanted) == 4 and not [link for link in wanted if dead(site, site / "index.html", link)]
    with served(hosted.parent) as address:
        page = open_page("something/404.html", base=address)
        assert page.locator("h1").inner_text() == "This page is not here"
        assert "Inter" in page.evaluate("getComputedStyle(document.body).fontFamily")
        assert not violations(page)


def template() -> str:
    return (ROOT / "site" / "overrides" / "404.html").read_text()


def test_without_an_address_there_is_none_of_it(site: Path) -> None:
    if repository.REPOSITORY:
        pytest.skip("this project has an address")
    assert not (site / "404.html").exists() and "<loc>" not in (site / "sitemap.xml").read_text()
    for page in pages(site):
        text = page.read_text()
        assert 'rel="edit"' not in text and 'rel="canonical"' not in text and "og:url" not in text
        told = properties(page)
        assert told["og:title"] and told["og:description"] and not dead(site, page, told["og:image"])


def test_the_picture_has_the_size_that_pages_say(site: Path) -> None:
    picture = (site / "assets" / "card.png").read_bytes()
    told = properties(site / "index.html")
    size = [str(int.from_bytes(picture[place : place + 4], "big")) for place in (16, 20)]
    assert picture[1:4] == b"PNG" and size == [told["og:image:width"], told["og:image:height"]]


@pytest.mark.parametrize(
    ("page", "file"),
    [
        ("guide/launch.md", "site/docs/guide/launch.md"),
        ("lessons/index.md", "lessons/README.md"),
        ("lessons/step0_adam/lesson.md", "lessons/step0_adam/lesson.md"),
        ("notebooks/00_adam.md", "notebooks/00_adam.ipynb"),
        ("source/zero_min/adam.py.md", "zero_min/adam.py"),
        ("source/index.md", None),
    ],
)
def test_a_page_is_edited_where_it_is_written(page: str, file: str | None) -> None:
    assert places.file_of(page) == file
    wanted = file and f"{SOMEWHERE}/edit/main/{file}"
    assert hosting.edit_address(page, SOMEWHERE) == wanted and hosting.edit_address(page, "") is None


def test_a_description_is_the_first_whole_sentence_and_not_too_long() -> None:
    assert hosting.description("<p>Facts, a link</p><p>This <b>is</b>\nit.</p>") == "This is it."
    cut = hosting.description(f"<p>{'word ' * 100}end.</p>")
    assert cut is not None and cut.endswith("word …") and len(cut) <= hosting.LONGEST + 2
    assert hosting.description("<h1>Only a title</h1>") is None


def test_the_citation_is_of_this_version_and_names_the_paper() -> None:
    import yaml

    told = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert told["cff-version"] == "1.2.0" and told["authors"] and told["message"] and told["title"]
    assert f'version = "{told["version"]}"' in project and f'license = "{told["license"]}"' in project
    assert f"## {told['version']}" in (ROOT / "CHANGELOG.md").read_text()
    assert told["references"][0]["title"].startswith("ZeRO: Memory Optimizations")
