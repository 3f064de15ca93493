"""A step that is interrupted at any of its lines: whole and counted, or not begun, or the next call raises.

Exceptions are injected at lines of `zero_full`, but for those that guard a step (`GUARDS`): Python delivers a
signal between two calls, and a tracer also where none can come. Real signals at any time cover these.
"""

import copy
import linecache
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_full
from tests.worlds import run_each
from tests.zero_full.runs import Net, config, data, said_by
from zero_full.shard.guards import unfinished_step


@pytest.fixture(autouse=True)
def interrupts_raise() -> Iterator[None]:
    """As in a terminal: a shell lets what it starts in the background ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


ROOT = str(Path(zero_full.__file__).parent)
GUARDS = ("run", "_leave", "_note", "_deliver")
HOST = {"offload_optimizer": {"device": "cpu"}}
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "sgd": {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
    "bf16, clipped": {"bf16": {"enabled": True}, "gradient_clipping": 0.1},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 6}},
    "offload": {"bf16": {"enabled": True}, "zero_optimization": HOST},
    "in parts": {"zero_optimization": {"sub_group_size": 50}},
    "delayed": {
        "bf16": {"enabled": True},
        "zero_optimization": {"offload_optimizer": {"device": "cpu", "delay_update_after": 0}},
    },
}
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 100}}


class Stopped(BaseException):
    """As `KeyboardInterrupt`, where pytest must not take it for its own."""


class Line:
    """Acts when line number `at` of ours is executed; else counts them."""

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        self.at, self.act, self.count, self.where = at, act, 0, ""

    def _call(self, frame: Any, event: str, arg: Any) -> Any:
        code = frame.f_code
        is_guard = code.co_name in GUARDS and code.co_filename == unfinished_step.__file__
        ours = code.co_filename.startswith(ROOT) or "lr_scheduler" in code.co_filename
        return self._line if ours and not is_guard else None

    def _line(self, frame: Any, event: str, arg: Any) -> Any:
        # Not where `with` enters or leaves a context that is written in C: no signal is handled there, and an
        # exception raised by a trace would leave __torch_function__ off for good.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and "with without_overrides()" not in line:
            self.count += 1
            if self.count == self.at:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                self.act()
        return self._line

    @contextmanager
    def traced(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)


def stop() -> None:
    raise Stopped


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


ACTS = {"stop": stop, "SIGINT": interrupt}


def start(stage: int, kind: str, **more: Any) -> Any:
    keys = copy.deepcopy(KINDS[kind])
    if stage == 3:
        keys.setdefault("zero_optimization", {})["stage3_param_persistence_threshold"] = 20
    engine, *_ = zero_full.initialize(model=Net(), config=config(stage, scheduler=SCHEDULE, **keys, **more))
    return engine


def one_pass(engine: Any, step: int, rank: int = 0) -> None:
    engine.backward(engine(data(step, 0, rank, next(iter(engine.optimizer.sharded.flats)).dtype)))


def take(engine: Any, loop: str) -> None:
    """A step, as a loop of either kind takes it."""
    if loop == "engine":
        engine.step()
    else:
        engine.optimizer.step()
        engine.lr_scheduler.step()
        engine.optimizer.zero_grad()


def values_of(engine: Any) -> list[Any]:
    """Everything that a step changes."""
    optimizer = engine.optimizer
    if optimizer.delayed is not None:
        optimizer.delayed.wait()  # which writes masters beside
    whole = [] if engine.zero_optimization_stage() == 3 else list(engine.module.parameters())
    states = [dict(state) for state in optimizer.own_state.data.values()]
    counters = [engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.global_samples]
    schedule = {
        key: value for key, value in engine.lr_scheduler.state_dict().items() if not key.startswith("_is_")
    }
    rates = [group["lr"] for group in optimizer.param_groups]
    masters = [group.master.values for group in optimizer.trained]
    return copy.deepcopy([whole, masters, states, counters, schedule, rates, engine.loss_scale()])


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


class Run:
    """Two steps, and what the third and fourth would be."""

    def __init__(self, stage: int, kind: str, rank: int = 0, loop: str = "engine") -> None:
        self.stage, self.kind, self.rank, self.loop = stage, kind, rank, loop
        engine = start(stage, kind)
        for step in range(2):
            one_pass(engine, step, rank)
            engine.step()
        self.saved = copy.deepcopy(engine.state_dict())
        if kind == "delayed":  # so that the step that is traced completes an update, too
            self._step(engine, 1)
        one_pass(engine, 2, rank)
        self.before, line = values_of(engine), Line(0, stop)
        with line.traced():
            engine.step() if loop == "engine" else engine.optimizer.step()
        if loop != "engine":
            engine.lr_scheduler.step()
            engine.optimizer.zero_grad()
        self.lines, self.after = line.count, values_of(engine)
        self._step(engine, 3)
        self.last = self._ended(engine)
        engine = self._begun()
        engine.optimizer.finish_update()  # of the step before, which this step may have completed
        self.completed = values_of(engine)
        engine.destroy()

    def _begun(self) -> Any:
        """An engine with everything that the third step needs."""
        engine = start(self.stage, self.kind)
        engine.load_state_dict(self.saved)
        if self.kind == "delayed":
            self._step(engine, 1)
        one_pass(engine, 2, self.rank)
        return engine

    def _step(self, engine: Any, step: int) -> None:
        one_pass(engine, step, self.rank)
        take(engine, self.loop)

    def _ended(self, engine: Any) -> list[Any]:
        engine.optimizer.finish_update()
        values = values_of(engine)
        engine.destroy()
        return values

    def at(self, number: int, act: Callable[[], None]) -> str:
        """Empty, if all is well with an exception at this line; else what is wrong."""
        engine, line, raised = self._begun(), Line(number, act), False
        try:
            with line.traced():
                engine.step() if self.loop == "engine" else engine.optimizer.step()
        except (Stopped, KeyboardInterrupt, TimeoutError):
            raised = True
        values = values_of(engine)
        is_before, is_after = same(values, self.before), same(values, self.after)
        is_before |= same(values, self.completed)
        told = f"stage {self.stage}, {self.kind}, {self.loop}, line {number}, {line.where}: "
        if not engine.optimizer.unfinished.is_cut_short:
            if is_before:  # it has not begun
                take(engine, self.loop)
            elif self.loop != "engine":
                engine.lr_scheduler.step()
                engine.optimizer.zero_grad()
                is_after = same(values_of(engine), self.after)
            if not (is_before or is_after):
                return told + "neither before nor after the step, and nobody says so"
        said = said_by(partial(one_pass, engine, 3, self.rank))
        if said == "nothing was said":
            take(engine, self.loop)
        elif "cut short by" not in said:
            return told + said
        elif "zero_grad()" in said:
            if not is_before:
                return told + "something has changed, and this is not said: " + said
            engine.optimizer.zero_grad()
            self._step(engine, 2)
            self._step(engine, 3)
            if self.kind == "delayed":  # the update that was completed counts for the pass that is repeated
                return self._ended(engine) and ""
            if self.loop != "engine":
                engine.global_samples -= 5  # of the pass that is repeated: such a loop's forwards are counted
        else:
            says = [said_by(engine.step), said_by(engine.state_dict), said_by(engine.module_state_dict)]
            if not all("cut short by" in each for each in says):
                return told + str(says)
            engine.load_state_dict(self.saved)
            if self.kind == "delayed":
                self._step(engine, 1)
            self._step(engine, 2)
            self._step(engine, 3)
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return told + "the handler of SIGINT is not back"
        if not same(self._ended(engine), self.last):
            return told + f"goes on with other values, after {said}"
        return "" if raised or number > self.lines else told + "nothing was raised"


@pytest.mark.rotates
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_at_any_line_of_a_step_is_never_half_a_step(kind: str) -> None:
    for stage in (0, 1, 2, 3):
        if not stage and kind in ("offload", "delayed"):
            continue
        for number, (act, loop) in enumerate(
            [("stop", "engine"), ("SIGINT", "engine"), ("stop", "optimizer")]
        ):
            run = Run(stage, kind, loop=loop)
            assert run.lines > 300
            for at in range(10 + 17 * (stage + number), run.lines + 1, 199):
                problem = run.at(at, ACTS[act])
                assert not problem, (act, problem)


def masters_of(engine: Any) -> list[Tensor]:
    return [group.master.values.clone() for group in engine.optimizer.trained]


def test_real_interrupts_at_any_time_are_never_half_a_step() -> None:
    """By a timer of the system, at times as long as a step takes: a thread would have to wait for the GIL."""
    engine, _ = with_optimizer(2)
    generator = torch.Generator().manual_seed(0)
    took, interrupted, halves = 1.0, 0, set[str]()
    for step in range(5):  # the first is slow, and the others are where the machine has other work
        one_pass(engine, step)
        began = time.perf_counter()
        engine.step()
        took = min(took, time.perf_counter() - began)
    masters = masters_of(engine)
    before_alarms = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    for step in range(5, 600):
        if step > 64 and halves == {"", "collecting"}:
            break
        before = engine.global_steps
        engine.optimizer.zero_grad()
        one_pass(engine, step)
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-6 + float(torch.rand(1, generator=generator)) * took)
            engine.step()
            time.sleep(10)  # until it comes
        except KeyboardInterrupt:
            interrupted += 1
        now = masters_of(engine)
        assert same(now, masters) == (engine.global_steps == before)
        masters = now
        halves.add(engine.optimizer.unfinished.phase)
        assert torch.is_grad_enabled() and torch._C._is_torch_function_enabled()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert interrupted > 50 and halves == {"", "collecting"}, "the first phase and the second were hit"
    signal.signal(signal.SIGALRM, before_alarms)
    engine.destroy()


# Handlers ----------------------------------------------------------------------------------------


class Interrupting(torch.optim.SGD):
    """Its step is where SIGINT comes, so many times; or it raises, in a part but the first."""

    signals, fails, zero_full_elementwise = 0, False, True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Plain descent."""
        super().step()
        for _ in range(self.signals):
            interrupt()
        if self.fails:
            raise ArithmeticError("out of luck")


