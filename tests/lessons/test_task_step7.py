"""Lesson 7's tasks, one claim at a time; run on zero_min or on a learner's file in its place."""

import pytest
import torch
from torch import Tensor, nn

from lessons.evidence import same
from zero_min import muon, run_world
from zero_min.comm import Comm


def matrix(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (9, 9)])
def test_orthogonalize_brings_singular_values_near_one(shape: tuple[int, int]) -> None:
    got = torch.linalg.svdvals(muon.orthogonalize(matrix(*shape)).float())
    low, high = float(got.min()), float(got.max())
    assert low > 0.5 and high < 1.3, (
        f"singular values of {shape}: expected 0.5 to 1.3, got {low:.2f} to {high:.2f}"
    )


def test_orthogonalize_keeps_the_singular_vectors() -> None:
    x = matrix(6, 20)
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    inner = left.T @ muon.orthogonalize(x).float() @ right.T
    off = float((inner - inner.diagonal().diag()).abs().max())
    assert off < 0.1, (
        f"in the singular vectors' own axes: expected a diagonal matrix, got {off:.2f} beside it"
    )


def test_orthogonalize_answers_in_bf16_and_in_the_same_shape() -> None:
    for shape in ((3, 8), (8, 3)):
        got = muon.orthogonalize(matrix(*shape))
        assert (got.shape, got.dtype) == (shape, torch.bfloat16), (
            f"expected bfloat16 of shape {shape}, got {got.dtype} of shape {tuple(got.shape)}"
        )


def test_orthogonalize_makes_the_shorter_side_the_square() -> None:
    tall, wide = matrix(40, 3), matrix(40, 3).T
    off = float((muon.orthogonalize(tall) - muon.orthogonalize(wide).T).abs().max())
    assert off == 0, f"a tall matrix and its transpose: expected the same bits, got a difference of {off:.3g}"


def test_orthogonalize_bears_a_matrix_of_zeros() -> None:
    got = muon.orthogonalize(torch.zeros(3, 4))
    assert not got.any(), f"of zeros: expected zeros, got {got.tolist()}"


def test_orthogonalize_leaves_its_argument_alone() -> None:
    x = matrix(3, 4).bfloat16()
    before = x.clone()
    muon.orthogonalize(x)
    assert torch.equal(x, before), "the matrix that was given: expected no change, got other values"


@pytest.mark.parametrize(("shape", "expected"), [((1, 1), 3), ((2, 5), 48), ((5, 2), 48), ((4, 4), 192)])
def test_work_counts_multiplications(shape: tuple[int, int], expected: int) -> None:
    got = muon.work(shape)
    assert got == expected, f"a step on {shape}: expected {expected} multiplications, got {got}"


def test_owners_take_the_largest_first() -> None:
    got = muon.choose_owners([(2, 2), (2, 2), (4, 4)], 2)
    assert list(got) == [1, 1, 0], f"work 24, 24 and 192 for two ranks: expected [1, 1, 0], got {got}"


def test_owners_are_chosen_by_work_and_not_by_bytes() -> None:
    got = muon.choose_owners([(1, 64), (8, 8), (8, 8)], 2)
    assert len({got[1], got[2]}) == 2, (
        f"three matrices of 64 elements, two of which are square: expected them on two ranks, got {got}"
    )


def test_owners_may_be_fewer_than_ranks() -> None:
    got = muon.choose_owners([(2, 3)], 4)
    assert list(got) == [0], f"one matrix, four ranks: expected [0], got {got}"


SHAPES = [(6, 5), (4, 4), (2, 9)]


class Matrices(nn.Module):
    """Three matrices, 64 elements: on two ranks the second one is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ParameterList([torch.zeros(shape) for shape in SHAPES])


def trainer_of(comm: Comm) -> muon.Stage2Muon:
    trainer = muon.Stage2Muon(Matrices(), comm, lr=1.0)
    comm.ledger.clear_traffic()
    return trainer


Call = tuple[list[list[float]], list[int]]


def calls_of(comm: Comm) -> tuple[list[Call], list[int], Tensor]:
    """What a visit gives to both all-to-alls, who owns what, and what comes back."""
    trainer, calls = trainer_of(comm), []
    all_to_all = comm.all_to_all

    def noted(parts: list[Tensor], sizes: list[int]) -> list[Tensor]:
        calls.append(([part.tolist() for part in parts], list(sizes)))
        assert all(part.dtype == torch.bfloat16 for part in parts), (
            f"what travels: expected bfloat16, got {parts[0].dtype}"
        )
        return all_to_all(parts, sizes)

    comm.all_to_all = noted  # type: ignore[method-assign, assignment]
    mine = torch.arange(32.0) + 32 * comm.rank
    updates = trainer.visit(mine)
    return calls, trainer.owners, torch.cat(updates)


def test_there_sends_every_owner_its_pieces() -> None:
    (first, owners, _), (second, *_) = run_world(calls_of, 2)
    # Dealt to two ranks the matrices lie in the order (6, 5), (2, 9), (4, 4): 30, 18 and 16 elements.
    assert owners == [0, 1, 1], f"owners: expected [0, 1, 1], got {owners}"
    for rank, calls, expected in (
        (0, first, [[*range(30)], [30, 31]]),
        (1, second, [[], [*range(32, 64)]]),
    ):
        got = [[int(value) for value in part] for part in calls[0][0]]
        assert got == expected, f"rank {rank} sends to ranks 0 and 1: expected {expected}, got {got}"


def test_there_says_how_much_comes_from_each_rank() -> None:
    (first, *_), (second, *_) = run_world(calls_of, 2)
    for rank, calls, expected in ((0, first, [30, 0]), (1, second, [2, 32])):
        assert calls[0][1] == expected, (
            f"rank {rank} awaits elements of ranks 0 and 1: expected {expected}, got {calls[0][1]}"
        )


def test_back_brings_each_rank_its_pieces_of_the_whole() -> None:
    answers = run_world(calls_of, 2)
    elements = torch.arange(64.0)
    wholes = [elements[:30].view(6, 5), elements[30:48].view(2, 9), elements[48:].view(4, 4)]
    made = torch.cat([muon.orthogonalize(whole).reshape(-1) for whole in wholes])
    for rank, (_, _, updates) in enumerate(answers):
        expected = made[32 * rank : 32 * rank + 32]
        assert updates.shape == expected.shape, (
            f"rank {rank} gets back: expected {len(expected)} elements, got {len(updates)}"
        )
        off = float((updates - expected).abs().max())
        assert off == 0, (
            f"rank {rank}: expected its pieces of the matrices made orthogonal, got a difference of {off:.3g}"
        )


def test_back_sends_what_came_and_no_more() -> None:
    (first, *_), (second, *_) = run_world(calls_of, 2)
    for rank, calls in ((0, first), (1, second)):
        there, back = calls
        got, expected = [len(part) for part in back[0]], there[1]
        assert got == expected, f"rank {rank} sends back: expected {expected} elements, got {got}"
        got, expected = back[1], [len(part) for part in there[0]]
        assert got == expected, f"rank {rank} gets back: expected {expected} elements, got {got}"
