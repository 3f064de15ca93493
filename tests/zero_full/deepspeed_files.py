"""Writes the checkpoints in `deepspeed_files/` with the real DeepSpeed 0.19.8. Run by hand, never by a test.

    python -m venv build/deepspeed && . build/deepspeed/bin/activate
    pip install torch==2.13.0 safetensors setuptools wheel packaging psutil ninja
    DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install --no-build-isolation deepspeed==0.19.8
    python -m tests.zero_full.deepspeed_files [NAME ...]

Every case trains a tiny model of odd sizes for a few steps and saves it twice: by `engine.save_checkpoint`,
and as the truth, which `safe_get_full_fp32_param` and `safe_get_full_optimizer_state` return inside of
DeepSpeed: `truth.safetensors` under the keys of `zero_full.checkpoint.source`, and `truth.json` for the rest,
with the losses of the next steps. Without ZeRO there is no such function, and the truth is cut from the
optimizer's own tensors, by parameter and not by name.

DeepSpeed refuses fp16 on the CPU, because it would be slow: its answer is overruled here. What it cannot do
on the CPU or at all in 0.19.8 is not here: parameters without dimensions (it fails when it broadcasts
them), empty ones at stage 3 with several ranks (it fails when it gathers them), models that are cut across
ranks (tensor, pipeline, experts), and state on NVMe. Two of its functions are wrong at times:
`relink` and `check` say when.
"""

import json
import os
import sys
import tarfile
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from safetensors.torch import save_file
from torch import Tensor, nn

FOLDER = Path(__file__).with_suffix("")
MOMENTS = ("exp_avg", "exp_avg_sq")
MORE_STEPS = 3  # whose losses are a part of the truth
CLIENT_STATE = {"epoch": 3, "seen": [1, 2.5, "three"], "noise": torch.arange(3.0)}


@dataclass(frozen=True)
class Case:
    """One run of DeepSpeed. Its name says what is special about it."""

    stage: int
    world: int
    dtype: str = "fp32"
    groups: int = 1
    tied: bool = False
    frozen: bool = False
    steps: int = 3
    own_adam: bool = False  # the configuration's, which is compiled; else torch's
    universal: bool = False
    exclude_frozen: bool = False
    buffers: bool = True
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
ALL_OPTIONS: dict[str, Any] = {"groups": 2, "tied": True, "frozen": True}
CASES = {
    "plain_fp32": Case(0, 2, groups=2, tied=True, frozen=True),
    "plain_bf16": Case(0, 1, "bf16", groups=2, tied=True, frozen=True),
    "plain_fp16": Case(0, 2, "fp16", steps=5),
    "plain_bf16_flat": Case(0, 1, "bf16", own_adam=True, tied=True, frozen=True),
    "plain_fp16_flat": Case(0, 1, "fp16", own_adam=True, steps=5),
    "stage1_alone": Case(1, 1, tied=True),
    "stage1_bf16_groups": Case(1, 2, "bf16", **ALL_OPTIONS, universal=True),
    "stage1_fp16_static": Case(1, 3, "fp16", config={"fp16": {"loss_scale": 64}}),
    "stage1_fp32_gradients": Case(1, 4, "bf16", groups=2, config=FP32_GRADIENTS, universal=True),
    "stage1_small_group": Case(1, 4, "bf16", groups=3, config=FP32_GRADIENTS),  # the converter fails on it
    "stage1_elastic": Case(1, 4, "fp16", groups=3, steps=5, zero={"elastic_checkpoint": True}),
    "stage2_alone": Case(2, 1, "bf16", frozen=True),
    "stage2_round_robin": Case(
        2, 2, "bf16", **ALL_OPTIONS, zero={"round_robin_gradients": True}, universal=True
    ),
    "stage2_fp32": Case(2, 3, groups=3, tied=True, frozen=True, universal=True),
    "stage2_aligned": Case(
        2,
        4,
        "fp16",
        groups=3,
        steps=5,
        zero={"parameter_alignment": True, "round_robin_gradients": True},
        universal=True,
    ),
    "stage2_cpu_adam": Case(2, 2, "bf16", own_adam=True, zero={"offload_optimizer": {"device": "cpu"}}),
    "stage2_excluded": Case(2, 2, frozen=True, exclude_frozen=True),
    "stage2_untrained": Case(2, 3, "bf16", steps=0),
    "stage3_alone": Case(3, 1, **ALL_OPTIONS),
    "stage3_sub_groups": Case(3, 2, "bf16", **ALL_OPTIONS, zero={"sub_group_size": 16}, universal=True),
    "stage3_persistent": Case(
        3, 3, "fp16", steps=5, tied=True, zero={"stage3_param_persistence_threshold": 8, "sub_group_size": 40}
    ),
    "stage3_all": Case(3, 4, groups=3, tied=True, frozen=True, zero={"sub_group_size": 12}, universal=True),
    "stage3_excluded": Case(3, 2, "bf16", frozen=True, exclude_frozen=True),
}


