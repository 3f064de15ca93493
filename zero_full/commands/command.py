"""What a command of `python -m zero_full` is."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass

PROGRAM = "python -m zero_full"


@dataclass(frozen=True)
class Command:
    """A command: how it is described, what it takes and what it does."""

    name: str
    help: str  # what it is for, in a line
    examples: tuple[str, ...]  # of arguments, for `--help`; a long one is continued with a backslash
    run: Callable[[Namespace], int]  # returns the exit code
    add_arguments: Callable[[ArgumentParser], None] = lambda parser: None
    more: str = ""  # for `--help`, in lines

    def describe(self, parser: ArgumentParser) -> None:
        """Give the parser of this command its texts and arguments."""
        parser.description = "\n".join(filter(None, [f"{self.help[0].upper()}{self.help[1:]}.", self.more]))
        written = [f"  {PROGRAM} {self.name} {example}".rstrip() for example in self.examples]
        parser.epilog = "\n".join(["examples:", *written])
        self.add_arguments(parser)
