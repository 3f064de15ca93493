"""The gradients of a parameter group: one flat buffer, reduced in one collective.

[Note: what travels] In a collective every rank must send the same number of bytes of the same dtype. But the
gradients on a rank depend on its data: it may have used none of a group's parameters. So the number, order
and dtype of reductions depend only on what all ranks do alike: modules, passes, `no_sync`, the accumulation
boundary. They never depend on the gradients that are present. A pass that reduces does so once per group.
Gradients that arrive later wait for the group's next reduction. If any rank has such gradients before the
step, all ranks agree on an additional reduction.

[Note: a gradient's way] Autograd leaves a gradient in `param.grad`. `take` moves it into `local_grads`, the
flat buffer of this rank's own gradients. `reduce` averages the `local_grads` of all ranks, and each rank
keeps its slice of the average as `grad_slice`. At stage 0 the slice is the whole buffer.

    stages 0 and 1   `local_grads` is kept, and `grad_slice` is a window into it if the dtypes allow. It is
                     reduced once per step
    stages 2 and 3   `local_grads` is freed after its reduction, and `grad_slice` accumulates over the
                     micro-batches

If state is replicated, slices are also averaged over the replicas. From stage 2 on this happens
once per step, after the reduction of its last backward pass.

If the optimizer averages by itself (1-bit rules, at stage 0), `grad_slice` is this rank's own gradients.

A single rank needs no reduction. If no conversion is needed either, there is no `grad_slice`, and the
optimizer reads `param.grad` (`uses_param_grad`).

[Note: asleep] A group is asleep while all of its parameters have been frozen since initialize. It has no
gradients and no masters, and takes part in no collective. When one of its parameters is unfrozen it wakes up
and stays awake.

[Note: gradient placeholders] Gradients are averaged in flat buffers, of which this rank keeps a slice, so no
whole tensor exists for `param.grad`. None would be wrong: `clip_grad_norm_` would compute a norm of 0. A
`GradPlaceholder` has the parameter's shape and no memory. User code can clear it, as `module.zero_grad()`
does, or replace it by a tensor. Both take effect at the next backward pass or step. Any function that would
read or change its values raises, with a remedy in the message.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero_full._compat import foreach_zero, identity_of, without_overrides
from zero_full.offload.host_device_copies import CopyThreads, HostGradientSlice
from zero_full.settings import Settings
from zero_full.shard.group.parameters import FlatParameters, Member, contiguous_strides, placeholder_scalar
from zero_full.shard.group.process_groups import Reduce
from zero_full.shard.group.released import CONVERSIONS, WITHOUT_VALUES, call_plain

CLEARING = {Tensor.zero_, foreach_zero}
UNSCALED = (
    "the grad of {} was assigned, and with a loss scale it is unknown whether it is scaled. Use "
    "zero_full.safe_set_full_grad(param, value), which takes an unscaled gradient"
)
NO_VALUES = (
    "{}.grad has no values: after backward, averaged gradients are in flat buffers. To clip their norm, set "
    "the key gradient_clipping; the norm is engine.get_global_grad_norm(). To read or replace a gradient, "
    "use zero_full.safe_get_full_grad(param) and safe_set_full_grad(param, value), or assign a tensor to "
    "param.grad. Do not use torch's GradScaler: the key fp16 has a loss scale"
)
SPARSE = "{} has a sparse gradient, but flat buffers of gradients are dense. Use nn.Embedding(sparse=False)"
# Free gradient buffers, shared by the groups of an optimizer during a backward pass. On a CPU new pages would
# cost more time than writing the gradients. (On an accelerator the caching allocator reuses memory, with
# regard to streams.)
Spares = list[Tensor]


class FlatGradients:
    """A group's gradients on the device: see [Note: a gradient's way]."""

    host_slice: HostGradientSlice | None  # the averaged slice on the host; None: it stays on the device
    is_on_host = False  # the averaged slice is on the host or being copied to it

    def __init__(
        self,
        parameters: FlatParameters,
        settings: Settings,
        divisors: tuple[float, float],
        reduce_slices: Reduce,
        spares: Spares,
        copy_threads: CopyThreads | None = None,
    ) -> None:
        """`copy_threads` makes the host-device copies of `HostGradients`; None on the device."""
        self.parameters, self.settings, self.divisors = parameters, settings, divisors
        self.reduce_slices, self.spares = reduce_slices, spares
        self.members, self.layout = parameters.members, parameters.layout
        self.device = parameters.kind.device
        self.windows = self.layout.windows
        self.strides = list(map(contiguous_strides, parameters.shapes))
        self.shard_comm, self.replica_comm = parameters.shard_comm, parameters.replica_comm
        self.name = parameters.name
        self.accumulate = settings.dtypes.accumulate_of(parameters.dtype)
        host = (
            None
            if copy_threads is None
            else HostGradientSlice(copy_threads, self.name, self.layout.shard_numel, self.accumulate)
        )
        self.host_slice = host
        self.shards_gradients, self.checks_finite = settings.shards_gradients, settings.needs_norm
        alone = self.shard_comm.size == self.replica_comm.size == 1
        self.has_peers, self.is_replicated = not alone, self.replica_comm.size > 1
        master = settings.dtypes.master_of(parameters.dtype)
        self.is_average = alone and divisors == (1, 1)  # this rank's own gradients are the average
        self.uses_param_grad = (
            self.is_average
            and parameters.dtype == self.accumulate == master
            and settings.plain_divisor == 1
            and self.host_slice is None
            and not parameters.kind.is_dtensor
        )
        # Through `spares`. A buffer that is the average itself stays until it is copied to the host.
        self.reuses_memory = self.device.type == "cpu" and not (
            self.host_slice is not None and self.is_average
        )
        self.local_grads: Tensor | None = None  # this rank's own gradients, of the whole buffer
        self.grad_slice: Tensor | None = None  # this rank's slice of the average, or memory for it
        self.slice_is_valid = False  # `grad_slice` holds gradients of this step
        self.slice_is_replica_average = False  # averaged over `replicas`, too
        self.arrived: set[Member] = set()  # parameters with a gradient in `local_grads`
        # The smallest and the largest of this rank's own gradients in each reduction since the last step: NaN
        # if one of them is. One operation on the device; the host reads them only to report an overflow.
        self.local_ends: list[Tensor] = []

    # This rank's own -----------------------------------------------------------------------------

    def take(self, member: Member, final: bool) -> None:
        """Move `param.grad` into the flat buffer.

        `final`: it will be reduced before more is added, so the buffer can have the gradient's own dtype.
        """
        grad = member.param.grad
        if grad is not None and not isinstance(grad, GradPlaceholder):
            member.param.grad = None
            self._copy_in(member, grad, final)

    def own(self, member: Member) -> Tensor | None:
        """Return this rank's own gradient of a parameter, to be changed in place before it is reduced."""
        if self.uses_param_grad:
            return member.param.grad
        if self.local_grads is None or member not in self.arrived:
            return None
        return self.local_grads[self.windows[member.index]].view(member.param.shape)

    def detach(self) -> list[tuple[Member, Tensor]]:
        """Detach the gradients that are still in `param.grad`, for `reduce` to copy them."""
        here = []
        with without_overrides():
            for member in self.members:
                grad = member.param.grad
                if grad is not None and not isinstance(grad, GradPlaceholder):
                    member.param.grad = None
                    here.append((member, grad))
        return here

    def _copy_in(self, member: Member, grad: Tensor, final: bool) -> None:
        """Copy a gradient to its window in the flat buffer, or add it to the present one."""
        if grad.layout is not torch.strided:
            raise TypeError(SPARSE.format(member.name))
        local, is_new = self.local_grads, member not in self.arrived
        if not self.arrived:
            local = self._open(grad.dtype if final else self.accumulate)
        elif local is not None and not is_new and local.dtype != self.accumulate:
            local = self.local_grads = local.to(self.accumulate)  # expected to be final, but more arrived
        assert local is not None
        start = local.storage_offset() + self.layout.starts[member.index]
        window = local.as_strided(grad.shape, self.strides[member.index], start)
        if is_new:
            window.copy_(grad)
            self.arrived.add(member)
        else:
            window.add_(grad)

    def _open(self, dtype: torch.dtype) -> Tensor:
        """Return the flat buffer for new gradients. Its padding is zero; gradients overwrite the rest."""
        mine, local = self.grad_slice, self.local_grads
        is_window = mine is not None and local is not None and _share_memory(mine, local)
        if mine is not None and is_window and self.slice_is_valid:  # keep the averages of an earlier pass
            self.grad_slice, is_window = mine.clone(), False
        if local is None or local.dtype != dtype:
            if is_window:
                self.grad_slice = None  # a window keeps the old buffer alive
            total, local = self.layout.total, None
            with suppress(IndexError):  # not `if self.spares`: the lane's thread uses the list, too
                local = self.spares.pop()  # a free buffer of another group
            if local is None or local.dtype != dtype or local.numel() < total:
                local = torch.empty(total, dtype=dtype, device=self.device)
            local = self.local_grads = local[:total]
            end = 0
            for start, numel in zip(self.layout.starts, self.layout.numels, strict=True):
                if end < start:
                    local[end:start].zero_()
                end = start + numel
            if end < total:
                local[end:].zero_()
        return local

    # Averaged ------------------------------------------------------------------------------------

    def reduce(
        self,
        detached: Sequence[tuple[Member, Tensor]],
        message_dtype: torch.dtype,
        last: bool,
        averages: bool,
    ) -> None:
        """Average the gradients of all ranks and keep this rank's slice. Runs on the lane.

        detached       gradients that are not in the buffer yet
        message_dtype  dtype that the gradients are sent in
        last           this is the step's last reduction
        averages       False: the optimizer averages by itself, and needs this rank's own gradients
        """
        for member, grad in detached:
            self._copy_in(member, grad, final=True)
        local = self.local_grads
        if local is None or not self.arrived:  # no gradient on this rank, but other ranks may have some
            local = self._open(self.parameters.dtype)
        for member in self.members:
            if member not in self.arrived:  # not used on this rank, but perhaps on others: contribute zero
                local[self.windows[member.index]].zero_()
        if self.checks_finite and local.numel() and not local.is_meta:
            self.local_ends += torch.aminmax(local)
        if averages:
            self._average(local, message_dtype, last)
        else:
            copies = not self.shards_gradients and not self.slice_is_valid and local.dtype != self.accumulate
            self._add_to_slice(self._slice_memory().copy_(local) if copies else local, last)
        self.arrived.clear()
        if self.shards_gradients:  # stages 2 and 3: only this rank's slice of the gradients stays in memory
            if self.reuses_memory:
                self.spares.append(local)
            self.local_grads = None
        if last and self.is_replicated:
            self.average_over_replicas()

    def _average(self, local: Tensor, message_dtype: torch.dtype, last: bool) -> None:
        """Reduce the flat buffer over the ranks, and add this rank's slice of the average to `grad_slice`."""
        sent = local.to(message_dtype)
        keeps = not self.shards_gradients and not self.slice_is_valid
        in_place = keeps and sent is local and local.dtype == self.accumulate
        # In place at stages 0 and 1: the averaged slice is a window into the buffer, and costs no memory.
        out = self.shard_comm.slice_of(local) if in_place else self._slice_memory()
        before, after = self.divisors
        if before != 1:
            sent.div_(before)
        # Stages 2 and 3 average over replicas once per step, by `average_over_replicas`. Gradients that come
        # after that are averaged at once, because the slice that they are added to is.
        over_replicas = self.is_replicated and (not self.shards_gradients or self.slice_is_replica_average)
        # Stage 0: replicas average the whole buffer, in the dtype of messages.
        is_whole = over_replicas and self.shard_comm.size == 1
        divisor, what = 1 if over_replicas and not is_whole else after, f"gradients {self.name}"
        if self.settings.reduce_scatter and not is_whole:
            self.reduce_slices(sent, out, divisor, what)
        else:
            (self.replica_comm if is_whole else self.shard_comm).all_reduce(sent, divisor, what)
            if not in_place:
                out.copy_(self.shard_comm.slice_of(sent))
        if over_replicas and not is_whole:
            self._reduce_over_replicas(out, after, sent.dtype)
        self._add_to_slice(out, last)

    def _reduce_over_replicas(self, gradients: Tensor, divisor: float, message_dtype: torch.dtype) -> None:
        sent = gradients.to(message_dtype)
        self.replica_comm.all_reduce(sent, divisor, f"gradients {self.name}")
        if sent is not gradients:
            gradients.copy_(sent)

    def _add_to_slice(self, more: Tensor, last: bool) -> None:
        """Add this pass's averaged slice to the step's, or keep it as the first one."""
        if not self.slice_is_valid:
            self.grad_slice, self.slice_is_valid = more, True
        else:
            assert self.grad_slice is not None
            self.grad_slice.add_(more)

    def _lacks_replica_average(self) -> bool:
        return self.shards_gradients and self.is_replicated and not self.slice_is_replica_average

    def average_over_replicas(self) -> None:
        """Average this rank's slice over the replicas, once per step."""
        if self.slice_is_valid and self._lacks_replica_average():
            mine = self.grad_slice
            assert mine is not None
            self._reduce_over_replicas(mine, 1, self.settings.dtypes.reduce or mine.dtype)
            self.slice_is_replica_average = True

    def _slice_memory(self) -> Tensor:
        """Return memory for an averaged slice: that of the last step if it is free, or new."""
        before = self.grad_slice
        if before is not None and not self.slice_is_valid and before.dtype == self.accumulate:
            return before
        return torch.empty(self.layout.shard_numel, dtype=self.accumulate, device=self.device)

    # By hand -------------------------------------------------------------------------------------

    def drop(self, member: Member) -> None:
        """Set this parameter's gradient to zero."""
        self.arrived.discard(member)
        gradient = self.gradient_of(member)
        if gradient is not None and self.slice_is_valid:
            gradient.zero_()

    def put(self, member: Member, gradient: Tensor) -> None:
        """Replace this parameter's averaged gradient, of which this rank keeps its part."""
        self.arrived.discard(member)
        if not self.slice_is_valid:
            if self.arrived:
                self.grad_slice = None  # it may be a window into gradients that are not reduced yet
            self.grad_slice = self._zero_slice()
            # Values by user code are equal on replicas: there is nothing to average.
            self.slice_is_valid = self.slice_is_replica_average = True
        mine = self.averaged_slice()
        assert mine is not None
        self.parameters.write(mine, member, gradient)

    def _zero_slice(self) -> Tensor:
        return self._slice_memory().zero_()

    # What there is -------------------------------------------------------------------------------

    def averaged_gradients(self) -> list[Tensor]:
        """Return this rank's averaged gradients, in as few tensors as possible."""
        if not self.uses_param_grad:
            mine = self.averaged_slice()
            return [] if mine is None else [mine]
        with without_overrides():
            return [m.param.grad for m in self.members if m.param.grad is not None]

    def averaged_slice(self) -> Tensor | None:
        """Return this rank's slice of the averaged gradients, or None."""
        return self.grad_slice if self.slice_is_valid else None

    def gradient_of(self, member: Member) -> Tensor | None:
        """Return the averaged gradient of this rank's piece of a parameter, or None."""
        if self.uses_param_grad:
            return member.param.grad
        mine = self.averaged_slice()
        return None if mine is None else self.parameters.piece_of(mine, member)

    def averaged(self, member: Member) -> Tensor:
        """Return a whole averaged gradient in the parameter's dtype; at stage 0 only."""
        gradient = self.gradient_of(member)
        assert gradient is not None
        return gradient.view(member.shape).to(member.param.dtype)

    def check_dense(self) -> None:
        """Raise TypeError if a gradient that autograd has left in `param.grad` is sparse."""
        with without_overrides():
            for member in self.members if self.uses_param_grad else ():
                grad = member.param.grad
                if grad is not None and grad.layout is not torch.strided:
                    raise TypeError(SPARSE.format(member.name))

    def forget(self, free: bool) -> None:
        """Discard the gradients. `free`: also free their memory."""
        with without_overrides():
            for param in self.parameters.params:
                param.grad = None
        self.arrived.clear()
        self.slice_is_valid = self.slice_is_replica_average = False
        self.local_ends.clear()
        if free:
            self.local_grads = self.grad_slice = None

    def device_memory(self) -> Iterator[Tensor]:
        """Yield every tensor on the device that holds gradients."""
        on_device = self.local_grads, None if self.is_on_host else self.grad_slice
        yield from (t for t in on_device if t is not None)
        grads = (m.param.grad for m in self.members)
        yield from (grad for grad in grads if grad is not None and not isinstance(grad, GradPlaceholder))


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return identity_of(one.untyped_storage()) == identity_of(other.untyped_storage())


