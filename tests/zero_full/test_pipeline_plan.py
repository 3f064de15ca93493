"""A plan of a pipeline says what its ranks hold, what is in flight, and how long they wait."""

import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zero_full
from tests.worlds import run_each
from tests.zero_full.pipeline_runs import BLOCKS, MICRO_BATCHES, Case, Embed, loss_of, specs
from tests.zero_full.test_pipeline import HAS_ZBV
from zero_full import LayerSpec, PipelineModule, PlanError
from zero_full.__main__ import main
from zero_full.comm.shared_memory import SharedMemory
from zero_full.errors import ConfigError
from zero_full.offload.nvme_state import OpenNvmeTier
from zero_full.pipeline.stage import Stage
from zero_full.pipeline.timetable import Operation, operations
from zero_full.plan import Plan, human, plan, plan_stages, side_by_side
from zero_min.ledger import Ledger, held

OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
IN_FILES = {"offload_optimizer": {"device": "nvme", "nvme_path": gettempdir()}}
WORDS = torch.empty(3, 60, dtype=torch.int64, device="meta")  # inputs, and labels, of a micro-batch


def config_of(case: Case, **more: Any) -> dict[str, Any]:
    return {**case.config(), "pipeline": {"schedule": case.schedule}, **more}


def described(case: Case) -> PipelineModule:
    """The module of a case for a plan, in a process that is no rank."""
    with torch.device("meta"):
        return case.module()


def planned(case: Case, data_ranks: int) -> Plan:
    return plan(described(case), config_of(case), data_ranks, inputs=[WORDS, WORDS], device="cpu")


# Bytes -----------------------------------------------------------------------------------------------

# torch 2.15 allocates a buffer when a message is due. Before, all stay for the next batch.
KEEPS_RECEIVED = find_spec("torch.distributed.pipelining._recv_buffers") is None
STATE = ("parameters", "buffers", "gradients", "master", "moments", "communication", "received")
BESIDE = ("host", "disk", "read", "written", "sent", "saved")


class Watched:
    """What one rank holds and does in a batch, from one operation to the next."""

    def __init__(self, engine: Any, ledger: Ledger) -> None:
        self.engine, self.ledger, self.order = engine, ledger, list[Operation]()
        self.gradients = 0  # bytes, before the step frees them
        self.begin()
        zero_grad = engine.optimizer.zero_grad

        def noting(*given: Any, **named: Any) -> None:
            self.gradients = held(engine.optimizer.holdings()["gradients"])
            zero_grad(*given, **named)

        engine.optimizer.zero_grad = noting

    def begin(self) -> None:
        self.order.clear()
        self.before, self.most = 0, 0
        self.before = self.most = self.now()

    def now(self) -> int:
        """Bytes that are alive besides gradients."""
        return self.ledger.live() - held(self.engine.optimizer.holdings()["gradients"])

    def note(
        self, kind: str, act: Callable[..., Any], stage: Stage, number: int, *given: Any, **named: Any
    ) -> Any:
        answer = act(stage, number, *given, **named)
        whole = named.get("full_backward", True)
        kind = kind if kind != "B" or whole else "I"
        self.order.append(Operation(kind, stage.stage_index, number))
        self.most = max(self.most, self.now())
        return answer


def watched(act: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """A method of a stage that tells the engine's watcher."""

    def method(stage: Stage, number: int, *given: Any, **named: Any) -> Any:
        return WATCHED[0].note(kind, act, stage, number, *given, **named)

    return method


WATCHED: list[Watched] = []
METHODS = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}


def buffers_of(engine: Any) -> list[Tensor]:
    """What torch's stages hold between two batches."""
    found: list[Tensor] = []
    for stage in (
        engine._schedule._stages if hasattr(engine._schedule, "_stages") else [engine._schedule._stage]
    ):
        for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
            buffers = [b for info in infos if (b := getattr(info, "buffer", None)) is not None]
            found += [*buffers, *(b.grad for b in buffers if b.grad is not None)]
    return found


