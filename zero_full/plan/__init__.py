"""How much memory will a run need? An answer before there is a machine: bytes a rank, bytes sent a step.

    plan(model, "ds_config.json", world=64).table()
    python -m zero_full plan --model my_models:llama_7b --config ds_config.json --world 64 --stages

The model may be on the meta device: nothing is allocated.

[Note: what is exact] A plan is the runtime itself, run for a step on the meta device as the first of `world`
ranks (`rehearsal.py`). Parameters, buffers, gradients, master, optimizer state and traffic are what a rank's
ledger shows, to the byte. What passes within a step is, row by row, the most at one time on an accelerator;
a CPU holds on to a reduced buffer for the next bucket, and makes wider copies of 16-bit numbers to sum them.

A plan's step calls modules in the order in which they are listed, each once, see [Note: a pretended pass].
On that depend stage 3's traffic and gathered parameters, and which gradients are on their way together.

The rows' worst moments need not be the same: the peak, which adds them up, is the worst that can come
together. Activations are what autograd saves on the way forward, each storage once, and the outputs; of what
it makes and drops on the way back only gradients of parameters are counted, and not what it recomputes.

Not predicted at all: the allocator's fragmentation, what an accelerator's context and libraries take, NCCL's
buffers, temporaries of an optimizer's own step, and its step counters.
"""

from zero_full.errors import PlanError
from zero_full.formatting import SCALES, human
from zero_full.plan.activations import activations
from zero_full.plan.answer import Plan, side_by_side
from zero_full.plan.ask import STAGES, plan, plan_stages
from zero_full.plan.command import input_of, main, model_of

__all__ = [
    "SCALES",
    "STAGES",
    "Plan",
    "PlanError",
    "activations",
    "human",
    "input_of",
    "main",
    "model_of",
    "plan",
    "plan_stages",
    "side_by_side",
]
