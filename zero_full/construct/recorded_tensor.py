"""Recorded tensors: the tensors of a model between `Init` and `initialize`, without values.

[Note: recorded tensors] A `Recorded` has two sides. Its *shell* is the object that user code holds, from the
constructor to the last training step: a CPU tensor of the right shape and dtype that shows NaN, like a
released parameter. Its *twin* is on the meta device. Operations on the tensor run on the twin and are
recorded. When values are available, the shell gets them and becomes an ordinary tensor or parameter: the same
object.

All torch functions on a `Recorded` go through `__torch_function__`. Queries of shape, dtype and the like use
the twin (ABOUT_VALUES). Gradients and hooks belong to the shell, and so does the device, once the model is
constructed. Functions that expose memory raise (NEEDS_MEMORY). The recorder runs and records all others.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import cache, lru_cache
from typing import Any, NoReturn, Protocol, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from zero_full._compat import (
    BACKWARD_HOOKS,
    METADATA,
    VIEW_BASE,
    ParameterCandidate,
    has_compatible_type,
    identity_of,
    instance_of,
    typed_storage,
    without_functions,
    without_overrides,
)
from zero_full.construct.generators import CPU
from zero_full.errors import NoValuesError
from zero_full.nested import tensors_in
from zero_full.shard.group.parameters import placeholder_scalar
from zero_full.shard.group.registry import record_of


def _slot(name: str) -> Any:
    return getattr(Tensor, name)


def _getters(names: str) -> set[Any]:
    return {_slot(name).__get__ for name in names.split()}


def _methods(names: str) -> set[Any]:
    return {_slot(name) for name in names.split()}


SHAPE_AND_DTYPE = _getters("shape dtype layout ndim itemsize nbytes requires_grad grad_fn is_leaf is_sparse")
SHAPE_AND_DTYPE |= _methods(
    "size dim ndimension numel nelement element_size stride storage_offset is_contiguous"
)
SHAPE_AND_DTYPE |= _methods("is_floating_point is_complex is_signed is_conj is_neg is_inference __len__")
DEVICE = _getters("device is_cpu is_cuda") | _methods("get_device")
ON_SHELL = _getters("grad retains_grad name") | {_slot(name).__get__ for name in (*METADATA, VIEW_BASE)}
ON_SHELL |= _methods("register_hook register_post_accumulate_grad_hook is_shared is_pinned")
ON_SHELL |= {_slot("grad").__set__, _slot("grad").__delete__, _slot(BACKWARD_HOOKS).__set__}
ON_SHELL |= {has_compatible_type}
ON_BOTH = {Tensor.requires_grad_, _slot("requires_grad").__set__}
NEEDS_MEMORY = _methods("data_ptr untyped_storage storage share_memory_ pin_memory") | {typed_storage}
NEEDS_MEMORY |= _methods("backward numpy __array__ tolist __dlpack__ apply_ map_ map2_")
NEEDS_MEMORY |= {torch.autograd.backward, torch.autograd.grad}


UNRECORDED_ASSIGNMENT = (
    "a recorded tensor was assigned to it in a way that torch does not always report (parameter.data = "
    "recorded, or a tensor subclass). Use nn.Parameter(recorded), or do it outside zero_full.Init."
)


class RecorderProtocol(Protocol):
    """Interface of the object that records the operations on a tensor."""

    recording: Any

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record a call, and return the result of `func`."""

    def gathered(self, tensors: Sequence[Tensor], rank: int | None) -> AbstractContextManager[None]:
        """Return a context in which these tensors have values: see `GatheredParameters`."""


class Record:
    """The data behind a recorded tensor: its twin, recorder and parameter class."""

    kind: type[Parameter] | None = None  # class of the parameter; None: a plain tensor
    # Inside GatheredParameters (see `early_gather`):
    contexts = 0  # number of contexts
    rank: int | None = None  # modifier rank
    at_start: Any = None  # fingerprint at the start
    was_received = False  # received from the rank that has changed it last
    accepted: Any = None  # fingerprint at the end of a context with a modifier rank
    source: Tensor | None = None  # tensor in a mapped file that was copied to this one

    def __init__(self, recorder: RecorderProtocol, twin: Tensor) -> None:
        self.recorder, self.twin = recorder, twin

    @property
    def name(self) -> str:
        """The tensor's name, for error messages."""
        return cast(str, self.recorder.recording.name_of(self.twin))


