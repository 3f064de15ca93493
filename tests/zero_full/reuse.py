"""Models whose modules are called several times in a forward, trained beside a lane that dawdles.

`python -m tests.zero_full.reuse --engines 300 --burners 3` runs many of them on two ranks, on a machine that
is kept busy, and compares each with plain torch.
"""

import argparse
import multiprocessing
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_full
from zero_full.comm.lane import Pending, ThreadLane

WIDTH, LAYERS = 12, 8
SLOWEST_S = 0.004  # that a job on the lane may be late by chance
LATEST_S = 2.0  # that one may be late which begins when its caller waits for it, who might never do so
CLOSE = 1e-5


@dataclass(frozen=True)
class Case:
    """One way to train, and to use modules again."""

    model: str = "pairs"
    stage: int = 3
    overlap: bool = True
    micro_batches: int = 1
    recompute: str = "no"  # "reentrant", "saved"
    two_groups: bool = True
    seed: int = 0
    late_by_rank: bool = False
    joined: int = 0  # layers that stage 3 gathers together
    kept: bool = True  # at stage 3 from forward to backward

    def __str__(self) -> str:
        return "-".join(map(str, asdict(self).values()))


class Reuse(nn.Module):
    """Linear layers, called as the case says."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        # Most have one parameter: what is left of a bucket could hide that a part of it has left too early.
        bias = case.model == "outside"
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias) for _ in range(LAYERS))
        # Units join up to an eighth of the model, so this layer lets as many of the others join.
        layer = sum(p.numel() for p in self.linears[0].parameters())
        rows = (8 * case.joined - LAYERS) * layer // WIDTH
        self.large = nn.Linear(WIDTH, rows, bias=False) if case.joined else None
        for p in self.parameters():
            p.data.copy_(torch.randn(p.shape, generator=generator) * 0.2)
        self.case = case

    def forward(self, x: Tensor, rank: int) -> Tensor:
        """The loss."""
        x = WAYS[self.case.model](self, x, rank)
        return x.square().mean() if self.large is None else x.square().mean() + self.large(x).square().mean()

    def call(self, number: int, x: Tensor) -> Tensor:
        """One layer, recomputed or not."""
        layer = self.linears[number]
        if self.case.recompute == "no" or not x.requires_grad:
            return torch.tanh(layer(x))
        reentrant = self.case.recompute == "reentrant"
        return torch.tanh(checkpoint(layer, x, use_reentrant=reentrant))


def pairs(model: Reuse, x: Tensor, rank: int) -> Tensor:
    """Later layers call the first ones again, whose first input needs no gradient."""
    for i in range(LAYERS):
        x = model.call(i // 2, x) + model.call(i, x)
    return x


def again(model: Reuse, x: Tensor, rank: int) -> Tensor:
    """One layer over and over, as in ALBERT, between two others."""
    x = model.call(0, x)
    for _ in range(5):
        x = model.call(1, x)
    return model.call(2, x)


def silent(model: Reuse, x: Tensor, rank: int) -> Tensor:
    """A layer looks at its input without gradients first."""
    with torch.no_grad():
        target = model.call(2, model.call(1, x))
    for i in range(3):
        x = model.call(i, x)
    return x - target


def outside(model: Reuse, x: Tensor, rank: int) -> Tensor:
    """A layer's bias is used once more, outside of the layer."""
    with zero_full.GatheredParameters([model.linears[0].bias]):
        more = model.linears[0].bias * 1.0
    for i in range(3):
        x = model.call(i, x)
    return x + more


def unused(model: Reuse, x: Tensor, rank: int) -> Tensor:
    """One rank does not use what the last layers have made. At stage 3 it must, if only times zero."""
    for i in range(2):
        x = model.call(i, x)
    y = model.call(3, model.call(2, x))
    if rank == 1:
        return x + 0 * y if model.case.stage == 3 else x
    return x + y


def elsewhere(model: Reuse, x: Tensor, rank: int) -> Tensor:
    """Below stage 3: one rank uses a layer once more, in a part that is recomputed."""
    for i in range(LAYERS):
        x = model.call(i, x)
    if rank == 1 and model.case.stage < 3:
        x = x + checkpoint(model.linears[3], x, use_reentrant=True)
    return x


Way = Callable[[Reuse, Tensor, int], Tensor]
WAYS: dict[str, Way] = {f.__name__: f for f in (pairs, again, silent, outside, unused, elsewhere)}


