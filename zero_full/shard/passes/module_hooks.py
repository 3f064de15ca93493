"""Hooks of ours on modules of the user's."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class Hook:
    """Calls a method of an object that it does not keep alive.

    `copy.deepcopy` and pickle copy a module with its hooks. This one is for one module only: in a copy it
    does nothing. An object with a method `refuse_copy` may raise there, if there is nothing worth copying.
    """

    __slots__ = ("function", "module", "more", "owner")

    def __init__(self, module: nn.Module, method: Any, *more: Any) -> None:
        self.module, self.owner = weakref.ref(module), weakref.ref(method.__self__)
        self.function = method.__func__
        self.more = more  # the method's first arguments

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, *arguments: Any) -> Any:
        """Call the method, if its object is alive and this is the hook's own module."""
        return self._do(module, *arguments)

    def _do(self, module: nn.Module, *arguments: Any) -> Any:
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
        if owner is not None and hasattr(owner, "refuse_copy"):
            owner.refuse_copy()


class InnerHook(Hook):
    """A hook that is called often, does nothing as a rule, and has no part in what torch.compile makes.

    What was compiled for one block asks whether the modules inside have a hook of the same number, so all
    hooks of this kind get one number: else each block would be compiled anew, until torch gives up.
    """

    __slots__ = ()
    NUMBER = -1  # torch counts from 0

    def __call__(self, module: nn.Module, *arguments: Any) -> Any:
        """Call the method, if its object is alive and this is the hook's own module."""
        return None if torch.compiler.is_compiling() else self._do(module, *arguments)

    @classmethod
    def renumber(cls, handle: RemovableHandle, first: bool) -> None:
        """Give the hook behind this handle the number of its kind; `first`: it is called before others."""
        for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
            hooks: Any = reference()
            if handle.id in hooks:
                hooks[cls.NUMBER] = hooks.pop(handle.id)
                if first:
                    hooks.move_to_end(cls.NUMBER, last=False)
        handle.id = cls.NUMBER


def do_nothing(*arguments: Any) -> None:
    """What a copy of a module has in the place of a hook."""


def _make_do_nothing() -> Callable[..., None]:
    return do_nothing