def measured(comm: Any, case: Case, folder: Path) -> dict[str, Any]:
    """What this rank holds after two batches, and does, holds and sends in the third."""
    ledger, words = Ledger(), torch.ones_like(WORDS, device="cpu")
    with ledger.watch(), pytest.MonkeyPatch.context() as patch:
        for name, kind in METHODS.items():
            patch.setattr(Stage, name, watched(getattr(Stage, name), kind))
        engine, optimizer, *_ = zero_full.initialize(model=case.module(), config=config_of(case))
        WATCHED[:] = [watcher := Watched(engine, ledger)]
        for _ in range(3):
            optimizer.communicators.traffic.clear()
            before = engine.moved()
            watcher.begin()
            engine.train_batch((words.clone(), words.clone()) for _ in range(MICRO_BATCHES))
    found: dict[str, Any] = {
        kind: held(tensors) for kind, tensors in optimizer.holdings().items() if kind != "counters"
    }
    found["gradients"], found["sent"] = watcher.gradients, optimizer.communicators.traffic.total()
    moved = {way: size - before.get(way, 0) for way, size in engine.moved().items()}
    found["master"] = held(
        g.master.values for g in optimizer.trained if g.master.is_separate and not g.master.tier.is_offloaded
    )
    found["moments"] = found.pop("optimizer", 0) - found["master"]
    found.setdefault("host", 0)
    tier = optimizer.settings.tier
    found["disk"] = sum(e.padded_size for e in tier.blocks.values()) if isinstance(tier, OpenNvmeTier) else 0
    found["read"], found["written"] = (moved.get(f"{way} disk", 0) for way in ("read from", "written to"))
    flat = {member.param for values in optimizer.sharded.flats for member in values.members}
    found["parameters"] += held(p.detach() for p in engine.module.parameters() if p not in flat)
    found["buffers"] = held(engine.module.buffers())
    windows = [
        e.transport.windows[0] for e in optimizer.communicators.all if isinstance(e.transport, SharedMemory)
    ]
    found["communication"] = sum(window.nbytes for window in windows)
    found["received"] = held(buffers_of(engine))
    found["activations"] = watcher.most - watcher.before
    found["order"], found["place"] = watcher.order, engine.module.place
    engine.save_checkpoint(folder, asynchronous=True)
    found["saved"] = sum(room.nbytes for room in optimizer.background.staging.rooms)
    engine.destroy()
    WATCHED.clear()
    return found


