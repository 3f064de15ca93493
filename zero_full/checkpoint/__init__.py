"""Sharded checkpoints to resume training from, and weights exported as safetensors.

    save_checkpoint(module, optimizer, "out", "step10")    each rank writes its shards; published atomically
    load_checkpoint(module, optimizer, "out")              at any world size, stage and precision
    save_weights(module, optimizer, "out")                 safetensors in Hugging Face's layout
    load_weights(module, optimizer, "out")                 each rank reads its own shards, at any world size

Every rank must call these functions. A failure on one rank is raised on all ranks. A single process calls

    export_checkpoint("checkpoints", "out")   convert a checkpoint to safetensors, without the model

which is also the command `python -m zero_full export`.
"""

from zero_full.checkpoint.async_save import wait_for_checkpoint
from zero_full.checkpoint.consolidate import export_checkpoint
from zero_full.checkpoint.folder import SaveOptions, complete, latest_tag, unfinished
from zero_full.checkpoint.load import LoadOptions, Resumed, load_checkpoint
from zero_full.checkpoint.reading import open_checkpoint
from zero_full.checkpoint.save import Extras, save_checkpoint
from zero_full.checkpoint.weights import Unmatched, load_weights, save_16bit_model, save_weights
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
