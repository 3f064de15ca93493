"""Lesson 7's tasks, one claim at a time; run on zero_min or on a learner's file in its place."""

from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lessons.evidence import same
from zero_min import muon, run_world
from zero_min.comm import Comm


def matrix(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (9, 9)])
def test_orthogonalize_brings_singular_values_near_one(shape: tuple[int, int]) -> None:
    made = muon.orthogonalize(matrix(*shape)).float()
    same(f"the largest number in what {shape} becomes", float(made.abs().max()), 0.5, near=0.5)
    got = torch.linalg.svdvals(made)
    ends = [float(got.min()), float(got.max())]
    small = matrix(*shape).bfloat16()
    divided = torch.linalg.svdvals((small / small.norm()).float())
    known = {"it is divided by its norm, and nothing else": [float(divided.min()), float(divided.max())]}
    what = f"smallest and largest singular value of {shape}"
    same(what, ends, [0.9, 0.9], near=0.4, lookalikes=known)


def test_orthogonalize_keeps_the_singular_vectors() -> None:
    x = matrix(6, 20)
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    inner = left.T @ muon.orthogonalize(x).float() @ right.T
    off = float((inner - inner.diagonal().diag()).abs().max())
    same("in the singular vectors' own axes, what stands beside the diagonal", off, 0.0, near=0.1)


TURNED = {"a tall matrix was turned, and never turned back": [3, 8]}


def test_orthogonalize_answers_in_bf16_and_in_the_same_shape() -> None:
    for shape in ((3, 8), (8, 3)):
        got = muon.orthogonalize(matrix(*shape))
        same(f"the shape, from {shape}", list(got.shape), list(shape), lookalikes=TURNED)
        same("what comes out", str(got.dtype), "torch.bfloat16", about="dtype")


def test_orthogonalize_makes_the_shorter_side_the_square() -> None:
    tall, wide = matrix(40, 3), matrix(40, 3).T
    off = float((muon.orthogonalize(tall) - muon.orthogonalize(wide).T).abs().max())
    same("the difference between a tall matrix and its transpose", off, 0.0)
    with FlopCounterMode(display=False) as counter:
        muon.orthogonalize(tall, steps=1)
    expected, longer = 747, 73_600
    got = counter.get_total_flops() // 2
    known = {"the square is made on the longer side": longer}
    same("multiplications of a step on (40, 3)", max(got, expected), expected, lookalikes=known)


def test_orthogonalize_bears_a_matrix_of_zeros() -> None:
    got = muon.orthogonalize(torch.zeros(3, 4))
    same("of a matrix of zeros", got, [[0.0] * 4] * 3)


def test_orthogonalize_leaves_its_argument_alone() -> None:
    x = matrix(3, 4).bfloat16()
    before = x.clone()
    muon.orthogonalize(x)
    same("the matrix that was given", x, before, lookalikes={"it is changed in place": x})


WORK = {  # of a shape, and what it comes to without the small square, without sorting, with one long product
    (1, 1): (3, 2, 3, 2),
    (2, 5): (48, 40, 48, 28),
    (5, 2): (48, 40, 225, 28),
    (4, 4): (192, 128, 192, 128),
}


@pytest.mark.parametrize("shape", WORK, ids=str)
def test_work_counts_multiplications(shape: tuple[int, int]) -> None:
    expected, no_square, unsorted, one_product = WORK[shape]
    known = {"the small square is forgotten": no_square, "the sides are not sorted": unsorted}
    known["one of the two long products is forgotten"] = one_product
    known = {cause: number for cause, number in known.items() if number != expected}
    same(f"multiplications of a step on {shape}", muon.work(shape), expected, lookalikes=known)


def test_owners_take_the_largest_first() -> None:
    got = muon.choose_owners([(2, 2), (2, 2), (4, 4)], 2)
    known = {"they are dealt in the order in which they come": [0, 1, 0], "they are dealt in turn": [1, 0, 0]}
    known["the one with the least work is dealt first"] = [0, 1, 0]
    known["all go to one rank: what a rank has already is not counted"] = [0, 0, 0]
    same("work 24, 24 and 192 for two ranks", got, [1, 1, 0], lookalikes=known)


