"""0/1 Adam: exact averages at growing intervals, one-bit averages in between, and later local steps.

[Note: three kinds of steps] Until `var_freeze_step` parameters are equal on all ranks. When the variance is
due, gradients are averaged exactly and update both moments of Adam. In other steps gradients are
averaged at one bit and update the momentum only. After `var_freeze_step` the variance is frozen, so a step is
linear in the momentum. Each rank takes local steps by its own gradient and sums them (`moved`). At growing
intervals the ranks synchronize: they return to the parameters of the last synchronization (`anchor`), average
their sums at one bit, step by the average, and derive a common momentum from it.

The sum is of momenta times learning rates, before the division by the denominator of Adam, which is equal on
all ranks. Sum and anchor exist during local steps. Synchronized ranks have equal bits.

[Note: local steps at any rate] Ranks send the sum over that of its learning rates, which is a mean of
momenta, times the steps of a whole interval: a sum of momenta. So compression errors of a large rate, or of a
long interval, do not become a huge momentum when the rate is small, or when `meet` ends an interval early. If
the rate was zero, each rank sends its momentum, so that all ranks have the same one afterwards.

[Note: sharded variance] A one-bit average gives every rank the whole result, so parameters, momentum and
local steps are whole on each. The variance changes only in steps with exact gradients and can be sharded.
Each rank keeps its shard in fp32 and the root of the whole in bf16, by which a step divides. When the
variance is due each rank updates its shard, and an all-gather distributes the new roots.

For n elements on N ranks that is 2n + 4n/N bytes instead of 4n, and 2n (N - 1)/N more bytes to send when the
variance is due. A step equals that of stage 0 to within the rounding of bf16, 1 part in 256. Gradients are
not reduce-scattered, because the momentum needs the exact gradient whole.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zero_full.optim.arguments import arguments_of
from zero_full.optim.one_bit import (
    NEW_RUN,
    BufferLayout,
    OneBitOptimizer,
    OneBitStep,
    denominator,
    moments_in,
    root_with_eps,
    step_along_momentum,
    step_size,
    update_moments,
    variance_correction,
    write,
)
from zero_full.optim.step import Peers, Piece, Stepper

Corrected = Callable[[Piece], float]  # the bias correction of a piece's variance
# Keys of state entries and of tensors in checkpoints.
MOVED, PARAMETERS, MOMENTUM, VARIANCE, ROOTS = "walk", "parameters", "exp_avg", "exp_avg_sq", "roots"


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

    zero_full_stages = (0, 1)
    step_options = ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")

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
        super().__init__(params, arguments_of(locals()))

    def zero_full_stepper(self) -> Stepper:
        """Return the stepper of sharded parameters."""
        return ZeroOneAdamStep(self)


class Interval:
    """The number of steps between two events. It doubles after every `patience` counts, up to `longest`."""

    def __init__(self, patience: int, longest: float = float("inf")) -> None:
        self.patience, self.longest = patience, longest
        self.length, self.counted = 1, 0

    def is_due(self, step: int) -> bool:
        """Return whether the event falls on this step."""
        return step % self.length == 0

    def count(self) -> None:
        """Count an event, and double the interval if it is time."""
        self.counted += 1
        if self.counted >= self.patience:
            self.counted = 0
            self.length = int(min(2 * self.length, self.longest))


@dataclass(eq=False)
class LocalMovement:
    """A rank's movement since the last synchronization."""

    anchor: Tensor  # parameters of the last synchronization
    moved: Tensor  # sum of momenta times learning rates
    rates: list[float]  # sums of the learning rates, by piece; equal on all ranks
    kept: list[float]  # products of the factors of weight decay, by piece; equal on all ranks


