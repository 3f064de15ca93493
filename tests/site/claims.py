"""What pages say is refused or has no effect, beside what `python -m zero_full check` says of it.

A sentence is a claim if it denies something and names a feature of FEATURES or a key of the configuration.
Whether GPUs have run nothing, the page of the day on GPUs says.
"""

import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import config_page

from zero_full.config import check

ROOT = Path(__file__).parents[2]
DENIES = re.compile(
    r"\b(?:is|are) (?:refused|missing|not (?:here|there|supported|implemented|available))\b"
    r"|\bnot supported\b|\brefused\b|\b(?:has|have|had) no effect\b|\bwithout effect\b"
    r"|\bNot (?:here|supported):|\bdoes nothing here\b|\blacks?\b"
)
FEATURES: dict[str, dict[str, Any]] = {  # how pages name it -> a configuration that asks for it
    r"NVMe|state or parameters in a file": {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"},
            "offload_param": {"device": "nvme", "nvme_path": "/local_nvme"},
        }
    },
    r"\boffload\b": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    r"super_offload": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": True}}
    },
    r"sequence parallelism|Ulysses|sequence_parallel_size": {"sequence_parallel_size": 2},
    r"AutoTP": {"tensor_parallel": {"autotp_size": 2}},
    r"ZenFlow": {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}},
    r"\bamp\b": {"amp": {"enabled": True}},
    r"elasticity": {"elasticity": {"enabled": True}},
    r"curriculum_learning": {"curriculum_learning": {"enabled": True}},
    r"autotuning": {"autotuning": {"enabled": True}},
    r"ZeRO\+\+|hpZ": {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
    r"MiCS|mics_shard_size": {"zero_optimization": {"stage": 3, "mics_shard_size": 2}},
    r"inference_tp_size": {"hybrid_engine": {"enabled": True, "inference_tp_size": 2}},
    r"\bwandb\b": {"wandb": {"enabled": True}},
    r"\btensorboard\b": {"tensorboard": {"enabled": True}},
    r"\bcomet\b": {"comet": {"enabled": True}},
    r"\bfp16\b": {"fp16": {"enabled": True}},
    r"\bbf16\b": {"bf16": {"enabled": True}},
    r"torch_autocast": {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
}
NO_GPU = re.compile(
    r"\b[Nn]o GPU\b[^.,]*\b(?:yet|run|used)\b|\bGPU runs: none yet\b|\bGPUs?\b[^.]*\bnot yet tried\b"
    r"|\b(?:[Nn]o|[Nn]othing|[Nn]either|[Nn]ot) [^.]*\b(?:run|tried|measured)\b[^.]*\bGPUs?\b|\bCPUs only\b"
)
GPU = ROOT / "site" / "docs" / "benchmarks" / "gpu.md"
NO_PART_OF_A_DAY = {  # pages about what a day on GPUs does not run: they may say so
    "README.md",  # of zero_min
    "lessons/step5_offload/lesson.md",
    "site/docs/benchmarks/real_models.md",
    "site/docs/fit.md",
    *(
        f"site/docs/guide/{name}.md"
        for name in (
            "flight_recorder",
            "generation",
            "hugging_face",
            "hugging_face_loop",
            "lightning",
            "migrate_fsdp",
            "pipeline",
        )
    ),
}
STATE = re.compile(r"^\| [^|]+ \| [^|]+ \| ([^|]+) \|$", re.M)


class Claim(NamedTuple):
    """A sentence of a page and what it denies."""

    page: str
    subject: str
    sentence: str


def pages() -> Iterator[tuple[str, str]]:
    """Every text that a reader of the site or of the repository sees first."""
    found = {*(ROOT / "site" / "docs").rglob("*.md"), *(ROOT / "lessons").rglob("*.md"), ROOT / "README.md"}
    return ((str(path.relative_to(ROOT)), path.read_text()) for path in sorted(found - {GPU}))


def sentences(text: str) -> Iterator[str]:
    """Sentences, entries of lists and rows of tables, without code blocks and what links lead to."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.M | re.S)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*[*|#\d])", text):
        yield from re.split(r"(?<=[.;!?])\s+(?=[A-Z`*\[])", " ".join(paragraph.split()))


@cache
def _keys() -> dict[str, str]:
    """What the schema says of each key: "ok", "no effect" or "refused", by its last name, if all agree."""
    found: dict[str, set[str]] = {}
    for _, _, keys in config_page.sections():
        for key in keys:
            remark = key.remark
            plain = remark is None or remark is config_page.STAGE3
            verdict = "ok" if plain or remark is None else "refused" if remark.refuses else "no effect"
            found.setdefault(key.name, set()).add(verdict)
    return {name: verdicts.pop() for name, verdicts in found.items() if len(verdicts) == 1}


def denied(page: str, text: str) -> Iterator[Claim]:
    """The features and keys that a page says it has not."""
    for sentence in filter(DENIES.search, sentences(text)):
        names = [name for name in FEATURES if re.search(name, sentence)]
        keys = [key for key in re.findall(r"`([a-z_0-9]+)`", sentence) if key in _keys()]
        others = [key for key in keys if not any(re.search(name, key) for name in names)]
        yield from (Claim(page, subject, sentence) for subject in (*names, *others))


@cache
def verdict(subject: str) -> str:
    """The worst that `check` says of a feature; of a key, what the schema says."""
    if subject not in FEATURES:
        return _keys()[subject]
    found = {each.kind for each in check(json.dumps(FEATURES[subject]), 2).verdicts}
    return next((kind for kind in ("refused", "no effect") if kind in found), "ok")


def stale(texts: Iterable[tuple[str, str]]) -> list[Claim]:
    """Claims about what works."""
    claims = (claim for page, text in texts for claim in denied(page, text))
    return [claim for claim in claims if verdict(claim.subject) == "ok"]


def on_gpus(texts: Iterable[tuple[str, str]], day: str) -> list[Claim]:
    """Sentences that say GPUs have run nothing, on pages about what a day runs, if a part of it has run."""
    states = [state.strip() for state in STATE.findall(day) if set(state.strip()) != {"-"}][1:]
    if all(state == "not run" for state in states):
        return []
    texts = ((page, text) for page, text in texts if page not in NO_PART_OF_A_DAY)
    found = ((page, sentence) for page, text in texts for sentence in sentences(text))
    return [Claim(page, "GPU", sentence) for page, sentence in found if NO_GPU.search(sentence)]
