"""A signal to any rank: all finish the same step, save and exit with 0."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import zero_full
from tests.worlds import POOL, run_each
from tests.zero_full.checkpoint_runs import Layout, batch, engine_of, go
from tests.zero_full.runs import Net, config, data, said_by
from tests.zero_full.test_tensor_parallel import Part, sgd
from zero_full.checkpoint import complete, open_checkpoint

When = tuple[int, int]  # a step, and one of its micro-batches
BOTH = signal.SIGTERM, signal.SIGUSR1


def to_me(number: int) -> None:
    """A signal, whose handler has run when this returns."""
    os.kill(os.getpid(), number)


@contextmanager
def signals_given_back() -> Iterator[None]:
    """The test's process has the handlers that it had."""
    before = {number: signal.getsignal(number) for number in (*BOTH, signal.SIGINT)}
    yield
    assert {number: signal.getsignal(number) for number in before} == before


def stopped(
    comm: Any, folder: Path, layout: Layout, whom: tuple[int, ...], when: When
) -> tuple[int, int, int, list[str]]:
    """A run whose ranks get a signal: what it exits with, and the step it was at."""
    with signals_given_back():
        engine = engine_of(layout)
        seen: dict[str, Any] = {"micro-batches": 0}
        engine.on_signal(folder, client_state=seen)
        if comm.rank in whom and when == (-1, 0):
            to_me(signal.SIGTERM)
        left: Any = None
        try:
            for step, micro in product(range(4), range(engine.gradient_accumulation_steps())):
                loss = engine(batch(step, comm.rank, engine.module.first.weight.dtype))
                if comm.rank in whom and when == (step, micro):
                    to_me(signal.SIGUSR1)
                    to_me(signal.SIGTERM)
                if layout.precision == "fp16" and step == 1:
                    loss = loss * float("inf")
                engine.backward(loss)
                seen["micro-batches"] += 1
                engine.step()
        except SystemExit as exit:
            left = exit.code
        engine.destroy()
    return left, engine.global_steps, engine.skipped_steps, list(complete(folder))


TWICE = {"gradient_accumulation_steps": 2}
WHOM = (0,), (1,), (0, 1)
MATRIX = [
    *((Layout(2, stage, more=TWICE), whom, (1, 0)) for stage, whom in product(range(4), WHOM)),
    *((Layout(2, stage), (1,), (-1, 0)) for stage in (0, 3)),
    (Layout(2, 2, more=TWICE), (0,), (1, 1)),
    (Layout(2, 2, "fp16"), (1,), (1, 0)),  # a step that is skipped
    (Layout(2, 2, more={"gradient_clipping": 1.0}), (1,), (1, 0)),
]


def test_all_ranks_stop_after_the_step_in_which_one_gets_a_signal(tmp_path: Path) -> None:
    cases = [(tmp_path / str(number), *case) for number, case in enumerate(MATRIX)]
    for case, answers in zip(cases, run_each(stopped, 2, cases), strict=True):
        folder, layout, _, (step, _) = case
        skipped = int(layout.precision == "fp16" and step == 1)
        want = 0, max(0, step) + 1, skipped, [f"global_step{max(0, step) + 1}"]
        assert answers == [want] * 2, (str(layout), *case[2:])
        made = open_checkpoint(folder).shared["client_state"]["micro-batches"]
        assert made == want[1] * layout.more.get("gradient_accumulation_steps", 1)


@pytest.mark.parametrize("stage", range(4))
def test_one_process_stops_too(tmp_path: Path, stage: int) -> None:
    for number, more in enumerate(({}, {"gradient_clipping": 1.0})):
        (answer,) = POOL.run(stopped, 1, tmp_path / str(number), Layout(1, stage, more=more), (0,), (1, 0))
        assert answer == (0, 2, 0, ["global_step2"])


def test_what_was_saved_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    layout = Layout(2, 3)
    whole = POOL.run(undisturbed, 2, layout)
    POOL.run(stopped, 2, tmp_path, layout, (1,), (1, 0))
    assert [losses[2:] for losses in whole] == POOL.run(undisturbed, 2, layout, tmp_path)


def undisturbed(comm: Any, layout: Layout, folder: Path | None = None) -> list[float]:
    engine = engine_of(layout)
    if folder is not None:
        engine.load_checkpoint(folder)
    losses = go(engine, comm.rank, range(engine.global_steps, 4))
    engine.destroy()
    return losses


def behind_another(comm: Any, folder: Path) -> tuple[Any, list[str]]:
    """A signal while another checkpoint is still being written."""
    engine = engine_of(Layout(2, 2))
    engine.on_signal(folder)
    go(engine, comm.rank, range(1))
    engine.save_checkpoint(folder, tag="other", asynchronous=True)
    to_me(signal.SIGTERM) if comm.rank == 0 else None
    left = None
    try:
        go(engine, comm.rank, range(1, 3))
    except SystemExit as exit:
        left = exit.code
    engine.destroy()
    return left, sorted(complete(folder))


def test_a_checkpoint_that_is_being_written_is_completed_first(tmp_path: Path) -> None:
    assert POOL.run(behind_another, 2, tmp_path) == [(0, ["global_step2", "other"])] * 2


