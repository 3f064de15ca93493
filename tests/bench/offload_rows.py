"""The rows of the offload benchmark: who keeps the optimizer's state on the host or on a disk, and how."""

from collections.abc import Callable
from functools import partial

from tests.bench import peers
from tests.bench.peers import Row, Setup, Trainee
from tests.slow_copies import slow_copies

STAGES = (1, 2, 3)
BACKWARD = "forward+backward"
KEPT = "FSDP2 on host, parameters kept"  # from forward to backward, as at stages 1 and 2
RELEASED = "FSDP2 on host"
BANDWIDTHS = (0.5, 1.0, 2.0)  # GB/s, of a device that is not there
IN_MEMORY = 2**25  # elements: the default of `offload_optimizer.max_in_cpu`
STEPPED = 2  # the stage of the rows that are not about stages
INSIDE, HOST, DISK = "beside the parameters", "on the host", "on the disk"
HALF, DELAYED = "half of it on the host", "on the host, delayed steps"
PARAMETERS, DISK_PARAMETERS = "parameters on the host, too", "parameters on the disk, too"


def here(stage: int) -> str:
    """Ours without offload."""
    return f"zero_full {stage}"


def away(stage: int) -> str:
    """Ours with it."""
    return f"zero_full {stage} on host"


def theirs(stage: int) -> tuple[str, str]:
    """Who does the same at this stage."""
    return f"DeepSpeed {stage} on host", RELEASED if stage == 3 else KEPT


def of_peers() -> dict[str, Row]:
    """Every stage with and without, beside who does the same."""
    rows = {BACKWARD: Row(peers.forward_backward)}
    for stage in STAGES:
        rows[here(stage)] = Row(peers.zero_full(stage))
        rows[away(stage)] = Row(peers.zero_full(stage, offload={}), here(stage))
        rows[theirs(stage)[0]] = Row(peers.deepspeed(stage, on_host=True), here(stage))
    rows[KEPT] = Row(partial(peers.fsdp2, reshard=False, on_host=True), here(1))
    rows[RELEASED] = Row(partial(peers.fsdp2, on_host=True), here(3))
    return rows


def of_disk(directory: str, in_memory: int = IN_MEMORY) -> dict[str, Row]:
    """The same state in three places. `in_memory`: elements whose state does not wait on the disk."""
    on_disk = {"device": "nvme", "nvme_path": directory, "pin_memory": False, "max_in_cpu": in_memory}
    return {
        INSIDE: Row(peers.zero_full(STEPPED)),
        HOST: Row(peers.zero_full(STEPPED, offload={}), INSIDE),
        DISK: Row(peers.zero_full(STEPPED, offload=on_disk), INSIDE),
    }


def of_tiers(directory: str) -> dict[str, Row]:
    """State on every tier, stepped in every way, and parameters on both tiers that they have."""
    disk = {"device": "nvme", "nvme_path": directory}
    host_too, disk_too = {"device": "cpu"}, {**disk, "max_in_cpu": 0}
    return {
        INSIDE: Row(peers.zero_full(STEPPED)),
        HOST: Row(peers.zero_full(STEPPED, offload={}), INSIDE),
        HALF: Row(peers.zero_full(STEPPED, offload={"ratio": 0.5}), INSIDE),
        DELAYED: Row(peers.zero_full(STEPPED, offload={"delay_update_after": 0})),
        DISK: Row(peers.zero_full(STEPPED, offload=disk), INSIDE),
        PARAMETERS: Row(peers.zero_full(3, offload={}, offload_param=host_too), INSIDE),
        DISK_PARAMETERS: Row(peers.zero_full(3, offload=disk, offload_param=disk_too), INSIDE),
    }


def linked(bandwidth: float | None) -> str:
    """A row whose copies cross a link."""
    return "no limit" if bandwidth is None else f"{bandwidth:g} GB/s"


def of_links() -> dict[str, Row]:
    """Copies at each bandwidth."""
    first = linked(None)
    return {linked(bandwidth): Row(behind(bandwidth), first) for bandwidth in (None, *BANDWIDTHS)}


def behind(bandwidth: float | None) -> Callable[[Setup], Trainee]:
    """Ours on a device that is so far from the host. Its owner has the copies at its side."""

    def build(setup: Setup) -> Trainee:
        with slow_copies(None if bandwidth is None else bandwidth * 1e9) as copies:
            trainee = peers.zero_full(STEPPED, offload={})(setup)
        trainee.owner = (trainee.owner, copies)
        return trainee

    return build
