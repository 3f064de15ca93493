"""How long a step takes: the diary of a trainer, replayed on a machine of your choice.

A machine is three numbers. Arithmetic takes FLOPs / (FLOP/s). A collective is priced as a ring: a message
of latency for each of its steps, and the bytes that the rank sends / bandwidth. A rank's network does one
collective at a time, in the order of the calls, and a collective starts when all ranks have called it.

The recorded model is small, so it is replayed as a larger one: every tensor K times as large, with K times
the bytes and K times the arithmetic. Arithmetic grows with the tokens, too; bytes do not.

From how many tokens on does communication hide? A gradient of P parameters is 4 P bytes in fp32, and a rank
of N sends (N-1)/N of them. Backward makes 4 P FLOPs for each token meanwhile. So the network is not later
than the arithmetic if T >= (N-1)/N x (FLOP/s) / bandwidth. `bound` is this with the bytes and the FLOPs
of the diary in the place of 4 P; `hides_from` tries it out.

`python -m lessons clock N` shows it for the file of lesson N.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from shutil import get_terminal_size

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

import zero_min
from lessons.cells import columns
from lessons.colours import BACKWARD, FORWARD, INK, STEP
from lessons.exercise import LessonError
from lessons.plots import LANES, Picture, picture
from lessons.recording import CONFIG, Build, Call, Recording, Work, record
from lessons.registry import ROOT
from zero_min.gpt import GPT

PHASES = {"forward": ("f", FORWARD), "backward": ("b", BACKWARD), "step": ("s", STEP)}
COLUMNS = 64  # of the chart in letters
ROUNDS = 60  # of halving, in the search for a number of tokens


@dataclass(frozen=True)
class Machine:
    """What one rank has: seconds until a message arrives, bytes/s that it can send, FLOP/s."""

    name: str
    latency: float
    bandwidth: float
    flops: float
    source: str = "your own numbers"


A100 = "FLOP/s: NVIDIA's A100 data sheet, TF32, the peak"
ASSUMED = "latency: an assumption"
MACHINES = {
    "nvlink": Machine(
        "NVLink", 5e-6, 300e9, 156e12, f"{A100}; bandwidth: the same, 600 GB/s both ways together; {ASSUMED}"
    ),
    "pcie": Machine(
        "PCIe",
        10e-6,
        32e9,
        156e12,
        f"{A100}; bandwidth: the same, PCIe 4.0 x16, 64 GB/s both ways; {ASSUMED}",
    ),
    "25gbe": Machine(
        "25 GbE", 30e-6, 3.125e9, 156e12, f"{A100}; bandwidth: 25 Gbit/s by name, one card a GPU; {ASSUMED}"
    ),
    "laptops": Machine(
        "laptops on a cable",
        200e-6,
        125e6,
        384e9,
        "FLOP/s: 4 cores x 3 GHz x 32, two AVX2 units that multiply and add, the peak; bandwidth: gigabit "
        f"Ethernet by name; {ASSUMED}",
    ),
}


def machine_named(words: str) -> Machine:
    """One of MACHINES, or the user's own: "latency,bandwidth,flops" in s, bytes/s and FLOP/s."""
    if words in MACHINES:
        return MACHINES[words]
    known = f"give one of {', '.join(MACHINES)}, or latency,bandwidth,FLOP/s as in 1e-5,32e9,1e14"
    try:
        latency, bandwidth, flops = map(float, words.split(","))
    except ValueError:
        raise LessonError(f"--machine {words} is not known: {known}") from None
    if not (0 <= latency < 1e6 and 0 < bandwidth < 1e30 and 0 < flops < 1e30):
        raise LessonError(f"--machine {words}: a latency of 0 or more, the other two above 0; {known}")
    return Machine("your machine", latency, bandwidth, flops)


@dataclass(frozen=True)
class Size:
    """As what the recorded step is replayed: so many parameters, so many tokens a rank and micro-batch."""

    parameters: float
    tokens: float


