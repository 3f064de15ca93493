"""What the search knows beside the headings of pages: messages that the guide explains, and keys.

Each is the title of an entry of its own, so that a pasted message or a typed key leads to its line. A page of
the guide stands above a single key: who types "nvme" wants to know how, and then which key.
"""

from collections.abc import Iterator
from typing import Any

import config_page
import messages
from places import url_of

MESSAGE = 2  # below a page with a searched word in its title, above one with some of a message's
KEY = 1
GUIDE = 1.5  # where a page does not say something else
KEYS = "configuration.md"


def of(page: str, content: str) -> Iterator[dict[str, Any]]:
    """A page's entries; each leads to an anchor that the page has."""
    titles = {
        each.anchor: (each.text, each.section, MESSAGE) for each in messages.quoted() if each.page == page
    }
    if page == KEYS:
        for section, _, keys in config_page.sections():
            for key in keys:
                name = f"{section}.{key.name}".lstrip(".")
                titles[name] = (name, key.text.replace("`", ""), KEY)
    for anchor, (title, says, boost) in titles.items():
        if f'id="{anchor}"' in content:
            where = f"{url_of(page)}#{anchor}"
            yield {"location": where, "title": title, "text": f"<p>{says}</p>", "boost": boost}
