"""Lesson 5's tasks, one claim at a time; run on zero_min or on a learner's file in its place."""

import pytest
import torch
from torch import Tensor, nn

from lessons.evidence import same
from zero_min import offload, run_world
from zero_min.comm import Comm


def layer(dtype: torch.dtype) -> nn.Linear:
    model = nn.Linear(3, 1, bias=False)
    nn.init.ones_(model.weight)
    return model.to(dtype)


def made(comm: Comm, dtype: torch.dtype) -> tuple[torch.dtype, list[float], int, int]:
    """The master right after the start, and where it and the own slice lie."""
    (f,) = offload.Stage2Offload(layer(dtype), comm).flats
    return f.master.dtype, f.master.tolist(), f.master.data_ptr(), f.mine.data_ptr()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
    ],
    ids=str,
)
def test_place_makes_a_master_wide_enough_for_adam(dtype: torch.dtype, expected: torch.dtype) -> None:
    got = [str(answer[0]) for answer in run_world(made, 2, dtype)]
    same(f"masters of {dtype} slices", got, [str(expected)] * 2, about="dtype")


def test_place_copies_the_values_of_the_own_slice() -> None:
    got = [answer[1] for answer in run_world(made, 2, torch.bfloat16)]
    expected = [[1.0, 1.0], [1.0, 0.0]]  # rank 1's slice ends with padding
    zeros = {"the master is zeros still: the own slice's values are missing": [[0.0, 0.0]] * 2}
    same("masters of 2 ranks", got, expected, world=2, by_rank=True, lookalikes=zeros)


def test_place_answers_another_memory_than_the_slice_s() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for rank, (_, _, master, own) in enumerate(run_world(made, 2, dtype)):
            what = f"{dtype}, rank {rank}: whether master and own slice share memory"
            same(what, master == own, False, about="memory")


class Late(offload.Host):
    """A host on which nothing has landed before somebody waits."""

    def down(self, tensor: Tensor) -> Tensor:
        self.ledger.move("device to host", tensor.nbytes)
        self.started = [*getattr(self, "started", []), (torch.zeros_like(tensor), tensor)]
        return self.started[-1][0]

    def wait(self) -> None:
        for landing, tensor in getattr(self, "started", []):
            landing.copy_(tensor)
        self.started = []


def backward(comm: Comm, late: bool = False) -> tuple[list[float], int, int]:
    """The own gradient after three micro-batches, bytes sent down, and copies still flying."""
    model = layer(torch.bfloat16)
    trainer = offload.Stage2Offload(model, comm)
    if late:
        trainer.host = Late(torch.device("cpu"), comm.ledger)
    for _ in range(3):
        trainer.backward(model(torch.full((1, 3), comm.rank + 1.0, dtype=torch.bfloat16)).sum())
    grad = trainer.flats[0].grad
    values = grad.tolist() if grad is not None else []
    return values, comm.ledger.moved["device to host"], len(trainer.flying)


