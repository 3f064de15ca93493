"""lamb_norms and lamb_step give the numbers of the reference and of the formula, whatever types and sizes."""

import math
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import BF16, FP16, FP32, INF, NAN, NUMBERS, SIZES, normal, ops, same, same_everywhere
from tests.kernels.optimizing import ALIGNED, Lists, lists, moved
from zero_full.kernels import reference

GRAIN = 2**14  # elements whose squares are one sum
FIRST: dict[str, Any] = {
    "beta1": 0.9,
    "beta2": 0.99,
    "eps": 1e-6,
    "weight_decay": 0.1,
    "eps_inside_sqrt": False,
    "factor": 0.5,
}
SECOND: dict[str, Any] = {
    "lr": 1e-2,
    "beta1": 0.9,
    "beta2": 0.99,
    "eps": 1e-6,
    "weight_decay": 0.1,
    "bias_correction": True,
    "eps_inside_sqrt": False,
    "min_trust": 0.01,
    "max_trust": 10.0,
}


def stepped(mine: Lists, norms: Callable[..., Tensor], step: Callable[..., None], **options: Any) -> Tensor:
    """Both halves; `options` are for both as far as they know them."""
    first, second = ({k: options.get(k, v) for k, v in each.items()} for each in (FIRST, SECOND))
    found = norms(*mine[:4], **first)
    step(mine.masters, *mine[2:], found, **second)
    return found


def compiled(mine: Lists, **options: Any) -> Tensor:
    return stepped(mine, ops().lamb_norms, ops().lamb_step, **options)


def same_norms(mine: Tensor, want: Tensor) -> None:
    """Of masters all but the last bits; in updates torch's square roots are off by a bit of fp32 at times."""
    torch.testing.assert_close(mine[:, 0], want[:, 0], rtol=1e-13, atol=0, equal_nan=True)
    torch.testing.assert_close(mine[:, 1], want[:, 1], rtol=1e-6, atol=0, equal_nan=True)


def check(before: Lists, offset: int = 0, **options: Any) -> Lists:
    """The reference's moments bit for bit, its norms and masters; everywhere the same bits."""
    want = before.clone()
    want_norms = stepped(want, reference.lamb_norms, reference.lamb_step, **options)

    def run() -> list[Tensor]:
        mine = before.map(lambda t: moved(t, offset))
        norms = compiled(mine, **options)
        assert all(map(same, mine.grads + mine.steps, before.grads + before.steps))
        return [norms, *mine.exp_avgs, *mine.exp_avg_sqs, *mine.masters, *mine.copies]

    norms, *found = same_everywhere(run)
    same_norms(norms, want_norms)
    moments = 2 * len(before.masters)
    assert all(map(same, found[:moments], want.exp_avgs + want.exp_avg_sqs))
    masters, copies = found[moments:][: len(before.masters)], found[moments:][len(before.masters) :]
    for one, other in zip(masters, want.masters, strict=True):
        rtol = 2 * torch.finfo(one.dtype).eps
        torch.testing.assert_close(one, other, rtol=rtol, atol=1e-8, equal_nan=True)
    if before.copies:
        for copy, master in zip(copies, masters, strict=True):
            assert same(copy, master.to(copy.dtype))
    return want


@pytest.mark.parametrize("size", sorted({*SIZES, 3 * GRAIN + 17}))
def test_any_size(size: int) -> None:
    check(lists([size], grad=BF16))


@pytest.mark.parametrize("offset", [1, 3, 7])
def test_any_place(offset: int) -> None:
    check(lists([9, 1000, GRAIN + 5], grad=FP16), offset)


@pytest.mark.parametrize("grad", NUMBERS)
@pytest.mark.parametrize("copy", [None, BF16, FP16])
@pytest.mark.parametrize("moments", [FP32, BF16])
@pytest.mark.parametrize("master", [FP32, BF16])
def test_all_types(
    grad: torch.dtype, master: torch.dtype, moments: torch.dtype, copy: torch.dtype | None
) -> None:
    check(lists([1003], ALIGNED, grad, master, moments, copy), offset=1)


@pytest.mark.parametrize("eps_inside_sqrt", [True, False])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("eps", [1e-8, 0.1])
def test_options(eps_inside_sqrt: bool, bias_correction: bool, weight_decay: float, eps: float) -> None:
    check(
        lists([1003]),
        eps_inside_sqrt=eps_inside_sqrt,
        bias_correction=bias_correction,
        weight_decay=weight_decay,
        eps=eps,
        factor=1.0,
    )


