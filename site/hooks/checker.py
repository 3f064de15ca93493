"""What the page that checks a configuration knows: the schema, the remarks and the rules, as JavaScript.

Nothing is written twice: values are judged by what `zero_full/config/schema.py` says of their types, rules
about several keys are translated (rules_in_js.py), and the page's own part is what `resolve` does with them.
"""

import json
from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from places import SiteError
from pydantic import BeforeValidator
from rules_in_js import translated

from zero_full.config import json_parser, messages, remarks, values
from zero_full.config.auto import FILLERS
from zero_full.config.schema import Config, Strict
from zero_full.config.verdicts import IN_A_RUN, IN_TORCH, NOT_READ
from zero_full.formatting import WIDE

FILE = "assets/js/config_data.js"
CHANGES = {  # what config_check.js does to a value before it is judged, by the same names
    *(
        values.zero_or_one,
        values.lower,
        values.capital,
        values.auto_is_none,
        values.infinity_is_none,
        values.null_is_empty,
    ),
    *(values.short_dtype, values.names_or_auto),
}
WHENS = {remarks.is_on, remarks.more_than_one, remarks.names_some}  # and these are in it, too
PLAIN = {bool: "bool", str: "str", dict: "dict", list: "list"}


def data() -> str:
    """Two constants: what is known of each key, and the rules about several."""
    known = {
        "schema": _model(Config),
        "keys": list(messages.known_keys()),
        "kinds": messages.KINDS,
        "dtypes": values.DTYPES,
        "fillers": FILLERS,
        "comment": messages.COMMENT,
        "notRead": messages.NOT_READ,
        "unread": NOT_READ,
        "inTorch": IN_TORCH,
        "inARun": IN_A_RUN,
        "deepest": json_parser.DEEPEST,
        "digits": json_parser.DIGITS,
        "otherWords": json_parser.OTHER_WORDS,
        "wide": WIDE,
    }
    return f"const zeroConfig = {in_js(known)}\nconst zeroConfigRules = {translated()}\n"


def in_js(value: Any) -> str:
    """A literal. Whole numbers are BigInt, so that they cannot be taken for fractions."""
    if isinstance(value, bool) or value is None or isinstance(value, str | float):
        return json.dumps(value)
    if isinstance(value, int):
        return f"{value}n"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {in_js(each)}" for key, each in value.items()) + "}"
    return "[" + ", ".join(map(in_js, value)) + "]"


def _model(model: type[Strict]) -> dict[str, Any]:
    return {"fields": {name: _field(name, field) for name, field in model.model_fields.items()}}


def _field(name: str, field: Any) -> dict[str, Any]:
    known: dict[str, Any] = {"steps": _steps(name, field.annotation, field.metadata)}
    inner = messages.inner_model(field.annotation)
    if inner is not None:
        known["model"] = _model(inner)
    if field.is_required():
        known["required"] = True
    elif not isinstance(field.default, Strict):
        known["default"] = field.default
    for each in field.metadata:
        if isinstance(each, remarks.Remark):
            known["remark"] = _remark(each)
    return known


def _remark(remark: remarks.Remark) -> dict[str, Any]:
    if remark.when is not None and remark.when not in WHENS:
        raise SiteError(f"checker.py: config_check.js does not know {remark.when} of a remark in the schema")
    return {
        **{"text": remark.text, "remedy": remark.remedy, "refuses": remark.refuses},
        **{"switches": [switch.split(".") for switch in remark.switches]},
        **{"when": remark.when and remark.when.__name__, "belowStage": remark.below_stage},
    }


def _steps(name: str, annotation: Any, metadata: Sequence[Any] = ()) -> list[list[Any]]:
    """What pydantic does to a value of this type, one after the other."""
    before = [each.func for each in metadata if isinstance(each, BeforeValidator)]
    return [*map(_before, reversed(before)), *_of_type(name, annotation, before)]


def _before(check: Any) -> list[Any]:
    if isinstance(check, values.WholeNumber):
        return ["whole", check.least, check.most, check.rough, check.exact]
    if isinstance(check, values.Numeric):
        return ["number", check.least, check.most, check.or_zero, check.rough, check.exact]
    if check in CHANGES:
        return [check.__name__]
    raise SiteError(f"checker.py: config_check.js does not know {check} of a key in the schema")


def _of_type(name: str, annotation: Any, before: Sequence[Any]) -> list[list[Any]]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _steps(name, arguments[0], arguments[1:])
    if origin in (Union, UnionType) and NoneType in arguments:
        others = [each for each in arguments if each is not NoneType]
        return [["null"], *_steps(name, others[0])] if len(others) == 1 else _unknown(name, annotation)
    if values.names_or_auto in before or annotation in (int, float):  # judged by what comes before
        return [] if before else _unknown(name, annotation)
    if origin is Literal:
        shown = [*map(repr, arguments)]
        return [["literal", list(arguments), f"one of {', '.join(shown[:-1])} or {shown[-1]}"]]
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        first = next(iter(annotation.model_fields))
        return [["model", f'an object such as {{"{first}": ...}}']]
    kind = PLAIN.get(origin or annotation)
    return [[kind]] if kind and arguments in ((), (str,), (str, Any)) else _unknown(name, annotation)


def _unknown(name: str, annotation: Any) -> list[list[Any]]:
    raise SiteError(f"checker.py does not know how a value of {annotation} is checked, which {name} has")
