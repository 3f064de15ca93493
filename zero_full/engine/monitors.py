"""Monitors: write the metrics of a run to files, TensorBoard or Weights & Biases, on the first rank.

Sections and tags are DeepSpeed's; the horizontal axis of a tag is the number of samples, or of steps if the
configuration has no batch size. `jsonl_monitor` has no counterpart in DeepSpeed: a line has all metrics.

A monitor that cannot be opened is an error. One that fails later, by a full disk for example, is closed with
a warning, and training goes on.
"""

import csv
import json
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from zero_full.comm.fork_safety import in_this_process_only
from zero_full.config import Config
from zero_full.config.schema import JsonlMonitorConfig, MonitorConfig, WandbConfig
from zero_full.engine.metrics import Metrics
from zero_full.errors import ConfigError

log = logging.getLogger("zero_full")
PREFIX = "Train/Samples/"  # of all tags
NOT_INSTALLED = "%s needs the package %s, which cannot be imported (%s). Install it: pip install %s"
NOT_WRITABLE = "%s.output_path: nothing can be written to %s (%s). Set it to another folder"
NOT_OPENED = "%s could not be opened (%s: %s). Fix the cause, or set its enabled to false"
STOPPED = "%s has failed and stops writing: %s. Training continues. Fix the cause before the next run"


class Monitor(Protocol):
    """Protocol of a monitor, which writes the metrics of steps."""

    def write(self, metrics: Metrics, tags: Mapping[str, float], at: int) -> None:
        """Write the metrics of a step. `tags`: some metrics by DeepSpeed's names. `at`: samples so far."""

    def close(self) -> None:
        """Write pending metrics, and close the files."""


class Monitors:
    """The monitors of a run. Closed by `close`, or with the process."""

    def __init__(self, config: Config) -> None:
        """Open the monitors that the configuration enables. Raises ConfigError if one cannot be opened."""
        self.open: dict[str, Monitor] = {}  # by section
        try:
            for section in _enabled(config):
                self.open[section] = _opened(section, getattr(config, section))
        except BaseException:
            _close(self.open)
            raise
        self.finish = weakref.finalize(self, in_this_process_only(_close), self.open)

    def write(self, metrics: Metrics) -> None:
        """Write the metrics of a step to all monitors."""
        tags = {PREFIX + name: value for name, value in _scalars(metrics)}
        at = metrics["step"] if metrics["samples"] is None else metrics["samples"]
        for section, monitor in [*self.open.items()]:
            try:
                monitor.write(metrics, tags, at)
            except Exception as error:  # the monitor's library may raise any type
                del self.open[section]
                log.warning(STOPPED, section, error)

    def close(self) -> None:
        """Close all monitors."""
        self.finish()


def is_monitored(config: Config) -> bool:
    """Return whether the configuration enables a monitor."""
    return bool(_enabled(config))


def _enabled(config: Config) -> list[str]:
    """Return the sections of the monitors that the configuration enables."""
    return [section for section in MONITORS if getattr(config, section).enabled]


def _opened(section: str, options: Any) -> Monitor:
    try:
        return MONITORS[section](options)
    except ConfigError:
        raise
    except Exception as error:  # the monitor's library may raise any type
        raise ConfigError(NOT_OPENED % (section, type(error).__name__, error)) from error


def _close(monitors: dict[str, Monitor]) -> None:
    while monitors:
        section, monitor = monitors.popitem()
        try:
            monitor.close()
        except Exception as error:
            log.warning(STOPPED, section, error)


def _scalars(metrics: Metrics) -> Iterator[tuple[str, float]]:
    """Yield the metrics that have a tag, under DeepSpeed's name where it has one."""
    named = {
        "train_loss": metrics["loss"],
        "lr": metrics["lr"][0] if metrics["lr"] else None,
        "loss_scale": metrics["loss_scale"],
        "grad_norm": metrics["grad_norm"],
        "skipped_steps": metrics["skipped"],
        "samples_per_second": metrics["samples_per_second"],
        "tokens_per_second": metrics["tokens_per_second"],
        "peak_bytes": metrics["peak"],
        **{f"elapsed_time_ms_{name}": s * 1000 for name, s in metrics["phase_seconds"].items()},
    }
    yield from ((name, value) for name, value in named.items() if value is not None)


