"""Format the result as commands and code to copy."""

from zero_full.fit.choice import PRECISIONS, Machine, Run
from zero_full.fit.hf_config import Shape

MASKED, CAUSAL = "AutoModelForMaskedLM", "AutoModelForCausalLM"


def torchrun(machine: Machine) -> str:
    """Return the command that starts the run, equal on every host."""
    if machine.hosts == 1:
        return f"torchrun --standalone --nproc-per-node {machine.gpus} train.py"
    meeting = "--rdzv-backend c10d --rdzv-endpoint HOST:29500 --rdzv-id 1"
    return f"torchrun --nnodes {machine.hosts} --nproc-per-node {machine.gpus} {meeting} train.py"


def snippet(shape: Shape, run: Run) -> str:
    """Return the code of train.py before the training loop, with deferred initialization.

    It sets the dtype, since that of config.json may differ from the plan's.
    """
    auto = MASKED if shape.family.model.endswith("ForMaskedLM") else CAUSAL
    dtype = "torch.float32" if PRECISIONS[run.precision][1] == 4 else "torch.bfloat16"
    lines = [
        "import torch",
        "import zero_full",
        f"from transformers import AutoConfig, {auto}",
        "",
        'config = AutoConfig.from_pretrained("config.json")',
        "with zero_full.Init():",
        f"    model = {auto}.from_config(config, dtype={dtype})",
        *(["model.gradient_checkpointing_enable()"] if run.batch.checkpoints else []),
        "model.train()",
        'engine, optimizer, _, _ = zero_full.initialize(model=model, config="ds.json")',
    ]
    return "\n".join(lines)
