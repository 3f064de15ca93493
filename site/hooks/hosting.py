"""What pages have at a public address and not in a folder, and what they show where a link to them is shared.

The address is one setting, REPOSITORY in lessons/repository.py. With it, a site has a link to the repository,
a link on each page to the file that it is written in, a page for what a server does not find, and absolute
addresses in what others read of it. Without it, it has none of these, and asks nobody for anything.
"""

import html
import re
from typing import Any

from places import file_of

from lessons import repository

LONGEST = 200  # characters of a description: about what others show
PARAGRAPH = re.compile(r"<p>(.*?)</p>", re.DOTALL)
NOT_TEXT = re.compile(r"<[^>]+>")


def configure(config: Any, address: str) -> None:
    """Tell mkdocs and its theme where the site will be, if that is known.

    A page for a server's "not found" is asked for from any depth, so its links must be absolute.
    """
    if address:
        config.repo_url, config.repo_name = address, repository.name(address)
        config.site_url = repository.pages(address)
    else:
        config.theme.static_templates.discard("404.html")


def edit_address(page: str, address: str) -> str | None:
    """Where a page can be changed."""
    file = file_of(page)
    return repository.edit(file, address) or None if file else None


def description(content: str) -> str | None:
    """The first paragraph of a page as plain text, ready for an attribute; None if it has none."""
    for found in PARAGRAPH.finditer(content):
        text = html.unescape(" ".join(NOT_TEXT.sub("", found[1]).split()))
        if text.endswith((".", "!", "?")):
            if len(text) > LONGEST:
                text = text[:LONGEST].rpartition(" ")[0].rstrip(",;:.") + " …"
            return html.escape(text)
    return None
