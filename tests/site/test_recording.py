"""A recording of a real run on the page of the player: read from a file, drawn, and told in words."""

import json
from pathlib import Path
from typing import Any

import pytest
import recordings as shown

from tests.recordings import hang
from tests.site.browser import Open
from zero_full.flight.captions import ms
from zero_full.flight.rank_files import FORMAT
from zero_full.flight.timeline import recording_of
from zero_full.formatting import human

pytest_plugins = ["tests.site.fixtures"]
DROP = """([text, name]) => {
  const files = new DataTransfer()
  files.items.add(new File([text], name, { type: "application/json" }))
  const kinds = ["dragover", "drop"]
  return kinds.map((kind) => {
    const event = new DragEvent(kind, { dataTransfer: files, bubbles: true, cancelable: true })
    return document.querySelector("h1").dispatchEvent(event)
  })
}"""


@pytest.fixture(scope="module")
def recording() -> dict[str, Any]:
    """As a file has it."""
    made: dict[str, Any] = json.loads(json.dumps(recording_of(hang())))
    return made


def drop(page: Any, recording: Any, name: str = "step.json") -> None:
    taken = page.evaluate(DROP, [recording if isinstance(recording, str) else json.dumps(recording), name])
    assert taken == [False, False]  # the browser does not open the file itself
    page.wait_for_function(
        "!document.getElementById('recording').hidden"
        " || document.querySelector('#recording-drop [role=status]').textContent"
    )


def rows(page: Any, table: str) -> list[list[str]]:
    script = "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    found: list[list[str]] = page.eval_on_selector_all(f"#recording table.{table} tbody tr", script)
    return found


@pytest.mark.parametrize("width", [390, 1440])
def test_a_dropped_file_is_drawn_and_starts_where_it_went_wrong(
    open_page: Open, recording: dict[str, Any], width: int
) -> None:
    page = open_page("animation.html", width=width)
    drop(page, recording)
    frame = next(each for each in recording["frames"] if each["missing"])
    assert page.inner_text("#recording .caption") == f"{frame['title']}. {frame['text']}"
    assert page.inner_text("#recording .about").startswith(
        "Stage 2 on 4 ranks (cpu). There are no events of rank 3."
    )
    assert page.locator("#recording .times .label").count() == 3
    drawn = page.locator("#recording .times svg").bounding_box()
    assert drawn["x"] >= 0 and drawn["x"] + drawn["width"] <= width
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_numbers_are_those_of_the_file(open_page: Open, recording: dict[str, Any]) -> None:
    page = open_page("animation.html")
    drop(page, recording)
    told = rows(page, "told")
    for rank, (name, waited, whom, most, how) in enumerate(told):
        waits = recording["waits"][rank]
        assert (name, waited) == (f"rank {rank}", ms(sum(us for _, us in waits)))
        assert whom == ", ".join(f"rank {other}: {ms(us)}" for other, us in waits[:3])
        assert most == human(max(frame["live"][rank] for frame in recording["frames"]))
        assert how == (recording["ended"][rank] or "not ended")
    page.select_option("#recording .steps select", "")
    listed = rows(page, "events")
    assert [row[1:3] for row in listed] == [[frame["title"], frame["text"]] for frame in recording["frames"]]
    for size in (0, 999, 1000, 9_995, 123_456, 99_950_000, 7_500_000_000):
        assert page.evaluate(f"zeroRecordingPage.human({size})") == human(size)
    for us in (0, 5, 9_994, 10_000, 99_940, 123_456):
        assert page.evaluate(f"zeroRecordingPage.ms({us})") == ms(us)


def test_one_moves_through_it_by_keys_clicks_and_the_list(open_page: Open, recording: dict[str, Any]) -> None:
    page = open_page("animation.html")
    drop(page, recording)
    page.select_option("#recording .steps select", "1")
    frames = [frame for frame in recording["frames"] if frame["step"] == 1]
    page.focus("#recording")
    for key, place in (
        ("ArrowRight", 1),
        ("End", len(frames) - 1),
        ("ArrowLeft", len(frames) - 2),
        ("Home", 0),
    ):
        page.keyboard.press(key)
        assert int(page.input_value("#recording .seek")) == place, key
    page.click("#recording [data-do=longest]")
    longest = max(frames, key=lambda frame: max(frame["waited"]))
    assert longest["text"] in page.inner_text("#recording .caption")
    page.click("#recording .times rect.call[data-place='2']", force=True)
    assert frames[2]["title"] in page.inner_text("#recording .caption")
    page.click("#recording summary")
    page.click("#recording .events [data-place='1']")
    assert int(page.input_value("#recording .seek")) == 1
    assert rows(page, "held")[0][1:] == [human(size) for size in frames[1]["held"][0]]


def test_names_in_a_file_are_text_and_no_markup(open_page: Open, recording: dict[str, Any]) -> None:
    page = open_page("animation.html")
    hostile = json.loads(json.dumps(recording))
    hostile["frames"][0]["title"] = hostile["kinds"][0] = "<img src=x onerror=alert(1)>"
    hostile["ended"][0] = "<script>alert(1)</script>"
    drop(page, hostile)
    page.select_option("#recording .steps select", "")
    assert page.locator("#recording :is(img, script, b)").count() == 0
    assert page.locator("#recording table.events").text_content().count("<b>norm</b> & 'more'") >= 1


def test_what_is_no_recording_is_said(open_page: Open, recording: dict[str, Any], tmp_path: Path) -> None:
    page = open_page("animation.html")
    part = json.dumps({FORMAT: {"version": 1}})
    for text, said in (
        ("[1, 2", "is not a recording. engine.record(path) of zero_full makes one"),
        ("null", "is not a recording"),
        (f"{part}\n{part}", "is one rank's part: python -m zero_full replay puts all parts together"),
        (json.dumps({**recording, FORMAT: 2}), "has format version 2, not 1"),
        (json.dumps({**recording, "frames": []}), "has no moments"),
        (json.dumps({FORMAT: 1, "frames": [{}]}), "cannot be drawn"),
    ):
        drop(page, text)
        assert said in page.inner_text("#recording-drop [role=status]")
        assert page.is_hidden("#recording")
    file = tmp_path / "step.json"
    file.write_text(json.dumps(recording))
    page.set_input_files("#recording-drop input", file)
    page.wait_for_selector("#recording", state="visible")
    assert page.inner_text("#recording-drop [role=status]") == ""


def test_the_example_is_a_hang_that_was_recorded(open_page: Open) -> None:
    page = open_page("animation.html")
    page.click("#recording-drop button")
    assert "Rank 2 makes another call in its place" in page.inner_text("#recording .caption")
    told = shown.replayed(shown.EXAMPLE, "a page")
    assert "rank 2" in told and max(map(len, told.splitlines())) <= 80
