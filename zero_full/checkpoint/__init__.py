"""Weights in files that everybody can read: written from sharded parameters, read into them.

    save_weights(module, optimizer, "out")    safetensors in Hugging Face's layout
    load_weights(module, optimizer, "out")    each rank reads what it owns, at any world size and stage

Every rank must call these. A failure on one rank is raised on all of them.
"""

from zero_full.checkpoint.export import save_16bit_model, save_weights
from zero_full.checkpoint.failure import CheckpointError
from zero_full.checkpoint.weights import Unmatched, load_weights

__all__ = ["CheckpointError", "Unmatched", "load_weights", "save_16bit_model", "save_weights"]
