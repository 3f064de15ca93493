"""Measure a machine's rates: products, passes over memory, collectives, Adam, and the runtime's own time.

Every measurement is the median of repeated calls, averaged over the ranks. Large operands come from a pool
that exceeds the caches, as a model's parameters and gradients do; small activations are used again at once.

[Note: what is left] Two costs cannot be called alone: a fixed time of each operation, and the runtime's
Python. Both are what is left of steps of two small models, when the time of their products, collectives and
updates is subtracted, which is measured within the same steps. The difference between the two models is the
time of each operation or parameter, the rest that of each pass or step. Both are higher than in a loop over
one small call, because in a step the last update and the next block's matrices take the caches.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import date
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_full.comm.communicator import Communicator
from zero_full.comm.lane import lane_for
from zero_full.comm.traffic import CollectiveCall
from zero_full.initialization import initialize
from zero_full.kernels.load import operators
from zero_full.pipeline.module import LayerSpec, PipelineModule
from zero_full.plan import plan
from zero_full.plan.activations import pass_bytes
from zero_full.plan.machine_facts import machine_facts
from zero_full.plan.machine_file import RATE, MachineRates
from zero_full.plan.pipeline_time import MESSAGE, RUNTIME
from zero_full.plan.step_time import HEAD, operations_seconds
from zero_full.plan.work import (
    ACCUMULATE,
    BACKWARD,
    CAST,
    COPY,
    FORWARD,
    FUNCTION,
    MIXED,
    NORM,
    SCAN,
    SUM,
    MatrixProduct,
    Work,
    WorkRecorder,
    dtype_name,
)
from zero_full.precision.dtypes import Dtypes
from zero_full.precision.norms import squared_norm

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
POOL = 2**26  # bytes of operands that are used in turn
LARGEST = 4096 * 1024  # elements of a matrix of parameters
HEADS = 8  # that attention is measured with
ADAM_NUMEL = 2**21  # of each of four tensors
ADAM_OPTIONS = (1e-4, 0.9, 0.95, 1e-8, 0.1, True, 1.0)
LEAST, MOST = 3, 100  # repeated calls
TOKENS, WIDTH, INNER = 16, 256, 1024  # of small models: sizes of products that are measured
EVICTED = 2**23  # elements of two operands that fill the caches


@dataclass(frozen=True)
class MeasuredSizes:
    """The sizes that are measured, and how often."""

    tokens: tuple[int, ...] = (16, 64, 256, 1024)  # rows of activations
    widths: tuple[int, ...] = (64, 256, 1024, 4096)  # of layers
    passes: tuple[int, ...] = tuple(2**power for power in range(12, 27, 2))  # bytes
    collectives: tuple[int, ...] = tuple(2**power for power in (10, 16, 20, 22, 24, 26))  # bytes
    blocks: tuple[int, int] = (3, 12)  # of the two small models
    steps: int = 16  # of a small model, after half as many that warm up
    calls: int = 9  # of a call that waits for other ranks
    rounds: int = 30  # of products between two meetings of the ranks
    products: int = 20  # of a round, about 20 ms
    seconds: float = 0.008  # of repeated calls


QUICK = MeasuredSizes(  # for tests
    (16, 64), (64, 256), (2**12, 2**20), (2**10, 2**20), (1, 3), 3, 3, 3, 1, 0.0
)


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
        yield f"{dtype_name(pool.values.dtype)} {layout}", points


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
    yield f"{dtype_name(dtype)} {FORWARD}", forward
    yield f"{dtype_name(dtype)} {BACKWARD}", backward


def pass_points(clock: Clock, pool: Pool) -> Iterator[tuple[str, list[list[float]]]]:
    """Yield bytes and seconds of passes over memory, by kind."""
    dtype, outputs = pool.values.dtype, Pool(pool.values.dtype)
    name, found = dtype_name(dtype), defaultdict[str, list[list[float]]](list)
    for size in clock.sizes.passes:
        third, half, whole = (size // dtype.itemsize // parts for parts in (3, 2, 1))
        a, b, c = (pool.cut(numel)[0].clone() for numel in (third, third, half))
        calls: dict[str, Callable[[int], object]] = {
            SUM: partial(_ignoring, torch.add, a, b),
            FUNCTION: partial(_ignoring, nn.functional.gelu, c),
            COPY: in_turn(_copy, _pairs(outputs, pool, half)),
            ACCUMULATE: in_turn(_add, _pairs(outputs, pool, third)),
            SCAN: in_turn(torch.aminmax, pool.cut(whole)),
            NORM: in_turn(lambda one: squared_norm([one], CPU), pool.cut(whole)),
        }
        for kind, call in calls.items():
            found[f"{kind} {name}"].append([size, clock.seconds(call)])
    yield from found.items()


def mixed_points(clock: Clock) -> Iterator[tuple[str, list[list[float]]]]:
    """Yield bytes and seconds of copies between fp32 and bf16, and of sums of bf16 in fp32."""
    wide, narrow, found = Pool(torch.float32), Pool(torch.bfloat16), defaultdict[str, list[list[float]]](list)
    for size in clock.sizes.passes:
        calls = {
            f"{CAST} float32": in_turn(_copy, _pairs(wide, narrow, size // 6)),
            f"{CAST} bfloat16": in_turn(_copy, _pairs(narrow, wide, size // 6)),
            f"{MIXED} float32": in_turn(_add, _pairs(wide, narrow, size // 10)),
        }
        for name, call in calls.items():
            found[name].append([size, clock.seconds(call)])
    yield from found.items()


Pair = tuple[Tensor, Tensor]


def _pairs(outputs: Pool, inputs: Pool, numel: int) -> list[Pair]:
    """Return pairs of windows in both pools."""
    return [*zip(outputs.cut(numel), inputs.cut(numel), strict=False)]


def _copy(pair: Pair) -> None:
    pair[0].copy_(pair[1])


def _add(pair: Pair) -> None:
    pair[0].add_(pair[1])


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
                    found[f"{kind} {dtype_name(dtype)}"].append([size, seconds])
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
        times = [_seconds_of(partial(exchange, number)) for number in range(clock.sizes.calls)]
        points.append([size, median(times) / 2])
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
        name = "none" if copied is None else dtype_name(copied)
        yield f"float32 {dtype_name(gradient)} {name}", one / (4 * ADAM_NUMEL)


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

    def both() -> None:
        job = lane.submit(send, [whole], [])
        compute()
        job.wait()

    times = defaultdict[str, list[float]](list)
    for _ in range(clock.sizes.calls):  # in turn, because a machine's speed varies
        for act in (compute, send, both):
            clock.barrier()
            times[act.__name__].append(_seconds_of(act))
    computing, sending, together = (median(times[act.__name__]) for act in (compute, send, both))
    lane.close()
    ranks.close()
    return min(1.0, max(0.0, (computing + sending - together) / min(computing, sending)))


def waiting_share(clock: Clock) -> float:
    """Return how much longer ranks take from one meeting to the next than each computes, as a share.

    Ranks that compute the same do not take the same time, and a meeting waits for the slowest.
    """
    if clock.group is None:
        return 0.0
    ranks = Communicator(clock.group, CPU)
    first, second, number = torch.randn(64, 1024), torch.randn(1024, 1024), torch.zeros(1)
    computed = list[float]()

    def compute() -> None:
        for _ in range(clock.sizes.products):
            torch.mm(first, second)

    def round_of(call: int) -> None:
        begin = time.perf_counter()
        compute()
        computed.append(time.perf_counter() - begin)
        ranks.sum_numbers(number, "rates")

    meeting = clock.seconds(lambda call: ranks.sum_numbers(number, "rates"), clock.sizes.rounds)
    whole = clock.seconds(round_of, clock.sizes.rounds)
    ranks.close()
    alone: float = _mean(clock, median(computed))
    together: float = _mean(clock, whole)
    return max(0.0, together - meeting - alone) / alone


# What is left ----------------------------------------------------------------------------------------


class SmallModel(nn.Module):
    """A model of blocks with two linear layers. A block's matrices exceed a core's own caches."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of the outputs, as a loss."""
        for block in self.blocks:
            x = x + block(x)
        return x.mean()


