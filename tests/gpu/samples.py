"""Arguments for every operator, how to call it with them on a device, and what must come out on each.

`python -m tests.gpu.samples` calls each operator on the GPU, with arrays that end where their memory does:
for tools that watch memory.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.kernels.cases import BF16, FP32, bits, normal
from tests.kernels.optimizing import TOGETHER, Lists, lists
from zero_full.kernels import load
from zero_full.kernels.reference import payload_bytes

CPU, GPU = torch.device("cpu"), torch.device("cuda")
CHUNK = 8192  # elements that a block of threads walks over
SIZES = (0, 1, 7, 8, 9, 31, 1000, CHUNK - 1, CHUNK, CHUNK + 1, 100_003)
MANY = (3,) * 340  # tensors: too many for one launch, also of those that only add up
GUARD, POISON = 512, 255  # bytes on each side of an array; they are NaN in all types
ADAM = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "factor": 0.5}
LAMB = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1}
MOVE = {"lr": 1e-2, "bias_correction": True, "min_trust": 0.01, "max_trust": 10.0}


@dataclass(frozen=True)
class Sample:
    """One call. Tensors, and lists of tensors, are on the CPU; where they start is part of the sample."""

    operator: str
    tensors: tuple[Any, ...]
    options: dict[str, Any]

    def __str__(self) -> str:
        return self.operator


def changed(function: Callable[[Tensor], Tensor], argument: Any) -> Any:
    """A tensor, a list of them, or None."""
    if isinstance(argument, (list, tuple)):
        return [changed(function, each) for each in argument]
    return function(argument) if isinstance(argument, Tensor) else argument


# Samples -----------------------------------------------------------------------------------------


class Types(NamedTuple):
    """Of an optimizer's tensors."""

    master: torch.dtype = FP32
    grad: torch.dtype = BF16
    moments: torch.dtype = FP32
    copy: torch.dtype | None = BF16


def _lists(sizes: Sequence[int], types: Types, offsets: Sequence[int]) -> Lists:
    return lists(sizes, offsets, types.grad, types.master, types.moments, types.copy)


def adam_step(
    sizes: Sequence[int],
    types: Types = Types(),  # noqa: B008
    offsets: Sequence[int] = TOGETHER,
    decoupled: bool = True,
) -> Sample:
    return Sample("adam_step", tuple(_lists(sizes, types, offsets)), {**ADAM, "decoupled": decoupled})


def adam_step_stochastic(
    sizes: Sequence[int],
    types: Types = Types(BF16, BF16, BF16, None),  # noqa: B008
    offsets: Sequence[int] = TOGETHER,
) -> Sample:
    about = {
        "keys": [7 * 10**15 * i - 10**18 for i in range(len(sizes))],
        "places": [2**32 - 50] * len(sizes),
    }
    tensors = tuple(_lists(sizes, types, offsets)[:5])
    return Sample("adam_step_stochastic", tensors, {**about, **ADAM, "decoupled": True})


def lamb_norms(
    sizes: Sequence[int],
    types: Types = Types(),  # noqa: B008
    offsets: Sequence[int] = TOGETHER,
    eps_inside_sqrt: bool = False,
) -> Sample:
    options = {**LAMB, "eps_inside_sqrt": eps_inside_sqrt, "factor": 0.5}
    return Sample("lamb_norms", tuple(_lists(sizes, types, offsets)[:4]), options)


def lamb_step(
    sizes: Sequence[int],
    types: Types = Types(),  # noqa: B008
    offsets: Sequence[int] = TOGETHER,
    eps_inside_sqrt: bool = False,
) -> Sample:
    masters, _, *others = _lists(sizes, types, offsets)
    norms = normal(2 * len(sizes), seed=1).double().square().view(-1, 2)
    return Sample(
        "lamb_step", (masters, *others, norms), {**LAMB, **MOVE, "eps_inside_sqrt": eps_inside_sqrt}
    )


def unscale(sizes: Sequence[int], dtype: torch.dtype = FP32, factor: float = 0.3, offset: int = 3) -> Sample:
    gradients = [normal(n, dtype, i, offset) for i, n in enumerate(sizes)]
    return Sample("unscale_norm_check", (gradients,), {"factor": factor})


