"""Joining the world: who is started by a launcher is a rank of it, or hears why not."""

import inspect
import os
import socket
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zero_full import launch
from zero_full.launch import LAUNCHER, OTHERS, LaunchError, find_place, init_distributed

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
OMPI = {
    **{"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"},
    **{"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
}
SRUN = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
BATCH = {"SLURM_NTASKS": "16", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}  # the script that calls srun


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*TORCHRUN, *(name for other in OTHERS for name in other.sizes)]:
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
    assert find_place(environment) is None


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        (TORCHRUN, (1, 2, {})),
        (without(TORCHRUN, "LOCAL_RANK"), (1, 2, {})),
        ({**TORCHRUN, **SRUN, **OMPI}, (1, 2, {})),
        ({**OMPI, "MASTER_ADDR": "b"}, (3, 4, {"LOCAL_RANK": "1", "MASTER_PORT": "29500"})),
        ({**OMPI, "MASTER_ADDR": "b", "MASTER_PORT": "7"}, (3, 4, {"MASTER_ADDR": "b", "MASTER_PORT": "7"})),
        ({**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, (3, 4, {"MASTER_ADDR": "127.0.0.1", "RANK": "3"})),
        ({**SRUN, **OMPI, "MASTER_ADDR": "b"}, (3, 4, {})),  # mpirun starts its daemons with srun
    ],
    ids=str,
)
def test_a_rank_knows_its_place(environment: dict[str, str], place: Any) -> None:
    rank, world_size, variables = place
    found = find_place(environment)
    assert found is not None and found[:2] == (rank, world_size)
    assert set(LAUNCHER) <= found.variables.keys() and variables.items() <= found.variables.items()


HALF = "so every process would train alone: start with torchrun, or unset"
ELSE = "and torch does not read its variables, so each would train alone: start torchrun, once a host, or"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "0"}, f"RANK is set but WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not, {HALF} RANK to"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, f"SIZE are set but MASTER_ADDR, MASTER_PORT are not, {HALF}"),
        (without(TORCHRUN, "RANK"), f"WORLD_SIZE and LOCAL_RANK are set but RANK is not, {HALF} WORLD"),
        (without(TORCHRUN, "WORLD_SIZE"), "RANK and LOCAL_RANK are set but WORLD_SIZE is not"),
        (without(TORCHRUN, "MASTER_PORT"), "are set but MASTER_PORT is not"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK is set but RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not"),
        ({**TORCHRUN, "RANK": "2"}, "RANK=2 is not a rank of WORLD_SIZE=2: start with torchrun, or"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "RANK=1 is not a rank of WORLD_SIZE=two"),
        (SRUN, f"SLURM_STEP_NUM_TASKS=2: srun has started 2 processes, {ELSE}"),
        (SRUN, "unset SLURM_STEP_NUM_TASKS and SLURM_NTASKS"),
        (SRUN, "'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_STEP_NUM_TASKS LOCAL_RANK=$SLURM_LOCALID MAST"),
        (without(SRUN, "SLURM_STEP_NUM_TASKS"), "SLURM_NTASKS=2: srun has started 2 processes"),
        (OMPI, "has started 4 processes on several hosts, and nobody says where the first one is: add"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, f"Open MPI's mpirun has started 4 processes, {ELSE}"),
        ({"PMI_SIZE": "2"}, f"PMI_SIZE=2: MPICH's or Intel's mpirun has started 2 processes, {ELSE}"),
        ({"MV2_COMM_WORLD_SIZE": "3"}, f"MVAPICH's mpirun has started 3 processes, {ELSE}"),
    ],
)  # fmt: skip
def test_who_would_train_alone_hears_what_to_write(environment: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError) as caught:
        find_place(environment)
    assert words in str(caught.value)


def test_open_mpi_is_not_asked_against_the_users_will() -> None:
    with pytest.raises(LaunchError, match="torch does not read its variables"):
        find_place({**OMPI, "MASTER_ADDR": "b"}, discover=False)


@pytest.mark.parametrize(
    ("local_rank", "devices", "world_size", "words"),
    [
        ("0", 1, 1, None),
        ("3", 4, 8, None),
        (None, 1, 8, None),
        (None, 8, 1, None),
        (None, 8, 8, "LOCAL_RANK is not set and this process sees 8 devices: set it"),
        ("4", 4, 8, "LOCAL_RANK=4 has no device, because this process sees 4 devices: start no more"),
        ("x", 1, 8, "LOCAL_RANK=x is not a number"),
    ],
)
def test_a_device_for_each_rank_of_a_host(
    local_rank: str | None, devices: int, world_size: int, words: str | None
) -> None:
    problem = launch.device_problem(local_rank, devices, world_size)
    assert problem is None if words is None else problem is not None and words in problem


def test_a_rank_without_a_device_is_refused_unless_it_stays_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **named: None)
    monkeypatch.setattr(launch.atexit, "register", lambda function: None)
    for name, value in {**TORCHRUN, "LOCAL_RANK": "5"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match="LOCAL_RANK=5 has no device"):
        init_distributed()
    init_distributed("gloo")
    assert chosen == []
    monkeypatch.setenv("LOCAL_RANK", "1")
    init_distributed()
    assert chosen == [1]


def test_its_arguments_are_deepspeeds_in_its_order() -> None:
    assert list(inspect.signature(init_distributed).parameters) == [
        *("dist_backend", "auto_mpi_discovery", "distributed_port", "verbose", "timeout", "init_method"),
        *("dist_init_required", "config", "rank", "world_size"),
    ]
    with pytest.raises(
        TypeError, match=r"auto_mpi_discovery, the second argument, .*give timeout .* by name"
    ):
        init_distributed("gloo", timedelta(minutes=1))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="not initialized, and dist_init_required is False"):
        init_distributed(dist_init_required=False)
    with pytest.raises(LaunchError, match="rank=1 is not a rank of world_size=-1: give both"):
        init_distributed(rank=1)
    with pytest.raises(LaunchError, match=r"rank=0 does not say where .* or set MASTER_ADDR and MASTER_PORT"):
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


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def test_two_processes_find_each_other_by_arguments_and_by_open_mpis_variables() -> None:
    ports = [free_port(), free_port()]
    commands = [[sys.executable, "-c", JOIN, str(rank), *ports] for rank in range(2)]
    ranks = [subprocess.Popen(c, env=dict(os.environ), stdout=subprocess.PIPE, text=True) for c in commands]
    said = [rank.communicate(timeout=120)[0].strip() for rank in ranks]
    assert said == [f"[[{rank}, 2, 2, None], [{rank}, 2, 2, '{rank}']]" for rank in range(2)]
