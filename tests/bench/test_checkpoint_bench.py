"""The benchmark of checkpoints measures what it says. (The numbers themselves are nobody's test.)"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.bench import checkpoint, recovery
from tests.bench.checkpoint import BESIDE, COPY, DEEPSPEED, LOAD, OURS, PEERS, SAVE, Found, Plan
from tests.bench.checkpoint_rows import Saver, check
from tests.worlds import POOL


@pytest.mark.rotates
def test_a_small_run_visits_every_row_and_finds_the_state_again(tmp_path: Path) -> None:
    found = checkpoint.measure(Plan(str(tmp_path), "50k", 2, rounds=2), limit=60)
    savers = [OURS, *(peer for peer in PEERS if peer not in found.missing)]
    assert set(found.missing) <= {DEEPSPEED}
    assert set(found.seconds) == {COPY, BESIDE, *(what + name for what in (SAVE, LOAD) for name in savers)}
    assert all(len(series) == 2 and min(map(min, series)) > 0 for series in found.seconds.values())
    numel = found.nbytes // 12  # a master and two moments, without padding
    assert found.nbytes == 12 * numel and 50_000 < numel < 250_000 and found.first_s > 0
    assert [path.name for path in sorted(tmp_path.iterdir())] == sorted(savers)
    exported = checkpoint.exported(tmp_path / OURS, tmp_path / "export")
    assert exported is None or (exported[0] >= 4 * numel and exported[1] >= 0)


class Forgetful(Saver):
    """Saves and loads nothing."""

    def __init__(self) -> None:
        self.state = [torch.ones(3)]

    def tensors(self) -> list[Tensor]:
        return self.state

    def save(self, folder: Path) -> None:
        pass

    def load(self, folder: Path) -> None:
        pass


def checked(comm: object, folder: Path) -> None:
    check(Forgetful(), folder)


def test_a_row_that_loads_something_else_is_found(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="Forgetful: what was loaded is not what was saved"):
        POOL.run(checked, 1, tmp_path)


def test_bandwidth_is_that_of_all_ranks_and_what_is_missing_is_said() -> None:
    series = {
        COPY: [[0.010]],
        BESIDE: [[0.012]],
        SAVE + OURS: [[0.5]],
        LOAD + OURS: [[0.2]],
        SAVE + "DCP": [[1.0]],
    }
    found = Found(10**9, 0.1, {DEEPSPEED: "not installed"}, {**series, LOAD + "DCP": [[0.1]]})
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in checkpoint.report(found).splitlines()
    ]
    rows = {line[0]: line[1:] for line in cells}
    assert rows[SAVE + OURS] == ["500", "500-500", "2.00"]
    assert rows[f"save and load: {DEEPSPEED}"][0] == "not installed"
    values = [(ratio.value, ratio.met) for ratio in checkpoint.ratios(found)]
    assert values == [(pytest.approx(1.2), True), (0.5, None), (2.0, None)]


@pytest.mark.rotates
def test_a_small_run_saves_beside_its_steps_and_comes_back_after_a_kill(tmp_path: Path) -> None:
    found = recovery.measure(recovery.Plan(str(tmp_path), "50k", 2, 1, length=8), ["steps", "kill"], 100)
    assert {*found.steps} == {*found.kills} == {*recovery.BUILDERS}
    timed = {recovery.BEFORE, recovery.CALL, recovery.AFTER, recovery.WRITTEN}
    assert all({*times} == timed for times in found.steps.values())
    assert all(series[0][0] > 0 for times in found.steps.values() for series in times.values())
    assert all(series[0][0] > 0 for times in found.kills.values() for series in times.values())
    met = [(ratio.name, ratio.target) for ratio in recovery.ratios(found) if ratio.target is not None]
    assert [target for _, target in met] == [recovery.STALL_TARGET, 1]
    assert recovery.report(found).count("| zero_full") == recovery.report(found).count("| FSDP2 + DCP") == 2
