"""Update rules on sharded parameters: a stepper updates the pieces that this rank owns.

[Note: steppers] `begin` is called once per training step, so a counter there counts each step once. A rule
that needs more than its own pieces calls the `Peers`. Every rank must call them equally often, even a rank
that owns no piece. `add_up` sums over all elements of a parameter, as for a norm. `by_whole` gathers whole
parameters: each on one rank, which computes on it, and scatters the result.

An optimizer provides its own stepper by a method `zero_full_stepper` that returns one.

[Note: state of whole parameters] State in `piece.state` is sharded with the piece: a value for each element,
or a number. So a checkpoint loads at any layout. State in another shape, such as Adafactor's rows and columns
or Shampoo's factors, belongs to the whole parameter. The rule names these entries in `whole_entries`:

    without a `whole_rule`   every rank that has a piece keeps the entry in `piece.state`. It must have equal
                             values on these ranks, as results of `add_up` have
    with a `whole_rule`      the parameter's owner alone keeps it, in the dict that `OwnerRule.state` returns.
                             Owners are assigned once and stay, because their state does not move

Either is saved once, and loaded by the ranks that keep it in the new run.

[Note: own gradients] A rule may need this rank's own gradient, before it is averaged. While `averages` is
False, gradients are not reduced. That needs whole state on every rank. Ranks still agree on the step: all of
them skip it if one has a gradient that is not finite. The norm for clipping is one number on all ranks, the
root of the mean of the squared norms of the ranks' own gradients. It is at least the averaged gradient's
norm, and equal to it where all ranks have the same gradient. The rule averages with the object that
`Peers.compressed` makes.

[Note: a rank's own state] Such a rule may keep state that differs between ranks, and even parameters may
differ for some steps. Then `common` returns the values on which all ranks agree, which are saved as the
parameters, and `own_tensors` this rank's own state, which a checkpoint has for each rank. It can be restored
on the same rank of the same world size only; on others it must be dropped, which the user has to ask for.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_full._compat import disable_step_hooks, is_wrapped_by_schedule, unhooked_step
from zero_full.kernels import reference
from zero_full.kernels.load import operators
from zero_full.kernels.ops import DTYPES

Kind = tuple[torch.dtype, torch.dtype, torch.device]  # of masters: dtype, dtype of their gradients, device


@dataclass(frozen=True)
class Whole:
    """Identity of a parameter: name, shape and group, equal on every rank."""

    name: str
    shape: torch.Size
    group: int  # number of its parameter group


@dataclass(eq=False)
class Piece:
    """The elements of a parameter that this rank owns, with their gradient and state."""

    name: str  # of the parameter
    shape: torch.Size  # of the whole parameter
    param_range: tuple[int, int]  # (start, stop) in the flattened parameter
    group: int  # number of its parameter group
    master: Tensor  # the values that are updated
    gradient: Tensor | None = None  # averaged; set during a step only
    copy: Tensor | None = None  # the parameter's elements, if their dtype is not the master's; in a step only
    changed: Tensor | None = None  # bits of the copy's elements, to set those that change; in a step only
    state: dict[str, Any] = field(default_factory=dict)  # the optimizer's state of the piece

    @property
    def whole(self) -> Whole:
        """The identity of the parameter that this piece belongs to."""
        return Whole(self.name, self.shape, self.group)


class WholeRule(Protocol):
    """An update that needs whole parameters, for `Peers.by_whole`."""

    wire: torch.dtype  # of the values that ranks send

    def concerns(self, whole: Whole) -> bool:
        """Return whether to gather this parameter. All ranks must return the same."""

    def work(self, whole: Whole) -> int:
        """Return the cost of `of_whole`, to balance it over the ranks. All ranks must return the same."""

    def bring(self, piece: Piece) -> Tensor:
        """Return this rank's contribution, a tensor of the piece's size."""

    def of_whole(self, whole: Whole, values: Tensor) -> Tensor:
        """Return the result for the gathered `values`, in the parameter's shape. May overwrite them."""

    def take(self, piece: Piece, values: Tensor) -> None:
        """Update a piece with its elements of the result."""


class OwnerRule(WholeRule, Protocol):
    """A rule that keeps state of whole parameters, each on one rank, its owner."""

    def state(self, whole: Whole) -> dict[str, Tensor]:
        """Return the state that this rank, the owner, keeps of the parameter: the same dict at every call."""


