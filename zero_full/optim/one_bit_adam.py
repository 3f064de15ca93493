"""1-bit Adam: after warm-up steps the variance is frozen, and only signs of the momentum are sent."""

from collections.abc import Sequence
from typing import Any

from zero_full.optim.adam_pieces import adam_step, denominator, moments_in, step_along_momentum
from zero_full.optim.arguments import arguments_of
from zero_full.optim.one_bit import OneBitOptimizer, OneBitStep
from zero_full.optim.step import Peers, Piece, Stepper


class OneBitAdam(OneBitOptimizer):
    """AdamW for `freeze_step` steps; then its variance is frozen, and the momentum is averaged at one bit.

    freeze_step        warm-up steps with averaged gradients, in which the variance is updated
    bias_correction    of both moments, as in Adam: the momentum's by all steps, the variance's by those in
                       which it was updated
    per_tensor_scales  one sign scale per parameter; False: one for the model, which was measured to be worse,
                       the more the sizes of gradients differ between parameters
    comm_backend_name  "nccl", "gloo", "mpi" or "hccl": the backend that is required; None: any
    exp_avg_mask       an option of a parameter group: for each of its parameters None, or a tensor that is 0
                       where the momentum stays zero, such as at positions that never occur. One bit cannot
                       encode zero. (An element that had no gradient during the warm-up does not move,
                       except by weight decay.)

    Stage 0 only. Differences to DeepSpeed 0.19.6: its `bias_correction` and `eps_inside_sqrt` have no effect
    and the bias is never corrected (bias_correction=False here); its first call takes no step; one scale
    serves a whole group (per_tensor_scales=False is one for the model); each rank clips by its own norm; an
    overflow may reach the errors; a resumed run forgets them.

    A parameter that has no gradient in a step of the second phase, and had one before, is stepped as if its
    gradient were zero. Momentum and variance are fp32.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        *,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str | None = None,
        per_tensor_scales: bool = True,
    ) -> None:
        super().__init__(params, arguments_of(locals()))

    def zero_full_stepper(self) -> Stepper:
        """The stepper of sharded parameters."""
        return OneBitAdamStep(self)


class OneBitAdamStep(OneBitStep):
    """Steps of AdamW with averaged gradients, then steps with an averaged momentum."""

    def _step_exactly(self, pieces: Sequence[Piece], factor: float, peers: Peers) -> None:
        states = {p: moments_in(p, self.optimizer.state[p.master]) for p in pieces}
        adam_step(pieces, states, self.optimizer.param_groups, factor)

    def _step_at_one_bit(self, pieces: Sequence[Piece], factor: float) -> None:
        mean = self.average(self.newest_momenta(pieces, factor), "momentum")
        for piece, state, part in self.parts_with_state(mean):
            state["exp_avg"].copy_(part).mul_(state["exp_avg_sq"] > 0)
            state["step"] += 1
            step_along_momentum(piece, state, group := self.group_of(piece), denominator(state, group))
