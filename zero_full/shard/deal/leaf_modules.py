"""Marks for modules that stage 3 gathers as one unit (leaf modules), with DeepSpeed's function names.

A mark is the same attribute that DeepSpeed sets. So it is copied with its module, and marks by code for
DeepSpeed are valid here.
"""

from collections.abc import Iterable, Sequence

from torch import nn

from zero_full.shard.group.registry import owner_of

MARK = "_z3_leaf"
ClassOrName = type[nn.Module] | str


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether this module is marked."""
    return bool(getattr(model, MARK, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return every marked module in the model, including the model itself."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or remove its mark. It must run before `initialize`, which chooses the units."""
    if z3_leaf_module(model) == flag:
        return
    if any(owner_of(param) is not None for param in model.parameters()):
        raise RuntimeError(
            f"{type(model).__name__} belongs to an engine, which has already chosen the modules that are "
            "gathered as one. Mark modules before initialize"
        )
    setattr(model, MARK, flag)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[ClassOrName], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark all modules of these classes, given as classes or by name; return them."""
    return _flag_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[ClassOrName], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the marks of all modules of these classes; return them."""
    return _flag_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their names in `named_modules`; return them, and the names without a module."""
    _check_is_list("module_names", module_names)
    modules = dict(model.named_modules(remove_duplicate=False))
    missing = [name for name in module_names if name not in modules]
    if missing and raise_if_not_found:
        raise ValueError(f"no module of {type(model).__name__} is named {_any_of(missing)}")
    return _flag([modules[name] for name in module_names if name in modules], flag), missing


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by suffixes of their names; return them, and the suffixes without a module."""
    _check_is_list("module_name_suffixes", module_name_suffixes)
    named = list(model.named_modules(remove_duplicate=False))
    missing = [end for end in module_name_suffixes if not any(name.endswith(end) for name, _ in named)]
    if missing and raise_if_not_found:
        raise ValueError(f"no module of {type(model).__name__} has a name that ends with {_any_of(missing)}")
    found = [module for end in module_name_suffixes for name, module in named if name.endswith(end)]
    return _flag(found, flag), missing


def _flag_classes(
    model: nn.Module, kinds: Sequence[ClassOrName], flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    """Set or remove the marks of all modules of these classes; return the modules."""
    _check_is_list("leaf_module_classes", kinds)
    for kind in kinds:
        if not isinstance(kind, type | str):
            raise TypeError(f"leaf_module_classes must list classes or their names, not {kind!r}")
    classes = tuple(kind for kind in kinds if isinstance(kind, type))
    names = {kind for kind in kinds if isinstance(kind, str)}
    found: list[nn.Module] = []

    def look(module: nn.Module) -> None:
        own = type(module)
        if isinstance(module, classes) or names & {own.__name__, f"{own.__module__}.{own.__qualname__}"}:
            found.append(module)

    model.apply(look)  # inner modules come first, as in DeepSpeed's answer
    if not found and raise_if_not_found:
        raise ValueError(f"no module of {type(model).__name__} is of the class {_any_of(kinds)}")
    return _flag(found, flag)


def _flag(modules: Iterable[nn.Module], flag: bool) -> list[nn.Module]:
    found = list(dict.fromkeys(modules))
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _check_is_list(argument: str, given: object) -> None:
    if isinstance(given, str | type):
        raise TypeError(f"{argument} must be a list, not {given!r}")


def _any_of(kinds: Sequence[ClassOrName]) -> str:
    return " or ".join(kind if isinstance(kind, str) else kind.__qualname__ for kind in kinds) or "nothing"
