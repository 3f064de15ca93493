"""The command `python -m zero_full fit`."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from zero_full.errors import FitError
from zero_full.fit.activation_estimate import Batch
from zero_full.fit.choice import PRECISIONS, Candidate, Fit, Machine, Run, fit
from zero_full.fit.hf_config import Shape, read
from zero_full.fit.snippets import snippet, torchrun
from zero_full.formatting import parse_size
from zero_full.plan import human


def main(options: argparse.Namespace) -> int:
    """Run `python -m zero_full fit`. Returns the exit code: 1 if nothing fits."""
    if options.write and not Path(options.write).parent.is_dir():
        raise FitError(f"--write: {Path(options.write).parent} is not a directory. Create it first")
    shape, machine, run = read(options.hf_config), _machine(options), _run(options)
    found = fit(shape, machine, run)
    if options.json:
        print("\n".join(json.dumps(_as_dict(each, found)) for each in found.candidates))
    else:
        print("\n".join(_lines(shape, machine, run, found)))
    if options.write and found.chosen is not None:
        _write(Path(options.write), found.chosen)
    return 0 if found.chosen is not None else 1


def _write(path: Path, chosen: Candidate) -> None:
    try:
        path.write_text(json.dumps(chosen.config, indent=2) + "\n")
    except OSError as error:
        raise FitError(f"--write: {path} cannot be written: {error.strerror}") from error


def _machine(options: argparse.Namespace) -> Machine:
    for name, value in {"--world": options.world, "--hosts": options.hosts}.items():
        _at_least_one(name, value)
    if options.world % options.hosts:
        raise FitError(f"--world: {options.world} GPUs cannot be divided equally among {options.hosts} hosts")
    names = ("memory", "host_memory", "disk")
    memory, host_memory, disk = (_size(name, getattr(options, name)) for name in names)
    assert memory is not None
    return Machine(options.hosts, options.world // options.hosts, memory, host_memory, disk)


def _size(name: str, text: str | None) -> int | None:
    option = f"--{name.replace('_', '-')}"
    if text is not None and text.strip()[-1:].isdigit():
        raise FitError(f"{option} {text} has no unit: write it as in {text.strip()}GB")
    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise FitError(f"{option}: {error}") from None


def _run(options: argparse.Namespace) -> Run:
    for name in ("sequences", "context", "micro_batches"):
        _at_least_one(f"--{name.replace('_', '-')}", getattr(options, name))
    batch = Batch(options.sequences, options.context, options.checkpointing)
    return Run(batch, options.micro_batches, options.precision)


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise FitError(f"{name}: {value} is less than 1")


def _as_dict(candidate: Candidate, found: Fit) -> dict[str, object]:
    return {
        "name": candidate.name,
        "verdict": candidate.verdict,
        "reason": candidate.reason,
        "chosen": candidate is found.chosen,
        "config": candidate.config,
        "plan": {**asdict(candidate.plan), "peak": candidate.plan.peak},
    }


def _lines(shape: Shape, machine: Machine, run: Run, found: Fit) -> Iterator[str]:
    numel = found.candidates[0].plan.numel
    yield f"{shape.family.model}, {numel:,} parameters"
    yield from (f"  {note}" for note in shape.notes)
    hosts = "1 host" if machine.hosts == 1 else f"{machine.hosts} hosts"
    yield f"{machine.world:,} GPUs of {human(machine.memory)} on {hosts}; {PRECISIONS[run.precision][0]}"
    how = "with" if run.batch.checkpoints else "without"
    yield (
        f"{run.batch.sequences:,} x {run.batch.context:,} tokens in a micro-batch, "
        f"{how} activation checkpointing"
    )
    yield ""
    for each in found.candidates:
        mark = ">" if each is found.chosen else " "
        peak = human(each.plan.peak) + (" + activations" if each.plan.activations is None else "")
        yield f"{mark} {each.name}: {each.verdict}, peak {peak}"
        yield f"    {each.reason}"
    yield ""
    yield from _answer(shape, machine, run, found)


def _answer(shape: Shape, machine: Machine, run: Run, found: Fit) -> Iterator[str]:
    if found.chosen is None:
        yield "Nothing fits. " + _hint(machine, run)
        return
    if found.chosen.verdict == "tight":
        yield "This is tight: memory that is not counted (see `plan`) may not fit. " + _hint(machine, run)
    yield from ("ds.json:", json.dumps(found.chosen.config, indent=2), "")
    yield from ("train.py:", snippet(shape, run), "")
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
