"""`init_distributed`: read the launcher's variables, and initialize the process group.

torch reads `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`. Other launchers set other variables. If
they were ignored, every process would silently train alone. So an incomplete set of variables, or another
launcher's, raises an error that says what to write instead.

`python -m zero_full doctor` calls `read_launcher` on machines without torch. So this module imports torch
inside functions.
"""

import argparse
import atexit
import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

from zero_full.errors import LaunchError

log = logging.getLogger("zero_full")
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # that torch reads
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # an address alone does not request several ranks
PORT = 29500  # the default of torch and DeepSpeed
LOCALHOST = "127.0.0.1"
TEARDOWN_S = 5.0  # seconds for destroying the process groups of a process that ends by an exception


class ForeignLauncher(NamedTuple):
    """A launcher with variables that torch does not read."""

    name: str
    sizes: tuple[str, ...]  # variables that may hold the number of processes
    rank: str
    local_rank: str
    local_size: str = ""


FOREIGN_LAUNCHERS = (  # srun comes after Open MPI and MVAPICH, which Slurm may have started
    ForeignLauncher(
        "Open MPI's mpirun",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ForeignLauncher(
        "MVAPICH's mpirun", ("MV2_COMM_WORLD_SIZE",), "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK"
    ),
    ForeignLauncher("srun", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "SLURM_PROCID", "SLURM_LOCALID"),
    ForeignLauncher("MPICH's or Intel's mpirun", ("PMI_SIZE",), "PMI_RANK", "MPI_LOCALRANKID"),
)


class LaunchedRank(NamedTuple):
    """Rank and world size of this process, and the environment variables that torch reads."""

    rank: int
    world_size: int
    source: str  # the launcher, or the arguments
    variables: dict[str, str]


# The launcher ----------------------------------------------------------------------------------------


def read_launcher(
    environment: Mapping[str, str], discover: bool = True, port: int = PORT, address_needed: bool = True
) -> LaunchedRank | None:
    """Return this process's rank. None if it runs alone; LaunchError if the variables are ambiguous.

    discover        also read Open MPI's variables, if they give a rank and an address
    port            the default of MASTER_PORT
    address_needed  MASTER_ADDR and MASTER_PORT must be set; False: the caller has an `init_method`
    """
    given = {name: environment[name] for name in (*VARIABLES, "LOCAL_RANK") if environment.get(name)}
    needed = VARIABLES if address_needed else VARIABLES[:2]
    if all(name in given for name in needed):
        return LaunchedRank(*_parse_rank(given), "torchrun", given)
    if given.get("WORLD_SIZE") == "1" and given.get("RANK", "0") == given.get("LOCAL_RANK", "0") == "0":
        return None
    if some := [name for name in RANK_VARIABLES if name in given]:
        absent = [name for name in needed if name not in given]
        raise LaunchError(
            f"set: {', '.join(some)}; not set: {', '.join(absent)}. torch needs all of them; without them "
            "every process would train alone. "
            f"Start with torchrun, or unset {', '.join(some)} to run one process"
        )
    for launcher in FOREIGN_LAUNCHERS:
        if (size := _processes_of(launcher, environment)) > 1:
            return _from_foreign(launcher, size, environment, given, discover, port)
    return None


def spans_hosts(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun or Open MPI has started ranks on several hosts. Equal on all ranks."""
    world, here = (environment.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return world.isdecimal() and here.isdecimal() and int(world) > int(here)


def _parse_rank(given: Mapping[str, str]) -> tuple[int, int]:
    rank, world = given["RANK"], given["WORLD_SIZE"]
    if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
        raise LaunchError(
            f"RANK={rank} is not a rank of WORLD_SIZE={world}. Start with torchrun, or unset both to run one "
            "process"
        )
    return int(rank), int(world)


def _processes_of(launcher: ForeignLauncher, environment: Mapping[str, str]) -> int:
    """Return how many processes this launcher has started; 0 if it did not start this one."""
    for name in launcher.sizes:
        # In a batch script, which is one process, Slurm sets the number of tasks that srun would start.
        if name == "SLURM_NTASKS" and not environment.get("SLURM_STEP_ID"):
            continue
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    return 0


def _from_foreign(
    launcher: ForeignLauncher,
    size: int,
    environment: Mapping[str, str],
    given: Mapping[str, str],
    discover: bool,
    port: int,
) -> LaunchedRank:
    """Return the rank that another launcher has set; LaunchError if it cannot be used."""
    names = (launcher.rank, launcher.local_rank, launcher.local_size)
    rank, local_rank, local_size = (environment.get(name, "") for name in names)
    address = given.get("MASTER_ADDR") or (LOCALHOST if local_size == str(size) else None)
    has_rank = discover and bool(launcher.local_size) and rank.isdecimal() and local_rank.isdecimal()
    if has_rank and address:
        found = {"RANK": rank, "WORLD_SIZE": str(size), "LOCAL_RANK": local_rank}
        found["LOCAL_WORLD_SIZE"] = local_size
        found |= {"MASTER_ADDR": address, "MASTER_PORT": given.get("MASTER_PORT", str(port))}
        return LaunchedRank(*_parse_rank(found), launcher.name, found)
    variable = next(name for name in launcher.sizes if environment.get(name) == str(size))
    started = f"{variable}={size}: {launcher.name} has started {size} processes"
    if has_rank:
        raise LaunchError(
            f"{started} on several hosts, and MASTER_ADDR is not set. Add -x MASTER_ADDR=<first host> "
            f"-x MASTER_PORT={PORT} to mpirun, or start torchrun on each host"
        )
    sizes = " and ".join(name for name in launcher.sizes if environment.get(name))
    line = f"RANK=${launcher.rank} WORLD_SIZE=${variable} LOCAL_RANK=${launcher.local_rank} "
    raise LaunchError(
        f"{started}, but torch does not read its variables, so every process would train alone. Start "
        f"torchrun on each host, or start the script by bash -c '{line}MASTER_ADDR=<first host> "
        f"MASTER_PORT={PORT} python ...'. To run independent processes, unset {sizes}"
    )


# The process group -----------------------------------------------------------------------------------


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
            f"init_distributed: auto_mpi_discovery, the second argument, must be True or False, not "
            f"{auto_mpi_discovery!r}. Pass timeout and init_method by name"
        )
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise RuntimeError(
            "init_distributed: torch.distributed is not initialized, and dist_init_required is False. Call "
            "torch.distributed.init_process_group first, or omit the argument"
        )
    if config is not None:
        log.warning("init_distributed: config has no effect. Pass it to initialize")
    method = init_method or "env://"
    launched = _from_arguments(rank, world_size, method) or read_launcher(
        os.environ, auto_mpi_discovery, distributed_port, method.startswith("env:")
    )
    if launched is None and init_method is None:
        return
    if launched is not None:
        _set_up_process(launched, dist_backend, verbose)
        rank, world_size = launched.rank, launched.world_size
    _connect(dist_backend, method, timeout, rank, world_size)
    from zero_full.comm.fork_safety import in_this_process_only

    atexit.register(in_this_process_only(_tear_down))


def _from_arguments(rank: int, world_size: int, method: str) -> LaunchedRank | None:
    """Return the rank that the arguments of `init_distributed` give, if any."""
    local = os.environ.get("LOCAL_RANK")
    variables = {"LOCAL_RANK": local} if local else {}
    if rank == world_size == -1:
        return LaunchedRank(-1, -1, "init_method", variables) if "rank=" in method else None
    if not 0 <= rank < world_size:
        raise LaunchError(
            f"init_distributed: rank={rank} is not a rank of world_size={world_size}. Pass both"
        )
    absent = [name for name in VARIABLES[2:] if not os.environ.get(name)]
    if method.startswith("env:") and absent:
        raise LaunchError(
            f"init_distributed: rank={rank} needs the address of rank 0. Pass "
            f"init_method='tcp://<first host>:{PORT}', or set {' and '.join(absent)}"
        )
    return LaunchedRank(rank, world_size, "the arguments of init_distributed", variables)


def _set_up_process(launched: LaunchedRank, backend: str | None, verbose: bool) -> None:
    """Set the variables that torch reads, and make this process's device the current one."""
    import torch

    os.environ.update(launched.variables)
    if verbose and launched.rank == 0:
        log.info("rank 0 of %d, set by %s", launched.world_size, launched.source)
    from zero_full.comm.devices import ON_CPU, own_accelerator

    if torch.accelerator.is_available() and backend not in ON_CPU:
        if problem := local_rank_problem(launched.variables.get("LOCAL_RANK")):
            raise LaunchError(problem)
        torch.accelerator.set_device_index(own_accelerator().index)


def local_rank_problem(local_rank: str | None) -> str | None:
    """Return the error in LOCAL_RANK; None if it is a number or not set."""
    if local_rank is None or local_rank.isdecimal():
        return None
    return f"LOCAL_RANK={local_rank} is not a number. Start with torchrun, or unset it to run one process"


def _connect(backend: str | None, method: str, timeout: timedelta | None, rank: int, world_size: int) -> None:
    """Connect to the other ranks and initialize the process group."""
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    from zero_full._compat import prefix_store
    from zero_full.comm.devices import ON_CPU
    from zero_full.comm.stores import fresh_prefix

    options = {} if timeout is None else {"timeout": timeout}
    store, rank, world_size = next(rendezvous(method, rank, world_size, **options))
    if method.startswith("env:") and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = fresh_prefix(store, rank, world_size)
    if backend not in ON_CPU and torch.accelerator.is_available():
        backend = _backend_for_devices(store, rank, world_size, backend)
    store = prefix_store("default_pg", store)
    dist.init_process_group(backend, timeout=timeout, rank=rank, world_size=world_size, store=store)
    # Wait until all ranks are connected. A rank that fails right after would break the connections of the
    # others, whose errors would hide the reason.
    store = prefix_store("zero_full/connected", store)
    if store.add("ranks", 1) == world_size:
        store.set("all", "")
    store.wait(["all"])


def _backend_for_devices(store: Any, rank: int, world_size: int, requested: str | None) -> str | None:
    """Return the backend for the ranks' devices. Every rank returns the same, or raises the same error."""
    import torch

    from zero_full._compat import prefix_store
    from zero_full.comm.devices import describe_shared, own_accelerator, shared_devices

    device = own_accelerator()
    shared = shared_devices(prefix_store("zero_full/devices", store), range(world_size), rank, device)
    if not shared or (requested is not None and f"{device.type}:gloo" in requested.split(",")):
        return requested
    if requested is not None:
        raise LaunchError(
            f"{describe_shared(shared)}, but {requested} needs a device for each rank. Omit dist_backend, so "
            "that shards are staged in host memory, or start no more processes on a host than it has devices"
        )
    if not os.environ.get("LOCAL_RANK") and torch.accelerator.device_count() > 1:
        raise LaunchError(
            f"{describe_shared(shared)}, though {torch.accelerator.device_count()} devices are visible, "
            "because LOCAL_RANK is not set. Set it to each process's rank on its host, or call "
            "torch.accelerator.set_device_index first"
        )
    if rank == 0:
        log.warning(
            "%s, but NCCL needs a device for each rank: shards are staged in host memory (gloo)",
            describe_shared(shared),
        )
    return f"cpu:gloo,{device.type}:gloo"


def _tear_down() -> None:
    """Destroy the process group at exit, with a time limit after an uncaught exception."""
    import torch.distributed as dist

    from zero_full.threads import make_thread

    if dist.is_initialized():
        destroying = make_thread(_destroy, "zero_full-destroy", daemon=True)
        destroying.start()
        # Destroying may wait for collectives that never end, if this rank has raised in the middle of one.
        failed = hasattr(sys, "last_value")  # set by an uncaught exception
        destroying.join(TEARDOWN_S if failed else None)
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
    group.add_argument("--deepspeed", action="store_true", help="accepted and ignored")
    group.add_argument("--deepspeed_config", metavar="FILE", help="the configuration, a JSON file")
    return parser
