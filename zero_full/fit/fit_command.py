"""The command `python -m zero_full fit`: its result as text, JSON, and code to copy."""

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from zero_full.arguments import size_of
from zero_full.errors import FitError
from zero_full.fit.activation_estimate import Batch
from zero_full.fit.choice import PRECISIONS, Candidate, Fit, Machine, Run, fit
from zero_full.fit.hf_config import Shape, read
from zero_full.fit.mesh import HEADS, cut_for_tensor
from zero_full.formatting import INDENT, terminal_width
from zero_full.plan import human
from zero_full.plan.bars import Bars, Style
from zero_full.plan.result import rate_cell, time_cell, time_numbers
from zero_full.progress import StatusLine

MASKED, CAUSAL = "AutoModelForMaskedLM", "AutoModelForCausalLM"


def main(options: argparse.Namespace) -> int:
    """Run `python -m zero_full fit`. Returns the exit code: 1 if nothing fits."""
    shape = read(options.hf_config)
    machine = _machine(options)
    batch = Batch(options.sequences, options.context, options.checkpointing)
    run = Run(batch, options.micro_batches, options.precision)
    with StatusLine(sys.stderr) as line:
        found = fit(shape, machine, run, line.show, rates=options.machine, fastest=options.fastest)
    if options.json:
        print("\n".join(json.dumps(_as_dict(each, found)) for each in found.candidates))
    else:
        print("\n".join(_lines(shape, machine, run, found)))
    if options.write and found.chosen is not None:
        try:
            Path(options.write).write_text(json.dumps(found.chosen.config, indent=2) + "\n")
        except OSError as error:
            raise FitError(f"--write: {options.write} cannot be written: {error.strerror}") from error
    return 0 if found.chosen is not None else 1


def _machine(options: argparse.Namespace) -> Machine:
    if options.world % options.hosts:
        unit = Machine(1, 1, 0, device=options.device).unit
        raise FitError(
            f"--world: {options.world} {unit}s cannot be divided equally among {options.hosts} hosts"
        )
    names = ("memory", "host_memory", "disk")
    memory, host_memory, disk = (_size(name, getattr(options, name)) for name in names)
    assert memory is not None
    gpus, mesh = options.world // options.hosts, (options.tensor, options.pipe)
    return Machine(options.hosts, gpus, memory, host_memory, disk, *mesh, options.device)


def _size(name: str, text: str | None) -> int | None:
    return None if text is None else size_of(f"--{name.replace('_', '-')}", text)


def _as_dict(candidate: Candidate, found: Fit) -> dict[str, object]:
    return {
        "name": candidate.name,
        "verdict": candidate.verdict,
        "reason": candidate.reason,
        "chosen": candidate is found.chosen,
        "config": candidate.config,
        "plan": {
            **asdict(candidate.plan),
            "peak": candidate.plan.peak,
            "step_time": time_numbers(candidate.plan.step_time),
        },
    }


def _lines(shape: Shape, machine: Machine, run: Run, found: Fit) -> Iterator[str]:
    numel = sum(p.numel() for p in shape.model().parameters())
    yield f"{shape.family.model}, {numel:,} parameters"
    yield from (f"  {note}" for note in shape.notes)
    hosts = "1 host" if machine.hosts == 1 else f"{machine.hosts} hosts"
    ranks = f"{machine.world:,} {machine.unit}s of {human(machine.memory)} on {hosts}"
    yield f"{ranks}; {PRECISIONS[run.precision][0]}"
    if machine.tensor > 1:
        yield f"{machine.data:,} data ranks x {machine.tensor:,} tensor ranks"
    if machine.pipe > 1:
        yield f"{machine.data:,} data ranks x {machine.pipe:,} pipeline ranks (1f1b)"
    how = "with" if run.batch.checkpoints else "without"
    yield (
        f"{run.batch.sequences:,} x {run.batch.context:,} tokens in a micro-batch, "
        f"{how} activation checkpointing"
    )
    yield ""
    width = terminal_width()
    plans = [each.plan for each in found.candidates]
    bars = Bars(plans, width - INDENT, Style.of(sys.stdout), machine.memory, machine.unit)
    for each in found.candidates:
        mark = ">" if each is found.chosen else " "
        peak = human(each.plan.peak) + (" + activations" if each.plan.activations is None else "")
        yield f"{mark} {each.name}: {each.verdict}, peak {peak}"
        yield f"    {each.reason}"
        if (time := each.plan.step_time) is not None:
            rate = rate_cell(time)
            yield f"    step, a forecast: {time_cell(time)}" + (
                f"; tokens/s, all ranks: {rate}" if rate else ""
            )
        yield f"    {bars.bar(each.plan)}"
    yield from bars.legend(width)
    for reason in dict.fromkeys(each.plan.not_forecast for each in found.candidates):
        if reason:
            names = [each.name for each in found.candidates if each.plan.not_forecast == reason]
            yield from textwrap.wrap(f"time not forecast at {'; '.join(names)}: {reason}", width)
    yield ""
    yield from _answer(shape, machine, run, found)


