"""Parameters that are DTensors: tensor parallelism has cut them before the engine sees them.

[Note: DTensors] A DTensor is a Python object around the tensor that this rank holds, its local tensor. Flat
buffers, gradients, masters and optimizer state are those of local tensors, sharded over the ranks that hold
the same part (`Topology.data`). The module keeps its DTensors, whose local tensors are windows into the flat
buffer, or placeholders while it is released. DTensors and plain parameters are in different groups, so the
two classes here serve the first kind alone, and other runs do not need this file.

Parameters that are cut have a `LocalBlock`, their place in the whole parameter. All others are equal on the
`tensor` ranks: the norm counts them once, and ranks save them together.
"""

from typing import Any

from torch import Tensor
from torch.nn import Parameter

from zero_full._compat import local_tensor, version_of
from zero_full.shard.group.dtensors import is_dtensor, like, local_of, point
from zero_full.shard.group.gradients import FlatGradients, HostGradients
from zero_full.shard.group.parameters import FlatParameters, Member
from zero_full.shard.group.released import released_class


class DTensorParameters(FlatParameters):
    """A flat buffer of the local tensors of DTensors."""

    def values_of(self, param: Parameter) -> Tensor:
        """Return the local tensor of a parameter."""
        return local_tensor(param)

    def point(self, param: Parameter, values: Tensor) -> None:
        """Replace the local tensor of a parameter."""
        point(param, values)

    def shown(self, member: Member) -> Any:
        """Return the parameter's values in the buffer, as a DTensor."""
        return like(member.param, self.windows[member.index])

    def show(self) -> None:
        """Point the parameters to their windows in the buffer, and restore their own classes."""
        for param in self.params if self.hidden else ():
            param.__class__ = param.present  # type: ignore[attr-defined]
        for param, window in zip(self.params, self.windows, strict=True):
            point(param, window)
        self.hidden = False
        self.versions = list(map(version_of, self.params))

    def hide(self) -> None:
        """Point the parameters to placeholders of their shapes, and make use of their values raise."""
        if self.hidden:
            return
        self.hidden = True
        for member, placeholder in zip(self.members, self.placeholders, strict=True):
            param = member.param
            point(param, placeholder)
            param.released_name = member.name  # type: ignore[attr-defined]
            param.__class__ = released_class(type(param))

    def reassigned(self) -> list[tuple[Member, Tensor]]:
        """Find parameters that user code gave other local tensors; raise RuntimeError while released."""
        pairs = zip(self.members, self.placeholders if self.hidden else self.windows, strict=True)
        found = [(member, place) for member, place in pairs if local_tensor(member.param) is not place]
        if found and self.hidden:
            raise self.assigned_while_released(found[0][0])
        return found

    def write(self, flat: Tensor, member: Member, value: Tensor) -> None:
        """Copy this rank's part of a parameter into a flat tensor of its slice."""
        super().write(flat, member, local_of(value))


class _FromDTensors(FlatGradients):
    """Mixin for groups whose gradients autograd leaves in `param.grad` as DTensors."""

    def detach(self) -> list[tuple[Member, Tensor]]:
        """Detach the local tensors of the gradients that are still in `param.grad`."""
        # On backward's thread, like the all-reduces of forward and backward: the lane would mix their order.
        return [(member, _local_gradient(member, grad)) for member, grad in super().detach()]

    def _copy_in(self, member: Member, grad: Tensor, final: bool) -> None:
        super()._copy_in(member, _local_gradient(member, grad), final)

    def averaged(self, member: Member) -> Tensor:
        """Return an averaged gradient as a DTensor, in the parameter's dtype; at stage 0 only."""
        return like(member.param, super().averaged(member))  # type: ignore[no-any-return]


def _local_gradient(member: Member, grad: Any) -> Tensor:
    """Return the local tensor of a gradient, laid out as its parameter: partial sums are added up."""
    if not is_dtensor(grad):
        return grad  # type: ignore[no-any-return]
    wanted = member.param.placements  # type: ignore[attr-defined]
    if tuple(grad.placements) != tuple(wanted):
        grad = grad.redistribute(placements=wanted)
    local: Tensor = grad.to_local()
    return local


class DTensorGradients(_FromDTensors, FlatGradients):
    """A group's gradients on the device, of DTensors."""


class DTensorHostGradients(_FromDTensors, HostGradients):
    """A group's gradients of DTensors, with an averaged slice that is copied to host memory."""


def gradients_class(kind: type[FlatGradients]) -> type[FlatGradients]:
    """Return the version of `kind`, a class of gradients on the device or the host, for DTensors."""
    return DTensorHostGradients if issubclass(kind, HostGradients) else DTensorGradients
