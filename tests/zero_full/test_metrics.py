"""What `engine.metrics()` returns, and what monitors write of it."""

import csv
import json
import logging
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zero_full
from tests.worlds import run_each
from tests.zero_full.runs import WIDTH, Net, config, data

BATCH = 5


def engine_of(stage: int = 1, model: Any = None, **keys: Any) -> zero_full.Engine:
    return zero_full.initialize(model=model or Net(), config=config(stage, **keys))[0]


def steps(engine: zero_full.Engine, count: int, spoil: float = 1.0) -> list[float]:
    """Train; each step's loss."""
    losses = []
    for _ in range(count):
        parts = []
        for micro in range(engine.gradient_accumulation_steps()):
            loss = engine(data(engine.global_steps, micro, engine.global_rank)) * spoil
            parts.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
        losses.append(sum(parts) / len(parts))
    return losses


def folder_of(path: Path, **more: Any) -> dict[str, Any]:
    return {"enabled": True, "output_path": str(path), **more}


def lines_in(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


# metrics ------------------------------------------------------------------------------------------


def test_metrics_before_the_first_step_inside_one_and_after_it() -> None:
    engine = engine_of(2, gradient_accumulation_steps=2, gradient_clipping=0.01)
    first = engine.metrics()
    assert {name for name, value in first.items() if value} <= {"lr", "held", "peak"}
    assert first["lr"] == [0.01] and first["held"].keys() == {"parameters"}
    engine.backward(engine(data(0, 0, 0)))
    engine.step()
    inside = engine.metrics()
    assert (inside["step"], inside["loss"]) == (0, None) and inside["held"]["gradients"] > 0
    engine.zero_grad()
    engine.micro_steps = 0
    losses = steps(engine, 2)
    after = engine.metrics()
    assert (after["step"], after["samples"], after["skipped"]) == (2, 2 * 2 * BATCH, 0)
    assert after["loss"] == pytest.approx(losses[-1]) and after["grad_norm"] == engine.get_global_grad_norm()
    assert after["clipped_norm"] == pytest.approx(0.01, rel=1e-3) and after["loss_scale"] is None
    seconds, rate = after["step_seconds"], after["samples_per_second"]
    assert seconds is not None and rate == pytest.approx(2 * BATCH / seconds)
    assert engine.metrics()["step_seconds"] is None  # no step since
    engine.destroy()
    with pytest.raises(RuntimeError, match="metrics after destroy"):
        engine.metrics()


def test_metrics_of_a_skipped_step_in_fp16() -> None:
    scale = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    engine = engine_of(1, model=Net().half(), fp16=scale, gradient_clipping=1.0)
    engine.metrics()
    for spoil in (1.0, math.nan):
        engine.backward(engine(torch.ones(BATCH, WIDTH, dtype=torch.float16)) * spoil)
        engine.step()
    found = engine.metrics()
    assert found["loss"] is not None and math.isnan(found["loss"])
    assert (found["step"], found["skipped"], found["loss_scale"]) == (2, 1, 8.0)
    assert found["clipped_norm"] is None and found["grad_norm"] is not None
    engine.destroy()


def test_metrics_without_an_optimizer_and_with_rates_that_a_schedule_moves() -> None:
    forward_only = zero_full.initialize(model=Net(), config={"train_micro_batch_size_per_gpu": 1})[0]
    forward_only(data(0, 0, 0))
    assert forward_only.metrics()["loss"] is None
    forward_only.destroy()
    engine = engine_of(scheduler={"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}})
    engine.metrics()
    rates = []
    for _ in range(3):
        rates.append(engine.get_lr())
        steps(engine, 1)
        assert engine.metrics()["lr"] == rates[-1] != engine.get_lr()
    engine.destroy()


def metrics_of_a_rank(comm: Any) -> tuple[Any, ...]:
    """One rank's metrics at stage 3 with offload, beside what other calls return."""
    host = {"device": "cpu"}
    zero = {"offload_optimizer": host, "offload_param": host, "stage3_param_persistence_threshold": 0}
    engine = engine_of(3, zero_optimization=zero)
    if comm.rank == 0:
        engine.metrics()  # any rank, alone
    losses = steps(engine, 2)
    if comm.rank == 1:
        assert engine.metrics()["loss"] is None  # it notes losses from now on
    losses += steps(engine, 1)
    found = engine.metrics()
    told = engine.traffic(), engine.moved(), {k for k, t in engine.optimizer.holdings().items() if t}
    engine.destroy()
    return found, losses[-1], told


@pytest.mark.parametrize("stage", [1, 3])
def test_what_offload_states_has_moved_is_not_held(stage: int) -> None:
    engine = engine_of(stage, zero_optimization={"stage3_param_persistence_threshold": 0})
    steps(engine, 1)
    held = engine.metrics()["held"]
    engine.offload_states()
    assert engine.metrics()["held"].keys() <= {"counters"}
    engine.reload_states()
    assert engine.metrics()["held"] == held
    engine.destroy()


def test_metrics_are_each_ranks_own() -> None:
    found = run_each(metrics_of_a_rank, 2, [()])[0]
    for metrics, loss, (sent, moved, kinds) in found:
        assert metrics["loss"] == pytest.approx(loss)
        assert (metrics["sent"], metrics["moved"]) == (sent, moved) and set(metrics["held"]) <= kinds
    assert found[0][0]["step_seconds"] > 0 and found[1][0]["step_seconds"] > 0
    assert found[0][0]["loss"] != found[1][0]["loss"]


# Monitors -----------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A folder that the working directory is in."""
    before = Path.cwd()
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(before)


def test_a_resumed_run_appends_to_its_lines(run: Path) -> None:
    keys = {"jsonl_monitor": folder_of(run / "logs", job_name="a"), "steps_per_monitor": 2}
    engine = engine_of(**keys)
    losses = steps(engine, 5)
    engine.save_checkpoint(run / "saved")
    engine.destroy()
    engine.destroy()
    with (run / "logs/a/metrics.jsonl").open("a") as file:
        file.write('{"time": 1')  # of a rank that was killed
    engine = engine_of(**keys)
    engine.load_checkpoint(run / "saved")
    steps(engine, 1, spoil=math.nan)
    engine.destroy()
    path = run / "logs/a/metrics.jsonl"
    *_, torn, last = path.read_text().splitlines()
    assert torn == '{"time": 1'
    path.write_text(path.read_text().replace(torn + "\n", ""))
    lines = lines_in(path.parent)
    assert [line["step"] for line in lines] == [2, 4, 6] and len({line["run"] for line in lines}) == 2
    assert [lines[0]["loss"], lines[1]["loss"]] == pytest.approx([losses[1], losses[3]])
    assert lines[2]["loss"] == "NaN" and lines[0]["step_seconds"] > 0
    assert list(json.loads(last))[:3] == ["time", "run", "step"]


def test_tags_and_files_are_deepspeeds(run: Path) -> None:
    keys: dict[str, Any] = {
        "csv_monitor": {"enabled": True, "job_name": "mine"},
        "wall_clock_breakdown": True,
    }
    for _ in range(2):
        engine = engine_of(fp16={"enabled": True, "loss_scale": 8}, model=Net().half(), **keys)
        engine.backward(engine(torch.ones(BATCH, WIDTH, dtype=torch.float16)))
        engine.optimizer.step()  # a loop of PyTorch's
        engine.destroy()
    files = {path.name: [*csv.reader(path.open())] for path in (run / "mine").iterdir()}
    assert files["Train_Samples_lr.csv"] == [["step", "lr"], ["5", "0.01"], ["5", "0.01"]]
    assert files["Train_Samples_loss_scale.csv"][:2] == [["step", "loss_scale"], ["5", "8.0"]]
    names = {name.removeprefix("Train_Samples_").removesuffix(".csv") for name in files}
    times = {f"elapsed_time_ms_{phase}" for phase in ("forward", "backward")}
    assert names >= {"train_loss", "lr", "loss_scale", "grad_norm", "skipped_steps"} | times


class Wandb(SimpleNamespace):
    """Stands in for the module `wandb`. The real one is in tests/hf."""

    def __init__(self) -> None:
        super().__init__(run=None, asked=None, logged=[], finished=0)

    def init(self, **options: Any) -> Any:
        self.asked = options
        return SimpleNamespace(log=self.log, finish=self.finish)

    def log(self, values: Any, step: int, commit: bool) -> None:
        self.logged.append((values, step))

    def finish(self) -> None:
        self.finished += 1


def test_a_run_of_wandb_is_the_scripts_or_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    keys = {"wandb": {"enabled": True, "team": "a", "group": "b", "project": "c"}}
    engine = engine_of(train_micro_batch_size_per_gpu=None, **keys)
    losses = steps(engine, 2)
    engine.destroy()
    assert wandb.asked == {"project": "c", "group": "b", "entity": "a"} and wandb.finished == 1
    assert [step for _, step in wandb.logged] == [1, 2]  # steps, as there is no batch size
    assert [each["Train/Samples/train_loss"] for each, _ in wandb.logged] == pytest.approx(losses)
    wandb.run, wandb.asked = wandb.init(), None
    engine = engine_of(**keys)
    steps(engine, 1)
    engine.destroy()
    assert wandb.asked is None and wandb.finished == 1 and wandb.logged[-1][1] == BATCH
    wandb.run, wandb.init = None, lambda **options: 1 / 0
    with pytest.raises(zero_full.ConfigError, match=r"wandb could not be opened \(ZeroDivisionError: "):
        engine_of(**keys)


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    engine = engine_of(tensorboard=folder_of(tmp_path, job_name="a"))
    losses = steps(engine, 3)
    engine.destroy()
    read = EventAccumulator(str(tmp_path / "a"))
    read.Reload()
    events = read.Scalars("Train/Samples/train_loss")
    assert [(each.step, each.value) for each in events] == [
        (BATCH * (place + 1), pytest.approx(loss)) for place, loss in enumerate(losses)
    ]


def test_a_monitor_that_fails_later_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(csv_monitor=folder_of(tmp_path), jsonl_monitor=folder_of(tmp_path))
    assert engine.reporting is not None and engine.reporting.monitors is not None
    engine.reporting.monitors.open["jsonl_monitor"].file.close()  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING, "zero_full"):
        steps(engine, 2)
    assert len([line for line in caplog.messages if line.startswith("jsonl_monitor has failed")]) == 1
    assert len((tmp_path / "DeepSpeedJobName/Train_Samples_lr.csv").read_text().splitlines()) == 3
    engine.destroy()


def monitored(comm: Any, folder: str) -> list[str]:
    """What each rank is told of monitors that cannot be opened, and of those that can."""
    said = []
    Path(folder, "a file").touch()
    sys.modules["wandb"] = None  # type: ignore[assignment]  # as if it was not installed
    blocked = {"jsonl_monitor": folder_of(Path(folder, "a file"))}
    model = Net()
    for keys in (blocked, {"wandb": {"enabled": True}, "csv_monitor": folder_of(Path(folder))}):
        try:
            engine_of(model=model, **keys)
        except (zero_full.ConfigError, RuntimeError) as error:
            said.append(str(error))
    del sys.modules["wandb"]
    engine = engine_of(model=model, jsonl_monitor=folder_of(Path(folder), job_name=f"run {comm.rank}"))
    steps(engine, 2)
    engine.destroy()
    return said


def test_what_cannot_be_opened_is_an_error_on_every_rank(tmp_path: Path) -> None:
    first, *others = run_each(monitored, 3, [(str(tmp_path),)])[0]
    assert "jsonl_monitor.output_path: nothing can be written to" in first[0]
    assert "wandb needs the package wandb" in first[1] and "pip install wandb" in first[1]
    for said in others:
        assert [line.partition(": ")[2] for line in said] == [f"ConfigError: {line}" for line in first]
    assert [path.name for path in tmp_path.glob("run *")] == ["run 0"]
    assert [line["step"] for line in lines_in(tmp_path / "run 0")] == [1, 2]
