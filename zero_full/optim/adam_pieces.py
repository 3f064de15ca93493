"""Adam's update for pieces whose variance has its own step count: it is not updated in every step."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_full.optim.step import Piece, alike, operators_for, take_copy

Options = Mapping[str, Any]


def averages_of(
    piece: Piece, state: dict[str, Any], kept: Sequence[str] = ("exp_avg", "exp_avg_sq")
) -> dict[str, Any]:
    """A piece's state, created if missing: the update counts of both moments, and the moments in `kept`."""
    if not state:
        state["step"] = state["variance_step"] = 0
        for name in kept:
            state[name] = torch.zeros_like(piece.master, dtype=torch.float32)
    return state


def rate(state: Mapping[str, Any], group: Options, more: int = 0) -> float:
    """The learning rate with the momentum's bias correction, `more` steps from now."""
    lr = float(group["lr"])
    return lr / (1 - group["betas"][0] ** (state["step"] + more)) if group["bias_correction"] else lr


def correction(state: Mapping[str, Any], group: Options) -> float:
    """The variance's bias correction, by the number of its own updates."""
    return 1 - float(group["betas"][1]) ** state["variance_step"] if group["bias_correction"] else 1.0


def spread(state: Mapping[str, Any], group: Options) -> Tensor:
    """The denominator of the update: the root of the corrected variance, with eps."""
    variance: Tensor = state["exp_avg_sq"] / correction(state, group)
    eps = group["eps"]
    return variance.add_(eps).sqrt_() if group["eps_inside_sqrt"] else variance.sqrt_().add_(eps)


def learn(state: dict[str, Any], group: Options, gradient: Tensor) -> None:
    """Update the moments with an averaged gradient."""
    state["step"] += 1
    state["variance_step"] += 1
    state["exp_avg"].lerp_(gradient, 1 - group["betas"][0])
    if "exp_avg_sq" in state:
        beta = group["betas"][1]
        state["exp_avg_sq"].mul_(beta).addcmul_(gradient, gradient, value=1 - beta)


def put(piece: Piece, value: Tensor) -> None:
    """Write a value to the piece and its copy."""
    piece.master.copy_(value)
    if piece.copy is not None:
        piece.copy.copy_(value)


def move(piece: Piece, state: Mapping[str, Any], group: Options, over: Tensor) -> None:
    """Update the piece by its momentum over `over`, with decoupled weight decay."""
    take_copy(piece)
    value = piece.master.float() * (1 - float(group["lr"]) * group["weight_decay"])
    put(piece, value.addcdiv_(state["exp_avg"], over, value=-rate(state, group)))


def adam(pieces: Sequence[Piece], states: Mapping[int, dict[str, Any]], groups: Any, factor: float) -> None:
    """Take a step of AdamW, by the operator where it knows the options; `states` by the pieces' ids."""
    for some in alike(pieces):
        group = groups[some[0].group]
        if not group["bias_correction"] or group["eps_inside_sqrt"]:
            for piece in some:
                assert piece.gradient is not None
                state = states[id(piece)]
                learn(state, group, piece.gradient.float() * factor)
                move(piece, state, group, spread(state, group))
            continue
        for state in (states[id(piece)] for piece in some):
            state["step"] += 1
            state["variance_step"] += 1
        mine = [states[id(piece)] for piece in some]
        operators_for(some).adam_step(
            [piece.master for piece in some],
            [piece.gradient.contiguous() for piece in some if piece.gradient is not None],
            [state["exp_avg"] for state in mine],
            [state["exp_avg_sq"] for state in mine],
            [
                torch.full((), state["step"], dtype=torch.float32, device=some[0].master.device)
                for state in mine
            ],
            [piece.copy for piece in some if piece.copy is not None],
            float(group["lr"]),
            *group["betas"],
            group["eps"],
            group["weight_decay"],
            True,
            factor,
        )
