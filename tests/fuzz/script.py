"""A case as a script of its own: zero_full under torchrun, and plain torch on one process beside it."""

import inspect
import pprint
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz import loops, model
from tests.fuzz.case import FOLDER, ONE_BIT, SCHEDULES, Case, Layout, class_of, config_of, group_options
from tests.fuzz.loops import LOOPS, OF_TORCH
from tests.fuzz.run import JOINING
from zero_full.shard.deal import units

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp16, dynamic": "float16"}


def write(case: Case, text: str, folder: Path, name: str) -> Path:
    """The script, and the case beside it as JSON; returns the script's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(case.to_json() + "\n")
    path = folder / f"{name}.py"
    path.write_text(script_of(case, text, path))
    return path


def script_of(case: Case, text: str, path: Path) -> str:
    """Its source."""
    parts = [
        _head(case, text, path),
        _without_imports(inspect.getsource(model)),
        _constants(case),
        inspect.getsource(LOOPS[case.loop]) if case.loop != "own accumulation" else "",
        inspect.getsource(loops.of_torch) if case.loop == "own accumulation" else "",
        inspect.getsource(loops.do_between) if case.between or case.within else "",
        inspect.getsource(loops.fail) if case.between.startswith("failed") else "",
        *_functions(case),
    ]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _head(case: Case, text: str, path: Path) -> str:
    runs = "\n".join(
        f"    PYTHONPATH=. torchrun --nproc-per-node {layout.ranks} {path} {number}"
        for number, (layout, _) in enumerate(case.legs())
    )
    told = textwrap.indent(text.replace("\\", "/").replace('"""', "'''").rstrip(), "    ")
    copies = any("copies" in layout.tier for layout, _ in case.legs())
    joins = any(layout.joins for layout, _ in case.legs())
    return f'''"""zero_full beside plain torch. In the project's folder:

{runs}

What was wrong:

{told}

The search compares masters, moments and counters, too:

    python -m tests.fuzz --case {path.with_suffix(".json")}
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import zero_full
{"from tests.slow_copies import slow_copies" if copies else ""}
{"from zero_full.shard.deal import units" if joins else ""}

Losses = Sequence[Callable[[Any], Any]]'''


def _without_imports(source: str) -> str:
    return source[source.index("IDS = ") :]


def _constants(case: Case) -> str:
    def config(layout: Layout) -> str:
        written = pprint.pformat(config_of(case, layout, FOLDER), width=100, sort_dicts=False)
        return written.replace(repr(FOLDER), "str(FOLDER)")

    legs = ",\n".join(f"({config(layout)}, {steps!r})" for layout, steps in case.legs())
    lines = [
        f"PARTS = {pprint.pformat(list(case.parts), width=100)}",
        f"USES = {pprint.pformat(list(case.uses), width=100)}",
        f"SEED, WIDTH, STEPS, MICRO_BATCHES, CLIP = "
        f"{case.seed}, {case.width}, {case.steps}, {case.micro_batches}, {case.clip}",
        'FOLDER = Path("/tmp/zero_full_fuzz_script")  # of checkpoints and spill files',
        f"DTYPE = torch.{DTYPES.get(case.first.precision, 'float32')}",
        f"LEGS = [\n{legs},\n]",
        f"TENSOR_RANKS = {[layout.tensor for layout, _ in case.legs()]}  # of each leg",
        "ENGINES = []",
        f"PIPELINES = {[_pipeline(layout) for layout, _ in case.legs()]}  # ranks, stages of one, placement",
    ]
    return "\n".join(lines)


def _pipeline(layout: Layout) -> tuple[int, int, str]:
    placement = "v" if layout.schedule == "zbv" else "loop"
    return layout.pipe, SCHEDULES[layout.schedule], placement


def _joins(layout: Layout) -> tuple[int, int]:
    return (JOINING["PARTS"], JOINING["MIN_JOINED"]) if layout.joins else (units.PARTS, units.MIN_JOINED)


def _model(case: Case) -> str:
    shape = f"(WIDTH, PARTS, USES, SEED{' + rank' if case.differ else ''})"
    if not case.is_pipeline:
        return f"def model_of(number, rank):\n    return Net{shape}"
    return f'''def model_of(number, rank):
    """The model of a leg, as a list of layers."""
    ranks, stages, placement = PIPELINES[number]
    if not ranks:
        return Layers{shape}
    return zero_full.PipelineModule(
        layers_of{shape}, ranks, None, loss_of, "uniform", stages_per_rank=stages, placement=placement
    )


def micro_batch(x, ids, rank, micro):
    return pair(x, ids, micro)'''


