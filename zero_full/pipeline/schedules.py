"""The schedules of `torch.distributed.pipelining`, by the names of the configuration."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from zero_full.errors import ConfigError
from zero_full.pipeline.module import PipelineModule

STEPS = "gradient_accumulation_steps"


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule of torch, and the stages that it needs."""

    torch_name: str
    several: bool = False  # several stages per rank
    placement: str = "loop"
    splits_backward: bool = False  # gradients of inputs first, those of weights later, in the bubble
    since: str = "2.11"  # the oldest torch that runs it over every backend


KINDS = {
    "1f1b": ScheduleKind("Schedule1F1B"),
    "gpipe": ScheduleKind("ScheduleGPipe"),
    "interleaved_1f1b": ScheduleKind("ScheduleInterleaved1F1B", several=True),
    "interleaved_zero_bubble": ScheduleKind(
        "ScheduleInterleavedZeroBubble", several=True, splits_backward=True
    ),
    "zbv": ScheduleKind(
        "ScheduleZBVZeroBubble", several=True, placement="v", splits_backward=True, since="2.13"
    ),
}


def check_schedule(name: str, module: PipelineModule) -> None:
    """Raise ConfigError if this schedule cannot run the module's stages."""
    kind, stages = KINDS[name], module.stages_per_rank
    if kind.several != (stages > 1):
        needs = "several stages per rank" if kind.several else "one stage per rank"
        fitting = [other for other, each in KINDS.items() if each.several == (stages > 1)]
        raise ConfigError(
            f"pipeline.schedule {name!r} needs {needs}, but the PipelineModule has stages_per_rank={stages}. "
            f"Change that, or use one of {', '.join(fitting)}"
        )
    if kind.placement != module.placement:
        raise ConfigError(
            f"pipeline.schedule {name!r} needs a PipelineModule with placement={kind.placement!r}, not "
            f"{module.placement!r}"
        )
    if torch.__version__ < kind.since:  # torch 2.11 sends from a rank to itself, which gloo cannot
        raise ConfigError(
            f"pipeline.schedule {name!r} needs torch {kind.since}, not {torch.__version__}. Use "
            "interleaved_zero_bubble, or a newer torch"
        )
    if kind.splits_backward and module.activation_checkpoint_interval:
        raise ConfigError(
            f"pipeline.schedule {name!r} runs backward in two parts, of which each would recompute the "
            "activations. Set activation_checkpoint_interval to 0, or use a schedule without zero_bubble"
        )


def make_schedule(
    name: str, stages: Sequence[PipelineStage], micro_batches: int, loss_fn: Callable[..., Any]
) -> Any:
    """Return torch's schedule for a number of micro-batches; ConfigError if it cannot run them."""
    kind = KINDS[name]
    made = getattr(pipelining, kind.torch_name)
    try:
        return made([*stages] if kind.several else stages[0], micro_batches, loss_fn, scale_grads=False)
    except ValueError as error:
        ranks = stages[0].group_size
        raise ConfigError(
            f"pipeline.schedule {name!r} cannot run {STEPS} {micro_batches} micro-batches on {ranks} "
            f"pipeline ranks: {error}"
        ) from error
