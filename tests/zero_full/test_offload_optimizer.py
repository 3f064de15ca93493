"""`offload_optimizer`: masters and the optimizer's state wait on the host, and every bit is the same."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL
from tests.zero_full.runs import Net, assert_same, config, data
from zero_full.config import ConfigError, resolve
from zero_full.optim import build_optimizer

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
}
PAIRS = [*((precision, "AdamW") for precision in KEYS), ("fp32", "SGD"), ("bf16", "SGD"), ("bf16", "Lamb")]
IN_PART = [("fp32", "AdamW"), ("bf16", "Lamb"), ("fp16", "AdamW")]
CUT = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 100, "sub_group_size": 60}


def on_host(stage: int, ratio: float, **keys: Any) -> dict[str, Any]:
    """A config with so much of the state on the host, or no word of it.

    At stage 3 every parameter is cut, and stepped in several sub-groups.
    """
    zero = {"stage": stage, **(CUT if stage == 3 else {})}
    if ratio:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True, "ratio": ratio}
    return config(stage, zero_optimization=zero, **keys)


def written_and_resumed(comm: Any, stage: int, ratio: float, keys: dict[str, Any]) -> dict[str, Tensor]:
    """What a loop does: steps, writes to parameters and masters, state saved and loaded, a layer thawed."""
    torch.manual_seed(0)
    model = Net()
    model.layers[2].requires_grad_(False)
    groups = [{"params": list(model.parameters())}]
    section = keys["optimizer"]
    base = build_optimizer(section["type"], section["params"], groups)
    engine, *_ = zero_full.initialize(model=model, optimizer=base, config=on_host(stage, ratio, **keys))
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
    assert ("host" in holdings, "optimizer" in holdings) == (ratio > 0, ratio < 1)
    engine.destroy()
    return found


def both(comm: Any, stage: int) -> list[tuple[str, dict[str, Tensor], dict[str, Tensor]]]:
    """Without and with offloading, all or a part, for each precision and optimizer."""
    found = []
    for precision, kind in PAIRS:
        more = {**KEYS[precision], "optimizer": {"type": kind, "params": OPTIMIZERS[kind]}}
        beside = written_and_resumed(comm, stage, 0, more)
        for ratio in (1.0, 0.5) if (precision, kind) in IN_PART else (1.0,):
            away = written_and_resumed(comm, stage, ratio, more)
            found.append((f"{precision}, {kind}, {ratio}", beside, away))
    return found


@pytest.mark.parametrize(("world", "stage"), [(1, 2), (3, 1), (3, 2), (3, 3)])
def test_state_on_the_host_changes_no_bit(world: int, stage: int) -> None:
    for cases in POOL.run(both, world, stage):
        for name, beside, away in cases:
            assert list(beside) == list(away), name
            for key, value in beside.items():
                assert torch.equal(away[key], value), f"{name}: {key}"


def bytes_held(comm: Any, stage: int, host: float, keys: dict[str, Any]) -> tuple[dict[str, int], set[int]]:
    """By kind, after a step; and where parameters and host state lie."""
    engine, *_ = zero_full.initialize(model=Net(), config=on_host(stage, host, **keys))
    dtype = next(engine.parameters()).dtype
    for micro in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(data(0, micro, comm.rank, dtype)))
        engine.step()
    holdings = engine.optimizer.holdings()
    held = {kind: sum(t.nbytes for t in tensors) for kind, tensors in holdings.items()}
    on_device = {t.untyped_storage().data_ptr() for t in holdings["parameters"] + holdings["gradients"]}
    shared = {t.untyped_storage().data_ptr() for t in holdings.get("host", [])} & on_device
    engine.destroy()
    return held, shared


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 masters"])
def test_the_device_keeps_neither_masters_nor_moments(stage: int, precision: str) -> None:
    beside = POOL.run(bytes_held, 2, stage, 0, KEYS[precision])
    away = POOL.run(bytes_held, 2, stage, 1, KEYS[precision])
    for (before, _), (after, shared) in zip(beside, away, strict=True):
        assert not shared and "optimizer" not in after
        assert after["parameters"] == before["parameters"] and after["gradients"] == before["gradients"]
        owned = sum(p.numel() for p in Net().parameters()) // 2
        size = 2 if precision == "bf16 masters" else 4
        has_master = precision == "bf16"
        extra = 0 if has_master else after["host"] - before["optimizer"]
        assert after["host"] == before["optimizer"] + extra
        assert has_master or owned * size <= extra <= (owned + 64) * size, "a master of its own"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"device": "nvme", "nvme_path": "/tmp"}, "NVMe has not landed"),
        ({"device": "cpu", "ratio": 1.5}, "ratio: got 1.5, expected a number from .* to 1, or 0"),
        ({"device": "cpu", "super_offload": True}, "super_offload"),
    ],
    ids=str,
)
def test_what_is_not_here_is_an_error(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(config(2, zero_optimization={"stage": 2, "offload_optimizer": section}), 1)


def test_stage_0_has_nothing_to_offload() -> None:
    with pytest.raises(ConfigError, match="stage 0 keeps the optimizer"):
        resolve(on_host(0, 1), 1)


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
    with pytest.raises(ConfigError, match="cpu_offload: deprecated, and offload_optimizer is given as well"):
        resolve(both, 1)
    with pytest.raises(ConfigError, match=r"zero_optimization\.cpu_offload: stage 0 keeps"):
        resolve(config(0, zero_optimization=old), 1)


def test_a_ratio_of_nothing_is_said_to_have_no_effect() -> None:
    section = {"device": "none", "ratio": 0.5}
    (warning,) = resolve(config(2, zero_optimization={"offload_optimizer": section}), 1).warnings
    assert "offload_optimizer.ratio = 0.5 has no effect" in warning


def test_what_only_nvme_reads_is_said_to_be_idle() -> None:
    section = {"device": "cpu", "buffer_count": 5, "fast_init": True, "pin_memory": False}
    warnings = resolve(config(2, zero_optimization={"stage": 2, "offload_optimizer": section}), 1).warnings
    for key in ("buffer_count", "fast_init"):
        assert any(f"offload_optimizer.{key}" in line for line in warnings)


def test_a_model_without_a_trained_parameter_has_nothing_on_the_host() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    keys = on_host(1, 1)
    del keys["optimizer"]
    engine, *_ = zero_full.initialize(model=model, config=keys)
    assert_same({"y": engine(torch.ones(1, 2)).detach()}, {"y": model(torch.ones(1, 2)).detach()})
    engine.destroy()
