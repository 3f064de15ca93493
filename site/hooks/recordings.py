"""Recordings of zero_full's runs on the site: as text, as a picture, and as an example for the player."""

import html
import json
from collections.abc import Iterator, Mapping
from typing import Any

from places import ROOT, SiteError

from zero_full.flight.picture import picture

FILE = "assets/js/recording_example.js"
EXAMPLE = "recording_hang"
HIGH = 26  # pixels of a rank's row
PASSES = ("forward", "backward", "step")
CARRIES = {"reduce_scatter": "gradients", "all_reduce": "gradients", "all_gather": "parameters"}
STRIPES = (
    '<defs><pattern id="waits" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect class="stripe" width="2" height="5"/></pattern></defs>'
)
LEGEND = (
    '<p class="legend"><i class="pass"></i> forward, backward, update <i class="gradients"></i> gradients '
    'travel <i class="waits"></i> waits for another rank</p>'
)


def data() -> str:
    """The file that the page loads: `zeroRecordingExample`, a recording as its file has it."""
    return f"const zeroRecordingExample = {json.dumps(_kept(EXAMPLE, FILE))}\n"


def replayed(name: str, page: str) -> str:
    """What `python -m zero_full replay` prints of it."""
    return "```text\n" + "\n".join(picture(json.loads(_kept(name, page)))) + "\n```\n"


def lanes(name: str, page: str) -> str:
    """A picture of the recording's last step: a row for each rank, and the first incomplete call."""
    recording = json.loads(_kept(name, page))
    last = max(frame["step"] for frame in recording["frames"])
    frames = [frame for frame in recording["frames"] if frame["step"] == last]
    times = [time for frame in frames for time in (*frame["start"], *frame["end"]) if time is not None]
    span = (min(times), max(times))
    rows = [
        f'<tr><th scope="row">rank {rank}</th><td><svg width="100%" height="{HIGH}" aria-hidden="true">'
        f"{'' if rank else STRIPES}{''.join(_bars(frames, rank, span))}</svg></td></tr>"
        for rank in recording["present"]
    ]
    stuck = next((frame for frame in frames if frame["missing"]), None)
    said = f"<p>{html.escape(stuck['title'])}. {html.escape(stuck['text'])}</p>" if stuck else ""
    ms = (span[1] - span[0]) / 1000
    axis = f'<p class="legend">step {last}, {ms:.0f} ms from left to right</p>'
    table = "\n".join(['<table class="rows"><tbody>', *rows, "</tbody></table>"])
    return f'<figure class="lanes" data-search-exclude>\n{table}\n{axis}\n{LEGEND}\n{said}\n</figure>\n'


def _bars(frames: list[Mapping[str, Any]], rank: int, span: tuple[int, int]) -> Iterator[str]:
    """Passes first, then what travels and waits in front of them."""
    for frame in sorted(frames, key=lambda frame: frame["what"] not in PASSES):
        if frame["start"][rank] is None:
            continue
        start = frame["start"][rank]
        end = span[1] if frame["end"][rank] is None else frame["end"][rank]
        if frame["what"] in PASSES:
            yield _bar("pass", start, end, span)
            continue
        arrived = min(end, start + frame["waited"][rank]) if frame["end"][rank] is not None else end
        yield _bar("waits", start, arrived, span)
        yield _bar(CARRIES.get(frame["what"], "other"), arrived, end, span)


def _bar(kind: str, start: float, end: float, span: tuple[int, int]) -> str:
    x, wide = (100 * part / (span[1] - span[0]) for part in (start - span[0], end - start))
    y, high = (2, HIGH - 4) if kind == "pass" else (6, HIGH - 12)
    place = f'x="{x:.2f}%" y="{y}" width="{wide:.2f}%" height="{high}"'
    under = f'<rect class="under" {place}/>' if kind == "waits" else ""
    return f'{under}<rect class="{kind}" {place}/>' if end > start else ""


def _kept(name: str, page: str) -> str:
    file = ROOT / "site" / "records" / f"{name}.json"
    if not file.exists():
        raise SiteError(f"{page} asks for {file.relative_to(ROOT)}, which does not exist")
    return file.read_text()
