"""Forecast a plan's time of a step, or give the reason why the time is not forecast."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zero_full.nested import tensors_in
from zero_full.plan.machine_file import MachineRates
from zero_full.plan.simulation import Simulation
from zero_full.plan.step_time import NotForecastError, StepTime, StepWork, step_time
from zero_full.plan.work import BACKWARD, FORWARD, AdamStep, Work, WorkRecorder

SHARED, MESSAGES, NATIVE = "shared memory", "exchange", "native"  # names of transports


@dataclass(frozen=True)
class ModelWork:
    """The operations of a micro-batch of a model, or the reason why they are unknown."""

    recorder: WorkRecorder
    inputs: Sequence[Any]
    unknown: str = ""


@dataclass(frozen=True)
class Forecast:
    """What all plans of a model share: the machine, and the model's work."""

    rates: MachineRates
    of_model: ModelWork

    def of(self, simulated: Simulation) -> dict[str, Any]:
        """Return the fields of a plan: `step_time`, or `not_forecast` with the reason."""
        try:
            if self.of_model.unknown:
                raise NotForecastError(self.of_model.unknown)
            if not self.of_model.inputs:
                raise NotForecastError("without a batch of inputs the model's operations are unknown")
            return {"step_time": self.step_time(simulated)}
        except NotForecastError as error:
            return {"not_forecast": str(error)}

    def step_time(self, simulated: Simulation) -> StepTime:
        """Return the forecast. Raises NotForecastError."""
        settings, count = simulated.optimizer.settings, simulated.config.gradient_accumulation_steps
        check_features(simulated)
        parts, tokens = self.of_model.recorder.parts, tokens_of(self.of_model.inputs)
        runtime = simulated.runtime_work()
        check_update(simulated, runtime)
        work = StepWork(
            forward=parts[FORWARD],
            backward=parts[BACKWARD],
            runtime=runtime,
            stage=settings.stage,
            parameters=sum(len(group.members) for group in simulated.optimizer.trained),
            micro_batches=count,
            transport=transport_of(simulated),
            overlaps=settings.overlap,
            tokens=None if tokens is None else tokens * count * simulated.cluster.world,
        )
        return step_time(work, self.rates)


def check_features(simulated: Simulation) -> None:
    """Raise NotForecastError for a feature whose time is not modelled."""
    settings, cluster = simulated.optimizer.settings, simulated.cluster
    if simulated.phases:
        raise NotForecastError("an optimizer with several kinds of steps (1-bit, 0/1 Adam)")
    if settings.tier.delay_after is not None:
        raise NotForecastError("delayed updates run beside the next step")
    if settings.tier.moves or simulated.parameters_read:
        raise NotForecastError("offload to a file (NVMe)")
    if cluster.tensor is not None or cluster.experts is not None:
        raise NotForecastError("the model's own messages between tensor-parallel ranks or experts")
    if settings.tier.is_offloaded and cluster.device != "cpu":
        raise NotForecastError("offload from an accelerator to the host: copies overlap in unmeasured ways")


def check_update(simulated: Simulation, runtime: Work) -> None:
    """Raise NotForecastError unless the fused operator steps this rank's slices."""
    stepped = sum(item.numel * number for item, number in runtime.items.items() if isinstance(item, AdamStep))
    if not stepped:
        name = type(simulated.optimizer.base).__name__
        raise NotForecastError(
            f"the step of {name}: only the compiled operators of Adam and AdamW are measured"
        )


def transport_of(simulated: Simulation) -> str:
    """Return the name of the transport that the run would use."""
    if simulated.cluster.device != "cpu":
        return NATIVE
    return SHARED if simulated.optimizer.settings.shared_memory else MESSAGES


def tokens_of(inputs: Sequence[Any]) -> int | None:
    """Return the tokens of a micro-batch: the elements of the first two-dimensional input of integers.

    None: there is none.
    """
    for tensor in tensors_in(tuple(inputs)):
        if isinstance(tensor, Tensor) and not tensor.is_floating_point() and tensor.dim() == 2:
            return tensor.numel()
    return None
