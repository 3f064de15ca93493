"""Value types of the schema: accepted values and spellings, and descriptions for error messages."""

import math
import sys
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

# Range of normal fp32 numbers, because values of a configuration become fp32.
FINEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
MOST = sys.maxsize
DTYPES = {"half": "fp16", "float16": "fp16", "bfloat16": "bf16", "float": "fp32", "float32": "fp32"}


def expected(what: str) -> PydanticCustomError:
    """Make the error for a value that is not as expected."""
    return PydanticCustomError("expected", "{what}", {"what": what})


@dataclass(frozen=True)
class WholeNumber:
    """Validator of whole numbers from `least` to `most`. Accepts 5e8, but not true."""

    least: int
    most: int = MOST

    def __call__(self, value: object) -> int:
        """Return the number as an int."""
        is_whole = isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not is_whole or value < self.least:  # type: ignore[operator]
            raise expected(self.rough)
        if value > self.most:  # type: ignore[operator]
            raise expected(self.exact)
        return int(value)  # type: ignore[call-overload, no-any-return]

    @property
    def rough(self) -> str:
        """Description of the expected value, for one of another type or below the minimum."""
        return f"a whole number of at least {self.least}"

    @property
    def exact(self) -> str:
        """Description of the expected value, for one that is too large."""
        return f"a whole number of at most {self.most}"


@dataclass(frozen=True)
class Numeric:
    """Validator of numbers from `least` to `most`, and optionally 0."""

    least: float
    most: float = LARGEST
    or_zero: bool = False

    def __call__(self, value: object) -> float:
        """Return the number as a float."""
        is_number = isinstance(value, Real) and value == value  # not NaN
        if isinstance(value, bool) or not is_number or value < 0 or (value == 0 and not self.or_zero):  # type: ignore[operator]
            raise expected(self.rough)
        if value != 0 and not self.least <= value <= self.most:  # type: ignore[operator]
            raise expected(self.exact)
        return float(value)  # type: ignore[arg-type]

    @property
    def rough(self) -> str:
        """Description of the expected value, for one of another type or sign."""
        return "a number of 0 or more" if self.or_zero else "a number above 0"

    @property
    def exact(self) -> str:
        """Description of the expected value, for one out of bounds."""
        return f"a number from {self.least:g} to {self.most:g}{', or 0' if self.or_zero else ''}"


def whole_number(least: int, most: int = MOST) -> BeforeValidator:
    """Make a `WholeNumber` validator for annotations."""
    return BeforeValidator(WholeNumber(least, most))


def number(least: float, most: float = LARGEST, or_zero: bool = False) -> BeforeValidator:
    """Make a `Numeric` validator for annotations."""
    return BeforeValidator(Numeric(least, most, or_zero))


def zero_or_one(value: object) -> object:
    """Convert 0 and 1 to booleans."""
    return bool(value) if type(value) is int and value in (0, 1) else value


def lower(value: object) -> object:
    """Convert a word to lower case, so that any case is accepted."""
    return value.lower() if isinstance(value, str) else value


def capital(value: object) -> object:
    """Capitalize a word, as DeepSpeed writes it, so that any case is accepted."""
    return value.capitalize() if isinstance(value, str) else value


def infinity_is_none(value: object) -> object:
    """Convert infinity, which some launchers write for 'never print', to None."""
    return None if isinstance(value, float) and value == math.inf else value


def auto_is_none(value: object) -> object:
    """Convert "auto", where a part of the program decides, to None."""
    return None if isinstance(value, str) and value == "auto" else value


def null_is_empty(value: object) -> object:
    """Convert null or false to an empty section."""
    return {} if value is None or value is False else value


def names_or_auto(value: object) -> object:
    """Validate a list of names or "auto". A single validator reports a mistake only once."""
    is_list = isinstance(value, list) and all(isinstance(name, str) for name in value)
    if not is_list and not (isinstance(value, str) and value == "auto"):
        raise expected('a list of names, or "auto"')
    return value


def short_dtype(value: object) -> object:
    """Convert the name of a dtype to its short form."""
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
Section = dict[str, Any]  # a section that is not used: only its switches are validated
Object = Annotated[Section, BeforeValidator(null_is_empty)]  # null and false mean an empty section

# [Note: loss scales] Both scale (times a loss of about 1) and 1 / scale must be in the range of fp32.
SCALE_POWERS = 126
Scale = Annotated[float, number(2.0**-SCALE_POWERS, 2.0**SCALE_POWERS, or_zero=True)]
ScalePower = Annotated[int, whole_number(0, SCALE_POWERS)]
SmallestScale = Annotated[int, whole_number(1, 2**SCALE_POWERS)]
