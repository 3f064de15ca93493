"""What an engine opens: groups of its own where its calls could mix with the user's, and their end."""

from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_full
from tests.worlds import POOL
from tests.zero_full.runs import Net, config, data
from zero_full import Settings, Topology, _compat, assemble
from zero_full.comm.topology import new_group, ranks_of
from zero_full.comm.traffic import Traffic
from zero_full.comm.transport import Exchange
from zero_full.precision import StaticScale
from zero_full.shard.group.process_groups import Connection, connect
from zero_full.shard.passes.backward import Accumulation


class ConnectedError(Exception):
    """Nothing more is wanted."""


@pytest.mark.parametrize(
    ("device", "overlap", "own"),
    [("cpu", False, False), ("cpu", True, True), ("cuda", False, True), ("cuda", True, True)],
)
def test_on_accelerators_an_engine_always_has_groups_of_its_own(
    device: str, overlap: bool, own: bool
) -> None:
    """There its calls are queued beside the user's, in an order that may be another one on another rank."""
    prepared: Any = SimpleNamespace(
        settings=Settings(stage=1, overlap=overlap),
        deferred=SimpleNamespace(device=torch.device(device)),
        base=None,
        scaler=StaticScale(1.0),
    )
    with (
        mock.patch.object(assemble, "connect", side_effect=ConnectedError) as connected,
        pytest.raises(ConnectedError),
    ):
        assemble.assemble(nn.Linear(1, 1), Topology(), prepared, Accumulation())
    assert connected.call_args[0][2].own_groups is own


def opened_and_left(comm: Any) -> list[Any]:
    """Groups that are open with a connection, and after it has been closed."""
    before = len(dist.distributed_c10d._world.pg_map)
    connection = Connection(torch.device("cpu"), Traffic(), True, None)
    groups = connect(Topology(), Settings(stage=3, overlap=True), connection)
    own = all(each.group is not dist.group.WORLD for each in connection.communicators)
    opened = len(dist.distributed_c10d._world.pg_map) - before
    groups.close()
    closed = [each.closed for each in connection.communicators if each.size > 1]
    return [own, opened, len(dist.distributed_c10d._world.pg_map) - before, closed]


def test_groups_are_left_with_the_engine() -> None:
    assert POOL.run(opened_and_left, 2) == [[True, 2, 0, [True, True]]] * 2


def bound(comm: Any) -> list[Any]:
    """A world that its user has bound to a device: what a further group of some ranks knows of it."""
    world: Any = dist.group.WORLD
    device = torch.device("cuda", 0)
    world.bound_device_id = device
    try:
        if comm.rank == 2:
            return []  # who is no member need not come
        with mock.patch.object(dist.distributed_c10d, "_get_split_source") as split:
            group: Any = new_group([0, 1], like=world)
        return [split.called, group.bound_device_id, world.bound_device_id == device, ranks_of(group)]
    finally:
        world.bound_device_id = None


def test_a_group_of_some_ranks_is_no_part_of_a_communicator_that_all_ranks_have_to_split() -> None:
    assert POOL.run(bound, 3) == [[False, None, True, [0, 1]]] * 2 + [[]]


class TwoBackends:
    """A group as torch makes it of "cpu:gloo,cuda:nccl"."""

    def __init__(self, *kinds: str) -> None:
        self._device_types = [torch.device(kind) for kind in kinds]

    def _get_backend(self, device: torch.device) -> Any:
        minutes = {"cpu": 30, "cuda": 10}[device.type]
        return SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(minutes=minutes)))


@pytest.mark.parametrize("kinds", [("cpu", "cuda"), ("cuda", "cpu")])
def test_the_patience_of_a_group_is_that_of_the_devices_backend(kinds: tuple[str, str]) -> None:
    group = TwoBackends(*kinds)
    patience = {device: _compat.timeout_of(group, device) for device in map(torch.device, ("cpu", "cuda"))}
    assert patience == {
        torch.device("cpu"): timedelta(minutes=30),
        torch.device("cuda"): timedelta(minutes=10),
    }
    assert _compat.timeout_of(group) == timedelta(minutes=10)
    assert _compat.timeout_of(TwoBackends("cpu"), torch.device("cuda")) == timedelta(minutes=30)


# Torch's own group -----------------------------------------------------------------------------------

CALLS = ("all_gather_object", "all_reduce", "broadcast", "barrier", "all_to_all_single")
CALLS += ("all_gather_into_tensor", "reduce_scatter_tensor", "broadcast_object_list", "all_gather")


def calls_of_all_ranks(comm: Any, folder: Path) -> dict[str, set[str]]:
    """By what a script does: the collectives on torch's group of all ranks. Each opens its communicator."""
    found: dict[str, set[str]] = {}
    phase = ""

    def watched(name: str) -> Any:
        call = getattr(dist, name)

        def noted(*args: Any, **named: Any) -> Any:
            given = [named.get("group"), *(each for each in args if isinstance(each, dist.ProcessGroup))]
            given = [each for each in given if each is not None]
            if all(each is dist.group.WORLD for each in given):
                found.setdefault(phase, set()).add(name)
            return call(*args, **named)

        return mock.patch.object(dist, name, noted)

    def post(self: Exchange, *given: Any) -> Any:
        if self.group is dist.group.WORLD:
            found.setdefault(phase, set()).add("messages")
        return post_messages(self, *given)

    post_messages = Exchange._post
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Exchange, "_post", post))
        for name in CALLS:
            stack.enter_context(watched(name))
        phase = "Init and GatheredParameters"
        with zero_full.Init():
            model = Net()
        for _ in range(2):
            with zero_full.GatheredParameters(model.parameters(), modifier_rank=0), torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
        phase = "initialize"
        zero = {"overlap_comm": True, "stage3_param_persistence_threshold": 0}
        keys = config(3, zero_optimization=zero, gradient_clipping=0.1)
        engine = zero_full.initialize(model=model, config=keys)[0]
        phase = "synced"
        assert len([*zero_full.synced(range(2))]) == 2
        phase = "training"
        for step in range(2):
            engine.backward(engine(data(step, 0, comm.rank)))
            engine.step()
        phase = "saving and loading"
        for asynchronous in (False, True):
            engine.save_checkpoint(folder, f"tag {asynchronous}", asynchronous=asynchronous)
        engine.load_checkpoint(folder)
        engine.save_16bit_model(folder / "weights")
        phase = "the end"
        engine.destroy()
    return found


def test_torchs_own_group_is_used_where_the_page_of_nccl_says_so(tmp_path: Path) -> None:
    """NCCL makes a communicator for it at its first collective."""
    page = (Path(__file__).parents[2] / "site/docs/guide/nccl.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith("| torch's own group"))
    for found in POOL.run(calls_of_all_ranks, 2, tmp_path):
        assert set(found) == {"Init and GatheredParameters", "initialize", "synced"}
        assert found["initialize"] == {"all_gather_object"} and found["synced"] == {"all_reduce"}
    assert all(name in row for name in ("`initialize`", "`GatheredParameters`", "`synced`"))
