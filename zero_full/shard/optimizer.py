"""`ZeroOptimizer`: any elementwise optimizer, stepping only this rank's slices.

It stands where the optimizer it wraps stood: same `param_groups` (so schedulers work), `step`,
`zero_grad`, `state_dict`. Which stage it is, is a setting of its parts.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero_full.comm.communicator import CommunicationError
from zero_full.comm.lane import Pending, lane_for
from zero_full.comm.topology import this_rank
from zero_full.precision.norms import Slices
from zero_full.precision.scaler import DynamicScale, ScaleExhaustedError, StaticScale
from zero_full.shard import state as sharded_state
from zero_full.shard.bucket import Bucket
from zero_full.shard.build import Parts
from zero_full.shard.gatherer import ParameterGatherer
from zero_full.shard.groups import Groups
from zero_full.shard.owners import register, unregister
from zero_full.shard.reducer import GradientReducer
from zero_full.shard.report import investigate
from zero_full.shard.settings import Settings
from zero_full.shard.sweep import AdamSweep
from zero_full.shard.values import Member, State, Values

log = logging.getLogger("zero_full")
EPSILON = 1e-6


@dataclass(frozen=True)
class StepReport:
    """What a step did."""

    applied: bool
    grad_norm: float | None  # of the averaged gradients, unscaled, before clipping; None: nobody needed it
    scale: float  # the loss scale that backward used


class ZeroOptimizer(torch.optim.Optimizer):
    """See the module's docstring."""

    def __init__(
        self,
        base: torch.optim.Optimizer,
        model: nn.Module,
        parts: Parts,
        groups: Groups,
        settings: Settings,
        scaler: StaticScale,
    ) -> None:
        # torch's own constructor would copy the groups; here they stay the wrapped optimizer's.
        self.base, self.parts, self.groups = base, parts, groups
        self.buckets, self.frozen = parts.buckets, parts.frozen
        self.settings, self.scaler = settings, scaler
        self.lane = lane_for(groups.dense.shard.device, settings.overlap)
        self.loss: Tensor | None = None
        self.last: StepReport | None = None
        self.sweep = AdamSweep(base, settings.dtypes)
        self.left_scale: float | None = None  # that the last step has left in the gradients
        self.passes = 0  # backward passes until then
        self.arriving: dict[Bucket, Pending] = {}
        register(self, (m.param for values in self.values() for m in values.members))
        self._replace_parameters()
        self.reducer = GradientReducer(self.buckets, self.lane, settings.stage)
        self.guards: list[RemovableHandle] = []  # on the model's state_dict
        self.gatherer: ParameterGatherer | None = None
        if parts.sites:
            beside = lane_for(groups.dense.shard.device, settings.overlap)
            limits = settings.gathering
            self.gatherer = ParameterGatherer(model, parts.sites, beside, limits, self.reducer)

    def values(self) -> list[Values]:
        """All flat buffers of parameters."""
        return self.parts.values

    def _members(self) -> list[Member]:
        return [member for bucket in self.buckets for member in bucket.members]

    def _replace_parameters(self) -> None:
        """The wrapped optimizer gets this rank's fragments instead of parameters."""
        whole = {m.name: m.param for m in self._members()}
        owned = [owned for bucket in self.buckets for owned in bucket.owned]
        sharded_state.cut_state(self.base, whole, sharded_state.fragments(self.buckets))
        for number, group in enumerate(self.base.param_groups):
            group["params"] = [o.master for o in owned if o.member.group == number]

    # What torch's optimizers have ----------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's; their "params" are this rank's fragments."""
        return self.base.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's, by fragment."""
        return self.base.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.base.defaults

    def __repr__(self) -> str:
        return f"ZeroOptimizer(stage {self.settings.stage}, {len(self.buckets)} buckets, {self.base!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the layout is made once."""
        raise RuntimeError(
            "parameter groups cannot be added after initialize, because slices are already dealt: pass all "
            "of them to initialize (set lr to 0 for those that should wait)"
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Average what is left, step this rank's slices, send them to everyone. `last` says what happened."""
        if closure is not None:
            raise ValueError("a closure is not supported: gradients are averaged while backward runs")
        if not self.reducer.began:
            return  # like torch: no gradients, no step
        self.reducer.flush()
        if self.settings.refuse_unused:
            self._refuse_unused()
        scale, held = self.scaler.scale, self.gradient_scale
        if held != scale and self.passes != self.reducer.passes:
            raise RuntimeError(
                f"a backward pass has added gradients at the scale {scale:g} to those of the last step, "
                f"whose scale is {held:g}: call zero_grad after every step"
            )
        norm = self._norm() / held if self.settings.needs_norm else None
        finite = norm is None or isfinite(norm)
        apply = finite or not self.settings.check_overflow
        if not finite:
            self._tell(apply)
        if apply:
            self._update(norm, held)
        self.last, self.loss = StepReport(apply, norm, scale), None
        for bucket in self.buckets:
            bucket.suspicion = None
        self._learn_scale(overflow=not finite)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Let go of the gradients.

        By default their memory is freed on accelerators and kept on the CPU, where getting fresh pages
        from the system would cost more than the step.
        """
        self.reducer.forget()
        if self.gatherer is not None:
            self.gatherer.forget()
        self.left_scale = None
        for bucket in self.buckets:
            on_cpu = bucket.kind.device.type == "cpu"
            bucket.forget(free=not on_cpu if set_to_none is None else set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part: fragments by parameter name, the groups' options and the loss scale."""
        self.settle()
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        return {
            "format": 1,
            "fragments": sharded_state.save(self.base, self.buckets),
            "groups": options,
            "scaler": self.scaler.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from this rank's part. Every rank must call this: parameters are gathered."""
        if len(state_dict["groups"]) != len(self.param_groups):
            raise ValueError(
                f"{len(state_dict['groups'])} parameter groups were saved, but the optimizer has "
                f"{len(self.param_groups)}"
            )
        sharded_state.load(self.base, self.buckets, state_dict["fragments"])
        self.scaler.load_state_dict(state_dict["scaler"])
        for group, options in zip(self.param_groups, state_dict["groups"], strict=True):
            group.update(options)
        self.zero_grad()
        self.publish()
        self.settle()

    # The parts of a step -------------------------------------------------------------------------

    def _norm(self) -> float:
        slices = [Slices(b.own_gradients(), b.kind.counts, b.kind.expert) for b in self.buckets]
        return self.groups.norm(slices)

    @property
    def gradient_scale(self) -> float:
        """What averaged gradients are multiplied by now."""
        return self.scaler.scale if self.left_scale is None else self.left_scale

    def _update(self, norm: float | None, scale: float) -> None:
        factor = 1.0 / scale
        if self.settings.clip > 0 and norm is not None:
            factor *= min(1.0, self.settings.clip / (norm + EPSILON))
        swept = self.sweep.takes(self.buckets)
        if swept:
            for bucket in self.buckets:
                self.sweep.step(bucket, factor)
            self.left_scale = scale
        else:
            self._step_in_passes(factor)
            self.left_scale = 1.0
        self.passes = self.reducer.passes
        self.publish(copied=swept)
        if not self.settings.gather_beside_forward:
            self.settle()

    def _step_in_passes(self, factor: float) -> None:
        """With any optimizer: unscale and clip, then step."""
        for bucket in self.buckets:
            for gradient in bucket.own_gradients() if factor != 1.0 else ():
                gradient.mul_(factor)
        for buckets in self._sub_groups():
            for bucket in buckets:
                bucket.hand_over()
            self.base.step()  # those that have no gradient now stay as they are
            for bucket in buckets:
                bucket.take_back()

    def _sub_groups(self) -> list[list[Bucket]]:
        """What is stepped at a time: at stage 3 so much that what the step makes for itself stays small."""
        if self.settings.stage < 3:
            return [self.buckets]
        sub_groups: list[list[Bucket]] = []
        room = 0
        for bucket in self.buckets:
            if not sub_groups or bucket.layout.shard > room:
                sub_groups.append([])
                room = self.settings.sub_group_numel
            sub_groups[-1].append(bucket)
            room -= bucket.layout.shard
        return sub_groups

    def publish(self, copied: bool = False) -> None:
        """Parameters follow their masters, what forward needs first at first; `settle` waits for all.

        `copied`: this rank's own slices do already.
        """
        if self.gatherer is not None:
            self.gatherer.release_all()
        for bucket in reversed(self.buckets):
            values = bucket.values
            values.second = None
            if not copied:
                bucket.copy_master()
            if values.state is State.WHOLE:
                producers = [self.lane.producer()]
                self.arriving[bucket] = self.lane.submit(values.collect, [values.whole], producers)

    def note_loss(self, loss: Tensor) -> None:
        """Remember the losses of a step, for a report: one that is not finite spoils their sum."""
        loss = loss.detach().float()
        self.loss = loss if self.loss is None else self.loss + loss

    def settle(self) -> None:
        """Until all parameters have arrived."""
        while self.arriving:
            _, pending = self.arriving.popitem()
            pending.wait()

    def hold_back(self, model: nn.Module) -> None:
        """With `gather_beside_forward`: each module waits for its own parameters, not for all."""
        bucket_of = {m.param: bucket for bucket in self.buckets for m in bucket.members}
        for module in model.modules():
            needed = {bucket_of[p] for p in module.parameters(recurse=False) if p in bucket_of}
            if needed:
                module.register_forward_pre_hook(lambda *_, needed=needed: self._wait_for(needed))

    def _wait_for(self, needed: set[Bucket]) -> None:
        for bucket in needed:
            if bucket in self.arriving:
                self.arriving.pop(bucket).wait()

    def _refuse_unused(self) -> None:
        unused = {member.name for member in self._members() if member not in self.reducer.used}
        for group in self.groups.everyone:  # so that every rank raises, or none
            unused = set.union(*group.gather_objects(unused, "unused parameters"))
        if unused:
            raise ValueError(
                f"no gradient for {', '.join(sorted(unused))} in this step, on some rank at least. Freeze "
                "what is not trained, or set zero_optimization.ignore_unused_parameters to true"
            )

    # Overflow ------------------------------------------------------------------------------------

    def _tell(self, apply: bool) -> None:
        rank = this_rank()
        self.finding = investigate(self.buckets, self.loss, self.groups.everyone, rank)
        if rank == 0:
            # A dynamic scale finds its place by overflowing: that is no reason to worry anybody.
            level = logging.INFO if isinstance(self.scaler, DynamicScale) else logging.WARNING
            log.log(level, "step %s: %s", "applied nevertheless" if apply else "skipped", self.finding)

    def _learn_scale(self, overflow: bool) -> None:
        try:
            self.scaler.update(overflow)
        except ScaleExhaustedError as error:
            raise ScaleExhaustedError(
                f"{error}. {self.finding[0].upper()}{self.finding[1:]}. What helps: bf16, a smaller "
                "learning rate, gradient clipping, or fixing what produces inf or NaN in fp32"
            ) from None

    def close(self, gather: bool) -> None:
        """Leave the model without hooks, its parameters as they are or, if every rank asks for it, whole."""
        for finish in (self.settle, self.reducer.close, self.zero_grad):
            with suppress(CommunicationError):  # of calls that were under way: told already
                finish()
        if self.gatherer is not None:
            self.gatherer.close()
            if gather:
                for values in self.values():
                    self.gatherer.gather(values)
        if all(values.state is State.WHOLE for values in self.values()):
            for handle in self.guards:
                handle.remove()
        unregister(m.param for values in self.values() for m in values.members)

    # What this rank has --------------------------------------------------------------------------

    def holdings(self) -> dict[str, list[Tensor]]:
        """Every tensor that this rank keeps, by kind. Counters are the optimizer's step numbers."""
        state = [v for s in self.state.values() for v in s.values() if isinstance(v, Tensor)]
        masters = [b.master for b in self.buckets if b.master.dtype != b.values.dtype]
        whole = [v.whole for v in self.values() if v.state is not State.SHARDED]
        second = [v.second for v in self.values() if v.second is not None]
        return {
            "parameters": whole + [v.own for v in self.values() if v.sheds] + second,
            "gradients": [t for b in self.buckets for t in b.gradient_memory()],
            "optimizer": masters + [t for t in state if t.dim()],
            "counters": [t for t in state if not t.dim()],
        }
