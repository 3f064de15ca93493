"""Construct a model without memory for it; get its values later, one parameter at a time.

[Note: recording and replay] Inside `recorder` a model is constructed on the meta device: its tensors have
shapes and no values. Every operation that would have made or changed values is written down. `replay` runs
them on the CPU and delivers each parameter as soon as it is complete, so that about one parameter is in
memory at a time. The values are bit for bit those of plain construction on the CPU:

    order      Operations that draw random numbers run in the recorded order, even if what they draw is
               overwritten later. Others run as late as possible: when a draw or a delivery needs them.
    versions   An operation that overwrites a whole storage starts a new `Value`. Nothing connects it with
               what the storage held before, so a default initialisation that is replaced keeps no memory.
    numbers    Drawing on the meta device leaves a generator alone. To notice when a constructor seeds it,
               the recorder seeds it after each draw with a random mark. A generator at a mark stands for
               "as after that draw"; at anything else, the constructor has set it.

What cannot be recorded is an error: above all, reading values (`.item()`, `if tensor:`) before there are any.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from zero_full.construct.generators import Streams, alone_with_torchs_generator
from zero_full.construct.replay import CPU, Held, Op, Player, Ref, Value, leaves, needed, schedule, swap

META = torch.device("meta")

# These do not read what they write to. Nor do others read an argument that is called `out`.
BLIND = "zero_ fill_ copy_ normal_ uniform_ random_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_"
TRUNC_NORMAL = "tensor", "mean", "std", "a", "b", "generator"
_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]


class Recording:
    """What was recorded. Ranks that construct the same model get the same deliveries in the same order."""

    def __init__(self) -> None:
        self._ops: list[Op] = []
        self._values: dict[int, Value] = {}  # what each meta storage holds now, by the storage's identity
        self.streams = Streams()

    @property
    def rng_state_before(self) -> Tensor:
        """The state of torch's generator that replay starts from. May be set to another rank's."""
        return self.streams.main.before

    @rng_state_before.setter
    def rng_state_before(self, state: Tensor) -> None:
        self.streams.main.start_from(state)

    def knows(self, tensor: Tensor) -> bool:
        """Whether this is a tensor of the recorded construction."""
        return id(tensor.untyped_storage()) in self._values

    def replay(self, deliver: Callable[[Tensor, Tensor], None], wanted: Iterable[Tensor]) -> Tensor:
        """Call `deliver(tensor, real)` once for each wanted tensor, as soon as its values are there.

        `real` is all of it, on the CPU; its memory is free when nobody keeps it. A tensor that is not on the
        meta device is delivered as it is, first. Returns torch's generator's state after construction, and
        moves the generator there unless somebody has used it since or `rng_state_before` is another rank's.
        """
        by_value: dict[Value, list[Tensor]] = defaultdict(list)
        for tensor in {id(tensor): tensor for tensor in wanted}.values():
            if tensor.device == META:
                by_value[self._value_of(tensor)].append(tensor)
            else:
                deliver(tensor, tensor.detach())
        with torch.no_grad():
            player = Player(self.streams, deliver, by_value)
            player.play(schedule(needed(self._ops, by_value), by_value))
        return player.move_generators(self.streams.main)

    def add(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Write down an operation that has just run on the meta device."""
        targets = _targets(func, args, kwargs)
        refs = self._refs((args, kwargs), targets)
        born = [self._born(leaf) for leaf in leaves(out)]
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if not (targets or draws or any(born)) or "empty" in func.name():
            return  # a view, or memory without values
        draw = self.streams.draw(_generator_in((args, kwargs))) if draws else None
        if draw and any(argument.name == "generator" for argument in func._schema.arguments):
            kwargs = {**kwargs, "generator": draw.stream.generator}
        args, kwargs = (swap(given, lambda leaf: self._freeze(leaf, refs)) for given in (args, kwargs))
        reads = [ref.value for i, ref in refs.items() if not targets.get(i)]
        writes = [refs[i].value for i in targets] + [ref.value for ref in born if ref]
        self._ops.append(Op(func, args, kwargs, born, reads, writes, torch.get_default_dtype(), draw))

    def add_whole(self, func: Any, kwargs: dict[str, Any]) -> None:
        """Write down a function of `nn.init` that could not run without values."""
        refs = self._refs(kwargs, {id(kwargs["tensor"]): True})
        draw = self.streams.draw(_generator_in(kwargs))
        kwargs = swap(kwargs, lambda leaf: self._freeze(leaf, refs))
        writes = [ref.value for ref in refs.values()]
        self._ops.append(Op(func, (), kwargs, [None], [], writes, torch.get_default_dtype(), draw))

    def _value_of(self, tensor: Tensor) -> Value:
        value = self._values.get(id(tensor.untyped_storage()))
        if value is None:
            what = f"a meta tensor of shape {tuple(tensor.shape)}"
            raise ValueError(f"{what} has no values: the operation that made it could not be recorded")
        return value

    def _ref(self, tensor: Tensor) -> Ref:
        if tensor.is_conj() or tensor.is_neg():
            raise RuntimeError("a lazy conjugate cannot be recorded; use Tensor.conj_physical()")
        offset = int(tensor.storage_offset())
        return Ref(self._value_of(tensor), tensor.shape, tensor.stride(), offset, tensor.dtype)

    def _refs(self, args: Any, targets: dict[int, bool]) -> dict[int, Ref]:
        """A reference to each meta tensor, by identity. Targets come last: they may overlap with sources."""
        tensors = {id(t): t for t in leaves(args) if isinstance(t, Tensor) and t.device == META}
        refs = {i: self._ref(tensor) for i, tensor in tensors.items() if i not in targets}
        for i, blind in targets.items():
            storage = tensors[i].untyped_storage()
            whole = tensors[i].is_contiguous() and tensors[i].nbytes == storage.nbytes()
            if blind and whole:
                self._values[id(storage)] = Value(storage)
            refs[i] = self._ref(tensors[i])
        return refs

    def _freeze(self, leaf: Any, refs: dict[int, Ref]) -> Any:
        if isinstance(leaf, Tensor):
            return refs[id(leaf)] if id(leaf) in refs else Held(leaf, leaf._version)
        if isinstance(leaf, Generator):
            return self.streams.of(leaf)
        return CPU if isinstance(leaf, torch.device) and leaf == META else leaf

    def _born(self, leaf: Any) -> Ref | None:
        """A reference to an operation's result if its storage is new."""
        if not isinstance(leaf, Tensor) or id(leaf.untyped_storage()) in self._values:
            return None
        self._values[id(leaf.untyped_storage())] = Value(leaf.untyped_storage())
        return self._ref(leaf)


