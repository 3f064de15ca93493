"""Replay recorded operations on the CPU, one parameter at a time. See `recording` for the recording."""

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor

from zero_full.construct.generators import CPU, Draw, RandomStream, as_default_generator
from zero_full.nested import Leaf, leaves, mapped
from zero_full.shard.group.checksum import checksum


@dataclass(frozen=True, eq=False)
class Value:
    """The contents of a storage between two complete overwrites."""

    storage: torch.UntypedStorage  # kept alive, so that its identity is not reused


@dataclass(frozen=True)
class Ref(Leaf):
    """Reference to a tensor that replay makes: a view of a value."""

    value: Value
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class RealInput(Leaf):
    """A real tensor that an operation reads."""

    tensor: Tensor
    checksum: int

    @classmethod
    def of(cls, tensor: Tensor) -> "RealInput":
        """Keep this tensor's memory, even if `tensor.data` is assigned later."""
        return cls(tensor.detach(), checksum(tensor))

    def has_changed(self) -> bool:
        """Return whether the memory was written since, also by an array that shares it."""
        return checksum(self.tensor) != self.checksum


@dataclass(frozen=True, eq=False)
class Op:
    """A recorded operation, with `Ref` or `RealInput` for tensors and `RandomStream` for generators."""

    func: Any
    args: Any
    kwargs: Any
    outputs: list[Ref | None]  # None: the result has no new storage
    reads: list[Value]
    writes: list[Value]
    draw: Draw | None
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    @property
    def touches(self) -> list[Value]:
        """All values that the operation reads or writes, each once."""
        return list(dict.fromkeys(self.reads + self.writes))


Wanted = Mapping[Value, list[Tensor]]


# Scheduling ------------------------------------------------------------------------------------------


def needed_ops(
    ops: Iterable[Op], wanted: Iterable[Value], ends: Iterable[int], known: Container[int]
) -> list[Op]:
    """Return the operations that replay must run, in recorded order.

    These make the wanted values and their inputs, directly or indirectly. They also make the random draws
    that precede such an operation or an end state in `ends`. A draw depends on the one before it, unless the
    generator's state after that one is known.
    """
    live: set[Value | int] = {*wanted, *(end for end in ends if end not in known)}
    kept = []
    for op in reversed(list(ops)):
        if not live.isdisjoint(op.writes) or (op.draw and op.draw.mark in live):
            live.update(op.reads)
            if op.draw and isinstance(op.draw.start, int) and op.draw.start not in known:
                live.add(op.draw.start)
            kept.append(op)
    return kept[::-1]


def schedule(ops: list[Op], wanted: Wanted) -> list[Op]:
    """Order the operations: draws as recorded, and after each the operations that it lets complete."""
    after = _dependencies(ops)
    makers: dict[Value, list[Op]] = {value: [] for value in wanted}
    draws = [op for op in ops if op.draw]
    numbers = {op: number for number, op in enumerate(draws)}
    step: dict[Op, int] = {}  # number of the last draw that each operation depends on
    for op in ops:
        step[op] = numbers[op] if op.draw else max((step[earlier] for earlier in after[op]), default=-1)
        for value in op.writes:
            if value in makers:
                makers[value].append(op)
    complete: dict[int, list[Op]] = defaultdict(list)
    for made_by in makers.values():
        complete[max((step[op] for op in made_by), default=-1)] += made_by
    goals = complete[-1] + [op for number, draw in enumerate(draws) for op in [draw, *complete[number]]]
    return _dependencies_first(goals, after)


def _dependencies(ops: list[Op]) -> dict[Op, list[Op]]:
    """Return each operation's predecessors: writers of its values, and readers of values that it writes."""
    writer: dict[Value, Op] = {}
    readers: dict[Value, list[Op]] = defaultdict(list)
    after: dict[Op, list[Op]] = {}
    for op in ops:
        after[op] = [writer[value] for value in op.touches if value in writer]
        after[op] += [reader for value in op.writes for reader in readers.pop(value, [])]
        writer.update(dict.fromkeys(op.writes, op))
        for value in op.reads:
            if value not in op.writes:
                readers[value].append(op)
    return after


def _dependencies_first(goals: list[Op], after: dict[Op, list[Op]]) -> list[Op]:
    """Return the goals in order, each directly after its dependencies."""
    order: dict[Op, None] = {}
    for goal in goals:
        todo = [goal]
        while todo:
            missing = [op for op in reversed(after[todo[-1]]) if op not in order]
            todo.extend(missing)
            if not missing:
                order[todo.pop()] = None
    return list(order)


# Execution -------------------------------------------------------------------------------------------


