"""By which rule owned state moves: a stepper steps the pieces that this rank owns of parameters.

[Note: steppers] A step of training is one `begin`, one `step` for each part of the pieces, and one `end`:
what counts steps, or is called at every step, is so once. A piece is a range of a parameter's elements, in
one dimension; where nothing is cut it is the whole parameter, in its own shape.

A rule that needs more than pieces asks the `Peers`, which every rank must ask equally often, also one that
owns no piece. `add_up` gives sums over all elements of a parameter, such as its norm. `by_whole` puts whole
parameters together: each comes to one rank, which does the work on it, and what is made of it is cut again.

An optimizer brings its own stepper by a method `zero_full_stepper` that returns one.

[Note: state of whole parameters] What a rule keeps in `piece.state` is cut with the piece: one value for each
element, or a number. So a checkpoint loads at any layout. State in a shape of its own, such as Adafactor's
rows and columns or Shampoo's factors, belongs to the whole parameter. The rule names these entries in
`whole_entries`:

    without a `whole_rule`   every rank that has a piece keeps the entry in `piece.state`. It must be the same
                             tensor on all of them, as it is when it is made of what `add_up` has returned
    with a `whole_rule`      the parameter's owner alone keeps it, in the dict that `WholeRule.state` returns.
                             Owners are dealt once and stay, as their state would otherwise have to travel

Either is saved once, and given to whoever keeps it in the run that loads it.

[Note: own gradients] A rule may have to see this rank's own gradient before anybody averages it. While its
`averages` is False, gradients stay what each rank's backward passes have brought; that needs whole state on
every rank. Ranks still agree on the step: it is skipped on all of them if one has a gradient that is not
finite. The norm by which gradients are clipped is one number for all, the root of the mean of the squared
norms of all ranks' own gradients: at least the averaged gradient's norm, and equal to it where all ranks have
the same. What a rule averages by itself it averages with what `Peers.compressed` makes.

[Note: a rank's own state] Such a rule may keep what differs from rank to rank, and ranks may even have other
parameters for a while. Then `common` says what all agree on, which is what is saved as the parameters, and
`own_tensors` what this rank has beside it: a checkpoint has that for each rank. It can be restored where it
was saved; elsewhere it must be given up, which somebody has to ask for.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_full._compat import hooks_aside, is_wrapped_by_schedule, without_hooks
from zero_full.kernels import reference
from zero_full.kernels.load import operators

Kind = tuple[torch.dtype, torch.dtype, torch.device]  # of masters and of their gradients, and where they are


@dataclass(frozen=True)
class Whole:
    """A parameter, as all ranks know it that have pieces of such."""

    name: str
    shape: torch.Size
    group: int  # which of the optimizer's parameter groups


@dataclass(eq=False)
class Piece:
    """What this rank owns of a parameter."""

    name: str  # of the parameter
    shape: torch.Size  # of the whole parameter
    param_range: tuple[int, int]  # which of its elements
    group: int  # which of the optimizer's parameter groups
    master: Tensor  # what moves
    gradient: Tensor | None = None  # averaged; only while the piece is stepped
    copy: Tensor | None = None  # the parameter's own elements, if they are of another type; only then, too
    state: dict[str, Any] = field(default_factory=dict)  # what the rule remembers

    @property
    def whole(self) -> Whole:
        """The parameter."""
        return Whole(self.name, self.shape, self.group)


class WholeRule(Protocol):
    """What `Peers.by_whole` is to do."""

    wire: torch.dtype  # of what ranks bring and are given

    def concerns(self, whole: Whole) -> bool:
        """Whether this parameter is to be put together. All ranks must say the same."""

    def work(self, whole: Whole) -> int:
        """How much there is to do on it, as a number to compare. All ranks must say the same."""

    def bring(self, piece: Piece) -> Tensor:
        """What this rank has to say of a piece: one number for each element."""

    def of_whole(self, whole: Whole, values: Tensor) -> Tensor:
        """What is made of all that was brought, in the parameter's shape. It may write over `values`."""

    def take(self, piece: Piece, values: Tensor) -> None:
        """The piece is given its elements of that."""


