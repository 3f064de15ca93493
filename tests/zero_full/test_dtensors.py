"""Models that parallelize_module has cut, trained over the data ranks of a mesh: as one process trains."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zero_full
from tests.worlds import POOL, run_each
from tests.zero_full.generation_runs import Server
from zero_full.shard.group.dtensors import local_of
from zero_min.ledger import Ledger

WIDTH, HIDDEN, CLASSES = 6, 10, 3
CLIP = 0.05  # below the norms: what counts twice would show in the parameters, too
STEPS, MICRO = 2, 2
Optimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
    "lamb": lambda parameters: zero_full.Lamb(parameters, lr=0.05),
}


class Block(nn.Module):
    """An MLP with a residual, the part that is cut: `up` by rows, `down` by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, HIDDEN),
            nn.Linear(HIDDEN, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Two blocks between layers that are not cut, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.frozen = Block().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in (*self.blocks, self.frozen):
            x = block(x)
        return self.last(x).square().mean()


def batch(step: int, micro: int, data_rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + data_rank)
    return torch.randn(4, WIDTH, generator=generator)


def cut(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    # Without local outputs: torch takes local inputs of `down` for equal parts, and 10 = 4 + 4 + 2.
    names = ("blocks.0", "blocks.1", "frozen")
    plan: dict[str, Any] = {f"{name}.up": ColwiseParallel(use_local_output=False) for name in names}
    return parallelize_module(model, mesh, plan | {f"{name}.down": RowwiseParallel() for name in names})


def mesh_of(data: int, tensor: int) -> Any:
    return init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))


def keys_of(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "reduce_bucket_size": 100, **more.pop("zero", {})}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    return {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero, **more}


def engine_of(mesh: Any, keys: dict[str, Any], optimizer: Optimizer = OPTIMIZERS["adamw"]) -> Any:
    model = Model() if mesh is None else cut(Model(), mesh["tensor"])
    return zero_full.initialize(model=model, optimizer=optimizer, config=keys, mesh=mesh)[0]


def train(engine: Any, data_rank: int, steps: int = STEPS, dtype: torch.dtype = torch.float32) -> list[Any]:
    norms = []
    for step in range(steps):
        for micro in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(batch(step, micro, data_rank).to(dtype)))
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


def on_one_process(name: str, data: int, clip: float) -> tuple[dict[str, Tensor], list[float]]:
    """(parameters after all steps, norms)."""
    model, norms = Model(), []
    optimizer = OPTIMIZERS[name](p for p in model.parameters() if p.requires_grad)
    for step in range(STEPS):
        for micro in range(MICRO):
            for data_rank in range(data):
                (model(batch(step, micro, data_rank)) / data / MICRO).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
    return {key: p.detach() for key, p in model.named_parameters()}, norms


Case = tuple[Any, ...]  # optimizer, stage, clip, and perhaps keys of zero_optimization


