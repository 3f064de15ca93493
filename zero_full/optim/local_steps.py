"""0/1 Adam's local steps: intervals between synchronizations, and a rank's movement since the last one."""

from collections.abc import Sequence

from torch import Tensor


class Interval:
    """The number of steps between two events. It doubles after every `patience` counts, up to `longest`."""

    def __init__(self, patience: int, longest: float = float("inf")) -> None:
        self.patience, self.longest = patience, longest
        self.length, self.counted = 1, 0

    def is_due(self, step: int) -> bool:
        """Whether the event falls on this step."""
        return step % self.length == 0

    def count(self) -> None:
        """Count an event, and double the interval if it is time."""
        self.counted += 1
        if self.counted >= self.patience:
            self.counted = 0
            self.length = int(min(2 * self.length, self.longest))


class Walk:
    """A rank's movement since the last synchronization.

    `rates` and `kept` have a number for each piece, equal on all ranks.
    """

    def __init__(self, anchor: Tensor, walked: Tensor, rates: Sequence[float], kept: Sequence[float]) -> None:
        self.anchor, self.walked = anchor, walked
        self.rates = list(rates)  # sums of the learning rates
        self.kept = list(kept)  # products of the factors of weight decay
