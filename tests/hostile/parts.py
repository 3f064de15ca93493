"""The matrix of runs whose ranks hold different parts of the model: stages, and tensor-parallel ranks.

An event takes the place of the second of three steps. The parameters must then be those of the run in which
nothing has happened, or every rank must raise an error that names the event. That the run without an event
trains as one process does is the matter of `tests/zero_full/test_pipeline.py` and `test_dtensors.py`.
"""

import copy
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zero_full
from tests.hostile.cells import Outcome, quickly_stuck
from tests.hostile.generation_events import receive
from tests.worlds import POOL, RankError
from tests.zero_full import pipeline_runs, test_dtensors
from zero_full import PipelineModule

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 8.0}},
}
STAGES = {"pipeline": (0, 1), "tensor": (0, 1, 2, 3)}  # of ZeRO
STEPS = 3


@dataclass(frozen=True)
class PartsCell:
    """One run."""

    kind: str  # "pipeline" or "tensor"
    event: str
    stage: int
    precision: str

    def __str__(self) -> str:
        return f"{self.kind}, {self.event}: stage {self.stage}, {self.precision}"

    @property
    def refusal(self) -> str | None:
        return EVENTS[self.kind][self.event][1]

    @property
    def waits_for_torch(self) -> bool:
        """Whether ranks wait in torch's collectives of tensor parallelism, until its timeout."""
        # At stage 3 a write to a released parameter raises on the ranks that write, and the others go on.
        writes = self.stage == 3 and "written that is not cut" in self.event
        return self.kind == "tensor" and (self.refusal in SLOW or writes)


