"""The command `python -m zero_full check`, which validates a configuration."""

from argparse import ArgumentParser, Namespace

from zero_full.commands.command import Command


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the configuration, a JSON file")
    parser.add_argument("--world", type=int, metavar="N", help="data-parallel ranks")
    parser.add_argument(
        "--json", action="store_true", help="print one line of JSON, with a verdict on every key"
    )


def _run(options: Namespace) -> int:
    from zero_full.check import check_command

    return check_command.main(options.file, options.world, options.json)


COMMAND = Command(
    "check",
    "check a configuration and list all mistakes, with their lines",
    ("ds.json --world 8", "ds.json --json"),
    _run,
    _add_arguments,
    more="It prints the errors and warnings of the engine, and starts nothing.\n"
    "The exit code is 1 if the file is invalid, and 0 with warnings only.",
)
