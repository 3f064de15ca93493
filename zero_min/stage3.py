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

from zero_min.adam import Adam, Groups, clip_by_global_norm
from zero_min.comm import Comm
from zero_min.stage0 import claim, gradient_or_zeros, master_of, trainable_groups
from zero_min.stage1 import flatten_dense_tensors_aligned, get_data_parallel_partitions

NAN = {t: torch.tensor(torch.nan, dtype=t) for t in (torch.float, torch.double, torch.half, torch.bfloat16)}


class Sliced:
    """One parameter: `mine`, this rank's slice, for good; `flat`, the padded whole, while it is gathered.

    `master` is what Adam steps, and `grad` the averaged gradient of the slice.
    """

    def __init__(self, name: str, param: Tensor, comm: Comm) -> None:
        self.name, self.param, self.comm = name, param, comm
        self.shape, self.numel = param.shape, param.numel()
        # --8<-- [start:ex_slice]
        self.flat = flatten_dense_tensors_aligned([param.data], comm.world_size)
        comm.broadcast(self.flat)  # everyone starts from rank 0's values
        self.mine = get_data_parallel_partitions(self.flat, comm.world_size)[comm.rank].clone()
        # --8<-- [end:ex_slice]
        self.master = master_of(self.mine) if param.requires_grad else self.mine
        self.grad: Tensor | None = None
        self.bytes, self.is_whole = self.flat.untyped_storage().nbytes(), True
        self.release()

    def gather(self) -> None:
        """Fill the whole from everybody's slice. The storage stays the same one for life."""
        if self.is_whole:
            return
        if not NAN[self.mine.dtype].isnan():
            NAN[self.mine.dtype].fill_(torch.nan)
            raise RuntimeError(f"a released parameter was written to; gather first ({self.name} was next)")
        # --8<-- [start:stage3_gather]
        self.flat.untyped_storage().resize_(self.bytes)  # views that autograd saved see it refilled
        self.comm.all_gather(self.flat, self.mine, label=self.name)  # (N-1)/N n
        self.param.data = self.flat[: self.numel].view(self.shape)
        # --8<-- [end:stage3_gather]
        self.is_whole = True

    def release(self) -> None:
        """Give the memory back; what remains has the right shape and reads NaN."""
        if self.is_whole:
            # --8<-- [start:stage3_release]
            self.param.data = NAN[self.mine.dtype].to(self.mine.device).expand(self.shape)
            self.flat.untyped_storage().resize_(0)
            # --8<-- [end:stage3_release]
            self.is_whole = False

    @torch.no_grad()
    def reduce_gradient(self) -> None:
        """The whole gradient becomes every owner's averaged slice, and is gone."""
        # --8<-- [start:ex_reduce]
        flat_grad = flatten_dense_tensors_aligned([gradient_or_zeros(self.param)], self.comm.world_size)
        parts = get_data_parallel_partitions(flat_grad, self.comm.world_size)
        my_grad = self.comm.reduce_scatter(parts, label=self.name) / self.comm.world_size  # (N-1)/N n
        self.grad = my_grad if self.grad is None else self.grad + my_grad
        self.param.grad = None
        # --8<-- [end:ex_reduce]


