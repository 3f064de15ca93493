"""What the calculator must know: bytes of every kind, read off `zero_full plan` when the site is built.

The page (assets/js/calculator_plan.js) knows how parameters are laid out in buffers: arithmetic of a few
lines, ported from zero_full/layout and zero_full/shard/units. What a buffer costs it does not know: that is
in the table made here, by asking the functions of zero_full/plan_table.py about a buffer with sizes that no
real buffer has: powers of a large number, so that the digits of the answer are the bytes for each size.
tests/site/test_calculator.py compares the page with `zero_full.plan` and zero_min's formulas, as integers.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from made_once import made_once
from places import ROOT, SiteError
from torch import nn

from zero_full.config import Config, resolve
from zero_full.plan import SCALES, STAGES, activations
from zero_full.plan_table import Flat, Laid, kept, moments, on_their_way, run_of, sent, updating
from zero_full.precision.dtypes import Dtypes
from zero_full.shard.flat import ALIGNMENT
from zero_full.shard.reducer import IN_FLIGHT
from zero_full.shard.units import LIVE_PARTS, PARTS
from zero_min import formula
from zero_min.gpt import GPT, GPTConfig

FILE = "assets/js/calculator_data.js"
MADE_FROM = ("zero_full/**/*.py", "zero_min/gpt.py", "zero_min/formula.py", "site/hooks/calculator.py")

BF16 = {"enabled": True}
LOW = {**BF16, "bf16_master_weights_and_grads": True}
PRECISIONS: dict[str, tuple[str, dict[str, Any]]] = {  # name: (what the page says, the configuration's keys)
    "fp32": ("32 bits", {}),
    "mixed": ("16 bits; master and gradients in fp32", {"bf16": BF16}),
    "mixed16": (
        "16 bits, also the gradients; master in fp32",
        {"bf16": BF16, "data_types": {"grad_accum_dtype": "bf16"}},
    ),
    "low": ("16 bits, no master; Adam's moments in fp32", {"bf16": LOW}),
    "lowest": ("16 bits, no master; Adam's moments in 16", {"bf16": {**LOW, "bf16_optimizer_states": True}}),
}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {"type": "AdamW", "params": {"lr": 1e-3}}),
    "lion": ("Lion", {"type": "Lion", "params": {"lr": 1e-4}}),
    "momentum": ("SGD with momentum", {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}),
    "sgd": ("SGD", {"type": "SGD", "params": {"lr": 0.1}}),
}
OFFLOADED = {"stage": 2, "precision": "mixed16", "optimizer": "adamw"}  # what lesson 5 does
PRESETS = {  # layers, width, heads, vocabulary, context: tables of the GPT-2 and GPT-3 papers
    "GPT-2, small": (12, 768, 12, 50257, 1024),
    "GPT-2, XL": (48, 1600, 25, 50257, 1024),
    "GPT-3 6.7B": (32, 4096, 32, 50257, 2048),
    "GPT-3 13B": (40, 5120, 40, 50257, 2048),
    "GPT-3 175B": (96, 12288, 96, 50257, 2048),
}
SIZES = (24, 40, 80, 141)  # GB, of devices


def data() -> str:
    """The file that the page loads: `zeroCalculator` with everything."""
    sources = [path for pattern in MADE_FROM for path in ROOT.glob(pattern)]
    return made_once("calculator", sources, lambda: f"const zeroCalculator = {json.dumps(table())}\n")


def table() -> dict[str, Any]:
    """Everything the page knows about bytes."""
    return {
        "stages": STAGES,
        "precisions": {name: {"label": label, "config": keys} for name, (label, keys) in PRECISIONS.items()},
        "optimizers": {name: {"label": label, "config": keys} for name, (label, keys) in OPTIMIZERS.items()},
        "presets": PRESETS,
        "sizes": SIZES,
        "scales": SCALES,
        "alignment": ALIGNMENT,
        "parts": PARTS,
        "liveParts": LIVE_PARTS,
        "limits": {stage: _limits(stage) for stage in STAGES},
        "terms": dict(_terms()),
        "state": {f"{p} {o}": _state(p, o) for p in PRECISIONS for o in OPTIMIZERS},
        "model": model_tree(),
        "activations": {
            p: activation_terms(run_of(_config(0, precision=p), 1).dtypes.parameter) for p in PRECISIONS
        },
        "offload": {**OFFLOADED, "each": asdict(formula.MIXED), "flag": formula.flag(2)},
    }


def _config(stage: int, micro_batches: int = 1, precision: str = "fp32", optimizer: str = "adamw") -> Config:
    keys = {**PRECISIONS[precision][1], "optimizer": OPTIMIZERS[optimizer][1]}
    steps = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micro_batches}
    return resolve({**keys, **steps, "zero_optimization": {"stage": stage}}, 2).config


def _limits(stage: int) -> dict[str, Any]:
    """In elements, unless the name says otherwise; the defaults of zero_full."""
    settings = run_of(_config(stage), 2).settings
    gathering = settings.gathering
    return {
        "bucket": settings.bucket_numel,
        "bucketsAtOnce": IN_FLIGHT + 1 if settings.overlap else 1,
        "prefetch": gathering.prefetch_numel if settings.overlap else -1,
        "live": gathering.max_live,
        "reuse": gathering.max_reuse,
        "keep": gathering.keep_numel,
        "keepTotal": gathering.keep_total,
        "subGroup": settings.sub_group_numel,
    }


# Bytes a buffer costs ----------------------------------------------------------------------------

FAR = 10**6  # larger than any coefficient


@dataclass(frozen=True)
class Probe:
    """Stands in for a FlatLayout: sizes so far apart that an answer in bytes can be taken to pieces."""

    total: int = FAR**3
    shard: int = FAR**2
    numels: tuple[int, ...] = (FAR, 1)


def coefficients(answer: int) -> dict[str, int]:
    """Bytes for each element of the whole buffer, of a slice, of the largest parameter, of all parameters."""
    rest, numbers = divmod(answer, FAR)
    rest, largest = divmod(rest, FAR)
    whole, piece = divmod(rest, FAR)
    found = {"whole": whole, "slice": piece, "largest": largest - numbers, "numbers": numbers}
    return {size: each for size, each in found.items() if each}


def _terms() -> Iterator[tuple[str, dict[str, Any]]]:
    for precision in PRECISIONS:
        for stage in STAGES:
            for ranks in (1, 2):
                for micro_batches in (1, 2):
                    key = f"{precision} {stage} {'alone' if ranks == 1 else 'shared'} "
                    key += "once" if micro_batches == 1 else "again"
                    yield key, _terms_of(precision, stage, ranks, micro_batches)


def _terms_of(precision: str, stage: int, ranks: int, micro_batches: int) -> dict[str, Any]:
    run = run_of(_config(stage, micro_batches, precision), ranks)
    flat = Flat(Probe(), run.dtypes.of(torch.float32))
    laid = Laid([flat], [], 0)
    held, passing = kept(laid, run), coefficients(on_their_way(laid, run))
    waiting = flat.dtype.itemsize if stage >= 2 and passing else 0  # until the whole buffer is complete
    return {
        "parameter": flat.dtype.itemsize,
        "gradients": coefficients(held["gradients"]),
        "master": coefficients(held["master"]),
        "arriving": passing.get("largest", 0),
        "waiting": waiting,
        "reducing": {"whole": passing.get("whole", 0) - waiting, "slice": passing.get("slice", 0)},
        "sent": _sent(precision, stage, micro_batches),
    }


def _sent(precision: str, stage: int, micro_batches: int) -> dict[str, int]:
    """Bytes to each other rank for an element of a slice: of gradients in a step and in each micro-batch, and
    of parameters whenever they are gathered."""
    whole = 2 * FAR
    probe = Probe(whole, whole if stage == 0 else FAR)

    def bytes_of(count: int, trained: bool) -> int:
        run = run_of(_config(stage, count, precision), 2)
        flat = Flat(probe, run.dtypes.of(torch.float32), trained)
        return sent(Laid([flat], [], 0), run) // FAR

    gathered = bytes_of(1, trained=False)
    each = bytes_of(3, trained=True) - bytes_of(2, trained=True) if micro_batches > 1 else 0
    once = bytes_of(micro_batches, trained=True) - gathered - micro_batches * each
    return {"once": once, "each": each, "gathered": gathered}


def _state(precision: str, optimizer: str) -> dict[str, int]:
    """Bytes for an element that a rank owns: kept by the optimizer, and made when it steps."""
    config = _config(1, 1, precision, optimizer)
    run = run_of(config, 2)
    flat = Flat(run.layout([("", nn.Parameter(torch.empty(2 * ALIGNMENT)))]), run.dtypes.of(torch.float32))
    laid = Laid([flat], [], 0)
    owned = flat.layout.shard
    return {
        "kept": moments(laid, config, run) // owned,
        "updating": updating(laid, config, run, "cuda") // owned,
    }


# The model ---------------------------------------------------------------------------------------


def model_tree() -> dict[str, Any]:
    """zero_min's GPT as the page needs it: modules in order, their own parameters' shapes in letters."""
    letters = {1031: "vocabulary", 1033: "context", 1024: "width"}  # sizes that cannot be mistaken
    with torch.device("meta"):
        model = GPT(GPTConfig(vocabulary=1031, context=1033, width=1024, layers=1, heads=1))
    holders: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        holders.setdefault(param, []).append(name)

    def shape(param: nn.Parameter) -> list[list[Any]]:
        found = []
        for size in param.shape:
            unit = next(unit for unit in letters if size % unit == 0)
            found.append([size // unit, letters[unit]])
        return found

    def node(name: str, module: nn.Module) -> dict[str, Any]:
        own = [p for p in module.parameters(recurse=False) if len(holders[p]) == 1]
        if module is model:  # tied weights belong to the module around all that use them: here, the model
            own += [param for param, names in holders.items() if len(names) > 1]
        return {
            "name": name,
            "called": type(module).forward is not nn.Module.forward,
            "own": [shape(param) for param in own],
            "each": [node(name, child) for name, child in module.named_children()],
            "repeated": isinstance(module, nn.ModuleList),  # its one child stands for every layer
        }

    return node("", model)


FEATURES = (  # products of these are what activations of a GPT are a sum of
    (),
    ("context",),
    ("batch", "context"),
    ("batch", "context", "width"),
    ("batch", "context", "vocabulary"),
    ("batch", "context", "layers"),
    ("batch", "context", "layers", "width"),
    ("batch", "context", "layers", "heads"),
)


@cache
def activation_terms(parameter: torch.dtype | None) -> list[Any]:
    """Bytes for each feature: their sum is what `zero_full plan` finds by running a forward."""
    rows, found = [], []
    for vocabulary, context, layers, heads, width, batch in _CASES:
        shape = GPTConfig(vocabulary, context, layers, heads, width)
        with torch.device("meta"):
            model = GPT(shape)
        tokens = torch.empty(batch, context, dtype=torch.int64, device="meta")
        found.append(activations(model, [tokens, tokens], Dtypes(parameter)))
        sizes = {**asdict(shape), "batch": batch}
        rows.append([math.prod(sizes[letter] for letter in feature) for feature in FEATURES])
    matrix, answers = torch.tensor(rows, dtype=torch.float64), torch.tensor(found, dtype=torch.float64)
    terms = torch.linalg.lstsq(matrix, answers).solution.round()
    if (matrix @ terms != answers).any():
        raise SiteError("site/hooks/calculator.py: a GPT's activations are no sum of FEATURES any more")
    return [[int(each), feature] for each, feature in zip(terms.tolist(), FEATURES, strict=True)]


_CASES = [  # any that tell the features apart, and two more to check the answer
    *(
        (50, 8, 1, 1, 16, 1),
        (90, 8, 1, 2, 16, 1),
        (50, 12, 1, 1, 16, 1),
        (50, 8, 2, 1, 16, 1),
        (50, 8, 2, 2, 16, 1),
    ),
    *(
        (50, 8, 1, 1, 24, 1),
        (50, 8, 2, 1, 24, 1),
        (50, 8, 1, 1, 16, 3),
        (70, 12, 3, 4, 32, 2),
        (53, 11, 2, 3, 48, 2),
    ),
]
