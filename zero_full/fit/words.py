"""An answer as what one types next."""

from zero_full.fit.choice import Machine
from zero_full.fit.read import Shape

MASKED, CAUSAL = "AutoModelForMaskedLM", "AutoModelForCausalLM"


def torchrun(machine: Machine) -> str:
    """The line that starts it, on every host the same."""
    if machine.hosts == 1:
        return f"torchrun --standalone --nproc-per-node {machine.gpus} train.py"
    meeting = "--rdzv-backend c10d --rdzv-endpoint HOST:29500 --rdzv-id 1"
    return f"torchrun --nnodes {machine.hosts} --nproc-per-node {machine.gpus} {meeting} train.py"


def snippet(shape: Shape, stage: int, checkpoints: bool) -> str:
    """What stands in train.py before the loop."""
    auto = MASKED if shape.family.model.endswith("ForMaskedLM") else CAUSAL
    made = f'{auto}.from_config(AutoConfig.from_pretrained("config.json"))'
    lines = [
        "import zero_full",
        f"from transformers import AutoConfig, {auto}",
        "",
        *(["with zero_full.Init():", f"    model = {made}"] if stage == 3 else [f"model = {made}"]),
        *(["model.gradient_checkpointing_enable()"] if checkpoints else []),
        "model.train()",
        'engine, optimizer, _, _ = zero_full.initialize(model=model, config="ds.json")',
    ]
    return "\n".join(lines)
