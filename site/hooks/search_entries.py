"""What the search knows beside the headings of pages: messages that the guide explains, and keys.

Each is the title of an entry of its own, so that a pasted message or a typed key leads to its line.
"""

from collections.abc import Iterator
from typing import Any

import config_page
import messages
from places import url_of

BOOST = 2  # below a page with a searched word in its title, above one with some of a message's
KEYS = "configuration.md"


def of(page: str, content: str) -> Iterator[dict[str, Any]]:
    """A page's entries; each leads to an anchor that the page has."""
    titles = {each.anchor: (each.text, each.section) for each in messages.quoted() if each.page == page}
    if page == KEYS:
        for section, _, keys in config_page.sections():
            for key in keys:
                name = f"{section}.{key.name}".lstrip(".")
                titles[name] = (name, key.text.replace("`", ""))
    for anchor, (title, says) in titles.items():
        if f'id="{anchor}"' in content:
            where = f"{url_of(page)}#{anchor}"
            yield {"location": where, "title": title, "text": f"<p>{says}</p>", "boost": BOOST}