def data(step: int, micro: int, rank: int) -> Tensor:
    """Every (step, micro-batch, rank) has its own numbers."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    return torch.randn(3, WIDTH, generator=generator)


@dataclass
class Asked:
    """A job on a lane that begins when its caller waits for it."""

    pending: Pending
    event: threading.Event

    def wait(self) -> None:
        """Let it begin, and wait for its end."""
        self.event.set()
        self.pending.wait()


@contextmanager
def dawdling(seed: int, rank: int, by_rank: bool) -> Iterator[None]:
    """Jobs on lanes begin late: by chance; or `by_rank`, as late as can be on all ranks but the first."""
    times, submit = random.Random(seed + rank), ThreadLane.submit

    def late(self: ThreadLane, job: Any, tensors: Any, producers: Any) -> Any:
        asked, pause = threading.Event(), times.choice((0.0, times.random() * SLOWEST_S))

        def act() -> None:
            if by_rank and rank:
                asked.wait(LATEST_S)
            elif not by_rank:
                time.sleep(pause)
            job()

        return Asked(submit(self, act, tensors, producers), asked)

    with mock.patch.object(ThreadLane, "submit", late):
        yield


def groups_of(model: nn.Module, case: Case) -> list[dict[str, Any]]:
    """All parameters, or every other one apart."""
    every = [*model.parameters()]
    if not case.two_groups:
        return [{"params": every}]
    return [{"params": every[::2]}, {"params": every[1::2], "lr": 0.02}]


def plain(case: Case, ranks: int, steps: int) -> dict[str, Tensor]:
    """One process, everybody's data."""
    model = Reuse(case)
    optimizer = torch.optim.AdamW(groups_of(model, case), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        for micro, rank in product(range(case.micro_batches), range(ranks)):
            (model(data(step, micro, rank), rank) / ranks / case.micro_batches).backward()
        if step == 0:
            gradients = {f"gradient of {n}": _or_zero(p.grad, p) for n, p in model.named_parameters()}
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()} | gradients


def _or_zero(gradient: Tensor | None, param: Tensor) -> Tensor:
    return torch.zeros_like(param) if gradient is None else gradient.clone()


def sharded(case: Case, rank: int, steps: int) -> dict[str, Tensor]:
    """The same on this rank of zero_full."""
    model = Reuse(case)
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": case.micro_batches,
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": case.stage,
            "overlap_comm": case.overlap,
            "reduce_bucket_size": 200,
            **({"stage3_param_persistence_threshold": 0} if case.stage == 3 else {}),
            **({} if case.kept or case.stage < 3 else {"stage3_max_reuse_distance": 0}),
        },
    }
    optimizer = torch.optim.AdamW(groups_of(model, case), lr=0.01)
    engine, *_ = zero_full.initialize(model=model, optimizer=optimizer, config=config)
    with dawdling(case.seed, rank, case.late_by_rank):
        for step, micro in product(range(steps), range(case.micro_batches)):
            engine.backward(engine(data(step, micro, rank), rank))
            if (step, micro) == (0, case.micro_batches - 1):
                read = {n: zero_full.safe_get_full_grad(p) for n, p in model.named_parameters()}
            engine.step()
        whole = engine.module_state_dict()
    engine.destroy()
    return whole | {f"gradient of {n}": _or_zero(each, whole[n]) for n, each in read.items()}


def off_by(comm: Any, cases: list[Case], steps: int = 2) -> list[float]:
    """How far each case is from plain torch, on this rank."""
    found = []
    for case in cases:
        want, got = plain(case, comm.world_size, steps), sharded(case, comm.rank, steps)
        found.append(max(float((got[name] - want[name]).abs().max()) for name in want))
    return found


def burn() -> None:
    """Keep a core busy."""
    while True:
        pass


def random_cases(count: int, seed: int) -> list[Case]:
    """Of all that there are."""
    draw = random.Random(seed)
    return [
        Case(
            draw.choice([*WAYS]),
            draw.choice((0, 1, 2, 3, 3, 3)),
            draw.random() < 0.8,
            draw.choice((1, 2)),
            draw.choice(("no", "reentrant", "saved")),
            draw.random() < 0.5,
            draw.randrange(10**6),
            joined=draw.choice((0, 4, LAYERS)),
            kept=draw.random() < 0.5,
        )
        for _ in range(count)
    ]


def main() -> None:
    """Run engines under load; the exit code is 1 if one is not what plain torch is."""
    from tests.worlds import POOL

    options = argparse.ArgumentParser(prog="python -m tests.zero_full.reuse", description=__doc__)
    options.add_argument("--engines", type=int, default=300)
    options.add_argument("--burners", type=int, default=3, help="processes that keep a core busy")
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    cases = random_cases(chosen.engines, chosen.seed)
    burners = [multiprocessing.Process(target=burn, daemon=True) for _ in range(chosen.burners)]
    for burner in burners:
        burner.start()
    wrong = []
    for first in range(0, len(cases), 50):
        some = cases[first : first + 50]
        ranks = POOL.run(off_by, chosen.ranks, some)
        wrong += [case for case, *offs in zip(some, *ranks, strict=True) if max(offs) > CLOSE]
        print(f"{first + len(some)} engines on {chosen.ranks} ranks: {len(wrong)} wrong", flush=True)
    for burner in burners:
        burner.kill()
    print(*wrong, sep="\n")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
