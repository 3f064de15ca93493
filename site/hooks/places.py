"""Where a file of the repository is on the site, and links rewritten to match.

A text may link to any file the way it does in the repository: to a page in site/docs, a lesson, a notebook or
a Python file. On the site the link leads to the page that shows this file.
"""

import os.path
import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = "site/docs/"
CODE = ("zero_min", "zero_full")  # packages whose files have a page each
PARTS = {  # of a page, which includes them; and where each begins there, if that is not the page's beginning
    "site/docs/guide/first_gpu_run.md": ("benchmarks/gpu.md", ""),
    "site/docs/guide/configuration.md": ("configuration.md", ""),
    "site/docs/guide/errors/symptoms.md": ("guide/troubleshooting.md", "#symptoms"),
    "site/docs/guide/errors/refused.md": ("guide/troubleshooting.md", "#steps-that-are-refused"),
    "site/docs/guide/errors/between_steps.md": (
        "guide/troubleshooting.md",
        "#what-you-may-do-between-steps",
    ),
}
NAMED = {
    "README.md": "index.md",
    "lessons/README.md": "lessons/index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
FENCE = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2[`~]* *$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?P<text>\[[^\]]*\])\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?P<rest>[^)]*)\)")


class SiteError(Exception):
    """The site cannot be built as it is; the text says which file to change."""


def page_of(path: str) -> str | None:
    """The page, or the file beside pages, that shows this file of the repository."""
    if path in NAMED:
        return NAMED[path]
    if path in PARTS:
        return PARTS[path][0]
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    first, _, rest = path.partition("/")
    if first in CODE and path.endswith(".py"):
        return f"source/{path}.md"
    if first == "notebooks" and path.endswith(".ipynb"):
        return path.removesuffix("ipynb") + "md"
    if first == "lessons" and path.endswith(("lesson.md", ".svg")) and rest:
        return path
    return None


def file_of(page: str) -> str | None:
    """The file of the repository in which a page is written; None for one that code writes."""
    named = {there: path for path, there in NAMED.items()}
    file = page.removesuffix(".md")
    candidates = [DOCS + page, named.get(page, page), f"{file}.ipynb", file.removeprefix("source/")]
    return next((path for path in candidates if (ROOT / path).is_file()), None)


def url_of(page: str) -> str:
    """The built file of a page."""
    return page.removesuffix(".md") + ".html" if page.endswith(".md") else page


def relative(target: str, page: str) -> str:
    """From one page to another, whatever both are called."""
    return posixpath.relpath(target, posixpath.dirname(page) or ".")


def outside_code(text: str, change: "re.Pattern[str]", to: object) -> str:
    """`change.sub(to, ...)` on everything but fenced code."""
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [change.sub(to, text[end : fence.start()]), fence[0]]  # type: ignore[call-overload]
        end = fence.end()
    return "".join([*parts, change.sub(to, text[end:])])  # type: ignore[call-overload]


def relinked(text: str, home: str, page: str) -> str:
    """A text that is written for `home`, a path of the repository, with links that are right on `page`."""

    def moved(link: "re.Match[str]") -> str:
        target = link["target"]
        if ":" in target:
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(home), target))
        there = page_of(path)
        if there is None or not (ROOT / path).exists():
            if path.startswith(DOCS):
                return link[0]  # a page that is made during the build, or a mistake that mkdocs reports
            raise SiteError(f"{home} links to {target}, and no page of the site shows {path}")
        anchor = link["anchor"] or PARTS.get(path, ("", ""))[1]
        return f"{link['text']}({relative(there, page)}{anchor}{link['rest']})"

    return outside_code(text, LINK, moved)


def unfolded(text: str) -> str:
    """A text whose folded parts are Markdown, too: on the site that has to be said."""
    return text.replace("<details><summary>", '<details markdown="1"><summary>')


def version() -> str:
    """The version that these pages describe."""
    project = (ROOT / "pyproject.toml").read_text()
    return project.partition('\nversion = "')[2].partition('"')[0]


def shown(path: Path) -> str:
    """A path as the repository writes it."""
    return os.path.relpath(path, ROOT).replace(os.sep, "/")
