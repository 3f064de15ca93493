"""Recordings of zero_full's runs on the site: as text, and as an example for the page that draws them."""

import json

from places import ROOT, SiteError

from zero_full.flight.picture import picture

FILE = "assets/js/recording_example.js"
EXAMPLE = "recording_hang"


def data() -> str:
    """The file that the page loads: `zeroRecordingExample`, a recording as its file has it."""
    return f"const zeroRecordingExample = {json.dumps(_kept(EXAMPLE, FILE))}\n"


def replayed(name: str, page: str) -> str:
    """What `python -m zero_full replay` prints of it."""
    return "```text\n" + "\n".join(picture(json.loads(_kept(name, page)))) + "\n```\n"


def _kept(name: str, page: str) -> str:
    file = ROOT / "site" / "records" / f"{name}.json"
    if not file.exists():
        raise SiteError(f"{page} asks for {file.relative_to(ROOT)}, which does not exist")
    return file.read_text()
