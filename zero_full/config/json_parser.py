"""Parse JSON with comments and trailing commas into objects and their positions.

DeepSpeed also reads such files. Python's json reports positions of syntax errors only, and most mistakes in a
configuration are of another kind. `site/docs/assets/js/config_read.js` is the same parser for the website's
configuration checker, and tests compare the two.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_full.errors import ConfigError

DEEPEST = 32  # levels of nesting; DeepSpeed's deepest key is on the seventh
TOO_DEEP = f"nested more than {DEEPEST} levels deep"
DIGITS = 1000  # of a number; Python cannot parse integers of many thousands
SPACE = re.compile(r"(?:[ \t\r\n]|//[^\n]*|#[^\n]*|/\*.*?\*/)*", re.DOTALL)
STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')  # without the closing quote
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
WORD = re.compile(r"[A-Za-z_]+|-Infinity")
WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}
WORDS |= {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": -float("inf")}  # as Python's json
OTHER_WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's spelling -> JSON's
Route = tuple[str | int, ...]


@dataclass(frozen=True, order=True)
class Position:
    """Line and column in a text, both counted from 1."""

    line: int
    column: int

    def __str__(self) -> str:
        return f"line {self.line}, column {self.column}"


class NotJsonError(ValueError):
    """Error for a text that is not JSON, with reason, remedy and position."""

    def __init__(self, why: str, remedy: str, position: Position) -> None:
        super().__init__(f"{why}; {remedy}" if remedy else why)
        self.why, self.remedy, self.position = why, remedy, position


@dataclass
class Parsed:
    """A parsed text: its value, and the positions of keys and list items. () is the beginning."""

    value: Any = None
    positions: dict[Route, Position] = field(default_factory=dict)
    spans: dict[Route, tuple[int, int]] = field(default_factory=dict)  # of the keys' values, as offsets
    repeated: list[tuple[Route, Position]] = field(default_factory=list)  # duplicate keys

    def position_of(self, path: Route) -> Position:
        """Return the position of this path, or of the nearest enclosing one in the text."""
        return self.positions[self.nearest(path)]

    def nearest(self, path: Route) -> Route:
        """Return this path, or the nearest enclosing one in the text."""
        while path not in self.positions:
            path = path[:-1]
        return path


def parse(text: str) -> Parsed:
    """Parse a text. Raises NotJsonError if it is not JSON."""
    parser = _Parser(text)
    parser.parsed.value = parser.value(())
    parser.skip_space()
    if parser.at < len(text):
        raise parser.error("unexpected text after the end")
    return parser.parsed


class _Parser:
    """Recursive-descent parser: one pass over the text."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.parsed = text, 0, Parsed()
        self.skip_space()
        self.parsed.positions[()] = self.position()

    def position(self) -> Position:
        start = self.text.rfind("\n", 0, self.at) + 1
        return Position(self.text.count("\n", 0, self.at) + 1, self.at - start + 1)

    def error(self, why: str, remedy: str = "") -> NotJsonError:
        return NotJsonError(f"this is not JSON: {why}", remedy, self.position())

    def skip_space(self) -> None:
        matched = SPACE.match(self.text, self.at)
        self.at = matched.end() if matched else self.at

    def consume(self, sign: str) -> bool:
        """Consume this sign and the space after it, if it comes next. Returns whether it did."""
        if not self.text.startswith(sign, self.at):
            return False
        self.at += len(sign)
        self.skip_space()
        return True

    def value(self, path: Route) -> Any:
        if len(path) > DEEPEST:
            raise NotJsonError(f"{TOO_DEEP}, which no key needs", "", self.position())
        if self.consume("{"):
            return self.object(path)
        if self.consume("["):
            return self.list(path)
        return self.string() if self.text.startswith('"', self.at) else self.scalar()

    def object(self, path: Route) -> dict[str, Any]:
        result: dict[str, Any] = {}
        while not self.consume("}"):
            here = self.position()
            if not self.text.startswith('"', self.at):
                raise self.error("expected a key in double quotes or a }")
            name = self.string()
            key = (*path, name)
            if name in result:
                self.parsed.repeated.append((key, here))
            self.parsed.positions[key] = here
            self.skip_space()
            if not self.consume(":"):
                raise self.error("expected a : between a key and its value")
            start = self.at
            result[name] = self.value(key)
            self.parsed.spans[key] = (start, self.at)
            self.separator("}")
        return result

    def list(self, path: Route) -> list[Any]:
        result: list[Any] = []
        while not self.consume("]"):
            item = (*path, len(result))
            self.parsed.positions[item] = self.position()
            result.append(self.value(item))
            self.separator("]")
        return result

    def separator(self, end: str) -> None:
        self.skip_space()
        if not self.consume(",") and not self.text.startswith(end, self.at):
            raise self.error(f"expected a comma or a {end}")

    def string(self) -> str:
        start, matched = self.at, STRING.match(self.text, self.at)
        assert matched is not None
        self.at = matched.end()
        if not self.text.startswith('"', self.at):
            raise self.error("a string must end with a double quote on its line, and \\ is written \\\\")
        self.at += 1
        result: str = json.loads(self.text[start : self.at])
        return result

    def scalar(self) -> Any:
        number, word = NUMBER.match(self.text, self.at), WORD.match(self.text, self.at)
        if word is not None and word[0] in WORDS:
            self.at = word.end()
            return WORDS[word[0]]
        if number is None:
            meant = OTHER_WORDS.get(word[0], "") if word else ""
            hint = f"write {meant}" if meant else "put strings in double quotes"
            raise self.error("expected a value", hint)
        if len(number[0]) > DIGITS:
            raise self.error(f"a number has more than {DIGITS} digits")
        self.at = number.end()
        return float(number[0]) if number[1] or number[2] else int(number[0])


def text_of(path: Path) -> str:
    """Return a file's text. Raises ConfigError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}; pass a path, a dict or a Config") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"the configuration file {path} cannot be read as text: {error}") from None


def read(path: Path) -> Parsed:
    """Parse a file. Raises ConfigError with line and column if it is not JSON."""
    try:
        return parse(text_of(path))
    except NotJsonError as error:
        raise ConfigError(f"{path}, {error.position}: {error}") from None


def check_nesting(given: Mapping[Any, Any]) -> None:
    """Raise ConfigError if objects and lists are nested too deep or contain themselves."""
    pending: list[tuple[tuple[str, ...], Any]] = [((), given)]
    while pending:
        path, value = pending.pop()
        if len(path) > DEEPEST:
            raise ConfigError(f"{'.'.join(path[:4])}: {TOO_DEEP}, which no key needs")
        if isinstance(value, list | tuple):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            pending += [((*path, str(name)), each) for name, each in value.items()]
