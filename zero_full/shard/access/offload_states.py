"""Offload states: move parameters, gradients and state off the device and back, to free its memory."""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from zero_full.shard.group.master import StateByParameter
from zero_full.shard.group.parameter_group import offloaded_ids
from zero_full.shard.group.parameters import GatherState
from zero_full.shard.step.optimizer import ZeroOptimizer

# DeepSpeed's names for kinds of state.
KINDS = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")


class OffloadedStates:
    """Moves a `ZeroOptimizer`'s tensors off the device and back."""

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        self.optimizer = optimizer

    @property
    def moved(self) -> bool:
        """Whether any tensor is off the device now."""
        return bool(self.optimizer.offloaded.copies)

    def _mark(self, offloaded: bool) -> None:
        """Note whether states are offloaded, so that uses of them raise."""
        self.optimizer.states_offloaded = offloaded
        state: Any = self.optimizer.base.state
        if isinstance(state, StateByParameter):  # user code may have assigned another object
            state.awaits_reload = offloaded

    @torch.no_grad()
    def offload(self, include: Collection[str] | None, device: torch.device, pin_memory: bool) -> None:
        """Move tensors of these kinds to `device`; None: all kinds.

        Raises RuntimeError between a backward pass and its step, when gradients are not averaged yet.
        """
        unknown = sorted(set(include or ()) - set(KINDS))
        if unknown:
            raise ValueError(
                f"offload_states: unknown {', '.join(unknown)}. Known kinds are {', '.join(KINDS)}"
            )
        self.optimizer.check_open("offload_states")
        self.optimizer.check_no_pending_update("offload_states")
        if self.optimizer.reducer.unreduced:
            raise RuntimeError("offload_states between a backward pass and its step. Call step first")
        if self.optimizer.gatherer is not None:
            self.optimizer.gatherer.release_all()
        if self.optimizer.sharded.copy_threads is not None:
            self.optimizer.sharded.copy_threads.wait_for_copies()
        self._mark(offloaded=True)
        for kind in include or KINDS:
            for tensor in self._tensors(kind):
                self.optimizer.offloaded.move(tensor, device, pin_memory)

    @torch.no_grad()
    def reload(self) -> None:
        """Move all tensors back to the device."""
        self.optimizer.offloaded.bring_back()
        self._mark(offloaded=False)
        for flat in self.optimizer.sharded.flats:
            flat.awaits_reload = False
            if flat.state is GatherState.WHOLE and flat.hidden:
                flat.adopt_assigned()
                flat.show()

    def _tensors(self, kind: str) -> Iterator[Tensor]:
        """Yield the tensors of a kind that are on the device; hide the parameters for `lp_params`."""
        away = set(offloaded_ids(self.optimizer.trained, self.optimizer.base.state))  # in a tier
        if kind == "optim_states":
            states = self.optimizer.base.state.values()
            kept = (v for s in states for v in s.values() if isinstance(v, Tensor) and v.dim())
            yield from (v for v in kept if id(v) not in away)
            yield from self.optimizer.contents.stepper.held()
        elif kind == "hp_params":
            masters = [group.master.values for group in self.optimizer.trained if group.master.is_separate]
            yield from (master for master in masters if id(master) not in away)
        elif kind == "lp_params":
            for part in self.optimizer.sharded.flats:
                part.hide()
                part.awaits_reload = not part.slice.is_offloaded
                if not part.slice.is_offloaded:
                    yield part.shard
                if part.state is GatherState.WHOLE:
                    yield part.full
        else:
            yield from (t for group in self.optimizer.trained for t in group.gradients.device_memory())
