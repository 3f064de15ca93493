"""`init_distributed`: find out the launcher and the rank of this process, and join the process group.

torch reads `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`. Other launchers set other variables. If
they were ignored, every process would silently train alone. So an incomplete set of variables, or another
launcher's, raises an error that says what to write instead.

The doctor calls `find_place` on machines without torch, so this module imports torch inside functions.
"""

import argparse
import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

from zero_full.errors import LaunchError

log = logging.getLogger("zero_full")
LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # describe this process; an address alone does not
PORT = 29500  # the default of torch and DeepSpeed
HERE = "127.0.0.1"
REMEDY = "start with torchrun, or unset"
PATIENCE_S = 5.0  # seconds for destroying the groups of a process that ends by an exception


class Other(NamedTuple):
    """A launcher whose variables torch does not read."""

    name: str
    sizes: tuple[str, ...]  # variables, each with the number of processes it has started
    rank: str
    local_rank: str
    local_size: str = ""


OTHERS = (  # srun comes after Open MPI and MVAPICH, which Slurm may have started
    Other(
        "Open MPI's mpirun",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Other("MVAPICH's mpirun", ("MV2_COMM_WORLD_SIZE",), "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    Other("srun", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "SLURM_PROCID", "SLURM_LOCALID"),
    Other("MPICH's or Intel's mpirun", ("PMI_SIZE",), "PMI_RANK", "MPI_LOCALRANKID"),
)


class Place(NamedTuple):
    """Rank and world size of this process, and the environment variables that torch reads."""

    rank: int
    world_size: int
    by: str  # the launcher, or what else gave the rank
    variables: dict[str, str]


# The launcher ----------------------------------------------------------------------------------------


def find_place(
    environment: Mapping[str, str], discover: bool = True, port: int = PORT, address_needed: bool = True
) -> Place | None:
    """Return this process's place in the world. None if it runs alone; LaunchError if that is ambiguous.

    discover        also read Open MPI's variables, if they are sufficient
    port            the default of MASTER_PORT
    address_needed  MASTER_ADDR and MASTER_PORT must be set; False: the caller has an `init_method`
    """
    given = {name: environment[name] for name in (*LAUNCHER, "LOCAL_RANK") if environment.get(name)}
    needed = LAUNCHER if address_needed else LAUNCHER[:2]
    if all(name in given for name in needed):
        return Place(*_rank_of(given), "torchrun", given)
    if given.get("WORLD_SIZE") == "1" and {given.get(name, "0") for name in OWN if name != "WORLD_SIZE"} == {
        "0"
    }:
        return None
    if some := [name for name in OWN if name in given]:
        absent = [name for name in needed if name not in given]
        raise LaunchError(
            f"{' and '.join(some)} {'is' if len(some) == 1 else 'are'} set but {', '.join(absent)} "
            f"{'is' if len(absent) == 1 else 'are'} not, so every process would train alone: {REMEDY} "
            f"{', '.join(some)} to run one process"
        )
    for other in OTHERS:
        if (size := _size(other, environment)) > 1:
            return _from_other(other, size, environment, given, discover, port)
    return None


def _rank_of(given: Mapping[str, str]) -> tuple[int, int]:
    rank, world = given["RANK"], given["WORLD_SIZE"]
    if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
        raise LaunchError(
            f"RANK={rank} is not a rank of WORLD_SIZE={world}: {REMEDY} both to run one process"
        )
    return int(rank), int(world)


def _size(other: Other, environment: Mapping[str, str]) -> int:
    """Return how many processes this launcher has started; 0 if it has not started this one."""
    for name in other.sizes:
        # In a batch script, which is one process, Slurm sets the number of tasks that srun would start.
        if name == "SLURM_NTASKS" and not environment.get("SLURM_STEP_ID"):
            continue
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    return 0


def _from_other(
    other: Other,
    size: int,
    environment: Mapping[str, str],
    given: Mapping[str, str],
    discover: bool,
    port: int,
) -> Place:
    values = [environment.get(name, "") for name in (other.rank, other.local_rank, other.local_size)]
    address = given.get("MASTER_ADDR") or (HERE if values[2] == str(size) else None)
    readable = bool(other.local_size) and values[0].isdecimal() and values[1].isdecimal()
    if not (discover and readable and address):
        raise LaunchError(_what_to_write(other, size, environment, discover and readable))
    found = {"RANK": values[0], "WORLD_SIZE": str(size), "LOCAL_RANK": values[1]}
    found |= {"MASTER_ADDR": address, "MASTER_PORT": given.get("MASTER_PORT", str(port))}
    return Place(*_rank_of(found), other.name, found)


def _what_to_write(other: Other, size: int, environment: Mapping[str, str], only_address: bool) -> str:
    told = next(name for name in other.sizes if environment.get(name) == str(size))
    says = f"{told}={size}: {other.name} has started {size} processes"
    if only_address:
        return (
            f"{says} on several hosts, and MASTER_ADDR is not set: add -x MASTER_ADDR=<the first host> "
            f"-x MASTER_PORT={PORT} to mpirun, or start torchrun once a host"
        )
    sizes = " and ".join(name for name in other.sizes if environment.get(name))
    line = f"RANK=${other.rank} WORLD_SIZE=${told} LOCAL_RANK=${other.local_rank} "
    return (
        f"{says}, and torch does not read its variables, so each would train alone: start torchrun, once a "
        f"host, or the script by bash -c '{line}MASTER_ADDR=<first host> MASTER_PORT={PORT} python ...'. If "
        f"each is to train alone, unset {sizes}"
    )


# Joining ---------------------------------------------------------------------------------------------


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialize torch.distributed from the launcher's variables. Does nothing if it is initialized already.

    The arguments are DeepSpeed's, in its order. This reads torchrun's variables, and Open MPI's unless
    `auto_mpi_discovery` is false. `rank` and `world_size` may be passed instead, together with `init_method`
    or MASTER_ADDR and MASTER_PORT. `timeout` None is torch's default. `config` has no effect. A process that
    no launcher started stays alone.

    Each process gets a device: the current one if the script has set one, else number LOCAL_RANK. Without
    `dist_backend` torch chooses one for the devices, such as NCCL. If several ranks share a device, the
    backend is gloo, and shards are staged in host memory. "gloo" keeps everything on the CPU.

    The process group is not bound to the device (`device_id`). torch would then open NCCL's communicator of
    all ranks at once, used or not, and creating a later group would need all ranks, not only its members.

    The process group is destroyed at exit: one that is still open may abort the process.
    """
    import torch.distributed as dist

    if not isinstance(auto_mpi_discovery, bool):
        raise TypeError(
            f"init_distributed: auto_mpi_discovery, the second argument, is True or False and not "
            f"{auto_mpi_discovery!r}; give timeout and init_method by name"
        )
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise RuntimeError(
            "init_distributed: torch.distributed is not initialized, and dist_init_required is False: call "
            "torch.distributed.init_process_group first, or leave it out"
        )
    if config is not None:
        log.warning("init_distributed(config=...) has no effect: initialize reads the configuration")
    where = init_method or "env://"
    place = _told(rank, world_size, where) or find_place(
        os.environ, auto_mpi_discovery, distributed_port, where.startswith("env:")
    )
    if place is None and init_method is None:
        return
    if place is not None:
        _use(place, dist_backend, verbose)
        rank, world_size = place.rank, place.world_size
    _join(dist_backend, where, timeout, rank, world_size)
    from zero_full.comm.forked import only_here

    atexit.register(only_here(_leave))


def _told(rank: int, world_size: int, where: str) -> Place | None:
    """Return the place that the arguments of `init_distributed` give; None if they give no rank."""
    local = os.environ.get("LOCAL_RANK")
    variables = {"LOCAL_RANK": local} if local else {}
    if rank == world_size == -1:
        return Place(-1, -1, "init_method", variables) if "rank=" in where else None
    if not 0 <= rank < world_size:
        raise LaunchError(
            f"init_distributed: rank={rank} is not a rank of world_size={world_size}: give both"
        )
    absent = [name for name in LAUNCHER[2:] if not os.environ.get(name)]
    if where.startswith("env:") and absent:
        raise LaunchError(
            f"init_distributed: rank={rank} does not say where the others are: pass "
            f"init_method='tcp://<first host>:{PORT}', or set {' and '.join(absent)}"
        )
    return Place(rank, world_size, "the arguments of init_distributed", variables)


def _use(place: Place, backend: str | None, verbose: bool) -> None:
    """Set the variables that torch reads, and make this process's device the current one."""
    import torch

    os.environ.update(place.variables)
    if verbose and place.rank == 0:
        log.info("this is rank 0 of %d, according to %s", place.world_size, place.by)
    from zero_full.comm.devices import ON_CPU, own_accelerator

    if torch.accelerator.is_available() and backend not in ON_CPU:
        if problem := device_problem(place.variables.get("LOCAL_RANK")):
            raise LaunchError(problem)
        torch.accelerator.set_device_index(own_accelerator().index)


def device_problem(local_rank: str | None) -> str | None:
    """Return what is wrong with LOCAL_RANK; None if it is a number or not set."""
    if local_rank is None or local_rank.isdecimal():
        return None
    return f"LOCAL_RANK={local_rank} is not a number: {REMEDY} it to run one process"


def _join(backend: str | None, where: str, timeout: timedelta | None, rank: int, world_size: int) -> None:
    """Connect to the other ranks and initialize the process group."""
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    from zero_full._compat import keys_under
    from zero_full.comm.devices import ON_CPU
    from zero_full.comm.fresh_store import fresh_part

    patience = {} if timeout is None else {"timeout": timeout}
    store, rank, world_size = next(rendezvous(where, rank, world_size, **patience))
    if where.startswith("env:") and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = fresh_part(store, rank, world_size)
    if backend not in ON_CPU and torch.accelerator.is_available():
        backend = _backend_for_devices(store, rank, world_size, backend)
    store = keys_under("default_pg", store)
    dist.init_process_group(backend, timeout=timeout, rank=rank, world_size=world_size, store=store)
    # Wait until all ranks are connected. A rank that fails at once, by an error of its own, would make the
    # connections of others fail, and hide the reason.
    store = keys_under("zero_full/connected", store)
    if store.add("ranks", 1) == world_size:
        store.set("all", "")
    store.wait(["all"])


def _backend_for_devices(store: Any, rank: int, world_size: int, asked: str | None) -> str | None:
    """Return the backend for the ranks' devices. Every rank returns the same, or raises the same error."""
    import torch

    from zero_full._compat import keys_under
    from zero_full.comm.devices import own_accelerator, shared_among, told

    device = own_accelerator()
    by_host = f"cpu:gloo,{device.type}:gloo"
    shared = shared_among(keys_under("zero_full/devices", store), range(world_size), rank, device)
    if not shared or (asked is not None and f"{device.type}:gloo" in asked.split(",")):
        return asked
    if asked is not None:
        raise LaunchError(
            f"{told(shared)}, and {asked} wants one for each: leave dist_backend out, and their slices go "
            "through the host's memory; or start no more processes on a host than it has devices"
        )
    if not os.environ.get("LOCAL_RANK") and torch.accelerator.device_count() > 1:
        raise LaunchError(
            f"{told(shared)} of {torch.accelerator.device_count()} that they see, because nothing tells them "
            "apart: set LOCAL_RANK to each process's number on its host, or call "
            "torch.accelerator.set_device_index before"
        )
    if rank == 0:
        log.warning(
            "%s: slices go through the host's memory (gloo), because NCCL wants a device for each rank",
            told(shared),
        )
    return by_host


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        leaving = threading.Thread(target=_destroy, daemon=True)
        leaving.start()
        # Destroying may wait for collectives that never end, if this rank has raised in the middle of one.
        leaving.join(PATIENCE_S if hasattr(sys, "last_value") else None)
    # A gloo thread may still wait for the GIL, to free the last collective's tensors. A thread that waits for
    # the GIL while the interpreter shuts down is killed, which aborts the process. The sleep yields the GIL.
    time.sleep(0.05)


def _destroy() -> None:
    import torch.distributed as dist

    with suppress(RuntimeError):  # other ranks may have exited
        dist.destroy_process_group()


# The command line ------------------------------------------------------------------------------------


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the command-line arguments of DeepSpeed scripts to the parser, and return it."""
    group = parser.add_argument_group("zero_full")
    group.add_argument(
        "--deepspeed", action="store_true", help="accepted and ignored: there is no other mode"
    )
    group.add_argument("--deepspeed_config", metavar="FILE", help="the configuration, a JSON file")
    return parser
