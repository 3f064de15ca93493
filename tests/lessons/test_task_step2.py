"""Lesson 2's tasks, one claim at a time. A learner's file takes the place of zero_min's."""

import pytest
import torch
from torch import nn

from lessons.evidence import same
from zero_min import run_world, stage2
from zero_min.comm import Comm


def ends(numbers: list[int]) -> list[int]:
    """The first of these numbers, and one past the last."""
    return [numbers[0], numbers[-1] + 1]


@pytest.mark.parametrize(
    ("start", "end", "rank", "expected"),
    [(0, 10, 0, (0, 4)), (0, 10, 1, (4, 8)), (0, 10, 2, (8, 10)), (5, 7, 1, (5, 7)), (4, 8, 1, (4, 8))],
)
def test_overlap_is_the_part_in_the_slice(start: int, end: int, rank: int, expected: tuple[int, int]) -> None:
    got = tuple(stage2.overlap(start, end, rank, 4))
    low, high = rank * 4, rank * 4 + 4
    interval, own = range(start, end), range(low, high)
    known = {"the slice's end is not looked at": ends([i for i in interval if i >= low])}
    known["the slice's start is not looked at"] = ends([i for i in interval if i < high])
    known["the interval's end is not looked at"] = ends([i for i in own if i >= start])
    known["the interval's start is not looked at"] = ends([i for i in own if i < end])
    known["this is counted from the slice's first element"] = [expected[0] - low, expected[1] - low]
    same(f"[{start}, {end}) and rank {rank}'s slice of 4", got, expected, lookalikes=known)


def test_overlap_is_empty_where_there_is_none() -> None:
    for start, end, rank in [(0, 3, 2), (9, 12, 0), (5, 5, 1)]:
        low, high = stage2.overlap(start, end, rank, 4)
        backwards = {"the end lies before the start: an empty answer has end = start": min(high - low, -1)}
        what = f"elements of [{start}, {end}) in rank {rank}'s slice of 4"
        same(what, high - low, 0, lookalikes=backwards)
        assert low >= start, f"an empty answer still starts at or after {start}, got {low}"


class Departures(stage2.Stage2):
    """Three buckets of two weights each, and the numbers of those that have left, in order."""

    def __init__(self, comm: Comm) -> None:
        layers = [nn.Linear(2, 2, bias=False) for _ in range(6)]
        super().__init__(nn.Sequential(*layers), comm, bucket_size=8)
        self.weights = [layer.weight for layer in reversed(layers)]  # in the order of the buckets
        self.left: list[int] = []
        self.gradients_there: list[int] = []  # how many weights had one when each bucket left

    def _reduce(self, bucket: stage2.Bucket) -> None:
        self.left.append(next(i for i, each in enumerate(self.buckets) if each is bucket))
        self.gradients_there.append(sum(w.grad is not None for w in self.weights))
        bucket.reduced = True


def departures(order: list[int]) -> list[list[int]]:
    """Which buckets have left after each of these weights' gradients has arrived."""

    def body(comm: Comm) -> list[list[int]]:
        stage, after = Departures(comm), []
        for number in order:
            stage._gradient_arrived(stage.weights[number])
            after.append(list(stage.left))
        return after

    return run_world(body, 1)[0]


def leaving(order: list[int], enough: int = 0, again: bool = False, in_turn: bool = True) -> list[str]:
    """Which buckets leave if so few gradients may be missing, and they may leave again, or out of turn."""
    missing, left = [2, 2, 2], []
    for bucket in (number // 2 for number in order):
        missing[bucket] -= 1
        for i in range(3) if in_turn else [bucket]:
            if i in left and not again:
                continue
            if missing[i] > enough:
                break
            left.append(i)
    return [f"bucket {i}" for i in left]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ([0, 1], [[], [0]]),  # complete with its second gradient
        ([0, 1, 3, 2], [[], [0], [0], [0, 1]]),
        ([2, 3, 0, 1], [[], [], [], [0, 1]]),  # bucket 1 is complete first, and waits for bucket 0
        ([5, 2, 4, 3, 1, 0], [[], [], [], [], [], [0, 1, 2]]),
        ([0, 1, 4, 5, 2, 3], [[], [0], [0], [0], [0], [0, 1, 2]]),
    ],
    ids=["one", "in order", "second first", "last first", "third before second"],
)
def test_arrived_lets_complete_buckets_leave_in_the_order_of_the_list(
    order: list[int], expected: list[list[int]]
) -> None:
    for count, (got, want) in enumerate(zip(departures(order), expected, strict=True), 1):
        what = f"gradients arrived, by bucket: {[number // 2 for number in order[:count]]}; buckets that left"
        so_far = order[:count]
        known = {"a bucket has left while a gradient of its own is missing": leaving(so_far, enough=1)}
        known["a bucket that has left leaves again"] = leaving(so_far, again=True)
        known["a bucket has left out of turn: one before it in the list still waits"] = leaving(
            so_far, in_turn=False
        )
        known["a bucket is complete, it is its turn, and it does not leave"] = []
        left = [f"bucket {i}" for i in got]
        same(what, left, [f"bucket {i}" for i in want], about="events", lookalikes=known)