class ShardedVariance:
    """This rank's shard of the variance, and the square roots of all of it. See [Note: sharded variance]."""

    def __init__(self, layout: BufferLayout, peers: Peers) -> None:
        self.layout, self.peers = layout, peers
        rank, ranks = peers.place
        part = -(-layout.numel // ranks)
        self.start, self.stop = min(rank * part, layout.numel), min((rank + 1) * part, layout.numel)
        self.values = torch.zeros(self.stop - self.start, dtype=torch.float32, device=layout.device)
        self.roots = torch.zeros(part * ranks, dtype=torch.bfloat16, device=layout.device)

    def shards(self) -> Iterator[tuple[Piece, int, Tensor]]:
        """Yield this rank's shard by pieces: the piece, the first of its elements, the values."""
        for piece, (start, stop) in zip(self.layout.pieces, self.layout.ranges, strict=True):
            first, last = max(start, self.start), min(stop, self.stop)
            if first < last:
                yield piece, first - start, self.values[first - self.start : last - self.start]

    def update(self, gradients: Mapping[Piece, Tensor], beta_of: Callable[[Piece], float]) -> None:
        """Update this rank's shard with the averaged gradients of the pieces that have one."""
        for piece, first, values in self.shards():
            if piece in gradients:
                mine = gradients[piece].reshape(-1)[first : first + values.numel()].float()
                values.mul_(beta_of(piece)).addcmul_(mine, mine, value=1 - beta_of(piece))

    def gather_roots(self, corrected: Corrected) -> None:
        """Distribute the new roots by an all-gather. Every rank must call this."""
        for piece, first, values in self.shards():
            at = self.layout.range_of[piece][0] + first
            self.roots[at : at + values.numel()].copy_((values / corrected(piece)).sqrt_())
        self.peers.all_gather(self.roots, "roots of the variance")

    def root(self, piece: Piece) -> Tensor:
        """Return the root of the variance of a whole piece, in fp32."""
        start, stop = self.layout.range_of[piece]
        return self.roots[start:stop].view(piece.master.shape).float()

    def load(self, whole: Mapping[Piece, Tensor], corrected: Corrected) -> None:
        """Load this rank's shard of the variance. Pieces that are not in `whole` get zeros."""
        self.values.zero_()
        self.roots.zero_()
        for piece, first, values in self.shards():
            if piece in whole:
                values.copy_(whole[piece].reshape(-1)[first : first + values.numel()])
        for piece, (start, stop) in zip(self.layout.pieces, self.layout.ranges, strict=True):
            if piece in whole:
                self.roots[start:stop].copy_((whole[piece].reshape(-1) / corrected(piece)).sqrt_())


class ZeroOneAdamStep(OneBitStep):
    """The stepper of 0/1 Adam. See [Note: three kinds of steps]."""

    def __init__(self, optimizer: ZeroOneAdam) -> None:
        super().__init__(optimizer)
        options = optimizer.model_options
        self.variance_interval = Interval(options["var_update_scaler"])
        self.sync_interval = Interval(options["local_step_scaler"], options["local_step_clipper"])
        self.frozen = False  # whether a local step was taken
        self.movement: LocalMovement | None = None  # between two synchronizations
        self.numbers: list[Any] = []  # `rates` and `kept` of local steps that are being loaded
        self.shrunk = 1.0  # factor of a loaded interval, and of errors, by a smaller `local_step_clipper`
        self.shards_variance = optimizer.shards_variance
        self.sharded: ShardedVariance | None = None

    def attach(self, pieces: Sequence[Piece], peers: Peers) -> None:
        """Lay out the buffer and, at stage 1, this rank's shard of the variance."""
        super().attach(pieces, peers)
        if self.shards_variance and pieces:
            self.sharded = ShardedVariance(self.layout, peers)

    def unfreeze_obstacle(self) -> str:
        """Return why a parameter cannot be unfrozen; at stage 1 it never can after the first step."""
        reason = super().unfreeze_obstacle()
        if not reason and self.sharded is not None and any(map(self.state_of, self.layout.pieces)):
            reason = f"at stage 1 the variance is sharded, and has no place for the parameter. {NEW_RUN}"
        return reason

    @property
    def steps_locally(self) -> bool:
        """Whether the next step is a local one, by this rank's own gradient."""
        return self.frozen or self.steps >= self.warmup_steps

    @property
    def averages(self) -> bool:
        """Whether the next step averages gradients: if it updates the variance."""
        return not self.steps_locally and self.variance_interval.is_due(self.steps + 1)

    @property
    def ranks_differ(self) -> bool:
        """True between two synchronizations: each rank has its own parameters."""
        return self.movement is not None

    def phases(self) -> dict[str, Callable[[], None]]:
        """Return the kinds of steps that these intervals allow, for plans."""
        found: dict[str, Callable[[], None]] = {"exact gradients": partial(self._go_to, 1, False, 0)}
        if self.warmup_steps > self.variance_interval.patience:
            found["gradients at one bit"] = partial(self._go_to, 2, False, 0)
        if self.sync_interval.longest > 1:
            found["local step"] = partial(self._go_to, 2, True, 0)
        return found | {"synchronization": partial(self._go_to, 2, True, 1)}

    def _go_to(self, interval: int, frozen: bool, steps: int) -> None:
        self.variance_interval.length = self.sync_interval.length = interval
        self.frozen, self.steps = frozen, steps

    def step(self, pieces: Sequence[Piece], factor: float, peers: Peers) -> None:
        """Update masters, state and copies."""
        if self.steps_locally:
            self.check_variance(pieces)
            self._step_locally(pieces, factor)
            self.frozen = True
            self.sync_interval.count()
        elif self.averages:
            self._step_exactly(pieces, factor, peers)
            self.variance_interval.count()
        else:
            self.warn_of_few_updates()
            self._step_at_one_bit(pieces, factor)
        self.steps += 1

    def _step_exactly(self, pieces: Sequence[Piece], factor: float, peers: Peers) -> None:
        given = {p: p.gradient.float() * factor for p in pieces if p.gradient is not None}
        for piece in pieces:
            update_moments(self._moments_of(piece), self.group_of(piece), given[piece])
        if self.sharded is not None:  # then the moments have no variance: ranks exchange roots of shards
            self.sharded.update(given, lambda piece: self.group_of(piece)["betas"][1])
            self.sharded.gather_roots(self._correction)
        for piece in pieces:
            self._step_piece(piece, self._moments_of(piece))

    def _moments_of(self, piece: Piece) -> dict[str, Any]:
        kept = (MOMENTUM, VARIANCE) if self.sharded is None else (MOMENTUM,)
        return moments_in(piece, self.optimizer.state[piece.master], kept)

    def _correction(self, piece: Piece) -> float:
        """Return the bias correction of a piece's variance; 1 if it has none yet."""
        state = self.state_of(piece) or {}
        return variance_correction(state, self.group_of(piece)) if state.get("variance_step") else 1.0

    def _denominator(self, piece: Piece, state: Mapping[str, Any]) -> Tensor:
        group = self.group_of(piece)
        if self.sharded is None:
            return denominator(state, group)
        root = self.sharded.root(piece)
        return root_with_eps(root.square_(), group) if group["eps_inside_sqrt"] else root.add_(group["eps"])

    def _has_variance(self, piece: Piece, state: Mapping[str, Any]) -> Tensor:
        """Return which elements have had a gradient: one bit cannot encode a zero momentum."""
        variance: Tensor = state[VARIANCE] if self.sharded is None else self.sharded.root(piece)
        return variance > 0

    def _step_piece(self, piece: Piece, state: Mapping[str, Any]) -> None:
        step_along_momentum(piece, state, self.group_of(piece), self._denominator(piece, state))

    def _step_at_one_bit(self, pieces: Sequence[Piece], factor: float) -> None:
        given = {piece: piece.gradient for piece in pieces}

        def gradient_of(piece: Piece) -> Tensor | None:
            gradient = given.get(piece)
            return None if gradient is None else gradient.float() * factor

        mean = self.average(self.layout.filled(gradient_of), "gradients")
        for piece, part in self.layout.parts(mean):
            if piece in given or self.state_of(piece) is not None:
                state = self._moments_of(piece)
                gradient = part.mul_(self._has_variance(piece, state))
                state[MOMENTUM].lerp_(gradient, 1 - self.group_of(piece)["betas"][0])
                state["step"] += 1
                if state["variance_step"]:  # else there is no step size yet, and the momentum waits
                    self._step_piece(piece, state)

    # Local steps ---------------------------------------------------------------------------------

    def _step_locally(self, pieces: Sequence[Piece], factor: float) -> None:
        """Take a local step by this rank's own gradient. The last one of an interval synchronizes instead."""
        momenta = self.newest_momenta(pieces, factor)
        movement, is_last = self.movement or self._new_movement(), self.sync_interval.is_due(self.steps + 1)
        # If the average of the last step fails, nothing has changed.
        moved = movement.moved.clone() if is_last else movement.moved
        rates, kept = list(movement.rates), list(movement.kept)
        both = zip(self.layout.parts(momenta), self.layout.parts(moved), strict=True)
        for place, ((piece, momentum), (_, target)) in enumerate(both):
            if (state := self.state_of(piece)) is not None:
                group = self.group_of(piece)
                rate = step_size(state, group, more=1)
                target.add_(momentum, alpha=rate)
                rates[place] += rate
                kept[place] *= 1 - float(group["lr"]) * group["weight_decay"]
        following = LocalMovement(movement.anchor, moved, rates, kept)
        if is_last:
            self._synchronize(following, momenta)
        else:
            self.movement = following
        for piece, state, momentum in self.parts_with_state(momenta):
            state["step"] += 1
            if not is_last:
                state["exp_avg"].copy_(momentum)
                self._step_piece(piece, state)

    def _new_movement(self) -> LocalMovement:
        count = len(self.layout.pieces)
        anchor = self.layout.filled(lambda piece: piece.master)
        return LocalMovement(anchor, self.layout.zeros(), [0.0] * count, [1.0] * count)

    def _synchronize(self, movement: LocalMovement, momenta: Tensor) -> None:
        """Average the local steps. `momenta`: this rank's newest. See [Note: local steps at any rate]."""
        steps = self.sync_interval.length
        rates = [total / steps for total in movement.rates]
        moved = movement.moved.clone()
        both = zip(self.layout.parts(moved), self.layout.parts(momenta), rates, strict=True)
        for (_, part), (_, momentum), mean_rate in both:
            if mean_rate:
                part.div_(mean_rate)
            else:  # no rank has moved, and the momenta differ
                part.copy_(momentum).mul_(steps)
        mean = self.average(moved, "walks")  # the name of these errors in checkpoints
        together = zip(self.layout.parts(mean), self.layout.parts(movement.anchor), strict=True)
        for place, ((piece, part), (_, value)) in enumerate(together):
            if (state := self.state_of(piece)) is not None:
                part.mul_(self._has_variance(piece, state))
                change = part * rates[place] / self._denominator(piece, state)
                write(piece, value * movement.kept[place] - change)
                state["exp_avg"].copy_(part).div_(steps)
        self.movement = None

    def meet(self) -> None:
        """Synchronize now, before the end of the interval. Every rank must call this."""
        if self.movement is not None:
            self._synchronize(self.movement, self._momenta())

    def _momenta(self) -> Tensor:
        return self.layout.filled(lambda piece: (self.state_of(piece) or {}).get(MOMENTUM))

    # State ---------------------------------------------------------------------------------------

    def common(self, piece: Piece) -> Tensor:
        """Return the piece, as of the last synchronization if ranks have taken local steps since."""
        bounds = self.layout.range_of.get(piece)
        if self.movement is None or bounds is None:
            return piece.master
        return self.movement.anchor[slice(*bounds)].view(piece.master.shape)

    @property
    def own_entries(self) -> frozenset[str]:
        """The momentum, during local steps."""
        return frozenset((MOMENTUM,)) if self.ranks_differ else frozenset()

    def held(self) -> list[Tensor]:
        """Return compression errors, the shard and roots of the variance, and the buffers of local steps."""
        local = [] if self.movement is None else [self.movement.anchor, self.movement.moved]
        return [*super().held(), *self.cut_tensors().values(), *local]

    @property
    def cut_entries(self) -> frozenset[str]:
        """The variance, at stage 1, where it is sharded."""
        return frozenset() if self.sharded is None else frozenset((VARIANCE,))

    def cut_state(self) -> Iterator[tuple[Piece, str, int, Tensor]]:
        """Yield this rank's shard of the variance."""
        for piece, start, values in [] if self.sharded is None else self.sharded.shards():
            if self.state_of(piece) is not None:
                yield piece, VARIANCE, start, values

    def cut_tensors(self) -> dict[str, Tensor]:
        """Return this rank's shard of the variance, and the square roots of the whole variance."""
        return {} if self.sharded is None else {VARIANCE: self.sharded.values, ROOTS: self.sharded.roots}

    def own_tensors(self) -> dict[str, Tensor]:
        """Return this rank's compression errors and, in local steps, its movement, values and momentum."""
        own = super().own_tensors()
        if self.movement is None:
            return own
        masters = self.layout.filled(lambda piece: piece.master)
        return own | {MOVED: self.movement.moved, PARAMETERS: masters, MOMENTUM: self._momenta()}

    def state_dict(self) -> dict[str, Any]:
        """Return the steps, the intervals and the numbers of local steps: equal on every rank."""
        intervals = [[each.length, each.counted] for each in (self.variance_interval, self.sync_interval)]
        numbers = [] if self.movement is None else [self.movement.rates, self.movement.kept]
        return {**super().state_dict(), "intervals": intervals, "frozen": self.frozen, "walk": numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved `state_dict`. `load_own_tensors` follows."""
        super().load_state_dict(state)
        intervals = self.variance_interval, self.sync_interval
        for interval, (length, counted) in zip(intervals, state["intervals"], strict=True):
            interval.length, interval.counted = int(min(length, interval.longest)), counted
            self.shrunk = interval.length / length  # of the last one, `sync_interval`
        self.frozen, self.numbers = state["frozen"], state["walk"]

    def load_own_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore errors, movement, parameters and momentum. Without tensors they are dropped."""
        super().load_own_tensors(tensors)
        for tensor in self._loaded():
            tensor.mul_(self.shrunk)
        self.movement = None
        if self.sharded is not None:
            self._load_variance(self.sharded, tensors)
        if MOVED not in tensors:
            return
        self.movement = LocalMovement(
            self._new_movement().anchor, tensors[MOVED].clone(), *map(list, self.numbers)
        )
        for piece, part in self.layout.parts(tensors[PARAMETERS]):
            piece.master.copy_(part)
        for _, state, part in self.parts_with_state(tensors[MOMENTUM]):
            state[MOMENTUM].copy_(part)

    def _load_variance(self, sharded: ShardedVariance, tensors: Mapping[str, Tensor]) -> None:
        if VARIANCE in tensors:
            sharded.values.copy_(tensors[VARIANCE])
            sharded.roots.copy_(tensors[ROOTS])
            return
        states = {piece: self.state_of(piece) or {} for piece in self.layout.pieces}
        whole = {piece: state.pop(VARIANCE) for piece, state in states.items() if VARIANCE in state}
        sharded.load(whole, self._correction)
