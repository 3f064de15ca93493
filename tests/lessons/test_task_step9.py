"""Lesson 9's tasks, one claim at a time; run on zero_min or on a learner's file in its place."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lessons.evidence import same
from zero_min import pipeline, run_world
from zero_min.comm import Comm
from zero_min.gpt import GPT, GPTConfig
from zero_min.pipeline import Box


@pytest.mark.parametrize(
    ("layers", "ranks", "counts"), [(10, 4, [3, 3, 2, 2]), (8, 4, [2] * 4), (5, 3, [2, 2, 1]), (4, 1, [4])]
)
def test_layers_are_neighbours_in_near_equal_numbers(layers: int, ranks: int, counts: list[int]) -> None:
    size, more = layers // ranks, layers % ranks
    every = iter(range(layers))
    expected = [[next(every) for _ in range(count)] for count in counts]
    known = {
        "layers are dealt in turn, and should be neighbours": [
            [*range(r, layers, ranks)] for r in range(ranks)
        ]
    }
    if more:
        known["the remainder is forgotten: nobody has the last layers"] = [
            [*range(r * size, r * size + size)] for r in range(ranks)
        ]
        late = [r * size + max(0, r - (ranks - more)) for r in range(ranks + 1)]
        known["the last ranks have more, and should be the first"] = [
            [*range(a, b)] for a, b in pairwise(late)
        ]
        ends = [min(layers, r * (size + 1)) for r in range(ranks + 1)]
        known["each takes as many as the largest, so the last one has too few"] = [
            [*range(a, b)] for a, b in pairwise(ends)
        ]
        all_rest = [*range(0, ranks * size, size), layers]
        known["the last rank takes all that remains"] = [[*range(a, b)] for a, b in pairwise(all_rest)]
    got = [list(part) for part in pipeline.cut_layers(layers, ranks)]
    same(f"{layers} layers on {ranks} ranks", got, expected, lookalikes=known)


def words(order: Any) -> list[str]:
    """An order as a list of F0, B0 and so on."""
    return [f"{what}{i}" for what, i in order]


def went_ahead(order: list[str]) -> int:
    """How many forwards an order has before the first that a backward follows."""
    first = next((place for place, word in enumerate(order) if word[0] == "B"), len(order) + 1)
    return first - 1


@pytest.mark.parametrize("m", [4, 1])
def test_gpipe_does_all_forwards_before_the_first_backward(m: int) -> None:
    forwards, backwards = [f"F{i}" for i in range(m)], [f"B{i}" for i in range(m)]
    got = words(pipeline.gpipe(1, 4, m))
    backwards = backwards[::-1] if got == forwards + backwards[::-1] else backwards  # as good
    known = {"there are no backwards": forwards, "the backwards come first": backwards + forwards}
    turns = [f"{what}{i}" for i in range(m) for what in "FB"]
    known["each forward is followed by its backward, so the ranks take turns"] = turns
    same(f"the order of {m} micro-batches", got, forwards + backwards, lookalikes=known)


def test_gpipe_has_the_same_order_on_all_ranks() -> None:
    got = [words(pipeline.gpipe(rank, 4, 5)) for rank in range(4)]
    same("the orders of 4 ranks", got, [got[0]] * 4)


ORDERS = {  # of a rank, of so many ranks, with so many micro-batches
    (2, 7, 9): "F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 F7 B3 F8 B4 B5 B6 B7 B8",
    (0, 4, 6): "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5",
    (3, 4, 6): "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    (0, 4, 2): "F0 F1 B0 B1",
    (0, 1, 3): "F0 B0 F1 B1 F2 B2",
}


@pytest.mark.parametrize(("rank", "ranks", "m"), ORDERS)
def test_one_f_one_b_goes_as_few_forwards_ahead_as_it_can(rank: int, ranks: int, m: int) -> None:
    got, expected = words(pipeline.one_f_one_b(rank, ranks, m)), ORDERS[rank, ranks, m].split()
    mine, right = went_ahead(got), went_ahead(expected)
    causes = {  # in words, and whether it is so
        "no forward goes ahead, so the ranks work one after the other": mine == 0,
        "all forwards come first: that is GPipe": mine == m - 1,
        "one forward too many goes ahead: its activations wait for nothing": mine == right + 1,
        "one forward too few goes ahead: the next rank will have to wait": mine == right - 1,
        "every rank goes as far ahead as the first: the last needs no forward ahead": mine == ranks - 1,
        "a rank goes as far ahead as its number, and the first should go furthest": mine == rank,
    }
    complete = sorted(got) == sorted(expected)
    known = {cause: got for cause, so in causes.items() if so and complete and mine != right}
    if got == expected[: len(got)]:
        known["the last backwards are missing"] = got
    same(f"the order of rank {rank} of {ranks}, {m} micro-batches", got, expected, lookalikes=known)


class Times(nn.Module):
    """A stage that multiplies by a number: 2 on rank 0, 3 on rank 1, ...; at the end the sum is the loss."""

    def __init__(self, comm: Comm) -> None:
        super().__init__()
        self.first, self.last = comm.rank == 0, comm.rank == comm.world_size - 1
        self.weight = nn.Parameter(torch.tensor(comm.rank + 2.0))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """What comes out."""
        x = x.float().unsqueeze(-1).expand(-1, -1, 8) if self.first else x
        return (x * self.weight).sum() if self.last else x * self.weight


def prepared(comm: Comm) -> pipeline.Pipeline:
    """A pipeline of such stages. Micro-batch 0 is the characters 1 and 2, micro-batch 1 is 10 and 20."""
    trainer = pipeline.Pipeline(GPT(GPTConfig(context=2, layers=3, heads=2, width=8)), comm, 2)
    trainer.stage = Times(comm)  # type: ignore[assignment]
    trainer.tokens = trainer.targets = (torch.tensor([[1, 2]]), torch.tensor([[10, 20]]))
    return trainer


def after_forward(comm: Comm) -> tuple[float, list[bool], list[int], list[str]]:
    """The first number of what came out; who asks for gradients; what is kept; the messages."""
    trainer = prepared(comm)
    trainer.forward(0)
    x, y = trainer.kept.get(0, (torch.zeros(1), torch.zeros(1)))
    sent = [event.what for event in comm.ledger.events]
    return float(y.detach().flatten()[0]), [x.requires_grad, y.requires_grad], list(trainer.kept), sent


def test_forward_runs_the_stages_one_after_the_other() -> None:
    got = [first for first, *_ in run_world(after_forward, 3)]
    known = {"nothing is kept for the backward": [0.0] * 3}
    same("what comes out of 3 stages, the first number", got, [2.0, 6.0, 24.0 * 3 * 8], lookalikes=known)


def test_forward_keeps_an_input_and_an_output_that_backward_can_start_from() -> None:
    answers = run_world(after_forward, 3)
    same("the micro-batches that are kept", [kept for _, _, kept, _ in answers], [[0]] * 3)
    got = [asks for _, asks, _, _ in answers]
    known = {
        "the received input does not ask for a gradient, so none can be sent back": [[False, True]] * 3,
        "the output is cut off from its stage: nothing can be sent through it": [
            [rank > 0, False] for rank in range(3)
        ],
    }
    expected = [[False, True], [True, True], [True, True]]
    same("whether input and output ask for gradients, on 3 ranks", got, expected, lookalikes=known)


def test_forward_sends_once_and_the_last_rank_not_at_all() -> None:
    got = [sent for *_, sent in run_world(after_forward, 3)]
    same("the messages of 3 ranks", got, [["send"], ["send"], []], about="calls", by_rank=True)


def after_backward(comm: Comm, micro_batches: int = 1) -> tuple[float, int, list[str]]:
    """The gradient of this rank's number, how many micro-batches are still kept, and the messages."""
    trainer = prepared(comm)
    for i in range(micro_batches):
        trainer.forward(i)
    comm.ledger.clear_traffic()
    for i in range(micro_batches):
        trainer.backward(i)
    grad = trainer.stage.weight.grad
    return 0.0 if grad is None else float(grad), len(trainer.kept), [e.what for e in comm.ledger.events]


