"""Generation from a sharded model, and its weights for a server, beside plain torch and a whole state dict.

    python -m tests.bench.engines_generation

Two ranks at stage 3 in bf16, a language model with a cache of keys and values. Each row is
timed in turn on both ranks; a sample is over when the last rank is. The last line is JSON.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import zero_full
from tests.bench import interleave
from tests.bench.interleave import Series
from tests.worlds import Pool
from tests.zero_full.generation_runs import Language

WIDTH, DEPTH, VOCABULARY, PROMPT, NEW, BATCH, ROUNDS = 256, 6, 2048, 16, 32, 2, 7
PLAIN, GENERATION, PER_LAYER = "the plain model", "engine.generation()", "gathered per layer"
STATE_DICT, WHOLE, DELTA = "module_state_dict", "engine.weights()", "engine.weights(delta=True)"
STEP, STEP_DELTA = "a step", "a step that notes changes"
NAMES = [PLAIN, GENERATION, PER_LAYER, STATE_DICT, WHOLE, DELTA, STEP, STEP_DELTA]


def model_of(width: int, depth: int, vocabulary: int) -> Language:
    """The tests' language model in this size."""
    torch.manual_seed(0)
    return Language(depth, width, vocabulary).bfloat16()


def engine_of(model: nn.Module) -> zero_full.Engine:
    """At stage 3, where every parameter is released."""
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    return zero_full.initialize(model=model, config=config)[0]


def measure(
    comm: Any, sizes: tuple[int, int, int], new: int, rounds: int
) -> tuple[dict[str, Series], list[int]]:
    """Seconds by row and round on this rank, and bytes: of the model, and of each delta."""
    torch.set_num_threads(1)
    width, depth, vocabulary = sizes
    plain = model_of(width, depth, vocabulary).eval()
    engine, noting = (engine_of(model_of(width, depth, vocabulary)) for _ in range(2))
    prompts = torch.randint(vocabulary, (BATCH, PROMPT), generator=torch.Generator().manual_seed(comm.rank))
    sizes_of_deltas = [sum(values.nbytes for _, _, values in noting.weights(delta=True))]

    def train(of: Any) -> None:
        x = torch.randint(vocabulary, (BATCH, PROMPT + 1))
        of.backward(functional.cross_entropy(of(x[:, :-1]).flatten(0, 1).float(), x[:, 1:].flatten()))

    def in_a_block() -> None:
        with engine.generation() as model:
            model.generate(prompts, new)

    def delta() -> None:
        size = 0
        for _, indices, values in noting.weights(delta=True):
            size += values.nbytes + (0 if indices is None else indices.nbytes)
        sizes_of_deltas.append(size)

    acts: dict[str, Callable[[], Any]] = {
        PLAIN: lambda: plain.generate(prompts, new),
        GENERATION: in_a_block,
        PER_LAYER: lambda: engine.module.generate(prompts, new),
        STATE_DICT: lambda: engine.module_state_dict(),
        WHOLE: lambda: [None for _ in engine.weights()],
        DELTA: delta,
        STEP: engine.step,
        STEP_DELTA: noting.step,
    }
    engine.eval()

    def visit(name: str, number: int) -> list[float]:
        if name in (STEP, STEP_DELTA):
            train(engine if name == STEP else noting)
        dist.barrier()
        start = time.perf_counter()
        with torch.no_grad():
            acts[name]()
        return [time.perf_counter() - start]

    for name in NAMES:
        visit(name, 0)
    series = interleave.run(NAMES, rounds, visit)
    engine.destroy()
    noting.destroy()
    return series, sizes_of_deltas


def main() -> None:
    """Print seconds, ratios and the JSON line."""
    print(interleave.heading())
    pool = Pool()
    by_rank = pool.run(measure, 2, (WIDTH, DEPTH, VOCABULARY), NEW, ROUNDS, limit=900, collective=120)
    pool.stop()
    found = {name: interleave.slowest([series[name] for series, _ in by_rank]) for name in NAMES}
    rows = []
    for name, series in found.items():
        ms = [[1e3 * seconds for seconds in times] for times in series]
        low, high = interleave.spread(ms)
        rate = f"{NEW * BATCH / interleave.middle(series):.0f}" if name in NAMES[:3] else ""
        rows.append([name, f"{interleave.middle(ms):.2f}", f"{low:.2f}-{high:.2f}", rate])
    print("\n" + interleave.table(["on 2 ranks at stage 3, bf16", "ms", "range", "tokens/s a rank"], rows))
    ratios = [
        interleave.ratio(f"{GENERATION} / {PLAIN}", found[GENERATION], found[PLAIN], 1 / 0.95),
        interleave.ratio(f"{GENERATION} / {PER_LAYER}", found[GENERATION], found[PER_LAYER], 1 / 5),
        interleave.ratio(f"{WHOLE} / {STATE_DICT}", found[WHOLE], found[STATE_DICT]),
        interleave.ratio(f"{STEP_DELTA} / {STEP}", found[STEP_DELTA], found[STEP]),
    ]
    print("\n" + interleave.table(interleave.RATIO_HEAD, [ratio.cells() for ratio in ratios]))
    whole, *deltas = by_rank[0][1]
    added = interleave.middle(found[STEP_DELTA]) - interleave.middle(found[STEP])
    print(f"\nbytes: {whole} whole, {deltas[-1]} in the last delta; noting adds {1e3 * added:.2f} ms a step")
    print("\n" + interleave.json_line(ratios, width=WIDTH, new=NEW, whole=whole, delta=deltas[-1]))


if __name__ == "__main__":
    main()
