"""Names of recorded tensors for error messages, from the modules that they are registered in."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import finalize

from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from zero_full.construct.recorded_tensor import twin_of


class TensorNames:
    """Registry of the modules that were constructed while it watched."""

    def __init__(self) -> None:
        self.modules = WeakIdKeyDictionary()  # module -> finalizer, which keeps the owner alive
        self.given: dict[str, Tensor] = {}  # twins by explicitly given names

    @contextmanager
    def watch(self, is_recording: Callable[[], bool], owner: Any) -> Iterator[None]:
        """Register every module that gets a tensor or a child while this thread's operations are recorded.

        The modules keep the owner alive, even if their recorded tensors are replaced.
        """

        def tensor(module: nn.Module, name: str, tensor: Any) -> None:
            if is_recording():
                check_not_lazy(f"{name} of {type(module).__name__}", tensor)
                self._add(module, owner)

        def part(module: nn.Module, name: str, inner: Any) -> None:
            if is_recording():
                self._add(module, owner)

        with ExitStack() as stack:
            stack.enter_context(hooks.register_module_parameter_registration_hook(tensor))
            stack.enter_context(hooks.register_module_buffer_registration_hook(tensor))
            stack.enter_context(hooks.register_module_module_registration_hook(part))
            yield

    def _add(self, module: nn.Module, owner: Any) -> None:
        if module not in self.modules:
            self.modules[module] = finalize(module, id, owner)

    def release_owner(self) -> None:
        """Stop keeping the owner alive through the modules."""
        for finalizer in self.modules.values():
            finalizer.detach()

    def matching(self, is_wanted: Callable[[Tensor], bool]) -> list[str]:
        """Return the names of the tensors with these twins."""
        found = {name: None for name, twin in self.given.items() if is_wanted(twin)}
        known = list(self.modules)
        inner = {id(child) for module in known for child in module.children()}
        for root in (module for module in known if id(module) not in inner):
            for name, tensor in (*root.named_parameters(), *root.named_buffers()):
                twin = twin_of(tensor)
                if twin is not None and is_wanted(twin):
                    found[name] = None
        return list(found)


def check_not_lazy(name: str, tensor: Any) -> None:
    """Raise ValueError for a parameter of a lazy module, which has no shape before the first forward."""
    if is_lazy(tensor):
        raise ValueError(
            f"{name} has no shape yet. Give its module the sizes (nn.Linear instead of nn.LazyLinear), or "
            "construct it outside zero_full.Init and run a batch through it before initialize."
        )
