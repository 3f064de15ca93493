"""The command `python -m zero_full replay`, which shows a recording of the last steps."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from zero_full.commands.command import Command
from zero_full.errors import UsageError


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("recording", type=Path, metavar="FILE", help="the path that engine.record was given")
    parser.add_argument("--moments", action="store_true", help="every moment, too, each with its sentence")


def _run(options: Namespace) -> int:
    from zero_full.errors import RecordingError
    from zero_full.flight.replay_command import replay

    try:
        return replay(options.recording, options.moments)
    except RecordingError as error:
        raise UsageError(str(error)) from None


COMMAND = Command(
    "replay",
    "what every rank did in its last steps, and which waited for whom",
    ("step.json", "step.json --moments"),
    _run,
    _add_arguments,
    "Where a run was killed or hangs, what the ranks have left is put together first.",
)
