"""1-bit LAMB: after warm-up steps coefficients are scaled, and only signs of the momentum are sent.

[Note: coefficients at one bit] LAMB scales a parameter's step by a coefficient: its norm over its update's
norm. At one bit that ratio would follow the noise of the signs. So the warm-up steps average each parameter's
coefficient, and later steps multiply this mean by a factor that follows the size of gradients. Two successive
averaged momenta give the averaged gradient between them, and from it a variance that is still updated
(`exp_avg_sq_fresh`) beside the frozen one. The factor is the largest ratio of the frozen variance's root to
the fresh one's, within bounds, and changes by a small part from step to step.
"""

import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zero_full.optim.arguments import BELOW_1, arguments_of, finite_number
from zero_full.optim.lamb import Coefficients, LambStep, check_bounds
from zero_full.optim.one_bit import OneBitOptimizer, OneBitStep, Options, root_with_eps, write
from zero_full.optim.step import Peers, Piece, Stepper

FRESH = "exp_avg_sq_fresh"
State = dict[str, Any]


class OneBitLamb(OneBitOptimizer, Coefficients):
    """LAMB for `freeze_step` steps; then its variance is frozen, and the momentum is averaged at one bit.

    freeze_step              warm-up steps with averaged gradients: those of `Lamb`, with its options
    coeff_beta               decay of the mean of a coefficient in a warm-up step
    factor_max, factor_min   bounds of the factor by which that mean is multiplied afterwards
    factor_threshold         largest relative change of that factor in a step
    per_tensor_scales        one sign scale per parameter; False: one for the model, and momenta are sent with
                             factors that made their sizes equal when the variance was frozen
    comm_backend_name        "nccl", "gloo", "mpi" or "hccl": the backend that is required; None: any
    exp_avg_mask             as in `OneBitAdam`

    `lamb_coeffs` and `get_lamb_coeffs()` return the coefficients of the last step, as in `Lamb`.

    Works at stage 0 only. In DeepSpeed 0.19.6, unlike here: `bias_correction` and `eps_inside_sqrt` have no
    effect, and the bias is never corrected (bias_correction=False here); the mean of a coefficient begins at
    zero, and a short `freeze_step` leaves it too small; a parameter without a coefficient never moves after
    the warm-up; elements that never had a gradient keep the factor from falling below 1; one scale serves a
    whole parameter group; each rank clips by its own norm; a resumed run starts without compression errors.

    A parameter that has no gradient in a step after the warm-up, and had one before, is stepped as if its
    gradient were zero.
    """

    group_options = (*OneBitOptimizer.group_options, "max_coeff", "min_coeff")

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
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str | None = None,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        per_tensor_scales: bool = True,
    ) -> None:
        coeff_beta = finite_number("coeff_beta", coeff_beta, most=BELOW_1)
        factor_max = finite_number("factor_max", factor_max)
        factor_min = finite_number("factor_min", factor_min)
        factor_threshold = finite_number("factor_threshold", factor_threshold)
        if not 0 < factor_min <= factor_max:
            raise ValueError(f"factor_min must be > 0 and <= factor_max ({factor_max}), not {factor_min}")
        super().__init__(params, arguments_of(locals()))

    def checked(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return a group's options with checked types and ranges, or raise ValueError."""
        checked = super().checked(options)
        check_bounds(checked)
        return checked

    def zero_full_stepper(self) -> Stepper:
        """Return the stepper of sharded parameters."""
        return OneBitLambStep(self)


class OneBitLambStep(OneBitStep):
    """Steps of LAMB with averaged gradients, then steps with an averaged momentum."""

    optimizer: OneBitLamb

    def __init__(self, optimizer: OneBitLamb) -> None:
        super().__init__(optimizer)
        self.lamb = LambStep(optimizer)

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Check the options of all groups, which may have been edited, so that all ranks raise, or none."""
        super().begin(pieces)
        self.lamb.note_bounds()

    def _step_exactly(self, pieces: Sequence[Piece], factor: float, peers: Peers) -> None:
        """Step as LAMB does, and update the mean of each coefficient that the step had."""
        self.lamb.step(pieces, factor, peers)
        beta, coeffs = self.optimizer.model_options["coeff_beta"], self.optimizer.lamb_coeffs
        params = dict(self.piece_params())
        for piece in pieces:
            state, coeff = self.optimizer.state[piece.master], coeffs[params[piece]]
            state["variance_step"] = state.get("variance_step", 0) + 1
            if coeff != 1:  # a parameter with a norm of zero had none
                state["coeff_sum"] = beta * state.get("coeff_sum", 0.0) + (1 - beta) * coeff
                state["coeff_weight"] = beta * state.get("coeff_weight", 0.0) + 1 - beta

    def _digest(self) -> int:
        """Return a checksum that differs for one scale per model, where momenta are sent in other units."""
        layout = super()._digest()
        return layout if self.optimizer.model_options["per_tensor_scales"] else zlib.crc32(b"sizes", layout)

    # At one bit ----------------------------------------------------------------------------------

    def _step_at_one_bit(self, pieces: Sequence[Piece], factor: float) -> None:
        """Step with the averaged momentum. See [Note: coefficients at one bit]."""
        scalings, momenta = self._momentum_scalings(), self.newest_momenta(pieces, factor)
        for piece, part in self.layout.parts(momenta):
            if piece in scalings:
                part.mul_(scalings[piece])
        mean = self.average(momenta, "momentum")
        for piece, state, momentum in self.parts_with_state(mean):
            if piece in scalings:
                momentum.div_(scalings[piece])
                state["scaling_coeff"] = scalings[piece]
            _update_fresh_variance(state, self.group_of(piece), momentum)
        self._step_by_coefficients()

    def _momentum_scalings(self) -> dict[Piece, float]:
        """Return factors for the momenta that let one sign scale fit all; none if each has a scale.

        They are computed once, from the root mean squares of the momenta when the variance is frozen.
        """
        if self.optimizer.model_options["per_tensor_scales"]:
            return {}
        stepped = self._pieces_with_state()
        if all("scaling_coeff" in state for _, state in stepped):
            return {piece: state["scaling_coeff"] for piece, state in stepped}
        roots = _to_host([state["exp_avg"].float().square().mean().sqrt() for _, state in stepped])
        usual = sum(roots) / max(len(roots), 1)
        pairs = zip(stepped, roots, strict=True)
        return {piece: usual / root if root > 0 else 1.0 for (piece, _), root in pairs}

    def _step_by_coefficients(self) -> None:
        """Update each parameter by its coefficient. The host reads the norms of all of them at once."""
        stepped, params, coeffs = self._pieces_with_state(), dict(self.piece_params()), []
        measured = _to_host([_ratio_and_norms(p, state, self.group_of(p)) for p, state in stepped])
        for (piece, state), numbers in zip(stepped, measured, strict=True):
            group, value = self.group_of(piece), piece.master.float()
            coeff = self._coefficient(state, group, *numbers)
            coeffs.append((params[piece], coeff))
            update = _adam_update(state, group) + group["weight_decay"] * value
            write(piece, value.add_(update, alpha=-coeff * _step_size(state, group)))
        self.optimizer.ratios.append(partial(iter, coeffs))

    def _coefficient(
        self, state: State, group: Options, ratio: float, adam_norm: float, update_norm: float
    ) -> float:
        """Return the mean coefficient times its factor: see `_ratio_and_norms` for the three numbers."""
        options, last = self.optimizer.model_options, state.get("last_factor", 1.0)
        # The factor corrects Adam's part of the update only: weight decay does not follow the gradients.
        share = min(1.0, adam_norm / update_norm) if group["weight_decay"] and update_norm > 0 else 1.0
        factor = (ratio if ratio > 0 else 1.0) * share + (1 - share)
        factor = min(max(factor, options["factor_min"]), options["factor_max"])
        threshold = options["factor_threshold"]
        state["last_factor"] = factor = min(max(factor, last * (1 - threshold)), last * (1 + threshold))
        mean_coeff = state["coeff_sum"] / state["coeff_weight"] if "coeff_sum" in state else 1.0
        return float(mean_coeff * factor)

    def _pieces_with_state(self) -> list[tuple[Piece, State]]:
        """Return the pieces with elements that have a state."""
        pairs = ((piece, self.state_of(piece)) for piece in self.layout.pieces if piece.master.numel())
        return [(piece, state) for piece, state in pairs if state is not None]


def _update_fresh_variance(state: State, group: Options, momentum: Tensor) -> None:
    """Store the averaged momentum, and update the fresh variance by the gradient that its change implies."""
    beta1, beta2 = group["betas"]
    momentum = momentum * (state["exp_avg_sq"] > 0)
    gradient = (momentum - beta1 * state["exp_avg"]).div_(1 - beta1)
    if FRESH not in state:
        state[FRESH] = state["exp_avg_sq"].clone()
        state["frozen_step"] = 0
    state[FRESH].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    state["exp_avg"].copy_(momentum)
    state["step"] += 1
    state["frozen_step"] += 1


def _adam_update(state: State, group: Options) -> Tensor:
    """Return Adam's part of the update, without weight decay."""
    update: Tensor = state["exp_avg"] / root_with_eps(state["exp_avg_sq"].clone(), group)
    return update.float()


def _ratio_and_norms(piece: Piece, state: State, group: Options) -> Tensor:
    """Return the largest ratio of the variances' roots, and the norms of Adam's and of the whole update."""
    frozen, fresh = state["exp_avg_sq"], state[FRESH]
    if group["bias_correction"]:  # with the frozen variance's bias correction
        beta2, count = group["betas"][1], state["variance_step"]
        fresh = fresh * ((1 - beta2**count) / (1 - beta2 ** (count + state["frozen_step"])))
    ratios = root_with_eps(frozen.clone(), group) / root_with_eps(fresh.clone(), group)
    adam = _adam_update(state, group)
    update = adam + group["weight_decay"] * piece.master.float()
    largest = ratios.masked_fill_(frozen == 0, 0.0).max()
    return torch.stack([largest.double(), adam.double().norm(), update.double().norm()])


def _step_size(state: State, group: Options) -> float:
    """Return the learning rate with the bias corrections of `Lamb`."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    if not group["bias_correction"]:
        return lr
    count = state["variance_step"]
    return float(lr * (1 - beta2**count) ** 0.5 / (1 - beta1 ** (count + state["frozen_step"])))


def _to_host(rows: list[Tensor]) -> Any:
    """Read tensors of equal shapes on the host at once. Those of a plan, on the meta device, are zeros."""
    stacked = torch.stack(rows) if rows else torch.zeros(0)
    return (torch.zeros(stacked.shape) if stacked.is_meta else stacked).tolist()
