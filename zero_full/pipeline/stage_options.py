"""Options of the optimizer that pipeline stages must have alike, such as a learning rate.

The step compares all options between the ranks of one stage. Stages may have parameter groups of their own.
So each batch compares less between them:

    tied layers   the options of their groups, on all stages that have a copy: copies would drift apart
    NUMBERS       options that were equal on all stages when the engine was made or loaded. A stage that
                  changes one alone is a mistake, such as a schedule that only the stage with the loss runs

A schedule may have other rates for the groups of other stages, also where all begin with the same rate, such
as a warmup from 0. So of rates that the engine's schedule has set only the number of its steps is compared.
Those of a schedule that the loop runs are compared if `initial_lr` was equal as well.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.nn import Parameter
from torch.optim import Optimizer

from zero_full.pipeline.module import PipelineModule
from zero_full.shard.guards.model_watch import NUMBERS
from zero_full.shard.step.agreement import MARK_BITS, are_equal, mark_of, options_of

DIFFERENT = (
    "the ranks have different options of the optimizer. {}. Change an option on all ranks alike: all get the "
    "same loss from train_batch. Stages may have options of their own if these differ when initialize is "
    "called, and learning rates of their own by an lr_scheduler that is passed to initialize, but not "
    "options of a tied layer"
)
STARTS = "initial_lr"  # option that a schedule adds: the rate that it began with
POSITIONS = ("last_epoch", "last_batch_iteration")  # attributes of schedules: their steps


class StageOptions:
    """Compares one rank's options with those of other stages."""

    def __init__(self, module: PipelineModule, optimizer: Optimizer, schedule: Callable[[], Any]) -> None:
        """`schedule` returns the engine's LR scheduler, or None."""
        self.optimizer, self.schedule = optimizer, schedule
        # This rank's parameters of each layer that several stages have a copy of.
        self.tied: dict[str, set[Parameter]] = {}
        for key in module.shared_keys():
            copied = module.tied[key].parameters() if key in module.tied else ()
            self.tied[f"options of the tied layer {key}"] = {*copied}
        self.names = [*NUMBERS, STARTS, *self.tied]  # equal on all ranks
        self.alike = set[str]()  # names of options that must stay equal

    def _values(self) -> Iterator[str]:
        """Yield this rank's value of each name; "" if it has none."""
        options = [options_of(group) for group in self.optimizer.param_groups]
        for key in (*NUMBERS, STARTS):
            yield ", ".join(sorted({repr(each[key]) for each in options if key in each}))
        for params in self.tied.values():
            groups = zip(self.optimizer.param_groups, options, strict=True)
            values = {repr(each) for group, each in groups if not params.isdisjoint(group["params"])}
            yield ", ".join(sorted(values))

    def numbers(self) -> list[float]:
        """Return three numbers for each name. Their sums over all ranks show which options differ.

        They are how many ranks have the option (0 or 1), a hash of this rank's value, and its square.
        """
        numbers = list[float]()
        for name, value in zip(self.names, self._values(), strict=True):
            if name == "lr":
                value = self._position() or value
            elif name == STARTS and hasattr(self.schedule(), "get_last_lr"):
                value = ""
            mark = mark_of(value, MARK_BITS)
            numbers += [1.0, mark, mark**2] if value else [0.0, 0.0, 0.0]
        return numbers

    def _position(self) -> str:
        """Describe how far the engine's schedule is; "" before its first step, or if other code set rates."""
        schedule = self.schedule()
        steps = max((getattr(schedule, name, 0) for name in POSITIONS), default=0)
        if steps <= 0 or not hasattr(schedule, "get_last_lr"):
            return ""
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        is_its = [*map(float, schedule.get_last_lr())] == rates
        return f"by the schedule, after {steps} steps" if is_its else ""

    def _differing(self, sums: Sequence[float]) -> set[str]:
        """Return the names of options that differ between ranks."""
        places = {name: 3 * number for number, name in enumerate(self.names)}
        return {name for name, place in places.items() if not are_equal(*sums[place : place + 3])}

    def learn(self, sums: Sequence[float]) -> None:
        """Note which options are equal on all stages now. Those of tied layers must always be."""
        differing = self._differing(sums)
        self.alike = ({*NUMBERS} - differing - ({"lr"} if STARTS in differing else set())) | self.tied.keys()

    def changed(self, sums: Sequence[float]) -> set[str]:
        """Return the names of options that were equal on all stages and differ now; equal on all ranks."""
        return self.alike & self._differing(sums)

    def described(self, names: set[str]) -> str:
        """Return these options with this rank's values; "" if it has none of them.

        Tied layers are left out if one of `NUMBERS` says what has changed.
        """
        shown = names.intersection(NUMBERS) or names
        mine = zip(self.names, self._values(), strict=True)
        notes = {"lr": self._position()}
        return ", ".join(
            f"{name}: {value}" + (f" ({notes[name]})" if notes.get(name) else "")
            for name, value in mine
            if name in shown and value
        )