class Totals(NamedTuple):
    """A row of sums for each parameter of which some rank steps a piece now."""

    params: list[Tensor]
    rows: Tensor
    places: Tensor  # for each of this rank's pieces, the row of its parameter


class Average(Protocol):
    """A compressed all-reduce of a flat buffer, at one bit per element: made by `Peers.compressed`."""

    sent: int  # bytes that this rank sends per average

    def new_errors(self) -> Any:
        """Make this rank's compression errors, all zero. The caller keeps them between averages.

        They have `zero_`, `state_dict` and `load_state_dict`.
        """

    def average(self, x: Tensor, out: Tensor, errors: Any, what: str) -> None:
        """Write the average over the ranks' `x` to `out`, in fp32, and update `errors`. `out` may be `x`.

        A value that is not finite raises an error on all ranks, and the step is skipped. Then nothing has
        been changed, so a stepper must not change anything before the last average of its step.
        """


class Peers:
    """Communication with the ranks that own other pieces. This class serves a single rank."""

    def totals(self, pieces: Sequence[Piece], rows: Tensor) -> Totals:
        """Sum rows of numbers, one for each piece, over all pieces of each parameter."""
        places = torch.arange(len(pieces), device=rows.device)
        return Totals([piece.master for piece in pieces], rows, places)

    def add_up(self, pieces: Sequence[Piece], rows: Tensor) -> Tensor:
        """Sum rows of numbers as `totals` does, and return the row of its parameter for each piece."""
        totals = self.totals(pieces, rows)
        return totals.rows[totals.places]

    def by_whole(self, pieces: Sequence[Piece], rule: WholeRule) -> None:
        """Gather the parameters that concern the rule, compute on each of them, and update their pieces."""
        for piece in pieces:
            if rule.concerns(piece.whole):
                brought = rule.bring(piece).view(piece.shape)
                rule.take(piece, rule.of_whole(piece.whole, brought).reshape(-1))

    @property
    def place(self) -> tuple[int, int]:
        """This rank and the number of ranks, of those that average gradients."""
        return 0, 1

    def all_gather(self, whole: Tensor, what: str) -> None:
        """All-gather in place: `whole` consists of one equal part per rank."""

    def compressed(
        self, numel: int, tensors: Sequence[tuple[int, int]] | None = None, mask: Tensor | None = None
    ) -> Average:
        """Make a compressed all-reduce for flat buffers of `numel` elements. Every rank must call it alike.

        `tensors`: ranges of the buffer, in order, each with its own scale. None: one scale for the buffer.
        `mask`: bool, False where an element stays zero and is not sent.
        """
        raise NotImplementedError("a compressed average needs an engine, which knows the ranks")


