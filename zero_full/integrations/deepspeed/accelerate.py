"""Adapt accelerate, when this process imports it, in two functions; report versions that were not tested.

Without an accelerator, accelerate chooses no backend for a DeepSpeed run, and then every rank sees one
process only. So `PartialState` gets gloo. And `Accelerator(cpu=True)` ignores a DeepSpeed plugin without a
word: it trains DDP. So it warns.
"""

import logging
import os
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import torch

log = logging.getLogger("zero_full")
SWITCH = "ACCELERATE_USE_DEEPSPEED"  # set by `accelerate launch`, a plugin, and TrainingArguments
IGNORED = (
    "accelerate ignores the DeepSpeed plugin, because this run is on the CPU by request (cpu=True, use_cpu "
    "or --cpu): it trains %s. Remove the request; zero_full runs on CPUs without it"
)


TESTED = {  # the oldest version that was tested, and the first of the next series
    "transformers": ("5.23", "6"),
    "accelerate": ("1.15", "2"),
    "peft": ("0.21", "1"),
    "trl": ("1.16", "2"),
}


def adapt(accelerator: ModuleType) -> None:
    """Adapt the module accelerate.accelerator, which has just been imported."""
    state, main = accelerator.PartialState, accelerator.Accelerator
    state.__init__ = _with_gloo(state.__init__)
    main.__init__ = _with_warning(main.__init__)
    if (others := untested()) and os.environ.get("RANK", "0") == "0":
        log.warning("zero_full stands in for DeepSpeed, and was not tested with %s", ", ".join(others))


def untested() -> list[str]:
    """Return Hugging Face's installed libraries whose versions were not tested, with the tested ones."""
    others = []
    for name, (oldest, beyond) in TESTED.items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        if not _numbers(oldest) <= _numbers(installed) < _numbers(beyond):
            others.append(f"{name} {installed} (tested: from {oldest} to before {beyond})")
    return others


def _numbers(written: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(part) for part in written.split(".")[:2] if part.isdecimal())


def _is_on() -> bool:
    return os.environ.get(SWITCH, "false").lower() == "true"


def _with_gloo(construct: Any) -> Any:
    """Return `PartialState.__init__` with the backend gloo for a DeepSpeed run on CPUs."""

    @wraps(construct)
    def __init__(self: Any, cpu: bool = False, **kwargs: Any) -> None:  # noqa: N807
        launched = os.environ.get("LOCAL_RANK", "-1") != "-1"
        if _is_on() and launched and not cpu and not torch.accelerator.is_available():
            kwargs["backend"] = kwargs.get("backend") or "gloo"
        construct(self, cpu, **kwargs)

    return __init__


def _with_warning(construct: Any) -> Any:
    """Return `Accelerator.__init__` with a warning if the result is not a DeepSpeed run."""

    @wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        construct(self, *args, **kwargs)
        kind = str(getattr(self.distributed_type, "value", self.distributed_type))
        if _is_on() and kind != "DEEPSPEED" and self.is_main_process:
            log.warning(IGNORED, "alone" if kind == "NO" else f"by {kind}")

    return __init__
