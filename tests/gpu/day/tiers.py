"""Offload on every tier: where a run ends, and how often a step reads a value from the device."""

import tempfile
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tests.gpu.day.conformance import ALLOWED, judged
from tests.gpu.day.place import PRECISIONS, RELEASES, Place, Tower, batch_of, engine_of, one_step
from tests.gpu.day.rows import finish
from tests.gpu.day.streams import waits
from tests.zero_full.runs import Net, config, data, reference

STEPS = 4
AFTER = 2  # updates before the first delayed one
DELAYED = "state on the host, delayed updates"
ON_HOST = {"device": "cpu", "pin_memory": True}
RULES = {
    "AdamW": {"type": "AdamW", "params": {"lr": 1e-3}},
    "LAMB": {"type": "Lamb", "params": {"lr": 1e-3}},
}


def sections(folder: str) -> dict[str, tuple[int, dict[str, Any]]]:
    """The stage and the sections of `zero_optimization` for each tier. `folder`: on the disk to use."""
    on_disk = {"device": "nvme", "nvme_path": folder}
    return {
        "state on the host": (2, {"offload_optimizer": ON_HOST}),
        "half of the state on the host": (2, {"offload_optimizer": {**ON_HOST, "ratio": 0.5}}),
        DELAYED: (2, {"offload_optimizer": {**ON_HOST, "delay_update_after": AFTER}}),
        "state on the disk": (2, {"offload_optimizer": on_disk}),
        "parameters on the host": (3, {"offload_param": ON_HOST}),
        "parameters and state on the host": (3, {"offload_param": ON_HOST, "offload_optimizer": ON_HOST}),
        "parameters and state on the disk": (
            3,
            {"offload_param": {**on_disk, "max_in_cpu": 0}, "offload_optimizer": on_disk},
        ),
    }


def check(place: Place) -> None:
    """Train on every tier in fp32 and bf16. What is wrong is raised at the end."""
    wrong = list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for tier, (stage, zero) in sections(folder).items():
            want = delayed_reference() if tier == DELAYED else reference(1, STEPS)
            for precision in ("fp32", "bf16"):
                given = config(stage, zero_optimization={**RELEASES, **zero}, **PRECISIONS[precision])
                wrong += judged(place, given, want, ALLOWED[precision], f"{tier}, {precision}", None)
    if wrong:
        raise ArithmeticError(f"not where plain AdamW ends: {', '.join(wrong)}")


def delayed_reference() -> dict[str, Tensor]:
    """Plain AdamW whose gradients are those of parameters that lack the last update, from `AFTER` on."""
    seen, updated = Net(), Net()
    optimizer = torch.optim.AdamW(updated.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(STEPS):
        seen.zero_grad()
        seen(data(step, 0, 0)).backward()
        if step >= AFTER:
            seen.load_state_dict(updated.state_dict())
        for mine, theirs in zip(updated.parameters(), seen.parameters(), strict=True):
            mine.grad = theirs.grad
        optimizer.step()
        if step < AFTER:
            seen.load_state_dict(updated.state_dict())
    return {name: p.detach().clone() for name, p in updated.named_parameters()}


def reads(place: Place) -> None:
    """Count the reads of the third step on every tier, with AdamW and with LAMB."""
    with tempfile.TemporaryDirectory() as folder:
        tiers = {"no offload": (2, {}), **sections(folder)}
        for (tier, (stage, zero)), rule in product(tiers.items(), RULES):
            if (tier, rule) == (DELAYED, "LAMB"):  # raises: only Adam's updates can be delayed
                continue
            width = 16 if place.tiny else 256
            engine = engine_of(
                Tower(width, 3, place.device),
                stage,
                zero_optimization=zero,
                optimizer=RULES[rule],
                gradient_clipping=1.0,
            )
            for step in range(2):
                one_step(engine, batch_of(place, width, step))
            x = batch_of(place, width, 2).to(next(engine.module.parameters()).dtype)
            finish(place.device)
            found = waits(place.device, lambda e=engine, x=x: one_step(e, x))
            engine.optimizer.finish_update()
            engine.destroy()
            place.say(tier=tier, rule=rule, **found)