class PipelineRun:
    """Pipelines of two stages, or of three on three ranks."""

    def __init__(self, stage: int, precision: str, ranks: int, rank: int) -> None:
        self.case = pipeline_runs.Case(3 if ranks == 3 else 2, zero=stage)
        self.config = {**self.case.config(), **PRECISIONS[precision]}
        self.rank, self.data_rank = rank, rank % (ranks // self.case.stages)
        self.engine = zero_full.initialize(model=self.case.module(), config=self.config)[0]
        self.is_first = self.engine.is_first_stage()

    def data(self, step: int) -> Iterator[Any]:
        return iter(pipeline_runs.batch(step, self.data_rank))

    def step(self, step: int) -> None:
        self.engine.train_batch(self.data(step))

    def values(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.engine.module.named_parameters()}


class TensorRun:
    """Pairs of tensor-parallel ranks, or all three of three ranks."""

    def __init__(self, stage: int, precision: str, ranks: int, rank: int) -> None:
        self.width = 3 if ranks == 3 else 2
        self.rank, self.data_rank, self.place = rank, rank // self.width, rank % self.width
        self.mesh = test_dtensors.mesh_of(ranks // self.width, self.width)
        keys = test_dtensors.keys_of(stage, gradient_clipping=0.0, **PRECISIONS[precision])
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
        self.engine = test_dtensors.engine_of(self.mesh, keys)
        self.is_first = self.place == 0

    def backward(self, step: int, data_rank: int | None = None) -> None:
        x = test_dtensors.batch(step, 0, self.data_rank if data_rank is None else data_rank)
        self.engine.backward(self.engine(x.to(self.dtype)))

    def step(self, step: int) -> None:
        self.backward(step)
        self.engine.step()

    def values(self) -> dict[str, Tensor]:
        return dict(self.engine.module_state_dict())


Run = Any  # one of the two
RUNS: dict[str, type[PipelineRun] | type[TensorRun]] = {"pipeline": PipelineRun, "tensor": TensorRun}
Act = Callable[[Run], None]
EVENTS: dict[str, dict[str, tuple[Act, str | None, Act]]] = {"pipeline": {}, "tensor": {}}
BOTH, PIPELINE, TENSOR = ("pipeline", "tensor"), ("pipeline",), ("tensor",)


def nothing(run: Run) -> None:
    run.step(1)


def event(
    kinds: Sequence[str], name: str, refused: str | None = None, plain: Act = nothing
) -> Callable[[Act], Act]:
    """Add an event. `refused`: what the error on every rank says; None: the result is that of `plain`."""

    def add(act: Act) -> Act:
        for kind in kinds:
            EVENTS[kind][name] = act, refused, plain
        return act

    return add


for each in BOTH:
    EVENTS[each]["nothing"] = nothing, None, nothing


# Batches ------------------------------------------------------------------------------------------


def interrupted(items: Iterator[Any], act: Callable[[], Any]) -> Iterator[Any]:
    """Yield the first, act, and yield the others."""
    yield next(items)
    act()
    yield from items


INSIDE = "_batch inside the data iterator of a batch"


@event(PIPELINE, "train_batch in the iterator of eval_batch", INSIDE)
def train_in_eval(run: Run) -> None:
    run.engine.eval_batch(interrupted(run.data(5), lambda: run.step(1)))


@event(PIPELINE, "train_batch in the iterator of train_batch", INSIDE)
def train_in_train(run: Run) -> None:
    run.engine.train_batch(interrupted(run.data(1), lambda: run.step(5)))


@event(PIPELINE, "eval_batch in the iterator of train_batch", INSIDE)
def eval_in_train(run: Run) -> None:
    run.engine.train_batch(interrupted(run.data(1), lambda: run.engine.eval_batch(run.data(5))))


@event(PIPELINE, "save_checkpoint in the iterator of train_batch", "save_checkpoint inside the data iterator")
def save_in_train(run: Run) -> None:
    run.engine.train_batch(interrupted(run.data(1), lambda: save(run)))


@event(PIPELINE, "load_state_dict in the iterator of eval_batch", "load_state_dict inside the data iterator")
def load_in_eval(run: Run) -> None:
    state = run.engine.state_dict()
    run.engine.eval_batch(interrupted(run.data(5), lambda: run.engine.load_state_dict(state)))


@event(PIPELINE, "train_batch in no_grad", "train_batch inside torch.no_grad")
def train_without_gradients(run: Run) -> None:
    with torch.no_grad():
        run.step(1)


@event(PIPELINE, "set_dataiterator in a batch")
def new_iterator(run: Run) -> None:
    other = run.data(7)
    run.engine.set_dataiterator(interrupted(run.data(1), lambda: run.engine.set_dataiterator(other)))
    run.engine.train_batch()
    run.engine.set_dataiterator(None)


@event(PIPELINE, "eval_batch")
def evaluated(run: Run) -> None:
    run.engine.eval_batch(run.data(5))
    run.step(1)
    run.engine.eval_batch(run.data(5))


@event(PIPELINE, "an iterator that fails once")
def iterator_fails(run: Run) -> None:
    with suppress(RuntimeError):
        run.engine.train_batch(interrupted(run.data(1), lambda: 1 // 0))
    run.step(1)


@event(PIPELINE, "two engines on one module", "already belongs to an engine")
def second_engine(run: Run) -> None:
    zero_full.initialize(model=run.engine.module, config=run.config)


@event(PIPELINE, "the module called by itself", "train_batch")
def module_called(run: Run) -> None:
    run.engine.module(next(run.data(1))[0])


@event(PIPELINE, "a copy of the module")
def module_copied(run: Run) -> None:
    other: PipelineModule = copy.deepcopy(run.engine.module)
    assert len(list(other.parameters())) == len(list(run.engine.module.parameters()))
    run.step(1)


@event(PIPELINE, "the first stages: eval_batch", "rank 0: eval_batch with 4 .* rank 1: .*_batch with 4")
def one_evaluates(run: Run) -> None:
    (run.engine.eval_batch if run.is_first else run.engine.train_batch)(run.data(1))


@event(PIPELINE, "the first stages: another number of micro-batches", "rank 0: train_batch with 8 micro")
def other_count(run: Run) -> None:
    if run.is_first:
        run.engine.set_train_batch_size(2 * run.engine.train_batch_size())
    run.engine.train_batch(iter([*run.data(1), *run.data(2)]))


@event(TENSOR, "different batches", "tensor-parallel ranks have different gradients")
def different_batches(run: Run) -> None:
    run.backward(1, data_rank=run.rank)
    run.engine.step()


@event(TENSOR, "different batches, with loss.backward()", "tensor-parallel ranks have different gradients")
def different_batches_of_torch(run: Run) -> None:
    x = test_dtensors.batch(1, 0, run.rank).to(run.dtype)
    run.engine(x).backward()
    run.engine.optimizer.step()


@event(TENSOR, "different batches in one micro-batch", "tensor-parallel ranks have different gradients")
def different_in_one(run: Run) -> None:
    run.backward(1)
    run.backward(2, data_rank=run.rank)
    run.engine.step()


# Both ----------------------------------------------------------------------------------------------


def save(run: Run) -> None:
    run.engine.save_checkpoint(Path(tempfile.gettempdir()) / "zero_full_hostile_parts", tag="one")


# The last is gloo's own: tensor-parallel ranks wait for each other in collectives of torch.
WAITS = "waits in {}.* for ranks|rank .* has destroyed its engine or exited|Timed out waiting"
SLOW = [WAITS.format(call) for call in ("save_checkpoint", "GatheredParameters", "engine.generation")]


@event(BOTH, "the first part: save_checkpoint", WAITS.format("save_checkpoint"))
def one_saves(run: Run) -> None:
    if run.is_first:
        save(run)
    run.step(1)


@event(BOTH, "the first part: GatheredParameters", WAITS.format("GatheredParameters"))
def one_gathers(run: Run) -> None:
    if run.is_first:
        with zero_full.GatheredParameters(list(run.engine.module.parameters())):
            pass
    run.step(1)


@event(TENSOR, "the first part: generation()", WAITS.format("engine.generation"))
def one_generates(run: Run) -> None:
    if run.is_first:
        with run.engine.generation():
            pass
    run.step(1)


@event(BOTH, "the first part: clip_next_step", r"gradient clipping: 0.01 \(rank 0\)")
def one_clips(run: Run) -> None:
    if run.is_first:
        run.engine.optimizer.clip_next_step(0.01)
    run.step(1)


@event(TENSOR, "the first part: another learning rate", r"lr of group 0: 0.1 \(rank 0\), 0.05 \(rank 1\)")
def one_is_faster(run: Run) -> None:
    if run.is_first:
        run.engine.optimizer.param_groups[0]["lr"] *= 2
    run.step(1)


def fail(*_: Any) -> None:
    raise ArithmeticError("on purpose")


@event(BOTH, "the first part: a hook on step that fails", "on purpose")
def one_fails(run: Run) -> None:
    if run.is_first:
        run.engine.basic_optimizer.register_step_pre_hook(fail)
    run.step(1)


@event(BOTH, "the first part: a hook on our optimizer's step that fails", "on purpose")
def one_of_ours_fails(run: Run) -> None:
    if run.is_first:
        run.engine.optimizer.register_step_pre_hook(fail)
    run.step(1)


@event(BOTH, "the first part: a write where others read", "changed inside GatheredParameters")
def one_writes_while_reading(run: Run) -> None:
    params = list(run.engine.module.parameters())
    with zero_full.GatheredParameters(params), torch.no_grad():
        if run.is_first:
            params[0].fill_(0.5)


@event(BOTH, "record")
def recorded(run: Run) -> None:
    with tempfile.TemporaryDirectory() as folder, run.engine.record(Path(folder, "a.json")):
        run.step(1)


ANOTHER_RATE = r"lr of group 0: .* \(rank 0\)|rank 0: lr: .*; rank 1: lr: |no other rank has its part"


@event(BOTH, "rank 0: another learning rate", ANOTHER_RATE)
def one_rank_is_faster(run: Run) -> None:
    if run.rank == 0:
        run.engine.optimizer.param_groups[0]["lr"] *= 2
    if run.engine.world_size == 1 and isinstance(run, PipelineRun):
        raise RuntimeError("no other rank has its part")  # a stage may have a learning rate of its own
    run.step(1)


@event(TENSOR, "the first part: a parameter written that is not cut", r"first\.weight")
def one_writes(run: Run) -> None:
    if run.is_first:
        with torch.no_grad():
            run.engine.module.first.weight.fill_(0.3)
    run.step(1)


@event(TENSOR, "the first part: p.grad = None of a parameter that is not cut", "gradient")
def one_clears(run: Run) -> None:
    run.backward(1)
    if run.is_first:
        run.engine.module.first.weight.grad = None
    run.engine.step()


@event(BOTH, "after destroy", "after destroy")
def ended(run: Run) -> None:
    run.engine.destroy()
    run.step(1)


@event(BOTH, "state_dict and back")
def there_and_back(run: Run) -> None:
    run.engine.load_state_dict(run.engine.state_dict())
    run.step(1)


@event(PIPELINE, "weights()", "each rank has the layers of its own stages only")
def weights_of_stages(run: Run) -> None:
    list(run.engine.weights())


@event(TENSOR, "weights()")
def weights_of_parts(run: Run) -> None:
    whole = dict(run.engine.weights())
    with zero_full.GatheredParameters(list(run.engine.module.parameters())):
        for name, param in run.engine.module.named_parameters():
            value = param.full_tensor() if hasattr(param, "full_tensor") else param
            assert torch.equal(whole[name], value), name
    run.step(1)


@event(TENSOR, "weights(delta=True)")
def changes_of_parts(run: Run) -> None:
    received: dict[str, Tensor] = {}
    receive(received, run.engine.weights(delta=True))
    run.step(1)
    receive(received, run.engine.weights(delta=True))
    for name, value in run.engine.weights():
        assert torch.equal(received[name], value), name


@event(TENSOR, "generation()")
def generated(run: Run) -> None:
    with run.engine.generation() as module:
        module(test_dtensors.batch(1, 0, run.data_rank).to(run.dtype))
    run.step(1)


# The matrix ----------------------------------------------------------------------------------------


def everything() -> Iterator[PartsCell]:
    """The whole matrix."""
    for kind, events in EVENTS.items():
        for name in events:
            for stage in STAGES[kind]:
                for precision in PRECISIONS:
                    yield PartsCell(kind, name, stage, precision)


def tenth(seed: int) -> Iterator[PartsCell]:
    """One of the ten parts of everything, without those that wait for a timeout of torch's."""
    for place, cell in enumerate(everything()):
        if place % 10 == seed % 10 and not cell.waits_for_torch:
            yield cell


def outcome_of(comm: Any, cell: PartsCell, ranks: int) -> Outcome:
    """Play it on this rank, and the run in which nothing happens."""
    torch.manual_seed(0)

    act, refused, plain = EVENTS[cell.kind][cell.event]

    def played(act: Act) -> dict[str, Tensor]:
        run = RUNS[cell.kind](cell.stage, cell.precision, ranks, comm.rank)
        try:
            run.step(0)
            act(run)
            run.step(2)
            return run.values()
        finally:
            run.engine.destroy()

    want = played(plain) if refused is None else {}
    try:
        with quickly_stuck():
            got = played(act)
    except Exception as error:
        return Outcome(float("inf"), f"{type(error).__name__}: {error}")
    return Outcome(max((float((got[name] - want[name]).abs().max()) for name in want), default=0.0))


def verdict(cell: PartsCell, outcomes: Sequence[Outcome]) -> str:
    """Empty if all is well, else what is wrong."""
    for rank, each in enumerate(outcomes):
        if cell.refusal is None and (each.error or each.off):
            return f"rank {rank}: {each.error[:300] or f'off by {each.off:.3g}'}"
        if cell.refusal is not None and not re.search(cell.refusal, each.error, re.DOTALL):
            return (
                f"rank {rank}: expected an error about {cell.refusal!r}, got {each.error[:300] or 'none'!r}"
            )
    return ""


def run(cells: Iterable[PartsCell], ranks: int) -> dict[PartsCell, str]:
    """The verdict on every cell. Each is a job of its own, because an error may end its process group."""
    verdicts = {}
    for cell in cells:
        # Groups of a mesh have torch's timeout of half an hour, unless one of them is the whole world.
        if ranks > 3 and cell.waits_for_torch:
            continue
        try:
            verdicts[cell] = verdict(cell, POOL.run(outcome_of, ranks, cell, ranks, limit=60, collective=4))
        except RankError as error:
            verdicts[cell] = str(error)[:1000]
    return verdicts
