"""How much memory will a run need? An answer before there is a machine: bytes a rank, bytes sent a step.

    plan(model, "ds_config.json", world=64).table()
    python -m zero_full plan --model my_models:llama_7b --config ds_config.json --world 64 --stages

The model may be on the meta device: nothing is allocated.

[Note: what is exact] Parameters, buffers, gradients, master, optimizer state and traffic are what a rank's
ledger shows, to the byte; traffic of stage 3 if modules are called in the order in which they are listed.
What passes within a step is the worst that can come together: neighbouring buckets or units, while all
activations are still there. Activations are what autograd saves on the way forward, each storage once, and
the outputs; what it makes and drops on the way back is not counted, nor what it recomputes.

Not predicted at all: the allocator's fragmentation, what an accelerator's context and libraries take, NCCL's
buffers, temporaries of optimizers that are not fused, and the optimizer's step counters.
"""

import argparse
import importlib
import inspect
import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_full._compat import FakeTensorMode, identity_of
from zero_full.comm.shared import WINDOW
from zero_full.comm.topology import marked_as_expert
from zero_full.config import Config, Resolved, resolve
from zero_full.config.resolve import MICRO, TRAIN
from zero_full.config.schema import ZeroConfig
from zero_full.plan_table import gathered, kept, lay_out, moments, on_their_way, run_of, sent, updating
from zero_full.precision.dtypes import NAMES, Dtypes
from zero_full.trees import mapped

STAGES = (0, 1, 2, 3)
SCALES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
KEPT = {
    "parameters": "parameters",
    "buffers": "buffers",
    "gradients": "gradients",
    "master": "master",
    "moments": "optimizer state",
    "communication": "shared memory",
}
PASSING = {
    "gathered": "gathered parameters",
    "buckets": "gradients on their way",
    "activations": "activations",
    "update": "gradients as the master's type",
}


class PlanError(ValueError):
    """There can be no plan; the text says why and what to do."""


@dataclass(frozen=True)
class Plan:
    """Bytes on the rank that holds most, by kind. See [Note: what is exact]."""

    stage: int
    world: int
    numel: int  # elements of the model's parameters
    # Kept from step to step; gradients until `zero_grad`, which the engine calls after the step.
    parameters: int
    buffers: int
    gradients: int
    master: int  # a copy of what this rank owns of the parameters, if those have 16 bits
    moments: int  # what the optimizer remembers
    communication: int  # windows in shared memory
    # Beside that, at a step's worst moment.
    gathered: int  # whole parameters of units, while they are used
    buckets: int  # gradients that are not reduced yet, or are being reduced
    activations: int | None  # None: nobody has said what a batch is
    update: int  # gradients converted for the optimizer; by then the three above are gone
    sent: int  # bytes that this rank sends in a step

    @property
    def between_steps(self) -> int:
        """All that is kept."""
        return sum(getattr(self, kind) for kind in KEPT)

    @property
    def peak(self) -> int:
        """The most at one time: in backward, or while the optimizer steps."""
        backward = self.gathered + self.buckets + (self.activations or 0)
        return self.between_steps + max(backward, self.update)

    def table(self) -> str:
        """Every kind in human units and in bytes, and the totals."""
        rows = [
            *((f"  {name}", getattr(self, kind)) for kind, name in KEPT.items()),
            ("between steps", self.between_steps),
            *((f"  {name}", getattr(self, kind)) for kind, name in PASSING.items()),
            ("peak", self.peak),
            ("sent in a step", self.sent),
        ]
        title = f"stage {self.stage}, {self.world:,} ranks, {self.numel:,} parameters: bytes a rank"
        lines = [
            f"{name:<34}{human(size):>9}" + (f"{size:>24,}" if size is not None else "")
            for name, size in rows
        ]
        return "\n".join([title, *lines])

    def as_json(self) -> str:
        """One line with every number."""
        return json.dumps({**asdict(self), "between_steps": self.between_steps, "peak": self.peak})


def plan(
    model: nn.Module, config: Any, world: int, *, inputs: Sequence[Tensor] = (), device: str = "cuda"
) -> Plan:
    """What the rank that holds most will hold, with `world` data-parallel ranks.

    config   a dict or the path of a JSON file, as for `initialize`; batch sizes may be missing
    inputs   tensors like a micro-batch's positional inputs, on meta if you like; without them activations
             are unknown
    device   where it will run: only on "cpu" are there windows of shared memory
    """
    config = _resolved(config, world).config
    return _plan(model, config, world, device, _activations(model, config, inputs))


