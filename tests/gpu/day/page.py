"""Makes the site's GPU page of the results of a day.

    python -m tests.gpu.day.page                  of site/records/gpu: the page as it is committed
    python -m tests.gpu.day.page --folder build/gpu-day   takes those results into site/records/gpu first
    python -m tests.gpu.day.page --archive gpu-day.zip    the same from the archive that was brought back

What a rehearsal has printed is no result: its page stays in its folder, and says so in its title and above.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from matplotlib.figure import Figure

from lessons.colours import SLATE
from lessons.plots import INKS, picture
from tests.bench.interleave import RATIO_HEAD, Ratio, table
from tests.gpu.day import archive, parts
from tests.gpu.day.parts import Part
from tests.gpu.day.run import Result

ROOT = Path(__file__).parents[3]
RECORDS = ROOT / "site" / "records" / "gpu"
PAGE = ROOT / "site" / "docs" / "benchmarks" / "gpu.md"
CHARTS = ROOT / "site" / "docs" / "assets" / "gpu"
LINKS = {True: "charts", False: "../assets/gpu"}  # from the page to its charts; of a rehearsal, and otherwise
NOT_YET = """Nothing has been measured on a GPU yet, and no test has run on one. This page lists the prepared
commands, which need a GPU and a torch built for it, how a first run proceeds and, after a run, its results:
"""
FINDINGS = RECORDS / "findings.md"  # what a person has to say about the results
MEASURED = (
    "The parts below are made from what `make gpu-day` has printed; nobody types a number there. To run it:\n"
)
HOW = """
```
make gpu-day                              # every part below; finished parts are not run again
make gpu-day MINUTES=9.5 OUT=build        # as many parts as fit; repeat it for the rest
make gpu-day REHEARSE=1                   # the same commands on a CPU, with tiny sizes
make gpu-rehearsal                        # a day on a CPU in three calls, of which two are killed
make gpu-page ARCHIVE=build/gpu-day.zip   # writes the results into this page
```