def test_backward_gives_each_stage_its_part_of_the_mean_s_gradient() -> None:
    got = [grad for grad, _, _ in run_world(after_backward, 3)]
    whole = (1 + 2) * 8 * 2 * 3 * 4 / 2  # of the sum over 2 characters x 8; half of it, for 2 micro-batches
    expected = [whole / 2, whole / 3, whole / 4]
    known = {
        "the loss is not divided by the number of micro-batches": [2 * x for x in expected],
        "every stage divides by the number of micro-batches, and the last should alone": [
            x / 2 ** (2 - rank) for rank, x in enumerate(expected)
        ],
        "what has come is passed on, and should be the gradient of the own input": [whole / 6, *expected[1:]],
        "no gradient has come from the next rank: ones were used": [24.0, 48.0, expected[2]],
    }
    same("the gradients of 3 stages, of micro-batch 0 of 2", got, expected, lookalikes=known)


def test_backward_adds_up_over_micro_batches() -> None:
    got = [grad for grad, _, _ in run_world(after_backward, 3, 2)]
    whole = (1 + 2 + 10 + 20) * 8 * 2 * 3 * 4 / 2
    same("the gradients of 3 stages, both micro-batches", got, [whole / 2, whole / 3, whole / 4])


def test_backward_lets_go_of_what_was_kept() -> None:
    got = [kept for _, kept, _ in run_world(after_backward, 3)]
    same("micro-batches that are kept afterwards", got, [0, 0, 0], about="kept")