class HostGradients(FlatGradients):
    """Gradients with an averaged slice that is copied to host memory and accumulated there (ZeRO-Offload).

    Replicated slices accumulate on the device until they are averaged over the replicas. Read the slice by
    `averaged_slice`, which waits for the copy.
    """

    host_slice: HostGradientSlice

    @property
    def is_on_host(self) -> bool:  # type: ignore[override]
        """Whether the averaged slice is on the host or being copied to it."""
        return self.grad_slice is not None and self.grad_slice is self.host_slice.memory

    def _open(self, dtype: torch.dtype) -> Tensor:
        if not self.shards_gradients:
            self.host_slice.wait_until_copied()  # wait: a copy may still read the buffer
        return super()._open(dtype)

    def _average(self, local: Tensor, message_dtype: torch.dtype, last: bool) -> None:
        if not self.is_average:
            return super()._average(local, message_dtype, last)
        if self.shards_gradients:
            self.host_slice.copy_threads.wait_for_turn()
        self._add_to_slice(local.to(message_dtype), last)  # it may have fewer bytes than `local`

    def _add_to_slice(self, more: Tensor, last: bool) -> None:
        if self._lacks_replica_average():
            return super()._add_to_slice(more, last)
        self.host_slice.receive(more, adds=self.slice_is_valid, last=last)
        self.grad_slice, self.slice_is_valid = self.host_slice.memory, True

    def average_over_replicas(self) -> None:
        """Average this rank's slice over the replicas, once per step, and copy it to the host."""
        on_device = None if self.slice_is_replica_average else self.grad_slice
        super().average_over_replicas()
        if self.slice_is_replica_average and on_device is not None:
            self.host_slice.receive(on_device, adds=False, last=True)
            self.grad_slice = self.host_slice.memory

    def _slice_memory(self) -> Tensor:
        self.host_slice.copy_threads.wait_for_turn()
        return torch.empty(self.layout.shard_numel, dtype=self.accumulate, device=self.device)

    def _zero_slice(self) -> Tensor:
        return self.host_slice.zero()

    def averaged_slice(self) -> Tensor | None:
        """Wait for the copy, and return this rank's slice of the averaged gradients; None if none."""
        mine = super().averaged_slice()
        return self.host_slice.arrived() if mine is not None and self.is_on_host else mine

    def forget(self, free: bool) -> None:
        """Discard the gradients, also those that are being copied. `free`: also free their memory."""
        super().forget(free)
        self.host_slice.forget()
        self.grad_slice = None