def check_plan(case: Case, ranks: Sequence[dict[str, Any]]) -> None:
    made = planned(case, len(ranks) // case.stages)
    assert [each.pipeline.place for each in made.places if each.pipeline] == [*range(case.stages)]
    orders = operations(case.schedule, described(case), MICRO_BATCHES)
    for each in made.places:
        assert each.pipeline is not None
        here = [rank for rank in ranks if rank["place"] == each.pipeline.place]
        for kind in (*STATE, *BESIDE):
            most = max(rank[kind] for rank in here)
            planned_bytes = getattr(each, kind) if kind != "received" or KEEPS_RECEIVED else 0
            assert planned_bytes == most, (case, each.pipeline.place, kind)
        for rank in here:
            assert rank["order"] == orders[each.pipeline.place], case
        activations = max(rank["activations"] for rank in here)
        if KEEPS_RECEIVED:
            assert each.activations == pytest.approx(activations, rel=0.01), case
        else:  # what is received is among what a batch holds, as long as it is needed
            more = each.received + 0.01 * each.activations
            assert abs(each.activations - activations) <= more, case
    assert made.peak == max(each.peak for each in made.places)
    assert made.numel == sum(p.numel() for p in nn.ModuleList([Embed()]).parameters()) + BLOCKS * (64 + 8) + (
        0 if case.tied else 88
    )


ONE_DATA_RANK = [
    Case(2),
    Case(2, zero=0, interval=2),
    Case(2, "gpipe", precision="bf16"),
    Case(2, "interleaved_1f1b", per_rank=2, optimizer="Muon", params={"momentum": 0.9}),
    Case(2, "interleaved_zero_bubble", per_rank=2, precision="fp16"),
    Case(2, "zbv", per_rank=2, tied=False),
]
TWO_DATA_RANKS = [
    Case(2, precision="bf16"),
    Case(2, zero=0, tied=False),
    Case(2, "gpipe", interval=1, optimizer="Lamb"),
    Case(2, "interleaved_zero_bubble", per_rank=2, more=OFFLOADED, precision="bf16"),
    Case(2, more=IN_FILES, precision="fp16"),
]
FOUR_STAGES = [
    Case(4),
    Case(4, "gpipe", precision="bf16", zero=0),
    Case(4, "interleaved_1f1b", per_rank=2, more=OFFLOADED, precision="bf16"),
    Case(4, "interleaved_zero_bubble", per_rank=2, tied=False),
    Case(4, "zbv", per_rank=2, precision="fp16"),
    Case(4, interval=1, optimizer="Muon", params={"momentum": 0.9}),
]


def check_plans(world: int, cases: Sequence[Case], folder: Path) -> None:
    cases = [case for case in cases if case.schedule != "zbv" or HAS_ZBV]
    answers = run_each(measured, world, [(case, folder / str(place)) for place, case in enumerate(cases)])
    for case, ranks in zip(cases, answers, strict=True):
        check_plan(case, ranks)


@pytest.mark.rotates
@pytest.mark.parametrize(("world", "cases"), [(2, ONE_DATA_RANK), (4, TWO_DATA_RANKS)])
def test_ranks_hold_and_run_what_was_planned(world: int, cases: list[Case], tmp_path: Path) -> None:
    check_plans(world, cases, tmp_path)


@pytest.mark.slow
def test_ranks_of_four_stages_hold_and_run_what_was_planned(tmp_path: Path) -> None:
    check_plans(4, FOUR_STAGES, tmp_path)


# Time ------------------------------------------------------------------------------------------------

CLOCK = [0.0, 0.0]  # of this rank: the time, and how much of it was work


class Work(torch.autograd.Function):
    """Work begins when its input is there: tensors that ranks send each other carry the time of their end."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.takes = backward
        return work(x, forward) if forward else x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return work(grads[0], ctx.takes), None, None


def work(tensor: Tensor, takes: float) -> Tensor:
    CLOCK[:] = max(CLOCK[0], float(tensor.max())) + takes, CLOCK[1] + takes
    return torch.full_like(tensor, CLOCK[0])


class Layer(nn.Module):
    """Works for 1 in forward, 1 in the backward for its input, and 1 in that for its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = Work.apply(x, 1.0, 1.0)
        return x + Work.apply(self.weight, 0.0, 1.0)


class First(Layer):
    """The same for inputs that require no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return work(x, 1.0) + Work.apply(self.weight, 0.0, 2.0)


def working(schedule: str, ranks: int, per_rank: int) -> PipelineModule:
    layers = [LayerSpec(First), *(LayerSpec(Layer) for _ in range(ranks * per_rank - 1))]
    return PipelineModule(
        layers,
        ranks,
        loss_fn=lambda y, _: 0 * y.mean(),
        stages_per_rank=per_rank,
        placement="v" if schedule == "zbv" else "loop",
        base_seed=0,
    )


def waiting(comm: Any, schedule: str, per_rank: int, micro_batches: int) -> tuple[float, Plan]:
    """The share of a batch in which this rank does no work, and what a plan says."""
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micro_batches}
    config |= {"optimizer": {"type": "SGD", "params": {"lr": 0.0}}, "pipeline": {"schedule": schedule}}
    module = working(schedule, dist.get_world_size(), per_rank)
    engine = zero_full.initialize(model=module, config=config)[0]
    batch = [(torch.zeros(4), torch.zeros(1))] * micro_batches
    engine.train_batch(iter(batch))  # finds the shapes, by an additional forward
    CLOCK[:] = 0.0, 0.0
    engine.train_batch(iter(batch))
    end = torch.tensor(CLOCK[0])
    dist.all_reduce(end, dist.ReduceOp.MAX)
    engine.destroy()
    return 1 - CLOCK[1] / float(end), plan(module, config, 1)


SCHEDULES = {"1f1b": 1, "gpipe": 1, "interleaved_1f1b": 2, "interleaved_zero_bubble": 2, "zbv": 2}


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_wait_as_long_as_planned(world: int) -> None:
    cases = [
        (name, stages, 6 if world == 2 else 8)
        for name, stages in SCHEDULES.items()
        if name != "zbv" or HAS_ZBV
    ]
    answers = run_each(waiting, world, cases)
    for (schedule, *_), ranks in zip(cases, answers, strict=True):
        for (found, made), each in zip(ranks, ranks[0][1].places, strict=True):
            assert each.pipeline is not None and made.places == ranks[0][1].places
            print(schedule, world, found, each.pipeline.idle)
            assert each.pipeline.idle == pytest.approx(found, abs=1e-6), schedule


# What is asked ---------------------------------------------------------------------------------------


def test_a_plan_can_cut_the_layers_for_another_number_of_ranks() -> None:
    case, other = Case(2), Case(4)
    for inputs in ((), (WORDS, WORDS)):
        there = plan(described(case), config_of(case), 2, inputs=inputs, pipe=4)
        assert there == plan(described(other), config_of(other), 2, inputs=inputs)
        assert (there.activations is None) == (not inputs) and (there.received > 0) == bool(inputs)
    stages = plan_stages(described(case), config_of(case), 2, inputs=[WORDS, WORDS], pipe=4)
    assert [each.stage for each in stages] == [0, 1] and stages[1] == there
    one = plan(described(case), config_of(case), 2, inputs=[WORDS, WORDS], pipe=1)
    assert one.pipeline is not None and one.pipeline.idle == one.received == one.pipeline.handed_over == 0


def test_the_table_compares_the_places() -> None:
    made = plan(described(Case(4)), config_of(Case(4)), 2, inputs=[WORDS, WORDS])
    text = made.table()
    assert made.pipeline is not None and f"; the rows above show place {made.pipeline.place}\n" in text
    assert "2 data ranks x 4 pipeline ranks (1f1b), 520 parameters" in text
    rows = text.splitlines()[-4:]
    for row, each in zip(rows, made.places, strict=True):
        place, layers, *sizes, flying, idle = row.split()
        assert each.pipeline is not None and int(place) == each.pipeline.place and idle == "42.9%"
        assert " ".join(sizes) == " ".join(map(human, (each.between_steps, each.activations, each.peak)))
        assert (int(flying),) == each.pipeline.in_flight == (4 - int(place),)
        assert layers == f"{2 * int(place)}-{2 * int(place) + 1}"
    assert max(map(len, rows)) <= 80
    assert "receive buffers" in side_by_side([made])
    assert "receive buffers" not in plan(nn.Linear(2, 2), {}, 2).table()


class Reads(nn.Module):
    """A layer that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if x.sum().item() else x


REFUSED: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [  # options, keys
    ({"pipe": 9}, {}, PlanError, "9 pipeline stages, but the model has only 8 layers"),
    ({"pipe": 0}, {}, PlanError, "pipe is 0"),
    ({"inputs": [WORDS]}, {}, PlanError, "pass inputs and labels of a micro-batch"),
    (
        {"inputs": [WORDS.float(), WORDS]},
        {},
        PlanError,
        r"(?s)stage 0 \(layers 0 to 3\) failed.*without values",
    ),
    ({"expert_parallel": 2}, {}, PlanError, "not supported inside a pipeline stage"),
    ({}, {"zero_optimization": {"stage": 2}}, ConfigError, "Use stage 0 or 1"),
    ({}, {"pipeline": {"schedule": "zbv"}}, ConfigError, "needs several stages per rank"),
    ({}, {"gradient_accumulation_steps": 1}, ConfigError, "cannot run gradient_accumulation_steps 1"),
]


def test_what_cannot_be_planned_is_told() -> None:
    for options, keys, kind, text in REFUSED:
        with pytest.raises(kind, match=text):
            plan(described(Case(2)), config_of(Case(2)) | keys, 2, **options)
    with pytest.raises(PlanError, match="pipe is 2, but the model is no PipelineModule"):
        plan(nn.Linear(2, 2), {}, 2, pipe=2)
    with torch.device("meta"):
        module = PipelineModule([LayerSpec(Reads), LayerSpec(Reads)], 2, loss_fn=lambda y, _: y.mean())
    with pytest.raises(PlanError, match=r"stage 0 \(layers 0 to 0\) failed on a micro-batch without values"):
        plan(module, config_of(Case(2)), 1, inputs=[WORDS, WORDS])
    shared = nn.Linear(60, 60)
    with torch.device("meta"):
        module = PipelineModule([LayerSpec(nn.Sequential, shared) for _ in range(2)], 1)
    made = plan(module, config_of(Case(2)), 1)
    assert made.numel == 60 * 61
    with pytest.raises(PlanError, match=r"layer 1 \(stage 1\).*Use TiedLayerSpec with one key"):
        plan(module, config_of(Case(2)), 1, pipe=2)
    with pytest.raises(ValueError, match="was built on the meta device, which describes it for a plan"):
        zero_full.initialize(model=described(Case(2)), config=config_of(Case(2)))


# The command -----------------------------------------------------------------------------------------

ME = "tests.zero_full.test_pipeline_plan"


def a_pipeline() -> PipelineModule:
    return PipelineModule(specs(), 2, loss_fn=loss_of, partition_method="uniform")


def an_mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 16))


