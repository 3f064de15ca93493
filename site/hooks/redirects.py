"""Old addresses of pages and of headings that have moved: readers' links to them still lead there."""

import html
import json
import posixpath
import re

PAGES = {  # an old page -> where its text is now; a heading or message keeps its anchor
    "guide/configuration.html": "configuration.html",
    "guide/messages.html": "guide/troubleshooting.html#all-messages",
    "guide/refused.html": "guide/troubleshooting.html#steps-that-are-refused",
    "habits.html": "guide/troubleshooting.html#what-you-may-do-between-steps",
}
HEADINGS = {  # a page -> headings that were on it -> where they are now
    "zero_full.html": {
        "state-on-the-host": "guide/offload.html",
        "parameters-on-the-host-or-on-a-disk": "stage_3.html#parameters-on-the-host-or-on-a-disk",
        "muon": "guide/optimizers.html#muon",
        "an-update-rule-of-your-own": "guide/optimizers.html#an-update-rule-of-your-own",
        "without-a-file-without-an-engine": "guide/loop.html#without-a-file-without-an-engine",
        "who-divides-the-loss": "guide/loop.html#who-divides-the-loss",
        "without-an-optimizer": "guide/loop.html#without-an-optimizer",
        "what-you-may-do-in-between": "guide/troubleshooting.html#what-you-may-do-between-steps",
        "when-do-gradients-travel": "guide/loop.html#when-do-gradients-travel",
        "precision": "guide/precision.html#rules",
        "process-groups": "guide/loop.html#process-groups",
        "when-something-is-wrong": "guide/loop.html#read-parameters-gradients-and-state",
        "what-a-run-logs": "guide/metrics.html#a-line-now-and-then",
        "what-is-different-from-deepspeed": "guide/migrate_deepspeed.html#what-behaves-differently",
    },
    "guide/troubleshooting.html": {
        "a-parameter-or-a-gradient-was-changed-and-that-is-an-error": (
            "#a-parameter-or-a-gradient-was-changed"
        ),
        "nobody-has-said-who-divides": "#lossbackward-with-gradient-accumulation",
        "a-checkpoint": "#saving-or-loading-a-checkpoint",
        "what-you-keep": "#state-that-you-keep",
        "ranks": "#changes-that-must-be-equal-on-all-ranks",
        "what-loops-for-other-libraries-do": "#loops-written-for-other-libraries",
        "the-whole-table": "#the-table-of-all-runs",
        "runs-that-nobody-thought-of": "#random-runs",
        "what-stays-behind": "#memory-after-many-steps-and-engines",
    },
}
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Moved</title>
<meta name="robots" content="noindex">
<script>location.replace({address} + (location.hash || {anchor}))</script>
<meta http-equiv="refresh" content="0; url={link}">
</head>
<body><p>This page has moved: <a href="{link}">go there</a>.</p></body>
</html>
"""
MOVED = """<script>
{{
  const moved = {headings}
  const follow = () => {{
    const there = moved[location.hash.slice(1)]
    if (there && !document.getElementById(location.hash.slice(1))) location.replace(there)
  }}
  follow()
  addEventListener("hashchange", follow)
}}
</script>
"""


def pages() -> dict[str, str]:
    """The files at old addresses, each of which sends its reader on."""
    return {old: _page(old, new) for old, new in PAGES.items()}


def _page(old: str, new: str) -> str:
    link = _from(old, new)
    address, _, anchor = link.partition("#")
    asked = f"#{anchor}" if anchor else ""
    return PAGE.format(address=json.dumps(address), anchor=json.dumps(asked), link=html.escape(link))


def headings(page: str) -> str:
    """What a page runs to follow the headings that have left it; nothing if there are none."""
    if page not in HEADINGS:
        return ""
    known = {old: _from(page, new) for old, new in HEADINGS[page].items()}
    return MOVED.format(headings=json.dumps(known, indent=1))


def _from(page: str, target: str) -> str:
    path, anchor = re.fullmatch(r"([^#]*)(#.*)?", target).groups()  # type: ignore[union-attr]
    there = posixpath.relpath(path, posixpath.dirname(page) or ".") if path else ""
    return there + (anchor or "")
