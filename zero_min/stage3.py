"""Step 3. ZeRO stage 3: the parameters, too, live in slices.

Each tensor is cut into N slices and every rank keeps one. A module's parameters are gathered just before
it runs, released right after, gathered again for its backward, and released when the gradient has gone to
its owners. In between a parameter keeps its shape but reads NaN, so that misuse is seen at once.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zero_min.adam import Adam, Groups
from zero_min.comm import Comm
from zero_min.stage0 import claim, gradient_or_zeros, master_of, trainable_groups
from zero_min.stage1 import Stage1, flatten_dense_tensors_aligned, get_data_parallel_partitions

NAN = {t: torch.tensor(torch.nan, dtype=t) for t in (torch.float, torch.double, torch.half, torch.bfloat16)}


class Sliced:
    """One parameter: this rank's slice for good, and room for the whole while it is gathered."""

    def __init__(self, name: str, param: Tensor, comm: Comm) -> None:
        self.name, self.param, self.comm = name, param, comm
        self.shape, self.numel = param.shape, param.numel()
        # --8<-- [start:ex_slice]
        self.whole = flatten_dense_tensors_aligned([param.data], comm.world_size)
        comm.broadcast(self.whole)  # everyone starts from rank 0's values
        self.own = get_data_parallel_partitions(self.whole, comm.world_size)[comm.rank].clone()
        # --8<-- [end:ex_slice]
        self.shard = master_of(self.own) if param.requires_grad else self.own  # what Adam steps
        self.grad: Tensor | None = None
        self.bytes, self.is_whole = self.whole.untyped_storage().nbytes(), True
        self.release()

    def gather(self) -> None:
        """Fill the whole from everybody's slice. The storage stays the same one for life."""
        if self.is_whole:
            return
        if not NAN[self.own.dtype].isnan():
            NAN[self.own.dtype].fill_(torch.nan)
            raise RuntimeError(f"a released parameter was written to; gather first ({self.name} was next)")
        # --8<-- [start:ex_gather]
        self.whole.untyped_storage().resize_(self.bytes)  # views that autograd saved see it refilled
        self.comm.all_gather(self.whole, self.own, label=self.name)  # (N-1)/N n
        self.param.data = self.whole[: self.numel].view(self.shape)
        # --8<-- [end:ex_gather]
        self.is_whole = True

    def release(self) -> None:
        """Give the memory back; what remains has the right shape and reads NaN."""
        if self.is_whole:
            # --8<-- [start:ex_release]
            self.param.data = NAN[self.own.dtype].to(self.own.device).expand(self.shape)
            self.whole.untyped_storage().resize_(0)
            # --8<-- [end:ex_release]
            self.is_whole = False

    @torch.no_grad()
    def reduce_gradient(self) -> None:
        """The whole gradient becomes every owner's averaged slice, and is gone."""
        # --8<-- [start:ex_reduce]
        flat = flatten_dense_tensors_aligned([gradient_or_zeros(self.param)], self.comm.world_size)
        parts = get_data_parallel_partitions(flat, self.comm.world_size)
        mine = self.comm.reduce_scatter(parts, label=self.name) / self.comm.world_size  # (N-1)/N n
        self.grad = mine if self.grad is None else self.grad + mine
        self.param.grad = None
        # --8<-- [end:ex_reduce]


