"""The private or renamed parts of torch that the package uses, and nothing else."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.optim import optimizer as torch_optimizer
from torch.utils._device import DeviceContext

# torch 2.13 renamed these two; torch 2.11 knows only the old names.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

foreach_zero = torch._foreach_zero_
without_overrides = torch._C.DisableTorchFunctionSubclass  # a block in which subclasses are plain tensors
# What a tensor has beside its values, as properties without a public name.
BESIDE_VALUES = ("_version", "_backward_hooks", "_post_accumulate_grad_hooks")
has_compatible_type = torch._has_compatible_shallow_copy_type  # asked when a module is converted
NormWithStatistics = torch.nn.modules.batchnorm._NormBase  # batch and instance norms


def keys_under(prefix: str, store: Any) -> Any:
    """The part of a store whose keys start with `prefix`."""
    return torch._C._distributed_c10d.PrefixStore(prefix, store)


def default_store() -> Any:
    """The key-value store that the default process group was started with."""
    return dist.distributed_c10d._get_default_store()


def open_group(ranks: list[int], name: str, backend: str, timeout: timedelta | None) -> Any:
    """A process group of this name. Only its members need to call.

    `dist.new_group` makes names of the number of groups that are open: a name comes back when a group has
    been destroyed, with the old one's addresses, and ranks with different numbers of groups never meet.
    """
    c10d: Any = dist.distributed_c10d
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        dist.Backend(backend),
        default_store(),
        name,
        timeout=timeout or c10d._get_default_timeout(dist.Backend(backend)),
        device_id=c10d._get_default_group().bound_device_id,
    )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def backend_of(group: Any, device: torch.device) -> str:
    """What moves this device's tensors. `dist.get_backend` gives what the user has asked for, if anything."""
    return str(group._get_backend(device).name())


def device_of(group: Any) -> torch.device:
    """Where tensors must be that this group sends: on the CPU, if it can."""
    kinds = {torch.device(kind) for kind in group._device_types}
    cpu = torch.device("cpu")
    return cpu if cpu in kinds or not kinds else kinds.pop()


def timeout_of(group: Any) -> timedelta | None:
    """How long a call on this group waits for a peer; None: its backend does not tell."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)


def current_backward() -> int:
    """The number of the backward pass that runs in this thread, or -1. A recomputed part has its own."""
    return torch._C._current_graph_task_id()


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward pass that calls this is complete."""
    Variable._execution_engine.queue_callback(callback)


def is_last_hook(param: torch.Tensor, handle: Any) -> bool:
    """Whether this post-accumulate hook runs after all others of the parameter."""
    return bool(next(reversed(param._post_accumulate_grad_hooks)) == handle.id)


def inside_transform() -> bool:
    """Whether `torch.func.grad`, `vmap` or another transform is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def identity_of(storage: torch.UntypedStorage) -> int:
    """The same number for every view of a piece of memory, as long as it lives, also while it is empty."""
    return int(storage._cdata)


def with_initial_seed(state: torch.Tensor, seed: int) -> torch.Tensor:
    """A CPU generator's state that gives the same numbers and says that it was seeded with this."""
    changed = state.clone()
    changed[:8] = torch.frombuffer(bytearray(seed.to_bytes(8, "little")), dtype=torch.uint8)
    return changed


def default_device_context(device: torch.device) -> Any:
    """What `with device:` enters, so that its device can be changed meanwhile."""
    return DeviceContext(device)


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[list[Any], list[Any]]:
    """What runs before and after each step of this optimizer."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return list(before.values()), list(after.values())


def global_step_hooks() -> list[Any]:
    """What runs before or after each step of every optimizer."""
    before, after = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
    return [*before.values(), *after.values()]


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Without this mark a schedule would warn that it is stepped before its optimizer."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def foreach_add(tensors: list[torch.Tensor], number: float) -> None:
    """Add a number to each tensor in place, in one call."""
    torch._foreach_add_(tensors, number)


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor was written in place, as far as torch counts it."""
    return tensor._version
