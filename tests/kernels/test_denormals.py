"""Denormal numbers where `torch.set_flush_denormal` takes them for zeros."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import FP16, bits, normal, ops, same_everywhere
from tests.kernels.optimizing import lists

EVERY_HALF = torch.arange(2**16).to(torch.int32).to(torch.int16).view(FP16)
FINITE = EVERY_HALF[EVERY_HALF.isfinite()]
NOTHING = torch.zeros(1, dtype=torch.int64)  # all elements are padding, whose error is what was wanted


@pytest.fixture(params=[True, False], ids=["flushed", "kept"], autouse=True)
def flush(request: pytest.FixtureRequest) -> Iterator[None]:
    ops()
    assert torch.set_flush_denormal(request.param) or not request.param, "this processor cannot"
    yield
    torch.set_flush_denormal(False)


def as_single(halves: Tensor) -> Tensor:
    """What an operator takes the halves for: the same on every instruction set, on 1 and 2 threads."""

    def run() -> Sequence[Tensor]:
        error = torch.zeros(len(halves))
        ops().sign_pack(halves, error, NOTHING, True)
        return [error]

    (found,) = same_everywhere(run)
    return found


def test_every_half_is_the_number_that_torch_takes_it_for() -> None:
    halves = FINITE.sort().values.repeat(2)  # more than a thread takes alone
    assert torch.equal(as_single(halves), halves.double().float())
    special = EVERY_HALF[~EVERY_HALF.isfinite()]
    assert torch.equal(as_single(special).isnan(), special.isnan())
    assert torch.equal(as_single(special).isinf(), special.isinf())


def test_a_norm_of_the_smallest_halves_is_not_zero() -> None:
    halves = torch.full((5000,), 2.0**-24, dtype=FP16)
    total, first = ops().unscale_norm_check([halves.clone()], 1.0)
    assert (float(total), int(first)) == (5000 * 2.0**-48, -1)
    ops().unscale_norm_check([halves], 2.0)
    assert torch.equal(halves, torch.full_like(halves, 2.0**-23))


def test_every_half_that_is_denormal_is_rounded_to() -> None:
    small = FINITE[FINITE.abs() < 2.0**-13]
    wide = torch.cat([small.float(), small.float() * 1.5, small.float() * 1.0001])
    out = torch.zeros(len(wide), dtype=FP16)
    before = lists([len(wide)], copy=FP16)
    before.masters[0].copy_(wide)
    before.copies[0].copy_(wide)
    ops().adam_step(*before, 0.0, 0.9, 0.95, 1e-8, 0.0, True, 1.0)
    assert torch.equal(bits(before.copies[0]), bits(out.copy_(wide)))


def test_results_made_of_denormal_numbers_do_not_depend_on_the_number_of_threads() -> None:
    before = lists([200_001])
    before.exp_avg_sqs[0].mul_(1e-38)
    before.grads[0].mul_(1e-20)
    gradients = normal(200_001, scale=1e-38)

    def run() -> Sequence[Tensor]:
        mine = before.clone()
        ops().adam_step(*mine, 1e-2, 0.9, 0.95, 1e-8, 0.1, True, 1.0)
        numbers = gradients.clone()
        return [*mine.written(), numbers, *ops().unscale_norm_check([numbers], 0.3)]

    same_everywhere(run)
