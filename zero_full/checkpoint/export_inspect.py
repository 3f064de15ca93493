"""The commands `python -m zero_full export` and `python -m zero_full inspect`."""

import argparse
import functools
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TextIO

import torch

from zero_full.checkpoint.consolidate import ExportOptions, consolidate, size_to_read
from zero_full.checkpoint.inspection import Inspection, neighbours, pairs, verify
from zero_full.checkpoint.reading import open_checkpoint
from zero_full.errors import CheckpointError, UsageError
from zero_full.formatting import human, listed, parse_size, printable

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FAILED = 1
WIDTH = 24  # of the progress bar, in characters
ON_TERMINAL, ELSEWHERE = 0.1, 10.0  # seconds between two updates of the progress


class Progress:
    """The progress of a long read, in bytes: a bar on a terminal, else a line every ten seconds.

    As a context manager it clears its line on the terminal at exit.
    """

    def __init__(
        self, doing: str, total: int, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.doing, self.total, self.stream, self.clock = doing, total, stream, clock
        self.done, self.shown = 0, ""
        self.terminal = stream.isatty()
        self.began = self.last = clock()

    def advance(self, size: int) -> None:
        """Advance the display by `size` bytes."""
        self.done += size
        now = self.clock()
        if now - self.last >= (ON_TERMINAL if self.terminal else ELSEWHERE):
            self.last = now
            self._show(now - self.began)

    def _show(self, seconds: float) -> None:
        share = min(1.0, self.done / self.total)
        text = f"{share:4.0%}, {human(self.done)} of {human(self.total)}, {human(int(self.done / seconds))}/s"
        if self.terminal:
            self._overwrite(f"{self.doing} [{'#' * round(share * WIDTH):<{WIDTH}}] {text}")
        else:
            print(f"{self.doing}: {text.strip()}", file=self.stream, flush=True)

    def _overwrite(self, text: str) -> None:
        print(f"\r{text:<{len(self.shown)}}", end="", file=self.stream, flush=True)
        self.shown = text

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        if self.shown:
            self._overwrite("")
            print("\r", end="", file=self.stream, flush=True)


def _prints_errors(command: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Decorate a command: errors that a user can cause print a message, without a traceback."""

    @functools.wraps(command)
    def run(options: argparse.Namespace) -> int:
        try:
            return command(options)
        except BrokenPipeError:  # the reader has closed the pipe (as `head` does): `__main__` handles it
            raise
        except CheckpointError as error:
            text = str(error)
        except OSError as error:
            place = "" if error.filename is None else f"{error.filename}: "
            text = f"{place}{error.strerror or error}"
        print(printable(f"error: {text}"), file=sys.stderr)
        return FAILED

    return run


@_prints_errors
def export(options: argparse.Namespace) -> int:
    """Run `python -m zero_full export` and return the exit code."""
    try:
        max_shard_bytes = parse_size(options.max_shard_size)
    except ValueError as error:
        raise UsageError(f"--max-shard-size: {error}") from None
    wanted = ExportOptions(DTYPES.get(options.dtype), options.exclude_frozen, max_shard_bytes)
    if not options.out:
        raise CheckpointError("OUT is empty. Name the folder to write the weights to")
    with closing(open_checkpoint(Path(options.checkpoint), options.tag)) as source:
        with Progress("exporting", size_to_read(source, wanted), sys.stderr) as progress:
            exported = consolidate(source, Path(options.out), wanted, progress.advance)
        _print(f"{source.path} ({source.kind})")
    for path in exported.files:
        _print(f"  -> {path}")
    _print(f"{human(exported.nbytes)} in all")
    if exported.frozen:
        _print(f"left out, because frozen: {listed(exported.frozen)}")
    if exported.others:
        _print(f"left out, because no tensors (get_extra_state): {listed(exported.others)}")
    return 0


@_prints_errors
def inspect(options: argparse.Namespace) -> int:
    """Run `python -m zero_full inspect` and return the exit code, 1 if the checkpoint is damaged."""
    folder = Path(options.checkpoint)
    try:
        source = open_checkpoint(folder, options.tag)
    except CheckpointError as error:
        found_there = pairs(list(neighbours(folder, None).rows()))
        raise CheckpointError("\n".join([str(error), *found_there])) from error
    with closing(source):
        wrong = None
        if options.verify:
            total = sum(stored.nbytes for stored in source.tensors.values())
            with Progress("verifying", total, sys.stderr) as progress:
                wrong = verify(source, progress.advance)
        found = Inspection(source, neighbours(folder, source.path), wrong)
        _print(found.as_json() if options.json else found.table())
    return FAILED if wrong else 0


def _print(text: str) -> None:
    print(printable(text), flush=True)
