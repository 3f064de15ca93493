"""Averaged gradients from one step to the next: at which scale they are, and what a step leaves of them."""

from collections.abc import Callable

from zero_full.precision.scaler import StaticScale
from zero_full.shard.group.grad_placeholder import UNSCALED, Found, names_of
from zero_full.shard.passes.reduce import GradientReducer

EPSILON = 1e-6


class KeptGradients:
    """The averaged gradients of all buckets. Without `zero_grad`, backward adds to them, as in torch."""

    def __init__(self, scaler: StaticScale, reducer: GradientReducer) -> None:
        self.scaler, self.reducer = scaler, reducer
        self.scale_left: float | None = None  # that the last step has left in them
        self.unclipped = 1.0  # by what the last step has multiplied them for itself only
        self.passes = 0  # backward passes until the last step
        self.averages: Callable[[], bool] = lambda: True  # whether the next step wants averages
        self.are_own = False  # they are each rank's own, as far as a step has looked at them
        reducer.on_clearing = self.forget
        reducer.backward.at_begin.append(self._clip)

    @property
    def scale(self) -> float:
        """What they are multiplied by now."""
        return self.scaler.scale if self.scale_left is None else self.scale_left

    @property
    def are_new(self) -> bool:
        """Whether a backward pass has brought some since the last step, skipped or not."""
        return self.passes != self.reducer.backward.count

    def refuse_two_scales(self) -> None:
        """Raise if a backward pass has added gradients of one scale to those of another."""
        scale = self.scaler.scale
        if self.scale != scale and self.are_new:
            raise RuntimeError(
                f"a backward pass has added gradients at the scale {scale:g} to those of the last step, "
                f"whose scale is {self.scale:g}: call zero_grad after every step"
            )

    def factor(self, norm: float | None, clip: float) -> float:
        """By what a step multiplies them, if they have this norm without their scale."""
        factor = 1.0 / self.scale
        return factor * min(1.0, clip / (norm + EPSILON)) if clip > 0 and norm is not None else factor

    def begin_step(self) -> bool:
        """Whether they are averaged now, and not each rank's own."""
        self.refuse_own()
        averaged = self.averages()
        self.are_own = not averaged
        return averaged

    def refuse_own(self) -> None:
        """Raise if a step that wants averages would get what the last step has left of each rank's own."""
        if self.are_own and self.averages():
            raise RuntimeError(
                "the last step has left gradients that each rank has of its own, and the next step is one of "
                "averaged gradients: call zero_grad after every step"
            )

    def multiply(self, factor: float) -> None:
        """Multiply all of them, unless by 1."""
        if factor == 1.0:
            return
        for bucket in self.reducer.every:
            for gradient in () if bucket.asleep else bucket.averaged_gradients():
                gradient.mul_(factor)

    def note_step(self, factor: float, multiplied: bool) -> None:
        """A step has used them times this factor; `multiplied`: they are by now."""
        scale = self.scale
        self.scale_left = 1.0 if multiplied else scale
        self.unclipped = 1.0 if multiplied else factor * scale

    def end_step(self) -> None:
        """A step has used them, or has looked at them and was skipped: nothing is still to be stepped."""
        self.passes = self.reducer.backward.count
        for bucket in self.reducer.every:
            bucket.local_finite = None

    def _clip(self) -> None:
        """Backward adds to the last step's gradients: as in torch, to clipped ones."""
        self.refuse_own()
        self.multiply(self.unclipped)
        self.unclipped = 1.0

    def take_in(self) -> Found:
        """What was done by hand to the gradients since the last backward pass."""
        self.reducer.catch_up()
        found = self.reducer.by_hand()
        if found.written and self.scaler.scale != 1:
            raise RuntimeError(UNSCALED.format(names_of(m for m, _ in found.written)))
        for member, _ in found.written:
            member.param.grad = None
        self.reducer.drop(found.cleared)
        return found

    def forget(self) -> None:
        """Nothing is left of them."""
        self.scale_left, self.unclipped, self.are_own = None, 1.0, False
