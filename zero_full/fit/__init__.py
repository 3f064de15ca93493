"""Find the lowest ZeRO stage at which a Hugging Face model fits on a machine, from its config.json.

    python -m zero_full fit --hf-config config.json --world 8 --memory 80GB

    python -m zero_full fit --hf-config config.json --world 16 --memory 80GB --tensor 2

`families.txt` describes the supported model families. `hf_config.py` makes a model of that shape on the meta
device, and `zero_full.plan` counts its bytes, stage by stage, until one fits. `mesh.py` cuts the model for
tensor parallelism or a pipeline. Only activations are estimated: see [Note: activations] in
`activation_estimate.py`. Running the model itself would require transformers, and does for the forecast of a
step's time, whose operations are recorded from transformers' model (`model_operations.py`).
"""

from zero_full.errors import FitError
from zero_full.fit.activation_estimate import LOSS, Batch, activations, with_loss
from zero_full.fit.choice import LADDER, PRECISIONS, TIGHT, Candidate, Fit, Machine, Run, fit
from zero_full.fit.fit_command import main, snippet, torchrun
from zero_full.fit.grammar import families
from zero_full.fit.hf_config import Shape, read, shape_of

__all__ = [
    "LADDER",
    "LOSS",
    "PRECISIONS",
    "TIGHT",
    "Batch",
    "Candidate",
    "Fit",
    "FitError",
    "Machine",
    "Run",
    "Shape",
    "activations",
    "families",
    "fit",
    "main",
    "read",
    "shape_of",
    "snippet",
    "torchrun",
    "with_loss",
]
