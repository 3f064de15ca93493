"""1-bit and 0/1 Adam: what they cannot do is said, with the remedy; and what a configuration file may say."""

from typing import Any

import pytest
import torch
from torch import nn

import zero_full
from tests.worlds import POOL
from tests.zero_full.one_bit_runs import Run, engine_of, one_step
from tests.zero_full.runs import Net, config, data, said_by
from zero_full.optim import OneBitAdam, OneBitLamb, ZeroOneAdam, build_optimizer

CLASSES = {"OneBitAdam": OneBitAdam, "OneBitLamb": OneBitLamb, "ZeroOneAdam": ZeroOneAdam}
KINDS = tuple(CLASSES)
COUNTS = {
    "OneBitAdam": ("freeze_step",),
    "OneBitLamb": ("freeze_step",),
    "ZeroOneAdam": ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"),
}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_grad_norm": 1.0}, "gradient_clipping"),
    ({"amsgrad": True}, "amsgrad cannot be True"),
    ({"cuda_aware": True}, "cuda_aware cannot be True"),
    ({"comm_backend_name": 3}, "must be a name"),
    ({"betas": [0.9, 1.0]}, "betas"),
    ({"lr": -1.0}, "lr"),
    ({"bias_correction": "yes"}, "bias_correction must be true or false"),
    ({"per_tensor_scales": 2}, "per_tensor_scales must be true or false"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_options_have_an_effect_or_are_refused(kind: str) -> None:
    counts = [
        ({name: value}, f"{name} must be a whole number") for name in COUNTS[kind] for value in (0, 1.5)
    ]
    for options, reason in [*WRONG, *counts]:
        with pytest.raises((ValueError, TypeError), match=reason):
            CLASSES[kind]([nn.Parameter(torch.ones(2))], **options)
    same = {"max_grad_norm": 0.0, "amsgrad": False, "cuda_aware": False, "comm_backend_name": None}
    CLASSES[kind]([nn.Parameter(torch.ones(2))], **same)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_names_them_as_deepspeed_does(kind: str) -> None:
    params = dict.fromkeys(COUNTS[kind], 5) | {"lr": 0.1, "betas": [0.8, 0.9], "eps_inside_sqrt": True}
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": 0.2}]
    made = build_optimizer(kind.lower(), params | {"cuda_aware": False}, groups)
    assert type(made) is CLASSES[kind] and made.param_groups[0]["lr"] == 0.2
    assert made.model_options.items() >= dict.fromkeys(COUNTS[kind], 5).items()
    for name in ("freeze_steps", "var_freeze"):
        with pytest.raises(ValueError, match=name):
            build_optimizer(kind, {name: 1}, groups)


def test_masks_are_checked() -> None:
    weights = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(4))]
    for mask, reason in (
        (torch.ones(2, 3), "exp_avg_mask .* 2 parameters"),
        ([None], "exp_avg_mask .* 2 parameters"),
        ([None, torch.ones(5)], r"exp_avg_mask\[1\] .*shape \(4,\)"),
        ([torch.ones(2, 3), 1.0], r"exp_avg_mask\[1\]"),
    ):
        with pytest.raises(ValueError, match=reason):
            OneBitAdam([{"params": weights, "exp_avg_mask": mask}])
    OneBitAdam([{"params": weights[:1], "exp_avg_mask": torch.ones(2, 3)}])
    with pytest.raises(ValueError, match="freeze_step is an option of the whole model"):
        OneBitAdam([{"params": weights, "freeze_step": 3}])


def test_alone_it_cannot_step() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match=r"OneBitAdam .* zero_full\.initialize"):
        OneBitAdam([weight]).step()


class Experts(Net):
    """One layer is an expert's."""

    def __init__(self) -> None:
        super().__init__()
        for p in self.layers[0].parameters():
            p.allreduce = False  # type: ignore[union-attr]


