"""The command `python -m zero_full replay`, which shows a recording of the last steps."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from zero_full.commands.command import Command


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "recording", type=Path, metavar="FILE", help="the path that was passed to engine.record"
    )
    parser.add_argument("--moments", action="store_true", help="also print every event, with a sentence")


def _run(options: Namespace) -> int:
    from zero_full.flight.replay_command import replay

    return replay(options.recording, options.moments)


COMMAND = Command(
    "replay",
    "show what each rank did in its last steps, and which ranks waited",
    ("step.json", "step.json --moments"),
    _run,
    _add_arguments,
    "If the run was killed or hangs, the files of the ranks are merged first.",
)
