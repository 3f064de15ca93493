"""Measure a machine's rates: products, passes over memory, collectives, Adam, and the runtime's own time.

Every measurement is the median of repeated calls, averaged over the ranks. Large operands come from a pool
that exceeds the caches, as a model's parameters and gradients do; small activations are used again at once.

[Note: what is left] Two costs cannot be called alone: a fixed time of each operation, and the runtime's
Python. Both are what a tiny model's measured time leaves when all measured rates are subtracted.
"""

import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_full.comm.communicator import Communicator
from zero_full.comm.lane import lane_for
from zero_full.initialization import initialize
from zero_full.kernels.load import operators
from zero_full.pipeline.module import LayerSpec, PipelineModule
from zero_full.plan import plan
from zero_full.plan.activations import pass_bytes
from zero_full.plan.machine_file import MachineRates
from zero_full.plan.pipeline_time import MESSAGE, RUNTIME
from zero_full.plan.step_time import HEAD, operations_seconds
from zero_full.plan.work import BACKWARD, COPY, FORWARD, FUNCTION, MIXED, SCAN, SUM, WorkRecorder
from zero_full.precision.dtypes import Dtypes

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
POOL = 2**26  # bytes of operands that are used in turn
LARGEST = 4096 * 1024  # elements of a matrix of parameters
HEADS = 8  # that attention is measured with
ADAM_NUMEL = 2**20  # of each tensor
ADAM_OPTIONS = (1e-4, 0.9, 0.95, 1e-8, 0.1, True, 1.0)
LEAST, MOST = 3, 100  # repeated calls


@dataclass(frozen=True)
class MeasuredSizes:
    """The sizes that are measured, and how often."""

    tokens: tuple[int, ...] = (16, 64, 256, 1024)  # rows of activations
    widths: tuple[int, ...] = (64, 256, 1024, 4096)  # of layers
    passes: tuple[int, ...] = tuple(2**power for power in range(12, 27, 2))  # bytes
    collectives: tuple[int, ...] = tuple(2**power for power in range(10, 27, 4))  # bytes
    blocks: tuple[int, int] = (4, 20)  # of the two tiny models
    steps: int = 12  # of a tiny model, after half as many that warm up
    calls: int = 9  # of a call that waits for other ranks
    seconds: float = 0.008  # of repeated calls


QUICK = MeasuredSizes((16, 64), (64, 256), (2**12, 2**20), (2**10, 2**20), (1, 3), 3, 3, 0.0)  # for tests


class Clock:
    """Times calls on all ranks at once."""

    def __init__(self, group: Any, sizes: MeasuredSizes) -> None:
        self.group, self.sizes = group, sizes
        self.world = 1 if group is None else group.size()

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.group is not None:
            dist.barrier(self.group)

    def seconds(self, call: Callable[[int], object], calls: int | None = None) -> float:
        """Return the median seconds of `call`, which gets the call's number.

        `calls`: how many, equal on all ranks, for a call that waits for other ranks.
        """
        call(0)
        self.barrier()
        begin, times = time.perf_counter(), list[float]()
        while len(times) < (calls or LEAST) or (
            calls is None and len(times) < MOST and time.perf_counter() - begin < self.sizes.seconds
        ):
            start = time.perf_counter()
            call(len(times))
            times.append(time.perf_counter() - start)
        return median(times)


class Pool:
    """Values in memory that exceed the caches, cut into tensors of any shape."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.values = torch.randn(POOL // 4).to(dtype).repeat(4 // dtype.itemsize)

    def cut(self, *shape: int) -> list[Tensor]:
        """Return windows of this shape, one after the other."""
        numel = int(torch.Size(shape).numel())
        count = max(1, min(MOST, self.values.numel() // numel))
        return [self.values[place * numel : (place + 1) * numel].view(shape) for place in range(count)]


def in_turn(call: Callable[[Any], object], operands: Sequence[Any]) -> Callable[[int], object]:
    """Return a function of a call's number that calls with another of the operands each time."""
    return lambda number: call(operands[number % len(operands)])


