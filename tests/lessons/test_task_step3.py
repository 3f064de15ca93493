"""Lesson 3's tasks, one claim at a time; a learner's files take the places of zero_min's."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lessons.evidence import same
from zero_min import prefetch, run_world, stage3
from zero_min.comm import Comm, Handle

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


# Prefetch ----------------------------------------------------------------------------------------


def overheard(comm: Comm) -> list[str]:
    """What goes through this telephone from now on: "start 1", "wait 1", "gather 0", "reduce 1"."""
    events: list[str] = []
    all_gather, start_all_gather, reduce_scatter = (
        comm.all_gather,
        comm.start_all_gather,
        comm.reduce_scatter,
    )

    def note(what: str, label: str) -> None:
        events.append(f"{what} {label.removesuffix('.weight') or 'without a label'}")

    def gather(whole: Tensor, mine: Tensor, label: str = "") -> Tensor:
        note("gather", label)
        return all_gather(whole, mine, label)

    def start(whole: Tensor, mine: Tensor, label: str = "") -> Handle:
        note("start", label)
        handle = start_all_gather(whole, mine, label)

        def wait() -> None:
            note("wait", label)
            handle.wait()

        return Handle(wait)

    def reduce(parts: Any, label: str = "") -> Tensor:
        note("reduce", label)
        return reduce_scatter(parts, label)

    comm.all_gather, comm.start_all_gather, comm.reduce_scatter = gather, start, reduce  # type: ignore[method-assign]
    return events


def early(comm: Comm, layers: int = 4) -> tuple[Any, list[Any]]:
    """A trainer with prefetch of equal layers, and what looks after their weights."""
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(layers)))
    for number, p in enumerate(model.parameters()):
        nn.init.constant_(p, number + 1.0)
    trainer = prefetch.Stage3Prefetch(model, comm)
    return trainer, [*trainer.sliced.values()]


def test_start_asks_and_goes_on() -> None:
    def body(comm: Comm) -> list[str]:
        trainer, (s, *_) = early(comm)
        events = overheard(comm)
        trainer._start(s)
        return events

    known = {
        "it waits at once, so nothing can be computed meanwhile": ["start 0", "wait 0"],
        "it gathers and waits, so nothing can be computed meanwhile": ["gather 0"],
        "start_all_gather is called without `label=s.name`, so ranks that disagree are not named": [
            "start without a label"
        ],
    }
    for rank, got in enumerate(run_world(body, 2)):
        what = f"rank {rank}, when layer 0 is asked for"
        same(what, got, ["start 0"], about="events", lookalikes=known)


def test_start_asks_once() -> None:
    def body(comm: Comm) -> list[str]:
        trainer, (s, *_) = early(comm)
        events = overheard(comm)
        trainer._start(s)
        trainer._start(s)
        return events

    for rank, got in enumerate(run_world(body, 2)):
        same(f"rank {rank}, when layer 0 is asked for twice", got, ["start 0"], about="events")


def test_start_does_not_ask_for_what_is_whole() -> None:
    def body(comm: Comm) -> list[str]:
        trainer, (s, *_) = early(comm)
        events = overheard(comm)
        s.gather()
        trainer._start(s)
        return events

    for rank, got in enumerate(run_world(body, 2)):
        same(f"rank {rank}, when a whole layer is asked for", got, ["gather 0"], about="events")


def test_start_is_found_when_the_layer_waits() -> None:
    def body(comm: Comm) -> tuple[list[str], list[float]]:
        trainer, (_, s, *_) = early(comm)
        events = overheard(comm)
        trainer._start(s)
        trainer._collect([s])
        return events, s.param.data.flatten().tolist()

    for rank, (events, values) in enumerate(run_world(body, 2)):
        same(f"rank {rank}, layer 1 asked for, then needed", events, ["start 1", "wait 1"], about="events")
        same(f"rank {rank}, weights of layer 1", values, [2.0] * 4)


def test_leave_releases_what_is_whole_and_what_is_on_its_way() -> None:
    def body(comm: Comm) -> list[str]:
        trainer, slices = early(comm)
        slices[0].gather()
        trainer._start(slices[1])
        trainer.release_all()
        kept = [s for s in slices if s.flat.untyped_storage().nbytes() or s in trainer.coming]
        return [f"{s.name} is {'on its way' if s in trainer.coming else 'there'}" for s in kept]

    for rank, got in enumerate(run_world(body, 2)):
        what = f"rank {rank}, what still has memory afterwards"
        same(what, got, list[str](), about="events")


def test_leave_waits_before_memory_is_given_back() -> None:
    def body(comm: Comm) -> list[str]:
        trainer, slices = early(comm)
        events = overheard(comm)
        trainer._start(slices[1])
        trainer.release_all()
        return events

    for rank, got in enumerate(run_world(body, 2)):
        same(f"rank {rank}, layer 1 asked for, then given up", got, ["start 1", "wait 1"], about="events")


def following(recorded: str, current: str) -> list[str]:
    """What `_next` says if the last pass took the layers `recorded`, and this one `current` so far."""

    def body(comm: Comm) -> list[str] | None:
        trainer, slices = early(comm)
        trainer.recorded = tuple((slices[int(number)],) for number in recorded)
        trainer.current = tuple((slices[int(number)],) for number in current)
        found = trainer._next()
        return None if found is None else [s.name.removesuffix(".weight") for s in found]

    return run_world(body, 1)[0]


def claim_next(recorded: str, current: str, expected: list[str], known: dict[str, list[str]]) -> None:
    """Claim what comes next."""
    layers, so_far = ", ".join(recorded) or "none", ", ".join(current)
    what = f"the last pass had layers {layers}; this one has {so_far}; next"
    same(what, following(recorded, current), expected, about="events", lookalikes=known)


@pytest.mark.parametrize(
    ("current", "then"), [("0", "1"), ("01", "2"), ("012", "3")], ids=["first", "second", "third"]
)
def test_next_is_what_came_then(current: str, then: str) -> None:
    known = {
        "that is the layer that runs now, which is whole already: count from the one after it": [current[-1]],
        "that is the order from its end": [str(3 - int(current[-1]))],
        "everything that is still to come is named, not only the next: all of that is whole at a time": [
            *"0123"[len(current) :]
        ],
    }
    known = {cause: got for cause, got in known.items() if got != [then]}
    claim_next("0123", current, [then], known)


def test_next_counts_places_where_a_layer_runs_twice() -> None:
    known = {"a layer that runs twice is looked up where it ran first: count how many have run": ["1"]}
    claim_next("0103", "010", ["3"], known)


@pytest.mark.parametrize("recorded", ["", "0123"], ids=["in the first pass", "after the last module"])
def test_next_is_nothing(recorded: str) -> None:
    known = {"at the end it begins again: the next pass comes after Adam's step, with other weights": ["0"]}
    claim_next(recorded, recorded or "0", [], known)


@pytest.mark.parametrize("current", ["03", "1", "01230"], ids=["second", "first", "longer"])
def test_next_is_nothing_on_another_path(current: str) -> None:
    at = "0123"[len(current) : len(current) + 1]
    known = {"this pass has left the path of the last one, which says nothing about it any more": [at]}
    claim_next("0123", current, [], known)


@dataclass
class Pass:
    """What happened in one forward and its backward."""

    forward: list[str] = field(default_factory=list)  # for each layer, what is there while it runs
    backward: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)  # layers, in the order in which they set out
    most: list[str] = field(default_factory=list)  # that was whole or on its way at one time
    left: list[str] = field(default_factory=list)  # afterwards


class Observer:
    """Notes a pass, moment by moment."""

    def __init__(self, trainer: Any, events: list[str]) -> None:
        self.trainer, self.events, self.seen = trainer, events, Pass()
        for number, layer in enumerate(trainer.model):
            layer.register_forward_hook(lambda *_, n=number: self.look(n, self.seen.forward), prepend=True)
            weight = next(layer.parameters())
            really = trainer.sliced[weight].reduce_gradient
            trainer.sliced[weight].reduce_gradient = lambda n=number, really=really: self.reduce(n, really)

    def reduce(self, number: int, really: Callable[[], None]) -> None:
        """The gradient of a layer is complete, so its backward has run."""
        self.look(number, self.seen.backward)
        really()

    def there(self) -> list[str]:
        """Which layers have memory, and whether their weights have arrived."""
        slices = enumerate(self.trainer.sliced.values())
        return [
            f"{number} {'whole' if s.is_whole else 'on its way'}"
            for number, s in slices
            if s.flat.untyped_storage().nbytes()
        ]

    def look(self, number: int, into: list[str]) -> None:
        """While a layer runs: what is there beside it."""
        there = self.there()
        others = [each for each in there if not each.startswith(f"{number} ")]
        into.append(f"{number} runs beside {' and '.join(others) or 'no other'}")
        self.seen.most = max(self.seen.most, there, key=len)

    def run(self) -> Pass:
        """One pass."""
        self.seen = Pass()
        self.events.clear()
        self.trainer.backward(self.trainer.model(torch.ones(1, 2)).sum())
        self.seen.asked = [each.split()[1] for each in self.events if each.startswith(("start", "gather"))]
        self.seen.left = self.there()
        return self.seen


@cache
def passes() -> list[list[Pass]]:
    """The first two passes of four layers, of each of two ranks."""

    def body(comm: Comm) -> list[Pass]:
        trainer, _ = early(comm)
        observer = Observer(trainer, overheard(comm))
        return [observer.run(), observer.run()]

    return run_world(body, 2)


NEVER = "each layer is asked for when it runs, and none before"
AT_ONCE = "the next layer is waited for before this one runs, so its gather hides behind nothing"
ALL = "everything is asked for, not only the next layer: the whole model is there"


def runs(*beside: str) -> list[str]:
    """For layers in the order of `beside`: what is there while each runs."""
    return [f"{each[0]} runs beside {each[2:] or 'no other'}" for each in beside]


def test_ahead_makes_this_layer_whole() -> None:
    def body(comm: Comm) -> list[str]:
        trainer, slices = early(comm)
        trainer._before([slices[2]])
        return [s.name for s in slices if s.is_whole]

    for rank, got in enumerate(run_world(body, 2)):
        same(f"rank {rank}, whole before layer 2 runs", got, ["2.weight"], about="events")


def test_ahead_has_the_next_layer_on_its_way_in_forward() -> None:
    expected = runs("0 1 on its way", "1 2 on its way", "2 3 on its way", "3")
    known = {
        NEVER: runs("0", "1", "2", "3"),
        AT_ONCE: runs("0 1 whole", "1 2 whole", "2 3 whole", "3"),
        ALL: runs(*(f"{n} {' and '.join(f'{k} on its way' for k in range(4) if k != n)}" for n in range(4))),
    }
    for rank, (_, second) in enumerate(passes()):
        same(f"rank {rank}, second forward", second.forward, expected, about="events", lookalikes=known)


def test_ahead_has_the_next_layer_on_its_way_in_backward() -> None:
    expected = runs("3 2 on its way", "2 1 on its way", "1 0 on its way", "0")
    known = {
        NEVER: runs("3", "2", "1", "0"),
        AT_ONCE: runs("3 2 whole", "2 1 whole", "1 0 whole", "0"),
    }
    for rank, (_, second) in enumerate(passes()):
        same(f"rank {rank}, second backward", second.backward, expected, about="events", lookalikes=known)


def test_ahead_asks_for_each_layer_once_and_in_the_order_of_need() -> None:
    before = {
        "the next layer sets out before the one that is needed now, which waits behind it": [*"10232310"]
    }
    for rank, (_, second) in enumerate(passes()):
        what = f"rank {rank}, layers in the order in which they set out"
        same(what, second.asked, [*"01233210"], about="events", lookalikes=before)


def test_ahead_has_two_layers_at_a_time_at_most() -> None:
    for rank, (_, second) in enumerate(passes()):
        same(f"rank {rank}, layers that are there at a time, at most", len(second.most), 2)


def test_ahead_leaves_nothing_for_the_step() -> None:
    for rank, (first, second) in enumerate(passes()):
        what = f"rank {rank}, what is still there after backward"
        same(what, first.left + second.left, list[str](), about="events")
