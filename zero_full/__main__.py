"""The command line: `python -m zero_full doctor`."""

import argparse
import sys
from collections.abc import Sequence

from zero_full import doctor


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; argparse exits with 2 where there is none to run."""
    parser = argparse.ArgumentParser(prog="python -m zero_full")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what is installed, what is used and what is wrong with it")
    parser.parse_args(arguments)
    return doctor.main()


if __name__ == "__main__":
    sys.exit(main())
