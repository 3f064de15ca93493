"""The CUDA operators on a GPU give the CPU's numbers, whatever types, sizes and places.

A sample runs between guards, and what it has to write is poisoned (samples.py).
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.gpu import samples
from tests.gpu.samples import CHUNK, GPU, MANY, SIZES, Blocks, Sample, Types, check, placed
from tests.kernels.cases import BF16, FP16, FP32, INF, NAN, NUMBERS, normal
from tests.kernels.optimizing import ALIGNED, APART, TOGETHER
from zero_full.kernels import load, ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("compiled"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("operator", ops.SCHEMAS)
def test_the_compiled_operator_is_the_one_that_runs(operator: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"zero_full::{operator}", "CUDA")
    assert load.compiled_for(GPU)


# Optimizers --------------------------------------------------------------------------------------

OPTIMIZERS = pytest.mark.parametrize("make", [samples.adam_step, samples.lamb_norms, samples.lamb_step])


@OPTIMIZERS
@pytest.mark.parametrize("master", [FP32, BF16])
@pytest.mark.parametrize("grad", NUMBERS)
@pytest.mark.parametrize("moments", [FP32, BF16])
@pytest.mark.parametrize("copy", [None, BF16, FP16])
def test_an_optimizer_takes_all_types(
    make: Any, master: torch.dtype, grad: torch.dtype, moments: torch.dtype, copy: torch.dtype | None
) -> None:
    check(make([1003, CHUNK + 9], Types(master, grad, moments, copy)))


@OPTIMIZERS
@pytest.mark.parametrize("offsets", [ALIGNED, TOGETHER, APART])
def test_an_optimizer_takes_any_size_at_any_place(make: Any, offsets: Sequence[int]) -> None:
    check(make(SIZES, offsets=offsets))


@OPTIMIZERS
def test_an_optimizer_takes_more_tensors_than_a_launch(make: Any) -> None:
    check(make([*MANY, 2 * CHUNK + 5, *MANY]))


@OPTIMIZERS
@pytest.mark.parametrize("option", [False, True])
def test_an_optimizer_takes_its_option_and_special_numbers(make: Any, option: bool) -> None:
    sample = make([999], Types(grad=FP32), ALIGNED, option)
    for place, number in enumerate((NAN, INF, -INF, 1e38, -0.0, 1e-42)):
        sample.tensors[1][0][150 * place] = number  # gradients; LAMB's second half has moments there
    check(sample)


@pytest.mark.parametrize("copy", [BF16, FP16])
def test_a_copy_is_its_master_rounded_by_torch(compiled: Any, copy: torch.dtype) -> None:
    sample = samples.adam_step([4096], Types(copy=copy), ALIGNED)
    master = sample.tensors[0][0]
    master[:6] = torch.tensor([NAN, INF, 65519.0, 65520.0, 2.98e-8, 1e-40])
    master[6:2000] *= torch.logspace(-9, 6, 1994)
    sample.options["lr"] = 0.0
    (masters, *_, copies) = tensors = placed(sample, GPU)
    compiled.adam_step(*tensors, **sample.options)
    torch.testing.assert_close(copies[0], masters[0].to(copy), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("decoupled", [True, False])
def test_ten_steps_are_those_of_torch_in_fp64(compiled: Any, decoupled: bool) -> None:
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    master = normal(50_000).to(GPU)
    param = torch.nn.Parameter(master.double())
    theirs = kind([param], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    exp_avg, exp_avg_sq, step = (
        torch.zeros_like(master),
        torch.zeros_like(master),
        torch.zeros((), device=GPU),
    )
    for number in range(10):
        grad = normal(50_000, seed=100 + number).to(GPU)
        param.grad = grad.double() * 0.5
        theirs.step()
        step += 1
        lists = ([each] for each in (master, grad, exp_avg, exp_avg_sq, step))
        compiled.adam_step(*lists, [], **samples.ADAM, decoupled=decoupled)
    torch.testing.assert_close(master.double(), param.detach(), rtol=1e-5, atol=2e-6)


def test_no_tensors_are_no_work(compiled: Any) -> None:
    compiled.adam_step([], [], [], [], [], [], **samples.ADAM, decoupled=True)
    for make in (samples.adam_step, samples.lamb_norms, samples.lamb_step):
        check(make([0, 0]))


# Gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("factor", [1.0, 1 / 3])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_gradients_of_any_size_at_any_place(dtype: torch.dtype, factor: float, offset: int) -> None:
    check(samples.unscale([*SIZES, *MANY], dtype, factor, offset))


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_the_first_gradient_that_is_not_finite_is_found(
    dtype: torch.dtype, bad: float, factor: float
) -> None:
    sizes = (0, 9, 3 * CHUNK + 7, 31)
    for places in ([0], [8], [9 + CHUNK], [9 + 3 * CHUNK + 6, 9 + 3 * CHUNK + 7], [sum(sizes) - 1]):
        sample = samples.unscale(sizes, dtype, factor, 0)
        for place in places:
            tensor = max(i for i in (1, 2, 3) if sum(sizes[:i]) <= place)
            sample.tensors[0][tensor][place - sum(sizes[:tensor])] = bad
        assert int(check(sample).results[1]) == places[0]


@pytest.mark.parametrize("scale", [1e-30, 1e30, 0.0])
def test_squares_beyond_fp32_are_in_the_norm(scale: float) -> None:
    sample = samples.unscale([100_003], FP32, 1.0)
    sample.tensors[0][0].mul_(scale)
    exact = sample.tensors[0][0].double().square().sum()
    torch.testing.assert_close(check(sample).results[0], exact, rtol=1e-6, atol=0)


# One bit a number --------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("flag", [False, True])
def test_signs_of_any_number_of_elements_at_any_place(numel: int, offset: int, flag: bool) -> None:
    check(samples.sign_pack(numel, l1=flag, offset=offset))
    check(samples.sign_mean(numel, add=flag, offset=offset))


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("rows", [1, 7])
def test_signs_of_all_types(dtype: torch.dtype, rows: int) -> None:
    check(samples.sign_pack(30_001, dtype))
    check(samples.sign_pack(30_001, None))
    check(samples.sign_mean(30_001, dtype, rows))


def test_a_piece_for_each_element() -> None:
    ends = torch.arange(1, 3001)
    check(Sample("sign_pack", (None, normal(3000), ends), {"l1": True}))
    packed, scales = normal(188).view(torch.uint8)[None, :375], normal(3000)[None]
    check(Sample("sign_unpack_mean", (packed, scales, ends, normal(3000)), {"add": False}))


# Blocks of integers ------------------------------------------------------------------------------

WIDTHS = pytest.mark.parametrize("width", [4, 8])


@WIDTHS
@pytest.mark.parametrize("block", [1, 7, 64, 255, 256, 257, 2048, CHUNK + 3, 10**6])
def test_blocks_of_any_size(width: int, block: int) -> None:
    for numel in SIZES:
        blocks = Blocks(width, block, 0)
        check(samples.quantize(numel, FP32, blocks, 0))
        check(samples.dequantize(numel, FP32, blocks, 0, False))


@WIDTHS
@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4, 8])
@pytest.mark.parametrize("block", [99, 2048])
def test_blocks_of_all_types_at_any_place(width: int, dtype: torch.dtype, offset: int, block: int) -> None:
    blocks = Blocks(width, block, offset)
    check(samples.quantize(30_001, dtype, blocks, offset))
    check(samples.dequantize(30_001, dtype, blocks, offset))


@WIDTHS
@pytest.mark.parametrize("bad", [NAN, INF, -INF, 3e38, 1e-44, 0.0])
def test_blocks_with_special_numbers(width: int, bad: float) -> None:
    sample = samples.quantize(1001, FP32, Blocks(width, 70), 0)
    sample.tensors[0][333:490] = bad
    check(sample)
