"""What a run logs while it trains: what a line has, what it leaves out, and when there is one."""

import logging
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_full
from tests.worlds import run_each
from tests.zero_full.runs import config
from zero_full.engine.metrics import Lap, Means, Meter, peak_memory
from zero_full.formatting import duration, three_digits

BATCH, LENGTH, WORDS = 5, 7, 11


class Speaker(nn.Module):
    """A model that calls its tokens as Hugging Face's do, and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        scores: Tensor = self.body(input_ids).flatten(0, 1)
        return scores if labels is None else nn.functional.cross_entropy(scores, labels.flatten())


def words(step: int, rank: int = 0) -> Tensor:
    seed = torch.Generator().manual_seed(100 * rank + step)
    return torch.randint(WORDS, (BATCH, LENGTH), generator=seed)


def engine_of(**keys: Any) -> zero_full.Engine:
    torch.manual_seed(0)
    engine, _, _, _ = zero_full.initialize(model=Speaker(), config=config(1, **keys))
    return engine


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """A function of what was logged of steps since it was called last."""

    def lines() -> list[str]:
        found = [line for line in caplog.messages if line.startswith("step ")]
        caplog.clear()
        return found

    with caplog.at_level(logging.INFO, "zero_full"):
        yield lines


def train(engine: zero_full.Engine, steps: int, how: str = "engine", spoil: float = 1.0) -> list[float]:
    """Steps in one of the ways to write a loop; each step's loss."""
    losses: list[float] = []
    for step in range(steps):
        parts: list[float] = []
        for micro in range(engine.gradient_accumulation_steps()):
            x = words(10 * step + micro, engine.global_rank)
            if how == "outside":
                loss = nn.functional.cross_entropy(engine.module(x), x.flatten())
            else:
                loss = engine(x, labels=x) * spoil
            parts.append(float(loss.detach()))
            if how == "engine":
                engine.backward(loss)
            elif how == "scale":
                engine.scale(loss).backward()
            else:
                loss.backward()
            if how in ("engine", "scale", "plain"):
                engine.step()
        if how in ("torch", "outside"):
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        losses.append(sum(parts) / len(parts))
    return losses


TIMES = r"[\d.,]+ m?s, [\d.,]+ samples/s, [\d.,]+ tokens/s, "


@pytest.mark.parametrize(
    ("how", "micro_batches"), [("engine", 1), ("engine", 2), ("scale", 2), ("plain", 2), ("torch", 1)]
)
def test_a_line_has_what_is_known(how: str, micro_batches: int, said: Any) -> None:
    keys = {"gradient_accumulation_steps": micro_batches, "plain_backward_divides": True}
    engine = engine_of(steps_per_print=2, gradient_clipping=1.0, **keys)
    losses = train(engine, 5, how)
    lines = said()
    assert len(lines) == 2
    for line, step in zip(lines, (2, 4), strict=True):
        told = f"step {step}: loss {losses[step - 1]:.4f}, {TIMES}norm [\\d.]+, lr 0.01, peak [\\d.]+ [MG]B"
        assert re.fullmatch(told, line), line
    passes = 5 * micro_batches
    samples = passes * engine.train_micro_batch_size_per_gpu()
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (5, passes, samples)
    engine.destroy()


class Recomputed(nn.Module):
    """Five layers, of which four are recomputed, each by a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = checkpoint(layer, x, use_reentrant=True)
        return x.square().mean()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("calls", ["optimizer", "engine", "engine, eval", "module", "backward twice"])
def test_samples_are_those_of_forwards_however_many_passes_they_have(calls: str, said: Any) -> None:
    keys = {"managed_gradient_accumulation": False} if calls.startswith("engine") else {}
    model = nn.Linear(4, 1) if calls == "module" else Recomputed()
    engine = zero_full.initialize(model=model, config=config(1, steps_per_print=1, **keys))[0]
    engine.train("eval" not in calls)
    losses = []
    for _ in range(3):
        x = torch.randn(BATCH, 4)
        with torch.no_grad():
            engine(x)
        loss = engine.module(x).mean() if calls == "module" else engine(x)
        if calls == "backward twice":
            loss.backward(retain_graph=True)
        loss.backward()
        (engine if calls.startswith("engine") else engine.optimizer).step()
        engine.optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert engine.global_samples == 3 * BATCH * (5 if "eval" in calls else 1)
    told = [re.match(r"step \d: loss ([\d.]+),", line) for line in said()]
    if calls != "module":
        assert [each and each[1] for each in told] == [f"{loss:.4f}" for loss in losses]
    engine.destroy()


class TwoLosses(nn.Module):
    """A loss, one of an earlier layer, and their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.early(x)
        early, late = x.square().mean(), self.late(x).square().mean()
        return {"late": late, "early": early, "sum": early + late}


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
def test_a_loss_made_of_several_outputs_is_told_by_the_user_or_not_at_all(half: bool, said: Any) -> None:
    keys = {"fp16": {"enabled": True, "initial_scale_power": 4}} if half else {}
    engine = zero_full.initialize(model=TwoLosses(), config=config(1, steps_per_print=1, **keys))[0]
    torch.manual_seed(1)
    for how, is_known in (
        ("sum", True),
        ("plain", False),
        ("plain", False),
        ("early", True),
        ("engine", True),
    ):
        losses = engine(torch.randn(BATCH, 4).to(next(engine.parameters()).dtype))
        made = losses["late"] + 0.1 * losses["early"] if how in ("plain", "engine") else losses[how]
        engine.backward(made) if how == "engine" else made.backward()
        engine.step()
        [line] = said()
        assert (f"loss {float(made.detach()):.4f}," in line) is is_known, (how, line)
        assert is_known or not re.search(r"loss \d", line), (how, line)
    engine.destroy()


