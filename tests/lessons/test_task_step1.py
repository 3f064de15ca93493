"""Lesson 1's tasks, one claim at a time. A learner's file takes the place of zero_min's."""

import pytest
import torch
from torch import nn

from zero_min import run_world, stage1
from zero_min.comm import Comm


def sized(*sizes: int) -> list[torch.Tensor]:
    return list(torch.arange(sum(sizes), dtype=torch.float32).split(list(sizes)))


def test_reorder_deals_like_cards() -> None:
    tensors = sized(1, 1, 1, 1, 1)
    reordered, position = stage1.round_robin_reorder(tensors, 2)
    got = [int(t.item()) for t in reordered]
    assert got == [0, 2, 4, 1, 3], f"5 tensors, 2 ranks: expected order [0, 2, 4, 1, 3], got {got}"
    assert list(position) == [0, 3, 1, 4, 2], (
        f"where each went: expected [0, 3, 1, 4, 2], got {list(position)}"
    )


def test_flatten_pads_with_as_few_zeros_as_possible() -> None:
    flatten = stage1.flatten_dense_tensors_aligned
    for sizes, alignment, expected in [((2, 3), 4, 8), ((2, 2), 4, 4), ((0, 1), 3, 3)]:
        got = flatten(sized(*sizes), alignment)
        assert got.numel() == expected, (
            f"sizes {sizes}, alignment {alignment}: expected {expected}, got {got.numel()}"
        )
        assert torch.equal(got[: sum(sizes)], torch.arange(sum(sizes), dtype=torch.float32))
        assert not got[sum(sizes) :].any(), f"the padding should be zero, got {got.tolist()}"


@pytest.mark.parametrize(
    ("numel", "world", "expected"), [(8, 4, [2] * 4), (10, 4, [3, 3, 2, 2]), (1, 3, [1, 0, 0])]
)
def test_partition_cuts_near_equally(numel: int, world: int, expected: list[int]) -> None:
    flat = torch.arange(numel, dtype=torch.float32)
    parts = stage1.get_data_parallel_partitions(flat, world)
    got = [part.numel() for part in parts]
    assert got == expected, f"{numel} elements, {world} ranks: expected {expected}, got {got}"
    assert torch.equal(torch.cat(list(parts)), flat), "the parts should give the flat tensor back"
    assert parts[0].data_ptr() == flat.data_ptr(), "the parts should be views (narrow), not copies"


def one_step(comm: Comm) -> tuple[list[float], list[float], bool]:
    model = nn.Linear(3, 1, bias=False)
    nn.init.ones_(model.weight)
    stage = stage1.Stage1(model, comm, lr=0.25)
    model(torch.full((1, 3), float(comm.rank + 1))).sum().backward()
    stage.reduce_gradients()
    own = stage.flats[0].master.grad.tolist()
    stage.optimizer.step()
    stage.gather_parameters()
    return own, model.weight.detach().flatten().tolist(), stage.flats[0].master.grad is None


def test_reduce_gives_each_rank_the_average_of_its_slice() -> None:
    got = [own for own, _, _ in run_world(one_step, 2)]
    expected = [[1.5, 1.5], [1.5, 0.0]]  # gradients 1 and 2; rank 1's slice ends with padding
    assert got == expected, f"own gradients of 2 ranks: expected {expected}, got {got}"


def reduced(comm: Comm) -> tuple[list[str], int]:
    """The calls that `reduce_gradients` makes for three weights, and the bytes behind the own gradient."""
    model = nn.Linear(3, 1, bias=False)
    stage = stage1.Stage1(model, comm)
    model(torch.ones(1, 3)).sum().backward()
    comm.ledger.clear_traffic()
    stage.reduce_gradients()
    calls = [event.what for event in comm.ledger.events]
    return calls, stage.flats[0].master.grad.untyped_storage().nbytes()


def test_reduce_is_one_call() -> None:
    for rank, (calls, _) in enumerate(run_world(reduced, 2)):
        assert calls == ["reduce_scatter"], f"rank {rank}: expected the calls ['reduce_scatter'], got {calls}"


def test_reduce_keeps_no_more_than_the_own_slice() -> None:
    for rank, (_, nbytes) in enumerate(run_world(reduced, 2)):
        assert nbytes == 8, (
            f"rank {rank}, memory behind the own gradient of 2 floats: expected 8 bytes, got {nbytes}; "
            "a view keeps the whole tensor alive while Adam steps"
        )


def test_gather_gives_everyone_all_new_parameters() -> None:
    got = [weight for _, weight, _ in run_world(one_step, 2)]
    for rank, weight in enumerate(got):
        assert weight == pytest.approx([0.75] * 3), f"rank {rank}: expected [0.75, 0.75, 0.75], got {weight}"


def test_gather_drops_the_gradient_that_is_used_up() -> None:
    for _, _, dropped in run_world(one_step, 2):
        assert dropped, "after gather_parameters the gradient of `f.master` should be None"


def test_gather_is_one_call() -> None:
    def body(comm: Comm) -> list[str]:
        stage = stage1.Stage1(nn.Linear(3, 1, bias=False), comm)
        comm.ledger.clear_traffic()
        with torch.no_grad():
            stage.gather_parameters()
        return [event.what for event in comm.ledger.events]

    for rank, calls in enumerate(run_world(body, 3)):
        assert calls == ["all_gather"], f"rank {rank}: expected the calls ['all_gather'], got {calls}"


def test_flatten_keeps_16_bits() -> None:
    got = stage1.flatten_dense_tensors_aligned([torch.ones(3, dtype=torch.bfloat16)], 2)
    assert got.dtype == torch.bfloat16, f"a bfloat16 tensor and its padding should stay so, got {got.dtype}"


def one_step_of_16_bits(comm: Comm) -> tuple[torch.dtype | None, bool]:
    model = nn.Linear(3, 1, bias=False).bfloat16()
    stage = stage1.Stage1(model, comm, lr=0.25)
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    stage.reduce_gradients()
    (flat,) = stage.flats
    dtype = None if flat.master.grad is None else flat.master.grad.dtype
    stage.optimizer.step()
    stage.gather_parameters()
    return dtype, torch.equal(flat.mine, flat.master.to(torch.bfloat16))


def test_reduce_gives_the_master_a_gradient_of_its_own_type() -> None:
    got = [dtype for dtype, _ in run_world(one_step_of_16_bits, 2)]
    assert got == [torch.float32] * 2, f"the master of a 16-bit model is in fp32, but its gradient is {got}"


def test_gather_copies_the_master_into_its_place() -> None:
    placed = [same for _, same in run_world(one_step_of_16_bits, 2)]
    assert all(placed), (
        "the master of a 16-bit model is a tensor of its own: copy it into `f.mine` before it is sent"
    )
