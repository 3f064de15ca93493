"""When 0/1 Adam's ranks meet, and where each has gone since."""

from collections.abc import Sequence

from torch import Tensor


class Interval:
    """How many steps lie between two events; doubles after every `patience` counts, up to `longest`."""

    def __init__(self, patience: int, longest: float = float("inf")) -> None:
        self.patience, self.longest = patience, longest
        self.length, self.counted = 1, 0

    def is_due(self, step: int) -> bool:
        """Whether the event is in this step."""
        return step % self.length == 0

    def count(self) -> None:
        """One more; perhaps the interval grows."""
        self.counted += 1
        if self.counted >= self.patience:
            self.counted = 0
            self.length = int(min(2 * self.length, self.longest))


class Walk:
    """Where a rank went since all were together. The numbers are the same on all ranks, by piece."""

    def __init__(self, anchor: Tensor, walked: Tensor, rates: Sequence[float], kept: Sequence[float]) -> None:
        self.anchor, self.walked = anchor, walked
        self.rates = list(rates)  # the sum of the learning rates
        self.kept = list(kept)  # the product of what decays have left