def pass_times(clock: Clock, model: nn.Module, x: Tensor) -> dict[str, float]:
    """Return the seconds of forward and backward between updates, and of their matrix products alone.

    They are measured in turn, because a machine's speed varies.
    """
    times = defaultdict[str, list[float]](list)
    one, other = Pool(torch.float32).cut(EVICTED)[:2]
    losses = list[Tensor]()
    weights = [layer.weight.detach() for layer in model.modules() if isinstance(layer, nn.Linear)]
    given = [torch.randn(TOKENS, weight.shape[1]) for weight in weights]
    acts: dict[str, Callable[[], object]] = {
        FORWARD: lambda: losses.append(model(x)),
        BACKWARD: lambda: losses.pop().backward(),
        f"products of {FORWARD}": partial(_forward_products, weights, given),
        f"products of {BACKWARD}": partial(_backward_products, weights, given),
    }
    for number in range(clock.sizes.steps + clock.sizes.steps // 2):
        for name, act in acts.items():
            if name != BACKWARD:
                one.add_(other)  # as an update does, this leaves nothing of the model in the caches
            begin = time.perf_counter()
            act()
            if number >= clock.sizes.steps // 2:
                times[name].append(time.perf_counter() - begin)
        model.zero_grad()
    return {name: median(each) for name, each in times.items()}


def _forward_products(weights: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    for weight, inputs in zip(weights, given, strict=True):
        torch.mm(inputs, weight.t())


def _backward_products(weights: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of weights, which take new memory as in a step."""
    made = []
    for weight, inputs in zip(weights, given, strict=True):
        outputs = inputs.new_empty(TOKENS, weight.shape[0]).fill_(1e-3)
        torch.mm(outputs, weight)
        made.append(torch.mm(outputs.t(), inputs))
    return made


def measured_passes(clock: Clock, rates: MachineRates) -> dict[str, list[float]]:
    """Return the fixed seconds of a pass and of each operation in it, by direction: [Note: what is left]."""
    left, counts = defaultdict[str, list[float]](list), defaultdict[str, list[int]](list)
    x = torch.randn(TOKENS, WIDTH)
    for blocks in clock.sizes.blocks:
        model, recorder = SmallModel(blocks), WorkRecorder()
        pass_bytes(model, [x], Dtypes(), recorder=recorder)
        times: dict[str, float] = _mean(clock, pass_times(clock, model, x))
        for part in (FORWARD, BACKWARD):
            work = recorder.parts[part]
            others = Work(Counter({i: n for i, n in work.items.items() if not isinstance(i, MatrixProduct)}))
            left[part].append(times[part] - times[f"products of {part}"] - operations_seconds(others, rates))
            counts[part].append(work.operations)
    return {part: _line(counts[part], left[part]) for part in left}


def runtime_seconds(clock: Clock, stage: int) -> list[float]:
    """Return the runtime's seconds of a step and of a parameter at a stage. See [Note: what is left]."""
    left, counts, x = list[float](), list[int](), torch.randn(TOKENS, WIDTH)
    one, other = Pool(torch.float32).cut(EVICTED)[:2]
    for blocks in clock.sizes.blocks:
        model, plain, timer = SmallModel(blocks), SmallModel(blocks), RuntimeTimer()
        engine = initialize(model=model, config=small_config(stage))[0]
        engine.optimizer.named_range = timer.range
        engine.optimizer.communicators.traffic.listener = timer
        alone, within = partial(_one_pass, plain, x), partial(_engine_pass, engine, x)
        copies = partial(_copy_gradients, plain, torch.empty(sum(p.numel() for p in model.parameters())))
        of_passes, of_steps = list[float](), list[float]()
        for number in range(clock.sizes.steps + clock.sizes.steps // 2):
            one.add_(other)
            known = _seconds_of(alone)
            if clock.world > 1:  # else gradients stay where they are
                known += _seconds_of(copies)
            plain.zero_grad()
            one.add_(other)
            clock.barrier()
            timer.seconds = 0.0
            of_pass = _seconds_of(within) - known - timer.seconds
            timer.seconds = 0.0
            of_step = _seconds_of(engine.step) - timer.seconds
            if number >= clock.sizes.steps // 2:
                of_passes.append(of_pass)
                of_steps.append(of_step)
        engine.destroy()
        left.append(_mean(clock, max(0.0, median(of_passes)) + median(of_steps)))
        counts.append(len([*model.parameters()]))
    return _line(counts, left)


class RuntimeTimer:
    """Adds up the seconds of a step's collectives and of its update, which have rates of their own."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Time a phase of the step, if it is the update."""
        before, begin = self.seconds, time.perf_counter()
        yield
        if name == "update":
            self.seconds = before + time.perf_counter() - begin

    def collective(self, call: CollectiveCall, make: Callable[[], None]) -> None:
        """Make a collective and time it."""
        self.seconds += _seconds_of(make)


def _seconds_of(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def pipeline_seconds(clock: Clock, rates: MachineRates) -> list[float]:
    """Return what a pipeline takes beyond computation and messages: seconds per step, and per operation.

    See [Note: what is left].
    """
    left, counts, x = list[float](), list[int](), torch.randn(TOKENS, WIDTH)
    for blocks in clock.sizes.blocks:
        count = blocks * clock.world  # micro-batches
        config = {**small_config(1), "gradient_accumulation_steps": count}
        engine = initialize(model=small_pipeline(clock.world), config=config)[0]
        step = partial(_one_batch, engine, [(x, x)] * count)
        step(0)
        measured: float = _mean(clock, clock.seconds(step, clock.sizes.steps // 2))
        engine.destroy()
        with torch.device("meta"):
            described = small_pipeline(clock.world)
        made = plan(described, config, 1, inputs=[x, x], device="cpu", pipe=clock.world, machine=rates)
        assert made.step_time is not None, made.not_forecast
        left.append(measured - made.step_time.total)
        counts.append(2 * (count + clock.world - 1))  # from the first operation of any rank to the last
    return _line(counts, left)


def _line(counts: Sequence[int], seconds: Sequence[float]) -> list[float]:
    """Return the constant, and the seconds of each of `counts`, on the line through two points."""
    each = max(0.0, (seconds[1] - seconds[0]) / (counts[1] - counts[0]))
    return [max(0.0, seconds[1] - each * counts[1]), each]


def _one_batch(engine: Any, pairs: Sequence[tuple[Tensor, Tensor]], number: int) -> None:
    engine.train_batch(iter(pairs))


def small_pipeline(ranks: int) -> PipelineModule:
    """Return a pipeline of four small layers for each rank."""
    layers = [LayerSpec(nn.Linear, WIDTH, INNER), LayerSpec(nn.Linear, INNER, WIDTH)] * (2 * ranks)
    return PipelineModule(layers, ranks, loss_fn=nn.functional.mse_loss, partition_method="uniform")


def _one_pass(model: nn.Module, x: Tensor) -> None:
    model(x).backward()


def _copy_gradients(model: nn.Module, flat: Tensor) -> None:
    """Copy all gradients into a flat buffer, as the runtime does."""
    start = 0
    for param in model.parameters():
        flat[start : start + param.numel()].copy_(param.grad.view(-1))  # type: ignore[union-attr]
        start += param.numel()


def _engine_pass(engine: Any, x: Tensor) -> None:
    engine.backward(engine(x))


def small_config(stage: int) -> dict[str, Any]:
    """Return the configuration of a small run."""
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": False}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0  # all parameters are gathered for use
    return {
        "train_micro_batch_size_per_gpu": TOKENS,
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
        show(f"matrix products in {dtype_name(dtype)} ...")
        products.update(product_points(clock, pool))
        attention.update(attention_points(clock, dtype))
        show(f"passes over memory in {dtype_name(dtype)} ...")
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
        "waiting": waiting_share(clock),
    }
    about: dict[str, Any] = {"date": str(date.today()), **machine_facts("cpu", clock.world)}
    nothing = {str(stage): [0.0, 0.0] for stage in range(4)}
    if group is not None:
        nothing[RUNTIME] = [0.0, 0.0]
    rates = MachineRates(
        **about,
        **_mean(clock, found),
        operations={FORWARD: [0.0, 0.0], BACKWARD: [0.0, 0.0]},
        runtime=nothing,
    )
    show("the runtime on small models ...")
    rates = replace(rates, operations=measured_passes(clock, rates))
    runtime = {str(stage): runtime_seconds(clock, stage) for stage in range(4)}
    rates = replace(rates, runtime={**nothing, **runtime})
    if group is not None:
        rates = replace(rates, runtime={**runtime, RUNTIME: pipeline_seconds(clock, rates)})
    return rates


def mean_rates(measured: Sequence[MachineRates]) -> MachineRates:
    """Return the mean rates of several measurements of one machine, whose speed varies with time."""
    names = [each.name for each in fields(MachineRates) if each.metadata["kind"] == RATE]
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
