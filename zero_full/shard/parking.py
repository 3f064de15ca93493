"""Move state off the device for a while, and back: between training and something else that needs the memory.

A flat buffer that is parked keeps its storage, which shrinks to nothing, as a released parameter's does (see
`values.py`): everything that is a view of it is right again when it is back.
"""

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from zero_full._compat import identity_of
from zero_full.shard.optimizer import ZeroOptimizer
from zero_full.shard.values import State

# DeepSpeed's names of what can be moved.
KINDS = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")


class Parking:
    """What of an optimizer is parked."""

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        self.optimizer = optimizer
        self.parked: list[tuple[torch.UntypedStorage, Tensor]] = []

    @torch.no_grad()
    def offload(self, include: Collection[str] | None, device: torch.device, pin_memory: bool) -> None:
        """Park the kinds given, or everything. Gradients that are not averaged yet are refused."""
        unknown = sorted(set(include or ()) - set(KINDS))
        if unknown:
            raise ValueError(f"cannot offload {', '.join(unknown)}: known are {', '.join(KINDS)}")
        if self.optimizer.reducer.owing:
            raise RuntimeError("offload_states between a backward and its step: step first")
        self.optimizer.settle()
        if self.optimizer.gatherer is not None:
            self.optimizer.gatherer.release_all()
        self.optimizer.parked = True
        done = {identity_of(storage) for storage, _ in self.parked}
        for kind in include or KINDS:
            for tensor in self._tensors(kind):
                storage = tensor.untyped_storage()
                if identity_of(storage) not in done and storage.nbytes():
                    done.add(identity_of(storage))
                    self._park(storage, device, pin_memory)

    def _park(self, storage: torch.UntypedStorage, device: torch.device, pin_memory: bool) -> None:
        view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        pin = pin_memory and device.type == "cpu" and storage.device.type != "cpu"
        copy = torch.empty(view.shape, dtype=torch.uint8, device=device, pin_memory=pin)
        copy.copy_(view)
        self.parked.append((storage, copy))
        storage.resize_(0)

    @torch.no_grad()
    def reload(self) -> None:
        """Everything comes back."""
        while self.parked:
            storage, copy = self.parked.pop()
            storage.resize_(copy.numel())
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(copy)
        self.optimizer.parked = False
        for values in self.optimizer.values():
            if values.state is State.WHOLE and values.hidden:
                values.take_back_moved()
                values.show()

    def _tensors(self, kind: str) -> Iterator[Tensor]:
        buckets, values = self.optimizer.buckets, self.optimizer.values()
        if kind == "optim_states":
            states = self.optimizer.base.state.values()
            yield from (v for s in states for v in s.values() if isinstance(v, Tensor) and v.dim())
        elif kind == "hp_params":
            yield from (bucket.master for bucket in buckets if bucket.master is not bucket.values.own)
        elif kind == "lp_params":
            for part in values:
                part.hide()
                yield part.own
                if part.state is State.WHOLE:
                    yield part.whole
        else:
            yield from (t for bucket in buckets for t in bucket.gradient_memory())