@contextmanager
def recorder() -> Iterator[Recording]:
    """Construct models inside without memory for them. See [Note: recording and replay].

    With an explicit `device="cpu"`, `torch.zeros` and others whose values are known at once stay real;
    empty and random tensors are recorded all the same. Not seen, and so not replayed: what is done to a
    model after the context, and to a NumPy array that a tensor was made from. torch's generator moves on at
    replay, not here.
    """
    if torch.get_default_device() == META:
        raise RuntimeError("already constructing on the meta device; recorders cannot be nested")
    with alone_with_torchs_generator():
        recording = Recording()
        try:
            with torch.device("meta"), _Functions(recording), _Operations(recording):
                yield recording
        finally:
            recording.streams.close()


class _Functions(TorchFunctionMode):
    """What torch decides above the level of operations, and would decide wrongly."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _IS_META and args[0].device == META:
            return self._is_left_alone(inspect.currentframe())
        if func in (Tensor.numpy, Tensor.__array__) and args[0].device == META:
            raise _no_values(f"Tensor.{func.__name__}")
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].device == META:
            args = args[0], _real_index(args[1]), *args[2:]
        if func == Tensor.new_tensor and args[0].device == META:
            func, args, kwargs = torch.tensor, args[1:], {"dtype": args[0].dtype, **kwargs}
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and not _has_meta((args, kwargs)):
            return _from_data(func, args, kwargs)
        return func(*args, **kwargs)

    def _is_left_alone(self, frame: FrameType | None) -> bool:
        """The answer to `tensor.is_meta`. As a rule no: who asks would leave the tensor without values.

        But trunc_normal_ draws again what falls outside, for which it must see values. So it is recorded as
        one operation, with the arguments in the frame that asks.
        """
        asking = frame and frame.f_back
        if not asking or asking.f_globals is not vars(nn.init) or "trunc_normal" not in asking.f_code.co_name:
            return False
        given = {name: asking.f_locals[name] for name in TRUNC_NORMAL}
        self.recording.add_whole(nn.init.trunc_normal_, given)
        return True


def _from_data(func: Any, args: Any, kwargs: Any) -> Tensor:
    """A recorded tensor with this data, which the meta device would forget."""
    if torch.device(kwargs.get("device") or META) != META:
        return cast(Tensor, func(*args, **kwargs))
    real: Tensor = func(*args, **{**kwargs, "device": CPU})
    return real.detach().to(META).requires_grad_(real.requires_grad)


def _real_index(index: Any) -> Any:
    """The same index, where a list's or an array's numbers are not forgotten."""
    if isinstance(index, tuple):
        return tuple(_real_index(part) for part in index)
    is_numbers = isinstance(index, list) or (hasattr(index, "__array__") and not isinstance(index, Tensor))
    return torch.as_tensor(index, device=CPU) if is_numbers else index


class _Operations(TorchDispatchMode):
    """Records operations on meta tensors, and lets others be."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if _is_made_anew(func, args, draws) and kwargs.get("device") == CPU:
            kwargs = {**kwargs, "device": META}
        if kwargs.get("device") != META and not _has_meta((args, kwargs)):
            if draws and self.recording.streams.has_marked(_generator_in((args, kwargs))):
                raise _no_values(f"{func} on a tensor of device='cpu'")
            return func(*args, **kwargs)
        out = _on_meta(func, args, kwargs)
        if torch.Tag.inplace_view not in func.tags:  # those change what a tensor shows, not what is there
            self.recording.add(func, args, kwargs, out)
        return out


