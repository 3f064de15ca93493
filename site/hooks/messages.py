"""Messages that the guide quotes: an anchor for each, and an index of them.

A page quotes messages in blocks of kind `text`, one on a line, or in a table whose first column is "the
message says"; … stands for what varies.
"""

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from places import DOCS, ROOT, SiteError, page_of, relative

SOURCES = ("guide/errors/symptoms.md", "guide/errors/refused.md", "guide/metrics.md")  # all of their blocks
TABLES = ("guide/configuration.md",)
BLOCK = re.compile(r"^```text\n(.*?)^```$", re.M | re.S)
TABLE = re.compile(r"(?<=^\| the message says \| do \|\n\|---\|---\|\n)(?:^\|.*\n)+", re.M)
CELL = re.compile(r"^\| `([^`]+)`", re.M)
WORDS = 8  # of a message, in its anchor


@dataclass(frozen=True)
class Message:
    """A quoted line."""

    page: str
    section: str
    text: str

    @property
    def anchor(self) -> str:
        """From its first words."""
        return "message-" + "-".join(re.findall(r"\w+", self.text.lower())[:WORDS])


@cache
def quoted() -> tuple[Message, ...]:
    """All messages, in the order of the pages; an error if two have one anchor."""
    found = [each for file in (*SOURCES, *TABLES) for each in _of((ROOT / DOCS / file).read_text(), file)]
    anchors = [message.anchor for message in found]
    if twice := {anchor for anchor in anchors if anchors.count(anchor) > 1}:
        raise SiteError(f"{', '.join(SOURCES)}: messages begin alike: {', '.join(sorted(twice))}")
    return tuple(found)


def _of(text: str, file: str) -> Iterator[Message]:
    page = page_of(DOCS + file) or file
    for section in re.split(r"^(?=## )", text, flags=re.M)[1:]:
        title = section.partition("\n")[0].removeprefix("## ")
        lines = [line for block in BLOCK.findall(section) for line in block.splitlines()]
        cells = [cell for table in TABLE.findall(section) for cell in CELL.findall(table)]
        yield from (Message(page, title, text) for text in (lines if file in SOURCES else cells))


def anchored(text: str, page: str) -> str:
    """A page's text, in which a link leads to each message."""
    anchors = {message.text: message.anchor for message in quoted() if message.page == page}

    def lines(block: "re.Match[str]") -> str:
        if not anchors.keys() >= set(block[1].splitlines()):
            return block[0]  # an example, and no messages
        shown = [
            f'<span class="message" id="{anchors[line]}">{html.escape(line)}</span>'
            for line in block[1].splitlines()
        ]
        return '<div class="highlight"><pre><code>' + "\n".join(shown) + "\n</code></pre></div>"

    def cells(table: "re.Match[str]") -> str:
        return CELL.sub(lambda cell: f'| <span id="{anchors[cell[1]]}"></span>`{cell[1]}`', table[0])

    return TABLE.sub(cells, BLOCK.sub(lines, text)) if anchors else text


def index(_: str, page: str) -> str:
    """A table of all, by their first words."""
    lines = ["| message | explained under |", "|---|---|"]
    for message in sorted(quoted(), key=lambda each: re.sub(r"^\W+", "", each.text).lower()):
        there = relative(message.page, page)
        text = message.text.replace("|", "\\|")
        lines.append(f"| `{text}` | [{message.section}]({there}#{message.anchor}) |")
    return '<div class="stacked messages" markdown="1">\n\n' + "\n".join(lines) + "\n\n</div>\n"
