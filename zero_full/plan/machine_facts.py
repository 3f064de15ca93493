"""Facts about this machine and this process on which the measured rates of a machine file depend."""

import os
import platform
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zero_full._compat import matrix_instructions
from zero_full.cpus import usable_cpus
from zero_full.kernels.load import compiled_for

CPU_INFO = Path("/proc/cpuinfo")


def machine_facts(device: str, ranks: int) -> dict[str, Any]:
    """Return the facts of a run of `ranks` ranks on this machine, by the names of `MachineRates`."""
    return {
        "device": device,
        "ranks": ranks,
        "threads": threads_of_a_rank(ranks),
        "torch": torch.__version__,
        "cpu": cpu_name(),
        "cpus": usable_cpus(),
        "instructions": instructions(),
        "operators": "compiled" if compiled_for(torch.device("cpu")) else "reference",
    }


def threads_of_a_rank(ranks: int) -> int:
    """Return the intra-op threads of each rank: those of this process if it is a rank, else torchrun's.

    torchrun gives each of several ranks one thread, unless OMP_NUM_THREADS is set.
    """
    has_group = dist.is_initialized() and dist.get_backend() != "fake"  # which `plan --tensor` makes
    is_a_rank = ranks == 1 or "RANK" in os.environ or has_group
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if is_a_rank:
        return torch.get_num_threads()
    return int(first) if first.isdigit() else 1


def cpu_name() -> str:
    """Return the processor's name."""
    for line in CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def instructions() -> str:
    """Return the vector instructions that torch uses, and those for matrices of 16 bits."""
    return " ".join([torch.backends.cpu.get_cpu_capability(), *matrix_instructions()])
