"""Runs to be planned and to be measured: one list of cases, and what real ranks find in them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

import zero_full
from tests.pairwise import pairwise
from tests.worlds import POOL
from tests.zero_full.runs import WIDTH, config
from tests.zero_full.test_experts import topology_of
from zero_full.comm.shared_memory import SharedMemory
from zero_full.offload.nvme_params import Buffer, NvmeParamStore
from zero_full.offload.nvme_state import OpenNvmeTier
from zero_min.ledger import held


class Odd(nn.Module):
    """Sizes that no world divides, a frozen layer, a buffer and a layer of another type."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 13)
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.last = nn.Linear(13, 3)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.register_buffer("offsets", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        y = self.last(self.frozen(self.first(x.to(self.first.weight.dtype)).tanh()).tanh())
        return (y * self.scale).float().square().mean()


class WithExperts(Odd):
    """The same, the last layer of which is an expert."""

    def __init__(self) -> None:
        super().__init__()
        for p in self.last.parameters():
            p.allreduce = False  # type: ignore[attr-defined]


BF16 = {"bf16": {"enabled": True}}
STAGES = [0, 1, 2, 3]
SMALL = {"stage3_param_persistence_threshold": 20}  # elements: biases stay whole
AGAIN = {"gradient_accumulation_steps": 2}
Keys = dict[str, Any]
PRECISIONS: dict[str, Keys] = {
    "bf16": BF16,
    "fp32": {},
    "bf16 added up in bf16": {**BF16, "data_types": {"grad_accum_dtype": "bf16"}},
    "fp16": {"fp16": {"enabled": True}},
    "fp32 added up in fp16": {"data_types": {"grad_accum_dtype": "fp16"}},
    "no master": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "nothing but bf16": {
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    },
}


NVME = {"device": "nvme", "nvme_path": gettempdir()}  # the file there has no name


def zero(**keys: Any) -> Keys:
    return {"zero_optimization": keys}


def in_a_file(place: Keys | None = None, **keys: Any) -> Keys:
    return zero(offload_param={**NVME, "max_in_cpu": 0, **(place or {})}, **keys)


def optimizer(type: str, **params: Any) -> Keys:
    return {"optimizer": {"type": type, "params": {"lr": 0.1, **params}}}


OPTIONS: dict[str, Keys] = {  # for two ranks
    "2 micro-batches": AGAIN,
    "5 micro-batches": {"gradient_accumulation_steps": 5},
    "overlap": {**zero(overlap_comm=True), **AGAIN},
    "no overlap": zero(overlap_comm=False),
    "round robin": zero(round_robin_gradients=True),
    "all-reduce": zero(reduce_scatter=False),
    "no copy on arrival": {**zero(contiguous_gradients=False), **AGAIN},
    "one bucket": zero(reduce_bucket_size=10_000),
    "travel in fp32": {"communication_data_type": "fp32", **AGAIN},
    "travel in bf16": {"communication_data_type": "bf16"},
    "clipping": {"gradient_clipping": 1.0},
    "predivided": {"gradient_predivide_factor": 2.0},
    "sums": {"prescale_gradients": True, "gradient_allreduce_op": "sum"},
    "buffers in bf16": {"data_types": {"buffer_dtype": "bf16"}},
    "nothing stays": {**zero(stage3_max_reuse_distance=0), **AGAIN},
    "little may be live": zero(stage3_max_live_parameters=300),
    "no prefetch": zero(stage3_prefetch_bucket_size=0),
    "small steps": zero(sub_group_size=50),
    "all in units": zero(stage3_param_persistence_threshold=0),
    "none in units": zero(stage3_param_persistence_threshold=1000),
    "SGD": optimizer("SGD"),
    "momentum": optimizer("SGD", momentum=0.9),
    "Lion": optimizer("Lion"),
    "LAMB": optimizer("Lamb"),
    "Muon": {**optimizer("Muon"), **AGAIN},
    "Muon in rounds": {**optimizer("Muon"), **zero(overlap_comm=True)},
    "Muon, state on the host": {**zero(offload_optimizer={"device": "cpu"}), **optimizer("Muon")},
    "Muon, small steps": {**optimizer("Muon"), **zero(sub_group_size=50)},
    "half on the host": {**zero(offload_optimizer={"device": "cpu", "ratio": 0.5}), **AGAIN},
    "half on the host, Muon": {
        **zero(offload_optimizer={"device": "cpu", "ratio": 0.4}, sub_group_size=50),
        **optimizer("Muon"),
    },
    "state on the host, updated late": zero(offload_optimizer={"device": "cpu", "delay_update_after": 0}),
    "state on the host": zero(offload_optimizer={"device": "cpu"}),
    "state on the host, LAMB": {**zero(offload_optimizer={"device": "cpu"}), **optimizer("Lamb"), **AGAIN},
    "amsgrad": optimizer("Adam", amsgrad=True),
    "state on a disk": {**zero(offload_optimizer=NVME), **AGAIN},
    "state on a disk, small steps": zero(
        offload_optimizer={**NVME, "max_in_cpu": 0}, sub_group_size=50, reduce_bucket_size=50
    ),
    "parameters in a file": in_a_file(),
    "parameters in a file, 5 micro-batches": {
        **in_a_file(stage3_max_reuse_distance=0),
        "gradient_accumulation_steps": 5,
    },
    "parameters in a file, small steps": in_a_file(sub_group_size=50),
    "parameters in a file, few buffers": in_a_file({"buffer_count": 1, "buffer_size": 1}),
    "parameters partly in a file": in_a_file({"max_in_cpu": 100}),
    "parameters and state in files": {**in_a_file(offload_optimizer=NVME), **AGAIN},
    "parameters in a file, state on the host": in_a_file(offload_optimizer={"device": "cpu"}),
    "parameters in a file, SGD": {**in_a_file(), **optimizer("SGD")},
}
FOR_FOUR: dict[str, Keys] = {
    "4 ranks": AGAIN,
    "MiCS": zero(mics_shard_size=2),
    "MiCS, fp32": {**zero(mics_shard_size=2), **AGAIN, "communication_data_type": "fp32"},
    "no shards": zero(mics_shard_size=1),
    "MiCS, Muon": {**zero(mics_shard_size=2), **optimizer("Muon")},
    "4 ranks, Muon": optimizer("Muon"),
    "node copies": zero(zero_hpz_partition_size=2),
    "node copies, released": {
        **zero(zero_hpz_partition_size=2, stage3_max_reuse_distance=0),
        "gradient_accumulation_steps": 4,
    },
    "quantized weights": zero(zero_quantized_weights=True),
    "quantized gradients": zero(zero_quantized_gradients=True),
    "ZeRO++": zero(
        zero_hpz_partition_size=2,
        zero_quantized_weights=True,
        zero_quantized_gradients=True,
        stage3_max_reuse_distance=0,
    ),
}
FOR_EXPERTS: dict[str, tuple[int, Keys]] = {  # on four ranks: how many hold different ones
    "2 experts": (2, AGAIN),
    "4 experts": (4, {"gradient_clipping": 1.0}),
    "1 expert": (1, {}),
    "2 experts, overlap": (2, zero(overlap_comm=True)),
    "2 experts, Muon": (2, optimizer("Muon")),
    "2 experts, ZeRO++": (2, zero(zero_hpz_partition_size=2, zero_quantized_weights=True)),
}


ONLY_AT_STAGE_3 = {
    *("nothing stays", "little may be live", "no prefetch", "small steps", "all in units", "none in units"),
    *("node copies", "node copies, released", "quantized weights", "quantized gradients"),
    *("ZeRO++", "2 experts, ZeRO++", "Muon, small steps"),
    *(name for name in OPTIONS if name.startswith("parameters")),
}
NOT_AT_STAGE_0 = {  # where nothing is cut, and state on the host is refused
    *("MiCS", "MiCS, fp32", "no shards", "MiCS, Muon"),
    *(
        "state on the host",
        "state on the host, updated late",
        "state on the host, LAMB",
        "Muon, state on the host",
    ),
    *("half on the host", "half on the host, Muon"),
    *("state on a disk", "state on a disk, small steps"),
}


@dataclass(frozen=True)
class Case:
    """A run to be planned and to be measured."""

    world: int
    stage: int
    option: str
    precision: str

    def __str__(self) -> str:
        return f"{self.world} ranks, stage {self.stage}, {self.option}, {self.precision}"

    @property
    def experts(self) -> int | None:
        """How many ranks hold different ones; None: the model has none."""
        return FOR_EXPERTS[self.option][0] if self.option in FOR_EXPERTS else None

    @property
    def config(self) -> Keys:
        """The precision's keys and the option's."""
        keys = {**OPTIONS, **FOR_FOUR, **{name: keys for name, (_, keys) in FOR_EXPERTS.items()}}
        given, chosen = config(self.stage, **PRECISIONS[self.precision]), keys.get(self.option, {})
        given["zero_optimization"] |= SMALL
        for key, value in chosen.items():
            merge = isinstance(value, dict) and isinstance(given.get(key), dict) and key != "optimizer"
            given[key] = {**given[key], **value} if merge else value
        return given

    def model(self) -> nn.Module:
        """With an expert, or without."""
        return Odd() if self.experts is None else WithExperts()


def matrix() -> Iterator[Case]:
    """Every option at each stage that knows it, with another precision each time; plain runs in all."""
    options = {2: OPTIONS, 4: {**FOR_FOUR, **FOR_EXPERTS}}
    for stage in STAGES:
        for precision in PRECISIONS:
            yield from (Case(world, stage, "plain", precision) for world in (1, 2))
        yield Case(1, stage, "predivided", "fp32")
        for world, names in options.items():
            for place, name in enumerate(names):
                if (stage < 3 and name in ONLY_AT_STAGE_3) or (stage == 0 and name in NOT_AT_STAGE_0):
                    continue
                precision = list(PRECISIONS)[(2 * place + stage) % len(PRECISIONS)]
                if "Muon" in name and precision == "nothing but bf16":  # which is refused
                    precision = "no master"
                yield Case(world, stage, name, precision)


def soon(seed: int) -> set[Case]:
    """The cases of one run: every option at one stage, another one by the seed; plain runs for every pair."""
    plain = [
        (case.world, case.stage, case.option, case.precision) for case in matrix() if case.option == "plain"
    ]
    chosen = {Case(*row) for row in pairwise(plain)}
    by_option: dict[tuple[int, str], list[Case]] = {}
    for case in matrix():
        by_option.setdefault((case.world, case.option), []).append(case)
    for place, ((_, option), cases) in enumerate(by_option.items()):
        if option != "plain":
            chosen.add(cases[(seed + place) % len(cases)])
    return chosen


def most_in_buffers(optimizer: Any) -> list[int]:
    """Bytes in buffers for parameters, whenever one is taken from now on."""
    sizes: list[int] = []
    param_store = optimizer.sharded.param_store
    if isinstance(param_store, NvmeParamStore):
        take, alive = param_store.buffers.take, WeakSet[Buffer]()

        def noted(*given: Any, **named: Any) -> Buffer | None:
            taken = take(*given, **named)
            if taken is not None:
                alive.add(taken)
            sizes.append(held(buffer.memory for buffer in alive))
            return taken

        param_store.buffers.take = noted  # type: ignore[method-assign]
    return sizes


def measured(comm: Any, case: Case, folder: Path) -> dict[str, int]:
    """What this rank holds after two steps, before its gradients are let go, and sends in one; and saves."""
    topology = None if case.experts is None else topology_of(comm.rank, case.experts)[0]
    engine, optimizer, _, _ = zero_full.initialize(model=case.model(), config=case.config, topology=topology)
    buffers = most_in_buffers(optimizer)
    steps = 3 if isinstance(optimizer.settings.tier, OpenNvmeTier) else 2  # the first ones write all state
    for _ in range(steps):
        optimizer.communicators.traffic.clear()
        before = engine.moved()
        for micro in reversed(range(engine.gradient_accumulation_steps())):
            engine.set_gradient_accumulation_boundary(micro == 0)
            engine.backward(engine(torch.randn(5, WIDTH)))
        optimizer.step()
        found = {kind: held(tensors) for kind, tensors in optimizer.holdings().items() if kind != "counters"}
        found["sent"] = optimizer.communicators.traffic.total()
        for flat in optimizer.sharded.flats:
            assert flat.shard.numel(), "which waits for what is being written"
        moved = {way: size - before.get(way, 0) for way, size in engine.moved().items()}
        optimizer.zero_grad()
    beside = [
        group.master.values
        for group in optimizer.trained
        if group.master.is_separate and not group.master.tier.is_offloaded
    ]
    found["master"] = held(beside)
    found["moments"] = found.pop("optimizer", 0) - found["master"]
    found.setdefault("host", 0)
    tier, param_store = optimizer.settings.tier, optimizer.sharded.param_store
    found["disk"] = (
        sum(each.padded_size for each in tier.blocks.values()) if isinstance(tier, OpenNvmeTier) else 0
    )
    found["disk"] += param_store.file.size if isinstance(param_store, NvmeParamStore) else 0
    for way, words in {"read": "read from disk", "written": "written to disk"}.items():
        found[way] = moved.get(words, 0) + moved.get(f"parameters {way}", 0)
    flat = {member.param for values in optimizer.sharded.flats for member in values.members}
    found["parameters"] += held(p.detach() for p in engine.module.parameters() if p not in flat)
    found["buffers"] = held(engine.module.buffers())
    transports = [each.transport for each in optimizer.communicators.all]
    found["communication"] = sum(t.windows[0].nbytes for t in transports if isinstance(t, SharedMemory))
    found["in buffers"] = max(buffers, default=0)
    engine.save_checkpoint(folder, asynchronous=True)
    found["saved"] = sum(room.nbytes for room in optimizer.background.staging.rooms)
    engine.destroy()
    return found


def all_measured(comm: Any, cases: Sequence[Case], folder: Path) -> dict[Case, dict[str, int]]:
    """One after the other: to start a job takes as long as a case."""
    found = {}
    for case in cases:
        try:
            found[case] = measured(comm, case, folder)
        except Exception as error:
            raise RuntimeError(f"in {case}") from error
    return found


@cache
def by_real_ranks(cases: tuple[Case, ...]) -> list[dict[Case, dict[str, int]]]:
    """What each rank has measured in these cases, which have the same number of ranks."""
    with TemporaryDirectory() as folder:
        return POOL.run(all_measured, cases[0].world, cases, Path(folder), limit=300, collective=60)
