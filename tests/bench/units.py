"""What the engine costs the host for a unit of nine parameters: hooks of forward and backward, and `step`.

    python -m tests.bench.units

Two ranks on one machine train many tiny units, so that the time goes into Python. Counted is the CPU time of
the thread that calls the engine. The model without an engine is subtracted. On a CPU that thread shares the
interpreter with the one that runs the collectives, and waits for it. On an accelerator streams run them. The
second table is for that case: one rank gathers and releases its units without a second thread, as in the day
on GPUs (`tests/gpu/day/hooks.py`). The last line is JSON.
"""

import time
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zero_full
from tests.bench import interleave
from tests.bench.interleave import Series
from tests.gpu.day import hooks as forced
from tests.worlds import POOL
from zero_full.assemble import shard

UNITS, WIDTH, ROUNDS, PASSES = 60, 8, 7, 5
RANKS = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STAGES = (1, 2, 3)
AIMS = {"stage 2": 100.0, "stage 3": 300.0}  # microseconds a unit and micro-batch
STEP_AIM = 50.0


class Unit(nn.Module):
    """Nine parameters that one module uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 10 for _ in range(4))
        self.biases = nn.ParameterList(torch.zeros(WIDTH) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Four layers beside a residual."""
        inner = x * self.scale
        for weight, bias in zip(self.weights, self.biases, strict=True):
            inner = F.linear(inner, weight, bias)
        return x + inner


class Tower(nn.Module):
    """Units, one after the other."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(Unit() for _ in range(units))

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        for unit in self.units:
            x = unit(x)
        return x.square().mean()


class Plain:
    """The model without an engine."""

    def __init__(self, units: int, dtype: str) -> None:
        self.model = Tower(units).to(DTYPES[dtype])
        self.x = torch.randn(4, WIDTH, dtype=DTYPES[dtype])

    def run(self) -> list[float]:
        """Seconds of a forward and backward, and of nothing."""
        start = time.thread_time()
        self.model(self.x).backward()
        end = time.thread_time()
        self.model.zero_grad()
        return [end - start, 0.0]


class Engine(Plain):
    """With an engine of this stage."""

    def __init__(self, units: int, dtype: str, stage: int) -> None:
        super().__init__(units, dtype)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0}},
            "zero_optimization": {"stage": stage},
        }
        config |= {"bf16": {"enabled": True}} if dtype == "bf16" else {}
        if stage == 3:
            config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0}
        self.engine, *_ = zero_full.initialize(model=Tower(units), config=config)

    def run(self) -> list[float]:
        """Seconds of a forward and backward, and of a step."""
        start = time.thread_time()
        self.engine.backward(self.engine(self.x))
        middle = time.thread_time()
        self.engine.step()
        return [middle - start, time.thread_time() - middle]


def measure(comm: Any, units: int, rounds: int, passes: int) -> dict[str, Series]:
    """Measure every row in turn: seconds of a pass and of a step, one after the other."""
    torch.set_num_threads(1)
    rows: dict[str, Plain] = {}
    for dtype in DTYPES:
        rows[f"{dtype} no engine"] = Plain(units, dtype)
        rows |= {f"{dtype} stage {stage}": Engine(units, dtype, stage) for stage in STAGES}

    def visit(name: str, number: int) -> list[float]:
        times = [rows[name].run() for _ in range(passes + 1)][1:]
        return [seconds for both in times for seconds in both]

    return interleave.run(list(rows), rounds, visit)


def alone(comm: Any, units: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of a pass and of a step of one rank, by row, in turn."""
    torch.set_num_threads(1)
    x = torch.randn(4, WIDTH, requires_grad=True)
    models, optimizers = dict[str, nn.Module](), dict[str, Any]()
    for name in ("no engine", "stage 2", "stage 3"):
        models[name] = model = forced.Units(units, WIDTH)
        optimizers[name] = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        if name != "no engine":
            settings = replace(forced.settings_of(int(name[-1]), WIDTH), overlap=False)
            optimizers[name] = shard(model, optimizers[name], settings)
    found: dict[str, dict[str, list[float]]] = {name: {"hooks": [], "step": []} for name in models}
    for _ in range(rounds + 2):
        for name, model in models.items():
            start = time.thread_time()
            model(x).backward()
            middle = time.thread_time()
            optimizers[name].step()
            found[name]["hooks"].append(middle - start)
            found[name]["step"].append(time.thread_time() - middle)
            optimizers[name].zero_grad()
    return {name: {what: times[2:] for what, times in each.items()} for name, each in found.items()}


def alone_table(units: int, rounds: int) -> str:
    """Microseconds a unit of one rank beyond a model without an engine."""
    found, rows = POOL.run(alone, 1, units, rounds)[0], list[list[str]]()
    plain = found.pop("no engine")
    for name, each in found.items():
        for what, times in each.items():
            extra = [1e6 * (a - b) / units for a, b in zip(times, plain[what], strict=True)]
            aim = AIMS[name] if what == "hooks" else STEP_AIM
            rows.append([name, what, f"{median(extra):.0f}", f"{aim:.0f}"])
    return interleave.table(["one rank, fp32", "what", "us a unit", "aim"], rows)


def main() -> None:
    """Print microseconds a unit and the JSON line."""
    print(interleave.heading())
    samples = POOL.run(measure, RANKS, UNITS, ROUNDS, PASSES)[0]
    passes = {name: [times[::2] for times in series] for name, series in samples.items()}
    steps = {name: [times[1::2] for times in series] for name, series in samples.items()}
    ratios, rows = [], []
    for name in (name for name in samples if "stage" in name):
        dtype, _, stage = name.partition(" ")
        hooks = interleave.minus(passes[name], passes[f"{dtype} no engine"])
        for what, series, aim in (("hooks", hooks, AIMS.get(stage)), ("step", steps[name], STEP_AIM)):
            per_unit = [[1e6 * seconds / UNITS for seconds in times] for times in series]
            low, high = interleave.spread(per_unit)
            rows.append([name, what, f"{interleave.middle(per_unit):.0f}", f"{low:.0f}-{high:.0f}"])
            if aim is not None:
                aims = [[aim] * len(times) for times in per_unit]
                ratios.append(interleave.ratio(f"{name}, {what} / {aim:.0f} us", per_unit, aims, 1.0))
    print("\n" + interleave.table(["row", "what", "us a unit", "range"], rows))
    print("\n" + alone_table(UNITS, ROUNDS * PASSES))
    print("\n" + interleave.table(interleave.RATIO_HEAD, [r.cells() for r in ratios]))
    print("\n" + interleave.json_line(ratios, units=UNITS, rounds=ROUNDS))


if __name__ == "__main__":
    main()
