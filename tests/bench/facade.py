"""What a step costs more through the engine that programs get by DeepSpeed's name.

    python -m tests.bench.facade

One rank, so that nothing travels, and a model so small that most of a step is Python. Times are CPU time of
the process. The last line is JSON.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn

import zero_full
from tests.bench import interleave
from tests.bench.interleave import Series
from zero_full.integrations.deepspeed.engine import initialize

LAYERS, WIDTH, ROUNDS, STEPS = 8, 64, 41, 20
OURS, FACADE = "zero_full's engine", "through deepspeed's name"
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 2},
}


class Squares(nn.Module):
    """A few layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        return self.layers(x).square().mean()  # type: ignore[no-any-return]


def measure() -> dict[str, Series]:
    """CPU seconds a step, by round, for both in turn. Calls are those that accelerate makes."""
    x = torch.randn(4, WIDTH)
    engines: dict[str, Any] = {
        OURS: zero_full.initialize(model=Squares(), config=CONFIG)[0],
        FACADE: initialize(model=Squares(), config=CONFIG)[0],
    }

    def visit(name: str, number: int) -> list[float]:
        engine, times = engines[name], []
        for _ in range(STEPS + 1):
            start = time.process_time()
            loss = engine(x)
            engine.set_gradient_accumulation_boundary(is_boundary=True)
            engine.backward(loss)
            engine.step()
            engine.get_global_grad_norm()
            times.append(time.process_time() - start)
        return times[1:]

    return interleave.run(list(engines), ROUNDS, visit)


def main() -> None:
    """Print microseconds a step and the JSON line."""
    torch.set_num_threads(1)
    print(interleave.heading())
    found, rows = measure(), []
    for name, series in found.items():
        us = [[1e6 * seconds for seconds in times] for times in series]
        low, high = interleave.spread(us)
        rows.append([name, f"{interleave.middle(us):.0f}", f"{low:.0f}-{high:.0f}"])
    ratio = interleave.ratio(f"{FACADE} / {OURS}", found[FACADE], found[OURS], 1.05)
    print("\n" + interleave.table(["engine", "us of CPU a step", "range"], rows))
    print("\n" + interleave.table(interleave.RATIO_HEAD, [ratio.cells()]))
    print("\n" + interleave.json_line([ratio], layers=LAYERS, width=WIDTH, rounds=ROUNDS))


if __name__ == "__main__":
    main()
