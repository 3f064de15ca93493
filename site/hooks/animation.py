"""One training step of stages 0 to 3 on four ranks, recorded for the page that plays it.

Nothing is drawn by hand: zero_min's trainers run, each rank a thread, and whenever a rank's ledger writes a
line, its tensors are looked at. What the page draws of them has as many bytes as the trainer's `holdings`, or
the build stops. Captions are in animation_words.py.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from animation_words import caption
from made_once import made_once
from places import ROOT, SiteError
from torch import Tensor, nn

import zero_min
from zero_min.adam import Adam
from zero_min.comm import Comm
from zero_min.ledger import Event, Ledger, held
from zero_min.stage2 import overlap
from zero_min.thread_comm import run_world

FILE = "assets/js/animation_data.js"
MADE_FROM = ("zero_min/*.py", "site/hooks/animation*.py")
RANKS, BATCH, STEPS = 4, 8, 3  # the last step is recorded
WIDTHS = (24, 32, 32, 32, 16)  # of four layers without biases, so that cuts fall inside of layers, too
COLLECTIVES = {"all_reduce", "reduce_scatter", "all_gather"}
NUMEL = [a * b for a, b in pairwise(WIDTHS)]
FP32 = 4
Ranges = list[list[tuple[int, int]]]  # [rank][layer]: the elements that this rank owns
State = list[dict[str, list[str]]]  # [rank][kind][layer]: a letter for each segment


def data() -> str:
    """The file that the page loads: `zeroAnimation` with four recorded steps."""
    sources = [path for pattern in MADE_FROM for path in ROOT.glob(pattern)]
    return made_once("animation", sources, lambda: f"const zeroAnimation = {json.dumps(recorded())}\n")


def recorded() -> dict[str, Any]:
    """Every stage's frames."""
    stages = [_stage(number) for number in zero_min.STAGES]
    return {"ranks": RANKS, "numel": NUMEL, "stages": stages}


class Network(nn.Module):
    """Four layers, each a matrix."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(WIDTHS))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=0.2, generator=generator)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean squared error."""
        for layer in self.layers:
            x = layer(x).tanh()
        return (x - y).square().mean()


# What a rank does --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """One rank's tensors at one moment. A segment is a part of a layer that has one owner."""

    event: Event
    whole: list[str]  # layer by layer: "x" if all parameters are here, "e" if there is room for them, or ""
    values: list[list[float]]  # the first parameter of every segment that is here
    local: list[tuple[float, float] | None]  # two numbers of this rank's whole gradient, if it is here
    own: list[str]  # the own slices' averaged gradient: "a", or "e" for room that waits for it, or ""
    held: dict[str, int]  # bytes by kind, as the trainer says
    peak: int  # the most that was live so far in this step, between two looks, too


Moment = tuple[Look, ...]  # of all ranks


class Diary(Ledger):
    """A ledger that looks at the rank's tensors whenever it writes an event."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: list[Look] = []
        self.look: Callable[[Event], Look] | None = None

    def note(self, what: str, sent: int = 0) -> None:
        """As ever, and look."""
        super().note(what, sent)
        if self.look is not None:
            self.looks.append(self.look(self.events[-1]))


def run(comm: Comm, number: int) -> tuple[Ranges, list[Look], int]:
    """Train; returns all ranks' ranges, what this one has seen in the last step, and its peak."""
    comm.ledger = diary = Diary()
    generator = torch.Generator().manual_seed(comm.rank)

    class NotedAdam(Adam):
        """Adam that says when it steps."""

        def step(self) -> None:
            diary.note("adam")
            super().step()
            diary.note("stepped")

    with diary.watch():
        model = Network()
        options = {"bucket_size": 1} if number == 2 else {}  # a bucket for each layer
        trainer = zero_min.STAGES[number](model, comm, lr=1e-2, optimizer=NotedAdam, **options)
        _note_layers(model, diary)
        ranges = [_ranges(trainer, number, rank) for rank in range(RANKS)]
        for step in range(STEPS):
            x = torch.randn(BATCH, WIDTHS[0], generator=generator)
            y = torch.randn(BATCH, WIDTHS[-1], generator=generator)
            if step == STEPS - 1:
                comm.settle()
                diary.peak = diary.live()
                diary.look = Looker(trainer, number, ranges, comm.rank)
                diary.note("start")
            loss = model(x, y)
            trainer.backward(loss)
            del loss
            trainer.step()
            diary.note("done")
            trainer.zero_grad()
            comm.settle()
            diary.note("zero_grad")
    return ranges, diary.looks, diary.peak


