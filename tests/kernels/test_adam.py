"""adam_step gives the numbers of the reference and of torch's own Adam, whatever types, sizes and places."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import BF16, FP16, FP32, INF, NAN, NUMBERS, SIZES, bits, normal, ops, same_everywhere
from tests.kernels.optimizing import ALIGNED, Lists, lists
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


def check(before: Lists, **options: Any) -> Lists:
    """The reference's numbers, everywhere the same bits, and gradients and steps as they were."""
    want = before.clone()
    reference.adam_step(*want, **{**OPTIONS, **options})

    def run() -> list[Tensor]:
        mine = before.clone()
        ops().adam_step(*mine, **{**OPTIONS, **options})
        for one, other in zip([*mine.grads, *mine.steps], [*before.grads, *before.steps], strict=True):
            assert torch.equal(bits(one), bits(other))
        return mine.written()

    for mine, wanted in zip(same_everywhere(run), want.written(), strict=True):
        low = mine.dtype != FP32
        torch.testing.assert_close(
            mine.float(),
            wanted.float(),
            rtol=2**-7 if low else 3e-6,
            atol=1e-3 if low else 1e-6,
            equal_nan=True,
        )
    return want


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_any_size_at_any_place(size: int, offset: int) -> None:
    before = lists([size], [offset] * 5, grad=BF16)
    assert size == 0 or before.clone().masters[0].data_ptr() % 64 == 4 * offset
    check(before)


@pytest.mark.parametrize("grad", NUMBERS)
@pytest.mark.parametrize("copy", [None, BF16, FP16])
@pytest.mark.parametrize("moments", [FP32, BF16])
@pytest.mark.parametrize("master", [FP32, BF16])
def test_all_types(
    grad: torch.dtype, master: torch.dtype, moments: torch.dtype, copy: torch.dtype | None
) -> None:
    check(lists([1003], ALIGNED, grad, master, moments, copy))


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("factor", [1.0, 2.0**-10])
def test_options(decoupled: bool, weight_decay: float, factor: float) -> None:
    check(lists([1003]), decoupled=decoupled, weight_decay=weight_decay, factor=factor)


def test_without_bias_correction_moments_count_as_they_are() -> None:
    before = lists([1003], grad=FP32, copy=None)
    wanted = check(before, bias_correction=False, decoupled=False, weight_decay=0.0, factor=1.0)
    p, g, m, v = (each[0].double() for each in before[:4])
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    torch.testing.assert_close(
        wanted.masters[0].double(), p - 1e-2 * m / (v.sqrt() + 1e-8), rtol=1e-6, atol=1e-6
    )
    check(lists([31], master=BF16, moments=BF16), bias_correction=False)


def test_many_tensors_of_all_sizes_in_one_call() -> None:
    check(lists([0, 1, 5, 40_000, 0, 17, 70_001, 3] * 20))


