"""DeepSpeed by name: `install` puts a module `deepspeed` into this process, and zero_full does its work.

For programs that import DeepSpeed themselves, such as Hugging Face's Trainer, Accelerate, TRL and PEFT:

    import zero_full.integrations.deepspeed

    zero_full.integrations.deepspeed.install()  # before transformers and accelerate are imported

or, with a script that stays as it is, `python -m zero_full as-deepspeed train.py`.

`surface.py` lists the names, `engine.py` is the engine that they get, `run.py` the command.
"""

from zero_full.integrations.deepspeed.install import install
from zero_full.integrations.deepspeed.surface import VERSION

__all__ = ["VERSION", "install"]
