"""DeepSpeed's optimizers for the host: calling one constructs the optimizer of the same rule.

zero_full steps Adam by its own operator where the state is, so there is no class for each place.
"""

from typing import Any

import torch

from zero_full.optim import FusedAdam


class DeepSpeedCPUAdam:
    """Constructs `zero_full.FusedAdam`, which takes the same arguments in another order."""

    def __new__(  # type: ignore[misc]  # noqa: D102
        cls,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> FusedAdam:
        if not fp32_optimizer_states:
            raise ValueError(
                "DeepSpeedCPUAdam: fp32_optimizer_states=False has no effect here. Set "
                "bf16.bf16_optimizer_states in the configuration"
            )
        return FusedAdam(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)


class DeepSpeedCPUAdagrad:
    """Constructs `torch.optim.Adagrad`."""

    def __new__(  # type: ignore[misc]  # noqa: D102
        cls,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        adamw_mode: bool = False,  # which accelerate passes, and has no meaning here
    ) -> torch.optim.Adagrad:
        return torch.optim.Adagrad(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
