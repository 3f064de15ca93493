"""A bucket: parameters that live in one flat buffer and whose gradients travel in one collective.

[Note: a gradient's way] Autograd leaves a gradient in `param.grad`. `take` moves it into `whole`, the flat
buffer of this rank's own gradients. `reduce` turns everyone's `whole` into `own`: the average, of which
each rank keeps its slice. Stage 0 is the case where a slice is everything.

    stages 0 and 1   `whole` stays; `own` is a window into it where the dtypes allow; reduced once a step
    stages 2 and 3   `whole` is let go as soon as it is reduced; `own` adds up over the micro-batches

Where state is repeated (`across`), slices are averaged with the other copies, too: from stage 2 on once a
step.

A rank that is alone has nobody to send to: then `own` does not exist, the optimizer reads `param.grad`.

[Note: asleep] A bucket whose parameters were all frozen at first is asleep: it has neither masters nor
gradients, and nothing of it travels. It wakes up for good when one of its parameters is to be trained.
"""

from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_full._compat import identity_of
from zero_full.kernels.reference import unless_written
from zero_full.layout import Fragment
from zero_full.precision.norms import squared_norm
from zero_full.shard.flat import FlatParameter, Member
from zero_full.shard.groups import Reduce
from zero_full.shard.settings import Settings
from zero_full.shard.stand_in import StandIn


@dataclass(frozen=True, eq=False)
class Owned:
    """What this rank owns of a parameter: the tensor that the optimizer sees."""

    member: Member
    fragment: Fragment
    master: Tensor