def plan_stages(
    model: nn.Module, config: Any, world: int, *, inputs: Sequence[Tensor] = (), device: str = "cuda"
) -> list[Plan]:
    """The same for every stage, whatever the config says, to choose from."""
    resolved = _resolved(config, world)
    left = _activations(model, resolved.config, inputs)
    return [_plan(model, _at_stage(resolved, stage), world, device, left) for stage in STAGES]


def _resolved(config: Any, world: int) -> Resolved:
    """The checked configuration; with micro-batches of 1 where it does not say."""
    given: Any = config.model_dump(exclude_unset=True) if isinstance(config, Config) else config
    if isinstance(given, str | Path):
        with suppress(OSError, ValueError):  # `resolve` tells what is wrong
            read = json.loads(Path(given).read_text(encoding="utf-8-sig"))
            given = read if _lacks_batch(read) else given
    return resolve({**given, MICRO: 1} if _lacks_batch(given) else given, world)


def _lacks_batch(config: Any) -> bool:
    return isinstance(config, Mapping) and config.get(TRAIN) is None and config.get(MICRO) is None


def _at_stage(resolved: Resolved, stage: int) -> Config:
    update: dict[str, Any] = {"stage": stage}
    if resolved.origins["zero_optimization.overlap_comm"] == "derived":
        update["overlap_comm"] = stage == 3
    zero = resolved.config.zero_optimization.model_copy(update=update)
    return resolved.config.model_copy(update={"zero_optimization": zero})


def _plan(model: nn.Module, config: Config, world: int, device: str, left: int | None) -> Plan:
    _refuse_experts(model)
    _refuse_plus_plus(config.zero_optimization)
    run = run_of(config, world)
    laid = lay_out(model, run)
    held = kept(laid, run)
    return Plan(
        stage=run.settings.stage,
        world=world,
        numel=sum(p.numel() for p in model.parameters()),
        parameters=held["parameters"],
        buffers=_bytes_of_buffers(model, run.dtypes),
        gradients=held["gradients"],
        master=held["master"],
        moments=moments(laid, config, run),
        communication=run.groups * WINDOW if device == "cpu" else 0,  # if all ranks are on one host
        gathered=gathered(laid, run)[1],
        buckets=on_their_way(laid, run),
        activations=left,
        update=updating(laid, config, run, device),
        sent=sent(laid, run),
    )


def _bytes_of_buffers(model: nn.Module, dtypes: Dtypes) -> int:
    found = dtypes.of_buffers(model)
    return sum(buffer.numel() * found[name].itemsize for name, buffer in model.named_buffers())


def _refuse_plus_plus(zero: ZeroConfig) -> None:
    uncounted = {
        "zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
        "zero_quantized_weights": zero.zero_quantized_weights,
        "zero_quantized_gradients": zero.zero_quantized_gradients,
    }
    keys = ", ".join(f"zero_optimization.{key}" for key, used in uncounted.items() if used)
    if keys and zero.stage == 3:
        raise PlanError(f"a plan does not count {keys}: remove it to see the rest")


def _refuse_experts(model: nn.Module) -> None:
    experts = [name for name, p in model.named_parameters() if marked_as_expert(name, p)]
    if experts:
        raise PlanError(
            f"{experts[0]} is marked as an expert (allreduce = False), and a plan knows no expert groups: "
            "remove the marks to see the model sharded over all ranks"
        )


def _activations(model: nn.Module, config: Config, inputs: Sequence[Tensor]) -> int | None:
    return activations(model, inputs, run_of(config, 1).dtypes) if inputs else None


def activations(model: nn.Module, inputs: Sequence[Tensor], dtypes: Dtypes) -> int:
    """Bytes that a forward leaves behind for its backward, with its inputs and outputs.

    Fake tensors and not meta ones: on meta, attention takes a way that saves all scores, which neither a CPU
    nor a GPU does.
    """
    seen: dict[int, torch.UntypedStorage] = {}
    own: dict[int, torch.UntypedStorage] = {}

    def note(into: dict[int, torch.UntypedStorage], value: Any) -> Any:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            into[identity_of(storage)] = storage  # kept, or another one might get its number
        return value

    with FakeTensorMode(), torch.device("cpu"):
        state = {name: _like(t, dtypes.of(t.dtype)) for name, t in model.named_parameters()}
        buffers = dtypes.of_buffers(model)
        state |= {name: _like(t, buffers[name]) for name, t in model.named_buffers()}
        given = tuple(_like(t, t.dtype) for t in inputs)
        mapped(partial(note, own), state)
        mapped(partial(note, seen), given)
        with torch.autograd.graph.saved_tensors_hooks(partial(note, seen), lambda saved: saved):
            outputs = _forward(model, state, given)
        mapped(partial(note, seen), outputs)
    return sum(storage.nbytes() for key, storage in seen.items() if key not in own)


