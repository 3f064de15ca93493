"""Make memory plans from a model and a configuration."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from zero_full.comm.topology import marked_as_expert, marked_as_split
from zero_full.config import Config, Resolved, resolve
from zero_full.config.json_parser import read
from zero_full.config.resolve import Transport, communication_values
from zero_full.config.rules import MICRO, TRAIN
from zero_full.construct import outside_recording
from zero_full.errors import ConfigError, PlanError
from zero_full.optim import served_stages
from zero_full.pipeline.module import PipelineModule
from zero_full.plan.activations import PassBytes, pass_bytes
from zero_full.plan.forecast import Forecast, ModelWork
from zero_full.plan.machine_file import MachineRates, check_rates, read_rates
from zero_full.plan.result import Plan
from zero_full.plan.simulation import Cluster, Simulation
from zero_full.plan.work import WorkRecorder
from zero_full.shard.group.dtensors import is_dtensor
from zero_full.start.argument_checks import check_model
from zero_full.start.dtensor_checks import check_dtensor_options
from zero_full.start.from_config import settings_of

STAGES = (0, 1, 2, 3)
UNKNOWN = PassBytes(0, None)  # without inputs


def plan(
    model: nn.Module,
    config: Any,
    world: int,
    *,
    inputs: Sequence[Any] = (),
    device: str = "cuda",
    expert_parallel: int | None = None,
    tensor: int | None = None,
    pipe: int | None = None,
    machine: str | Path | MachineRates | None = None,
    work: ModelWork | None = None,
) -> Plan:
    """Predict the memory of the largest of `world` data-parallel ranks. Arguments are those of `plan_stages`.

    Without inputs, activations are unknown. `work`: the operations to forecast, of a model that cannot be
    called, such as `fit` makes.
    """
    cluster = Cluster(world, expert_parallel, device, tensor)
    [made] = _plans(model, config, cluster, inputs, pipe, None, machine, work)
    return made


def model_work(model: nn.Module, config: Any, world: int, inputs: Sequence[Any]) -> ModelWork:
    """Record the operations of a micro-batch of this model, for `plan`."""
    recorder = WorkRecorder()
    dtypes = settings_of(_resolved(config, world, "cpu").config).dtypes.for_model(model)
    pass_bytes(model, inputs, dtypes, recorder=recorder)
    return ModelWork(recorder, inputs)


def plan_stages(
    model: nn.Module,
    config: Any,
    world: int,
    *,
    inputs: Sequence[Any] = (),
    device: str = "cuda",
    expert_parallel: int | None = None,
    tensor: int | None = None,
    pipe: int | None = None,
    machine: str | Path | MachineRates | None = None,
) -> list[Plan]:
    """Make a plan for every stage that the optimizer supports, regardless of the config's stage.

    model    the model of one rank, with only that rank's experts; or a PipelineModule
    config   a dict or the path of a JSON file, as for `initialize`; batch sizes may be missing
    inputs   tensors like a micro-batch's positional inputs, possibly on the meta device, and the labels of a
             PipelineModule as the last; without them activations are unknown and missing in the peak
    device   the device type of the run; only "cpu" uses shared-memory windows
    expert_parallel  the number of consecutive ranks with different experts, if the model has experts
    tensor   the number of tensor-parallel ranks, beside `world` data-parallel ones; None: that of the mesh
             that has cut the model, if any
    pipe     the ranks of a pipeline, beside `world` data-parallel ones; None: the PipelineModule's
             `num_stages`
    machine  the file of `doctor --measure --out` or its rates, to forecast the time of a step, too
    """
    cluster = Cluster(world, expert_parallel, device, tensor)
    return _plans(model, config, cluster, inputs, pipe, STAGES, machine)


def _plans(
    model: nn.Module,
    config: Any,
    cluster: Cluster,
    inputs: Sequence[Any],
    pipe: int | None,
    stages: Sequence[int] | None,
    machine: str | Path | MachineRates | None,
    work: ModelWork | None = None,
) -> list[Plan]:
    """Make a plan for each of `stages` that the optimizer and the model support; None: for the config's."""
    rates = read_rates(machine) if isinstance(machine, str | Path) else machine
    if pipe is not None and pipe < 1:
        raise PlanError(f"pipe is {pipe}, but must be a number of ranks above 0")
    if pipe is not None and not isinstance(model, PipelineModule):
        raise PlanError(
            f"pipe is {pipe}, but the model is no PipelineModule, whose layers could be divided into stages"
        )
    cluster = replace(cluster, tensor=_tensor_ranks(model, cluster.tensor))
    resolved = _resolved(config, cluster.world, cluster.device)
    if stages is not None:
        with suppress(ValueError):  # an unknown optimizer name, on which the first plan raises
            stages = STAGES if (chosen := resolved.config.optimizer) is None else served_stages(chosen.type)
    if rates is not None:
        places = (pipe or model.num_stages) if isinstance(model, PipelineModule) else 1
        check_rates(rates, cluster.device, cluster.world * (cluster.tensor or 1) * places)
    of_model = work or ModelWork(WorkRecorder(), inputs)
    if isinstance(model, PipelineModule):
        return [
            _plan_pipeline(model, each, cluster, of_model, pipe, rates)
            for each in _at(resolved, stages, highest=1)
        ]
    forecast = None if rates is None else Forecast(rates, of_model)
    model_pass = _model_pass(model, resolved.config, inputs, forecast)
    saved = model_pass.saved if inputs else None
    return [
        _plan(model, each, cluster, saved, model_pass, forecast=forecast)
        for each in _at(resolved, stages, highest=3)
    ]


