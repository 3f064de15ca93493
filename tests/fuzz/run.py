"""A leg of a case on one rank of zero_full, and what this rank has to show."""

import logging
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zero_full
from tests.fuzz.case import ONE_BIT, SCHEDULES, Case, Layout, class_of, config_of, group_options
from tests.fuzz.defects import planted
from tests.fuzz.loops import LOOPS, OF_TORCH, do_between
from tests.fuzz.model import (
    Layers,
    Net,
    cut,
    data,
    freeze,
    layers_of,
    loss_of,
    name_in_net,
    pair,
    whole,
)
from tests.slow_copies import slow_copies
from zero_full.offload import BlockTier
from zero_full.optim import muon_groups
from zero_full.shard.deal import units

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp16, dynamic": torch.float16}
JOINING = {"PARTS": 1, "MIN_JOINED": 2}  # how units of small models are joined, too
ENTRIES = ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum", "square_avg", "step")
Values = dict[str, Tensor]


@dataclass
class Shown:
    """What one rank shows of a leg."""

    error: str = ""
    where: str = ""
    step: int = -1  # the last one that has begun
    losses: list[list[float]] = field(default_factory=list)  # by step and micro-batch
    norms: list[float | None] = field(default_factory=list)
    applied: list[bool] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)  # after each step
    seen: list[Values] = field(default_factory=list)  # by step: parameters as the first forward has used them
    differed: str = ""  # a parameter that a later forward of the same step has seen with other values
    values: Values = field(default_factory=dict)
    masters: Values = field(default_factory=dict)
    state: dict[str, Values] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)


def legs(comm: Any, works: Sequence[tuple[Case, int, str]], defect: str) -> list[Shown]:
    """Legs, one after the other, until one fails. `works`: case, number of the leg, folder."""
    found: list[Shown] = []
    logging.getLogger("zero_full").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    with planted(defect) if defect else ExitStack():
        for case, number, folder in works:
            found.append(Shown())
            leg(comm.rank, case, number, Path(folder), found[-1])
            if found[-1].error:
                break
    return found


def leg(rank: int, case: Case, number: int, folder: Path, shown: Shown) -> None:
    """Run it; an error is a part of what is shown."""
    engine = None
    try:
        layout, steps = case.legs()[number]
        place, rank = rank, data_rank(layout, rank)
        engine, optimizer = begin(case, layout, rank, folder)
        if number:
            _load(case, engine, place, folder)
        _train(case, layout, steps, engine, optimizer, rank, folder, shown)
        if case.then is not None and not number:
            _save(case, engine, place, folder)
        _collect(case, engine, shown)
    except Exception as error:
        shown.error = f"{type(error).__name__}: {error}"
        shown.where = traceback.format_exc()[-3000:]
    if engine is not None:
        try:
            engine.destroy()
        except Exception as error:
            if not shown.error:
                shown.error, shown.where = f"in destroy: {error!r}", traceback.format_exc()[-3000:]


def data_rank(layout: Layout, rank: int) -> int:
    """Which of the data a rank trains on."""
    return rank % layout.world if layout.pipe else rank // layout.tensor


def model_of(case: Case, layout: Layout, rank: int) -> nn.Module:
    """The model of a rank, by the rank of its data."""
    shape = case.width, case.parts, case.uses, case.seed + (rank if case.differ else 0)
    if not case.is_pipeline:
        return Net(*shape)
    if not layout.pipe:
        return Layers(*shape)
    return zero_full.PipelineModule(
        layers_of(*shape),
        num_stages=layout.pipe,
        loss_fn=loss_of,
        partition_method="uniform",
        stages_per_rank=SCHEDULES[layout.schedule],
        placement="v" if layout.schedule == "zbv" else "loop",
    )


