"""The recorded steps are what the formulas say, and the page plays them for everybody."""

from collections import Counter
from typing import Any

import animation
import places
import pytest

from tests.site.browser import Open
from zero_min import formula

pytest_plugins = ["tests.site.fixtures"]

RANKS = animation.RANKS


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return animation.recorded()


def pieces(stage: int) -> list[int]:
    """What the stage cuts."""
    return animation.NUMEL if stage == 3 else [sum(animation.NUMEL)]


def test_a_second_recording_is_the_same(recorded: dict[str, Any]) -> None:
    assert animation.recorded() == recorded


@pytest.mark.parametrize("stage", range(4))
def test_what_travels_is_what_the_formula_says(recorded: dict[str, Any], stage: int) -> None:
    sent = [frame["sent"] for frame in recorded["stages"][stage]["frames"] if frame["sent"]]
    assert sum(map(sum, sent)) == formula.sent(stage, pieces(stage), RANKS)


@pytest.mark.parametrize("stage", range(4))
def test_what_is_drawn_after_the_step_is_what_the_formula_says(recorded: dict[str, Any], stage: int) -> None:
    record = recorded["stages"][stage]
    state = record["frames"][-2]["state"]  # the last but one: gradients are still there
    bytes_of_an_element = {"parameters": 4, "gradients": 4, "optimizer": 8}
    for rank in range(RANKS):
        drawn = {
            kind: each
            * sum(
                high - low
                for layer, segments in zip(state[rank][kind], record["segments"], strict=True)
                for letter, (low, high, _) in zip(layer, segments, strict=True)
                if letter != "."
            )
            for kind, each in bytes_of_an_element.items()
        }
        assert drawn == formula.held(stage, pieces(stage), RANKS)


def test_every_stage_makes_its_collectives(recorded: dict[str, Any]) -> None:
    made = [
        Counter(frame["what"] for frame in stage["frames"] if frame["sent"]) for stage in recorded["stages"]
    ]
    layers = len(animation.NUMEL)
    assert made == [
        {"all_reduce": layers},
        {"reduce_scatter": 1, "all_gather": 1},
        {"reduce_scatter": layers, "all_gather": 1},
        {"reduce_scatter": layers, "all_gather": 2 * layers},
    ]


def test_every_step_ends_with_new_parameters_and_no_gradients(recorded: dict[str, Any]) -> None:
    for stage in recorded["stages"]:
        first, last = stage["frames"][0], stage["frames"][-1]
        for rank in range(RANKS):
            assert set("".join(first["state"][rank]["parameters"])) <= {"o", "."}
            assert set("".join(last["state"][rank]["parameters"])) <= {"n", "."}
            assert set("".join(last["state"][rank]["gradients"])) == {"."}
        assert first["live"] == last["live"]


def test_drawing_too_little_stops_the_build() -> None:
    held = {"parameters": 4, "gradients": 0, "optimizer": 0}
    event = animation.Event("start", 0, 0)
    look = animation.Look(event, ["x"] * 4, [], [None] * 4, [""] * 4, held, 0)
    nothing = {kind: ["."] * 4 for kind in held}
    with pytest.raises(
        places.SiteError, match=r"rank 1 holds .*'parameters': 4.* drawn are .*'parameters': 0"
    ):
        animation._check(0, [[(0, 1, -1)]] * 4, 1, look, nothing)


# The player --------------------------------------------------------------------------------------


def caption(page: Any) -> str:
    return page.inner_text("#animation .caption")


def moment(page: Any) -> int:
    return int(page.input_value("#animation .seek"))


@pytest.mark.rotates
@pytest.mark.parametrize("stage", range(4))
def test_it_steps_through_every_moment(open_page: Open, recorded: dict[str, Any], stage: int) -> None:
    page = open_page("animation.html", width=390, reduced_motion="reduce")
    page.check(f"#animation [name=stage][value='{stage}']")
    frames = recorded["stages"][stage]["frames"]
    for place, frame in enumerate(frames):
        assert caption(page) == f"{frame['title']}. {frame['text']}" and moment(page) == place
        assert page.inner_text(".rank:nth-child(2) figcaption").startswith(
            f"rank 1 {frame['live'][1]:,} bytes live"
        )
        page.click("#animation [data-do=next]")
    assert moment(page) == len(frames) - 1  # there is nothing after the last
    page.click("#animation [data-do=back]")
    assert moment(page) == len(frames) - 2
    page.click("#animation [data-do=first]")
    assert moment(page) == 0


