"""The hooks by themselves: what they cut out is right, and a mistake on a page stops the build."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lessons import museum
from tests.structure.test_structure import graph, room_of
from zero_full.migrate.name_table import INSTEAD, NAMES

pytest.importorskip("material", reason="pip install -e '.[site]'")

import api_pages
import charts
import config_page
import directives
import drawings
import formulas
import import_graph
import lesson_pages
import migrate_tables
import museum_page
import notebook_pages
import peer_chart
import places
import ratio_charts
import record_plots
import snippets


def test_code_is_found_by_marker_name_and_line() -> None:
    gather = snippets.snippet("zero_min/stage1.py:ex_gather")
    assert gather.code.startswith("f.mine.copy_(f.master)")
    method = snippets.snippet("zero_min/stage1.py Stage1.gather_parameters")
    assert method.first < gather.first <= gather.last <= method.last
    assert "8<" not in method.code and "    for f in self.flats:\n        f.mine" in method.code
    some = snippets.snippet('zero_min/stage1.py Stage1.step from "norm = self" to "return norm"')
    assert some.code.splitlines()[0] == "norm = self.clip_gradients()"
    assert some.code.splitlines()[-1] == "return norm"
    block = snippets.snippet('zero_min/stage1.py Stage1.clip_gradients from "if self.max_grad_norm"')
    assert len(block.code.splitlines()) == 2


@pytest.mark.parametrize(
    "reference",
    [
        "zero_min/nowhere.py f",
        "zero_min/stage1.py:ex_nothing",
        "zero_min/stage1.py Stage1.nothing",
        'zero_min/stage1.py Stage1.step from "not there"',
        "zero_min/stage1.py Stage1.step and more",
    ],
)
def test_code_that_is_not_there_stops_the_build(reference: str) -> None:
    with pytest.raises(places.SiteError):
        snippets.snippet(reference)


def test_a_link_leads_to_the_page_that_shows_the_file() -> None:
    text = "[a](../../zero_min/stage1.py) [b](stage_3.md#units) [c](https://example.org) `[d](x.py)`"
    moved = places.relinked(text, "site/docs/zero_full.md", "zero_full.md")
    assert moved.startswith(
        "[a](source/zero_min/stage1.py.md) [b](stage_3.md#units) [c](https://example.org)"
    )
    fenced = "```\n[a](../../zero_min/stage1.py)\n```"
    assert places.relinked(fenced, "site/docs/zero_full.md", "zero_full.md") == fenced
    with pytest.raises(places.SiteError, match=r"links to \.\./\.\./LICENSE"):
        places.relinked("[a](../../LICENSE)", "site/docs/zero_full.md", "zero_full.md")


def test_a_drawing_takes_its_description_from_the_text_and_its_colours_from_the_page() -> None:
    made = drawings.inlined("![Four of them.](../lessons/staircase.svg)", "here/page.md")
    assert (
        'aria-label="Four of them."' in made and "<style>" not in made and "prefers-color-scheme" not in made
    )
    plot = drawings.inlined("![A plot.](../lessons/step6_zero_one_adam/plot.svg)", "here/page.md")
    assert 'style="--wide:1036.8px; ' in plot  # what a small screen must not shrink


def test_the_import_graph_is_that_of_the_structure_tests() -> None:
    rooms: dict[str, set[str]] = {}
    for module, below in graph().items():
        room = room_of(module) if module.startswith("zero_full.") else ""
        if room and not room.startswith("__"):
            rooms.setdefault(room, set()).update({room_of(m) for m in below} - {room, ""})
    slashes = {room.replace(".", "/"): {r.replace(".", "/") for r in ones} for room, ones in rooms.items()}
    assert import_graph.rooms() == slashes


def test_arrows_that_are_left_out_follow_from_those_that_are_drawn() -> None:
    full = import_graph.rooms()
    drawn = import_graph.needed_arrows(full)
    for room in full:
        assert drawn[room] <= full[room] <= import_graph._reaches(drawn, room)


def test_the_paper_s_numbers_come_out_of_the_formulas() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in formulas.memory().splitlines()]
    assert ["64", "120", "31.4", "16.6", "1.88"] in rows and ["4", "120", "52.5", "41.3", "30"] in rows


def test_a_key_says_what_its_model_takes() -> None:
    keys = {
        f"{section}.{key.name}".lstrip("."): key
        for section, _, keys in config_page.sections()
        for key in keys
    }
    said = {name: config_page.expected(keys[name]) for name in keys}
    assert said["zero_optimization.stage"] == "one of 0, 1, 2 or 3"
    assert said["fp16.hysteresis"] == "a whole number of at least 1"
    assert said["gradient_predivide_factor"] == "a number above 0"
    assert said["communication_data_type"].endswith("or null") and said["bf16.enabled"] == "true or false"
    assert "anything" not in said.values()


def test_a_key_without_a_text_stops_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = dict(config_page._texts())
    texts.pop("fp16.hysteresis")
    monkeypatch.setattr(config_page, "_texts", lambda: {**texts, "fp16.hysterisis": "?"})
    with pytest.raises(places.SiteError, match=r"missing \['fp16.hysteresis'\].*\['fp16.hysterisis'\]"):
        config_page.check_texts()


def test_a_record_is_shown_as_it_was_printed_but_for_the_line_of_numbers_for_programs() -> None:
    shown = directives.expanded("<!-- record: hooks -->", "kernels.md")
    lines = (places.ROOT / "site" / "records" / "hooks.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("|")] == [x for x in shown.splitlines() if x[:1] == "|"]
    assert "Measured on" in shown and "{" not in shown
    with pytest.raises(places.SiteError, match=r"kernels\.md asks for site/records/nothing\.md"):
        directives.expanded("<!-- record: nothing -->", "kernels.md")


def test_an_api_page_that_forgets_a_name_stops_the_build() -> None:
    page = "\n".join(f"<!-- api: zero_min.{name} -->" for name in api_pages.exported("zero_min")[1:])
    with pytest.raises(places.SiteError, match="0 times"):
        api_pages.check_complete(page, "zero_min", "api/zero_min.md")


def test_a_signature_is_shown_as_it_is_written() -> None:
    shown = api_pages.render("zero_min.run_world", "api/zero_min.md")
    assert "fn: Callable[..., T]" in shown and "timeout: float = 60.0" in shown and "-> list[T]" in shown
    listed = api_pages.render("zero_full.initialize", "api/zero_full.md")
    assert "* `model`: moved to this rank's device" in listed


@pytest.mark.parametrize("package", ["zero_full", "zero_min"])
def test_what_a_public_name_is_stands_there_and_not_elsewhere(package: str) -> None:
    """A page of the reference shows docstrings alone, without what stands above them in the file."""
    page = (places.ROOT / "site" / "docs" / "api" / f"{package}.md").read_text()
    dead = re.compile(r"\[Note: [^]]*\]|[Ss]ee the (?:module|class)\b.*|docstring|^As above.*", re.M)
    names = re.findall(r"<!-- api: (\S+) -->", page)
    found = {name: dead.findall(api_pages.render(name, f"api/{package}.md")) for name in names}
    assert len(names) > 10 and {name: each for name, each in found.items() if each} == {}


def _notebook(*cells: str, **metadata: Any) -> Any:
    import nbformat.v4 as v4

    code = [v4.new_code_cell(source, metadata=metadata) for source in cells]
    return v4.new_notebook(cells=[v4.new_markdown_cell("# A title"), *code])


def test_a_notebook_that_fails_stops_the_build(tmp_path: Path) -> None:
    import nbformat

    path = tmp_path / "bad.ipynb"
    nbformat.write(_notebook("print('fine')", "assert 1 + 1 == 3, 'no'"), path)
    with pytest.raises(places.SiteError, match=r"(?s)notebooks/bad.ipynb fails.*AssertionError.*no"):
        notebook_pages._executed(path)


def test_a_notebook_that_runs_is_told_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notebook_pages, "CACHE", tmp_path)
    monkeypatch.setattr(notebook_pages, "_executed", lambda path: _notebook("1 + 1"))
    with caplog.at_level("INFO", "mkdocs.notebooks"):
        notebook_pages.folder("00b_ring")
        notebook_pages.folder("00b_ring")  # is there already
    place = f"notebook 00b_ring, 2 of {len(notebook_pages.names())}"
    assert caplog.messages == [f"{place}: running", f"{place}: done after 0 s"]


def test_a_notebook_that_is_not_to_be_run_has_a_page_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebook_pages, "CACHE", tmp_path)
    monkeypatch.setattr(notebook_pages, "_executed", lambda path: pytest.fail(f"{path} was run"))
    monkeypatch.setenv(notebook_pages.ONLY, "")
    folders = notebook_pages.folders()
    assert [*folders] == notebook_pages.names()
    for folder in folders.values():
        page = (folder / "page.md").read_text()
        assert "which was not run when the site was built" in page and "```ipython3" in page


def test_a_picture_needs_a_description(tmp_path: Path) -> None:
    import nbformat.v4 as v4

    shown = v4.new_output("display_data", data={"image/png": "aGVsbG8="})
    bare, described = _notebook("show()"), _notebook("show()", alt="A staircase.")
    for notebook in (bare, described):
        notebook.cells[1].outputs = [shown]
    with pytest.raises(places.SiteError, match="cell 2: a picture without a description"):
        notebook_pages._Page("x", tmp_path).text(bare)
    assert "![A staircase.](x_1.png)" in notebook_pages._Page("x", tmp_path).text(described)
    assert (tmp_path / "x_1.png").read_bytes() == b"hello"


def test_what_a_cell_prints_is_shown_without_colours_and_once() -> None:
    notebook = _notebook("print()")
    import nbformat.v4 as v4

    notebook.cells[1].outputs = [
        v4.new_output("stream", name="stdout", text="10%\r100%\n\x1b[31mred\x1b[0m\n")
    ]
    text = notebook_pages._Page("x", Path()).text(notebook)
    assert "100%\nred" in text and "\x1b" not in text and "10%\n" not in text


def test_the_page_of_migration_has_every_name_of_the_command() -> None:
    page = directives.expanded((places.ROOT / "site/docs/guide/migrate_deepspeed.md").read_text(), "x.md")
    for path in NAMES:
        module, _, name = path.rpartition(".")
        assert any(f"`{module}`" in line and f"`{name}`" in line for line in page.splitlines()), path
    for path, text in INSTEAD.items():
        assert path == "deepspeed" or f"| `{path}` | {text.replace('|', chr(92) + '|')} |" in page
    assert "`DeepSpeedEngine` → `Engine`" in migrate_tables.same("", "x.md")
    assert "| `engine." in page


RECORDS: dict[str, dict[str, Any]] = {
    "optimizers": {
        "seeds": [0, 1],
        "curves": {
            "Adam": {"steps": [20, 40], "losses": [[3.0, 2.5], [3.1, 2.75]]},
            "Adam, large batch": {"steps": [20, 40], "losses": [[3.0, 2.25], [3.0, 2.25]]},
            "LAMB, large batch": {"steps": [20, 40], "losses": [[3.0, 2.0], [3.0, 2.25]]},
        },
    },
    "compression_bytes": {
        "steps": 2,
        "counted": {
            "2": {
                "Adam": {"sent": [400, 400], "formula": [400, 500], "numel": 100},
                "1-bit Adam": {"sent": [100, 100], "formula": [100, 100], "numel": 100},
            }
        },
    },
    "offload_timeline": {
        "events": {"state in a file": [["backward", 1, 9], ["read", 4.2, 6], ["read", 6, 8]]}
    },
}
SEEN = {
    "optimizers": "Adam ends at 2.625, its seeds from 2.500 to 2.750.",
    "compression_bytes": "Bytes per parameter after 2 steps on 2 ranks: Adam 8.0, closed form 9.0; 1-bit",
    "offload_timeline": "by what is at work. state in a file: backward 1 to 9, read 4 to 8.",
}


SAID = {
    "optimizers": "The mean loss of 2 seeds ends, beside Adam's: LAMB 0.125 lower.",
    "compression_bytes": "In parts of the bytes that Adam sends, each sends: 1-bit Adam 0.25.",
}


@pytest.mark.parametrize("name", record_plots.PLOTS)
def test_a_plot_says_what_the_record_says(name: str) -> None:
    printed = ["# what people read", json.dumps(RECORDS[name])]
    figure = record_plots.drawn(name, printed)
    said, _, figure = figure.rpartition("\n\n")
    assert SEEN[name] in figure and said == SAID.get(name, "")
    assert "currentColor" in figure and "#000000" not in figure and "background" not in figure


def recorded(name: str) -> dict[str, Any]:
    """What a record's line for programs says, which the charts do not read."""
    text = (places.ROOT / "site" / "records" / f"{name}.md").read_text()
    ratios: dict[str, Any] = json.loads(text.splitlines()[-1])["ratios"]
    return ratios


