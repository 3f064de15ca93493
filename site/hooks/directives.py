"""What a page may ask the build for, as a comment on a line of its own: `<!-- KIND: ARGUMENTS -->`.

code: REFERENCE          lines of a source file (snippets.py says what a reference is)
include: FILE            a text of the repository without its title, with links that are right here
part: FILE               the same with its title, headings one level lower, and what it asks for itself
api: zero_full.Engine    signature and docstring of a public name
table: NAME              numbers of the papers, computed
config: PART             keys, refused or schedules: the configuration reference
migrate: names or instead  what DeepSpeed's names are here
rooms: graph or table    who imports whom in zero_full
bench: here              what `make bench` has printed on this machine, if it has
record: NAME             what a benchmark has printed, as site/records/NAME.md keeps it
replay: NAME             what `python -m zero_full replay` prints of the recording site/records/NAME.json
lanes: NAME              a picture of that recording's last step, a row for each rank
records: NAMES           some of them, folded: what stands behind a chart
chart: NAME              a sentence and bars: how long something takes beside its peers (charts.py)
plot: NAME               another picture of what a record has (record_plots.py)
golf: board              the public board of ZeRO golf, with each entry's code
museum: all              mistakes, what `check` says about each, and where it is explained
instructors: all         each lesson's time, tasks and points
list: notebooks          links to the notebooks
messages: all            messages that the guide explains, in the order of the alphabet
"""

import re
from collections.abc import Callable
from pathlib import Path

import api_pages
import charts
import config_page
import formulas
import golf_page
import import_graph
import instructors_page
import messages
import migrate_tables
import museum_page
import notebook_pages
import record_plots
import recordings
import snippets
from places import ROOT, SiteError, outside_code, relative, relinked

DIRECTIVE = re.compile(r"^<!-- (\w+): (.+?) -->$", re.MULTILINE)
HEADING = re.compile(r"^(#+ )", re.MULTILINE)
CONFIG = {
    "keys": config_page.keys_by_section,
    "refused": config_page.refused_together,
    "schedules": config_page.schedules,
}


SUMMARY = "The record: how it was measured, and every number"
MIGRATE = {"names": migrate_tables.same, "instead": migrate_tables.other}


def _include(path: str, page: str) -> str:
    text = (ROOT / path).read_text()
    return relinked(text.partition("\n")[2].strip() + "\n", path, page)


def _part(path: str, page: str) -> str:
    text = outside_code((ROOT / path).read_text(), HEADING, r"#\1")
    return expanded(relinked(text, path, page), page)


def _table(name: str, page: str) -> str:
    return formulas.TABLES[name]()


def _config(part: str, page: str) -> str:
    return CONFIG[part]("", page)


def _migrate(part: str, page: str) -> str:
    return MIGRATE[part]("", page)


def _rooms(kind: str, page: str) -> str:
    return import_graph.drawing() if kind == "graph" else import_graph.table(page)


def _bench(_: str, page: str) -> str:
    """Every file that the Makefile's bench targets write, if it is there."""
    names = dict.fromkeys(re.findall(r"build/bench/(\w+\.md)", (ROOT / "Makefile").read_text()))
    files = [ROOT / "build" / "bench" / name for name in names]
    parts = [
        f"### `{file.name}`\n\n{_printed(file)}" for file in files if file.exists() and file.stat().st_size
    ]
    return "\n".join(parts) or "Nothing: run `make bench` here, and then `make site`."


def _record(name: str, page: str) -> str:
    file = ROOT / "site" / "records" / f"{name}.md"
    if not file.exists():
        raise SiteError(f"{page} asks for {file.relative_to(ROOT)}, which does not exist")
    return _printed(file)


def _records(names: str, page: str) -> str:
    texts = "\n".join(_record(name, page) for name in names.split())
    return f'<details class="records" markdown="1"><summary>{SUMMARY}</summary>\n\n{texts}\n</details>\n'


def _printed(file: Path) -> str:
    """Without the line for programs. Headings are no headings of the page."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("{")]
    return re.sub(r"^#+ (.*)$", r"**\1**", "\n".join(lines), flags=re.MULTILINE) + "\n"


def _list(what: str, page: str) -> str:
    titles = notebook_pages.titles()
    links = [f"* [{title}]({relative(f'notebooks/{name}.md', page)})" for name, title in titles.items()]
    return "\n".join(links)


KINDS: dict[str, Callable[[str, str], str]] = {
    "code": snippets.render,
    "include": _include,
    "part": _part,
    "api": api_pages.render,
    "table": _table,
    "config": _config,
    "migrate": _migrate,
    "rooms": _rooms,
    "bench": _bench,
    "record": _record,
    "replay": recordings.replayed,
    "lanes": recordings.lanes,
    "records": _records,
    "chart": charts.render,
    "plot": record_plots.render,
    "golf": golf_page.render,
    "museum": museum_page.render,
    "instructors": instructors_page.render,
    "list": _list,
    "messages": messages.index,
}


def expanded(text: str, page: str) -> str:
    """A page with every request answered."""

    def answer(request: "re.Match[str]") -> str:
        kind, arguments = request.groups()
        if kind not in KINDS:
            raise SiteError(f"{page} asks for `{kind}`; there are {', '.join(KINDS)}")
        try:
            return KINDS[kind](arguments.strip(), page)
        except KeyError as error:
            raise SiteError(f"{page}: there is no {kind} {error}") from None

    return DIRECTIVE.sub(answer, text)
