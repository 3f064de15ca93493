"""Weights in files that everybody can read: written from sharded parameters, read into them.

    save_weights(module, optimizer, "out")    safetensors in Hugging Face's layout
    load_weights(module, optimizer, "out")    each rank reads what it owns, at any world size and stage

Every rank must call these. A failure on one rank is raised on all of them. One process alone calls

    export_checkpoint("checkpoints", "out")   safetensors of a checkpoint, without the model

which is `python -m zero_full export`, too.
"""

from zero_full.checkpoint.consolidate import export_checkpoint
from zero_full.checkpoint.export import save_16bit_model, save_weights
from zero_full.checkpoint.failure import CheckpointError
from zero_full.checkpoint.weights import Unmatched, load_weights

__all__ = [
    "CheckpointError",
    "Unmatched",
    "export_checkpoint",
    "load_weights",
    "save_16bit_model",
    "save_weights",
]
