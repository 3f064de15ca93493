"""Run `python -m zero_full check`: print a configuration's errors and warnings, with lines and columns."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from pathlib import Path

from zero_full.check.replace_file import replace_file
from zero_full.config import Checked, Verdict, check
from zero_full.config.auto import BOTH, FILLERS, read_filled
from zero_full.config.json_parser import Route, text_of
from zero_full.config.messages import dotted
from zero_full.config.verdicts import VerdictKind
from zero_full.errors import ConfigError
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
        warnings, unfilled = self.count("no effect") + self.count("assumed"), self.count("unfilled")
        parts = [counted(mistakes, "mistake") if mistakes else "ok"]
        if unfilled and mistakes:
            parts += [f"{counted(unfilled, 'key')} to fill in"]
        elif unfilled:
            parts[0] += f" once {counted(unfilled, 'key')} {'is' if unfilled == 1 else 'are'} filled in"
        parts += [counted(warnings, "warning")] if warnings else []
        parts += [f"{counted(unknown, 'key')} not looked at"] if unknown else []
        return ", ".join(parts)

    @property
    def remark(self) -> str:
        """Names the keys whose value is "auto", and the library that fills each in; "" if no key has it."""
        by_filler: dict[str, list[str]] = {}
        for key in (dotted(verdict.path) for verdict in self.verdicts if verdict.kind == "unfilled"):
            by_filler.setdefault(FILLERS.get(key, BOTH), []).append(key)
        said = "; by ".join(f"{who}: {', '.join(keys)}" for who, keys in by_filler.items())
        return f'"auto" is filled in by {said}. Without them, set values: check --fill' if said else ""


def check_file(path: Path, world: int | None, quick: bool = False) -> CheckedFile:
    """Return all verdicts on a file. Raises ConfigError if it cannot be read.

    `world` is None for the number of ranks that the configuration implies. `quick`: do not import torch.
    """
    return check_text(text_of(path), world, quick)


def check_text(text: str, world: int | None, quick: bool = False) -> CheckedFile:
    """Return all verdicts on a configuration's text, as `check_file` does."""
    checked = check(text, world)
    return CheckedFile(checked.verdicts if quick else tuple(_completed(checked, world)), checked.world)


def main(options: argparse.Namespace) -> int:
    """Print the verdicts on a file. Returns the exit code: 1 if the configuration is invalid, else 0."""
    file, world = options.file, options.world
    if options.write and not options.fill:
        raise ConfigError(f"--write {options.write} without --fill: there is no value to write")
    text = read_filled(Path(file), options.fill)
    checked = check_text(text, world, options.quick)
    mistakes, note = checked.count("refused"), ""
    if options.write:
        note = f"{options.write}: {'not written, because of a mistake' if mistakes else 'written'}"
        if not mistakes:
            replace_file(Path(options.write), text.encode())
    if options.json:
        rows = [each._asdict() for each in checked.verdicts]
        about = {"file": file, "world": checked.world, "quick": options.quick, "tally": checked.tally}
        print(json.dumps({**about, "verdicts": rows}))
    else:
        _print(file, checked, world, note, options.quick)
    return 1 if mistakes else 0


def _print(file: str, checked: CheckedFile, world: int | None, note: str, quick: bool) -> None:
    if checked.remark:
        print(printable(f"{file}: remark: {checked.remark}"))
    for each in checked.printed:
        if quick and each.kind == "unknown":
            continue
        place = f"{file}:{each.line}:{each.column}"
        print(printable(f"{place}: {LABELS[each.kind]}: {each.text}"))
    if note:
        print(printable(note))
    ranks = "" if world else f" on {counted(checked.world, 'rank')} (--world asks for others)"
    print(f"{checked.tally}{ranks}")
    if quick and not checked.count("refused"):
        skipped = [dotted(verdict.path) for verdict in checked.verdicts if verdict.kind == "unknown"]
        print(f"not checked with --quick: {', '.join([*skipped, 'a dry run'])}")


def _completed(checked: Checked, world: int | None) -> list[Verdict]:
    """Return the verdicts, completed by dry runs if torch can be imported.

    Without an explicit world size, also by a run on two ranks.
    """
    if checked.config is None:
        return list(checked.verdicts)
    try:
        from zero_full.check.dry_run import error_of_run, errors_of_sections, for_ranks, without_auto
    except ImportError:
        return list(checked.verdicts)
    config = without_auto(checked.config)
    refused = {verdict.path for verdict in checked.verdicts if verdict.kind == "refused"}
    invalid = {*map(dotted, refused)}  # torch would report a refused value as missing
    found = [
        (path, message)
        for path, message in errors_of_sections(config)
        if path not in refused and message.partition(" ")[0] not in invalid
    ]
    if not refused and not found:
        message, where = error_of_run(config, checked.world), ""
        has_ranks = config.train_batch_size and config.train_micro_batch_size_per_gpu
        if not message and world is None and checked.world == 1 and not has_ranks:
            message = error_of_run(for_ranks(config, 1, 2), 2)
            where = "on several ranks: "
        if message:  # it begins with a key, or else the optimizer's type is the usual cause
            paths = (each.path for each in checked.verdicts if each.path)
            path = next((p for p in paths if message.startswith(dotted(p))), ("optimizer", "type"))
            found = [(path, where + message.removeprefix(f"{dotted(path)}: "))]
    wrong = {path for path, _ in found}
    not_invalid = ("ok", "default", "unread", "unknown", "unfilled")
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
