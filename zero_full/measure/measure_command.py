"""The command `python -m zero_full doctor --measure --out FILE`."""

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist

from zero_full.errors import UsageError
from zero_full.measure.rates import measure_rates
from zero_full.progress import StatusLine
from zero_full.start.launch import init_distributed, read_launcher


def main(options: argparse.Namespace) -> int:
    """Measure this machine's rates with all ranks that the launcher started, and write them to a file."""
    if torch.accelerator.is_available():
        raise UsageError(
            "--out measures CPUs only: on an accelerator the host runs ahead of the device, which the "
            "forecast does not model. Hide the device (CUDA_VISIBLE_DEVICES=) to measure the CPU"
        )
    begin, group = time.perf_counter(), None
    place = read_launcher(os.environ)
    if place is not None and place.world_size > 1:
        init_distributed()
        group = dist.group.WORLD
    is_first = group is None or group.rank() == 0
    with StatusLine(sys.stderr) as line:
        rates = measure_rates(group, line.show if is_first else lambda text: None)
    if is_first:
        rates.write(options.out)
        seconds = time.perf_counter() - begin
        print(f"{options.out}: {rates.machine}, measured in {seconds:.0f} s")
    if group is not None:
        dist.destroy_process_group()
    return 0