class OwnerRule(WholeRule, Protocol):
    """A rule whose owners keep state, for whole parameters: their owners stay the same ranks."""

    def state(self, whole: Whole) -> dict[str, Tensor]:
        """What this rank, the owner, keeps of the parameter: the same dict at every call."""


class Totals(NamedTuple):
    """One row of numbers about each whole parameter that any rank steps now."""

    params: list[Tensor]
    rows: Tensor
    places: list[int]  # of the parameters of this rank's pieces, among them


class Average(Protocol):
    """What `Peers.compressed` makes: averages over ranks of a flat buffer, at one bit an element each way."""

    sent: int  # bytes that this rank sends for one of them

    def new_errors(self) -> Any:
        """What this rank has wanted to say and has not said yet: nothing. The caller keeps it.

        It has `zero_`, `state_dict` and `load_state_dict`.
        """

    def average(self, x: Tensor, out: Tensor, errors: Any, what: str) -> None:
        """`out`, in fp32, becomes the average of everyone's `x`, and may be it; `errors` change.

        Something that is not finite raises an error on all ranks, by which the step is skipped, and changes
        nothing: so a stepper changes nothing before its last average of a step.
        """


class Peers:
    """The ranks that have the other pieces of the same parameters. This class is for one rank alone."""

    def totals(self, pieces: Sequence[Piece], rows: Tensor) -> Totals:
        """Given one row of numbers about each piece: sums over all pieces of each parameter."""
        return Totals([piece.master for piece in pieces], rows, list(range(len(pieces))))

    def add_up(self, pieces: Sequence[Piece], rows: Tensor) -> Tensor:
        """Given one row of numbers about each piece: for each, the sum over all pieces of its parameter."""
        totals = self.totals(pieces, rows)
        return totals.rows[totals.places]

    def by_whole(self, pieces: Sequence[Piece], rule: WholeRule) -> None:
        """Do what the rule says about these and the others' pieces of the same parameters."""
        for piece in pieces:
            if rule.concerns(piece.whole):
                brought = rule.bring(piece).view(piece.shape)
                rule.take(piece, rule.of_whole(piece.whole, brought).reshape(-1))

    @property
    def place(self) -> tuple[int, int]:
        """Which rank this is, of how many that average."""
        return 0, 1

    def all_gather(self, whole: Tensor, what: str) -> None:
        """Everyone's part becomes everyone's. `whole` is as many equal parts as there are ranks."""

    def compressed(
        self, numel: int, tensors: Sequence[tuple[int, int]] | None = None, mask: Tensor | None = None
    ) -> Average:
        """Make what averages flat buffers of so many elements. Every rank must call this with the same.

        `tensors`: their ranges in the buffer, in order; each has a scale of its own. None: all is one.
        `mask`: bool, False where an element stays zero and does not travel.
        """
        raise NotImplementedError("there are no ranks to average with")