def test_backward_sends_once_and_the_first_rank_not_at_all() -> None:
    got = [sent for *_, sent in run_world(after_backward, 3)]
    same("the messages of 3 ranks", got, [[], ["send"], ["send"]], about="calls", by_rank=True)


def tied(comm: Comm) -> float | None:
    """The gradient of the embedding, or of the output layer, after both ends have exchanged theirs."""
    trainer = pipeline.Pipeline(GPT(GPTConfig(context=2, layers=3, heads=2, width=8)), comm, 2)
    stage = trainer.stage
    if not (stage.first or stage.last):
        trainer.tie()
        return None
    weight = stage.characters.weight if stage.first else stage.head.weight
    weight.grad = torch.full_like(weight, 1.0 if stage.first else 10.0)
    trainer.tie()
    return float(weight.grad[0, 0])


def test_tie_adds_up_the_gradients_of_both_ends() -> None:
    first, middle, last = run_world(tied, 3)
    assert middle is None
    known = {"each end has the other's gradient, and not the sum": [10.0, 1.0]}
    alone = [1.0, 10.0]
    same("the gradients of both ends", [first, last], [11.0, 11.0], world=2, alone=alone, lookalikes=known)


ROWS = [
    [Box("F", 0, 0.0, 1.0), Box("B", 0, 4.0, 6.0)],
    [Box("F", 0, 1.0, 2.0), Box("B", 0, 2.0, 4.0)],
]


def test_bubble_is_the_idle_share_of_all_ranks_time() -> None:
    busier = [*ROWS, [Box("F", 0, 2.0, 3.0)]]
    known = {
        "that is the busy share, and the idle one was asked": 7 / 18,
        "the time of all ranks is divided by that of one": 1 - 7 / 6,
        "only the first rank is counted": 0.5,
        "that is a time, and a share of it was asked": 11.0,
        "idle is divided by busy, and should be by all": 11 / 7,
    }
    got = pipeline.bubble(busier)
    same("the bubble of 3 ranks that are busy 3, 3 and 1 of 6", got, 11 / 18, near=1e-9, lookalikes=known)


def test_bubble_of_a_rank_alone_is_nothing() -> None:
    same("the bubble of one rank", pipeline.bubble([[Box("F", 0, 0.0, 1.0), Box("B", 0, 1.0, 3.0)]]), 0.0)
