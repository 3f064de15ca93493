"""What the GPU's tests do, without a GPU: the emulated kernels pass, and mistakes are noticed."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu import large, samples
from tests.gpu.samples import CPU, Outcome, Sample
from tests.kernels import emulation
from tests.kernels.cases import bits
from tests.kernels.cases import ops as compiled
from tests.kernels.emulation import Emulated
from zero_full.kernels import ops

NUMEL = 5001


@pytest.fixture(params=ops.SCHEMAS)
def sample(request: pytest.FixtureRequest) -> Sample:
    compiled()
    return samples.one_of_each(NUMEL)[request.param]


@pytest.mark.rotates
def test_the_emulated_kernels_give_what_is_expected_of_a_gpu(sample: Sample) -> None:
    got = samples.call(sample, CPU, Emulated(emulation.library()))
    samples.assert_same(sample, got, samples.call(sample, CPU))


def spoiled(tensor: Tensor) -> Tensor:
    """With other bits in its last element."""
    copy = tensor.clone()
    bits_of_it = copy.view(-1)[-1:].view(torch.uint8)
    bits_of_it[-1] ^= 2  # of a float, a large difference
    return copy


def test_each_tensor_and_result_is_compared(sample: Sample) -> None:
    right = samples.call(sample, CPU)
    samples.assert_same(sample, right, right)
    for kind in (0, 1):
        for place, tensor in enumerate(right[kind]):
            if tensor.numel():
                wrong = Outcome(*(list(each) for each in right))
                wrong[kind][place] = spoiled(tensor)
                with pytest.raises(AssertionError, match=f"{Outcome._fields[kind]} {place} of {sample}"):
                    samples.assert_same(sample, wrong, right)


@pytest.mark.parametrize(("place", "where"), [(-1, "before"), (NUMEL, "behind")])
def test_what_is_written_beside_a_tensor_is_noticed(place: int, where: str) -> None:
    def careless(gradients: list[Tensor], factor: float) -> tuple[Tensor, Tensor]:
        first = gradients[0].storage_offset()
        gradients[0].as_strided((1,), (1,), first + place).fill_(0)
        return torch.ones(()), torch.ones(())

    sample = samples.unscale([NUMEL, 3], torch.bfloat16)
    with pytest.raises(AssertionError, match=f"something was written {where} tensor 0"):
        samples.call(sample, CPU, SimpleNamespace(unscale_norm_check=careless))


def test_a_result_that_is_not_written_is_noticed() -> None:
    def lazy(error: Tensor) -> tuple[Tensor, Tensor]:
        packed, scales = compiled().sign_pack(None, error, torch.tensor([8]), True)
        return torch.empty_like(packed), torch.empty_like(scales)

    sample = Sample("sign_pack", (torch.zeros(8),), {})
    found = samples.call(sample, CPU, SimpleNamespace(sign_pack=lazy)).results
    assert found[0].tolist() == [255] and bool(found[1].isnan().all())
    assert not torch.are_deterministic_algorithms_enabled()


def test_tensors_lie_as_the_samples_do(sample: Sample) -> None:
    def look(*arguments: Any, **options: Any) -> None:
        mine, given = samples.flat(arguments), samples.flat(sample.tensors)
        for one, other in zip(mine, given, strict=True):
            assert torch.equal(bits(one), bits(other)) and one.shape == other.shape
            assert one.numel() == 0 or (one.data_ptr() - other.data_ptr()) % 64 == 0

    samples.call(sample, CPU, SimpleNamespace(**{sample.operator: look}))


CHECKS: dict[str, Callable[[Any, Path], None]] = {
    "adam": lambda ops, _: large.check_adam(ops, CPU, 3 * NUMEL, NUMEL),
    "unscale": lambda ops, _: large.check_unscale(ops, CPU, NUMEL),
    "signs": lambda ops, _: large.check_signs(ops, CPU, 3 * NUMEL, 5000),
    "blocks of 8 bits": lambda ops, _: large.check_blocks(ops, CPU, 8, 9 * large.BLOCK, 2 * large.BLOCK),
    "blocks of 4 bits": lambda ops, _: large.check_blocks(ops, CPU, 4, 9 * large.BLOCK, 2 * large.BLOCK),
    "slices": lambda ops, _: large.check_rows(ops, CPU, 3, 1001, 4),
    "pinned": lambda _, directory: large.check_pinned(directory, CPU, 3000, True),
}


@pytest.mark.parametrize("name", CHECKS)
def test_checks_of_large_tensors_pass_with_small_ones_on_the_cpu(name: str, tmp_path: Path) -> None:
    CHECKS[name](compiled(), tmp_path)


class Wrong:
    """The operators; each also spoils the last element of what it has written."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            results = getattr(compiled(), name)(*arguments, **options)
            for tensor in samples.flat([results, arguments]):
                if tensor.numel() > 1 and tensor.dtype in (torch.float32, torch.bfloat16, torch.uint8):
                    tensor.view(-1)[-1:].copy_(spoiled(tensor.contiguous().view(-1)[-1:]))
            return results

        return call


@pytest.mark.parametrize("name", [name for name in CHECKS if name not in ("pinned", "slices")])
def test_checks_of_large_tensors_notice_a_wrong_element(name: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        CHECKS[name](Wrong(), tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_program_for_sanitizers_says_when_it_has_done_nothing() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.gpu.samples"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "no compiled operators: no CUDA device\n")
