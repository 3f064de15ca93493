"""Limits on the host's memory: read from system files, shared as ranks share them, told in one sentence."""

from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import zero_full
from tests.slow_copies import slow_copies
from tests.worlds import POOL
from tests.zero_full.planned import BF16, NVME
from tests.zero_full.runs import Net, config, data
from tests.zero_full.test_host_memory import HOST, PAGE
from tests.zero_full.test_offload_param import host_apart
from zero_full import assemble
from zero_full.offload import Need, memory_limits, shortage_message
from zero_full.offload.limits import Limit
from zero_full.offload.nvme_params import NvmeParamStore
from zero_full.offload.spill_file import SpillFile, whole_pages
from zero_min.ledger import held

GIB = 2**30


def tree(root: Path, files: dict[str, str]) -> Path:
    """These files below a folder."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable:   50331648 kB\n"}  # 48 GiB
CGROUP_V2 = {
    "proc/self/cgroup": "0::/job/task\n",
    "sys/fs/cgroup/job/memory.max": f"{64 * GIB}\n",
    "sys/fs/cgroup/job/memory.current": f"{40 * GIB}\n",
    "sys/fs/cgroup/job/memory.stat": f"anon 5\ninactive_file {6 * GIB}\nactive_file {3 * GIB}\n",
    "sys/fs/cgroup/job/task/memory.max": "max\n",
    "sys/fs/cgroup/job/task/memory.current": "1\n",
}
CGROUP_V1 = {  # in a container: its own group is the outermost that it sees
    "proc/self/cgroup": "7:cpu:/docker/a\n4:hugetlb,memory:/docker/a\n0::/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{32 * GIB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{12 * GIB}\n",
    "sys/fs/cgroup/memory/memory.stat": f"cache 1\ntotal_inactive_file {2 * GIB}\n",
}
ULIMIT = {
    "proc/self/limits": f"Limit  Soft Limit  Hard Limit  Units\nMax address space  {9 * GIB}  x  bytes\n",
    "proc/self/statm": f"{GIB // PAGE} 5 5\n",
}
NONE = {"proc/self/limits": "Max address space         unlimited            unlimited            bytes\n"}
TREES: list[tuple[dict[str, str], list[int]]] = [
    ({}, []),
    (MEMINFO, [48]),
    (MEMINFO | NONE, [48]),
    (MEMINFO | CGROUP_V2, [48, 33]),
    (CGROUP_V1, [22]),
    (MEMINFO | CGROUP_V2 | ULIMIT, [48, 33, 8]),
]


@pytest.mark.parametrize(("files", "free"), TREES, ids=range(len(TREES)))
def test_limits_are_what_the_system_says(files: dict[str, str], free: list[int], tmp_path: Path) -> None:
    found = list(memory_limits("me", tree(tmp_path, files)))
    assert [limit.free // GIB for limit in found] == free
    assert len({limit.shared_by for limit in found}) == len(found)


def test_a_machine_has_some_memory_free() -> None:
    assert any(limit.free > 0 for limit in memory_limits("me"))


def under(*limits: tuple[str, str, int]) -> tuple[Limit, ...]:
    return tuple(Limit(name, shared_by, free * GIB, f"lift {name}") for name, shared_by, free in limits)


def test_ranks_share_what_their_host_has_and_not_another_ones() -> None:
    one, two = under(("A", "one", 10)), under(("A", "two", 10))
    needs = {rank: Need(5 * GIB, one if rank < 2 else two) for rank in range(4)}
    assert shortage_message(needs) is None
    needs[1] = Need(5 * GIB + 1, one)
    told = shortage_message(needs)
    assert (
        told is not None and "needs 10.0 GiB (2 ranks, up to 5.0 GiB each), but 10.0 GiB are free (A)" in told
    )
    assert "offload_optimizer" in told and told.endswith("or lift A.")


def test_a_limit_of_its_own_stops_one_rank() -> None:
    shared = ("A", "host", 100)
    needs = {0: Need(GIB, under(shared, ("B", "0", 2))), 1: Need(3 * GIB, under(shared, ("B", "1", 2)))}
    told = shortage_message(needs)
    assert told is not None and "needs 3.0 GiB, but 2.0 GiB are free (B)" in told
    assert shortage_message({0: Need(3 * GIB, ())}) is None


def test_the_numbers_of_a_control_group_are_told(tmp_path: Path) -> None:
    limits = tuple(memory_limits("me", tree(tmp_path, CGROUP_V2)))
    told = shortage_message(dict.fromkeys(range(8), Need(5 * GIB, limits)))
    assert told is not None
    assert "needs 40.0 GiB (8 ranks, up to 5.0 GiB each), but 33.0 GiB are free" in told
    assert "(control group /job: limit 64.0 GiB, in use 31.0 GiB)" in told


def start_on_a_small_host(comm: Any, small: int) -> str:
    """What every rank hears, of which one sees less memory than the others."""
    free = 3000 if comm.rank == small else 2**40
    limits = (Limit("A", "host", free, "lift A"),)
    with mock.patch.object(assemble, "memory_limits", lambda host: limits):
        try:
            zero_full.initialize(model=Net(), config=config(2, zero_optimization=HOST))
        except MemoryError as error:
            return str(error)
    return ""


def test_ranks_refuse_together_and_go_on_afterwards() -> None:
    told = POOL.run(start_on_a_small_host, 2, 1)
    assert len(set(told)) == 1 and "but 0.0 MiB are free (A)" in told[0]
    assert POOL.run(start_on_a_small_host, 2, 5) == ["", ""]


# What is compared --------------------------------------------------------------------------------

PLACES: dict[str, dict[str, Any]] = {  # by what waits where
    "state on the host": {"offload_optimizer": {"device": "cpu"}},
    "updates that are late": {"offload_optimizer": {"device": "cpu", "delay_update_after": 0}},
    "parameters on the host": {"offload_param": {"device": "cpu", "pin_memory": False}},
    "parameters in a file": {"offload_param": {**NVME, "max_in_cpu": 0}},
    "parameters partly in a file": {"offload_param": {**NVME, "max_in_cpu": 200}},
    "state in a file": {"offload_optimizer": NVME},
    "all in files": {"offload_optimizer": NVME, "offload_param": {**NVME, "max_in_cpu": 0}},
}


def seen(comm: Any, place: str, keys: dict[str, Any]) -> tuple[Any, int, int, int]:
    """What was foreseen; bytes of files at the most, of the parameters' file, and on the host after steps."""
    zero = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 150, **PLACES[place]}
    given = config(3, zero_optimization=zero, **keys)
    foreseen: list[Any] = []
    now, most = 0, 0

    def note(base: Any, dealer: Any, drafts: Any, device: torch.device) -> Any:
        foreseen.append(known(base, dealer, drafts, torch.device("cuda")))
        return foreseen[-1]

    def taken(file: SpillFile, size: int) -> int:
        nonlocal now, most
        now += max(whole_pages(size), PAGE)
        most = max(most, now)
        return take(file, size)

    def returned(file: SpillFile, begin: int, size: int) -> None:
        nonlocal now
        now -= whole_pages(size)
        give_back(file, begin, size)

    known, take, give_back = assemble.host_memory, SpillFile.take, SpillFile.give_back
    with (
        slow_copies(1e9),
        host_apart(),
        mock.patch.object(assemble, "host_memory", note),
        mock.patch.object(SpillFile, "take", taken),
        mock.patch.object(SpillFile, "give_back", returned),
    ):
        engine, optimizer, _, _ = zero_full.initialize(model=Net(), config=given)
        in_file = (
            optimizer.sharded.param_store.file.size
            if isinstance(optimizer.sharded.param_store, NvmeParamStore)
            else 0
        )
        dtype = next(p.dtype for flat in optimizer.sharded.flats for p in [flat.shard])
        for step in range(4):
            engine.backward(engine(data(step, 0, comm.rank, dtype)))
            engine.step()
        optimizer.finish_update()
        host = optimizer.holdings().get("host", [])
        engine.destroy()
    return foreseen[0], most, in_file, held(host)


