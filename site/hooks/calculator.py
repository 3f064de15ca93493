"""What the calculator must know: bytes of every kind, read off `zero_full plan` when the site is built.

The page (assets/js/calculator_plan.js) knows how parameters are laid out in buffers: arithmetic of a few
lines, ported from zero_full/layout and zero_full/shard/units, and in which order buffers fill and leave.
What a buffer costs it does not know: that is in the table made here, by planning models of few parameters
and looking for the bytes an element that explain all answers. tests/site/test_calculator.py compares the
page with `zero_full.plan` and zero_min's formulas, as integers.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
from made_once import made_once
from places import ROOT, SiteError
from torch import nn

from zero_full import fit
from zero_full.config import resolve
from zero_full.kernels.files import PAGE
from zero_full.layout import FlatLayout
from zero_full.offload import BlockTier
from zero_full.offload.nvme_state import APART
from zero_full.plan import SCALES, STAGES, Plan, activations, plan
from zero_full.precision.dtypes import Dtypes
from zero_full.settings import Settings
from zero_full.shard.deal.units import LIVE_PARTS, PARTS
from zero_full.shard.group.parameters import ALIGNMENT
from zero_full.shard.passes.reduce import IN_FLIGHT
from zero_full.start.from_config import settings_of
from zero_min import formula
from zero_min.gpt import GPT, GPTConfig

FILE = "assets/js/calculator_data.js"
MADE_FROM = ("zero_full/**/*.py", "zero_min/gpt.py", "zero_min/formula.py", "site/hooks/calculator.py")

LOW = {"enabled": True, "bf16_master_weights_and_grads": True}
PRECISIONS: dict[str, tuple[str, dict[str, Any]]] = {  # name: (what the page says, the configuration's keys)
    **{name: (label, keys) for name, (label, _, keys) in fit.PRECISIONS.items()},
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
PAPER = {  # the row of the ZeRO paper's figure 1: all in 16 bits but Adam's state
    "known": "count",
    "count": "7.5B",
    "ranks": 64,
    "microBatches": 1,
    "precision": "mixed16",
    "optimizer": "adamw",
}
RUNS = {"ZeRO paper, 7.5B on 64": PAPER}
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
        "runs": RUNS,
        "tight": fit.TIGHT,
        "sizes": SIZES,
        "scales": SCALES,
        "alignment": ALIGNMENT,
        "parts": PARTS,
        "liveParts": LIVE_PARTS,
        "limits": {stage: _limits(stage) for stage in STAGES},
        "terms": dict(_terms()),
        "state": {f"{p} {o}": _state(p, o) for p in PRECISIONS for o in OPTIMIZERS},
        "model": model_tree(),
        "activations": {p: activation_terms(_settings(0, precision=p).dtypes.parameter) for p in PRECISIONS},
        "part": BlockTier(path="/").part_numel,
        "inMemory": BlockTier(path="/").state_numel,
        "page": PAGE,
        "apart": APART,
        "waiting": dict(_waiting()),
        "checking": {p: _checking(p) for p in PRECISIONS},
        "tensors": {o: _tensors(o) for o in OPTIMIZERS},
        "offload": {**OFFLOADED, "each": asdict(formula.MIXED), "flag": formula.flag(2)},
    }


def _config(
    stage: int, micro_batches: int = 1, precision: str = "fp32", optimizer: str = "adamw", **zero: Any
) -> dict[str, Any]:
    keys = {**PRECISIONS[precision][1], "optimizer": OPTIMIZERS[optimizer][1]}
    steps = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micro_batches}
    return {**keys, **steps, "zero_optimization": {"stage": stage, **zero}}


def _settings(stage: int, precision: str = "fp32") -> Settings:
    return settings_of(resolve(_config(stage, precision=precision), 2).config)


def _limits(stage: int) -> dict[str, Any]:
    """In elements, unless the name says otherwise; the defaults of zero_full."""
    settings = _settings(stage)
    gathering = settings.gathering
    return {
        "bucket": settings.bucket_numel,
        "inFlight": IN_FLIGHT if settings.overlap else 0,  # buckets that may be on their way at a time
        "prefetch": gathering.prefetch_numel if settings.overlap else -1,
        "live": gathering.max_live,
        "reuse": gathering.max_reuse,
        "keep": gathering.keep_numel,
        "keepTotal": gathering.keep_total,
        "subGroup": settings.sub_group_numel,
    }


# Bytes a buffer costs ----------------------------------------------------------------------------


class Numbers(nn.Module):
    """A model that is nothing but parameters of these sizes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.each = nn.ParameterList(torch.empty(size, device="meta") for size in sizes)

    def forward(self) -> None:
        """Nobody calls it."""