class Stage3:
    """Everything is sharded: between steps a rank holds 1/N of it all."""

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
        self.trained = [self.sliced[p] for group in param_groups for p in group["params"]]
        masters = [{**g, "params": [self.sliced[p].master for p in g["params"]]} for g in param_groups]
        self.optimizer = optimizer(masters, **options)
        self.in_backward = False
        self._watch_modules()

    def _watch_modules(self) -> None:
        users: dict[Tensor, list[nn.Module]] = {p: [] for p in self.sliced}
        for module in self.model.modules():
            for param in module.parameters(recurse=False):
                users[param].append(module)
        belongs: dict[nn.Module, list[Sliced]] = {module: [] for module in self.model.modules()}
        for p, modules in users.items():
            if len(modules) == 1:
                belongs[modules[0]].append(self.sliced[p])
            else:  # a tied weight belongs to the module around all its users
                belongs[self.model].append(self.sliced[p])
        for module, slices in belongs.items():
            if slices:
                self._watch(module, slices)
        for s in self.trained:
            s.param.register_post_accumulate_grad_hook(self._arrived)

    # --8<-- [start:stage3_hooks]
    def _watch(self, module: nn.Module, slices: list[Sliced]) -> None:
        """Have autograd and torch call us before and after this module, in forward and in backward."""

        def before_forward(module: nn.Module, arguments: Any) -> None:
            self._before(slices)

        def after_forward(module: nn.Module, arguments: Any, output: Any) -> None:
            outputs = [tensor for tensor in tree_leaves(output) if isinstance(tensor, Tensor)]
            for tensor in outputs:
                self._refuse_window(tensor, slices)
            self._after(slices, [tensor for tensor in outputs if tensor.requires_grad])

        module.register_forward_pre_hook(before_forward)
        module.register_forward_hook(after_forward)

    def _before(self, slices: list[Sliced]) -> None:
        """A module is about to run, forward or backward, and these are its parameters."""
        # --8<-- [start:ex_before]
        for s in slices:
            s.gather()
        # --8<-- [end:ex_before]

    def _after(self, slices: list[Sliced], outputs: list[Tensor]) -> None:
        """A module's forward is over. Backward, if there is one, will come through these outputs."""
        # --8<-- [start:ex_after]
        if not self.in_backward:  # activation checkpointing runs forward inside backward: keep it then
            for s in slices:
                s.release()

        def before_backward(grad: Tensor) -> None:
            self._before(slices)

        for output in outputs:  # its gradient is the first thing the module's backward needs
            output.register_hook(before_backward)
        # --8<-- [end:ex_after]

    def _arrived(self, param: Tensor) -> None:
        """Autograd calls this in the middle of backward, when `param.grad` is complete."""
        # --8<-- [start:ex_arrived]
        s = self.sliced[param]
        s.reduce_gradient()
        s.release()  # all its users have had their turn, or the gradient would not be complete
        # --8<-- [end:ex_arrived]

    # --8<-- [end:stage3_hooks]

    def _refuse_window(self, output: Tensor, slices: list[Sliced]) -> None:
        for s in slices:
            if s.bytes and output.untyped_storage().data_ptr() == s.flat.untyped_storage().data_ptr():
                raise ValueError(f"a module returns {s.name} itself or a view of it: return a clone")

    def backward(self, loss: Tensor) -> None:
        """Run backward; gradients leave as they finish."""
        self.in_backward = True
        try:
            loss.backward()
        finally:
            self.in_backward = False
            self.release_all()  # frozen and unused parameters get no gradient that would release them

    # --8<-- [start:stage3_step]
    @torch.no_grad()
    def step(self) -> float | None:
        """Step the own slices. The next forward gathers what it needs. Returns the clipped norm."""
        self.reduce_gradients()
        norm = self.clip_gradients()
        self.update()
        return norm

    def reduce_gradients(self) -> None:
        """Each owner has had its averaged gradient since backward; hand it to Adam."""
        self.release_all()
        for s in self.trained:
            s.master.grad = torch.zeros_like(s.master) if s.grad is None else s.grad.to(s.master.dtype)

    def clip_gradients(self) -> float | None:
        """If there is a limit, scale the gradients down to it. Everyone has slices, so everyone is asked."""
        if self.max_grad_norm is None:
            return None
        return clip_by_global_norm(self.master_gradients(), self.max_grad_norm, self.comm)

    def update(self) -> None:
        """Step the own slices; a 16-bit slice is rounded from its master."""
        self.optimizer.step()
        for s in self.trained:
            s.mine.copy_(s.master)
            s.master.grad = None

    # --8<-- [end:stage3_step]

    def master_gradients(self) -> list[Tensor]:
        """What Adam is about to use: the own slices'."""
        return [s.master.grad for s in self.trained if s.master.grad is not None]

    def zero_grad(self) -> None:
        """Let go of the gradients."""
        for s in self.trained:
            s.grad = s.master.grad = s.param.grad = None

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
        masters = [s.master for s in self.trained if s.master is not s.mine]
        return {
            "parameters": [t for s in self.sliced.values() for t in (s.mine, s.flat)],
            "gradients": [g for s in self.trained for g in (s.grad, s.master.grad, s.param.grad)],
            "optimizer": [*masters, *self.optimizer.state()],
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of a checkpoint: slices, so nothing has to be gathered."""
        buffers = {name: b.clone() for name, b in self.model.named_buffers()}
        slices = {s.name: (s.mine.clone(), s.master.clone()) for s in self.sliced.values()}
        return {"buffers": buffers, "slices": slices, "adam": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this rank's part."""
        self.release_all()
        for name, b in self.model.named_buffers():
            b.copy_(state["buffers"][name])
        for s in self.sliced.values():
            mine, master = state["slices"][s.name]
            s.mine.copy_(mine)
            s.master.copy_(master)
        self.optimizer.load_state_dict(state["adam"])
