"""The configuration reference, from the pydantic models that check a configuration.

Types and bounds are what the models answer to a value that cannot be right, so they are what a user is told.
"""

import ast
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from places import SiteError
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from snippets import Defined, find, tree_of

from zero_full.config import resolve
from zero_full.config.messages import explain, inner_model
from zero_full.config.remarks import Remark
from zero_full.config.schema import STAGE3, Config, Strict
from zero_full.errors import ConfigError

TEXTS = Path(__file__).with_name("keys.yml")
SCHEDULES = "zero_full/optim/schedules.py"
PAIRS = {  # what cannot be had together: (configuration, ranks)
    "Two precisions at once": ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, 2),
    "Averages in 16 bits, masters in 32": ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, 2),
    "Groups that do not fit": ({"zero_optimization": {"stage": 2, "mics_shard_size": 3}}, 8),
    "Nodes that do not fit": ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}, 8),
    "Batch sizes that contradict": (
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
        8,
    ),
    "The same key twice, under both names": (
        {"zero_optimization": {"stage": 3, "prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 2}},
        2,
    ),
    "Clipping inside the optimizer": ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, 2),
    "A value left to Hugging Face's Trainer": ({"gradient_clipping": "auto"}, 2),
    "A key with a spelling mistake": ({"zero_optimization": {"stge": 2}}, 2),
}


@dataclass(frozen=True)
class Key:
    """One key that is not divided further."""

    name: str  # without its section
    model: type[Strict]
    field: FieldInfo
    text: str

    @property
    def remark(self) -> Remark | None:
        """What the schema has to say about it."""
        return next((item for item in self.field.metadata if isinstance(item, Remark)), None)


@cache
def _texts() -> dict[str, str]:
    texts: dict[str, str] = yaml.safe_load(TEXTS.read_text())
    return texts


def sections(model: type[Strict] = Config, name: str = "") -> Iterator[tuple[str, type[Strict], list[Key]]]:
    """(dotted name, model, keys) of every section, the top level first."""
    inner = {key: m for key, f in model.model_fields.items() if (m := inner_model(f.annotation))}
    prefix = f"{name}." if name else ""
    plain = [(key, field) for key, field in model.model_fields.items() if key not in inner]
    yield name, model, [Key(key, model, field, _text_of(prefix + key)) for key, field in plain]
    for key, part in inner.items():
        yield from sections(part, prefix + key)


def _text_of(key: str) -> str:
    return _texts().get(key) or _texts().get(f"{key.rpartition('.')[0]}.*", "")


def check_texts() -> None:
    """Every key with an effect has a text, and no other has."""
    wanted = {
        f"{section}.{key.name}".lstrip("."): key
        for section, _, keys in sections()
        for key in keys
        if key.remark in (None, STAGE3)
    }
    silent = sorted(name for name in wanted if not _text_of(name))
    known = {*wanted, *(f"{name.rpartition('.')[0]}.*" for name in wanted)}
    strange = sorted(set(_texts()) - known)
    if silent or strange:
        raise SiteError(
            f"site/hooks/keys.yml: missing {silent or 'nothing'}, not in the schema {strange or 'nothing'}"
        )


def _answer(key: Key, value: object) -> str | None:
    """What the model expects instead of this value; None: it takes it."""
    required = {name: "x" for name, f in key.model.model_fields.items() if f.is_required()}
    try:
        key.model.model_validate({**required, key.name: value})
    except ValidationError as error:
        return explain(error.errors()[0], {}).why.partition(", expected ")[2]
    return None


def expected(key: Key) -> str:
    """The values that a key takes, in the words of its error message."""
    answers = [a for value in (object(), "no such word", 10**6) if (a := _answer(key, value))]
    choice = next((a for a in answers if a.startswith("one of")), None)
    text = (choice or answers[0]).replace("'", '"') if answers else "anything"
    return f"{text}, or null" if _answer(key, None) is None and "object" not in text else text


def _default(key: Key) -> str:
    if key.field.is_required():
        return "required"
    value: Any = key.field.default
    if isinstance(value, list) and value:
        return "<br>".join(f"`{json.dumps(item)}`" for item in value)
    if value == 0 and key.name in (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    ):
        return "solved"
    return _number(value) if isinstance(value, int) and value >= 10**5 else f"`{json.dumps(value)}`"


def _number(value: int) -> str:
    """A large number as people write it."""
    if value >= sys.maxsize:
        return "unlimited"
    digits = str(value).rstrip("0")
    powers = f"`{digits}e{len(str(value)) - len(digits)}`"
    return powers if len(digits) == 1 else f"`{value}`"


