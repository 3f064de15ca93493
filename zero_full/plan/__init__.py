"""Predict the memory of a training run without running it: bytes per rank, and bytes sent per step.

    plan(model, "ds_config.json", world=64).table()
    python -m zero_full plan --model my_models:llama_7b --config ds_config.json --world 64 --stages
    python -m zero_full plan --model my_models:pipeline --config ds_config.json --world 16 --pipe 4

The model may be on the meta device. No memory is allocated for it.

[Note: what is exact] A plan runs the runtime itself for one step on the meta device, as the first of `world`
ranks (`simulation.py`). Parameters, buffers, gradients, master weights, optimizer state and traffic equal a
rank's ledger, to the byte. Each row of temporary memory is its peak within a step on an accelerator. A CPU
needs more: it keeps a reduced buffer for the next bucket, and sums 16-bit numbers in wider copies.

A plan's step calls each module once, in the order of the model's own backward if inputs are given, else in
the order of registration: see [Note: a fake pass]. Stage 3's traffic and gathered parameters depend on this
order, and so does the set of gradients in flight at one time.

Of a pipeline, each place is planned (`pipeline_stages.py`). Its activations are those of the micro-batches in
flight in torch's schedule, with what torch's stages hold besides: see [Note: what torch holds].

The rows may peak at different times, so the total peak is less than their sum. With inputs, it is the largest
sum of all kinds at one moment, with gradients of activations and recomputed activations: see [Note: moments
of a pass]. It is the sum of the rows, an upper bound, in four cases: without inputs, if backward fails
without values, of a pipeline, and on a CPU, which keeps the memory of gradients from step to step. Then the
table says "at most", and `passes` is None. The row of activations has what is alive after forward: storages
that autograd has saved, each counted once, inputs and outputs.

With the rates of a machine (`machine=`, a file of `doctor --measure --out`), a plan of a CPU's run forecasts
the time of a step, too: see [Note: the time of a step] in `step_time.py`.

Not predicted: rounding and fragmentation of the allocator, the memory of an accelerator's context and
libraries, NCCL's buffers, temporaries inside an operator or of an optimizer's own step, its step counters,
and a loss that is computed outside the model.
"""

from zero_full.errors import PlanError
from zero_full.formatting import SCALES, human
from zero_full.plan.activations import activations
from zero_full.plan.forecast import ModelWork
from zero_full.plan.machine_file import MachineRates, read_rates
from zero_full.plan.plan_command import input_of, main, model_of
from zero_full.plan.planning import STAGES, model_work, plan, plan_stages
from zero_full.plan.result import Plan, side_by_side
from zero_full.plan.work import WorkRecorder

__all__ = [
    "SCALES",
    "STAGES",
    "MachineRates",
    "ModelWork",
    "Plan",
    "PlanError",
    "WorkRecorder",
    "activations",
    "human",
    "input_of",
    "main",
    "model_of",
    "model_work",
    "plan",
    "plan_stages",
    "read_rates",
    "side_by_side",
]
