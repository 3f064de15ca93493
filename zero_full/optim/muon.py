"""Muon: orthogonalized momentum for hidden matrices, and AdamW for all other parameters.

[Note: hidden matrices] Muon is for matrices between hidden layers. Embeddings, output heads, biases and
norms are AdamW's. A parameter's class and shape do not tell which a matrix is, so the user must:

    param.use_muon = True       DeepSpeed's mark, on a parameter
    {"params": ..., "use_muon": True}   for a whole group
    use_muon=lambda name, p: ...        for all of `model.named_parameters()`
    muon_groups(model)          the rule of configuration files: parameters of two dimensions that are no
                                nn.Embedding's weight and have neither `embed` nor `lm_head` in the name

DeepSpeed's own rule goes by names only, so it gives GPT-2's `wte` to Muon, and also parameters of three and
more dimensions, which are AdamW's here.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from zero_full.formatting import shown
from zero_full.optim.arguments import BELOW_1, arguments_of, at_least, checked_options, finite_number
from zero_full.optim.fused_adam import fused_step
from zero_full.optim.step import Peers, Piece, Stepper, Whole, by_kind, operators_for, step_alone

log = logging.getLogger("zero_full")
NOT_HIDDEN = ("embed", "lm_head")  # parts of the names of matrices that AdamW steps
OF_MUON = ("momentum", "nesterov", "ns_steps", "ns_coefficients", "ns_eps", "ns_method", "adjust_lr_fn")
OF_ADAM = ("betas", "eps")
RATES = {True: ("muon_lr", 0.02), False: ("adam_lr", 3e-4)}  # by `use_muon`: option, default
RATE_OPTIONS = {name for name, _ in RATES.values()}
METHODS = ("standard", "gram")
ADJUSTMENTS = (None, "original", "match_rms_adamw")
MOST_STEPS = 99  # of Newton-Schulz, whose default is 5; torch.optim.Muon allows no more
State = dict[str, Any]


class Muon(Optimizer):
    """Moves a matrix by `lr` along its orthogonalized momentum, whose singular values are about 1.

    All other parameters are stepped by AdamW with `betas` and `eps`. Each of the two has its parameter
    groups, and `use_muon` assigns parameters to Muon: on a parameter (`param.use_muon = True`), as a group's
    key, or as a function of name and parameter. `muon_groups` makes such groups by a rule.

    lr           of both. `muon_lr` and `adam_lr` have precedence, and a group's own `lr` before these. None:
                 0.02 for Muon and 3e-4 for AdamW
    adjust_lr_fn "original" (also None) makes steps of tall matrices larger, by sqrt(rows / columns);
                 "match_rms_adamw" gives steps the size of AdamW's, so that its rate and decay can be used
    ns_...       the Newton-Schulz iteration, which runs in bf16. `ns_method="gram"` iterates in fp32 on the
                 products of the short side, and multiplies by the long one twice: for matrices that are
                 several times as long as wide

    torch's OneCycleLR and CyclicLR need cycle_momentum=False: they would move either `momentum` or `betas` in
    all groups, and each group has one of them.

    Names and updates are those of torch.optim.Muon, except that its `eps` is `ns_eps` here. Names that
    DeepSpeed has, and all defaults, are DeepSpeed's. At every stage the update is that of whole matrices.
    """

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        *,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        ns_steps: int = 5,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        ns_eps: float = 1e-7,
        ns_method: str = "standard",
        adjust_lr_fn: str | None = None,
        use_muon: Callable[[str, Parameter], bool] | None = None,
    ) -> None:
        self.options = _checked(arguments_of(locals()))
        # No momentum and betas among the defaults: torch's schedules would change either in all groups, and
        # each group has only one. Without both they report that there is no momentum to change.
        super().__init__(params, {name: self.options[name] for name in ("lr", "weight_decay")})
        if not any(group["use_muon"] for group in self.param_groups):
            log.warning("Muon has no hidden matrix here: AdamW steps all parameters")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group for the matrices among these parameters, and one for the others."""
        for name in sorted(RATE_OPTIONS & param_group.keys()):
            raise ValueError(f"a parameter group cannot have {name}. Set its lr")
        options = {**self.options, **{k: v for k, v in param_group.items() if k != "params"}}
        params = param_group["params"]
        if isinstance(params, set):
            raise TypeError("params is a set, which ranks may iterate in different orders. Pass a list")
        listed = [params] if isinstance(params, Tensor) else list(params)
        named = [each if isinstance(each, tuple) else (None, each) for each in listed]
        rule = _checked(options)["use_muon"]
        for use_muon, half in _split(listed, named, rule).items():
            self._add_half(half, {**options, "use_muon": use_muon}, param_group.get("lr"))

    def _add_half(self, params: list[Any], options: dict[str, Any], own_lr: float | None) -> None:
        rate, default = RATES[options["use_muon"]]
        rates = (own_lr, options[rate], options["lr"], default)
        lr = next(each for each in rates if each is not None)
        unused = {*RATE_OPTIONS, *(OF_ADAM if options["use_muon"] else OF_MUON)}
        checked = _checked({**options, "lr": lr})
        group = {name: value for name, value in checked.items() if name not in unused}
        super().add_param_group({**group, "params": params})

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or pickle, with the options of both rules."""
        return {**super().__getstate__(), "options": self.options}

    def zero_full_stepper(self) -> Stepper:
        """Return the stepper of sharded parameters."""
        return MuonStep(self)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        return step_alone(self, closure)


class MuonStep(Stepper):
    """Steps AdamW's pieces and Muon's momenta, and then gathers and orthogonalizes matrix by matrix."""

    fuses = True

    def __init__(self, optimizer: Muon) -> None:
        self.optimizer = optimizer

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Check the options of all groups, which may have been edited, so that all ranks raise, or none."""
        for number, group in enumerate(self.optimizer.param_groups):
            _checked(group)
            _check_edits(number, group)

    def step(self, pieces: Sequence[Piece], factor: float, peers: Peers) -> None:
        """Update masters, state and copies."""
        groups: Sequence[Mapping[str, Any]] = self.optimizer.param_groups
        by_adam = [piece for piece in pieces if not groups[piece.group]["use_muon"]]
        for same in by_kind(by_adam):
            group = {**groups[same[0].group], "decoupled_weight_decay": True}
            fused_step(operators_for(same), same, _wide(same[0].master), group, factor)
        peers.by_whole(pieces, Orthogonal(groups, factor))


