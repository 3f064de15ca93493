"""0/1 Adam: exact averages at growing intervals, one-bit averages in between, and later local steps.

[Note: three kinds of steps] Until `var_freeze_step` parameters are equal on all ranks. When the variance is
due, gradients are averaged exactly and update both moments of Adam. In other steps gradients are
averaged at one bit and update the momentum only. After `var_freeze_step` the variance is frozen, so a step is
linear in the momentum. Each rank takes local steps by its own gradient and sums them (`walk`). At growing
intervals the ranks synchronize: they return to the parameters of the last synchronization (`anchor`), average
their walks at one bit, step by the average, and derive a common momentum from it.

A walk sums momenta times learning rates, before the division by the denominator of Adam, which is equal on
all ranks. Walk and anchor exist during local steps. Synchronized ranks have equal bits.

[Note: a walk at any rate] Ranks send the walk over the sum of its learning rates, which is a mean of momenta,
times the steps of a whole interval: a sum of momenta. So compression errors of a large rate, or of a long
walk, do not become a huge momentum when the rate is small, or when `meet` ends a walk early. If the rate was
zero, each rank sends its momentum, so that all ranks have the same one after the synchronization.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from zero_full.optim.adam_pieces import averages_of, correction, learn, move, put, rate, spread
from zero_full.optim.local_steps import Interval, Walk
from zero_full.optim.one_bit import NEW_RUN, OneBitOptimizer, OneBitStep
from zero_full.optim.shared_variance import SharedVariance
from zero_full.optim.step import Peers, Piece, Stepper, take_copy

WALK, PARAMETERS, MOMENTUM, VARIANCE = "walk", "parameters", "exp_avg", "exp_avg_sq"
ROOTS = "roots"


class ZeroOneAdam(OneBitOptimizer):
    """Adam with growing intervals between synchronizations.

    Until `var_freeze_step` gradients are averaged: exactly when the variance is due, at growing intervals,
    and at one bit per value in between. Afterwards the variance is frozen, each rank takes local steps by its
    own gradient, and at growing intervals the ranks average their movements at one bit.

    var_freeze_step     steps in which the variance is updated and parameters are equal on all ranks
    var_update_scaler   exact averages until the interval between two of them doubles
    local_step_scaler   local steps until the interval between two synchronizations doubles
    local_step_clipper  the longest such interval, in steps
    bias_correction     of both moments, as in Adam: the momentum's by all steps, the variance's by those in
                        which it was updated
    per_tensor_scales   one sign scale per parameter; False: one for the model, which was measured to be worse
    comm_backend_name   "nccl", "gloo", "mpi" or "hccl": the backend that is required; None: any
    exp_avg_mask        as in `OneBitAdam`

    Stages 0 and 1. At stage 1 the variance is sharded.

    Between two synchronizations each rank has its own parameters. `engine.optimizer.meet()` makes them equal:
    call it before you evaluate or export. A checkpoint does not need it.

    Differences to DeepSpeed 0.19.6: its `bias_correction` and `eps_inside_sqrt` have no effect and the bias
    is never corrected (bias_correction=False here); its first call takes no step, and a single rank does not
    update its momentum between exact averages; weight decay is part of the walk, and so of the momentum
    after it; errors of walks are carried unchanged to another learning rate, so the momentum grows when the
    rate falls; ranks differ by rounding after a synchronization; one scale serves a whole group; each rank
    clips by its own norm; a resumed run begins its intervals anew.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        *,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 16,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str | None = None,
        per_tensor_scales: bool = True,
    ) -> None:
        options = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
        }
        whole = {
            "var_freeze_step": var_freeze_step,
            "var_update_scaler": var_update_scaler,
            "local_step_scaler": local_step_scaler,
            "local_step_clipper": local_step_clipper,
            "max_grad_norm": max_grad_norm,
            "amsgrad": amsgrad,
            "cuda_aware": cuda_aware,
            "comm_backend_name": comm_backend_name,
            "per_tensor_scales": per_tensor_scales,
        }
        super().__init__(params, options, whole)
        for name in ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"):
            self.steps_option(name)

    zero_full_stages = (0, 1)

    def zero_full_stepper(self) -> Stepper:
        """The stepper of sharded parameters."""
        return ZeroOneAdamStep(self)


