"""The one hook that mkdocs loads: pages that code writes, and what is done to every page.

Nothing that is made here is committed. The other files of this folder say how each thing is made.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # mkdocs may run from any folder

import animation
import api_pages
import calculator
import checker
import clock
import directives
import drawings
import lesson_pages
import notebook_pages
import source_pages
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from places import DOCS, ROOT, SiteError, relinked

made: set[str] = set()  # pages that code has written: their links are right already


def on_config(config: Any) -> Any:
    """No page for a server's "not found": it would look for its style sheets at the top of the host."""
    config.theme.static_templates.discard("404.html")
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages, pictures and data that are made by code."""
    try:
        pages = {**lesson_pages.pages(), **source_pages.pages()}
        pictures = {picture: ROOT / picture for picture in lesson_pages.pictures()}
        for name, folder in notebook_pages.folders().items():
            pages[f"notebooks/{name}.md"] = (folder / "page.md").read_text()
            pictures |= {f"notebooks/{picture.name}": picture for picture in folder.glob(f"{name}_*")}
        scripts = {script.FILE: script.data() for script in (calculator, animation, clock, checker)}
    except SiteError as error:
        raise PluginError(str(error)) from None
    made.update(pages)
    for uri, content in {**pages, **scripts}.items():
        files.append(File.generated(config, uri, content=content))
    for uri, path in pictures.items():
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Answer what the page asks for, and lead its links to where things are on the site."""
    uri = page.file.src_uri
    try:
        if uri not in made:
            markdown = relinked(markdown, DOCS + uri, uri)
            for package in ("zero_full", "zero_min"):
                if uri == f"api/{package}.md":
                    api_pages.check_complete(markdown, package, uri)
            markdown = directives.expanded(markdown, uri)
        return drawings.inlined(markdown, uri)
    except SiteError as error:
        raise PluginError(f"{uri}: {error}") from None


def on_post_page(output: str, page: Any, config: Any) -> str:
    """The theme's search is a dialog without a name; a screen reader needs one."""
    dialog = 'data-md-component="search" role="dialog"'
    return output.replace(dialog, f'{dialog} aria-label="Search"')
