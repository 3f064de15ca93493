"""1-bit Adam: after warm-up steps the variance is frozen, and only signs of the momentum are sent."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from zero_full.optim.adam_pieces import adam, averages_of, move, spread
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
        options = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
        }
        whole = {
            "freeze_step": freeze_step,
            "max_grad_norm": max_grad_norm,
            "amsgrad": amsgrad,
            "cuda_aware": cuda_aware,
            "comm_backend_name": comm_backend_name,
            "per_tensor_scales": per_tensor_scales,
        }
        super().__init__(params, options, whole)
        self.steps_option("freeze_step")

    def zero_full_stepper(self) -> Stepper:
        """The stepper of sharded parameters."""
        return OneBitAdamStep(self)


class OneBitAdamStep(OneBitStep):
    """Steps of AdamW with averaged gradients, then steps with an averaged momentum."""

    def __init__(self, optimizer: OneBitAdam) -> None:
        super().__init__(optimizer)
        self.learning = optimizer.steps_option("freeze_step")

    def phases(self) -> dict[str, Callable[[], None]]:
        """Warm-up steps and steps at one bit, for plans."""
        return {
            "the variance is learned": partial(setattr, self, "steps", 0),
            "the momentum at one bit": partial(setattr, self, "steps", self.learning),
        }

    def step(self, pieces: Sequence[Piece], factor: float, peers: Peers) -> None:
        """Update masters, state and copies."""
        if self.averages:
            states = {id(p): averages_of(p, self.optimizer.state[p.master]) for p in pieces}
            adam(pieces, states, self.optimizer.param_groups, factor)
        else:
            self._along_the_average(pieces, factor)
        self.steps += 1

    def _along_the_average(self, pieces: Sequence[Piece], factor: float) -> None:
        self.refuse_without_variance(pieces)
        mean = self.average(self.newest_momenta(pieces, factor), "momentum")
        for piece, window in self.fused.windows(mean):
            if (state := self.known(piece)) is not None:
                state["exp_avg"].copy_(window).mul_(state["exp_avg_sq"] > 0)
                state["step"] += 1
                move(piece, state, group := self.group_of(piece), spread(state, group))