SEEN = list(product(PLACES, ("fp32", "bf16")))  # every place in one of them, and slowly in the other


@pytest.mark.parametrize(
    ("place", "precision"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] if number % 4 in (1, 2) else [])
        for number, case in enumerate(SEEN)
    ],
)
def test_what_is_compared_is_what_a_run_takes(place: str, precision: str) -> None:
    for memory, in_files, parameters, host in POOL.run(seen, 2, place, BF16 if precision == "bf16" else {}):
        assert memory.state_in_file + memory.parameters_in_file == in_files
        assert memory.parameters_in_file == parameters and memory.knows_state
        if not in_files:
            assert memory.total >= host > 0
        if place == "state on the host":
            assert memory.total == host


class Own(torch.optim.Optimizer):
    """Of a user's own class; it keeps something for each element."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Down the slope."""
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["mean"] = self.state[p].get("mean", 0) + p.grad
                p.sub_(self.state[p]["mean"], alpha=group["lr"])


def test_what_cannot_be_counted_is_said(caplog: pytest.LogCaptureFixture) -> None:
    for place, own in product(("state on the host", "state in a file"), (True, False)):
        model = Net()
        keys = config(2, zero_optimization={"stage": 2, **PLACES[place]})
        del keys["optimizer"]
        base = Own(model.parameters()) if own else torch.optim.SGD(model.parameters(), lr=0.1)
        caplog.clear()
        engine, *_ = zero_full.initialize(model=model, optimizer=base, config=keys)
        engine.destroy()
        assert caplog.text.count("the size of Own's state is not known") == own
