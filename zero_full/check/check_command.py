"""Run `python -m zero_full check`: print a configuration's errors and warnings, with lines and columns."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from pathlib import Path

from zero_full.config import Checked, Verdict, check
from zero_full.config.json_parser import Route, text_of
from zero_full.config.messages import dotted
from zero_full.config.verdicts import VerdictKind
from zero_full.formatting import counted, printable

LABELS: dict[VerdictKind, str] = {
    "refused": "mistake",
    "no effect": "warning",
    "assumed": "warning",
    "unknown": "not looked at",
}


@dataclass(frozen=True)
class CheckedFile:
    """The verdicts on a file, for `world` ranks."""

    verdicts: tuple[Verdict, ...]
    world: int

    @property
    def printed(self) -> list[Verdict]:
        """The verdicts to print."""
        return [verdict for verdict in self.verdicts if verdict.kind in LABELS]

    def count(self, kind: VerdictKind) -> int:
        """Return the number of verdicts of this kind."""
        return sum(verdict.kind == kind for verdict in self.verdicts)

    @property
    def tally(self) -> str:
        """A summary such as `ok, 2 warnings` or `3 mistakes, 1 warning`."""
        mistakes, unknown = self.count("refused"), self.count("unknown")
        warnings = self.count("no effect") + self.count("assumed")
        parts = [counted(mistakes, "mistake") if mistakes else "ok"]
        parts += [counted(warnings, "warning")] if warnings else []
        parts += [f"{counted(unknown, 'key')} not looked at"] if unknown else []
        return ", ".join(parts)


def check_file(path: Path, world: int | None) -> CheckedFile:
    """Return all verdicts on a file. Raises ConfigError if it cannot be read.

    `world` is None for the number of ranks that the configuration implies.
    """
    checked = check(text_of(path), world)
    return CheckedFile(tuple(_completed(checked, world)), checked.world)


def main(options: argparse.Namespace) -> int:
    """Print the verdicts on a file. Returns the exit code: 1 if the configuration is invalid, else 0."""
    file, world = options.file, options.world
    checked = check_file(Path(file), world)
    mistakes = checked.count("refused")
    if options.json:
        rows = [each._asdict() for each in checked.verdicts]
        print(json.dumps({"file": file, "world": checked.world, "tally": checked.tally, "verdicts": rows}))
        return 1 if mistakes else 0
    for each in checked.printed:
        place = f"{file}:{each.line}:{each.column}"
        print(printable(f"{place}: {LABELS[each.kind]}: {each.text}"))
    ranks = "" if world else f" on {counted(checked.world, 'rank')} (--world asks for others)"
    print(f"{checked.tally}{ranks}")
    return 1 if mistakes else 0


def _completed(checked: Checked, world: int | None) -> list[Verdict]:
    """Return the verdicts, completed by dry runs if torch can be imported.

    Without an explicit world size, also by a run on two ranks.
    """
    if checked.config is None:
        return list(checked.verdicts)
    try:
        from zero_full.check.dry_run import error_of_run, errors_of_sections, for_ranks
    except ImportError:
        return list(checked.verdicts)
    refused = {verdict.path for verdict in checked.verdicts if verdict.kind == "refused"}
    invalid = {*map(dotted, refused)}  # torch would report a refused value as missing
    found = [
        (path, message)
        for path, message in errors_of_sections(checked.config)
        if path not in refused and message.partition(" ")[0] not in invalid
    ]
    if not refused and not found:
        config, message, where = checked.config, error_of_run(checked.config, checked.world), ""
        has_ranks = config.train_batch_size and config.train_micro_batch_size_per_gpu
        if not message and world is None and checked.world == 1 and not has_ranks:
            message = error_of_run(for_ranks(config, 1, 2), 2)
            where = "on several ranks: "
        if message:  # it begins with a key, or else the optimizer's type is the usual cause
            paths = (each.path for each in checked.verdicts if each.path)
            path = next((p for p in paths if message.startswith(dotted(p))), ("optimizer", "type"))
            found = [(path, where + message.removeprefix(f"{dotted(path)}: "))]
    wrong = {path for path, _ in found}
    not_invalid = ("ok", "default", "unread", "unknown")
    updated = [
        _after_dry_run(each, wrong)
        for each in checked.verdicts
        if each.path not in wrong or each.kind not in not_invalid
    ]
    updated += [_error_verdict(path, message, checked.verdicts) for path, message in found]
    return sorted(updated, key=lambda each: (each.line, each.column))


def _after_dry_run(verdict: Verdict, wrong: set[Route]) -> Verdict:
    """Update a verdict of the kind "unknown" after the dry run."""
    if verdict.kind != "unknown":
        return verdict
    kind = (str(verdict.path[0]), "type")
    if kind not in wrong:
        return verdict._replace(kind="ok", message="", text="")
    message = f"{dotted(kind)} is refused"
    return verdict._replace(kind="unread", message=message, text=f"{dotted(verdict.path)}: {message}")


def _error_verdict(path: Route, message: str, verdicts: Sequence[Verdict]) -> Verdict:
    """Make an error verdict, positioned at the nearest key that has a verdict."""
    near = max(verdicts, key=lambda each: sum(1 for _ in takewhile(bool, map(eq, each.path, path))))
    key = dotted(path)
    text = message if message.startswith(key) else f"{key}: {message}"
    return Verdict(path, near.line, near.column, "refused", message.removeprefix(f"{key}: "), "", text)
