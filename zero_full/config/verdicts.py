"""Judge every key of a JSON configuration, with line and column, as the engine would.

`resolve` and this module both use `examine`. The website's configuration checker gives the same verdicts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal, NamedTuple

from zero_full.config import messages
from zero_full.config.json_parser import NotJsonError, Parsed, Route, parse
from zero_full.config.resolve import Examined, check_world_size, examine, in_file, known_rules
from zero_full.config.rules import MICRO, STEPS, TRAIN, unread_keys
from zero_full.config.schema import Config

# Honoured; equal to the default; not read, as expected; without effect, with a warning; missing, with a
# default that may surprise; "auto", which another library replaces; invalid; only torch can judge it.
VerdictKind = Literal["ok", "default", "unread", "no effect", "assumed", "unfilled", "refused", "unknown"]
NOT_READ = "zero_full does not read it"
COMMAND = "`python -m zero_full check`"
IN_TORCH = f"only {COMMAND} can check it: the arguments depend on the installed torch"
IN_A_RUN = f"only {COMMAND} can check whether it exists and supports this configuration"


class Verdict(NamedTuple):
    """The judgement on one key of a configuration text."""

    path: Route  # () for the whole text
    line: int
    column: int
    kind: VerdictKind
    message: str = ""
    remedy: str = ""
    text: str = ""  # message and remedy as one sentence with the key


@dataclass(frozen=True)
class Checked:
    """The verdicts in the order of the text, and the configuration if the text can be parsed."""

    verdicts: tuple[Verdict, ...]
    world: int
    config: Config | None = None


def check(text: str, world_size: int | None) -> Checked:
    """Check a configuration text for this many data-parallel ranks.

    None: for the number of ranks that its batch and group sizes imply.
    """
    if world_size is not None:
        check_world_size(world_size)
    try:
        parsed = parse(text)
    except NotJsonError as error:
        return _unusable(error, world_size or 1)
    if not isinstance(parsed.value, dict):
        remedy = "write keys and values between { and }"
        return _unusable(
            NotJsonError("a configuration must be an object", remedy, parsed.positions[()]), world_size or 1
        )
    world = implied_world(parsed.value) if world_size is None else world_size
    examined = examine(parsed.value, world)
    notices = [
        Verdict(f.path, place.line, place.column, f.kind, f.message, f.remedy, f.line)
        for place, f in in_file(parsed, examined)
    ]
    verdicts = sorted(
        [*notices, *_quiet_verdicts(parsed, examined, notices)], key=lambda each: (each.line, each.column)
    )
    return Checked(tuple(verdicts), world, examined.config)


def _unusable(error: NotJsonError, world: int) -> Checked:
    place, text = error.position, str(error)
    return Checked((Verdict((), place.line, place.column, "refused", error.why, error.remedy, text),), world)


def implied_world(config: Any) -> int:
    """Return the number of ranks that a configuration's batch and group sizes imply, at least 1."""
    if not isinstance(config, Mapping):
        return 1
    train, micro, steps = (_count(config, key) for key in (TRAIN, MICRO, STEPS))
    unit = micro * (steps or 1)
    if train and unit and train % unit == 0:
        return train // unit
    zero = config.get("zero_optimization")
    groups = zero if isinstance(zero, Mapping) else {}
    return max(1, _count(groups, "mics_shard_size"), _count(groups, "zero_hpz_partition_size"))


def _count(config: Mapping[str, Any], key: str) -> int:
    """Return the number under this key, or 0 if it is missing or invalid."""
    value = config.get(key)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and 0 < value < 2**31 else 0


def _quiet_verdicts(parsed: Parsed, examined: Examined, notices: list[Verdict]) -> Iterator[Verdict]:
    """Yield a verdict on each key of the file that no notice is about. A section with keys gets none."""
    noticed = {_key_of(parsed.nearest(verdict.path)) for verdict in notices}
    refused = {verdict.path for verdict in notices if verdict.kind == "refused"}
    keys = [path for path in parsed.positions if path and path == _key_of(path)]
    sections = {path[:length] for path in keys for length in range(len(path))}
    first_names = {theirs: ours for ours, theirs in examined.spelled.items()}
    entries: dict[Route, messages.Entry] = {
        tuple(entry.key.split(".")): entry for entry in messages.entries(examined.config)
    }
    rules = known_rules(unread_keys(examined.config), examined.bad)
    unread: dict[Route, str] = {tuple(rule.key.split(".")): rule.why for rule in rules}
    for path in keys:
        if path in noticed or path in sections:
            continue
        kind, message = _quiet_verdict(messages.as_written(path, first_names), entries, unread)
        for length in range(1, len(path)):
            if path[:length] in refused:
                kind, message = "unread", f"{messages.dotted(path[:length])} is invalid"
        if any(str(name).startswith("_") for name in path[:-1]):
            kind, message = "unread", NOT_READ
        place, text = parsed.positions[path], f"{messages.dotted(path)}: {message}" if message else ""
        yield Verdict(path, place.line, place.column, kind, message, "", text)


def _key_of(path: Route) -> Route:
    """Return the path of the key that holds this value or list item."""
    return tuple(takewhile(lambda name: isinstance(name, str), path))


def _quiet_verdict(
    path: Route, entries: Mapping[Route, messages.Entry], unread: Mapping[Route, str]
) -> tuple[VerdictKind, str]:
    """Return (kind, message) for a key without a notice, under its canonical name."""
    entry = entries.get(path)
    if path in (("optimizer", "type"), ("scheduler", "type")) and entry:
        return "unknown", IN_A_RUN
    if path in unread:
        return "unread", unread[path]
    if entry is not None:
        return ("default", "") if entry.value == entry.default else ("ok", "")
    inside = next((path[:length] for length in range(1, len(path)) if path[:length] in entries), None)
    if inside is None:  # a section without keys, or null for a batch size
        return "default", ""
    section = entries[inside]
    if section.value is None:
        return "unread", f"{section.key} cannot be used"
    if inside[-1] == "params":
        return "unknown", IN_TORCH
    switches = section.remark.switches if section.remark is not None else ()
    is_switch = ".".join(map(str, path[len(inside) :])) in switches
    return ("default", "") if is_switch else ("unread", NOT_READ)
