"""Description of a command of `python -m zero_full`."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass

PROGRAM = "python -m zero_full"


@dataclass(frozen=True)
class Command:
    """A command with its help texts, its arguments and its implementation."""

    name: str
    help: str  # purpose, in one line
    examples: tuple[str, ...]  # arguments to show in `--help`; long ones continue after a backslash
    run: Callable[[Namespace], int]  # returns the exit code
    add_arguments: Callable[[ArgumentParser], None] = lambda parser: None
    more: str = ""  # further lines for `--help`

    def describe(self, parser: ArgumentParser) -> None:
        """Add this command's texts and arguments to its parser."""
        parser.description = "\n".join(filter(None, [f"{self.help[0].upper()}{self.help[1:]}.", self.more]))
        written = [f"  {PROGRAM} {self.name} {example}".rstrip() for example in self.examples]
        parser.epilog = "\n".join(["examples:", *written])
        self.add_arguments(parser)
