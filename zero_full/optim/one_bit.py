"""1-bit Adam, and the base classes that it shares with 1-bit LAMB and 0/1 Adam.

[Note: state of one rank] Between two steps most state of these optimizers is equal on all ranks. The
compression errors differ between ranks, and during local steps the ranks' movements differ as well. Both are
saved for each rank, and can be restored on the same rank of the same world size only.
"""

import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_full.comm.compressed import mask_checksum
from zero_full.formatting import listed, shown
from zero_full.optim.arguments import arguments_of, at_least, check_fixed, checked_options, flag
from zero_full.optim.step import Average, Peers, Piece, Stepper, by_kind, operators_for

log = logging.getLogger("zero_full")
Options = Mapping[str, Any]  # of a parameter group

MASK = "exp_avg_mask"
FIXED = {  # DeepSpeed's options that must be off, and why
    "max_grad_norm": "it does not clip. Use gradient_clipping, or Settings(clip=...)",
    "amsgrad": "not every step updates the variance, so its maximum would be unknown",
    "cuda_aware": "torch.distributed detects what its MPI can send",
}


class OneBitOptimizer(Optimizer):
    """An optimizer that averages over the ranks itself, gradients or momenta. Only an engine can step it."""

    zero_full_stages: tuple[int, ...] = (0,)  # supported ZeRO stages
    shards_variance = False  # whether the variance is sharded, at stage 1
    # Options of a parameter group. All others are `model_options`, of the whole model.
    group_options: tuple[str, ...] = (
        *("lr", "bias_correction", "betas", "eps", "eps_inside_sqrt", "weight_decay"),
    )
    step_options: tuple[str, ...] = ("freeze_step",)  # numbers of steps; the first is the warm-up's length
    model_options: Mapping[str, Any]

    def __init__(self, params: Any, given: Mapping[str, Any]) -> None:
        check_fixed(given, FIXED)
        kept = {name: v for name, v in given.items() if name not in (*self.group_options, *FIXED)}
        kept["per_tensor_scales"] = flag("per_tensor_scales", kept["per_tensor_scales"])
        for name in self.step_options:
            kept[name] = at_least(name, kept[name], 1)
        self.model_options = MappingProxyType(kept)  # read-only: later changes would have no effect
        if not isinstance(backend := kept["comm_backend_name"], str | None):
            raise ValueError(f"comm_backend_name must be a name, not {shown(backend)}")
        super().__init__(params, self.checked({name: given[name] for name in self.group_options}))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or pickle, with the options of the model."""
        return {**super().__getstate__(), "model_options": dict(self.model_options)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle. torch's constructor calls this as well."""
        super().__setstate__(state)
        self.model_options = MappingProxyType(dict(self.model_options))

    def checked(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return a group's options with checked types and ranges, or raise ValueError."""
        check_fixed(options, FIXED)
        for name in self.model_options.keys() & options.keys():
            raise ValueError(
                f"{name} is an option of the whole model: a parameter group cannot have it. Pass it to "
                f"{type(self).__name__}"
            )
        return checked_options(type(self), options, str)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Its options are checked like the constructor's."""
        super().add_param_group(self.checked({**self.defaults, **param_group}))
        group = self.param_groups[-1]
        if group.get(MASK) is not None:
            group[MASK] = _checked_masks(group[MASK], group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Raise RuntimeError: a step averages over the ranks, which this object does not know."""
        raise RuntimeError(
            f"{type(self).__name__} averages over the ranks by itself, so it cannot step alone. Pass it to "
            "zero_full.initialize or zero_full.assemble.shard, also on one process"
        )


def _checked_masks(given: Any, params: Sequence[Tensor]) -> list[Tensor | None]:
    masks = [given] if isinstance(given, Tensor) and len(params) == 1 else given
    if not isinstance(masks, list | tuple) or len(masks) != len(params):
        raise ValueError(
            f"{MASK} must be a list with a tensor or None for each of the {len(params)} parameters of its "
            "group"
        )
    made: list[Tensor | None] = []
    for place, (mask, param) in enumerate(zip(masks, params, strict=True)):
        if mask is not None and (not isinstance(mask, Tensor) or mask.shape != param.shape):
            raise ValueError(
                f"{MASK}[{place}] must be a tensor of its parameter's shape {tuple(param.shape)}, or None, "
                f"not {shown(tuple(mask.shape) if isinstance(mask, Tensor) else mask)}"
            )
        made.append(mask if mask is None or mask.dtype == torch.bool else mask != 0)
    return made


# Pieces in a flat buffer -------------------------------------------------------------------------


class BufferLayout:
    """The layout of pieces end to end in flat fp32 buffers."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = list(pieces)
        numels = [piece.master.numel() for piece in pieces]
        ends = list(accumulate(numels))
        self.ranges = [(end - numel, end) for numel, end in zip(numels, ends, strict=True)]
        self.numel = sum(numels)
        self.range_of = dict(zip(self.pieces, self.ranges, strict=True))
        self.device = pieces[0].master.device if pieces else torch.device("cpu")

    def zeros(self) -> Tensor:
        """Make a buffer of zeros."""
        return torch.zeros(self.numel, dtype=torch.float32, device=self.device)

    def parts(self, flat: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """Yield each piece with its part of a buffer, in the piece's shape."""
        for piece, (start, stop) in zip(self.pieces, self.ranges, strict=True):
            yield piece, flat[start:stop].view(piece.master.shape)

    def filled(self, value_of: Callable[[Piece], Tensor | None]) -> Tensor:
        """Return a flat buffer with `value_of` each piece at its place. None leaves zeros there."""
        flat = self.zeros()
        for piece, part in self.parts(flat):
            if (value := value_of(piece)) is not None:
                part.copy_(value)
        return flat

    def digest(self) -> int:
        """Return a checksum of the layout. Buffers with another checksum cannot be loaded."""
        return zlib.crc32(repr([(piece.group, tuple(piece.shape)) for piece in self.pieces]).encode())


# The stepper -------------------------------------------------------------------------------------

FEW = 8  # gradients; the mean square of fewer can be far from that of many
MADE_FOR = "made_for"
# Saved tensors of the compression errors, and their keys in the errors' `state_dict`.
SAVED_ERRORS = {"worker_error": "worker", "server_error": "server", MADE_FOR: MADE_FOR}
NEW_RUN = (
    "Save a checkpoint, and load it with drop_errors=True in a new run that trains the parameter when "
    "initialize is called. Use a later var_freeze_step there, if the parameter would have few exact "
    "gradients before it"
)


class OneBitStep(Stepper):
    """Base of the steppers with compressed averages. See [Note: state of one rank]."""

    fuses = True
    takes_parts: bool = False  # an average covers the whole model
    moves_without_gradient = True

    def __init__(self, optimizer: OneBitOptimizer) -> None:
        self.optimizer = optimizer
        self.name = type(optimizer).__name__
        self.warmup_option = optimizer.step_options[0]
        # Steps in which the variance is updated, before it is frozen.
        self.warmup_steps: int = optimizer.model_options[self.warmup_option]
        self.steps = 0  # taken so far
        self.layout, self.peers = BufferLayout([]), Peers()
        self.all_reduce: Average | None = None
        self.masks: list[Any] = []  # of the groups, when `all_reduce` was made
        self.errors: Any = None
        self.errors_of = ""  # the quantity whose compression errors these are
        self.loaded: dict[str, Tensor] = {}  # loaded errors, until `errors` is made
        self.warned: set[str] = set()  # parameters with few updates that were logged

    def attach(self, pieces: Sequence[Piece], peers: Peers) -> None:
        """Lay out the buffer. Errors of another layout were dropped: see `unfreeze_obstacle`."""
        self.layout, self.peers = BufferLayout(pieces), peers

    def unfreeze_obstacle(self) -> str:
        """Return why a parameter cannot be unfrozen after the first phase; "" during it."""
        if self.steps >= self.warmup_steps:
            return (
                f"{self.name} has frozen the variance after {self.warmup_steps} steps, so the parameter "
                "would have none. Save a checkpoint, and load it without the optimizer's state "
                "(load_optimizer_states=False) in a new run that trains the parameter from the beginning"
            )
        if self.errors is not None or self.loaded or self.ranks_differ:
            return f"the compression errors of {self.name} were laid out without the parameter. {NEW_RUN}"
        return ""

    @property
    def averages(self) -> bool:
        """Whether the next step averages gradients: in the warm-up, which updates the variance."""
        return self.steps < self.warmup_steps

    def phases(self) -> dict[str, Callable[[], None]]:
        """Return the kinds of steps, for plans: warm-up, and with a one-bit average."""
        starts = {"warm-up": 0, "momentum at one bit": self.warmup_steps}
        return {name: partial(setattr, self, "steps", steps) for name, steps in starts.items()}

    def step(self, pieces: Sequence[Piece], factor: float, peers: Peers) -> None:
        """Update masters, state and copies."""
        if self.averages:
            self._step_exactly(pieces, factor, peers)
        else:
            self.check_variance(pieces)
            self._step_at_one_bit(pieces, factor)
        self.steps += 1

    def _step_exactly(self, pieces: Sequence[Piece], factor: float, peers: Peers) -> None:
        """Step with averaged gradients, in the warm-up."""
        raise NotImplementedError

    def _step_at_one_bit(self, pieces: Sequence[Piece], factor: float) -> None:
        """Step with each rank's own gradients, by a one-bit average."""
        raise NotImplementedError

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Check the options of all groups, which may have been edited, so that all ranks raise, or none."""
        for number, group in enumerate(self.optimizer.param_groups):
            self.optimizer.checked(group)
            if group.get(MASK) is not None and self.all_reduce is None:
                group[MASK] = _checked_masks(group[MASK], group["params"])
            elif self.all_reduce is not None and group.get(MASK) is not self.masks[number]:
                raise RuntimeError(
                    f"{MASK} of parameter group {number} was changed after the first one-bit average. The "
                    "compression errors belong to the elements that were sent until now. Save a checkpoint, "
                    "and load it with drop_errors=True in a new run whose optimizer has the other mask"
                )

    # Averages ------------------------------------------------------------------------------------

    def average(self, flat: Tensor, what: str) -> Tensor:
        """Average the buffer over the ranks, in place. If this raises, nothing has been changed."""
        if self.all_reduce is None:
            self.all_reduce = self._make_all_reduce()
        if self.errors_of != what:  # errors of one quantity mean nothing to another
            self.errors.zero_()
            self.errors_of = what
        self.all_reduce.average(flat, flat, self.errors, what)
        return flat

    def _make_all_reduce(self) -> Average:
        ranges = self.layout.ranges if self.optimizer.model_options["per_tensor_scales"] else None
        made = self.peers.compressed(self.layout.numel, ranges, self._mask())
        errors = made.new_errors()
        if self.loaded:
            errors.load_state_dict({SAVED_ERRORS[name]: t for name, t in self.loaded.items()})
        self.errors, self.loaded = errors, {}
        self.masks = [group.get(MASK) for group in self.optimizer.param_groups]
        return made

    def _mask(self) -> Tensor | None:
        """Return the elements to be sent, as a bool buffer; None if no group has a mask."""
        masks = {
            param: mask
            for group in self.optimizer.param_groups
            for param, mask in zip(group["params"], group.get(MASK) or (), strict=False)
            if mask is not None
        }
        if not masks:
            return None
        params = dict(self.piece_params())
        return self.layout.filled(lambda p: masks.get(params[p], torch.ones_like(p.master))) != 0

    def piece_params(self) -> Iterator[tuple[Piece, Any]]:
        """Return an iterator over each piece with its parameter."""
        owners: Mapping[Any, Any] = self.optimizer.state.owners  # type: ignore[attr-defined]
        return ((piece, owners[piece.master]) for piece in self.layout.pieces)

    def newest_momenta(self, pieces: Sequence[Piece], factor: float) -> Tensor:
        """Make a buffer of all momenta, updated with this rank's gradients times `factor`."""
        given = {piece: piece.gradient for piece in pieces}

        def newest(piece: Piece) -> Tensor | None:
            state, gradient = self.state_of(piece), given.get(piece)
            if state is None:
                return None
            beta = self.group_of(piece)["betas"][0]
            average: Tensor = state["exp_avg"] * beta
            return average if gradient is None else average.add_(gradient, alpha=(1 - beta) * factor)

        return self.layout.filled(newest)

    def check_variance(self, pieces: Sequence[Piece]) -> None:
        """Raise RuntimeError if a parameter has had no gradient before the variance was frozen."""
        late = [piece.name for piece in pieces if not self._updates(piece)]
        if late:
            raise RuntimeError(
                f"{listed(late)} had no gradient before {self.name} froze the variance, so its step size is "
                f"unknown in step {self.steps + 1}. Train it from the beginning, or increase "
                f"{self.warmup_option}"
            )
        self.warn_of_few_updates()

    def warn_of_few_updates(self) -> None:
        """Warn, once per parameter, of variances from few gradients, which can make steps far too long."""
        counts = {piece.name: self._updates(piece) for piece in self.layout.pieces}
        few = {name: count for name, count in counts.items() if 0 < count < FEW}
        new = sorted(few.keys() - self.warned, key=lambda name: (few[name], name))
        self.warned.update(few)
        if new and self.peers.place[0] == 0:
            log.warning(
                "%s begins one-bit averages, and some variances are from less than %d gradients: %s. If "
                "these gradients were small, steps become far too long. Load an earlier checkpoint, and "
                "train these parameters for more steps with exact gradients",
                self.name,
                FEW,
                listed([f"{name} (from {few[name]})" for name in new]),
            )

    def _updates(self, piece: Piece) -> int:
        """Return the number of gradients that a piece's variance has averaged."""
        return int((self.state_of(piece) or {}).get("variance_step", 0))

    # State ---------------------------------------------------------------------------------------

    def group_of(self, piece: Piece) -> Mapping[str, Any]:
        """Return the options of a piece's group."""
        group: Mapping[str, Any] = self.optimizer.param_groups[piece.group]
        return group

    def state_of(self, piece: Piece) -> dict[str, Any] | None:
        """Return a piece's state; None for a parameter that never had a gradient."""
        return self.optimizer.state.get(piece.master) or None

    def parts_with_state(self, flat: Tensor) -> Iterator[tuple[Piece, dict[str, Any], Tensor]]:
        """Yield each piece that has a state, with its state and its part of a buffer."""
        for piece, part in self.layout.parts(flat):
            if (state := self.state_of(piece)) is not None:
                yield piece, state, part

    def held(self) -> list[Tensor]:
        """Return the compression errors."""
        return [*([] if self.errors is None else (self.errors.worker, self.errors.server)), *self._loaded()]

    def _loaded(self) -> Iterator[Tensor]:
        return (tensor for name, tensor in self.loaded.items() if name != MADE_FOR)

    def own_tensors(self) -> dict[str, Tensor]:
        """Return this rank's compression errors."""
        if self.errors is None:
            return dict(self.loaded)
        errors = self.errors.state_dict()
        return {name: errors[key] for name, key in SAVED_ERRORS.items()} if errors["worker"].numel() else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, and facts for the checks before a load: equal on every rank."""
        # "learning" is the warm-up, in which the variance is learned: the key of earlier checkpoints.
        facts = {"layout": self._digest(), "learning": self.warmup_steps}
        return {"steps": self.steps, "errors_of": self.errors_of, **facts}

    def _digest(self) -> int:
        """Return a checksum of the buffer's layout and mask."""
        mask, layout = self._mask(), self.layout.digest()
        return layout if mask is None else mask_checksum(mask, layout)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the saved variance is frozen and this run would freeze it at another step."""
        was = state.get("learning", self.warmup_steps)
        if was != self.warmup_steps and state["steps"] >= was:
            raise ValueError(
                f"{self.name} had frozen its variance after {was} steps when this state was saved, and now "
                f"{self.warmup_option} is {self.warmup_steps}. A frozen variance cannot be updated: set "
                f"{self.warmup_option} to {was}"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved `state_dict`. `load_own_tensors` follows."""
        self.steps, self.errors_of = state["steps"], state["errors_of"]

    def check_own_tensors(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the saved errors have another layout or mask than this run's buffer."""
        digest = self._digest()
        if state.get("layout", digest) != digest:
            raise ValueError(
                f"the saved compression errors of {self.name} belong to other parameters or parameter "
                f"groups, or were made with another {MASK} or per_tensor_scales. Load the checkpoint with "
                "drop_errors=True to drop them"
            )

    def load_own_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the compression errors. Without tensors they are dropped."""
        self.loaded = {name: tensors[name].clone() for name in SAVED_ERRORS if name in tensors}
        self.all_reduce = self.errors = None


# Adam's update of a piece, whose variance has a step count of its own ---------------------------------


def moments_in(
    piece: Piece, state: dict[str, Any], names: Sequence[str] = ("exp_avg", "exp_avg_sq")
) -> dict[str, Any]:
    """Return a piece's state, made if missing: the update counts of both moments, and the moments `names`."""
    if not state:
        state["step"] = state["variance_step"] = 0
        for name in names:
            state[name] = torch.zeros_like(piece.master, dtype=torch.float32)
    return state


def step_size(state: Mapping[str, Any], group: Options, more: int = 0) -> float:
    """Return the learning rate with the momentum's bias correction, `more` steps from now."""
    lr = float(group["lr"])
    return lr / (1 - group["betas"][0] ** (state["step"] + more)) if group["bias_correction"] else lr


def variance_correction(state: Mapping[str, Any], group: Options) -> float:
    """Return the variance's bias correction, by the number of its own updates."""
    return 1 - float(group["betas"][1]) ** state["variance_step"] if group["bias_correction"] else 1.0


def root_with_eps(variance: Tensor, group: Options) -> Tensor:
    """Turn a variance into the denominator of an update, in place."""
    eps = group["eps"]
    return variance.add_(eps).sqrt_() if group["eps_inside_sqrt"] else variance.sqrt_().add_(eps)


def denominator(state: Mapping[str, Any], group: Options) -> Tensor:
    """Return the denominator of Adam's update: the root of the corrected variance, with eps."""
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
    value = piece.master.float() * (1 - float(group["lr"]) * group["weight_decay"])
    write(piece, value.addcdiv_(state["exp_avg"], over, value=-step_size(state, group)))


# 1-bit Adam ------------------------------------------------------------------------------------------


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
        """Return the stepper of sharded parameters."""
        return OneBitAdamStep(self)


class OneBitAdamStep(OneBitStep):
    """Steps of AdamW with averaged gradients, then steps with an averaged momentum."""

    def _step_exactly(self, pieces: Sequence[Piece], factor: float, peers: Peers) -> None:
        for same in by_kind(pieces):
            group = self.group_of(same[0])
            states = [moments_in(piece, self.optimizer.state[piece.master]) for piece in same]
            if group["eps_inside_sqrt"]:  # the operator lacks it
                for piece, state in zip(same, states, strict=True):
                    assert piece.gradient is not None
                    update_moments(state, group, piece.gradient.float() * factor)
                    step_along_momentum(piece, state, group, denominator(state, group))
                continue
            for state in states:
                state["step"] += 1
                state["variance_step"] += 1
            masters = [piece.master for piece in same]
            operators_for(same).adam_step(
                masters,
                [piece.gradient.contiguous() for piece in same if piece.gradient is not None],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [masters[0].new_full((), state["step"], dtype=torch.float32) for state in states],
                [piece.copy for piece in same if piece.copy is not None],
                float(group["lr"]),
                *group["betas"],
                group["eps"],
                group["weight_decay"],
                True,  # decoupled weight decay
                factor,
                group["bias_correction"],
            )

    def _step_at_one_bit(self, pieces: Sequence[Piece], factor: float) -> None:
        mean = self.average(self.newest_momenta(pieces, factor), "momentum")
        for piece, state, part in self.parts_with_state(mean):
            # One bit cannot encode zero: without this, elements that never had a gradient would move.
            state["exp_avg"].copy_(part).mul_(state["exp_avg_sq"] > 0)
            state["step"] += 1
            step_along_momentum(piece, state, group := self.group_of(piece), denominator(state, group))
