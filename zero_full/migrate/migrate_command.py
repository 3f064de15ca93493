"""Run `python -m zero_full migrate`: rewrite a DeepSpeed script for zero_full, and check its JSON file.

The script is not executed. The output is a unified diff and, with line numbers, the names without a
counterpart. `--write` changes the files. The table of names is in `name_table.py`.
"""

import argparse
import difflib
import json
import tokenize
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zero_full.check.check_command import check_text
from zero_full.check.replace_file import replace_file
from zero_full.config import implied_world, resolve
from zero_full.config.json_parser import NotJsonError, parse, text_of
from zero_full.errors import ConfigError, MigrateError
from zero_full.formatting import counted
from zero_full.migrate.calls import configurations, find_other_uses
from zero_full.migrate.rewrite import ManualChange, Rewrite

# DeepSpeed's optimizers that zero_full has, in lower case. To look up other names, torch must be imported.
OPTIMIZERS = {
    *("adam", "adamw", "adagrad", "fusedlamb", "lamb", "lion", "muon", "sgd"),
    *("onebitadam", "onebitlamb", "zerooneadam"),
}


class Migrated(NamedTuple):
    """A migrated script with findings. Line numbers are those of the original."""

    result: str
    findings: list[ManualChange]
    remarks: list[ManualChange]  # warnings that need no action
    moved: Callable[[int], int]  # converts a line number to that of the result


class Report(NamedTuple):
    """The findings in one file. Line number 0 stands for the whole file."""

    file: str
    diff: list[str]
    findings: list[ManualChange]  # left to do by hand
    remarks: list[ManualChange]
    notes: list[str]

    def lines(self) -> Iterator[str]:
        """Yield the report as text."""
        yield from self.diff
        for kind, found in (("", self.findings), ("remark: ", self.remarks)):
            for line, text in found:
                yield f"{self.file}{f':{line}' if line else ''}: {kind}{text}"
        yield from (f"{self.file}: {note}" for note in self.notes)

    def as_json(self) -> str:
        """Return the report as one line of JSON."""
        lists = {"findings": self.findings, "remarks": self.remarks}
        rows = {name: [each._asdict() for each in found] for name, found in lists.items()}
        return json.dumps({"file": self.file, "diff": self.diff, **rows, "notes": self.notes})


def main(options: argparse.Namespace) -> int:
    """Migrate each file. Returns the exit code: 1 if anything is left to do by hand, else 0."""
    left, world = 0, options.world
    for path in map(Path, options.files):
        if path.suffix not in (".py", ".json"):
            raise MigrateError(f"{path}: expected a script (.py) or a configuration (.json)")
        report = _script(path, options.write, world) if path.suffix == ".py" else _json(path, world)
        for line in [report.as_json()] if options.json else report.lines():
            print(line)
        left += len(report.findings)
    if not options.json:
        print(f"{left or 'nothing'} left to do by hand")
    return 1 if left else 0


# Scripts ---------------------------------------------------------------------------------------------


def migrate(source: str, world: int | None = None) -> Migrated:
    """Rewrite a script and list the changes left to do. Raises SyntaxError if this Python cannot parse it."""
    rewrite = Rewrite(source)
    findings, remarks = set(find_other_uses(rewrite)), set[ManualChange]()
    for line, config in configurations(rewrite):
        errors, warnings = check(config, world)
        findings |= {ManualChange(line, text) for text in errors}
        remarks |= {ManualChange(line, text) for text in warnings}
    findings |= rewrite.findings
    remarks |= rewrite.remarks
    return Migrated(rewrite.result(), sorted(findings), sorted(remarks), rewrite.text.moved)


def _script(path: Path, write: bool, world: int | None) -> Report:
    source, encoding = _read(path)
    try:
        migrated = migrate(source, world)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise MigrateError(f"{path}{line}: not valid Python: {error}") from None
    name = path.as_posix().lstrip("/")
    old, new = source.splitlines(), migrated.result.splitlines()
    diff = list(difflib.unified_diff(old, new, f"a/{name}", f"b/{name}", lineterm=""))
    findings, remarks = (
        [each._replace(line=migrated.moved(each.line)) if write else each for each in changes]
        for changes in (migrated.findings, migrated.remarks)
    )
    if write and migrated.result != source:
        replace_file(path, migrated.result.encode(encoding))
    return Report(str(path), diff, findings, remarks, [] if diff else ["no name to change"])


def _read(path: Path) -> tuple[str, str]:
    """Return the file's text, with its line ends unchanged, and its encoding."""
    try:
        with path.open("rb") as file:
            encoding, _ = tokenize.detect_encoding(file.readline)
        return path.read_bytes().decode(encoding), encoding
    except (OSError, SyntaxError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise MigrateError(f"{path} cannot be read: {why}") from None


# Configurations --------------------------------------------------------------------------------------


def check(config: Mapping[str, Any], world: int | None) -> tuple[list[str], list[str]]:
    """Return (errors, warnings) of a configuration in a script, without values computed at run time."""
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & config.keys():
        config = {**config, "train_micro_batch_size_per_gpu": 1}
    try:
        resolved = resolve(dict(config), world or implied_world(config))
    except ConfigError as error:
        return [line.strip() for line in str(error).splitlines()[1:]], []
    return list(_missing_optimizer(config)), list(resolved.warnings)


def _missing_optimizer(config: Mapping[str, Any]) -> Iterator[str]:
    kind = _unusual_optimizer(config)
    if kind is None:
        return
    try:
        from zero_full.optim.build import optimizer_class
    except ImportError:  # without torch, skip the optimizer's name
        return
    try:
        optimizer_class(kind)
    except ValueError as error:
        yield str(error)


def _unusual_optimizer(config: Any) -> str | None:
    """Return the name of the configuration's optimizer, if only torch can tell whether it exists."""
    section = config.get("optimizer") if isinstance(config, Mapping) else None
    kind = section.get("type") if isinstance(section, Mapping) else None
    return kind if isinstance(kind, str) and kind.lower() not in OPTIMIZERS else None


def _value_of(text: str) -> Any:
    try:
        return parse(text).value
    except NotJsonError:  # `check_text` reports it
        return None


def _json(path: Path, world: int | None) -> Report:
    try:
        text = text_of(path)
        quick = _unusual_optimizer(_value_of(text)) is None
        checked = check_text(text, world, quick)
    except ConfigError as error:
        raise MigrateError(str(error)) from None
    report = Report(str(path), [], [], [], [])
    if checked.remark:
        report.remarks.append(ManualChange(0, checked.remark))
    for each in checked.printed:
        if quick and each.kind == "unknown":
            continue
        found = report.findings if each.kind == "refused" else report.remarks
        found.append(ManualChange(each.line, each.text))
    if not report.findings:
        filled = ' once "auto" is filled in' if checked.remark else ""
        ranks = counted(checked.world, "rank")
        report.notes.append(f"no mistake found{filled} on {ranks} (--world asks for others)")
        if quick:
            report.notes.append(
                f"for the optimizer, the scheduler and a dry run: python -m zero_full check {path}"
            )
    return report
