"""Generation from a sharded model beside the plain one, and a gather per layer: a topic of `engines.py`.

Two ranks at stage 3 in bf16 decode one sequence each, with a cache of keys and values: a token reads every
weight for a few numbers, so that gathering the weights is most of what a sharded model does. Ranks are in
shared memory, where a gather is a copy, and behind links of 1 Gbit/s each, where one can be limited
(`link.py`). Rows are timed in turn; a sample is over when the last rank is. CPU time is the process's, which
a busy machine changes less.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zero_full
from tests.bench import interleave, link
from tests.bench.interleave import Ratio, Series
from tests.zero_full.generation_runs import Language


@dataclass(frozen=True)
class Shape:
    """A language model, and what it generates."""

    width: int = 256
    depth: int = 12
    vocabulary: int = 2048
    prompt: int = 16
    new: int = 128
    batch: int = 1

    def model(self) -> Language:
        """The tests' language model in this size."""
        torch.manual_seed(0)
        return Language(self.depth, self.width, self.vocabulary).bfloat16()


ROUNDS, SMALL, BEHIND_LINKS = 7, Shape(16, 1, 24, new=2), Shape(depth=6, new=64)
PLAIN, GENERATION, PER_LAYER = "the plain model", "engine.generation()", "gathered per layer"
INSIDE = "inside its block"  # which a rank has entered already, and leaves later
NAMES = [PLAIN, INSIDE, GENERATION, PER_LAYER]
GBIT = 10**9


def engine_of(model: nn.Module, batch: int) -> zero_full.Engine:
    """At stage 3, where every parameter is released."""
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    return zero_full.initialize(model=model, config=config)[0]


def measure(comm: Any, shape: Shape, rounds: int) -> tuple[dict[str, Series], dict[str, Series]]:
    """Seconds, and CPU seconds, by row and round on this rank."""
    return behind_link(shape, rounds)


def behind_link(shape: Shape, rounds: int) -> tuple[dict[str, Series], dict[str, Series]]:
    """The same where the ranks have a process group already."""
    torch.set_num_threads(1)
    plain, engine = shape.model().eval(), engine_of(shape.model(), shape.batch)
    made = torch.Generator().manual_seed(dist.get_rank())
    prompts = torch.randint(shape.vocabulary, (shape.batch, shape.prompt), generator=made)

    def in_a_block() -> None:
        with engine.generation() as model:
            model.generate(prompts, shape.new)

    blocks = ExitStack()

    def ready(name: str) -> None:
        blocks.close()
        if name == INSIDE:
            blocks.enter_context(engine.generation())
        dist.barrier()

    acts: dict[str, Callable[[], Any]] = {
        PLAIN: lambda: plain.generate(prompts, shape.new),
        INSIDE: lambda: engine.module.generate(prompts, shape.new),
        GENERATION: in_a_block,
        PER_LAYER: lambda: engine.module.generate(prompts, shape.new),
    }
    engine.eval()
    with torch.no_grad():
        found = interleave.wall_and_cpu(acts, rounds, ready)
        blocks.close()
    engine.destroy()
    return found


def report(run: Any, small: bool) -> tuple[list[Ratio], dict[str, Any]]:
    """Measure, print tables, and return ratios and numbers. `run`: that of a pool of ranks."""
    shape, ratios, about = SMALL if small else Shape(), list[Ratio](), dict[str, Any]()
    ranks = run(measure, 2, shape, 1 if small else ROUNDS, limit=1500, collective=300)
    ratios += _table("in shared memory", shape, ranks)
    about["shared memory"] = vars(shape)
    why = "not in the smallest sizes" if small else link.problem()
    if why is not None:
        print(f"\nNo link was limited: {why}.")
    else:
        ranks = link.run(behind_link, 2, BEHIND_LINKS, ROUNDS, rate=GBIT, limit=900)
        ratios += _table("behind links of 1 Gbit/s", BEHIND_LINKS, ranks)
        about["links"] = vars(BEHIND_LINKS)
    return ratios, about


def _table(where: str, shape: Shape, ranks: Any) -> list[Ratio]:
    wall, cpu = (
        {name: interleave.slowest([r[kind][name] for r in ranks]) for name in NAMES} for kind in (0, 1)
    )
    rows = []
    for name in NAMES:
        rate = f"{shape.new * shape.batch / interleave.middle(wall[name]):.0f}"
        rows.append([*interleave.cells(name, wall[name]), *interleave.cells(name, cpu[name])[1:], rate])
    numel = sum(p.numel() for p in shape.model().parameters()) / 1e6
    size = f"{shape.depth} layers, {numel:.1f}M parameters, {shape.new} tokens, batch {shape.batch}"
    print(f"\n2 ranks {where}, stage 3, bf16: {size}\n")
    print(interleave.table(["row", "ms", "range", "CPU ms", "range", "tokens/s a rank"], rows))
    ratios = []
    for kind, series in (("", wall), (", CPU time", cpu)):
        for ours, other, rate in (
            (INSIDE, PLAIN, 0.95),
            (GENERATION, PLAIN, 0.95),
            (GENERATION, PER_LAYER, 5),
        ):
            name = f"{ours} / {other} {where}{kind}"
            ratios.append(interleave.ratio(name, series[ours], series[other], 1 / rate))
    return ratios
