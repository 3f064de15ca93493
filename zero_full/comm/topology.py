"""Topology: the process groups of a run, passed as arguments and never global.

data       ranks that train on different data; the state is sharded over them
shard      a part of `data`: the state is sharded inside it and replicated in the other parts (HSDP, MiCS)
replicate  ranks that hold the same slice as this one, one from each `shard`
tensor     ranks that split single layers (tensor parallelism)
pipe       ranks that hold different layers (pipeline parallelism)
expert, expert_data   ranks that hold different experts, and ranks that hold the same experts
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from zero_full._compat import default_store, open_group, timeout_of
from zero_full.comm.fake_ranks import FakeGroup

Predicate = Callable[[str, Parameter], bool]
MESH_NAMES = {
    "data": ("data", "dp", "data_parallel"),
    "shard": ("shard", "fsdp", "dp_shard"),
    "replicate": ("replicate", "dp_replicate"),
    "tensor": ("tensor", "tp", "tensor_parallel", "model"),
    "pipe": ("pipe", "pp", "pipeline"),
}
ROLES = ("data", "shard", "replicate", "tensor", "pipe", "expert", "expert_data")


def marked_as_expert(name: str, parameter: Parameter) -> bool:
    """Return whether a parameter has DeepSpeed's mark of an expert, `parameter.allreduce = False`."""
    return getattr(parameter, "allreduce", True) is False


def marked_as_split(name: str, parameter: Parameter) -> bool:
    """Return whether a parameter is split over tensor-parallel ranks, by Megatron's marks."""
    return bool(
        getattr(parameter, "model_parallel", False) or getattr(parameter, "tensor_model_parallel", False)
    )


def no_copy(name: str, parameter: object = None) -> bool:
    """Return False: the default of `Topology.is_copy`, for runs without tied layers in a pipeline."""
    return False


