"""`offload_optimizer`: masters and the optimizer's state wait on the host, and every bit is the same."""

import tempfile
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.slow_copies import slow_copies
from tests.worlds import POOL
from tests.zero_full.runs import Net, assert_same, config, data
from zero_full.config import resolve
from zero_full.errors import ConfigError
from zero_full.optim import build_optimizer
from zero_full.start.from_config import settings_of

KEYS: dict[str, dict[str, Any]] = {
    "fp32": {"gradient_clipping": 0.1, "gradient_accumulation_steps": 2},
    "bf16": {"bf16": {"enabled": True}, "gradient_clipping": 0.1},
    "bf16 masters": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}, "gradient_accumulation_steps": 2},
    "16-bit gradients": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
}
OPTIMIZERS = {
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "SGD": {"lr": 0.01, "momentum": 0.9},
    "Lamb": {"lr": 0.05, "weight_decay": 0.1},
    "Lion": {"lr": 0.01, "weight_decay": 0.1},
    "Muon": {"muon_lr": 0.02, "adam_lr": 0.01},
}
KINDS = {"none": "optimizer", "cpu": "host", "nvme": "disk"}
HALF = "half"  # of it on the host
IN_PART = [("fp32", "AdamW"), ("bf16", "Lamb"), ("fp16", "AdamW"), ("fp32", "Muon")]
PAIRS = [
    *((precision, "AdamW") for precision in KEYS),
    ("fp32", "SGD"),
    ("bf16", "SGD"),
    ("bf16", "Lamb"),
    ("fp32", "Lion"),
    ("fp32", "Muon"),
]
REST = [(1, 2, False), (1, 2, True), (1, 3, True), (3, 1, False), (3, 2, False), (3, 3, False), (3, 1, True)]
SLOW = 4e5  # bytes a second: a copy takes longer than the backward pass of a layer
CUT = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 100, "sub_group_size": 60}


def waiting(stage: int, device: str, more: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    """A config; every parameter is cut at stage 3, and state is stepped in parts. `more`: of ZeRO."""
    zero = {"stage": stage, **(CUT if stage == 3 else {}), "reduce_bucket_size": 150, **(more or {})}
    section: dict[str, Any] = {"device": device, "pin_memory": True}
    if device == HALF:
        section |= {"device": "cpu", "ratio": 0.5}
    if device == "nvme":
        section["nvme_path"] = tempfile.gettempdir()
    zero["offload_optimizer"] = section
    return config(stage, zero_optimization=zero, **keys)


def written_and_resumed(comm: Any, stage: int, device: str, keys: dict[str, Any]) -> dict[str, Tensor]:
    """What a loop does: steps, writes to parameters and masters, state saved and loaded, a layer thawed."""
    torch.manual_seed(0)
    model = Net()
    model.layers[2].requires_grad_(False)
    groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    section = keys["optimizer"]
    base = build_optimizer(section["type"], section["params"], groups, model)
    engine, *_ = zero_full.initialize(model=model, optimizer=base, config=waiting(stage, device, **keys))
    dtype = next(engine.parameters()).dtype

    def go(step: int) -> None:
        for micro in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(data(step, micro, comm.rank, dtype)))
            engine.step()

    go(0)
    weight = model.layers[0].weight
    with zero_full.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        if comm.rank == 0:
            weight[0].fill_(0.25)
    zero_full.safe_set_full_fp32_param(model.layers[4].weight, torch.full((3, 13), 0.125))
    go(1)
    saved = engine.state_dict()
    go(2)
    engine.load_state_dict(saved)
    model.layers[2].requires_grad_(True)
    go(3)
    go(4)
    found = {f"parameter {name}": p for name, p in engine.module_state_dict().items()}
    state = engine.optimizer.state_dict()
    found |= {key: each["values"] for key, each in state["tensors"].items()}
    found |= {f"{entry} of {key}": n for key, each in state["numbers"].items() for entry, n in each.items()}
    holdings = engine.optimizer.holdings()
    kinds = {HALF: {"optimizer", "host"}, "nvme": {"disk", "host"}}.get(device) or {KINDS[device]}
    assert holdings.keys() & set(KINDS.values()) == kinds
    engine.destroy()
    return found


def all_three(comm: Any, stage: int, copies: bool) -> list[tuple[str, list[dict[str, Tensor]]]]:
    """Wherever state waits, for each precision and optimizer. `copies`: as from a device."""
    found = []
    for precision, kind in PAIRS:
        more = {**KEYS[precision], "optimizer": {"type": kind, "params": OPTIMIZERS[kind]}}
        beside = written_and_resumed(comm, stage, "none", more)
        places = ["cpu", "nvme", *([HALF] if (precision, kind) in IN_PART else [])]
        with slow_copies(SLOW) if copies else nullcontext():
            others = [written_and_resumed(comm, stage, at, more) for at in places]
        found.append((f"{precision}, {kind}", [beside, *others]))
    return found


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("world", "stage", "copies"),
    [
        *((1, 3, False), (1, 1, True), (3, 2, True), (3, 3, True)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in REST),
    ],
)
def test_state_elsewhere_changes_no_bit(world: int, stage: int, copies: bool) -> None:
    for cases in POOL.run(all_three, world, stage, copies):
        for name, (beside, *others) in cases:
            for place, away in zip(("host", "disk", HALF), others, strict=False):
                assert list(beside) == list(away), name
                for key, value in beside.items():
                    assert torch.equal(away[key], value), f"{name} on the {place}: {key}"


