"""Deferred initialization: record a model's construction, and replay it later, one parameter at a time.

[Note: recording and replay] While a `recorder` is active, tensors have a shape and no values. Every operation
that creates or changes values runs on the meta device and is recorded. `replay` runs the operations on the
CPU and delivers each parameter as soon as it is complete, so that about one parameter is in memory at a time.
The values equal those of plain construction on the CPU, bit for bit:

    order      Operations that draw random numbers run in the recorded order, even if their results are
               overwritten later. Other operations run as late as possible: when a draw or a delivery needs
               them.
    versions   An operation that overwrites a whole storage starts a new `Value`, independent of the previous
               one. So a default initialization that is replaced later takes no memory.
    numbers    To detect that a constructor seeds a generator, the recorder seeds it after each draw with a
               random mark. A generator at a mark stands for its state after that draw. Any other state was
               set by the constructor. (See [Note: a generator between recordings].)

Recording continues after construction: later changes of the model are recorded as well. An operation that
cannot be recorded raises an error: above all, reading values (`.item()`, `if tensor:`).
"""

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from secrets import token_hex
from typing import Any
from weakref import finalize

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules import module as hooks
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from zero_full._compat import arguments_of, is_persistent_buffer
from zero_full.construct.generators import CPU, RandomStreams
from zero_full.construct.recorded_tensor import twin_of
from zero_full.construct.replay_ops import Op, Player, RealInput, Ref, Value, needed_ops, schedule
from zero_full.nested import leaves, mapped, tensors_in

META = torch.device("meta")

# Operations that do not read the tensor they write. (No operation reads its argument `out`.)
OVERWRITES = (
    "zero_ fill_ copy_ normal_ uniform_ random_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_"
)
# Arguments that batch norms change although their schemas do not declare it.
UNDECLARED_WRITES = "running_mean", "running_var"
# Operations that keep the values of a tensor from a file. Only the dtype may change.
VALUE_PRESERVING = "aten::_to_copy", "aten::clone"


@dataclass(frozen=True)
class NewestVersion:
    """The rank that holds the newest version of a value, by GatheredParameters(modifier_rank)."""

    rank: int
    since: tuple[str, ...] = ()  # later operations of this rank, to compare with other ranks


