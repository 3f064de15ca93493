"""Check whether a 1-bit optimizer, which averages by itself, supports a run's settings and topology."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from zero_full._compat import backend_of
from zero_full.comm.topology import Topology
from zero_full.optim.one_bit import OneBitOptimizer
from zero_full.settings import Settings
from zero_full.shard.group.process_groups import Communicators

SUMS = "it averages gradients and cannot sum them. Remove gradient_allreduce_op, or Settings(average=False)"
EXPERTS = "it averages the whole model over all ranks, but gradients of experts belong to some ranks only"
LOW_STATE = "it keeps its state in fp32. Remove bf16_optimizer_states, or Settings(dtypes=...) with low_state"
OFFLOAD = "its state cannot be offloaded. Remove offload_optimizer, or Settings(tier=...)"
PARTS = "it averages over all ranks. Remove mics_shard_size, or `shard` and `replicate` of the topology"
WIDE = "it keeps its state and averages in fp32. Convert the model by model.float()"
LIBRARIES = {"nccl": "NCCL", "gloo": "gloo", "mpi": "MPI"}  # that torch may be built with
BACKENDS = (*LIBRARIES, "hccl")


@dataclass(frozen=True)
class WholeState(Settings):
    """Settings for an optimizer with whole state on every rank, also at stage 1.

    Such an optimizer shards by itself the state that it can.
    """

    @property
    def shards_state(self) -> bool:
        """False: the layout is that of stage 0."""
        return False


def one_bit_settings(base: Optimizer, settings: Settings, topology: Topology) -> Settings:
    """Return the settings for this optimizer's layout; raise ValueError if it does not support the run."""
    if not isinstance(base, OneBitOptimizer):
        return settings
    name, stages = type(base).__name__, base.zero_full_stages
    if settings.stage not in stages:
        one_of = " or ".join(map(str, stages))
        raise ValueError(
            f"{name} cannot run at stage {settings.stage}: it needs this rank's own whole gradients, and the "
            f"momentum of the whole model on every rank. Use stage {one_of}, or another optimizer"
        )
    wide = settings.dtypes.parameter is None and any(p.dtype == torch.float64 for p in _trained(base))
    for applies, reason in (
        (topology.expert_data is not None, EXPERTS),
        (not settings.average, SUMS),
        (settings.dtypes.low_state, LOW_STATE),
        (settings.tier.is_offloaded, OFFLOAD),
        (topology.shard is not None, PARTS),
        (wide, WIDE),
    ):
        if applies:
            raise ValueError(f"{name} does not support this run: {reason}")
    base.shards_variance = settings.stage == 1
    return WholeState(**{each.name: getattr(settings, each.name) for each in fields(settings)})


def missing_for(name: str) -> str:
    """Return why this process cannot open a group of this backend; an empty string if it can."""
    if name not in BACKENDS:
        raise ValueError(f"comm_backend_name {name!r}: it can be {', '.join(BACKENDS)}")
    if name in LIBRARIES and not dist.is_backend_available(name):
        return f"{name}: this torch was built without {LIBRARIES[name]}"
    if name == "nccl" and not torch.accelerator.is_available():
        return "nccl: there is no GPU"
    if name == "hccl" and not dist.is_backend_available(name):
        return "hccl: torch_npu, which brings it, is not installed or not imported"
    return ""


def check_backend(base: Optimizer, communicators: Communicators, device: torch.device) -> None:
    """Raise ValueError if the process group's backend is not the one that `comm_backend_name` names.

    DeepSpeed has a class for each name. Here one `CompressedReduce` works over any process group, so the name
    selects nothing. It states which backend the configuration expects, and that can be checked.
    """
    wanted = base.model_options["comm_backend_name"] if isinstance(base, OneBitOptimizer) else None
    if wanted is None:
        return
    missing = missing_for(wanted)
    group = communicators.dense.replica_comm.group
    actual = None if group is None else backend_of(group, device)
    if not missing and actual not in (None, wanted):
        missing = f"{wanted}, but the process group of the ranks on {device.type} uses {actual}"
    if missing:
        raise ValueError(
            f"comm_backend_name of {type(base).__name__}: {missing}. Remove comm_backend_name to average "
            "over the existing process group"
        )


def _trained(base: Optimizer) -> Iterable[torch.Tensor]:
    return (p for group in base.param_groups for p in group["params"])