@dataclass(frozen=True)
class Topology:
    """The process groups of this rank. All are optional: by default all ranks are data-parallel."""

    data: dist.ProcessGroup | None = None
    shard: dist.ProcessGroup | None = None
    replicate: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None
    pipe: dist.ProcessGroup | None = None
    expert: dist.ProcessGroup | None = None
    expert_data: dist.ProcessGroup | None = None
    is_expert: Predicate = marked_as_expert
    is_split: Predicate = marked_as_split
    is_copy: Callable[..., bool] = no_copy  # True: another rank of `pipe` counts and saves the tensor
    opened: tuple[dist.ProcessGroup, ...] = ()  # opened for this topology: its engine closes them

    def __post_init__(self) -> None:
        for role in ROLES:
            if getattr(self, role) == dist.GroupMember.NON_GROUP_MEMBER:
                raise ValueError(
                    f"rank {dist.get_rank()} is not in the `{role}` group that it was given. Every rank must "
                    "pass the group that it is a member of (new_group gives all others a placeholder)."
                )
        for role in ("tensor", "pipe"):
            if getattr(self, role) is not None and self.data is None and self.shard is None:
                raise ValueError(
                    f"a topology with a `{role}` group also needs a `data` group: the ranks that hold the "
                    "same parts of the model. In a mesh, add a dimension 'data', which may have size 1."
                )
        if (self.shard is None) != (self.replicate is None):
            raise ValueError("a topology needs both `shard` and `replicate` groups, or neither")
        if (self.expert is None) != (self.expert_data is None):
            raise ValueError("a topology needs both `expert` and `expert_data` groups, or neither")
        if self.expert is not None and self.shard is not None:
            raise ValueError(
                "experts and replicated sharding together are not supported. Drop `shard` and `replicate`, "
                "or mark no parameter as an expert."
            )

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> "Topology":
        """Return the topology of a named mesh: ("data",), ("replicate", "shard"), ("data", "tensor"), ..."""
        names = mesh.mesh_dim_names
        if names is None:
            if mesh.ndim == 1:
                return cls(data=mesh.get_group())
            raise ValueError(f"a mesh of {mesh.ndim} dimensions needs mesh_dim_names, e.g. {_known_names()}")
        groups: dict[str, Any] = {}
        for name in names:
            role = next((role for role, known in MESH_NAMES.items() if name in known), None)
            if role is None or role in groups:
                raise ValueError(f"mesh dimension {name!r} is unknown or repeated; known: {_known_names()}")
            groups[role] = mesh.get_group(name)
        if "shard" in groups and "replicate" not in groups:  # one dimension shards over all ranks
            groups["data"] = groups.pop("shard")
        elif "replicate" in groups and "shard" not in groups:
            raise ValueError("a mesh with a 'replicate' dimension also needs a 'shard' dimension")
        return cls(**groups)

    @classmethod
    def from_mpu(cls, mpu: Any) -> "Topology":
        """Return the topology of a Megatron-style object, with `get_data_parallel_group()` and the like."""
        getters = ("get_tensor_model_parallel_group", "get_model_parallel_group")
        tensor = next((getattr(mpu, name)() for name in getters if hasattr(mpu, name)), None)
        return cls(data=mpu.get_data_parallel_group(), tensor=tensor)

    @property
    def model_parallel(self) -> list[dist.ProcessGroup]:
        """The groups of ranks that hold different parts of the model: `tensor` and `pipe`."""
        return [group for group in (self.tensor, self.pipe) if group is not None]

    def with_sub_groups(self, size: int) -> "Topology":
        """Return a copy with shard groups of `size` neighbouring ranks (`mics_shard_size`)."""
        shard, replicate = self.sub_groups(size, "mics_shard_size")
        return replace(self, shard=shard, replicate=replicate, opened=(*self.opened, shard, replicate))

    def sub_groups(self, size: int, key: str) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Arrange the data group in rows of `size` neighbours. Returns this rank's row, then its column."""
        if self.shard is not None or self.expert is not None:
            raise ValueError(f"{key} needs a topology without `shard` and `expert` groups")
        data = self.data if self.data is not None else dist.group.WORLD
        assert data is not None
        ranks = ranks_of(data)
        if size < 1 or len(ranks) % size:
            raise ValueError(f"{key} {size} does not divide the data-parallel world {len(ranks)}")
        rows = [ranks[start : start + size] for start in range(0, len(ranks), size)]
        columns = [list(column) for column in zip(*rows, strict=True)]
        return _own_group(rows, data), _own_group(columns, data)


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    """Return the global ranks of a group's members."""
    if isinstance(group, FakeGroup):
        return group.ranks
    return dist.get_process_group_ranks(group)


def this_rank() -> int:
    """Return the global rank of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def new_group(
    ranks: list[int], like: dist.ProcessGroup, device: torch.device | None = None
) -> dist.ProcessGroup:
    """Open a group with the backend of `like` and its timeout for `device`. Only its members call this.

    `dist.new_group` would use the default backend and timeout: half an hour for a rank that has died.
    """
    if isinstance(like, FakeGroup):
        return FakeGroup(ranks, like.global_rank)
    members = f"zero_full/{'-'.join(map(str, ranks))}"
    number = default_store().add(f"{members}/opened by {dist.get_rank()}", 1)  # groups of these members
    group: dist.ProcessGroup = open_group(
        ranks, f"{members}/{number}", dist.get_backend(like), timeout_of(like, device)
    )
    return group


def _own_group(partition: list[list[int]], like: dist.ProcessGroup) -> dist.ProcessGroup:
    """Open the group of ranks in `partition` that contains this rank."""
    global_rank = ranks_of(like)[like.rank()]
    return new_group(next(ranks for ranks in partition if global_rank in ranks), like)


def _known_names() -> str:
    """Return the known names of mesh dimensions, for an error."""
    return ", ".join(name for names in MESH_NAMES.values() for name in names)
