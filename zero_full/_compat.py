"""Wrappers of the private or renamed parts of torch (and one of Python) that the package uses.

No other file uses them directly. A change in torch shows here first: as an AttributeError at import of this
module, or in the test of a helper.
"""

import atexit
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, wraps
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Variable
from torch.autograd.profiler import record_function
from torch.optim import Optimizer
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FakeTensorMode", "TorchDispatchMode"]  # re-exported under torch's names; the rest is defined here

# torch 2.13 renamed these two; torch 2.11 has only the old names.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def matrix_instructions() -> list[str]:
    """Return the names of this CPU's instructions for bf16, as far as this torch tells of them."""
    capabilities: Any = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.11 has no such function
    return sorted(name for name, found in capabilities.items() if "bf16" in name and found is True)


@contextmanager
def without_fake_tensor_log() -> Iterator[None]:
    """Keep torch from logging, within the context, tracebacks of operations that fail on fake tensors.

    The operation raises the same error.
    """
    log = logging.getLogger(FakeTensorMode.__module__)
    disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = disabled


# Tensors ---------------------------------------------------------------------------------------------

# Private attributes of a tensor other than its values.
METADATA = ("_version", "_backward_hooks", "_post_accumulate_grad_hooks")
BACKWARD_HOOKS = "_backward_hooks"  # set by a tensor's first `register_hook`
VIEW_BASE = "_base"  # attribute of a view: the tensor whose memory it shares
has_compatible_type = torch._has_compatible_shallow_copy_type  # called when a module is converted
typed_storage = Tensor._typed_storage  # called by `Tensor.storage` and pickle to get the memory
foreach_zero = torch._foreach_zero_  # called by an optimizer's `zero_grad(set_to_none=False)`
foreach_add = torch._foreach_add_  # many additions in one call, instead of one call per tensor


def running_ddp() -> Any:
    """Return the DistributedDataParallel module whose forward is running in this process; None if none is."""
    return torch.nn.parallel.DistributedDataParallel._active_ddp_module


# Version counter: the number of in-place writes to a tensor, the only trace of a write in torch.
version_of: Callable[[Tensor], int] = attrgetter("_version")
# Identity of a storage: equal for all views, during its lifetime, even while the storage is empty.
identity_of: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")


def instance_of(kind: type[Any], tensor: Tensor) -> Any:
    """View the tensor as an instance of the class `kind`. `as_subclass` would call `__torch_function__`."""
    return Tensor._make_subclass(kind, tensor)


class ParameterCandidate(Tensor):
    """Tensor subclass that `nn.Parameter(tensor)` turns into a parameter, by calling `become_parameter`.

    torch sets `_is_param` on such a tensor, and reads it in `isinstance(tensor, nn.Parameter)`. Only the
    `__new__` of `nn.Parameter` knows which subclass is requested, so it is read from that frame. If torch
    changes this, the class is plain `nn.Parameter`.
    """

    def is_parameter(self) -> bool:
        """Return whether this tensor is a parameter."""
        raise NotImplementedError

    def become_parameter(self, kind: type[nn.Parameter]) -> None:
        """Turn this tensor into a parameter of this class."""
        raise NotImplementedError

    @property
    def _is_param(self) -> bool:
        return self.is_parameter()

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        self.become_parameter(sys._getframe(1).f_locals.get("cls", nn.Parameter))


def local_tensor(dtensor: Any) -> Tensor:
    """Return the tensor that this rank holds of a DTensor. `to_local` would make a view."""
    local: Any = dtensor._local_tensor
    if hasattr(local, "trigger_wait"):  # parallelize_module leaves the result of a broadcast pending
        local = dtensor._local_tensor = local.trigger_wait()
    return local  # type: ignore[no-any-return]


def set_local_tensor(dtensor: Any, local: Tensor, like: Any = None) -> None:
    """Replace the tensor that this rank holds of a DTensor. `like`: a DTensor with the new dtype, or None.

    Assigning to `data` changes what autograd knows of a DTensor, and not its local tensor.
    """
    if like is not None:
        dtensor.data = like
        dtensor._spec = like._spec
    dtensor._local_tensor = local


# Functions and operations ----------------------------------------------------------------------------

without_overrides = torch._C.DisableTorchFunctionSubclass  # a context: released parameters are plain tensors
without_functions = torch._C.DisableTorchFunction  # the same, and without any TorchFunctionMode
# Which of the two this thread is inside of, and a way back that needs no `with`.
overrides_state = torch._C._get_torch_function_state  # type: ignore[attr-defined]
set_overrides_state = torch._C._set_torch_function_state  # type: ignore[attr-defined]


def arguments_of(operation: Any) -> list[Any]:
    """Return the declared arguments of a `torch.ops` operation, with names and write flags."""
    return list(operation._schema.arguments)


