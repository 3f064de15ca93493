"""Runs of the code that `fit --tensor` prints, with small models of transformers on gloo ranks."""

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zero_full.fit import Batch, Machine, Run, fit, shape_of, snippet
from zero_full.shard.access.held_bytes import bytes_behind

CONFIGS = Path(__file__).parents[1] / "zero_full" / "hf_configs"
ACCELERATOR = "torch.accelerator.current_accelerator().type"
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SMALL, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {  # by the name of a config: other keys than its own
    "llama-3-8b": {**GROUPED, "head_dim": 16},
    "gemma-2-2b": {**GROUPED, "head_dim": 16},  # tied
    "pythia-1.4b": SMALL,
}


def planned_and_held(comm: Any, folder: Path) -> dict[str, list[dict[str, tuple[int, int]]]]:
    """By family, at stages 1 and 3: bytes that were planned and that this rank holds, by kind."""
    found: dict[str, list[dict[str, tuple[int, int]]]] = {}
    here = folder / str(dist.get_rank())
    here.mkdir()
    before = Path.cwd()
    os.chdir(here)
    try:
        for name, keys in FAMILIES.items():
            config = {**json.loads((CONFIGS / f"{name}.json").read_text()), "vocab_size": 128, **keys}
            (here / "config.json").write_text(json.dumps(config))
            shape, machine, run = shape_of(config), Machine(1, 4, 10**9, tensor=2), Run(Batch(1, 16))
            candidates = fit(shape, machine, run).candidates
            code = snippet(shape, run, machine).replace(ACCELERATOR, '"cpu"')
            found[name] = [_held(code, candidates[stage]) for stage in (1, 3)]
    finally:
        os.chdir(before)
    return found


def _held(code: str, candidate: Any) -> dict[str, tuple[int, int]]:
    Path("ds.json").write_text(json.dumps(candidate.config))
    names: dict[str, Any] = {}
    exec(code, names)
    engine, plan = names["engine"], candidate.plan
    for step in range(2):
        words = torch.randint(0, 128, (1, 16), generator=torch.Generator().manual_seed(step))
        engine.backward(engine(input_ids=words, labels=words).loss)
        gradients = bytes_behind(engine.optimizer.holdings()["gradients"])
        engine.step()
    held = {kind: bytes_behind(tensors) for kind, tensors in engine.optimizer.holdings().items()}
    engine.destroy()
    return {
        "parameters": (plan.parameters, held["parameters"]),
        "gradients": (plan.gradients, gradients),
        "state": (plan.master + plan.moments, held["optimizer"]),
    }