def parts_of_a_model(comm: Any, folder: Path, keys: dict[str, Any]) -> tuple[Any, int]:
    """Ranks that split layers, one of which gets a signal."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "model"))
    part: Any = Part(comm.rank)
    engine, *_ = zero_full.initialize(model=part, config=config(0, **keys), optimizer=sgd, mesh=mesh)
    engine.on_signal(folder)
    left = None
    try:
        for step in range(3):
            if (comm.rank, step) == (1, 1):
                to_me(signal.SIGTERM)
            engine.backward(engine(data(step, 0, 0)))
            engine.step()
    except SystemExit as exit:
        left = exit.code
    engine.destroy()
    return left, engine.global_steps


def test_ranks_that_split_layers_stop_together(tmp_path: Path) -> None:
    keys: tuple[dict[str, Any], ...] = ({}, {"gradient_clipping": 1.0})
    for answers in run_each(parts_of_a_model, 2, [(tmp_path / str(len(each)), each) for each in keys]):
        assert answers == [(0, 2), (0, 2)]


def own_loop(comm: Any) -> list[bool]:
    """A loop without an engine's step."""
    with signals_given_back():
        model = Net()
        adam = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = zero_full.assemble.shard(model, adam, zero_full.Settings(stage=2))
        optimizer.watch_signals([signal.SIGUSR1])
        requested = []
        for step in range(3):
            if (comm.rank, step) == (1, 1):
                to_me(signal.SIGUSR1)
            model(data(step, 0, comm.rank)).backward()
            requested.append(optimizer.stop_requested)
            optimizer.step()
            requested.append(optimizer.stop_requested)
            optimizer.zero_grad()
        optimizer.close(gather=False)
    return requested


def test_a_loop_of_ones_own_hears_of_it_after_the_same_step_on_all_ranks() -> None:
    assert POOL.run(own_loop, 2) == [[False, False, False, True, True, True]] * 2


def differing(comm: Any, folder: Path) -> list[str]:
    """What is said where ranks do not do the same, and where a save fails."""
    said = []
    for case in ("only one listens", "other folders", "no client state"):
        engine = engine_of(Layout(2, 1))

        def fails(rank: int = comm.rank) -> dict[str, Any]:
            return {} if rank == 0 else {"a": 1 // 0}

        if case != "only one listens" or comm.rank == 0:
            where = folder / (str(comm.rank) if case == "other folders" else "same")
            engine.on_signal(where, client_state=fails)
        to_me(signal.SIGTERM) if comm.rank == 0 else None
        said.append(said_by(lambda engine=engine: go(engine, comm.rank, range(1))))
        engine.destroy()
    assert not complete(folder / "same")
    return said


def test_ranks_that_listen_to_different_things_are_told_in_the_next_step(tmp_path: Path) -> None:
    for alone, folders, state in POOL.run(differing, 2, tmp_path):
        watched = f"SIGTERM, SIGUSR1 to save in {tmp_path}"
        assert f"signals watched: {watched}/same (rank 0),  (rank 1)" in alone, alone
        assert f"signals watched: {watched}/0 (rank 0), {watched}/1 (rank 1)" in folders, folders
        assert state == "CheckpointError: rank 1: integer division or modulo by zero", state


def test_what_cannot_be_listened_to_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine, other = engine_of(Layout(1, 1)), engine_of(Layout(1, 1))
    for signals, said in (
        ((), "ValueError: signals is empty"),
        ((signal.SIGKILL,), "ValueError: signals: SIGKILL cannot be watched"),
        ((4711,), "ValueError: signals: 4711 is not a valid Signals"),
        (signal.SIGTERM, "TypeError: signals must be a sequence, such as (signal.SIGTERM,)"),
    ):
        assert said_by(lambda signals=signals: engine.on_signal(tmp_path, signals)).startswith(said)
    assert said_by(lambda: engine.on_signal(tmp_path, tag="a/b")).startswith("CheckpointError: the tag")
    assert "client_state must be a dict" in said_by(
        lambda: engine.on_signal(tmp_path, client_state=3)  # type: ignore[arg-type]
    )
    said = []
    thread = threading.Thread(target=lambda: said.append(said_by(lambda: engine.on_signal(tmp_path))))
    thread.start()
    thread.join()
    assert "main thread" in said[0]
    with signals_given_back():
        engine.on_signal(tmp_path)
        assert "watches SIGTERM already" in said_by(lambda: other.on_signal(tmp_path))
        engine.backward(engine(batch(0, 0, torch.float32)))
        assert "optimizer.step() after on_signal" in said_by(engine.optimizer.step)
        engine.destroy()
        other.on_signal(tmp_path, [signal.SIGUSR1])
        other.on_signal(tmp_path, [signal.SIGINT])
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
        other.destroy()
    assert "its handler" not in caplog.text


def test_a_handler_that_was_there_rests_until_destroy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[int] = []

    def mine(number: int, frame: Any) -> None:
        called.append(number)

    before = signal.signal(signal.SIGUSR1, mine)
    try:
        engine = engine_of(Layout(1, 1))
        engine.on_signal(tmp_path)
        assert "SIGUSR1: its handler <function" in caplog.text and "until destroy" in caplog.text
        to_me(signal.SIGUSR1)
        assert not called and not engine.stop_requested
        engine.destroy()
        to_me(signal.SIGUSR1)
        assert called == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_processes_that_a_rank_forks_end_as_they_do_without(tmp_path: Path) -> None:
    engine = engine_of(Layout(1, 1))
    engine.on_signal(tmp_path)
    child = multiprocessing.get_context("fork").Process(target=threading.Event().wait, args=(60,))
    child.start()
    assert child.pid is not None
    os.kill(child.pid, signal.SIGUSR1)
    child.join(0.5)
    assert child.exitcode is None
    child.terminate()
    child.join(20)
    assert child.exitcode == -signal.SIGTERM
    engine.destroy()