def test_many_tensors_of_all_sizes_in_one_call() -> None:
    check(lists([0, 1, 5, 20_000, 0, 17, 40_001, 3, 0] * 3))


def test_nothing_to_do_is_done() -> None:
    assert compiled(lists([])).shape == (0, 2)
    assert torch.equal(compiled(lists([0, 0])), torch.zeros(2, 2, dtype=torch.float64))


def test_what_lies_beside_a_tensor_stays() -> None:
    for size in (1, 15, 16, 17, 1000):
        rooms = lists([size + 64], copy=FP16)
        before = rooms.clone()
        inside = rooms.map(itemgetter(slice(32, -32)))
        compiled(inside)
        for one, other in zip(sum(rooms[:4], rooms.copies), sum(before[:4], before.copies), strict=True):
            assert same(one[:32], other[:32])
            assert same(one[-32:], other[-32:])


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 3e38])
@pytest.mark.parametrize("place", [0, 8, 998])
def test_a_bad_gradient_gives_the_references_norms(bad: float, place: int) -> None:
    before = lists([999, 999])
    before.grads[0][place] = bad
    want, mine = before.clone(), before.clone()
    expected = stepped(want, reference.lamb_norms, reference.lamb_step)
    same_norms(compiled(mine), expected)
    for one, other in zip(mine.masters, want.masters, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8, equal_nan=True)
    assert mine.masters[1].isfinite().all()


def test_tiny_numbers_are_not_lost() -> None:
    before = lists([2000], copy=None)
    for tensors, low in (
        (before.masters, -45),
        (before.grads, -40),
        (before.exp_avgs, -45),
        (before.exp_avg_sqs, -45),
    ):
        tensors[0] *= torch.logspace(low, 4, 2000)
    check(before, eps=1e-12)


@pytest.mark.parametrize(
    ("norms", "ratio"),
    [
        ((4.0, 1.0), 2.0),
        ((1e8, 1.0), 10.0),
        ((1.0, 1e8), 0.01),
        ((0.0, 1.0), 1.0),
        ((1.0, 0.0), 1.0),
        ((0.0, 0.0), 1.0),
        ((INF, 1.0), 10.0),
        ((1.0, INF), 0.01),
        ((NAN, 1.0), 1.0),
        ((1.0, NAN), 1.0),
        ((INF, INF), NAN),
    ],
)
def test_the_trust_ratio_is_bounded(norms: tuple[float, float], ratio: float) -> None:
    one = lists([50], copy=None)
    before = one.clone()
    arguments = (one.exp_avgs, one.exp_avg_sqs, one.steps, one.copies)
    given = torch.tensor([norms], dtype=torch.float64)
    ops().lamb_step(one.masters, *arguments, given, **{**SECOND, "bias_correction": False})
    update = one.exp_avgs[0] / (one.exp_avg_sqs[0].sqrt() + SECOND["eps"]) + 0.1 * before.masters[0]
    wanted = before.masters[0] - SECOND["lr"] * ratio * update
    torch.testing.assert_close(one.masters[0], wanted, rtol=1e-6, atol=1e-7, equal_nan=True)
    want = before.clone()
    reference.lamb_step(want.masters, *arguments, given, **{**SECOND, "bias_correction": False})
    torch.testing.assert_close(one.masters[0], want.masters[0], rtol=1e-6, atol=1e-8, equal_nan=True)


