"""The command line: `python -m zero_full COMMAND`. `commands.py` describes the commands."""

from zero_full.interrupt import INTERRUPTED, ends_imports

with ends_imports():
    import argparse
    import os
    import sys
    from collections.abc import Sequence

    from zero_full import __version__
    from zero_full.commands import COMMANDS, PROGRAM, Script
    from zero_full.errors import ConfigError, FitError, MigrateError, PlanError, RecordingError, UsageError
    from zero_full.formatting import printable

# Errors in the arguments or in a file that they name. Others are failures of the command, with a traceback.
USAGE_ERRORS = (ConfigError, FitError, MigrateError, PlanError, RecordingError, UsageError)
FAILED, MISUSED = 1, 2  # exit codes. 0: fine


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Without one, print the help."""
    try:
        try:
            with ends_imports():
                result = _run(arguments)
        finally:
            print(end="", flush=True)
    except BrokenPipeError:  # the reader has closed the pipe; Python would flush stdout once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return result() if callable(result) else result


def _run(arguments: Sequence[str] | None) -> int | Script:
    parser = build_parser()
    options = parser.parse_args(arguments)
    command = next((each for each in COMMANDS if each.name == options.command), None)
    if command is None:
        parser.print_help()
        return 0
    try:
        return command.run(options)
    except USAGE_ERRORS as error:
        parser.exit(MISUSED, printable(f"{PROGRAM} {command.name}: error: {error}\n"))


def build_parser() -> argparse.ArgumentParser:
    """Build the parser for the arguments of all commands."""
    parser = argparse.ArgumentParser(
        PROGRAM,
        description="Look at a machine, a configuration, a checkpoint or a run.",
        epilog=f"{PROGRAM} COMMAND -h shows its arguments and examples.",
    )
    parser.add_argument("--version", action="version", version=f"zero_full {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name, help=command.help, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.describe(subparser)
    return parser


def run() -> None:
    """Run one command and end the process with its exit code."""
    code = main()
    if code == INTERRUPTED:  # at once, without waiting for threads
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
