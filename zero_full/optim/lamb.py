"""LAMB: Adam's direction for each parameter, in a length that fits the parameter's own."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_full._compat import foreach_add
from zero_full.optim.arguments import checked_options
from zero_full.optim.step import (
    Peers,
    Piece,
    Stepper,
    alike,
    moments_of,
    operators_for,
    step_alone,
    take_copy,
)


class Coefficients(Optimizer):
    """An optimizer that knows how far the last step has moved each parameter."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self.ratios: list[Callable[[], Iterable[tuple[Tensor, float]]]] = []  # of the last step, by parts
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What was pickled, copied or loaded has not stepped yet."""
        super().__setstate__(state)
        self.ratios = []

    @property
    def lamb_coeffs(self) -> dict[Tensor, float]:
        """The factor, norm over norm between its bounds, of each parameter that the last step has moved.

        Under zero_full every rank has those of all parameters. The device is waited for once.
        """
        found = [(param, ratio) for part in self.ratios for param, ratio in part()]
        ratios = {id(param): ratio for param, ratio in found}
        listed = [param for group in self.param_groups for param in group["params"]]
        return {param: ratios[id(param)] for param in listed if id(param) in ratios}

    def get_lamb_coeffs(self) -> list[float]:
        """`lamb_coeffs` as DeepSpeed's FusedLamb gives them: a list, in the order of the parameter groups."""
        return list(self.lamb_coeffs.values())


class Lamb(Coefficients):
    """Moves each parameter by `lr` times its norm over its update's norm, kept between two bounds.

    The defaults are DeepSpeed's. As there, the bias correction scales the step, not the norms' ratio, which
    is 1 where either norm is zero. At every stage the norms are those of whole parameters.
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
        given = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "eps_inside_sqrt": eps_inside_sqrt,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, _checked(given))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose options are checked as those of the constructor are."""
        options = {**self.defaults, **param_group}
        super().add_param_group({**_checked(options), "params": options["params"]})

    def zero_full_stepper(self) -> Stepper:
        """What steps pieces of parameters."""
        return LambStep(self)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        return step_alone(self, closure)


@dataclass(frozen=True)
class Ratios:
    """How long parameters and their updates were in a part of a step."""

    params: Sequence[Tensor]
    squares: Tensor  # two sums for each: of the parameter and of its update
    bounds: Mapping[int, tuple[float, float]]  # by the parameter's id

    def read(self) -> Iterator[tuple[Tensor, float]]:
        """Each parameter's factor, as the operator has found it."""
        norms = torch.zeros(self.squares.shape) if self.squares.is_meta else self.squares.sqrt()
        for param, (weight, change) in zip(self.params, norms.tolist(), strict=True):
            least, most = self.bounds[id(param)]
            yield param, min(max(weight / change, least), most) if weight > 0 and change > 0 else 1.0


class LambStep(Stepper):
    """In two halves, with one sum of two numbers a parameter between them."""

    fuses = True

    def __init__(self, optimizer: Coefficients) -> None:
        self.optimizer = optimizer

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Every rank looks at all groups, which may have been edited: all fail, or none."""
        for group in self.optimizer.param_groups:
            _checked(group)
        self.take_bounds()

    def take_bounds(self) -> None:
        """A step begins, whose coefficients are kept in these."""
        self.bounds: dict[int, tuple[float, float]] = {}
        for group in self.optimizer.param_groups:
            bounds = group["min_coeff"], group["max_coeff"]
            self.bounds |= dict.fromkeys(map(id, group["params"]), bounds)
        self.optimizer.ratios = []

    def step(self, pieces: Sequence[Piece], factor: float, peers: Peers) -> None:
        """Masters, state and copies change."""
        together = list(alike(pieces))
        ordered = [piece for some in together for piece in some]
        norms = [self._first_half(some, factor) for some in together]
        device = pieces[0].master.device if pieces else None
        rows = torch.cat(norms) if norms else torch.zeros(0, 2, dtype=torch.float64, device=device)
        totals = peers.totals(ordered, rows)
        self.optimizer.ratios.append(Ratios(totals.params, totals.rows, self.bounds).read)
        mine = totals.rows[totals.places]
        for some in together:
            norms_of_some, mine = mine[: len(some)], mine[len(some) :]
            self._second_half(some, norms_of_some)

    def _first_half(self, pieces: Sequence[Piece], factor: float) -> Tensor:
        group = self._group(pieces)
        for piece in pieces:
            take_copy(piece)
        states = [moments_of(p, torch.promote_types(p.master.dtype, torch.float32)) for p in pieces]
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
        foreach_add(steps, 1)
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


WITHOUT = {  # what DeepSpeed's FusedLamb has arguments for, and this has not
    "max_grad_norm": "clipping is not the optimizer's; use gradient_clipping in the configuration",
    "amsgrad": "LAMB has no such variant",
}


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options, of the right kind and in their bounds; ValueError if one is not."""
    for name, reason in WITHOUT.items():
        if options.get(name):
            raise ValueError(f"{name} cannot be {options[name]}: {reason}")
    checked = checked_options(Lamb, {k: v for k, v in options.items() if k != "params"}, str)
    check_bounds(checked)
    return checked


def check_bounds(options: Mapping[str, Any]) -> None:
    """ValueError unless the coefficient's bounds are two, in order."""
    least, most = options["min_coeff"], options["max_coeff"]
    if not 0 <= least <= most:
        raise ValueError(f"min_coeff must be from 0 to max_coeff, {most}, not {least}")
