"""The command `python -m zero_full doctor`: report on this machine, and measure its bandwidths."""

from zero_full.doctor.machine import accelerators, distributed, launcher, problems, report

__all__ = ["accelerators", "distributed", "launcher", "problems", "report"]
