"""The command `python -m zero_full doctor`, which reports on this machine."""

from argparse import ArgumentParser

from zero_full.commands.command import Command
from zero_full.doctor import machine as doctor


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--measure",
        nargs="?",
        const="",
        metavar="DIRECTORY",
        help="measure copies in memory and to an accelerator, and writes and reads of this directory's disk",
    )


COMMAND = Command(
    "doctor",
    "report what is installed, what is used, and any problems",
    ("", "--measure", "--measure /local_nvme"),
    lambda options: doctor.main(options.measure),
    _add_arguments,
    more="It starts nothing. The exit code is 1 if there is a problem.",
)
