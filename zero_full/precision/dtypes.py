"""The dtypes of a training step: parameters, reduction, accumulation, masters, moments and buffers."""

import sys
from dataclasses import dataclass, replace

import torch
from torch import nn

from zero_full._compat import NormWithStatistics

LOW = (torch.float16, torch.bfloat16)
NAMES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Dtypes:
    """The dtypes that were chosen for a run.

    `parameter` None: the model's own dtypes. `reduce` None: the dtype of the gradients.
    """

    parameter: torch.dtype | None = None
    reduce: torch.dtype | None = None
    accumulate: torch.dtype | None = None
    buffer: torch.dtype | None = None  # None: the model's own
    low_master: bool = False  # masters and gradients in the parameters' 16-bit dtype
    low_state: bool = False  # with bf16 masters: Adam's moments in bf16 instead of fp32
    rounding_seed: int | None = None  # seed of Adam's stochastic rounding to bf16; None: to the nearest
    adapters: frozenset[str] = frozenset()  # names of PEFT's parameters, which keep the model's dtype

    def __post_init__(self) -> None:
        """Raise TypeError for a dtype that is not floating-point, ValueError for a seed without effect."""
        if self.rounding_seed is not None and not self.low_master:
            raise ValueError("rounding_seed needs low_master=True: masters in fp32 are not rounded")
        for name in ("parameter", "reduce", "accumulate", "buffer"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise TypeError(f"{name} must be a floating-point dtype like torch.bfloat16, not {dtype!r}")

    def for_model(self, model: nn.Module) -> "Dtypes":
        """Return the dtypes for training this model: `adapters` are those of PEFT in fp32."""
        return replace(self, adapters=adapters_in_fp32(model))

    def of(self, model: torch.dtype, name: str = "") -> torch.dtype:
        """Return the dtype in which the parameter `name` is trained. `model`: its dtype in the model."""
        if self.parameter is None or not model.is_floating_point or name in self.adapters:
            return model
        return self.parameter

    def of_buffers(self, model: nn.Module) -> dict[str, torch.dtype]:
        """Return every buffer's dtype during training, by name.

        Buffers keep their dtype: rotary frequencies rounded to 16 bits are off by radians in a long context.
        Only the statistics of a batch norm follow its weights, because torch wants both in one dtype.
        """
        found = {}
        for prefix, module in model.named_modules():
            weight = module.weight if isinstance(module, NormWithStatistics) else None
            for name, buffer in module.named_buffers(recurse=False):
                dtype = buffer.dtype
                if dtype.is_floating_point and self.buffer is not None:
                    dtype = self.buffer
                elif dtype.is_floating_point and weight is not None:
                    dtype = self.of(weight.dtype)
                found[f"{prefix}.{name}" if prefix else name] = dtype
        return found

    def master_of(self, parameter: torch.dtype) -> torch.dtype:
        """Return the dtype of masters: fp32 for 16-bit parameters unless asked otherwise."""
        return torch.float32 if parameter in LOW and not self.low_master else parameter

    def moments_of(self, master: torch.dtype) -> torch.dtype:
        """Return the dtype of Adam's moments for a master of this dtype."""
        return torch.float32 if master == torch.bfloat16 and not self.low_state else master

    def accumulate_of(self, parameter: torch.dtype) -> torch.dtype:
        """Return the dtype of reduced gradients, in which micro-batches are accumulated."""
        return self.accumulate or self.master_of(parameter)

    def table(self, model: torch.dtype) -> dict[str, str]:
        """Return the dtypes as text for the log, by the kind of tensor."""
        parameter = self.of(model)
        master = self.master_of(parameter)
        rows = {
            "parameter": parameter,
            "reduce": self.reduce or "as the gradients are",
            "accumulate": self.accumulate_of(parameter),
            "master": "the parameters themselves" if master == parameter else master,
            "Adam's moments": self.moments_of(master),
            "buffers": self.buffer or "as the model has them",
        }
        if self.adapters and self.parameter is not None:
            rows["adapters of PEFT"] = torch.float32
        if self.rounding_seed is not None:
            rows["rounding of bf16"] = f"stochastic, seed {self.rounding_seed}"
        return {kind: str(dtype).removeprefix("torch.") for kind, dtype in rows.items()}


def adapters_in_fp32(model: nn.Module) -> frozenset[str]:
    """Return the names of PEFT's adapter parameters in fp32.

    PEFT makes adapters in fp32 also for 16-bit weights, because small updates of 16-bit adapters are rounded
    away. Its layers convert their inputs to an adapter's dtype, and the result to the layer's.
    """
    peft = sys.modules.get("peft.tuners.tuners_utils")  # not imported: the model has no adapters
    if peft is None:
        return frozenset()
    layers = [module for module in model.modules() if isinstance(module, peft.BaseTunerLayer)]
    names = [
        (layer, name) for layer in layers for name in (*layer.adapter_layer_names, *layer.other_param_names)
    ]
    containers = [held for layer, name in names if isinstance(held := getattr(layer, name, None), nn.Module)]
    adapters = {param for held in containers for param in held.parameters() if param.dtype == torch.float32}
    return frozenset(name for name, param in model.named_parameters() if param in adapters)
