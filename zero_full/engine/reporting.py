"""What a run logs while it trains: a line every `steps_per_print` steps, and where their time has gone."""

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

from zero_full.comm.topology import this_rank
from zero_full.config import Config
from zero_full.engine.stopwatch import Stopwatch
from zero_full.formatting import duration, human, rate
from zero_full.shard.step.optimizer import ZeroOptimizer

log = logging.getLogger("zero_full")
TOKENS = ("input_ids", "token_ids", "tokens", "idx")  # what a model's forward calls its tokens
RATES = 4  # of learning, in a line


class Pace:
    """Steps since the last line, their samples and tokens, and their time. `clock` tells seconds.

    Time is counted from the end of the first step: that one opens connections and makes state.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.began: float | None = None
        self.steps = self.timed = self.samples = self.tokens = 0

    def count(self, samples: int) -> None:
        """A step is over."""
        self.steps += 1
        if self.began is None:
            self.began, self.tokens = self.clock(), 0
        else:
            self.timed, self.samples = self.timed + 1, self.samples + samples

    def lap(self) -> Iterator[str]:
        """What there is to say about the steps since the last lap; the next one begins."""
        assert self.began is not None
        now = self.clock()
        seconds = now - self.began
        if self.timed and seconds > 0:
            yield duration(seconds / self.timed)
            yield from (
                f"{rate(count / seconds)} {what}/s"
                for what, count in (("samples", self.samples), ("tokens", self.tokens))
                if count
            )
        self.began, self.steps, self.timed, self.samples, self.tokens = now, 0, 0, 0, 0


class Reporting:
    """The part of an engine that logs how it goes, on the first rank."""

    module: nn.Module
    optimizer: ZeroOptimizer
    config: Config
    stopwatch: Stopwatch
    device: torch.device
    world_size: int
    global_steps: int
    skipped_steps: int

    def _watch_pace(self) -> None:
        """From now on."""
        self._pace = Pace()
        self._every = self.config.steps_per_print or int(self.config.wall_clock_breakdown)
        self._tells = self._every > 0 and this_rank() == 0
        self._rates: list[float] = []  # what the last step was taken with: a schedule moves them after it
        self._first_input = ""
        with suppress(TypeError, ValueError):  # what is compiled may have no signature
            self._first_input = next(iter(inspect.signature(self.module.forward).parameters), "")
        self.optimizer.report.keeps_last = self._tells
        if self._tells:
            self.optimizer.register_step_post_hook(self._note_rates)

    def _count_tokens(self, inputs: Sequence[Any], named_inputs: Mapping[str, Any]) -> None:
        """Of a forward in training: all ranks are taken to have as many as this one."""
        if not self._tells:
            return
        given = {self._first_input: inputs[0], **named_inputs} if inputs else named_inputs
        for name in TOKENS:
            if isinstance(found := given.get(name), Tensor) and not found.is_floating_point():
                self._pace.tokens += found.numel() * self.world_size

    def _note_rates(self, *step: Any) -> None:
        if self.optimizer.last is not None:  # else there was nothing to do
            self._rates = [float(group["lr"]) for group in self.optimizer.param_groups]

    def _report(self) -> None:
        """After a step: the line, if one is due."""
        if not self._tells or self.global_steps % self._every or not log.isEnabledFor(logging.INFO):
            return
        steps, told = self._pace.steps, ", ".join(self._told())
        if self.config.steps_per_print:
            log.info("step %d: %s", self.global_steps, told)
        if self.stopwatch.on:
            log.info("step %d: %s", self.global_steps, self.stopwatch.lap(steps))

    def _told(self) -> Iterator[str]:
        optimizer = self.optimizer
        loss = optimizer.report.step_loss()
        if loss is not None:  # the host waits for it, so that the time after it is that of the steps
            digits = f"{loss:.4f}" if 1e-3 <= abs(loss) < 1e4 else f"{loss:.5g}"
            yield f"loss {digits}" + (" (rank 0)" if self.world_size > 1 else "")
        yield from self._pace.lap()
        if optimizer.last is not None and optimizer.last.grad_norm is not None:
            yield f"norm {optimizer.last.grad_norm:.4g}"
        rates = [f"{lr:.3g}" for lr in dict.fromkeys(self._rates)]
        yield f"lr {' / '.join(rates[:RATES])}" + (" / ..." if len(rates) > RATES else "")
        if optimizer.scaler.scales:
            scale = optimizer.scaler.scale
            yield f"loss scale {scale:,.0f}" if scale >= 1 else f"loss scale {scale:g}"
        if self.skipped_steps:
            yield f"{self.skipped_steps} skipped"
        if (most := most_memory(self.device)) is not None:
            yield f"peak {human(most)}"


def most_memory(device: torch.device) -> int | None:
    """The most that this process has had at one time: of the device's memory, or on a CPU of the host's."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    with suppress(OSError):  # only Linux has the file; the answer below may be that of who has started us
        if told := re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text()):
            return int(told[1]) * 1024
    try:
        from resource import RUSAGE_SELF, getrusage
    except ImportError:  # Windows
        return None
    most = getrusage(RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
