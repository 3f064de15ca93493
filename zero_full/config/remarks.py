"""What the user must hear about a key that is not simply honoured.

`idle` is for a key without effect here, which costs a line of warning. `missing` is for a feature whose
silent absence would change the training, `removed` for one that DeepSpeed itself has given up: both are
errors. A remark speaks up only for a value that asks for something, so a file that spells out what happens
anyway, or switches off what is not here, stays quiet.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Remark:
    """A text about a key. `switches` are keys in a section that turn it on; `when` picks values."""

    text: str
    refuses: bool
    remedy: str = ""  # what to do instead, if it refuses
    switches: tuple[str, ...] = ()  # with dots
    when: Callable[[Any], bool] | None = None
    below_stage: int = 99  # a later stage has what this is about

    def asking(self, value: Any, default: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
        """Where in a key's value (() for all of it) what the remark is about is asked for, and the value."""
        switched = [each for each in self.switched(value) if isinstance(each[1], int)]  # others are refused
        for route, found in switched if self.switches else [((), value)]:
            usual = 0 if self.switches else default
            if self.when(found) if self.when else found != usual:
                yield route, found

    def switched(self, section: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
        """The switches that are in a section, and their values."""
        for switch in self.switches:
            *above, name = route = tuple(switch.split("."))
            level = section
            for each in above:
                level = level.get(each) if isinstance(level, Mapping) else None
            if isinstance(level, Mapping) and name in level:
                yield route, level[name]


def idle(text: str, switch: str = "", when: Callable[[Any], bool] | None = None) -> Remark:
    """A remark for a key that changes nothing here: one line of warning."""
    return Remark(text, refuses=False, switches=(switch,) if switch else (), when=when)


def missing(text: str, remedy: str, *switches: str, when: Callable[[Any], bool] | None = None) -> Remark:
    """A remark for a feature that is not here and would be missed: an error."""
    return Remark(text, refuses=True, remedy=remedy, switches=switches, when=when)


def removed(version: str, instead: str, switch: str = "") -> Remark:
    """A remark for a feature that DeepSpeed had before this version: an error, unless it is switched off."""
    text = f"DeepSpeed removed it in {version}"
    switches, when = ((switch,), None) if switch else ((), is_on)
    return Remark(text, refuses=True, remedy=instead, switches=switches, when=when)


def is_on(value: Any) -> bool:
    """Whether a value asks for anything. A section does, unless everything in it is switched off."""
    if not isinstance(value, Mapping):
        return bool(value)
    switches = list(_switches(value))
    return any(switches) if switches else bool(value)


def more_than_one(value: int) -> bool:
    """Whether ranks are asked for."""
    return value > 1


def names_some(value: object) -> bool:
    """Whether a list of names has any."""
    return value not in ("auto", [])


def _switches(section: Mapping[Any, Any]) -> list[bool]:
    found = []
    for key, value in section.items():
        if isinstance(value, Mapping):
            found += _switches(value)
        elif key == "enabled":
            found.append(bool(value))
    return found
