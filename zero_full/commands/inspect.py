"""The command `python -m zero_full inspect`, which describes and verifies a checkpoint."""

from argparse import ArgumentParser, Namespace

from zero_full.commands.command import Command
from zero_full.commands.export import add_checkpoint


def _add_arguments(parser: ArgumentParser) -> None:
    add_checkpoint(parser)
    parser.add_argument("--verify", action="store_true", help="read all data and compare checksums")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def _run(options: Namespace) -> int:
    from zero_full.checkpoint import export_inspect

    return export_inspect.inspect(options)


COMMAND = Command(
    "inspect",
    "describe a checkpoint, and verify it",
    ("checkpoints", "checkpoints --verify", "checkpoints --tag global_step100 --json"),
    _run,
    _add_arguments,
)
