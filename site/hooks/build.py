"""The one hook that mkdocs loads: pages that code writes, and what is done to every page.

Nothing that is made here is committed. The other files of this folder say how each thing is made.
"""

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # mkdocs may run from any folder

import animation
import api_pages
import calculator
import card
import checker
import clock
import directives
import drawings
import fit_page
import four_stages
import hosting
import lesson_pages
import messages
import notebook_pages
import places
import recordings
import redirects
import search_entries
import source_pages
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from places import DOCS, ROOT, SiteError, relinked

from lessons import repository

EMPTY_HEAD = re.compile(r"<th( [^>]*)?></th>")  # the corner of a table heads no column
made: set[str] = set()  # pages that code has written: their links are right already


def on_config(config: Any) -> Any:
    """What depends on the site's address; each page says of which version it speaks."""
    hosting.configure(config, repository.REPOSITORY)
    config.copyright = f"zero-full {places.version()}"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages, pictures and data that are made by code."""
    try:
        pages = {**lesson_pages.pages(), **source_pages.pages()}
        pictures = {picture: ROOT / picture for picture in lesson_pages.pictures()}
        for name, folder in notebook_pages.folders().items():
            pages[f"notebooks/{name}.md"] = (folder / "page.md").read_text()
            pictures |= {f"notebooks/{picture.name}": picture for picture in folder.glob(f"{name}_*")}
        written = (calculator, fit_page, animation, four_stages, clock, recordings, checker)
        scripts = {script.FILE: script.data() for script in written}
        picture_of_all = card.png(config.site_name, config.site_description)
    except SiteError as error:
        raise PluginError(str(error)) from None
    made.update(pages)
    for uri, content in {**pages, **scripts, **redirects.pages()}.items():
        files.append(File.generated(config, uri, content=content))
    files.append(File.generated(config, card.FILE, content=picture_of_all))
    for uri, path in pictures.items():
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Answer what the page asks for, and lead its links to where things are on the site."""
    uri = page.file.src_uri
    page.edit_url = hosting.edit_address(uri, repository.REPOSITORY)
    try:
        if uri not in made:
            markdown = relinked(markdown, DOCS + uri, uri)
            for package in ("zero_full", "zero_min"):
                if uri == f"api/{package}.md":
                    api_pages.check_complete(markdown, package, uri)
            markdown = messages.anchored(directives.expanded(markdown, uri), uri)
        return drawings.inlined(markdown, uri)
    except SiteError as error:
        raise PluginError(f"{uri}: {error}") from None


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """A page says what it is about, to those who show links to it."""
    page.meta.setdefault("description", hosting.description(content))
    if page.file.src_uri.startswith("guide/"):
        page.meta.setdefault("search", {"boost": search_entries.GUIDE})
    return EMPTY_HEAD.sub(r"<td\1></td>", content) + redirects.headings(page.url)


def on_page_context(context: Any, page: Any, config: Any, nav: Any) -> Any:
    """The search knows a page by now, and learns what else can be found on it."""
    entries = search_entries.of(page.file.src_uri, page.content)
    config.plugins["material/search"].search_index.entries += entries
    return context


def on_post_page(output: str, page: Any, config: Any) -> str:
    """See `_named`."""
    return _named(output)


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """See `_named`: the page for what is not found is none of the pages."""
    return _named(output_content)


def _named(output: str) -> str:
    """The theme's search is a dialog without a name; a screen reader needs one."""
    dialog = 'data-md-component="search" role="dialog"'
    return output.replace(dialog, f'{dialog} aria-label="Search"')