NUMEL = 2**13  # of a probe, and of one bucket
ONE, MANY, ODD = (NUMEL,), (NUMEL // 16,) * 16, (NUMEL - 9, 1, 5)
BYTES = range(9)  # what an element of anything may cost


@dataclass(frozen=True)
class Case:
    """What decides about the bytes of a buffer."""

    precision: str
    stage: int
    alone: bool
    micro_batches: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """To ask for; of many, a slice is next to nothing."""
        return (1,) if self.alone else (2, 64)

    @cache  # noqa: B019  # cases are few
    def plan(self, sizes: tuple[int, ...], ranks: int, reuse: int = 10**9) -> Plan:
        """Of parameters of these sizes in one buffer."""
        zero = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": reuse}
        config = _config(self.stage, self.micro_batches, self.precision, **zero)
        return plan(Numbers(sizes), config, ranks)

    def layout(self, sizes: Sequence[int], ranks: int) -> FlatLayout:
        """Of this buffer. At stage 0 nothing is cut."""
        world, copies = (1, ranks) if self.stage == 0 else (ranks, 1)
        return FlatLayout(tuple(sizes), world, ALIGNMENT, copies)


def _terms() -> Iterator[tuple[str, dict[str, Any]]]:
    for precision, stage, alone in product(PRECISIONS, STAGES, (True, False)):
        waiting: Sequence[int] = BYTES
        for micro_batches, times in ((1, "once"), (2, "again")):
            case = Case(precision, stage, alone, micro_batches)
            terms = _terms_of(case, waiting)
            waiting = (terms["waiting"],)  # what need not differ does not
            yield f"{precision} {stage} {'alone' if alone else 'shared'} {times}", terms


def _terms_of(case: Case, waiting: Sequence[int]) -> dict[str, Any]:
    parameter = _settings(case.stage, case.precision).dtypes.of(torch.float32).itemsize
    return {
        "parameter": parameter,
        "gradients": _kept(case, "gradients"),
        "master": _kept(case, "master"),
        **_passing(case, waiting, (parameter, *BYTES)),
        "sent": _sent(case),
    }


def _kept(case: Case, kind: str) -> dict[str, int]:
    """Bytes for each element of the whole buffer, of a slice, of all parameters."""
    asked = [(sizes, ranks) for sizes in (ONE, MANY, ODD) for ranks in case.ranks]
    answers = [getattr(case.plan(*each), kind) for each in asked]
    layouts = [case.layout(*each) for each in asked]
    for found in product(BYTES, BYTES, BYTES):  # the first that needs no more than it must
        each = dict(zip(("slice", "whole", "numbers"), found, strict=True))
        if answers == [
            each["slice"] * at.shard_numel + each["whole"] * at.total + each["numbers"] * sum(at.numels)
            for at in layouts
        ]:
            return {size: number for size, number in each.items() if number}
    raise SiteError(f"site/hooks/calculator.py: {kind} of {case} are no sum of sizes any more: {answers}")


def _passing(case: Case, *candidates: Sequence[int]) -> dict[str, int]:
    """Bytes for an element of the buffer while it fills, of what arrives, of a slice while it is reduced."""
    asked = [(sizes, ranks) for sizes in (ONE, MANY) for ranks in case.ranks]
    answers = [case.plan(*each).buckets for each in asked]
    layouts = [case.layout(*each) for each in asked]
    for waiting, arriving, reducing in product(*candidates, BYTES):
        if answers == [
            waiting * at.total + max(arriving * max(at.numels), reducing * at.shard_numel) for at in layouts
        ]:
            return {"waiting": waiting, "arriving": arriving, "reducing": reducing}
    raise SiteError(f"site/hooks/calculator.py: gradients of {case} pass in another way now: {answers}")


def _sent(case: Case) -> dict[str, int]:
    """Bytes to each other rank for an element of a slice: in a step and in each micro-batch, and whenever
    parameters of stage 3 are gathered. All others are gathered once a step, and are in the first."""
    if case.alone:
        return {"once": 0, "each": 0, "gathered": 0}

    def of(micro_batches: int, *reuse: int) -> int:
        asked = Case(case.precision, case.stage, False, micro_batches)
        return asked.plan(ONE, 2, *reuse).sent // (NUMEL // 2)

    gathered = of(1, 0) - of(1)
    each = of(3) - of(2) - gathered if case.micro_batches > 1 else 0
    once = of(case.micro_batches) - case.micro_batches * (each + gathered)
    return {"once": once, "each": each, "gathered": gathered}


def _away(place: str, ranks: int, sizes: Sequence[int], **keys: Any) -> Plan:
    """With state on the host or in a file."""
    zero = {"offload_optimizer": {"device": place, "nvme_path": "/"}, "reduce_bucket_size": NUMEL}
    return plan(Numbers(sizes), _config(**keys, **zero, stage3_param_persistence_threshold=0), ranks)


def _waiting() -> Iterator[tuple[str, dict[str, Any]]]:
    """Bytes for an element of a slice, and of the largest slice, where the optimizer keeps nothing else."""
    for precision, stage, alone, again in product(PRECISIONS, STAGES[1:], (True, False), (False, True)):
        keys = {"precision": precision, "stage": stage, "micro_batches": 1 + again, "optimizer": "sgd"}
        ranks = 1 if alone else 2
        owned = NUMEL // ranks

        # In four slices, of which stage 3 would make one.
        four = {**keys, "stage": min(stage, 2)}
        host, file = (
            [_away(place, ranks, ONE, **keys), *(_away(place, ranks, ONE * n, **four) for n in (1, 4))]
            for place in ("cpu", "nvme")
        )
        master, slices = file[0].disk // owned, (host[2].host - host[1].host) // (3 * owned)
        yield (
            f"{precision} {stage} {'alone' if alone else 'shared'} {'again' if again else 'once'}",
            {
                "master": master,
                "slice": slices,
                "largest": host[0].host // owned - slices,
                "beside": (file[2].host - file[1].host) // (3 * owned) - master,
                "down": host[0].down // owned // (1 + again if stage > 1 else 1),
                "up": host[0].up // owned,
            },
        )


def _checking(precision: str) -> dict[str, int]:
    """Bytes for an element of a slice whose state is elsewhere, when it is read to see who wrote it."""
    bucket, unit = (_away("cpu", 2, ONE, precision=precision, stage=stage) for stage in (2, 3))
    large = _away("cpu", 2, (2**27,), precision=precision, stage=3)
    owned = NUMEL // 2
    return {"bucket": bucket.update // owned, "unit": unit.update // owned, "most": large.update}


def _tensors(optimizer: str) -> int:
    """How many of a parameter's size the optimizer keeps: in a file each has whole lines."""
    many = _away("nvme", 1, (1,) * 640, stage=1, optimizer=optimizer)
    return (many.disk - 640 * ALIGNMENT * 4) // (640 * APART)


def _state(precision: str, optimizer: str) -> dict[str, int]:
    """Bytes for an element that a rank owns: what the optimizer keeps, and what is made when it steps, for
    all buffers together and for one after the other."""
    config = _config(1, 1, precision, optimizer, reduce_bucket_size=NUMEL)
    one, many = (plan(Numbers(ONE * count), config, 2) for count in (1, 16))
    owned = NUMEL // 2
    together = many.update // owned // 16 if many.update > one.update else 0
    return {"kept": one.moments // owned, "updating": together, "following": one.update // owned}


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
        # Tied weights belong to the module around all that use them: here, the model.
        tied = [param for param, names in holders.items() if len(names) > 1] if module is model else []
        return {
            "name": name,
            "called": type(module).forward is not nn.Module.forward,
            "own": [shape(param) for param in own],
            "tied": [shape(param) for param in tied],
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