def with_optimizer(stage: int = 1, **keys: Any) -> tuple[Any, Any]:
    model, made = Net(), config(stage, **keys)
    del made["optimizer"]
    raw = Interrupting(model.parameters(), lr=0.1)
    engine, *_ = zero_full.initialize(model=model, optimizer=raw, config=made)
    return engine, raw


def test_the_handler_of_sigint_is_called_once_after_the_step_and_is_back() -> None:
    engine, raw = with_optimizer()
    raw.signals, seen = 1, list[int]()
    usual = signal.signal(signal.SIGINT, mine := lambda *_: seen.append(engine.global_steps))
    try:
        one_pass(engine, 0)
        engine.step()
        assert seen == [1] and signal.getsignal(signal.SIGINT) is mine
        one_pass(engine, 1)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        assert seen == [1, 2] and engine.global_steps == 2
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        one_pass(engine, 2)
        engine.step()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN and engine.global_steps == 3
    finally:
        signal.signal(signal.SIGINT, usual)


def test_a_second_ctrl_c_does_not_wait() -> None:
    engine, raw = with_optimizer()
    raw.signals = 2
    one_pass(engine, 0)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.global_steps == 0 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(
        RuntimeError, match="forward after a step that was cut short by KeyboardInterrupt, while"
    ):
        one_pass(engine, 1)