def begin(case: Case, layout: Layout, rank: int, folder: Path) -> tuple[Any, Any]:
    """The engine and its optimizer."""
    torch.manual_seed(0)
    net: Any = model_of(case, layout, rank)
    freeze(net, case.parts, 0)
    if layout.whole and layout.stage == 3:
        zero_full.set_z3_leaf_modules(net, [type(net)])
    arguments: dict[str, Any] = {}
    if layout.tensor > 1:
        mesh = init_device_mesh("cpu", (layout.world, layout.tensor), mesh_dim_names=("data", "tensor"))
        cut(net, case.parts, mesh["tensor"])
        arguments["mesh"] = mesh
    arguments["model_parameters"] = groups_of(case, net)
    if case.instance:
        arguments["optimizer"] = instance_of(case, net)
        del arguments["model_parameters"]
    if case.decay:
        arguments["lr_scheduler"] = schedule_of
    copies = slow_copies(1e7) if "copies" in layout.tier else ExitStack()
    small = mock.patch("zero_full.start.from_config.BlockTier", partial(BlockTier, part_numel=30))
    with copies, small, mock.patch.multiple(units, **JOINING) if layout.joins else ExitStack():
        engine, optimizer, _, _ = zero_full.initialize(
            model=net, config=config_of(case, layout, str(folder)), **arguments
        )
    return engine, optimizer


def trained(case: Case, net: nn.Module) -> list[nn.Parameter]:
    """What the optimizer is given: all but what is always frozen, which many scripts leave out."""
    found = set()
    for step in reversed(range(case.steps)):
        freeze(net, case.parts, step)
        found |= {p for p in net.parameters() if p.requires_grad}
    return [p for p in net.parameters() if p in found]


def groups_of(case: Case, net: nn.Module) -> list[dict[str, Any]]:
    """One group, or matrices and all else."""
    params = trained(case, net)
    if not case.groups:
        return [{"params": params, **group_options(case, 0)}]
    halves = [[p for p in params if (p.dim() > 1) == matrices] for matrices in (True, False)]
    pairs = zip(halves, (2, 1), strict=True)
    return [{"params": half, **group_options(case, dims)} for half, dims in pairs if half]


def instance_of(case: Case, net: nn.Module) -> torch.optim.Optimizer:
    """The optimizer as a script makes it."""
    groups = groups_of(case, net)
    if case.optimizer == "Muon":
        groups = muon_groups(net, groups)
    name, options = class_of(case)
    made: Any = getattr(torch.optim, name, None)
    if name == "Muon" or made is None:
        made = getattr(zero_full, name)
    return made(groups, **options)


def schedule_of(optimizer: Any) -> Any:
    """A schedule by which the learning rate becomes smaller."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, decayed)


def decayed(updates: int) -> float:
    """The rate's factor after so many updates."""
    return 1 / (1 + 0.5 * updates)


def _train(
    case: Case,
    layout: Layout,
    steps: range,
    engine: Any,
    optimizer: Any,
    rank: int,
    folder: Path,
    shown: Shown,
) -> None:
    net, dtype = engine.module, DTYPES.get(layout.precision, torch.float32)
    for step in steps:
        shown.step = step
        shown.losses.append([])
        freeze(net, case.parts, step)
        with _watching(case, net, shown):
            micros = range(case.micro_batches)
            if layout.pipe:
                batch = [pair(*_batch(case, dtype, (step, micro, rank)), micro) for micro in micros]
                shown.losses[-1].append(float(engine.train_batch(iter(batch))))
            else:
                noted = shown.losses[-1]
                act = partial(_loss, case, dtype, noted, engine, folder)
                calls = [partial(act, (step, micro, rank)) for micro in micros]
                LOOPS[case.loop](engine, optimizer, calls)
        last = optimizer.last
        shown.norms.append(last.grad_norm)
        shown.applied.append(last.applied)
        shown.scales.append(engine.loss_scale())
        if case.loop in OF_TORCH and last.applied and engine.lr_scheduler is not None:
            engine.lr_scheduler.step()
        if case.between:
            x, ids = data(case.seed, step, 9, rank, case.width)
            batch = (x.to(dtype), ids, rank, 0)
            if layout.pipe:
                batch = [pair(x.to(dtype), ids, 0)] * case.micro_batches
            do_between(case.between, engine, batch, folder, step)


