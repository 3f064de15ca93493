"""Lesson 3's tasks, one claim at a time; a learner's file takes the place of zero_min.stage3."""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lessons.evidence import same
from zero_min import run_world, stage3
from zero_min.comm import Comm

VALUES = [1.0, 2.0, 3.0, 4.0, 5.0]


def sliced(comm: Comm, shape: tuple[int, ...] = (5,)) -> tuple[nn.Parameter, Any]:
    """A parameter that differs between ranks, and what looks after it. Rank 0 has 1, 2, 3, ..."""
    numel = math.prod(shape)
    param = nn.Parameter((torch.arange(1.0, numel + 1) + 10 * comm.rank).view(shape))
    s = stage3.Sliced("weight", param, comm)
    got = s.mine.untyped_storage().nbytes()  # reading a view of memory that is gone would end the process
    size = 4 * -(-numel // comm.world_size)
    same("bytes behind the own slice", got, size, about="memory")
    return param, s


def test_slice_is_a_copy_that_does_not_go_with_the_whole() -> None:
    got = run_world(lambda comm: sliced(comm)[1].mine.untyped_storage().nbytes(), 2)
    same("bytes behind the own slices of 3 floats", got, [12, 12], about="memory")


@pytest.mark.parametrize("world", [2, 3])
def test_slice_cuts_equally_and_pads_with_zeros(world: int) -> None:
    got = run_world(lambda comm: sliced(comm)[1].mine.tolist(), world)
    size = -(-5 // world)
    padded = VALUES + [0.0] * (size * world - 5)
    expected = [padded[rank * size : (rank + 1) * size] for rank in range(world)]
    alone = [[value + 10 * rank if value else 0.0 for value in mine] for rank, mine in enumerate(expected)]
    same(f"own slices of 1..5 on {world} ranks", got, expected, by_rank=True, alone=alone)


def test_slice_starts_everyone_from_rank_0s_values() -> None:
    got = run_world(lambda comm: sliced(comm)[1].mine.tolist(), 2)[1]
    own = {"rank 1 starts from its own values": [14.0, 15.0, 0.0]}
    same("rank 1's slice of rank 0's values", got, [4.0, 5.0, 0.0], lookalikes=own)


def reduce(comm: Comm, times: int) -> tuple[list[float], Tensor | None, int]:
    """Ranks 0, 1, ... bring gradients of 1, 2, ... times the element's number."""
    param, s = sliced(comm)
    s.gather()
    for _ in range(times):
        param.grad = torch.tensor(VALUES) * (comm.rank + 1)
        s.reduce_gradient()
    return s.grad.tolist(), param.grad, comm.ledger.sent["reduce_scatter"]


def test_reduce_gives_each_rank_the_average_of_its_slice() -> None:
    got = [answer[0] for answer in run_world(reduce, 2, 1)]
    expected = [[1.5, 3.0, 4.5], [6.0, 7.5, 0.0]]
    alone = [[1.0, 2.0, 3.0], [8.0, 10.0, 0.0]]
    same("own gradients of 2 ranks", got, expected, by_rank=True, world=2, alone=alone)


def test_reduce_adds_micro_batches_up() -> None:
    got = [answer[0] for answer in run_world(reduce, 2, 3)]
    expected = [[4.5, 9.0, 13.5], [18.0, 22.5, 0.0]]
    same("own gradients after 3 micro-batches", got, expected, world=2, micro_batches=3)


def test_reduce_frees_the_whole_gradient() -> None:
    got = [answer[1] for answer in run_world(reduce, 2, 1)]
    same("the parameter's gradient afterwards", got, [None, None], about="kept")


def test_reduce_sends_only_what_others_own() -> None:
    got = [answer[2] for answer in run_world(reduce, 2, 1)]
    same("bytes sent by rank 0 and 1", got, [12, 12], about="bytes", by_rank=True)


def test_reduce_says_whose_gradient_travels() -> None:
    def body(comm: Comm) -> list[str]:
        param, s = sliced(comm)
        labels, reduce_scatter = list[str](), comm.reduce_scatter

        def noted(parts: list[Tensor], label: str = "") -> Tensor:
            labels.append(label or "no label")
            return reduce_scatter(parts, label)

        comm.reduce_scatter = noted  # type: ignore[method-assign, assignment]
        s.gather()
        param.grad = torch.tensor(VALUES)
        s.reduce_gradient()
        return labels

    nameless = {
        "reduce_scatter is called without `label=self.name`, so ranks that disagree are not named": [
            "no label"
        ]
    }
    for rank, got in enumerate(run_world(body, 2)):
        same(
            f"rank {rank}, label of the reduce-scatter", got, ["weight"], about="events", lookalikes=nameless
        )


class Diary(stage3.Stage3):
    """Two layers, and what happens to their weights, in order: "gather 0.weight", "release 0.weight", ..."""

    def __init__(self, comm: Comm, model: nn.Module | None = None) -> None:
        super().__init__(model or nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), comm)
        self.events: list[str] = []
        for s in self.sliced.values():
            s.gather = self._noting("gather", s, s.gather)
            s.release = self._noting("release", s, s.release)
            s.reduce_gradient = self._noting("reduce", s, s.reduce_gradient)

    def _noting(self, what: str, s: Any, really: Callable[[], None]) -> Callable[[], None]:
        def act() -> None:
            if what == "reduce" or s.is_whole == (what == "release"):  # else there is nothing to do
                self.events.append(f"{what} {s.name}")
            really()

        return act

    def layer(self, number: int) -> list[Any]:
        """What looks after the weight and the bias of one layer."""
        return [self.sliced[p] for p in self.model[number].parameters()]


class BackwardWithoutUs(Diary):
    """Gradients stay where autograd puts them."""

    def _arrived(self, param: Tensor) -> None:
        pass


LAYER_0, LAYER_1 = ["0.weight", "0.bias"], ["1.weight", "1.bias"]


def test_before_makes_all_parameters_of_a_module_whole() -> None:
    def body(comm: Comm) -> list[str]:
        trainer = Diary(comm)
        trainer._before(trainer.layer(0))
        return [s.name for s in trainer.sliced.values() if s.is_whole]

    for rank, got in enumerate(run_world(body, 2)):
        expected = LAYER_0
        same(f"rank {rank}, whole before layer 0 runs", got, expected, about="events")


def test_after_releases_each_layer_before_the_next_one_runs() -> None:
    def body(comm: Comm) -> list[str]:
        trainer = Diary(comm)
        trainer.model(torch.ones(1, 2))
        return trainer.events

    expected = [
        f"{what} {name}" for layer in (LAYER_0, LAYER_1) for what in ("gather", "release") for name in layer
    ]
    for rank, got in enumerate(run_world(body, 2)):
        same(f"rank {rank}, in forward", got, expected, about="events")


def test_after_has_the_weights_back_when_backward_comes() -> None:
    def body(comm: Comm) -> tuple[list[str], bool]:
        trainer = BackwardWithoutUs(comm)
        x = torch.ones(1, 2, requires_grad=True)
        loss = trainer.model(x).sum()
        trainer.events.clear()
        try:
            loss.backward()
        except RuntimeError as error:
            if "setStorage" not in str(error):  # what torch says of a weight that is not there
                raise
        return trainer.events, x.grad is not None and bool(x.grad.isfinite().all())

    expected = [f"gather {name}" for name in (*LAYER_1, *LAYER_0)]
    for rank, (got, finite) in enumerate(run_world(body, 2)):
        same(f"rank {rank}, in backward", got, expected, about="events")
        assert finite, f"rank {rank}: expected a gradient of numbers for the input, got NaN or nothing"


class TwoOutputs(nn.Module):
    """A layer that returns two tensors, both made with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Two products with the weight."""
        return x @ self.weight, 2 * x @ self.weight


@pytest.mark.parametrize("used", [0, 1], ids=["first", "second"])
def test_after_listens_to_every_output(used: int) -> None:
    def body(comm: Comm) -> list[str]:
        trainer = BackwardWithoutUs(comm, TwoOutputs())
        loss = trainer.model(torch.ones(1, 2, requires_grad=True))[used].sum()
        trainer.events.clear()
        with suppress(RuntimeError):  # torch finds no weight if nobody has gathered it
            loss.backward()
        return trainer.events

    for rank, got in enumerate(run_world(body, 2)):
        what = f"rank {rank}, in the backward of output {used + 1} of 2"
        same(what, got, ["gather weight"], about="events")


def test_after_lets_a_model_be_evaluated_without_gradients() -> None:
    def body(comm: Comm) -> list[str]:
        trainer = Diary(comm)
        with torch.no_grad():
            trainer.model(torch.ones(1, 2))
        return [s.name for s in trainer.sliced.values() if s.is_whole]

    for rank, got in enumerate(run_world(body, 2)):
        same(f"rank {rank}, still whole after a forward without gradients", got, list[str](), about="events")


def test_after_keeps_what_a_forward_inside_backward_has_used() -> None:
    def body(comm: Comm) -> list[str]:
        trainer = Diary(comm)
        trainer.in_backward = True  # activation checkpointing runs this forward, and its backward comes next
        trainer.model[0](torch.ones(1, 2))
        return [s.name for s in trainer.sliced.values() if s.is_whole]

    for rank, got in enumerate(run_world(body, 2)):
        same(f"rank {rank}, whole after a forward inside backward", got, LAYER_0, about="events")


def test_arrived_reduces_a_gradient_and_then_lets_its_parameter_go() -> None:
    def body(comm: Comm) -> tuple[list[str], list[float]]:
        trainer = Diary(comm)
        s = trainer.layer(0)[1]
        s.gather()
        trainer.events.clear()
        s.param.grad = torch.full((2,), comm.rank + 1.0)
        trainer._arrived(s.param)
        return trainer.events, [] if s.grad is None else s.grad.tolist()

    for rank, (got, grad) in enumerate(run_world(body, 2)):
        expected = ["reduce 0.bias", "release 0.bias"]
        same(f"rank {rank}, when 0.bias has its gradient", got, expected, about="events")
        same(f"rank {rank}, own slice of gradients 1 and 2", grad, [1.5])


def test_arrived_leaves_one_layer_whole_at_a_time_in_backward() -> None:
    def body(comm: Comm) -> list[str]:
        trainer = Diary(comm)
        loss = trainer.model(torch.ones(1, 2)).sum()
        trainer.events.clear()
        trainer.backward(loss)
        whole, most = set[str](), list[str]()
        for event in trainer.events:
            what, name = event.split()
            whole = whole | {name} if what == "gather" else whole - {name} if what == "release" else whole
            most = sorted(whole) if len(whole) > len(most) else most
        return most

    for rank, got in enumerate(run_world(body, 2)):
        expected = sorted(LAYER_1)
        same(f"rank {rank}, most that was whole in backward", got, expected, about="events")
