"""DeepSpeed's checkpoints, read without DeepSpeed.

    source = open_deepspeed("checkpoints/run7")    a `Source`, or None if nothing of DeepSpeed's is there

`folder` knows files by their names; `ranges` and `model` are what all kinds have in common, and the rest is a
file a kind: `zero` (stages 1 to 3), `plain` (no ZeRO) and `universal`.
"""

from zero_full.checkpoint.deepspeed.folder import is_deepspeeds, open_deepspeed

__all__ = ["is_deepspeeds", "open_deepspeed"]