def product_points(clock: Clock, pool: Pool) -> Iterator[tuple[str, list[list[float]]]]:
    """Yield rows, inner size, columns and seconds of matrix products, by layout."""
    outputs = Pool(pool.values.dtype)
    for layout in ("nt", "nn", "tn"):
        points = []
        for tokens, inner, columns in product(clock.sizes.tokens, *[clock.sizes.widths] * 2):
            if inner * columns <= LARGEST:
                sizes = (inner, tokens, columns) if layout == "tn" else (tokens, inner, columns)
                points.append([*sizes, clock.seconds(_product(pool, outputs, layout, *sizes))])
        yield f"{_name(pool.values.dtype)} {layout}", points


def _product(
    pool: Pool, outputs: Pool, layout: str, rows: int, inner: int, columns: int
) -> Callable[[int], object]:
    """Return a function that makes a product, with another matrix of parameters, or gradient, each time."""
    if layout == "tn":
        first, second = pool.cut(inner, rows)[0].clone().t(), pool.cut(inner, columns)[0].clone()
        return in_turn(lambda out: torch.mm(first, second, out=out), outputs.cut(rows, columns))
    first = pool.cut(rows, inner)[0].clone()
    if layout == "nt":
        return in_turn(lambda weight: torch.mm(first, weight.t()), pool.cut(columns, inner))
    return in_turn(lambda weight: torch.mm(first, weight), pool.cut(inner, columns))


def attention_points(clock: Clock, dtype: torch.dtype) -> Iterator[tuple[str, list[list[float]]]]:
    """Yield tokens and seconds of causal attention in one head, by direction."""
    forward, backward = list[list[float]](), list[list[float]]()
    for tokens in clock.sizes.tokens:
        q, k, v = (torch.randn(1, HEADS, tokens, HEAD, dtype=dtype, requires_grad=True) for _ in range(3))
        run = partial(nn.functional.scaled_dot_product_attention, q, k, v, is_causal=True)
        outputs = run()
        ones = torch.ones_like(outputs)
        one = clock.seconds(partial(_ignoring, run))
        back = partial(torch.autograd.grad, outputs, (q, k, v), ones, retain_graph=True)
        other = clock.seconds(partial(_ignoring, back))
        forward.append([tokens, one / HEADS])
        backward.append([tokens, other / HEADS])
    yield f"{_name(dtype)} {FORWARD}", forward
    yield f"{_name(dtype)} {BACKWARD}", backward