class Orthogonal:
    """The part of a step that needs whole matrices.

    Ranks send bf16. That loses nothing, because Newton-Schulz begins by rounding to bf16, and ends in it.
    """

    wire = torch.bfloat16

    def __init__(self, groups: Sequence[Mapping[str, Any]], factor: float) -> None:
        self.groups, self.factor = groups, factor

    def concerns(self, whole: Whole) -> bool:
        """Return whether the parameter is Muon's."""
        return bool(self.groups[whole.group]["use_muon"])

    def work(self, whole: Whole) -> int:
        """Return the number of multiplications in Newton-Schulz."""
        group = self.groups[whole.group]
        small, large = sorted(whole.shape)
        if group["ns_method"] == "gram":
            return small * small * (2 * large + 4 * int(group["ns_steps"]) * small)
        return int(group["ns_steps"]) * small * small * (2 * large + small)

    def bring(self, piece: Piece) -> Tensor:
        """Update the momentum and return it, or Nesterov's combination with the gradient."""
        group, master, gradient = self.groups[piece.group], piece.master, piece.gradient
        assert gradient is not None
        if "momentum_buffer" not in piece.state:
            piece.state["momentum_buffer"] = torch.zeros_like(master, dtype=_wide(master))
        average, share = piece.state["momentum_buffer"], float(group["momentum"])
        newest = gradient.to(average.dtype) * self.factor
        average.lerp_(newest, 1 - share)
        update = newest.lerp(average, share) if group["nesterov"] else average
        return update.to(self.wire).reshape(-1)

    def of_whole(self, whole: Whole, values: Tensor) -> Tensor:
        """Orthogonalize the matrix."""
        group = self.groups[whole.group]
        by = orthogonalized_by_gram if group["ns_method"] == "gram" else orthogonalized
        # User code may step inside autocast, which a dry run on the meta device does not have.
        with nullcontext() if values.is_meta else torch.autocast(values.device.type, enabled=False):
            return by(values, int(group["ns_steps"]), group["ns_coefficients"], group["ns_eps"])

    def take(self, piece: Piece, values: Tensor) -> None:
        """Update the piece along its part of the orthogonalized matrix."""
        group, master = self.groups[piece.group], piece.master
        lr = float(group["lr"])
        master.mul_(1 - lr * group["weight_decay"])
        master.add_(values.view(master.shape), alpha=-lr * _adjustment(group["adjust_lr_fn"], piece.shape))
        if piece.copy is not None:
            piece.copy.copy_(master)


