"""Nests of values: which tensors are in them, and what is copied when some are exchanged."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from zero_full.nested import Leaf, leaves, mapped, tensors_in

ONE, TWO = torch.tensor(1.0), torch.tensor(2.0)
Pair = namedtuple("Pair", ["x", "index"])


@dataclass
class Output:
    x: Any
    cache: Any = None


@dataclass(frozen=True)
class Slotted:
    __slots__ = ("cache", "x")
    x: Any
    cache: Any


@dataclass
class Whole(Leaf):
    x: Any


class Cache:
    """Neither a nest nor a tensor."""

    def __init__(self, held: Any) -> None:
        self.held = held


def doubled(value: Any) -> Any:
    return value * 2 if isinstance(value, Tensor) else value


NESTS = [
    *((ONE, 3), [ONE, None], {"x": ONE, "y": "a"}, Pair(ONE, 0), Output(ONE), Slotted(ONE, None)),
    *(OrderedDict(x=ONE), UserDict(x=ONE), {"deep": [(Output(ONE),)]}),
]


@pytest.mark.parametrize("nest", NESTS, ids=lambda nest: type(nest).__name__)
def test_tensors_are_exchanged_in_a_copy_of_the_same_kind(nest: Any) -> None:
    assert list(tensors_in(nest)) == [ONE]
    made = mapped(doubled, nest)
    assert type(made) is type(nest) and list(tensors_in(made)) == [TWO]
    assert list(tensors_in(nest)) == [ONE]


@pytest.mark.parametrize("nest", [*NESTS, torch.Size([2]), "text", None], ids=lambda n: type(n).__name__)
def test_what_nothing_changes_is_not_copied(nest: Any) -> None:
    assert mapped(lambda leaf: leaf, nest) is nest


def test_only_the_way_to_what_changes_is_copied() -> None:
    kept: list[Any] = [3]
    nest = {"kept": kept, "x": ONE}
    made = mapped(doubled, nest)
    assert made is not nest and made["kept"] is kept


def test_what_torch_returns_by_name_stays_that() -> None:
    found = torch.max(torch.tensor([[1.0, 3.0]]), dim=1)
    made = mapped(doubled, found)
    assert type(made) is type(found) and made.values == 6


def test_a_leaf_is_left_whole() -> None:
    whole = Whole(ONE)
    assert list(leaves([whole])) == [whole]
    assert mapped(doubled, [whole])[0] is whole


def test_a_nest_inside_itself_has_an_end() -> None:
    nest: list[Any] = [ONE]
    nest.append({"again": nest})
    assert list(tensors_in(nest)) == [ONE]
    made = mapped(doubled, nest)
    assert made[0] == TWO and made[1]["again"] is nest


def test_objects_are_looked_into_as_deep_as_is_said() -> None:
    inner = Cache([ONE])
    assert list(tensors_in((inner,))) == []
    assert list(tensors_in((inner,), depth=1)) == [ONE]
    assert list(tensors_in(Cache(inner), depth=1)) == []
    assert list(tensors_in(torch.nn.Linear(1, 1), depth=4)) == []
