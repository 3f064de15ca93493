"""Remarks of the schema: warnings and errors for keys that are not honoured.

`idle` is for a key without effect in this package: a warning. `missing` is for a feature whose absence would
change the training, and `removed` for one that DeepSpeed itself has removed: both are errors. A remark
applies only to a value that requests something. So a file that writes out defaults, or switches off missing
features, causes no message.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Remark:
    """A message about a key, with the values that cause it.

    `switches` are the keys in a section that turn a feature on. `when` selects the values that cause the
    message.
    """

    text: str
    refuses: bool
    remedy: str = ""  # alternative, for errors
    switches: tuple[str, ...] = ()  # dotted keys
    when: Callable[[Any], bool] | None = None
    below_stage: int = 99  # applies to lower stages only

    def asking(self, value: Any, default: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
        """Yield (path within the key's value, value) for each place that requests the feature."""
        switched = [each for each in self.switched(value) if isinstance(each[1], int)]  # others are errors
        for route, found in switched if self.switches else [((), value)]:
            usual = 0 if self.switches else default
            if self.when(found) if self.when else found != usual:
                yield route, found

    def switched(self, section: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
        """Yield the switches in a section with their values."""
        for switch in self.switches:
            *above, name = route = tuple(switch.split("."))
            level = section
            for each in above:
                level = level.get(each) if isinstance(level, Mapping) else None
            if isinstance(level, Mapping) and name in level:
                yield route, level[name]


def idle(text: str, *switches: str) -> Remark:
    """Make a remark for a key without effect: a warning."""
    return Remark(text, refuses=False, switches=switches)


def missing(text: str, remedy: str, *switches: str, when: Callable[[Any], bool] | None = None) -> Remark:
    """Make the error for a key of a feature that is not supported, and that would change the training."""
    return Remark(text, refuses=True, remedy=remedy, switches=switches, when=when)


def removed(version: str, instead: str, switch: str = "") -> Remark:
    """Make a remark for a feature that DeepSpeed removed in this version: an error unless switched off."""
    switches, when = ((switch,), None) if switch else ((), is_on)
    return missing(f"DeepSpeed removed it in {version}", instead, *switches, when=when)


def is_on(value: Any) -> bool:
    """Return whether a value requests anything. A section does unless all of its switches are off."""
    switches = _switches(value) if isinstance(value, Mapping) else []
    return any(switches) if switches else bool(value)


def more_than_one(value: int) -> bool:
    """Return whether the value requests more than one rank."""
    return value > 1


def names_some(value: object) -> bool:
    """Return whether the value is a list with names."""
    return value not in ("auto", [])


def _switches(section: Mapping[Any, Any]) -> list[bool]:
    found = []
    for key, value in section.items():
        if isinstance(value, Mapping):
            found += _switches(value)
        elif key == "enabled":
            found.append(bool(value))
    return found
