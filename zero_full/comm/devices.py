"""Which device is this process's, and which ranks use the same one.

NCCL refuses two ranks on one device, so ranks ask before it is used. Launchers count differently (torchrun
lets each process see all devices of its host, Slurm's --gpus-per-task=1 shows each its own as number 0), so
what ranks compare is the device itself, by the identity that its driver gives it.
"""

import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

ON_CPU = ("gloo", "cpu:gloo", "mpi", "ucc")  # who asks for one of these backends wants to stay there
LISTED = 8  # ranks in a message


def own_accelerator() -> torch.device:
    """The accelerator of this process: the current one; if that is the first, LOCAL_RANK may name another.

    Where there are fewer devices than processes they take turns.
    """
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    index, local = torch.accelerator.current_device_index(), os.environ.get("LOCAL_RANK", "")
    if index == 0 and local.isdecimal():  # nobody has chosen
        index = int(local) % torch.accelerator.device_count()
    return torch.device(kind.type, index)


def identity_of(device: torch.device) -> str:
    """The same text in every process that uses this device, and in no other."""
    ask: Any = getattr(torch.get_device_module(device), "get_device_properties", None)
    uuid = None if ask is None else getattr(ask(device), "uuid", None)
    return str(uuid) if uuid is not None else f"{device} of {_host()}"


def _host() -> str:
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{platform.node()} {boot}".strip()


def shared_among(
    store: Any, ranks: Sequence[int], rank: int, device: torch.device
) -> Mapping[str, list[int]]:
    """The ranks that have the same device, by device, where there are several. Every rank must call this.

    It speaks through the store that ranks have met in, since no backend can be asked yet.
    """
    store.set(str(rank), identity_of(device))
    users: dict[str, list[int]] = {}
    for each, identity in zip(ranks, store.multi_get([str(each) for each in ranks]), strict=True):
        users.setdefault(identity.decode(), []).append(each)
    return {identity: sharing for identity, sharing in users.items() if len(sharing) > 1}


def told(shared: Mapping[str, list[int]]) -> str:
    """In words, the first device that is shared, and by whom."""
    identity, ranks = next(iter(shared.items()))
    more = f" and {len(ranks) - LISTED} more" if len(ranks) > LISTED else ""
    return f"ranks {', '.join(map(str, ranks[:LISTED]))}{more} have one device ({identity})"
