"""Adam's update for pieces whose variance has its own step count: it is not updated in every step."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_full.optim.step import Piece, adopt_copy, by_kind, operators_for

Options = Mapping[str, Any]


def moments_in(
    piece: Piece, state: dict[str, Any], names: Sequence[str] = ("exp_avg", "exp_avg_sq")
) -> dict[str, Any]:
    """A piece's state, created if missing: the update counts of both moments, and the moments `names`."""
    if not state:
        state["step"] = state["variance_step"] = 0
        for name in names:
            state[name] = torch.zeros_like(piece.master, dtype=torch.float32)
    return state


def step_size(state: Mapping[str, Any], group: Options, more: int = 0) -> float:
    """The learning rate with the momentum's bias correction, `more` steps from now."""
    lr = float(group["lr"])
    return lr / (1 - group["betas"][0] ** (state["step"] + more)) if group["bias_correction"] else lr


def variance_correction(state: Mapping[str, Any], group: Options) -> float:
    """The variance's bias correction, by the number of its own updates."""
    return 1 - float(group["betas"][1]) ** state["variance_step"] if group["bias_correction"] else 1.0


def root_with_eps(variance: Tensor, group: Options) -> Tensor:
    """Turn a variance into the denominator of an update, in place."""
    eps = group["eps"]
    return variance.add_(eps).sqrt_() if group["eps_inside_sqrt"] else variance.sqrt_().add_(eps)


def denominator(state: Mapping[str, Any], group: Options) -> Tensor:
    """The denominator of Adam's update: the root of the corrected variance, with eps."""
    return root_with_eps(state["exp_avg_sq"] / variance_correction(state, group), group)


def update_moments(state: dict[str, Any], group: Options, gradient: Tensor) -> None:
    """Update the moments that the state has with an averaged gradient."""
    state["step"] += 1
    state["variance_step"] += 1
    state["exp_avg"].lerp_(gradient, 1 - group["betas"][0])
    if "exp_avg_sq" in state:
        beta = group["betas"][1]
        state["exp_avg_sq"].mul_(beta).addcmul_(gradient, gradient, value=1 - beta)


def write(piece: Piece, value: Tensor) -> None:
    """Write a value to the piece and its copy."""
    piece.master.copy_(value)
    if piece.copy is not None:
        piece.copy.copy_(value)


def step_along_momentum(piece: Piece, state: Mapping[str, Any], group: Options, over: Tensor) -> None:
    """Update the piece by its momentum over the denominator `over`, with decoupled weight decay."""
    adopt_copy(piece)
    value = piece.master.float() * (1 - float(group["lr"]) * group["weight_decay"])
    write(piece, value.addcdiv_(state["exp_avg"], over, value=-step_size(state, group)))


def adam_step(
    pieces: Sequence[Piece], states: Mapping[Piece, dict[str, Any]], groups: Any, factor: float
) -> None:
    """Take a step of AdamW, by the operator where it has the options."""
    for same in by_kind(pieces):
        group, mine = groups[same[0].group], [states[piece] for piece in same]
        if not group["bias_correction"] or group["eps_inside_sqrt"]:
            for piece, state in zip(same, mine, strict=True):
                assert piece.gradient is not None
                update_moments(state, group, piece.gradient.float() * factor)
                step_along_momentum(piece, state, group, denominator(state, group))
            continue
        for state in mine:
            state["step"] += 1
            state["variance_step"] += 1
        operators_for(same).adam_step(
            [piece.master for piece in same],
            [piece.gradient.contiguous() for piece in same if piece.gradient is not None],
            [state["exp_avg"] for state in mine],
            [state["exp_avg_sq"] for state in mine],
            [
                torch.full((), state["step"], dtype=torch.float32, device=same[0].master.device)
                for state in mine
            ],
            [piece.copy for piece in same if piece.copy is not None],
            float(group["lr"]),
            *group["betas"],
            group["eps"],
            group["weight_decay"],
            True,
            factor,
        )
