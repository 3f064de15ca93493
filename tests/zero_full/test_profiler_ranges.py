"""Named ranges in a profiler's trace: the phases of a step and its collectives, only while one runs."""

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

import zero_full
from tests.worlds import run_each
from tests.zero_full.runs import Net, config, data


def ranges(comm: Any, stage: int, folder: str) -> list[Counter[str]]:
    """The ranges of zero_full's in the trace of a step, and in that of one that is recorded as well."""
    zero = {"stage3_param_persistence_threshold": 0, "overlap_comm": False}
    engine = zero_full.initialize(model=Net(), config=config(stage, zero_optimization=zero))[0]

    def step() -> None:
        engine.backward(engine(data(engine.global_steps, 0, comm.rank)))
        engine.step()

    step()
    found = []
    for recorder in (None, "recording.json"):
        if recorder is not None:
            engine.record(Path(folder, recorder))
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            step()
        names = (event.name for event in profiler.events() if event.name.startswith("zero_full "))
        found.append(Counter(name.removeprefix("zero_full ").partition(" of ")[0] for name in names))
    step()  # the profiler has ended, and the recorder has not
    assert engine.optimizer.communicators.traffic.listener is engine.recorder is not None
    assert isinstance(engine.optimizer.named_range("update"), nullcontext)
    engine.destroy()
    return found


def test_a_trace_names_the_phases_and_collectives(tmp_path: Path) -> None:
    for stage, kinds in ((1, {"reduce_scatter", "all_gather"}), (3, {"reduce_scatter", "all_gather"})):
        for plain, recorded in run_each(ranges, 2, [(stage, str(tmp_path / str(stage)))])[0]:
            phases = ("forward", "backward", "step", "update")
            assert {name: plain[name] for name in phases} == dict.fromkeys(phases, 1)
            assert plain["publish"] == 1 and plain.keys() >= kinds
            assert recorded == plain
