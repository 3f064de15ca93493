"""Log lines of a training run: one every `steps_per_print` steps, and the times of its phases."""

import logging
import sys
from collections.abc import Callable, Iterator

import torch

from zero_full.config import Config
from zero_full.engine.metrics import Lap, Means, Meter, Metrics, peak_memory
from zero_full.engine.monitors import Monitors
from zero_full.formatting import duration, human, three_digits

log = logging.getLogger("zero_full")
RATES = 4  # largest number of learning rates in a line


class Reporting:
    """Logs the progress of a run, and writes to its monitors. Only the engine of the first rank has one.

    device  whose peak memory a line shows
    read    returns the engine's metrics, with these means
    """

    def __init__(
        self, meter: Meter, config: Config, device: torch.device, read: Callable[[Means], Metrics]
    ) -> None:
        self.meter, self.device, self.read = meter, device, read
        self.steps_per_print = config.steps_per_print or 0
        # Log lines and monitors are written at different steps, so each have means over their own steps.
        self.line_lap, self.monitor_lap = Lap(meter), Lap(meter)
        self.steps_per_monitor = config.steps_per_monitor
        self.monitors: Monitors | None = None

    def report(self, step: int, skipped: int) -> None:
        """Log and write the lines due after step number `step`; `skipped` steps of the run overflowed."""
        self._log_step(step, skipped)
        if self.monitors is not None and step % self.steps_per_monitor == 0:
            self.monitors.write(self.read(self.monitor_lap.end()))

    def close(self) -> None:
        """Close the monitors."""
        if self.monitors is not None:
            self.monitors.close()

    def _log_step(self, step: int, skipped: int) -> None:
        is_timed = self.meter.stopwatch.on
        if not (self.steps_per_print or is_timed) or step % (self.steps_per_print or 1) or not _is_shown():
            return
        # Reading the loss waits for the device, so the clock is read afterwards.
        loss = self.meter.loss()
        means = self.line_lap.end()
        if self.steps_per_print:
            _show(f"step {step}: {', '.join(self._parts(loss, means, skipped))}")
        if is_timed:
            times = ", ".join(f"{name} {duration(s)}" for name, s in means.phase_seconds.items())
            times = times or "no times: the loop did not call forward, backward or step of the engine"
            _show(f"step {step}: {times}")

    def _parts(self, loss: float | None, means: Means, skipped: int) -> Iterator[str]:
        """Yield the parts of a progress line: loss, times, rates, norm, memory."""
        optimizer = self.meter.optimizer
        if loss is not None:
            digits = f"{loss:.4f}" if 1e-3 <= abs(loss) < 1e4 else f"{loss:.5g}"
            yield f"loss {digits}" + (" (rank 0)" if self.meter.world_size > 1 else "")
        if means.step_seconds is not None:
            yield duration(means.step_seconds)
        if means.samples_per_second is not None:
            yield f"{three_digits(means.samples_per_second)} samples/s"
        if means.tokens_per_second is not None:
            yield f"{three_digits(means.tokens_per_second)} tokens/s"
        if optimizer.last is not None and optimizer.last.grad_norm is not None:
            yield f"norm {optimizer.last.grad_norm:.4g}"
        rates = [f"{lr:.3g}" for lr in dict.fromkeys(self.meter.rates)]
        yield f"lr {' / '.join(rates[:RATES])}" + (" / ..." if len(rates) > RATES else "")
        if optimizer.scaler.scales:
            scale = optimizer.scaler.scale
            yield f"loss scale {scale:,.0f}" if scale >= 1 else f"loss scale {scale:g}"
        if skipped:
            yield f"{skipped} skipped"
        if (peak := peak_memory(self.device)) is not None:
            yield f"peak {human(peak)}"


def _is_configured() -> bool:
    """Return whether the script has configured logging: by a handler, or by a level."""
    # WARNING is the default level of the root logger.
    return log.hasHandlers() or log.level != logging.NOTSET or logging.root.level != logging.WARNING


def _is_shown() -> bool:
    """Return whether a line of progress is shown: by default, unless the script's logging drops it."""
    if not _is_configured():  # logging's default level hides INFO, but was not chosen by the script
        return log.manager.disable < logging.INFO
    return log.isEnabledFor(logging.INFO)


def _show(line: str) -> None:
    """Log a line at INFO. Without a handler Python would drop it, so it goes to stderr."""
    if log.hasHandlers():
        log.info("%s", line)
    else:
        print(line, file=sys.stderr, flush=True)