def test_arrived_does_not_wait_for_the_end_of_backward() -> None:
    def body(comm: Comm) -> list[int]:
        stage = Departures(comm)
        stage.backward(stage.model(torch.ones(1, 2)).sum())
        return stage.gradients_there[:3]  # they are not freed here, so the end of backward finds them again

    (got,) = run_world(body, 1)
    expected = [2, 4, 6]
    late = {"all buckets leave at the end of backward": [6, 6, 6]}
    what = "gradients that backward had made when buckets 0, 1 and 2 left"
    same(what, got, expected, lookalikes=late)


def test_arrived_counts_so_that_a_step_knows_what_is_missing() -> None:
    def body(comm: Comm) -> list[int]:
        stage = Departures(comm)
        stage._gradient_arrived(stage.weights[0])
        return [bucket.missing for bucket in stage.buckets]

    (got,) = run_world(body, 1)
    same("`missing` of three buckets of two, after one gradient", got, [1, 2, 2], before=[2, 2, 2])


def backward(comm: Comm) -> tuple[list[float], int, int]:
    model = nn.Linear(3, 1, bias=False)
    stage = stage2.Stage2(model, comm)
    during = []
    for _ in range(3):  # three micro-batches add up
        stage.backward(model(torch.full((1, 3), float(comm.rank + 1))).sum())
        during.append(sum(p.grad is not None for p in model.parameters()))
    comm.barrier()
    return stage.flats[0].grad.tolist(), sum(during), comm.ledger.sent["reduce_scatter"]


def test_bucket_frees_the_whole_gradients() -> None:
    got = [answer[1] for answer in run_world(backward, 2)]
    same("whole gradients left after backward", got, [0, 0], about="kept")


def test_bucket_says_that_it_has_left() -> None:
    def body(comm: Comm) -> list[bool]:
        stage = stage2.Stage2(nn.Linear(3, 1), comm, bucket_size=3)
        with torch.no_grad():
            stage._reduce(stage.buckets[0])
        return [bucket.reduced for bucket in stage.buckets]

    got = run_world(body, 2)[0]
    same(
        "`reduced` of two buckets, the first has left",
        got,
        [True, False],
        lookalikes={"nobody says that it has left": [False] * 2},
    )


def test_bucket_travels_in_one_call() -> None:
    def body(comm: Comm) -> list[str]:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        stage = stage2.Stage2(model, comm)
        comm.ledger.clear_traffic()
        stage.backward(model(torch.ones(1, 3)).sum())
        return [event.what for event in comm.ledger.events]

    got = run_world(body, 2)[0]
    same("calls for a bucket of four weights", got, ["reduce_scatter"], about="calls")


def test_bucket_gives_each_rank_its_part_of_the_sum() -> None:
    got = run_world(backward, 2)
    own = [answer[0] for answer in got]
    expected = [[4.5, 4.5], [4.5, 0.0]]  # averages of 1 and 2, three times; rank 1's slice ends with padding
    known = {"world": 2, "by_rank": True, "micro_batches": 3, "alone": [[3.0, 3.0], [6.0, 0.0]]}
    same("own gradients of 2 ranks after 3 micro-batches", own, expected, **known)


def test_bucket_gives_each_parameter_its_own_piece() -> None:
    def body(comm: Comm) -> list[float]:
        model = nn.Linear(2, 2)
        stage = stage2.Stage2(model, comm)
        stage.backward(
            model(torch.tensor([[3.0, 5.0]])).sum()
        )  # 3, 5, 3, 5 for the weight, 1, 1 for the bias
        return stage.flats[0].grad.tolist()

    known = {"every parameter gets the bucket's first piece": [[3.0, 5.0, 3.0], [1.0, 1.0, 1.0]]}
    expected = [[3.0, 5.0, 3.0], [5.0, 1.0, 1.0]]
    same("own gradients of 2 ranks", run_world(body, 2), expected, by_rank=True, lookalikes=known)


def test_bucket_sends_only_what_others_own() -> None:
    got = [answer[2] for answer in run_world(backward, 2)]
    expected = [3 * 1 * 4, 3 * 2 * 4]  # rank 0 sends rank 1's one element, rank 1 sends rank 0's two
    same("bytes sent by rank 0 and 1", got, expected, about="bytes", by_rank=True)
