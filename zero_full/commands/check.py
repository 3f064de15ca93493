"""The command `python -m zero_full check`, which validates a configuration."""

from argparse import ArgumentParser, Namespace

from zero_full.commands.command import Command
from zero_full.errors import UsageError


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the configuration, a JSON file")
    parser.add_argument("--world", type=int, metavar="N", help="data-parallel ranks")
    parser.add_argument("--json", action="store_true", help="one line of JSON, with a verdict on every key")


def _run(options: Namespace) -> int:
    from zero_full.check import check_command
    from zero_full.errors import ConfigError

    try:
        return check_command.main(options.file, options.world, options.json)
    except ConfigError as error:
        raise UsageError(str(error)) from None


COMMAND = Command(
    "check",
    "all mistakes of a configuration at once, with their lines",
    ("ds.json --world 8", "ds.json --json"),
    _run,
    _add_arguments,
    more="It says what the engine would say, and starts nothing.\n"
    "The exit code is 1 if the file cannot be used, and 0 with warnings only.",
)
