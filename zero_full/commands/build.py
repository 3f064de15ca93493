"""`python -m zero_full build`."""

from argparse import Namespace

from zero_full import doctor
from zero_full.commands.command import Command


def _run(options: Namespace) -> int:
    load, reason = doctor.imported("zero_full.kernels.load")
    if load is None:
        print(f"nothing can be built: torch is not usable: {reason}")
        return 1
    from zero_full.kernels.build import PARTS
    from zero_full.kernels.toolchain import BuildError

    failed = 0
    for part in PARTS:
        try:
            print(f"{part}: {load.build_now(part)}")
        except (BuildError, OSError) as error:
            failed += part == "cpu"
            print(f"{part}: not built: {error}")
    return failed


COMMAND = Command(
    "build",
    "compile the operators for this machine, again if that failed before",
    ("",),
    _run,
)
