"""Forecast the time of a pipeline's step: each operation takes its stage's seconds, in the schedule's order.

A stage waits for a tensor from another rank, which takes the measured seconds of a message of its bytes. The
runtime's Python is that of a small pipeline, and that of each parameter at stage 1: see [Note: what is left]
in `measure/rates.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from zero_full.pipeline.module import PipelineModule
from zero_full.pipeline.schedules import KINDS
from zero_full.pipeline.timetable import BACKWARD, FORWARD, Operation, idle_shares, operations
from zero_full.plan.forecast import Forecast, check_features, check_update, tokens_of, transport_of
from zero_full.plan.machine_file import seconds_at
from zero_full.plan.pipeline_stages import StageBytes
from zero_full.plan.simulation import Simulation
from zero_full.plan.step_time import NotForecastError, StepTime, check_known, moved_seconds, pass_seconds
from zero_full.plan.work import BACKWARD as BACKWARD_PASS
from zero_full.plan.work import FORWARD as FORWARD_PASS

MESSAGE, RUNTIME = "message", "pipeline"  # names of rates


@dataclass(frozen=True)
class PipelineForecast(Forecast):
    """The forecast of one place of a pipeline."""

    module: PipelineModule
    stages: Sequence[StageBytes]

    def step_time(self, simulated: Simulation) -> StepTime:
        """Return the forecast of this place. Raises NotForecastError."""
        config, rates, module = simulated.config, self.rates, self.module
        schedule, count = config.pipeline.schedule, config.gradient_accumulation_steps
        check_features(simulated)
        if KINDS[schedule].splits_backward:
            raise NotForecastError(f"the schedule {schedule} splits backward, whose parts are not measured")
        if simulated.cluster.world > 1:
            raise NotForecastError(
                "data-parallel ranks beside a pipeline: their collectives are not measured"
            )
        if RUNTIME not in rates.runtime:
            raise NotForecastError("a pipeline: the machine was measured by one rank")
        for stage in self.stages:
            for work in stage.work.values():
                check_known(work)
        orders = operations(schedule, module, count)
        mine = orders[module.place]
        runtime = simulated.runtime_work()
        check_update(simulated, runtime)
        moved = moved_seconds(runtime, rates, transport_of(simulated))
        parameters = sum(len(group.members) for group in simulated.optimizer.trained)
        of_gradients = rates.runtime["1"][1] * parameters  # hooks of a micro-batch
        takes = partial(self.takes, of_backward=of_gradients + moved.reduce / count)
        busy = sum(map(takes, mine))
        idle = busy / (1 - idle_shares(orders, takes)[module.place]) - busy
        of_step, of_operation = rates.runtime[RUNTIME]
        tokens = tokens_of(self.of_model.inputs)
        forward, backward = (
            sum(self.computes(each) for each in mine if each.kind == kind) for kind in (FORWARD, BACKWARD)
        )
        return StepTime(
            forward=forward,
            backward=backward,
            reduce=moved.reduce,
            gather=moved.gather,
            update=moved.update,
            runtime=of_step + of_operation * len(mine) + of_gradients * count,
            messages=sum(map(self.waits, mine)),
            idle=idle,
            waiting=rates.waiting * (forward + backward + moved.update),
            tokens=None if tokens is None else tokens * count,
        )

    def takes(self, operation: Operation, of_backward: float) -> float:
        """Return the seconds of an operation from the arrival of what it needs, with its message.

        `of_backward`: seconds of what the runtime does with the gradients of a micro-batch.
        """
        more = of_backward if operation.kind == BACKWARD else 0.0
        return self.computes(operation) + self.waits(operation) + self.rates.runtime[RUNTIME][1] + more

    def computes(self, operation: Operation) -> float:
        """Return the seconds of a stage's layers."""
        part = FORWARD_PASS if operation.kind == FORWARD else BACKWARD_PASS
        return pass_seconds(self.stages[operation.stage].work[part], self.rates, part)

    def waits(self, operation: Operation) -> float:
        """Return the seconds of the message that an operation needs from another rank."""
        stage, module = self.stages[operation.stage], self.module
        if operation.kind == FORWARD:
            sender, size = operation.stage - 1, stage.taken
        else:
            sender, size = operation.stage + 1, stage.given
        if not 0 <= sender < module.total_stages or module.place_of(sender) == module.place_of(
            operation.stage
        ):
            return 0.0
        return seconds_at(self.rates.collectives[MESSAGE], size)
