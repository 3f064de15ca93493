"""Joining the world: who is started by a launcher is a rank of it, or hears why not."""

import inspect
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_full
from tests.worlds import POOL, free_port, run_each
from zero_full import Topology, assemble, initialization
from zero_full.comm import devices
from zero_full.comm.lane import InlineLane, ThreadLane
from zero_full.config import resolve
from zero_full.config.resolve import FREED_BUCKET, OVERLAPPED_BUCKET, Transport
from zero_full.config.rules import MICRO
from zero_full.errors import LaunchError, SharedDeviceError
from zero_full.start import launch
from zero_full.start import startup_checks as ranks
from zero_full.start.launch import FOREIGN_LAUNCHERS, VARIABLES, init_distributed, read_launcher

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
OMPI = {
    **{"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"},
    **{"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
}
SRUN = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
BATCH = {"SLURM_NTASKS": "16", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}  # the script that calls srun


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*TORCHRUN, *(name for other in FOREIGN_LAUNCHERS for name in other.sizes)]:
        monkeypatch.delenv(name, raising=False)


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"MASTER_ADDR": "a", "MASTER_PORT": "1"},
        {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},
        {"RANK": "", "WORLD_SIZE": ""},
        BATCH,
        {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_SIZE": "1"},
    ],
    ids=str,
)
def test_one_process_is_alone(environment: dict[str, str]) -> None:
    assert read_launcher(environment) is None


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        (TORCHRUN, (1, 2, {})),
        (without(TORCHRUN, "LOCAL_RANK"), (1, 2, {})),
        ({**TORCHRUN, **SRUN, **OMPI}, (1, 2, {})),
        ({**OMPI, "MASTER_ADDR": "b"}, (3, 4, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})),
        ({**OMPI, "MASTER_ADDR": "b", "MASTER_PORT": "7"}, (3, 4, {"MASTER_ADDR": "b", "MASTER_PORT": "7"})),
        ({**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, (3, 4, {"MASTER_ADDR": "127.0.0.1", "RANK": "3"})),
        ({**SRUN, **OMPI, "MASTER_ADDR": "b"}, (3, 4, {})),  # mpirun starts its daemons with srun
    ],
    ids=str,
)
def test_a_rank_knows_its_place(environment: dict[str, str], place: Any) -> None:
    rank, world_size, variables = place
    found = read_launcher(environment)
    assert found is not None and found[:2] == (rank, world_size)
    assert set(VARIABLES) <= found.variables.keys() and variables.items() <= found.variables.items()


HALF = (
    "not set: {}. torch needs all of them; without them every process would train alone. Start with "
    "torchrun, or unset"
)
FOREIGN = "but torch does not read its variables, so every process would train alone. Start torchrun"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "0"}, f"set: RANK; {HALF.format('WORLD_SIZE, MASTER_ADDR, MASTER_PORT')} RANK to"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "set: RANK, WORLD_SIZE; not set: MASTER_ADDR, MASTER_PORT."),
        (without(TORCHRUN, "RANK"), f"set: WORLD_SIZE, LOCAL_RANK; {HALF.format('RANK')} WORLD_SIZE, LOCAL_"),
        (without(TORCHRUN, "WORLD_SIZE"), "set: RANK, LOCAL_RANK; not set: WORLD_SIZE."),
        (without(TORCHRUN, "MASTER_PORT"), "; not set: MASTER_PORT."),
        ({"LOCAL_RANK": "0"}, "set: LOCAL_RANK; not set: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT."),
        ({**TORCHRUN, "RANK": "2"}, "RANK=2 is not a rank of WORLD_SIZE=2"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "RANK=1 is not a rank of WORLD_SIZE=two"),
        (SRUN, f"SLURM_STEP_NUM_TASKS=2: srun has started 2 processes, {FOREIGN}"),
        (SRUN, "unset SLURM_STEP_NUM_TASKS and SLURM_NTASKS"),
        (SRUN, "'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_STEP_NUM_TASKS LOCAL_RANK=$SLURM_LOCALID MAST"),
        (without(SRUN, "SLURM_STEP_NUM_TASKS"), "SLURM_NTASKS=2: srun has started 2 processes"),
        (OMPI, "has started 4 processes on several hosts, and MASTER_ADDR is not set. Add"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, f"Open MPI's mpirun has started 4 processes, {FOREIGN}"),
        ({"PMI_SIZE": "2"}, f"PMI_SIZE=2: MPICH's or Intel's mpirun has started 2 processes, {FOREIGN}"),
        ({"MV2_COMM_WORLD_SIZE": "3"}, f"MVAPICH's mpirun has started 3 processes, {FOREIGN}"),
    ],
)  # fmt: skip
def test_who_would_train_alone_hears_what_to_write(environment: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError) as caught:
        read_launcher(environment)
    assert words in str(caught.value)


