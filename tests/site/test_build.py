"""The built site: complete, without dead links, and without a request to anybody."""

import hashlib
import json
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import notebook_pages
import pytest
import redirects

from lessons.registry import LESSONS
from tests import rotation

ROOT = Path(__file__).parents[2]
VENDOR = ROOT / "site" / "docs" / "assets" / "vendor"
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "embed": "src", "object": "data"}
# URLs inside the theme's own program. It asks for the first if a page has a mermaid drawing and for the next
# two if it finds its own link to a repository; `test_nothing_wakes_the_theme_s_requests` says that neither is
# the case.
DORMANT = {"unpkg.com", "api.github.com", "gitlab.com"}
IN_COMMENTS = {"clipboardjs.com", "lunrjs.com", "tartarus.org", "bit.ly"}


@dataclass
class Page:
    """What a built page refers to."""

    links: list[str] = field(default_factory=list)  # of <a>: the reader may follow them
    loads: list[str] = field(default_factory=list)  # the browser asks for these by itself
    ids: set[str] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)


class Reader(HTMLParser):
    """Fills a Page."""

    def __init__(self) -> None:
        super().__init__()
        self.page = Page()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.page.ids |= {given[name] for name in ("id", "name") if name in given}
        self.page.classes |= set(given.get("class", "").split())
        if tag == "a" and "href" in given:
            self.page.links.append(given["href"])
        if tag == "link" and given.get("rel") not in ("prev", "next", "canonical"):
            self.page.loads.append(given["href"])
        if tag in LOADED and LOADED[tag] in given:
            self.page.loads.append(given[LOADED[tag]])
        self.page.loads += re.findall(r"url\(['\"]?([^'\")]+)", given.get("style", ""))


@cache
def read(path: Path) -> Page:
    reader = Reader()
    reader.feed(path.read_text())
    return reader.page


def pages(site: Path) -> Iterator[Path]:
    """All but those that only lead to others, and the one that a server shows at any address."""
    others = {site / page for page in ("404.html", *redirects.PAGES)}
    return iter(sorted(page for page in site.rglob("*.html") if page not in others))


def dead(site: Path, page: Path, target: str) -> str:
    """What is wrong with a link of a page; empty if nothing is."""
    parts = urlsplit(target)
    if parts.scheme in ("http", "https", "mailto"):
        return ""
    there = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    there = there / "index.html" if there.is_dir() else there
    if not there.is_relative_to(site) or not there.exists():
        return f"{page.relative_to(site)}: {target} does not exist"
    if parts.fragment and there.suffix == ".html" and unquote(parts.fragment) not in read(there).ids:
        return f"{page.relative_to(site)}: {target} has no such anchor"
    return ""


def test_links_and_anchors_lead_somewhere(site: Path) -> None:
    wrong = [dead(site, page, target) for page in pages(site) for target in read(page).links]
    assert not list(filter(None, wrong))


def test_old_addresses_lead_to_pages_and_headings_that_exist(site: Path) -> None:
    for old, new in redirects.PAGES.items():
        assert read(site / old).links and not dead(site, site / old, read(site / old).links[0])
        assert not dead(site, site / "index.html", new)
    for page, headings in redirects.HEADINGS.items():
        for old, new in headings.items():
            assert old not in read(site / page).ids, f"{page} has the heading {old} again"
            assert not dead(site, site / page if new.startswith("#") else site / "index.html", new)


def test_a_redirect_to_a_heading_that_is_gone_is_noticed(site: Path) -> None:
    assert "no such anchor" in dead(site, site / "index.html", "zero_full.html#precision")
    assert "does not exist" in dead(site, site / "index.html", "guide/gone.html")


def test_pages_load_only_files_of_the_site(site: Path) -> None:
    for page in pages(site):
        for target in read(page).loads:
            assert not urlsplit(target).netloc, f"{page.relative_to(site)} asks for {target}"
            assert not dead(site, page, target)


def test_style_sheets_load_only_files_of_the_site(site: Path) -> None:
    for sheet in site.rglob("*.css"):
        targets = re.findall(r"url\(['\"]?([^'\")]+)|@import ['\"]([^'\"]+)", sheet.read_text())
        for target in filter(None, (one or other for one, other in targets)):
            if target.startswith("data:") or target.startswith("#"):
                continue
            assert not urlsplit(target).netloc, f"{sheet.relative_to(site)} asks for {target}"
            # KaTeX offers each font in three formats, and the first, which is here, is the one in use.
            other_format = "katex" in sheet.parts and not target.endswith(".woff2")
            assert other_format or (sheet.parent / target).exists(), f"{sheet.relative_to(site)}: {target}"