def _meaning(key: Key) -> str:
    remark = key.remark
    if remark is None:
        return key.text
    if remark is STAGE3:
        return f"**Stage 3.** {key.text}"
    asked = "true" if remark.when is None else "2"
    switches = " or ".join(f"`{switch}: {asked}`" for switch in remark.switches)
    inside = f"{switches} in it is " if switches else ""
    verdict = f"{inside}refused" if remark.refuses else f"{inside}without effect"
    if not remark.switches and not remark.when and not key.field.is_required():
        verdict += f", unless {_default(key)}" if remark.refuses else ""
    if remark.when is not None and not remark.switches:
        verdict += ", unless it asks for nothing"
    told = "; ".join(filter(None, (remark.text, remark.remedy)))
    told = told.replace("{", "&#123;").replace("}", "&#125;")  # at the end of a cell they would be attributes
    return f"*{verdict[0].upper()}{verdict[1:]}:* {told}"


def _table(section: str, keys: list[Key]) -> list[str]:
    """A row has the key, which is a link to itself, and what a small screen shows below it."""
    lines = [
        '<div class="keys" markdown="1">',
        "",
        "| key | what it does | values | default |",
        "|---|---|---|---|",
    ]
    for key in keys:
        name = f"{section}.{key.name}".lstrip(".")
        cells = [f"[`{key.name}`](#{name}){{ #{name} }}", _meaning(key), expected(key), _default(key)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*lines, "", "</div>", ""]


def _folded(summary: str, table: list[str]) -> list[str]:
    return [
        '<details class="quote" markdown="1">',
        f"<summary>{summary}</summary>",
        "",
        *table,
        "</details>",
        "",
    ]


def keys_by_section(_: str, page: str) -> str:
    """Every key of every section; those that nobody can use, or need not, are folded away."""
    check_texts()
    lines: list[str] = []
    for name, model, keys in sections():
        lines += ['<div class="key-section" markdown="1">', ""]
        lines += [f"\n## {f'`{name}`' if name else 'Top level'} {{ #{name or 'top-level'} }}\n"]
        lines += [(model.__doc__ or "").strip().replace("`resolve`", "`initialize`"), ""]
        honoured = [key for key in keys if key.remark in (None, STAGE3)]
        refused = [key for key in keys if key.remark and key.remark.refuses]
        idle = [key for key in keys if key not in honoured and key not in refused]
        lines += _table(name, honoured) if honoured else []
        lines += _folded(f"Refused: {len(refused)}", _table(name, refused)) if refused else []
        lines += _folded(f"Accepted without effect: {len(idle)}", _table(name, idle)) if idle else []
        lines += ["</div>", ""]
    return "\n".join(lines)


def refused_together(_: str, page: str) -> str:
    """Examples, each with the message that a user would read."""
    lines: list[str] = []
    for title, (given, ranks) in PAIRS.items():
        config = {**given} if "train_batch_size" in given else {"train_micro_batch_size_per_gpu": 1, **given}
        try:
            resolve(config, ranks)
        except ConfigError as error:
            shown = json.dumps(given, indent=2)
            lines += [
                f"\n**{title}**, on {ranks} ranks:\n",
                f"```json\n{shown}\n```\n",
                f"```text\n{error}\n```\n",
            ]
            continue
        raise SiteError(f"config_page.PAIRS: {title!r} is not refused any more")
    return "\n".join(lines)


def schedules(_: str, page: str) -> str:
    """The schedules of our own: what each does and its arguments."""
    lines: list[str] = []
    for name in _own_schedules():
        node = find(SCHEDULES, name)
        says = (ast.get_docstring(node) or "").replace("\n\n", " ").replace("\n", " ")
        lines += [f"\n**`{name}`**: {says}\n", "| argument | default |", "|---|---|"]
        lines += [f"| `{argument}` | {default} |" for argument, default in _arguments(node)]
    return "\n".join(lines) + "\n"


def _own_schedules() -> list[str]:
    for node in tree_of(SCHEDULES).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "OURS":
            assert isinstance(node.value, ast.DictComp)
            return [
                ast.unparse(name)
                for name in ast.walk(node.value.generators[0].iter)
                if isinstance(name, ast.Name)
            ]
    raise SiteError(f"{SCHEDULES} has no OURS")


def _arguments(node: Defined) -> Iterator[tuple[str, str]]:
    """Names and defaults, from __init__ or from a dataclass's fields."""
    fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
    pairs: list[tuple[str, ast.expr | None]] = [(ast.unparse(f.target), f.value) for f in fields]
    for made in (n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"):
        given = made.args.args
        defaults = [None] * (len(given) - len(made.args.defaults)) + list(made.args.defaults)
        pairs = [(a.arg, d) for a, d in zip(given, defaults, strict=True)]
    for name, default in pairs:
        if name not in ("self", "optimizer", "last_batch_iteration"):
            yield name, f"`{ast.unparse(default)}`" if default else "required"
