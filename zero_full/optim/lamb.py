"""LAMB: Adam's update, with a step size in proportion to each parameter's norm."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_full._compat import foreach_add
from zero_full.optim.arguments import arguments_of, check_fixed, checked_options
from zero_full.optim.step import (
    Peers,
    Piece,
    Stepper,
    Totals,
    by_kind,
    moments_of,
    operators_for,
    step_alone,
)

Bounds = dict[int, tuple[float, float]]  # of coefficients, by the parameter's id


class Coefficients(Optimizer):
    """An optimizer that reports the LAMB coefficients of its last step."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        # Read the coefficients of the last step: a function for each part.
        self.ratios: list[Callable[[], Iterable[tuple[Tensor, float]]]] = []
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickle, a copy or a state dict, which has no last step."""
        super().__setstate__(state)
        self.ratios = []

    @property
    def lamb_coeffs(self) -> dict[Tensor, float]:
        """The coefficient of each parameter that the last step moved: the ratio of norms within its bounds.

        Under zero_full every rank has those of all parameters. Reading them waits for the device once.
        """
        ratios = dict(pair for part in self.ratios for pair in part())
        listed = [param for group in self.param_groups for param in group["params"]]
        return {param: ratios[param] for param in listed if param in ratios}

    def get_lamb_coeffs(self) -> list[float]:
        """Return `lamb_coeffs` as DeepSpeed's FusedLamb does: a list, in the parameter groups' order."""
        return list(self.lamb_coeffs.values())


class Lamb(Coefficients):
    """Adam with a coefficient for each parameter: its norm over its update's norm, within two bounds.

    The defaults are DeepSpeed's. As in DeepSpeed, the bias correction scales the step and not the ratio of
    norms, which is 1 where either norm is zero. At every stage the norms are those of whole parameters.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        eps_inside_sqrt: bool = False,
        *,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        super().__init__(params, _checked(arguments_of(locals())))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Its options are checked like the constructor's."""
        super().add_param_group(_checked({**self.defaults, **param_group}))

    zero_full_sums_only = True  # of whole parameters it needs sums, which ranks with other parts can add up

    def zero_full_stepper(self) -> Stepper:
        """Return the stepper of sharded parameters."""
        return LambStep(self)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        return step_alone(self, closure)


def _coefficients(totals: Totals, bounds: Bounds) -> Iterator[tuple[Tensor, float]]:
    """Yield each parameter with its coefficient, computed as in the operator."""
    norms = torch.zeros(totals.rows.shape) if totals.rows.is_meta else totals.rows.sqrt()
    for param, (weight, change) in zip(totals.params, norms.tolist(), strict=True):
        least, most = bounds[id(param)]
        yield param, min(max(weight / change, least), most) if weight > 0 and change > 0 else 1.0


class LambStep(Stepper):
    """LAMB's step in two halves, with one all-reduce of two numbers per parameter in between."""

    fuses = True

    def __init__(self, optimizer: Coefficients) -> None:
        self.optimizer = optimizer

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Check the options of all groups, which may have been edited, so that all ranks raise, or none."""
        for group in self.optimizer.param_groups:
            _checked(group)
        self.note_bounds()

    def note_bounds(self) -> None:
        """Note the bounds of the coefficients for this step."""
        self.bounds: Bounds = {}
        for group in self.optimizer.param_groups:
            bounds = group["min_coeff"], group["max_coeff"]
            self.bounds |= dict.fromkeys(map(id, group["params"]), bounds)
        self.optimizer.ratios = []

    def step(self, pieces: Sequence[Piece], factor: float, peers: Peers) -> None:
        """Update masters, state and copies."""
        kinds = by_kind(pieces)
        ordered = [piece for same in kinds for piece in same]
        norms = [self._first_half(same, factor) for same in kinds]
        device = pieces[0].master.device if pieces else None
        rows = torch.cat(norms) if norms else torch.zeros(0, 2, dtype=torch.float64, device=device)
        totals = peers.totals(ordered, rows)
        self.optimizer.ratios.append(partial(_coefficients, totals, self.bounds))
        mine = totals.rows[totals.places]
        for same in kinds:
            self._second_half(same, mine[: len(same)])
            mine = mine[len(same) :]

    def _first_half(self, pieces: Sequence[Piece], factor: float) -> Tensor:
        group = self._group(pieces)
        states = moments_of(pieces, torch.promote_types(pieces[0].master.dtype, torch.float32))
        norms: Tensor = operators_for(pieces).lamb_norms(
            [piece.master for piece in pieces],
            [piece.gradient.contiguous() for piece in pieces if piece.gradient is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            *group["betas"],
            group["eps"],
            group["weight_decay"],
            group["eps_inside_sqrt"],
            factor,
        )
        return norms

    def _second_half(self, pieces: Sequence[Piece], norms: Tensor) -> None:
        group = self._group(pieces)
        steps = [piece.state["step"] for piece in pieces]
        foreach_add(steps, 1)  # first: the bias correction is that of this step
        operators_for(pieces).lamb_step(
            [piece.master for piece in pieces],
            [piece.state["exp_avg"] for piece in pieces],
            [piece.state["exp_avg_sq"] for piece in pieces],
            steps,
            [piece.copy for piece in pieces if piece.copy is not None],
            norms,
            float(group["lr"]),
            *group["betas"],
            group["eps"],
            group["weight_decay"],
            group["bias_correction"],
            group["eps_inside_sqrt"],
            group["min_coeff"],
            group["max_coeff"],
        )

    def _group(self, pieces: Sequence[Piece]) -> Mapping[str, Any]:
        group: Mapping[str, Any] = self.optimizer.param_groups[pieces[0].group]
        return group


FIXED = {  # DeepSpeed's options that must be off, and why
    "max_grad_norm": "LAMB does not clip. Use gradient_clipping in the configuration",
    "amsgrad": "LAMB has no such variant",
}


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's options with checked types and ranges, or raise ValueError."""
    check_fixed(options, FIXED)
    checked = checked_options(Lamb, options, str)
    check_bounds(checked)
    return checked


def check_bounds(options: Mapping[str, Any]) -> None:
    """Raise ValueError unless 0 <= min_coeff <= max_coeff."""
    least, most = options["min_coeff"], options["max_coeff"]
    if not 0 <= least <= most:
        raise ValueError(f"min_coeff must be from 0 to max_coeff ({most}), not {least}")
