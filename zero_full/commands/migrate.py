"""The command `python -m zero_full migrate`, which rewrites DeepSpeed scripts."""

from argparse import ArgumentParser, Namespace

from zero_full.commands.command import Command
from zero_full.errors import UsageError


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="scripts (.py) and configurations (.json)")
    parser.add_argument("--write", action="store_true", help="change the scripts, and not only show how")
    parser.add_argument("--world", type=int, metavar="N", help="check configurations for so many ranks")


def _run(options: Namespace) -> int:
    from zero_full import migrate

    try:
        return migrate.main(options.files, options.write, options.world)
    except migrate.MigrateError as error:
        raise UsageError(str(error)) from None


COMMAND = Command(
    "migrate",
    "make a DeepSpeed script one of zero_full's",
    ("train.py ds.json", "--write train.py", "--world 8 ds.json"),
    _run,
    _add_arguments,
    more="Scripts are read and not run. Without --write it shows what would change.\n"
    "The exit code is 1 if anything is left to do by hand.",
)
