"""Load optimizer state that differs between ranks: see [Note: a rank's own state] in `optim/step.py`."""

import torch

from zero_full.checkpoint.source import Source
from zero_full.comm.topology import this_rank
from zero_full.errors import CheckpointError
from zero_full.shard.contents.state import OWN, Chunk
from zero_full.shard.step.optimizer import ZeroOptimizer


class OwnState:
    """This rank's own optimizer state during a load."""

    def __init__(self, source: Source, optimizer: ZeroOptimizer) -> None:
        self.source, self.stepper = source, optimizer.contents.stepper
        self.device = optimizer.groups.dense.shard.device
        self.keys: list[str] = []
        self.rooms: dict[str, Chunk] = {}

    def find(self, ranks: int, same_ranks: bool) -> None:
        """Find this rank's own state. Raises CheckpointError if the number of ranks has changed."""
        kept = [key for key in self.source.tensors if key.startswith(f"{OWN}/")]
        if not kept:
            return
        if not same_ranks:
            raise CheckpointError(
                f"{self.source.path} was saved by {len(self.source.savers)} ranks that average at one bit: "
                "it has for each of them what it had not said yet, and where it has gone alone. That means "
                f"nothing to {ranks} ranks: load with drop_errors=True (or checkpoint.drop_errors in the "
                "configuration), which gives it up. Nothing was loaded"
            )
        self.stepper.refuse_own(self.source.shared["stepper"])
        self.keys = [key for key in kept if key.startswith(f"{OWN}/{this_rank()}/")]

    def chunks(self) -> list[Chunk]:
        """Allocate tensors for the state, as chunks to be read."""
        for key in self.keys:
            stored = self.source.tensors[key]
            room = torch.empty(stored.numel, dtype=stored.dtype, device=self.device)
            self.rooms[key.split("/", 2)[2]] = Chunk(key, stored.shape, 0, room)
        return list(self.rooms.values())

    def install(self) -> None:
        """Load the state into the stepper, in place of its own state."""
        self.stepper.load_own({name: chunk.values for name, chunk in self.rooms.items()})
