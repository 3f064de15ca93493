"""Four stages on one clock: what one of four ranks holds during the step that `animation` records.

The home page plays it, and four_stages_gif.py makes the picture that moves. The stages make the same turns
of layers, one after the other, and the clock counts these: what a stage does beside them, a collective, comes
in between, and the others keep still meanwhile. It counts moments, not seconds.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import animation
from made_once import made_once
from places import ROOT, SiteError

import zero_min
from zero_min.thread_comm import run_world

FILE = "assets/js/four_stages_data.js"
MADE_FROM = (*animation.MADE_FROM, "site/hooks/four_stages.py")
RANK = 0  # whose memory it is
KINDS = {  # from the ground up, as a legend says it
    "optimizer": "optimizer state",
    "parameters": "parameters",
    "gathered": "parameters gathered for a moment",
    "gradients": "gradients",
    "activations": "activations, working copies",
}
CUT = ("nothing is cut", "optimizer cut", "+ gradients", "+ parameters")  # what each stage adds
LAYERS = len(animation.NUMEL)
Look = animation.Look

FORWARD = "All compute alike. Stage 3 gathers a layer from the other workers, uses it and lets it go."
BACKWARD = "Gradients appear. Stages 2 and 3 send them to their owners at once, and keep a quarter."
AVERAGED = "Stages 0 and 1 average their gradients now. Stages 2 and 3 did so on the way."
STEP = "Stage 0: each worker updates everything. The others: only the quarter whose state it has."
SHARED = "Stages 1 and 2 gather the new parameters. Stage 3 waits until a layer is needed."
SAME = "The new parameters are the same at every stage. Only the bytes differ."
CAPTIONS = {
    "start": (
        "Between two steps",
        "What is always there. Each stage cuts one thing more into four, a slice for each.",
    ),
    "forward": ("Forward, layer {}", FORWARD),
    "forwarded": ("Forward, layer {}", FORWARD),
    "backward": ("Backward, layer {}", BACKWARD),
    "gradient": ("Backward, layer {}", BACKWARD),
    "before adam": ("Gradients are averaged", AVERAGED),
    "adam": ("The optimizer steps", STEP),
    "stepped": ("The optimizer steps", STEP),
    "before done": ("New parameters are shared", SHARED),
    "done": ("The step is done", SAME),
    "zero_grad": ("The step is done, gradients are let go", SAME),
}
DEEDS = {  # of one stage, at one moment, unless it has less now than before: then it lets go
    "forward": "computes",
    "forwarded": "computes",
    "backward": "computes",
    "gradient": "computes",
    "adam": "steps",
    "stepped": "steps",
    "all_reduce": "averages",
    "reduce_scatter": "averages",
    "all_gather": "gathers",
}


def data() -> str:
    """The file that the home page loads: `zeroFourStages`."""
    sources = [path for pattern in MADE_FROM for path in ROOT.glob(pattern)]
    return made_once("four_stages", sources, lambda: f"const zeroFourStages = {json.dumps(recorded())}\n")


def recorded() -> dict[str, Any]:
    """The clock's moments, and at each of them each stage's bytes by kind and what it has sent."""
    turns = [list(_turns(run_world(animation.run, animation.RANKS, s)[RANK][1])) for s in zero_min.STAGES]
    names = [[name for name, _ in stage] for stage in turns]
    if any(other != names[0] for other in names):
        raise SiteError(f"four stages: they make different turns: {names}")
    clock: list[dict[str, str]] = []
    stages: list[list[dict[str, Any]]] = [[] for _ in turns]
    for at, name in enumerate(names[0]):
        beside = [stage[at][1] for stage in turns]
        longest = max(map(len, beside))
        clock += [_moment(name, longest - place) for place in range(1, longest + 1)]
        for said, looks in zip(stages, beside, strict=True):
            said += [{**said[-1], "does": ""} for _ in range(longest - len(looks))]  # the others come later
            for look in looks:
                said.append(_said(look, said))
    return {
        "ranks": animation.RANKS,
        "rank": RANK,
        "numel": sum(animation.NUMEL),
        "kinds": KINDS,
        "cut": CUT,
        "clock": clock,
        "stages": stages,
    }


def _turns(looks: Sequence[Look]) -> Iterator[tuple[str, list[Look]]]:
    """What every stage does, by name, and what this one has seen since the last."""
    seen = []
    for look in looks:
        seen.append(look)
        if look.event.what not in animation.COLLECTIVES:
            yield look.event.what, seen
            seen = []


def _moment(name: str, before: int) -> dict[str, str]:
    """A moment's name, for links, and its caption. `before` says how many come before the turn itself."""
    what, _, layer = name.partition(" ")
    number = str(int(layer) + 1) if layer else ""
    title, text = (before and CAPTIONS.get(f"before {what}")) or CAPTIONS[what]
    parts = ["before" if before else "", what.replace("_", "-"), number, str(before) if before > 1 else ""]
    return {
        "name": "-".join(filter(None, parts)),
        "title": title.format(f"{number} of {LAYERS}"),
        "text": text,
    }


def _said(look: Look, before: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Bytes by kind, the most so far, bytes sent so far, and what the rank does."""
    whole = look.held["parameters"]
    always = before[0]["bytes"]["parameters"] if before else whole
    bytes_now = {
        "optimizer": look.held["optimizer"],
        "parameters": always,
        "gathered": whole - always,
        "gradients": look.held["gradients"],
        "activations": look.event.live - sum(look.held.values()),
    }
    passing = ("gathered", "gradients")
    lets_go = bool(before) and any(bytes_now[kind] < before[-1]["bytes"][kind] for kind in passing)
    return {
        "bytes": bytes_now,
        "most": max(look.peak, look.event.live),
        "sent": look.event.sent + (before[-1]["sent"] if before else 0),
        "does": "lets go" if lets_go else DEEDS.get(look.event.what.partition(" ")[0], ""),
    }