@pytest.mark.parametrize("bias_correction", [True, False])
def test_ten_steps_are_those_of_the_formula(bias_correction: bool) -> None:
    sizes, lr, beta1, beta2, eps, decay = [300, 1, 20_000], 1e-2, 0.9, 0.99, 1e-6, 0.1
    mine = lists(sizes, copy=None)
    for state in mine.exp_avgs + mine.exp_avg_sqs + mine.steps:
        state.zero_()
    weights = [p.double() for p in mine.masters]
    m, v = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    for step in range(1, 11):
        for i, w in enumerate(weights):
            mine.steps[i] += 1
            mine.grads[i].copy_(normal(sizes[i], seed=100 * step + i))
            g = mine.grads[i].double() * 0.5
            m[i] = beta1 * m[i] + (1 - beta1) * g
            v[i] = beta2 * v[i] + (1 - beta2) * g * g
            update = m[i] / (v[i].sqrt() + eps) + decay * w
            trust = min(max(float(w.norm() / update.norm()), 0.01), 10.0)
            corrected = math.sqrt(1 - beta2**step) / (1 - beta1**step) if bias_correction else 1
            w -= lr * corrected * trust * update
        compiled(mine, bias_correction=bias_correction)
    for one, other in zip(mine.masters, weights, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("moments", [FP32, BF16])
def test_a_tensor_cut_over_three_ranks_moves_as_if_it_were_whole(moments: torch.dtype) -> None:
    whole = lists([50_000, 700], moments=moments)
    ranks = [
        Lists(*(each[:1] for each in whole.clone())).map(itemgetter(slice(low, high)))
        for low, high in ((0, 20_001), (20_001, 20_001), (20_001, 50_000))
    ]
    compiled(whole)
    total = sum(ops().lamb_norms(*each[:4], **FIRST) for each in ranks)
    for each in ranks:
        ops().lamb_step(each.masters, *each[2:], total, **SECOND)
    for name in ("masters", "exp_avgs", "exp_avg_sqs", "copies"):
        joined = torch.cat([getattr(each, name)[0] for each in ranks])
        assert torch.equal(joined, getattr(whole, name)[0]), name


@pytest.mark.parametrize("copy", [BF16, FP16])
def test_a_copy_is_its_master_rounded_by_torch(copy: torch.dtype) -> None:
    mine = lists([4096], copy=copy)
    special = [NAN, INF, -INF, 65519.0, 65520.0, 1e-7, 6e-8, -3e-8, 2.98e-8, 1e-40, 70000.0, -0.0]
    mine.masters[0][:12] = torch.tensor(special)
    mine.masters[0][12:2000] *= torch.logspace(-9, 6, 1988)
    compiled(mine, lr=0.0)
    torch.testing.assert_close(mine.copies[0], mine.masters[0].to(copy), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"grads": [torch.zeros(4)]}, "2 masters, but 1 grads"),
        ({"grads": []}, "2 masters, but 0 grads"),
        ({"grads": [torch.zeros(4), torch.zeros(5)]}, "grads 1 has 5 elements, its master 4"),
        ({"grads": [torch.zeros(4), torch.zeros(4, dtype=BF16)]}, "grads must all be of one type"),
        ({"grads": [torch.zeros(8)[::2]] * 2}, "grads must be contiguous"),
        ({"grads": [torch.zeros(4, dtype=torch.int32)] * 2}, "grads must be float32, bfloat16 or float16"),
        ({"masters": [torch.zeros(4, dtype=FP16)] * 2}, "masters must be float32 or bfloat16"),
        ({"exp_avgs": [torch.zeros(4, dtype=BF16)] * 2}, "both moments must be of one type"),
    ],
)
def test_norms_of_what_does_not_fit_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RuntimeError, match=complaint):
        ops().lamb_norms(*lists([4, 4])._replace(**changes)[:4], **FIRST)


@pytest.mark.parametrize(
    ("changes", "norms", "complaint"),
    [
        ({"copies": [torch.zeros(4)] * 2}, torch.zeros(2, 2).double(), "copies must be bfloat16 or float16"),
        ({"copies": [torch.zeros(4).half()]}, torch.zeros(2, 2).double(), "2 masters, but 1 copies"),
        ({"steps": [torch.zeros(())]}, torch.zeros(2, 2).double(), "2 masters, but 1 steps"),
        ({"steps": [torch.zeros(2)] * 2}, torch.zeros(2, 2).double(), "a step is one number"),
        ({}, torch.zeros(2, 2), "norms must be float64"),
        ({}, torch.zeros(1, 2).double(), "norms must have two numbers for each master"),
    ],
)
def test_a_step_of_what_does_not_fit_is_refused(
    changes: dict[str, Any], norms: Tensor, complaint: str
) -> None:
    wrong = lists([4, 4])._replace(**changes)
    with pytest.raises(RuntimeError, match=complaint):
        ops().lamb_step(wrong.masters, *wrong[2:], norms, **SECOND)


def test_torch_finds_nothing_wrong_with_the_operators() -> None:
    ops()
    one = lists([9, 17, 0])
    torch.library.opcheck(torch.ops.zero_full.lamb_norms, tuple(one[:4]), FIRST)
    norms = torch.ones(3, 2, dtype=torch.float64)
    torch.library.opcheck(torch.ops.zero_full.lamb_step, (one.masters, *one[2:], norms), SECOND)
