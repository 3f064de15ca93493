"""Module hooks that hold weak references, and that are not copied with the user's module."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class Hook:
    """Hook on one module that calls a method of an object without keeping it alive.

    `copy.deepcopy` and pickle copy a module with its hooks. In a copy this hook does nothing. If the object
    has a method `check_copy`, copying calls it, and it may raise.
    """

    __slots__ = ("function", "module", "more", "owner")

    def __init__(self, module: nn.Module, method: Any, *more: Any) -> None:
        self.module, self.owner = weakref.ref(module), weakref.ref(method.__self__)
        self.function = method.__func__
        self.more = more  # the method's first arguments
        _exclude_from_compilation()

    def __call__(self, module: nn.Module, *arguments: Any) -> Any:
        """Call the method, if its object is alive and this is the hook's own module."""
        owner = self.owner()
        if owner is None or module is not self.module():
            return None
        return self.function(owner, *self.more, *arguments)

    def __deepcopy__(self, memo: Any) -> Any:
        self._check_copy()
        return do_nothing

    def __reduce__(self) -> Any:
        self._check_copy()
        return _make_do_nothing, ()

    def _check_copy(self) -> None:
        owner = self.owner()
        if owner is not None and hasattr(owner, "check_copy"):
            owner.check_copy()


@cache
def _exclude_from_compilation() -> None:
    """Exclude calls of `Hook` from torch.compile, before the first hook is used.

    A decorator would do it at import. But `torch.compiler.disable` imports torch's compiler: seconds.
    """
    Hook.__call__ = torch.compiler.disable(Hook.__call__)  # type: ignore[method-assign]


class InnerHook(Hook):
    """Hook on inner modules, which usually returns at once and is not traced by torch.compile.

    The guards of compiled code compare the ids of hooks on inner modules. So all hooks of this class get the
    same id. Otherwise each block would be recompiled, until torch reaches its recompilation limit.
    """

    __slots__ = ()
    NUMBER = -1  # torch's own ids count from 0

    def __call__(self, module: nn.Module, *arguments: Any) -> Any:
        """Call the method, if its object is alive and this is the hook's own module."""
        owner = None if torch.compiler.is_compiling() else self.owner()
        if owner is None or module is not self.module():
            return None
        return self.function(owner, *self.more, *arguments)

    @classmethod
    def renumber(cls, handle: RemovableHandle, first: bool) -> None:
        """Change the id of the hook behind this handle to `NUMBER`. `first`: call it before other hooks."""
        for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
            hooks: Any = reference()
            if handle.id in hooks:
                hooks[cls.NUMBER] = hooks.pop(handle.id)
                if first:
                    hooks.move_to_end(cls.NUMBER, last=False)
        handle.id = cls.NUMBER


def do_nothing(*arguments: Any) -> None:
    """Do nothing: the hook of a copied module."""


def _make_do_nothing() -> Callable[..., None]:
    return do_nothing


@contextmanager
def removed(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove these hooks within the context. Afterwards they are called at their places again.

    Without hooks a module's call takes torch's short way. Hooks that user code adds or removes within the
    context are added or removed.
    """
    before: dict[int, tuple[dict[int, Any], dict[int, Any]]] = {}  # by identity of the hooks' dict
    ours: set[int] = set()
    for handle in handles:
        for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
            hooks: Any = reference()
            if hooks is not None and handle.id in hooks:
                before.setdefault(id(hooks), (hooks, dict(hooks)))
                ours.add(handle.id)
                del hooks[handle.id]
    try:
        yield
    finally:
        for hooks, former in before.values():
            present = dict(hooks)
            hooks.clear()
            hooks.update({i: hook for i, hook in former.items() if i in ours or i in present})
            hooks.update(present)
