"""The operations of a model's pass, for the forecast of a step's time.

`fit` describes shapes, without code. The operations are those of transformers' own model, recorded on fake
tensors, which allocate no memory.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zero_full.errors import PlanError
from zero_full.fit.activation_estimate import Batch
from zero_full.fit.hf_config import Shape
from zero_full.plan import ModelWork, WorkRecorder, model_work


class WithLoss(nn.Module):
    """A language model that returns its loss, with the tokens as their own labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss."""
        loss: Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss


def operations_of(shape: Shape, batch: Batch, config: Mapping[str, Any], world: int) -> ModelWork:
    """Record the operations of a micro-batch of transformers' model. If that fails, `unknown` says why."""
    if importlib.util.find_spec("transformers") is None:
        return _unknown(
            f"the operations are those of transformers' {shape.family.model}: install transformers"
        )
    transformers: Any = importlib.import_module("transformers")
    given = {key: value for key, value in shape.config.items() if key != "model_type"}
    tokens = torch.empty(batch.sequences, batch.context, dtype=torch.int64, device="meta")
    try:
        made = transformers.AutoConfig.for_model(shape.family.model_type, **given)
        with torch.device("meta"):
            model = getattr(transformers, shape.family.model)(made).train()
        if batch.checkpoints:
            model.gradient_checkpointing_enable()
        return model_work(WithLoss(model), config, world, [tokens])
    except (PlanError, TypeError, ValueError) as error:
        first = str(error).partition("\n")[0]
        return _unknown(f"transformers' {shape.family.model} does not run without values: {first}")


def _unknown(reason: str) -> ModelWork:
    return ModelWork(WorkRecorder(), (), reason)
