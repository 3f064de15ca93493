"""A run goes on with another number of ranks, and no sample is seen twice or not at all."""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zero_full
from tests.worlds import POOL, RankError, free_port
from tests.zero_full.checkpoint_runs import Layout, batch, engine_of
from tests.zero_full.runs import WIDTH, Net, config, said_by
from zero_full.comm.stores import fresh_prefix
from zero_full.examples import resume

STEPS = 10
ROUNDING = 1e-5  # of a loss: sums in another order


class Seen:
    """An object of the loop's, the same on all ranks."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


def trains(comm: Any, folder: Path, stage: int, killed_at: int | None = None) -> tuple[int, list[float]]:
    """All steps, of 12 samples, four of them a pass, saved at every third. The first one, and the losses."""
    rows = torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(0))
    keys: Any = config(stage, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 20}})
    del keys["train_micro_batch_size_per_gpu"], keys["gradient_accumulation_steps"]
    engine, _, loader, _ = zero_full.initialize(
        model=Net(), config={**keys, "train_batch_size": 12}, training_data=rows
    )
    seen = Seen()
    engine.keep_in_checkpoint(seen=seen)
    engine.load_checkpoint(folder)
    first = engine.global_steps
    while engine.global_steps < STEPS:
        for rows in loader:
            loss = engine(rows)
            if engine.global_steps == killed_at and comm.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            engine.backward(loss)
            seen.losses.append(float(comm.all_reduce(loss.detach().clone())) / comm.world_size)
            engine.step()
            if engine.global_steps % 3 == 0:
                engine.save_checkpoint(folder)
            if engine.global_steps == STEPS:
                break
    engine.destroy()
    return first, seen.losses


@pytest.mark.rotates
def test_a_run_of_which_a_rank_was_killed_goes_on_with_fewer_and_with_more(tmp_path: Path) -> None:
    ((_, whole),) = POOL.run(trains, 1, tmp_path / "whole", 0)
    assert len(whole) == STEPS
    with pytest.raises(RankError, match="the process died"):
        POOL.run(trains, 3, tmp_path / "cut", 3, 5)
    with pytest.raises(RankError, match="the process died"):
        POOL.run(trains, 2, tmp_path / "cut", 1, 7)
    for first, losses in POOL.run(trains, 4, tmp_path / "cut", 2):
        assert first == 6
        assert losses == pytest.approx(whole, rel=ROUNDING)


class Refuses(Seen):
    """One that does not take a state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError(f"not these {len(state)}")


def kept(comm: Any, folder: Path, what: str) -> tuple[str, list[float], Any]:
    engine = engine_of(Layout(comm.world_size, 1))
    seen = Refuses() if what == "refuse" and comm.rank == 1 else Seen()
    engine.keep_in_checkpoint(seen=seen)
    if what == "save":
        seen.losses = [0.0] * 5000
        seen.losses[2500] = float(comm.rank)
        engine.backward(engine(batch(0, comm.rank, torch.float32)))
        engine.step()
        engine.save_checkpoint(folder)
    said = said_by(lambda: engine.load_checkpoint(folder))
    engine.destroy()
    return said, seen.losses[2500:2501], engine.lr_scheduler.state_dict()


def test_if_one_object_on_one_rank_refuses_its_state_no_object_has_got_one(tmp_path: Path) -> None:
    assert [losses for _, losses, _ in POOL.run(kept, 2, tmp_path, "save")] == [[0.0], [1.0]]
    fresh = engine_of(Layout(1, 1)).lr_scheduler.state_dict()
    for said, losses, schedule in POOL.run(kept, 2, tmp_path, "refuse"):
        assert said == (
            f"CheckpointError: rank 1: seen cannot load the state in {tmp_path}/global_step1: "
            "ValueError('not these 1'). Nothing was loaded"
        )
        assert (losses, schedule) == ([], fresh)
    for said, losses, schedule in POOL.run(kept, 3, tmp_path, "load"):  # of 5000 numbers one is not the same
        assert "seen was saved with a different state on each of 2 ranks" in said
        assert (losses, schedule) == ([], fresh)


# Whole processes, as a user starts them ----------------------------------------------------------

TORCHRUN = sys.executable, "-m", "torch.distributed.run"
EXAMPLE = "-m", "zero_full.examples.resume"


