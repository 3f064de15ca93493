"""The operators `torch.ops.zero_full.*`: their schemas, with the reference as the fallback.

The compiled versions register themselves for CPU and CUDA when `load` loads them (those of `CPU_SCHEMAS` only
for the CPU). On other devices, and if nothing could be built, torch calls the reference.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zero_full.kernels import reference

# The meaning of arguments, and the caller's obligations, are in `reference`.
LIBRARY = torch.library.Library("zero_full", "DEF")  # one set of operators per process
Fake = Callable[..., Any]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of numbers that compiled operators take
SCHEMAS = {
    "adam_step": (
        "(Tensor(a!)[] masters, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
        "Tensor[] steps, Tensor(d!)[] copies, float lr, float beta1, float beta2, float eps, "
        "float weight_decay, bool decoupled, float factor, bool bias_correction=True, "
        "*, Tensor(e!)[]? changed=None) -> ()"
    ),
    "adam_step_stochastic": (
        "(Tensor(a!)[] masters, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
        "Tensor[] steps, int[] keys, int[] places, float lr, float beta1, float beta2, float eps, "
        "float weight_decay, bool decoupled, float factor, bool bias_correction=True) -> ()"
    ),
    "lamb_norms": (
        "(Tensor[] masters, Tensor[] grads, Tensor(a!)[] exp_avgs, Tensor(b!)[] exp_avg_sqs, float beta1, "
        "float beta2, float eps, float weight_decay, bool eps_inside_sqrt, float factor) -> Tensor"
    ),
    "lamb_step": (
        "(Tensor(a!)[] masters, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor[] steps, "
        "Tensor(b!)[] copies, Tensor norms, float lr, float beta1, float beta2, float eps, "
        "float weight_decay, bool bias_correction, bool eps_inside_sqrt, float min_trust, "
        "float max_trust) -> ()"
    ),
    "unscale_norm_check": "(Tensor(a!)[] gradients, float factor) -> (Tensor, Tensor)",
    "sign_pack": "(Tensor? values, Tensor(a!) error, Tensor ends, bool l1) -> (Tensor, Tensor)",
    "sign_unpack_mean": "(Tensor packed, Tensor scales, Tensor ends, Tensor(a!) out, bool add) -> ()",
    "quantize_blocks": "(Tensor numbers, Tensor(a!) payload, int bits, int block) -> ()",
    "dequantize_blocks": "(Tensor payload, Tensor(a!) out, int bits, int block, bool add) -> ()",
}
CPU_SCHEMAS = {  # none for CUDA
    "sum_and_divide": "(Tensor[] terms, Tensor(a!) out, float divisor) -> ()",
    "nontemporal_copy": "(Tensor source, Tensor(a!) out) -> ()",
}


def _fake_lamb_norms(masters: list[Tensor], *_: Any) -> Tensor:
    like = masters[0] if masters else torch.empty(0)
    return like.new_empty(len(masters), 2, dtype=torch.float64)


def _fake_unscale_norm_check(gradients: list[Tensor], factor: float) -> tuple[Tensor, Tensor]:
    like = gradients[0] if gradients else torch.empty(0)
    return like.new_empty((), dtype=torch.float64), like.new_empty((), dtype=torch.int64)


def _fake_sign_pack(values: Tensor | None, error: Tensor, ends: Tensor, l1: bool) -> tuple[Tensor, Tensor]:
    packed = error.new_empty((error.numel() + 7) // 8, dtype=torch.uint8)
    return packed, error.new_empty(ends.numel(), dtype=torch.float32)


FAKES: dict[str, Fake] = {
    "lamb_norms": _fake_lamb_norms,
    "unscale_norm_check": _fake_unscale_norm_check,
    "sign_pack": _fake_sign_pack,
}

for name, schema in (SCHEMAS | CPU_SCHEMAS).items():
    LIBRARY.define(name + schema)
    LIBRARY.impl(name, getattr(reference, name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"zero_full::{name}", FAKES.get(name, lambda *_, **__: None), lib=LIBRARY)