def _loss(
    case: Case,
    dtype: torch.dtype,
    noted: list[float],
    engine: Any,
    folder: Path,
    place: tuple[int, int, int],
    call: Any,
) -> Tensor:
    """The loss of one micro-batch, whose number is noted. `place`: step, micro-batch, rank."""
    batch = (*_batch(case, dtype, place), place[2], place[1])
    loss: Tensor = call(*batch)
    noted.append(float(loss.detach()))
    if case.within:
        do_between(case.within, engine, batch, folder, place[0])
    return loss


def _batch(case: Case, dtype: torch.dtype, place: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """The data of one micro-batch. `place`: step, micro-batch, rank."""
    step, micro, rank = place
    x, ids = data(case.seed, step, micro, rank, case.width)
    if case.poison == (step, rank):
        x[0, 0] = float("inf")
    return x.to(dtype), ids


@contextmanager
def _watching(case: Case, net: nn.Module, shown: Shown) -> Iterator[None]:
    """Note each parameter's values when the module that has it is called."""
    if not case.watched:
        yield
        return
    seen: Values = {}
    shown.seen.append(seen)

    def note(prefix: str, module: nn.Module, inputs: Any) -> None:
        for name, p in module.named_parameters(prefix, recurse=False):
            name = _name(case, name)
            now = whole(p.detach()).clone(memory_format=torch.contiguous_format)
            if not torch.equal(seen.setdefault(name, now), now):
                shown.differed = shown.differed or name

    named = [(name, m) for name, m in net.named_modules() if any(True for _ in m.parameters(recurse=False))]
    hooks = [m.register_forward_pre_hook(partial(note, name)) for name, m in named]
    yield
    for hook in hooks:
        hook.remove()


def _name(case: Case, name: str) -> str:
    """The name of a parameter in `Net`, which the reference trains."""
    return name_in_net(name, case.uses) if case.is_pipeline else name


# From one leg to the next ------------------------------------------------------------------------


def _save(case: Case, engine: Any, rank: int, folder: Path) -> None:
    if case.how == "state dict":
        torch.save(engine.state_dict(), folder / f"rank{rank}.pt")
        return
    engine.save_checkpoint(folder / "saved", asynchronous=case.how == "asynchronous")
    engine.wait_for_checkpoint()


def _load(case: Case, engine: Any, rank: int, folder: Path) -> None:
    if case.how == "state dict":
        engine.load_state_dict(torch.load(folder / f"rank{rank}.pt", weights_only=False))
    else:
        path, _ = engine.load_checkpoint(folder / "saved")
        assert path is not None


def _collect(case: Case, engine: Any, shown: Shown) -> None:
    """All that is compared at the end of a leg."""
    counters = {name: getattr(engine, name) for name in ("global_steps", "skipped_steps")}
    shown.counters = {**counters, "updates": sum(shown.applied)}
    named = {_name(case, name): p for name, p in engine.module.named_parameters()}
    if case.optimizer in ONE_BIT:  # whose ranks may be apart
        shown.values = {name: p.detach().clone() for name, p in named.items()}
        return
    state = engine.module_state_dict()
    shown.values = {_name(case, name): state[name] for name, _ in engine.module.named_parameters()}
    mine = engine.optimizer.state
    asked = engine.optimizer.communicators.everyone  # whose ranks have this parameter
    if case.is_pipeline:
        asked = [each for each in asked if each is not engine.optimizer.communicators.pipe]
    for name, p in named.items():
        master = zero_full.safe_get_full_fp32_param(p)
        if master is not None:
            shown.masters[name] = whole(master)
            entries = set(mine[p]) if p in mine else set()
            for group in asked:
                entries = set().union(*group.gather_objects(entries, "entries"))
            got = {e: zero_full.safe_get_full_optimizer_state(p, e) for e in sorted(entries) if e in ENTRIES}
            shown.state[name] = {entry: whole(value) for entry, value in got.items() if value is not None}