A day is made for 30 minutes on a GPU, in calls of 9.5 minutes. After every part one archive has all
results, so a killed call loses only one part. On a bare machine without a network and without a virtual
environment, `make gpu-day PYTHON=python3` uses the installed packages; `python -m tests.gpu.pack` packs
missing ones beforehand. For a single test or benchmark: `make test-gpu`, `make bench-gpu`. [The order, and
the expected results](../guide/first_gpu_run.md#the-day).

Parts "under the defaults" have `ZERO_FULL_KERNELS=auto`, which uses the [CUDA
operators](../kernels.md#on-a-gpu) that can be loaded or compiled.
"""
FIRST_RUN = "<!-- include: site/docs/guide/first_gpu_run.md -->\n"  # a part of this page on the site
FOLD = '<details class="records" markdown="1"><summary>{}</summary>\n'
REHEARSAL = """# Rehearsal on a CPU

!!! warning "Not results"
    Every number on this page comes from a CPU with tiny sizes. It shows that commands, parsers, files and the
    page work, and nothing else. Where a GPU cannot be replaced, a row says what stands in.
"""


def results_in(folder: Path) -> dict[str, Result]:
    """By part, in the order of the list."""
    files = {part.name: folder / f"{part.name}.json" for part in parts.ALL}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def page(results: dict[str, Result], rehearsal: bool) -> str:
    """Charts first, tables folded. Results of the other kind are refused: they would be taken for results."""
    wrong = [name for name, result in results.items() if result["rehearsal"] != rehearsal]
    if wrong:
        told = "of a GPU" if rehearsal else "of a rehearsal"
        raise SystemExit(f"these results are {told}, and this page is not: {', '.join(wrong)}")
    drawn = [f"![{chart.said()}]({LINKS[rehearsal]}/{chart.name}.svg)\n" for chart in charts(results)]
    said = [FINDINGS.read_text()] if results and FINDINGS.exists() else []
    measured = ["# GPU\n", *said, *drawn, (MEASURED if results else NOT_YET) + HOW]
    head = [REHEARSAL, *drawn] if rehearsal else measured
    missing = [part for part in parts.ALL if part.name not in results]
    lines = [*head, *([] if results or rehearsal else [FIRST_RUN]), "## Parts\n", overview(results)]
    lines += [section(part, results[part.name]) for part in parts.ALL if part.name in results]
    if missing and results:
        lines.append("## Not run\n\n" + "\n".join(f"* {part.title}" for part in missing) + "\n")
    lines += [FIRST_RUN] if results and not rehearsal else []
    return "\n".join(lines).rstrip() + "\n"


def overview(results: dict[str, Result]) -> str:
    """A line for each part: what is expected of it, and how it went."""
    rows = [[part.title, part.expected_result, verdict(results.get(part.name))] for part in parts.ALL]
    table_of_all = markdown(["part", "expected", "state"], rows)
    return f"{FOLD.format('What is expected of each, and how it went')}\n{table_of_all}\n</details>\n"


def verdict(result: Result | None) -> str:
    """In a few words."""
    if result is None:
        return "not run"
    if result["state"] != "done":
        return {"failed": "FAILED", "stopped": "not complete: the time was over"}.get(
            result["state"], "not complete: it was killed"
        )
    judged = [row["fine"] for row in result["rows"] if "fine" in row]
    judged += [
        told["met"] for row in result["rows"] for told in row.get("ratios", {}).values() if told["target"]
    ]
    bad = judged.count(False)
    return f"done, {bad} of {len(judged)} rows are not as expected" if bad else "done"


def section(part: Part, result: Result) -> str:
    """What a part has found."""
    when, card = result["began"].partition("T")[0], result["card"] or "no card"
    lines = [
        f"## {part.title}\n",
        f"{when}, {card}: {verdict(result)}.\n",
        f"```\n{result['command']}\n```\n",
        FOLD.format("What it printed"),
    ]
    if result["tables"]:  # a benchmark prints its own, with its ratios
        printed = re.sub(r"(?m)^## (.*)$", r"\n### \1\n", "\n".join(result["tables"]))
        lines.append(re.sub(r"(?m)(^\|.*\n)(?=\|.*\n\|-)", r"\1\n", printed).strip() + "\n")
    else:
        lines += tables(result["rows"])
    lines.append("</details>\n")
    return "\n".join(lines)


def tables(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Rows with the same keys are a table; a benchmark's last line is one, too."""
    alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        alike.setdefault(tuple(row), []).append(row)
    for keys, some in alike.items():
        if "ratios" in keys:
            for row in some:
                yield (
                    table(RATIO_HEAD, [ratio(name, told).cells() for name, told in row["ratios"].items()])
                    + "\n"
                )
        else:
            yield markdown(keys, [[cell(key, row[key]) for key in keys] for row in some])


def ratio(name: str, told: dict[str, Any]) -> Ratio:
    """As `interleave.json_line` wrote it."""
    nan = float("nan")
    value, low, high = (nan if told[key] is None else told[key] for key in ("value", "low", "high"))
    return Ratio(name, value, low, high, told["target"])


def cell(key: str, value: Any) -> str:
    """For a table."""
    if isinstance(value, bool):
        return "yes" if value else "NO" if key == "fine" else "no"
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ").strip()


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that has as many characters as it needs."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


# Charts ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chart:
    """A bar for each name. `one` says what 1 is, where that says something."""

    name: str
    title: str
    bars: dict[str, tuple[float, float, float]]  # and the lowest and the highest of the rounds
    one: str = ""

    def said(self) -> str:
        """In words, for who does not see it."""
        return f"{self.title}: {', '.join(f'{name} {bar[0]:.2f}' for name, bar in self.bars.items())}."


def charts(results: dict[str, Result]) -> list[Chart]:
    """All that there are numbers for."""

    def rows_of(*parts: str) -> list[dict[str, Any]]:
        return [row for part in parts for row in results.get(part, {}).get("rows", [])]

    def ratios(*parts: str) -> dict[str, tuple[float, float, float]]:
        rows = rows_of(*parts)
        found = {name: told for row in rows for name, told in row.get("ratios", {}).items()}
        return {
            name: (told["value"], told["low"] or told["value"], told["high"] or told["value"])
            for name, told in found.items()
            if told["value"] and told["target"]
        }

    speed = {
        name.partition(" / copy")[0]: (1 / value, 1 / high, 1 / low)
        for name, (value, low, high) in ratios("kernels").items()
    }
    with_operators = ratios("steps-operators", "large-operators")
    steps = ratios("steps", "large-steps")
    steps |= {f"{name}, all operators": bar for name, bar in with_operators.items()}
    largest = {
        f"stage {row['stage']}" + (", state on the host" if row["state on the host"] else ""): row[
            "parameters, M"
        ]
        for row in rows_of("largest", "largest-between")
    }
    hidden = {row["run"]: row["hidden"] for row in rows_of("traces") if row.get("hidden") is not None}
    hidden = hidden if any(hidden.values()) else {}  # between ranks that share a card nothing is
    alone = [{name: (value,) * 3 for name, value in values.items()} for values in (largest, hidden)]
    found = [
        Chart("steps", "Step time, as a ratio", steps, "as long as the other's step"),
        Chart("operators", "Operators: share of a copy's speed", speed, "as fast as a copy"),
        Chart("largest", "Largest model that trains, millions of parameters", alone[0]),
        Chart("hidden", "Share of the communication that is hidden", alone[1]),
    ]
    return [chart for chart in found if chart.bars]


def draw(results: dict[str, Result], folder: Path, rehearsal: bool) -> None:
    """The charts as SVG files, which follow a dark page and a light one."""
    for chart in charts(results):
        figure = Figure(figsize=(7, 1 + 0.35 * len(chart.bars)), layout="constrained")
        axes = figure.subplots()
        for y, (value, low, high) in enumerate(chart.bars.values()):
            axes.barh(y, value, color=SLATE)
            axes.plot([low, high], [y, y], color="black", marker="|")
        if chart.one:
            axes.axvline(1, color="black", linestyle=":")
            told = f"1: {chart.one}; lines: from the lowest round to the highest"
            figure.supxlabel(told, x=0.01, ha="left", fontsize="medium")
        axes.set_yticks(range(len(chart.bars)), list(chart.bars))
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        shown = f"REHEARSAL ON A CPU, no result: {chart.title}" if rehearsal else chart.title
        figure.suptitle(shown, x=0.01, ha="left", fontsize="medium")
        folder.mkdir(parents=True, exist_ok=True)
        svg = picture(figure, chart.said()).svg.replace(">", f">\n{INKS}", 1)
        (folder / f"{chart.name}.svg").write_text(svg)


def main(given: Sequence[str] | None = None) -> int:
    """Write the page, and say where."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, help="results to be taken into the records")
    parser.add_argument("--archive", type=Path, help="the same, in an archive")
    parser.add_argument("--rehearsal", action="store_true", help="the folder's own page, of a rehearsal")
    asked = parser.parse_args(given)
    if asked.rehearsal:
        results, drawings, target = (
            results_in(asked.folder),
            asked.folder / LINKS[True],
            asked.folder / "page.md",
        )
    else:
        if asked.folder is not None:
            take(asked.folder)
        if asked.archive is not None:
            with TemporaryDirectory() as unpacked:
                archive.load(asked.archive, Path(unpacked), rehearsal=False)
                take(Path(unpacked))
        results, drawings, target = results_in(RECORDS), CHARTS, PAGE
    text = page(results, asked.rehearsal)
    draw(results, drawings, asked.rehearsal)
    target.write_text(text)
    print(target)
    return 0


def take(folder: Path) -> None:
    """Results become records, part by part: what was not run again keeps its older record."""
    results = results_in(folder)
    page(results, rehearsal=False)  # refuses a rehearsal before anything is written
    RECORDS.mkdir(parents=True, exist_ok=True)
    for name, result in results.items():
        (RECORDS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