@contextmanager
def started(
    *command: str, log: Path, folder: Path | None = None, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A program, whose ranks do not outlive the block."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    with log.open("wb") as out:
        program = subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=folder)
    try:
        yield program
    finally:
        for pid in (program.pid, *below(program.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        program.wait()


def below(pid: int) -> list[int]:
    """The processes that it has started, and so on."""
    return [each for child in children_of(pid) for each in (child, *below(child))]


def children_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        return [int(each) for each in path.read_text().split()]
    except FileNotFoundError:
        return []


def wait_for(text: str, log: Path, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while text not in log.read_text():
        assert time.monotonic() < deadline, f"no {text!r} in\n{log.read_text()}"
        time.sleep(0.05)


def listens(port: int) -> bool:
    """Whether somebody does, on this host."""
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0


def losses_in(*logs: Path) -> dict[int, tuple[str, str]]:
    """Of each step the loss and the ranks that took it last."""
    lines = [line for log in logs for line in log.read_text().splitlines()]
    found = [re.fullmatch(r"step (\d+): loss (\S+), (\d) ranks", line) for line in lines]
    return {int(each[1]): (each[2], each[3]) for each in found if each}


def run_here(log: Path, *arguments: str) -> None:
    """The example, as one process: this one."""
    with mock.patch.object(sys, "argv", ["resume", *arguments]), log.open("w") as out, redirect_stdout(out):
        assert resume.main() == 0


def whole_run(folder: Path) -> dict[int, float]:
    """The losses of the example without an end in the middle."""
    run_here(folder / "whole.log", "--out", str(folder / "whole"))
    return {step: float(loss) for step, (loss, _) in losses_in(folder / "whole.log").items()}


def check(logs: tuple[Path, ...], whole: dict[int, float]) -> list[str]:
    """All steps were taken, with the losses of a run without an end; returns who took them."""
    found = losses_in(*logs)
    assert {step: float(loss) for step, (loss, _) in sorted(found.items())} == pytest.approx(whole, abs=3e-6)
    return [ranks for _, (_, ranks) in sorted(found.items())]


@pytest.mark.rotates
def test_a_signal_to_one_rank_of_torchrun_ends_it_well_and_another_number_goes_on(tmp_path: Path) -> None:
    whole, logs = whole_run(tmp_path), (tmp_path / "1.log", tmp_path / "2.log")
    out = ("--out", str(tmp_path / "run"))
    command = (*TORCHRUN, "--standalone", "--nproc-per-node", "2", *EXAMPLE, *out)
    with started(*command, "--pause", "0.05", "--save-every", "100", log=logs[0]) as program:
        wait_for("step 4:", logs[0])
        os.kill(children_of(program.pid)[1], signal.SIGUSR1)
        assert program.wait(60) == 0, logs[0].read_text()
    assert "stopping after a signal" in logs[0].read_text()
    taken = len(losses_in(logs[0]))
    assert 4 < taken < len(whole)
    run_here(logs[1], *out, "--stage", "1")
    assert check(logs, whole) == ["2"] * taken + ["1"] * (len(whole) - taken)
    assert min(losses_in(logs[1])) == taken


def test_the_example_takes_a_file_and_goes_on_with_it(tmp_path: Path) -> None:
    file, log, out = tmp_path / "ds.json", tmp_path / "log", ("--out", str(tmp_path / "run"))
    muon = {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 3e-3}}
    file.write_text(json.dumps({"train_batch_size": 12, "optimizer": muon, "bf16": {"enabled": True}}))
    run_here(log, *out, "--config", str(file), "--epochs", "2")
    losses = [float(loss) for loss, _ in losses_in(log).values()]
    assert sum(losses[11:]) < 0.8 * sum(losses[:11])
    run_here(log, *out, "--config", str(file), "--epochs", "3", "--stage", "2")
    assert list(losses_in(log)) == list(range(20, 33))  # behind the last save


def test_ranks_that_are_started_again_find_nothing_of_those_before_them() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))

    def starts(rank: int, ranks: int, late: tuple[int, ...]) -> bytes:
        time.sleep(0.1 if rank in late else 0)
        part = fresh_prefix(store, rank, ranks)
        if rank == 1:
            part.set("address", secrets.token_hex(8))
        return bytes(part.get("address"))

    seen = set()
    for ranks, late in ((3, ()), (3, (1, 2)), (2, (0,)), (4, (1,)), (4, (0, 3)), (2, ())):
        with ThreadPoolExecutor(ranks) as pool:
            heard = set(pool.map(lambda rank, n=ranks, late=late: starts(rank, n, late), range(ranks)))
        assert len(heard) == 1 and not heard & seen
        seen |= heard
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] have not called init_distributed within 0.1 s"):
        fresh_prefix(store, 0, 3)


STARTED_AGAIN = """
import os, sys, time
import torch.distributed as dist
import zero_full
again = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
time.sleep(2.0 if again and os.environ["RANK"] == "1" else 0.0)
zero_full.init_distributed()
dist.barrier()
sys.exit(0 if again else 1)
"""