def _folder(section: str, config: MonitorConfig) -> Path:
    """Make the folder of a monitor, and return it."""
    folder = Path(config.output_path).expanduser() / config.job_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").write_bytes(b"")
        (folder / ".writable").unlink()
    except OSError as error:
        raise ConfigError(NOT_WRITABLE % (section, folder.absolute(), error.strerror)) from error
    return folder


def _imported(section: str, module: str, package: str) -> Any:
    """Import a monitor's library. Raises ConfigError if its package is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(NOT_INSTALLED % (section, package, error, package)) from error


class JsonLines:
    """Appends a line of JSON for each step: the metrics, the time, and when this engine was made.

    Numbers that JSON lacks are the strings "NaN", "Infinity" and "-Infinity".
    """

    def __init__(self, config: JsonlMonitorConfig) -> None:
        self.run = datetime.now(timezone.utc).isoformat()
        path = _folder("jsonl_monitor", config) / "metrics.jsonl"
        try:
            # Each line is one unbuffered write, which a process that is killed leaves complete.
            self.file = path.open("a+b", buffering=0)
            if self.file.tell():
                self.file.seek(-1, os.SEEK_END)
                if self.file.read(1) != b"\n":  # the last line was cut short
                    self.file.write(b"\n")
        except OSError as error:
            raise ConfigError(NOT_WRITABLE % ("jsonl_monitor", path.absolute(), error.strerror)) from error

    def write(self, metrics: Metrics, tags: Mapping[str, float], at: int) -> None:
        """Append a line."""
        line = {"time": time.time(), "run": self.run, **{k: _in_json(v) for k, v in metrics.items()}}
        self.file.write(json.dumps(line, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def _in_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_in_json(each) for each in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


class CsvFiles:
    """Appends to a file for each tag, named after it: `Train_Samples_train_loss.csv`."""

    def __init__(self, config: MonitorConfig) -> None:
        self.folder = _folder("csv_monitor", config)

    def write(self, metrics: Metrics, tags: Mapping[str, float], at: int) -> None:
        """Append a row to each file. A new file begins with a header."""
        for tag, value in tags.items():
            with (self.folder / f"{tag.replace('/', '_')}.csv").open("a", newline="") as file:
                rows = csv.writer(file)
                if not file.tell():
                    rows.writerow(["step", tag.removeprefix(PREFIX)])
                rows.writerow([at, value])

    def close(self) -> None:
        """Do nothing: no file stays open."""


class TensorBoard:
    """Writes events by `torch.utils.tensorboard`."""

    def __init__(self, config: MonitorConfig) -> None:
        library = _imported("tensorboard", "torch.utils.tensorboard", "tensorboard")
        self.writer = library.SummaryWriter(str(_folder("tensorboard", config)), flush_secs=10)

    def write(self, metrics: Metrics, tags: Mapping[str, float], at: int) -> None:
        """Add an event for each tag."""
        for tag, value in tags.items():
            self.writer.add_scalar(tag, value, at)

    def close(self) -> None:
        """Write the events that are queued."""
        self.writer.close()


class WeightsAndBiases:
    """Logs to the run of `wandb` that the script has started, or else to one of its own."""

    def __init__(self, config: WandbConfig) -> None:
        library = _imported("wandb", "wandb", "wandb")
        self.own = library.run is None
        self.run = library.run
        if self.own:
            self.run = library.init(project=config.project, group=config.group, entity=config.team)

    def write(self, metrics: Metrics, tags: Mapping[str, float], at: int) -> None:
        """Log all tags. In the script's own run they are sent with the script's log of this step."""
        self.run.log(dict(tags), step=at, commit=self.own)

    def close(self) -> None:
        """Finish the run, unless the script has started it."""
        if self.own:
            self.run.finish()


MONITORS: dict[str, Callable[[Any], Monitor]] = {  # by their sections of the configuration
    "jsonl_monitor": JsonLines,
    "csv_monitor": CsvFiles,
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}
