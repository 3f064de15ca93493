"""The ledger finds what is there, whoever owns it, and charges nobody for a neighbour's memory."""

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.worlds import POOL
from zero_min import Stage0, run_world
from zero_min.comm import Comm
from zero_min.ledger import Ledger, held


def test_held_counts_shared_storage_once() -> None:
    whole = torch.zeros(10)
    assert held([whole, whole[2:5], whole.view(2, 5), None]) == 40
    assert held([]) == 0


def test_live_follows_allocation_resizing_and_release() -> None:
    ledger = Ledger()
    with ledger.watch():
        a = torch.zeros(100)
        b = a * 2
        window = a[3:7]
        assert ledger.live() == 800
        b.untyped_storage().resize_(0)
        assert ledger.live() == 400
        del a, b
        gc.collect()
        assert ledger.live() == 400  # the window keeps the whole storage alive
        del window
        assert ledger.live() == 0
        assert ledger.peak == 800


def test_live_sees_gradients_and_saved_activations() -> None:
    ledger = Ledger()
    with ledger.watch():
        layer = nn.Linear(10, 10, bias=False)
        x = torch.ones(5, 10)
        y = layer(x).square().sum()
        before = ledger.live()
        y.backward()
        del x, y
        assert ledger.live() == held([layer.weight, layer.weight.grad]) == 800
        assert before > 800 - 400


def test_what_existed_before_is_not_charged() -> None:
    before = torch.zeros(1000)
    ledger = Ledger()
    with ledger.watch():
        before.add_(1)
        assert before[2:].view(-1).numel() == 998
        assert ledger.live() == 0
        made = torch.tensor([1.0, 2.0])
        assert ledger.live() == made.nbytes


def test_a_reader_is_not_charged_for_its_neighbour() -> None:
    def body(comm: Comm) -> int:
        with comm.ledger.watch():
            mine = torch.ones(1000 if comm.rank == 0 else 10)
            comm.broadcast(mine[:10].clone() if comm.rank == 0 else mine)
            comm.barrier()
            return comm.ledger.live()

    assert run_world(body, 2) == [4000, 40]


def test_traffic_can_be_cleared_between_steps() -> None:
    def body(comm: Comm) -> tuple[int, int]:
        comm.all_reduce(torch.ones(8))
        first = comm.ledger.total_sent()
        comm.ledger.clear_traffic()
        return first, comm.ledger.total_sent() + len(comm.ledger.events)

    assert run_world(body, 2) == [(32, 0)] * 2


def loopback() -> int:
    """Bytes the kernel has sent on this machine's loopback."""
    line = next(x for x in Path("/proc/net/dev").read_text().splitlines() if x.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


MIB = 2**20


def on_the_wire(comm: Comm, collective: str) -> tuple[int, int]:
    """(logical bytes this rank sent, loopback bytes of all ranks meanwhile) for 16 MiB."""
    N = comm.world_size
    whole = torch.ones(16 * MIB // 4)
    size = whole.numel() // N
    parts = list(whole[: N * size].split(size))
    comm.barrier()
    before = loopback()
    if collective == "all_reduce":
        comm.all_reduce(whole)
    elif collective == "reduce_scatter":
        comm.reduce_scatter(parts)
    else:
        comm.all_gather(whole[: N * size], parts[comm.rank])
    comm.barrier()
    return comm.ledger.total_sent(), loopback() - before


@pytest.mark.skipif(not Path("/proc/net/dev").exists(), reason="reads the kernel's loopback counter")
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("N", [2, 4])
def test_the_kernel_sent_what_the_ledger_says(collective: str, N: int) -> None:
    ratios = []
    for _ in range(5):  # something else may use the loopback, so one clean try is enough
        answers = POOL.run(on_the_wire, N, collective)
        logical = sum(sent for sent, _ in answers)
        ratios.append(answers[0][1] / logical)
        if 0.98 <= ratios[-1] <= 1.06:  # headers and the two barriers are on top
            return
    pytest.fail(f"loopback bytes / ledger bytes: {ratios}")


def test_a_stage_s_traffic_is_all_in_the_ledger() -> None:
    """Stage 0 without the ledger's knowledge would be a collective that bypasses `Comm`."""

    def body(comm: Comm) -> int:
        model = nn.Linear(4, 4)
        stage = Stage0(model, comm)
        comm.ledger.clear_traffic()
        stage.backward(model(torch.ones(1, 4)).sum())
        stage.step()
        return len(comm.ledger.events)

    assert run_world(body, 2) == [2, 2]  # one all-reduce for the weight, one for the bias