class Stepper:
    """An update rule for the pieces of parameters that this rank owns. Derive your own rules from it.

    A step of training is one `begin`, one `step` for each part of the pieces, and one `end`. A piece is a
    range of a parameter's elements, in one dimension. Where parameters are not sharded it is the whole
    parameter, in its own shape. A rule that needs more than its own pieces calls the `Peers` that `step` is
    given, on every rank equally often. The optimizer has a method `zero_full_stepper` that returns its rule.

    Properties such as `takes_parts` may be class attributes of a rule in which they are constant.
    """

    # True: `step` multiplies gradients by its factor, takes them in any dtype, and writes copies, if any.
    # False: gradients are multiplied before and have the master's dtype, and there are no copies.
    fuses = False
    # True: an element of a copy that is not its rounded master was written by the user, and `step` lets it
    # replace the master's. False: the masters have what the user wrote already.
    adopts = False
    # True: on a CPU `step` sets the bits of the copies' elements that it or the user has changed, if a piece
    # has `changed`. See `adam_step` in `kernels/reference.py`.
    marks_changes = False
    # True: `step` calls no peers, needs no `begin` and `end`, and has no state but the pieces'.
    is_alone = False
    # True: a parameter that has state and gets no gradient is stepped as if its gradient were zero.
    moves_without_gradient = False

    @property
    def takes_parts(self) -> bool:
        """Whether `step` may be called several times in a step, each time with a part of the pieces."""
        return True

    @property
    def whole_entries(self) -> frozenset[str]:
        """Names of the state entries that belong to whole parameters, not to elements of pieces."""
        return frozenset()

    @property
    def whole_rule(self) -> OwnerRule | None:
        """The rule with owners that keep state of whole parameters; None: no owners."""
        return None

    @property
    def averages(self) -> bool:
        """Whether the gradients of the next step are averaged over the ranks.

        If not, each rank keeps its own gradients, which needs whole state on every rank. All ranks must
        return the same, and must not change it between a step's first backward pass and `step`.
        """
        return True

    def attach(self, pieces: Sequence[Piece], peers: Peers) -> None:
        """Note all pieces to be stepped, and the peers, which may be called at any time.

        Called once before the first step, and again when frozen parameters begin to be trained.
        """

    def unfreeze_obstacle(self) -> str:
        """Return why a frozen parameter cannot be unfrozen now, with a remedy; "" if it can."""
        return ""

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Begin a step. `pieces`: all that this rank owns, including those without a gradient."""

    def step(self, pieces: Sequence[Piece], factor: float, peers: Peers) -> None:
        """Update these pieces by their gradients times `factor`. All of them have a gradient."""
        raise NotImplementedError

    def end(self) -> None:
        """End a step, also one that has failed."""

    def state_dict(self) -> dict[str, Any]:
        """Return the rule's own state, beside that of the pieces: plain data, the same on every rank."""
        return {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if this run cannot continue from a saved `state_dict`."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved `state_dict`."""

    def phases(self) -> dict[str, Callable[[], None]]:
        """Return the kinds of steps of a run, for plans, each with a function that puts the rule into it."""
        return {}

    def with_these_options(self) -> "Stepper":
        """Copy this rule with the groups' present options, so that later edits do not change the copy's.

        Called only if `is_alone`.
        """
        raise NotImplementedError

    # State that differs between ranks: see [Note: a rank's own state] ----------------------------

    @property
    def ranks_differ(self) -> bool:
        """Whether parameters differ between ranks now."""
        return False

    def meet(self) -> None:
        """Make parameters equal on all ranks again. Every rank must call this."""

    def common(self, piece: Piece) -> Tensor:
        """Return the values of a piece on which all ranks agree."""
        return piece.master

    @property
    def own_entries(self) -> frozenset[str]:
        """Names of the entries of the pieces' state that differ between ranks now."""
        return frozenset()

    def held(self) -> list[Tensor]:
        """Return the rule's own tensors, beside the pieces' state."""
        return []

    @property
    def cut_entries(self) -> frozenset[str]:
        """Names of the entries of the pieces' state that are sharded though the pieces are whole."""
        return frozenset()

    def cut_state(self) -> Iterator[tuple[Piece, str, int, Tensor]]:
        """Return this rank's shards of `cut_entries`: piece, name of the entry, first element, values.

        The shards of all ranks make up the whole. A load puts the whole into the pieces' state first, and
        `load_own_tensors` shards it again.
        """
        return iter(())

    def cut_tensors(self) -> dict[str, Tensor]:
        """Return the shards and tensors derived from them, to load on the same rank and world size."""
        return {}

    def own_tensors(self) -> dict[str, Tensor]:
        """Return the state that only this rank has between two steps, by name."""
        return {}

    def check_own_tensors(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if tensors saved together with this `state_dict` cannot be restored here."""

    def load_own_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore `own_tensors`, after everything else. Without tensors, drop this rank's own state."""


class TorchStep(Stepper):
    """The `step` of any torch optimizer, with pieces in the groups' lists of parameters."""

    def __init__(self, optimizer: Optimizer, own_step: Callable[[], Any]) -> None:
        self.optimizer, self.own_step = optimizer, own_step
        # Noted once, and not in each step: an interrupted step may have left pieces in the groups.
        self.params = [group["params"] for group in optimizer.param_groups]

    @property
    def takes_parts(self) -> bool:
        """Whether `step` may be called for some of the parameters: it is torch's or ours, not overridden."""
        known = type(self.optimizer).__module__.split(".")[0] in ("torch", "zero_full")
        return known and steps_as_its_class(self.optimizer, self.own_step)

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Put the pieces into the groups."""
        groups = self.optimizer.param_groups
        for group in groups:
            group["params"] = []
        for piece in pieces:
            groups[piece.group]["params"].append(piece.master)

    def step(self, pieces: Sequence[Piece], factor: float, peers: Peers) -> None:
        """Run the optimizer's step with the pieces' gradients. Pieces without one stay as they are."""
        for piece in pieces:
            piece.master.grad = piece.gradient
        try:
            self._step()
        finally:
            for piece in pieces:
                piece.master.grad = None

    def _step(self) -> None:
        """Step without hooks, which run once per step, with parameters in the groups instead of pieces."""
        if steps_as_its_class(self.optimizer, self.own_step):
            unhooked_step(self.optimizer)()
            return
        with disable_step_hooks(self.optimizer):
            self.own_step()

    def end(self) -> None:
        """Put the parameters back into the groups."""
        for group, params in zip(self.optimizer.param_groups, self.params, strict=True):
            group["params"] = params


def steps_as_its_class(optimizer: Optimizer, step: Any) -> bool:
    """Return True unless `step` was overridden on this instance (LR schedulers wrap it and are ignored)."""
    return getattr(step, "__func__", None) is type(optimizer).step or is_wrapped_by_schedule(step)


def by_kind(pieces: Sequence[Piece]) -> Collection[list[Piece]]:
    """Split the pieces into lists for one call of an operator each: one group, one device, equal dtypes."""
    together: dict[Any, list[Piece]] = {}
    for piece in pieces:
        master, gradient, copy = piece.master, piece.gradient, piece.copy
        of_gradient = None if gradient is None else gradient.dtype
        of_copy = None if copy is None else copy.dtype
        kind = piece.group, master.device, master.dtype, of_gradient, of_copy, piece.changed is None
        together.setdefault(kind, []).append(piece)
    return together.values()


def moments_of(pieces: Sequence[Piece], dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Return each piece's state like torch's Adam: `step` and two moments, made in `dtype` if missing."""
    states = []
    for piece in pieces:
        state, device = piece.state, piece.master.device
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state["exp_avg"] = torch.zeros_like(piece.master, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(piece.master, dtype=dtype)
        step = state["step"]
        if step.device != device or step.dtype != torch.float32:  # a state dict of torch may have others
            state["step"] = step.to(device, torch.float32)
        states.append(state)
    return states


def indices_on(device: torch.device, indices: Sequence[int]) -> Tensor:
    """Copy indices to the device. Indexing by a list makes the host wait for a copy."""
    return copy_on(device, torch.tensor(indices, dtype=torch.int64, device="cpu"))


def copy_on(device: torch.device, here: Tensor) -> Tensor:
    """Copy a tensor of a few numbers to the device, from the host through pinned memory: it does not wait."""
    if here.device.type != "cpu" or device.type in ("cpu", "meta"):
        return here.to(device)
    return here.pin_memory().to(device, non_blocking=True)


def operators_for(pieces: Sequence[Piece]) -> Any:
    """Return the compiled operators if they take these pieces, else the reference, which takes any."""
    given = [t for piece in pieces for t in (piece.master, piece.gradient) if t is not None]
    takes = all(t.dtype in DTYPES for t in given) and all(
        piece.master.dtype != torch.float16 and piece.master.is_contiguous() for piece in pieces
    )
    return operators(given[0].device) if given and takes else reference


@torch.no_grad()
def step_alone(optimizer: Any, closure: Callable[[], float] | None) -> float | None:
    """Step an optimizer by its stepper without an engine: its parameters are whole on this rank."""
    loss = loss_of(closure)
    groups = optimizer.param_groups
    used = [(number, p) for number, group in enumerate(groups) for p in group["params"] if p.grad is not None]
    for p in (p for _, p in used if p.grad.layout != torch.strided):
        kind = type(optimizer).__name__
        raise RuntimeError(f"{kind} needs dense gradients, not {p.grad.layout} of shape {tuple(p.shape)}")
    whole = [
        Piece("", p.shape, (0, p.numel()), number, p, p.grad, state=optimizer.state[p]) for number, p in used
    ]
    stepper: Stepper = optimizer.zero_full_stepper()
    stepper.begin(whole)
    stepper.step(whole, 1.0, Peers())
    return loss


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """Call a closure that was passed to `step`, with gradients enabled, and return its result."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
