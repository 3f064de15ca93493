"""What users of Accelerate, the Trainer and PEFT do with zero_full; torchrun starts it, rank 0 prints all.

`worked` says how far a training has ended from plain torch's, as a part of its way, `warned` what the guide
warns of, and `refused` is the text of the error by which something that cannot work ends.
"""

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from tempfile import mkdtemp
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers as hf
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import DataLoader

import zero_full
from tests.hf.families import FAMILIES, llama
from tests.hf.players import STEPS, Full, Run, optimizer_of, playing
from tests.hf.training import distance, wanted

FAMILY = FAMILIES["Llama"]
CONFIG = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}


def accelerator(micro_batches: int = 1) -> Accelerator:
    """A new one: they share what they know."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(cpu=True, gradient_accumulation_steps=micro_batches)


# What works --------------------------------------------------------------------------------------


def looped(full: Full, run: Run, theirs: Accelerator) -> None:
    """A loop of Accelerate's, around an engine."""
    optimizer = theirs.prepare(full.optimizer)
    for step in range(STEPS):
        for place in run.places(step, [full.rank]):
            with theirs.accumulate(full.engine):
                theirs.backward(full.engine(**FAMILY.batch(*place)).loss)
                optimizer.step()
                optimizer.zero_grad()


def trained_by_accelerate(stage: int, micro_batches: int) -> tuple[float, int]:
    """How far it ends from plain torch, and how many steps the engine has not counted."""
    run, theirs = Run("Llama", micro_batches=micro_batches, stage=stage), accelerator(micro_batches)
    with playing(replace(run, micro_batches=1), dist.get_rank()) as full:
        looped(full, run, theirs)
        got, counted = full.values(), full.engine.global_steps
    _, before, want = wanted(replace(run, stage=0), dist.get_world_size())
    return distance(got, before, want), STEPS - counted


def missing_data() -> float:
    """Rows that no rank has seen, or two have, of a loader that Accelerate has shared out."""
    loader = accelerator().prepare(DataLoader(list(range(8)), batch_size=2))
    mine = [row for rows in loader for row in rows.tolist()]
    all_of_them: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_of_them, mine)
    return float(sorted(row for rows in all_of_them for row in rows) != list(range(8)))


def alone() -> int:
    """Whether Accelerate sees other ranks on CPUs if nobody tells it that it is on CPUs."""
    AcceleratorState._reset_state(reset_partial_state=True)
    seen = Accelerator().num_processes
    AcceleratorState._reset_state(reset_partial_state=True)
    return int(seen)


def adapters_after_merging(stage: int) -> float:
    """How far the logits are from the engine's once adapters are part of the weights."""
    with playing(Run("LoRA", stage=stage), dist.get_rank()) as full:
        full.train(range(1))
        inputs = FAMILY.batch(9, 9, 0)
        full.engine.eval()
        with torch.no_grad():
            before = full.engine(**inputs).logits
        base = FAMILIES["LoRA"].make()
        base.load_state_dict(full.engine.module_state_dict())
        with torch.no_grad():
            return float((base.merge_and_unload().eval()(**inputs).logits - before).abs().max())


# What is refused ---------------------------------------------------------------------------------


def initialized(model: nn.Module) -> Any:
    return zero_full.initialize(model=model, optimizer=optimizer_of(model), config=CONFIG)


def plugin() -> None:
    AcceleratorState._reset_state()
    Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))


def prepared() -> None:
    initialized(accelerator().prepare(llama()))


def deepspeed_trainer() -> None:
    hf.TrainingArguments(output_dir=mkdtemp(), use_cpu=True, deepspeed=CONFIG)


def auto() -> None:
    model = llama()
    config = {"train_batch_size": "auto", "zero_optimization": {"stage": 2}}
    zero_full.initialize(model=model, optimizer=optimizer_of(model), config=config)


def trainer(clip: float) -> None:
    """The Trainer on a model that zero_full has; it wraps that in DDP."""
    AcceleratorState._reset_state()
    model = llama()
    _, optimizer, _, _ = initialized(model)
    arguments = hf.TrainingArguments(
        output_dir=mkdtemp(), use_cpu=True, max_steps=2, report_to=[], max_grad_norm=clip, disable_tqdm=True
    )
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 16
    hf.Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, None)).train()


def late_adapters() -> None:
    model = llama()
    engine, _, _, _ = initialized(model)
    peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    engine.backward(engine(**FAMILY.batch(0, 0, 0)).loss)
    engine.step()


def clipped_by_accelerate() -> None:
    model, theirs = llama(), accelerator()
    engine, _, _, _ = initialized(model)
    theirs.backward(engine(**FAMILY.batch(0, 0, 0)).loss)
    theirs.clip_grad_norm_(model.parameters(), 1.0)


def refusal(act: Callable[[], None]) -> str:
    """The error's text; empty if there is none."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> int:
    """Everything, and a line of JSON."""
    logging.getLogger("zero_full").setLevel(logging.ERROR)
    zero_full.init_distributed()
    worked, warned = {"data": missing_data()}, {"ranks seen without cpu=True": alone()}
    for stage in (2, 3):
        for micro_batches in (1, 2):
            name = f"Accelerate, stage {stage}, {micro_batches} micro-batches"
            worked[name], warned["steps not counted"] = trained_by_accelerate(stage, micro_batches)
        worked[f"merged adapters, stage {stage}"] = adapters_after_merging(stage)
    acts = {"prepared": prepared, "auto": auto, "late adapters": late_adapters, "clip": clipped_by_accelerate}
    acts |= {f"Trainer, clip {clip}": partial(trainer, clip) for clip in (0.0, 1.0)}
    acts |= {"deepspeed=": deepspeed_trainer, "plugin": plugin}  # last: they write to the environment
    refused = {name: refusal(act) for name, act in acts.items()}
    if dist.get_rank() == 0:
        print(json.dumps({"worked": worked, "warned": warned, "refused": refused}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