@pytest.mark.parametrize("name", charts.CHARTS)
def test_a_chart_draws_and_writes_the_record_s_medians_and_ranges(name: str) -> None:
    chart = charts.CHARTS[name]
    figure = directives.expanded(f"<!-- chart: {name} -->", "kernels.md")
    told = [
        recorded(row.record or series.record)[row.ratio.replace("*", series.word)]
        for group in chart.groups
        for row in group.rows
        for series in chart.series
    ]
    one = float(re.findall(r'"one" x1="([\d.]+)%"', figure)[0])  # all places are in percent of the width
    wide = re.findall(r'<rect y="\d+" width="([\d.]+)%"', figure)
    ranges = re.findall(r'class="rounds" x1="([\d.]+)%" x2="([\d.]+)%"', figure)[::3]  # and its two ends
    said = re.findall(r"<b>([\d.]+)</b> ([\d.]+) to ([\d.]+)", figure)
    assert len(told) == len(wide) == len(ranges) == len(said) > 5
    for ratio, bar, line, digits in zip(told, wide, ranges, said, strict=True):
        numbers = [ratio[key] for key in ("value", "low", "high")]
        assert [float(place) / one for place in (bar, *line)] == pytest.approx(numbers, abs=0.006)
        assert [float(each) for each in digits] == pytest.approx(numbers, abs=0.00501)


