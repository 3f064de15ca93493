"""Memory bars in the terminal: how much of a rank's peak each kind of memory takes.

A letter stands for the same share of memory in all bars of one drawing. Encodings without block characters
get letters, and a terminal gets colours, unless NO_COLOR is set.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from zero_full.formatting import flowed, human
from zero_full.plan.result import Plan

KINDS = ("parameters", "gradients", "optimizer state", "temporary, at the peak")
BLOCKS, LETTERS = "█▓▒░", "PGOT"  # a character for each kind
LIMIT, CUT = "|", ">"  # the memory of a device; the bar continues beyond the terminal
COLOURS = (34, 32, 33, 36)  # of ANSI terminals: blue, green, yellow, cyan
SHORTEST = 10  # characters of a bar
BEYOND = 1.5  # times the limit that is drawn


@dataclass(frozen=True)
class Style:
    """Characters and colours that a stream can show."""

    characters: str = BLOCKS
    colours: bool = False

    @classmethod
    def of(cls, stream: TextIO) -> "Style":
        """Return the style for this stream."""
        try:
            BLOCKS.encode(stream.encoding or "ascii")
            characters = BLOCKS
        except (LookupError, UnicodeEncodeError):
            characters = LETTERS
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        return cls(characters, characters == BLOCKS and stream.isatty() and not plain)

    def draw(self, text: str) -> str:
        """Colour the characters of a bar."""
        if not self.colours:
            return text
        for character, colour in zip(self.characters, COLOURS, strict=True):
            text = re.sub(f"{character}+", f"\x1b[{colour}m\\g<0>\x1b[0m", text)
        return text


class Bars:
    """Bars on one scale, of at most `width` characters. `limit`: the memory of a `unit`, to be marked."""

    def __init__(
        self, plans: Sequence[Plan], width: int, style: Style, limit: int | None = None, unit: str = "GPU"
    ) -> None:
        self.width, self.style, self.limit, self.unit = max(SHORTEST, width), style, limit, unit
        largest = max([plan.peak for plan in plans], default=0)
        if limit is not None:
            largest = min(max(largest, limit), round(BEYOND * limit))
        self.scale = max(1, largest) / self.width

    def bar(self, plan: Plan) -> str:
        """Return the bar of one plan."""
        ends, total = [], 0
        for size in sizes_of(plan):
            total += size
            ends.append(round(total / self.scale))
        line, begin = "", 0
        for character, end in zip(self.style.characters, ends, strict=True):
            line += character * (end - begin)
            begin = end
        if len(line) > self.width:
            line = line[: self.width - 1] + CUT
        if self.limit is not None:
            mark = min(self.width - 1, round(self.limit / self.scale))
            line = f"{line[:mark]:<{mark}}{LIMIT}{line[mark + 1 :]}"
        return self.style.draw(line.rstrip())

    def legend(self, columns: int) -> Iterator[str]:
        """Yield the lines that explain the characters."""
        names = [f"{character} {kind}" for character, kind in zip(self.style.characters, KINDS, strict=True)]
        if self.limit is not None:
            names.append(f"{LIMIT} {human(self.limit)}, the memory of a {self.unit}")
        yield from (self.style.draw(line) for line in flowed(names, columns))


def sizes_of(plan: Plan) -> tuple[int, int, int, int]:
    """Return the bytes of each of `KINDS`. Their sum is the peak."""
    state = plan.master + plan.moments
    parameters = plan.between_steps - plan.gradients - state
    return parameters, plan.gradients, state, plan.peak - plan.between_steps


def drawing(plans: Sequence[Plan], columns: int, style: Style) -> str:
    """Draw a bar for each plan, with its stage and peak, and a legend."""
    sides = len("stage 0  ") + len("  123 GB")
    bars = Bars(plans, columns - sides, style)
    lines = [f"stage {plan.stage}  {bars.bar(plan)}  {human(plan.peak)}" for plan in plans]
    return "\n".join([*lines, *bars.legend(columns)])
