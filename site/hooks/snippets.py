"""Code on a page is cut out of the sources when the site is built: by marker, by name, or by what lines say.

zero_min/stage1.py:ex_gather                 between the markers `# --8<-- [start:ex_gather]` and `[end:...]`
zero_min/stage1.py Stage1.step               a function, method or class
zero_full/a.py f from "one" to "two"         from its first line with "one" to the next with "two"
zero_full/a.py f from "one"                  that line and what is indented below it
"""

import ast
import re
import textwrap
from dataclasses import dataclass
from functools import cache

from places import ROOT, SiteError, page_of, relative, url_of

from lessons.exercise import MARK, regions

REFERENCE = re.compile(
    r"^(?P<path>[\w/.]+?)(:(?P<region>\w+))?( (?P<name>[\w.]+))?"
    r'( from "(?P<first>[^"]+)"( to "(?P<last>[^"]+)")?)?$'
)
Defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Snippet:
    """Lines of a file; numbers count from 1 and include both ends."""

    path: str
    name: str
    first: int
    last: int

    @property
    def code(self) -> str:
        """The lines at the left margin, without markers."""
        lines = [x for x in lines_of(self.path)[self.first - 1 : self.last] if not MARK.match(x)]
        return textwrap.dedent("\n".join(lines)).strip("\n")


@cache
def lines_of(path: str) -> list[str]:
    """A source file's lines."""
    if not (ROOT / path).exists():
        raise SiteError(f"a page shows code of {path}, which does not exist")
    return (ROOT / path).read_text().splitlines()


@cache
def tree_of(path: str) -> ast.Module:
    """A source file, parsed."""
    return ast.parse("\n".join(lines_of(path)))


def find(path: str, name: str) -> Defined:
    """The definition of a dotted name."""
    body: list[ast.stmt] = tree_of(path).body
    node: Defined | None = None
    for part in name.split("."):
        node = next((n for n in body if isinstance(n, Defined) and n.name == part), None)
        if node is None:
            raise SiteError(f"a page shows {name} of {path}, which is not defined there")
        body = node.body
    assert node is not None
    return node


def snippet(reference: str) -> Snippet:
    """What a reference means; see the module's docstring."""
    parts = REFERENCE.match(reference.strip())
    if parts is None:
        raise SiteError(f"this is no reference to code: {reference}")
    path, region, name = parts["path"], parts["region"], parts["name"]
    if region:
        return _between_markers(path, region)
    low, high = 1, len(lines_of(path))
    if name:
        node = find(path, name)
        low = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        high = node.end_lineno or low
    if parts["first"]:
        low, high = _narrowed(path, low, high, parts["first"], parts["last"])
    return Snippet(path, name or "", low, high)


def _between_markers(path: str, region: str) -> Snippet:
    found = [each for each in regions("\n".join(lines_of(path))) if each.name == region]
    if len(found) != 1:
        raise SiteError(f"{path} has no region {region}")
    return Snippet(path, "", found[0].first + 1, found[0].last)


def _narrowed(path: str, low: int, high: int, first: str, last: str | None) -> tuple[int, int]:
    lines = lines_of(path)
    start = next((i for i in range(low, high + 1) if first in lines[i - 1]), None)
    if start is None:
        raise SiteError(f"{path}, lines {low} to {high}: no line has {first!r}")
    if last is not None:
        end = next((i for i in range(start, high + 1) if last in lines[i - 1]), None)
        if end is None:
            raise SiteError(f"{path}, lines {start} to {high}: no line has {last!r}")
        return start, end
    margin = len(lines[start - 1]) - len(lines[start - 1].lstrip())
    end = start
    while end < high and (not lines[end].strip() or len(lines[end]) - len(lines[end].lstrip()) > margin):
        end += 1
    return start, end


def line_link(path: str, line: int, page: str) -> str:
    """The URL of a line of code, seen from a page."""
    there = page_of(path)
    assert there is not None, path
    return f"{relative(url_of(there), url_of(page))}#__codelineno-0-{line}"


def render(reference: str, page: str) -> str:
    """Markdown: where the lines are, and the lines."""
    cut = snippet(reference)
    lines = f"lines {cut.first} to {cut.last}" if cut.last > cut.first else f"line {cut.first}"
    where = f'<a href="{line_link(cut.path, cut.first, page)}"><code>{cut.path}</code>, {lines}</a>'
    name = f", in <code>{cut.name}</code>" if cut.name else ""
    return f'\n<p class="snippet-from">{where}{name}</p>\n\n```python\n{cut.code}\n```\n'
