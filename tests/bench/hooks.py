"""What stage 3 costs a module in Python: forward and backward of many tiny layers.

    python -m tests.bench.hooks

One rank, so that nothing travels. A rank alone gets no hooks on its modules from `initialize`; in the last
row they are put on by hand, as every unit has them where there are others. "empty hooks" are as many hooks
that do nothing: what torch itself takes, so no engine can cost less. FSDP2 shards every layer, over one rank
too. The last line is JSON.
"""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import zero_full
from tests.bench import interleave
from tests.bench.interleave import Series
from zero_full.comm.lane import InlineLane
from zero_full.offload import ParamStore
from zero_full.settings import Gathering
from zero_full.shard.passes.gather import ParameterGatherer, Site, UnitState

LAYERS, WIDTH, ROUNDS, PASSES = 200, 8, 15, 5
TARGET_US = 25.0
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 1},
}


class Tower(nn.Module):
    """Tiny layers, so that time goes into what is around them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Plain:
    """The model without an engine."""

    def __init__(self) -> None:
        self.model = Tower()

    def run(self, x: Tensor) -> None:
        """Forward and backward, and no gradients afterwards."""
        self.model(x).backward()
        self.model.zero_grad()


class Empty(Plain):
    """Hooks of the same kinds on every layer, and a view of its input."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.model.layers:
            layer.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True)
            layer.register_forward_hook(self.after, always_call=True)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Hook the backward of the input."""
        passed = args[0].view_as(args[0])
        assert passed.grad_fn is not None
        passed.grad_fn.register_hook(nothing)
        return (passed,), kwargs

    def after(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """Hook the gradient of the output."""
        output.register_hook(nothing)


def nothing(*gradients: Any) -> None:
    """Do nothing."""


class Fsdp2(Plain):
    """FSDP2 with a unit for every layer, on a mesh of one rank."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)


class Alone:
    """An engine on one rank."""

    def __init__(self) -> None:
        self.model = Tower()
        self.engine, self.optimizer, _, _ = zero_full.initialize(model=self.model, config=CONFIG)

    def run(self, x: Tensor) -> None:
        """Forward and backward, and no gradients afterwards."""
        self.engine.backward(self.engine(x))
        self.engine.zero_grad()


class Hooked(Alone):
    """With the hooks that its modules would have if there were others."""

    def __init__(self) -> None:
        super().__init__()
        group_of = {m.param: group for group in self.optimizer.sharded.groups for m in group.members}
        layers = enumerate(self.model.layers)
        sites = [Site(str(n), layer, UnitState([group_of[layer.weight]])) for n, layer in layers]
        reducer = self.optimizer.reducer
        self.gatherer = ParameterGatherer(self.model, sites, InlineLane(), Gathering(), reducer, ParamStore())


ROWS = {
    "no engine": Plain,
    "empty hooks": Empty,
    "stage 3 alone": Alone,
    "with hooks on every layer": Hooked,
    "FSDP2": Fsdp2,
}


def measure() -> dict[str, Series]:
    """Seconds a pass, by round, for every row in turn."""
    x = torch.randn(4, WIDTH, requires_grad=True)
    towers = {name: make() for name, make in ROWS.items()}

    def visit(name: str, number: int) -> list[float]:
        times = []
        for _ in range(PASSES + 1):
            start = time.perf_counter()
            towers[name].run(x)
            times.append(time.perf_counter() - start)
        return times[1:]

    return interleave.run(list(towers), ROUNDS, visit)


def main() -> None:
    """Print microseconds a module and the JSON line."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(interleave.heading())
    try:
        found = measure()
    finally:
        dist.destroy_process_group()
    ratios, rows = [], []
    for name in list(ROWS)[1:]:
        extra = interleave.minus(found[name], found["no engine"])
        per_module = [[1e6 * seconds / LAYERS for seconds in times] for times in extra]
        low, high = interleave.spread(per_module)
        rows.append([name, f"{interleave.middle(per_module):.1f}", f"{low:.1f}-{high:.1f}"])
        aim = TARGET_US if name == "stage 3 alone" else None
        aims = [[TARGET_US] * len(times) for times in per_module]
        ratios.append(interleave.ratio(f"{name} / {TARGET_US:.0f} us", per_module, aims, aim and 1.0))
    print("\n" + interleave.table(["row", "us a module", "range"], rows))
    print("\n" + interleave.table(interleave.RATIO_HEAD, [r.cells() for r in ratios]))
    print("\n" + interleave.json_line(ratios, layers=LAYERS, rounds=ROUNDS))


if __name__ == "__main__":
    main()
