"""What the notebooks' cells call: a changed line, real processes, pictures."""

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from lessons.cells import change_line, torchrun
from lessons.exercise import LessonError
from lessons.notebook import slider
from lessons.plots import Picture, cut, lanes, new_figure, picture, spans, strips
from zero_min.ledger import Event

PAIR = "my_grad = self.comm.reduce_scatter(parts).div_(self.comm.world_size)"


COUNT = "self.skipped += 1"


@pytest.mark.rotates
def test_the_unchanged_line_passes_all_tests_of_its_step() -> None:
    verdict = change_line(4, COUNT, COUNT)
    assert (verdict.failed, verdict.text) == (0, f"passed: {verdict.passed}, failed: 0")
    assert verdict.passed > 0


@pytest.mark.rotates
def test_a_line_that_only_check_refuses_is_not_said_to_do_the_same() -> None:
    verdict = change_line(4, COUNT, "pass")
    assert verdict.passed > 0 and verdict.failed == 1
    assert "failed: 0\n\nbut `check` refuses it:" in verdict.text
    assert "failed: test_an_overflow_on_one_rank_skips_everywhere" in verdict.text


def test_a_wrong_line_fails_and_the_answer_key_stays() -> None:
    source = Path(__file__).parents[2] / "zero_min" / "stage1.py"
    before = source.read_bytes()
    verdict = change_line(1, PAIR, PAIR.replace(".div_(self.comm.world_size)", ""))
    assert verdict.failed > 0
    assert "test_reduce_gives_each_rank_the_average_of_its_slice" in verdict.text
    assert source.read_bytes() == before


def test_a_line_with_a_syntax_error_is_answered_with_it() -> None:
    with pytest.raises(LessonError, match="SyntaxError"):
        change_line(1, PAIR, "my_grad = (")


@pytest.mark.parametrize("line", ["no such line", "self.comm"])
def test_a_line_must_stand_in_the_answer_key_once(line: str) -> None:
    with pytest.raises(LessonError, match=r"must stand in zero_min/stage1.py exactly once"):
        change_line(1, line, "pass")