def test_a_chart_s_sentence_has_the_record_s_numbers() -> None:
    # By the records' tables: their lines for programs have more digits, and round 0.8749 to 0.875.
    records = [(places.ROOT / "site" / "records" / f"{name}.md") for name in ("step_time", "step_time_50M")]
    steps = [
        row for each in records for row in re.findall(r"^\| (.+?) +\| +([\d.]+) \|", each.read_text(), re.M)
    ]
    text = directives.expanded("<!-- chart: step -->", "benchmarks/cpu.md").splitlines()[0]
    for peer in ("DDP", "ZeroRedundancyOptimizer", "FSDP2", "DeepSpeed"):
        ours = re.compile(rf"fp32: zero_full \d / {peer}( \d)?$")
        values = [float(value) for name, value in steps if ours.search(name)]
        assert re.search(rf"{min(values):.2f} to {max(values):.2f} of (the time of )?{peer}'s", text), peer


def test_a_chart_of_what_is_not_recorded_stops_the_build() -> None:
    with pytest.raises(places.SiteError, match=r"cpu\.md asks for a chart of nothing; there are peers"):
        charts.render("nothing", "cpu.md")
    series, row = (
        [ratio_charts.Series("", "hooks")],
        ratio_charts.Row("", "with hooks on every layer / 25 us"),
    )
    for says, rows, message in (
        ("{fast}", [row], "asks for {fast}, and no bar has these names"),
        ("fast", [row, ratio_charts.Row("", "we / they")], "'we / they', which is not in site/records/hooks"),
    ):
        chart = ratio_charts.Chart(says, series, [ratio_charts.Group("", "red", rows)], "")
        with pytest.raises(places.SiteError, match=message):
            ratio_charts.drawn(chart)


