"""Runs with delayed updates, for their tests."""

from typing import Any

import torch
from torch import Tensor

import zero_full
from tests.zero_full.runs import Net, config, data

STEPS, AFTER, LR, CLIP = 9, 3, 0.01, 0.05
SKIPPED = (2, 5, 6)  # steps whose gradients overflow, where anybody looks
KEYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "clipped": {"gradient_clipping": CLIP},
    "accumulated": {"gradient_accumulation_steps": 2, "gradient_clipping": CLIP},
    "bf16": {"bf16": {"enabled": True}, "gradient_clipping": CLIP},
}


def waiting(stage: int, after: int | None = AFTER, **keys: Any) -> dict[str, Any]:
    """A config; every parameter is cut at stage 3."""
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 150, "sub_group_size": 60}
    zero |= {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 100} if stage == 3 else {}
    zero["offload_optimizer"] = {"device": "cpu", "delay_update_after": after}
    return config(stage, zero_optimization=zero, **keys)


def engine_of(stage: int, after: int | None = AFTER, **keys: Any) -> Any:
    torch.manual_seed(0)
    return zero_full.initialize(model=Net(), config=waiting(stage, after, **keys))[0]


def one_step(engine: Any, step: int, rank: int, skips: bool = False) -> None:
    """Of training, at a learning rate of its own."""
    for group in engine.optimizer.param_groups:
        group["lr"] = LR * 0.9**step
        group["betas"] = [0.9, 0.999]  # a list, as a JSON file has it
    dtype, micros = next(engine.parameters()).dtype, engine.gradient_accumulation_steps()
    for micro in range(micros):
        inf = float("inf") if skips and step in SKIPPED and micro == 0 and rank == 0 else 1.0
        engine.backward(engine(data(step, micro, rank, dtype)) * inf)
        engine.step()
    for group in engine.optimizer.param_groups:
        group["lr"] = 100.0  # that is nobody's
        group["betas"][0] = 0.1  # nor is that


def of_engine(engine: Any) -> list[Tensor]:
    """Parameters, masters and state, whole."""
    params = list(engine.parameters())
    masters = [zero_full.safe_get_full_fp32_param(p) for p in params]
    moments = [zero_full.safe_get_full_optimizer_state(p, "exp_avg_sq") for p in params]
    found = [*engine.module_state_dict().values(), *masters, *moments]
    return [tensor for tensor in found if tensor is not None]