def _answer(shape: Shape, machine: Machine, run: Run, found: Fit) -> Iterator[str]:
    if found.chosen is None:
        yield "Nothing fits. " + _hint(machine, run)
        return
    if found.chosen.verdict == "tight":
        yield "This is tight: memory that is not counted (see `plan`) may not fit. " + _hint(machine, run)
    yield from ("ds.json:", json.dumps(found.chosen.config, indent=2), "")
    yield from ("train.py:", snippet(shape, run, machine), "")
    yield from ("start:", torchrun(machine))


def _hint(machine: Machine, run: Run) -> str:
    """Return a hint with the options that were not tried."""
    ways = [
        *(["--checkpointing"] if not run.batch.checkpoints else []),
        *(["--host-memory"] if machine.host_memory is None else []),
        *(["--disk"] if machine.disk is None else []),
        *(["fewer --sequences"] if run.batch.sequences > 1 else []),
        "a larger --world",
    ]
    return f"Try {', '.join(ways[:-1])} or {ways[-1]}" if ways[:-1] else f"Try {ways[0]}"


def torchrun(machine: Machine) -> str:
    """Return the command that starts the run, equal on every host."""
    if machine.hosts == 1:
        return f"torchrun --standalone --nproc-per-node {machine.gpus} train.py"
    meeting = "--rdzv-backend c10d --rdzv-endpoint HOST:29500 --rdzv-id 1"
    return f"torchrun --nnodes {machine.hosts} --nproc-per-node {machine.gpus} {meeting} train.py"


def snippet(shape: Shape, run: Run, machine: Machine | None = None) -> str:
    """Return the code of train.py before the training loop, with deferred initialization.

    With tensor parallelism the model is built whole and then cut. A pipeline is written by hand.

    It sets the dtype, since that of config.json may differ from the plan's.
    """
    auto = MASKED if shape.family.model.endswith("ForMaskedLM") else CAUSAL
    dtype = "torch.float32" if PRECISIONS[run.precision][1] == 4 else "torch.bfloat16"
    if machine is not None and machine.pipe > 1:
        last = shape.family.modules[-1].name
        return (
            f"# Write {shape.family.model} as a list of layers, up to {last} and the loss:\n"
            f"# model = zero_full.PipelineModule(layers, num_stages={machine.pipe}, loss_fn=...)\n"
            "# The page Pipelines of the guide shows how. Then:\n"
            'engine, *_ = zero_full.initialize(model=model, config="ds.json")'
        )
    if machine is not None and machine.tensor > 1:
        return "\n".join(_cut_lines(shape, run, machine, auto, dtype))
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


def _cut_lines(shape: Shape, run: Run, machine: Machine, auto: str, dtype: str) -> list[str]:
    """Return the lines that build the model whole and cut it over a mesh."""
    styles = cut_for_tensor(shape, shape.model(), machine.tensor)
    heads = {name for name in styles if name.rpartition(".")[2] in HEADS}
    parallel = "torch.distributed.tensor.parallel"
    return [
        "import torch",
        "import zero_full",
        "from torch.distributed.device_mesh import init_device_mesh",
        "from torch.distributed.tensor import Replicate",
        f"from {parallel} import ColwiseParallel, RowwiseParallel, parallelize_module",
        f"from transformers import AutoConfig, {auto}",
        "",
        'MESH = ("data", "tensor")',
        "zero_full.init_distributed()",
        'device = "cpu"' if machine.is_cpu else "device = torch.accelerator.current_accelerator().type",
        f"mesh = init_device_mesh(device, ({machine.data}, {machine.tensor}), mesh_dim_names=MESH)",
        'config = AutoConfig.from_pretrained("config.json")',
        "torch.manual_seed(0)  # tensor ranks need equal values",
        f"model = {auto}.from_config(config, dtype={dtype}).to(device)",
        *(["model.gradient_checkpointing_enable()"] if run.batch.checkpoints else []),
        "cuts = {",
        *(
            f'    "{name}": {kind}Parallel({"output_layouts=Replicate()" if name in heads else ""}),'
            for name, kind in styles.items()
        ),
        "}",
        'parallelize_module(model, mesh["tensor"], cuts)',
        "model.train()",
        'engine, optimizer, _, _ = zero_full.initialize(model=model, config="ds.json", mesh=mesh)',
    ]