class ZeroOneAdamStep(OneBitStep):
    """The stepper of 0/1 Adam. See [Note: three kinds of steps]."""

    def __init__(self, optimizer: ZeroOneAdam) -> None:
        super().__init__(optimizer)
        self.learning = optimizer.steps_option("var_freeze_step")
        self.exact = Interval(optimizer.steps_option("var_update_scaler"))
        longest = optimizer.steps_option("local_step_clipper")
        self.meeting = Interval(optimizer.steps_option("local_step_scaler"), longest)
        self.frozen = False  # whether a local step was taken
        self.walk: Walk | None = None  # during local steps
        self.numbers: list[Any] = []  # `rates` and `kept` of a walk that is being loaded
        self.shrunk = 1.0  # factor of a loaded interval, and of errors, by a smaller `local_step_clipper`
        self.shares = optimizer.shares_variance
        self.shared: SharedVariance | None = None

    def attach(self, pieces: Sequence[Piece], peers: Peers) -> None:
        """Lay out the buffer and, at stage 1, this rank's shard of the variance."""
        super().attach(pieces, peers)
        if self.shares and pieces:
            self.shared = SharedVariance(self.fused, peers)

    def closed_to_newcomers(self) -> str:
        """The reason of the base class; at stage 1 also one from the first step on."""
        reason = super().closed_to_newcomers()
        if not reason and self.shared is not None and any(map(self.known, self.fused.pieces)):
            reason = f"at stage 1 each rank keeps a part of the others' variance. {NEW_RUN}"
        return reason

    @property
    def steps_alone(self) -> bool:
        """Whether the next step is a local one, by this rank's own gradient."""
        return self.frozen or self.steps >= self.learning

    @property
    def averages(self) -> bool:
        """True if the variance is due in the next step."""
        return not self.steps_alone and self.exact.is_due(self.steps + 1)

    @property
    def is_apart(self) -> bool:
        """True between two synchronizations: each rank has its own parameters."""
        return self.walk is not None

    def phases(self) -> dict[str, Callable[[], None]]:
        """The kinds of steps that these intervals allow, for plans."""
        found: dict[str, Callable[[], None]] = {"exact gradients": partial(self._pretend, 1, False, 0)}
        if self.learning > self.exact.patience:
            found["gradients at one bit"] = partial(self._pretend, 2, False, 0)
        if self.meeting.longest > 1:
            found["each rank alone"] = partial(self._pretend, 2, True, 0)
        return found | {"a meeting": partial(self._pretend, 2, True, 1)}

    def _pretend(self, interval: int, frozen: bool, steps: int) -> None:
        self.exact.length = self.meeting.length = interval
        self.frozen, self.steps = frozen, steps

    def step(self, pieces: Sequence[Piece], factor: float, peers: Peers) -> None:
        """Update masters, state and copies."""
        if self.steps_alone:
            self.refuse_without_variance(pieces)
            self._alone(pieces, factor)
            self.frozen = True
            self.meeting.count()
        elif self.averages:
            self._learn(pieces, factor)
            self.exact.count()
        else:
            self._at_one_bit(pieces, factor)
        self.steps += 1

    def _learn(self, pieces: Sequence[Piece], factor: float) -> None:
        given = {id(piece): piece.gradient.float() * factor for piece in pieces if piece.gradient is not None}
        for piece in pieces:
            learn(self._state_of(piece), self.group_of(piece), given[id(piece)])
        if self.shared is not None:
            self.shared.learn(
                lambda piece: given.get(id(piece)), lambda piece: self.group_of(piece)["betas"][1]
            )
            self.shared.tell(self._correction)
        for piece in pieces:
            self._move(piece, self._state_of(piece))

    def _state_of(self, piece: Piece) -> dict[str, Any]:
        kept = (MOMENTUM, VARIANCE) if self.shared is None else (MOMENTUM,)
        return averages_of(piece, self.optimizer.state[piece.master], kept)

    def _correction(self, piece: Piece) -> float:
        """The bias correction of a piece's variance; 1 if it has none yet."""
        state = self.known(piece)
        learned = state is not None and state["variance_step"]
        return correction(state, self.group_of(piece)) if state is not None and learned else 1.0

    def _spread(self, piece: Piece, state: Mapping[str, Any]) -> Tensor:
        group = self.group_of(piece)
        if self.shared is None:
            return spread(state, group)
        root, eps = self.shared.root(piece), group["eps"]
        return root.square_().add_(eps).sqrt_() if group["eps_inside_sqrt"] else root.add_(eps)

    def _moves(self, piece: Piece, state: Mapping[str, Any]) -> Tensor:
        """Elements that have had a gradient, as a bool tensor: one bit cannot encode a zero momentum."""
        moves: Tensor = (state[VARIANCE] if self.shared is None else self.shared.root(piece)) > 0
        return moves

    def _move(self, piece: Piece, state: Mapping[str, Any]) -> None:
        move(piece, state, self.group_of(piece), self._spread(piece, state))

    def _at_one_bit(self, pieces: Sequence[Piece], factor: float) -> None:
        self.warn_of_few_updates()
        given = {id(piece): piece.gradient for piece in pieces}

        def gradient_of(piece: Piece) -> Tensor | None:
            gradient = given.get(id(piece))
            return None if gradient is None else gradient.float() * factor

        mean = self.average(self.fused.filled(gradient_of), "gradients")
        for piece, window in self.fused.windows(mean):
            if id(piece) in given or self.known(piece) is not None:
                state = self._state_of(piece)
                gradient = window.mul_(self._moves(piece, state))
                state[MOMENTUM].lerp_(gradient, 1 - self.group_of(piece)["betas"][0])
                state["step"] += 1
                if state["variance_step"]:
                    self._move(piece, state)

    # Local steps ---------------------------------------------------------------------------------

    def _alone(self, pieces: Sequence[Piece], factor: float) -> None:
        """Take a local step by this rank's own gradient. The last one of an interval synchronizes instead."""
        for piece in pieces:
            take_copy(piece)
        momenta = self.newest_momenta(pieces, factor)
        walk, is_last = self.walk or self._new_walk(), self.meeting.is_due(self.steps + 1)
        walked = walk.walked.clone() if is_last else walk.walked  # if the average fails, nothing has changed
        rates, kept = list(walk.rates), list(walk.kept)
        for place, ((piece, momentum), (_, target)) in enumerate(
            zip(self.fused.windows(momenta), self.fused.windows(walked), strict=True)
        ):
            if (state := self.known(piece)) is not None:
                group = self.group_of(piece)
                now = rate(state, group, more=1)
                target.add_(momentum, alpha=now)
                rates[place] += now
                kept[place] *= 1 - float(group["lr"]) * group["weight_decay"]
        following = Walk(walk.anchor, walked, rates, kept)
        if is_last:
            self._meet(following, momenta)
        else:
            self.walk = following
        for piece, momentum in self.fused.windows(momenta):
            if (state := self.known(piece)) is not None:
                state["step"] += 1
                if not is_last:
                    state["exp_avg"].copy_(momentum)
                    self._move(piece, state)

    def _new_walk(self) -> Walk:
        count = len(self.fused.pieces)
        anchor = self.fused.filled(lambda piece: piece.master)
        return Walk(anchor, self.fused.new(), [0.0] * count, [1.0] * count)

    def _meet(self, walk: Walk, momenta: Tensor) -> None:
        """Synchronize: average the walks. `momenta`: this rank's newest. See [Note: a walk at any rate]."""
        steps = self.meeting.length
        rates = [total / steps for total in walk.rates]
        walked = walk.walked.clone()
        both = zip(self.fused.windows(walked), self.fused.windows(momenta), rates, strict=True)
        for (_, window), (_, momentum), mean_rate in both:
            if mean_rate:
                window.div_(mean_rate)
            else:  # no rank has moved, and the momenta differ
                window.copy_(momentum).mul_(steps)
        mean = self.average(walked, "walks")
        together = zip(self.fused.windows(mean), self.fused.windows(walk.anchor), strict=True)
        for place, ((piece, window), (_, value)) in enumerate(together):
            if (state := self.known(piece)) is not None:
                window.mul_(self._moves(piece, state))
                put(piece, value * walk.kept[place] - window * rates[place] / self._spread(piece, state))
                state["exp_avg"].copy_(window).div_(steps)
        self.walk = None

    def meet(self) -> None:
        """Synchronize now, before the end of the interval. Every rank must call this."""
        if self.walk is not None:
            self._meet(self.walk, self._momenta())

    def _momenta(self) -> Tensor:
        return self.fused.filled(lambda piece: (self.known(piece) or {}).get(MOMENTUM))

    # State ---------------------------------------------------------------------------------------

    def common(self, piece: Piece) -> Tensor:
        """The piece, as of the last synchronization if ranks have taken local steps since."""
        place = self.fused.place.get(id(piece))
        if self.walk is None or place is None:
            return piece.master
        start, stop = self.fused.ranges[place]
        return self.walk.anchor[start:stop].view(piece.master.shape)

    @property
    def own_entries(self) -> frozenset[str]:
        """The momentum, during local steps."""
        return frozenset((MOMENTUM,)) if self.is_apart else frozenset()

    def held(self) -> list[Tensor]:
        """The compression errors, the shard and roots of the variance, walk and anchor."""
        variance = [] if self.shared is None else [self.shared.values, self.shared.roots]
        return super().held() + variance + ([] if self.walk is None else [self.walk.anchor, self.walk.walked])

    @property
    def cut_entries(self) -> frozenset[str]:
        """The variance, at stage 1, where it is sharded."""
        return frozenset() if self.shared is None else frozenset((VARIANCE,))

    def cut_state(self) -> Iterator[tuple[Piece, str, int, Tensor]]:
        """This rank's shard of the variance."""
        for piece, start, values in [] if self.shared is None else self.shared.parts():
            if self.known(piece) is not None:
                yield piece, VARIANCE, start, values

    def cut_tensors(self) -> dict[str, Tensor]:
        """This rank's shard of the variance, and the roots of all of it."""
        return {} if self.shared is None else {VARIANCE: self.shared.values, ROOTS: self.shared.roots}

    def own_tensors(self) -> dict[str, Tensor]:
        """This rank's compression errors and, during local steps, its walk, parameters and momentum."""
        own = super().own_tensors()
        if self.walk is None:
            return own
        masters = self.fused.filled(lambda piece: piece.master)
        return own | {WALK: self.walk.walked, PARAMETERS: masters, MOMENTUM: self._momenta()}

    def state_dict(self) -> dict[str, Any]:
        """The steps, the intervals and the numbers of the walk: equal on every rank."""
        intervals = [[each.length, each.counted] for each in (self.exact, self.meeting)]
        walk = self.walk
        numbers = [] if walk is None else [walk.rates, walk.kept]
        return {**super().state_dict(), "intervals": intervals, "frozen": self.frozen, "walk": numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved `state_dict`. `load_own` follows."""
        super().load_state_dict(state)
        for interval, (length, counted) in zip((self.exact, self.meeting), state["intervals"], strict=True):
            interval.length, interval.counted = int(min(length, interval.longest)), counted
            self.shrunk = interval.length / length  # of the last one: `meeting`
        self.frozen, self.numbers = state["frozen"], state["walk"]

    def load_own(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore errors, walk, parameters and momentum. Without tensors they are dropped."""
        super().load_own(tensors)
        for tensor in self._loaded():
            tensor.mul_(self.shrunk)
        self.walk = None
        if self.shared is not None:
            self._load_variance(self.shared, tensors)
        if WALK not in tensors:
            return
        self.walk = Walk(self._new_walk().anchor, tensors[WALK].clone(), *self.numbers)
        for name in (PARAMETERS, MOMENTUM):
            for piece, window in self.fused.windows(tensors[name]):
                state = self.known(piece)
                if name == PARAMETERS:
                    piece.master.copy_(window)
                elif state is not None:
                    state[MOMENTUM].copy_(window)

    def _load_variance(self, shared: SharedVariance, tensors: Mapping[str, Tensor]) -> None:
        if VARIANCE in tensors:
            shared.values.copy_(tensors[VARIANCE])
            shared.roots.copy_(tensors[ROOTS])
            return
        states = {id(piece): self.known(piece) or {} for piece in self.fused.pieces}
        whole = {place: state.pop(VARIANCE) for place, state in states.items() if VARIANCE in state}
        shared.absorb(whole, self._correction)