@pytest.mark.slow
def test_torchrun_starts_ranks_again_of_which_one_is_late(tmp_path: Path) -> None:
    (tmp_path / "again.py").write_text(STARTED_AGAIN)
    command = (*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    with started(*command, str(tmp_path / "again.py"), log=tmp_path / "log") as program:
        assert program.wait(60) == 0, (tmp_path / "log").read_text()


@pytest.mark.slow
def test_torchrun_passes_a_signal_on_and_a_restart_goes_on(tmp_path: Path) -> None:
    whole, logs = whole_run(tmp_path), (tmp_path / "1.log", tmp_path / "2.log")
    command = (*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", *EXAMPLE)
    command = (*command, "--out", str(tmp_path / "run"), "--pause", "0.2")
    with started(*command, log=logs[0]) as program:
        wait_for("step 13:", logs[0])
        program.send_signal(signal.SIGTERM)
        assert program.wait(60) == 1  # of torchrun itself; its ranks exit with 0
    assert "stopping after a signal" in logs[0].read_text()
    with started(*command, log=logs[1]) as program:
        wait_for("step 21:", logs[1])
        os.kill(children_of(program.pid)[0], signal.SIGKILL)
        assert program.wait(120) == 0, logs[1].read_text()
    assert len(re.findall(r"^step 20:", logs[1].read_text(), re.M)) == 2  # saved last before that
    assert set(check(logs, whole)) == {"2"}


@pytest.mark.slow
def test_if_a_host_is_lost_the_others_go_on_with_fewer_ranks(tmp_path: Path) -> None:
    """Two agents of two ranks each, both on this host. That without the store is killed, with its ranks."""
    whole, logs, port = whole_run(tmp_path), (tmp_path / "1.log", tmp_path / "2.log"), free_port()
    command = (*TORCHRUN, "--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "3")
    command = (*command, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}")
    command = (*command, "--rdzv-id", "elastic", "--rdzv-conf", "last_call_timeout=5,keep_alive_interval=1")
    command = (*command, *EXAMPLE, "--out", str(tmp_path / "run"), "--pause", "0.2")
    with started(*command, log=logs[0]) as keeper:
        while not listens(port):
            assert keeper.poll() is None, logs[0].read_text()
        with started(*command, log=logs[1]) as lost:
            while not any("step 7:" in log.read_text() for log in logs):
                assert keeper.poll() is None and lost.poll() is None, logs[0].read_text()
                time.sleep(0.1)
            for pid in (lost.pid, *children_of(lost.pid)):
                os.kill(pid, signal.SIGKILL)
            assert keeper.wait(180) == 0, "\n".join(log.read_text() for log in logs)
    taken = check(logs, whole)
    assert taken[:5] == ["4"] * 5 and taken[-1] == "2"


STAND_INS = {
    "srun": 'exec "$@"',
    "scontrol": '[ "$1" = show ] && echo 127.0.0.1 || echo "$@" >> requeued',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
}


@pytest.mark.slow
def test_the_script_for_slurm_saves_and_goes_into_the_queue_again(tmp_path: Path) -> None:
    """The script of the guide. Nobody but the script itself gets the signal."""
    page = (Path(__file__).parents[2] / "site" / "docs" / "guide" / "long_runs.md").read_text()
    text = page.partition("```bash\n#!/bin/bash\n")[2].partition("```")[0]
    for old, new in (
        ("--nproc-per-node 8", "--nproc-per-node 2"),
        (":29500", f":{free_port()}"),
        ("train.py --deepspeed_config ds.json", f"{' '.join(EXAMPLE)} --out run --pause 0.2"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / "job.sh").write_text(text)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    for name, command in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{command}\n")
        (tmp_path / name).chmod(0o755)
    whole, logs = whole_run(tmp_path), (tmp_path / "1.log", tmp_path / "2.log")
    told = {"SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here"}
    told |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(Path(__file__).parents[2])}
    with started("bash", "job.sh", log=logs[0], folder=tmp_path, **told) as job:
        wait_for("step 13:", logs[0])
        job.send_signal(signal.SIGUSR1)
        assert job.wait(60) == 0, logs[0].read_text()
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    taken = len(losses_in(logs[0]))
    with started("bash", "job.sh", log=logs[1], folder=tmp_path, SLURM_RESTART_COUNT="1", **told) as job:
        assert job.wait(120) == 0, logs[1].read_text()
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert min(losses_in(logs[1])) == taken
    check(logs, whole)
