"""The steps of `initialize` for a `PipelineModule` only: groups, checks, and the engine.

The engine and torch's pipelining are imported here by runs with a pipeline, and by no others.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from zero_full.comm.topology import Topology
from zero_full.config import Config
from zero_full.engine.engine import Engine
from zero_full.errors import ConfigError
from zero_full.pipeline.module import PipelineModule
from zero_full.start.from_config import facts_of_config
from zero_full.start.startup_checks import attempt, compare

if TYPE_CHECKING:
    from zero_full.pipeline.tied import Tie


def open_pipeline(module: PipelineModule, given: Mapping[str, Any]) -> Topology:
    """Open the process groups of a pipeline. Every rank must call this.

    given  the groups that were passed to `initialize`; a pipeline takes none
    """
    if named := [name for name, value in given.items() if value is not None]:
        raise ValueError(
            f"{named[0]} with a PipelineModule, which has its groups already. Pass a topology with a `pipe` "
            "group to PipelineModule instead"
        )
    return module.open_topology()


def pipeline_engine(module: PipelineModule, topology: Topology, config: Config) -> Callable[..., Engine]:
    """Check the configuration on all ranks, and return a function that makes the engine. Collective."""
    compare({"configuration": facts_of_config(config)}, Topology(data=topology.pipe))
    ties = attempt(partial(_check, module, topology, config), topology)
    from zero_full.pipeline.engine import PipelineEngine

    return partial(PipelineEngine, topology=topology, ties=ties)


def _check(module: PipelineModule, topology: Topology, config: Config) -> "list[Tie]":
    """Raise if this configuration cannot train the module; else open the groups of tied modules."""
    from zero_full.pipeline.tied import check_equal, open_ties

    check_pipeline(module, config)
    if topology.tensor is not None or topology.expert is not None:
        raise ValueError(
            "a PipelineModule with a `tensor` or `expert` group: layers that are split, and experts, are not "
            "supported inside a stage. Pass a topology with `pipe` and `data` only"
        )
    ties = open_ties(module, topology)
    for tie in ties:
        check_equal(module, tie)
    return ties


def check_pipeline(module: PipelineModule, config: Config) -> None:
    """Raise if this configuration cannot train the module on this rank; apply the keys that it changes."""
    from zero_full.pipeline.schedules import check_schedule

    section, zero = config.pipeline, config.zero_optimization
    if zero.stage > 1:
        raise ConfigError(
            f"zero_optimization.stage {zero.stage} with a PipelineModule: each micro-batch would reduce "
            "gradients again, and at stage 3 gather parameters. Use stage 0 or 1"
        )
    if config.hybrid_engine.enabled:
        raise ConfigError(
            "hybrid_engine.enabled with a PipelineModule: a rank has only its stages' layers, and cannot "
            "generate. Set it to false"
        )
    if not config.managed_gradient_accumulation:
        raise ConfigError(
            "managed_gradient_accumulation is false, but a pipeline's batch has gradient_accumulation_steps "
            "micro-batches. Leave the key out"
        )
    for key, value, here in (
        ("stages", section.stages, module.num_stages),
        ("partition", section.partition, module.partition_method),
    ):
        if value not in (here, None, "best"):
            raise ConfigError(
                f"pipeline.{key} is {value!r}, but the PipelineModule has {here!r}. Leave the key out"
            )
    if section.activation_checkpoint_interval:
        module.activation_checkpoint_interval = section.activation_checkpoint_interval
    check_schedule(section.schedule, module)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        layers = [number for stage in module.stages for number in module.parts[stage]]
        raise ValueError(
            f"stages {module.stages} (layers {layers}) have no parameter to train. Use "
            'partition_method="parameters", or fewer stages'
        )
