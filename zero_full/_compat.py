"""The private or renamed parts of torch (and one of Python) that the package uses; no other file names them.

Each helper says what it is for. A change in torch shows here first: as an AttributeError when this module is
imported, or in the test of what the helper is for.
"""

import atexit
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FakeTensorMode", "TorchDispatchMode"]  # handed on under torch's names; the rest is made here

# torch 2.13 renamed these two; torch 2.11 knows only the old names.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# Tensors ---------------------------------------------------------------------------------------------

# What a tensor has beside its values, as properties without a public name.
BESIDE_VALUES = ("_version", "_backward_hooks", "_post_accumulate_grad_hooks")
BACKWARD_HOOKS = "_backward_hooks"  # the first `register_hook` of a tensor sets it
VIEWED = "_base"  # the tensor that another one is a view of
has_compatible_type = torch._has_compatible_shallow_copy_type  # asked when a module is converted
typed_storage = Tensor._typed_storage  # what `Tensor.storage` and pickle call to get at the memory
foreach_zero = torch._foreach_zero_  # what an optimizer's `zero_grad(set_to_none=False)` calls on gradients
foreach_add = torch._foreach_add_  # many additions in one call; without it, one call a tensor


def calling_ddp() -> Any:
    """The DistributedDataParallel whose forward is under way in this process, or None."""
    return torch.nn.parallel.DistributedDataParallel._active_ddp_module


def version_of(tensor: Tensor) -> int:
    """How often the tensor was written to in place: the only sign of a write that torch gives."""
    return tensor._version


def identity_of(storage: torch.UntypedStorage) -> int:
    """The same number for every view of a piece of memory, as long as it lives, also while it is empty."""
    return int(storage._cdata)


def instance_of(kind: type[Any], tensor: Tensor) -> Any:
    """A new `kind` that shares the tensor's memory. `as_subclass` would ask `__torch_function__`."""
    return Tensor._make_subclass(kind, tensor)


class ParameterInWaiting(Tensor):
    """A tensor of another class that `nn.Parameter(tensor)` can make a parameter of, by `become_parameter`.

    torch sets `_is_param` on such a tensor, and asks it in `isinstance(tensor, nn.Parameter)`; which subclass
    of `nn.Parameter` is wanted only its `__new__` knows. If that changes, the tensor becomes a plain one.
    """

    def is_parameter(self) -> bool:
        """Whether it is a parameter by now."""
        raise NotImplementedError

    def become_parameter(self, kind: type[nn.Parameter]) -> None:
        """From now on it is a parameter of this class."""
        raise NotImplementedError

    @property
    def _is_param(self) -> bool:
        return self.is_parameter()

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        self.become_parameter(sys._getframe(1).f_locals.get("cls", nn.Parameter))


# Functions and operations ----------------------------------------------------------------------------

without_overrides = torch._C.DisableTorchFunctionSubclass  # a block in which subclasses are plain tensors
without_functions = torch._C.DisableTorchFunction  # the same, and no TorchFunctionMode hears of anything


def arguments_of(operation: Any) -> list[Any]:
    """The declared arguments of a `torch.ops` operation: their names, and which of them it writes to."""
    return list(operation._schema.arguments)


def reads_value(operation: Any) -> bool:
    """Whether this is the `torch.ops` operation that `item`, `float` and `if tensor:` come to."""
    return operation is torch.ops.aten._local_scalar_dense.default


def returns_new(operation: Any) -> bool:
    """Whether what a `torch.ops` operation returns is neither a view nor one of its arguments."""
    return all(each.alias_info is None for each in operation._schema.returns)


def default_device_context(device: torch.device) -> Any:
    """The context that `with device:` enters, as an object whose device can be changed meanwhile."""
    return DeviceContext(device)


def inside_transform() -> bool:
    """Whether `torch.func.grad`, `vmap` or another transform is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None


# Backward passes -------------------------------------------------------------------------------------


def current_backward() -> int:
    """The number of the backward pass that runs in this thread, or -1. A recomputed part has its own."""
    return torch._C._current_graph_task_id()


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward pass that calls this is complete."""
    Variable._execution_engine.queue_callback(callback)


def is_last_hook(param: Tensor, handle: Any) -> bool:
    """Whether this post-accumulate hook runs after all others of the parameter."""
    return bool(next(reversed(param._post_accumulate_grad_hooks)) == handle.id)


# Modules ---------------------------------------------------------------------------------------------

NormWithStatistics = nn.modules.batchnorm._NormBase  # batch and instance norms, which have no public base