def test_open_mpi_is_not_asked_against_the_users_will() -> None:
    with pytest.raises(LaunchError, match="torch does not read its variables"):
        read_launcher({**OMPI, "MASTER_ADDR": "b"}, discover=False)


# Devices -----------------------------------------------------------------------------------------


@contextmanager
def devices_seen(count: int, chosen: int = 0, of_its_own: str = "") -> Iterator[list[int]]:
    """A process that sees so many devices, of which one is current. `of_its_own`: nobody else sees them.

    It gives the numbers that are made current from then on.
    """
    made_current: list[int] = []

    def current() -> int:
        return made_current[-1] if made_current else chosen

    with (
        mock.patch.object(torch.accelerator, "is_available", lambda: True),
        mock.patch.object(torch.accelerator, "current_accelerator", lambda: torch.device("cuda")),
        mock.patch.object(torch.accelerator, "device_count", lambda: count),
        mock.patch.object(torch.accelerator, "current_device_index", current),
        mock.patch.object(torch.accelerator, "set_device_index", made_current.append),
        mock.patch.object(devices, "identity_of", lambda device: f"GPU-{device.index}{of_its_own}"),
    ):
        yield made_current


@pytest.mark.parametrize(
    ("local_rank", "seen", "chosen", "index"),
    [
        ("0", 1, 0, 0),
        ("3", 4, 0, 3),
        ("3", 1, 0, 0),  # --gpus-per-task=1 shows each task its own, as number 0; or four share one
        ("5", 4, 0, 1),
        (None, 8, 0, 0),
        (None, 8, 6, 6),  # torch.cuda.set_device, after mp.spawn
        ("3", 4, 2, 2),
    ],
)
def test_which_device_is_this_processs(
    local_rank: str | None, seen: int, chosen: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    with devices_seen(seen, chosen):
        assert devices.own_accelerator() == torch.device("cuda", index)
        model = nn.Linear(2, 2)
        assert assemble._device(model) == torch.device("cuda", index)
        assert assemble._device(model.to("meta")) == torch.device("cuda", index)


def joined(port: str, rank: int, **named: Any) -> tuple[str, float]:
    """The backend of a world of two that this process joins, and a sum over it."""
    with mock.patch.object(launch.atexit, "register"):
        init_distributed(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, **named)
    total = torch.ones(3)
    dist.all_reduce(total)
    return str(dist.get_backend()), float(total[0])


def joining(comm: Any, case: str, port: str, store: str) -> Any:
    """What becomes of a rank that sees devices as in this case."""
    local, backend, seen, chosen, own = {
        "one card": (True, None, 1, 0, ""),
        "one card, more ranks": (True, None, 2, 0, ""),
        "one card each": (True, None, 2, 0, ""),
        "one card each, as number 0": (True, None, 1, 0, f" of {comm.rank}"),
        "chosen before": (False, None, 2, comm.rank, ""),
        "nobody has chosen": (False, None, 2, 0, ""),
        "one card and NCCL": (True, "nccl", 1, 0, ""),
        "one card by name": (True, "cpu:gloo,cuda:gloo", 1, 0, ""),
        "CPU": (True, "gloo", 1, 0, ""),
    }[case]
    local_rank = {"LOCAL_RANK": str(2 * comm.rank if case == "one card, more ranks" else comm.rank)}
    dist.destroy_process_group()
    environment = dict.fromkeys(VARIABLES, "") | (local_rank if local else {"LOCAL_RANK": ""})
    asked: list[Any] = []
    real = dist.init_process_group

    def start(backend: str | None, *given: Any, **named: Any) -> None:
        asked.append(backend)
        real(backend or "gloo", *given, **named)  # no NCCL here

    with (
        devices_seen(seen, chosen, own) as current,
        mock.patch.dict(os.environ, environment),
        mock.patch.object(dist, "init_process_group", start),
        mock.patch.object(launch.log, "warning") as said,
    ):
        try:
            made = joined(port, comm.rank, dist_backend=backend)
        except LaunchError as error:
            real("gloo", init_method=f"file://{store}", rank=comm.rank, world_size=2)
            dist.barrier()  # a rank that leaves at once would fail the one that is still connecting
            return str(error)
    told = said.call_args[0][0] % said.call_args[0][1:] if said.called else ""
    return asked, current, *made, told


GLOO, SHARED = "cpu:gloo,cuda:gloo", "ranks 0, 1 share one device (GPU-0)"
HOST = f"{SHARED}, but NCCL needs a device for each rank: shards are staged in host memory (gloo)"


@pytest.mark.parametrize(
    ("case", "found"),
    [
        ("one card", [([GLOO], [0], GLOO, 2.0, HOST), ([GLOO], [0], GLOO, 2.0, "")]),
        ("one card, more ranks", [([GLOO], [0], GLOO, 2.0, HOST), ([GLOO], [0], GLOO, 2.0, "")]),
        ("one card each", [([None], [rank], "gloo", 2.0, "") for rank in range(2)]),
        ("one card each, as number 0", [([None], [0], "gloo", 2.0, "")] * 2),
        ("chosen before", [([None], [rank], "gloo", 2.0, "") for rank in range(2)]),
        ("one card by name", [([GLOO], [0], GLOO, 2.0, "")] * 2),
        ("CPU", [(["gloo"], [], "gloo", 2.0, "")] * 2),
        (
            "nobody has chosen",
            [
                f"{SHARED}, though 2 devices are visible, because LOCAL_RANK is not set. Set it to each "
                "process's rank on its host, or call torch.accelerator.set_device_index first"
            ]
            * 2,
        ),
        (
            "one card and NCCL",
            [
                f"{SHARED}, but nccl needs a device for each rank. Omit dist_backend, so that shards are "
                "staged in host memory, or start no more processes on a host than it has devices"
            ]
            * 2,
        ),
    ],
)
def test_ranks_that_have_one_device_do_not_use_nccl(case: str, found: Any, tmp_path: Path) -> None:
    assert POOL.run(joining, 2, case, free_port(), str(tmp_path / "store")) == found


def connected(comm: Any, port: str) -> tuple[float, float]:
    """When this rank was connected, which takes rank 1 longer, and when it went on."""
    dist.destroy_process_group()
    real, times = dist.init_process_group, []

    def start(*given: Any, **named: Any) -> None:
        real(*given, **named)
        time.sleep(0.5 * comm.rank)
        times.append(time.monotonic())

    where = f"tcp://127.0.0.1:{port}"
    with (
        mock.patch.object(dist, "init_process_group", start),
        mock.patch.object(launch.atexit, "register"),
    ):
        init_distributed("gloo", init_method=where, rank=comm.rank, world_size=2)
    times.append(time.monotonic())
    dist.barrier()
    return times[0], times[1]


def test_no_rank_goes_on_before_all_are_connected() -> None:
    (_, went_on), (ready, _) = POOL.run(connected, 2, free_port())
    assert went_on >= ready, "rank 0 could leave, and rank 1 would hear that a peer has closed the connection"


def started_by_the_user(comm: Any, identities: list[str]) -> list[str]:
    """A world with a backend that wants a device a rank, and a model there: what `initialize` would say."""
    heard = []
    for _ in range(2):  # as with two engines
        with (
            mock.patch.object(ranks, "backend_of", lambda group, device: "nccl"),
            mock.patch.object(devices, "identity_of", lambda device: identities[comm.rank]),
            mock.patch.object(ranks.dist, "all_gather_object", wraps=dist.all_gather_object) as by_nccl,
        ):
            check = partial(ranks.check_shared_devices, Topology(), torch.device("cuda", 0))
            try:
                ranks.attempt(check, Topology())
            except SharedDeviceError as error:
                heard.append(str(error))
            assert bool(by_nccl.called) == (not heard)
    return heard


def test_a_world_of_nccls_with_two_ranks_on_a_device_is_refused_before_nccl_is_used() -> None:
    assert POOL.run(started_by_the_user, 3, ["a", "b", "c"]) == [[]] * 3
    for heard in POOL.run(started_by_the_user, 3, ["a", "b", "a"]):
        assert len(heard) == 2
        for text in heard:
            assert text.startswith(
                "ranks 0, 2 share one device (a), but nccl needs a device for each rank. Call zero_full.init"
            )


def test_a_device_is_known_by_its_drivers_identity_or_by_its_host_and_number() -> None:
    device = torch.device("cuda", 3)
    module = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(uuid="4f-1"))
    with mock.patch.object(torch, "get_device_module", lambda device: module):
        assert devices.identity_of(device) == "4f-1"
    with mock.patch.object(torch, "get_device_module", lambda device: SimpleNamespace()):
        assert devices.identity_of(device).startswith(f"cuda:3 of {platform.node()}")


