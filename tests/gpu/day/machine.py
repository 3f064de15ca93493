"""The machine: versions, driver, compiler, memory, and how fast it copies and multiplies."""

import platform
import shutil
import subprocess
import sys
from functools import partial
from importlib import metadata

import torch

from tests.gpu.day.rows import STAND_IN, numbers, parser_for, say, seconds_of

PACKAGES = ("torch", "pydantic", "safetensors", "pytest", "hypothesis", "numpy", "triton")


def said_by(*command: str) -> str:
    """The last line of what a program prints; empty if it is not there or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout.strip().rpartition("\n")[2] if done.returncode == 0 else ""


def version_of(name: str) -> str:
    """Of an installed package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


def devices(device: torch.device) -> None:
    """A row for each."""
    if device.type == "cpu":
        say(device=platform.processor() or platform.machine(), **{STAND_IN: "a CPU"})
        return
    for number in range(torch.cuda.device_count()):
        known = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        say(
            device=f"cuda:{number}",
            name=known.name,
            capability=f"{known.major}.{known.minor}",
            multiprocessors=known.multi_processor_count,
            **{"L2, MiB": known.L2_cache_size // 2**20},
            **{"memory, GiB": round(total / 2**30, 1), "free, GiB": round(free / 2**30, 1)},
        )


def main() -> int:
    """Look, then measure."""
    parser = parser_for(__doc__)
    parser.add_argument("--numel", type=int, default=2**30, help="fp32 numbers to be copied")
    parser.add_argument("--width", type=int, default=8192, help="of the matrices")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    rows = {
        "Python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.machine()}",
        "glibc": "".join(platform.libc_ver()[1:]),
        **{name: version_of(name) for name in PACKAGES},
        "torch is built for CUDA": torch.version.cuda or "no",
        "driver": said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "nvcc": said_by("nvcc", "--version"),
        "g++": said_by("g++", "-dumpfullversion"),
        "compute-sanitizer": shutil.which("compute-sanitizer") or "not on the path",
    }
    if device.type == "cuda":
        rows["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[attr-defined]
    for what, value in rows.items():
        say(what=what, value=value or "missing")
    devices(device)
    for command in (("nvidia-smi", "topo", "-m"), (sys.executable, "-m", "zero_full", "doctor")):
        if shutil.which(command[0]):  # what they print is for the log
            subprocess.run(command, timeout=120, check=False)
    source = numbers(asked.numel, device)
    target = torch.empty_like(source)
    spent = seconds_of(partial(target.copy_, source), device, 10)
    say(measured="copy in device memory, GB/s read and written", value=round(8e-9 * asked.numel / spent, 1))
    host = torch.empty(asked.numel // 4, pin_memory=device.type == "cuda")
    for name, one, other in (("from", source, host), ("to", host, source)):
        goal, part = other[: len(host)], one[: len(host)]
        spent = seconds_of(partial(goal.copy_, part, non_blocking=True), device, 5)
        say(measured=f"copy {name} the device, pinned, GB/s", value=round(4e-9 * len(host) / spent, 1))
    del target, host
    a = numbers(asked.width**2, device, torch.bfloat16).view(asked.width, asked.width)
    spent = seconds_of(lambda: a @ a, device, 10)
    say(measured=f"bf16 product of {asked.width}, TFLOP/s", value=round(2e-12 * asked.width**3 / spent, 3))
    return 0


if __name__ == "__main__":
    sys.exit(main())
