"""How near are the CUDA operators to what memory allows, and how far ahead of torch's own? Needs a GPU.

    python -m tests.bench.kernels_gpu --topics adam unscale
    python -m tests.bench.kernels_gpu --numel 262144  # of 16 MB or less: what launches cost

The ceiling is a copy from device memory to device memory that reads and writes, together, as many bytes as
the operator must move at least; the aim is 0.90 of its speed. All rows of a topic share their arrays, which
are far larger than caches, and take turns in one run. Before, whatever is there to do the same as another row
is checked for giving the same.

Times are the device's (CUDA events). While a spinning kernel keeps it busy, the host queues what is measured:
so what the host needs to start kernels is not in there, unless it takes longer than the spinning.
The last line is JSON.
"""

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.bench import interleave
from tests.bench.interleave import Ratio, Series
from tests.bench.kernel_rows import BETA1, BETA2, DECAY, EPS, LR, TRUST, Call, Row, Topic, Versus
from zero_full.comm.quantized import BLOCK
from zero_full.kernels import load
from zero_full.kernels.reference import payload_bytes

BF16, FP32 = torch.bfloat16, torch.float32
AIM = 0.90  # of a copy's speed
SPIN = 20_000_000  # cycles: about 10 ms
SAMPLES = 5  # of a row in a round
CHECKED = 6_000_000  # elements: more than a layer of "many"
MULTIPLE = 64  # of elements: whole bytes of signs, and of a copy's half
WIDTH = 1024  # of the layers whose tensors are "many"
TENSORS = 300  # of a small model
ROWS_OF_SIGNS = 8  # ranks whose signs are averaged
HEAD = ["row", "ms", "range", "GB/s", "of a copy"]


