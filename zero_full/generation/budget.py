"""Compute the bytes of parameters that `engine.generation()` keeps gathered without `memory`.

Everything, if it fits into three quarters of the free memory: the rest is for keys and values of the cache,
and for activations. If it does not fit, units are gathered in each call beside those that are kept: memory
for the largest one in use and the next one is set aside. Free memory is what the device reports and the
allocator has cached. On a CPU it is the least of what host and control groups have left, shared by the ranks
there. Ranks exchange these numbers and choose the least, so that all of them keep the same units.
"""

import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch

from zero_full.comm.communicator import Communicator
from zero_full.offload import memory_limits
from zero_full.shard.group.parameter_group import ParameterGroup
from zero_full.shard.group.process_groups import Communicators

KEPT_FREE = 4  # a quarter of the free memory


def whole_bytes(groups: Sequence[ParameterGroup]) -> int:
    """Return the bytes of these groups' whole parameters."""
    return sum(group.parameters.full.nbytes for group in groups)


def budget(communicators: Communicators, gathered: Sequence[ParameterGroup]) -> int:
    """Return the bytes to keep of these groups, equal on all ranks. Every rank must call this."""
    free = _least(communicators.everyone, list(_free(communicators.device)))
    wanted, room = whole_bytes(gathered), free - free // KEPT_FREE
    if wanted <= room:
        return wanted
    return max(0, room - 2 * max(group.parameters.full.nbytes for group in gathered))


def _free(device: torch.device) -> Iterator[tuple[str, int]]:
    """Yield the free bytes of each limit on this rank's memory, with a name that ranks under it share."""
    host = socket.gethostname()
    if device.type == "cpu":
        yield from ((limit.shared_by, limit.free) for limit in memory_limits(host))
    else:
        with suppress(RuntimeError):  # not every kind of device reports its memory
            free, _ = torch.accelerator.get_memory_info(device)
            cached = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
            yield f"{host} {device}", free + cached


def _least(everyone: Sequence[Communicator], mine: list[tuple[str, int]]) -> int:
    """Return the smallest share of free memory that any limit leaves to a rank, over all ranks."""
    limits = [mine]
    for communicator in everyone:
        limits = [one for each in communicator.gather_objects(limits, "free memory") for one in each]
    sharing = Counter(name for each in limits for name, _ in each)
    return min((free // sharing[name] for each in limits for name, free in each), default=2**63)
