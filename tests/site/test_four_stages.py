"""Four stages on one clock: the formula's numbers, played on the page, and a GIF of the same run."""

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import four_stages
import four_stages_gif
import pytest
from PIL import Image, ImageChops, ImageColor, ImageStat

from lessons.colours import MEANINGS
from tests.site.browser import Open
from zero_min import formula

pytest_plugins = ["tests.site.fixtures"]

RANKS, NUMEL = four_stages.animation.RANKS, four_stages.animation.NUMEL


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return four_stages.recorded()


@pytest.mark.parametrize("stage", range(4))
def test_the_strips_are_what_the_formula_says(record: dict[str, Any], stage: int) -> None:
    pieces = NUMEL if stage == 3 else [sum(NUMEL)]
    moments = dict(zip((each["name"] for each in record["clock"]), record["stages"][stage], strict=True))
    held = {kind: moments["done"]["bytes"][kind] for kind in ("parameters", "gradients", "optimizer")}
    assert held == formula.held(stage, pieces, RANKS)
    assert moments["zero-grad"]["sent"] * RANKS == formula.sent(stage, pieces, RANKS)
    gathered = [name for name, moment in moments.items() if moment["bytes"]["gathered"]]
    assert bool(gathered) == (stage == 3)
    assert moments["start"]["bytes"] == moments["zero-grad"]["bytes"]
    most = [moment["most"] for moment in moments.values()]
    assert most == sorted(most) and all(
        sum(moment["bytes"].values()) <= moment["most"] for moment in moments.values()
    )
    before = [0, *(moment["sent"] for moment in moments.values())]
    for was, moment in zip(before, moments.values(), strict=False):
        assert moment["does"] in ("gathers", "averages") or moment["sent"] == was


def test_each_moment_has_a_name_of_its_own_and_a_caption_for_a_phone(record: dict[str, Any]) -> None:
    names = [each["name"] for each in record["clock"]]
    assert len(set(names)) == len(names) > 30
    assert max(len(each["text"]) for each in record["clock"]) <= 90  # two lines


def test_the_gif_is_of_this_run(record: dict[str, Any]) -> None:
    with Image.open(four_stages_gif.FILE) as gif:
        assert gif.info["comment"].decode() == four_stages_gif.digest(record), "run `make weave`"
        assert gif.n_frames == len(record["clock"]) and four_stages_gif.FILE.stat().st_size < 500_000
        place = next(i for i, each in enumerate(record["clock"]) if each["name"] == "before-gradient-2")
        gif.seek(place)
        difference = ImageChops.difference(gif.convert("RGB"), four_stages_gif.frame(record, place))
    assert max(ImageStat.Stat(difference).mean) < 4  # of 255: other letters on another system, the same bars


# The page ----------------------------------------------------------------------------------------


def moment(page: Any) -> int:
    return int(page.input_value("#four-stages .seek"))


def at(record: dict[str, Any], name: str) -> int:
    return [each["name"] for each in record["clock"]].index(name)


STOPPED = {"reduced_motion": "reduce"}
UNREADABLE = """() => {
  const found = []
  zeroFourStagesPage.act("first")
  for (const { name } of zeroFourStages.clock) {
    const all = [...document.querySelectorAll("#four-stages .strips text")].filter((it) => it.textContent)
    const boxes = all.map((it) => [it.textContent, it.getBoundingClientRect()])
    const beside = (a, b) => a.left >= b.right || b.left >= a.right
    const apart = (a, b) => beside(a, b) || a.top >= b.bottom - 3 || b.top >= a.bottom - 3
    boxes.forEach(([words, box], i) => {
      if (box.left < 0 || box.right > innerWidth) found.push([name, words])
      for (const [others, other] of boxes.slice(i + 1)) apart(box, other) || found.push([name, words, others])
    })
    zeroFourStagesPage.act("next")
  }
  return found
}"""


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (390, 844)])
def test_it_plays_by_itself_above_the_fold(open_page: Open, width: int, height: int) -> None:
    page = open_page("index.html", width=width)
    page.wait_for_function("document.querySelector('#four-stages .seek').value > 1")
    box = page.locator("#four-stages .strips svg").bounding_box()
    # On a telephone it begins there: the ways into the site come first.
    assert box["y"] + (box["height"] if width > 1000 else 0) <= height
    assert box["x"] >= 0 and box["x"] + box["width"] <= width
    sizes = "all => all.map(it => parseFloat(getComputedStyle(it).fontSize))"
    assert min(page.eval_on_selector_all("#four-stages .strips text", sizes)) >= 12
    assert page.evaluate(UNREADABLE) == []
    cut = "it => it.scrollWidth > it.clientWidth"
    assert not page.eval_on_selector(".drawing", cut)  # the staircase, below