def orthogonalized(matrix: Tensor, steps: int, coefficients: Sequence[float], eps: float) -> Tensor:
    """Return the matrix with its singular values set to about 1, by Newton-Schulz in bf16.

    `coefficients` are those of an odd polynomial of degree 5, which is applied `steps` times.
    """
    first, third, fifth = coefficients
    x = _normalized(matrix, eps)
    for _ in range(steps):
        gram = x @ x.T
        factor = torch.addmm(gram, gram, gram, beta=third, alpha=fifth)
        x = torch.addmm(x, factor, x, beta=first)
    return x.T if _is_tall(matrix) else x


def orthogonalized_by_gram(matrix: Tensor, steps: int, coefficients: Sequence[float], eps: float) -> Tensor:
    """Orthogonalize by iterating on the Gram matrix `x @ x.T`, which is small for a long matrix.

    Each step multiplies x from the left by a polynomial of its Gram matrix, and these factors commute. So
    they are multiplied first, in fp32 because errors of a Gram matrix grow with the steps, and x is
    multiplied by their product at the end.
    """
    first, third, fifth = coefficients
    x = _normalized(matrix, eps)
    gram = x.float() @ x.float().T
    product = torch.eye(gram.shape[0], device=gram.device)
    for _ in range(steps):
        factor = torch.addmm(gram, gram, gram, beta=third, alpha=fifth)
        factor.diagonal().add_(first)
        product = factor @ product
        gram = factor @ gram @ factor  # of `factor @ x`: `factor` is symmetric
    made: Tensor = product.to(x.dtype) @ x
    return made.T if _is_tall(matrix) else made


def _normalized(matrix: Tensor, eps: float) -> Tensor:
    """Return the matrix, or its transpose if it is tall, in bf16 and without a singular value above 1."""
    x = matrix.to(torch.bfloat16)
    x = x.T if _is_tall(matrix) else x
    # The Frobenius norm is at least the largest singular value, and Newton-Schulz needs values up to 1.
    unit: Tensor = x / x.norm().clamp(min=eps)
    return unit


def _is_tall(matrix: Tensor) -> bool:
    return matrix.shape[0] > matrix.shape[1]


def _adjustment(kind: str | None, shape: torch.Size) -> float:
    rows, columns = shape
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def _wide(master: Tensor) -> torch.dtype:
    """Return the dtype of the moments and momenta of a master."""
    return torch.promote_types(master.dtype, torch.float32)


