"""What a notebook's output lets its reader do: guess before the measured is shown, and move a slider.

Both are plain HTML with what was measured inside, so they work on the site, too, where no kernel runs.
Without JavaScript what was measured still opens, and a slider shows what it began with.
"""

import hashlib
import html
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Value = TypeVar("Value")
QUIET = 'data-lm-suppress-shortcuts="true"'  # else JupyterLab takes keys for commands
EDGE = "border: 1px solid currentColor; border-radius: 0.2em"
FIELD = f"font: inherit; color: inherit; background: none; {EDGE}; padding: 0.2em 0.5em"


@dataclass(frozen=True)
class Shown:
    """HTML as the value of a cell, and the words for whoever sees none."""

    html: str
    words: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.words


def predict(unit: str, truth: float, hint: str, *measured: object) -> Shown:
    """A box for the reader's guess, before what was measured, which is folded until it is asked for.

    A wrong guess is told whether to go up or down, and the hint. `measured` are pictures, or text.
    """
    name = html.escape(unit)
    said = f"<p>Measured: {truth:.6g} {name}.</p>\n"
    return _live(
        f'<div class="zero-predict" data-truth="{truth:.12g}" data-hint="{html.escape(hint)}" '
        f'style="{EDGE}; padding: 0.6em 0.9em">\n'
        f'<p style="margin: 0 0 0.6em"><label>Your guess: <input type="text" size="9" inputmode="decimal" '
        f'autocomplete="off" style="{FIELD}" {QUIET}> {name}</label> '
        f'<button type="button" style="{FIELD}; cursor: pointer">That is my guess</button> '
        '<output aria-live="polite" style="font-weight: 600"></output></p>\n'
        f"{fold('Show what was measured', Shown(said, ''), *measured).html}\n</div>",
        f"Guess first, in {unit}. Measured: {truth:.6g}. " + " ".join(map(str, measured)),
    )


def fold(title: str, *measured: object) -> Shown:
    """Pictures or text that are shown when the reader asks for them."""
    inside = "".join(_html(shown, title + str(place)) for place, shown in enumerate(measured))
    summary = f'<summary style="cursor: pointer">{html.escape(title)}</summary>'
    return Shown(f"<details>{summary}\n{inside}</details>", " ".join(map(str, measured)))


def slider(name: str, values: Sequence[Value], drawn: Callable[[Value], object], at: int = 0) -> Shown:
    """A slider over these values; `drawn` makes a picture or text for each. It begins with number `at`.

    The pictures have one scale: what moves is what was measured, never an axis.
    """
    frames, words = [], []
    for place, (value, made) in enumerate(zip(values, _to_one_scale([*map(drawn, values)]), strict=True)):
        said = f"{value:,}" if isinstance(value, (int, float)) else str(value)
        hidden = "" if place == at else " hidden"
        frames.append(f'<div data-value="{html.escape(said)}"{hidden}>{_html(made, name + said)}</div>')
        words.append(f"{name} {said}: {made}")
        if place == at:
            first = html.escape(said)
    return _live(
        '<div class="zero-slider">\n'
        f'<p style="margin: 0.3em 0"><label>{html.escape(name)} '
        f'<input type="range" min="0" max="{len(values) - 1}" value="{at}" aria-valuetext="{first}" {QUIET} '
        'style="width: 40%; max-width: 20em; vertical-align: middle"></label> '
        f'<output style="font-weight: 600">{first}</output></p>\n'
        f'<div class="zero-frames">\n{"".join(frames)}\n</div>\n</div>',
        "\n".join(words),
    )


def _to_one_scale(made: Sequence[Any]) -> Sequence[Any]:
    """Pictures (`lessons.plots.Picture`) drawn again, so that the axes of all go as far as the furthest."""
    reaches = [getattr(each, "reach", ()) for each in made]
    if len({len(reach) for reach in reaches}) != 1 or not reaches[0]:
        return made  # text, or figures of several shapes
    furthest = tuple(map(max, zip(*reaches, strict=True)))
    return [each.redraw(furthest) for each in made]


def _html(shown: object, place: str) -> str:
    """What a picture or another output is as HTML, text as it is.

    A picture may stand on the page twice: its parts get names of this place, so that each refers to its own.
    """
    made = getattr(shown, "_repr_html_", None)
    if made is None:
        return f'<pre style="overflow-x: auto; font-family: monospace">{html.escape(str(shown))}</pre>'
    here = hashlib.sha256(place.encode()).hexdigest()[:6]
    return re.sub(r'(\bid="|url\(#|href="#)([^")]+)', rf"\1\2-{here}", str(made()))


def _live(made: str, words: str) -> Shown:
    """The same with the script that looks after it, once, however deep one stands in another."""
    script = (Path(__file__).with_suffix(".js")).read_text(encoding="utf-8")
    inside = re.sub(r"<script>.*?</script>", "", made, flags=re.DOTALL)
    return Shown(f"{inside}\n<script>\n{script}</script>", words)