def test_a_script_that_fails_is_shown_with_its_error(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise ValueError('as planned')\n")
    with pytest.raises(RuntimeError, match="as planned"):
        torchrun(str(script), ranks=1)


def test_no_rank_of_a_script_outlives_the_limit(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(subprocess.TimeoutExpired):
        torchrun(str(script), limit=15)
    deadline = time.monotonic() + 10
    pids = [int(path.read_text()) for path in tmp_path.iterdir() if path.name.isdigit()]
    while alive := [pid for pid in pids if _alive(pid)]:
        assert time.monotonic() < deadline, f"still alive: {alive}"
        time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_picture_takes_the_readers_colours_and_says_what_is_seen() -> None:
    figure, (plot,) = new_figure(1)
    plot.plot([0, 1], color="black", label="a line")
    plot.legend()
    made = picture(figure, 'a line "up" & away')
    assert 'role="img"' in made.svg and 'aria-label="a line &quot;up&quot; &amp; away"' in made.svg
    assert "#000000" not in made.svg and "currentColor" in made.svg
    assert "#ffffff" not in made.svg  # no background, behind the legend neither
    assert "<style" not in made.svg and "font-family: '" not in made.svg  # it would restyle the whole page
    assert "\n\n" not in made.svg
    assert repr(made) == made.alt
    assert made._repr_html_().startswith("<figure")


def test_a_picture_is_the_same_text_every_time() -> None:
    first, second = (cut(["A", "A", "B", "0"], 2) for _ in range(2))
    assert first == second
    other = cut(["A", "B", "B", "0"], 2)
    assert not set(_ids(first.svg)) & set(_ids(other.svg))


def _ids(svg: str) -> list[str]:
    return re.findall(r'\bid="([^"]+)"', svg)


def shown(svg: str) -> list[str]:
    """The words in a picture."""
    return re.findall(r"<text[^>]*>([^<]+)</text>", svg)


def test_all_pictures_of_a_slider_have_one_scale() -> None:
    def strip(size: int) -> Picture:
        return strips({"rank 0": {"parameters": 10 * size}}, 10)

    def line(size: int) -> Picture:
        figure, (plot,) = new_figure(1)
        plot.plot([0, size])
        return picture(figure, f"up to {size}")

    def lane(size: int) -> Picture:
        return lanes([[Event("all_gather", size, 0), Event("all_reduce", 1, 0)]], 1)

    def axis(svg: str) -> list[str]:
        return [word for word in shown(svg) if re.fullmatch(r"\d+(\.\d)?", word)]

    for drawn in (strip, line):
        small, large = slider("size", [1, 16], drawn).html.split("data-value=")[1:]
        assert axis(small) == axis(large) == axis(drawn(16).svg) != axis(drawn(1).svg)
    small, _ = slider("size", [1, 16], lane).html.split("data-value=")[1:]  # its boxes have no axis
    boxes = re.compile(r'<path d="([^"]*)"')
    assert boxes.findall(small) != boxes.findall(lane(1).svg)


def test_ranks_that_are_alike_are_one_row_and_the_others_are_not() -> None:
    same = {f"stage 1, rank {rank}": {"parameters": 40} for rank in range(3)}
    other = {"stage 1, rank 3": {"parameters": 20}}
    words = shown(strips(same | other, 10).svg)
    assert (
        "stage 1, ranks 0 to 2, x3" in words and "stage 1, rank 3" in words and "stage 1, rank 0" not in words
    )
    events = [Event("send", 8, 8)]
    assert "ranks 0 to 3, x4" in shown(lanes([events] * 4, 1).svg)
    assert "rank 1" in shown(lanes([events, [Event("send", 4, 8)]], 1).svg)


def test_a_number_without_room_in_its_box_stands_beside_the_row() -> None:
    words = shown(strips({"a": {"parameters": 10, "optimizer": 200}, "b": {"parameters": 100}}, 10).svg)
    assert "= 1.00 + 20.00" in [word.strip() for word in words] and "1.00" not in words and "10.00" in words


def test_where_boxes_are_narrow_the_legend_names_no_letters() -> None:
    few, many = ([Event("all_gather", 8, 0)] * count for count in (5, 200))
    assert {"G", "G all_gather"} <= set(shown(lanes([few], 1).svg))
    assert "all_gather" in shown(lanes([many], 1).svg) and "G" not in shown(lanes([many], 1).svg)


def test_the_pictures_words_carry_the_numbers() -> None:
    rows = {
        "rank 0": {"parameters": 40, "host gradients": 20},
        "rank 1": {"parameters": 40, "host gradients": 20},
    }
    assert strips(rows, 10, {"rank 0": 60, "rank 1": 60}).alt == (
        "Strips of memory, in bytes per parameter. rank 0: parameters 4.00, host gradients 2.00, "
        "together 6.00, the formula says 6.00; rank 1: the same."
    )
    events = [
        Event("step", 0, 8),
        Event("all_gather", 12, 8),
        Event("all_gather", 12, 8),
        Event("done", 0, 8),
    ]
    assert lanes([events, events[:3]], 2).alt == (
        "A timeline, event by event. rank 0: step, all_gather 2 times (24 bytes), done; "
        "rank 1: step, all_gather 2 times (24 bytes)."
    )
    assert cut(["A", "B", "0", "0"], 2).alt == (
        "A flat tensor of 4 elements, cut for 2 ranks: rank 0 owns A B; rank 1 owns 0 0."
    )
    assert spans({"layer 0": [(0, 2)], "layer 1": []}, {"now": 1}).alt == (
        "What was whole, and when, counted in events; now at 1. layer 0: from 0 to 2; layer 1: never."
    )