def _at(resolved: Resolved, stages: Sequence[int] | None, highest: int) -> list[Resolved]:
    """Return the configuration at each of these stages up to `highest`; None: at its own stage."""
    return [resolved] if stages is None else [_at_stage(resolved, each) for each in stages if each <= highest]


def _plan_pipeline(
    model: PipelineModule,
    resolved: Resolved,
    cluster: Cluster,
    of_model: ModelWork,
    pipe: int | None,
    rates: MachineRates | None,
) -> Plan:
    """Return the plan of the place with the highest peak, with those of all places."""
    from zero_full.plan import pipeline_stages as stages_of  # plans of other models need no pipelining
    from zero_full.plan.pipeline_time import PipelineForecast

    if cluster.tensor is not None or cluster.experts is not None:
        raise PlanError(
            "tensor parallelism and experts are not supported inside a pipeline stage. Plan one of them alone"
        )
    try:
        places = stages_of.places_of(model, pipe, resolved.config)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise PlanError(str(error)) from error
    inputs = () if of_model.unknown else of_model.inputs
    sizes = stages_of.stage_bytes(places, resolved.config, inputs, rates is not None) if inputs else []
    owned = (p.numel() for m in places for name, p in m.named_parameters() if not m.is_copy(name))
    numel, plans = sum(owned), []
    for module in places:
        part, activation_bytes, received = stages_of.part_of(module, resolved, sizes)
        seen_from = stages_of.PipelineCluster(**vars(cluster), module=module)
        forecast = None
        if rates is not None:
            forecast = PipelineForecast(rates, of_model, module, sizes)
        simulation = stages_of.PlaceSimulation
        made = _plan(module, resolved, seen_from, activation_bytes, UNKNOWN, simulation, forecast)
        plans.append(replace(made, numel=numel, received=received, pipeline=part))
    slowest = max((each.step_time for each in plans if each.step_time), key=lambda t: t.total, default=None)
    return replace(max(plans, key=lambda each: each.peak), places=tuple(plans), step_time=slowest)