def runs(comm: Any, data: int, tensor: int, cases: Sequence[Case], replicas: int = 1) -> list[Any]:
    """For each case the whole parameters and the norms."""
    mesh, answers = mesh_of(data, tensor), []
    if replicas > 1:
        names = ("replicate", "shard", "tensor")
        mesh = init_device_mesh("cpu", (replicas, data // replicas, tensor), mesh_dim_names=names)
    for name, stage, clip, *zero in cases:
        keys = keys_of(stage, gradient_clipping=clip, gradient_accumulation_steps=MICRO, zero=dict(*zero))
        engine = engine_of(mesh, keys, OPTIMIZERS[name])
        norms = train(engine, comm.rank // tensor)
        answers.append((engine.module_state_dict(), norms))
        engine.destroy()
    return answers


QUICK = [
    *(("adamw", stage, CLIP) for stage in (0, 1, 2, 3)),
    *(("lamb", stage, CLIP) for stage in (0, 3)),
]
HOST = {"offload_optimizer": {"device": "cpu"}}
OPTIONS = [
    *(("adamw", stage, CLIP, HOST) for stage in (1, 2, 3)),
    *(("adamw", stage, CLIP, {"overlap_comm": True}) for stage in (1, 2, 3)),
    *(("adamw", stage, CLIP, {"mics_shard_size": 1}) for stage in (1, 2, 3)),
    ("adamw", 3, CLIP, {"offload_param": {"device": "cpu"}, **HOST}),
]
ALL = [(name, stage, clip) for name in OPTIMIZERS for stage in (0, 1, 2, 3) for clip in (0.0, CLIP)]


@pytest.mark.parametrize(
    ("data", "tensor", "cases", "replicas"),
    [
        (2, 2, [*QUICK, OPTIONS[1], OPTIONS[-1]], 1),
        (1, 3, QUICK[2:5], 1),
        *(
            pytest.param(data, tensor, ALL, 1, marks=pytest.mark.slow)
            for data, tensor in ((2, 2), (1, 2), (2, 1), (1, 3))
        ),
        pytest.param(2, 2, OPTIONS, 1, marks=pytest.mark.slow),
        pytest.param(2, 2, QUICK[1:4], 2, marks=pytest.mark.slow),
    ],
)
def test_parameters_and_norms_are_those_of_one_process(
    data: int, tensor: int, cases: Sequence[Case], replicas: int
) -> None:
    for answers in POOL.run(runs, data * tensor, data, tensor, cases, replicas):
        for (name, _, clip, *_), (parameters, norms) in zip(cases, answers, strict=True):
            wanted, wanted_norms = on_one_process(name, data, clip)
            assert parameters.keys() == wanted.keys()
            for key, value in wanted.items():
                torch.testing.assert_close(parameters[key], value, atol=1e-5, rtol=1e-4)
            if clip:
                assert min(wanted_norms) > 2 * CLIP
                assert norms == pytest.approx(wanted_norms, rel=1e-4)


# Precisions, and gradients by hand -------------------------------------------------------------------


def overflow_on_one_part(comm: Any, stage: int) -> tuple[list[bool], bool, bool]:
    """In the second step one element of one tensor-parallel part is infinite, on one rank."""
    engine, step = (
        engine_of(mesh_of(2, 2), keys_of(stage, fp16={"enabled": True, "initial_scale_power": 4})),
        0,
    )
    weight = engine.module.blocks[0].up.weight

    def spoil(grad: Any) -> Any:
        if step == 1 and comm.rank == 3:
            grad.to_local()[0, 0] = float("inf")
        return grad

    weight.register_hook(spoil)
    applied = []
    for step in range(3):
        engine.backward(engine(batch(step, 0, comm.rank // 2).half()))
        engine.step()
        applied.append(engine.was_step_applied())
    whole = engine.module_state_dict()
    engine.destroy()
    return (
        applied,
        all(bool(value.isfinite().all()) for value in whole.values()),
        weight.dtype == torch.float16,
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_an_overflow_in_one_part_skips_the_step_on_all_ranks(stage: int) -> None:
    assert POOL.run(overflow_on_one_part, 4, stage) == [([True, False, True], True, True)] * 4


def tensors_by_hand(comm: Any) -> list[bool]:
    """Reads and writes of single parameters, and partial gradients, at stage 3 in bf16."""
    from torch.distributed.tensor import DTensor

    engine = engine_of(mesh_of(2, 2), keys_of(3, bf16={"enabled": True}))
    weight = engine.module.blocks[1].down.weight
    engine.backward(engine(batch(0, 0, comm.rank // 2).bfloat16()))
    gradient = zero_full.safe_get_full_grad(weight)
    engine.step()
    master = zero_full.safe_get_full_fp32_param(weight)
    moment = zero_full.safe_get_full_optimizer_state(weight, "exp_avg")
    good = [type(each) is DTensor and each.shape == weight.shape for each in (gradient, master, moment)]
    with pytest.raises(RuntimeError, match=r"blocks.1.down.weight is sharded and has no values here"):
        weight.full_tensor()
    wanted = torch.arange(weight.numel(), dtype=torch.float32).view(weight.shape)
    zero_full.safe_set_full_fp32_param(weight, wanted)
    good.append(torch.equal(zero_full.safe_get_full_fp32_param(weight).full_tensor(), wanted))
    with zero_full.GatheredParameters([weight], modifier_rank=2), torch.no_grad():
        good.append(torch.equal(weight.full_tensor(), wanted.bfloat16()))
        weight.mul_(2 if comm.rank // 2 == 1 else 3)
    good.append(torch.equal(engine.module_state_dict()["blocks.1.down.weight"], 2 * wanted.bfloat16()))
    engine.load_module_state_dict(Model().bfloat16().state_dict())
    whole = engine.module_state_dict()
    good += [torch.equal(whole[key], value) for key, value in Model().bfloat16().state_dict().items()]
    engine.destroy()
    return good


def test_single_tensors_are_read_and_written_as_dtensors() -> None:
    for good in POOL.run(tensors_by_hand, 4):
        assert all(good)


# Checkpoints -----------------------------------------------------------------------------------------

Values = dict[str, tuple[Tensor, Tensor, Tensor]]


def values_of(engine: Any, with_moments: bool = True) -> Values:
    """Whole parameters, their masters and first moments."""

    def whole(tensor: Any) -> Tensor:
        return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()

    shown, found = engine.module_state_dict(), Values()
    for key, param in engine.module.named_parameters():
        if param.requires_grad:
            master = zero_full.safe_get_full_fp32_param(param)
            moment = zero_full.safe_get_full_optimizer_state(param, "exp_avg") if with_moments else master
            found[key] = (shown[key].clone(), whole(master), whole(moment))
    return found


def saved(comm: Any, data: int, tensor: int, folder: Path, stages: Sequence[int]) -> list[Values]:
    mesh, answers = mesh_of(data, tensor), []
    for stage in stages:
        engine = engine_of(mesh, keys_of(stage, bf16={"enabled": True}, gradient_clipping=1.0))
        train(engine, comm.rank // tensor, dtype=torch.bfloat16)
        engine.save_checkpoint(folder / str(stage))
        answers.append(values_of(engine))
        engine.destroy()
    return answers


def loaded(
    comm: Any, data: int, tensor: int, folder: Path, stages: Sequence[tuple[int, int]]
) -> list[tuple[int, Values]]:
    mesh, answers = mesh_of(data, tensor) if tensor else None, []
    for before, now in stages:
        engine = engine_of(mesh, keys_of(now, bf16={"enabled": True}, gradient_clipping=1.0))
        engine.load_checkpoint(folder / str(before))
        answers.append((before, values_of(engine)))
        engine.destroy()
    return answers


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("before", "now"),
    [
        ([1, 3], [(3, 3), (1, 2)]),
        pytest.param([0, 1, 2, 3], [(a, b) for a in range(4) for b in range(4)], marks=pytest.mark.slow),
    ],
    ids=["", "all stages"],
)
def test_a_checkpoint_loads_at_another_mesh_bit_for_bit(
    tmp_path: Path, before: list[int], now: list[tuple[int, int]]
) -> None:
    first = dict(zip(before, POOL.run(saved, 4, 2, 2, tmp_path, before)[0], strict=True))
    for data, tensor in ((4, 1), (1, 2), (1, 3), (1, 0)):  # 0: the model is not cut
        for answers in POOL.run(loaded, data * max(1, tensor), data, tensor, tmp_path, now):
            for stage, values in answers:
                assert values.keys() == first[stage].keys()
                for key, wanted in first[stage].items():
                    for got, each in zip(values[key], wanted, strict=True):
                        assert torch.equal(got, each), (data, tensor, stage, key)


def files_of_weights(comm: Any, folder: Path) -> list[bool]:
    """Whole tensors in a file, and back into a model that is cut at another place."""
    good = list[bool]()
    for stage, (data, tensor) in ((3, (2, 2)), (1, (1, 4))):
        engine = engine_of(mesh_of(data, tensor), keys_of(stage, bf16={"enabled": True}))
        if stage == 3:
            train(engine, comm.rank // tensor, dtype=torch.bfloat16)
            engine.save_weights(folder, dtype=torch.float32)
        else:
            engine.load_weights(folder)
        masters = {key: each[1] for key, each in values_of(engine, with_moments=False).items()}
        stored = load_file(folder / "model.safetensors")
        good += [torch.equal(stored[key], master) for key, master in masters.items()]
        whole = engine.module_state_dict()
        good += [torch.equal(stored[key].bfloat16(), whole[key]) for key in whole]
        engine.save_16bit_model(folder, f"{stage}.bin")
        again = torch.load(folder / f"{stage}.bin")
        good += [torch.equal(again[key], whole[key]) for key in whole]
        for bucket_bytes, dtype in ((1, None), (600, None), (10**6, None), (600, torch.float32)):
            weights = engine.weights(bucket_bytes, dtype=dtype)
            shapes = dict(zip(weights.names, weights.shapes, strict=True))
            found, wanted = dict(weights), whole if dtype is None else stored
            assert found.keys() == wanted.keys() == shapes.keys()
            good += [torch.equal(found[key], wanted[key]) for key in wanted]
            good += [shapes[key] == wanted[key].shape for key in wanted]
        x = batch(0, 0, 0).bfloat16()
        with torch.no_grad():
            plain = engine.eval()(x)
        with engine.generation() as module:
            good += [torch.equal(module(x), plain)]
        engine.train()
        saved_state = engine.state_dict()
        engine.load_state_dict(saved_state)
        good += [torch.equal(value, whole[key]) for key, value in engine.module_state_dict().items()]
        engine.destroy()
    return good


@pytest.mark.rotates
def test_files_have_whole_tensors(tmp_path: Path) -> None:
    for good in POOL.run(files_of_weights, 4, tmp_path):
        assert len(good) > 100 and all(good)


def changes_of_parts(comm: Any, stage: int, data: int, tensor: int, precision: str) -> list[int]:
    """A server that gets changes of a model that is cut has every bit. Returns the bytes of the updates."""
    keys = {} if precision == "fp32" else {precision: {"enabled": True}}
    small = partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.0)
    engine = engine_of(mesh_of(data, tensor), keys_of(stage, **keys), small)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    server, sizes, module = Server(), list[int](), engine.module

    def push() -> None:
        server.update(engine.weights(600, delta=True))
        sizes.append(server.received)
        assert server.differs_from(engine.module_state_dict()) == []

    push()
    for _ in range(3):
        train(engine, comm.rank // tensor, 1, dtype)
        push()
        cut = {name for name in server.sparse if ".up." in name or ".down.weight" in name}
        assert precision == "fp32" or (any("up" in n for n in cut) and any("down" in n for n in cut))
    assert precision == "fp32" or max(sizes[1:]) < sizes[0]
    if stage < 3:
        with torch.no_grad():  # one part of each; frozen parameters are in no flat buffer
            if comm.rank % tensor == 0:
                module.blocks[0].up.weight.to_local().add_(1)
            if comm.rank % tensor == tensor - 1:
                module.frozen.down.weight.to_local().add_(1)
        push()
        assert sizes[-1] > 0 and "frozen.down.weight" not in server.sparse
    push()
    assert sizes[-1] == 0
    saved = engine.state_dict()
    train(engine, comm.rank // tensor, 1, dtype)
    engine.load_state_dict(saved)
    push()
    engine.destroy()
    return sizes


def test_changes_of_parts_are_those_of_whole_tensors() -> None:
    cases = [(1, 2, 2, "bf16"), (3, 2, 2, "bf16"), (2, 1, 4, "bf16"), (3, 2, 2, "fp32")]
    for case, answers in zip(cases, run_each(changes_of_parts, 4, cases), strict=True):
        assert all(sizes == answers[0] for sizes in answers), case
    run_each(changes_of_parts, 3, [(3, 1, 3, "bf16"), (1, 1, 3, "bf16")])


# What is refused -------------------------------------------------------------------------------------


def refusals(comm: Any) -> list[str]:
    from torch.distributed.tensor import DTensor, Partial

    mesh, told = mesh_of(2, 2), []

    def attempt(act: Callable[[], Any]) -> None:
        with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
            act()
        told.append(str(caught.value).partition("\n")[0])

    attempt(lambda: zero_full.initialize(model=cut(Model(), mesh["tensor"]), config=keys_of(1)))
    attempt(lambda: zero_full.initialize(model=cut(Model(), mesh["data"]), config=keys_of(1), mesh=mesh))
    unnamed = init_device_mesh("cpu", (2, 2))
    attempt(lambda: zero_full.initialize(model=Model(), config=keys_of(1), mesh=unnamed))
    odd = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    attempt(lambda: zero_full.initialize(model=Model(), config=keys_of(1), mesh=odd))
    staged = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pipe", "data", "tensor"))
    model = cut(Model(), staged["tensor"])
    attempt(lambda: zero_full.initialize(model=model, config=keys_of(1), mesh=staged))
    hpz = keys_of(3, zero={"zero_hpz_partition_size": 2})
    attempt(lambda: engine_of(mesh, hpz))
    muon = keys_of(0, optimizer={"type": "Muon", "params": {"lr": 0.1}})
    attempt(lambda: zero_full.initialize(model=cut(Model(), mesh["tensor"]), config=muon, mesh=mesh))
    attempt(lambda: engine_of(mesh, keys_of(0), torch.optim.Adafactor))
    partial = Model()
    partial.scale = nn.Parameter(DTensor.from_local(torch.ones(2), mesh["tensor"], [Partial()]))
    attempt(lambda: zero_full.initialize(model=partial, config=keys_of(1), mesh=mesh))
    for name in ("blocks.0.up.weight", "first.bias"):
        model = cut(Model(), mesh["tensor"])
        with torch.no_grad():
            if comm.rank == 3 or (name == "first.bias" and comm.rank == 1):
                param: Any = model.get_parameter(name)
                (param.to_local() if name == "blocks.0.up.weight" else param).add_(1)
        attempt(lambda: zero_full.initialize(model=model, config=keys_of(2), mesh=mesh))  # noqa: B023
    engine = engine_of(mesh, keys_of(3))
    attempt(lambda: engine.weights(merge_adapters=True))
    attempt(lambda: engine.generation(merge_adapters=True).__enter__())
    engine.destroy()
    return told


REFUSED = (
    r"first|blocks.0.up.weight is a DTensor on .*, and initialize got no mesh with a dimension 'tensor'",
    r"is a DTensor on .*, but the dimension 'tensor' of this rank has the ranks",
    r"a mesh of 2 dimensions needs mesh_dim_names",
    r"mesh dimension 'context' is unknown or repeated; known: data, dp, .* tp, .* pipe",
    r"is a DTensor\. Pipeline stages of layers that tensor parallelism has cut are not supported",
    r"zero_hpz_partition_size is not supported with DTensors",
    r"Muon needs whole parameters, and blocks.0.up.weight, .* are split over tensor-parallel ranks",
    r"Adafactor cannot step on pieces of parameters",
    r"scale is a DTensor with placement Partial.* Supported are Shard\(dim\) and Replicate\(\)",
    r"ranks hold different values of the same parameters: blocks.0.up.weight \(.*\) on ranks 1 and 3\.",
    r"ranks hold different values of the same parameters: first.bias \(.*\) on ranks 0 and 1\.",
    r"engine.weights\(merge_adapters=True\): tensor parallelism has cut this model",
    r"merge_adapters with a model that tensor parallelism has cut is not supported",
)


def test_what_cannot_be_trained_is_refused_on_every_rank() -> None:
    for told in POOL.run(refusals, 4):
        assert len(told) == len(REFUSED)
        for text, wanted in zip(told, REFUSED, strict=True):
            assert re.search(wanted, text), (wanted, text)


# Plans -----------------------------------------------------------------------------------------------


class OfLocalTensors(Ledger):
    """Counts the local tensor of a DTensor."""

    def _saw(self, tensor: Tensor) -> None:
        super()._saw(local_of(tensor))


def planned_and_held(comm: Any, cases: Sequence[tuple[int, str]]) -> list[Any]:
    """For each case (stage, optimizer) the bytes by kind: of a plan, and held and sent by this rank."""
    import zero_full.plan
    from zero_full.shard.access.held_bytes import bytes_behind

    mesh, found = mesh_of(2, 2), []
    for stage, kind in cases:
        optimizer = {"type": kind, "params": {"lr": 0.1}}
        keys = keys_of(stage, optimizer=optimizer, bf16={"enabled": True}, gradient_clipping=1.0)
        plan = zero_full.plan.plan(cut(Model(), mesh["tensor"]), keys, 2, device="cpu")
        engine, *_ = zero_full.initialize(model=cut(Model(), mesh["tensor"]), config=keys, mesh=mesh)
        train(engine, comm.rank // 2, dtype=torch.bfloat16)
        traffic = engine.optimizer.communicators.traffic
        before = traffic.total()
        engine.backward(engine(batch(9, 0, comm.rank // 2).bfloat16()))
        gradients = bytes_behind(engine.optimizer.holdings()["gradients"])
        engine.step()
        held = engine.optimizer.holdings()
        whole = [p for p in engine.module.parameters() if p not in engine.optimizer.sharded.places]
        frozen = sum(getattr(p, "to_local", lambda p=p: p)().nbytes for p in whole)
        state = bytes_behind(held["optimizer"]), gradients, traffic.total() - before
        told = plan.master + plan.moments, plan.gradients, plan.sent, plan.parameters
        found.append((told, (*state, bytes_behind(held["parameters"]) + frozen)))
        engine.destroy()
    ledger, inputs = OfLocalTensors(), torch.ones(200, WIDTH)
    model = cut(Model(), mesh["tensor"])
    with ledger.watch():
        outputs = model(inputs)
    plan = zero_full.plan.plan(model, keys_of(1), 2, inputs=[inputs])
    assert plan.activations == ledger.live() + inputs.nbytes > outputs.nbytes
    for given, message in ((3, r"tensor is 3, but blocks.0.up.weight is a DTensor over 2 ranks"),):
        with pytest.raises(zero_full.PlanError, match=message):
            zero_full.plan.plan(cut(Model(), mesh["tensor"]), keys_of(1), 2, tensor=given)
    with pytest.raises(zero_full.PlanError, match=r"tensor is 2, but no parameter of the model is cut"):
        zero_full.plan.plan(Model(), keys_of(1), 2, tensor=2)
    return found


@pytest.mark.rotates
def test_a_plan_is_what_the_largest_rank_holds_and_sends() -> None:
    cases = [(0, "AdamW"), (2, "Lamb"), (3, "AdamW")]
    for ranks in zip(*POOL.run(planned_and_held, 4, cases), strict=True):
        (told, *_), held = zip(*ranks, strict=True)
        assert told == tuple(map(max, zip(*held, strict=True)))


# The optimizer's state in torch's form -------------------------------------------------------------


def consolidated(comm: Any, data: int, tensor: int, stages: Sequence[int]) -> list[dict[str, Any]]:
    """The state of a torch optimizer of the whole model, at each ZeRO stage."""
    mesh, found = mesh_of(data, tensor), []
    for stage in stages:
        engine = engine_of(mesh, keys_of(stage, gradient_clipping=0.0))
        train(engine, comm.rank // tensor)
        found.append(zero_full.consolidated_state_dict(engine.optimizer))
        engine.destroy()
    return found


@pytest.mark.parametrize(("data", "tensor"), [(2, 2), (1, 3)])
def test_the_state_in_torchs_form_has_whole_tensors(data: int, tensor: int) -> None:
    model = Model()
    base = OPTIMIZERS["adamw"](p for p in model.parameters() if p.requires_grad)
    for step in range(STEPS):
        for data_rank in range(data):
            (model(batch(step, 0, data_rank)) / data).backward()
        base.step()
        base.zero_grad()
    want = base.state_dict()["state"]
    for ranks in POOL.run(consolidated, data * tensor, data, tensor, (1, 3)):
        for found in ranks:
            assert found["state"].keys() == want.keys()
            for number, entries in want.items():
                for key, value in entries.items():
                    got = found["state"][number][key]
                    assert got.shape == value.shape and torch.allclose(got, value, atol=1e-6), (number, key)
            base.load_state_dict(found)
