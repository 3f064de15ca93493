"""Training steps of some optimizers, timed in turns on ranks that may be behind a limited link."""

import gc
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tests.bench import interleave, peers, volume
from tests.bench.interleave import Series
from tests.bench.peers import Setup, Trainee
from zero_min.gpt import GPTConfig, batch, load_text

SIZES = {
    "50k": GPTConfig(layers=4, heads=2, width=32),
    "3M": GPTConfig(layers=4, heads=4, width=256),
    "10M": GPTConfig(layers=6, heads=6, width=384),
}
ADAM = {"lr": 1e-7, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
STREAM_S = 0.5  # how long a link's rate is measured
# A variance that is frozen after one step is a poor one: by a larger learning rate the model would diverge.
FROZEN = {"var_freeze_step": 1, "local_step_scaler": 1}
ALONE, DDP, ADAM_ROW, ONE_BIT_ROW = "forward+backward", "DDP", "Adam", "1-bit Adam"
EVERY, IN_16 = "0/1 Adam, a round in every step", "0/1 Adam, a round in 16 steps"


@dataclass(frozen=True)
class Row:
    """An optimizer of a JSON file, and how many steps are timed as one: as many as a round comes back in."""

    type: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    block: int = 1
    warmup: int = 2
    kind: str = ""  # of the one step in a block that sends, by `volume.py`


ROWS = {
    ALONE: Row(),
    DDP: Row(),
    ADAM_ROW: Row("AdamW", ADAM, kind=volume.EXACT),
    ONE_BIT_ROW: Row("OneBitAdam", {**ADAM, "freeze_step": 1}, kind=volume.ONE_BIT),
    EVERY: Row("ZeroOneAdam", {**ADAM, **FROZEN, "local_step_clipper": 1}, kind=volume.ONE_BIT),
    IN_16: Row("ZeroOneAdam", {**ADAM, **FROZEN, "local_step_clipper": 16}, 16, 8, volume.ONE_BIT),
}


@dataclass(frozen=True)
class Plan:
    """One run."""

    size: str
    rows: tuple[str, ...]
    rounds: int
    rate: int | None


@dataclass
class Found:
    """What one rank saw."""

    parameters: int = 0
    rate: float = 0.0  # bits a second that a stream got
    seconds: dict[str, Series] = field(default_factory=dict)  # a step
    sent: dict[str, float] = field(default_factory=dict)  # bytes a step, as zero_full counts


def build(name: str, setup: Setup) -> Trainee:
    """A row, ready to train."""
    row = ROWS[name]
    if name == ALONE:
        return peers.forward_backward(setup)
    if name == DDP:
        return peers.ddp(setup)
    import zero_full

    config = peers.json_config(setup, 0) | {"optimizer": {"type": row.type, "params": row.params}}
    engine = zero_full.initialize(model=setup.model(), config=config)[0]
    backward = peers.engine_backward(engine)
    return Trainee(engine.module, backward, engine.step, engine, traffic=engine.traffic)


def measured_rate(rate: int | None) -> float:
    """Bits a second that a stream from the last rank to the first gets, as the first one sees it."""
    numel = int(max(rate or 0, 10**8) * STREAM_S / 8)
    data, hello = torch.zeros(numel, dtype=torch.uint8), torch.zeros(1)
    last = dist.get_world_size() - 1
    seconds = 0.0
    if dist.get_rank() == last:
        dist.send(hello, 0)
        dist.send(data, 0)
    elif dist.get_rank() == 0:
        dist.recv(hello, last)
        start = time.perf_counter()
        dist.recv(data, last)
        seconds = time.perf_counter() - start
    answer = [8 * numel / seconds if seconds else 0.0]
    dist.broadcast_object_list(answer, 0)
    return answer[0]


class Rank:
    """One rank: its rows, all alive at once, and its clock."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.found = plan, Found(rate=measured_rate(plan.rate))
        config, world = SIZES[plan.size], dist.get_world_size()
        setup = Setup(config, torch.float32, world, None, bucket=5_000_000, overlap=False)
        self.alive = {name: build(name, setup) for name in plan.rows}
        sizes = volume.sizes_of(setup.model())
        self.model, self.found.parameters = volume.Model(sizes, world), sum(sizes)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.data = [batch(load_text(), 1, config.context, generator) for _ in range(16)]
        self.taken = 0

    def run(self) -> Found:
        """Every row once to warm up, then rounds."""
        for name in self.plan.rows:
            self.steps(name, ROWS[name].warmup)
        self.found.seconds = interleave.run(self.plan.rows, self.plan.rounds, self.visit)
        return self.found

    def visit(self, name: str, number: int) -> list[float]:
        """The time of one block, over its steps. RuntimeError if it did not send what it is there for."""
        traffic, block, kind = self.alive[name].traffic, ROWS[name].block, ROWS[name].kind
        before = sum(traffic().values()) if traffic else 0
        gc.collect()
        dist.barrier()
        start = time.perf_counter()
        self.steps(name, block)
        seconds = time.perf_counter() - start
        if traffic:
            sent = sum(traffic().values()) - before
            if sent != self.model.sent(kind):
                raise RuntimeError(f"{name} sent {sent} bytes, and not the {self.model.sent(kind)} of {kind}")
            self.found.sent[name] = sent / block
        return [seconds / block]

    def steps(self, name: str, count: int) -> None:
        """Train."""
        trainee = self.alive[name]
        for _ in range(count):
            trainee.backward(*self.data[self.taken % len(self.data)])
            self.taken += 1
            trainee.update()


def rank_main(plan: Plan) -> Found:
    """The life of a rank."""
    return Rank(plan).run()


def in_pool(_: Any, plan: Plan) -> Found:
    """The same on a rank of `tests.worlds`."""
    return rank_main(plan)


def together(ranks: list[Found]) -> Found:
    """All ranks' findings as one: a step is over when its last rank is."""
    first = ranks[0]
    seconds = {name: interleave.slowest([rank.seconds[name] for rank in ranks]) for name in first.seconds}
    return Found(first.parameters, first.rate, seconds, first.sent)
