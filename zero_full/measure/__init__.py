"""Measure the rates of this machine from which `plan` forecasts the time of a step.

    python -m zero_full doctor --measure --out machine.json
    torchrun --standalone --nproc-per-node 2 -m zero_full doctor --measure --out machine.json

All ranks measure at once, because the ranks of a run share cores and memory bandwidth.
"""

from zero_full.measure.measure_command import main
from zero_full.measure.rates import measure_rates

__all__ = ["main", "measure_rates"]
