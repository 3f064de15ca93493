"""Checkpoints to go on from, and weights in files that everybody can read.

    save_checkpoint(module, optimizer, "out", "step10")    each rank its share; complete or not there
    load_checkpoint(module, optimizer, "out")              at any number of ranks, stage and precision
    save_weights(module, optimizer, "out")                 safetensors in Hugging Face's layout
    load_weights(module, optimizer, "out")                 each rank reads what it owns, at any world size

Every rank must call these. A failure on one rank is raised on all of them. One process alone calls

    export_checkpoint("checkpoints", "out")   safetensors of a checkpoint, without the model

which is `python -m zero_full export`, too.
"""

from zero_full.checkpoint.background import wait_for_checkpoint
from zero_full.checkpoint.consolidate import export_checkpoint
from zero_full.checkpoint.export import save_16bit_model, save_weights
from zero_full.checkpoint.folder import complete, latest_tag, unfinished
from zero_full.checkpoint.load import LoadOptions, Resumed, load_checkpoint
from zero_full.checkpoint.one_save import SaveOptions
from zero_full.checkpoint.reading import open_checkpoint
from zero_full.checkpoint.save import Extras, save_checkpoint
from zero_full.checkpoint.weights import Unmatched, load_weights
from zero_full.errors import CheckpointError

__all__ = [
    "CheckpointError",
    "Extras",
    "LoadOptions",
    "Resumed",
    "SaveOptions",
    "Unmatched",
    "complete",
    "export_checkpoint",
    "latest_tag",
    "load_checkpoint",
    "load_weights",
    "open_checkpoint",
    "save_16bit_model",
    "save_checkpoint",
    "save_weights",
    "unfinished",
    "wait_for_checkpoint",
]
