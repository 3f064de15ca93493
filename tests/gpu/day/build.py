"""Finds the operators or compiles them, and runs each once."""

import sys
from time import perf_counter

import torch

from tests.gpu import samples
from tests.gpu.day.rows import STAND_IN, parser_for, say
from zero_full.kernels import load

NUMEL = 50_001


def main() -> int:
    """A row for each library and each operator; 1 if there is none for the device."""
    asked = parser_for(__doc__).parse_args()
    device = torch.device(asked.device)
    missing = 0
    for part in dict.fromkeys(("cpu", asked.device)):
        began = perf_counter()
        fine = load.compiled_for(torch.device(part))
        spent, where = round(perf_counter() - began, 1), dict(load.rows())[part]
        missing += not fine
        say(library=part, fine=fine, seconds=spent, which=where.rpartition("/")[2])
    if missing:
        return 1
    stand_in = {STAND_IN: "the CPU's operators beside themselves"} if device.type == "cpu" else {}
    for name, sample in samples.one_of_each(NUMEL).items():
        samples.assert_same(sample, samples.call(sample, device), samples.call(sample, samples.CPU))
        say(operator=name, fine=True, **stand_in)
    return 0


if __name__ == "__main__":
    sys.exit(main())