def test_it_shows_every_moment_and_comes_round(open_page: Open, record: dict[str, Any]) -> None:
    page = open_page("index.html", **STOPPED)
    last = len(record["clock"]) - 1
    assert moment(page) == last and page.inner_text("#four-stages .play") == "Play"  # a still
    page.focus("#four-stages")
    page.keyboard.press("Home")
    for place, each in enumerate(record["clock"]):
        assert page.inner_text("#four-stages .caption").split("\n") == [each["title"] + ".", each["text"]]
        for stage, drawn in zip(record["stages"], drawn_by(page), strict=True):
            held = [nbytes for nbytes in stage[place]["bytes"].values() if nbytes]
            assert drawn == pytest.approx([nbytes / sum(held) for nbytes in held], abs=1e-3)
        said = page.locator("#four-stages .strips text").all_text_contents()
        for word in ("now", "most", "sent"):
            numbers = [told(stage[place])[word] / record["numel"] for stage in record["stages"]]
            assert [words for words in said if words.startswith(word)] == [f"{word} {n:.1f}" for n in numbers]
        page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert moment(page) == last - 1
    page.evaluate("Object.assign(zeroFourStagesPage.now, { pace: 5, rest: 5 })")
    page.keyboard.press("Space")
    page.wait_for_function("document.querySelector('#four-stages .seek').value < 9")
    page.keyboard.press("Space")
    assert page.inner_text("#four-stages .play") == "Play"


def told(stage: dict[str, Any]) -> dict[str, int]:
    return {"now": sum(stage["bytes"].values()), "most": stage["most"], "sent": stage["sent"]}


def drawn_by(page: Any) -> list[list[float]]:
    """Of each stage's bar: its parts, as shares."""
    bars = page.eval_on_selector_all(
        "#four-stages .now", "all => all.map(it => [it.x.baseVal.value, it.height.baseVal.value])"
    )
    stages = [[high for x, high in bars if x == left] for left in sorted({x for x, _ in bars})]
    return [[high / sum(each) for high in each] for each in stages]


@pytest.mark.rotates
def test_a_link_leads_to_its_moment(open_page: Open, record: dict[str, Any]) -> None:
    page = open_page("index.html", permissions=["clipboard-read", "clipboard-write"], **STOPPED)
    page.fill("#four-stages .seek", str(at(record, "forward-3")))
    page.click("#four-stages [data-do=link]")
    link = page.input_value("#four-stages .link input")
    assert parse_qs(urlsplit(link).query) == {"moment": ["forward-3"]} and link.endswith("#four-stages")
    page.wait_for_function("document.querySelector('#four-stages .link output').textContent")
    there = open_page("index.html?" + urlsplit(link).query + "#four-stages")
    assert moment(there) == at(record, "forward-3") and there.inner_text("#four-stages .play") == "Play"
    wrong = open_page("index.html?moment=forward-9")
    assert "not in this step: forward-9" in wrong.inner_text("#four-stages .caption")


def test_a_picture_has_the_page_s_colours_and_the_moment_s_name(open_page: Open, tmp_path: Any) -> None:
    for scheme in ("light", "dark"):
        page = open_page("index.html?moment=before-forward-2", scheme=scheme, width=390)
        with page.expect_download() as download:
            page.click("#four-stages [data-do=picture]")
        assert download.value.suggested_filename == "zero-four-stages-before-forward-2.png"
        download.value.save_as(tmp_path / "saved.png")
        with Image.open(tmp_path / "saved.png") as picture:
            assert picture.width == 2400
            corner, seen = picture.convert("RGB").getpixel((2, 2)), picture.convert("RGB").getcolors(1 << 20)
        assert corner == ImageColor.getrgb(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        kinds = {ImageColor.getrgb(MEANINGS[kind]) for kind in ("parameters", "gradients", "optimizer")}
        assert kinds <= {colour for _, colour in seen}


CUT = """() => {
  const place = document.createElement("div")
  place.innerHTML = zeroFourStagesPage.poster()
  document.body.append(place)
  const outside = [...place.querySelectorAll("svg svg")].flatMap(svg => [...svg.querySelectorAll("text")]
    .filter(text => {
      const box = text.getBBox(), whole = svg.viewBox.baseVal
      return box.x < 0 || box.y < 0 || box.x + box.width > whole.width || box.y + box.height > whole.height
    }).map(text => text.textContent))
  place.remove()
  return outside
}"""


def test_no_word_or_number_of_a_saved_picture_is_cut_off(open_page: Open) -> None:
    assert open_page("index.html", **STOPPED).evaluate(CUT) == []


def test_it_offers_the_gif(site: Any, open_page: Callable[..., Any]) -> None:
    page = open_page("index.html", **STOPPED)
    link = page.get_attribute("#four-stages a[download]", "href")
    assert (site / link).read_bytes() == four_stages_gif.FILE.read_bytes()