class Odd(nn.Module):
    """Parameters of no, one and odd numbers of elements, with buffers between them."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 3)
        self.gain = nn.Parameter(torch.tensor([1.5]))
        if case.stage < 3 or case.world == 1:
            self.nothing = nn.Parameter(torch.empty(0, 3))
        self.first = nn.Linear(3, 7)
        self.norm = nn.LayerNorm(7)
        self.last = nn.Linear(7, 3)
        self.head = nn.Linear(3, 11, bias=False)
        if case.tied:
            self.head.weight = self.embed.weight
        self.base = nn.Linear(3, 3, bias=False)
        self.base.requires_grad_(not case.frozen)
        self.register_buffer("mean", torch.linspace(0, 1, 7))
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean of the logits' squares."""
        hidden = self.embed(tokens) * self.gain
        hidden = self.last(
            self.norm(torch.tanh(self.first(hidden))) - self.mean.to(hidden.dtype)
        ) + self.base(hidden)
        logits: Tensor = self.head(hidden)
        return (logits.float() ** 2).mean()


def groups_of(model: Odd, count: int) -> list[dict[str, Any]]:
    """The parameters as an optimizer is given them: matrices decay, the rest does not.

    The third of three groups has one element, and so nothing for most ranks.
    """
    params = list(model.parameters())
    if count == 1:
        return [{"params": params}]
    rest = [p for p in params if p.dim() < 2 and (count == 2 or p is not model.gain)]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": rest, "weight_decay": 0.0, "eps": 1e-6},
    ]
    return [*groups, {"params": [model.gain], "betas": (0.8, 0.9)}][:count]


def configuration(case: Case) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": case.stage, **case.zero},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10}},
    }
    if case.own_adam:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
    if case.dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 17, "loss_scale_window": 2, "hysteresis": 1}
    if case.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    for key, value in case.config.items():
        config[key] = {**config.get(key, {}), **value}
    return config


def make_engine(case: Case) -> Any:
    import deepspeed

    torch.manual_seed(case.stage * 10 + case.world)
    model = Odd(case)
    groups = groups_of(model, case.groups)
    if case.own_adam:
        given: dict[str, Any] = {"model_parameters": list(model.parameters())}
    else:
        given = {"optimizer": torch.optim.AdamW(groups, lr=0.01)}
    return deepspeed.initialize(model=model, config=configuration(case), **given)[0]


def train(engine: Any, rank: int, steps: range) -> list[float]:
    """The losses of micro-batches, which are each rank's and each step's own."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(torch.randint(11, (2, 4), generator=generator))
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
    return losses


# The truth ---------------------------------------------------------------------------------------


def whole_tensors(engine: Any, case: Case) -> Iterator[tuple[str, Tensor]]:
    """What parameters and moments are, by their keys in a `Source`. Every rank must ask."""
    from deepspeed import zero

    trained = dict(stage3_tensors(engine, case) if case.stage == 3 else flat_tensors(engine, case))
    for name, param in engine.module.named_parameters():
        if param in trained:
            yield from ((f"{place}/{name}", value) for place, value in trained[param].items())
        else:
            with zero.GatheredParameters([param] if case.stage == 3 else []):
                yield f"parameters/{name}", param
    for name, value in engine.module.state_dict().items():
        if name in ("mean", "count"):
            yield f"buffers/{name}", value


def stage3_tensors(engine: Any, case: Case) -> Iterator[tuple[nn.Parameter, dict[str, Tensor]]]:
    """Each parameter that is trained, with its master and its moments, as DeepSpeed tells them."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    for param in engine.module.parameters():
        if param.requires_grad and param.ds_numel:
            moments = {k: safe_get_full_optimizer_state(param, k) for k in MOMENTS} if case.steps else {}
            yield param, {"parameters": safe_get_full_fp32_param(param), **under_state(moments)}


def flat_tensors(engine: Any, case: Case) -> Iterator[tuple[nn.Parameter, dict[str, Tensor]]]:
    """The same for optimizers that lay parameters out in one flat buffer a group, or not at all."""
    optimizer = engine.optimizer
    if case.stage == 0 and case.dtype == "fp32":
        for param, state in optimizer.state.items():
            yield param, {"parameters": param, **under_state({key: state[key] for key in MOMENTS})}
        return
    if hasattr(optimizer, "fp32_groups"):
        yield from unflat_tensors(optimizer)
        return
    relink(optimizer)
    groups = first_of(optimizer, "round_robin_bit16_groups", "bf16_groups", "fp16_groups")
    masters = first_of(
        optimizer, "single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_groups_flat"
    )
    for place, (params, master) in enumerate(zip(groups, masters, strict=True)):
        state = optimizer.optimizer.state[master]
        values = {"parameters": master, **under_state({key: state[key] for key in MOMENTS if key in state})}
        whole = {key: gathered(value) if case.stage else value for key, value in values.items()}
        begins = offsets_of(optimizer, place, params)
        for param, begin in zip(params, begins, strict=True):
            cut = {k: v[begin : begin + param.numel()].view(param.shape) for k, v in whole.items()}
            check(param, cut, case)
            yield param, cut


