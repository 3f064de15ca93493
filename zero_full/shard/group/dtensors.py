"""Functions on DTensors and their local tensors. They take plain tensors as well."""

from typing import Any

import torch
from torch import Tensor

from zero_full._compat import local_tensor, set_local_tensor
from zero_full.layout import LocalBlock


def is_dtensor(tensor: Any) -> bool:
    """Return whether this is a DTensor. Importing the class would cost runs without one a second."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def mark_stand_in(param: Tensor) -> None:
    """Mark a plain tensor of a plan that stands for the local tensor of a DTensor."""
    param.stands_for_dtensor = True  # type: ignore[attr-defined]


def counts_as_dtensor(tensor: Any) -> bool:
    """Return whether this is a DTensor, or stands for one in a plan."""
    return is_dtensor(tensor) or getattr(tensor, "stands_for_dtensor", False)


def largest_shape(dtensor: Any) -> torch.Size:
    """Return the shape of the largest local tensor, which is that of the mesh's first rank."""
    block = block_of(dtensor)
    if block is None:
        return torch.Size(dtensor.shape)
    largest = -(-block.shape[block.dim] // dtensor.device_mesh.size())
    return torch.Size((*block.shape[: block.dim], largest, *block.shape[block.dim + 1 :]))


def local_of(tensor: Tensor) -> Tensor:
    """Return the tensor that this rank holds: a DTensor's local tensor, else the tensor itself."""
    return local_tensor(tensor) if is_dtensor(tensor) else tensor


def local_shape(tensor: Tensor) -> torch.Size:
    """Return the shape of the tensor that this rank holds."""
    return local_of(tensor).shape


def block_of(tensor: Any) -> LocalBlock | None:
    """Return the place of the local tensor in a DTensor that is cut, or None."""
    if not is_dtensor(tensor) or not tensor.placements[0].is_shard():
        return None
    dim = tensor.placements[0].dim % tensor.dim()
    mesh, length = tensor.device_mesh, tensor.shape[dim]
    part = -(-length // mesh.size())  # torch cuts into equal parts; the last ones may be smaller or empty
    offset = min(mesh.get_local_rank() * part, length)
    return LocalBlock(tuple(tensor.shape), dim, offset, min(part, length - offset))


def largest_numel(tensor: Any) -> int:
    """Return the number of elements of the largest local tensor: equal on all ranks, as buckets must be."""
    return largest_shape(tensor).numel() if is_dtensor(tensor) else int(tensor.numel())


def like(dtensor: Any, local: Tensor) -> Any:
    """Return a DTensor with the layout of `dtensor` and the local tensor `local`."""
    made = dtensor.present if hasattr(dtensor, "present") else type(dtensor)
    mesh, placements = dtensor.device_mesh, dtensor.placements
    return made.from_local(
        local, mesh, placements, run_check=False, shape=dtensor.shape, stride=dtensor.stride()
    )


def part_of(tensor: Any, value: Any) -> Tensor:
    """Return this rank's part, in the layout of `tensor`, of a value that is a DTensor or a whole tensor."""
    if is_dtensor(value):
        value = value.redistribute(placements=tensor.placements)
        return local_of(value)
    block = block_of(tensor)
    return value if block is None else value.narrow(block.dim, block.offset, block.size)  # type: ignore[no-any-return]


@torch.no_grad()
def whole_of(tensor: Any) -> Tensor:
    """Return a DTensor's whole tensor, or a plain tensor itself. All ranks of the mesh must call this."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[no-any-return]


def point(dtensor: Any, local: Tensor) -> None:
    """Replace the local tensor of a DTensor, and its dtype."""
    set_local_tensor(dtensor, local, None if dtensor.dtype == local.dtype else like(dtensor, local))