KEYS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"gradient_allreduce_op": "sum"}, "cannot sum them"),
    (
        {},
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
        "keeps its state in fp32",
    ),
    ({"comm_backend_name": "nccl"}, {}, "nccl: "),
    ({"comm_backend_name": "ucc"}, {}, "it can be nccl, gloo, mpi, hccl"),
]


def what_runs_say(comm: Any, kind: str) -> dict[str, str]:
    """Of runs that cannot be, and of one that can."""
    found = {}
    for stage in (2, 3) if kind == "ZeroOneAdam" else (1, 2, 3):
        chosen = {"type": kind, "params": {}}
        keys = config(stage, optimizer=chosen)
        found[f"stage {stage}"] = said_by(lambda keys=keys: zero_full.initialize(model=Net(), config=keys))
    for number, (options, more, _) in enumerate(KEYS):
        keys = config(0, optimizer={"type": kind, "params": options}, **more)
        found[f"{number}"] = said_by(lambda keys=keys: zero_full.initialize(model=Net(), config=keys))
    if kind == "ZeroOneAdam":
        for name, zero in (
            ("offload", {"stage": 1, "offload_optimizer": {"device": "cpu"}}),
            ("MiCS", {"stage": 1, "mics_shard_size": 1}),
        ):
            keys = config(1, optimizer={"type": kind, "params": {}}, zero_optimization=zero)
            found[name] = said_by(lambda keys=keys: zero_full.initialize(model=Net(), config=keys))
    plain = config(0, optimizer={"type": kind, "params": {"comm_backend_name": "gloo"}})
    found["fp64"] = said_by(lambda: zero_full.initialize(model=Net().double(), config=plain))
    engine, *_ = zero_full.initialize(model=Net(), config=plain)
    engine.backward(engine(data(0, 0, comm.rank)))
    engine.step()
    engine.destroy()
    differs = config(0, optimizer={"type": kind, "params": {COUNTS[kind][0]: 5 + comm.rank}})
    found["differs"] = said_by(lambda: zero_full.initialize(model=Net(), config=differs))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_runs_that_they_cannot_step_are_refused(kind: str) -> None:
    for said in POOL.run(what_runs_say, 2, kind):
        stages = [2, 3] if kind == "ZeroOneAdam" else [1, 2, 3]
        for stage in stages:
            assert (
                f"{kind} cannot run at stage {stage}" in said[f"stage {stage}"]
                and "Use stage" in said[f"stage {stage}"]
            )
        for number, (_, _, reason) in enumerate(KEYS):
            assert reason in said[f"{number}"], said[f"{number}"]
        assert "model.float()" in said["fp64"]
        assert kind != "ZeroOneAdam" or ("offload_optimizer" in said["offload"] and "mics" in said["MiCS"])
        assert COUNTS[kind][0] in said["differs"], said["differs"]


def with_experts(comm: Any) -> str:
    """What a model with experts hears."""
    from tests.zero_full.test_experts import topology_of

    model, topology = Experts(), topology_of(comm.rank, 2)[0]
    given = OneBitAdam(model.parameters())
    return said_by(
        lambda: zero_full.initialize(model=model, optimizer=given, config=config(0), topology=topology)
    )


def test_experts_are_refused() -> None:
    for said in POOL.run(with_experts, 4):
        assert "OneBitAdam does not support this run" in said and "experts" in said


def newcomer(comm: Any, kind: str) -> str:
    """A parameter that was unused is first trained when nobody learns a variance any more."""
    engine = engine_of(Run(kind))
    for step in range(9):
        one_step(engine, comm.rank, step)
    unused = engine.module.parts["unused"]

    def step_with_unused() -> None:
        engine.backward(engine.module.parts["tall"].sum() + unused.sum())
        engine.step()

    said = said_by(step_with_unused)
    engine.optimizer.zero_grad()
    engine.destroy()
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_after_the_variance_is_frozen_is_refused_by_name(kind: str) -> None:
    for said in POOL.run(newcomer, 2, kind):
        assert f"parts.unused had no gradient before {kind} froze the variance" in said
        assert "unknown in step 10" in said
