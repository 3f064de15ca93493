"""Base classes of 1-bit Adam, 1-bit LAMB and 0/1 Adam: a compressed average of one flat buffer.

[Note: errors and walks] Between two steps most of the state of such a rule is equal on all ranks. The
compression errors differ between ranks, and during local steps also the ranks' movements (walks). Both are
saved for each rank, and can be restored on the same rank of the same world size only.
"""

import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_full.formatting import listed, shown
from zero_full.optim.arguments import at_least, checked_options, flag
from zero_full.optim.step import Average, Peers, Piece, Stepper

log = logging.getLogger("zero_full")

MASK = "exp_avg_mask"
FIXED = {  # DeepSpeed's options that must be off, and why
    "max_grad_norm": "clipping is not the optimizer's: use gradient_clipping, or Settings(clip=...)",
    "amsgrad": "the largest variance so far cannot be known at one bit an element",
    "cuda_aware": "torch.distributed knows by itself what its MPI can send",
}


class OneBitOptimizer(Optimizer):
    """An optimizer that averages over the ranks itself. It can be stepped by an engine only."""

    zero_full_stages: tuple[int, ...] = (0,)  # supported ZeRO stages
    shares_variance = False  # whether the variance is sharded, at stage 1
    model_options: Mapping[str, Any]  # options of the whole model, not of a group

    def __init__(self, params: Any, options: Mapping[str, Any], whole: Mapping[str, Any]) -> None:
        _refuse_fixed(whole)
        kept = {name: value for name, value in whole.items() if name not in FIXED}
        kept["per_tensor_scales"] = flag("per_tensor_scales", kept["per_tensor_scales"])
        self.model_options = MappingProxyType(kept)  # read-only: later changes would have no effect
        if not (self.backend is None or isinstance(self.backend, str)):
            raise ValueError(f"comm_backend_name must be a name, not {shown(self.backend)}")
        super().__init__(params, self.checked(options))

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy or pickle, with the options of the model."""
        return {**super().__getstate__(), "model_options": dict(self.model_options)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle. torch's constructor calls this as well."""
        super().__setstate__(state)
        self.model_options = MappingProxyType(dict(self.model_options))

    @property
    def backend(self) -> str | None:
        """The communication backend that the user requires; None: any."""
        name: str | None = self.model_options["comm_backend_name"]
        return name

    def steps_option(self, name: str) -> int:
        """Return an option that counts steps; ValueError unless it is a positive integer."""
        return at_least(name, self.model_options[name], 1)

    def checked(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return a group's options with checked types and ranges, or raise ValueError."""
        _refuse_fixed(options)
        for name in self.model_options.keys() & options.keys():
            raise ValueError(f"{name} is the whole model's and cannot be a parameter group's")
        return checked_options(type(self), {k: v for k, v in options.items() if k != "params"}, str)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose options are checked as those of the constructor are."""
        super().add_param_group({**param_group, **self.checked({**self.defaults, **param_group})})
        group = self.param_groups[-1]
        if group.get(MASK) is not None:
            group[MASK] = _checked_masks(group[MASK], group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Raise RuntimeError: a step averages over the ranks, which this object does not know."""
        raise RuntimeError(
            f"{type(self).__name__} averages over the ranks by itself, so it cannot step alone: pass it to "
            "zero_full.initialize or zero_full.assemble.shard, also on one process"
        )


def _refuse_fixed(options: Mapping[str, Any]) -> None:
    for name in FIXED.keys() & options.keys():
        if options[name]:
            raise ValueError(f"{name} cannot be {shown(options[name])}: {FIXED[name]}")


def _checked_masks(given: Any, params: Sequence[Tensor]) -> list[Tensor | None]:
    masks = [given] if isinstance(given, Tensor) and len(params) == 1 else given
    if not isinstance(masks, list | tuple) or len(masks) != len(params):
        raise ValueError(
            f"{MASK} must be a list with a mask or None for each of the group's {len(params)} parameters"
        )
    made: list[Tensor | None] = []
    for place, (mask, param) in enumerate(zip(masks, params, strict=True)):
        if mask is not None and (not isinstance(mask, Tensor) or mask.shape != param.shape):
            raise ValueError(
                f"{MASK}[{place}] must be a tensor of the shape {tuple(param.shape)} of its parameter, or "
                f"None, not {shown(mask if not isinstance(mask, Tensor) else tuple(mask.shape))}"
            )
        made.append(mask if mask is None or mask.dtype == torch.bool else mask != 0)
    return made


# Pieces in a flat buffer -------------------------------------------------------------------------


class Fused:
    """The layout of pieces end to end in flat fp32 buffers."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = list(pieces)
        numels = [piece.master.numel() for piece in pieces]
        ends = list(accumulate(numels))
        self.ranges = [(end - numel, end) for numel, end in zip(numels, ends, strict=True)]
        self.numel = sum(numels)
        self.place = {id(piece): place for place, piece in enumerate(self.pieces)}
        self.device = pieces[0].master.device if pieces else torch.device("cpu")

    def new(self) -> Tensor:
        """Make a buffer of zeros."""
        return torch.zeros(self.numel, dtype=torch.float32, device=self.device)

    def windows(self, flat: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """Each piece with its part of a buffer, in the piece's shape."""
        for piece, (start, stop) in zip(self.pieces, self.ranges, strict=True):
            yield piece, flat[start:stop].view(piece.master.shape)

    def filled(self, value_of: Callable[[Piece], Tensor | None]) -> Tensor:
        """Make a buffer of the pieces' values; zeros for pieces whose value is None."""
        flat = self.new()
        for piece, window in self.windows(flat):
            if (value := value_of(piece)) is not None:
                window.copy_(value)
        return flat

    def digest(self) -> int:
        """A checksum of the layout. Buffers with another checksum cannot be loaded."""
        return zlib.crc32(repr([(piece.group, tuple(piece.shape)) for piece in self.pieces]).encode())


# The stepper -------------------------------------------------------------------------------------

FEW = 8  # gradients; the mean square of fewer can be far from that of many
WORKER, SERVER, MADE_FOR = "worker_error", "server_error", "made_for"
OF_ERRORS = {WORKER: "worker", SERVER: "server", MADE_FOR: "made_for"}
NEW_RUN = (
    "Save a checkpoint, and load it with drop_errors=True in a new run, in which it is trained when "
    "initialize is called; with a later var_freeze_step, if it would have few exact gradients until then"
)


class OneBitStep(Stepper):
    """Base of the steppers with compressed averages. See [Note: errors and walks]."""

    fuses = True
    moves_without_gradient = True
    learning = 0  # steps in which the variance is updated

    def __init__(self, optimizer: OneBitOptimizer) -> None:
        self.optimizer = optimizer
        self.steps = 0  # taken so far
        self.fused = Fused([])
        self.by: Average | None = None
        self.masks: list[Any] = []  # of the groups, when `by` was made
        self.errors: Any = None
        self.errors_of = ""  # the quantity whose compression errors these are
        self.loaded: dict[str, Tensor] = {}  # loaded errors, until `errors` is made
        self.peers = Peers()
        self.warned: set[str] = set()  # parameters with few updates that were logged

    @property
    def takes_parts(self) -> bool:
        """False: an average covers the whole model."""
        return False

    def attach(self, pieces: Sequence[Piece], peers: Peers) -> None:
        """Lay out the buffer. Errors of another layout were dropped: see `closed_to_newcomers`."""
        self.fused, self.peers = Fused(pieces), peers

    def closed_to_newcomers(self) -> str:
        """The reason in every phase but the first."""
        name = type(self.optimizer).__name__
        if self.steps >= self.learning:
            return (
                f"{name} has frozen the variance after {self.learning} steps, and the parameter would "
                "have none. Save a checkpoint, and load it without the optimizer's state "
                "(load_optimizer_states=False) in a new run, in which it is trained from the beginning and "
                "the variance is learned anew"
            )
        if self.errors is not None or self.loaded or self.is_apart:
            return f"the errors of {name}'s averages at one bit are those of the others. {NEW_RUN}"
        return ""

    @property
    def averages(self) -> bool:
        """True while the variance is updated."""
        return self.steps < self.learning

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Check the options of all groups, which may have been edited, so that all ranks raise, or none."""
        for number, group in enumerate(self.optimizer.param_groups):
            self.optimizer.checked(group)
            if group.get(MASK) is not None and self.by is None:
                group[MASK] = _checked_masks(group[MASK], group["params"])
            elif self.by is not None and group.get(MASK) is not self.masks[number]:
                raise RuntimeError(
                    f"{MASK} of parameter group {number} was changed after the first average at one bit, "
                    "whose errors are those of what travelled until now. Save a checkpoint, and load it with "
                    "drop_errors=True in a new run, whose optimizer has the other mask"
                )

    # Averages ------------------------------------------------------------------------------------

    def average(self, flat: Tensor, what: str) -> Tensor:
        """Average the buffer over the ranks, in place. If this raises, nothing has been changed."""
        if self.by is None:
            self._make_average()
        assert self.by is not None
        if self.errors_of != what:  # errors of one quantity mean nothing to another
            self.errors.zero_()
            self.errors_of = what
        self.by.average(flat, flat, self.errors, what)
        return flat

    def _make_average(self) -> None:
        ranges = self.fused.ranges if self.optimizer.model_options["per_tensor_scales"] else None
        by = self.peers.compressed(self.fused.numel, ranges, self._mask())
        errors = by.new_errors()
        if self.loaded:
            errors.load_state_dict({OF_ERRORS[name]: t for name, t in self.loaded.items()})
        self.by, self.errors, self.loaded = by, errors, {}
        self.masks = [group.get(MASK) for group in self.optimizer.param_groups]

    def _mask(self) -> Tensor | None:
        """The elements to be sent, as a bool buffer; None if no group has a mask."""
        masks = {
            param: mask
            for group in self.optimizer.param_groups
            for param, mask in zip(group["params"], group.get(MASK) or (), strict=False)
            if mask is not None
        }
        if not masks:
            return None
        mine: dict[int, Tensor] = {}
        for piece, param in self._params():
            if param in masks:
                mine[id(piece)] = masks[param]
        full = self.fused.filled(lambda piece: mine.get(id(piece), torch.ones_like(piece.master)))
        return full != 0

    def _params(self) -> Iterator[tuple[Piece, Any]]:
        """Each piece with its parameter."""
        owners: Mapping[Any, Any] = self.optimizer.state.owners  # type: ignore[attr-defined]
        return ((piece, owners[piece.master]) for piece in self.fused.pieces)

    def newest_momenta(self, pieces: Sequence[Piece], factor: float) -> Tensor:
        """Make a buffer of all momenta, updated with this rank's gradients times `factor`."""
        given = {id(piece): piece.gradient for piece in pieces}

        def newest(piece: Piece) -> Tensor | None:
            state, gradient = self.known(piece), given.get(id(piece))
            if state is None:
                return None
            beta = self.group_of(piece)["betas"][0]
            average: Tensor = state["exp_avg"] * beta
            return average if gradient is None else average.add_(gradient, alpha=(1 - beta) * factor)

        return self.fused.filled(newest)

    def refuse_without_variance(self, pieces: Sequence[Piece]) -> None:
        """Raise RuntimeError if a parameter has had no gradient before the variance was frozen."""
        late = [piece.name for piece in pieces if not self._updates(piece)]
        if late:
            raise RuntimeError(
                f"{listed(late)}: no gradient has come while {type(self.optimizer).__name__} has learned the "
                f"variance, which was frozen before step {self.steps + 1}. Without a variance its step size "
                "is unknown. Train it from the beginning, or freeze the variance later"
            )
        self.warn_of_few_updates()

    def warn_of_few_updates(self) -> None:
        """Warn, once per parameter, of variances from few gradients, which can make steps far too long."""
        counts = {piece.name: self._updates(piece) for piece in self.fused.pieces}
        few = {name: count for name, count in counts.items() if 0 < count < FEW}
        new = sorted(few.keys() - self.warned, key=lambda name: (few[name], name))
        self.warned.update(few)
        if new and self.peers.place[0] == 0:
            log.warning(
                "%s averages at one bit now, and some variances are of less than %d gradients: %s. Where "
                "these happened to be small, steps are far too long. Go back to a checkpoint of before, and "
                "give these parameters more steps with exact gradients",
                type(self.optimizer).__name__,
                FEW,
                listed([f"{name} (of {few[name]})" for name in new]),
            )

    def _updates(self, piece: Piece) -> int:
        """The number of gradients that a piece's variance has averaged."""
        return int((self.known(piece) or {}).get("variance_step", 0))

    # State ---------------------------------------------------------------------------------------

    def group_of(self, piece: Piece) -> Mapping[str, Any]:
        """The options of a piece's group."""
        group: Mapping[str, Any] = self.optimizer.param_groups[piece.group]
        return group

    def known(self, piece: Piece) -> dict[str, Any] | None:
        """A piece's state, if it has any: a parameter that never had a gradient has none."""
        return self.optimizer.state.get(piece.master) or None

    def held(self) -> list[Tensor]:
        """The compression errors."""
        return [*([] if self.errors is None else (self.errors.worker, self.errors.server)), *self._loaded()]

    def _loaded(self) -> Iterator[Tensor]:
        return (tensor for name, tensor in self.loaded.items() if name != MADE_FOR)

    def own_tensors(self) -> dict[str, Tensor]:
        """This rank's compression errors."""
        if self.errors is None:
            return dict(self.loaded)
        told = self.errors.state_dict()
        return {name: told[theirs] for name, theirs in OF_ERRORS.items()} if told["worker"].numel() else {}

    def state_dict(self) -> dict[str, Any]:
        """The number of steps, and checks for `refuse_state` and `refuse_own`: equal on every rank."""
        layout = self._layout()
        return {"steps": self.steps, "errors_of": self.errors_of, "layout": layout, "learning": self.learning}

    def _layout(self) -> int:
        """A checksum of the buffer's layout and mask."""
        mask, layout = self._mask(), self.fused.digest()
        return layout if mask is None else zlib.crc32(mask.cpu().numpy().tobytes(), layout)

    def refuse_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the saved variance is frozen and this run would freeze it at another step."""
        was = state.get("learning", self.learning)
        if was != self.learning and state["steps"] >= was:
            raise ValueError(
                f"{type(self.optimizer).__name__} has frozen its variance after {was} steps, before this was "
                f"saved, and here it is to learn it for {self.learning}: that cannot be changed any more"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved `state_dict`. `load_own` follows."""
        self.steps, self.errors_of = state["steps"], state["errors_of"]

    def refuse_own(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the saved errors have another layout or mask than this run's buffer."""
        layout = self._layout()
        if state.get("layout", layout) != layout:
            raise ValueError(
                "the errors of its averages at one bit are those of other parameters, of parameters in other "
                f"groups, or under another {MASK} or per_tensor_scales: load_checkpoint with "
                "drop_errors=True gives them up"
            )

    def load_own(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the compression errors. Without tensors they are dropped."""
        self.loaded = {name: tensors[name].clone() for name in OF_ERRORS if name in tensors}
        self.by = self.errors = None