def _note_layers(model: Network, diary: Diary) -> None:
    """Notes around every layer. These hooks come after the trainer's, so they see what it has done."""
    for number, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(lambda *_, n=number: diary.note(f"forward {n}"))

        def leaving(module: nn.Module, args: Any, output: Tensor, n: int = number) -> None:
            diary.note(f"forwarded {n}")
            output.register_hook(lambda grad: diary.note(f"backward {n}"))

        layer.register_forward_hook(leaving)
        layer.weight.register_post_accumulate_grad_hook(lambda p, n=number: diary.note(f"gradient {n}"))


def _ranges(trainer: Any, number: int, rank: int) -> list[tuple[int, int]]:
    """The elements of every layer that this rank owns."""
    if number == 0:
        return [(0, numel) for numel in NUMEL]
    if number == 3:
        sizes = [s.mine.numel() for s in trainer.sliced.values()]
        return [(rank * size, (rank + 1) * size) for size in sizes]
    (flat,) = trainer.flats
    ends = zip(flat.starts, NUMEL, strict=True)
    parts = [(start, *overlap(start, start + numel, rank, flat.mine.numel())) for start, numel in ends]
    return [(low - start, high - start) for start, low, high in parts]


class Looker:
    """Looks at a trainer's tensors."""

    def __init__(self, trainer: Any, number: int, ranges: Ranges, rank: int) -> None:
        self.trainer, self.number, self.mine = trainer, number, ranges[rank]
        self.params = [layer.weight for layer in trainer.model.layers]
        self.starts = [[low for low, _, _ in segments] for segments in segments_of(ranges)]

    def __call__(self, event: Event) -> Look:
        """What is there now."""
        local = [
            None if p.grad is None else (float(p.grad[0, 0]), float(p.grad[-1, -1])) for p in self.params
        ]
        held_now = {kind: held(tensors) for kind, tensors in self.trainer.holdings().items()}
        peak = self.trainer.comm.ledger.peak
        if self.number < 3:
            everywhere = ["x"] * len(NUMEL)
            values, own = self._values(everywhere), self._own_of_flat()
            return Look(event, everywhere, values, local, own, held_now, peak)
        sliced = [self.trainer.sliced[p] for p in self.params]
        room = [s.flat.untyped_storage().nbytes() > 0 for s in sliced]
        whole = ["x" if s.is_whole else "e" * there for s, there in zip(sliced, room, strict=True)]
        own = ["" if s.grad is None else "a" for s in sliced]
        return Look(event, whole, self._values(whole), local, own, held_now, peak)

    def _values(self, whole: list[str]) -> list[list[float]]:
        found = []
        for p, starts, here in zip(self.params, self.starts, whole, strict=True):
            values = p.detach().flatten() if here == "x" else self.trainer.sliced[p].mine
            found.append([float(values[at]) for at in (starts if here == "x" else [0])])
        return found

    def _own_of_flat(self) -> list[str]:
        """Stages 1 and 2 have one flat gradient for the own slices of all layers."""
        (flat,) = getattr(self.trainer, "flats", [None])
        gradient = None if flat is None else flat.grad if flat.master.grad is None else flat.master.grad
        if gradient is None:
            return [""] * len(NUMEL)
        found, at = [], 0
        for low, high in self.mine:
            found.append("" if low == high else "a" if float(gradient[at]) != 0 else "e")
            at += high - low
        return found


# From what was seen to frames --------------------------------------------------------------------


def segments_of(ranges: Ranges) -> list[list[tuple[int, int, int]]]:
    """Every layer's segments: from, to and owner; -1 where everybody owns all of it."""
    if len({tuple(mine) for mine in ranges}) == 1:
        return [[(0, numel, -1)] for numel in NUMEL]
    layers = range(len(NUMEL))
    return [
        sorted((*ranges[r][n], r) for r in range(RANKS) if ranges[r][n][0] < ranges[r][n][1]) for n in layers
    ]


def _stage(number: int) -> dict[str, Any]:
    ranks = run_world(run, RANKS, number)
    segments = segments_of(ranks[0][0])
    moments = list(zip(*(looks for _, looks, _ in ranks), strict=True))
    for moment in moments:
        if len({look.event.what for look in moment}) > 1:
            raise SiteError(f"animation: ranks did different things: {[look.event.what for look in moment]}")
    states = [_state(number, segments, moment, moments[0], moments[-1]) for moment in moments]
    return {
        "number": number,
        "segments": segments,
        "frames": list(_frames(number, moments, states)),
        "peak": [peak for _, _, peak in ranks],
    }


