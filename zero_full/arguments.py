"""Parse and check command line arguments without torch, so that a mistake is reported at once."""

import importlib.util
import re
import sys
from argparse import ArgumentTypeError, Namespace
from pathlib import Path

from zero_full.errors import PlanError, UsageError
from zero_full.formatting import parse_size, shown


def count(text: str) -> int:
    """Parse a number of at least 1. Raises ArgumentTypeError, which argparse prints with the option."""
    try:
        number = int(text)
    except ValueError:
        raise ArgumentTypeError(f"{shown(text)} is not a whole number") from None
    if number < 1:
        raise ArgumentTypeError(f"{number} is less than 1")
    return number


def path_text(text: str) -> str:
    """Return the text of a path. Raises ArgumentTypeError if it is empty, as "$FILE" without a value is."""
    if not text:
        raise ArgumentTypeError("the path is empty")
    return text


def check_readable(path: str | Path, option: str, what: str) -> None:
    """Raise UsageError unless this is a file that can be read. `what`: what to pass instead."""
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise UsageError(f"{option}: {path}: {error.strerror}. Pass the path of {what}") from None


def check_writable(path: str | None, option: str) -> None:
    """Raise UsageError if a file is to be written in place of a folder, or into one that does not exist."""
    if path is not None and not Path(path).parent.is_dir():
        raise UsageError(f"{option}: {Path(path).parent} is not a directory. Create it first")
    if path is not None and Path(path).is_dir():
        raise UsageError(f"{option}: {path} is a directory. Name a file in it")


def check_checkpoint_folder(folder: str) -> None:
    """Raise UsageError unless this path is a folder."""
    if not Path(folder).is_dir():
        raise UsageError(f"{folder} does not exist or is not a folder. Pass the folder of save_checkpoint")


def size_of(option: str, text: str) -> int:
    """Parse a size in bytes, which must have a unit."""
    try:
        size = parse_size(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
    if text.strip()[-1:].isdigit():
        raise UsageError(f"{option} {text} has no unit: write it as in {text.strip()}GB")
    return size


def module_and_function(text: str) -> tuple[str, str]:
    """Split `module:function`. Raises PlanError if the top-level module does not exist."""
    module, _, function = text.partition(":")
    if not function or not all(part.isidentifier() for part in module.split(".")):
        raise PlanError(f'--model {text}: write module:function, such as "my_models:llama_7b"')
    if "" not in sys.path:
        sys.path.insert(0, "")
    top = module.partition(".")[0]
    if top not in sys.modules and importlib.util.find_spec(top) is None:
        raise no_module(module, top)
    return module, function


def no_module(name: str, missing: str) -> PlanError:
    """Make the error for a module of `--model` that does not exist."""
    return PlanError(
        f"--model {name}:...: there is no module {missing}. Run this in the directory that has it"
    )


def shape_and_type(text: str) -> tuple[list[int], str]:
    """Split the description of an input, such as "2x1024:int64"."""
    found = re.fullmatch(r"(\d+(?:x\d+)*):(\w+)", text)
    sizes = [int(size) for size in found[1].split("x")] if found is not None else []
    if found is None or not all(sizes):
        raise bad_batch(text)
    return sizes, found[2]


def bad_batch(text: str) -> PlanError:
    """Make the error for a `--batch` that is not a shape with a dtype."""
    return PlanError(f'--batch {text}: write the shape and dtype of an input, such as "2x1024:int64"')


def script_of(options: Namespace) -> tuple[list[str], bool]:
    """Return the script or module that `as-deepspeed` runs, followed by its arguments.

    Also returns whether it is `accelerate launch`.
    """
    target = options.m or [options.script, *options.arguments]
    if not target or target[0] is None:
        raise UsageError("no script is given. Pass one, or -m and a module")
    launches = not options.m and target[:2] == ["accelerate", "launch"] and not Path("accelerate").is_file()
    if not (options.m or launches or Path(target[0]).is_file()):
        raise UsageError(f"there is no script {target[0]}. For a module write -m {target[0]}")
    return target, launches
