"""What a test of a task compares. A failure keeps both sides as values, so that it can be diagnosed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Facts:
    """Two sides of a claim that do not agree, and what is known about them."""

    what: str  # in words, "own gradients of 2 ranks"
    expected: Any
    got: Any
    about: str = "values"  # or "calls", "events", "bytes", "dtype", "memory", "kept"
    world: int = 1
    by_rank: bool = False  # both sides are lists with one entry a rank
    micro_batches: int = 1  # that were to be added up
    alone: Any = None  # what the ranks would have if nobody had exchanged anything
    before: Any = None  # what stood there before, if it had to change
    lookalikes: Mapping[str, Any] = field(default_factory=dict)  # a cause in words, and what it leads to

    def __str__(self) -> str:
        return f"{self.what}: expected {shown(self.expected)}, got {shown(self.got)}"


@dataclass(frozen=True)
class Evidence:
    """Which task is wrong, the line that first shows it, and the difference in words."""

    task: str
    place: tuple[Path, int] | None
    words: str


class WrongError(AssertionError):
    """A claim about a task that does not hold."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(str(facts))
        self.facts = facts


def same(what: str, got: Any, expected: Any, near: float = 0.0, **known: Any) -> None:
    """Claim that both are the same, up to `near` for each number. `known` are further fields of `Facts`."""
    got, expected = plain(got), plain(expected)
    if not alike(got, expected, near):
        known = {name: plain(value) for name, value in known.items()}
        raise WrongError(Facts(what, expected, got, **known))


def plain(value: Any) -> Any:
    """Tensors and tuples as lists; all else as it is."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(each) for each in value]
    return value


def alike(a: Any, b: Any, near: float = 0.0) -> bool:
    """Whether two plain values are the same, with numbers up to `near` apart."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(alike(x, y, near) for x, y in zip(a, b, strict=True))
    if is_number(a) and is_number(b):
        return bool(a == b) or abs(a - b) <= near
    return type(a) is type(b) and bool(a == b)


def is_number(value: Any) -> bool:
    """An int or a float, but not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def numbers(value: Any) -> list[float] | None:
    """All numbers in a nest of lists, in order; None if there is anything else."""
    if is_number(value):
        return [value]
    if not isinstance(value, list):
        return None
    found: list[float] = []
    for each in value:
        inner = numbers(each)
        if inner is None:
            return None
        found += inner
    return found


def shown(value: Any) -> str:
    """A value in a message: floats without the digits of rounding, long lists with their beginning."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        ends = ", ..." if len(value) > 20 else ""
        return f"[{', '.join(shown(each) for each in value[:20])}{ends}]"
    return "nothing" if value is None else str(value)