class Stage3(Stage1):
    """Everything is sharded: between steps a rank holds 1/N of it all. The step itself is stage 1's."""

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        groups: Groups | None = None,
        optimizer: type[Adam] = Adam,
        max_grad_norm: float | None = None,
        **options: Any,
    ) -> None:
        claim(model)
        self.model, self.comm, self.max_grad_norm = model, comm, max_grad_norm
        param_groups = trainable_groups(model, groups)
        self.sliced: dict[Tensor, Sliced] = {p: Sliced(n, p, comm) for n, p in model.named_parameters()}
        self.flats = [self.sliced[p] for group in param_groups for p in group["params"]]
        shards = [{**g, "params": [self.sliced[p].shard for p in g["params"]]} for g in param_groups]
        self.optimizer = optimizer(shards, **options)
        self.norm_comm, self.in_backward = comm, False
        self._watch_modules()

    def _watch_modules(self) -> None:
        users: dict[Tensor, list[nn.Module]] = {p: [] for p in self.sliced}
        for module in self.model.modules():
            for param in module.parameters(recurse=False):
                users[param].append(module)
        owned: dict[nn.Module, list[Sliced]] = {}
        for p, modules in users.items():  # a tied weight belongs to the module around all its users
            owned.setdefault(modules[0] if len(modules) == 1 else self.model, []).append(self.sliced[p])
        for module, slices in owned.items():
            module.register_forward_pre_hook(lambda *_, slices=slices: self._before(slices))
            module.register_forward_hook(lambda m, args, out, slices=slices: self._after_forward(slices, out))
        for s in self.flats:
            s.param.register_post_accumulate_grad_hook(self._gradient_arrived)

    # --8<-- [start:stage3_hooks]
    def _before(self, slices: list[Sliced]) -> None:
        for s in slices:  # before a module's forward, and again before its backward
            s.gather()

    def _after_forward(self, slices: list[Sliced], output: Any) -> None:
        for tensor in (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)):
            self._refuse_window(tensor, slices)
            if tensor.requires_grad:  # its gradient is the first thing the module's backward needs
                tensor.register_hook(lambda grad: self._before(slices))
        if not self.in_backward:  # activation checkpointing runs forward inside backward: keep it then
            for s in slices:
                s.release()

    def _refuse_window(self, output: Tensor, slices: list[Sliced]) -> None:
        for s in slices:
            if s.bytes and output.untyped_storage().data_ptr() == s.whole.untyped_storage().data_ptr():
                raise ValueError(f"a module returns {s.name} itself or a view of it: return a clone")

    def _gradient_arrived(self, param: Tensor) -> None:
        s = self.sliced[param]
        s.reduce_gradient()
        s.release()  # all its users have had their turn, or the gradient would not be complete

    # --8<-- [end:stage3_hooks]

    def backward(self, loss: Tensor) -> None:
        """Run backward; gradients leave as they finish."""
        self.in_backward = True
        try:
            loss.backward()
        finally:
            self.in_backward = False
            self.release_all()  # frozen and unused parameters get no gradient that would release them

    def reduce_gradients(self) -> None:
        """Each owner has had its averaged gradient since backward; hand it to Adam."""
        self.release_all()
        for s in self.flats:
            s.shard.grad = torch.zeros_like(s.shard) if s.grad is None else s.grad.to(s.shard.dtype)

    def update(self) -> None:
        """Step the own slices; a 16-bit slice is rounded from its master."""
        self.optimizer.step()
        for s in self.flats:
            s.own.copy_(s.shard)
            s.shard.grad = None

    def zero_grad(self) -> None:
        """Let go of the gradients."""
        for s in self.flats:
            s.grad = s.shard.grad = s.param.grad = None

    def release_all(self) -> None:
        """Release whatever is still whole."""
        for s in self.sliced.values():
            s.release()

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Inside the `with`, all parameters are whole, for reading on every rank."""
        self._before(list(self.sliced.values()))
        try:
            yield self.model
        finally:
            self.release_all()

    def holdings(self) -> dict[str, list[Tensor | None]]:
        """What this rank keeps, by kind."""
        masters = [s.shard for s in self.flats if s.shard is not s.own]
        grads = [g for s in self.flats for g in (s.grad, s.shard.grad, s.param.grad)]
        params = [t for s in self.sliced.values() for t in (s.own, s.whole)]
        return {"parameters": params, "gradients": grads, "optimizer": [*masters, *self.optimizer.state()]}

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of a checkpoint: slices, so nothing has to be gathered."""
        buffers = {name: b.clone() for name, b in self.model.named_buffers()}
        shards = {s.name: (s.own.clone(), s.shard.clone()) for s in self.sliced.values()}
        return {"buffers": buffers, "shards": shards, "adam": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this rank's part."""
        self.release_all()
        for name, b in self.model.named_buffers():
            b.copy_(state["buffers"][name])
        for s in self.sliced.values():
            for mine, saved in zip((s.own, s.shard), state["shards"][s.name], strict=True):
                mine.copy_(saved)
        self.optimizer.load_state_dict(state["adam"])
