"""Kinds of values: what a key takes, in which spellings, and the words for what is expected instead."""

import math
import sys
from numbers import Integral, Real
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

# What fp32 holds without losing digits, because that is what numbers of a configuration become.
FINEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
MOST = sys.maxsize


def expected(what: str) -> PydanticCustomError:
    """The error for a value that is not what is expected."""
    return PydanticCustomError("expected", "{what}", {"what": what})


def whole_number(least: int, most: int = MOST) -> BeforeValidator:
    """Whole numbers from `least` to `most`; 5e8 is one, true is not."""

    def check(value: object) -> int:
        is_whole = isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not is_whole or value < least:  # type: ignore[operator]
            raise expected(f"a whole number of at least {least}")
        if value > most:  # type: ignore[operator]
            raise expected(f"a whole number of at most {most}")
        return int(value)  # type: ignore[call-overload, no-any-return]

    return BeforeValidator(check)


def number(least: float, most: float = LARGEST, or_zero: bool = False) -> BeforeValidator:
    """Numbers from `least` to `most`, and perhaps 0."""
    rough = "a number of 0 or more" if or_zero else "a number above 0"
    exact = f"a number from {least:g} to {most:g}{', or 0' if or_zero else ''}"

    def check(value: object) -> float:
        is_number = isinstance(value, Real) and value == value  # not NaN
        if isinstance(value, bool) or not is_number or value < 0 or (value == 0 and not or_zero):  # type: ignore[operator]
            raise expected(rough)
        if value != 0 and not least <= value <= most:  # type: ignore[operator]
            raise expected(exact)
        return float(value)  # type: ignore[arg-type]

    return BeforeValidator(check)


def _zero_or_one(value: object) -> object:
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


def _nothing_is_empty(value: object) -> object:
    return {} if value is None or value is False else value


def _short_dtype(value: object) -> object:
    names = {"half": "fp16", "float16": "fp16", "bfloat16": "bf16", "float": "fp32", "float32": "fp32"}
    if not isinstance(value, str):
        return value
    bare = value.lower().removeprefix("torch.")
    return names.get(bare, bare)


Flag = Annotated[bool, BeforeValidator(_zero_or_one)]
Count = Annotated[int, whole_number(1)]
Size = Annotated[int, whole_number(0)]
BatchSize = Annotated[int, whole_number(1, 2**31 - 1)]
Amount = Annotated[float, number(FINEST, or_zero=True)]
Share = Annotated[float, number(FINEST, 1.0, or_zero=True)]
Seconds = Annotated[float, number(1e-3, 1e6)]
Divisor = Annotated[float, number(1e-6, 1e6)]
Dtype = Annotated[Literal["fp16", "bf16", "fp32"], BeforeValidator(_short_dtype)]
Section = dict[str, Any]  # read by nobody here, so only its switch is looked at, never the keys inside
Given = Annotated[Section, BeforeValidator(_nothing_is_empty)]  # null and false give nothing

# [Note: loss scales] A loss of about 1 times the scale, and 1 / scale, must both be numbers that fp32 holds.
SCALE_POWERS = 126
Scale = Annotated[float, number(2.0**-SCALE_POWERS, 2.0**SCALE_POWERS, or_zero=True)]
ScalePower = Annotated[int, whole_number(0, SCALE_POWERS)]
SmallestScale = Annotated[int, whole_number(1, 2**SCALE_POWERS)]