def test_only_a_local_rank_that_is_no_number_is_a_problem() -> None:
    assert launch.local_rank_problem(None) is None and launch.local_rank_problem("7") is None
    assert "LOCAL_RANK=x is not a number" in str(launch.local_rank_problem("x"))


# Joining -----------------------------------------------------------------------------------------


def test_its_arguments_are_deepspeeds_in_its_order() -> None:
    assert list(inspect.signature(init_distributed).parameters) == [
        *("dist_backend", "auto_mpi_discovery", "distributed_port", "verbose", "timeout", "init_method"),
        *("dist_init_required", "config", "rank", "world_size"),
    ]
    with pytest.raises(TypeError, match=r"auto_mpi_discovery, the second argument, .*timeout .* by name"):
        init_distributed("gloo", timedelta(minutes=1))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="not initialized, and dist_init_required is False"):
        init_distributed(dist_init_required=False)
    with pytest.raises(LaunchError, match="rank=1 is not a rank of world_size=-1"):
        init_distributed(rank=1)
    with pytest.raises(LaunchError, match=r"rank=0 .* or set MASTER_ADDR and MASTER_PORT"):
        init_distributed(rank=0, world_size=2)
    init_distributed()
    assert not dist.is_initialized()


JOIN = """
import os, sys
import torch, torch.distributed as dist, zero_full

def total():
    x = torch.ones(1)
    dist.all_reduce(x)
    return [dist.get_rank(), dist.get_world_size(), int(x), os.environ.get("LOCAL_RANK")]

rank, ports = int(sys.argv[1]), sys.argv[2:]
zero_full.init_distributed("gloo", init_method=f"tcp://127.0.0.1:{ports[0]}", rank=rank, world_size=2)
seen = [total()]
dist.destroy_process_group()
size = {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")}
os.environ |= size | {f"OMPI_COMM_WORLD_{name}": str(rank) for name in ("RANK", "LOCAL_RANK")}
zero_full.init_distributed("gloo", distributed_port=int(ports[1]))
print([*seen, total()])
"""


