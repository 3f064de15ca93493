"""Precision plugins: engines hold parameters in their dtype, and step, scale and clip."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.fabric.plugins import Precision as FabricPrecision
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn

from zero_full.integrations.lightning.configuration import PRECISIONS
from zero_full.nested import mapped

DTYPES = {"bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16, "16-mixed": torch.float16}
LIGHTNINGS_OWN = (
    "Precision",
    "MixedPrecision",
    "HalfPrecision",
)  # plugins that only a precision's name chose


def name_of(plugin: Any) -> str:
    """Return the name of a plugin's precision. ValueError if the engine does not have it."""
    kind, name = type(plugin).__name__, str(plugin.precision)
    if isinstance(plugin, (ZeroPrecision, ZeroFabricPrecision)):
        return name
    if kind not in LIGHTNINGS_OWN or name not in PRECISIONS:
        raise ValueError(
            f"precision {name!r} ({kind}) is not supported with zero_full. Use one of {', '.join(PRECISIONS)}"
        )
    return name


class Conversions:
    """The conversions of modules and inputs that both kinds of plugins share."""

    precision: str

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert a module for `bf16-true`, which keeps no fp32 copy of its parameters."""
        return module.to(torch.bfloat16) if self.precision == "bf16-true" else module

    def convert_input(self, data: Any) -> Any:
        """Convert floating-point tensors to the dtype of the parameters."""
        dtype = DTYPES.get(self.precision)
        return data if dtype is None else mapped(partial(_converted, dtype), data)

    @contextmanager
    def tensor_init_context(self) -> Iterator[None]:
        """Make new tensors in the default dtype, or for `bf16-true` in bf16."""
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16 if self.precision == "bf16-true" else usual)
        try:
            yield
        finally:
            torch.set_default_dtype(usual)

    def module_init_context(self) -> Any:
        """Make the parameters of new modules in the dtype of `tensor_init_context`."""
        return self.tensor_init_context()


class ZeroPrecision(Conversions, Precision):
    """The precision plugin of `ZeroStrategy`."""

    def __init__(self, precision: str = "32-true") -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, not {precision!r}")
        self.precision = precision

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run the LightningModule's `backward`, with the loss scale."""
        model.backward(model.trainer.strategy.scale(tensor), *args, **kwargs)

    def clip_gradients(
        self, optimizer: Any, clip_val: float | None = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        """Let the next step clip the gradients to this norm."""
        check_clipping(str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)))
        if clip_val:
            unwrapped(optimizer).clip_next_step(float(clip_val))


class ZeroFabricPrecision(Conversions, FabricPrecision):
    """The precision plugin of `ZeroFabricStrategy`."""

    def __init__(self, precision: str = "32-true") -> None:
        self.precision = precision

    def convert_output(self, data: Any) -> Any:
        """Convert floating-point tensors to the default dtype, as Lightning's mixed precision does."""
        if self.precision not in ("bf16-mixed", "16-mixed"):
            return data
        return mapped(partial(_converted, torch.get_default_dtype()), data)


def unwrapped(optimizer: Any) -> Any:
    """Return the engine's optimizer behind the one that `LightningModule.optimizers()` returns."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _converted(dtype: torch.dtype, value: Any) -> Any:
    """Return a floating-point tensor in this dtype, and anything else as it is."""
    is_floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_floating else value


def check_clipping(algorithm: str) -> None:
    """Raise ValueError for clipping by value: gradients are sharded, and only their norm is clipped."""
    if algorithm == "value":
        raise ValueError(
            'clipping by value (gradient_clip_algorithm="value") is not supported with zero_full: gradients '
            'are sharded, and a step clips their norm over all ranks. Use gradient_clip_algorithm="norm"'
        )