def _resolved(config: Any, world: int, device: str) -> Resolved:
    """Resolve the configuration, with a micro-batch size of 1 if it has no batch sizes."""
    given: Any = config.model_dump(exclude_unset=True) if isinstance(config, Config) else config
    if isinstance(given, str | Path):
        with suppress(ConfigError):  # `resolve` raises it again
            content = read(Path(given)).value
            given = content if _lacks_batch(content) else given
    transport: Transport = "shared memory" if device == "cpu" else "accelerator"
    return resolve({**given, MICRO: 1} if _lacks_batch(given) else given, world, transport)


def _lacks_batch(config: Any) -> bool:
    return isinstance(config, Mapping) and config.get(TRAIN) is None and config.get(MICRO) is None


def _at_stage(resolved: Resolved, stage: int) -> Resolved:
    zero = resolved.config.zero_optimization
    given = {
        name: getattr(zero, name)
        for name in ("overlap_comm", "reduce_bucket_size")
        if resolved.origins[f"zero_optimization.{name}"] == "user"
    }
    found = communication_values(stage, resolved.transport, given)
    zero = zero.model_copy(update={"stage": stage, **found})
    return replace(resolved, config=resolved.config.model_copy(update={"zero_optimization": zero}))


@outside_recording
def _plan(
    model: nn.Module,
    resolved: Resolved,
    cluster: Cluster,
    activation_bytes: int | None,
    model_pass: PassBytes = UNKNOWN,
    simulation: type[Simulation] = Simulation,
    forecast: Forecast | None = None,
) -> Plan:
    recorder = None if forecast is None else WorkRecorder(of_runtime=True)
    try:
        check_model(model)
        _check_experts(model, cluster)
        for name, param in model.named_parameters():
            if is_dtensor(param):
                check_dtensor_options(name, settings_of(resolved.config))
        simulated = simulation(model, resolved, cluster, model_pass.arrivals, recorder)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:  # the errors that `initialize` would raise
        raise PlanError(str(error)) from error
    found: dict[str, Any] = {"sent": simulated.sent, **simulated.peaks, **simulated.kept()}
    for phase in simulated.phases:  # each kind is of the phase in which it is largest
        for kind in ("moments", "update", "sent", "saved"):
            found[kind] = max(found[kind], getattr(phase, kind))
    if forecast is not None:
        found |= forecast.of(simulated)
    on_cpu = cluster.device == "cpu"  # which keeps the memory of gradients from step to step
    return Plan(
        stage=resolved.config.zero_optimization.stage,
        world=cluster.world,
        numel=sum(p.numel() for p in model.parameters()),
        phases=simulated.phases,
        activations=activation_bytes,
        passes=None if on_cpu else _largest_sum(simulated.moments, model_pass.moments),
        tensor_ranks=cluster.tensor or 1,
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
    if size is not None and size > 1 and not experts:
        raise PlanError(
            f"expert_parallel is {size}, but no parameter of the model is marked as an expert (allreduce = "
            "False). Mark them, or leave the argument out"
        )
    if size is not None and (size < 1 or cluster.world % size):
        raise PlanError(f"expert_parallel {size} does not divide the {cluster.world} ranks")


def _largest_sum(runtime: Sequence[tuple[str, int]], model: Sequence[tuple[str, int]] | None) -> int | None:
    """Return the largest sum of both at one moment; None: unknown. See [Note: moments of a pass].

    `runtime` has the moments of all passes. A parameter without a gradient in the model's own pass has the
    bytes of the moment before.
    """
    if model is None:
        return None
    of_model, largest, now = dict[str, int](), 0, 0
    for name, size in model:  # a parameter of several recomputed parts has several
        of_model[name] = max(size, of_model.get(name, 0))
    for name, size in runtime:
        now = of_model.get(name, now)
        largest = max(largest, size + now)
    return largest


def _model_pass(
    model: nn.Module, config: Config, inputs: Sequence[Any], forecast: Forecast | None
) -> PassBytes:
    if not inputs:
        return UNKNOWN
    dtypes = settings_of(config).dtypes.for_model(model)
    return pass_bytes(
        model, inputs, dtypes, recorder=None if forecast is None else forecast.of_model.recorder
    )
