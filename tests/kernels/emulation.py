"""The CUDA kernels, executed on the CPU: csrc/cuda compiled with csrc/cuda/emulate.h in the place of CUDA.

`Emulated` has the operators of `reference`, with the same arguments. Every call is made several times, with
threads and blocks in different orders; each time all arrays lie between guards, at the alignment that the
test's tensors have, and what will be written is poisoned. `EmulationError` says what a kernel did wrong.
"""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.kernels.cases import bits
from tests.kernels.emulated_types import (
    AdamOptions,
    Cuts,
    LambOptions,
    Lists,
    Long,
    Piece,
    Slot,
    StochasticSlot,
    rows_of,
    type_of,
)
from zero_full.kernels.builder import KERNEL, sources, toolchain

THREADS, CHUNK = 128, 4096  # smaller than on a GPU: few elements make several blocks
DIALECT = "-x c++ -std=c++17 -fPIC -fvisibility=hidden -fno-gnu-unique -ffp-contract=off -U_FORTIFY_SOURCE"
WARNINGS = "-Wall -Wextra -Wno-unknown-pragmas"
EMULATE = f"-DZF_EMULATE -DZF_THREADS={THREADS} -DZF_CHUNK={CHUNK}"
FLAGS = [*f"{DIALECT} {WARNINGS} {EMULATE}".split(), *KERNEL]
SOURCES = ("emulate.cpp", "adam.cu", "lamb.cu", "quantize.cu", "sign.cu", "stochastic.cu", "unscale.cu")
ORDERS = [(0, 0), (1, 0), (2, 1), (2, 2)]  # of threads and of blocks: forward, reverse, shuffled by a seed
POISON = 255  # NaN in all types
GUARD = 512  # bytes on each side of an array


class EmulationError(AssertionError):
    """A kernel did what it must not."""


# Building ----------------------------------------------------------------------------------------


class Change(NamedTuple):
    """A mistake to plant in a file of csrc/cuda, and what is compiled with it: a .cu file."""

    file: str
    old: str
    new: str
    compiled: str


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="zero_full_emulated_")  # removed when Python ends


def _compile(source: Path, to: Path, *flags: str) -> Path:
    command = [toolchain("cpu").cxx, *FLAGS, *flags, "-c", str(source), "-o", str(to)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return to


@functools.cache
def _objects() -> dict[str, Path]:
    folder = Path(_folder().name)
    with ThreadPoolExecutor(2) as pool:
        jobs = {
            name: pool.submit(_compile, sources() / "cuda" / name, folder / f"{name}.o", "-O1", "-Werror")
            for name in SOURCES
        }
    return {name: job.result() for name, job in jobs.items()}


def _link(objects: Sequence[Path], to: Path) -> ctypes.CDLL:
    command = [toolchain("cpu").cxx, "-shared", "-o", str(to), *map(str, objects)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(to))


@functools.cache
def library() -> ctypes.CDLL:
    """All operators, as they are."""
    return _link(list(_objects().values()), Path(_folder().name) / "emulated.so")


def library_with(change: Change) -> ctypes.CDLL:
    """All operators, and a mistake."""
    folder = Path(tempfile.mkdtemp(dir=_folder().name))
    for part in ("core", "cuda"):
        shutil.copytree(sources() / part, folder / part)
    place = folder / "cuda" / change.file
    text = place.read_text()
    assert text.count(change.old) == 1, f"{text.count(change.old)} times in {change.file}: {change.old}"
    place.write_text(text.replace(change.old, change.new))
    mine = _compile(folder / "cuda" / change.compiled, folder / "changed.o", "-O0", "-w")
    others = [path for name, path in _objects().items() if name != change.compiled]
    return _link(
        [mine, *others], folder / "emulated.so"
    )  # mine first: functions of headers are taken from it


# Memory ------------------------------------------------------------------------------------------


class Array(NamedTuple):
    """A tensor's place in memory: from the `start`-th byte of `room`. What lies in its gaps is part of it."""

    tensor: Tensor
    room: Tensor
    start: int
    written: bool

    @property
    def content(self) -> Tensor:
        size = self.tensor.numel() * self.tensor.element_size()
        return self.room[self.start : self.start + size]


class Memory:
    """Of the device, for one call."""

    def __init__(self, written: Sequence[Tensor]) -> None:
        self.written = {id(tensor) for tensor in written}
        self.arrays: list[Array] = []

    def address(self, tensor: Tensor | None) -> int | None:
        """Of a copy of the tensor, as aligned as it is."""
        if tensor is None or tensor.numel() == 0:
            return None
        whole = with_gaps(tensor)
        content = bits(whole)
        room = torch.full((content.numel() + 2 * GUARD + 64,), POISON, dtype=torch.uint8)
        start = GUARD + (tensor.data_ptr() - room.data_ptr() - GUARD) % 64
        room[start : start + content.numel()] = content
        self.arrays.append(Array(whole, room, start, id(tensor) in self.written))
        return room.data_ptr() + start

    def pointer(self, tensor: Tensor | None) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.address(tensor))

    def workspace(self, doubles: int) -> ctypes.c_void_p:
        tensor = poisoned(doubles, dtype=torch.float64)
        self.written.add(id(tensor))
        return self.pointer(tensor)

    def check(self) -> None:
        """Nothing was written beside the arrays, nor to those that are only read."""
        for number, array in enumerate(self.arrays):
            name = f"array {number} ({tuple(array.tensor.shape)}, {array.tensor.dtype})"
            end = array.start + array.content.numel()
            if not bool((array.room[: array.start] == POISON).all()):
                raise EmulationError(f"something was written before {name}")
            if not bool((array.room[end:] == POISON).all()):
                raise EmulationError(f"something was written behind {name}")
            if not array.written and not torch.equal(array.content, bits(array.tensor)):
                raise EmulationError(f"{name} is only to be read, but was written")

    def results(self) -> list[Array]:
        return [array for array in self.arrays if array.written]