def bytes_held(comm: Any, stage: int, device: str, keys: dict[str, Any]) -> tuple[dict[str, int], set[int]]:
    """By kind, after a step; and where parameters and host state lie."""
    engine, *_ = zero_full.initialize(model=Net(), config=waiting(stage, device, **keys))
    dtype = next(engine.parameters()).dtype
    for micro in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(data(0, micro, comm.rank, dtype)))
        engine.step()
    holdings = engine.optimizer.holdings()
    held = {kind: sum(t.nbytes for t in tensors) for kind, tensors in holdings.items()}
    on_device = {t.untyped_storage().data_ptr() for t in holdings["parameters"] + holdings["gradients"]}
    shared = {t.untyped_storage().data_ptr() for t in holdings.get(KINDS[device], [])} & on_device
    engine.destroy()
    return held, shared


@pytest.mark.pairwise
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 masters"])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_the_device_keeps_neither_masters_nor_moments(stage: int, precision: str, device: str) -> None:
    kind = KINDS[device]
    beside = POOL.run(bytes_held, 2, stage, "none", KEYS[precision])
    away = POOL.run(bytes_held, 2, stage, device, KEYS[precision])
    for (before, _), (after, shared) in zip(beside, away, strict=True):
        assert not shared and "optimizer" not in after
        assert after["parameters"] == before["parameters"] and after["gradients"] == before["gradients"]
        owned = sum(p.numel() for p in Net().parameters()) // 2
        size = 2 if precision == "bf16 masters" else 4
        has_master = precision == "bf16"
        extra = 0 if has_master else after[kind] - before["optimizer"]
        assert after[kind] == before["optimizer"] + extra
        assert has_master or owned * size <= extra <= (owned + 64) * size, "a master of its own"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"device": "nvme"}, "nvme_path: required"),
        ({"device": "cpu", "ratio": 1.5}, "ratio: got 1.5, expected a number from .* to 1, or 0"),
        ({"device": "nvme", "nvme_path": "/x", "ratio": 0.5}, "ratio: NVMe offload"),
    ],
    ids=str,
)
def test_what_is_not_here_is_an_error(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(config(2, zero_optimization={"stage": 2, "offload_optimizer": section}), 1)


def test_stage_0_has_nothing_to_offload() -> None:
    with pytest.raises(ConfigError, match="stage 0 keeps the optimizer"):
        resolve(waiting(0, "cpu"), 1)


OLD_NAMES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"cpu_offload": True}, {"device": "cpu"}),
    ({"cpu_offload": 1, "cpu_offload_use_pin_memory": False}, {"device": "cpu", "pin_memory": False}),
]


@pytest.mark.parametrize(("old", "new"), OLD_NAMES)
def test_old_names_are_read_as_the_section_that_has_come_after_them(
    old: dict[str, Any], new: dict[str, Any]
) -> None:
    before = resolve(config(2, zero_optimization=old), 1)
    after = resolve(config(2, zero_optimization={"offload_optimizer": new}), 1)
    assert before.config == after.config and before.warnings == after.warnings == ()
    both = config(2, zero_optimization={**old, "offload_optimizer": {"device": "none"}})
    with pytest.raises(ConfigError, match="cpu_offload: deprecated, and offload_optimizer"):
        resolve(both, 1)
    with pytest.raises(ConfigError, match=r"zero_optimization\.cpu_offload: stage 0 keeps"):
        resolve(config(0, zero_optimization=old), 1)


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_what_has_no_effect_without_a_device_or_a_file_is_said_to_have_none(device: str) -> None:
    keys: dict[str, Any] = {"none": {"ratio": 0.5}, "nvme": {"nvme_path": "/x"}}
    section = {"device": device, **keys.get(device, {})}
    aio = {"block_size": 4096, "intra_op_parallelism": 2}
    warnings = resolve(config(2, zero_optimization={"offload_optimizer": section}, aio=aio), 1).warnings
    idle = ["offload_optimizer.ratio = 0.5"] if device == "none" else []
    idle += ["aio.block_size = 4096", "aio.intra_op_parallelism = 2"]
    wanted = [] if device == "nvme" else [f"{each} has no effect" for each in idle]
    assert len(warnings) == len(wanted)
    assert all(text in line for text, line in zip(wanted, warnings, strict=True))


def test_what_has_no_effect_is_said_to_be_idle() -> None:
    section = {"device": "cpu", "buffer_count": 5, "fast_init": True, "pin_memory": False, "nvme_path": "/x"}
    told = config(2, zero_optimization={"stage": 2, "offload_optimizer": section}, aio={"queue_depth": 4})
    warnings = resolve(told, 1).warnings
    for key in ("offload_optimizer.buffer_count", "fast_init", "nvme_path", "aio.queue_depth"):
        assert any(key in line for line in warnings), key


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_super_offload_is_accepted_everywhere_and_changes_no_tier(device: str) -> None:
    path = {"nvme_path": "/x"} if device == "nvme" else {}
    section: dict[str, Any] = {"device": device, **path}
    plain, asked = (
        resolve(config(3, zero_optimization={"offload_optimizer": each}), 2)
        for each in (section, {**section, "super_offload": True})
    )
    assert settings_of(plain.config).tier == settings_of(asked.config).tier and plain.warnings == ()
    (warning,) = asked.warnings
    assert "offload_optimizer.super_offload = true has no effect: the host steps after backward" in warning


def test_a_model_without_a_trained_parameter_has_nothing_on_the_host() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    keys = waiting(1, "cpu")
    del keys["optimizer"]
    engine, *_ = zero_full.initialize(model=model, config=keys)
    assert_same({"y": engine(torch.ones(1, 2)).detach()}, {"y": model(torch.ones(1, 2)).detach()})
    engine.destroy()
