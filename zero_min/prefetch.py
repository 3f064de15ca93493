"""Step 3, continued. Gather the next module before this one runs.

Stage 3 makes every module wait for its parameters. But a model runs its modules in the same order in
every step, so the first step writes the order down, and from then on each gather also asks for what
comes next. Here the collectives still block, so only the order changes; with a second stream, the next
gather would travel while this module computes. The price: two modules are whole at a time.
"""

import torch

from zero_min.stage3 import Sliced, Stage3


class Stage3Prefetch(Stage3):
    """Stage 3 that looks one module ahead."""

    recorded: tuple[tuple[Sliced, ...], ...] = ()  # the modules of the last step, in order
    current: tuple[tuple[Sliced, ...], ...] = ()  # the modules of this step so far

    # --8<-- [start:prefetch]
    def _before(self, slices: list[Sliced]) -> None:
        if not (torch.is_grad_enabled() or self.in_backward):
            return super()._before(slices)  # evaluation is not part of the step's order
        self.current += (tuple(slices),)
        super()._before(slices)
        ahead = self._next()
        if ahead is not None:
            super()._before(ahead)

    def _next(self) -> list[Sliced] | None:
        """What came after this in the last step, while this step goes the same way."""
        here = len(self.current)
        if self.recorded[:here] != self.current or here >= len(self.recorded):
            return None
        return list(self.recorded[here])

    # --8<-- [end:prefetch]

    def reduce_gradients(self) -> None:
        """The step is over: its order is the next one's forecast."""
        super().reduce_gradients()
        self.recorded, self.current = self.current, ()
