"""What 1-bit rules have in common: pieces in one flat buffer, its average at one bit, what each rank has.

[Note: errors and walks] Between two steps most of what such a rule keeps is the same on all ranks. What
differs from rank to rank is what was wanted and not said yet (the errors), and while ranks step apart also
where each has gone. It is saved for each rank, and means nothing to other ranks, or to as many others.
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
FIXED = {  # DeepSpeed's options that can only have one value here
    "max_grad_norm": "clipping is not the optimizer's: use gradient_clipping, or Settings(clip=...)",
    "amsgrad": "the largest variance so far cannot be known at one bit an element",
    "cuda_aware": "torch.distributed knows by itself what its MPI can send",
}


class OneBitOptimizer(Optimizer):
    """An optimizer that needs the other ranks: `zero_full.initialize` makes of it one that can step."""

    zero_full_stages: tuple[int, ...] = (0,)  # at which it can be stepped
    shares_variance = False  # each rank keeps its part only: stage 1
    model_options: Mapping[str, Any]  # those that are the whole model's, not a group's

    def __init__(self, params: Any, options: Mapping[str, Any], whole: Mapping[str, Any]) -> None:
        _refuse_fixed(whole)
        kept = {name: value for name, value in whole.items() if name not in FIXED}
        kept["per_tensor_scales"] = flag("per_tensor_scales", kept["per_tensor_scales"])
        self.model_options = MappingProxyType(kept)  # what is written later would have no effect
        if not (self.backend is None or isinstance(self.backend, str)):
            raise ValueError(f"comm_backend_name must be a name, not {shown(self.backend)}")
        super().__init__(params, self.checked(options))

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, in which torch has groups, state and defaults only."""
        return {**super().__getstate__(), "model_options": dict(self.model_options)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """From a copy or a pickle; torch calls it in its constructor, too."""
        super().__setstate__(state)
        self.model_options = MappingProxyType(dict(self.model_options))

    @property
    def backend(self) -> str | None:
        """Over what its author wants ranks to talk; None: over whatever they do."""
        name: str | None = self.model_options["comm_backend_name"]
        return name

    def steps_option(self, name: str) -> int:
        """One of the options that count steps; ValueError unless it is a whole number above 0."""
        return at_least(name, self.model_options[name], 1)

    def checked(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """A group's options, of the right kind and in their bounds; ValueError if one is not."""
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
        """Refused: a step averages over the ranks, which this object does not know."""
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
    """Pieces end to end, as flat fp32 buffers have them."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = list(pieces)
        numels = [piece.master.numel() for piece in pieces]
        ends = list(accumulate(numels))
        self.ranges = [(end - numel, end) for numel, end in zip(numels, ends, strict=True)]
        self.numel = sum(numels)
        self.place = {id(piece): place for place, piece in enumerate(self.pieces)}
        self.device = pieces[0].master.device if pieces else torch.device("cpu")

    def new(self) -> Tensor:
        """A buffer of zeros."""
        return torch.zeros(self.numel, dtype=torch.float32, device=self.device)

    def windows(self, flat: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """Each piece, and its part of a buffer in the piece's shape."""
        for piece, (start, stop) in zip(self.pieces, self.ranges, strict=True):
            yield piece, flat[start:stop].view(piece.master.shape)

    def filled(self, value_of: Callable[[Piece], Tensor | None]) -> Tensor:
        """A buffer of what pieces have; zeros where that is nothing."""
        flat = self.new()
        for piece, window in self.windows(flat):
            if (value := value_of(piece)) is not None:
                window.copy_(value)
        return flat

    def digest(self) -> int:
        """A checksum of what is where: buffers of another one cannot be used."""
        return zlib.crc32(repr([(piece.group, tuple(piece.shape)) for piece in self.pieces]).encode())


# The stepper -------------------------------------------------------------------------------------

FEW = 8  # gradients: of less, the mean square is now and then far from what more of them would give
WORKER, SERVER, MADE_FOR = "worker_error", "server_error", "made_for"
OF_ERRORS = {WORKER: "worker", SERVER: "server", MADE_FOR: "made_for"}
NEW_RUN = (
    "Save a checkpoint, and load it with drop_errors=True in a new run, in which it is trained when "
    "initialize is called; with a later var_freeze_step, if it would have few exact gradients until then"
)


class OneBitStep(Stepper):
    """What steppers have in common that average by themselves. See [Note: errors and walks]."""

    fuses = True
    moves_without_gradient = True
    learning = 0  # steps in which the variance is learned

    def __init__(self, optimizer: OneBitOptimizer) -> None:
        self.optimizer = optimizer
        self.steps = 0  # that were taken
        self.fused = Fused([])
        self.by: Average | None = None
        self.masks: list[Any] = []  # of the groups, by which that was made
        self.errors: Any = None
        self.errors_of = ""  # of what
        self.loaded: dict[str, Tensor] = {}  # errors, until there is something to put them into
        self.peers = Peers()
        self.warned: set[str] = set()  # of too few updates

    @property
    def takes_parts(self) -> bool:
        """No: an average takes the whole model."""
        return False

    def attach(self, pieces: Sequence[Piece], peers: Peers) -> None:
        """The buffer is laid out: there are no errors, or they were given up, or `closed_to_newcomers`."""
        self.fused, self.peers = Fused(pieces), peers

    def closed_to_newcomers(self) -> str:
        """All phases but the first."""
        name = type(self.optimizer).__name__
        if self.steps >= self.learning:
            return (
                f"{name} has frozen the variance after {self.learning} steps, so nobody would know how far "
                "to step. Save a checkpoint, and load it without the optimizer's state "
                "(load_optimizer_states=False) in a new run, in which it is trained from the beginning and "
                "the variance is learned anew"
            )
        if self.errors is not None or self.loaded or self.is_apart:
            return f"the errors of {name}'s averages at one bit are those of the others. {NEW_RUN}"
        return ""

    @property
    def averages(self) -> bool:
        """While the variance is learned."""
        return self.steps < self.learning

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Every rank looks at all groups, which may have been edited: all fail, or none."""
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
        """The buffer becomes the average of everyone's. Where it raises nothing has changed."""
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
        """Which elements travel: None if no group says so."""
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
        """Each piece and its parameter."""
        owners: Mapping[Any, Any] = self.optimizer.state.owners  # type: ignore[attr-defined]
        return ((piece, owners[piece.master]) for piece in self.fused.pieces)

    def newest_momenta(self, pieces: Sequence[Piece], factor: float) -> Tensor:
        """A buffer of all momenta, with this rank's gradients times the factor in them."""
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
        """RuntimeError if a parameter has had no gradient while the variance was learned."""
        late = [piece.name for piece in pieces if not self._updates(piece)]
        if late:
            raise RuntimeError(
                f"{listed(late)}: no gradient has come while {type(self.optimizer).__name__} has learned the "
                f"variance, of which it has frozen what there was before step {self.steps + 1}, so nobody "
                "knows how far to step. Train it from the beginning, or freeze the variance later"
            )
        self.warn_of_few_updates()

    def warn_of_few_updates(self) -> None:
        """Say, once of each, which variance is of so few gradients that steps over it can be far too long."""
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
        """How many gradients a variance is of."""
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
        """What is kept beside the pieces' state."""
        return [*([] if self.errors is None else (self.errors.worker, self.errors.server)), *self._loaded()]

    def _loaded(self) -> Iterator[Tensor]:
        return (tensor for name, tensor in self.loaded.items() if name != MADE_FOR)

    def own_tensors(self) -> dict[str, Tensor]:
        """What this rank alone has."""
        if self.errors is None:
            return dict(self.loaded)
        told = self.errors.state_dict()
        return {name: told[theirs] for name, theirs in OF_ERRORS.items()} if told["worker"].numel() else {}

    def state_dict(self) -> dict[str, Any]:
        """How far it is, the same on every rank."""
        layout = self._layout()
        return {"steps": self.steps, "errors_of": self.errors_of, "layout": layout, "learning": self.learning}

    def _layout(self) -> int:
        """A checksum of what is where in the buffer, and of what travels."""
        mask, layout = self._mask(), self.fused.digest()
        return layout if mask is None else zlib.crc32(mask.cpu().numpy().tobytes(), layout)

    def refuse_state(self, state: Mapping[str, Any]) -> None:
        """ValueError if the variance is frozen there, and would be learned for another time here."""
        was = state.get("learning", self.learning)
        if was != self.learning and state["steps"] >= was:
            raise ValueError(
                f"{type(self.optimizer).__name__} has frozen its variance after {was} steps, before this was "
                f"saved, and here it is to learn it for {self.learning}: that cannot be changed any more"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` has returned. What ranks had of their own comes after that."""
        self.steps, self.errors_of = state["steps"], state["errors_of"]

    def refuse_own(self, state: Mapping[str, Any]) -> None:
        """ValueError unless what ranks had of their own can be loaded into this, going by `state_dict`."""
        layout = self._layout()
        if state.get("layout", layout) != layout:
            raise ValueError(
                "the errors of its averages at one bit are those of other parameters, of parameters in other "
                f"groups, or under another {MASK} or per_tensor_scales: load_checkpoint with "
                "drop_errors=True gives them up"
            )

    def load_own(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `own_tensors` has returned; nothing means that it is given up."""
        self.loaded = {name: tensors[name].clone() for name in OF_ERRORS if name in tensors}
        self.by = self.errors = None