def test_nothing_to_do_is_done() -> None:
    ops().adam_step(*lists([]), **OPTIONS)
    check(lists([0, 0]))


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 1e38, 1e-42, -0.0])
@pytest.mark.parametrize("place", [0, 8, 998])
def test_special_numbers_spoil_only_themselves(bad: float, place: int) -> None:
    before = lists([999], grad=FP32)
    clean = before.clone()
    before.grads[0][place] = bad
    ops().adam_step(*clean, **OPTIONS)
    for one, other in zip(check(before).written(), clean.written(), strict=True):
        others = torch.arange(999) != place
        torch.testing.assert_close(one[others].float(), other[others].float(), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("copy", [BF16, FP16])
def test_a_copy_is_its_master_rounded_by_torch(copy: torch.dtype) -> None:
    before = lists([4096], copy=copy)
    special = torch.tensor(
        [NAN, INF, -INF, 65519.0, 65520.0, 1e-7, 6e-8, -3e-8, 2.98e-8, 1e-40, 70000.0, -0.0]
    )
    before.masters[0][:12] = special
    before.masters[0][12:2000] *= torch.logspace(-9, 6, 1988)
    before.copies[0].copy_(before.masters[0])
    ops().adam_step(*before, **{**OPTIONS, "lr": 0.0})
    rounded = before.masters[0].to(copy)
    torch.testing.assert_close(before.copies[0], rounded, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("copy", [BF16, FP16])
def test_a_master_takes_what_was_written_to_its_copy_and_only_that(copy: torch.dtype) -> None:
    """Every number that is not the master's, NaN and both zeros included; the others keep all their bits."""
    before = lists([4096], copy=copy)
    before.masters[0][:100] = 0.0
    before.copies[0].copy_(before.masters[0])
    written = torch.tensor([NAN, INF, -INF, -0.0, 1e-7, 6e-8, 1.0, 1.0009765625], dtype=copy)
    before.copies[0][:8] = written
    want = torch.cat([written.float(), before.masters[0][8:]])
    for moved in same_everywhere(lambda: after_a_step_of_nothing(before)):
        torch.testing.assert_close(moved, want, rtol=0, atol=0, equal_nan=True)


def after_a_step_of_nothing(before: Lists) -> list[Tensor]:
    mine = before.clone()
    ops().adam_step(*mine, **{**OPTIONS, "lr": 0.0})
    return mine.masters


def marked(before: Lists, step: Any, changed: list[Tensor], **options: Any) -> list[Tensor]:
    """What the step has written, and the bits."""
    mine, bytes_ = before.clone(), [each.clone() for each in changed]
    step(*mine, **{**OPTIONS, **options}, changed=bytes_)
    return [*mine.written(), *bytes_]


@pytest.mark.parametrize("copy", [BF16, FP16])
@pytest.mark.parametrize("size", SIZES)
def test_changed_elements_are_marked(size: int, copy: torch.dtype) -> None:
    """Those that the step or somebody else has changed, zeros with a sign and NaN included; bits stay set."""
    sizes = [size, 3, 70_001, size]
    before = lists(sizes, grad=BF16, copy=copy)
    for master, low, grad in zip(before.masters, before.copies, before.grads, strict=True):
        low.copy_(master)
        grad[::3] = 0
        low[1:12:2] = torch.tensor([NAN, INF, -0.0, 1.0, 0.0, 3.0], dtype=copy)[: len(low[1:12:2])]
    options = {"lr": 1e-4, "weight_decay": 0.0}
    changed = [torch.zeros(-(-numel // 8), dtype=torch.uint8) for numel in sizes]
    for one in changed:
        one[len(one) // 2 :] = 16
    found = same_everywhere(lambda: marked(before, ops().adam_step, changed, **options))
    plain = before.clone()
    ops().adam_step(*plain, **{**OPTIONS, **options})
    for mine, other in zip(found, plain.written(), strict=False):
        assert torch.equal(bits(mine), bits(other))
    for number, numel in enumerate(sizes):
        was, low = before.copies[number], plain.copies[number]
        rounded = before.masters[number].to(copy)
        want = (bits(was).view(-1, 2) != bits(low).view(-1, 2)).any(1)
        want |= (bits(was).view(-1, 2) != bits(rounded).view(-1, 2)).any(1)
        mine = found[number - len(sizes)]
        flags = (mine[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).view(-1).bool()
        assert len(mine) < 2 or flags[:numel].any()
        assert not want.all() or numel < 12
        kept = torch.arange(len(flags)) // 8 >= len(mine) // 2
        kept &= torch.arange(len(flags)) % 8 == 4
        assert torch.equal(flags, torch.cat([want, want.new_zeros(-numel % 8)]) | kept)


@pytest.mark.parametrize("copy", [BF16, FP16])
def test_the_reference_marks_the_same(copy: torch.dtype) -> None:
    before = lists([1003, 5], copy=copy)
    for master, low in zip(before.masters, before.copies, strict=True):
        low.copy_(master)
        low[3] = -7
    changed = [torch.zeros(size, dtype=torch.uint8) for size in (126, 1)]
    mine, want = (marked(before, each.adam_step, changed, lr=1e-3) for each in (ops(), reference))
    assert all(torch.equal(one, other) for one, other in zip(mine[-2:], want[-2:], strict=True))
    assert sum(int(each.count_nonzero()) for each in mine[-2:]) > 0


@pytest.mark.parametrize(
    ("changes", "changed", "complaint"),
    [
        ({}, [torch.zeros(1, dtype=torch.uint8)], "2 masters, but 1 changed"),
        ({}, [torch.zeros(2, dtype=torch.uint8)] * 2, "changed 0 has 2 bytes, its master's bits take 1"),
        ({}, [torch.zeros(1, dtype=torch.int8)] * 2, "changed must be uint8"),
        ({"copies": []}, [torch.zeros(1, dtype=torch.uint8)] * 2, "changed elements are those of copies"),
    ],
)
def test_marks_that_do_not_fit_are_refused(
    changes: dict[str, Any], changed: list[Tensor], complaint: str
) -> None:
    with pytest.raises(RuntimeError, match=complaint):
        ops().adam_step(*wrong(**changes), **OPTIONS, changed=changed)


@pytest.mark.parametrize("decoupled", [True, False])
def test_ten_steps_are_those_of_torch(decoupled: bool) -> None:
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    param = torch.nn.Parameter(normal(5000).double())
    theirs = kind([param], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    mine = lists([5000], copy=None)
    mine.masters[0].copy_(param.detach())
    for state in (mine.exp_avgs, mine.exp_avg_sqs, mine.steps):
        state[0].zero_()
    for step in range(10):
        mine.grads[0].copy_(normal(5000, seed=100 + step))
        param.grad = mine.grads[0].double() * 0.5
        theirs.step()
        mine.steps[0] += 1
        ops().adam_step(*mine, **{**OPTIONS, "decoupled": decoupled})
    torch.testing.assert_close(mine.masters[0].double(), param.detach(), rtol=1e-5, atol=2e-6)


def wrong(**changes: Any) -> tuple[list[Tensor], ...]:
    return tuple(lists([4, 4])._replace(**changes))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"grads": [torch.zeros(4)]}, "2 masters, but 1 grads"),
        ({"grads": [torch.zeros(4), torch.zeros(5)]}, "grads 1 has 5 elements, its master 4"),
        ({"grads": [torch.zeros(4), torch.zeros(4, dtype=BF16)]}, "grads must all be of one type"),
        ({"grads": [torch.zeros(8)[::2]] * 2}, "grads must be contiguous"),
        ({"grads": [torch.zeros(4, dtype=torch.int32)] * 2}, "grads must be float32, bfloat16 or float16"),
        ({"masters": [torch.zeros(4, dtype=FP16)] * 2}, "masters must be float32 or bfloat16"),
        ({"exp_avgs": [torch.zeros(4, dtype=FP16)] * 2}, "both moments must be of one type"),
        ({"copies": [torch.zeros(4)] * 2}, "copies must be bfloat16 or float16"),
        ({"steps": [torch.zeros(())]}, "2 masters, but 1 steps"),
        ({"steps": [torch.zeros((), dtype=torch.int64)] * 2}, "steps must be float32"),
        ({"steps": [torch.zeros(2)] * 2}, "a step is one number"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RuntimeError, match=complaint):
        ops().adam_step(*wrong(**changes), **OPTIONS)


def test_torch_finds_nothing_wrong_with_the_operator() -> None:
    ops()
    torch.library.opcheck(torch.ops.zero_full.adam_step, tuple(lists([9, 17])), OPTIONS)
    changed = {"changed": [torch.zeros(size, dtype=torch.uint8) for size in (2, 3)]}
    torch.library.opcheck(torch.ops.zero_full.adam_step, tuple(lists([9, 17])), {**OPTIONS, **changed})
