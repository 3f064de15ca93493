"""Messages about a configuration: errors and warnings by key, and the table of its values."""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from pydantic_core import ErrorDetails

from zero_full import formatting
from zero_full.config.auto import FILLERS, is_auto
from zero_full.config.json_parser import Route
from zero_full.config.remarks import Remark
from zero_full.config.schema import Config, Strict

Origin = Literal["user", "default", "derived"]
# "unfilled": the value is "auto"; "assumed": the key is missing.
Kind = Literal["refused", "unfilled", "no effect", "assumed"]
ERRORS = ("refused", "unfilled")  # kinds that `resolve` raises on

WIDE = 80  # characters per line
KINDS = {  # pydantic's error type -> expected value, in words
    "bool_type": "true or false",
    "string_type": "a string",
    "dict_type": "an object",
    "list_type": "a list",
    "invalid_key": "a key that is a string",
}
COMMENT = "names that begin with _ are comments"
NOT_READ = {  # keys of public files that DeepSpeed does not read either
    "cuda_aware": "torch.distributed detects what its MPI can send",
    "cuda_visible_devices": "set the environment variable CUDA_VISIBLE_DEVICES before the start",
}


@dataclass(frozen=True)
class Notice:
    """An error or warning about a key, under the name that the user wrote."""

    path: Route
    kind: Kind
    why: str
    remedy: str = ""
    value: str = ""  # the value as JSON, if the message should include it

    @property
    def message(self) -> str:
        """The message without the key."""
        unsupported = "not supported: " if self.value and self.kind == "refused" else ""
        return f"{unsupported}{self.why}" if self.why else unsupported.removesuffix(": ")

    @property
    def line(self) -> str:
        """The message as one sentence with the key."""
        start = dotted(self.path)
        if self.kind == "assumed":
            start = f"{start} is not in the configuration"
        elif self.value:
            start += f" = {self.value} {'is not supported' if self.kind == 'refused' else 'has no effect'}"
        return f"{start}: {'; '.join(filter(None, (self.why, self.remedy)))}"


@dataclass(frozen=True)
class Entry:
    """One key of a configuration that is no section."""

    key: str  # dotted, as in "zero_optimization.stage"
    value: Any
    default: Any
    is_set: bool  # by the user
    remark: Remark | None


def entries(config: Strict, prefix: str = "") -> Iterator[Entry]:
    """Yield every key of the configuration in the order of the schema."""
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, Strict):
            yield from entries(value, f"{prefix}{name}.")
        else:
            remark = next((item for item in field.metadata if isinstance(item, Remark)), None)
            yield Entry(prefix + name, value, field.default, name in config.model_fields_set, remark)


