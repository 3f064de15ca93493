"""Describe a checkpoint's contents, as text and as JSON, and verify that all data can be read."""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from zero_full.checkpoint.description import Described, DescribedTensor
from zero_full.checkpoint.folder import TEMPORARY
from zero_full.errors import CheckpointError
from zero_full.formatting import INDENT, human, listed, natural_order, shown, table_row, terminal_width
from zero_full.progress import Advance
from zero_full.shard.contents.keys import PARAMETERS, STATE

if TYPE_CHECKING:
    from zero_full.checkpoint.source import Source

LATEST = ("latest", "latest_universal")  # files that name the newest checkpoint
MOST = 20  # largest number of errors shown


@dataclass(frozen=True)
class Neighbours:
    """Other checkpoints in the folder that a checkpoint is in."""

    latest: str | None = None
    others: list[str] = field(default_factory=list)  # folder names
    unfinished: list[str] = field(default_factory=list)  # folder names of incomplete saves

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the rows that describe the neighbours: name and text."""
        if self.latest is not None:
            yield "latest", self.latest
        if self.others:
            yield "also here", ", ".join(self.others)
        if self.unfinished:
            yield "unfinished", f"{', '.join(self.unfinished)}: saves in progress or interrupted"


def neighbours(folder: Path, path: Path | None) -> Neighbours:
    """Find the other checkpoints next to `path`, opened through `folder`; `path` None: those in `folder`."""
    root = folder
    if path is not None and path.resolve() == folder.resolve():
        root = folder.resolve().parent
        if _latest(root) is None:
            return Neighbours()  # the parent may be any folder, not one of checkpoints
    if not root.is_dir():
        return Neighbours()
    found = [each.name for each in root.iterdir() if each.is_dir() and each.name[0] != "."]
    folders = sorted(found, key=natural_order)
    unfinished = [name for name in folders if TEMPORARY.fullmatch(name)]
    mine = None if path is None else path.resolve().name
    return Neighbours(_latest(root), [n for n in folders if n not in (mine, *unfinished)], unfinished)


def _latest(root: Path) -> str | None:
    for name in LATEST:
        try:
            if (root / name).is_file():
                return (root / name).read_text()[:1000].strip()
        except (OSError, ValueError):  # opening the checkpoint reports this, if it needs the file
            continue
    return None


def verify(source: "Source", advance: Advance = lambda size: None) -> list[str]:
    """Read all data and return the distinct error messages."""
    errors: dict[str, None] = {}

    def attempt(read: Callable[[], object]) -> None:
        try:
            read()
        except (CheckpointError, OSError) as error:
            errors[str(error)] = None

    for key, stored in source.tensors.items():
        for first, last in source.parts(key, 0, stored.numel):
            attempt(partial(source.verify, key, first, last))
            advance((last - first) * stored.dtype.itemsize)
    for check in source.further_checks():
        attempt(check)
    for rank in source.savers:
        attempt(partial(source.private, rank))
    return list(errors)


def total(tensors: Collection[DescribedTensor]) -> dict[str, int]:
    """Return the number of tensors, their elements and their bytes."""
    return {
        "tensors": len(tensors),
        "elements": sum(tensor.numel for tensor in tensors),
        "bytes": sum(tensor.nbytes for tensor in tensors),
    }


class Inspection:
    """The description of a checkpoint, with the errors of its verification if that was requested."""

    def __init__(self, source: Described, around: Neighbours, errors: list[str] | None = None) -> None:
        self.source, self.around = source, around
        self.errors = errors  # None: not verified
        kinds: dict[str, dict[str, DescribedTensor]] = {}  # by kind, as "state/exp_avg", by name
        for key in sorted(source.tensors, key=_place):
            kind, _, name = key.partition("/")
            if kind.partition("@")[0] == STATE:
                entry, _, name = name.partition("/")
                kind = f"{kind}/{entry}"
            kinds.setdefault(kind, {})[name] = source.tensors[key]
        self.totals = {kind: total(tensors.values()) for kind, tensors in kinds.items()}
        # Parameters and buffers, without the optimizer state.
        self.named = {kind: tensors for kind, tensors in kinds.items() if "/" not in kind}
        described = ("about", "aliases", "frozen", "excluded")
        self.others = [k for k, value in source.shared.items() if k not in described and value is not None]

    def as_json(self) -> str:
        """Return the description as one line of JSON."""
        shared = self.source.shared
        return json.dumps(
            {
                "path": str(self.source.path),
                "written_by": self.source.kind,
                "tag": self.source.path.name,
                "about": shared.get("about") or {},
                "latest": self.around.latest,
                "also_here": self.around.others,
                "unfinished": self.around.unfinished,
                "totals": self.totals,
                "tensors": {
                    kind: {
                        name: {"shape": list(stored.shape), "dtype": _type(stored), "bytes": stored.nbytes}
                        for name, stored in tensors.items()
                    }
                    for kind, tensors in self.named.items()
                },
                "tied": self.source.aliases,
                "frozen": shared.get("frozen"),
                "excluded": shared.get("excluded") or [],
                "also_in_it": self.others,
                "verified": self.errors is not None,
                "wrong": self.errors or [],
            },
            default=str,
        )

    def table(self) -> str:
        """Return the description as text."""
        shared = self.source.shared
        about, excluded = shared.get("about") or {}, shared.get("excluded") or []
        facts = [
            ("written by", self.source.kind),
            ("tag", self.source.path.name),
            *((key.replace("_", " "), _value(about[key])) for key in about if key != "tag"),
            *self.around.rows(),
            *([("left out", f"the frozen parameters {listed(excluded)}")] if excluded else []),
            *([("also in it", ", ".join(self.others))] if self.others else []),
        ]
        sums = [("", "tensors", "elements", "size", "bytes")]
        together = total(self.source.tensors.values())
        for kind, sizes in {**self.totals, "together": together}.items():
            counts = (f"{sizes['tensors']:,}", f"{sizes['elements']:,}")
            sums.append((kind, *counts, human(sizes["bytes"]), f"{sizes['bytes']:,}"))
        parts = [[str(self.source.path), *pairs(facts)], fitted(sums)]
        parts += [self._list(kind, tensors) for kind, tensors in self.named.items()]
        if self.errors:
            more = [f"and {len(self.errors) - MOST} more"] * (len(self.errors) > MOST)
            parts.append(["DAMAGED:", *(f"  {text}" for text in [*self.errors[:MOST], *more])])
        elif self.errors is not None:
            parts.append([f"verified: {human(together['bytes'])} can be read and are what was written"])
        return "\n\n".join("\n".join(part) for part in parts)

    def _list(self, kind: str, tensors: dict[str, DescribedTensor]) -> list[str]:
        aliases = self.source.aliases
        notes: dict[str, list[str]] = {}
        for name in self.source.shared.get("frozen") or []:
            notes.setdefault(aliases.get(name, name), []).append("frozen")
        for alias, name in aliases.items():
            notes.setdefault(name, []).append(f"also {alias}")
        rows = [("shape", "type", "size")]
        rows += [
            (" x ".join(map(str, t.shape)) or "one number", _type(t), human(t.nbytes))
            for t in tensors.values()
        ]
        remarks = ["", *(", ".join(dict.fromkeys(notes.get(name, []))) for name in tensors)]
        return _named([kind, *tensors], aligned(rows), remarks)


def _place(key: str) -> tuple[bool, bool, list[tuple[int, str]]]:
    """Return the sort key of a tensor: parameters, then buffers, then optimizer state."""
    return key.startswith(STATE), not key.startswith(PARAMETERS), natural_order(key)


def _value(value: object) -> str:
    if value is None:
        return "unknown"
    return ", ".join(map(str, value)) if isinstance(value, list) else shown(value, str)


def _type(stored: DescribedTensor) -> str:
    return str(stored.dtype).removeprefix("torch.")


def pairs(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Format names and values in two columns, wrapped to the terminal's width."""
    column = 4 + max((len(name) for name, _ in rows), default=0)
    return [line for name, value in rows for line in table_row(f"  {name}", value, column, terminal_width())]


def _named(names: Sequence[str], cells: Sequence[str], notes: Sequence[str]) -> list[str]:
    """Format each name, cell and note as a line, wrapped to the terminal's width."""
    width, wide = terminal_width(), max(map(len, cells))
    column = min(2 + max(map(len, names)), max(width - wide, 0))
    lines = []
    for name, cell, note in zip(names, cells, notes, strict=True):
        first = [name] if len(name) + 2 > column else []
        line = f"{'' if first else name:<{column}}{cell:<{wide}}  {note}".rstrip()
        fits = len(line) <= width
        lines += [*first, line if fits else line[: column + wide].rstrip()]
        lines += [] if fits else table_row("", note, INDENT, width)
    return lines


def fitted(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Format a header and rows as a table; on a narrow terminal each row as a name and a text."""
    lines, (header, *others) = aligned(rows, right=True), rows
    if max(map(len, lines)) <= terminal_width():
        return lines
    return pairs(
        [(name, ", ".join(map(" ".join, zip(header[1:], cells, strict=True)))) for name, *cells in others]
    )


def aligned(rows: Sequence[tuple[str, ...]], right: bool = False) -> list[str]:
    """Format rows in aligned columns. `right`: all columns but the first are aligned to the right."""
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if right and place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, wide, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
