"""Lesson 8's tasks, one claim at a time; run on zero_min or on a learner's file in its place."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lessons.evidence import same
from zero_min import run_world
from zero_min import tensor_parallel as tp
from zero_min.comm import Comm


def entered(comm: Comm) -> tuple[Tensor, Tensor, Tensor, list[str]]:
    """What Enter's backward makes of a gradient: it, the gradient afterwards, before, and what was called."""
    grad = torch.tensor([1.0, 2.0, 4.0]) * (comm.rank + 1)
    before = grad.clone()
    found, nothing = tp.Enter.backward(SimpleNamespace(comm=comm), grad)
    assert nothing is None, "the second answer is the gradient of comm, which has none: None"
    return found, grad, before, [event.what for event in comm.ledger.events]


def test_enter_adds_up_what_all_ranks_say_about_x() -> None:
    answers = run_world(entered, 2)
    alone = [before.tolist() for _, _, before, _ in answers]
    same(
        "the gradients of x on 2 ranks", [a[0] for a in answers], [[3.0, 6.0, 12.0]] * 2, world=2, alone=alone
    )


def test_enter_leaves_the_gradient_that_it_is_given_alone() -> None:
    for rank, (_, after, before, _) in enumerate(run_world(entered, 2)):
        same(f"rank {rank}'s incoming gradient afterwards", after, before, before=before)


def test_enter_makes_one_all_reduce() -> None:
    for _, _, _, calls in run_world(entered, 2):
        same("what is called in its backward", calls, ["all_reduce"], about="calls")


def test_enter_bears_a_gradient_that_is_not_contiguous() -> None:
    def body(comm: Comm) -> Tensor:
        return tp.Enter.backward(SimpleNamespace(comm=comm), torch.ones(3, 2).T)[0]

    same("the sum of two transposed gradients of ones", run_world(body, 2)[0], [[2.0] * 3] * 2, world=2)


