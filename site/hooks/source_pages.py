"""Every file of zero_min and zero_full as a page with numbered lines, so that a link can lead to a line."""

import ast

from places import CODE, ROOT, shown
from snippets import tree_of


def paths() -> list[str]:
    """The files."""
    return [shown(path) for name in CODE for path in sorted((ROOT / name).rglob("*.py"))]


def pages() -> dict[str, str]:
    """A page for each file, and a list of all."""
    return {"source/index.md": _index(), **{f"source/{path}.md": _page(path) for path in paths()}}


def says(path: str) -> str:
    """The first sentence of what a file says about itself."""
    text = (ast.get_docstring(tree_of(path)) or "").partition("\n\n")[0].replace("\n", " ")
    return text.partition(". ")[0].rstrip(".")


def _page(path: str) -> str:
    code = (ROOT / path).read_text()
    head = f"---\ntitle: {path}\nsearch: {{exclude: true}}\nhide: [toc]\n---\n\n# `{path}`\n\n"
    return f'{head}````python linenums="1"\n{code}````\n'


def _index() -> str:
    lines = ["---\ntitle: Source files\n---\n\n# Source files\n"]
    for name in CODE:
        lines += [f"\n## `{name}`\n", "| file | what it is |", "|---|---|"]
        mine = [path for path in paths() if path.startswith(f"{name}/")]
        lines += [f"| [`{path}`]({path}.md) | {says(path).replace('|', chr(92) + '|')} |" for path in mine]
    return "\n".join(lines) + "\n"
