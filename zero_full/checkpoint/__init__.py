"""Sharded checkpoints to resume training from, and weights exported as safetensors.

    save_checkpoint(module, optimizer, "out", "step10")    each rank writes its shards; published atomically
    load_checkpoint(module, optimizer, "out")              at any world size, stage and precision
    save_weights(module, optimizer, "out")                 safetensors in Hugging Face's layout
    load_weights(module, optimizer, "out")                 each rank reads its own shards, at any world size

Every rank must call these functions. A failure on one rank is raised on all ranks. A single process calls

    export_checkpoint("checkpoints", "out")   convert a checkpoint to safetensors, without the model

which is also the command `python -m zero_full export`.

Names are imported on first use, because `inspect` reads manifests without torch.
"""

from zero_full.lazy_names import on_first_use

__all__, __getattr__ = on_first_use(globals())
