"""The command `python -m zero_full build`, which compiles the operators."""

from argparse import ArgumentParser, Namespace
from functools import partial

from zero_full.commands.command import Command
from zero_full.doctor import machine as doctor

NO_CUDA = "not built, because this torch has no CUDA: `python -m zero_full build cuda` builds it anyway"


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "part", nargs="?", choices=["cpu", "cuda"], help="default: the parts that the installed torch can use"
    )


def _run(options: Namespace) -> int:
    load, reason = doctor.imported("zero_full.kernels.load")
    if load is None:
        print(f"nothing can be built: torch is not usable: {reason}")
        return 1
    import torch

    from zero_full.kernels.builder import PARTS
    from zero_full.kernels.toolchain import BuildError

    failed = 0
    for part in [options.part] if options.part else PARTS:
        if part == "cuda" and options.part is None and torch.version.cuda is None:
            print(f"{part}: {NO_CUDA}")
            continue
        try:
            print(f"{part}: {load.build_now(part, partial(_report, part))}")
        except (BuildError, OSError) as error:
            failed += part in ("cpu", options.part)
            print(f"{part}: not built: {error}")
    return failed


def _report(part: str, text: str) -> None:
    print(f"{part}: {text}", flush=True)


COMMAND = Command(
    "build",
    "compile the operators for this machine, again if that failed before",
    ("", "cpu"),
    _run,
    _add_arguments,
    more="Without a compiler torch's own operations are used:\nthey give the same results, slower.",
)