def reads_value(operation: Any) -> bool:
    """Return whether this is the `torch.ops` operation behind `item`, `float` and `if tensor:`."""
    return operation is torch.ops.aten._local_scalar_dense.default


def returns_new(operation: Any) -> bool:
    """Return whether a `torch.ops` operation returns neither a view nor one of its arguments."""
    return all(each.alias_info is None for each in operation._schema.returns)


def backward_for_inputs(*arguments: Any) -> Any:
    """Run the first part of a backward that torch's zero-bubble schedules split: gradients of inputs only.

    Takes outputs, their gradients or None, inputs and weights. Returns what the second part needs.
    """
    from torch.distributed.pipelining._backward import stage_backward_input  # only a plan needs it

    return stage_backward_input(*arguments)


def accept_any_loss(stage: Any) -> None:
    """Keep torch's pipelining from comparing the last stage's outputs with the declared shape and dtype.

    torch 2.11 raises on a loss of 16 bits, whose dtype is unknown before the first batch; torch 2.13 compares
    the other stages' outputs only.
    """
    if hasattr(stage, "_validate_fwd_outputs"):
        stage._validate_fwd_outputs = lambda outputs: None


def discard_micro_batch(stage: Any, micro_batch: int) -> None:
    """Discard what a stage of torch's pipelining keeps for a micro-batch's backward, which will not run."""
    if hasattr(stage, "_forward_chunk_states"):  # torch 2.15
        stage._forward_chunk_states.pop(micro_batch, None)
        for info in stage.grad_recv_info.get(micro_batch, ()):
            info.buffer = None  # the next batch allocates it, and raises if nothing has taken it
    else:
        stage.fwd_cache.pop(micro_batch, None)


@contextmanager
def fake_process_group(ranks: int) -> Iterator[None]:
    """Initialize torch.distributed with a fake process group: rank 0 of `ranks`, collectives move no data."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def default_device_context(device: torch.device) -> Any:
    """Return the context manager behind `with device:`. Its device can be changed afterwards."""
    return DeviceContext(device)


# The innermost running transform of torch.func (grad, vmap, ...), or None.
transform_stack: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack


# Backward passes -------------------------------------------------------------------------------------


# Id of the backward pass that runs in this thread, or -1. The recomputation of a checkpoint has its own.
current_backward: Callable[[], int] = torch._C._current_graph_task_id


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run `callback` at the end of the current backward pass."""
    Variable._execution_engine.queue_callback(callback)


# A parameter's post-accumulate-grad hooks, in order.
post_accumulate_grad_hooks: Callable[[Tensor], dict[int, Any]] = attrgetter("_post_accumulate_grad_hooks")
# Modules ---------------------------------------------------------------------------------------------

NormWithStatistics = nn.modules.batchnorm._NormBase  # base of batch and instance norms, without a public name


