"""The rows of the checkpoint benchmark: who saves and loads a training state, and how.

All have the state of the same model after a step of AdamW at the same stage: fp32 parameters and two moments,
cut over the ranks. torch.save and torch.distributed.checkpoint (DCP) get zero_full's own pieces of it as they
are, each rank its own; what it takes to load them at another number of ranks is not their part.
"""

import contextlib
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.bench import peers
from tests.bench.files import flush, forget
from tests.bench.peers import Setup
from zero_min.gpt import batch, load_text

TAG = "step"


class Saver(ABC):
    """One way to save and to load. A save counts until it would survive a crash."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """The state of this rank, where it is now."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Into a new folder."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Into the state that is there."""

    def close(self) -> None:  # noqa: B027 (pieces are others')
        """Let go."""

    def size(self) -> int:
        """Bytes of this rank's state."""
        return sum(tensor.nbytes for tensor in self.tensors())


def trained(build: Callable[[Setup], peers.Trainee], setup: Setup) -> Any:
    """The engine of a row of the step benchmark, after a step."""
    trainee = build(setup)
    generator = torch.Generator().manual_seed(dist.get_rank())
    trainee.backward(*batch(load_text(), 1, 16, generator))
    trainee.update()
    return trainee.owner


class ZeroFull(Saver):
    """Ours."""

    def __init__(self, setup: Setup, stage: int) -> None:
        self.engine = trained(peers.zero_full(stage), setup)

    def pieces(self) -> dict[str, Tensor]:
        """What this rank has of everything, by name."""
        contents = self.engine.optimizer.contents
        return {chunk.key: chunk.values for chunk in (*contents.masters(), *contents.state())}

    def tensors(self) -> list[Tensor]:
        """Masters and moments."""
        return list(self.pieces().values())

    def save(self, folder: Path) -> None:
        """Return when all is on the disk."""
        self.engine.save_checkpoint(folder, TAG)

    def save_beside(self, folder: Path) -> None:
        """Return when all is copied."""
        self.engine.save_checkpoint(folder, TAG, asynchronous=True)

    def load(self, folder: Path) -> None:
        """Verify, then read."""
        self.engine.load_checkpoint(folder, TAG)

    def close(self) -> None:
        """Wait for what is being written."""
        self.engine.destroy()


class Pieces(Saver):
    """The pieces of ours, saved by somebody else."""

    def __init__(self, ours: ZeroFull) -> None:
        self.pieces, self.rank = ours.pieces(), dist.get_rank()

    def tensors(self) -> list[Tensor]:
        """The same."""
        return list(self.pieces.values())


class Dcp(Pieces):
    """torch.distributed.checkpoint, which flushes its files itself."""

    def _state(self) -> dict[str, Any]:
        return {f"{self.rank}/{key}": value for key, value in self.pieces.items()}

    def save(self, folder: Path) -> None:
        """By all ranks together."""
        dcp_save(self._state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """In place."""
        dcp_load(self._state(), checkpoint_id=folder)


class Pickled(Pieces):
    """torch.save and torch.load, one file a rank; the benchmark flushes it."""

    def save(self, folder: Path) -> None:
        """One file."""
        folder.mkdir(exist_ok=True)
        torch.save(self.pieces, folder / f"{self.rank}.pt")
        flush(folder / f"{self.rank}.pt")

    def load(self, folder: Path) -> None:
        """Load, and copy to where the state is."""
        for key, value in torch.load(folder / f"{self.rank}.pt").items():
            self.pieces[key].copy_(value)


class DeepSpeed(Saver):
    """DeepSpeed's own; the benchmark flushes what it has written, each rank a part of the files."""

    def __init__(self, setup: Setup, stage: int) -> None:
        self.engine = trained(peers.deepspeed(stage), setup)

    def tensors(self) -> list[Tensor]:
        """Masters and moments, at stages 1 and 2."""
        optimizer = self.engine.optimizer
        state = [v for each in optimizer.optimizer.state.values() for v in each.values()]
        return [*optimizer.single_partition_of_fp32_groups, *(v for v in state if v.dim())]

    def save(self, folder: Path) -> None:
        """Return when all is on the disk."""
        with contextlib.redirect_stdout(sys.stderr):
            self.engine.save_checkpoint(str(folder), TAG)
        for path in files_in(folder)[dist.get_rank() :: dist.get_world_size()]:
            flush(path)

    def load(self, folder: Path) -> None:
        """Into the engine."""
        with contextlib.redirect_stdout(sys.stderr):
            self.engine.load_checkpoint(str(folder), TAG)

    def close(self) -> None:
        """Take it off the model."""
        self.engine.destroy()


def files_in(folder: Path) -> list[Path]:
    """All files below a folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def forget_all(folder: Path) -> None:
    """Ask the page cache to."""
    for path in files_in(folder):
        forget(path)


def remove(folder: Path) -> None:
    """Before the next save; the first rank does it."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()


def check(saver: Saver, folder: Path) -> None:
    """Save, spoil the state, load: ArithmeticError unless it is what it was."""
    before = [tensor.clone() for tensor in saver.tensors()]
    saver.save(folder)
    for tensor in saver.tensors():
        tensor.detach().fill_(float("nan"))
    dist.barrier()
    saver.load(folder)
    after = saver.tensors()
    if len(before) != len(after) or not all(map(torch.equal, before, after)):
        raise ArithmeticError(f"{type(saver).__name__}: what was loaded is not what was saved")