def test_owners_are_chosen_by_work_and_not_by_bytes() -> None:
    got = muon.choose_owners([(8, 8), (1, 64), (1, 64), (1, 64)], 2)
    by_bytes = {"they are chosen by the number of elements, not by work": [0, 1, 0, 1]}
    same("a square of 64 elements and three rows of 64 for two ranks", got, [0, 1, 1, 1], lookalikes=by_bytes)


def test_owners_may_be_fewer_than_ranks() -> None:
    got = muon.choose_owners([(2, 3)], 4)
    same("one matrix, four ranks", got, [0])


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


class Enough(Exception):  # noqa: N818  it is no error
    """The first call has been seen, and what follows is another task."""


def calls_of(comm: Comm, first_only: bool = False) -> tuple[list[Call], list[int], Tensor]:
    """What a visit gives to both all-to-alls, who owns what, and what comes back."""
    trainer, calls, dtypes = trainer_of(comm), list[Call](), list[str]()
    all_to_all = comm.all_to_all

    def noted(parts: list[Tensor], sizes: list[int]) -> list[Tensor]:
        calls.append(([part.tolist() for part in parts], list(sizes)))
        dtypes.append(str(parts[0].dtype))
        received = all_to_all(parts, sizes)
        if first_only:
            raise Enough
        return received

    comm.all_to_all = noted  # type: ignore[method-assign, assignment]
    mine = torch.arange(32.0) + 32 * comm.rank
    updates = [mine]
    with suppress(Enough):
        updates = trainer.visit(mine)
    same("what travels", dtypes, ["torch.bfloat16"] * len(dtypes), about="dtype")
    return calls, trainer.owners, torch.cat(list(updates))


def test_there_sends_every_owner_its_pieces() -> None:
    (first, owners, _), (second, *_) = run_world(calls_of, 2, True)
    # Dealt to two ranks the matrices lie in the order (6, 5), (2, 9), (4, 4): 30, 18 and 16 elements.
    same("owners", owners, [0, 1, 1])
    got = [[[int(value) for value in part] for part in calls[0][0]] for calls in (first, second)]
    expected = [[[*range(30)], [30, 31]], [[], [*range(32, 64)]]]
    same("what ranks 0 and 1 send to 0 and 1", got, expected, by_rank=True, world=2)


def test_there_says_how_much_comes_from_each_rank() -> None:
    (first, *_), (second, *_) = run_world(calls_of, 2, True)
    got = [calls[0][1] for calls in (first, second)]
    same("elements that ranks 0 and 1 await from 0 and 1", got, [[30, 0], [2, 32]], by_rank=True, world=2)


def test_back_brings_each_rank_its_pieces_of_the_whole() -> None:
    answers = run_world(calls_of, 2)
    elements = torch.arange(64.0)
    wholes = [elements[:30].view(6, 5), elements[30:48].view(2, 9), elements[48:].view(4, 4)]
    made = torch.cat([muon.orthogonalize(whole).reshape(-1) for whole in wholes])
    cut = torch.cat([elements[:32].bfloat16(), elements[32:].bfloat16()])
    untouched = {"the pieces come back as they went: nothing was made orthogonal": cut.view(2, 32).tolist()}
    cuts = [muon.orthogonalize(piece.view(1, -1)).reshape(-1) for piece in elements.split([30, 2, 16, 16])]
    untouched["each rank's piece was made orthogonal by itself"] = torch.cat(cuts).view(2, 32).tolist()
    got = [updates for *_, updates in answers]
    same("the pieces that come back", got, made.view(2, 32), by_rank=True, world=2, lookalikes=untouched)


def test_back_sends_what_came_and_no_more() -> None:
    (first, *_), (second, *_) = run_world(calls_of, 2)
    for rank, (there, back) in enumerate((first, second)):
        same(f"elements that rank {rank} sends back", [len(part) for part in back[0]], there[1])
        came = [len(part) for part in there[0]]
        same(f"elements that rank {rank} expects back", back[1], came)