def parameters_and_children(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the dictionaries of a module's parameters and children themselves, not copies."""
    return module._parameters, module._modules


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that a module holds itself, without the two generators of `parameters`."""
    return [param for param in module._parameters.values() if param is not None]


def is_persistent_buffer(module: nn.Module, buffer: str) -> bool:
    """Return whether the module's buffer of this name is persistent: in the state dict."""
    return buffer not in module._non_persistent_buffers_set


# The profiler ----------------------------------------------------------------------------------------

# Whether a profiler runs, of the module torch.autograd.profiler. It is called by every forward.
is_profiling: Callable[[Any], bool] = attrgetter("_is_profiler_enabled")

# Optimizers ------------------------------------------------------------------------------------------


# An optimizer's own hooks before and after `step`, without the global ones.
step_hooks: Callable[[Optimizer], tuple[dict[int, Any], dict[int, Any]]] = attrgetter(
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
)


def global_step_hooks() -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks before and after the `step` of every optimizer."""
    module = sys.modules[Optimizer.__module__]  # `torch.optim` has no attribute of its name
    return module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks


def runs_step_hooks(step: Any) -> Any:
    """Decorator of a `step` that calls the hooks itself. Torch's wrapper would call them before it begins."""

    @wraps(step)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with record_function(f"Optimizer.step#{type(self).__name__}.step"):  # as torch's wrapper
            made = step(self, *args, **kwargs)
            self._optimizer_step_code()  # where torch's profiler may count steps
            return made

    call.hooked = True  # type: ignore[attr-defined]
    return call


def unhooked_step(optimizer: Optimizer) -> Callable[[], Any]:
    """Return `optimizer.step` without torch's wrapper, which calls the hooks."""
    step: Any = type(optimizer).step
    return partial(step.__wrapped__ if hasattr(step, "hooked") else step, optimizer)


@contextmanager
def disable_step_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Disable an optimizer's own step hooks inside the context. Global hooks still run."""
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
    """Return the hooks that run before and after `optimizer.state_dict`."""
    before, after = optimizer._optimizer_state_dict_pre_hooks, optimizer._optimizer_state_dict_post_hooks
    return list(before.values()), list(after.values())


def load_hooks(optimizer: Optimizer) -> tuple[list[Any], list[Any]]:
    """Return the hooks that run before and after `optimizer.load_state_dict`."""
    before = optimizer._optimizer_load_state_dict_pre_hooks
    return list(before.values()), list(optimizer._optimizer_load_state_dict_post_hooks.values())


OPT_CALLED = "_opt_called"  # optimizer attribute, True after a step; LR schedulers warn without it


def is_wrapped_by_schedule(step: Any) -> bool:
    """Return whether this function is an optimizer's `step`, wrapped by an LR scheduler to count calls."""
    return hasattr(step, "_wrapped_by_lr_sched")


# Key in the state dict of an LR scheduler that consists of others (SequentialLR, ChainedScheduler).
SCHEDULE_PARTS = "_schedulers"
# Keys in the state dicts of torch's LR schedulers: lists with a value for each parameter group.
BY_GROUP = ("base_lrs", "_last_lr", "min_lrs", "max_lrs", "lr_lambdas")


# Generators ------------------------------------------------------------------------------------------


def with_initial_seed(state: Tensor, seed: int) -> Tensor:
    """Return a CPU generator's state with another initial seed, which produces the same numbers.

    The first eight bytes of a state are the seed, which torch does not document.
    """
    changed = state.clone()
    changed[:8] = torch.frombuffer(bytearray(seed.to_bytes(8, "little")), dtype=torch.uint8)
    return changed


# The end of the process ------------------------------------------------------------------------------

run_exit_functions: Callable[[], None] = atexit._run_exitfuncs  # runs and unregisters all exit functions


# Files ---------------------------------------------------------------------------------------------

# Functions that a pickle of torch.save names: for a tensor, a parameter, and a tensor with attributes. A
# reader that does not call them must know their meaning.
REBUILD_TENSOR = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
REBUILD_PARAMETER = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
REBUILD_WITH_ATTRIBUTES = "torch._tensor._rebuild_from_type_v2"


# Process groups --------------------------------------------------------------------------------------


def prefix_store(prefix: str, store: Any) -> Any:
    """Return a view of a store that adds `prefix` to all keys."""
    return torch._C._distributed_c10d.PrefixStore(prefix, store)


def default_store() -> Any:
    """Return the key-value store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def is_own_excepthook(hook: Any) -> bool:
    """Return whether this is Python's `sys.excepthook`, or torch's, which prefixes lines with the rank."""
    return hook is sys.__excepthook__ or getattr(hook, "__module__", "") == dist.distributed_c10d.__name__


def open_group(ranks: list[int], name: str, backend: str, timeout: timedelta | None) -> Any:
    """Create a process group with this name. Only its members need to call this.

    `dist.new_group` derives names from the number of open groups. So a name is reused after a group was
    destroyed, with the old group's addresses, and ranks with different numbers of groups never connect.

    If the default group is bound to a device, torch splits NCCL's global communicator for every new group,
    which all ranks must call. So the binding is removed while this group is created.
    """
    c10d: Any = dist.distributed_c10d
    default = c10d._get_default_group()
    bound, default.bound_device_id = default.bound_device_id, None
    place, kind = ranks.index(dist.get_rank()), dist.Backend(backend)
    timeout = timeout or c10d._get_default_timeout(kind)
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks), place, ranks, kind, default_store(), name, timeout=timeout
        )
    finally:
        default.bound_device_id = bound
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def clean_name(name: str) -> str:
    """Return a parameter's name without the prefix that torch.compile adds."""
    return name.replace("_orig_mod.", "")


def backend_of(group: Any, device: torch.device) -> str:
    """Return the backend in use for this device's tensors. `dist.get_backend` returns the requested one."""
    return str(group._get_backend(device).name())


def device_of(group: Any) -> torch.device:
    """Return the device of tensors that this group's backend can send: the CPU if possible."""
    kinds = {torch.device(kind) for kind in group._device_types}
    cpu = torch.device("cpu")
    return cpu if cpu in kinds or not kinds else kinds.pop()


def timeout_of(group: Any, device: torch.device | None = None) -> timedelta | None:
    """Return the timeout of collectives on this group with this device's tensors, or None if unknown.

    A group may have a backend for each kind of device. Without `device`, an accelerator's is used if the
    group has one.
    """
    kinds = [torch.device(kind).type for kind in group._device_types]
    usual = next((kind for kind in kinds if kind != "cpu"), "cpu")
    kind = usual if device is None else device.type
    options = getattr(group._get_backend(torch.device(kind if kind in kinds else usual)), "options", None)
    return getattr(options, "_timeout", None)
