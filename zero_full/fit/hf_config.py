"""Read a model's config.json: the sizes of its family, and a model of that shape on the meta device."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_full.errors import FitError
from zero_full.fit.grammar import (
    Expression,
    Family,
    Node,
    RemainderError,
    Requirement,
    Size,
    Sizes,
    Weight,
    families,
    holds,
)
from zero_full.formatting import shown

MOST = 10**9  # largest value of any size
MOST_LAYERS = 1000
MOST_NUMEL = 10**12  # elements of a parameter


@dataclass(frozen=True)
class Shape:
    """The family and sizes of a model, which determine its memory."""

    family: Family
    sizes: Sizes
    notes: tuple[str, ...]  # defaults of transformers that were used for missing keys
    config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)  # the whole file

    def model(self) -> nn.Module:
        """Make transformers' modules and parameters on the meta device. They cannot be called."""
        made: list[nn.Parameter] = []

        def parameter(weight: Weight) -> nn.Parameter:
            """Make a parameter, or return the model's first one if they are tied."""
            if weight.same is not None and holds(weight.same, self.sizes):
                return made[0]
            sizes = [size.value(self.sizes) for size in weight.shape]
            if (numel := math.prod(sizes)) > MOST_NUMEL:
                first = next(name for name in weight.shape[0].terms[0][1] if isinstance(name, str))
                key = key_of(self.family, first)
                raise FitError(
                    f"{key}: a parameter of {numel:,} elements exceeds the limit of {MOST_NUMEL:,}"
                )
            made.append(nn.Parameter(torch.empty(sizes, device="meta")))
            return made[-1]

        def module(node: Node) -> nn.Module:
            found = nn.ModuleList() if node.is_list else DescribedModule()
            for weight in node.weights:
                if holds(weight.when, self.sizes):
                    found.register_parameter(weight.name, parameter(weight))
            counts = [1 if child.count is None else child.count.value(self.sizes) for child in node.inside]
            each = [child for child, count in zip(node.inside, counts, strict=True) for _ in range(count)]
            for place, child in enumerate(each):
                found.add_module(child.name or str(place), module(child))
            return found

        return module(Node("", None, (), self.family.modules))


def read(path: str | Path) -> Shape:
    """Read the shape of a model from the file config.json."""
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise FitError(f"{path}: {error.strerror}. Pass the path of a model's config.json") from None
    except ValueError as error:
        raise FitError(f"{path} is not JSON: {error}") from None
    return shape_of(config)


def shape_of(config: Any) -> Shape:
    """Read the shape from the contents of a config.json. A missing required key raises FitError."""
    if not isinstance(config, Mapping):
        raise FitError(f"config.json must be a JSON object, not {shown(config)}")
    family = _family(config)
    sizes: dict[str, int] = {}
    notes: list[str] = []
    given = config.get("architectures")
    if isinstance(given, list) and given and family.model not in given:
        notes.append(f"architectures: {shown(given[0])}; counted as {family.model}")
    for size in family.sizes:
        if size.name not in sizes and holds(size.when, sizes):
            sizes[size.name], note = _value(size, config, family, sizes)
            notes += note
    for requirement in family.requirements:
        if holds(requirement.when, sizes):
            _check(requirement, config, family, sizes)
    if sizes["layers"] > MOST_LAYERS:
        raise FitError(
            f"{key_of(family, 'layers')}: {sizes['layers']:,} layers exceed the limit of {MOST_LAYERS:,}"
        )
    return Shape(family, sizes, tuple(notes), config)


def _family(config: Mapping[str, Any]) -> Family:
    known, name = families(), config.get("model_type")
    if name is None:
        raise FitError("model_type is missing: it names the model's family")
    if not isinstance(name, str) or name not in known:
        inner = config.get("text_config")
        inside = inner.get("model_type") if isinstance(inner, Mapping) else None
        is_known = isinstance(inside, str) and inside in known
        more = f". Its text_config is ({inside}): pass that alone" if is_known else ""
        raise FitError(f"model_type: {shown(name)} is not supported, only {', '.join(sorted(known))}{more}")
    return known[name]


def _value(size: Size, config: Mapping[str, Any], family: Family, sizes: Sizes) -> tuple[int, list[str]]:
    """Return a size's value, and notes about a default."""
    given = None if size.key is None else config.get(size.key)
    if given is not None:
        return _given(size, given), []
    if size.default is None:
        raise FitError(f"{size.key} is missing: {family.model_type} requires it")
    value = size.default if isinstance(size.default, bool) else _computed(size.default, family, sizes)
    text = str(value).lower() if isinstance(value, bool) else f"{value:,}"
    return int(value), [f"{size.key}: not given, so {text}"] if size.key else []


def _given(size: Size, given: object) -> int:
    if isinstance(size.default, bool):
        if not isinstance(given, bool):
            raise FitError(f"{size.key}: {shown(given)} is not true or false")
        return int(given)
    if not isinstance(given, int) or isinstance(given, bool) or not size.least <= given <= MOST:
        raise FitError(f"{size.key}: {shown(given)} is not a whole number from {size.least} to {MOST:,}")
    return given


def _computed(expression: Expression, family: Family, sizes: Sizes) -> int:
    try:
        value = expression.value(sizes)
    except RemainderError as remainder:
        dividend, divisor = (key_of(family, name) for name in remainder.args)
        a, b = (sizes[name] for name in remainder.args)
        raise FitError(f"{dividend}: {a:,} is not divisible by {divisor}, {b:,}") from None
    if value < 0:
        first, second = (key_of(family, str(factors[0])) for _, factors, _ in expression.terms[:2])
        raise FitError(f"{second} is larger than {first}")
    return value


def key_of(family: Family, name: str) -> str:
    """Return the config.json key of a size."""
    return next((size.key for size in family.sizes if size.name == name and size.key), name)


def _check(requirement: Requirement, config: Mapping[str, Any], family: Family, sizes: Sizes) -> None:
    given, value = config.get(requirement.key), requirement.value
    if isinstance(value, Expression):
        wanted: object = value.value(sizes)
        fits = given is None or (given == wanted and not isinstance(given, bool))
    elif value is None:
        wanted, fits = "none", not given
    else:
        wanted, fits = str(value).lower(), given is None or given is value
    if not fits:
        found = f"{requirement.key}: {shown(given, json.dumps)}"
        raise FitError(f"{found} is not supported for {family.model_type}, only {wanted}")


class DescribedModule(nn.Module):
    """A module with known parameters and unknown computation."""

    def forward(self) -> None:
        """Do nothing. It is defined because a module with a forward counts as called."""