def unflat_tensors(optimizer: Any) -> Iterator[tuple[nn.Parameter, dict[str, Tensor]]]:
    """The same for the optimizer that keeps a master for each parameter."""
    for params, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for param, master in zip(params, masters, strict=True):
            state = optimizer.optimizer.state[master]
            yield param, {"parameters": master, **under_state({key: state[key] for key in MOMENTS})}


def relink(optimizer: Any) -> None:
    """Make `safe_get_full_optimizer_state` work with several groups.

    DeepSpeed looks for moments once, after the first step of the first group: others have none by then.
    """
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def check(param: nn.Parameter, cut: dict[str, Tensor], case: Case) -> None:
    """The model's own values are the rounded masters; and DeepSpeed tells the same, where it is right.

    With `round_robin_gradients` it is not: it looks for parameters where they are without.
    """
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    assert torch.equal(param, cut["parameters"].to(param.dtype))
    if case.stage and not case.zero.get("round_robin_gradients"):
        assert torch.equal(safe_get_full_fp32_param(param), cut["parameters"])
        for key in MOMENTS if case.steps else ():
            assert torch.equal(safe_get_full_optimizer_state(param, key), cut[f"state/{key}"])


def first_of(optimizer: Any, *names: str) -> Any:
    return next((getattr(optimizer, name) for name in names if hasattr(optimizer, name)), None)


def offsets_of(optimizer: Any, group: int, params: list[nn.Parameter]) -> list[int]:
    """Where each parameter begins in its group's buffer."""
    if hasattr(optimizer, "round_robin_bit16_offsets"):
        known: list[int] = optimizer.round_robin_bit16_offsets[group]
        return known
    ends = torch.tensor([0] + [param.numel() for param in params]).cumsum(0)
    return ends[:-1].tolist()


def gathered(part: Tensor) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, part.detach())
    return torch.cat(parts)


def under_state(moments: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"state/{key}": value for key, value in moments.items()}


def other_truths(engine: Any, case: Case) -> dict[str, Any]:
    """What is no tensor, as the engine has it."""
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    plain_scale = getattr(engine.optimizer, "loss_scale_config", None)
    values = next((state for state in base.state.values() if state), {})
    return {
        "stage": case.stage,
        "world": case.world,
        "step": float(values["step"]) if "step" in values else None,
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in base.param_groups],
        "scaler": {k: v for k, v in vars(scaler or plain_scale or Namespace()).items() if k != "dtype"},
        "lr_scheduler": engine.lr_scheduler.state_dict(),
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "micro_steps": engine.micro_steps,
        "frozen": [n for n, p in engine.module.named_parameters() if not p.requires_grad],
        "tied": {"head.weight": "embed.weight"} if case.tied else {},
    }


# The runs ----------------------------------------------------------------------------------------


def rank_of_case(rank: int, name: str, folder: Path, port: int) -> None:
    """One rank's life."""
    case = CASES[name]
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.world, "LOCAL_SIZE": case.world}
    os.environ |= {key: str(value) for key, value in places.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    torch.set_num_threads(1)
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend="gloo")
    engine = make_engine(case)
    train(engine, rank, range(case.steps))
    tensors = {k: v.detach().clone().contiguous() for k, v in whole_tensors(engine, case)}
    truths = other_truths(engine, case)
    engine.save_checkpoint(folder, client_state=CLIENT_STATE, exclude_frozen_parameters=case.exclude_frozen)
    after: list[list[float]] = [[] for _ in range(case.world)]
    mine = train(engine, rank, range(case.steps, case.steps + MORE_STEPS))
    torch.distributed.all_gather_object(after, mine)
    if rank == 0:
        save_file(tensors, folder / "truth.safetensors")
        (folder / "truth.json").write_text(json.dumps({**truths, "after": after}, indent=1, default=str))
    torch.distributed.destroy_process_group()


def convert(folder: Path) -> None:
    """The same as a universal checkpoint, by DeepSpeed's own converter."""
    from deepspeed.checkpoint.ds_to_universal import main

    tag = (folder / "latest").read_text()
    main(
        Namespace(
            input_folder=str(folder / tag),
            output_folder=str(folder / f"{tag}_universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


def make(name: str, port: int) -> None:
    """Run a case and pack what it has written."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        torch.multiprocessing.spawn(rank_of_case, (name, folder, port), nprocs=CASES[name].world)
        if CASES[name].universal:
            convert(folder)
        FOLDER.mkdir(exist_ok=True)
        with tarfile.open(FOLDER / f"{name}.tar.xz", "w:xz", preset=9) as archive:
            for path in sorted(folder.rglob("*")):
                if path.is_file() and path.suffix != ".py":  # the recovery scripts are DeepSpeed's
                    archive.add(path, path.relative_to(folder))


if __name__ == "__main__":
    for place, case_name in enumerate(sys.argv[1:] or CASES):
        print(case_name, flush=True)
        make(case_name, 29600 + place)