def _state(number: int, segments: Any, now: Moment, first: Moment, last: Moment) -> State:
    """For each rank and layer one letter a segment, by kind; and a check that this is what the rank holds.

    parameters  o or n: the old or the new value      optimizer  x
    gradients   l: this rank's, a: the average, b: both
    of any kind  e: room for what is about to come, .: nothing
    """
    state = []
    for rank, look in enumerate(now):
        mine: dict[str, list[str]] = {"parameters": [], "gradients": [], "optimizer": []}
        for n, layer in enumerate(segments):
            averaged = look.local[n] is not None and len({each.local[n] for each in now}) == 1
            letters = ["", "", ""]
            for place, (_, _, owner) in enumerate(layer):
                is_mine = owner in (rank, -1)
                letters[0] += _parameter(n, place, max(owner, 0), look, (first, last), is_mine)
                letters[1] += _gradient(
                    "a" if averaged else "l", look.local[n], look.own[n] if is_mine else ""
                )
                letters[2] += "x" if is_mine else "."
            for kind, found in zip(mine, letters, strict=True):
                mine[kind].append(found)
        _check(number, segments, rank, look, mine)
        state.append(mine)
    return state


def _parameter(n: int, place: int, owner: int, look: Look, ends: tuple[Moment, Moment], is_mine: bool) -> str:
    if look.whole[n] != "x" and not is_mine:
        return look.whole[n] or "."
    old, new = (each[owner].values[n][place if each[owner].whole[n] == "x" else 0] for each in ends)
    value = look.values[n][place if look.whole[n] == "x" else 0]
    if old == new or value not in (old, new):
        raise SiteError(
            f"animation: layer {n}, segment {place} is neither old nor new: {old}, {value}, {new}"
        )
    return "n" if value == new else "o"


def _gradient(letter: str, local: object, own: str) -> str:
    if local is None:
        return own or "."
    return "b" if own else letter


def _check(number: int, segments: Any, rank: int, look: Look, mine: dict[str, list[str]]) -> None:
    """The letters stand for as many bytes as the trainer says.

    A layer that is gathered is in a buffer of its own, beside the slice.
    """
    drawn = dict.fromkeys(mine, 0)
    for kind, letters in mine.items():
        for n, layer in enumerate(segments):
            for (low, high, owner), letter in zip(layer, letters[n], strict=True):
                times = {".": 0, "b": 2, "x": 2}.get(letter, 1)
                times += kind == "parameters" and number == 3 and look.whole[n] != "" and owner == rank
                drawn[kind] += FP32 * times * (high - low)
    if drawn != look.held:
        raise SiteError(f"animation: at {look.event.what!r} rank {rank} holds {look.held}, drawn are {drawn}")


def _frames(number: int, moments: list[Moment], states: list[State]) -> Iterator[dict[str, Any]]:
    """What is worth showing: every turn of a layer, every collective, every change of a tensor."""
    shown: State = []
    for place, (moment, state) in enumerate(zip(moments, states, strict=True)):
        what, _, layer = moment[0].event.what.partition(" ")
        layers = [int(layer)] if layer else []
        if what in COLLECTIVES:
            after = states[place + 1]  # the ledger writes before anything travels
            complete = _changed(shown, state, "gradients")
            if complete:  # and about to be reduced
                yield _frame(number, "gradient", complete, moment, state)
            kind = "parameters" if what == "all_gather" else "gradients"
            changed = _changed(state, after, kind)
            yield _frame(
                number, what, changed, moments[place + 1], after, [look.event.sent for look in moment]
            )
            shown = after
        elif state != shown or what in ("start", "forward", "backward"):
            yield _frame(number, what, layers, moment, state)
            shown = state


def _changed(before: State, after: State, kind: str) -> list[int]:
    """Layers of which some rank has more, or newer values, than before."""

    def better(old: str, new: str) -> bool:
        return any(a != b and b not in ".e" for a, b in zip(old, new, strict=True))

    pairs = [(old[kind], new[kind]) for old, new in zip(before, after, strict=True)]
    return [n for n in range(len(NUMEL)) if any(better(old[n], new[n]) for old, new in pairs)]


def _frame(
    number: int, what: str, layers: list[int], moment: Moment, state: State, sent: list[int] | None = None
) -> dict[str, Any]:
    title, text = caption(number, what, [n + 1 for n in layers])
    live = [look.event.live for look in moment]
    return {
        "what": what,
        "layers": layers,
        "title": title,
        "text": text,
        "live": live,
        "state": state,
        "sent": sent,
    }
