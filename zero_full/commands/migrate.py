"""The command `python -m zero_full migrate`, which rewrites DeepSpeed scripts."""

from argparse import ArgumentParser, Namespace

from zero_full.commands.command import Command


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="scripts (.py) and configurations (.json)")
    parser.add_argument("--write", action="store_true", help="change the scripts, not only show the diff")
    parser.add_argument("--world", type=int, metavar="N", help="check configurations for this many ranks")


def _run(options: Namespace) -> int:
    from zero_full import migrate

    return migrate.main(options.files, options.write, options.world)


COMMAND = Command(
    "migrate",
    "rewrite a DeepSpeed script for zero_full",
    ("train.py ds.json", "--write train.py", "--world 8 ds.json"),
    _run,
    _add_arguments,
    more="Scripts are read, not run. Without --write it only shows the diff.\n"
    "The exit code is 1 if anything is left to do by hand.",
)
