"""Log lines of a training run: one every `steps_per_print` steps, and the times of its phases."""

import inspect
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_full.engine.stopwatch import Stopwatch
from zero_full.formatting import duration, human, three_digits
from zero_full.shard.step.optimizer import ZeroOptimizer

log = logging.getLogger("zero_full")
TOKENS = ("input_ids", "token_ids", "tokens", "idx")  # usual names of a forward's argument with tokens
RATES = 4  # largest number of learning rates in a line


class Throughput:
    """Steps, samples, tokens and seconds since the last log line. `clock` returns seconds.

    Time counts from the end of the first step, which opens connections and creates optimizer state.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.began: float | None = None  # seconds; None: before the end of the first step
        self.steps = self.timed = self.samples = self.tokens = 0

    def count(self, samples: int) -> None:
        """Count a step that has ended, and its samples."""
        self.steps += 1
        if self.began is None:
            self.began, self.tokens = self.clock(), 0
        else:
            self.timed, self.samples = self.timed + 1, self.samples + samples

    def lap(self) -> Iterator[str]:
        """Yield the time of a step, samples and tokens per second since the last lap; begin a new lap."""
        assert self.began is not None
        now = self.clock()
        seconds = now - self.began
        if self.timed and seconds > 0:
            yield duration(seconds / self.timed)
            yield from (
                f"{three_digits(count / seconds)} {what}/s"
                for what, count in (("samples", self.samples), ("tokens", self.tokens))
                if count
            )
        self.began, self.steps, self.timed, self.samples, self.tokens = now, 0, 0, 0, 0


class Reporting:
    """Logs the progress of a run, on the first rank. An engine that logs nothing has none.

    steps_per_print  steps from one line to the next; 0: only the stopwatch's line, after every step
    stopwatch        times the phases of a step, if it is on
    device           whose peak memory a line shows
    world_size       data-parallel ranks: each is assumed to have as many tokens as this one
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: ZeroOptimizer,
        steps_per_print: int,
        stopwatch: Stopwatch,
        device: torch.device,
        world_size: int,
    ) -> None:
        self.optimizer, self.stopwatch = optimizer, stopwatch
        self.steps_per_print, self.device, self.world_size = steps_per_print, device, world_size
        self.throughput = Throughput()
        self.rates: list[float] = []  # of the last step: a schedule moves them before the line is logged
        self.first_input = ""  # the name of the first argument of forward
        with suppress(TypeError, ValueError):  # a compiled forward may have no signature
            self.first_input = next(iter(inspect.signature(module.forward).parameters), "")
        self.loss: Tensor | None = None  # of the last step
        optimizer.at_step.append(self._note_loss)
        optimizer.register_step_post_hook(self._note_rates)

    def count_tokens(self, inputs: Sequence[Any], named_inputs: Mapping[str, Any]) -> None:
        """Count the tokens of a training forward."""
        given = {self.first_input: inputs[0], **named_inputs} if inputs else named_inputs
        for name in TOKENS:
            if isinstance(found := given.get(name), Tensor) and not found.is_floating_point():
                self.throughput.tokens += found.numel() * self.world_size

    def _note_loss(self) -> None:
        self.loss = self.optimizer.accumulation.step_loss()

    def _note_rates(self, *step: Any) -> None:
        if self.optimizer.last is not None:  # else the step found no gradients
            self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]

    def log_step(self, step: int, skipped: int) -> None:
        """Log the lines that are due after step number `step`; `skipped` steps of the run overflowed."""
        if step % (self.steps_per_print or 1) or not log.isEnabledFor(logging.INFO):
            return
        steps, line = self.throughput.steps, ", ".join(self._parts(skipped))
        if self.steps_per_print:
            log.info("step %d: %s", step, line)
        if self.stopwatch.on:
            log.info("step %d: %s", step, self.stopwatch.lap(steps))

    def _parts(self, skipped: int) -> Iterator[str]:
        """Yield the parts of a line."""
        optimizer = self.optimizer
        loss = None if self.loss is None else float(self.loss)
        if loss is not None:  # reading it waits for the device, so the clock is read afterwards
            digits = f"{loss:.4f}" if 1e-3 <= abs(loss) < 1e4 else f"{loss:.5g}"
            yield f"loss {digits}" + (" (rank 0)" if self.world_size > 1 else "")
        yield from self.throughput.lap()
        if optimizer.last is not None and optimizer.last.grad_norm is not None:
            yield f"norm {optimizer.last.grad_norm:.4g}"
        rates = [f"{lr:.3g}" for lr in dict.fromkeys(self.rates)]
        yield f"lr {' / '.join(rates[:RATES])}" + (" / ..." if len(rates) > RATES else "")
        if optimizer.scaler.scales:
            scale = optimizer.scaler.scale
            yield f"loss scale {scale:,.0f}" if scale >= 1 else f"loss scale {scale:g}"
        if skipped:
            yield f"{skipped} skipped"
        if (peak := peak_memory(self.device)) is not None:
            yield f"peak {human(peak)}"


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
