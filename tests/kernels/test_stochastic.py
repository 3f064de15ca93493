"""adam_step_stochastic: the reference's bits, right on average, the same wherever a piece begins."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import BF16, FP32, INF, NAN, NUMBERS, SIZES, ops, same, same_everywhere
from tests.kernels.optimizing import ALIGNED, APART, TOGETHER, Lists, lists
from zero_full.kernels import reference

OPTIONS: dict[str, Any] = {
    "lr": 1e-2,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "decoupled": True,
    "factor": 0.5,
}
FAR = 2**32 - 20  # so that a place's upper half changes in the middle of a tensor


def keys_of(count: int) -> list[int]:
    return [int(key) for key in torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator())]


def low(sizes: Any, offsets: Any = ALIGNED, grad: torch.dtype = BF16, moments: torch.dtype = BF16) -> Lists:
    return lists(sizes, offsets, grad, BF16, moments, None)


def check(before: Lists, place: int = 0, **options: Any) -> Lists:
    """The reference's bits on every instruction set, with any number of threads."""
    keys, places = keys_of(len(before.masters)), [place] * len(before.masters)
    want = before.clone()
    reference.adam_step_stochastic(*want[:5], keys, places, **{**OPTIONS, **options})

    def run() -> list[Tensor]:
        mine = before.clone()
        ops().adam_step_stochastic(*mine[:5], keys, places, **{**OPTIONS, **options})
        return mine.written()

    for mine, wanted in zip(same_everywhere(run), want.written(), strict=True):
        assert same(mine, wanted), int((mine != wanted).sum())
    return want


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offsets", [ALIGNED, TOGETHER, APART])
def test_any_size_at_any_place_has_the_references_bits(size: int, offsets: Any) -> None:
    check(low([size], offsets), FAR)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("moments", [FP32, BF16])
@pytest.mark.parametrize("grad", NUMBERS)
def test_all_types(grad: torch.dtype, moments: torch.dtype, decoupled: bool) -> None:
    check(low([1003, 0, 5], ALIGNED, grad, moments), decoupled=decoupled)


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 1e38, -3.3e38, 1e-42, -0.0])
def test_special_numbers_spoil_only_themselves(bad: float) -> None:
    before = low([999], grad=FP32)
    clean = before.clone()
    before.grads[0][8] = bad
    before.masters[0][9] = bad
    others = torch.ones(999, dtype=torch.bool)
    others[8:10] = False
    for one, other in zip(check(before).written(), check(clean).written(), strict=True):
        assert torch.equal(one[others], other[others])


def test_pieces_of_a_tensor_draw_what_the_whole_draws() -> None:
    """However it is cut: the same bits. Another key, step or place: others."""
    whole, cut = low([1000]), low([1000])
    ops().adam_step_stochastic(*whole[:5], [7], [FAR], **OPTIONS)
    starts = [0, 1, 3, 258, 700]
    pieces = [[t[a:b] for a, b in zip(starts, [*starts[1:], 1000], strict=True)] for (t,) in cut[:4]]
    steps = [cut.steps[0].clone() for _ in starts]
    ops().adam_step_stochastic(*pieces, steps, [7] * 5, [FAR + start for start in starts], **OPTIONS)
    for one, other in zip(whole.written(), cut.written(), strict=True):
        assert torch.equal(one, other)
    first = torch.ones(())
    others = (
        (8, first, FAR),
        (7 + 2**32, first, FAR),
        (7, first, FAR + 1),
        (7, first, 20),
        (7, first + 1, FAR),
    )
    for other_draws in others:
        for one, other in zip(draws(7, first, FAR), draws(*other_draws), strict=True):
            assert float((one == other).float().mean()) < 0.01, other_draws


def draws(key: int, step: Tensor, place: int, numel: int = 1000) -> list[Tensor]:
    """16 bits for the master, the first and the second moment of each element."""
    return [each & 0xFFFF for each in reference.random_bits(key, step, place, numel)]


def test_on_average_a_number_stays_what_it_is() -> None:
    """The mean of 2**18 elements is off by less than four standard errors, wherever between neighbours."""
    numel = 2**18
    for number in (1 + 1e-3, 1 + 2**-8, -(1 + 2**-7 - 1e-4), 3e-5, -123.4, 1e-39, 1.9999):
        values = torch.full((numel,), number)
        for drawn in draws(5, torch.tensor(3.0), 10**10, numel):
            got = reference.round_stochastically(values, drawn).double()
            below, above = float(got.min()), float(got.max())
            exact = float(values[0].double())
            assert below <= exact <= above and (above - below) <= abs(exact) * 2**-7 + 1e-40
            error = (above - below) / 2 / numel**0.5
            assert abs(float(got.mean()) - exact) <= 4 * error, number


def test_draws_of_neighbours_steps_and_numbers_of_an_element_are_independent() -> None:
    """Correlations of 2**16 draws: below five standard errors."""
    numel = 2**16
    first, second = (draws(5, torch.tensor(step), 0, numel) for step in (1.0, 2.0))
    uniform = [each.double() / 65536 - 0.5 for each in (*first, *second)]
    uniform.append(uniform[0].roll(1))
    uniform.append(uniform[0].roll(256))
    found = torch.corrcoef(torch.stack(uniform)) - torch.eye(len(uniform))
    assert float(found.abs().max()) < 5 / numel**0.5
    for each in uniform:
        assert abs(float(each.mean())) < 5 * (1 / 12) ** 0.5 / numel**0.5
        assert float(each.var()) == pytest.approx(1 / 12, rel=0.02)


@pytest.mark.parametrize("stochastic", [True, False])
def test_small_updates_are_lost_to_the_nearest_and_kept_on_average(stochastic: bool) -> None:
    """A thousand steps of 6e-4 away from 1, whose neighbours in bf16 are 2**-8 below."""
    size = 4096
    masters, grads = [torch.ones(size, dtype=BF16)], [torch.ones(size, dtype=BF16)]
    moments = [[torch.zeros(size)], [torch.zeros(size)]]
    steps = [torch.zeros(())]
    for _ in range(1000):
        steps[0] += 1
        options = {**OPTIONS, "lr": 6e-4, "weight_decay": 0.0}
        if stochastic:
            ops().adam_step_stochastic(masters, grads, *moments, steps, [1], [0], **options)
        else:
            ops().adam_step(masters, grads, *moments, steps, [], **options)
    mean = float(masters[0].double().mean())
    assert mean == pytest.approx(0.4, abs=2e-3) if stochastic else mean == 1.0


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"masters": [torch.zeros(4)]}, "masters must be bfloat16"),
        ({"keys": []}, "1 masters, but 0 keys and 1 places"),
        ({"places": [0, 1]}, "1 masters, but 1 keys and 2 places"),
        ({"places": [-1]}, "place 0 is negative"),
        ({"grads": []}, "1 masters, but 0 grads"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], complaint: str) -> None:
    given: dict[str, Any] = {**low([4])._asdict(), "keys": [1], "places": [0], **changes}
    del given["copies"]
    with pytest.raises(RuntimeError, match=complaint):
        ops().adam_step_stochastic(*given.values(), **OPTIONS)


def test_torch_finds_nothing_wrong_with_the_operator() -> None:
    ops()
    given = tuple(low([9, 17])[:5])
    torch.library.opcheck(torch.ops.zero_full.adam_step_stochastic, (*given, [1, 2], [0, 3]), OPTIONS)
