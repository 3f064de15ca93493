"""Weights and their changes for an inference server, beside a whole state dict: a topic of `engines.py`.

Two ranks at stage 3 in bf16. A step that notes changes is compared with a step: with a small model, whose
slices stay in the cache, and with one whose slices do not.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from tests.bench import interleave
from tests.bench.engines_generation import SMALL, Shape, engine_of
from tests.bench.interleave import Ratio, Series

ROUNDS = 9
SHAPES = {"small": Shape(depth=6, batch=2), "large": Shape(width=512, depth=8, batch=2)}
STATE_DICT, WHOLE, DELTA = "module_state_dict", "engine.weights()", "engine.weights(delta=True)"
STEP, STEP_DELTA = "a step", "a step that notes changes"
NAMES = [STATE_DICT, WHOLE, DELTA, STEP, STEP_DELTA]


def measure(comm: Any, shape: Shape, rounds: int) -> tuple[dict[str, Series], dict[str, Series], list[int]]:
    """Seconds and CPU seconds by row and round on this rank, and bytes: of the model, and of each delta."""
    torch.set_num_threads(1)
    engine, noting = (engine_of(shape.model(), shape.batch) for _ in range(2))
    sizes = [sum(values.nbytes for _, _, values in noting.weights(delta=True))]

    def train(of: Any) -> None:
        x = torch.randint(shape.vocabulary, (shape.batch, shape.prompt + 1))
        of.backward(functional.cross_entropy(of(x[:, :-1]).flatten(0, 1).float(), x[:, 1:].flatten()))

    def delta() -> None:
        size = 0
        for _, indices, values in noting.weights(delta=True):
            size += values.nbytes + (0 if indices is None else indices.nbytes)
        sizes.append(size)

    acts: dict[str, Callable[[], Any]] = {
        STATE_DICT: engine.module_state_dict,
        WHOLE: lambda: [None for _ in engine.weights()],
        DELTA: delta,
        STEP: engine.step,
        STEP_DELTA: noting.step,
    }

    def ready(name: str) -> None:
        if name in (STEP, STEP_DELTA):
            train(engine if name == STEP else noting)
        dist.barrier()

    wall, cpu = interleave.wall_and_cpu(acts, rounds, ready)
    engine.destroy()
    noting.destroy()
    return wall, cpu, sizes


def report(run: Any, small: bool) -> tuple[list[Ratio], dict[str, Any]]:
    """Measure, print tables, and return ratios and numbers. `run`: that of a pool of ranks."""
    ratios, about = list[Ratio](), dict[str, Any]()
    for label, shape in ({"smallest": SMALL} if small else SHAPES).items():
        ranks = run(measure, 2, shape, 1 if small else ROUNDS, limit=900, collective=120)
        wall, cpu = (
            {name: interleave.slowest([each[kind][name] for each in ranks]) for name in NAMES}
            for kind in (0, 1)
        )
        rows = [[*interleave.cells(n, wall[n]), *interleave.cells(n, cpu[n])[1:]] for n in NAMES]
        whole, *deltas = ranks[0][2]
        print(f"\n{label} model: {whole} bytes whole, {deltas[-1]} in the last delta\n")
        print(interleave.table(["on 2 ranks, stage 3, bf16", "ms", "range", "CPU ms", "range"], rows))
        ratios += [
            interleave.ratio(f"{label}: {WHOLE} / {STATE_DICT}", wall[WHOLE], wall[STATE_DICT]),
            interleave.ratio(f"{label}: {STEP_DELTA} / {STEP}", wall[STEP_DELTA], wall[STEP]),
            interleave.ratio(f"{label}: {STEP_DELTA} / {STEP}, CPU time", cpu[STEP_DELTA], cpu[STEP]),
        ]
        added = interleave.middle(cpu[STEP_DELTA]) - interleave.middle(cpu[STEP])
        about[label] = {"whole": whole, "delta": deltas[-1], "added_cpu_ms": round(1e3 * added, 3)}
    return ratios, about
