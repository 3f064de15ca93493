"""From a file to objects: JSON, in which people also write comments and a comma after the last item.

DeepSpeed reads such files, too. What is not JSON is blanked out, not cut out, so that the parser's lines and
columns stay those of the file.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .schema import ConfigError

DEEPEST = 32  # levels; DeepSpeed's deepest key is on the seventh
STRING = r'"(?:[^"\\\n]|\\[^\n])*"'
COMMENT = re.compile(rf"{STRING}|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
COMMA = re.compile(rf"{STRING}|,(?=\s*[\]}}])")
NOT_INK = re.compile(r"[^\n]")


class _Object(dict[str, Any]):
    """A JSON object that remembers which of its keys were written more than once."""

    repeated: tuple[str, ...] = ()


def _as_object(pairs: list[tuple[str, Any]]) -> _Object:
    made = _Object(pairs)
    made.repeated = tuple(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
    return made


def repeated(given: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """A line for each key that a file has twice in one object."""
    if isinstance(given, _Object):
        yield from (f"{prefix}{key}: written twice in one object; keep one" for key in given.repeated)
    for key, value in given.items():
        if isinstance(value, Mapping):
            yield from repeated(value, f"{prefix}{key}.")


def read(path: Path) -> Any:
    """The file's content as objects; ConfigError with line and column if it is not JSON."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}; give a path, a dict or a Config") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"the configuration file {path} cannot be read as text: {error}") from None
    try:
        return json.loads(plain(text), object_pairs_hook=_as_object)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}, line {error.lineno}, column {error.colno}: this is not JSON: {error.msg} "
            "(JSON writes true, false and null, and names in double quotes)"
        ) from None
    except RecursionError:
        raise ConfigError(f"{path}: objects and lists are nested deeper than in any configuration") from None
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"{path}: {error}") from None


def plain(text: str) -> str:
    """The same text with spaces in the place of comments and of commas after the last item."""
    bare = COMMENT.sub(lambda found: found[0] if found[0][0] == '"' else NOT_INK.sub(" ", found[0]), text)

    def without(found: re.Match[str]) -> str:
        follows_an_item = bare[: found.start()].rstrip()[-1:] not in ("", "[", "{", ",", ":")
        return " " if found[0] == "," and follows_an_item else found[0]

    return COMMA.sub(without, bare)


def refuse_nests(given: Mapping[Any, Any]) -> None:
    """ConfigError if objects and lists are nested too deep, or without end."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), given)]
    while waiting:
        path, value = waiting.pop()
        if len(path) > DEEPEST:
            raise ConfigError(f"{'.'.join(path[:4])}: nested more than {DEEPEST} levels deep, no key is")
        if isinstance(value, list | tuple):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            waiting += [((*path, str(name)), each) for name, each in value.items()]