# Placeholders in `param.grad` ---------------------------------------------------------------------


class GradPlaceholder(Tensor):
    """Placeholder for a gradient: right shape and dtype, no values. See [Note: gradient placeholders]."""

    parameter = "a parameter"  # its name
    member: Member | None = None  # None: a conversion such as `grad.float()`, with no gradient behind it
    owner: Callable[[], "GradientPlaceholders | None"] = staticmethod(lambda: None)  # weak: see `Hook`

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run functions that do not read values, handle `zero_`, and raise for all others."""
        if func in WITHOUT_VALUES:
            return call_plain(func, args, kwargs)
        if func in CONVERSIONS:
            converted = call_plain(func, args, kwargs).as_subclass(GradPlaceholder)
            converted.parameter = args[0].parameter
            return converted
        given = args[0] if args and isinstance(args[0], (tuple, list)) else args
        found = [each for each in given if isinstance(each, GradPlaceholder)]
        if func in CLEARING and len(found) == len(given):
            for each in found:
                if (owner := each.owner()) is not None:
                    owner.zero(each)
            return args[0]
        if func is Tensor.__repr__:
            return f"<the gradient of {found[0].parameter}: averaged in a flat buffer>"
        name = found[0].parameter if found else "a parameter"
        raise RuntimeError(NO_VALUES.format(name))


@dataclass
class Found:
    """Gradients that user code cleared or wrote since they were shown."""

    cleared: list[Member] = field(default_factory=list)
    written: list[tuple[Member, Tensor]] = field(default_factory=list)


class GradientPlaceholders:
    """The placeholders and averaged gradients that we have put into `param.grad`."""

    def __init__(self, zero: Callable[[Member], None]) -> None:
        self.zero_gradient_of = zero
        self.shown: dict[Member, Tensor] = {}
        self.blank: dict[Member, Tensor] = {}  # tensors of NaN in the shapes of the parameters

    def show(self, members: Iterable[Member]) -> None:
        """Put placeholders into `grad` of these parameters, because their gradients are in a buffer."""
        with without_overrides():
            for member in members:
                param = member.param
                blank = self.blank.get(member)
                if blank is None or blank.dtype != param.dtype or blank.device != param.device:
                    scalar = placeholder_scalar(param.dtype, param.device)
                    blank = self.blank[member] = scalar.expand(param.shape)
                # A new one each time: one that user code has kept belongs to an earlier gradient.
                made = blank.as_subclass(GradPlaceholder)
                made.parameter, made.member, made.owner = member.name, member, weakref.ref(self)
                param.grad = self.shown[member] = made

    def hand_out(self, member: Member, gradient: Tensor) -> None:
        """Put this averaged gradient into `param.grad`."""
        member.param.grad = self.shown[member] = gradient

    def zero(self, placeholder: GradPlaceholder) -> None:
        """Set the gradient behind a placeholder to zero, if it is still the current one."""
        member = placeholder.member
        if member is not None and self.shown.get(member) is placeholder:
            self.zero_gradient_of(member)

    def changes(self) -> Found:
        """Return the gradients that user code cleared or replaced, each once."""
        found = Found()
        with without_overrides():
            for member, placeholder in list(self.shown.items()):
                grad = member.param.grad
                if grad is placeholder:
                    continue
                del self.shown[member]
                if grad is None:
                    found.cleared.append(member)
                else:
                    found.written.append((member, grad))
        # Placeholders of an earlier gradient, or converted ones.
        if empty := [member for member, grad in found.written if isinstance(grad, GradPlaceholder)]:
            raise RuntimeError(NO_VALUES.format(names_of(empty)))
        return found

    def lift(self) -> None:
        """Remove all placeholders from `param.grad`, because autograd would accumulate into them."""
        with without_overrides():
            for member, placeholder in self.shown.items():
                if member.param.grad is placeholder:
                    member.param.grad = None
        self.shown.clear()


def names_of(members: Iterable[Member]) -> str:
    """Join the parameters' names for a message, in an order that is equal on every rank."""
    return ", ".join(sorted(member.name for member in members))