def _like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(tensor.shape, dtype=dtype).requires_grad_(tensor.requires_grad)


def _forward(model: nn.Module, state: dict[str, Tensor], given: tuple[Tensor, ...]) -> Any:
    try:
        return torch.func.functional_call(model, state, given)
    except Exception as error:
        shapes = ", ".join(f"{'x'.join(map(str, t.shape))}:{t.dtype}".replace("torch.", "") for t in given)
        raise PlanError(
            f"the model's forward failed on {shapes} with {type(error).__name__}: {error}\n"
            "Nothing is computed here, so it must not look at values; without a batch there is a plan for "
            "everything else"
        ) from error


# The command line --------------------------------------------------------------------------------


def main(options: argparse.Namespace) -> int:
    """Print what `python -m zero_full plan` was asked for."""
    model = model_of(options.model)
    inputs = [input_of(text) for text in options.batch]
    make = plan_stages if options.stages else lambda *given, **named: [plan(*given, **named)]
    plans = make(model, options.config, options.world, inputs=inputs, device=options.device)
    if options.json:
        print("\n".join(each.as_json() for each in plans))
    else:
        print(side_by_side(plans) if options.stages else plans[0].table())
    return 0


def model_of(name: str) -> nn.Module:
    """The model that `module:function` makes, on the meta device."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise PlanError(f'--model {name}: give it as module:function, such as "my_models:llama_7b"')
    make = _attribute(_module(module_name), attribute)
    if isinstance(make, nn.Module):
        return make
    try:
        with suppress(ValueError):  # builtins have no signature
            inspect.signature(make).bind()
    except TypeError as error:
        raise PlanError(
            f"--model {name}: it cannot be called without arguments ({error}); name a function that can, and "
            "returns the model"
        ) from None
    with torch.device("meta"):
        model = make()
    if not isinstance(model, nn.Module):
        raise PlanError(f"--model {name}: it returned {model!r:.60}, not an nn.Module")
    return model


def _module(name: str) -> Any:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # it is there, and misses something itself
        raise PlanError(
            f"--model {name}:...: there is no module {error.name}; run this in the folder that has it"
        ) from None


def _attribute(module: Any, name: str) -> Any:
    if not hasattr(module, name):
        known = [each for each, value in vars(module).items() if callable(value) and each[0] != "_"]
        raise PlanError(f"--model: {module.__name__} has no {name}; it has {', '.join(known) or 'nothing'}")
    return getattr(module, name)


def input_of(text: str) -> Tensor:
    """ "2x1024:int64" as a tensor without values."""
    found = re.fullmatch(r"(\d+(?:x\d+)*):(\w+)", text)
    dtype = NAMES.get(found[2], getattr(torch, found[2], None)) if found else None
    if found is None or not isinstance(dtype, torch.dtype):
        raise PlanError(f'--batch {text}: give shape and type of an input, such as "2x1024:int64"')
    return torch.empty([int(size) for size in found[1].split("x")], dtype=dtype, device="meta")


def side_by_side(plans: Sequence[Plan]) -> str:
    """One row for each stage."""
    kinds = ["parameters", "gradients", "master", "moments", "gathered", "buckets", "activations"]
    rows = [["stage", *kinds, "between steps", "peak", "sent in a step"]]
    for each in plans:
        sizes = [getattr(each, kind) for kind in kinds]
        sizes += [each.between_steps, each.peak, each.sent]
        rows.append([str(each.stage), *map(human, sizes)])
    wide = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, wide, strict=True)) for row in rows]
    return "\n".join([f"{plans[0].world:,} ranks, {plans[0].numel:,} parameters: bytes a rank", *lines])


def human(size: int | None) -> str:
    """Three digits and a unit; decimal, as in the papers."""
    if size is None:
        return "unknown"
    for scale, unit in SCALES:
        if size >= scale * 0.9995:
            number = size / scale
            return f"{number:.{max(0, 3 - len(str(round(number))))}f} {unit}"
    return f"{size} B"
