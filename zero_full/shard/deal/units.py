"""Choice of stage-3 units: the parameters of a module and its submodules that are gathered together.

[Note: choosing units] Modules are visited from the top down. A module with at most `limit` elements becomes a
unit, including its submodules. From a larger one, the parameters that it holds directly become a unit, and
its children are visited. Two kinds of modules cannot be split like that: modules that are never called
(`nn.ModuleList`), and modules that read their children's parameters without calling them
(`nn.MultiheadAttention`). Modules that the user names or marks (`leaf_modules.py`) are units of any size.

A parameter of several modules (tied weights) belongs to the innermost module that contains all of them. It is
gathered once, before the first use, and released after the last.

[Note: joined units] A collective has a fixed cost, so consecutive small units become one: they are gathered,
reduced and stepped together. The parameters stay gathered until a module of another unit is called. A unit is
not joined if the user has named it, or if it contains another one that would be called in the middle of it.
Joined units are not larger than what may be prefetched (0: nothing).

Modules may be called in another order than they were registered in, and a joined unit is gathered again
whenever its modules are not called one after the other. So only modules of one parent are joined, which are
called close to each other, and none with more than a quarter of the limit: gathering a norm must not gather
a large layer. Fewer than four are not joined: a block's two norms are seldom called one after the other.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from torch import nn
from torch.nn import Parameter

from zero_full._compat import own_parameters
from zero_full.settings import Gathering
from zero_full.shard.deal.leaf_modules import z3_leaf_module

INDIVISIBLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
PARTS = 8  # no unit needs to be larger than this part of the model ...
LIVE_PARTS = 4  # ... or this part of what may be live at a time
MAX_JOINED = 2**20  # elements of a joined unit: copying more takes longer than a collective's fixed cost
MIN_JOINED = 4  # modules of a joined unit, so none of them has more than a quarter of the limit
Wrap = Callable[[str, nn.Module], bool]


@dataclass(frozen=True, eq=False)
class Unit:
    """Parameters that are gathered together, before the forward of the first of these modules."""

    modules: tuple[tuple[str, nn.Module], ...]  # with their names, "" for the model
    parameters: tuple[tuple[str, Parameter], ...]
    may_join: bool  # see [Note: joined units]

    @property
    def numel(self) -> int:
        """The number of elements of the parameters."""
        return sum(p.numel() for _, p in self.parameters)


def size_limit(model: nn.Module, max_live: int) -> int:
    """Return the limit on elements of a unit, for models without units chosen by the user."""
    total = sum(p.numel() for p in model.parameters())
    return max(1, min(-(-total // PARTS), max_live // LIVE_PARTS))


def kept_whole(model: nn.Module, limits: Gathering) -> list[Parameter]:
    """Return the parameters that are too small to be worth gathering, up to `keep_total` elements."""
    kept, room = [], limits.keep_total
    for param in model.parameters():
        if param.numel() <= min(limits.keep_numel, room):
            kept.append(param)
            room -= param.numel()
    return kept


def choose_units(
    model: nn.Module, limit: int, wrap: Wrap | None = None, leave_out: Iterable[Parameter] = ()
) -> list[Unit]:
    """Choose units, in the order of the modules. Every parameter not in `leave_out` is in exactly one."""
    sites: dict[nn.Module, str] = {}
    for name, module in ("", model), *_sites("", model, limit, wrap):
        sites.setdefault(module, name)
    owner = _site_of_each(model, sites)
    left_out = set(leave_out)
    held: dict[nn.Module, list[tuple[str, Parameter]]] = {}
    for name, param in model.named_parameters():
        if param not in left_out:
            held.setdefault(owner[param], []).append((name, param))
    units = []
    for module, params in held.items():
        name = sites[module]
        contains_unit = any(inner in held for inner in module.modules() if inner is not module)
        may_join = not contains_unit and not _is_named(name, module, wrap)
        units.append(Unit(((name, module),), tuple(params), may_join))
    return units


def join_small(units: Iterable[Unit], limit: int) -> list[Unit]:
    """Join consecutive units to units of at most `limit` elements. See [Note: joined units]."""
    together: list[list[Unit]] = []
    room, last_parent = 0, ""  # elements that the last unit can still take, and the parent of its modules
    for unit in units:
        numel, parent = unit.numel, unit.modules[0][0].rpartition(".")[0]
        joins = unit.may_join and MIN_JOINED * numel <= limit
        if joins and numel <= room and parent == last_parent:
            together[-1].append(unit)
            room -= numel
        else:
            together.append([unit])
            room, last_parent = limit - numel if joins else 0, parent
    return [unit for several in together for unit in _joined(several)]


def _joined(units: Sequence[Unit]) -> Sequence[Unit]:
    if len(units) < MIN_JOINED:
        return units
    modules = tuple(module for unit in units for module in unit.modules)
    return [Unit(modules, tuple(param for unit in units for param in unit.parameters), True)]


def _sites(name: str, module: nn.Module, limit: int, wrap: Wrap | None) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that may get a unit, outer ones first."""
    is_called = type(module).forward is not nn.Module.forward
    if z3_leaf_module(module) and not is_called:
        raise ValueError(
            f"{name or 'the model'} is marked as a leaf of stage 3, but a {type(module).__name__} is never "
            "called, so nothing would gather it. Mark the module that calls its submodules"
        )
    if _is_named(name, module, wrap) and is_called:
        yield name, module
        return
    small = sum(p.numel() for p in module.parameters()) <= limit or isinstance(module, INDIVISIBLE)
    if is_called:
        yield name, module
    inside = [
        site
        for child_name, child in module.named_children()
        for site in _sites(f"{name}.{child_name}" if name else child_name, child, limit, wrap)
    ]
    if small and is_called and name:
        inside = [(n, m) for n, m in inside if _is_named(n, m, wrap)]
    yield from inside


def _is_named(name: str, module: nn.Module, wrap: Wrap | None) -> bool:
    """Return whether the user chose this module as a unit. `wrap` is not called for the model itself."""
    return z3_leaf_module(module) or (wrap is not None and bool(name) and wrap(name, module))


def _site_of_each(model: nn.Module, sites: Container[nn.Module]) -> dict[Parameter, nn.Module]:
    """Return for each parameter the innermost site that contains all modules with this parameter."""
    modules = dict(model.named_modules(remove_duplicate=False))
    paths: dict[Parameter, list[list[str]]] = {}
    for name, module in modules.items():
        for param in own_parameters(module):
            paths.setdefault(param, []).append(name.split(".") if name else [])

    def innermost(path: Sequence[str]) -> nn.Module:
        around = [modules[".".join(path[:length])] for length in range(len(path), -1, -1)]
        found: nn.Module = next(module for module in around if module in sites)
        return found

    owners = {}
    for param, found in paths.items():
        nearest = {innermost(path) for path in found}
        # One module under several names is one site; different ones meet further out.
        together = takewhile(lambda names: len(set(names)) == 1, zip(*found, strict=False))
        owners[param] = nearest.pop() if len(nearest) == 1 else innermost([name for name, *_ in together])
    return owners
