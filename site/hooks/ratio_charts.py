"""Charts of how long something takes beside its peers, made from the records when the site is built.

A chart is a sentence, and below it a bar for each ratio: our median over the peer's. `charts.py` says which
there are. All numbers, those of the sentence too, are the digits of the record's own table of ratios. A bar's
line goes from the lowest round to the highest.
"""

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from places import ROOT, SiteError

LINE = 16  # pixels for a bar and the numbers beside it
RATIO = re.compile(r"^\| (.+ / .+?) \| +(\d+\.\d\d) \| +(\d+\.\d\d)-(\d+\.\d\d) \|", re.MULTILINE)
NUMBERS = re.compile(r"\{([^}]+)\}")


@dataclass(frozen=True)
class Row:
    """Some bars with one name. `ratio` is a ratio's name in the record; `*` is the series' word."""

    label: str
    ratio: str
    record: str | None = None  # where it is not in the series' record


@dataclass(frozen=True)
class Series:
    """The bars at the same place of every row: say, those of one size of model."""

    label: str
    record: str
    word: str = ""


@dataclass(frozen=True)
class Group:
    """Rows with one heading and one colour."""

    label: str
    colour: str
    rows: Sequence[Row]


@dataclass(frozen=True)
class Chart:
    """`says` is a sentence; `{group; row; series}` in it, or a part of that, is the range of these ratios."""

    says: str
    series: Sequence[Series]
    groups: Sequence[Group]
    one: str  # what a bar as long as 1 means


@dataclass(frozen=True)
class Bar:
    """One ratio, and the lowest and the highest of its rounds."""

    names: tuple[str, str, str]
    value: str
    low: str
    high: str


@cache
def ratios(record: str) -> Mapping[str, Sequence[str]]:
    """Median, lowest and highest of each ratio that a benchmark has printed."""
    text = (ROOT / "site" / "records" / f"{record}.md").read_text()
    return {name.strip(): ends for name, *ends in RATIO.findall(text)}


def bars(chart: Chart) -> Iterator[Bar]:
    """All of a chart, from top to bottom. One that no record has is an error."""
    for group in chart.groups:
        for row in group.rows:
            for series in chart.series:
                record, name = row.record or series.record, row.ratio.replace("*", series.word)
                if name not in ratios(record):
                    raise SiteError(f"a chart shows {name!r}, which is not in site/records/{record}.md")
                yield Bar((group.label, row.label, series.label), *ratios(record)[name])


def sentence(chart: Chart) -> str:
    """What the chart says, with the records' numbers."""
    drawn = list(bars(chart))

    def span(asked: "re.Match[str]") -> str:
        names = {name.strip() for name in asked[1].split(";")}
        values = [bar.value for bar in drawn if names <= set(bar.names)]
        if not values:
            raise SiteError(f"a chart's sentence asks for {asked[0]}, and no bar has these names")
        return " to ".join(dict.fromkeys([min(values, key=float), max(values, key=float)]))

    return NUMBERS.sub(span, chart.says)


def _x(value: float | str, longest: float) -> str:
    return f"{100 * float(value) / longest:.2f}%"


def _svg(high: int, parts: Sequence[str], longest: float) -> str:
    """A strip of the chart. Its width is the page's: all places along it are in percent."""
    one = _x(1, longest)
    parts = [*parts, f'<line class="one" x1="{one}" x2="{one}" y1="0" y2="{high}"/>']
    return f'<svg width="100%" height="{high}" aria-hidden="true">{"".join(parts)}</svg>'


def _bars(row: Sequence[Bar], colour: str, longest: float) -> str:
    parts = []
    for number, bar in enumerate(row):
        y, pale = number * LINE + 3, ' fill-opacity="0.5"' if number else ""
        wide, (low, high) = _x(bar.value, longest), (_x(end, longest) for end in (bar.low, bar.high))
        parts.append(f'<rect y="{y}" width="{wide}" height="{LINE - 6}" fill="{colour}"{pale}/>')
        middle = y + LINE // 2 - 3
        parts.append(f'<line class="rounds" x1="{low}" x2="{high}" y1="{middle}" y2="{middle}"/>')
        parts += [
            f'<line class="rounds" x1="{end}" x2="{end}" y1="{middle - 3}" y2="{middle + 3}"/>'
            for end in (low, high)
        ]
    return _svg(LINE * len(row), parts, longest)


def _axis(longest: float) -> str:
    ticks = [half / 2 for half in range(1, int(2 * longest) + 1)]
    parts = ['<text x="0" y="12">0</text>']
    parts += [f'<text x="{_x(at, longest)}" y="12" text-anchor="middle">{at:g}</text>' for at in ticks]
    strip = f'<svg width="100%" height="{LINE}" aria-hidden="true">{"".join(parts)}</svg>'
    return f"<tbody><tr><td></td><td>{strip}</td><td></td></tr></tbody>"


def _legend(chart: Chart) -> str:
    """What a bar, its line and the line at 1 are."""
    pale = ("", ' class="pale"')
    keys = [
        f"<i{pale[number]}></i> {html.escape(series.label)}" for number, series in enumerate(chart.series)
    ]
    which = f"{', '.join(keys)}. " if len(keys) > 1 else ""
    return (
        f'<p class="legend">{which}Medians; a thin line goes from the lowest round to the highest. '
        f"1: {html.escape(chart.one)}; a shorter bar is a shorter time.</p>"
    )


def drawn(chart: Chart) -> str:
    """The sentence and the chart, as a part of a page."""
    all_bars = list(bars(chart))
    longest = 1.04 * max(1.0, *(float(bar.high) for bar in all_bars))
    parts = []
    for group in chart.groups:
        parts.append(f'<tbody><tr><th colspan="3" scope="rowgroup">{html.escape(group.label)}</th></tr>')
        for row in group.rows:
            mine = [bar for bar in all_bars if bar.names[:2] == (group.label, row.label)]
            said = "<br>".join(f"<b>{bar.value}</b> {bar.low} to {bar.high}" for bar in mine)
            parts.append(
                f'<tr><th scope="row">{html.escape(row.label)}</th>'
                f"<td>{_bars(mine, group.colour, longest)}</td><td>{said}</td></tr>"
            )
        parts.append("</tbody>")
    table = "\n".join(['<table class="bars">', *parts, _axis(longest), "</table>"])
    figure = f'<figure class="ratios" data-search-exclude>\n{table}\n{_legend(chart)}\n</figure>'
    return f"{sentence(chart)}\n\n{figure}\n"
