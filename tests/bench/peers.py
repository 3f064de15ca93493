"""The rows of the step benchmark: how each of them trains the same GPT, behind one small interface.

Everything that torch brings is always there. DeepSpeed is not a dependency of this project; a row whose
package is missing says "not installed" and the run goes on. To have it on a CPU, in an environment of its
own (DeepSpeed needs torch in place before itself, a C++ compiler and ninja):

    python -m venv benchvenv
    benchvenv/bin/pip install torch==2.13.0 numpy pydantic safetensors setuptools wheel ninja py-cpuinfo
    DS_BUILD_OPS=0 DS_ACCELERATOR=cpu LOCAL_SIZE=2 benchvenv/bin/pip install --no-build-isolation deepspeed
    PYTHONPATH=. PATH=benchvenv/bin:$PATH benchvenv/bin/python -m tests.bench.step_time

Every row gets the same AdamW (torch's fused kernel wherever the row lets us choose), and no clipping.
"""

import contextlib
import gc
import importlib
import importlib.util
import logging
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.bench.shapes import gpt
from zero_min.gpt import GPT, GPTConfig

ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class NotInstalled(Exception):  # noqa: N818 - an answer, not an error
    """This row's package is not here. Raised before the row's first collective."""


@dataclass(frozen=True)
class Setup:
    """What every row is built from."""

    config: GPTConfig
    dtype: torch.dtype
    world: int
    alone: Any  # a process group with only this rank in it
    bucket: int  # elements; for every row that lets us choose
    overlap: bool | None  # zero_full's overlap_comm; None: its default
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - it never changes
    recompute: bool = False  # activations, in backward

    def model(self) -> GPT:
        """The same weights in every row and on every rank."""
        return self.wide().to(self.dtype)

    def wide(self) -> GPT:
        """The same in fp32."""
        return gpt(self.config, self.device, self.recompute)


@dataclass
class Trainee:
    """A row at work."""

    model: nn.Module
    backward: Callable[[Tensor, Tensor], Tensor]  # forward and backward; the loss
    update: Callable[[], Any]  # the optimizer's step, then no gradients
    owner: Any = None  # from here every tensor of the row can be reached
    unseen: Callable[[], int] = lambda: 0  # bytes that it holds where Python cannot see them
    traffic: Callable[[], dict[str, int]] | None = None  # bytes it says it sent so far
    close: Callable[[], Any] = lambda: None


class Masters:
    """The usual hand-written 16-bit recipe: fp32 copies of the parameters, stepped by the optimizer."""

    def __init__(self, model: nn.Module, adamw: dict[str, Any] = ADAMW) -> None:
        self.parameters: list[Tensor] = list(model.parameters())
        self.copies = [p.detach().float() for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.copies, fused=True, **adamw)

    def update(self) -> None:
        """Gradients up, step, parameters down."""
        for copy, p in zip(self.copies, self.parameters, strict=True):
            copy.grad = None if p.grad is None else p.grad.float()
            p.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.copies)


class Plain:
    """fp32: the optimizer steps the parameters themselves."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.optimizer = optimizer or torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def update(self) -> None:
        """Step and drop the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def by_hand(model: nn.Module) -> Plain | Masters:
    """What a careful person writes for this model's precision."""
    return Plain(model) if next(model.parameters()).dtype == torch.float32 else Masters(model)


