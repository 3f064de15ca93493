"""`python -m zero_full as-deepspeed`: run a script in a process where zero_full stands in for DeepSpeed."""

import os
import runpy
import socket
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

from zero_full.arguments import script_of
from zero_full.errors import UsageError
from zero_full.integrations.deepspeed.install import install
from zero_full.start.launch import LOCALHOST, read_launcher


def prepare(options: Namespace) -> Callable[[], int]:
    """Check the arguments and install the stand-in. Returns a function that runs the script or the module."""
    target, launches = script_of(options)
    try:
        install()
    except ImportError as error:
        raise UsageError(str(error)) from error
    if launches:
        return partial(_launch, target[2:])
    return partial(_run, target, bool(options.m))


def _run(target: list[str], is_module: bool) -> int:
    """Run a script or a module as `__main__`, with the arguments that follow it."""
    _be_a_rank()
    sys.argv = target
    if is_module:
        runpy.run_module(target[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(target[0]).resolve().parent)  # as `python script.py` does
        runpy.run_path(target[0], run_name="__main__")
    return 0


def _be_a_rank() -> None:
    """Set the variables of a launcher with one rank, if there is no launcher: transformers expects them."""
    if read_launcher(os.environ) is None:
        with socket.socket() as asked:
            asked.bind((LOCALHOST, 0))
            port = str(asked.getsockname()[1])
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ.update(alone | {"MASTER_ADDR": LOCALHOST, "MASTER_PORT": port})


def _launch(arguments: list[str]) -> int:
    """Run `accelerate launch`, with each rank's script under as-deepspeed."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    options = launch_command_parser().parse_args(arguments)
    script = [*(["-m"] if options.module else []), options.training_script]
    options.training_script_args = ["as-deepspeed", *script, *options.training_script_args]
    options.module, options.training_script = True, "zero_full"
    launch_command(options)
    return 0