def left(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
    """What Leave's forward makes of a term: it, the term afterwards, and before."""
    term = torch.tensor([1.0, 2.0, 4.0]) * (comm.rank + 1)
    before = term.clone()
    return tp.Leave.forward(SimpleNamespace(), term, comm), term, before


def test_leave_adds_up_the_terms() -> None:
    answers = run_world(left, 2)
    alone = [before.tolist() for _, _, before in answers]
    same("what comes out on 2 ranks", [a[0] for a in answers], [[3.0, 6.0, 12.0]] * 2, world=2, alone=alone)


def test_leave_keeps_the_term_as_it_is() -> None:
    for rank, (_, after, before) in enumerate(run_world(left, 2)):
        same(f"rank {rank}'s term afterwards", after, before, before=before)


def turned_back(comm: Comm) -> tuple[Tensor, list[str]]:
    grad = torch.tensor([1.0, 2.0, 4.0])  # of the sum, so it is the same on every rank
    ctx = SimpleNamespace(comm=comm)
    return tp.Leave.backward(ctx, grad)[0], [event.what for event in comm.ledger.events]


def test_back_passes_the_gradient_of_the_sum_to_each_term() -> None:
    got = [grad for grad, _ in run_world(turned_back, 2)]
    same("the gradients of the terms on 2 ranks", got, [[1.0, 2.0, 4.0]] * 2, world=2)


def test_back_calls_no_collective() -> None:
    for _, calls in run_world(turned_back, 2):
        same("what is called in its backward", calls, [], about="calls")


WEIGHT = torch.arange(24.0).view(4, 6)  # 6 inputs, 4 outputs
BIAS = torch.tensor([100.0, 200.0, 300.0, 400.0])


def column(comm: Comm) -> tuple[Tensor, Tensor]:
    layer = tp.ColumnLinear(WEIGHT, BIAS, comm)
    return layer.weight.detach(), layer.bias.detach()


def test_columns_are_the_rows_of_torch_s_weight() -> None:
    got = [weight for weight, _ in run_world(column, 2)]
    known = {
        "it is cut by its inputs, and should be by its outputs": [p.tolist() for p in WEIGHT.chunk(2, 1)],
        "it is not cut: every rank has all of it": [WEIGHT.tolist()] * 2,
        "every rank has the first part": [WEIGHT[:2].tolist()] * 2,
        "the outputs are dealt in turn, and should stay together": [WEIGHT[r::2].tolist() for r in range(2)],
    }
    expected = [p.tolist() for p in WEIGHT.chunk(2)]
    same("the weights of 2 ranks, of a weight (4, 6)", got, expected, by_rank=True, world=2, lookalikes=known)


def test_columns_have_the_bias_of_their_outputs() -> None:
    got = [bias for _, bias in run_world(column, 2)]
    known = {"the bias is whole, and a rank has the outputs of its part only": [BIAS.tolist()] * 2}
    expected = [[100.0, 200.0], [300.0, 400.0]]
    same("the biases of 2 ranks", got, expected, by_rank=True, world=2, lookalikes=known)


def test_columns_are_parameters() -> None:
    def body(comm: Comm) -> list[str]:
        return sorted(name for name, _ in tp.ColumnLinear(WEIGHT, BIAS, comm).named_parameters())

    known = {
        f"`self.{name}` is a plain tensor, which nobody trains: it should be an nn.Parameter": [other]
        for name, other in (("weight", "bias"), ("bias", "weight"))
    }
    for got in run_world(body, 2):
        same("parameters of a layer", got, ["bias", "weight"], about="events", lookalikes=known)


def row(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
    """A layer of 4 inputs and 6 outputs on this rank's part of x: y, and the gradients of bias and weight."""
    layer = tp.RowLinear(WEIGHT.T, torch.full((6,), 1000.0), comm)
    y = layer(torch.tensor([[1.0, 10.0, 2.0, 20.0]]).chunk(comm.world_size, 1)[comm.rank])
    y.sum().backward()
    biases = torch.zeros(6) if layer.bias.grad is None else layer.bias.grad
    weights = torch.zeros(6, 2) if layer.weight.grad is None else layer.weight.grad
    return y.detach()[0], biases, weights


def test_rows_add_up_to_the_whole_layer() -> None:
    expected = F.linear(torch.tensor([1.0, 10.0, 2.0, 20.0]), WEIGHT.T, torch.full((6,), 1000.0))
    parts = torch.tensor([[1.0, 10.0, 0.0, 0.0], [0.0, 0.0, 2.0, 20.0]]) @ WEIGHT
    known = {
        "the bias is inside the sum: it counts once for each rank": [(expected + 1000.0).tolist()] * 2,
        "there is no bias": [(expected - 1000.0).tolist()] * 2,
        "the terms are not added up: every rank has its own": (parts + 1000.0).tolist(),
        "the sum was divided by the number of ranks": [((expected - 1000.0) / 2 + 1000.0).tolist()] * 2,
    }
    got = [y for y, _, _ in run_world(row, 2)]
    same("y on 2 ranks, with a bias of 1000", got, [expected.tolist()] * 2, world=2, lookalikes=known)


def test_rows_give_every_rank_the_whole_gradient_of_the_bias() -> None:
    known = {"only rank 0 uses its bias, so the others never learn theirs": [[1.0] * 6, [0.0] * 6]}
    got = [bias for _, bias, _ in run_world(row, 2)]
    same("the gradients of the bias on 2 ranks", got, [[1.0] * 6] * 2, world=2, lookalikes=known)


def test_rows_give_each_rank_the_gradient_of_its_weight() -> None:
    got = [weight for *_, weight in run_world(row, 2)]
    expected = [[[1.0, 10.0]] * 6, [[2.0, 20.0]] * 6]
    same("the gradients of the weight on 2 ranks", got, expected, by_rank=True, world=2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_heads_come_rank_by_rank_with_q_k_and_v(ranks: int) -> None:
    # q has the rows 0 to 3, k the rows 10 to 13, v 20 to 23: of each, two rows for each of 2 ranks
    rows = torch.tensor([float(10 * part + row) for part in range(3) for row in range(4)])
    size = 4 // ranks
    expected = [10.0 * part + size * r + i for r in range(ranks) for part in range(3) for i in range(size)]
    by_head = [10.0 * part + row for row in range(4) for part in range(3)]
    known = (
        {"nothing has moved, so rank 0 would get all of q and some of k": rows.tolist()} if ranks > 1 else {}
    )
    known["q, k and v take turns row by row, and must stay together for each rank"] = by_head
    cut_first = rows.view(ranks, 3, -1).transpose(0, 1).reshape(-1).tolist()
    known["it is cut by ranks first, and what lies in memory first is q, k and v"] = cut_first
    same(f"a bias of 12, for {ranks} ranks", tp.rank_by_rank(rows, ranks), expected, lookalikes=known)


def test_heads_keep_the_shape_and_whole_rows() -> None:
    weight = torch.arange(24.0).view(12, 2)
    got = tp.rank_by_rank(weight, 2)
    order = [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]
    same("the shape", list(got.shape), [12, 2])
    same("a weight of 12 rows, for 2 ranks", got, weight[order])


class TwoLayers(nn.Module):
    """A layer cut by outputs, one cut by inputs, a norm that is whole; gradients are small whole numbers."""

    def __init__(self, comm: Comm) -> None:
        super().__init__()
        self.up = tp.ColumnLinear(torch.zeros(4, 2), torch.zeros(4), comm)
        self.down = tp.RowLinear(torch.zeros(2, 4), torch.zeros(2), comm)
        self.norm = nn.LayerNorm(2)
        for p, value in ((self.up.weight, 1), (self.up.bias, 2), (self.down.weight, 3)):
            p.grad = torch.full_like(p, value + 4.0 * comm.rank)
        for p, value in ((self.down.bias, 6), (self.norm.weight, 7), (self.norm.bias, 8)):
            p.grad = torch.full_like(p, float(value))


def normed(comm: Comm) -> tuple[float, int]:
    model = TwoLayers(comm)
    return tp.global_norm(model, comm), comm.ledger.total_sent()


def test_norm_counts_parts_of_all_ranks_and_whole_parameters_once() -> None:
    cut = [4 * (1 + 4 * r) ** 2 + 2 * (2 + 4 * r) ** 2 + 4 * (3 + 4 * r) ** 2 for r in range(2)]
    whole = 2 * (6 * 6 + 7 * 7 + 8 * 8)
    known = {
        "what every rank has whole is counted once for each rank": [(sum(cut) + 2 * whole) ** 0.5] * 2,
        "every rank counts its own parts only, so the ranks would clip differently": [
            (mine + whole) ** 0.5 for mine in cut
        ],
        "only the parts are counted, and not what is whole": [sum(cut) ** 0.5] * 2,
        "norms are added up, and should be squares": [sum((mine + whole) ** 0.5 for mine in cut)] * 2,
        "the root is missing": [float(sum(cut) + whole)] * 2,
    }
    got = [norm for norm, _ in run_world(normed, 2)]
    expected = [(sum(cut) + whole) ** 0.5] * 2
    same("the norm of all gradients on 2 ranks", got, expected, near=1e-3, lookalikes=known)


def test_norm_sends_one_number_and_no_gradients() -> None:
    got = [sent for _, sent in run_world(normed, 2)]
    assert max(got) <= 8, f"the norm needs one number from each rank, 8 bytes; 2 ranks sent {got}"
