"""Device selection: the accelerator of this process, and which ranks share one.

NCCL fails with two ranks on one device, so ranks compare devices before they use it. They compare by the
identity that the driver reports, since launchers number devices differently: torchrun lets each process see
all devices of its host, and Slurm's --gpus-per-task=1 shows each process its own as number 0.
"""

import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from zero_full.formatting import listed

ON_CPU = ("gloo", "cpu:gloo", "mpi", "ucc")  # backends that select the CPU


def own_accelerator() -> torch.device:
    """Return this process's accelerator: the current one, or by LOCAL_RANK if the current one is number 0.

    With fewer devices than processes, several processes share one.
    """
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    index, local = torch.accelerator.current_device_index(), os.environ.get("LOCAL_RANK", "")
    if index == 0 and local.isdecimal():  # the default: the user's script has not set a device
        index = int(local) % torch.accelerator.device_count()
    return torch.device(kind.type, index)


def identity_of(device: torch.device) -> str:
    """Return a device's identity: equal in all processes that use it, and different for any other device."""
    properties: Any = getattr(torch.get_device_module(device), "get_device_properties", None)
    uuid = None if properties is None else getattr(properties(device), "uuid", None)
    if uuid is not None:
        return str(uuid)
    boot = ""  # the boot's identity, because two hosts may have equal names
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{device} of {platform.node()} {boot}".strip()


def shared_devices(
    store: Any, ranks: Sequence[int], rank: int, device: torch.device
) -> Mapping[str, list[int]]:
    """Return the ranks that share a device, by the device's identity. Every rank must call this.

    It uses the store, since a backend cannot be used yet.
    """
    store.set(str(rank), identity_of(device))
    users: dict[str, list[int]] = {}
    for each, identity in zip(ranks, store.multi_get([str(each) for each in ranks]), strict=True):
        users.setdefault(identity.decode(), []).append(each)
    return {identity: sharing for identity, sharing in users.items() if len(sharing) > 1}


def describe_shared(shared: Mapping[str, list[int]]) -> str:
    """Return the text of an error: the first shared device and its ranks."""
    identity, ranks = next(iter(shared.items()))
    return f"ranks {listed(list(map(str, ranks)))} share one device ({identity})"
