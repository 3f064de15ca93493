"""Cases of Lightning Fabric with zero_full; see `cases.py`."""

from pathlib import Path
from typing import Any

import lightning
import torch
from torch import nn

from tests.lightning.cases import RANKS, SHARD_ALL, STAGES, case, raised, rounded
from tests.lightning.models import loader
from zero_full.integrations.lightning import ZeroFabricStrategy


def fabric_of(stage: Any, precision: Any = "32-true") -> lightning.Fabric:
    strategy = "ddp" if stage == "ddp" else ZeroFabricStrategy(stage, SHARD_ALL if stage == 3 else None)
    fabric = lightning.Fabric(accelerator="cpu", devices=RANKS, strategy=strategy, precision=precision)
    fabric.launch()
    return fabric


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5))


class Loop:
    """A user's loop with accumulation and clipping."""

    def __init__(self, stage: Any, precision: Any = "32-true", clip: float = 0.2, init: bool = False) -> None:
        self.fabric, self.clip = fabric_of(stage, precision), clip
        if init:
            with self.fabric.init_module():
                model = network()
        else:
            model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        self.model, self.optimizer, self.schedule = self.fabric.setup(model, optimizer, scheduler=schedule)
        self.data = self.fabric.setup_dataloaders(loader(RANKS))
        self.losses: list[float] = []
        self.norms: list[float] = []

    def train(self, accumulate: int = 2, begin: int = 0, end: int = 6) -> None:
        for number, (inputs, wanted) in enumerate(self.data):
            if not begin <= number < end:
                continue
            steps = number % accumulate == accumulate - 1
            with self.fabric.no_backward_sync(self.model, enabled=not steps):
                loss = nn.functional.mse_loss(self.model(inputs), wanted)
                self.fabric.backward(loss / accumulate)
            self.losses.append(float(self.fabric.all_reduce(loss.detach().clone())))
            if steps:
                if self.clip:
                    norm = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=self.clip)
                    self.norms.append(float(norm))
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.schedule.step()

    def results(self) -> dict[str, Any]:
        return {"losses": rounded(self.losses), "norms": rounded(self.norms)}


@case
def fabric_loops(folder: Path) -> Any:
    found = {}
    for stage in STAGES:
        for precision in ("32-true", "bf16-mixed", "bf16-true"):
            if precision == "bf16-true" and stage == "ddp":
                continue
            loop = Loop(stage, precision)
            loop.train()
            loop.clip = 0.0  # the clipping of one step is not the next one's
            loop.train(accumulate=1)
            found[f"{stage} {precision}"] = loop.results()
    loop = Loop(3, init=True)
    loop.train()
    loop.clip = 0.0
    loop.train(accumulate=1)
    found["3 init"] = loop.results()
    return found


@case
def fabric_saves(folder: Path) -> Any:
    loop = Loop(3)
    loop.train(end=4)
    state = {"model": loop.model, "optimizer": loop.optimizer, "schedule": loop.schedule, "step": 2}
    loop.fabric.save(folder / "fabric", state)
    loop.train(begin=4)
    ddp = Loop("ddp")
    ddp.train(end=4)
    ddp.fabric.save(folder / "fabric_ddp.ckpt", {"model": ddp.model})
    return loop.results()


@case
def fabric_loads(folder: Path) -> Any:
    found: dict[str, Any] = {}
    for stage in (1, 3):
        loop = Loop(stage)
        state = {"model": loop.model, "optimizer": loop.optimizer, "schedule": loop.schedule, "step": 0}
        rest = loop.fabric.load(folder / "fabric", state)
        loop.train(begin=4)
        found[str(stage)] = loop.results() | {"step": state["step"], "rest": sorted(rest)}
        missing = raised(lambda: loop.fabric.load(folder / "fabric", {"model": loop.model, "epoch": 1}))  # noqa: B023
        loop = Loop(stage)
        loop.fabric.load(folder / "fabric_ddp.ckpt", {"model": loop.model})
        loop.train(begin=4, end=5)
        found[f"{stage} from ddp"] = {"losses": rounded(loop.losses)}
        found[f"{stage} missing"] = missing
    return found


@case
def fabric_several(folder: Path) -> Any:
    """Two models with an optimizer each, and one model with two."""
    found: dict[str, Any] = {}
    for stage in STAGES:
        fabric, losses = fabric_of(stage), []
        first, second = network(), nn.Linear(5, 5)
        model, optimizer = fabric.setup(first, torch.optim.Adam(first.parameters(), lr=1e-2))
        head, by_head = fabric.setup(second, torch.optim.SGD(second.parameters(), lr=1e-2))
        both = nn.ModuleDict({"body": network(), "head": nn.Linear(5, 5)})
        both.forward = lambda x: both["head"](both["body"](x))  # type: ignore[assignment, method-assign] # noqa: B023
        bodies = torch.optim.Adam(both["body"].parameters(), lr=1e-2)
        heads = torch.optim.SGD(both["head"].parameters(), lr=1e-2)
        both_model, bodies, heads = fabric.setup(both, bodies, heads)
        for inputs, wanted in fabric.setup_dataloaders(loader(RANKS)):
            for outputs, steps in (
                (head(model(inputs)), (optimizer, by_head)),
                (both_model(inputs), (bodies, heads)),
            ):
                loss = nn.functional.mse_loss(outputs, wanted)
                fabric.backward(loss)
                for each in steps:
                    each.step()
                    each.zero_grad()
                losses.append(float(fabric.all_reduce(loss.detach().clone())))
        found[str(stage)] = {"losses": rounded(losses)}
    return found


@case
def fabric_refusals(folder: Path) -> Any:
    def clipped(**how: Any) -> Any:
        loop = Loop(2)
        loop.train(end=1)
        return loop.fabric.clip_gradients(loop.model, loop.optimizer, **how)

    def alone() -> Any:
        fabric, model = fabric_of(2), network()
        fabric.setup_module(model)
        return fabric.setup_optimizers(torch.optim.Adam(model.parameters()))

    def filtered() -> Any:
        loop = Loop(2)
        return loop.fabric.save(folder / "never", {"model": loop.model}, filter={"model": lambda *each: True})

    refused = {
        "clipping by value": lambda: clipped(clip_val=1.0),
        "norm_type": lambda: clipped(max_norm=1.0, norm_type=1),
        "setup_module": alone,
        "filter": filtered,
        "static_graph": lambda: ZeroFabricStrategy(static_graph=True),
    }
    return {name: raised(call) for name, call in refused.items()}