@pytest.mark.rotates
def test_two_processes_find_each_other_by_arguments_and_by_open_mpis_variables() -> None:
    ports = [str(free_port()), str(free_port())]
    commands = [[sys.executable, "-c", JOIN, str(rank), *ports] for rank in range(2)]
    ranks = [subprocess.Popen(c, env=dict(os.environ), stdout=subprocess.PIPE, text=True) for c in commands]
    said = [rank.communicate(timeout=120)[0].strip() for rank in ranks]
    assert said == [f"[[{rank}, 2, 2, None], [{rank}, 2, 2, '{rank}']]" for rank in range(2)]


RAISES = """
import sys, time
import torch.distributed as dist, zero_full

zero_full.init_distributed("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
dist.destroy_process_group = lambda: time.sleep(1000)  # as NCCL's may, while a collective waits for others
zero_full.start.launch.TEARDOWN_S = 0.1
raise RuntimeError("the reason")
"""


def test_a_rank_that_raises_ends_though_its_groups_do_not(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", RAISES, str(tmp_path / "store")], capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 1 and "RuntimeError: the reason" in run.stderr


SIZES = {MICRO: 1, "gradient_clipping": 0.0}


def overlapped(comm: Any, hosts: int, keys: dict[str, Any]) -> tuple[bool, int]:
    """What `initialize` derives for `overlap_comm` and buckets, if torchrun has started so many hosts."""
    sizes = {"WORLD_SIZE": str(comm.world_size), "LOCAL_WORLD_SIZE": str(comm.world_size // hosts)}
    config: dict[str, Any] = {**SIZES, **keys}
    config["optimizer"] = {"type": "AdamW", "params": {}}
    with mock.patch.dict(os.environ, sizes):
        engine = zero_full.initialize(model=nn.Linear(2, 2), config=config, dist_init_required=False)[0]
    zero = engine.config.zero_optimization
    assert type(engine.optimizer.lane) is (ThreadLane if zero.overlap_comm else InlineLane)
    assert engine.optimizer.settings.bucket_numel == zero.reduce_bucket_size
    engine.destroy()
    return bool(zero.overlap_comm), zero.reduce_bucket_size


def test_what_is_derived_depends_on_how_cpu_ranks_reach_each_other() -> None:
    whole, freed, small = 500_000_000, FREED_BUCKET, OVERLAPPED_BUCKET
    alone, two_hosts, messages = (1, True), (2, True), (1, False)
    table: list[tuple[dict[str, Any], tuple[int, bool], tuple[bool, int]]] = [
        ({"stage": 1}, alone, (False, whole)),
        ({"stage": 1}, two_hosts, (True, small)),
        ({"stage": 1}, messages, (False, whole)),
        ({"stage": 2}, alone, (False, freed)),
        ({"stage": 2}, messages, (False, freed)),
        ({"stage": 2}, two_hosts, (True, small)),
        ({"stage": 2, "overlap_comm": True}, alone, (True, freed)),
        ({"stage": 2, "overlap_comm": None}, alone, (False, freed)),
        ({"stage": 2, "reduce_bucket_size": 500_000_000}, alone, (False, whole)),
        ({"stage": 3}, alone, (False, freed)),
        ({"stage": 3}, messages, (True, small)),
        ({"stage": 1, "overlap_comm": False}, messages, (False, whole)),
        ({"stage": 1, "overlap_comm": True}, messages, (True, small)),
        ({"stage": 1, "overlap_comm": True}, alone, (True, whole)),
        ({"stage": 1, "reduce_bucket_size": 70}, two_hosts, (True, 70)),
        ({"stage": 2, "reduce_bucket_size": 500_000_000}, messages, (False, whole)),
    ]
    cases = [
        (hosts, {"zero_optimization": zero, "shared_memory": shared}) for zero, (hosts, shared), _ in table
    ]
    assert [found[0] for found in run_each(overlapped, 2, cases)] == [want for *_, want in table]


def test_ranks_of_one_host_send_messages_where_they_cannot_share_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    assert initialization._transport() == "shared memory"
    monkeypatch.delattr(os, "memfd_create")  # as on macOS
    assert initialization._transport() == "loopback"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert initialization._transport() == "network"


def test_accelerators_overlap_at_stage_3_by_default() -> None:
    for stage, overlaps in ((2, False), (3, True)):
        zero = resolve({**SIZES, "zero_optimization": {"stage": stage}}, 2).config.zero_optimization
        assert (zero.overlap_comm, zero.reduce_bucket_size) == (overlaps, 500_000_000)


def test_derived_values_are_shown_as_derived() -> None:
    def origin(stage: int, transport: Transport, **zero: int) -> str:
        config = {**SIZES, "zero_optimization": {"stage": stage, **zero}}
        return resolve(config, 2, transport).origins["zero_optimization.reduce_bucket_size"]

    assert origin(1, "shared memory") == origin(1, "loopback") == origin(2, "accelerator") == "default"
    assert origin(2, "shared memory") == origin(0, "network") == "derived"
    assert origin(2, "shared memory", reduce_bucket_size=500_000_000) == "user"
    shown = resolve(SIZES, 2, "network").table()
    assert re.search(rf"reduce_bucket_size +{OVERLAPPED_BUCKET} +derived", shown)
