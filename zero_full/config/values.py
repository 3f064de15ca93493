"""Kinds of values: what a key takes, in which spellings, and the words for what is expected instead."""

import math
import sys
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

# What fp32 holds without losing digits, because that is what numbers of a configuration become.
FINEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
MOST = sys.maxsize
DTYPES = {"half": "fp16", "float16": "fp16", "bfloat16": "bf16", "float": "fp32", "float32": "fp32"}


def expected(what: str) -> PydanticCustomError:
    """The error for a value that is not what is expected."""
    return PydanticCustomError("expected", "{what}", {"what": what})


@dataclass(frozen=True)
class WholeNumber:
    """WholeNumber numbers from `least` to `most`; 5e8 is one, true is not."""

    least: int
    most: int = MOST

    def __call__(self, value: object) -> int:
        """The number as an int."""
        is_whole = isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not is_whole or value < self.least:  # type: ignore[operator]
            raise expected(self.rough)
        if value > self.most:  # type: ignore[operator]
            raise expected(self.exact)
        return int(value)  # type: ignore[call-overload, no-any-return]

    @property
    def rough(self) -> str:
        """What is expected instead of something that is no such number at all."""
        return f"a whole number of at least {self.least}"

    @property
    def exact(self) -> str:
        """What is expected instead of one that is too large."""
        return f"a whole number of at most {self.most}"


@dataclass(frozen=True)
class Numeric:
    """Numbers from `least` to `most`, and perhaps 0."""

    least: float
    most: float = LARGEST
    or_zero: bool = False

    def __call__(self, value: object) -> float:
        """The number as a float."""
        is_number = isinstance(value, Real) and value == value  # not NaN
        if isinstance(value, bool) or not is_number or value < 0 or (value == 0 and not self.or_zero):  # type: ignore[operator]
            raise expected(self.rough)
        if value != 0 and not self.least <= value <= self.most:  # type: ignore[operator]
            raise expected(self.exact)
        return float(value)  # type: ignore[arg-type]

    @property
    def rough(self) -> str:
        """What is expected instead of something that is no such number at all."""
        return "a number of 0 or more" if self.or_zero else "a number above 0"

    @property
    def exact(self) -> str:
        """What is expected instead of one beyond the bounds."""
        return f"a number from {self.least:g} to {self.most:g}{', or 0' if self.or_zero else ''}"


def whole_number(least: int, most: int = MOST) -> BeforeValidator:
    """For annotations: `WholeNumber`."""
    return BeforeValidator(WholeNumber(least, most))


def number(least: float, most: float = LARGEST, or_zero: bool = False) -> BeforeValidator:
    """For annotations: `Numeric`."""
    return BeforeValidator(Numeric(least, most, or_zero))


def zero_or_one(value: object) -> object:
    """0 and 1 as booleans."""
    return bool(value) if type(value) is int and value in (0, 1) else value


def lower(value: object) -> object:
    """The word in lower case, so that any case is accepted."""
    return value.lower() if isinstance(value, str) else value


def capital(value: object) -> object:
    """The word with a capital, as DeepSpeed writes it, so that any case is accepted."""
    return value.capitalize() if isinstance(value, str) else value


def never_is_none(value: object) -> object:
    """None instead of infinity, which some launchers write for 'never print'."""
    return None if isinstance(value, float) and value == math.inf else value


def nothing_is_empty(value: object) -> object:
    """An empty section instead of null or false."""
    return {} if value is None or value is False else value


def names_or_auto(value: object) -> object:
    """A list of names, or "auto"; as one kind of value, so that a mistake is told once."""
    is_list = isinstance(value, list) and all(isinstance(name, str) for name in value)
    if not is_list and not (isinstance(value, str) and value == "auto"):
        raise expected('a list of names, or "auto"')
    return value


def short_dtype(value: object) -> object:
    """A precision by its short name."""
    if not isinstance(value, str):
        return value
    bare = value.lower().removeprefix("torch.")
    return DTYPES.get(bare, bare)


Flag = Annotated[bool, BeforeValidator(zero_or_one)]
Count = Annotated[int, whole_number(1)]
Size = Annotated[int, whole_number(0)]
BatchSize = Annotated[int, whole_number(1, 2**31 - 1)]
Amount = Annotated[float, number(FINEST, or_zero=True)]
Share = Annotated[float, number(FINEST, 1.0, or_zero=True)]
Seconds = Annotated[float, number(1e-3, 1e6)]
Divisor = Annotated[float, number(1e-6, 1e6)]
Dtype = Annotated[Literal["fp16", "bf16", "fp32"], BeforeValidator(short_dtype)]
Section = dict[str, Any]  # read by nobody here, so only its switch is looked at, never the keys inside
Given = Annotated[Section, BeforeValidator(nothing_is_empty)]  # null and false give nothing

# [Note: loss scales] A loss of about 1 times the scale, and 1 / scale, must both be numbers that fp32 holds.
SCALE_POWERS = 126
Scale = Annotated[float, number(2.0**-SCALE_POWERS, 2.0**SCALE_POWERS, or_zero=True)]
ScalePower = Annotated[int, whole_number(0, SCALE_POWERS)]
SmallestScale = Annotated[int, whole_number(1, 2**SCALE_POWERS)]
