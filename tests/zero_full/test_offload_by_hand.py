"""What people hold and change by hand counts the same where state moves as where it stays on the host."""

import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext, suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import zero_full
from tests.slow_copies import slow_copies
from tests.worlds import run_each
from tests.zero_full.runs import Net, config, data
from zero_full import assemble
from zero_full.formatting import human
from zero_full.offload import BlockTier
from zero_full.offload.nvme_state import OpenNvmeTier

PLACES: dict[str, dict[str, Any]] = {
    "host": {"device": "cpu"},
    "disk": {"device": "nvme"},
}
STAGES = [1, 2]


def engine_of(stage: int, place: str, path: str, **more: Any) -> Any:
    torch.manual_seed(0)
    state = {**PLACES[place], **({"nvme_path": path} if place == "disk" else {}), **more}
    zero = {"stage": stage, "reduce_bucket_size": 150, "offload_optimizer": state}
    return zero_full.initialize(model=Net(), config=config(stage, zero_optimization=zero))[0]


def kept_rows(engine: Any, rank: int) -> Tensor:
    """Rows that were asked for once: a moving average reads them after each step, and some are written."""
    weight = engine.module.layers[2].weight
    master = zero_full.safe_get_local_fp32_param(weight)
    assert master is not None
    average, moments = master.clone(), torch.zeros(0)
    for step in range(7):
        engine.backward(engine(data(step, 0, rank)))
        engine.step()
        if step == 1:
            found = zero_full.safe_get_local_optimizer_state(weight, "exp_avg")
            assert found is not None
            moments = found
        if step == 3:
            master.mul_(0.5)
        if step == 4:
            moments.mul_(3)
        if step == 5:
            engine.load_state_dict(engine.state_dict())
        average.lerp_(master, 0.1)
    return torch.cat([average, moments])


def counters(engine: Any, rank: int) -> Tensor:
    """Adam's step number is set between backward and a step, on one rank only."""
    for step in range(6):
        engine.backward(engine(data(step, 0, rank)))
        if step == 3 and rank == 0:
            for group in engine.optimizer.trained:
                for piece in group.master.pieces.values():
                    engine.optimizer.base.state[piece.master]["step"].fill_(1.0)
        engine.step()
    return torch.empty(0)


def options(engine: Any, rank: int) -> Tensor:
    """A list among the options is written in place."""
    group = engine.optimizer.param_groups[0]
    group["betas"] = [0.9, 0.99]
    for step in range(6):
        engine.backward(engine(data(step, 0, rank)))
        if step % 3 == 2:
            group["betas"][0] -= 0.2
        engine.step()
    return torch.empty(0)


def values_of(engine: Any) -> list[Tensor]:
    state = engine.optimizer.state_dict()["tensors"]
    return [*engine.module_state_dict().values(), *(state[key]["values"] for key in sorted(state))]


def end(comm: Any, act: Callable[[Any, int], Tensor], stage: int, place: str, path: str) -> list[Tensor]:
    """All values after it."""
    with nullcontext() if place == "disk" else slow_copies(1e7):
        engine = engine_of(stage, place, path)
        seen = act(engine, comm.rank)
        values = [seen, *values_of(engine)]
        engine.destroy()
    return values


