"""Load a run from a checkpoint folder; save and load one rank's state dict of a run."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from zero_full.checkpoint import (
    Extras,
    LoadOptions,
    Resumed,
    load_checkpoint,
    unfinished,
)
from zero_full.shard.access.gathered_parameters import fitting_chunks, load_own_state_dict, own_state_dict
from zero_full.shard.contents.state import RankPart
from zero_full.shard.step.optimizer import ZeroOptimizer

log = logging.getLogger("zero_full")
KEYS = ("module", "optimizer", "lr_scheduler", "counters")  # of a run's state dict


def load_run(
    module: nn.Module,
    optimizer: ZeroOptimizer,
    load_dir: str | Path,
    tag: str | None,
    options: LoadOptions,
    extras: Extras,
) -> Resumed | None:
    """Load a checkpoint. If the folder has none, warn, and return None."""
    found = load_checkpoint(module, optimizer, load_dir, None if tag is None else str(tag), options, extras)
    if found is None:
        names = "".join(f". Incomplete: {path.name}" for path in unfinished(Path(load_dir)))
        log.warning("nothing was loaded: %s has no checkpoint%s", load_dir, names)
    return found


def run_state(
    module: nn.Module, optimizer: ZeroOptimizer, lr_scheduler: Any, counters: Mapping[str, Any]
) -> dict[str, Any]:
    """Return this rank's part of a run's state."""
    return {
        "module": own_state_dict(module, optimizer),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": lr_scheduler.state_dict() if lr_scheduler is not None else None,
        **({"schedule": type(lr_scheduler).__name__} if lr_scheduler is not None else {}),
        "counters": dict(counters),
    }


def load_run_state(
    module: nn.Module, optimizer: ZeroOptimizer, lr_scheduler: Any, state: Mapping[str, Any]
) -> None:
    """Load what `run_state` returned on this rank, without its counters. Raises before anything changes."""
    optimizer.check_open("load_state_dict")
    with optimizer.announces_failure("load_state_dict"):
        _check_run_state(state, lr_scheduler)
        fitting_chunks(module, optimizer, RankPart(state["module"]["tensors"], {}))
    optimizer.load_state_dict(state["optimizer"])  # may raise, so it comes before anything changes
    load_own_state_dict(module, optimizer, state["module"])
    if lr_scheduler is not None and state["lr_scheduler"] is not None:
        lr_scheduler.load_state_dict(state["lr_scheduler"])


def _check_run_state(state: Mapping[str, Any], lr_scheduler: Any) -> None:
    if missing := [key for key in KEYS if key not in state]:
        raise ValueError(f"load_state_dict needs the result of an engine's state_dict; {missing} are missing")
    if lr_scheduler is not None and state["lr_scheduler"] is None:
        raise ValueError(
            f"the state has no schedule, so this run's {type(lr_scheduler).__name__} would not continue at "
            'the loaded step. To keep the schedule unchanged, set state["lr_scheduler"] = '
            "engine.lr_scheduler.state_dict() before the load"
        )
    kind = type(lr_scheduler).__name__
    if lr_scheduler is not None and state.get("schedule", kind) != kind:  # torch's would take any state
        raise ValueError(
            f"the state is of a run with a {state['schedule']}, and this run has a {kind}. Pass a schedule "
            "of the same class to initialize"
        )
    if lr_scheduler is None and state["lr_scheduler"] is not None:
        log.warning("the schedule's state is not loaded: this run has no schedule. Pass one to initialize")