def cut(mesh: Any) -> nn.Module:
    """The same, cut over a mesh."""
    return parallelize_module(an_mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def asked(folder: Path, model: str, *words: str, **keys: Any) -> int:
    (folder / "ds.json").write_text(json.dumps({"optimizer": {"type": "AdamW"}, **keys}))
    where = ("--model", f"{ME}:{model}", "--config", str(folder / "ds.json"), "--world", "2")
    return main(["plan", *where, *words])


def test_the_command_plans_pipelines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch, keys = ("--batch", "3x60:int64", "3x60:int64"), {"gradient_accumulation_steps": 4}
    for pipe, words in ((2, ()), (4, ("--pipe", "4"))):
        assert asked(tmp_path, "a_pipeline", *batch, *words, "--json", **keys) == 0
        told = json.loads(capsys.readouterr().out)
        with torch.device("meta"):
            made = plan(a_pipeline(), tmp_path / "ds.json", 2, inputs=[WORDS, WORDS], pipe=pipe)
        assert [place["peak"] for place in told["places"]] == [place.peak for place in made.places]
        assert len(told["places"]) == told["pipeline"]["ranks"] == pipe and told["activations"] > 0
    assert asked(tmp_path, "a_pipeline", "--stages", *batch, **keys) == 0
    assert "2 data ranks x 2 pipeline ranks (1f1b)" in capsys.readouterr().out


def test_the_command_plans_tensor_parallel_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--tensor", "4", "--batch", "300x16:fp32")
    assert asked(tmp_path, "cut", *words) == 0
    assert "2 data ranks x 4 tensor ranks" in capsys.readouterr().out and not dist.is_initialized()
    assert asked(tmp_path, "cut", *words, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    held_by_rank = 4 * (16 * 12 + 12 + 12 * 16 + 16)
    assert held_by_rank <= told["parameters"] <= held_by_rank + 64  # with padding
    assert told["activations"] == sum(4 * 300 * width for width in (16, 48 // 4, 16))


@pytest.mark.parametrize(
    ("model", "words", "answer"),
    [
        ("cut", [], "cannot be called without arguments"),
        ("cut", ["--tensor", "0"], "argument --tensor: 0 is less than 1"),
        ("an_mlp", ["--tensor", "2"], "tensor is 2, but no parameter of the model is cut"),
        ("an_mlp", ["--pipe", "2"], "pipe is 2, but the model is no PipelineModule"),
        ("a_pipeline", ["--pipe", "9"], "9 pipeline stages, but the model has only 8 layers"),
        ("a_pipeline", ["--tensor", "2"], "no parameter of the model is cut"),
    ],
)
def test_mistakes_of_meshes_are_told_in_a_line(
    model: str, words: list[str], answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        asked(tmp_path, model, *words)
    assert stopped.value.code == 2
    assert answer in capsys.readouterr().err