class Recording:
    """The recorded operations, and the state of the tensors that they use."""

    def __init__(self) -> None:
        self._ops: list[Op] = []
        self._values: dict[int, Value] = {}  # current value of each meta storage, by the storage's identity
        self._written: set[Value] = set()
        self.streams, self.names = RandomStreams(), TensorNames()
        self.states: dict[int, Tensor] = {}  # generator states by mark, as far as a replay has computed them
        self.files: dict[Value, Any] = {}  # file from which initialize will read a value
        self.real_before_load = WeakIdKeyDictionary()  # module -> its real tensors that a file will overwrite
        self.newest: dict[Value, NewestVersion] = {}
        self.is_construction = True  # False while changes after construction are recorded

    @property
    def rng_state_before(self) -> Tensor:
        """State of torch's default generator from which replay starts. Can be set to another rank's."""
        return self.streams.main.initial_state

    @rng_state_before.setter
    def rng_state_before(self, state: Tensor) -> None:
        if not torch.equal(state, self.streams.main.initial_state):
            self.states.clear()
        self.streams.main.start_from(state)

    def replay(
        self,
        deliver: Callable[[Tensor, Tensor], object],
        wanted: Iterable[Tensor],
        to_the_end: bool = True,
        remember: bool = False,
    ) -> None:
        """Compute the wanted tensors, and call `deliver(tensor, real)` once for each when it is complete.

        `real` is the full tensor on the CPU. Its memory is freed after the call unless `deliver` keeps it.

        to_the_end   make all random draws of construction, and set the generators to their final states,
                     unless they were used since or `rng_state_before` is another rank's
        remember     keep the generators' states, so that the next replay can skip draws that it does not need
        """
        by_value: dict[Value, list[Tensor]] = defaultdict(list)
        for tensor in {id(tensor): tensor for tensor in wanted}.values():
            by_value[self.value_of(tensor)].append(tensor)
        ends = self.streams.final_marks() if to_the_end else {}
        player = Player(self.streams, deliver, by_value, self.states, self.names_of, keeps_all=remember)
        ops = needed_ops(self._ops, by_value, ends.values(), player.states.keys())
        with torch.no_grad():
            player.play(schedule(ops, by_value))
        if remember:
            self.states = player.states
        if to_the_end:
            self.streams.set_final_states(
                {stream: (mark, player.state_at(stream, mark)) for stream, mark in ends.items()}
            )

    # Recording -----------------------------------------------------------------------------------

    def add(self, func: Any, args: Any, kwargs: Any, out: Any, tensors: list[Tensor]) -> None:
        """Record an operation that has just run on the meta device, on these tensors."""
        targets = _targets(func, args, kwargs, tensors)
        made, draws = list(leaves(out)), draws_numbers(func)
        changes = bool(targets or draws or any(map(self._is_new, made))) and "empty" not in func.name()
        if not changes:  # a view, or uninitialized memory
            for tensor in filter(is_recorded, tensors):
                self.value_of(tensor)
            for leaf in made:
                self._new_result(leaf)
            return
        self._check_possible(func.name(), (args, kwargs), draws)
        refs = self._refs(tensors, targets)
        results = [self._new_result(leaf) for leaf in made]
        draw = self.streams.draw(generator_in((args, kwargs))) if draws else None
        if draw and any(argument.name == "generator" for argument in arguments_of(func)):
            kwargs = {**kwargs, "generator": draw.stream.generator}
        args, kwargs = mapped(lambda leaf: self._recorded_argument(leaf, refs), (args, kwargs))
        reads = [ref.value for i, ref in refs.items() if not targets.get(i)]
        writes = [refs[i].value for i in targets] + [ref.value for ref in results if ref]
        self._append(Op(func, args, kwargs, results, reads, writes, draw), func.name())

    def add_init_function(self, func: Any, kwargs: dict[str, Any]) -> None:
        """Record a function of `nn.init` that cannot run without values."""
        self._check_possible(func.__name__, kwargs, True)
        refs = self._refs([kwargs["tensor"]], {id(kwargs["tensor"]): True})
        draw = self.streams.draw(generator_in(kwargs))
        kwargs = mapped(lambda leaf: self._recorded_argument(leaf, refs), kwargs)
        writes = [ref.value for ref in refs.values()]
        self._append(Op(func, (), kwargs, [None], [], writes, draw), func.__name__)

    def _append(self, op: Op, name: str) -> None:
        self._ops.append(op)
        self._written.update(op.writes)
        for value in op.reads:
            if value in self.files and value not in op.writes:
                # `_check_possible` has found that this operation preserves values.
                self.files |= dict.fromkeys(op.writes, self.files[value])
        known = [self.newest[value] for value in op.touches if value in self.newest]
        if known:
            is_comparable = op.draw is None and len(set(known)) == 1
            what = f"{name} {_signature((op.args, op.kwargs))}" if is_comparable else token_hex()
            since = NewestVersion(known[0].rank, (*known[0].since, what))
            self.newest |= dict.fromkeys(op.writes, since)

    def _check_possible(self, name: str, given: Any, draws: bool) -> None:
        """Raise RuntimeError if this operation depends on something that only initialize will do."""
        if self.files and name not in VALUE_PRESERVING:
            self.check_not_from_file(name, filter(is_recorded, tensors_in(given)))
        if draws and not self.is_construction and self.streams.drawn_out_of_order(generator_in(given)):
            names = self.names_of(map(self.value_of, filter(is_recorded, tensors_in(given))))
            raise RuntimeError(
                f"{name} of {names} cannot continue the random numbers of construction: zero_full.initialize "
                "draws those, and the same generator has drawn others meanwhile. Call torch.manual_seed "
                "first, or do it inside zero_full.Init."
            )

    def load_later(self, file: Any, modules: Iterable[nn.Module]) -> None:
        """Record that initialize will read the parameters and buffers of these modules from a file."""
        for module in modules:
            real: dict[str, Tensor] = {}
            for name, tensor in state_of(module):
                twin = twin_of(tensor)
                if twin is not None:
                    self.files[self.value_of(twin)] = file
                else:
                    real[name] = tensor.detach().clone()
            self.real_before_load[module] = real

    def newest_version(self, tensor: Tensor) -> NewestVersion | None:
        """Return the rank that has newer values of this tensor, or None."""
        return self.newest.get(self.value_of(tensor))

    def file_of(self, tensor: Tensor) -> Any:
        """Return the file from which initialize will read this tensor, or None."""
        return self.files.get(self.value_of(tensor))

    def check_not_from_file(self, what: str, tensors: Iterable[Tensor]) -> None:
        """Raise RuntimeError if initialize has yet to read one of these tensors from a file."""
        values = [self.value_of(tensor) for tensor in tensors] if self.files else []
        fixed = [value for value in values if value in self.files]
        if fixed:
            raise RuntimeError(
                f"{what} on {self.names_of(fixed)} comes too early: initialize will overwrite it with the "
                "file of Init(weights=...). Do it after initialize, inside zero_full.GatheredParameters."
            )

    # Tensors and their values --------------------------------------------------------------------

    def value_of(self, tensor: Tensor) -> Value:
        """Return the current value of a tensor's storage."""
        value = self._values.get(id(tensor.untyped_storage()))
        if value is None:
            names = self.names.matching(lambda twin: twin is tensor)
            what = ", ".join(names) or f"a tensor of shape {tuple(tensor.shape)}"
            raise ValueError(
                f"{what} has no values: the operation that made it was not recorded. Make it inside "
                "zero_full.Init, or after initialize."
            )
        return value

    def is_empty(self, tensor: Tensor) -> bool:
        """Return whether the tensor's memory was never written."""
        return tensor.numel() > 0 and self.value_of(tensor) not in self._written

    def name_of(self, tensor: Tensor) -> str:
        """Return the tensor's name, for error messages."""
        value = self._values.get(id(tensor.untyped_storage()))
        return self.names_of([] if value is None else [value])

    def names_of(self, values: Iterable[Value]) -> str:
        """Return the names of the parameters and buffers with these values or their sources, for messages."""
        wanted = set(values)
        found = self._names(wanted)
        if not found:
            for op in reversed(self._ops):
                if not wanted.isdisjoint(op.writes):
                    wanted.update(op.reads)
            found = [f"something made from {name}" for name in self._names(wanted)[:1]]
        return ", ".join(found) or "a tensor that zero_full.Init has recorded"

    def _names(self, values: Container[Value]) -> list[str]:
        return self.names.matching(lambda twin: self._values.get(id(twin.untyped_storage())) in values)

    def _ref(self, tensor: Tensor) -> Ref:
        if tensor.is_conj() or tensor.is_neg():
            raise RuntimeError("a lazy conjugate cannot be recorded. Use Tensor.conj_physical().")
        offset = int(tensor.storage_offset())
        return Ref(self.value_of(tensor), tensor.shape, tensor.stride(), offset, tensor.dtype)

    def _refs(self, tensors: list[Tensor], targets: dict[int, bool]) -> dict[int, Ref]:
        """Return a reference to each meta tensor, by identity. Targets last, as they may overlap sources."""
        recorded = {id(tensor): tensor for tensor in tensors if is_recorded(tensor)}
        refs = {i: self._ref(tensor) for i, tensor in recorded.items() if i not in targets}
        for i, overwrites in targets.items():
            storage = recorded[i].untyped_storage()
            whole = recorded[i].is_contiguous() and recorded[i].nbytes == storage.nbytes()
            if overwrites and whole:
                self._values[id(storage)] = Value(storage)
            refs[i] = self._ref(recorded[i])
        return refs

    def _recorded_argument(self, leaf: Any, refs: dict[int, Ref]) -> Any:
        if isinstance(leaf, Tensor):
            return refs[id(leaf)] if id(leaf) in refs else RealInput.of(leaf)
        if isinstance(leaf, Generator):
            return self.streams.of(leaf)
        return CPU if isinstance(leaf, torch.device) and leaf == META else leaf

    def _is_new(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and id(leaf.untyped_storage()) not in self._values

    def _new_result(self, leaf: Any) -> Ref | None:
        """Return a reference to an operation's result if its storage is new, else None."""
        if not self._is_new(leaf):
            return None
        self._values[id(leaf.untyped_storage())] = Value(leaf.untyped_storage())
        return self._ref(leaf)


def state_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own entries of its state dict, without its children's: names and tensors."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if is_persistent_buffer(module, name):
            yield name, buffer


def is_recorded(leaf: Any) -> bool:
    """Return whether this is a tensor on the meta device, which has no values."""
    return isinstance(leaf, Tensor) and leaf.device == META


@cache
def draws_numbers(func: Any) -> bool:
    """Return whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def written(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Tensor, str]]:
    """Yield the tensors that an operation changes, with the arguments' names."""
    for position, name in _written_arguments(func):
        given = args[position] if position < len(args) else kwargs.get(name)
        yield from ((tensor, name) for tensor in tensors_in(given))


@cache
def _written_arguments(func: Any) -> list[tuple[int, str]]:
    def is_written(argument: Any) -> bool:
        declared = argument.alias_info is not None and argument.alias_info.is_write
        return declared or argument.name in UNDECLARED_WRITES

    return [(i, each.name) for i, each in enumerate(arguments_of(func)) if is_written(each)]


def generator_in(args: Any) -> Generator:
    """Return the generator in an operation's arguments, or else torch's default generator."""
    given = [leaf for leaf in leaves(args) if isinstance(leaf, Generator)]
    return given[0] if given else torch.default_generator


def _targets(func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> dict[int, bool]:
    """Return the tensors that an operation changes, by identity, and whether it overwrites them unread."""
    if not _written_arguments(func):
        return {}
    overwrites = func.name().removeprefix("aten::").split(".")[0] in OVERWRITES.split()
    seen = [id(tensor) for tensor in tensors]
    return {
        id(tensor): (overwrites or name == "out") and seen.count(id(tensor)) == 1
        for tensor, name in written(func, args, kwargs)
    }


def _signature(args: Any) -> str:
    """Return an operation's arguments as text that is equal on all ranks that run the same operation."""

    def described(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return *leaf.size, leaf.dtype
        return leaf.checksum if isinstance(leaf, RealInput) else leaf

    return str([described(leaf) for leaf in leaves(args)])


# Names ------------------------------------------------------------------------------------------------


class TensorNames:
    """Names of recorded tensors for messages, from the modules that were constructed while it watched."""

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
                _check_not_lazy(f"{name} of {type(module).__name__}", tensor)
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


def _check_not_lazy(name: str, tensor: Any) -> None:
    """Raise ValueError for a parameter of a lazy module, which has no shape before the first forward."""
    if is_lazy(tensor):
        raise ValueError(
            f"{name} has no shape yet. Give its module the sizes (nn.Linear instead of nn.LazyLinear), or "
            "construct it outside zero_full.Init and run a batch through it before initialize."
        )