def test_a_step_of_another_thread_leaves_handlers_alone() -> None:
    engine, _ = with_optimizer()
    said: list[str] = []

    def act() -> None:
        one_pass(engine, 0)
        said.append(said_by(engine.step))

    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    assert said == ["nothing was said"] and engine.global_steps == 1


# Errors of the user's code in a step -------------------------------------------------------------


def test_an_optimizer_that_raises_in_its_step_is_told_until_all_is_loaded(tmp_path: Path) -> None:
    engine, raw = with_optimizer()
    one_pass(engine, 0)
    engine.step()
    engine.save_checkpoint(tmp_path)
    kept = copy.deepcopy(engine.state_dict())
    want = [p.detach().clone() for p in engine.module.parameters()]
    weight = engine.module.layers[2].weight
    loads: list[Callable[[], Any]] = [
        lambda: engine.load_checkpoint(tmp_path),
        lambda: engine.load_state_dict(kept),
        lambda: (engine.optimizer.load_state_dict(kept["optimizer"]), engine.load_state_dict(kept)),
    ]
    for load in loads:
        one_pass(engine, 1)
        raw.fails = True
        with pytest.raises(ArithmeticError, match="out of luck"):
            engine.step()
        raw.fails = False
        assert engine.global_steps == 1
        engine.optimizer.zero_grad()
        calls: list[Callable[[], Any]] = [
            lambda: one_pass(engine, 1),
            lambda: engine.module(data(0, 0, 0)).backward(),
            engine.step,
            engine.optimizer.step,
            engine.state_dict,
            engine.optimizer.state_dict,
            lambda: engine.save_checkpoint(tmp_path, "no"),
            lambda: engine.save_weights(tmp_path / "no"),
            lambda: engine.load_checkpoint(tmp_path, load_module_only=True),
            lambda: engine.load_checkpoint(tmp_path, load_optimizer_states=False),
            lambda: zero_full.safe_get_full_fp32_param(weight),
            lambda: zero_full.GatheredParameters([weight]).__enter__(),
            lambda: engine.destroy(gather=True),
        ]
        for call in calls:
            said = said_by(call)
            assert (
                "after a step that was cut short by ArithmeticError out of luck, while it changed" in said
            ), said
            assert "by load_checkpoint" in said
        load()
        assert all(map(torch.equal, engine.module.parameters(), want)) and engine.global_steps == 1
    one_pass(engine, 1)
    engine.step()
    assert engine.global_steps == 2


