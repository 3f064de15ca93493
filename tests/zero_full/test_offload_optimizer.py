"""`offload_optimizer`: masters and the optimizer's state wait on the host, and every bit is the same."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.slow_copies import slow_copies
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
    "Lion": {"lr": 0.01},
    "Muon": {"lr": 0.05},
}
PAIRS = [*((precision, "AdamW") for precision in KEYS), ("fp32", "SGD"), ("bf16", "SGD"), ("bf16", "Lamb")]
PAIRS += [("fp32", "Lion"), ("bf16", "Muon")]
SLOW = 4e5  # bytes a second: a copy takes longer than the backward pass of a layer
CUT = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 100, "sub_group_size": 60}


def on_host(stage: int, host: bool, more: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    """A config; at stage 3 every parameter is cut, and stepped in several sub-groups. `more`: of ZeRO."""
    zero = {"stage": stage, **(CUT if stage == 3 else {}), **(more or {})}
    if host:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return config(stage, zero_optimization=zero, **keys)


def written_and_resumed(comm: Any, stage: int, host: bool, keys: dict[str, Any]) -> dict[str, Tensor]:
    """What a loop does: steps, writes to parameters and masters, state saved and loaded, a layer thawed."""
    torch.manual_seed(0)
    model = Net()
    model.layers[2].requires_grad_(False)
    groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    section = keys["optimizer"]
    if section["type"] == "Muon":
        are_matrices = (lambda p: p.dim() == 2), (lambda p: p.dim() != 2)
        by_kind = [list(filter(is_one, model.parameters())) for is_one in are_matrices]
        groups = [{"params": ps, "use_muon": not n} for n, ps in enumerate(by_kind)]
    base = build_optimizer(section["type"], section["params"], groups)
    engine, *_ = zero_full.initialize(model=model, optimizer=base, config=on_host(stage, host, **keys))
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
    assert ("host" in holdings, "optimizer" in holdings) == (host, not host)
    engine.destroy()
    return found


def both(comm: Any, stage: int, copies: bool) -> list[tuple[str, dict[str, Tensor], dict[str, Tensor]]]:
    """Without and with offloading, for each precision and optimizer. `copies`: as from a device."""
    found = []
    for precision, kind in PAIRS:
        more = {**KEYS[precision], "optimizer": {"type": kind, "params": OPTIMIZERS[kind]}}
        beside = written_and_resumed(comm, stage, False, more)
        with slow_copies(SLOW) if copies else nullcontext():
            away = written_and_resumed(comm, stage, True, more)
        found.append((f"{precision}, {kind}", beside, away))
    return found


@pytest.mark.parametrize(
    ("world", "stage", "copies"),
    [(1, 2, False), (1, 2, True), *((3, s, c) for c in (False, True) for s in (1, 2, 3))],
)
def test_state_on_the_host_changes_no_bit(world: int, stage: int, copies: bool) -> None:
    for cases in POOL.run(both, world, stage, copies):
        for name, beside, away in cases:
            assert list(beside) == list(away), name
            for key, value in beside.items():
                assert torch.equal(away[key], value), f"{name}: {key}"


def bytes_held(comm: Any, stage: int, host: bool, keys: dict[str, Any]) -> tuple[dict[str, int], set[int]]:
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
    beside = POOL.run(bytes_held, 2, stage, False, KEYS[precision])
    away = POOL.run(bytes_held, 2, stage, True, KEYS[precision])
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
        ({"device": "cpu", "ratio": 0.5}, "ratio"),
        ({"device": "cpu", "super_offload": True}, "super_offload"),
    ],
    ids=str,
)
def test_what_is_not_here_is_an_error(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(config(2, zero_optimization={"stage": 2, "offload_optimizer": section}), 1)


def test_stage_0_has_nothing_to_offload() -> None:
    with pytest.raises(ConfigError, match="stage 0 keeps the optimizer"):
        resolve(on_host(0, True), 1)


def test_what_only_nvme_reads_is_said_to_be_idle() -> None:
    section = {"device": "cpu", "buffer_count": 5, "fast_init": True, "pin_memory": False}
    warnings = resolve(config(2, zero_optimization={"stage": 2, "offload_optimizer": section}), 1).warnings
    for key in ("buffer_count", "fast_init"):
        assert any(f"offload_optimizer.{key}" in line for line in warnings)


def test_a_model_without_a_trained_parameter_has_nothing_on_the_host() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    keys = on_host(1, True)
    del keys["optimizer"]
    engine, *_ = zero_full.initialize(model=model, config=keys)
    assert_same({"y": engine(torch.ones(1, 2)).detach()}, {"y": model(torch.ones(1, 2)).detach()})
    engine.destroy()