def with_gaps(tensor: Tensor) -> Tensor:
    """All memory from the tensor's first element to its last."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.as_strided((1 + sum((size - 1) * stride for size, stride in sizes),), (1,))


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """What a kernel has to write, all of it."""
    tensor = torch.empty(shape, dtype=dtype)
    tensor.untyped_storage().fill_(POISON)
    return tensor


# Operators ---------------------------------------------------------------------------------------


class Emulated:
    """The operators of a library, to be called like those of `reference`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self.library, name)
        function.restype = ctypes.c_char_p
        if message := function(*arguments):
            raise EmulationError(message.decode())

    def _doubles(self, name: str, *arguments: Any) -> int:
        function = getattr(self.library, f"{name}_workspace")
        function.restype = ctypes.c_int64
        return int(function(*arguments))

    def _in_all_orders(self, written: Sequence[Tensor], call: Callable[[Memory], None]) -> None:
        """The tensors become what the calls make of them, which must be the same each time."""
        results: list[Array] = []
        for order, seed in ORDERS:
            self.library.choose_order(order, ctypes.c_uint64(seed))
            memory = Memory(written)
            call(memory)
            memory.check()
            results = results or memory.results()
            for one, other in zip(results, memory.results(), strict=True):
                if not torch.equal(one.content, other.content):
                    raise EmulationError("the result depends on the order of threads or blocks: a race")
        for array in results:
            array.tensor.copy_(array.content.clone().view(array.tensor.dtype))

    def _slots(self, memory: Memory, lists: Lists) -> ctypes.Array[Slot]:
        slots = (Slot * len(lists.masters))()
        for i, master in enumerate(lists.masters):
            each = (memory.address(tensors[i] if tensors else None) for tensors in lists)
            slots[i] = Slot(*each, master.numel())
        return slots

    def adam_step(
        self,
        masters: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        steps: list[Tensor],
        copies: list[Tensor],
        **options: float,
    ) -> None:
        chosen = AdamOptions(**{"bias_correction": True, **options})
        lists = Lists(masters, grads, exp_avgs, exp_avg_sqs, copies, steps)

        def call(memory: Memory) -> None:
            slots = self._slots(memory, lists)
            self._call("adam_step", slots, Long(len(slots)), *map(ctypes.byref, (lists.types(), chosen)))

        self._in_all_orders([*masters, *exp_avgs, *exp_avg_sqs, *copies], call)

    def adam_step_stochastic(
        self,
        masters: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        steps: list[Tensor],
        keys: list[int],
        places: list[int],
        **options: float,
    ) -> None:
        chosen = AdamOptions(**{"bias_correction": True, **options})
        lists = Lists(masters, grads, exp_avgs, exp_avg_sqs, [], steps)

        def call(memory: Memory) -> None:
            made = zip(self._slots(memory, lists), keys, places, strict=True)
            slots = (StochasticSlot * len(masters))(*(StochasticSlot(*each) for each in made))
            about = map(ctypes.byref, (lists.types(), chosen))
            self._call("adam_step_stochastic", slots, Long(len(slots)), *about)

        self._in_all_orders([*masters, *exp_avgs, *exp_avg_sqs], call)

    def lamb_norms(
        self,
        masters: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        **options: float,
    ) -> Tensor:
        chosen = LambOptions(**options)
        lists = Lists(masters, grads, exp_avgs, exp_avg_sqs)
        norms = poisoned(len(masters), 2, dtype=torch.float64)

        def call(memory: Memory) -> None:
            slots, count = self._slots(memory, lists), Long(len(masters))
            work = memory.workspace(self._doubles("lamb", slots, count))
            about = map(ctypes.byref, (lists.types(), chosen))
            self._call("lamb_norms", slots, count, *about, memory.pointer(norms), work)

        self._in_all_orders([*exp_avgs, *exp_avg_sqs, norms], call)
        return norms

    def lamb_step(
        self,
        masters: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        steps: list[Tensor],
        copies: list[Tensor],
        norms: Tensor,
        **options: float,
    ) -> None:
        chosen = LambOptions(**options)
        lists = Lists(masters, [], exp_avgs, exp_avg_sqs, copies, steps)

        def call(memory: Memory) -> None:
            slots = self._slots(memory, lists)
            about = map(ctypes.byref, (lists.types(), chosen))
            self._call("lamb_step", slots, Long(len(slots)), *about, memory.pointer(norms))

        self._in_all_orders([*masters, *copies], call)

    def unscale_norm_check(self, gradients: list[Tensor], factor: float) -> tuple[Tensor, Tensor]:
        total, first = poisoned(dtype=torch.float64), poisoned(dtype=torch.int64)

        def call(memory: Memory) -> None:
            pieces, count = (Piece * len(gradients))(), Long(len(gradients))
            for i, gradient in enumerate(gradients):
                pieces[i] = Piece(memory.address(gradient), gradient.numel())
            work = memory.workspace(self._doubles("unscale", pieces, count))
            numbers = (type_of(gradients), ctypes.c_double(factor))
            results = map(memory.pointer, (total, first))
            self._call("unscale_norm_check", pieces, count, *numbers, *results, work)

        self._in_all_orders([*(gradients if factor != 1 else []), total, first], call)
        return total, first

    def sign_pack(
        self, values: Tensor | None, error: Tensor, ends: Tensor, l1: bool
    ) -> tuple[Tensor, Tensor]:
        numel, pieces = error.numel(), ends.numel()
        packed = poisoned(-(-numel // 8), dtype=torch.uint8)
        scales = poisoned(pieces, dtype=torch.float32)

        def call(memory: Memory) -> None:
            cuts = Cuts(memory.address(ends), pieces)
            work = memory.workspace(self._doubles("sign", Long(numel), Long(pieces)))
            given = (memory.pointer(values), type_of([values]), memory.pointer(error), Long(numel))
            results = map(memory.pointer, (packed, scales))
            self._call("sign_pack", *given, ctypes.byref(cuts), ctypes.c_bool(l1), *results, work)

        self._in_all_orders([error, packed, scales], call)
        return packed, scales

    def sign_unpack_mean(self, packed: Tensor, scales: Tensor, ends: Tensor, out: Tensor, add: bool) -> None:
        def call(memory: Memory) -> None:
            cuts = Cuts(memory.address(ends), ends.numel())
            given = (*map(memory.pointer, (packed, scales)), Long(len(packed)), ctypes.byref(cuts))
            about = (memory.pointer(out), type_of([out]), Long(out.numel()), ctypes.c_bool(add))
            self._call("sign_unpack_mean", *given, *about)

        self._in_all_orders([out], call)

    def quantize_blocks(self, numbers: Tensor, payload: Tensor, bits: int, block: int) -> None:
        rows = rows_of(payload, numbers)

        def call(memory: Memory) -> None:
            given = (memory.pointer(numbers), type_of([numbers]), ctypes.byref(rows))
            self._call("quantize_blocks", *given, memory.pointer(payload), bits, Long(block))

        self._in_all_orders([payload], call)

    def dequantize_blocks(self, payload: Tensor, out: Tensor, bits: int, block: int, add: bool) -> None:
        rows = rows_of(payload, out)

        def call(memory: Memory) -> None:
            given = (*map(memory.pointer, (payload, out)), type_of([out]), ctypes.byref(rows))
            self._call("dequantize_blocks", *given, bits, Long(block), ctypes.c_bool(add))

        self._in_all_orders([out], call)
