"""The commands `python -m zero_full export` and `python -m zero_full inspect`."""

import argparse
import functools
import json
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from zero_full.arguments import size_of
from zero_full.checkpoint.consolidate import ExportOptions, consolidate, size_to_read
from zero_full.checkpoint.folder import local_path
from zero_full.checkpoint.inspection import Inspection, neighbours, pairs, verify
from zero_full.checkpoint.reading import open_checkpoint
from zero_full.errors import CheckpointError
from zero_full.formatting import human, listed, printable
from zero_full.progress import Progress

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FAILED = 1


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
    max_shard_bytes = size_of("--max-shard-size", options.max_shard_size)
    wanted = ExportOptions(DTYPES.get(options.dtype), options.exclude_frozen, max_shard_bytes)
    with (
        closing(open_checkpoint(local_path(options.checkpoint), options.tag)) as source,
        Progress("exporting", size_to_read(source, wanted), sys.stderr) as progress,
    ):
        exported = consolidate(source, local_path(options.out), wanted, progress.advance)
    if options.json:
        found = {"path": source.path, "written_by": source.kind, "files": exported.files}
        left_out = {"frozen": exported.frozen, "not_tensors": exported.others}
        _print(json.dumps({**found, "bytes": exported.nbytes, **left_out}, default=str))
        return 0
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
