"""Save, check and restore the states of the random number generators that a training loop uses."""

import random
import sys
from typing import Any

import torch


def rng_states() -> dict[str, Any]:
    """Return the generator states of Python, torch, numpy (if imported) and this rank's accelerator."""
    found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy"] = numpy.random.get_state()
    if torch.accelerator.is_available():
        found["accelerator"] = torch.get_device_module().get_rng_state()
    return found


def check_rng_states(found: dict[str, Any] | None) -> None:
    """Raise the error that `restore_rng_states` would raise, before anything is loaded."""
    if found is None:
        return
    random.Random().setstate(found["python"])
    torch.Generator().set_state(found["torch"])
    if "numpy" in found:
        import numpy

        numpy.random.RandomState().set_state(found["numpy"])


def restore_rng_states(found: dict[str, Any]) -> None:
    """Set the generators to saved states. An accelerator's state is skipped in a process without one."""
    random.setstate(found["python"])
    torch.set_rng_state(found["torch"])
    if "numpy" in found:
        import numpy

        numpy.random.set_state(found["numpy"])
    if "accelerator" in found and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(found["accelerator"])