def pass_points(clock: Clock, pool: Pool) -> Iterator[tuple[str, list[list[float]]]]:
    """Yield bytes and seconds of passes over memory, by kind."""
    dtype, outputs = pool.values.dtype, Pool(pool.values.dtype)
    found: dict[str, list[list[float]]] = {kind: [] for kind in (SUM, FUNCTION, COPY, SCAN)}
    for size in clock.sizes.passes:
        third, half, whole = (size // dtype.itemsize // parts for parts in (3, 2, 1))
        a, b, c = (pool.cut(numel)[0].clone() for numel in (third, third, half))
        pairs = [*zip(outputs.cut(half), pool.cut(half), strict=True)]
        calls: dict[str, Callable[[int], object]] = {
            SUM: partial(_ignoring, torch.add, a, b),
            FUNCTION: partial(_ignoring, nn.functional.gelu, c),
            COPY: in_turn(lambda pair: pair[0].copy_(pair[1]), pairs),
            SCAN: in_turn(torch.aminmax, pool.cut(whole)),
        }
        for kind, call in calls.items():
            found[kind].append([size, clock.seconds(call)])
    yield from ((f"{kind} {_name(dtype)}", points) for kind, points in found.items())


def mixed_points(clock: Clock) -> Iterator[tuple[str, list[list[float]]]]:
    """Yield bytes and seconds of adding bf16 to fp32, as gradients of several micro-batches are."""
    wide, narrow, points = Pool(torch.float32), Pool(torch.bfloat16), list[list[float]]()
    for size in clock.sizes.passes:
        pairs = [*zip(wide.cut(size // 6), narrow.cut(size // 6), strict=False)]
        points.append([size, clock.seconds(in_turn(lambda pair: pair[0].add_(pair[1]), pairs))])
    yield f"{MIXED} float32", points


def _ignoring(call: Callable[..., object], *given: Any) -> object:
    """Call without the last argument, a number."""
    return call(*given[:-1])


def collective_points(clock: Clock, shared_memory: bool) -> Iterator[tuple[str, list[list[float]]]]:
    """Yield bytes of the whole buffer and seconds of the collectives of one transport, by kind and dtype."""
    ranks = Communicator(clock.group, CPU, shared_memory=shared_memory)
    transport = ranks.transport
    if transport is not None and (transport.name == "shared memory") == shared_memory:
        found = defaultdict[str, list[list[float]]](list)
        for dtype in DTYPES:
            pool = Pool(dtype)
            for size in clock.sizes.collectives:
                buffers = pool.cut(size // dtype.itemsize // ranks.size * ranks.size)
                out = torch.empty(buffers[0].numel() // ranks.size)  # gradients accumulate in fp32
                calls = {
                    "reduce_scatter": partial(_reduce_scatter, ranks, out),
                    "all_gather": partial(ranks.all_gather, what="rates"),
                    "all_reduce": partial(ranks.all_reduce, divisor=ranks.size, what="rates"),
                }
                for kind, call in calls.items():
                    seconds = clock.seconds(in_turn(call, buffers), clock.sizes.calls)
                    found[f"{kind} {_name(dtype)}"].append([size, seconds])
        numbers = torch.zeros(64)
        adding = clock.seconds(lambda number: ranks.sum_numbers(numbers, "rates"), clock.sizes.calls)
        found["sum float32"] = [[1, adding]]
        yield from ((f"{transport.name} {name}", points) for name, points in found.items())
    ranks.close()


def _reduce_scatter(ranks: Communicator, out: Tensor, whole: Tensor) -> None:
    ranks.reduce_scatter(whole, out, ranks.size, "rates")


def message_points(clock: Clock) -> Iterator[tuple[str, list[list[float]]]]:
    """Yield bytes and seconds of a message between two ranks: half of the way there and back."""
    if clock.group is None:
        return
    rank, points = clock.group.rank(), list[list[float]]()
    partner = rank ^ 1
    sizes = clock.sizes.collectives if partner < clock.world else ()  # an odd number of ranks: not the last
    for size in sizes:
        exchange = partial(_ignoring, _exchange, torch.zeros(size // 4), rank, partner, clock.group)
        for _ in range(2):  # a first message opens the connection
            exchange(0)
        begin = time.perf_counter()
        for number in range(clock.sizes.calls):
            exchange(number)
        points.append([size, (time.perf_counter() - begin) / clock.sizes.calls / 2])
    every: list[Any] = [None] * clock.world
    dist.all_gather_object(every, points, group=clock.group)
    yield MESSAGE, _mean_of([each for each in every if each])


def _exchange(buffer: Tensor, rank: int, partner: int, group: Any) -> None:
    calls = (dist.send, dist.recv) if rank < partner else (dist.recv, dist.send)
    for call in calls:
        call(buffer, partner, group=group)


def adam_rates(clock: Clock) -> Iterator[tuple[str, float]]:
    """Yield seconds of an element of the fused operator, by dtypes of master, gradient and copy."""
    f32, b16 = torch.float32, torch.bfloat16
    for gradient, copied in ((f32, None), (f32, b16), (b16, b16)):
        masters, averages, squares = ([torch.zeros(ADAM_NUMEL) for _ in range(4)] for _ in range(3))
        gradients = [torch.full((ADAM_NUMEL,), 1e-3, dtype=gradient) for _ in range(4)]
        copies = [] if copied is None else [torch.zeros(ADAM_NUMEL, dtype=copied) for _ in range(4)]
        steps = [torch.ones(()) for _ in range(4)]
        lists = (masters, gradients, averages, squares, steps, copies)
        one = clock.seconds(partial(_ignoring, operators(CPU).adam_step, *lists, *ADAM_OPTIONS))
        name = "none" if copied is None else _name(copied)
        yield f"float32 {_name(gradient)} {name}", one / (4 * ADAM_NUMEL)


def hidden_share(clock: Clock) -> float:
    """Return the share of a collective that a lane of its own hides behind matrix products."""
    if clock.group is None:
        return 0.0
    ranks, lane = Communicator(clock.group, CPU), lane_for(CPU, overlap=True)
    first, second, whole = torch.randn(256, 1024), torch.randn(1024, 1024), torch.zeros(2**20)

    def compute() -> None:
        for _ in range(4):
            torch.mm(first, second)

    def send() -> None:
        for _ in range(4):
            ranks.all_gather(whole, "rates")

    def both(number: int) -> None:
        job = lane.submit(send, [whole], [])
        compute()
        job.wait()

    computing = clock.seconds(lambda number: compute(), clock.sizes.calls)
    sending = clock.seconds(lambda number: send(), clock.sizes.calls)
    together = clock.seconds(both, clock.sizes.calls)
    lane.close()
    ranks.close()
    return min(1.0, max(0.0, (computing + sending - together) / min(computing, sending)))


# What is left ----------------------------------------------------------------------------------------


class TinyModel(nn.Module):
    """A model whose matrices are so small that operations take their fixed time."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of the outputs, as a loss."""
        for block in self.blocks:
            x = x + block(x)
        return x.mean()


def operation_seconds(clock: Clock, rates: MachineRates) -> dict[str, float]:
    """Return the fixed seconds of an operation in forward and in backward. See [Note: what is left]."""
    model, x, recorder = TinyModel(clock.sizes.blocks[-1]), torch.randn(16, 16), WorkRecorder()
    pass_bytes(model, [x], Dtypes(), recorder=recorder)
    losses = list[Tensor]()
    forward = clock.seconds(lambda number: losses.append(model(x)), 30)
    losses.reverse()

    def back(number: int) -> None:
        losses.pop().backward()
        model.zero_grad()

    measured = {FORWARD: forward, BACKWARD: clock.seconds(back, 29)}
    found = dict[str, float]()
    for part, seconds in measured.items():
        work = recorder.parts[part]
        found[part] = max(0.0, seconds - operations_seconds(work, rates)) / work.operations
    return found


def runtime_seconds(clock: Clock, rates: MachineRates, stage: int) -> list[float]:
    """Return the runtime's seconds of a step and of a parameter at a stage. See [Note: what is left]."""
    left, counts = list[float](), list[int]()
    for blocks in clock.sizes.blocks:
        torch.manual_seed(0)
        model, x = TinyModel(blocks), torch.randn(16, 16)
        config = tiny_config(stage)
        engine = initialize(model=model, config=config)[0]

        step = partial(_one_step, engine, x)
        for number in range(clock.sizes.steps // 2):  # warm up
            step(number)
        measured = clock.seconds(step, clock.sizes.steps)
        engine.destroy()
        with torch.device("meta"):
            copy = TinyModel(blocks)
        made = plan(copy, config, clock.world, inputs=[x], device="cpu", machine=rates)
        assert made.step_time is not None, made.not_forecast
        left.append(measured - made.step_time.total)
        counts.append(len([*model.parameters()]))
    of_parameter = max(0.0, (left[1] - left[0]) / (counts[1] - counts[0]))
    return [max(0.0, left[1] - of_parameter * counts[1]), of_parameter]


def pipeline_seconds(clock: Clock, rates: MachineRates) -> list[float]:
    """Return the seconds of a step and of an operation of a pipeline. See [Note: what is left]."""
    left, counts, x = list[float](), list[int](), torch.randn(16, 16)
    for blocks in clock.sizes.blocks:
        count = blocks * clock.world  # micro-batches
        config = {**tiny_config(1), "gradient_accumulation_steps": count}
        engine = initialize(model=tiny_pipeline(clock.world), config=config)[0]
        step = partial(_one_batch, engine, [(x, x)] * count)
        step(0)
        measured = clock.seconds(step, clock.sizes.steps // 2)
        engine.destroy()
        with torch.device("meta"):
            described = tiny_pipeline(clock.world)
        made = plan(described, config, 1, inputs=[x, x], device="cpu", pipe=clock.world, machine=rates)
        assert made.step_time is not None, made.not_forecast
        left.append(measured - made.step_time.total)
        counts.append(2 * (count + clock.world - 1))  # from the first operation of any rank to the last
    of_operation = max(0.0, (left[1] - left[0]) / (counts[1] - counts[0]))
    return [max(0.0, left[1] - of_operation * counts[1]), of_operation]


def _one_batch(engine: Any, pairs: Sequence[tuple[Tensor, Tensor]], number: int) -> None:
    engine.train_batch(iter(pairs))


def tiny_pipeline(ranks: int) -> PipelineModule:
    """Return a pipeline of a few small layers for each rank."""
    layers = [LayerSpec(nn.Linear, 16, 16)] * (2 * ranks)
    return PipelineModule(layers, ranks, loss_fn=nn.functional.mse_loss, partition_method="uniform")


def _one_step(engine: Any, x: Tensor, number: int) -> None:
    engine.backward(engine(x))
    engine.step()


def tiny_config(stage: int) -> dict[str, Any]:
    """Return the configuration of a tiny run."""
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": False}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0  # all parameters are gathered for use
    return {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
    }


# All rates -------------------------------------------------------------------------------------------


def measure_rates(
    group: Any, show: Callable[[str], None] = lambda text: None, sizes: MeasuredSizes = MeasuredSizes()
) -> MachineRates:
    """Measure all rates on the ranks of this group at once; None: alone. `show` gets a line a topic."""
    clock = Clock(group, sizes)
    products, attention, passes = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    passes.update(mixed_points(clock))
    for dtype in DTYPES:
        pool = Pool(dtype)
        show(f"matrix products in {_name(dtype)} ...")
        products.update(product_points(clock, pool))
        attention.update(attention_points(clock, dtype))
        show(f"passes over memory in {_name(dtype)} ...")
        passes.update(pass_points(clock, pool))
    show("collectives ...")
    collectives = {
        **dict(collective_points(clock, shared_memory=True)),
        **dict(collective_points(clock, shared_memory=False)),
        **dict(message_points(clock)),
    }
    show("Adam ...")
    found: dict[str, Any] = {
        "products": products,
        "attention": attention,
        "passes": passes,
        "collectives": collectives,
        "adam": dict(adam_rates(clock)),
        "hidden": hidden_share(clock),
    }
    about: dict[str, Any] = {
        "date": str(date.today()),
        "machine": machine_in_words(),
        "device": "cpu",
        "ranks": clock.world,
        "torch": torch.__version__,
    }
    nothing = {str(stage): [0.0, 0.0] for stage in range(4)}
    if group is not None:
        nothing[RUNTIME] = [0.0, 0.0]
    rates = MachineRates(
        **about, **_mean(clock, found), operations={FORWARD: 0.0, BACKWARD: 0.0}, runtime=nothing
    )
    show("the runtime on a tiny model ...")
    operations = _mean(clock, operation_seconds(clock, rates))
    rates = replace(rates, operations=operations)
    runtime = {str(stage): runtime_seconds(clock, rates, stage) for stage in range(4)}
    if group is not None:
        runtime[RUNTIME] = pipeline_seconds(clock, rates)
    return replace(rates, runtime=_mean(clock, runtime))


def machine_in_words() -> str:
    """Return the processor and the number of CPUs and threads of a rank."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return f"{name}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads a rank"


def mean_rates(measured: Sequence[MachineRates]) -> MachineRates:
    """Return the mean rates of several measurements of one machine, whose speed varies with time."""
    names = ("products", "attention", "passes", "collectives", "adam", "operations", "runtime", "hidden")
    means = {name: _mean_of([getattr(each, name) for each in measured]) for name in names}
    return replace(measured[0], **means)


def _mean(clock: Clock, found: Any) -> Any:
    """Return the same structure with the mean of all ranks' numbers."""
    if clock.group is None:
        return found
    every: list[Any] = [None] * clock.world
    dist.all_gather_object(every, found, group=clock.group)
    return _mean_of(every)


def _mean_of(every: Sequence[Any]) -> Any:
    first = every[0]
    if isinstance(first, dict):
        return {key: _mean_of([each[key] for each in every]) for key in first}
    if isinstance(first, list):
        return [_mean_of(each) for each in zip(*every, strict=True)]
    return sum(every) / len(every)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