def held_by(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The dictionaries themselves of a module's parameters and of its modules: changes show in them."""
    return module._parameters, module._modules


def is_saved(module: nn.Module, buffer: str) -> bool:
    """Whether the module's buffer of this name goes into its state dict."""
    return buffer not in module._non_persistent_buffers_set


# Optimizers ------------------------------------------------------------------------------------------


def step_hooks(optimizer: Optimizer) -> tuple[list[Any], list[Any]]:
    """The hooks that run before and after `optimizer.step`, but for those of all optimizers."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return list(before.values()), list(after.values())


def without_hooks(optimizer: Optimizer) -> Callable[[], Any]:
    """`optimizer.step` as its class was written: torch puts what calls the hooks around it, once a class."""
    step: Any = type(optimizer).step
    return partial(step.__wrapped__ if hasattr(step, "hooked") else step, optimizer)


@contextmanager
def hooks_aside(optimizer: Optimizer) -> Iterator[None]:
    """In this block a call of `optimizer.step` runs no hooks but those of all optimizers."""
    registered: Any = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    kept = [dict(hooks) for hooks in registered]
    for hooks in registered:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(registered, kept, strict=True):
            hooks.update(before)


def state_dict_hooks(optimizer: Optimizer) -> tuple[list[Any], list[Any]]:
    """The hooks that run before and after `optimizer.state_dict`."""
    before, after = optimizer._optimizer_state_dict_pre_hooks, optimizer._optimizer_state_dict_post_hooks
    return list(before.values()), list(after.values())


def load_hooks(optimizer: Optimizer) -> tuple[list[Any], list[Any]]:
    """The hooks that run before and after `optimizer.load_state_dict`."""
    before = optimizer._optimizer_load_state_dict_pre_hooks
    return list(before.values()), list(optimizer._optimizer_load_state_dict_post_hooks.values())


def mark_stepped(optimizer: Optimizer) -> None:
    """A step was taken that did not go through `optimizer.step`: without this mark a schedule warns."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def is_wrapped_by_schedule(step: Any) -> bool:
    """Whether this is the `step` that a schedule has put in the place of an optimizer's, to count calls."""
    return hasattr(step, "_wrapped_by_lr_sched")


# Generators ------------------------------------------------------------------------------------------


def with_initial_seed(state: Tensor, seed: int) -> Tensor:
    """A CPU generator's state that gives the same numbers and says that it was seeded with this.

    The first eight bytes of a state are the seed; torch does not say so anywhere.
    """
    changed = state.clone()
    changed[:8] = torch.frombuffer(bytearray(seed.to_bytes(8, "little")), dtype=torch.uint8)
    return changed


# The end of the process ------------------------------------------------------------------------------

run_exit_functions: Callable[[], None] = atexit._run_exitfuncs  # all that are registered; then none is


# Files ---------------------------------------------------------------------------------------------

# The functions that a pickle of torch.save names: for a tensor, for a parameter, and for a tensor that has
# attributes of its own. A reader that calls none of them must know what they mean.
REBUILD_TENSOR = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
REBUILD_PARAMETER = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
REBUILD_WITH_ATTRIBUTES = "torch._tensor._rebuild_from_type_v2"


# Process groups --------------------------------------------------------------------------------------


def keys_under(prefix: str, store: Any) -> Any:
    """The part of a store whose keys start with `prefix`."""
    return torch._C._distributed_c10d.PrefixStore(prefix, store)


def default_store() -> Any:
    """The key-value store that the default process group was started with."""
    return dist.distributed_c10d._get_default_store()


def is_own_excepthook(hook: Any) -> bool:
    """Whether this is Python's `sys.excepthook`, or torch's, which puts the rank in front of each line."""
    return hook is sys.__excepthook__ or getattr(hook, "__module__", "") == dist.distributed_c10d.__name__


def open_group(ranks: list[int], name: str, backend: str, timeout: timedelta | None) -> Any:
    """A process group of this name. Only its members need to call.

    `dist.new_group` makes names of the number of groups that are open: a name comes back when a group has
    been destroyed, with the old one's addresses, and ranks with different numbers of groups never meet.

    If the default group is bound to a device, torch splits NCCL's communicator of all ranks for every further
    group, and all ranks have to take part; so it must not know of the device while it makes this one.
    """
    c10d: Any = dist.distributed_c10d
    default = c10d._get_default_group()
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        group = _new_group(ranks, name, backend, timeout)
    finally:
        default.bound_device_id = bound
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def _new_group(ranks: list[int], name: str, backend: str, timeout: timedelta | None) -> Any:
    c10d: Any = dist.distributed_c10d
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        dist.Backend(backend),
        default_store(),
        name,
        timeout=timeout or c10d._get_default_timeout(dist.Backend(backend)),
    )
    return group


def plain(name: str) -> str:
    """A parameter's name, whether or not the model is compiled: torch.compile puts this before names."""
    return name.replace("_orig_mod.", "")


def backend_of(group: Any, device: torch.device) -> str:
    """The backend that moves this device's tensors; `dist.get_backend` tells only what was asked for."""
    return str(group._get_backend(device).name())


def device_of(group: Any) -> torch.device:
    """The device that tensors must be on to be sent by this group: the CPU, if that is possible."""
    kinds = {torch.device(kind) for kind in group._device_types}
    cpu = torch.device("cpu")
    return cpu if cpu in kinds or not kinds else kinds.pop()


def timeout_of(group: Any, device: torch.device | None = None) -> timedelta | None:
    """How long a call on this group with tensors of this device waits for a peer; None if nobody tells.

    A group may have a backend for each kind of device. Without `device` an accelerator's is asked, if there
    is one.
    """
    kinds = [torch.device(kind).type for kind in group._device_types]
    usual = next((kind for kind in kinds if kind != "cpu"), "cpu")
    kind = usual if device is None else device.type
    options = getattr(group._get_backend(torch.device(kind if kind in kinds else usual)), "options", None)
    return getattr(options, "_timeout", None)
