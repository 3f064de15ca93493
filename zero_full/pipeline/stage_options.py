"""Options of the optimizer that pipeline stages must have alike, such as a learning rate.

The step compares all options between the ranks of one stage. Stages may have parameter groups of their own.
So each batch compares less between them:

    tied layers   the options of their groups, on all stages that have a copy: copies would drift apart
    NUMBERS       options that were equal on all stages when the engine was made or loaded. A stage that
                  changes one alone is a mistake, such as a schedule that only the stage with the loss runs

With n ranks, all hashes are equal if and only if n times the sum of squares equals the square of the sum.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch.optim import Optimizer

from zero_full.pipeline.module import PipelineModule
from zero_full.shard.guards.model_watch import NUMBERS
from zero_full.shard.step.agreement import MARK_BITS, mark_of, options_of

DIFFERENT = (
    "the ranks have different options of the optimizer. {}. Change an option on all ranks alike: all get the "
    "same loss from train_batch. Stages may have options of their own if these differ when initialize is "
    "called, but not options of a tied layer"
)


class StageOptions:
    """Compares one rank's options with those of other stages."""

    def __init__(self, module: PipelineModule, optimizer: Optimizer) -> None:
        self.module, self.optimizer = module, optimizer
        self.alike = set[str]()  # names of options that must stay equal

    def _mine(self) -> Iterator[tuple[str, Any]]:
        """Yield names and values, in an order that is equal on all ranks; None: this rank has none."""
        options = [options_of(group) for group in self.optimizer.param_groups]
        for key in NUMBERS:
            values = {repr(each[key]) for each in options if key in each}
            yield key, ", ".join(sorted(values)) or None
        for key in self.module.shared_keys():
            params = {*self.module.tied[key].parameters()} if key in self.module.tied else set()
            groups = zip(self.optimizer.param_groups, options, strict=True)
            values = {repr(each) for group, each in groups if not params.isdisjoint(group["params"])}
            yield f"options of the tied layer {key}", ", ".join(sorted(values)) or None

    def numbers(self) -> list[float]:
        """Return numbers whose sums over all ranks are for `learn` and `changed`."""
        numbers = list[float]()
        for _, value in self._mine():
            mark = mark_of(value, MARK_BITS)
            numbers += [0.0, 0.0, 0.0] if value is None else [1.0, mark, mark**2]
        return numbers

    def _differing(self, sums: Sequence[float]) -> Iterator[str]:
        """Yield the names of options that differ between ranks."""
        for number, (name, _) in enumerate(self._mine()):
            ranks, marks, squared = sums[3 * number : 3 * number + 3]
            if ranks * squared != marks**2:
                yield name

    def learn(self, sums: Sequence[float]) -> None:
        """Note which options are equal on all stages now."""
        names = {name for name, _ in self._mine()}
        tied = {name for name in names if name not in NUMBERS}
        self.alike = (names - {*self._differing(sums)}) | tied

    def changed(self, sums: Sequence[float]) -> set[str]:
        """Return the names of options that were equal on all stages and differ now; equal on all ranks."""
        return self.alike.intersection(self._differing(sums))

    def described(self, names: set[str]) -> str:
        """Return these options with this rank's values; "" if it has none of them.

        Tied layers are left out if one of `NUMBERS` says what has changed.
        """
        shown = names.intersection(NUMBERS) or names
        return ", ".join(f"{name}: {value}" for name, value in self._mine() if name in shown and value)
