"""What an engine opens: groups of its own where its calls could mix with the user's, and their end."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.worlds import POOL
from zero_full import Settings, Topology, _compat, assemble
from zero_full.comm.topology import new_group, ranks_of
from zero_full.comm.traffic import Traffic
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
