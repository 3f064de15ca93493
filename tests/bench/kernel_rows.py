"""The rows of the CPU operators' benchmark: ceilings, our operators, and what others have for the same work.

A ceiling (streams.cpp) reads and writes what an operator does, with next to no arithmetic. `torch` is what
one writes with torch for the same arrays: in place, with room for what is between, in as few sweeps as we
could find. `reference` is what runs where nothing is compiled.

[Note: Adams] All are AdamW. For a bf16 gradient and an fp32 master, `torch` and `DeepSpeed fp32` bring the
gradient up into an fp32 array, step the master, and bring it down into a bf16 copy; the operator does that
in one sweep. `DeepSpeed bf16` has a bf16 parameter and fp32 moments, no master and no copy: fewer bytes, and
steps below bf16's resolution are lost. `zero_full, bf16 master` does the same. (DeepSpeed 0.19.8 has vectors
for bf16 only with AVX-512; elsewhere that row is scalar code.) How to install DeepSpeed: peers.py.
"""

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import logging
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.kernels.cases import BF16, normal, ops
from zero_full.comm.quantized import BLOCK
from zero_full.kernels import builder, reference, toolchain

Call = Callable[[], Sequence[Tensor]]  # returns what it has computed

LR, BETA1, BETA2, EPS, DECAY = 1e-3, 0.9, 0.95, 1e-8, 0.1
PEER = {"lr": LR, "betas": (BETA1, BETA2), "eps": EPS, "weight_decay": DECAY}
FACTORS = (0.5, 2.0)  # in turn, so that what is multiplied in place stays what it is
MULTIPLE = 64  # of elements: whole blocks of streams.cpp, whole words of flags


@dataclass(frozen=True)
class Row:
    """One of those that are compared."""

    call: Call
    bytes: float = 0  # that must be moved for an element; 0: not counted, it takes several sweeps
    like: str = ""  # the row that computes the same


@dataclass(frozen=True)
class Versus:
    """Ours over the fastest of theirs that are there; the target is `at most`."""

    ours: str
    theirs: tuple[str, ...]
    target: float | None = None


@dataclass(frozen=True)
class Topic:
    """Rows that share their arrays: nobody has luckier pages."""

    rows: dict[str, Row]
    versus: tuple[Versus, ...]


# Ceilings ----------------------------------------------------------------------------------------


@functools.cache
def streams() -> ctypes.CDLL:
    """streams.cpp, compiled as the operators are."""
    tools, level = toolchain.toolchain("cpu"), ops().cpu_isa(0)
    march = [f"-march=x86-64-v{level}"] if platform.machine() in ("x86_64", "AMD64") else []
    flags = [*builder.COMMON, *builder.KERNEL, *builder.BINDING, *march, *builder.includes(tools)]
    source = Path(__file__).with_name("streams.cpp")
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory) / "streams.so"
        link = ["-shared", "-o", str(library), f"-L{tools.torch / 'lib'}", "-ltorch_cpu", "-lc10"]
        subprocess.run([tools.cxx, *flags, str(source), *link], check=True)
        return ctypes.CDLL(str(library))


def stream(name: str, arrays: Sequence[Tensor], *numbers: Any) -> Call:
    """A call of one of its functions. It computes nothing."""
    function = getattr(streams(), name)
    pointers = [ctypes.c_void_p(array.data_ptr()) for array in arrays]

    def call() -> Sequence[Tensor]:
        function(*pointers, *numbers)
        return ()

    return call


# Adam --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """What an Adam steps."""

    p: Tensor
    m: Tensor
    v: Tensor

    @staticmethod
    def of(numel: int) -> "State":
        """All fp32."""
        p, m = normal(numel, seed=1), normal(numel, seed=2, scale=0.1)
        return State(p, m, normal(numel, seed=3).square_())


def ours(state: State, grad: Tensor, copy: Tensor | None = None, factor: float = 1.0) -> Call:
    """The operator."""
    step, (p, m, v) = torch.zeros(1), (state.p, state.m, state.v)
    copies = [] if copy is None else [copy]

    def call() -> Sequence[Tensor]:
        step.add_(1)
        ops().adam_step([p], [grad], [m], [v], [step], copies, LR, BETA1, BETA2, EPS, DECAY, True, factor)
        return [p, m, v, *copies]

    return call


