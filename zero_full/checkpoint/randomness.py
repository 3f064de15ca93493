"""The states of the generators of random numbers that a training loop draws from."""

import random
import sys
from typing import Any

import torch


def states() -> dict[str, Any]:
    """Of Python, numpy where it is in use, torch, and this rank's accelerator."""
    found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy"] = numpy.random.get_state()
    if torch.accelerator.is_available():
        found["accelerator"] = torch.get_device_module().get_rng_state()
    return found


def check(found: dict[str, Any] | None) -> None:
    """Raise if `restore` would."""
    if found is None:
        return
    random.Random().setstate(found["python"])
    torch.Generator().set_state(found["torch"])
    if "numpy" in found:
        import numpy

        numpy.random.RandomState().set_state(found["numpy"])


def restore(found: dict[str, Any]) -> None:
    """Go on where `states` was called, as far as the same generators are here."""
    random.setstate(found["python"])
    torch.set_rng_state(found["torch"])
    if "numpy" in found:
        import numpy  # in use there, hence here sooner or later

        numpy.random.set_state(found["numpy"])
    if "accelerator" in found and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(found["accelerator"])