class Recorded(ParameterCandidate):
    """A tensor without values that records operations on it. See [Note: recorded tensors]."""

    _record: Record

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Recorded):
            if func in SHAPE_AND_DTYPE:
                return func(args[0]._record.twin, *args[1:], **kwargs)
            if func in ON_SHELL or func in DEVICE:
                with without_overrides():
                    return func(*args, **kwargs)
        recorded = next(tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, Recorded))
        return recorded._record.recorder.run(func, args, kwargs)

    def is_parameter(self) -> bool:
        """Return whether this tensor is a parameter."""
        return self._record.kind is not None

    def become_parameter(self, kind: type[Parameter]) -> None:
        """Turn this tensor into a parameter of this class."""
        self._record.kind = kind
        _set_class(self, _recorded_kind(kind))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            if not self.is_leaf:
                raise RuntimeError(
                    f"{self._record.name} is the result of an operation, which cannot be deep-copied. Copy "
                    "its detach()"
                )
            with torch.no_grad():
                copied = self.detach().clone()
            if self._record.kind is not None:
                copied = self._record.kind(copied, self.requires_grad)
            else:
                attributes = {key: value for key, value in vars(self).items() if key != "_record"}
                vars(copied.requires_grad_(self.requires_grad)).update(deepcopy(attributes, memo))
            memo[id(self)] = copied
        return cast(Tensor, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise_no_values(self, "pickling")

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.unbind(0))

    def __format__(self, how: str) -> str:
        return raise_no_values(self, f"the format {how!r}") if how else repr(self)

    def __repr__(self, **contents: Any) -> str:  # type: ignore[override]
        about = f"size={tuple(self.shape)}, dtype={self.dtype}, requires_grad={self.requires_grad}"
        text = f"tensor(..., {about}, values come in zero_full.initialize)"
        return f"Parameter containing:\n{text}" if self._record.kind else text


@cache
def _recorded_kind(kind: type[Parameter] | None) -> type[Recorded]:
    """Return the class of a recorded parameter: `Recorded` itself for a plain one, as torch checks a flag."""
    return Recorded if kind in (None, Parameter) else cast(Any, type)(kind.__name__, (Recorded, kind), {})


def raise_no_values(tensor: Recorded, what: str) -> NoReturn:
    """Raise NoValuesError, because `what` needs the tensor's values."""
    raise NoValuesError(
        f"{what} needs values of {tensor._record.name}, which zero_full.initialize computes. Do it "
        "afterwards, or inside zero_full.GatheredParameters."
    )


def has_values(tensor: Tensor) -> bool:
    """Return whether the tensor is neither recorded nor on the meta device."""
    return not isinstance(tensor, Recorded) and not tensor.is_meta


def twin_of(tensor: Any) -> Tensor | None:
    """Return the twin of a recorded tensor, also inside GatheredParameters, or None for other tensors."""
    record = record_of(tensor) if isinstance(tensor, Tensor) else None
    return None if record is None else cast(Tensor, record.twin)


# From recorded to real and back ----------------------------------------------------------------------


@cache
def _nothing(dtype: torch.dtype) -> Tensor:
    return placeholder_scalar(dtype, CPU).clone()


@lru_cache(maxsize=1024)
def _shown(dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return _nothing(dtype).expand(shape)


def is_empty_shell(tensor: Tensor) -> bool:
    """Return whether an unrecorded operation has made this tensor from a recorded one."""
    if isinstance(tensor, Recorded) or tensor.device != CPU or tensor.layout != torch.strided:
        return False
    return identity_of(tensor.untyped_storage()) == identity_of(_nothing(tensor.dtype).untyped_storage())


def new_recorded(recorder: RecorderProtocol, twin: Tensor) -> Recorded:
    """Make a new recorded tensor. (torch functions are disabled, here and in `sync_shell`.)"""
    shown = _shown(twin.dtype, twin.shape).data  # with its own version counter
    made: Recorded = instance_of(Recorded, shown)
    made._record = Record(recorder, twin)
    return made


def sync_shell(tensor: Recorded) -> None:
    """Update the shell to its twin's shape and dtype, which may have changed."""
    twin = tensor._record.twin
    if tensor.shape != twin.shape or tensor.dtype != twin.dtype:
        tensor.data = _shown(twin.dtype, twin.shape)


def materialize(tensor: Recorded, real: Tensor) -> Record:
    """Assign values to a recorded tensor, which makes it an ordinary one. Returns its record."""
    behind = tensor._record
    with without_functions():
        tensor.data = real
    del tensor._record
    _set_class(tensor, behind.kind or Tensor)
    return behind


def dematerialize(tensor: Tensor, behind: Record) -> None:
    """Turn a tensor back into a recorded one."""
    with without_functions():
        tensor.data = _shown(behind.twin.dtype, behind.twin.shape)
    _set_class(tensor, _recorded_kind(behind.kind))
    vars(tensor)["_record"] = behind


def _set_class(tensor: Tensor, kind: type[Tensor]) -> None:
    """Change the tensor's class, as torch does when it materializes a lazy parameter."""
    cast(Any, tensor).__class__ = kind
