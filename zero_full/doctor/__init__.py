"""What `python -m zero_full doctor` tells about this machine, and how fast it moves data."""

from zero_full.doctor.machine import accelerators, distributed, launcher, problems, report

__all__ = ["accelerators", "distributed", "launcher", "problems", "report"]