def theirs(kind: type, state: State, grad: Tensor, started: Any, **options: Any) -> Call:
    """An optimizer of torch's kind with this state; `started` is its step's number."""
    parameter = nn.Parameter(state.p)
    parameter.grad = grad
    optimizer = kind([parameter], **PEER, **options)
    optimizer.state[parameter] = {"step": started, "exp_avg": state.m, "exp_avg_sq": state.v}

    def call() -> Sequence[Tensor]:
        optimizer.step()
        return [state.p, state.m, state.v]

    return call


def torch_adam(state: State, grad: Tensor) -> Call:
    """The fused one."""
    return theirs(torch.optim.AdamW, state, grad, torch.zeros(()), fused=True)


def deepspeed_adam(state: State, grad: Tensor) -> Call | None:
    """DeepSpeedCPUAdam, if it is installed; the first one in an environment compiles itself."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with contextlib.redirect_stdout(sys.stderr):
        importlib.import_module("deepspeed").utils.logger.setLevel(logging.ERROR)
        kind = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        return theirs(kind, state, grad, 0)


def up_and_down(step: Call, grad: Tensor, wide: Tensor, copy: Tensor) -> Call:
    """An fp32 step for a gradient and a copy of 16 bits."""

    def call() -> Sequence[Tensor]:
        wide.copy_(grad)
        found = step()
        copy.copy_(found[0])
        return [*found, copy]

    return call


def adam(numel: int) -> Topic:
    """A bf16 gradient in; an fp32 master, moments and a bf16 copy in and out."""
    state, grad = State.of(numel), normal(numel, BF16)
    wide, copy = torch.zeros(numel), state.p.to(BF16)
    master = State(copy, state.m, state.v)  # the copy is then the only parameter
    narrow = State(state.p, state.m.to(BF16), state.v.to(BF16))
    numbers = ctypes.c_float(1), ctypes.c_uint16(0), ctypes.c_int64(numel)
    rows = {
        "streams": Row(stream("zf_adam_streams", (state.p, state.m, state.v, grad, copy), *numbers), 30),
        "zero_full": Row(ours(state, grad, copy), 30),
        "torch": Row(up_and_down(torch_adam(state, wide), grad, wide, copy), like="zero_full"),
        "zero_full, bf16 moments": Row(ours(narrow, grad, copy), 22),
        "zero_full, bf16 master": Row(ours(master, grad), 22),
    }
    bf16, fp32 = deepspeed_adam(master, grad), deepspeed_adam(state, wide)
    if bf16 is not None and fp32 is not None:
        rows["DeepSpeed bf16"] = Row(bf16, like="zero_full, bf16 master")
        rows["DeepSpeed fp32"] = Row(up_and_down(fp32, grad, wide, copy), like="zero_full")
    versus = (
        Versus("zero_full", ("streams",), 1 / 0.92),
        Versus("zero_full", ("torch",), 1 / 1.8),
        Versus("zero_full", ("DeepSpeed bf16",), 1 / 4),
        Versus("zero_full, bf16 master", ("DeepSpeed bf16",)),
        Versus("zero_full", ("DeepSpeed fp32",)),
    )
    return Topic(rows, versus)


def adam32(numel: int) -> Topic:
    """All fp32 and no copy, also with a factor for the gradient (clipping)."""
    state, grad = State.of(numel), normal(numel)
    fused, factors = torch_adam(state, grad), cycle(FACTORS)

    def multiplied() -> Sequence[Tensor]:
        grad.mul_(next(factors))
        return fused()

    rows = {
        "zero_full": Row(ours(state, grad), 28),
        "torch": Row(torch_adam(state, grad), 28, like="zero_full"),
        "zero_full, factor": Row(ours(state, grad, factor=FACTORS[0]), 28),
        "torch, factor": Row(multiplied, like="zero_full, factor"),
    }
    versus = Versus("zero_full", ("torch",), 1.0), Versus("zero_full, factor", ("torch, factor",))
    return Topic(rows, versus)


# One array ---------------------------------------------------------------------------------------


def unscale(numel: int) -> Topic:
    """unscale_norm_check, with a factor and with 1: nothing is written then."""
    x, size = normal(numel), ctypes.c_int64(numel)
    our_factors, torch_factors = cycle(FACTORS), cycle(FACTORS)

    def check(factor: float) -> Sequence[Tensor]:
        total, _ = ops().unscale_norm_check([x], factor)
        return [x, total.sqrt().float()]

    def in_three() -> Sequence[Tensor]:
        norm = torch.linalg.vector_norm(x.mul_(next(torch_factors)))
        norm.isfinite()
        return [x, norm]

    def norm_alone() -> Sequence[Tensor]:
        return [x, torch.linalg.vector_norm(x, dtype=torch.float64).float()]

    def walk(kind: str, places: int) -> Call:
        factor = (ctypes.c_float(1),) if kind == "scale" else ()
        return stream(f"zf_{kind}_stream", [x], *factor, size, ctypes.c_int(places))

    rows = {
        "stream": Row(walk("scale", 1), 8),
        "stream, 4 places": Row(walk("scale", 4), 8),
        "zero_full": Row(lambda: check(next(our_factors)), 8),
        "torch": Row(in_three, like="zero_full"),
        "read": Row(walk("read", 1), 4),
        "read, 4 places": Row(walk("read", 4), 4),
        "zero_full, 1": Row(lambda: check(1.0), 4),
        "torch norm": Row(norm_alone, 4, like="zero_full, 1"),
        "torch aminmax": Row(lambda: torch.aminmax(x), 4),
    }
    versus = (
        Versus("zero_full", ("stream", "stream, 4 places"), 1 / 0.90),
        Versus("zero_full", ("torch",)),
        Versus("zero_full, 1", ("read", "read, 4 places")),
        Versus("zero_full, 1", ("torch norm",)),
        Versus("zero_full, 1", ("torch aminmax",)),
    )
    return Topic(rows, versus)


# One bit a number --------------------------------------------------------------------------------


class TorchSign:
    """Signs packed by torch, in place, for one piece: the packing is a multiplication for eight numbers."""

    TO_THE_TOP = 0x0102040810204080  # moves byte k of eight bytes to bit 56 + k

    def __init__(self, values: Tensor, error: Tensor) -> None:
        self.values, self.error, numel = values, error, len(values)
        self.flags, self.signs = torch.empty(numel, dtype=torch.bool), torch.empty(numel)
        self.words = torch.empty(numel // 8, dtype=torch.int64)
        self.packed = torch.empty(numel // 8, dtype=torch.uint8)

    def __call__(self, l1: bool) -> Sequence[Tensor]:
        """As sign_pack. Errors are never -0, so a sign bit says what a comparison with 0 does."""
        wanted, numel = self.error.add_(self.values), len(self.error)
        if l1:
            scale = torch.abs(wanted, out=self.signs).sum() / numel
        else:
            scale = torch.linalg.vector_norm(wanted) / numel**0.5
        torch.ge(wanted, 0, out=self.flags)
        torch.mul(self.flags.view(torch.int64), self.TO_THE_TOP, out=self.words)
        self.packed.copy_(self.words.bitwise_right_shift_(56))
        wanted.sub_(torch.copysign(scale, wanted, out=self.signs))
        return [self.packed, scale, wanted]


def sign(numel: int) -> Topic:
    """sign_pack with error feedback, and the mean of four others' signs."""
    values, error = normal(numel), normal(numel, seed=1)
    ends, by_torch = torch.tensor([numel]), TorchSign(values, error)
    packed = normal(4 * numel // 32, seed=2).view(torch.uint8).view(4, -1)  # any bytes
    scales, out, room = normal(4, seed=3)[:, None], torch.zeros(numel), torch.zeros(numel)
    signs = (torch.arange(256)[:, None] >> torch.arange(8) & 1) * 2.0 - 1

    def pack(kind: Any, l1: bool) -> Sequence[Tensor]:
        found, scale = kind.sign_pack(values, error, ends, l1)
        return [found, scale.squeeze(), error]

    def unpack(kind: Any) -> Sequence[Tensor]:
        kind.sign_unpack_mean(packed, scales, ends, out, False)
        return [out]

    def look_up() -> Sequence[Tensor]:
        """A byte's eight signs are a row of a table."""
        for row, scale in enumerate(scales):
            target = out if row == 0 else room
            torch.index_select(signs * (scale / 4), 0, packed[row].int(), out=target.view(-1, 8))
            if row:
                out.add_(room)
        return [out]

    rows, versus = {}, []
    for name, l1 in (("l1", True), ("l2", False)):
        mine = f"zero_full, {name}"
        rows[mine] = Row(functools.partial(pack, ops(), l1), 20 + 1 / 8)
        rows[f"torch, {name}"] = Row(functools.partial(by_torch, l1), like=mine)
        rows[f"reference, {name}"] = Row(functools.partial(pack, reference, l1), like=mine)
        versus += [Versus(mine, (f"torch, {name}",), 1 / 10), Versus(mine, (f"reference, {name}",))]
    rows["zero_full, mean of 4"] = Row(lambda: unpack(ops()), 4 + 4 / 8)
    rows["torch, mean of 4"] = Row(look_up, like="zero_full, mean of 4")
    versus.append(Versus("zero_full, mean of 4", ("torch, mean of 4",)))
    return Topic(rows, tuple(versus))


# Blocks of integers ------------------------------------------------------------------------------


def blocks(numel: int) -> Topic:
    """To integers and back."""
    numbers, out = normal(numel), torch.zeros(numel)
    rows, versus = {}, []

    def there(kind: Any, payload: Tensor, bits: int) -> Sequence[Tensor]:
        kind.quantize_blocks(numbers, payload, bits, BLOCK)
        return [payload]

    def back(kind: Any, payload: Tensor, bits: int) -> Sequence[Tensor]:
        kind.dequantize_blocks(payload, out, bits, BLOCK, False)
        return [out]

    for bits in (8, 4):
        payload = torch.zeros(reference.payload_bytes(numel, bits, BLOCK), dtype=torch.uint8)
        reference.quantize_blocks(numbers, payload, bits, BLOCK)
        for name, work in ((f"to int{bits}", there), (f"from int{bits}", back)):
            mine, slow = f"zero_full, {name}", f"reference, {name}"
            rows[mine] = Row(functools.partial(work, ops(), payload, bits), 4 + bits / 8 + 4 / BLOCK)
            rows[slow] = Row(functools.partial(work, reference, payload, bits), like=mine)
            versus.append(Versus(mine, (slow,)))
    return Topic(rows, tuple(versus))


# Sums --------------------------------------------------------------------------------------------


def sums(numel: int) -> Topic:
    """The mean of two ranks' slices, in fp32; `torch` adds and divides in pieces that fit the cache."""
    rows, versus = {}, []
    for name, dtype, moved in (("fp32", torch.float32, 12), ("bf16", BF16, 8)):
        terms, out = [normal(numel, dtype, seed) for seed in range(2)], torch.zeros(numel)

        def mean(kind: Any, terms: list[Tensor] = terms, out: Tensor = out) -> Sequence[Tensor]:
            kind.sum_and_divide(terms, out, 2.0)
            return [out]

        mine, slow = f"zero_full, {name}", f"torch, {name}"
        rows[mine] = Row(functools.partial(mean, ops()), moved)
        rows[slow] = Row(functools.partial(mean, reference), like=mine)
        versus.append(Versus(mine, (slow,)))
    return Topic(rows, tuple(versus))


# LAMB --------------------------------------------------------------------------------------------

TENSORS = 8  # each with a trust ratio of its own
TRUST = (0.01, 10.0)


def torch_lamb(p: list[Tensor], g: list[Tensor], m: list[Tensor], v: list[Tensor], u: list[Tensor]) -> None:
    """A step without bias correction. `u`: room for the updates."""
    torch._foreach_lerp_(m, g, 1 - BETA1)
    torch._foreach_mul_(v, BETA2)
    torch._foreach_addcmul_(v, g, g, 1 - BETA2)
    torch._foreach_copy_(u, v)
    torch._foreach_sqrt_(u)
    torch._foreach_add_(u, EPS)
    torch._foreach_reciprocal_(u)
    torch._foreach_mul_(u, m)
    torch._foreach_add_(u, p, alpha=DECAY)
    trust = torch.stack(torch._foreach_norm(p)) / torch.stack(torch._foreach_norm(u))
    for weight, update, ratio in zip(p, u, trust.clamp_(*TRUST).tolist(), strict=True):
        weight.add_(update, alpha=-LR * ratio)


def lamb(numel: int) -> Topic:
    """Both halves of a step of several tensors, all fp32."""
    whole, gradient, room = State.of(numel), normal(numel), torch.zeros(numel)
    p, g, m, v, u = (list(t.chunk(TENSORS)) for t in (whole.p, gradient, whole.m, whole.v, room))
    steps, result = [torch.ones(1)] * len(p), [whole.p, whole.m, whole.v]

    def ours() -> Sequence[Tensor]:
        norms = ops().lamb_norms(p, g, m, v, BETA1, BETA2, EPS, DECAY, False, 1.0)
        ops().lamb_step(p, m, v, steps, [], norms, LR, BETA1, BETA2, EPS, DECAY, False, False, *TRUST)
        return result

    def by_torch() -> Sequence[Tensor]:
        torch_lamb(p, g, m, v, u)
        return result

    rows = {"zero_full": Row(ours, 40), "torch": Row(by_torch, like="zero_full")}
    return Topic(rows, (Versus("zero_full", ("torch",)),))


TOPICS = {topic.__name__: topic for topic in (adam, adam32, unscale, sign, blocks, sums, lamb)}
