"""A checkpoint that lies in memory, for the tests of what is made of any checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_full.checkpoint.source import Source, StoredTensor
from zero_full.errors import CheckpointError


def cut(numel: int, pieces: int) -> tuple[tuple[int, int], ...]:
    """So many elements in about so many pieces, none of them empty."""
    step = max(1, -(-numel // pieces))
    return tuple((start, min(start + step, numel)) for start in range(0, numel, step))


class MemorySource(Source):
    """Tensors by key, in pieces; what is damaged is an error when it is read or verified."""

    def __init__(self, path: Path, values: Mapping[str, Tensor], pieces: int = 3, **shared: Any) -> None:
        self.path, self.kind, self.values = path, "a test", values
        self.tensors = {
            key: StoredTensor(tuple(v.shape), v.dtype, cut(v.numel(), pieces)) for key, v in values.items()
        }
        self.aliases, self.numbers, self.shared = dict[str, str](), dict[str, dict[str, Any]](), shared
        self.damaged: dict[tuple[str, int], str] = {}  # by key and an element: what is said
        self.largest = self.closed = 0

    def read(self, key: str, start: int, stop: int) -> Tensor:
        assert any(first <= start < stop <= last for first, last in self.tensors[key].pieces)
        self.largest = max(self.largest, (stop - start) * self.tensors[key].dtype.itemsize)
        return self.values[key].reshape(-1)[start:stop].clone()

    def verify(self, key: str, start: int, stop: int) -> None:
        assert (start, stop) in self.tensors[key].pieces
        for (damaged, element), text in self.damaged.items():
            if key == damaged and start <= element < stop:
                raise CheckpointError(text)

    def private(self, rank: int) -> dict[str, Any]:
        if ("private", rank) in self.damaged:
            raise CheckpointError(self.damaged["private", rank])
        return {}

    def close(self) -> None:
        self.closed += 1


def values_of_all_kinds() -> dict[str, Tensor]:
    """What a checkpoint may hold: tensors of every kind, one number, nothing, and the optimizer's state."""
    generator = torch.Generator().manual_seed(0)
    values = {
        "parameters/words": torch.randn(11, 8, generator=generator),
        "parameters/body.0.weight": torch.randn(13, 8, generator=generator),
        "parameters/scale": torch.tensor(1.5),
        "parameters/empty": torch.zeros(0, 3),
        "parameters/frozen.weight": torch.randn(8, 8, generator=generator).bfloat16(),
        "parameters/fine": torch.randn(5, generator=generator, dtype=torch.float64),
        "buffers/mean": torch.randn(13, generator=generator),
        "buffers/count": torch.tensor(7),
        "buffers/mask": torch.tensor([True, False]),
        "buffers/phase": torch.randn(3, generator=generator).to(torch.complex64),
    }
    state = {f"state/{e}/words": torch.randn(11, 8, generator=generator) for e in ("exp_avg", "exp_avg_sq")}
    return {**values, **state}