class Player:
    """Executor of recorded operations. Keeps only values that a later operation needs."""

    def __init__(
        self,
        streams: Iterable[RandomStream],
        deliver: Callable[[Tensor, Tensor], object],
        wanted: Wanted,
        known: Mapping[int, Tensor],
        names: Callable[[Iterable[Value]], str],
        keeps_all: bool,
    ) -> None:
        """`keeps_all`: keep all generator states, not only those that a later draw returns to."""
        self.deliver, self.wanted, self.names, self.keeps_all = deliver, wanted, names, keeps_all
        self.real: dict[Value, torch.UntypedStorage] = {}
        self.absent: set[Value] = set()
        self.generators: dict[RandomStream, Generator] = {}  # copies: user code may use the originals
        self.places: dict[RandomStream, int | None] = {}  # current mark of each generator
        self.states = dict(known)  # generator states, by mark

        for stream in streams:
            self.generators[stream] = Generator(CPU)
            self.generators[stream].set_state(stream.initial_state)
            self.places[stream] = stream.first
            self.states[stream.first] = stream.initial_state

    def play(self, ops: list[Op]) -> None:
        """Run all operations; deliver each wanted value after its last use."""
        uses = Counter(value for op in ops for value in op.touches)
        for value in self.wanted:
            if value not in uses:  # never written: delivered uninitialized
                self._deliver(value)
        for op in ops:
            self._run(op)
            uses.subtract(op.touches)
            done = [value for value in op.touches if not uses[value]]
            for value in done:
                if value not in self.wanted:
                    self.real.pop(value, None)
            for value in done:
                if value in self.wanted:
                    self._deliver(value)

    def state_at(self, stream: RandomStream, place: Tensor | int) -> Tensor:
        """Return the generator's state at this mark."""
        self._seek(stream, place)
        return self.generators[stream].get_state()

    def _deliver(self, value: Value) -> None:
        storage = self._storage(value)
        del self.real[value]
        for tensor in self.wanted[value]:
            place = tensor.storage_offset(), tensor.size(), tensor.stride()
            self.deliver(tensor, torch.empty(0, dtype=tensor.dtype, device=CPU).set_(storage, *place))

    def _run(self, op: Op) -> None:
        for leaf in leaves((op.args, op.kwargs)):
            if isinstance(leaf, RealInput) and leaf.has_changed():
                raise RuntimeError(
                    f"{self.names(op.writes)} was made from a tensor of shape {tuple(leaf.tensor.shape)} "
                    "that has changed since, and its values are only computed now. Make it from a clone."
                )
        args, kwargs = mapped(self._real_argument, (op.args, op.kwargs))
        with _default_dtype(op.default_dtype):
            out = self._draw(op, op.draw, args, kwargs) if op.draw else op.func(*args, **kwargs)
        for ref, result in zip(op.outputs, leaves(out), strict=True):
            if ref:
                self._keep(ref, result)

    def _draw(self, op: Op, draw: Draw, args: Any, kwargs: Any) -> Any:
        generator = self.generators[draw.stream]
        self._seek(draw.stream, draw.start)
        if kwargs.get("generator") is generator:
            out = op.func(*args, **kwargs)
        else:
            with as_default_generator(generator):
                out = op.func(*args, **kwargs)
        self.places[draw.stream] = draw.mark
        if self.keeps_all or draw.mark in draw.stream.returned_to:
            self.states[draw.mark] = generator.get_state()
        return out

    def _seek(self, stream: RandomStream, place: Tensor | int) -> None:
        if isinstance(place, Tensor):
            self.generators[stream].set_state(place)
            self.places[stream] = None
        elif place != self.places[stream]:
            self.generators[stream].set_state(self.states[place])
            self.places[stream] = place

    def _real_argument(self, leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return self._tensor(leaf)
        if isinstance(leaf, RandomStream):
            return self.generators[leaf]
        return leaf.tensor if isinstance(leaf, RealInput) else leaf

    def _tensor(self, ref: Ref) -> Tensor:
        empty = torch.empty(0, dtype=ref.dtype, device=CPU)
        return empty.set_(self._storage(ref.value), ref.offset, ref.size, ref.stride)

    def _storage(self, value: Value) -> torch.UntypedStorage:
        if value in self.absent:
            raise RuntimeError(
                f"{self.names([value])} is made from an output that torch leaves empty on the CPU, where "
                "zero_full.Init replays operations. Make it from other values, or construct the model "
                "without zero_full.Init"
            )
        if value not in self.real:
            room = torch.empty(value.storage.nbytes(), dtype=torch.uint8, device=CPU)
            self.real[value] = room.untyped_storage()
        return self.real[value]

    def _keep(self, ref: Ref, result: Tensor) -> None:
        place = result.storage_offset(), result.size(), result.stride()
        assert result.dtype == ref.dtype
        if place == (ref.offset, ref.size, ref.stride):
            self.real[ref.value] = result.untyped_storage()
        elif result.shape != ref.size:  # an extra output that the CPU leaves empty, as of batch norm in eval
            self.absent.add(ref.value)
        else:  # the CPU result has another layout than the meta result
            self._tensor(ref).copy_(result)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    now = torch.get_default_dtype()
    if dtype == now:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(now)