def _functions(case: Case) -> Iterator[str]:
    yield _optimizer(case)
    poison = ""
    if case.poison is not None:
        poison = f"        if (step, rank) == {case.poison}:\n            x[0, 0] = float('inf')\n"
    within = ""
    if case.within:
        act = f"do_between({case.within!r}, ENGINES[0], (x.to(DTYPE), ids, rank, micro), FOLDER, step)"
        within = f"        if ENGINES:\n            {act}\n"
    yield (
        "def losses_of(step, rank):\n"
        "    def loss(call, micro):\n"
        "        x, ids = data(SEED, step, micro, rank, WIDTH)\n"
        f"{poison}"
        "        value = call(x.to(DTYPE), ids, rank, micro)\n"
        f"{within}"
        "        return value\n\n"
        "    return [lambda call, micro=micro: loss(call, micro) for micro in range(MICRO_BATCHES)]"
    )
    yield _model(case)
    if case.optimizer not in ONE_BIT:  # a rule of several ranks has no step on one
        yield _plain(case)
    yield _main(case)


def _optimizer(case: Case) -> str:
    if case.groups:
        groups = (
            f"halves = [({group_options(case, 2)}, [p for p in net.parameters() if p.dim() > 1]),\n"
            f"              ({group_options(case, 1)}, [p for p in net.parameters() if p.dim() <= 1])]\n"
            '    groups = [{"params": params, **options} for options, params in halves if params]'
        )
    else:
        groups = f'groups = [{{"params": list(net.parameters()), **{group_options(case, 0)}}}]'
    if case.optimizer == "Muon":
        groups += "\n    groups = zero_full.muon_groups(net, groups)"
    name, options = class_of(case)
    ours = name in ("Lion", "Lamb", "Muon", "FusedAdam", *ONE_BIT)
    made = f"{'zero_full' if ours else 'torch.optim'}.{name}(groups, **{options})"
    return (
        f"def groups_of(net):\n    {groups}\n    return groups\n\n\n"
        f"def optimizer_of(groups):\n    return {made}"
    )


def _plain(case: Case) -> str:
    autocast = (
        'torch.autocast("cpu", torch.bfloat16)' if case.first.precision == "autocast" else "nullcontext()"
    )
    decay = (
        "    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda updates: 1 / (1 + 0.5 * updates))\n"
        if case.decay
        else ""
    )
    clip = "            nn.utils.clip_grad_norm_(masters.parameters(), CLIP)\n" if case.clip else ""
    return f'''def plain(worlds):
    """Every rank's data on one process, with masters in fp32; `worlds`: of each step."""
    net, masters = Net(WIDTH, PARTS, USES, SEED).to(DTYPE), Net(WIDTH, PARTS, USES, SEED)
    optimizer = optimizer_of(groups_of(masters))
{decay}    for step, world in enumerate(worlds):
        freeze(net, PARTS, step)
        sums = {{}}
        for rank in range(world):
            for loss in losses_of(step, rank):
                net.zero_grad()
                with {autocast}:
                    value = loss(net)
                (value / MICRO_BATCHES).backward()
                for name, p in net.named_parameters():
                    if p.grad is not None:
                        sums[name] = sums.get(name, 0) + p.grad.float() / world
        for name, p in masters.named_parameters():
            p.grad = sums.get(name)
        if all(bool(total.isfinite().all()) for total in sums.values()):
{clip}            optimizer.step()
{"            rates.step()" if case.decay else ""}
        for p, master in zip(net.parameters(), masters.parameters(), strict=True):
            p.data.copy_(master)
    return {{name: p.detach().float() for name, p in net.named_parameters()}}'''


