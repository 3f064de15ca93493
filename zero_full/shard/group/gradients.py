"""A gradient bucket: gradients of the parameters of one flat buffer, which travel in one collective.

[Note: what travels] Every rank must send the same number of bytes, in the same type, equally often, whatever
its own backward has brought: a rank may have used none of a bucket's parameters. So the number, order and
type of reductions follow from what all ranks do alike (modules, passes, `no_sync`, the boundary), and never
from the gradients that are here. A bucket leaves once in a pass that reduces. What comes after it has left
waits for its next reduction, at the latest one before the step, if all ranks agree that some rank has such.

[Note: a gradient's way] Autograd leaves a gradient in `param.grad`. `take` moves it into `local_grads`, the
flat buffer of this rank's own gradients. `reduce` turns everyone's `local_grads` into `grad_slice`: the
average, of which each rank keeps its slice. Stage 0 is the case where a slice is everything.

    stages 0 and 1   `local_grads` stays; `grad_slice` is a window into it where the dtypes allow; reduced
                     once a step
    stages 2 and 3   `local_grads` is let go as soon as it is reduced; `grad_slice` adds up over the
                     micro-batches

Where state is repeated (`across`), slices are averaged with the other copies, too: from stage 2 on once a
step, behind the reduction of its last backward pass.

Where the rule that steps averages by itself (`averages`, at stage 0), `grad_slice` is this rank's own.

A rank that is alone has nobody to send to: then there is no `grad_slice`, the optimizer reads `param.grad`.

Where state waits on the host, and that is not the device's memory, `grad_slice` is there: slices go `down` as
soon as they are averaged, alone or not, and add up on the host. (Slices that are repeated add up on the
device until they are averaged with the other copies.) Who wants it calls `averaged_slice`, which waits.

[Note: asleep] A bucket whose parameters were all frozen at first is asleep: it has no gradients, its
parameters no masters, and nothing of it travels. It wakes up for good when one of its parameters is to be
trained.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from zero_full._compat import identity_of
from zero_full.offload.host_device_copies import Flow, HostSlice
from zero_full.precision.norms import all_finite
from zero_full.settings import Settings
from zero_full.shard.group.grad_placeholder import StandIn
from zero_full.shard.group.parameters import FlatParameter, Member
from zero_full.shard.group.process_groups import Reduce

SPARSE = "{} has a sparse gradient, and flat buffers of gradients are dense: use nn.Embedding(sparse=False)"


class Bucket:
    """See [Note: a gradient's way]."""

    def __init__(
        self,
        flat: FlatParameter,
        settings: Settings,
        divisors: tuple[float, float],
        reduce_slices: Reduce,
        flow: Flow | None = None,
    ) -> None:
        self.flat, self.settings, self.divisors = flat, settings, divisors
        self.reduce_slices = reduce_slices
        self.members, self.kind, self.layout = flat.members, flat.kind, flat.layout
        self.ranks, self.across, self.name = flat.ranks, flat.across, flat.name
        self.accumulate = settings.dtypes.accumulate_of(flat.dtype)
        self.asleep = self.kind.asleep
        self.down: HostSlice | None = None
        if flow is not None:
            self.down = HostSlice(flow, self.name, self.layout.shard, self.accumulate)
        alone = self.ranks.size == self.across.size == 1
        self.has_peers = not alone
        one_type = flat.dtype == self.accumulate == settings.dtypes.master_of(flat.dtype)
        self.is_average = alone and divisors == (1, 1)  # what this rank has
        self.uses_param_grad = self.is_average and one_type and settings.plain_divisor == 1 and flow is None
        self.local_grads: Tensor | None = None
        # Buffers that buckets of one optimizer hand on during a backward pass: on a CPU new pages cost more
        # than what is written to them. (On an accelerator the allocator does it, and it minds the streams.)
        self.spares: list[Tensor] = []
        self.grad_slice: Tensor | None = None
        self.averages: Callable[[], bool] = lambda: True  # whether the next step wants averages
        self.slice_is_valid = False
        self.slice_is_shared = False  # averaged over `across`, too
        self.arrived: set[Member] = set()
        self.local_finite: Tensor | None = None  # whether this rank's own gradients are; None: not known

    # This rank's own -----------------------------------------------------------------------------

    def take(self, member: Member, final: bool) -> None:
        """Move `param.grad` into the bucket. `final`: it will be reduced before anything is added."""
        grad = member.param.grad
        if grad is not None and not isinstance(grad, StandIn):
            member.param.grad = None
            self._copy_in(member, grad, final)

    def detach(self) -> list[tuple[Member, Tensor]]:
        """Take the gradients that are still in `param.grad` away, for `reduce` to copy them."""
        grads = [(member, member.param.grad) for member in self.members]
        here = [
            (member, grad) for member, grad in grads if grad is not None and not isinstance(grad, StandIn)
        ]
        for member, _ in here:
            member.param.grad = None
        return here

    def _copy_in(self, member: Member, grad: Tensor, final: bool) -> None:
        if grad.layout != torch.strided:
            raise TypeError(SPARSE.format(member.name))
        local = self._room_for(grad.dtype, member, final)
        window = local[self.layout.window(member.index)].view(grad.shape)
        if member in self.arrived:
            window.add_(grad)
        else:
            window.copy_(grad)
            self.arrived.add(member)

    def _room_for(self, dtype: torch.dtype, member: Member, final: bool) -> Tensor:
        self._part_slice()
        if not self.arrived:
            return self._reserve(dtype if final else self.accumulate)
        local = self.local_grads
        assert local is not None
        if member in self.arrived and local.dtype != self.accumulate:
            local = self.local_grads = local.to(self.accumulate)  # it was to be final, and is not
        return local

    def _part_slice(self) -> None:
        """A step's gradients were reduced, and more come: what was reduced must not be written over."""
        if self.down is not None and not self.settings.frees_gradients:
            self.down.let_go()
        if self.slice_is_valid and self._slice_is_a_window():
            assert self.grad_slice is not None
            self.grad_slice = self.grad_slice.clone()

    def _reserve(self, dtype: torch.dtype) -> Tensor:
        """A flat buffer whose padding is zero; the rest is written over as gradients arrive."""
        local = self.local_grads
        if local is None or local.dtype != dtype:
            if self._slice_is_a_window():
                self.grad_slice = None  # it would keep the old buffer alive
            local = self.local_grads = self._memory(dtype)
            end = 0
            for index, start in enumerate(self.layout.starts):
                local[end:start].zero_()
                end = start + self.layout.numels[index]
            local[end:].zero_()
        return local

    def _memory(self, dtype: torch.dtype) -> Tensor:
        """Room for all gradients: another bucket's, if it is done with it. See `spares`."""
        with suppress(IndexError):  # a reduction on another thread may be faster
            spare = self.spares.pop()
            if spare.dtype == dtype and spare.numel() >= self.layout.total:
                return spare[: self.layout.total]
        return torch.empty(self.layout.total, dtype=dtype, device=self.kind.device)

    def _slice_is_a_window(self) -> bool:
        if self.grad_slice is None or self.local_grads is None:
            return False
        mine, everything = self.grad_slice.untyped_storage(), self.local_grads.untyped_storage()
        return identity_of(mine) == identity_of(everything)

    # Averaged ------------------------------------------------------------------------------------

    def reduce(self, detached: Sequence[tuple[Member, Tensor]], wire: torch.dtype, last: bool) -> None:
        """Average everyone's gradients, which travel as `wire`, and keep this rank's slice.

        `detached`: gradients that are not in the buffer yet. `last`: for the last time in this step.
        """
        for member, grad in detached:
            self._copy_in(member, grad, final=True)
        self._part_slice()
        local = self.local_grads
        if local is None or not self.arrived:
            local = self._reserve(self.flat.dtype)
        for member in self.members:
            if member not in self.arrived:  # not used: its gradient is zero
                local[self.layout.window(member.index)].zero_()
        if self.settings.needs_norm:
            self._note_whether_finite(local)
        self._average(local, wire, last)
        self.arrived.clear()
        if self.settings.frees_gradients:
            if self.kind.device.type == "cpu" and not (self.down is not None and self.is_average):
                self.spares.append(local)
            self.local_grads = None
        if last:
            self.share_slice()

    def _average(self, local: Tensor, wire: torch.dtype, last: bool) -> None:
        keep = not self.settings.frees_gradients and not self.slice_is_valid
        if not self.averages():
            copies = keep and local.dtype != self.accumulate
            return self._add_to_slice(self._slice_memory().copy_(local) if copies else local, last)
        sent = local.to(wire)
        if self.down is not None and self.is_average:  # in its own type, of fewer bytes perhaps
            if self.settings.frees_gradients:
                self.down.flow.wait_for_turn()
            return self._add_to_slice(sent, last)
        in_place = keep and sent is local and local.dtype == self.accumulate
        out = self.ranks.slice_of(local) if in_place else self._slice_memory()
        before, after = self.divisors
        if before != 1:
            sent.div_(before)
        share_now = self.across.size > 1 and (not self.settings.frees_gradients or self.slice_is_shared)
        self._sum(sent, out, 1 if share_now else after)
        if share_now:
            self._share(out, after, sent.dtype)
        self._add_to_slice(out, last)

    def _add_to_slice(self, more: Tensor, last: bool) -> None:
        if self.down is not None and not self._is_to_be_shared():
            self.down.receive(more, adds=self.slice_is_valid, last=last)
            self.grad_slice, self.slice_is_valid = self.down.memory, True
        elif self.slice_is_valid:
            assert self.grad_slice is not None
            self.grad_slice.add_(more)
        else:
            self.grad_slice, self.slice_is_valid = more, True

    def _sum(self, sent: Tensor, out: Tensor, divisor: float) -> None:
        what = f"gradients {self.name}"
        if self.settings.reduce_scatter:
            self.reduce_slices(sent, out, divisor, what)
            return
        self.ranks.all_reduce(sent, divisor, what)
        if self.ranks.slice_of(sent).data_ptr() != out.data_ptr():
            out.copy_(self.ranks.slice_of(sent))

    def _share(self, gradients: Tensor, divisor: float, wire: torch.dtype) -> None:
        sent = gradients.to(wire)
        self.across.all_reduce(sent, divisor, f"gradients {self.name}")
        if sent is not gradients:
            gradients.copy_(sent)

    def _is_to_be_shared(self) -> bool:
        return self.settings.frees_gradients and self.across.size > 1 and not self.slice_is_shared

    def share_slice(self) -> None:
        """Average this rank's slice over the groups that hold the same one, once a step."""
        if self.slice_is_valid and self._is_to_be_shared():
            mine = self.grad_slice
            assert mine is not None
            self._share(mine, 1, self.settings.dtypes.reduce or mine.dtype)
            self.slice_is_shared = True
            if self.down is not None:
                self.down.receive(mine, adds=False, last=True)
                self.grad_slice = self.down.memory

    def _slice_memory(self) -> Tensor:
        """Memory for an averaged slice: last step's, if it is free."""
        before = self.grad_slice
        if self.down is not None:
            self.down.flow.wait_for_turn()
        elif before is not None and not self.slice_is_valid and before.dtype == self.accumulate:
            return before
        return torch.empty(self.layout.shard, dtype=self.accumulate, device=self.kind.device)

    def _note_whether_finite(self, local: Tensor) -> None:
        """Remember, without waiting for it, whether this rank's own gradients are finite."""
        finite = all_finite([local], local.device)
        self.local_finite = finite if self.local_finite is None else self.local_finite & finite

    # By hand -------------------------------------------------------------------------------------

    def drop(self, member: Member) -> None:
        """This parameter's gradient becomes zero."""
        self.arrived.discard(member)
        gradient = self.gradient_of(member)
        if gradient is not None and self.slice_is_valid:
            gradient.zero_()

    def put(self, member: Member, gradient: Tensor) -> None:
        """This parameter's averaged gradient becomes another one, of which this rank keeps its part."""
        self.arrived.discard(member)
        if not self.slice_is_valid:
            self.grad_slice = self._slice_memory().zero_() if self.down is None else self.down.zero()
            self.slice_is_valid = self.slice_is_shared = True
        mine = self.averaged_slice()
        assert mine is not None
        self.flat.write(mine, member, gradient)

    # What there is -------------------------------------------------------------------------------

    def averaged_gradients(self) -> list[Tensor]:
        """This rank's averaged gradients, as few tensors as possible."""
        if not self.uses_param_grad:
            mine = self.averaged_slice()
            return [] if mine is None else [mine]
        return [m.param.grad for m in self.members if m.param.grad is not None]

    def averaged_slice(self) -> Tensor | None:
        """This rank's slice of the averaged gradients, once it is where it is stepped, if there is one."""
        if self.grad_slice is None or not self.slice_is_valid:
            return None
        return self.down.arrived() if self.down is not None and self.is_down else self.grad_slice

    @property
    def is_down(self) -> bool:
        """Whether the averaged slice is on the host, or on its way."""
        slice_ = self.grad_slice
        return self.down is not None and slice_ is not None and slice_ is self.down.memory

    def gradient_of(self, member: Member) -> Tensor | None:
        """The averaged gradient of what this rank owns of a parameter, if it owns any and there is one."""
        if self.uses_param_grad:
            return member.param.grad
        mine = self.averaged_slice()
        return None if mine is None else self.flat.piece_of(mine, member)

    def averaged(self, member: Member) -> Tensor:
        """A whole averaged gradient, in the parameter's type. Only stage 0 has one."""
        gradient = self.gradient_of(member)
        assert gradient is not None
        return gradient.view(member.param.shape).to(member.param.dtype)

    def forget(self, free: bool) -> None:
        """Let go of the gradients; `free`: of their memory, too."""
        for member in self.members:
            member.param.grad = None
        self.arrived.clear()
        self.slice_is_valid = self.slice_is_shared = False
        self.local_finite = None
        if self.down is not None:
            self.down.forget()
            self.grad_slice = None
        if free:
            self.local_grads = self.grad_slice = None

    def gradient_memory(self) -> Iterator[Tensor]:
        """Every tensor of the device that holds gradients."""
        on_device = self.local_grads, None if self.is_down else self.grad_slice
        yield from (t for t in on_device if t is not None)
        grads = (m.param.grad for m in self.members)
        yield from (grad for grad in grads if grad is not None and not isinstance(grad, StandIn))
