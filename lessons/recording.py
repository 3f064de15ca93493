"""One step of a trainer, written down for a clock: its arithmetic, its collectives, and what waits for what.

A rank is a program that does its arithmetic in order. It hands a collective to the network when it comes to
the call, and goes on. It stops only where it needs a result that has not arrived: where a matrix
multiplication reads it, or where a number leaves the tensors (`.item()`). Sums, copies and Adam wait for a
result without stopping the program, and what they make arrives when the result does. So what may overlap is
not assumed for a stage; it is read off the order of the calls and off the storages that operations read.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero_min.comm import Comm, Handle
from zero_min.gpt import GPT, GPTConfig, batch, load_text
from zero_min.ledger import Ledger, Listener, tensors_in
from zero_min.thread_comm import ThreadComm, run_world

__tracebackhide__ = True  # in an error about waiting ranks the line that called is the trainer's
aten = torch.ops.aten
CONFIG = GPTConfig(context=16, layers=4, width=32)  # each tensor is a small part of this model
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
STEPS = 2  # the first shows prefetch the order; the last is recorded
SECONDS = 20.0  # that a rank waits for another
Build = Callable[[nn.Module, Comm], Any]


@dataclass(frozen=True)
class Work:
    """Arithmetic with no call in between; `after` is the number of the call whose result it needs, or -1."""

    phase: str  # forward, backward or step
    flops: int
    after: int
    part: int = 0  # the micro-batch, counted from 0; after the last of them comes the update


@dataclass(frozen=True)
class Call:
    """A collective: the bytes that this rank sends."""

    what: str
    sent: int
    part: int = 0


Entry = Work | Call


@dataclass(frozen=True)
class Recording:
    """What every rank did in one step, in order."""

    numel: int  # parameters of the model
    tokens: int  # of each rank in a micro-batch
    micro_batches: int
    ranks: tuple[tuple[Entry, ...], ...]


class Diary(Ledger):
    """A ledger whose diary has arithmetic, too, and that knows which storages wait for which call."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.part = "forward", 0
        self.entries: list[Entry] = []
        self.calls = 0
        self._waiting: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def begin(self) -> None:
        """A new step: all that was sent before has arrived."""
        self.entries.clear()
        self._waiting.clear()
        self.calls = self.part = 0

    def note(self, what: str, sent: int = 0) -> None:
        """As ever; a collective is an entry, too."""
        super().note(what, sent)
        if what in COLLECTIVES:
            self.entries.append(Call(what, sent, self.part))
            self.calls += 1

    def work(self, flops: int, after: int) -> None:
        """Arithmetic; it joins what stands before it unless it has to wait for something later."""
        if not flops and after < 0:
            return
        last = self.entries[-1] if self.entries else None
        same = isinstance(last, Work) and (last.phase, last.part) == (self.phase, self.part)
        if isinstance(last, Work) and same and after <= last.after:
            self.entries[-1] = replace(last, flops=last.flops + flops)
        else:
            self.entries.append(Work(self.phase, flops, after, self.part))

    def fill(self, tensors: Iterable[Tensor], call: int) -> None:
        """These tensors have their values when `call` has ended."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._waiting[id(storage)] = (weakref.ref(storage, partial(self._forget, id(storage))), call)

    def latest(self, tensors: Iterable[Tensor]) -> int:
        """The last call that one of these tensors waits for, or -1."""
        waits = [self._waiting.get(id(tensor.untyped_storage()), (None, -1))[1] for tensor in tensors]
        return max(waits, default=-1)

    def _forget(self, key: int, _: object) -> None:
        self._waiting.pop(key, None)


class TimedComm(ThreadComm):
    """A rank's telephone that tells the diary which tensors a call fills."""

    def __init__(self, comm: ThreadComm, diary: Diary) -> None:
        super().__init__(comm.rank, comm.world)
        self.ledger = self.diary = diary

    def _filled(self, *tensors: Tensor) -> None:
        self.diary.fill(tensors, self.diary.calls - 1)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """As ever, noted."""
        result = super().all_reduce(tensor)
        self._filled(result)
        return result

    def reduce_scatter(self, parts: Sequence[Tensor], label: str = "") -> Tensor:
        """As ever, noted."""
        result = super().reduce_scatter(parts, label)
        self._filled(result)
        return result

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        """As ever, noted."""
        result = super().all_to_all(parts, sizes)
        self._filled(*result)
        return result

    def all_gather(self, whole: Tensor, mine: Tensor, label: str = "") -> Tensor:
        """As ever, noted."""
        result = super().all_gather(whole, mine, label)
        self._filled(result)
        return result

    def start_all_gather(self, whole: Tensor, mine: Tensor, label: str = "") -> Handle:
        """As ever, noted. The program stops where it waits."""
        handle = super().start_all_gather(whole, mine, label)
        call = self.diary.calls - 1
        self._filled(whole)

        def wait() -> None:
            handle.wait()
            self.diary.work(0, call)

        return Handle(wait)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """As ever, noted."""
        result = super().broadcast(tensor, source)
        self._filled(result)
        return result


def arithmetic(operation: Any, args: Sequence[Any], result: Any) -> int:
    """Floating-point operations of a matrix multiplication or of attention; 0 for all others."""
    kind = operation.overloadpacket
    if kind in (aten.mm, aten.bmm):
        return int(2 * result.numel() * args[0].shape[-1])
    if kind in (aten.addmm, aten.baddbmm):
        return int(2 * result.numel() * args[1].shape[-1])
    if kind is aten._scaled_dot_product_flash_attention_for_cpu:  # two products
        return int(4 * args[0].numel() * args[1].shape[-2])
    if kind is aten._scaled_dot_product_flash_attention_for_cpu_backward:  # four
        return int(8 * args[1].numel() * args[2].shape[-2])
    return 0


class _Writer(Listener):
    """Writes a diary of operations."""

    def __init__(self, diary: Diary) -> None:
        super().__init__()
        self.diary = diary

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        after = self.diary.latest(tensors_in((*args, *kwargs.values())))
        result = func(*args, **kwargs)
        flops = arithmetic(func, args, result)
        if flops or func is aten._local_scalar_dense.default:
            self.diary.work(flops, after)
        elif after >= 0:
            self.diary.fill(tensors_in((result,)), after)
        return result


def _one_rank(comm: ThreadComm, build: Build, config: GPTConfig, micro_batches: int) -> tuple[Entry, ...]:
    diary, text = Diary(), load_text()
    generator = torch.Generator().manual_seed(comm.rank)
    with _Writer(diary):
        trainer = build(GPT(config), TimedComm(comm, diary))
        for _ in range(STEPS):
            diary.begin()
            trainer.zero_grad()
            for _ in range(micro_batches):
                diary.phase = "forward"
                loss = trainer.model(*batch(text, 1, config.context, generator)) / micro_batches
                diary.phase = "backward"
                trainer.backward(loss)
                del loss
                diary.part += 1
            diary.phase = "step"
            trainer.step()
    return tuple(diary.entries)


def record(
    build: Build, world_size: int = 4, micro_batches: int = 1, config: GPTConfig = CONFIG
) -> Recording:
    """One step of the trainer that `build(model, comm)` makes, on threads."""
    ranks = run_world(_one_rank, world_size, build, config, micro_batches, timeout=SECONDS)
    numel = sum(p.numel() for p in GPT(config).parameters())
    return Recording(numel, config.context, micro_batches, tuple(ranks))
