"""What a forward of one of these models leaves behind for its backward, without running it.

[Note: activations] Per token a model saves, in each layer and outside of them, so many bytes for each element
of its streams. The numbers in `families.txt` are what `zero_full.plan` finds in transformers' own models,
with parameters of 16 or 32 bits; tests/hf measures them again. They are for sdpa attention without dropout,
which saves its masks, and without padding, for which there would be a mask of attention. No scores are saved
but where a family says `heads*context`. With activation checkpointing a layer saves what came into it, and
one layer at a time is computed again, and then saves the rest.

[Note: the loss] Where backward begins, transformers' loss has made more of the logits than is saved: a copy
in 32 bits, and gradients. With a large vocabulary that is more than anything else. `LOSS` is what a process
was measured to take beyond the formula, at the most, for each logit: Llama, GPT-2, Gemma 2, BERT and Falcon.
"""

from dataclasses import dataclass

from zero_full.fit.grammar import Sizes
from zero_full.fit.read import Shape

LOSS = {2: 10, 4: 12}  # bytes, by those of a parameter


@dataclass(frozen=True)
class Batch:
    """One micro-batch."""

    sequences: int
    context: int  # tokens in each
    checkpoints: bool = False  # activation checkpointing, layer by layer

    @property
    def tokens(self) -> int:
        """In all sequences."""
        return self.sequences * self.context


def activations(shape: Shape, batch: Batch, parameter_bytes: int) -> int | None:
    """Bytes of activations at the most. None: nobody has measured this family in this precision."""
    saved, bits = shape.family.saved, 8 * parameter_bytes
    if f"{bits} layer" not in saved:
        return None
    sizes: Sizes = {**shape.sizes, "context": batch.context}
    outside, layer = (saved[f"{bits} {part}"].value(sizes) for part in ("outside", "layer"))
    layers, tokens = shape.sizes["layers"], batch.tokens
    if batch.checkpoints:
        return tokens * (outside + layers * parameter_bytes * shape.sizes["width"] + layer)
    return tokens * (outside + layers * layer)


def with_loss(shape: Shape, batch: Batch, parameter_bytes: int) -> int | None:
    """The same, where backward begins: [Note: the loss]."""
    saved, logits = activations(shape, batch, parameter_bytes), batch.tokens * shape.sizes["vocabulary"]
    return None if saved is None else saved + LOSS[parameter_bytes] * logits
