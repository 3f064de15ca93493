"""Training runs of one rank of several, recorded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

import zero_full
from tests.order.echo import on_an_accelerator
from tests.order.models import DEPTH, WIDTH, Model, data
from tests.order.trace import Recorder
from tests.zero_full.runs import config
from zero_full.comm.fake_ranks import FakeGroup
from zero_full.comm.lane import Lane
from zero_full.comm.topology import Topology

Drive = Callable[[zero_full.Engine, int], None]


def one_step(engine: zero_full.Engine, step: int) -> None:
    """Forward, backward, step."""
    dtype = engine.optimizer.sharded.flats[0].dtype
    for micro in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(data(step, micro, dtype)))
        engine.step()


@dataclass(frozen=True)
class Case:
    """A run, by what is special about it."""

    stage: int
    kind: str = "plain"
    keys: Mapping[str, Any] = field(default_factory=dict)
    zero: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 2
    me: int = 0
    drive: Drive = one_step
    steps: int = 2  # the second one prefetches, and uses memory again
    depth: int = DEPTH
    optimizer: Callable[[Any], Any] | None = None  # a user's own, of the parameters

    def config(self, overlap: bool, folder: Path) -> dict[str, Any]:
        """Its configuration: a bucket for each layer, and at stage 3 nothing is kept.

        Files of sections whose device is "nvme" are in the folder.
        """
        zero: dict[str, Any] = {"reduce_bucket_size": WIDTH * (WIDTH + 1), "overlap_comm": overlap}
        if self.stage == 3:
            zero |= {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
        for key, section in self.zero.items():
            in_file = isinstance(section, dict) and section.get("device") == "nvme"
            zero[key] = {**section, "nvme_path": str(folder)} if in_file else section
        return config(self.stage, **{**self.keys, "zero_optimization": zero})

    def __str__(self) -> str:
        plain = Case(self.stage)
        said = [f"stage {self.stage}", *map(str, self.keys)]
        for key, value in self.zero.items():
            section = value if isinstance(value, dict) else {}
            said.append(" ".join([key, *(f"{k}={v}" for k, v in section.items())]))
        said += [
            f"{k} {v}" for k, v in vars(self).items() if k in ("kind", "ranks") and v != getattr(plain, k)
        ]
        return ", ".join([*said, *([self.drive.__name__] if self.drive is not one_step else [])])


def recorded(
    case: Case, overlap: bool = True, late: bool = False, lane: Callable[[Any], Lane] = lambda made: made
) -> Recorder:
    """Train; write down all that happens from the first forward to the values that come out.

    `late`: when threads run, see `Recorder`. `lane` may put another in the place of each lane.
    """
    recorder = Recorder(late)
    with on_an_accelerator(recorder, lane) as folder:
        topology = Topology(data=FakeGroup(range(case.ranks), case.me))
        model = Model(case.kind, case.me, recorder, case.depth)
        for param in model.parameters():
            recorder.put_on_device(param)
        keys = case.config(overlap, folder)
        if case.optimizer is not None:
            del keys["optimizer"]
        engine, optimizer, _, _ = zero_full.initialize(
            model=model,
            optimizer=None if case.optimizer is None else case.optimizer(model.parameters()),
            config=keys,
            topology=topology,
            dist_init_required=False,
        )
        with recorder.recording():
            _call_by_name(recorder, optimizer)
            for step in range(case.steps):
                case.drive(engine, step)
            for name, values in final_values(optimizer).items():
                recorder.finals[name] = values.clone()
                recorder.host_reads(values)
        engine.destroy()
    return recorder


def final_values(optimizer: Any) -> dict[str, Tensor]:
    """What this rank has at the end."""
    found = {}
    for group in optimizer.trained:
        found[f"slice of {group.name}"] = group.parameters.shard
        found[f"master of {group.name}"] = group.master.values
        if not group.parameters.released_at_rest:
            found[f"all of {group.name}"] = group.parameters.full
        for member, piece in group.master.pieces.items():
            state = optimizer.base.state.get(piece.master, {})
            found |= {
                f"{key} of {member.name}": v for key, v in state.items() if isinstance(v, Tensor) and v.dim()
            }
    return found


def _call_by_name(recorder: Recorder, optimizer: Any) -> None:
    for group in optimizer.trained:
        recorder.called(f"master of {group.name}", group.master.values)
        recorder.called(f"slice of {group.name}", group.parameters.shard)
        if not group.parameters.released_at_rest:
            recorder.called(f"parameters {group.name}", group.parameters.full)
