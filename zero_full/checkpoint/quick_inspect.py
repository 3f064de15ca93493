"""The command `python -m zero_full inspect`, without torch where JSON files suffice."""

import argparse
from pathlib import Path

from zero_full.checkpoint.description import describe
from zero_full.checkpoint.inspection import Inspection, neighbours
from zero_full.formatting import printable


def inspect(options: argparse.Namespace) -> int:
    """Run `python -m zero_full inspect` and return the exit code, 1 if the checkpoint is damaged."""
    folder = Path(options.checkpoint)
    described = None if options.verify else describe(folder, options.tag)
    if described is None:
        from zero_full.checkpoint import export_inspect  # imports torch

        return export_inspect.inspect(options)
    found = Inspection(described, neighbours(folder, described.path))
    print(printable(found.as_json() if options.json else found.table()), flush=True)
    return 0
