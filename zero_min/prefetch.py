"""Step 3, continued. Gather the next module's parameters while this one runs.

Stage 3 makes every module wait for its parameters. But a model runs its modules in the same order in every
step. So one pass, a forward and its backward, writes the order down. In the next pass each gather starts one
module early: `start_all_gather` returns at once, and a module waits for its own parameters just before it
runs. The price: the parameters of two modules are whole, or on their way, at a time.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero_min.comm import Comm, Handle
from zero_min.stage3 import Sliced, Stage3


class Stage3Prefetch(Stage3):
    """Stage 3 that looks one module ahead."""

    def __init__(self, model: nn.Module, comm: Comm, **options: Any) -> None:
        self.recorded: tuple[tuple[Sliced, ...], ...] = ()  # the modules of the last pass, in order
        self.current: tuple[tuple[Sliced, ...], ...] = ()  # the modules of this pass so far
        self.coming: dict[Sliced, Handle] = {}  # the parameters that are on their way
        super().__init__(model, comm, **options)

    # --8<-- [start:prefetch]
    def _start(self, s: Sliced) -> None:
        """Start the gather of one parameter and go on, if it is neither whole nor on its way."""
        # --8<-- [start:ex_start]
        if not s.is_whole and s not in self.coming:
            s.flat.untyped_storage().resize_(s.bytes)
            self.coming[s] = self.comm.start_all_gather(s.flat, s.mine, label=s.name)
        # --8<-- [end:ex_start]

    def _collect(self, slices: Sequence[Sliced]) -> None:
        """Make these whole: wait for those that are on their way, and gather the others now."""
        for s in slices:
            if s in self.coming:
                self.coming.pop(s).wait()
                s.param.data = s.flat[: s.numel].view(s.shape)
                s.is_whole = True
        super()._before([*slices])

    def release_all(self) -> None:
        """Release all parameters: those that are whole, and those that are still on their way."""
        # --8<-- [start:ex_leave]
        self._collect([*self.coming])
        super().release_all()
        # --8<-- [end:ex_leave]

    def _next(self) -> Sequence[Sliced]:
        """What came after this in the last pass, as long as this pass takes the same path; else nothing."""
        # --8<-- [start:ex_next]
        here = len(self.current)
        if here == len(self.recorded) or self.recorded[:here] != self.current:
            return []
        return self.recorded[here]
        # --8<-- [end:ex_next]

    def _before(self, slices: list[Sliced]) -> None:
        """A module is about to run, forward or backward, and these are its parameters."""
        if not (torch.is_grad_enabled() or self.in_backward):
            return self._collect(slices)  # an evaluation is not part of the order
        # --8<-- [start:ex_ahead]
        self.current += (tuple(slices),)
        self._collect(slices)
        for s in self._next():
            self._start(s)
        # --8<-- [end:ex_ahead]

    # --8<-- [end:prefetch]

    def backward(self, loss: Tensor) -> None:
        """Run backward. The pass is over then, and its order is the next one's forecast."""
        try:
            super().backward(loss)
        finally:
            self.recorded, self.current = self.current, ()
