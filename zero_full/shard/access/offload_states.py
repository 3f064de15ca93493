"""Move state off the device for a while, and back: between training and what else needs the memory."""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from zero_full.shard.group.master import held_elsewhere
from zero_full.shard.group.optimizer_state import StateByParameter
from zero_full.shard.group.parameters import GatherState
from zero_full.shard.step.optimizer import ZeroOptimizer

# DeepSpeed's names of what can be moved.
KINDS = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")


class OffloadedStates:
    """The part of an optimizer's state that is off the device."""

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        self.optimizer = optimizer

    @property
    def moved(self) -> bool:
        """Whether anything is away."""
        return bool(self.optimizer.offloaded.copies)

    def _say_away(self, is_away: bool) -> None:
        state: Any = self.optimizer.base.state
        if isinstance(state, StateByParameter):  # and nobody has put another one there
            state.is_away = is_away

    @torch.no_grad()
    def offload(self, include: Collection[str] | None, device: torch.device, pin_memory: bool) -> None:
        """Move the kinds given, or everything. Gradients that are not averaged yet are refused."""
        unknown = sorted(set(include or ()) - set(KINDS))
        if unknown:
            raise ValueError(f"cannot offload {', '.join(unknown)}: known are {', '.join(KINDS)}")
        self.optimizer.delayed.refuse("offload_states")
        if self.optimizer.reducer.unreduced:
            raise RuntimeError("offload_states between a backward and its step: step first")
        if self.optimizer.gatherer is not None:
            self.optimizer.gatherer.release_all()
        if self.optimizer.parts.flow is not None:
            self.optimizer.parts.flow.wait_for_copies()
        self.optimizer.states_offloaded = True
        self._say_away(True)
        for kind in include or KINDS:
            for tensor in self._tensors(kind):
                self.optimizer.offloaded.move(tensor, device, pin_memory)

    @torch.no_grad()
    def reload(self) -> None:
        """Bring everything back."""
        self.optimizer.offloaded.bring_back()
        self.optimizer.states_offloaded = False
        self._say_away(False)
        for flat in self.optimizer.flats():
            if flat.state is GatherState.WHOLE and flat.hidden:
                flat.take_back_moved()
                flat.show()

    def _tensors(self, kind: str) -> Iterator[Tensor]:
        buckets, flat = self.optimizer.buckets, self.optimizer.flats()
        away = set(held_elsewhere(self.optimizer.owned, self.optimizer.base.state))  # it is off the device
        if kind == "optim_states":
            states = self.optimizer.base.state.values()
            kept = (v for s in states for v in s.values() if isinstance(v, Tensor) and v.dim())
            yield from (v for v in kept if id(v) not in away)
            yield from self.optimizer.contents.stepper.held()
        elif kind == "hp_params":
            masters = [owned.master for owned in self.optimizer.owned if owned.is_separate]
            yield from (master for master in masters if id(master) not in away)
        elif kind == "lp_params":
            for part in flat:
                part.hide()
                if not part.slice.apart:
                    yield part.shard
                if part.state is GatherState.WHOLE:
                    yield part.full
        else:
            yield from (t for bucket in buckets for t in bucket.gradient_memory())