def plain_backward(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """loss.backward(), nothing else."""

    def backward(x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = model(x, y)
        loss.backward()
        return loss.detach()

    return backward


def forward_backward(setup: Setup) -> Trainee:
    """No engine, no optimizer, no neighbour: the time that nobody can save."""
    model = setup.model()
    return Trainee(model, plain_backward(model), lambda: model.zero_grad(set_to_none=True))


def loop(setup: Setup) -> Trainee:
    """A hand-written loop that trains alone: what zero_full is measured against at world 1."""
    model = setup.model()
    optimizer = by_hand(model)
    return Trainee(model, plain_backward(model), optimizer.update, optimizer)


def _wrapped(setup: Setup) -> tuple[DistributedDataParallel, Callable[[], int]]:
    """DDP, and the size of its buckets once the gradients (views of them) have been dropped.

    The buckets live in C++ and stay; while the gradients are alive, the gradients are those buckets.
    """
    ddp = DistributedDataParallel(setup.model(), gradient_as_bucket_view=True)

    def unseen() -> int:
        holding = any(p.grad is not None for p in ddp.parameters())
        return 0 if holding else sum(p.numel() * p.element_size() for p in ddp.parameters())

    return ddp, unseen


def ddp(setup: Setup) -> Trainee:
    """torch DDP and fused AdamW; in bf16 with fp32 master copies, the usual hand-written recipe."""
    model, unseen = _wrapped(setup)
    optimizer = by_hand(model)
    return Trainee(model, plain_backward(model), optimizer.update, (model, optimizer), unseen)


def zero_redundancy(setup: Setup) -> Trainee:
    """DDP and torch's ZeroRedundancyOptimizer over fused AdamW."""
    if setup.dtype != torch.float32:
        raise NotInstalled("no fp32 master copies")
    model, unseen = _wrapped(setup)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, fused=True, **ADAMW
    )
    step = Plain(model, optimizer)
    return Trainee(model, plain_backward(model), step.update, (model, step), unseen)


def fsdp2(setup: Setup, reshard: bool = True, on_host: bool = False) -> Trainee:
    """torch FSDP2, blocks and root resharded after forward; bf16 means fp32 shards, bf16 compute.

    `reshard`: False keeps parameters until backward is over. `on_host`: shards wait and are stepped there.
    """
    model = setup.wide()
    mesh = dist.device_mesh.init_device_mesh(setup.device.type, (setup.world,))
    mixed = MixedPrecisionPolicy(param_dtype=None if setup.dtype == torch.float32 else setup.dtype)
    place = CPUOffloadPolicy(setup.device.type == "cuda") if on_host else OffloadPolicy()
    for block in model.blocks:
        after = None if reshard else False
        fully_shard(block, mesh=mesh, mp_policy=mixed, offload_policy=place, reshard_after_forward=after)
    fully_shard(model, mesh=mesh, mp_policy=mixed, offload_policy=place)
    step = Plain(model)
    return Trainee(model, plain_backward(model), step.update, (model, step))


def deepspeed(stage: int, on_host: bool = False) -> Callable[[Setup], Trainee]:
    """DeepSpeed; it finds the process group that is already there and uses it as its own.

    `on_host`: the optimizer's state waits there, and is stepped by DeepSpeed's own Adam for that.
    """

    def build(setup: Setup) -> Trainee:
        if importlib.util.find_spec("deepspeed") is None:
            raise NotInstalled("not installed")
        rank = str(dist.get_rank())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(setup.world))
        os.environ["DS_ACCELERATOR"] = setup.device.type
        os.environ.setdefault("LOCAL_SIZE", str(setup.world))
        with contextlib.redirect_stdout(sys.stderr):
            ds = importlib.import_module("deepspeed")
            ds.utils.logger.setLevel(logging.ERROR)
            model = setup.model()
            config = json_config(setup, stage)
            if on_host:
                config["zero_optimization"]["offload_optimizer"] = host_section(setup)
                adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
                optimizer = adam(model.parameters(), adamw_mode=True, **ADAMW)
            else:
                optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
            config["zero_optimization"]["allgather_bucket_size"] = setup.bucket
            engine = ds.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[
                0
            ]
        close = engine.destroy
        return Trainee(model, engine_backward(engine), engine.step, engine, close=close)

    return build


def zero_full(
    stage: int,
    alone: bool = False,
    offload: dict[str, Any] | None = None,
    offload_param: dict[str, Any] | None = None,
    messages: bool = False,
    keeps: bool = False,
) -> Callable[[Setup], Trainee]:
    """Ours. `alone`: every rank is a world of its own. `offload`: the section offload_optimizer.

    `messages`: ranks send messages, as ranks of several hosts do, and share no memory. `keeps`: stage 3 keeps
    small parameters whole, and the others until backward, as it does by default, and as DeepSpeed.
    """

    def build(setup: Setup) -> Trainee:
        import zero_full as ours

        if not hasattr(ours, "initialize"):
            raise NotInstalled("not there yet")
        model = setup.model()
        config = ours_config(setup, stage, offload, offload_param, messages, keeps)
        engine = ours.initialize(
            model=model,
            model_parameters=model.parameters(),
            config=config,
            process_group=setup.alone if alone else None,
        )[0]
        traffic = getattr(engine, "traffic", None)
        close = getattr(engine, "destroy", model.zero_grad)
        return Trainee(model, engine_backward(engine), engine.step, engine, traffic=traffic, close=close)

    return build