def _check_edits(number: int, group: Mapping[str, Any]) -> None:
    """Raise ValueError for an edit of a group that would have no effect."""
    use_muon = group["use_muon"]
    if any(name not in group for name in (OF_MUON if use_muon else OF_ADAM)):
        raise ValueError(
            f"use_muon of parameter group {number} was changed to {use_muon}, but the group has the options "
            f"and state of {'AdamW' if use_muon else 'Muon'}. Make a new optimizer instead"
        )
    for name in sorted(RATE_OPTIONS & group.keys()):
        raise ValueError(f"{name} in parameter group {number} has no effect: set its lr")


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's options with checked types and ranges, or raise ValueError."""
    checked = checked_options(Muon, options, str)
    rule = checked["use_muon"]
    if not (rule is None or isinstance(rule, bool) or callable(rule)):
        raise ValueError(f"use_muon must be true, false or a function(name, parameter), not {shown(rule)}")
    if "momentum" in checked:
        finite_number("momentum", checked["momentum"], most=BELOW_1)
        checked["ns_steps"] = at_least("ns_steps", checked["ns_steps"], 0)
        if checked["ns_steps"] > MOST_STEPS:
            raise ValueError(f"ns_steps must be at most {MOST_STEPS}, not {checked['ns_steps']}")
        if checked["ns_method"] not in METHODS:
            raise ValueError(f"ns_method must be 'standard' or 'gram', not {shown(checked['ns_method'])}")
        if checked["adjust_lr_fn"] not in ADJUSTMENTS:
            known = " or ".join(repr(each) for each in ADJUSTMENTS[1:])
            raise ValueError(f"adjust_lr_fn must be {known}, not {shown(checked['adjust_lr_fn'])}")
    return checked


# Muon's parameters and AdamW's -------------------------------------------------------------------


def muon_groups(model: nn.Module, groups: Iterable[Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
    """Make parameter groups for `Muon`: hidden matrices, and the parameters of AdamW.

    Unless `use_muon` of a parameter or of its group says otherwise, a parameter is a hidden matrix if it has
    two dimensions, is no embedding's weight and has neither `embed` nor `lm_head` in its name. Each of
    `groups` is divided in two. None: one group with all trained parameters.
    """
    named: dict[Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        named.setdefault(param, []).append(name)
    embeddings = {
        param
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for param in module.parameters(recurse=False)
    }

    def is_hidden(_: str, param: Parameter) -> bool:
        called = " ".join(named.get(param, ())).lower()
        is_known = param in named and param not in embeddings
        return is_known and param.dim() == 2 and not any(word in called for word in NOT_HIDDEN)

    if groups is None:
        groups = [{"params": [param for param in named if param.requires_grad]}]
    halves = []
    for group in groups:
        names = [named.get(param, ["a parameter"])[0] for param in group["params"]]
        split = _split(
            group["params"], zip(names, group["params"], strict=True), group.get("use_muon", is_hidden)
        )
        halves += [{**group, "params": half, "use_muon": use_muon} for use_muon, half in split.items()]
    return halves


def _split(
    listed: Iterable[Any], named: Iterable[tuple[str | None, Any]], rule: Any
) -> dict[bool, list[Any]]:
    """Divide the listed parameters by `_uses_muon` of their names and tensors. Empty halves are left out."""
    halves: dict[bool, list[Any]] = {True: [], False: []}
    for each, (name, param) in zip(listed, named, strict=True):
        halves[_uses_muon(name, param, rule)].append(each)
    return {use_muon: half for use_muon, half in halves.items() if half}


def _uses_muon(name: str | None, param: Any, rule: Any) -> bool:
    """Return whether a parameter is Muon's: by its own `use_muon`, the group's, or a function of its name."""
    if not isinstance(param, Tensor):
        return False  # torch raises for it
    use: Any = getattr(param, "use_muon", None)
    if use is None and callable(rule):
        if name is None:
            raise ValueError("use_muon is a function of names: pass model.named_parameters()")
        use = param.dim() > 1 and rule(name, param)
    elif use is None:
        use = rule
    what = f"{name or 'a parameter'} of shape {tuple(param.shape)}"
    if use is None and param.dim() == 2:
        raise ValueError(
            f"{what} may be a hidden matrix, which Muon steps, or an embedding, which AdamW steps. Pass "
            "zero_full.muon_groups(model), or set param.use_muon to True or False, or pass use_muon= with "
            "model.named_parameters()"
        )
    if use and param.dim() != 2:
        raise ValueError(
            f"{what} is assigned to Muon, which needs two dimensions. Set its use_muon to False, or train a "
            "matrix and use a view of it in forward"
        )
    if use and param.is_complex():
        raise ValueError(f"{what} is complex, which Muon does not support. Set its use_muon to False")
    return bool(use)
