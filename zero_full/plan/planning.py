"""Make memory plans from a model and a configuration."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zero_full.comm.topology import marked_as_expert, marked_as_split
from zero_full.config import Config, Resolved, resolve
from zero_full.config.json_parser import read
from zero_full.config.rules import MICRO, TRAIN
from zero_full.construct import outside_recording
from zero_full.errors import ConfigError, PlanError
from zero_full.optim import served_stages
from zero_full.pipeline.module import PipelineModule
from zero_full.plan.activations import activations
from zero_full.plan.result import Plan
from zero_full.plan.simulation import Cluster, Simulation
from zero_full.shard.group.dtensors import is_dtensor
from zero_full.start.argument_checks import check_model
from zero_full.start.dtensor_checks import check_dtensor_options
from zero_full.start.from_config import settings_of

STAGES = (0, 1, 2, 3)


def plan(
    model: nn.Module,
    config: Any,
    world: int,
    *,
    inputs: Sequence[Tensor] = (),
    device: str = "cuda",
    expert_parallel: int | None = None,
    tensor: int | None = None,
) -> Plan:
    """Predict the memory of the largest of `world` data-parallel ranks. Arguments are those of `plan_stages`.

    Without inputs, activations are unknown.
    """
    _check_kind(model)
    ranks = _tensor_ranks(model, tensor)
    resolved, cluster = _resolved(config, world), Cluster(world, expert_parallel, device, ranks)
    return _plan(model, resolved, cluster, _activations(model, resolved.config, inputs))


def plan_stages(
    model: nn.Module,
    config: Any,
    world: int,
    *,
    inputs: Sequence[Tensor] = (),
    device: str = "cuda",
    expert_parallel: int | None = None,
    tensor: int | None = None,
) -> list[Plan]:
    """Make a plan for every stage that the optimizer supports, regardless of the config's stage.

    model    the model of one rank, with only that rank's experts
    config   a dict or the path of a JSON file, as for `initialize`; batch sizes may be missing
    inputs   tensors like a micro-batch's positional inputs, possibly on the meta device; without them
             activations are unknown and missing in the peak
    device   the device type of the run; only "cpu" uses shared-memory windows
    expert_parallel  the number of consecutive ranks with different experts, if the model has experts
    tensor   the number of tensor-parallel ranks, beside `world` data-parallel ones; None: that of the mesh
             that has cut the model, if any
    """
    _check_kind(model)
    ranks = _tensor_ranks(model, tensor)
    resolved, cluster = _resolved(config, world), Cluster(world, expert_parallel, device, ranks)
    activation_bytes = _activations(model, resolved.config, inputs)
    stages: Sequence[int] = STAGES
    with suppress(ValueError):  # an unknown optimizer name, on which the first plan raises
        stages = STAGES if (chosen := resolved.config.optimizer) is None else served_stages(chosen.type)
    return [_plan(model, _at_stage(resolved, stage), cluster, activation_bytes) for stage in stages]


def _check_kind(model: nn.Module) -> None:
    """Raise PlanError for a model of several pipeline stages."""
    if isinstance(model, PipelineModule):
        raise PlanError(
            "a plan knows no pipelines: the activations in flight depend on the schedule. Plan the layers of "
            "one stage, as an nn.Sequential on its data-parallel ranks"
        )


def _resolved(config: Any, world: int) -> Resolved:
    """Resolve the configuration, with a micro-batch size of 1 if it has no batch sizes."""
    given: Any = config.model_dump(exclude_unset=True) if isinstance(config, Config) else config
    if isinstance(given, str | Path):
        with suppress(ConfigError):  # `resolve` raises it again
            content = read(Path(given)).value
            given = content if _lacks_batch(content) else given
    return resolve({**given, MICRO: 1} if _lacks_batch(given) else given, world)


def _lacks_batch(config: Any) -> bool:
    return isinstance(config, Mapping) and config.get(TRAIN) is None and config.get(MICRO) is None


def _at_stage(resolved: Resolved, stage: int) -> Resolved:
    update: dict[str, Any] = {"stage": stage}
    if resolved.origins["zero_optimization.overlap_comm"] == "derived":
        update["overlap_comm"] = stage == 3
    zero = resolved.config.zero_optimization.model_copy(update=update)
    return replace(resolved, config=resolved.config.model_copy(update={"zero_optimization": zero}))


@outside_recording
def _plan(model: nn.Module, resolved: Resolved, cluster: Cluster, activation_bytes: int | None) -> Plan:
    try:
        check_model(model)
        _check_experts(model, cluster)
        for name, param in model.named_parameters():
            if is_dtensor(param):
                check_dtensor_options(name, settings_of(resolved.config))
        simulated = Simulation(model, resolved, cluster)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:  # the errors that `initialize` would raise
        raise PlanError(str(error)) from error
    found = {"sent": simulated.sent, **simulated.peaks, **simulated.kept()}
    for phase in simulated.phases:  # each kind is of the phase in which it is largest
        for kind in ("moments", "update", "sent", "saved"):
            found[kind] = max(found[kind], getattr(phase, kind))
    return Plan(
        stage=resolved.config.zero_optimization.stage,
        world=cluster.world,
        numel=sum(p.numel() for p in model.parameters()),
        phases=simulated.phases,
        activations=activation_bytes,
        **found,
    )


def _tensor_ranks(model: nn.Module, given: int | None) -> int | None:
    """Return the number of tensor-parallel ranks. Raises PlanError if it is unknown, or not the model's."""
    named, sizes = [*model.named_parameters()], dict[int, str]()
    for name, param in named:
        if is_dtensor(param):
            sizes.setdefault(param.device_mesh.size(), name)  # type: ignore[attr-defined]
    if given is not None and sizes and [*sizes] != [given]:
        size, name = next((size, name) for size, name in sizes.items() if size != given)
        raise PlanError(f"tensor is {given}, but {name} is a DTensor over {size} ranks")
    if given is not None and given > 1 and not sizes and not any(marked_as_split(*each) for each in named):
        raise PlanError(
            f"tensor is {given}, but no parameter of the model is cut. Pass the model of one rank: cut by "
            f"parallelize_module over a mesh of {given} ranks, or with parameters marked as split"
        )
    return given if given is not None else next(iter(sizes), None)


def _check_experts(model: nn.Module, cluster: Cluster) -> None:
    experts = [name for name, p in model.named_parameters() if marked_as_expert(name, p)]
    size = cluster.experts
    if experts and size is None:
        raise PlanError(
            f"{experts[0]} is marked as an expert (allreduce = False). Pass the number of ranks that hold "
            "different experts: expert_parallel=, or --expert-parallel"
        )
    if size is not None and (size < 1 or cluster.world % size):
        raise PlanError(f"expert_parallel {size} does not divide the {cluster.world} ranks")


def _activations(model: nn.Module, config: Config, inputs: Sequence[Tensor]) -> int | None:
    return activations(model, inputs, settings_of(config).dtypes.for_model(model)) if inputs else None
