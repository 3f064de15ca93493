"""Check a command's arguments and the files that they name, before its implementation imports torch.

Importing torch takes seconds. A wrong argument or a missing file is reported without it. The functions have
the names of the commands; the implementation checks the rest.
"""

from argparse import Namespace
from pathlib import Path

from zero_full.arguments import (
    check_checkpoint_folder,
    check_readable,
    check_writable,
    module_and_function,
    script_of,
    shape_and_type,
    size_of,
)
from zero_full.errors import UsageError


def doctor(options: Namespace) -> None:
    """Check the arguments of `doctor --out`."""
    if options.measure is False:
        raise UsageError("--out needs --measure: doctor --measure --out FILE")
    if options.measure is not True:
        raise UsageError("--out measures no disk: pass --measure without a directory")
    check_writable(options.out, "--out")


def plan(options: Namespace) -> None:
    """Check the arguments of `plan`."""
    from zero_full.config.auto import read_filled

    module_and_function(options.model)
    for text in options.batch:
        shape_and_type(text)
    read_filled(Path(options.config), options.fill)


def fit(options: Namespace) -> None:
    """Check the arguments of `fit`."""
    for name in ("memory", "host_memory", "disk"):
        text = getattr(options, name)
        if text is not None:
            size_of(f"--{name.replace('_', '-')}", text)
    if options.fastest and options.machine is None:
        raise UsageError("--fastest compares forecast times: pass a machine file, --machine FILE")
    check_writable(options.write, "--write")
    check_readable(options.hf_config, "--hf-config", "a model's config.json")


def inspect(options: Namespace) -> None:
    """Check the arguments of `inspect`."""
    check_checkpoint_folder(options.checkpoint)


def export(options: Namespace) -> None:
    """Check the arguments of `export`."""
    size_of("--max-shard-size", options.max_shard_size)
    if not options.out:
        raise UsageError("OUT is empty. Name the folder to write the weights to")
    check_checkpoint_folder(options.checkpoint)


def as_deepspeed(options: Namespace) -> None:
    """Check the arguments of `as-deepspeed`."""
    script_of(options)