class Ending(torch.optim.lr_scheduler.ConstantLR):
    """Raises in its second step, as OneCycleLR does behind its last one."""

    def step(self, epoch: Any = None) -> None:
        """One, not two."""
        if self.last_epoch >= 1:
            raise ValueError("tried to step too often")
        super().step()


def test_a_schedule_that_is_at_its_end_has_not_undone_a_step_that_is_counted(tmp_path: Path) -> None:
    model, keys = Net(), config(1)
    engine, *_ = zero_full.initialize(
        model=model, lr_scheduler=lambda optimizer: Ending(optimizer), config=keys
    )
    for step in range(4):
        one_pass(engine, step)
        before = model.layers[0].weight.detach().clone()
        assert ("too often" in said_by(engine.step)) == (step > 0)
        assert engine.global_steps == step + 1 and not torch.equal(before, model.layers[0].weight)
    engine.save_checkpoint(tmp_path)


@pytest.mark.parametrize("loop", ["engine", "optimizer"])
def test_an_error_of_a_hook_after_a_step_has_not_undone_it(loop: str) -> None:
    model, keys = Net(), config(2, scheduler=SCHEDULE)
    del keys["optimizer"]
    raw = torch.optim.SGD(model.parameters(), lr=0.1)
    raw.register_step_post_hook(lambda *_: 1 / 0)
    engine, *_ = zero_full.initialize(model=model, optimizer=raw, config=keys)
    for step in range(2):
        schedule = engine.lr_scheduler.state_dict()
        one_pass(engine, step)
        with pytest.raises(ZeroDivisionError):
            engine.step() if loop == "engine" else raw.step()
        if loop == "engine":
            assert engine.lr_scheduler.state_dict() != schedule and model.layers[0].weight.grad is None
        raw.zero_grad()
        assert engine.global_steps == step + 1


def test_a_step_that_is_refused_before_it_changes_anything_may_be_repeated() -> None:
    model = Net()
    raw = zero_full.Lamb(model.parameters(), lr=0.01)
    keys = config(2, fp16={"enabled": True, "initial_scale_power": 4})
    del keys["optimizer"]
    engine, *_ = zero_full.initialize(model=model, optimizer=raw, config=keys)
    one_pass(engine, 0)
    raw.param_groups[0]["min_coeff"] = -1.0
    with pytest.raises(ValueError, match="min_coeff"):
        engine.step()
    raw.param_groups[0]["min_coeff"] = 0.01
    engine.step()
    assert engine.global_steps == 1


# Several ranks -----------------------------------------------------------------------------------


def one_is_interrupted(comm: Any, stage: int) -> tuple[str, int, list[Tensor]]:
    """SIGINT comes to one rank alone while it changes values: it finishes the step with the others."""
    engine, raw = with_optimizer(stage)
    raw.signals = comm.rank
    said = "nothing"
    one_pass(engine, 0, comm.rank)
    try:
        engine.step()
    except KeyboardInterrupt:
        said = "interrupted"
    raw.signals = 0
    one_pass(engine, 1, comm.rank)
    engine.step()
    found = [value for _, value in sorted(engine.module_state_dict().items())]
    steps = engine.global_steps
    engine.destroy()
    return said, steps, found


def one_is_cut_short(comm: Any, stage: int) -> list[str]:
    """The rank that was interrupted before it changed anything cannot go on by itself."""
    engine, _ = with_optimizer(stage)
    one_pass(engine, 0, comm.rank)
    said = []
    if comm.rank == 0:
        with suppress(Stopped), Line(400, stop).traced():
            engine.step()
        engine.optimizer.zero_grad()
        kept = engine.state_dict
        calls = (partial(one_pass, engine, 1), engine.step, kept, partial(engine.load_checkpoint, "nowhere"))
        said = [said_by(call) for call in calls]
    engine.optimizer.zero_grad()
    return said


def test_a_rank_that_is_interrupted_finishes_its_step_with_the_others_or_cannot_go_on() -> None:
    for ranks in run_each(one_is_interrupted, 2, [(stage,) for stage in (0, 1, 2, 3)]):
        assert [said for said, *_ in ranks] == ["nothing", "interrupted"]
        assert all(steps == 2 for _, steps, _ in ranks)
        assert same(ranks[0][2], ranks[1][2])
    for said, _ in run_each(one_is_cut_short, 2, [(1,)]):
        assert len(said) == 4
        for each in said:
            assert "cut short by Stopped, before it changed any parameter" in each, each
            assert "resume from a checkpoint" in each, each