def inner_model(annotation: Any) -> type[Strict] | None:
    """Return the pydantic model in a field's type (X for `X | None`), or None."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Strict):
            return kind
    return None


def known_keys(model: type[Strict] = Config, prefix: str = "") -> Iterator[str]:
    """Yield the dotted name of every known key, including sections."""
    for name, field in model.model_fields.items():
        yield prefix + name
        inner = inner_model(field.annotation)
        if inner is not None:
            yield from known_keys(inner, f"{prefix}{name}.")


def shown(value: object) -> str:
    """Return a value as JSON, cut to fit into a line."""
    return formatting.shown(value, partial(json.dumps, default=repr))


def dotted(path: Route) -> str:
    """Return a path with dots: `("fp16", "enabled")` as "fp16.enabled"."""
    return ".".join(map(str, path))


def _model_at(path: Route) -> type[Strict] | None:
    model: type[Strict] | None = Config
    for name in path:
        field = model.model_fields.get(str(name)) if model else None
        model = inner_model(field.annotation) if field else None
    return model


def _unknown(path: Route) -> tuple[str, str]:
    """Return (problem, remedy) for a key that the schema does not have at this place."""
    name = str(path[-1])
    model = _model_at(path[:-1]) or Config
    here = list(model.model_fields)
    elsewhere = [key for key in known_keys() if key.rpartition(".")[2] == name]
    near = difflib.get_close_matches(name, here, n=1)
    if elsewhere:
        places = [key if "." in key else f"{key} at the top level" for key in elsewhere[:3]]
        return "unknown here", f"it belongs at {' or '.join(places)}"
    if near:
        return "unknown key", f"did you mean {dotted((*path[:-1], near[0]))}?"
    if "params" in here:
        return "unknown key", f"put arguments of the {path[0]} into {dotted((*path[:-1], 'params'))}"
    known = f"; the keys here are {', '.join(here)}" if len(here) <= 12 else ""
    return f"unknown key, and no key has a similar name{known}", "remove it"


def _expectation(error: ErrorDetails) -> str:
    if error["type"] == "model_type":
        model = _model_at(error["loc"]) or Config
        return f'an object such as {{"{next(iter(model.model_fields))}": ...}}'
    if error["type"] == "literal_error":
        return f"one of {error['ctx']['expected']}"
    return KINDS.get(error["type"], error["msg"])


def as_written(path: Route, spelled: Mapping[Route, Route]) -> Route:
    """Return the key as the user wrote it. `spelled` maps canonical names to the aliases in use."""
    for ours, theirs in spelled.items():
        if path[: len(ours)] == ours:
            return theirs + path[len(ours) :]
    return path


def explain(error: ErrorDetails, spelled: Mapping[Route, Route]) -> Notice:
    """Make the notice for one of pydantic's errors."""
    path = as_written(error["loc"], spelled)
    if error["type"] == "extra_forbidden":
        name = str(path[-1])
        why = COMMENT if name.startswith("_") else NOT_READ.get(name)
        if why:
            return Notice(path, "no effect", why, value=shown(error["input"]))
        return Notice(path, "refused", *_unknown(error["loc"]))
    if error["type"] == "missing":
        return Notice(path, "refused", "missing", f"set it, or remove {dotted(error['loc'][:-1])}")
    if is_auto(error["input"]):
        return unfilled(path, dotted(error["loc"]), _expectation(error))
    return Notice(path, "refused", f"got {shown(error['input'])}, expected {_expectation(error)}")


def unfilled(path: Route, key: str, expectation: str) -> Notice:
    """Make the notice for "auto". `key` is the canonical name, which says who replaces it, if any."""
    filler, why = FILLERS.get(key), 'neither Hugging Face\'s Trainer nor Accelerate fills in "auto" here'
    if filler:
        why = f'only {filler} can fill in "auto"'
    return Notice(path, "unfilled" if filler else "refused", why, f"set a value: {expectation}")


def _rows(config: Config, origins: Mapping[str, Origin]) -> Iterator[tuple[str, str, str]]:
    """Yield the table's rows: values set by the user or by `resolve`, and defaults that have an effect."""
    named = {key.rpartition(".")[0] for key, origin in origins.items() if origin != "default"}
    for entry in entries(config):
        section, _, name = entry.key.rpartition(".")
        is_off = getattr(getattr(config, section, None), "enabled", True) is False
        is_open = not section or section == "zero_optimization" or section in named
        if is_off and name != "enabled":
            continue
        if isinstance(entry.value, dict) and entry.value:
            for inner, value in entry.value.items():
                yield f"{entry.key}.{inner}", shown(value), origins[f"{entry.key}.{inner}"]
        elif origins[entry.key] != "default" or (is_open and not entry.remark and entry.value is not None):
            yield entry.key, shown(entry.value), origins[entry.key]


def table(config: Config, origins: Mapping[str, Origin], extra_rows: Sequence[tuple[str, str, str]]) -> str:
    """Return keys, values and origins as aligned plain text, with `extra_rows` at the end."""
    rows = [("key", "value", "from"), *_rows(config, origins), *extra_rows]
    wide = [max(len(row[column]) for row in rows) for column in range(2)]
    # A longer value shifts its own line only.
    wide[1] = max(min(wide[1], WIDE - wide[0] - len("  derived  ")), 0)
    return "\n".join(f"{key:<{wide[0]}}  {value:<{wide[1]}}  {origin}" for key, value, origin in rows)
