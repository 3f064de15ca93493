"""What a unit costs the host, in hooks and queueing: at stage 3 with units forced, at stage 2, and in a step.

One rank alone has nothing to gather, so it gets no units. Here a parameter store says that its slices are
offloaded, and keeps them on the device. That forces the hooks, the memory and the copies of a rank that
shards parameters with others. Only the collectives are missing (`native.py`).
"""

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from tests.gpu.day.place import Place
from tests.gpu.day.rows import STAND_IN, finish
from zero_full.assemble import shard
from zero_full.offload import DeviceTier, ParamStore
from zero_full.offload.param_store import ParamSlice
from zero_full.settings import Gathering, Settings

PARAMETERS = 9  # of a unit
AIMS = {"stage 3": 0.3, "stage 2": 0.1, "step": 0.05}  # milliseconds of the host, a unit
WARM, ROUNDS = 5, 30


class DeviceSlice(ParamSlice):
    """A slice on the device, which needs no reading ahead of its gather."""

    def start_read(self, optional: bool = False) -> bool:
        """Read nothing, so that the search for slices to be read ends at once."""
        return not optional


class ForcedStore(ParamStore):
    """A store on the device that counts as offloaded."""

    is_offloaded = True

    def add(self, values: Tensor) -> ParamSlice:
        """Store a copy of these values."""
        return DeviceSlice(values.clone())


class ForcedTier(DeviceTier):
    """Its store makes units also on a single rank."""

    is_offloaded = True
    kind = ParamSlice.kind

    def param_store(self, device: torch.device) -> ParamStore:
        """A store on the model's device."""
        return ForcedStore()


class Unit(nn.Module):
    """Nine parameters with little work."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(PARAMETERS))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by all of them."""
        for scale in self.scales:
            x = x * scale
        return x


class Units(nn.Module):
    """Units, one after the other. Returns the loss."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(Unit(width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """The mean of what comes out."""
        for unit in self.units:
            x = unit(x)
        return x.mean()


def settings_of(stage: int, width: int) -> Settings:
    """A bucket, or at stage 3 a unit, for each `Unit`."""
    gathering = Gathering(keep_numel=0, max_reuse=0, wrap=lambda name, module: isinstance(module, Unit))
    return Settings(
        stage=stage,
        bucket_numel=PARAMETERS * width,
        overlap=True,
        check_overflow=False,  # it reads a value in each step, and the host would wait for the device
        gathering=gathering,
        param_tier=ForcedTier() if stage == 3 else DeviceTier(),
    )


def check(place: Place) -> None:
    """A row for each stage: milliseconds of the host beyond those of the model without an engine."""
    count, width = (4, 16) if place.tiny else (32, 4096)
    x = torch.randn(8, width, device=place.device, requires_grad=True)
    plain = timed(place, Units(count, width), None, x)
    for stage in (2, 3):
        model = Units(count, width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        sharded = shard(model.to(place.device), optimizer, settings_of(stage, width))
        units = len(sharded.sharded.sites)
        assert units == (count if stage == 3 else 0), f"{units} units at stage {stage}"
        found = timed(place, model, sharded, x)
        for kind, name in (("micro-batch", f"stage {stage}"), ("step", "step")):
            extra = (found[kind] - plain[kind]) / count
            told: dict[str, Any] = {"aim, ms": AIMS[name], "fine": extra <= AIMS[name]}
            if place.device.type == "cpu":
                told = {STAND_IN: "a CPU, which computes meanwhile"}
            place.say(
                stage=stage,
                of=kind,
                units=count,
                **{"host, ms a unit": round(extra, 4), "plain, ms a unit": round(plain[kind] / count, 4)},
                **told,
            )


def timed(place: Place, model: nn.Module, optimizer: Any, x: Tensor) -> dict[str, float]:
    """Median milliseconds that the host takes to queue forward and backward, and a step."""
    model.to(place.device)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    passes, steps = list[float](), list[float]()
    for _ in range(WARM + (2 if place.tiny else ROUNDS)):
        passes.append(spent(place, lambda: model(x).backward()))
        steps.append(spent(place, optimizer.step))
        optimizer.zero_grad()
    return {"micro-batch": 1e3 * median(passes[WARM:]), "step": 1e3 * median(steps[WARM:])}


def spent(place: Place, work: Callable[[], Any]) -> float:
    """Seconds until a call returns, from when the device is idle."""
    finish(place.device)
    began = perf_counter()
    work()
    return perf_counter() - began
