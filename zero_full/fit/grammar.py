"""Parser of `families.txt`, which describes the config.json keys and the modules of each model family.

`[llama] LlamaForCausalLM` begins a family: the `model_type` of config.json, and transformers' class. The next
lines define named sizes:

    width = hidden_size               a required key of config.json
    kv = num_key_value_heads or heads     a key with transformers' default for a missing or null value
    bias = attention_bias or no       a boolean key
    sparse := layers-dense            a computed size
    require head_norm is none         the only supported value; none is missing, null, false, 0 or empty
    saved 16 layer: 16*width+8*inner  bytes of activations per token, at 16 bits: [Note: activations]

`if bias` and `unless bias` at the end of a line are conditions. Of several lines with one name, the first one
whose condition holds is used. After an empty line come the modules, nested by indentation:

    lm_head: vocabulary width same if tied; vocabulary

is a module with a matrix `weight`, which the model's first parameter shares if `tied`, and a vector `bias`.
`.name: ...` is another parameter of the module itself. `*layers` is a list of that many modules, which is
never called itself. Sizes are sums of products, and `/` must leave no remainder.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

FILE = Path(__file__).with_name("families.txt")
Sizes = Mapping[str, int]  # by name; booleans are 1 and 0
Term = tuple[int, tuple[str | int, ...], tuple[str | int, ...]]  # 1 or -1, factors, divisors
WHEN = re.compile(r"(.*?)(?: (if|unless) (\w+))?")


class RemainderError(ValueError):
    """Raised for a division with a remainder, with the names of dividend and divisor."""


@dataclass(frozen=True)
class Expression:
    """A sum of products."""

    terms: tuple[Term, ...]

    def value(self, sizes: Sizes) -> int:
        """Evaluate with these sizes. Raises RemainderError."""
        total = 0
        for sign, factors, divisors in self.terms:
            product, divisor = (
                prod(name if isinstance(name, int) else sizes[name] for name in names)
                for names in (factors, divisors)
            )
            if product % divisor:
                raise RemainderError(factors[0], divisors[0])
            total += sign * product // divisor
        return total


@dataclass(frozen=True)
class Size:
    """A named size, and the origin of its value."""

    name: str
    key: str | None  # in config.json; None: computed
    default: Expression | bool | None  # None: the key is required
    least: int  # minimum
    when: str  # condition: "bias", "!bias", or "" for always


@dataclass(frozen=True)
class Requirement:
    """The only supported value of a key; None: missing or empty."""

    key: str
    value: Expression | bool | None
    when: str


@dataclass(frozen=True)
class Weight:
    """A parameter of a module."""

    name: str
    shape: tuple[Expression, ...]
    same: str | None  # condition under which it is the model's first parameter; None: never
    when: str


@dataclass(frozen=True)
class Node:
    """A module, or `count` equal modules in a list."""

    name: str
    count: Expression | None
    weights: tuple[Weight, ...]
    inside: tuple["Node", ...]

    @property
    def is_list(self) -> bool:
        """Whether this is a module list, which is never called itself."""
        return any(node.count is not None for node in self.inside)


@dataclass(frozen=True)
class Family:
    """The description of one `model_type`."""

    model_type: str
    model: str  # class in transformers
    sizes: tuple[Size, ...]
    requirements: tuple[Requirement, ...]
    saved: Mapping[str, Expression]  # by "16 layer", "16 outside", "32 layer", "32 outside"
    modules: tuple[Node, ...]


def holds(when: str, sizes: Sizes) -> bool:
    """Return whether a condition holds."""
    return not when or bool(sizes[when.lstrip("!")]) != when.startswith("!")


@cache
def families() -> dict[str, Family]:
    """Return all supported families, by `model_type`."""
    text = "\n".join(line for line in FILE.read_text().splitlines() if not line.startswith("#"))
    made = [_family(part) for part in re.split(r"^\[", text, flags=re.MULTILINE)[1:]]
    return {family.model_type: family for family in made}


def _family(text: str) -> Family:
    head, _, rest = text.partition("\n")
    model_type, _, model = head.partition("] ")
    keys, _, modules = rest.strip().partition("\n\n")
    lines = keys.splitlines()

    def of(first: str) -> list[str]:
        return [line.removeprefix(first) for line in lines if line.startswith(first)]

    saved = dict(line.split(": ") for line in of("saved "))
    return Family(
        model_type,
        model,
        tuple(_size(line) for line in lines if not line.startswith(("require ", "saved "))),
        tuple(map(_requirement, of("require "))),
        {name: _expression(text) for name, text in saved.items()},
        tuple(_nodes([line for line in modules.splitlines() if line.strip()])),
    )


def _conditional(line: str) -> tuple[str, str]:
    """Split a line into its text and its condition."""
    found = WHEN.fullmatch(line)
    assert found is not None
    return found[1], {"if": "", "unless": "!", None: ""}[found[2]] + (found[3] or "")


def _expression(text: str) -> Expression:
    terms = []
    for sign, term in re.findall(r"([+-]?)([^+-]+)", text):
        factors, _, divisors = term.partition("/")
        terms.append((-1 if sign == "-" else 1, _names(factors), _names(divisors)))
    return Expression(tuple(terms))


def _names(text: str) -> tuple[str | int, ...]:
    return tuple(int(name) if name.isdigit() else name for name in filter(None, text.split("*")))


def _value(text: str) -> Expression | bool | None:
    fixed = {"yes": True, "no": False, "none": None}
    return fixed[text] if text in fixed else _expression(text)


def _size(line: str) -> Size:
    line, when = _conditional(line)
    name, computed, value = re.split(r" (:?)= ", line)
    if computed:
        return Size(name, None, _value(value), 0, when)
    value, _, least = value.partition(" from ")
    key, _, default = value.partition(" or ")
    return Size(name, key, _value(default or "none"), int(least or 1), when)


def _requirement(line: str) -> Requirement:
    line, when = _conditional(line)
    key, _, value = line.partition(" is ")
    return Requirement(key, _value(value), when)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _nodes(lines: Sequence[str]) -> Iterator[Node]:
    """Yield the modules at the first line's indentation, each with its children."""
    rest = list(lines)
    while rest:
        head, depth = rest[0], _indent(rest[0])
        end = next((place for place in range(1, len(rest)) if _indent(rest[place]) <= depth), len(rest))
        inside, rest = rest[1:end], rest[end:]
        name, _, weights = head.strip().partition(":")
        least = min(map(_indent, inside), default=0)
        own = [place for place, line in enumerate(inside) if line[least:].startswith(".")]
        nodes = tuple(_nodes([line for place, line in enumerate(inside) if place not in own]))
        held = [_weight(*inside[place].strip()[1:].split(": ")) for place in own]
        held += map(_weight, ("weight", "bias"), filter(None, weights.split(";")))
        if name.startswith("*"):
            yield Node("", _expression(name[1:]), tuple(held), nodes)
        else:
            yield Node(name, None, tuple(held), nodes)


def _weight(name: str, text: str) -> Weight:
    shape, when = _conditional(text.strip())
    sizes = shape.split()
    same = None
    if sizes[-1] == "same":
        same, when = when, ""
        sizes.pop()
    return Weight(name, tuple(map(_expression, sizes)), same, when)