def ends_of(numel: int) -> Tensor:
    """Where pieces of no, few and many elements end; a little padding is left."""
    sizes = (0, 1, 2, 0, 67, CHUNK - 71, 3, numel // 3, numel // 2)
    return torch.tensor([min(end, numel - numel // 50) for end in accumulate(sizes)], dtype=torch.int64)


def sign_pack(numel: int, dtype: torch.dtype | None = BF16, l1: bool = True, offset: int = 3) -> Sample:
    values = None if dtype is None else normal(numel, dtype, 1, offset)
    return Sample("sign_pack", (values, normal(numel, FP32, 2, offset), ends_of(numel)), {"l1": l1})


def sign_mean(
    numel: int, dtype: torch.dtype = FP32, rows: int = 3, add: bool = True, offset: int = 3
) -> Sample:
    ends, generator = ends_of(numel), torch.Generator().manual_seed(rows)
    packed = torch.randint(0, 256, (rows, -(-numel // 8)), generator=generator).to(torch.uint8)
    scales = torch.rand(rows, len(ends), generator=generator)
    out = normal(numel, dtype, 3, offset)
    return Sample("sign_unpack_mean", (packed, scales, ends, out), {"add": add})


class Blocks(NamedTuple):
    """What numbers become."""

    bits: int = 4
    block: int = 2048
    offset: int = 3  # in bytes, of the payload


def quantize(
    numel: int,
    dtype: torch.dtype = BF16,
    blocks: Blocks = Blocks(),  # noqa: B008
    offset: int = 2,
) -> Sample:
    size = payload_bytes(numel, blocks.bits, blocks.block)
    payload = torch.full((size + blocks.offset,), POISON, dtype=torch.uint8)[blocks.offset :]
    numbers = normal(numel, dtype, 4, offset)
    return Sample("quantize_blocks", (numbers, payload), {"bits": blocks.bits, "block": blocks.block})


def dequantize(
    numel: int,
    dtype: torch.dtype = BF16,
    blocks: Blocks = Blocks(),  # noqa: B008
    offset: int = 2,
    add: bool = True,
) -> Sample:
    there = quantize(numel, dtype, blocks, offset)
    load.operators(torch.device("cpu")).quantize_blocks(*there.tensors, **there.options)
    out = normal(numel, dtype, 5, offset)
    return Sample("dequantize_blocks", (there.tensors[1], out), {**there.options, "add": add})


def one_of_each(numel: int) -> dict[str, Sample]:
    """Every operator, with about so many elements."""
    sizes = (numel // 3, 0, 7, numel - numel // 3)
    optimizers = [make(sizes) for make in (adam_step, adam_step_stochastic, lamb_norms, lamb_step)]
    signs = [sign_pack(numel), sign_mean(numel)]
    each = [*optimizers, unscale(sizes), *signs, quantize(numel), dequantize(numel)]
    return {sample.operator: sample for sample in each}


# Calls -------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What the tensors have become, and what came back; on the CPU."""

    tensors: list[Tensor]
    results: list[Tensor]


class Guarded:
    """Copies on a device, as aligned as the originals, each between guards."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.rooms = device, list[tuple[Tensor, int, int]]()

    def put(self, tensor: Tensor) -> Tensor:
        content = bits(tensor)
        room = torch.full((content.numel() + 2 * GUARD + 64,), POISON, dtype=torch.uint8, device=self.device)
        start = GUARD + (tensor.data_ptr() - room.data_ptr() - GUARD) % 64
        end = start + content.numel()
        room[start:end] = content.to(self.device)
        self.rooms.append((room, start, end))
        return room[start:end].view(tensor.dtype).view(tensor.shape)

    def check(self) -> None:
        """Nothing was written beside a tensor."""
        for number, (room, start, end) in enumerate(self.rooms):
            for guard, where in ((room[:start], "before"), (room[end:], "behind")):
                assert bool((guard == POISON).all()), f"something was written {where} tensor {number}"


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors have NaNs in them, or the largest integers: also those that operators make."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def flat(tensors: Any) -> list[Tensor]:
    """Of a tensor, nothing, or nested sequences of them."""
    if isinstance(tensors, (list, tuple)):
        return [tensor for each in tensors for tensor in flat(each)]
    return [tensors] if isinstance(tensors, Tensor) else []


def call(sample: Sample, device: torch.device, kind: Any = None) -> Outcome:
    """Between guards, with poisoned results. `kind`: who has the operators, if not torch."""
    guarded = Guarded(device)
    tensors = changed(guarded.put, sample.tensors)
    with poisoned_memory():
        results = getattr(kind or load.operators(device), sample.operator)(*tensors, **sample.options)
    guarded.check()
    return Outcome(*([tensor.cpu() for tensor in flat(each)] for each in (tensors, results)))


# What must be the same ---------------------------------------------------------------------------

Tolerance = tuple[float, float]
EXACT: Tolerance = (0, 0)
SUM: Tolerance = (1e-6, 1e-30)  # the GPU adds a few squares in fp32, or in another order
POWER: dict[torch.dtype, Tolerance] = {  # the last bit of a step's size: processors have their own `pow`
    FP32: (3e-6, 1e-6),
    BF16: (2**-7, 1e-6),
    torch.float16: (2**-10, 1e-6),
}


def tolerances(sample: Sample) -> tuple[list[Tolerance], list[Tolerance]]:
    """Of the tensors and of the results, on a GPU instead of a CPU."""
    exact = [[EXACT] * len(flat(each)) for each in sample.tensors]
    if sample.operator in ("adam_step", "lamb_step"):
        for place in (0, -1 if sample.operator == "adam_step" else -2):  # masters and copies
            exact[place] = [POWER[tensor.dtype] for tensor in sample.tensors[place]]
    if sample.operator == "adam_step_stochastic":
        exact[0] = [POWER[tensor.dtype] for tensor in sample.tensors[0]]
    if sample.operator == "sign_pack":
        exact[1] = [(0, 1e-6)]  # what a scale with another last bit gets wrong
    results = {
        "lamb_norms": [SUM],
        "unscale_norm_check": [SUM, EXACT],
        "sign_pack": [EXACT, (1.2e-7, 0)],  # fp64 sums that round to neighbouring fp32 numbers
    }
    return [tolerance for each in exact for tolerance in each], results.get(sample.operator, [])


def assert_same(sample: Sample, got: Outcome, want: Outcome) -> None:
    """As exactly as it can be; any NaN is as good as another."""
    for kind, mine, theirs, allowed in zip(Outcome._fields, got, want, tolerances(sample), strict=True):
        for number, (one, other, (rtol, atol)) in enumerate(zip(mine, theirs, allowed, strict=True)):

            def name(text: str, kind: str = kind, number: int = number) -> str:
                return f"{kind} {number} of {sample}: {text}"

            torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True, msg=name)


def check(sample: Sample) -> Outcome:
    """A GPU gives what the CPU gives."""
    got = call(sample, GPU)
    assert_same(sample, got, call(sample, CPU))
    return got


def assert_same_bits(mine: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    for number, (one, two) in enumerate(zip(mine, other, strict=True)):
        assert torch.equal(bits(one.cpu()), bits(two.cpu())), f"tensor {number} differs"


# Memory as it comes ------------------------------------------------------------------------------


def placed(sample: Sample, device: torch.device) -> Any:
    """The sample's tensors there, at the beginning of their memory."""
    return changed(lambda tensor: tensor.to(device, copy=True), sample.tensors)


def run(sample: Sample, tensors: Any) -> list[Tensor]:
    """The operator's results."""
    return flat(getattr(torch.ops.zero_full, sample.operator)(*tensors, **sample.options))


def main() -> None:
    """Every operator on the GPU, once; memory ends where its arrays do."""
    os.environ["ZERO_FULL_KERNELS"] = "all"
    loaded = load.load(GPU)
    if loaded.path is None:
        raise SystemExit(f"no compiled operators: {loaded.reason}")
    samples = one_of_each(2 * CHUNK + 1001)
    for sample in samples.values():

        def put(tensor: Tensor) -> Tensor:
            offset = tensor.storage_offset()
            room = torch.empty(offset + tensor.numel(), dtype=tensor.dtype, device=GPU)
            return room[offset:].view(tensor.shape).copy_(tensor)

        getattr(load.operators(GPU), sample.operator)(*changed(put, sample.tensors), **sample.options)
        torch.cuda.synchronize()
    print(f"{len(samples)} operators ran")


if __name__ == "__main__":
    main()
