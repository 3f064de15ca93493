"""What the compressed optimizers send, as closed forms: the kind of every step, and what a kind sends.

Written from the algorithms and the format of a message, without zero_full: `tests/bench/compression.py`
compares what zero_full counts with this, step by step.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import nn

EXACT, ONE_BIT, SILENT = "exact", "one bit", "silent"  # what a step can have
HEADER, NUMBER, ALIGNED = 1, 4, 16  # of a message: numbers before the scales, and bytes


def adam(steps: int) -> Iterator[str]:
    """Every step averages exactly."""
    return (EXACT for _ in range(steps))


def one_bit_adam(steps: int, freeze_step: int) -> Iterator[str]:
    """Exact until the variance is frozen, then one bit in every step."""
    return (EXACT if step <= freeze_step else ONE_BIT for step in range(1, steps + 1))


def zero_one_adam(
    steps: int,
    var_freeze_step: int,
    var_update_scaler: int = 16,
    local_step_scaler: int = 32678,
    local_step_clipper: int = 16,
) -> Iterator[str]:
    """DeepSpeed's names and defaults. Two intervals, which double after so many exact rounds and steps."""
    exact, interval = 0, 1
    for step in range(1, min(steps, var_freeze_step) + 1):
        due = step % interval == 0
        yield EXACT if due else ONE_BIT
        exact += due
        interval = 2 ** (exact // var_update_scaler)
    for step in range(var_freeze_step + 1, steps + 1):
        doubled = (step - var_freeze_step - 1) // local_step_scaler
        yield SILENT if step % min(2**doubled, local_step_clipper) else ONE_BIT


@dataclass(frozen=True)
class Model:
    """Tensors of these sizes, on so many ranks."""

    sizes: Sequence[int]
    ranks: int

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(self.sizes)

    def exact(self, width: int = 4) -> int:
        """Bytes that a rank sends to average all elements of `width` bytes: in slices, there and back."""
        slice_ = -(-self.numel // self.ranks)
        return 2 * (self.ranks - 1) * slice_ * width

    def one_bit(self, per_tensor: bool = True) -> int:
        """Bytes that a rank sends at one bit an element: a message to each of the others, twice.

        A message has a bit for each element of a chunk and a scale for each tensor in it; the longest counts.
        """
        ends = list(accumulate(self.sizes if per_tensor else [self.numel]))
        chunk = 8 * -(-self.numel // (8 * self.ranks))
        starts = [0, *ends[:-1]]
        most = max(
            sum(start < min(low + chunk, end) and end > low for start, end in zip(starts, ends, strict=True))
            for low in range(0, chunk * self.ranks, chunk)
        )
        message = NUMBER * (HEADER + most) + chunk // 8
        return 2 * (self.ranks - 1) * -(-message // ALIGNED) * ALIGNED

    def sent(self, kind: str, width: int = 4) -> int:
        """Bytes that a rank sends in a step of this kind."""
        return {EXACT: self.exact(width), ONE_BIT: self.one_bit(), SILENT: 0}[kind]


def sizes_of(model: nn.Module) -> list[int]:
    """The sizes of its parameters, in the order in which a compressed buffer has them: by name."""
    return [p.numel() for _, p in sorted(model.named_parameters())]


# What was published ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """A training of the authors: steps, and what their configurations say. Its volume counts no scales."""

    steps: int
    freeze_steps: int  # exact steps of 1-bit Adam, in both of its phases
    zero_one: Mapping[str, int]

    def rounds(self) -> dict[str, Counter[str]]:
        """How many steps of each kind, by optimizer."""
        return {
            "Adam": Counter(adam(self.steps)),
            "1-bit Adam": Counter(one_bit_adam(self.steps, self.freeze_steps)),
            "0/1 Adam": Counter(zero_one_adam(self.steps, **self.zero_one)),
        }


def bits(rounds: Mapping[str, int], width: int = 16) -> float:
    """Bits an element and step, as the papers count: `width` for an exact round, one for the other."""
    return (width * rounds.get(EXACT, 0) + rounds.get(ONE_BIT, 0)) / sum(rounds.values())


ZERO_ONE = {"var_freeze_step": 12_500, "local_step_scaler": 32_678}  # and DeepSpeed's defaults
PUBLISHED = {  # sequences of 128 tokens, then some of 512
    "BERT-Large": Published(152_000 + 10_000, 23_000 + 1_500, ZERO_ONE),
    "BERT-Base": Published(118_000 + 22_000, 16_000 + 1_500, ZERO_ONE),
}
