"""Guards for 0/1 Adam's local steps, and for other rules that update parameters without a gradient.

While ranks hold different parameters, writes by user code would be lost, or would apply to one rank only.
"""

from collections.abc import Sequence

import torch

from zero_full.formatting import listed
from zero_full.optim.step import Stepper
from zero_full.shard.group.parameter_group import TrainedGroup
from zero_full.shard.group.parameters import Member
from zero_full.shard.guards.guard import Guard
from zero_full.shard.guards.model_watch import ParameterWrites


class LocalSteps(Guard):
    """Guard against freezing and writes that local steps would ignore. Checked before a step only."""

    def __init__(
        self,
        base: torch.optim.Optimizer,
        stepper: Stepper,
        trained: Sequence[TrainedGroup],
        writes: ParameterWrites,
    ) -> None:
        self.base, self.stepper, self.trained, self.writes = base, stepper, trained, writes

    def check(self) -> None:
        """Raise RuntimeError if user code froze parameters with momentum, or wrote during local steps."""
        if self.stepper.moves_without_gradient:
            self._check_frozen()
        if self.stepper.ranks_differ:
            self.writes.check()  # notes tensors that were assigned to `param.data`
            masters = [group.name for group in self.trained if group.master.master_was_written()]
            self.check_writes(masters)

    def check_writes(self, masters: Sequence[str] = ()) -> None:
        """Raise RuntimeError if parameters or these `masters` were written during local steps."""
        if self.stepper.ranks_differ and (written := dict.fromkeys([*self.writes.names(), *masters])):
            raise RuntimeError(
                f"{listed(list(written))} was written between local steps of 0/1 Adam, in which parameters "
                "differ between ranks, so the next synchronization would overwrite it on all ranks. Call "
                "meet() of the engine's optimizer on every rank before you write. To discard these writes, "
                "load a checkpoint"
            )

    def _check_frozen(self) -> None:
        """Raise RuntimeError if a frozen parameter has state, as its momentum would still move it."""
        frozen = [
            member.name
            for group in self.trained
            for member, piece in group.master.pieces.items()
            if not member.param.requires_grad and self.base.state.get(piece.master)
        ]
        if frozen:
            raise RuntimeError(
                f"{listed(frozen)} was frozen after it was trained, but {type(self.base).__name__} would "
                "still move it by its momentum: it treats a missing gradient as zero. Unfreeze it. Or save a "
                "checkpoint, and load it with drop_errors=True in a new run that freezes the parameter and "
                "does not pass it to the optimizer"
            )


def check_thawed(stepper: Stepper, thawed: Sequence[Member]) -> None:
    """Raise RuntimeError if the rule cannot begin to train parameters that were frozen until now."""
    if problem := stepper.unfreeze_obstacle():
        raise RuntimeError(
            f"{listed([member.name for member in thawed])} was frozen until now, and {problem}. Or freeze it "
            "again: nothing has changed yet"
        )