def ours_config(
    setup: Setup,
    stage: int,
    offload: dict[str, Any] | None = None,
    offload_param: dict[str, Any] | None = None,
    messages: bool = False,
    keeps: bool = False,
) -> dict[str, Any]:
    """The configuration of a row of ours: see `zero_full`."""
    config = json_config(setup, stage)
    params = {**ADAMW, "betas": list(ADAMW["betas"])}
    config["optimizer"] = {"type": "AdamW", "params": params}
    config["zero_optimization"]["overlap_comm"] = setup.overlap
    config["shared_memory"] = not messages
    if setup.overlap is None and setup.device.type == "cpu":  # both are derived
        del config["zero_optimization"]["reduce_bucket_size"]
    if offload is not None:
        config["zero_optimization"]["offload_optimizer"] = {**host_section(setup), **offload}
    if offload_param is not None:
        config["zero_optimization"]["offload_param"] = {**host_section(setup), **offload_param}
    if stage == 3 and not keeps:  # as FSDP2 here: everything is sharded, and gathered again for backward
        config["zero_optimization"] |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
        }
    return config


def engine_backward(engine: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """DeepSpeed's idiom, which is zero_full's too."""

    def backward(x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = engine(x, y)
        engine.backward(loss)
        return loss.detach()

    return backward


def host_section(setup: Setup) -> dict[str, Any]:
    """State on the host, in memory that this device copies fast."""
    return {"device": "cpu", "pin_memory": setup.device.type == "cuda"}


def json_config(setup: Setup, stage: int) -> dict[str, Any]:
    """The keys that DeepSpeed and zero_full share."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": setup.dtype == torch.bfloat16},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": setup.bucket,
            "contiguous_gradients": True,
            "overlap_comm": False,
        },
    }


@dataclass(frozen=True)
class Row:
    """A name in the table, how to build it, and its part in the comparison."""

    build: Callable[[Setup], Trainee]
    compared_with: str = ""  # whose losses it must reproduce
    note: str = field(default="", compare=False)


ROWS: dict[str, Row] = {
    "forward+backward": Row(forward_backward, note="no engine, no optimizer, no communication"),
    "loop": Row(loop, note="a hand-written loop alone, no communication"),
    "zero_full 2 alone": Row(zero_full(2, alone=True), "loop", "world 1, stage 2"),
    "DDP": Row(ddp, "DDP", "bf16: bf16 parameters, fp32 master copies, by hand"),
    "ZeroRedundancyOptimizer": Row(zero_redundancy, "DDP", "parameters_as_bucket_view"),
    "FSDP2": Row(fsdp2, "DDP", "the equal of stage 3"),
    **{f"DeepSpeed {stage}": Row(deepspeed(stage), "DDP") for stage in (0, 1, 2, 3)},
    **{f"zero_full {stage}": Row(zero_full(stage), "DDP") for stage in (0, 1, 2, 3)},
    **{f"zero_full {stage}, messages": Row(zero_full(stage, messages=True), "DDP") for stage in (0, 1, 2, 3)},
}


CLOSED = (type, types.ModuleType, types.FrameType, weakref.ref)  # what lies behind belongs to everybody


def held(trainee: Trainee) -> dict[str, int]:
    """Bytes of every storage that can be reached from a row, by kind, each storage once."""
    parameters = list(trainee.model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    counted: dict[int, int] = {}
    found = {}
    by_kind: dict[str, list[Any]] = {"parameters": [*parameters], "gradients": [*gradients]}
    for kind, roots in {**by_kind, "other": [trainee.owner]}.items():
        before = sum(counted.values())
        _count(roots, counted, alone=kind != "other")
        found[kind] = sum(counted.values()) - before
    found["other"] += trainee.unseen()
    return found


def _count(roots: Iterable[Any], counted: dict[int, int], alone: bool) -> None:
    """Add the storages behind `roots` to `counted`; unless `alone`, of all that the roots refer to."""
    seen: set[int] = set()
    stack: list[Any] = list(roots)
    keep = []  # an id is only unique while its object lives
    while stack:
        thing = stack.pop()
        if id(thing) in seen or isinstance(thing, CLOSED):
            continue
        seen.add(id(thing))
        keep.append(thing)
        if isinstance(thing, DTensor):
            stack.append(thing._local_tensor)  # what this rank has of it
        elif isinstance(thing, Tensor):
            storage = thing.untyped_storage()
            # Memory that all ranks map is one piece of memory: this rank answers for its share.
            mapped = storage.device.type == "cpu" and storage.is_shared()  # CUDA's always say so
            sharers = dist.get_world_size() if mapped and dist.is_initialized() else 1
            counted[storage.data_ptr()] = storage.nbytes() // sharers
        if not alone:
            stack.extend(_behind(thing))


def _behind(thing: Any) -> list[Any]:
    if isinstance(thing, types.FunctionType):  # its globals are a module
        return [thing.__closure__, thing.__defaults__]
    if isinstance(thing, Tensor):
        return [thing.grad if thing.is_leaf else None, vars(thing)]
    return gc.get_referents(thing)
