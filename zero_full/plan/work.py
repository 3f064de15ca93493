"""The work of a step: which operations, collectives and updates it consists of, and their sizes.

A dispatch mode records the operations of the model's pass on fake tensors (`activations.py`), and those of
the runtime in the simulated step (`simulation.py`). Collectives are recorded where traffic is counted.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero_full._compat import TorchDispatchMode, arguments_of, returns_new
from zero_full.comm.traffic import CollectiveCall
from zero_full.nested import tensors_in
from zero_full.shard.group.dtensors import local_of

# Operations of torch.ops.aten that multiply matrices, with the place of the first matrix.
PRODUCTS = {"mm.default": 0, "addmm.default": 1, "bmm.default": 0, "baddbmm.default": 1}
# Operations of which each element takes the time of a function such as exp, and not that of a sum.
FUNCTIONS = ("gelu", "silu", "softmax", "tanh", "exp", "sigmoid", "erf", "norm", "dropout", "cross_entropy")
SUMMING = ("reduce_scatter", "all_reduce")  # collectives
ATTENTION = "scaled_dot_product"
UNKNOWN = ("convolution", "_fft", "linalg", "cdist", "grid_sampler", "lstm", "gru", "rnn", "sort", "topk")
# Operations that read only the rows of a table that they return.
GATHERS = ("embedding.default", "index_select.default", "gather.default", "index.Tensor")
# Kinds of passes over memory. "sum" and "function": of activations, which are used at once. The others are of
# large buffers. "cast": a copy into another type. "mixed": a sum into another type.
SUM, FUNCTION, COPY, CAST = "sum", "function", "copy", "cast"
ACCUMULATE, MIXED, SCAN, NORM = "accumulate", "mixed", "scan", "norm"
COPIES = ("copy_.default", "_to_copy.default", "clone.default")
WRITES_ONLY = ("copy_", "zero_", "fill_")  # in-place operations that do not read what they overwrite
FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class MatrixProduct:
    """A product of two matrices, or of `count` pairs of them."""

    dtype: str
    layout: str  # "nt": the second is transposed; "nn"; "tn": the first is, as for a weight's gradient
    rows: int
    inner: int
    columns: int
    count: int = 1


@dataclass(frozen=True)
class AttentionCall:
    """Attention in one operation."""

    dtype: str
    direction: str
    heads: int  # of all sequences
    tokens: int
    width: int  # of a head


@dataclass(frozen=True)
class MemoryPass:
    """One operation that reads and writes tensors."""

    kind: str
    dtype: str
    size: int  # bytes read and written


@dataclass(frozen=True)
class Collective:
    """A collective of the runtime."""

    kind: str
    dtype: str
    size: int  # bytes of the whole buffer
    in_pass: bool  # within forward or backward, which can hide it


@dataclass(frozen=True)
class AdamStep:
    """An update by the fused operator."""

    dtypes: str  # of master, gradient and copy
    numel: int


Item = MatrixProduct | AttentionCall | MemoryPass | Collective | AdamStep


@dataclass
class Work:
    """The work of a part of a step."""

    items: "Counter[Item]" = field(default_factory=Counter)
    operations: int = 0  # dispatched, views included
    unknown: set[str] = field(default_factory=set)  # operations whose time does not follow from their bytes

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.items + other.items, self.operations + other.operations, self.unknown | other.unknown
        )

    def times(self, count: int) -> "Work":
        """Return this work `count` times."""
        items = Counter({item: number * count for item, number in self.items.items()})
        return Work(items, self.operations * count, self.unknown)


class WorkRecorder(TorchDispatchMode):
    """Dispatch mode that records operations, and listener that records collectives, by part of the step."""

    def __init__(self, of_runtime: bool = False) -> None:
        """`of_runtime`: record the runtime's operations around a fake pass, and not the pass."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.of_runtime, self.in_pass, self.parts = of_runtime, True, defaultdict[str, Work](Work)
        self.checks_finite = False  # the runtime looks for numbers that are not finite in gradients
        self.begin(FORWARD)

    def begin(self, part: str, in_pass: bool = True) -> None:
        """Record into this part from now on. `in_pass`: it belongs to forward and backward."""
        self.work, self.in_pass = self.parts[part], in_pass

    def collective(self, call: CollectiveCall, make: Callable[[], None]) -> None:
        """Record a collective, by the bytes of the buffer that all ranks have of it."""
        size: int = call.by.size  # type: ignore[attr-defined]
        shares = 2 * (size - 1) if call.kind == "all_reduce" else size - 1
        whole = call.sent * size // shares
        dtype = call.by.transport.call[3]  # type: ignore[attr-defined]
        # Only a sum's time depends on the type of its elements.
        name = dtype_name(dtype) if call.kind in SUMMING else "float32"
        self.work.items[Collective(call.kind, name, whole, self.in_pass)] += 1
        if call.kind in SUMMING and self.in_pass and self.checks_finite:
            # Recorded here, because the runtime does not scan a plan's tensors, which have no values.
            self.work.items[MemoryPass(SCAN, name, whole)] += 1
        make()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim":
            self._record(func, args, result)
        return result

    def _record(self, func: Any, args: Any, result: Any) -> None:
        name = func.__name__
        given = [local_of(t) for t in tensors_in(args) if t.dim()]
        if func.namespace == "zero_full" and name.startswith("adam_step"):
            self._record_adam(args)
            return
        self.work.operations += not self.of_runtime
        if name in PRODUCTS and not self.of_runtime:
            self._record_product(*args[PRODUCTS[name] : PRODUCTS[name] + 2])
        elif ATTENTION in name:
            self._record_attention(args, "backward" in name)
        elif any(part in name for part in UNKNOWN):
            self.work.unknown.add(str(func))
        elif given and not name.partition(".")[0].endswith("_like") and _moves_data(func):
            made = [local_of(t) for t in tensors_in(result) if t.dim()] if returns_new(func) else []
            written = made or given[:1]
            size = sum(t.nbytes for t in given) + sum(t.nbytes for t in made)
            if name in GATHERS:
                size = 2 * sum(t.nbytes for t in made)
            elif not made and not name.startswith(WRITES_ONLY):
                size += given[0].nbytes  # read, and written
            if size:
                types = {dtype_name(t.dtype) for t in [*given, *made] if t.is_floating_point()}
                kind = self._kind_of(name, is_mixed=len(types) > 1)
                self.work.items[MemoryPass(kind, dtype_name(written[0].dtype), size)] += 1

    def _kind_of(self, name: str, is_mixed: bool) -> str:
        """Return the kind of an operation's pass over memory."""
        if is_mixed and name in COPIES:
            return CAST
        if any(part in name for part in FUNCTIONS):
            return FUNCTION
        if is_mixed:
            return MIXED
        if self.of_runtime:
            return COPY if name in COPIES or name.startswith(WRITES_ONLY) else ACCUMULATE
        return SUM

    def _record_product(self, first: Tensor, second: Tensor) -> None:
        count = first.shape[0] if first.dim() == 3 else 1
        rows, inner, columns = *first.shape[-2:], second.shape[-1]
        layout = "tn" if _is_transposed(first) else "nt" if _is_transposed(second) else "nn"
        made = MatrixProduct(dtype_name(first.dtype), layout, rows, inner, columns, count)
        self.work.items[made] += 1

    def _record_attention(self, args: Any, is_backward: bool) -> None:
        query = next(t for t in args if isinstance(t, Tensor) and t.dim() == 4)
        sequences, heads, tokens, width = query.shape
        direction = BACKWARD if is_backward else FORWARD
        made = AttentionCall(dtype_name(query.dtype), direction, sequences * heads, tokens, width)
        self.work.items[made] += 1

    def _record_adam(self, args: Any) -> None:
        masters, gradients, copies = args[0], args[1], args[5]
        of_copies = dtype_name(copies[0].dtype) if copies and isinstance(copies[0], Tensor) else "none"
        dtypes = f"{dtype_name(masters[0].dtype)} {dtype_name(gradients[0].dtype)} {of_copies}"
        self.work.items[AdamStep(dtypes, sum(t.numel() for t in masters))] += 1


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name in a machine file."""
    return str(dtype).removeprefix("torch.")


def _is_transposed(matrix: Tensor) -> bool:
    return matrix.stride(-1) != 1 and matrix.stride(-2) == 1


def _moves_data(func: Any) -> bool:
    """Return whether an operation reads or writes values: it returns new tensors, or writes to one given."""
    if returns_new(func):
        return True
    writes = (each.alias_info is not None and each.alias_info.is_write for each in arguments_of(func))
    return any(writes)