def test_records_fold_behind_a_chart() -> None:
    text = directives.expanded("<!-- records: files hooks -->", "kernels.md")
    assert (
        text.startswith('<details class="records" markdown="1"><summary>The record')
        and text.count("Measured on") == 2
    )
    for page in ("kernels.md", "benchmarks/cpu.md", "benchmarks/optimizers.md"):
        written = (places.ROOT / "site" / "docs" / page).read_text()
        assert re.match(r"# .*\n\n<!-- chart: ", written) and "<!-- record: " not in written


def test_a_plot_of_what_is_not_recorded_stops_the_build() -> None:
    with pytest.raises(places.SiteError, match="asks for a plot of nothing; there are optimizers"):
        record_plots.render("nothing", "page.md")


def test_every_mistake_is_on_the_museum_s_page_with_what_check_says() -> None:
    text = museum_page.render("all", "museum.md")
    for lesson, mistake in museum.each_mistake():
        assert f". {mistake.name}: " in text
        assert f"](lessons/{lesson.folder}/lesson.md#" in text
    assert "-my_grad = self.comm.reduce_scatter(parts).div_(self.comm.world_size)" in text
    assert "that is: it is 2 times too much: the sum over 2 ranks" in text
    assert not re.search(r"\.py:\d+", text)
    lessons = lesson_pages.pages()
    links = set(re.findall(r"\]\((lessons/\w+/lesson\.md)#(explains-[\w-]+)\)", text))
    assert len(links) > 30 and all(f'<div id="{mark}">' in lessons[page] for page, mark in links)


def test_a_mistake_without_a_record_stops_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(museum, "recorded", dict)
    with pytest.raises(places.SiteError, match=r"python -m lessons\.museum"):
        museum_page.render("all", "museum.md")


def test_the_readme_s_table_has_the_record_s_numbers() -> None:
    assert "\n".join(peer_chart.markdown()) in (places.ROOT / "README.md").read_text()


def test_a_record_without_a_peer_stops_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = places.ROOT / "site" / "records" / f"{peer_chart.RECORD}.md"
    other = tmp_path / "site" / "records" / record.name
    other.parent.mkdir(parents=True)
    other.write_text(record.read_text().replace("| FSDP2 ", "| FSDP3 ", 1))
    monkeypatch.setattr(peer_chart, "ROOT", tmp_path)
    with pytest.raises(places.SiteError, match="lacks the rows FSDP2"):
        peer_chart.rows()