@pytest.mark.rotates
@pytest.mark.parametrize("act", [kept_rows, counters, options])
def test_what_is_done_by_hand_counts_wherever_state_is(
    act: Callable[[Any, int], Tensor], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = str(tmp_path_factory.mktemp("state"))
    cases = [(act, stage, place, path) for stage in STAGES for place in PLACES]
    found = dict(zip(cases, run_each(end, 2, cases), strict=True))
    for case, ranks in found.items():
        _, stage, place, _ = case
        for values, wanted in zip(ranks, found[act, stage, "host", path], strict=True):
            for number, (one, other) in enumerate(zip(values, wanted, strict=True)):
                assert torch.equal(one, other), f"stage {stage}, {place}: value {number} differs"


# Steps and runs that end ---------------------------------------------------------------------------


def go(engine: Any, *steps: int) -> None:
    for step in steps:
        engine.backward(engine(data(step, 0, 0)))
        engine.step()


def after_loading(path: str, where: str, error: type[BaseException]) -> list[Tensor]:
    """A step that somebody ends when its second part is about to be moved; then a load, and further steps."""
    with mock.patch("zero_full.start.from_config.BlockTier", partial(BlockTier, part_numel=60)):
        engine = engine_of(1, "disk", path, max_in_cpu=0)
    go(engine, 0, 1)
    saved, moved, calls = deepcopy(engine.optimizer.state_dict()), getattr(OpenNvmeTier, where, None), []
    go(engine, 2)

    def ending(tier: OpenNvmeTier, *given: Any) -> Any:
        calls.append(where)
        if len(calls) == 2:
            raise error("enough")
        assert moved is not None
        return moved(tier, *given)

    if moved is not None:
        with mock.patch.object(OpenNvmeTier, where, ending), suppress(error):
            go(engine, 3)
        assert len(calls) >= 2
        engine.optimizer.zero_grad()
    engine.optimizer.load_state_dict(saved)
    go(engine, 2, 3)
    values = values_of(engine)
    engine.destroy()
    return values


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_who_ends_a_step_in_the_middle_and_loads_goes_on(error: type[BaseException], tmp_path: Path) -> None:
    wanted = after_loading(str(tmp_path), "nowhere", error)
    for where in ("_start_read", "_wait_for_read", "_write_back", "_note_new_tensors"):
        found = after_loading(str(tmp_path), where, error)
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True)), where


def test_destroy_lets_go_of_the_state_though_the_engine_is_held(tmp_path: Path) -> None:
    """Else a second engine in the same program finds no room."""

    def mapped() -> int:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sum(str(tmp_path) in line for line in lines)

    engine = engine_of(1, "disk", str(tmp_path))
    go(engine, 0, 1)
    assert mapped()
    engine.destroy()
    assert not mapped()


# Room on the disk ----------------------------------------------------------------------------------


def refusal_of(comm: Any, folders: list[str], free: int) -> str:
    """Where each disk has so much free, and no launcher says how many ranks are here."""
    before = Path.cwd()
    os.chdir(folders[comm.rank])  # the key must be the same on all ranks
    try:
        with mock.patch("zero_full.offload.spill_file.free_bytes", lambda directory: free):
            engine_of(1, "disk", "state").destroy()
    except Exception as error:
        return str(error)
    finally:
        os.chdir(before)
    return ""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no second file system")
def test_ranks_that_share_a_disk_need_room_for_all_of_them(tmp_path: Path) -> None:
    """Of two ranks, each with four parts in pages of their own, and one more while a part is moved."""
    (tmp_path / "there").mkdir()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        here, there = str(tmp_path), str(tmp_path / "there")
        need = 2 * 5 * 4096
        free, none = need - 1, need // 2
        cases = [([here, here], free), ([here, there], free), ([here, other], none), ([here, here], need)]
        together, apart, two_disks, enough = run_each(refusal_of, 2, cases)
    for told in (*together, *apart):
        assert "has 41.0 kB free" in told and "needs 41.0 kB" in told
    assert two_disks == enough == ["", ""]


def both_in_files(state: str, parameters: str, free: int) -> str:
    """Why no engine comes to be whose state and parameters wait there; "" if one does."""
    places = {
        "offload_optimizer": {"device": "nvme", "nvme_path": state},
        "offload_param": {"device": "nvme", "nvme_path": parameters, "max_in_cpu": 0},
    }
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **places}
    try:
        with mock.patch("zero_full.offload.spill_file.free_bytes", lambda directory: free):
            zero_full.initialize(model=Net(), config=config(3, zero_optimization=zero))[0].destroy()
    except OSError as error:
        return str(error)
    return ""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no second file system")
def test_what_waits_on_one_disk_needs_room_together(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    here, there = str(tmp_path), str(tmp_path / "there")
    known, foreseen = assemble.host_memory, []

    def note(*given: Any) -> Any:
        foreseen.append(known(*given))
        return foreseen[-1]

    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        with mock.patch.object(assemble, "host_memory", note):
            assert not both_in_files(here, other, 10**9)
        state, parameters = foreseen[0].state_in_file, foreseen[0].parameters_in_file
        assert state > 0 and parameters > 0
        assert not both_in_files(here, other, max(state, parameters)), "each has its own"
    for place in (here, there):
        assert not both_in_files(here, place, state + parameters)
        told = both_in_files(here, place, state + parameters - 1)
        assert "to that disk (offload_optimizer, offload_param)" in told
        assert f"needs {human(state + parameters)}" in told
    assert not list(tmp_path.rglob(".zero*"))