@dataclass(frozen=True)
class Bar:
    """From when to when something went on."""

    what: str  # a phase or a collective
    start: float
    end: float


@dataclass(frozen=True)
class Replay:
    """When everything happened, in seconds. The network's bars are those of all ranks."""

    arithmetic: tuple[tuple[Bar, ...], ...]  # rank by rank
    network: tuple[Bar, ...]

    @property
    def step(self) -> float:
        """From the start until everybody has everything."""
        return max((bar.end for bars in (*self.arithmetic, self.network) for bar in bars), default=0.0)

    @property
    def idle(self) -> float:
        """How long the busiest rank's arithmetic stands still."""
        return self.step - max(map(_length, self.arithmetic))

    @property
    def sending(self) -> float:
        """How long the network is busy."""
        return _length(self.network)

    @property
    def hidden(self) -> float:
        """How long rank 0's arithmetic and the network are busy at once."""
        return sum(
            _time_in(mine, other.start, other.end) for mine in self.arithmetic[0] for other in self.network
        )


def _length(bars: Sequence[Bar]) -> float:
    return sum(bar.end - bar.start for bar in bars)


def seconds(what: str, sent: float, ranks: int, machine: Machine) -> float:
    """A collective as a ring: N-1 steps, twice as many for an all-reduce; nothing for a rank alone."""
    steps = (ranks - 1) * (2 if what == "all_reduce" else 1)
    return machine.latency * steps + sent / machine.bandwidth


def replay(recording: Recording, machine: Machine, size: Size) -> Replay:
    """The recorded step on this machine."""
    ranks, scale = recording.ranks, size.parameters / recording.numel
    slower = scale * size.tokens / recording.tokens / machine.flops  # seconds of a recorded FLOP
    calls = [[entry for entry in entries if isinstance(entry, Call)] for entries in ranks]
    if len({tuple(call.what for call in mine) for mine in calls}) > 1:
        raise LessonError("the ranks made different calls, so there is no step to replay")
    bars: list[list[Bar]] = [[] for _ in ranks]
    network: list[Bar] = []
    now, at = [0.0 for _ in ranks], [0 for _ in ranks]
    for number in range(len(calls[0]) + 1):
        for rank, entries in enumerate(ranks):
            while at[rank] < len(entries) and isinstance(work := entries[at[rank]], Work):
                start = max(now[rank], network[work.after].end if work.after >= 0 else 0.0)
                now[rank] = start + work.flops * slower
                if work.flops:
                    bars[rank].append(Bar(work.phase, start, now[rank]))
                at[rank] += 1
            at[rank] += 1
        if number < len(calls[0]):
            what, sent = calls[0][number].what, scale * max(mine[number].sent for mine in calls)
            start = max([*now, network[-1].end if network else 0.0])
            network.append(Bar(what, start, start + seconds(what, sent, len(ranks), machine)))
    return Replay(tuple(map(tuple, bars)), tuple(network))


# From how many tokens on communication hides -----------------------------------------------------


def bound(recording: Recording, machine: Machine) -> float | None:
    """Tokens from which what leaves early takes no longer than the arithmetic after it, by bandwidth alone.

    None if nothing leaves early: then there is nothing to hide behind.
    """
    entries, sent, flops = recording.ranks[0], 0.0, 0
    calls = [[entry.sent for entry in each if isinstance(entry, Call)] for each in recording.ranks]
    last = max((i for i, entry in enumerate(entries) if isinstance(entry, Work)), default=-1)
    number = 0
    for entry in entries[: last + 1]:
        if isinstance(entry, Call):
            sent += max(mine[number] for mine in calls)
            number += 1
        elif number:
            flops += entry.flops
    return sent / (flops / recording.tokens) * machine.flops / machine.bandwidth if flops else None


