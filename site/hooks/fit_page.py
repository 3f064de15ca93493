"""What the page "Fit my model" must know: families, places to try, and models to begin with."""

import json
from dataclasses import asdict
from typing import Any

from places import ROOT

from zero_full.fit import LADDER, LOSS, PRECISIONS, TIGHT, families
from zero_full.fit.choice import OPTIMIZER
from zero_full.fit.hf_config import MOST, MOST_LAYERS, MOST_NUMEL

FILE = "assets/js/fit_data.js"
CONFIGS = ROOT / "tests" / "zero_full" / "hf_configs"  # as they are published
PRESETS = {
    "Llama 3.2 1B": "llama-3.2-1b",
    "Llama 3 8B": "llama-3-8b",
    "Llama 3.1 70B": "llama-3.1-70b",
    "Qwen2.5 7B": "qwen2.5-7b",
    "Qwen3 8B": "qwen3-8b",
    "Mistral 7B": "mistral-7b",
    "Gemma 2 2B": "gemma-2-2b",
    "GPT-2 XL": "gpt2-xl",
    "Mixtral 8x7B": "mixtral-8x7b",
}


def data() -> str:
    """The file that the page loads: `zeroFitData` with everything."""
    return f"const zeroFitData = {json.dumps(table())}\n"


def table() -> dict[str, Any]:
    """Everything that the page does not compute."""
    return {
        "families": {name: asdict(family) for name, family in families().items()},
        "presets": {
            name: json.loads((CONFIGS / f"{file}.json").read_text()) for name, file in PRESETS.items()
        },
        "ladder": LADDER,
        "precisions": {
            name: {"label": label, "bytes": size, "config": keys}
            for name, (label, size, keys) in PRECISIONS.items()
        },
        "optimizer": OPTIMIZER,
        "tight": TIGHT,
        "most": MOST,
        "mostLayers": MOST_LAYERS,
        "mostNumel": MOST_NUMEL,
        "loss": LOSS,
    }
