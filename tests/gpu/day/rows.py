"""What parts print: rows, as lines of JSON."""

import argparse
import json
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

STAND_IN = "stand-in"  # the key by which a row of a rehearsal says what it is instead


def say(**row: Any) -> None:
    """Print a row. `fine` is the verdict, where there is one."""
    print(json.dumps(row, default=str), flush=True)


def parser_for(text: str | None) -> argparse.ArgumentParser:
    """A parser with what every part takes."""
    parser = argparse.ArgumentParser(description=(text or "").partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes of a rehearsal")
    return parser


def finish(device: torch.device) -> None:
    """Return when the device has done all that is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], Any], device: torch.device, times: int) -> float:
    """Of one call, on average, after a first one that is not counted."""
    work()
    finish(device)
    began = perf_counter()
    for _ in range(times):
        work()
    finish(device)
    return (perf_counter() - began) / times


def numbers(numel: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random ones: zeros can be faster than real data."""
    return torch.randn(numel, device=device, generator=torch.Generator(device).manual_seed(0)).to(dtype)
