"""Lesson 1's tasks, one claim at a time. A learner's file takes the place of zero_min's."""

import pytest
import torch
from torch import nn

from lessons.evidence import same
from zero_min import run_world, stage1
from zero_min.comm import Comm


def sized(*sizes: int) -> list[torch.Tensor]:
    """Tensors of these sizes, with the numbers 1, 2, ... in them."""
    return list(torch.arange(1.0, sum(sizes) + 1).split(list(sizes)))


def test_reorder_deals_like_cards() -> None:
    reordered, position = stage1.round_robin_reorder(sized(1, 1, 1, 1, 1), 2)
    dealt = [int(t.item()) - 1 for t in reordered]
    same("5 tensors, 2 ranks, the order", dealt, [0, 2, 4, 1, 3], before=[0, 1, 2, 3, 4])
    the_order = "this is the order once more; asked is where each tensor went, which is the order's inverse"
    same("where each went", position, [0, 3, 1, 4, 2], lookalikes={the_order: [0, 2, 4, 1, 3]})


def test_flatten_pads_with_as_few_zeros_as_possible() -> None:
    for sizes, alignment, padding in [((2, 3), 4, 3), ((2, 2), 4, 0), ((0, 1), 3, 2)]:
        got = stage1.flatten_dense_tensors_aligned(sized(*sizes), alignment)
        expected = [float(i + 1) for i in range(sum(sizes))] + [0.0] * padding
        ones = {"the padding is not zero": [float(i + 1) for i in range(sum(sizes))] + [1.0] * padding}
        same(f"tensors of sizes {sizes}, aligned to {alignment}", got, expected, lookalikes=ones)


def test_flatten_takes_what_is_not_contiguous_row_by_row() -> None:
    got = stage1.flatten_dense_tensors_aligned([torch.arange(6.0).view(2, 3).t()], 2)
    same("a matrix that lies in memory by columns", got, [0.0, 3, 1, 4, 2, 5])


def test_flatten_answers_a_copy() -> None:
    (one,) = sized(4)
    flat = stage1.flatten_dense_tensors_aligned([one], 2)
    same("whether flat and tensor share memory", flat.data_ptr() == one.data_ptr(), False, about="memory")


def test_flatten_keeps_16_bits() -> None:
    got = stage1.flatten_dense_tensors_aligned([torch.ones(3, dtype=torch.bfloat16)], 2)
    same("a bfloat16 tensor and its padding", str(got.dtype), "torch.bfloat16", about="dtype")


@pytest.mark.parametrize(
    ("numel", "world", "expected"), [(8, 4, [2] * 4), (10, 4, [3, 3, 2, 2]), (1, 3, [1, 0, 0])]
)
def test_partition_cuts_near_equally(numel: int, world: int, expected: list[int]) -> None:
    flat = torch.arange(numel, dtype=torch.float32)
    parts = stage1.get_data_parallel_partitions(flat, world)
    same(f"{numel} elements for {world} ranks", [part.numel() for part in parts], expected)
    starts = [0, *expected[:-1]]
    still = torch.cat([flat[start : start + size] for start, size in zip(starts, expected, strict=True)])
    overlap = {
        "a part starts where the length before it says, not where the parts before it end": still.tolist()
    }
    same("the parts one behind the other", torch.cat(list(parts)), flat, lookalikes=overlap)
    shared = all(part.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for part in parts)
    same("whether parts and flat share memory", shared, True, about="memory")


def reduced(comm: Comm, dtype: torch.dtype = torch.float32) -> tuple[stage1.Stage1, list[str]]:
    """A trainer of three weights that are 1, with its gradients reduced, and the collectives of that."""
    model = nn.Linear(3, 1, bias=False).to(dtype)
    nn.init.ones_(model.weight)
    stage = stage1.Stage1(model, comm, lr=0.25)
    model(torch.full((1, 3), float(comm.rank + 1), dtype=dtype)).sum().backward()
    comm.ledger.clear_traffic()
    stage.reduce_gradients()
    return stage, [event.what for event in comm.ledger.events]


def own_gradient(comm: Comm) -> tuple[list[float] | None, list[str]]:
    stage, calls = reduced(comm)
    own = stage.flats[0].master.grad
    return None if own is None else own.tolist(), calls


def gathered(comm: Comm) -> tuple[list[float], int, list[str]]:
    """The weights after a step, the gradients that are left, and the collectives of the gathering."""
    stage, _ = reduced(comm)
    stage.optimizer.step()
    comm.ledger.clear_traffic()
    stage.gather_parameters()
    (weight,) = stage.model.parameters()
    kept = int(stage.flats[0].master.grad is not None)
    return weight.detach().flatten().tolist(), kept, [event.what for event in comm.ledger.events]


