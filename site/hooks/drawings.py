"""Drawings that our code made are put into the page itself, so that they follow its light or dark colours."""

import html
import posixpath
import re

from places import DOCS, ROOT, outside_code

IMAGE = re.compile(r"^!\[([^\]]+)\]\(([^)\s]+\.svg)\)$", re.MULTILINE)
STYLE = re.compile(r"<style>.*?</style>\s*", re.DOTALL)


def inlined(text: str, page: str) -> str:
    """Markdown whose images of drawings have become the drawings."""

    def drawing(image: "re.Match[str]") -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), image[2]))
        found = [file for file in (ROOT / path, ROOT / DOCS / path) if file.exists()]
        return figure(found[0].read_text(), image[1]) if found else image[0]

    return outside_code(text, IMAGE, drawing)


def figure(svg: str, description: str) -> str:
    """One drawing; the page's style sheet has its colours."""
    svg = STYLE.sub("", svg).strip()
    svg = re.sub(r'aria-label="[^"]*"', f'aria-label="{html.escape(description)}"', svg, count=1)
    svg = re.sub(
        r'(<svg [^>]*?viewBox="0 0 (\d+) \d+") width="\d+" height="\d+"',
        r'\1 style="max-width:\2px; min-width:min(0.85 * \2px, 33rem)"',
        svg,
    )
    svg = re.sub(r'(<svg [^>]*?style=")([^>]*? width="([\d.]+)pt")', r"\1--wide:\3px; \2", svg, count=1)
    return f'<figure class="drawing" data-search-exclude>\n{svg}\n</figure>'