def test_keys_step_and_play(open_page: Open) -> None:
    page = open_page("animation.html")
    page.focus("#animation")
    for key, place in [("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 18), ("Home", 0)]:
        page.keyboard.press(key)
        assert moment(page) == place, key
    page.keyboard.press("Space")
    assert page.inner_text(".play") == "Pause"
    page.keyboard.press("Space")
    assert page.inner_text(".play") == "Play"
    page.focus("#animation .seek")  # the slider has its own arrows
    page.keyboard.press("ArrowRight")
    assert moment(page) == 1
    page.focus("#animation [name=stage]")  # and so have the stages
    page.keyboard.press("ArrowRight")
    assert page.is_checked("[name=stage][value='1']") and moment(page) == 0


@pytest.mark.rotates
def test_it_plays_to_the_end_and_stops(open_page: Open) -> None:
    page = open_page("animation.html")
    page.eval_on_selector("#animation option[value='700']", "option => { option.value = 5 }")
    page.select_option("#animation .speed select", "5")
    page.check("[name=stage][value='3']")
    page.click("#animation .play")
    assert page.get_attribute("#animation .caption", "aria-live") == "off"  # or it would talk all the time
    page.wait_for_function("document.querySelector('#animation .play').textContent === 'Play'")
    assert caption(page).startswith("zero_grad")
    assert page.get_attribute("#animation .caption", "aria-live") == "polite"
    page.click("#animation .play")  # from the start again
    page.wait_for_function("document.querySelector('#animation .seek').value < 5")


@pytest.mark.rotates
def test_slices_fly_unless_the_reader_wants_no_motion(open_page: Open) -> None:
    for motion, dots in (("no-preference", RANKS * (RANKS - 1)), ("reduce", 0)):
        page = open_page("animation.html", reduced_motion=motion)
        page.check("[name=stage][value='3']")
        page.click("#animation [data-do=next]")
        assert caption(page).startswith("All-gather: layer 1")
        assert page.locator("#animation .dot").count() == dots
        page.wait_for_function("document.querySelectorAll('#animation .dot').length === 0")


def test_a_drawing_says_in_words_what_it_shows(open_page: Open) -> None:
    page = open_page("animation.html", reduced_motion="reduce")
    page.check("[name=stage][value='3']")
    rank = page.locator(".rank:nth-child(3) svg")
    quarters = ", ".join(f"25% of layer {layer}" for layer in range(1, 5))
    between = f"Rank 2 holds parameters: {quarters}; gradients: none; optimizer: {quarters}."
    assert rank.get_attribute("aria-label") == between
    page.click("#animation [data-do=next]")
    assert "parameters: 100% of layer 1, 25% of layer 2" in rank.get_attribute("aria-label")


def test_the_list_has_every_moment_and_leads_there(open_page: Open, recorded: dict[str, Any]) -> None:
    page = open_page("animation.html")
    page.click("#animation summary")
    rows = page.locator("#animation .events tbody tr")
    assert rows.count() == len(recorded["stages"][0]["frames"])
    page.click("#animation [data-frame='13']")
    assert moment(page) == 13 and caption(page).startswith("All-reduce: layer 1")


def test_the_totals_are_those_of_the_recording(open_page: Open, recorded: dict[str, Any]) -> None:
    page = open_page("animation.html")
    for stage, row in zip(recorded["stages"], page.query_selector_all(".totals tbody tr"), strict=True):
        cells = [cell.inner_text().replace(",", "") for cell in row.query_selector_all("td")]
        sent = formula.sent(stage["number"], pieces(stage["number"]), RANKS) // RANKS
        assert cells[:3] == [str(max(stage["frames"][0]["live"])), str(max(stage["peak"])), str(sent)]
