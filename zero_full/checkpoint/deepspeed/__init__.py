"""Read DeepSpeed's checkpoints, without DeepSpeed.

    source = open_deepspeed("checkpoints/run7")    a `Source`, or None if it is no checkpoint of DeepSpeed

`folder` recognizes files by their names. `ranges` and `model` have the code that all kinds share. Each kind
has a module: `zero` (stages 1 to 3), `plain` (without ZeRO) and `universal`.
"""

from zero_full.checkpoint.deepspeed.folder import is_deepspeeds, open_deepspeed

__all__ = ["is_deepspeeds", "open_deepspeed"]
