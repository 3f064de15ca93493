"""What the emulated kernels are told, as csrc/core/ops.h has it, made from tensors."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
Long = ctypes.c_int64


class Slot(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("master", "grad", "exp_avg", "exp_avg_sq", "copy", "step")),
        ("numel", ctypes.c_int64),
    )


class StochasticSlot(ctypes.Structure):
    _fields_ = (("slot", Slot), ("key", ctypes.c_uint64), ("place", ctypes.c_uint64))


class SlotTypes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("master", "grad", "moments", "copy"))


class AdamOptions(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_double) for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "factor")),
        *((name, ctypes.c_bool) for name in ("decoupled", "bias_correction")),
    )


class LambOptions(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_double) for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "factor")),
        *((name, ctypes.c_double) for name in ("min_trust", "max_trust")),
        *((name, ctypes.c_bool) for name in ("bias_correction", "eps_inside_sqrt")),
    )


class Piece(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("numel", ctypes.c_int64))


class Cuts(ctypes.Structure):
    _fields_ = (("ends", ctypes.c_void_p), ("count", ctypes.c_int64))


class BlockRows(ctypes.Structure):
    _fields_ = (
        ("counts", ctypes.c_int64 * 2),
        ("numel", ctypes.c_int64),
        ("numbers", ctypes.c_int64 * 2),
        ("payloads", ctypes.c_int64 * 2),
        ("terms", ctypes.c_int64),
        ("apart", ctypes.c_int64),
    )


def rows_of(payload: Tensor, numbers: Tensor) -> BlockRows:
    """As `bind.h` finds them."""
    terms = payload.dim() - numbers.dim()

    def padded(few: Sequence[int], value: int) -> ctypes.Array[ctypes.c_int64]:
        return (Long * 2)(*[value] * (2 - len(few)), *few)

    return BlockRows(
        padded(numbers.shape[:-1], 1),
        numbers.shape[-1],
        padded(numbers.stride()[:-1], 0),
        padded(payload.stride()[terms:-1], 0),
        payload.shape[0] if terms else 1,
        payload.stride(0) if terms else 0,
    )


def type_of(tensors: Sequence[Tensor | None]) -> int:
    """As the kernels number them; 0 if there is no tensor."""
    return TYPES[tensors[0].dtype] if tensors and tensors[0] is not None else 0


class Lists(NamedTuple):
    """What an optimizer works on, in a Slot's order; empty where it has none."""

    masters: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    copies: list[Tensor] = []  # noqa: RUF012
    steps: list[Tensor] = []  # noqa: RUF012

    def types(self) -> SlotTypes:
        return SlotTypes(*map(type_of, (self.masters, self.grads, self.exp_avgs, self.copies)))