def _main(case: Case) -> str:
    loop = LOOPS[case.loop].__name__ if case.loop != "own accumulation" else "of_torch"
    given = "optimizer=optimizer_of(groups_of(net))" if case.instance else "model_parameters=groups_of(net)"
    if case.decay:
        schedule = "torch.optim.lr_scheduler.LambdaLR(o, lambda updates: 1 / (1 + 0.5 * updates))"
        given += f", lr_scheduler=lambda o: {schedule}"
    lines = [
        "def main():",
        "    number = int(sys.argv[1])",
        '    dist.init_process_group("gloo")',
        "    torch.set_num_threads(1)",
        "    rank, (config, steps) = dist.get_rank(), LEGS[number]",
        "    FOLDER.mkdir(exist_ok=True)",
    ]
    if case.is_pipeline:
        worlds = [layout.world for layout, _ in case.legs()]
        lines.append(f"    rank %= {worlds}[number]  # of the data")
    if any(layout.joins for layout, _ in case.legs()):
        lines.append(
            f"    units.PARTS, units.MIN_JOINED = {[_joins(each) for each, _ in case.legs()]}[number]"
        )
    lines += ["    net = model_of(number, rank)", "    freeze(net, PARTS, 0)"]
    is_cut = any(layout.tensor > 1 for layout, _ in case.legs())
    if is_cut:
        lines += [
            "    tensor, arguments = TENSOR_RANKS[number], {}",
            "    if tensor > 1:",
            "        shape = (dist.get_world_size() // tensor, tensor)",
            '        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))',
            '        cut(net, PARTS, mesh["tensor"])',
            '        rank, arguments = rank // tensor, {"mesh": mesh}',
        ]
    if any(layout.whole for layout, _ in case.legs()):
        lines.append("    zero_full.set_z3_leaf_modules(net, [type(net)])")
    copies = any("copies" in layout.tier for layout, _ in case.legs())
    given += ", **arguments" if is_cut else ""
    begin = f"engine, optimizer, _, _ = zero_full.initialize(model=net, config=config, {given})"
    lines += ["    with slow_copies(1e7):", f"        {begin}"] if copies else [f"    {begin}"]
    lines.append("    ENGINES.append(engine)")
    if case.then is not None and case.how == "state dict":
        load = 'engine.load_state_dict(torch.load(FOLDER / f"rank{dist.get_rank()}.pt", weights_only=False))'
        save = 'torch.save(engine.state_dict(), FOLDER / f"rank{dist.get_rank()}.pt")'
    else:
        load = 'engine.load_checkpoint(FOLDER / "saved")'
        save = f'engine.save_checkpoint(FOLDER / "saved", asynchronous={case.how == "asynchronous"})'
    if case.then is not None:
        lines += ["    if number:", f"        {load}"]
    lines += [
        "    for step in steps:",
        "        freeze(net, PARTS, step)",
    ]
    if case.is_pipeline:
        lines += [
            "        if PIPELINES[number][0]:",
            "            engine.train_batch(iter([each(micro_batch) for each in losses_of(step, rank)]))",
            "        else:",
            f"            {loop}(engine, optimizer, losses_of(step, rank))",
        ]
    else:
        lines.append(f"        {loop}(engine, optimizer, losses_of(step, rank))")
    if case.decay and case.loop in OF_TORCH:
        lines += ["        if optimizer.last.applied:", "            engine.lr_scheduler.step()"]
    if case.between:
        lines += [
            "        x, ids = data(SEED, step, 9, rank, WIDTH)",
            "        batch = (x.to(DTYPE), ids, rank, 0)",
            *(
                [
                    "        if PIPELINES[number][0]:",
                    "            batch = [pair(x.to(DTYPE), ids, 0)] * MICRO_BATCHES",
                ]
                if case.is_pipeline
                else []
            ),
            f"        do_between({case.between!r}, engine, batch, FOLDER, step)",
        ]
    if case.then is not None:
        lines += ["    if not number:", f"        {save}", "        engine.wait_for_checkpoint()"]
    lines += ["    state = engine.module_state_dict()", "    ENGINES.clear()"]
    if case.optimizer not in ONE_BIT:
        worlds = [layout.world for layout, steps in case.legs() for _ in steps]
        who, name_of = "dist.get_rank() == 0", "name"
        if case.is_pipeline:
            who, name_of = "PIPELINES[number][0] or dist.get_rank() == 0", "name_in_net(name, USES)"
        lines += [
            f"    if {who}:",
            f"        plains = plain({worlds}[: steps.stop])",
            "        for name, value in state.items():",
            f"            wanted = plains[{name_of}]",
            "            off = (value.float() - wanted).abs().max().item() if wanted.numel() else 0.0",
            '            print(f"{name:30} off by {off:.3g}, of {wanted.abs().max().item():.3g}"'
            " if wanted.numel() else name)",
        ]
    else:
        lines.append("    print(rank, {name: p.tolist() for name, p in state.items()})")
    lines += ["    engine.destroy()", "    dist.destroy_process_group()", "", "", "main()"]
    return "\n".join(lines)