def test_steps_of_the_optimizer_itself_count_and_name_checkpoints(tmp_path: Path) -> None:
    engine = engine_of(fp16={"enabled": True, "initial_scale_power": 12})
    engine.optimizer.step()  # without gradients, which is no step
    for spoil, applied in ((1.0, True), (math.nan, False)):
        x = words(0, 0)
        engine.backward(engine(x, labels=x) * spoil)
        engine.optimizer.step()
        assert engine.was_step_applied() is applied
        engine.optimizer.zero_grad()
    engine.save_checkpoint(tmp_path)
    assert (engine.global_steps, engine.skipped_steps) == (2, 1)
    assert (tmp_path / "latest").read_text() == "global_step2"
    engine.destroy()


def test_a_line_leaves_out_what_nobody_knows(said: Any) -> None:
    """A loss outside the engine, no batch size, no norm; and the first step has no time."""
    engine = engine_of(steps_per_print=1, train_micro_batch_size_per_gpu=None)
    engine.optimizer.param_groups[0]["lr"] = 3e-5
    train(engine, 2, "outside")
    first, second = said()
    assert re.fullmatch(r"step 1: lr 3e-05, peak [\d.]+ [MG]B", first)
    assert re.fullmatch(r"step 2: [\d.,]+ m?s, lr 3e-05, peak [\d.]+ [MG]B", second)
    engine.destroy()


def test_the_rate_is_that_of_the_step_and_not_of_the_next_one(said: Any) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.4, "warmup_num_steps": 4}}
    schedule["params"]["warmup_type"] = "linear"  # type: ignore[index]
    engine = engine_of(steps_per_print=1, scheduler=schedule)
    rates = []
    for _ in range(3):
        rates.append(engine.get_lr()[0])
        train(engine, 1)
    assert [re.search("lr ([^,]*)", line)[1] for line in said()] == [f"{lr:.3g}" for lr in rates]  # type: ignore[index]
    assert rates[-1] != engine.get_lr()[0]
    engine.destroy()


@pytest.mark.parametrize("name", ["WarmupLR", "StepLR"])
@pytest.mark.parametrize("by", ["engine", "loop", "nobody"])
def test_a_schedule_that_nobody_moves_is_told_once(
    name: str, by: str, caplog: pytest.LogCaptureFixture
) -> None:
    params = {"WarmupLR": {"warmup_num_steps": 9}, "StepLR": {"step_size": 9}}[name]
    engine = engine_of(scheduler={"type": name, "params": params})
    for step in range(4):
        engine.backward(engine(x := words(step), labels=x))
        (engine.step if by == "engine" else engine.optimizer.step)()
        if by == "loop":
            engine.lr_scheduler.step()
    told = [line for line in caplog.messages if "does not advance" in line]
    assert len(told) == (by == "nobody") and all(f"({name})" in line for line in told)
    engine.destroy()


def test_a_loss_scale_and_skipped_steps_are_told_where_there_are_any(said: Any) -> None:
    engine = engine_of(steps_per_print=1, fp16={"enabled": True, "initial_scale_power": 12})
    train(engine, 1)
    train(engine, 1, spoil=math.nan)
    good, bad = (line for line in said() if line.startswith(("step 1:", "step 2:")))
    assert "loss scale 4,096, peak" in good and "skipped" not in good
    assert "loss nan, " in bad and ", 1 skipped, " in bad
    engine.destroy()


