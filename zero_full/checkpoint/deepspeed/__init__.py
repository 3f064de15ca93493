"""Read DeepSpeed's checkpoints, without DeepSpeed.

    source = open_deepspeed("checkpoints/run7")    a `Source`, or None if it is no checkpoint of DeepSpeed

`tag_folder` recognizes files by their names. `saved_source` and `model` have the code that all kinds share.
Each kind has a module: `zero` (stages 1 to 3), `stage0` (without ZeRO) and `universal`.
"""

from zero_full.checkpoint.deepspeed.tag_folder import is_deepspeeds, open_deepspeed

__all__ = ["is_deepspeeds", "open_deepspeed"]
