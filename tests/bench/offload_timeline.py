"""Who is at work when, in one step with state on the host or in a file: recorded in a real run.

    python -m tests.bench.offload_timeline

There is no accelerator: memory of the CPU stands in for a device's, its layers take a fixed time without
computing much, copies and files move at a fixed rate (`tests/slow_copies.py`). The order of events and what
waits for what are the runtime's own. The last line is JSON.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import zero_full
from tests.slow_copies import slow_copies
from zero_full.offload import BlockTier, HostTier, Tier
from zero_full.offload.host_device_copies import HostGradientSlice
from zero_full.offload.nvme_state import Block, OpenNvmeTier
from zero_full.precision import Dtypes
from zero_full.settings import Settings
from zero_full.shard.step.update import Steppers

LAYERS, WIDTH = 6, 1024
LAYER_S = 0.02  # that a layer takes on the device, in forward and in backward
LINK, DISK = 250e6, 2500e6  # bytes a second
STEPS = 3  # the last one is recorded


@dataclass
class Events:
    """What was at work, from when to when."""

    seen: list[tuple[str, float, float]] = field(default_factory=list)

    def note(self, lane: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, noted."""

        def noted(*given: Any, **named: Any) -> Any:
            began = time.monotonic()
            try:
                return call(*given, **named)
            finally:
                self.seen.append((lane, began, time.monotonic()))

        return noted

    def since(self, begin: float) -> list[tuple[str, float, float]]:
        """In milliseconds after this moment, in order."""
        rows = [(lane, 1e3 * (a - begin), 1e3 * (b - begin)) for lane, a, b in self.seen if a >= begin]
        return sorted((lane, round(a, 2), round(b, 2)) for lane, a, b in rows)


class Busy(torch.autograd.Function):
    """A device that is at work for a while, on the way forward and on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, events: Events) -> Tensor:
        """The same values, later."""
        ctx.events = events
        events.note("forward", time.sleep)(LAYER_S)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The same gradients, later."""
        ctx.events.note("backward", time.sleep)(LAYER_S)
        return grads[0], None


class Tower(nn.Module):
    """Layers of a million parameters."""

    def __init__(self, events: Events) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.events = events

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        for layer in self.layers:
            x = layer(Busy.apply(x, self.events))  # type: ignore[no-untyped-call]
        return x.float().square().mean()


def slowed(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call that moves blocks, at the disk's rate."""

    def moves(tier: OpenNvmeTier, what: Any, *more: Any) -> Any:
        found = [what] if isinstance(what, Block) else [block for block, _, _ in what]
        done = call(tier, what, *more)
        time.sleep(sum(block.padded_size for block in found) / DISK)
        return done

    return moves


@contextmanager
def watched(events: Events) -> Iterator[None]:
    """Parts of the runtime are noted."""
    noted: list[tuple[type, str, Callable[..., Any]]] = [
        (HostGradientSlice, "_square", events.note("sum of squares", HostGradientSlice._square)),
        (Steppers, "_step_part", events.note("step", Steppers._step_part)),
        (OpenNvmeTier, "_read", events.note("read", slowed(OpenNvmeTier._read))),
        (OpenNvmeTier, "_write", events.note("write", slowed(OpenNvmeTier._write))),
    ]
    with ExitStack() as stack:
        copies = stack.enter_context(slow_copies(LINK))
        for owner, name, call in noted:
            stack.enter_context(mock.patch.object(owner, name, call))
        yield
        events.seen += [(f"copies {each.way}", each.began, each.ended) for each in copies.done]


def recorded(tier: Tier) -> list[tuple[str, float, float]]:
    """The events of a step, from backward to the forward behind it."""
    events = Events()
    with watched(events):
        model = Tower(events)
        settings = Settings(2, Dtypes(torch.bfloat16), bucket_numel=WIDTH * WIDTH, tier=tier)
        optimizer = zero_full.assemble.shard(model, torch.optim.AdamW(model.parameters()), settings)
        x = torch.randn(4, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(STEPS):
            loss, begin = model(x), time.monotonic()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model(x)
        optimizer.close(gather=False)
    return events.since(begin)


def main() -> None:
    """Record each row, and say what its lanes have done."""
    with tempfile.TemporaryDirectory() as folder:
        tiers: dict[str, Tier] = {
            "state on the host": HostTier(),
            "state in a file": BlockTier(
                path=folder, part_numel=WIDTH * WIDTH, state_numel=2 * WIDTH * WIDTH
            ),
        }
        found = {name: recorded(tier) for name, tier in tiers.items()}
    print("| row | lane | times | at work, ms | first | last |\n|---|---|--:|--:|--:|--:|")
    for name, events in found.items():
        for lane in dict.fromkeys(lane for lane, _, _ in events):
            mine = [(a, b) for each, a, b in events if each == lane]
            work, first, last = sum(b - a for a, b in mine), mine[0][0], max(b for _, b in mine)
            print(f"| {name} | {lane} | {len(mine)} | {work:.1f} | {first:.1f} | {last:.1f} |")
    print(f"\n{LAYERS} layers of {WIDTH}x{WIDTH}; ", end="")
    print(f"{1e3 * LAYER_S:.0f} ms a layer, {LINK / 1e6:.0f} MB/s each way, the file {DISK / 1e6:.0f} MB/s\n")
    print(json.dumps({"events": found}))


if __name__ == "__main__":
    main()
