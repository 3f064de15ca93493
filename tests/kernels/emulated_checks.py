"""What is demanded of the CUDA kernels in the emulator: the reference's numbers.

Where no sum is involved, they give the very bits of the CPU's operators: the formulas are the same source.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tests.kernels.cases import BF16, FP16, FP32, INF, NAN, bits, normal, ops
from tests.kernels.emulation import CHUNK, Emulated, poisoned
from tests.kernels.optimizing import Lists
from zero_full.kernels import reference

SIZES = (0, 1, 7, 9, 1000, CHUNK - 1, CHUNK, CHUNK + 1)
MANY = (3,) * 340  # tensors: too many for one launch, also of those that only add up
ADAM: dict[str, Any] = {
    "lr": 1e-2,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "factor": 0.5,
}
LAMB: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1}
MOVE: dict[str, Any] = {"lr": 1e-2, "bias_correction": True, "min_trust": 0.01, "max_trust": 10.0}


def clone(tensor: Tensor) -> Tensor:
    """As aligned as the tensor is."""
    offset = tensor.storage_offset()
    return poisoned(tensor.numel() + offset, dtype=tensor.dtype)[offset:].copy_(tensor)


def special(tensor: Tensor) -> Tensor:
    """With numbers that are not finite, or hardly."""
    for place, number in enumerate((NAN, INF, -INF, 1e38, -0.0, 1e-42)):
        tensor[5 * place : 5 * place + 1] = number
    return tensor


def assert_same(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        assert torch.equal(bits(one), bits(other)), f"result {number} differs"


def assert_near(mine: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for one, other in zip(mine, wanted, strict=True):
        low = one.dtype in (BF16, FP16)
        rtol, atol = (2**-7, 1e-3) if low else (3e-6, 1e-6)
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True)


# Optimizers --------------------------------------------------------------------------------------


def check_adam(cuda: Emulated, before: Lists, decoupled: bool = True) -> None:
    mine, wanted, cpu = before.map(clone), before.map(clone), before.map(clone)
    cuda.adam_step(*mine, **ADAM, decoupled=decoupled)
    reference.adam_step(*wanted, **ADAM, decoupled=decoupled)
    ops().adam_step(*cpu, **ADAM, decoupled=decoupled)
    assert_near(mine.written(), wanted.written())
    assert_same(mine.written(), cpu.written())


def check_stochastic(cuda: Emulated, before: Lists, decoupled: bool = True) -> None:
    """The CPU's bits, and the reference's."""
    count = len(before.masters)
    keys, places = [7 * 10**15 * i - 10**18 for i in range(count)], [2**32 - 50] * count
    mine, wanted, cpu = before.map(clone), before.map(clone), before.map(clone)
    for step, lists in ((cuda.adam_step_stochastic, mine), (ops().adam_step_stochastic, cpu)):
        step(*lists[:5], keys, places, **ADAM, decoupled=decoupled)
    reference.adam_step_stochastic(*wanted[:5], keys, places, **ADAM, decoupled=decoupled)
    assert_same(mine.written(), cpu.written())
    for one, other in zip(mine.written(), wanted.written(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def check_lamb(cuda: Emulated, before: Lists, eps_inside_sqrt: bool = False) -> None:
    mine, wanted, cpu = before.map(clone), before.map(clone), before.map(clone)
    options = {**LAMB, "eps_inside_sqrt": eps_inside_sqrt}
    norms = cuda.lamb_norms(*mine[:4], **options, factor=0.5)
    torch.testing.assert_close(
        norms,
        reference.lamb_norms(*wanted[:4], **options, factor=0.5),
        # Moments of 16 bits may be rounded to the neighbour, and the update is made of them.
        rtol=1e-6 if before.exp_avgs[0].dtype == FP32 else 1e-2,
        atol=1e-30,
        equal_nan=True,
    )
    ops().lamb_norms(*cpu[:4], **options, factor=0.5)
    assert_near(mine.written(), wanted.written())
    assert_same(mine.written(), cpu.written())
    for run, each in ((cuda, mine), (reference, wanted), (ops(), cpu)):
        run.lamb_step(each.masters, *each[2:], norms, **options, **MOVE)
    assert_near(mine.written(), wanted.written())
    assert_same(mine.written(), cpu.written())


# Gradients ---------------------------------------------------------------------------------------


def check_unscale(cuda: Emulated, before: Sequence[Tensor], factor: float) -> None:
    mine, wanted = [clone(t) for t in before], [clone(t) for t in before]
    total, first = cuda.unscale_norm_check(mine, factor)
    wanted_total, wanted_first = reference.unscale_norm_check(wanted, factor)
    assert_same([*mine, first], [*wanted, wanted_first])
    torch.testing.assert_close(total, wanted_total, rtol=1e-6, atol=0, equal_nan=True)


# One bit a number --------------------------------------------------------------------------------


def check_sign_pack(cuda: Emulated, values: Tensor | None, error: Tensor, ends: Tensor, l1: bool) -> None:
    mine, wanted = clone(error), clone(error)
    packed, scales = cuda.sign_pack(values, mine, ends, l1)
    wanted_packed, wanted_scales = reference.sign_pack(values, wanted, ends, l1)
    assert_same([packed], [wanted_packed])
    assert_near([scales, mine], [wanted_scales, wanted])


def check_sign_mean(
    cuda: Emulated, rows: int, ends: Tensor, out: Tensor, add: bool, scale: float = 1.0
) -> None:
    packed = torch.randint(256, (rows, -(-out.numel() // 8)), dtype=torch.uint8)
    scales = torch.rand(rows, ends.numel()) * scale
    mine, wanted, cpu = clone(out), clone(out), clone(out)
    for run, each in ((cuda, mine), (reference, wanted), (ops(), cpu)):
        run.sign_unpack_mean(packed, scales, ends, each, add)
    assert_near([mine], [wanted])
    assert_same([mine], [cpu])


def ends_of(numel: int) -> Tensor:
    """Pieces of no, few and many elements, and padding."""
    cuts = (0, 1, 3, 3, 70, 70, CHUNK - 1, CHUNK + 2, numel - numel // 8)
    return torch.tensor(sorted(min(cut, numel) for cut in cuts))


# Blocks of integers ------------------------------------------------------------------------------


def check_blocks(cuda: Emulated, numbers: Tensor, width: int, block: int, offset: int = 0) -> None:
    size = reference.payload_bytes(numbers.numel(), width, block)
    mine, wanted = (poisoned(size + offset, dtype=torch.uint8)[offset:] for _ in range(2))
    cuda.quantize_blocks(numbers, mine, width, block)
    reference.quantize_blocks(numbers, wanted, width, block)
    assert_same([mine], [wanted])
    for add in (False, True):
        out = normal(numbers.numel(), numbers.dtype, 7, numbers.storage_offset())
        wanted_out = clone(out)
        cuda.dequantize_blocks(mine, out, width, block, add)
        reference.dequantize_blocks(mine, wanted_out, width, block, add)
        assert_same([out], [wanted_out])


def check_rows(cuda: Emulated, numbers: Tensor, width: int, block: int, gap: int) -> None:
    """Rows of rows, which lie the other way around in memory, with gaps; and all of them added up."""
    shape, size = numbers.shape, reference.payload_bytes(numbers.shape[-1], width, block)
    mine, wanted = (poisoned(*shape[:2], size + gap, dtype=torch.uint8) for _ in range(2))
    for run, payload in ((cuda, mine), (reference, wanted)):
        run.quantize_blocks(numbers, payload[..., :size], width, block)
    assert_same([mine], [wanted])
    rows, length = shape[0] * shape[1], shape[2] + gap
    for add, terms in product((False, True), repeat=2):
        outs = []
        for run in (cuda, reference):
            dtype = FP32 if terms else numbers.dtype
            flat = normal((shape[1] if terms else rows) * length, dtype).view(-1, length)
            out = flat if terms else flat.view(shape[1], shape[0], length).transpose(0, 1)
            run.dequantize_blocks(mine[..., :size], out[..., : shape[2]], width, block, add)
            outs.append(flat)
        assert_same(outs[:1], outs[1:])