def test_scripts_name_no_host(site: Path) -> None:
    for script in site.rglob("*.js"):
        if script.name == "search_index.js" or "lunr" in script.parts:
            continue  # the text of the pages; other languages' words for the search, with links in comments
        hosts = {urlsplit(url).netloc for url in re.findall(r"https?://[\w./@-]+", script.read_text())}
        if script.is_relative_to(site / "assets" / "javascripts"):
            hosts -= DORMANT | IN_COMMENTS
        assert hosts <= {"www.w3.org"}, f"{script.relative_to(site)}: {hosts}"


def test_nothing_wakes_the_theme_s_requests(site: Path) -> None:
    for page in pages(site):
        text = page.read_text()
        assert "mermaid" not in read(page).classes and 'data-md-component="source"' not in text, page
        settings = text.partition('id="__config"')[2].partition("</script>")[0]
        assert '"version": null' in settings, page


def test_no_page_shows_what_was_meant_for_the_build(site: Path) -> None:
    for page in pages(site):
        text = re.sub(r"<(pre|code|script|style)\b.*?</\1>", "", page.read_text(), flags=re.DOTALL)
        body = text.partition("<article")[2].partition("</article>")[0]
        for trace in (
            "```",
            "~~~",
            "<!-- weave",
            "<!-- code",
            "<!-- api",
            'markdown="1"',
            "--8<--",
            "](",
            "arithmatex-error",
        ):
            assert trace not in body, f"{page.relative_to(site)} shows {trace!r}"


def test_every_lesson_has_its_page(site: Path) -> None:
    for lesson in LESSONS:
        page = (site / "lessons" / lesson.folder / "lesson.html").read_text()
        assert page.count("<svg") >= 1 and "python -m lessons start" in page
        assert page.count("<details") == (lesson.path / "lesson.md").read_text().count("<details")


@pytest.mark.parametrize("name", notebook_pages.names())
def test_every_notebook_has_its_page(site: Path, name: str) -> None:
    assert "ipython3" in (site / "notebooks" / f"{name}.html").read_text()


@pytest.mark.parametrize("name", rotation.one_of(notebook_pages.names()))
def test_the_page_of_a_notebook_shows_what_its_cells_show(site: Path, name: str) -> None:
    assert 'class="output"' in (site / "notebooks" / f"{name}.html").read_text()


def test_every_key_and_every_public_name_is_documented(site: Path) -> None:
    import zero_full
    import zero_min
    from zero_full.config.messages import known_keys

    keys = (site / "configuration.html").read_text()
    for key in known_keys():
        assert f"<code>{key.rpartition('.')[2]}</code>" in keys or f'id="{key}"' in keys, key
    for package in (zero_full, zero_min):
        ids = read(site / "api" / f"{package.__name__}.html").ids
        for name in package.__all__:
            assert f"{package.__name__}.{name}" in ids


def test_every_message_that_the_guide_explains_has_an_anchor_and_is_in_the_index(site: Path) -> None:
    import messages

    index = "guide/troubleshooting.html"
    listed = read(site / index).links
    for message in messages.quoted():
        page = site / message.page.replace(".md", ".html")
        assert message.anchor in read(page).ids
        assert f"{posixpath.relpath(page, (site / index).parent)}#{message.anchor}" in listed
    assert len(messages.quoted()) > 50


def test_the_search_index_knows_hysteresis_and_is_there_for_both_ways_to_open_a_page(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = {entry["location"].partition("#")[0] for entry in index["docs"] if "hysteresis" in entry["text"]}
    assert {"configuration.html", "lessons/step4_precision/lesson.html"} <= found
    assert (site / "search" / "search_index.js").read_text().startswith("var __index = ")  # for file://
    assert not [entry for entry in index["docs"] if entry["location"].startswith("source/zero")]


def test_vendored_files_are_what_they_say() -> None:
    listed = {}
    for line in (VENDOR / "SOURCES.txt").read_text().splitlines():
        if not line.startswith("#"):
            digest, path, package, _ = line.split("  ")
            listed[path] = digest
            assert re.fullmatch(r"@?[\w/-]+@\d+\.\d+\.\d+", package), f"{path} is not pinned"
    there = {str(path.relative_to(VENDOR)): path for path in VENDOR.rglob("*") if path.is_file()}
    del there["SOURCES.txt"]
    assert {path: hashlib.sha256(file.read_bytes()).hexdigest() for path, file in there.items()} == listed
    for folder in filter(Path.is_dir, VENDOR.iterdir()):
        assert (folder / "LICENSE").exists(), f"{folder.name} has no licence"


@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_both_colour_schemes_can_be_chosen(site: Path, scheme: str) -> None:
    assert f'data-md-color-scheme="{scheme}"' in (site / "index.html").read_text()