class Stepper:
    """An update rule: it moves the pieces that this rank owns of parameters. A rule of yours derives from it.

    A step of training is one `begin`, one `step` for each part of the pieces, and one `end`. A piece is a
    range of a parameter's elements, in one dimension; where nothing is cut it is the whole parameter, in its
    own shape. A rule that needs more than its pieces asks the `Peers` that `step` is given, on every rank
    equally often. The optimizer has a method `zero_full_stepper` that returns its rule.
    """

    # True: `step` multiplies gradients by its factor and takes them in any type. It minds copies: elements
    # that are not what their master rounds to were written by somebody, and count; all are written then.
    # False: gradients are multiplied already and of the master's type, and there are no copies.
    fuses = False
    # True: `step` asks no peers, needs no `begin` and `end`, and remembers nothing but the pieces' state.
    is_alone = False
    # True: a parameter that has state and gets no gradient counts as one whose gradient is zero.
    moves_without_gradient = False

    @property
    def takes_parts(self) -> bool:
        """Whether `step` may be called for a part of the pieces at a time."""
        return True

    @property
    def whole_entries(self) -> frozenset[str]:
        """The names of state entries that belong to whole parameters, not to pieces' elements."""
        return frozenset()

    @property
    def whole_rule(self) -> OwnerRule | None:
        """The rule by which owners keep state of whole parameters; None: they keep none."""
        return None

    @property
    def averages(self) -> bool:
        """Whether the gradients of the step to come are averaged over the ranks.

        If not, they stay what this rank's backward passes have brought, which needs whole state on every
        rank. All ranks must say the same, and the same from a step's first backward pass until `step`.
        """
        return True

    def attach(self, pieces: Sequence[Piece], peers: Peers) -> None:
        """These are all the pieces that it will step, and the ranks that it can ask at any time.

        Once before the first step, and whenever parameters are trained that were frozen till then.
        """

    def closed_to_newcomers(self) -> str:
        """Why a parameter that was frozen until now cannot be trained from now on, and what helps; or ""."""
        return ""

    def begin(self, pieces: Sequence[Piece]) -> None:
        """A step begins. `pieces`: all that this rank owns, also what has no gradient now."""

    def step(self, pieces: Sequence[Piece], factor: float, peers: Peers) -> None:
        """Move these pieces, all of which have a gradient. Gradients count times `factor`."""
        raise NotImplementedError

    def end(self) -> None:
        """The step is over, or has failed."""

    def state_dict(self) -> dict[str, Any]:
        """What it remembers beside the pieces' state: the same on every rank, plain data."""
        return {}

    def refuse_state(self, state: Mapping[str, Any]) -> None:
        """ValueError if a run cannot go on here from what `state_dict` has returned there."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` has returned."""

    def phases(self) -> dict[str, Callable[[], None]]:
        """What its steps are like at different times, in order; each lets the next one be such. For plans."""
        return {}

    def with_these_options(self) -> "Stepper":
        """A copy that keeps the groups' options of now, whatever becomes of them. Only if it `is_alone`."""
        raise NotImplementedError

    # What differs from rank to rank: see [Note: a rank's own state] ------------------------------

    @property
    def is_apart(self) -> bool:
        """Whether ranks have parameters of their own now."""
        return False

    def meet(self) -> None:
        """Let all ranks have the same parameters again. Every rank must call this."""

    def common(self, piece: Piece) -> Tensor:
        """What all ranks agree that a piece is."""
        return piece.master

    @property
    def own_entries(self) -> frozenset[str]:
        """The entries of the pieces' state that differ from rank to rank now."""
        return frozenset()

    def held(self) -> list[Tensor]:
        """The memory that it keeps beside the pieces' state."""
        return []

    @property
    def cut_entries(self) -> frozenset[str]:
        """The entries of the pieces' state of which each rank keeps a part only."""
        return frozenset()

    def cut_state(self) -> Iterator[tuple[Piece, str, int, Tensor]]:
        """This rank's parts of these: of which piece, which entry, from where on, the values.

        All ranks together have it whole. A load makes it whole state of the pieces, before `load_own`.
        """
        return iter(())

    def cut_tensors(self) -> dict[str, Tensor]:
        """The parts of `cut_state`, and what is made of them, for `load_own` on the same rank of as many."""
        return {}

    def own_tensors(self) -> dict[str, Tensor]:
        """What this rank alone has, by name, between two steps."""
        return {}

    def refuse_own(self, state: Mapping[str, Any]) -> None:
        """ValueError unless `load_own` can restore what was saved together with this `state_dict`."""

    def load_own(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `own_tensors` has returned, after all else. Nothing: what there is is given up."""


class TorchStep(Stepper):
    """Any torch optimizer, by its own `step`, with the pieces in the place of its parameters."""

    def __init__(self, optimizer: Optimizer, own_step: Callable[[], Any]) -> None:
        self.optimizer, self.own_step = optimizer, own_step
        # Once, and not in each step: one that was cut short may have left pieces in the groups.
        self.shown = [group["params"] for group in optimizer.param_groups]

    @property
    def takes_parts(self) -> bool:
        """Only if nobody can tell: a class of ours or torch's, whose step nobody has replaced."""
        known = type(self.optimizer).__module__.split(".")[0] in ("torch", "zero_full")
        return known and steps_as_its_class(self.optimizer, self.own_step)

    def begin(self, pieces: Sequence[Piece]) -> None:
        """The groups list pieces."""
        groups = self.optimizer.param_groups
        for group in groups:
            group["params"] = []
        for piece in pieces:
            groups[piece.group]["params"].append(piece.master)

    def step(self, pieces: Sequence[Piece], factor: float, peers: Peers) -> None:
        """What has no gradient now stays as it is."""
        for piece in pieces:
            piece.master.grad = piece.gradient
        try:
            self._step()
        finally:
            for piece in pieces:
                piece.master.grad = None

    def _step(self) -> None:
        """Without hooks: they see the whole step from outside, and parameters instead of pieces."""
        if steps_as_its_class(self.optimizer, self.own_step):
            without_hooks(self.optimizer)()
            return
        with hooks_aside(self.optimizer):
            self.own_step()

    def end(self) -> None:
        """The groups list parameters again."""
        for group, params in zip(self.optimizer.param_groups, self.shown, strict=True):
            group["params"] = params


def steps_as_its_class(optimizer: Optimizer, step: Any) -> bool:
    """Whether nobody has put another `step` into this one object, but for schedules, which only watch."""
    return getattr(step, "__func__", None) is type(optimizer).step or is_wrapped_by_schedule(step)


def alike(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """The pieces, those together that an operator can take at once: of one group, types and device."""
    together: dict[Any, list[Piece]] = {}
    for piece in pieces:
        kinds = [None if t is None else t.dtype for t in (piece.master, piece.gradient, piece.copy)]
        together.setdefault((piece.group, *kinds, piece.master.device), []).append(piece)
    yield from together.values()


def moments_of(piece: Piece, dtype: torch.dtype) -> dict[str, Tensor]:
    """A piece's state as torch's Adam has it, made in this type if there is none: step and two averages."""
    state, master = piece.state, piece.master
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
        state["exp_avg"] = torch.zeros_like(master, dtype=dtype)
        state["exp_avg_sq"] = torch.zeros_like(master, dtype=dtype)
    if state["step"].device != master.device or state["step"].dtype != torch.float32:
        state["step"] = state["step"].to(master.device, torch.float32)
    return state


def take_copy(piece: Piece) -> None:
    """The master takes what somebody has written to its copy."""
    if piece.copy is not None:
        piece.master.copy_(reference.unless_written(piece.master, piece.copy))


def operators_for(pieces: Sequence[Piece]) -> Any:
    """The compiled ones, for all that they take; else the plain ones, which take everything."""
    given = [t for piece in pieces for t in (piece.master, piece.gradient) if t is not None]
    fine = (torch.float32, torch.bfloat16, torch.float16)
    takes = all(t.dtype in fine for t in given) and all(
        piece.master.dtype != torch.float16 and piece.master.is_contiguous() for piece in pieces
    )
    return operators(given[0].device) if given and takes else reference


@torch.no_grad()
def step_alone(optimizer: Any, closure: Callable[[], float] | None) -> float | None:
    """One step of an optimizer that brings a stepper, where no rank has other pieces of its parameters."""
    loss = loss_of(closure)
    groups = optimizer.param_groups
    listed = [
        (number, p) for number, group in enumerate(groups) for p in group["params"] if p.grad is not None
    ]
    for p in (p for _, p in listed if p.grad.layout != torch.strided):
        kind = type(optimizer).__name__
        raise RuntimeError(f"{kind} takes no sparse gradients, as a parameter of {tuple(p.shape)} has one")
    whole = [
        Piece("", p.shape, (0, p.numel()), number, p, p.grad, state=optimizer.state[p])
        for number, p in listed
    ]
    stepper: Stepper = optimizer.zero_full_stepper()
    stepper.begin(whole)
    stepper.step(whole, 1.0, Peers())
    return loss


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """What a closure that was passed to `step` returns, with gradients enabled meanwhile."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