def hides_from(recording: Recording, machine: Machine, parameters: float) -> float | None:
    """Tokens from which the arithmetic stands still as little as it ever will, found by replaying.

    None if more tokens never help, because every result is needed at once or is asked for at the end.
    """

    def at(tokens: float) -> Replay:
        return replay(recording, machine, Size(parameters, tokens))

    one = at(1.0)
    busy = max(map(_length, one.arithmetic))
    if not busy or not one.sending:
        return None
    low, high = 1e-6 * one.sending / busy, 1e6 * one.sending / busy
    least = at(high).idle + 1e-6 * one.sending
    if at(low).idle <= least:
        return None
    for _ in range(ROUNDS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if at(middle).idle <= least else (middle, high)
    return high


# Pictures ----------------------------------------------------------------------------------------


def _time_in(bar: Bar, low: float, high: float) -> float:
    """How long a bar lasts between two times."""
    start, end = (sorted((low, time, high))[1] for time in (bar.start, bar.end))
    return end - start


def _letters(bars: Sequence[Bar], step: float, slots: int) -> str:
    """A row of the chart: for each slot the letter of what takes most of it, or a dot."""
    row = []
    edges = [step * slot / slots for slot in range(slots + 1)]
    for low, high in pairwise(edges):
        inside: dict[str, float] = {}
        for bar in bars:
            time = _time_in(bar, low, high)
            if time > 0:
                inside[bar.what] = inside.get(bar.what, 0.0) + time
        free = high - low - sum(inside.values())
        most = max(inside, key=lambda what: inside[what], default="")
        row.append((PHASES | LANES)[most][0] if most and inside[most] >= free else ".")
    return "".join(row)


def chart(run: Replay, slots: int = COLUMNS) -> str:
    """The step as text: a row of arithmetic for each rank, and the network that they share."""
    rows = [f"rank {rank}   {_letters(bars, run.step, slots)}" for rank, bars in enumerate(run.arithmetic)]
    rows.append(f"network  {_letters(run.network, run.step, slots)}")
    used = dict.fromkeys(bar.what for bars in (*run.arithmetic, run.network) for bar in bars)
    legend = ", ".join(f"{(PHASES | LANES)[what][0]} {what}" for what in used)
    return "\n".join([*rows, f"         {legend}, . idle"])


def gantt(runs: Mapping[str, Replay]) -> Picture:
    """Replays under each other on one scale: rank 0's arithmetic above the network."""
    said = [
        f"{name}: {duration(run.step)}, of which the arithmetic stands still {duration(run.idle)}, and both "
        f"are busy {duration(run.hidden)}"
        for name, run in runs.items()
    ]
    alt = f"What rank 0 and its network do in a step. {'; '.join(said)}."
    return picture(drawn(runs), alt)


def drawn(runs: Mapping[str, Replay]) -> Figure:
    """The same as a figure."""
    figure = Figure(figsize=(9, 1.1 + 0.8 * len(runs)), layout="constrained")
    plot = figure.subplots()
    longest = max(run.step for run in runs.values())
    named: set[str] = set()
    for row, run in enumerate(runs.values()):
        for line, bars in enumerate((run.arithmetic[0], run.network)):
            for bar in bars:
                _, colour = (PHASES | LANES)[bar.what]
                label = None if bar.what in named else bar.what
                named.add(bar.what)
                place = (2.4 * row + line, bar.end - bar.start, 0.9, bar.start)
                plot.barh(*place, align="center", color=colour, edgecolor=INK, linewidth=0.3, label=label)
        plot.vlines(run.step, 2.4 * row - 0.5, 2.4 * row + 1.5, "black", "dashed")
    lines = [f"{name}, {lane}" for name in runs for lane in ("arithmetic", "network")]
    plot.set_yticks(
        [2.4 * row + line for row in range(len(runs)) for line in (0, 1)], lines, fontsize="small"
    )
    plot.invert_yaxis()
    plot.xaxis.set_major_formatter(EngFormatter("s"))
    plot.set(xlabel="dashed: the step is over", xlim=(0, 1.03 * longest))
    plot.spines[["top", "right"]].set_visible(False)
    figure.legend(*plot.get_legend_handles_labels(), frameon=False, ncols=6, loc="outside upper center")
    return figure


def duration(time: float) -> str:
    """Seconds in three digits and a unit."""
    for unit, times in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if time * times >= 1:
            return f"{time * times:.3g} {unit}"
    return f"{time * 1e9:.3g} ns" if time else "0 s"


def report(recording: Recording, machine: Machine, size: Size, slots: int = COLUMNS) -> str:
    """The chart, the times, and the tokens from which communication hides."""
    run = replay(recording, machine, size)
    per_second = size.tokens * recording.micro_batches * len(recording.ranks) / run.step
    rows = [
        ["the step takes", duration(run.step)],
        ["arithmetic", duration(run.step - run.idle)],
        ["the network is busy", duration(run.sending)],
        ["both at once: hidden", duration(run.hidden)],
        ["the arithmetic stands still", duration(run.idle)],
        ["tokens/s of all ranks", f"{per_second:,.0f}"],
    ]
    return f"{chart(run, slots)}\n\n{columns(rows)}\n\n{hiding(recording, machine, size.parameters)}"


def hiding(recording: Recording, machine: Machine, parameters: float) -> str:
    """From how many tokens on communication hides, in words."""
    early, found = bound(recording, machine), hides_from(recording, machine, parameters)
    if early is None:
        return "Nothing is sent before the arithmetic is over, so no batch hides the network behind it."
    if found is None:
        return "The arithmetic waits at once for what is sent early, so no batch hides the network behind it."
    best = replay(recording, machine, Size(parameters, found))
    return (
        f"Larger batches hide more communication, at most {duration(best.hidden)} of its "
        f"{duration(best.sending)}. The replay gets\nthere at {found:,.0f} tokens per rank; the formula, "
        f"which ignores latency, predicts {early:,.0f}."
    )


# For one lesson ----------------------------------------------------------------------------------

TRAINERS: dict[str, dict[str, Callable[[int], Build]]] = {  # by lesson and name: from a bucket's size
    "0": {"stage 0": lambda _: zero_min.Stage0},
    "1": {"stage 1": lambda _: zero_min.Stage1},
    "2": {"stage 2": lambda size: partial(zero_min.Stage2, bucket_size=size)},
    "3": {"stage 3": lambda _: zero_min.Stage3, "stage 3, prefetch": lambda _: zero_min.Stage3Prefetch},
}
BUCKET = 0.08  # of the model


def show(
    number: int, world: int, machine: str, tokens: float, parameters: float, bucket: float | None
) -> str:
    """The clock of a lesson's trainers as text; the picture is saved, too."""
    if number not in TRAINERS:
        raise LessonError(f"the clock knows the stages, lessons {', '.join(TRAINERS)}, not {number}")
    if bucket is not None and number != "2":
        raise LessonError("--bucket is of lesson 2: no other lesson has buckets")
    chosen, size = machine_named(machine), Size(parameters, tokens)
    part = BUCKET if bucket is None else bucket
    numel = sum(p.numel() for p in GPT(CONFIG).parameters())
    slots = max(1, min(COLUMNS, get_terminal_size().columns - len("network  ")))
    lines, runs = [], {}
    for name, make in TRAINERS[number].items():
        recording = record(make(max(1, round(part * numel))), world)
        runs[name] = replay(recording, chosen, size)
        lines += [f"{name} on {chosen.name}\n", report(recording, chosen, size, slots), ""]
    lines += [
        f"{world} ranks, {tokens:,.0f} tokens each, replayed as a model of {parameters:,.0f} parameters.",
        f"{chosen.name}: {chosen.latency:g} s, {chosen.bandwidth:g} bytes/s, {chosen.flops:g} FLOP/s.",
        f"  ({chosen.source})",
    ]
    path = ROOT / "build" / "lessons" / f"clock{number}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn(runs).savefig(path, dpi=120)
    return "\n".join([*lines, f"picture: {path.relative_to(ROOT)}"])
