"""What the user must hear about a key that is not simply honoured.

`idle` is for a key without effect here, which costs a line of warning. `missing` is for a feature whose
silent absence would change the training, `removed` for one that DeepSpeed itself has given up: both are
errors. A remark speaks up only for a value that asks for something, so a file that spells out what happens
anyway, or switches off what is not here, stays quiet.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Remark:
    """A text about a key. `switch` is the key in a section that turns it on; `when` picks values."""

    text: str
    refuses: bool
    remedy: str = ""  # what to do instead, if it refuses
    switch: str = ""
    when: Callable[[Any], bool] | None = None
    below_stage: int = 99  # a later stage has what this is about

    def applies(self, value: Any, default: Any) -> bool:
        """Whether this value asks for what the remark is about."""
        if self.switch:
            value, default = value.get(self.switch, 0), 0
            if not isinstance(value, int):
                return False  # no switch at all, and refused as that
        return self.when(value) if self.when else value != default


def idle(text: str, switch: str = "", when: Callable[[Any], bool] | None = None) -> Remark:
    """A remark for a key that changes nothing here: one line of warning."""
    return Remark(text, refuses=False, switch=switch, when=when)


def missing(text: str, remedy: str, switch: str = "", when: Callable[[Any], bool] | None = None) -> Remark:
    """A remark for a feature that is not here and would be missed: an error."""
    return Remark(text, refuses=True, remedy=remedy, switch=switch, when=when)


def removed(version: str, instead: str, switch: str = "") -> Remark:
    """A remark for a feature that DeepSpeed had before this version: an error, unless it is switched off."""
    text = f"DeepSpeed removed it in {version}"
    return Remark(text, refuses=True, remedy=instead, switch=switch, when=None if switch else is_on)


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
