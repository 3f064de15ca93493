"""Estimate the activations that a forward pass saves for backward, without running the model.

[Note: activations] Per token, a model saves a fixed number of bytes for each element of its hidden states, in
each layer and outside of the layers. The numbers in `families.txt` are those that `zero_full.plan` measures
for transformers' own models, with parameters of 16 or 32 bits; tests/hf measures them again. They are for
sdpa attention without dropout, which would save its masks, and without padding, which would need an attention
mask. Attention scores are saved only in families with `heads*context`. With activation checkpointing, a layer
saves its input only. Backward recomputes one layer at a time, which then saves the rest.

[Note: the loss] At the start of backward, transformers' loss has more tensors of the logits' size than are
saved: a copy in 32 bits, and gradients. With a large vocabulary these are the largest part. `LOSS` is the
largest memory per logit that was measured beyond the formula, with Llama, GPT-2, Gemma 2, BERT and Falcon.
"""

from dataclasses import dataclass

from zero_full.fit.grammar import Sizes
from zero_full.fit.hf_config import Shape

LOSS = {2: 10, 4: 12}  # bytes per parameter -> bytes per logit


@dataclass(frozen=True)
class Batch:
    """The size of one micro-batch."""

    sequences: int
    context: int  # tokens per sequence
    checkpoints: bool = False  # activation checkpointing, layer by layer

    @property
    def tokens(self) -> int:
        """The number of tokens in all sequences."""
        return self.sequences * self.context


def activations(
    shape: Shape,
    batch: Batch,
    parameter_bytes: int,
    layers: int | None = None,
    in_flight: int = 1,
    has_outside: bool = True,
) -> int | None:
    """Return the peak bytes of activations; None if this family was not measured in this precision.

    Of a pipeline stage: of `layers` layers (None: all), with `in_flight` micro-batches at a time, and with
    what is outside of the layers if `has_outside`.
    """
    saved, bits = shape.family.saved, 8 * parameter_bytes
    if f"{bits} layer" not in saved:
        return None
    sizes: Sizes = {**shape.sizes, "context": batch.context}
    outside, layer = (saved[f"{bits} {part}"].value(sizes) for part in ("outside", "layer"))
    outside *= has_outside
    count = in_flight * (shape.sizes["layers"] if layers is None else layers)
    if batch.checkpoints:
        return batch.tokens * (outside + count * parameter_bytes * shape.sizes["width"] + layer)
    return batch.tokens * (outside + count * layer)


def with_loss(shape: Shape, batch: Batch, parameter_bytes: int) -> int | None:
    """Return the bytes of activations at the start of backward. See [Note: the loss]."""
    saved, logits = activations(shape, batch, parameter_bytes), batch.tokens * shape.sizes["vocabulary"]
    return None if saved is None else saved + LOSS[parameter_bytes] * logits