def test_reduce_gives_each_rank_the_average_of_its_slice() -> None:
    got = [own for own, _ in run_world(own_gradient, 2)]
    expected = [[1.5, 1.5], [1.5, 0.0]]  # gradients 1 and 2; rank 1's slice ends with padding
    alone = [[1.0, 1.0], [2.0, 0.0]]
    same("own gradients of 2 ranks", got, expected, world=2, by_rank=True, alone=alone)


def uneven(comm: Comm) -> list[float]:
    model = nn.Linear(4, 1, bias=False)
    stage = stage1.Stage1(model, comm)
    if comm.rank == 1:  # rank 0 does not use it, so it has no gradient
        model(torch.tensor([[2.0, 4.0, 6.0, 8.0]])).sum().backward()
    stage.reduce_gradients()
    return stage.flats[0].master.grad.tolist()


def test_reduce_counts_no_gradient_as_zero() -> None:
    expected = [[1.0, 2.0], [3.0, 4.0]]
    same("rank 0 has no gradient", run_world(uneven, 2), expected, world=2, by_rank=True)


def test_reduce_sends_each_rank_its_part_and_no_more() -> None:
    calls = [calls for _, calls in run_world(own_gradient, 2)]
    same("collectives of the reduction", calls, [["reduce_scatter"]] * 2, about="calls", by_rank=True)


def test_reduce_keeps_no_more_than_the_own_slice() -> None:
    def body(comm: Comm) -> int:
        model = nn.Linear(3, 1, bias=False)
        stage = stage1.Stage1(model, comm)
        model(torch.ones(1, 3)).sum().backward()
        stage.reduce_gradients()
        return stage.flats[0].master.grad.untyped_storage().nbytes()

    what = "bytes behind the own gradients of 2 floats, which stay alive while Adam steps"
    same(what, run_world(body, 2), [8, 8], about="memory")


def test_gather_gives_everyone_all_new_parameters() -> None:
    got = [weight for weight, *_ in run_world(gathered, 2)]
    expected, before = [[0.75] * 3] * 2, [[1.0] * 3] * 2
    same("weights of 2 ranks", got, expected, near=1e-6, world=2, by_rank=True, before=before)


def test_gather_is_one_collective() -> None:
    calls = [calls for *_, calls in run_world(gathered, 2)]
    same("collectives of the gathering", calls, [["all_gather"]] * 2, about="calls", by_rank=True)


def test_gather_drops_the_gradient_that_is_used_up() -> None:
    kept = [kept for _, kept, _ in run_world(gathered, 2)]
    same("gradients of `f.master` that are left on 2 ranks", kept, [0, 0], about="kept")


def test_reduce_gives_the_master_a_gradient_of_its_own_type() -> None:
    def body(comm: Comm) -> str:
        stage, _ = reduced(comm, torch.bfloat16)
        grad = stage.flats[0].master.grad
        return "none" if grad is None else str(grad.dtype)

    got = run_world(body, 2)
    elsewhere = {
        "`f.master`, a tensor of its own in 16 bits, has no gradient: is it at `f.mine`?": ["none"] * 2
    }
    what = "the gradients of the fp32 masters of a 16-bit model"
    same(what, got, ["torch.float32"] * 2, about="dtype", lookalikes=elsewhere)


def stepped_in_16_bits(comm: Comm) -> tuple[list[float], list[float], bool]:
    """The own slice of a 16-bit model, its master, and whether the slice is in the model's memory."""
    stage, _ = reduced(comm, torch.bfloat16)
    stage.optimizer.step()
    stage.gather_parameters()
    (flat,) = stage.flats
    window = flat.mine.untyped_storage().data_ptr() == flat.flat.untyped_storage().data_ptr()
    return flat.mine.tolist(), flat.master.to(torch.bfloat16).tolist(), window


def test_gather_copies_the_master_into_its_place() -> None:
    answers = run_world(stepped_in_16_bits, 2)
    got, expected = [mine for mine, *_ in answers], [master for _, master, _ in answers]
    what = "own slices of a 16-bit model, whose masters are tensors of their own"
    before = [[1.0, 1.0], [1.0, 0.0]]
    same(what, got, expected, by_rank=True, world=2, before=before)


def test_gather_writes_into_the_window() -> None:
    got = [window for *_, window in run_world(stepped_in_16_bits, 2)]
    what = "whether `f.mine` is still a window of a 16-bit model's memory, on 2 ranks"
    same(what, all(got), True, about="memory")


def test_gather_gives_everyone_what_all_masters_have() -> None:
    def body(comm: Comm) -> list[float]:
        stage, _ = reduced(comm, torch.bfloat16)
        stage.optimizer.step()
        stage.gather_parameters()
        (weight,) = stage.model.parameters()
        return weight.detach().flatten().tolist()

    expected, before = [[0.75] * 3] * 2, [[1.0] * 3] * 2
    got = run_world(body, 2)
    same(
        "weights of a 16-bit model on 2 ranks", got, expected, near=0.01, world=2, by_rank=True, before=before
    )