EARLY = [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_down_delivers_every_piece_to_the_own_gradient(late: bool) -> None:
    got = [answer[0] for answer in run_world(backward, 2, late)]
    expected = [[4.5, 4.5], [4.5, 0.0]]  # averages of 1 and 2, three times
    unread: dict[str, object] = {"the own gradient is zeros: it was read before the copy had landed": EARLY}
    unread["no gradient has arrived at all"] = [[], []]
    known = {"world": 2, "by_rank": True, "micro_batches": 3}
    same("own gradients of 2 ranks after 3 micro-batches", got, expected, lookalikes=unread, **known)


def test_down_writes_its_bytes_into_the_ledger() -> None:
    got = [answer[1] for answer in run_world(backward, 2)]
    expected = [3 * 2 * 2, 3 * 1 * 2]  # three micro-batches of 2 and 1 elements of 2 bytes
    nothing = {"the copies are not in the ledger: they did not go through `self.host`": [0, 0]}
    same("bytes down on rank 0 and 1", got, expected, about="bytes", by_rank=True, lookalikes=nothing)


def flying(comm: Comm) -> tuple[int, bool]:
    """After one piece has started: how many fly, and whether the piece itself is kept."""
    trainer = offload.Stage2Offload(layer(torch.bfloat16), comm)
    window = trainer.buckets[0].windows[0]
    part = window.part_of(comm.rank)
    piece = torch.ones(part.stop - part.start, dtype=torch.bfloat16)
    trainer._add_to_my_gradient(window, part, piece)
    return len(trainer.flying), any(kept is piece for flight in trainer.flying for kept in flight)


def test_down_keeps_the_piece_until_it_has_landed() -> None:
    for rank, (count, kept) in enumerate(run_world(flying, 2)):
        same(f"rank {rank}: copies in flight", count, 1, about="kept")
        same(f"rank {rank}: times that the piece itself is kept while it flies", int(kept), 1, about="kept")


class Noting(offload.Host):
    """A host that writes down what starts, and what is waited for."""

    events: list[str]
    landings: list[Tensor]

    def down(self, tensor: Tensor) -> Tensor:
        """As ever, and written down."""
        self.events.append("a copy starts")
        self.landings.append(super().down(tensor))
        return self.landings[-1]

    def wait(self) -> None:
        """As ever, and written down."""
        self.events.append("wait")
        super().wait()


def noted(comm: Comm) -> tuple[list[str], list[str]]:
    """What happens in a backward with three buckets, and what flies after one more piece."""
    model = nn.Sequential(
        *[layer(torch.bfloat16), *[nn.Linear(1, 1, bias=False).bfloat16() for _ in range(2)]]
    )
    trainer = offload.Stage2Offload(model, comm, bucket_size=1)
    trainer.host = host = Noting(torch.device("cpu"), comm.ledger)
    host.events, host.landings = [], []
    trainer.backward(model(torch.ones(1, 3, dtype=torch.bfloat16)).sum())
    window = trainer.buckets[0].windows[0]
    piece = torch.ones(1, dtype=torch.bfloat16)
    events = list(host.events)
    trainer._add_to_my_gradient(window, slice(0, 1), piece)
    names = {id(window): "window", id(piece): "piece", id(host.landings[-1]): "landing place"}
    members = [names.get(id(each), "part" if isinstance(each, slice) else "?") for each in trainer.flying[-1]]
    return events, members


def test_down_waits_for_no_copy() -> None:
    for rank, (got, _) in enumerate(run_world(noted, 2)):
        expected = ["a copy starts"] * 3 + ["wait"]
        what = f"rank {rank}, in a backward with three buckets"
        at_once = {
            "each copy is waited for at once, so nothing overlaps": ["a copy starts", "wait"] * 3 + ["wait"]
        }
        same(what, got, expected, about="events", lookalikes=at_once)


def test_down_keeps_piece_and_landing_place_in_order() -> None:
    expected = ["window", "part", "piece", "landing place"]
    for rank, (_, got) in enumerate(run_world(noted, 2)):
        turned = {
            "piece and landing place are exchanged: the piece is added, landed or not": [
                *expected[:2],
                *expected[:1:-1],
            ]
        }
        same(f"rank {rank}, a copy in flight", got, expected, about="events", lookalikes=turned)


def up(comm: Comm) -> tuple[list[float], int, int, bool]:
    """New masters, then the way up: the weights, bytes moved up and sent, and whether a gradient is left."""
    model = layer(torch.bfloat16)
    trainer = offload.Stage2Offload(model, comm)
    (f,) = trainer.flats
    f.master.fill_(comm.rank + 2.0)
    f.master.grad = torch.ones_like(f.master)
    comm.ledger.clear_traffic()
    with torch.no_grad():
        trainer.gather_parameters()
    sent = comm.ledger.sent["all_gather"]
    return (
        model.weight.flatten().tolist(),
        comm.ledger.moved["host to device"],
        sent,
        f.master.grad is not None,
    )


def test_up_brings_everybody_s_new_slice_to_every_model() -> None:
    got, expected = [got for got, *_ in run_world(up, 2)], [[2.0, 2.0, 3.0]] * 2
    alone, before = [[2.0, 2.0, 1.0], [1.0, 1.0, 3.0]], [[1.0] * 3] * 2
    same("weights of 2 ranks", got, expected, by_rank=True, before=before, alone=alone)


def test_up_rounds_first_so_that_two_bytes_travel() -> None:
    moved, sent = ([answer[i] for answer in run_world(up, 2)] for i in (1, 2))
    past = {"the copy is not in the ledger: it did not go through `self.host`": [0, 0]}
    what = "slices of 2 elements of 2 bytes"
    same(f"{what}: bytes up", moved, [4, 4], about="bytes", by_rank=True, lookalikes=past)
    same(f"{what}: bytes gathered", sent, [4, 4], about="bytes", by_rank=True)


def test_up_lets_the_gradient_go() -> None:
    got = [int(left) for *_, left in run_world(up, 2)]
    same("gradients of masters that are left on 2 ranks", got, [0, 0], about="kept")
