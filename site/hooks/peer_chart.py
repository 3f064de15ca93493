"""Step time and memory of zero_full beside its peers: a picture for the site, a table for the README.

All numbers are the digits of a record of `tests/bench/step_time.py`.
"""

import html
import re
from collections.abc import Iterator
from typing import NamedTuple

from places import ROOT, SiteError

from lessons.colours import SLATE, VIOLET

RECORD = "step_time_50M"
GROUPS = {  # what is sharded -> the record's rows
    "nothing sharded": ("DDP", "DeepSpeed 0", "zero_full 0, messages", "zero_full 0"),
    "optimizer state sharded": (
        "ZeroRedundancyOptimizer",
        "DeepSpeed 1",
        "zero_full 1, messages",
        "zero_full 1",
    ),
    "and gradients": ("DeepSpeed 2", "zero_full 2, messages", "zero_full 2"),
    "and parameters": ("FSDP2", "DeepSpeed 3", "zero_full 3, messages", "zero_full 3"),
}
COLUMNS = ("step, ms", "range", "held after backward, B/p")
HEAD = re.compile(r"^\| row .*\|$", re.M)


class Row(NamedTuple):
    """What one engine takes and holds, as the record says it."""

    name: str
    ms: str
    range: str
    held: str


def rows() -> dict[str, Row]:
    """The first table of the record, by name."""
    text = (ROOT / "site" / "records" / f"{RECORD}.md").read_text()
    head = HEAD.search(text)
    names = [cell.strip() for cell in head[0].split("|")] if head else []
    if not set(COLUMNS) <= set(names):
        raise SiteError(f"site/records/{RECORD}.md has no table with {', '.join(COLUMNS)}")
    places = [names.index(column) for column in COLUMNS]
    found = {}
    for line in text[head.end() if head else 0 :].strip().splitlines()[1:]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.split("|")]
        found[cells[1]] = Row(cells[1], *(cells[place] for place in places))
    wanted = {name for names in GROUPS.values() for name in names}
    if missing := wanted - set(found):
        raise SiteError(f"site/records/{RECORD}.md lacks the rows {', '.join(sorted(missing))}")
    return found


def _label(name: str) -> str:
    """Put "stage" before the number in a row's name."""
    return re.sub(r" (\d)\b", r", stage \1", name)


def drawn() -> str:
    """Two bars for each row, with the digits beside them."""
    known = rows()
    longest = max(float(row.ms) for row in known.values()), max(float(row.held) for row in known.values())
    parts = [
        '<thead><tr><th scope="col">engine</th><th scope="col">step</th><th scope="col">ms</th>'
        '<th scope="col">held</th><th scope="col">B/p</th></tr></thead>'
    ]
    for group, names in GROUPS.items():
        parts.append(f'<tbody><tr><th colspan="5" scope="rowgroup">{group}</th></tr>')
        parts += [_row(known[name], longest) for name in names]
        parts.append("</tbody>")
    table = "\n".join(['<table class="bars">', *parts, "</table>"])
    legend = (
        '<p class="legend">Step: median in ms, and the range of the rounds. Held: bytes per parameter on one '
        "rank after backward, without activations. Shorter is better. Messages: ranks share no memory, as on "
        "several hosts.</p>"
    )
    return f'<figure class="ratios peers" data-search-exclude>\n{table}\n{legend}\n</figure>\n'


def _row(row: Row, longest: tuple[float, float]) -> str:
    colour = VIOLET if row.name.startswith("zero_full") else SLATE
    bars = [
        f'<svg width="100%" height="16" aria-hidden="true"><rect y="3" height="10" fill="{colour}" '
        f'width="{100 * float(value) / most:.1f}%"/></svg>'
        for value, most in zip((row.ms, row.held), longest, strict=True)
    ]
    name = html.escape(_label(row.name))
    return (
        f'<tr><th scope="row">{name}</th><td>{bars[0]}</td><td><b>{row.ms}</b> {row.range}</td>'
        f"<td>{bars[1]}</td><td><b>{row.held}</b></td></tr>"
    )


def markdown() -> Iterator[str]:
    """The same as lines of a small table in Markdown: our stages, DeepSpeed's, and what torch has."""
    known = rows()
    yield "| sharded over the ranks | zero_full | DeepSpeed | torch |"
    yield "|---|---|---|---|"
    for stage, (group, names) in enumerate(GROUPS.items()):
        torchs = next(
            (name for name in names if name.partition(" ")[0] not in ("zero_full", "DeepSpeed")), ""
        )
        cells = [
            f"{name}{known[row].ms} ms, {known[row].held} B" if row else "-"
            for name, row in (
                ("", f"zero_full {stage}"),
                ("", f"DeepSpeed {stage}"),
                (f"{torchs}: ", torchs),
            )
        ]
        yield f"| {group} (stage {stage}) | **{cells[0]}** | {cells[1]} | {cells[2]} |"