@pytest.mark.parametrize(
    ("keys", "steps", "lines", "times"),
    [
        ({}, 4, [], []),
        ({"steps_per_print": 3}, 7, [3, 6], []),
        ({"steps_per_print": 10**9, "wall_clock_breakdown": True}, 3, [], []),
        ({"steps_per_print": 2, "wall_clock_breakdown": True}, 5, [2, 4], [2, 4]),
        ({"steps_per_print": math.inf, "wall_clock_breakdown": True}, 2, [], [1, 2]),
        ({"wall_clock_breakdown": True}, 2, [], [1, 2]),
    ],
    ids=str,
)
def test_lines_come_when_they_are_asked_for(
    keys: dict[str, Any], steps: int, lines: list[int], times: list[int], said: Any
) -> None:
    engine = engine_of(**keys)
    train(engine, steps)
    found = said()
    number = re.compile(r"step (\d+)")
    timed = [line for line in found if "forward" in line]
    assert [int(number.match(line)[1]) for line in found if line not in timed] == lines  # type: ignore[index]
    assert [int(number.match(line)[1]) for line in timed] == times  # type: ignore[index]
    assert all(
        re.fullmatch(r"step \d+: forward .* m?s, backward .* m?s, step .* m?s", each) for each in timed
    )
    engine.destroy()


def test_a_script_whose_logging_drops_the_lines_is_told(caplog: pytest.LogCaptureFixture) -> None:
    told = "steps_per_print log at level INFO"
    with caplog.at_level(logging.INFO, "zero_full"):
        engine_of(steps_per_print=5).destroy()
    assert told not in caplog.text
    with caplog.at_level(logging.WARNING, "zero_full"):
        engine_of().destroy()
        assert told not in caplog.text
        engine_of(steps_per_print=5).destroy()
    assert told in caplog.text


@pytest.mark.parametrize(
    ("configured", "level", "shown", "logged"),
    [
        (False, None, True, []),  # the default
        (False, logging.INFO, True, []),
        (False, logging.WARNING, False, []),
        (True, logging.INFO, False, ["step 2"]),
        (True, logging.WARNING, False, []),
    ],
)
def test_without_logging_of_the_scripts_own_lines_go_to_stderr(
    configured: bool,
    level: int | None,
    shown: bool,
    logged: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("zero_full")
    with monkeypatch.context() as changed:
        changed.setattr(logging.root, "handlers", [])  # without pytest's
        changed.setattr(log, "handlers", [handler] if configured else [])
        log.setLevel(level or logging.NOTSET)
        engine = engine_of(steps_per_print=2)
        train(engine, 2)
        engine.destroy()
    log.setLevel(logging.NOTSET)
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("step ")]
    assert [line[:6] for line in lines] == ["step 2"] * shown and not captured.out
    assert [line[:6] for line in records if line.startswith("step ")] == logged


def logged(comm: Any) -> tuple[list[str], float]:
    """A run's lines on this rank, and its last loss."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("zero_full")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        engine = engine_of(steps_per_print=2)
        if engine.reporting is not None:  # on the first rank
            engine.reporting.meter.clock = iter(range(3)).__next__  # a second from one look to the next
            engine.reporting.line_lap = Lap(engine.reporting.meter)
        losses = train(engine, 2)
        engine.destroy()
    finally:
        log.setLevel(logging.NOTSET)
        log.removeHandler(handler)
    return [line for line in records if line.startswith("step ")], losses[-1]


def test_the_first_rank_tells_of_all() -> None:
    [((line,), loss), *others] = run_each(logged, 3, [()])[0]
    each = f"{three_digits(3 * BATCH)} samples/s, {three_digits(3 * BATCH * LENGTH)} tokens/s"
    assert line.startswith(f"step 2: loss {loss:.4f} (rank 0), 1.00 s, {each}, lr 0.01, peak ")
    assert [lines for lines, _ in others] == [[], []] and len({loss, *(other for _, other in others)}) == 3


def test_time_counts_from_the_end_of_the_first_step() -> None:
    engine = engine_of()
    meter = Meter(engine.module, engine.optimizer, engine.stopwatch, 1, lambda: 0.0)
    lap = Lap(meter)
    meter.clock = iter([100.0, 104.0, 104.0, 110.0, 111.0, 118.0]).__next__
    meter.tokens = 1000
    meter.count(8)
    for _ in range(2):
        meter.tokens += 500
        meter.count(8)
    assert lap.end() == Means(2.0, 4.0, 250.0)
    assert lap.end() == Means()  # no step since
    meter.count(0)
    assert lap.end() == Means(6.0)
    meter.clock()
    meter.count(7)
    assert lap.end() == Means(8.0, 7 / 8)  # from the last call that a step came before
    engine.destroy()


def test_digits() -> None:
    seconds = (0.00012, 0.01234, 0.9994, 0.9996, 12.345, 123.45)
    assert [*map(duration, seconds)] == ["0.12 ms", "12.3 ms", "999 ms", "1.00 s", "12.3 s", "123 s"]
    assert [*map(three_digits, (0.5, 9.994, 9.996, 99.96, 1234567.8))] == [
        "0.50",
        "9.99",
        "10.0",
        "100",
        "1,234,568",
    ]


def test_memory_is_this_processes() -> None:
    before = peak_memory(torch.device("cpu"))
    block = torch.ones(40_000_000 // 4)
    after = peak_memory(torch.device("cpu"))
    assert before is not None and after is not None and before <= after and after > block.nbytes
