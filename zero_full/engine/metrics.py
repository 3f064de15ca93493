"""Metrics of a run on one rank: `engine.metrics()`, and the counters behind it.

A `Meter` counts steps, samples, tokens and seconds. An engine has one only if its configuration or a call of
`metrics` asks for it. A `Lap` turns counts into means: log lines, monitors and `metrics` have one
each, because each of them is read at other times.
"""

import inspect
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from zero_full.engine.stopwatch import Stopwatch
from zero_full.shard.access.held_bytes import HeldBytes
from zero_full.shard.passes.reduce import EPSILON
from zero_full.shard.step.optimizer import ZeroOptimizer

TOKENS = ("input_ids", "token_ids", "tokens", "idx")  # usual names of a forward's argument with tokens


class Metrics(TypedDict):
    """Numbers of a run on one rank, as `engine.metrics()` returns them."""

    step: int  # steps of the run, applied or skipped
    samples: int | None  # of the run, on all ranks; None: the configuration has no batch size
    skipped: int  # steps of the run that changed no parameter, because gradients were inf or NaN
    loss: float | None  # of the last step, the mean over its micro-batches; None: unknown
    lr: list[float]  # by parameter group: of the last step; of the next one until steps are counted
    grad_norm: float | None  # of the averaged gradients of all ranks, before clipping; None: not computed
    clipped_norm: float | None  # the same after clipping; None: not computed, or the step was skipped
    loss_scale: float | None  # of the next backward pass; None: the run has none
    step_seconds: float | None  # mean since the last call, with all that the loop does between steps
    samples_per_second: float | None  # of all ranks
    tokens_per_second: float | None  # of all ranks, as if each had as many tokens as this one
    phase_seconds: dict[str, float]  # mean of a step by phase; empty without wall_clock_breakdown
    held: dict[str, int]  # bytes that zero_full holds now, by kind
    sent: dict[str, int]  # bytes sent since initialize, by kind of collective
    moved: dict[str, int]  # bytes moved by offload since initialize, by direction
    peak: int | None  # bytes: peak memory of the device, or on a CPU of the process; None: unknown


@dataclass(frozen=True)
class Counts:
    """Totals of a meter up to a point in time."""

    now: float  # seconds on the meter's clock
    steps: int
    timed: int  # of the steps: those after `Meter.began`
    samples: int
    tokens: int
    phases: Mapping[str, float]  # seconds


@dataclass(frozen=True)
class Means:
    """Means over the steps of a lap; None: unknown."""

    step_seconds: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    phase_seconds: dict[str, float] = field(default_factory=dict)


class Meter:
    """Counts the steps of an engine, and their samples, tokens and seconds.

    Time counts from the end of the first step, which opens connections and creates optimizer state.

    world_size  data-parallel ranks: each is assumed to have as many tokens as this one
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: ZeroOptimizer,
        stopwatch: Stopwatch,
        world_size: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.optimizer, self.stopwatch = optimizer, stopwatch
        self.world_size, self.clock = world_size, clock
        self.began: float | None = None  # seconds; None: before the end of the first step
        self.steps = self.timed = self.samples = self.tokens = 0
        self.rates: list[float] = []  # of the last step: a schedule moves them before they are read
        self.first_input = ""  # the name of the first argument of forward
        with suppress(TypeError, ValueError):  # a compiled forward may have no signature
            self.first_input = next(iter(inspect.signature(module.forward).parameters), "")
        self._held: HeldBytes | None = None
        self._loss: Tensor | None = None  # of the last step
        optimizer.at_step.append(self._note_loss)
        optimizer.register_step_post_hook(self._note_rates)

    def begin(self) -> None:
        """Count time from now on, between two steps."""
        self.began, self.samples, self.tokens = self.clock(), 0, 0

    def count_tokens(self, inputs: Sequence[Any], named_inputs: Mapping[str, Any]) -> None:
        """Count the tokens of a training forward."""
        given = {self.first_input: inputs[0], **named_inputs} if inputs else named_inputs
        for name in TOKENS:
            if isinstance(found := given.get(name), Tensor) and not found.is_floating_point():
                self.tokens += found.numel() * self.world_size

    def count(self, samples: int) -> None:
        """Count a step that has ended, and its samples."""
        self.steps += 1
        if self.began is None:
            self.begin()
        else:
            self.timed, self.samples = self.timed + 1, self.samples + samples

    def _note_loss(self) -> None:
        self._loss = self.optimizer.accumulation.step_loss()

    def _note_rates(self, *step: Any) -> None:
        if self.optimizer.last is not None:  # else the step found no gradients
            self.rates = rates_of(self.optimizer)

    def counts(self) -> Counts:
        """Return the counts up to now."""
        phases = dict(self.stopwatch.seconds)
        return Counts(self.clock(), self.steps, self.timed, self.samples, self.tokens, phases)

    def loss(self) -> float | None:
        """Return the last step's loss. The host waits for the device."""
        return None if self._loss is None else float(self._loss)

    def held(self) -> dict[str, int]:
        """Return the bytes that this rank holds now, by kind."""
        if self._held is None:
            self._held = HeldBytes(self.optimizer)
        self._held.settle()
        return {kind: size for kind, size in self._held.now().items() if size}


class Lap:
    """The steps from one call of `end` to the next."""

    def __init__(self, meter: Meter) -> None:
        self.meter, self.last = meter, meter.counts()

    def end(self) -> Means:
        """Return means per step since the last call that ended a lap. Without a step, the lap continues."""
        now, last, began = self.meter.counts(), self.last, self.meter.began
        steps, timed = now.steps - last.steps, now.timed - last.timed
        if not steps:
            return Means()
        self.last = now
        phases = {name: (now.phases[name] - last.phases.get(name, 0.0)) / steps for name in now.phases}
        if not timed or began is None or (seconds := now.now - max(last.now, began)) <= 0:
            return Means(phase_seconds=phases)
        samples, tokens = now.samples - last.samples, now.tokens - last.tokens
        return Means(seconds / timed, samples / seconds or None, tokens / seconds or None, phases)


def rates_of(optimizer: ZeroOptimizer) -> list[float]:
    """Return the learning rate of every parameter group; an empty result without an optimizer."""
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def clipped(norm: float, clip: float) -> float:
    """Return a gradient norm after clipping to `clip`; 0: no clipping."""
    return norm * min(1.0, clip / (norm + EPSILON)) if clip > 0 else norm


def peak_memory(device: torch.device) -> int | None:
    """Return the peak memory of this process in bytes: on the device, or on a CPU its resident set."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    with suppress(OSError):  # only Linux has the file; getrusage may count a parent process's peak
        if found := re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text()):
            return int(found[1]) * 1024
    try:
        from resource import RUSAGE_SELF, getrusage
    except ImportError:  # Windows
        return None
    peak = getrusage(RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
