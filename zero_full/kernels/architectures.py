"""GPU architectures: which ones to compile for, and which devices a library serves.

An architecture is written as for nvcc: "90" is machine code for compute capability 9.0 and later 9.x, "90a"
for exactly 9.0, and "90+PTX" adds code that the driver translates for any newer device.
"""

import os
import re
from collections.abc import Collection, Sequence

from zero_full.kernels.toolchain import BuildError

DEFAULT = "80;90;100+PTX"  # without a device: those of these that nvcc knows
VARIABLE = "ZERO_FULL_CUDA_ARCHS"
Device = tuple[int, int]  # a compute capability


def parse(text: str) -> tuple[str, ...]:
    """Parse a list of architectures such as "8.0, 9.0+PTX"."""
    found = []
    for each in re.split(r"[;, ]+", text.strip()):
        match = re.fullmatch(r"(\d+)\.?(\d?)(a?)(\+PTX)?", each)
        if not match:
            raise BuildError(
                f"{VARIABLE}={text!r}: {each!r} is not a GPU architecture. Write 90, 9.0, 90a or 90+PTX"
            )
        found.append("".join(match.groups(default="")))
    return tuple(found)


def options(architectures: Sequence[str]) -> list[str]:
    """Return nvcc's options for these architectures."""
    flags = []
    for each in architectures:
        number = each.removesuffix("+PTX")
        flags += ["-gencode", f"arch=compute_{number},code=sm_{number}"]
        if number != each:
            flags += ["-gencode", f"arch=compute_{number},code=compute_{number}"]
    return flags


def chosen(known: Collection[int], devices: Collection[Device]) -> tuple[str, ...]:
    """Return the architectures to compile for, with an nvcc that knows `known`.

    They are those of ZERO_FULL_CUDA_ARCHS; else those of the devices; else those of DEFAULT that nvcc knows.
    """
    if text := os.environ.get(VARIABLE):
        asked = parse(text)
        if unknown := [each for each in asked if _number(each) not in known]:
            raise BuildError(
                f"{VARIABLE}={text!r}: nvcc does not support {', '.join(unknown)}, only {_listed(known)}"
            )
        return asked
    if devices:
        return tuple(sorted({_best(device, known) for device in devices}))
    usual = [each for each in map(_number, parse(DEFAULT)) if each in known]
    if not usual:
        raise BuildError(f"nvcc supports none of {DEFAULT}, only {_listed(known)}: set {VARIABLE}")
    return (*map(str, usual[:-1]), f"{usual[-1]}+PTX")


def _best(device: Device, known: Collection[int]) -> str:
    number = 10 * device[0] + device[1]
    if number in known:
        return str(number)
    older = [each for each in known if each < number]
    if not older:
        raise BuildError(
            f"nvcc does not support this GPU ({number}), only {_listed(known)}: install an older CUDA "
            "toolkit, and set CUDA_HOME to its directory"
        )
    return f"{max(older)}+PTX"  # for the driver to translate


def serves(architectures: Collection[str], device: Device) -> bool:
    """Return whether code for one of these architectures runs on the device."""
    return is_native(architectures, device) or any(
        each.endswith("+PTX") and "a" not in each and _number(each) <= 10 * device[0] + device[1]
        for each in architectures
    )


def is_native(architectures: Collection[str], device: Device) -> bool:
    """Return whether one of these architectures is machine code of the device, which needs no translation."""
    for each in architectures:
        major, minor = divmod(_number(each), 10)
        if (major, minor) == device or ("a" not in each and major == device[0] and minor < device[1]):
            return True
    return False


def _number(architecture: str) -> int:
    return int(architecture.removesuffix("+PTX").removesuffix("a"))


def _listed(known: Collection[int]) -> str:
    return ", ".join(map(str, sorted(known)))