class Bucket:
    """See [Note: a gradient's way]."""

    def __init__(
        self,
        flat: FlatParameter,
        settings: Settings,
        divisors: tuple[float, float],
        reduce_slices: Reduce,
        deferred: bool = False,
    ) -> None:
        self.flat, self.settings, self.divisors = flat, settings, divisors
        self.reduce_slices = reduce_slices
        self.members, self.kind, self.layout = flat.members, flat.kind, flat.layout
        self.ranks, self.across, self.name = flat.ranks, flat.across, flat.name
        dtypes, original = settings.dtypes, flat.reserve() if deferred else flat.move_in()
        self.accumulate = dtypes.accumulate_of(flat.dtype)
        self.master_dtype = dtypes.master_of(flat.dtype)
        self.asleep, one_type = self.kind.asleep, flat.dtype == self.master_dtype
        if self.asleep or one_type:
            self._let_master_be(flat.shard)
        else:
            self._let_master_be(original.to(self.master_dtype, copy=True))
        alone = self.ranks.size == self.across.size == 1
        plain = flat.dtype == self.accumulate and not settings.divides_plain_backward and divisors == (1, 1)
        self.uses_param_grad = alone and one_type and plain
        self.local_grads: Tensor | None = None
        # Buffers that buckets of one optimizer hand on during a backward pass: on a CPU new pages cost more
        # than what is written to them. (On an accelerator the allocator does it, and it minds the streams.)
        self.spares: list[Tensor] = []
        self.grad_slice: Tensor | None = None
        self.slice_is_valid = False
        self.slice_is_shared = False  # averaged over `across`, too
        self.arrived: set[Member] = set()
        self.local_finite: Tensor | None = None  # not finite if this rank's own gradients are not

    # Parameters ----------------------------------------------------------------------------------

    def _let_master_be(self, master: Tensor) -> None:
        self.master = master
        self.owned = [
            Owned(self.members[fragment.index], fragment, self._view(master, fragment))
            for fragment in self.flat.fragments()
        ]

    def wake(self) -> None:
        """Masters appear; whoever knows the old fragments must learn the new ones. See [Note: asleep]."""
        self.asleep = False
        if self.flat.dtype != self.master_dtype:
            self._let_master_be(self.flat.shard.to(self.master_dtype))

    def _view(self, own: Tensor, fragment: Fragment) -> Tensor:
        """A fragment's part of this rank's slice. In the parameter's own shape where nothing is cut."""
        flat, shape = self.flat.cut(own, fragment), self.members[fragment.index].param.shape
        return flat.view(shape) if self.layout.world == 1 or not shape else flat

    def copy_master(self) -> None:
        """This rank's slice of the parameters becomes what its master says."""
        self.flat.node_copy = None
        if self.master is not self.flat.shard:
            self.flat.shard.copy_(self.master)

    @torch.no_grad()
    def follow_parameters(self, released: bool = False) -> None:
        """Masters take what somebody has written to this rank's slice of the parameters.

        `released`: even if it is a unit's, which nobody can write to but `GatheredParameters`.
        """
        own = self.flat.shard
        if self.master is own or (self.flat.released_at_rest and not released):
            return
        as_it_was = own.device.type == "cpu" and torch.equal(  # elsewhere it would cost a wait for the device
            self.master.to(own.dtype).view(torch.int16), own.view(torch.int16)
        )
        if as_it_was:
            return
        self.master.copy_(unless_written(self.master, own))

    def own_views(self, owned: Sequence[Owned]) -> list[Tensor]:
        """These fragments of this rank's slice of the parameters; none where the masters are views of it."""
        if self.master is self.flat.shard:
            return []
        return [self._view(self.flat.shard, each.fragment) for each in owned]

    def fill(self, member: Member, value: Tensor) -> None:
        """Give a parameter and its master new values. Every rank must do the same."""
        self.flat.fill(member, value)
        if self.master is not self.flat.shard:
            self.flat.write(self.master, member, value)

    # Gradients -----------------------------------------------------------------------------------

    def take(self, member: Member, final: bool) -> None:
        """Move `param.grad` into the bucket. `final`: it will be reduced before anything is added."""
        grad = member.param.grad
        if grad is None or isinstance(grad, StandIn):
            return
        if grad.layout != torch.strided:
            raise TypeError(f"{member.name} has a sparse gradient; use nn.Embedding(sparse=False)")
        whole = self._room_for(grad.dtype, member, final)
        window = whole[self.layout.window(member.index)].view(grad.shape)
        if member in self.arrived:
            window.add_(grad)
        else:
            window.copy_(grad)
            self.arrived.add(member)
        member.param.grad = None

    def _room_for(self, dtype: torch.dtype, member: Member, final: bool) -> Tensor:
        self._part_own()
        if not self.arrived:
            self._let_whole_be(dtype if final else self.accumulate)
        elif (
            self.local_grads is not None
            and member in self.arrived
            and self.local_grads.dtype != self.accumulate
        ):
            self.local_grads = self.local_grads.to(self.accumulate)  # it was to be final, and is not
        assert self.local_grads is not None
        return self.local_grads

    def _part_own(self) -> None:
        """A step's gradients were reduced, and more come: what was reduced must not be written over."""
        if self.slice_is_valid and self._own_is_a_window():
            assert self.grad_slice is not None
            self.grad_slice = self.grad_slice.clone()

    def _let_whole_be(self, dtype: torch.dtype) -> None:
        """A flat buffer whose padding is zero; the rest is written over as gradients arrive."""
        if self.local_grads is None or self.local_grads.dtype != dtype:
            if self._own_is_a_window():
                self.grad_slice = None  # it would keep the old buffer alive
            self.local_grads = self._room(dtype)
            end = 0
            for index, start in enumerate(self.layout.starts):
                self.local_grads[end:start].zero_()
                end = start + self.layout.numels[index]
            self.local_grads[end:].zero_()

    def _room(self, dtype: torch.dtype) -> Tensor:
        """Memory for all gradients: another bucket's, if it is done with it. See `spares`."""
        with suppress(IndexError):  # a reduction on another thread may be faster
            spare = self.spares.pop()
            if spare.dtype == dtype and spare.numel() >= self.layout.total:
                return spare[: self.layout.total]
        return torch.empty(self.layout.total, dtype=dtype, device=self.kind.device)

    def _own_is_a_window(self) -> bool:
        if self.grad_slice is None or self.local_grads is None:
            return False
        storages = self.grad_slice.untyped_storage(), self.local_grads.untyped_storage()
        return identity_of(storages[0]) == identity_of(storages[1])

    def reduce(self) -> None:
        """Average everyone's gradients; keep this rank's slice of them."""
        for member in self.members:
            self.take(member, final=True)
        self._part_own()
        if self.local_grads is None or not self.arrived:
            self._let_whole_be(self.flat.dtype)
        assert self.local_grads is not None
        for member in self.members:
            if member not in self.arrived:  # not used: its gradient is zero
                self.local_grads[self.layout.window(member.index)].zero_()
        self._note_whether_finite(self.local_grads)
        self._average(self.local_grads)
        self.arrived.clear()
        if self.settings.stage >= 2:
            if self.kind.device.type == "cpu":
                self.spares.append(self.local_grads)
            self.local_grads = None

    def _average(self, whole: Tensor) -> None:
        keep = self.settings.stage < 2 and not self.slice_is_valid
        flat = whole.to(self.settings.dtypes.reduce or whole.dtype)
        in_place = keep and flat is whole and whole.dtype == self.accumulate
        out = self.ranks.slice_of(whole) if in_place else self._slice_buffer()
        before, after = self.divisors
        if before != 1:
            flat.div_(before)
        share_now = self.across.size > 1 and (self.settings.stage < 2 or self.slice_is_shared)
        self._sum(flat, out, 1 if share_now else after)
        if share_now:
            self._share(out, after, flat.dtype)
        if self.slice_is_valid:
            assert self.grad_slice is not None
            self.grad_slice.add_(out)
        else:
            self.grad_slice, self.slice_is_valid = out, True

    def _sum(self, flat: Tensor, out: Tensor, divisor: float) -> None:
        what = f"gradients {self.name}"
        if self.settings.reduce_scatter:
            self.reduce_slices(flat, out, divisor, what)
            return
        self.ranks.all_reduce(flat, divisor, what)
        if self.ranks.slice_of(flat).data_ptr() != out.data_ptr():
            out.copy_(self.ranks.slice_of(flat))

    def _share(self, gradients: Tensor, divisor: float, wire: torch.dtype) -> None:
        sent = gradients.to(wire)
        self.across.all_reduce(sent, divisor, f"gradients {self.name}")
        if sent is not gradients:
            gradients.copy_(sent)

    def share_own(self) -> None:
        """Average this rank's slice over the groups that hold the same one, once a step."""
        if self.settings.stage >= 2 and self.across.size > 1 and not self.slice_is_shared:
            assert self.grad_slice is not None
            self._share(self.grad_slice, 1, self.settings.dtypes.reduce or self.grad_slice.dtype)
            self.slice_is_shared = True

    def _slice_buffer(self) -> Tensor:
        """Memory for an averaged slice: last step's, if it is free."""
        if (
            self.grad_slice is not None
            and not self.slice_is_valid
            and self.grad_slice.dtype == self.accumulate
        ):
            return self.grad_slice
        return torch.empty(self.layout.shard, dtype=self.accumulate, device=self.kind.device)

    def _note_whether_finite(self, whole: Tensor) -> None:
        """Remember, without waiting for it, whether this rank's own gradients are finite."""
        total = squared_norm([whole], whole.device)
        self.local_finite = total if self.local_finite is None else self.local_finite + total

    def drop(self, member: Member) -> None:
        """This parameter's gradient becomes zero."""
        self.arrived.discard(member)
        for owned in self.owned:
            if owned.member is member and self.slice_is_valid:
                gradient = self.gradient_of(owned)
                assert gradient is not None
                gradient.zero_()

    def put(self, member: Member, gradient: Tensor) -> None:
        """This parameter's averaged gradient becomes another one, of which this rank keeps its part."""
        self.arrived.discard(member)
        if not self.slice_is_valid:
            self.grad_slice = self._slice_buffer().zero_()
            self.slice_is_valid = self.slice_is_shared = True
        for owned in self.owned:
            if owned.member is member:
                start, stop = owned.fragment.param_range
                mine = self.gradient_of(owned)
                assert mine is not None
                mine.copy_(gradient.reshape(-1)[start:stop].view(mine.shape))

    def own_gradients(self) -> list[Tensor]:
        """This rank's averaged gradients, as few tensors as possible."""
        if not self.uses_param_grad:
            return [self.grad_slice] if self.grad_slice is not None and self.slice_is_valid else []
        return [m.param.grad for m in self.members if m.param.grad is not None]

    def hand_over(self, used: Container[Member]) -> None:
        """Give the optimizer's tensors their gradients, where any rank has one."""
        own = (
            None if self.grad_slice is None or self.uses_param_grad else self.grad_slice.to(self.master.dtype)
        )
        for owned in self.owned:
            if owned.member in used:
                owned.master.grad = (
                    owned.member.param.grad if own is None else self._view(own, owned.fragment)
                )

    def take_back(self) -> None:
        """The optimizer's tensors have no gradients any more."""
        for owned in self.owned:
            owned.master.grad = None

    def gradient_of(self, owned: Owned) -> Tensor | None:
        """The averaged gradient of a fragment, if there is one now."""
        if self.uses_param_grad:
            return owned.member.param.grad
        return (
            self._view(self.grad_slice, owned.fragment)
            if self.grad_slice is not None and self.slice_is_valid
            else None
        )

    def averaged(self, member: Member) -> Tensor:
        """A whole averaged gradient, in the parameter's type. Only stage 0 has one."""
        (owned,) = (owned for owned in self.owned if owned.member is member)
        gradient = self.gradient_of(owned)
        assert gradient is not None
        return gradient.view(member.param.shape).to(member.param.dtype)

    def forget(self, free: bool) -> None:
        """Let go of the gradients; `free`: of their memory, too."""
        for member in self.members:
            member.param.grad = None
        self.take_back()
        self.arrived.clear()
        self.slice_is_valid = self.slice_is_shared = False
        self.local_finite = None
        if free:
            self.local_grads = self.grad_slice = None

    def gradient_memory(self) -> Iterator[Tensor]:
        """Every tensor that holds gradients."""
        yield from (t for t in (self.local_grads, self.grad_slice) if t is not None)
        grads = (m.param.grad for m in self.members)
        yield from (grad for grad in grads if grad is not None and not isinstance(grad, StandIn))