def random(numel: int, device: torch.device, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    """Normal numbers, made there."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(numel, device=device, generator=generator).to(dtype)


# Adam --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """Tensors of an optimizer, views of one array each."""

    sizes: list[int]
    p: list[Tensor]
    m: list[Tensor]
    v: list[Tensor]
    grad: list[Tensor]
    copy: list[Tensor]


def one(numel: int) -> list[int]:
    """Everything in one tensor, as in a shard."""
    return [numel]


def many(numel: int) -> list[int]:
    """Those of a transformer: two large ones and two small ones a layer, and what is left."""
    layer = [WIDTH * WIDTH, WIDTH, 4 * WIDTH * WIDTH, WIDTH]
    times, rest = divmod(numel, sum(layer))
    return [*layer * times, rest]


def small(numel: int) -> list[int]:
    """As many as a model of 60 million parameters has, however large they are."""
    return [numel // TENSORS] * TENSORS + [numel % TENSORS]


def state_of(sizes: list[int], device: torch.device, moments: torch.dtype = FP32) -> State:
    """A bf16 gradient and copy, an fp32 master."""
    numel = sum(sizes)
    master = random(numel, device, seed=1)
    whole = [
        master,
        random(numel, device, moments, 2).mul_(0.1),
        random(numel, device, moments, 3).square_(),
        random(numel, device, BF16, 4),
        master.to(BF16),
    ]
    return State(sizes, *(list(tensor.split(sizes)) for tensor in whole))


def steps_of(state: State) -> list[Tensor]:
    """The numbers of steps, as fused optimizers have them."""
    return [torch.zeros((), device=p.device) for p in state.p]


def ours(state: State, copies: bool = True) -> Call:
    """The operator, in one sweep."""
    steps, copy = steps_of(state), state.copy if copies else []

    def call() -> Sequence[Tensor]:
        torch._foreach_add_(steps, 1)
        lists = (state.p, state.grad, state.m, state.v, steps, copy)
        load.operators(state.p[0].device).adam_step(*lists, LR, BETA1, BETA2, EPS, DECAY, True, 1.0)
        return [*state.p, *state.m, *state.v, *copy]

    return call


def torchs(state: State, **how: bool) -> Call:
    """AdamW of torch with casts around: gradients come up into fp32, masters go down into their copies."""
    wide = list(torch.zeros(sum(state.sizes), device=state.p[0].device).split(state.sizes))
    parameters = [nn.Parameter(p) for p in state.p]
    for parameter, grad in zip(parameters, wide, strict=True):
        parameter.grad = grad
    optimizer = torch.optim.AdamW(parameters, lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY, **how)
    counts = steps_of(state) if how.get("fused") else [torch.zeros(()) for _ in parameters]
    for parameter, step, m, v in zip(parameters, counts, state.m, state.v, strict=True):
        optimizer.state[parameter] = {"step": step, "exp_avg": m, "exp_avg_sq": v}

    def call() -> Sequence[Tensor]:
        torch._foreach_copy_(wide, state.grad)
        optimizer.step()
        torch._foreach_copy_(state.copy, state.p)
        return [*state.p, *state.m, *state.v, *state.copy]

    return call


def adam(layout: Callable[[int], list[int]], numel: int, device: torch.device) -> Topic:
    """A bf16 gradient in, an fp32 master and moments, a bf16 copy in and out: 30 bytes an element."""
    state = state_of(layout(numel), device)
    rows = {
        "zero_full": Row(ours(state), 30),
        "torch fused": Row(torchs(state, fused=True), like="zero_full"),
        "torch foreach": Row(torchs(state, foreach=True), like="zero_full"),
    }
    versus = [Versus("zero_full", (f"torch {kind}",)) for kind in ("fused", "foreach")]
    return Topic(rows, tuple(versus))


def adam_types(numel: int, device: torch.device) -> Topic:
    """Less to move: no copy; bf16 moments."""
    state = state_of(one(numel), device)
    narrow = replace(state, m=[t.to(BF16) for t in state.m], v=[t.to(BF16) for t in state.v])
    rows = {
        "zero_full, no copy": Row(ours(state, copies=False), 26),
        "zero_full, bf16 moments": Row(ours(narrow), 22),
    }
    return Topic(rows, ())


def lamb(numel: int, device: torch.device) -> Topic:
    """Both halves of a step of many tensors."""
    state, operators = state_of(many(numel), device), load.operators(device)
    steps = [step + 1 for step in steps_of(state)]
    lists = (state.p, state.grad, state.m, state.v)

    def norms() -> Tensor:
        found: Tensor = operators.lamb_norms(*lists, BETA1, BETA2, EPS, DECAY, False, 1.0)
        return found

    fixed = norms()

    def step() -> Sequence[Tensor]:
        after = (fixed, LR, BETA1, BETA2, EPS, DECAY, False, False, *TRUST)
        operators.lamb_step(state.p, state.m, state.v, steps, state.copy, *after)
        return state.p

    rows = {"zero_full, norms": Row(lambda: [norms()], 22), "zero_full, step": Row(step, 18)}
    return Topic(rows, ())


# One array ---------------------------------------------------------------------------------------


def unscale(numel: int, device: torch.device) -> Topic:
    """unscale_norm_check: bf16 and fp32 multiplied in place, and fp32 only read."""
    rows, versus = {}, []

    def check(x: Tensor, factor: float) -> Sequence[Tensor]:
        total, _ = load.operators(x.device).unscale_norm_check([x], factor)
        return [x, total.sqrt().float()]

    def by_torch(x: Tensor) -> Sequence[Tensor]:
        norm = torch.linalg.vector_norm(x.mul_(-1.0), dtype=FP32)
        norm.isfinite()
        return [x, norm]

    for name, dtype in (("bf16", BF16), ("fp32", FP32)):
        x, mine = random(numel, device, dtype), f"zero_full, {name}"
        rows[mine] = Row(functools.partial(check, x, -1.0), 2 * x.element_size())  # x stays as large as it is
        rows[f"torch, {name}"] = Row(functools.partial(by_torch, x), like=mine)
        versus.append(Versus(mine, (f"torch, {name}",)))
    rows["zero_full, fp32, factor 1"] = Row(functools.partial(check, x, 1.0), 4)
    return Topic(rows, tuple(versus))


def sign(numel: int, device: torch.device) -> Topic:
    """sign_pack, which needs two sweeps because a scale is known after the first, and a mean of signs."""
    values, error = random(numel, device, BF16), random(numel, device, seed=1)
    ends = torch.tensor([numel], device=device)
    packed = torch.zeros(ROWS_OF_SIGNS, numel // 8, dtype=torch.uint8, device=device)
    scales, out = torch.ones(ROWS_OF_SIGNS, 1, device=device), torch.zeros(numel, device=device)

    def pack() -> Sequence[Tensor]:
        return list(load.operators(device).sign_pack(values, error, ends, True))

    def mean() -> Sequence[Tensor]:
        load.operators(device).sign_unpack_mean(packed, scales, ends, out, False)
        return [out]

    rows = {
        "zero_full, pack": Row(pack, 2 * (2 + 4) + 4 + 1 / 8),
        f"zero_full, mean of {ROWS_OF_SIGNS}": Row(mean, 4 + ROWS_OF_SIGNS / 8),
    }
    return Topic(rows, ())


def blocks(behind: int, numel: int, device: torch.device) -> Topic:
    """bf16 to integers and back; payloads begin so many bytes behind a multiple of 16."""
    numbers, out = random(numel, device, BF16), torch.zeros(numel, dtype=BF16, device=device)
    rows = {}

    def there(payload: Tensor, bits: int) -> Sequence[Tensor]:
        load.operators(device).quantize_blocks(numbers, payload, bits, BLOCK)
        return [payload]

    def back(payload: Tensor, bits: int) -> Sequence[Tensor]:
        load.operators(device).dequantize_blocks(payload, out, bits, BLOCK, False)
        return [out]

    for bits in (8, 4):
        room = torch.zeros(payload_bytes(numel, bits, BLOCK) + behind, dtype=torch.uint8, device=device)
        payload = room[behind:]
        there(payload, bits)
        for name, work in ((f"to int{bits}", there), (f"from int{bits}", back)):
            call = functools.partial(work, payload, bits)
            rows[f"zero_full, {name}"] = Row(call, 2 + bits / 8 + 4 / BLOCK)
    return Topic(rows, ())


TOPICS: dict[str, Callable[[int, torch.device], Topic]] = {
    "adam": functools.partial(adam, one),
    "adam, many tensors": functools.partial(adam, many),
    "adam, small tensors": functools.partial(adam, small),
    "adam, other types": adam_types,
    "lamb, many tensors": lamb,
    "unscale": unscale,
    "sign": sign,
    "blocks": functools.partial(blocks, 0),
    "blocks, 4 bytes on": functools.partial(blocks, 4),
}


# Ceilings ----------------------------------------------------------------------------------------


def copy_of(moved: int, device: torch.device) -> Call:
    """Half of the bytes are read, half are written."""
    source = torch.zeros(moved // 2, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)

    def call() -> Sequence[Tensor]:
        target.copy_(source)
        return ()

    return call


def with_copies(topic: Topic, numel: int, device: torch.device) -> Topic:
    """For each row whose bytes are counted a copy of so many, and a comparison with it."""
    counted = {name: row.bytes for name, row in topic.rows.items() if row.bytes}
    copies = {size: f"copy, {size:.4g} B" for size in counted.values()}
    rows = {name: Row(copy_of(int(size * numel), device), size) for size, name in copies.items()}
    versus = [Versus(name, (copies[size],), 1 / AIM) for name, size in counted.items()]
    return Topic({**rows, **topic.rows}, (*versus, *topic.versus))


# Measuring ---------------------------------------------------------------------------------------


def check(name: str, device: torch.device, numel: int | None = None) -> None:
    """Every row that has a like gives what that one does, from the same start."""
    numel = CHECKED if numel is None else min(numel, CHECKED)
    for row, told in TOPICS[name](numel, device).rows.items():
        if told.like:
            mine, other = (TOPICS[name](numel, device).rows[each].call() for each in (told.like, row))
            for number, (expected, got) in enumerate(zip(mine, other, strict=True)):
                rtol = 1e-2 if expected.dtype == BF16 else 1e-4

                def words(text: str, number: int = number, row: str = row) -> str:
                    return f"{name}: result {number} of {row}: {text}"

                torch.testing.assert_close(got, expected, rtol=rtol, atol=1e-6, msg=words)


def seconds(call: Call, device: torch.device) -> float:
    """The device's time, or on the CPU, which is for tests, the clock's."""
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(SPIN)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def measure(topic: Topic, rounds: int, device: torch.device) -> dict[str, Series]:
    """All rows in turn; the first call of a visit is not counted."""

    def visit(name: str, number: int) -> list[float]:
        return [seconds(topic.rows[name].call, device) for _ in range(SAMPLES + 1)][1:]

    return interleave.run(list(topic.rows), rounds, visit)


def report(topic: Topic, numel: int, found: dict[str, Series]) -> str:
    """A row's bandwidth is over the bytes that must be moved."""
    lines = []
    copies = {topic.rows[name].bytes: name for name in topic.rows if name.startswith("copy, ")}
    for name, series in found.items():
        moved, median, (low, high) = (
            topic.rows[name].bytes,
            interleave.middle(series),
            interleave.spread(series),
        )
        rate = f"{moved * numel / median / 1e9:.0f}" if moved else ""
        share = f"{interleave.middle(found[copies[moved]]) / median:.2f}" if moved else ""
        lines.append([name, f"{1e3 * median:.3f}", f"{1e3 * low:.3f}-{1e3 * high:.3f}", rate, share])
    return interleave.table(HEAD, lines)


def ratios(name: str, topic: Topic, found: dict[str, Series]) -> list[Ratio]:
    """Times of ours over theirs: to have 0.90 of a copy's speed is to take 1.11 of its time."""
    return [
        interleave.ratio(f"{name}: {each.ours} / {theirs}", found[each.ours], found[theirs], each.target)
        for each in topic.versus
        for theirs in each.theirs
    ]


def the_device(kind: str) -> torch.device:
    """The GPU, with compiled operators; otherwise the program ends, and says why. "cpu" is for rehearsals."""
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        sys.exit("kernels_gpu: no CUDA device, so nothing was measured")
    os.environ["ZERO_FULL_KERNELS"] = "all"
    loaded = load.load(torch.device("cuda"))
    if loaded.path is None:
        sys.exit(f"kernels_gpu: no compiled operators ({loaded.reason}), so nothing was measured")
    return torch.device("cuda")


def main() -> None:
    """Check, measure, print tables and one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--topics", nargs="+", choices=TOPICS, default=list(TOPICS), metavar="TOPIC")
    parser.add_argument("--numel", type=int, default=2**27, help="elements; arrays must not fit into a cache")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal")
    asked = parser.parse_args()
    device = the_device(asked.device)
    print(interleave.heading())
    numel = max(asked.numel // MULTIPLE, 1) * MULTIPLE
    every: list[Ratio] = []
    for name in asked.topics:
        check(name, device, numel)
        topic = with_copies(TOPICS[name](numel, device), numel, device)
        found = measure(topic, asked.rounds, device)
        every += ratios(name, topic, found)
        print(f"\n## {name}\n\n{report(topic, numel, found)}", flush=True)
        del topic  # its arrays make room for the next one's
    print("\n" + interleave.table(interleave.RATIO_HEAD, [r.cells() for r in every]))
    print("\n" + interleave.json_line(every, numel=numel, rounds=asked.rounds, **about(device)))


def about(device: torch.device) -> dict[str, Any]:
    """What it was measured on."""
    if device.type == "cpu":
        return {"device": "a CPU: nothing that counts", "torch": torch.__version__}
    found = torch.cuda.get_device_properties(device)
    return {"device": found.name, "GiB": round(found.total_memory / 2**30), "torch": torch.__version__}


if __name__ == "__main__":
    main()