def _is_made_anew(func: Any, args: Any, draws: bool) -> bool:
    """Whether this makes a tensor without values (as `torch.Tensor(2, 3)` does) or with random ones."""
    if any(isinstance(leaf, Tensor) for leaf in leaves(args)):
        return False
    return draws or (func.name() == "aten::empty.memory_format" and 0 not in args[0])


def _on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation for its shapes."""
    if any(tensor.device != META for tensor, _ in _written(func, args, kwargs)):
        raise _no_values(f"{func} into a tensor of device='cpu'")
    try:
        return func(*args, **kwargs)
    except RuntimeError:  # some do not like real tensors among the others
        args, kwargs = swap((args, kwargs), lambda leaf: leaf.to(META) if isinstance(leaf, Tensor) else leaf)
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if isinstance(error, NotImplementedError) or "meta tensor" in str(error).lower():
            raise _no_values(str(func)) from error
        raise


def _no_values(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} needs values, as .item() and `if tensor` do, and inside the recorder a model's tensors have "
        "none. Make what it reads outside, or with device='cpu'; or do it after `initialize`, inside "
        "`GatheredParameters`"
    )


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Tensor, str]]:
    """The tensors that an operation changes, and the arguments' names."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from ((leaf, argument.name) for leaf in leaves(given) if isinstance(leaf, Tensor))


def _targets(func: Any, args: Any, kwargs: Any) -> dict[int, bool]:
    """The tensors that an operation changes, by identity; True: without reading them."""
    overwrites = func.name().removeprefix("aten::").split(".")[0] in BLIND.split()
    seen = [id(leaf) for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return {
        id(tensor): (overwrites or name == "out") and seen.count(id(tensor)) == 1
        for tensor, name in _written(func, args, kwargs)
    }


def _generator_in(args: Any) -> Generator:
    given = [leaf for leaf in leaves(args) if isinstance(leaf, Generator)]
    return given[0] if given else torch.default_generator


def _has_meta(nested: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.device == META for leaf in leaves(nested))
