"""`offload_param`: slices of parameters wait on the host or in a file, and every bit is the same."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_full
from tests.worlds import POOL
from tests.zero_full.runs import config, data
from tests.zero_full.stage3_runs import Block, Tower, seeded, whole_bytes
from zero_full.config import resolve
from zero_full.errors import ConfigError
from zero_full.kernels.files import PAGE
from zero_full.offload import BlockTier, HostTier
from zero_full.offload.param_store import HostParamStore
from zero_full.plan import plan
from zero_full.settings import Settings
from zero_full.start.from_config import settings_of

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5},
    "bf16": {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2},
    "bf16 masters": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
}
PLACES = {  # of the parameters
    "host": {"device": "cpu"},
    "disk": {"device": "nvme", "max_in_cpu": 0},
    "one buffer": {"device": "nvme", "max_in_cpu": 0, "buffer_count": 1, "buffer_size": 1},
    "partly": {"device": "nvme", "max_in_cpu": 1500},
}
STATES = ("none", "cpu", "nvme")


class Tall(nn.Module):
    """Blocks of which one is frozen, one asleep at first and two recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.blocks[1].requires_grad_(False)
        self.blocks[2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        for number, block in enumerate(self.blocks):
            again = number in (3, 4) and torch.is_grad_enabled()
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        return x.float().square().mean()


def keys_of(parameters: dict[str, Any] | None, state: str, **keys: Any) -> dict[str, Any]:
    """A config in which everything is released as soon as possible."""
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 2000}
    zero |= {"stage3_max_reuse_distance": 0}
    path = {"nvme_path": tempfile.gettempdir()}
    if parameters is not None:
        zero["offload_param"] = parameters | (path if parameters["device"] == "nvme" else {})
    if state != "none":
        zero["offload_optimizer"] = {"device": state, **(path if state == "nvme" else {})}
    return config(3, zero_optimization=zero, **keys)


@contextmanager
def host_apart() -> Iterator[None]:
    """The CPU as if it were a device with memory of its own."""
    param_store = HostTier.param_store
    HostTier.param_store = lambda self, device: HostParamStore()
    try:
        yield
    finally:
        HostTier.param_store = param_store


def a_loop(comm: Any, keys: dict[str, Any], released: bool, folder: str) -> dict[str, Tensor]:
    """Steps, an evaluation, writes to parameters, a layer thawed, state saved and loaded."""
    model = seeded(Tall)
    listed = [p for name, p in model.named_parameters() if not name.startswith("blocks.1.")]
    engine = zero_full.initialize(model=model, model_parameters=listed, config=keys)[0]
    dtype = engine.optimizer.sharded.flats[0].dtype

    def go(step: int) -> None:
        for micro in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(data(step, micro, comm.rank, dtype)))
            engine.step()

    found: dict[str, Tensor] = {}
    go(0)
    go(1)
    with torch.no_grad():
        found["evaluated"] = engine(data(9, 0, comm.rank, dtype))
    for number in (0, 1, 2):
        weight = model.blocks[number].up.weight
        with zero_full.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
            if comm.rank == 0:
                weight[0].fill_(0.25)
    zero_full.safe_set_full_fp32_param(model.blocks[5].up.bias, torch.full((32,), 0.125))
    go(2)
    saved = engine.state_dict()
    engine.save_checkpoint(folder)
    go(3)
    engine.load_state_dict(saved)
    model.blocks[2].requires_grad_(True)
    go(4)
    engine.load_checkpoint(folder)
    go(5)
    assert not (released and whole_bytes(engine))
    found |= engine.module_state_dict()
    state = engine.optimizer.state_dict()
    found |= {key: each["values"] for key, each in state["tensors"].items()}
    engine.save_16bit_model(folder, "weights.bin")
    if comm.rank == 0:
        loaded = torch.load(Path(folder) / "weights.bin")
        assert all(torch.equal(loaded[name], value) for name, value in engine_weights(found, loaded).items())
    engine.destroy(gather=True)
    found |= {f"left {name}": p.detach().clone() for name, p in model.named_parameters()}
    return found


def engine_weights(found: dict[str, Tensor], loaded: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in found.items() if name in loaded}


def everywhere(comm: Any, precision: str, states: tuple[str, ...], folder: str) -> dict[str, list[Any]]:
    """By where the optimizer's state waits, without and with parameters elsewhere."""
    keys, found = PRECISIONS[precision], {}
    for state in states:
        runs = [a_loop(comm, keys_of(None, state, **keys), False, f"{folder}/{state}")]
        for name, place in PLACES.items():
            told = keys_of(place, state, **keys)
            told["zero_optimization"]["overlap_comm"] = name != "disk"
            with host_apart():
                runs.append(a_loop(comm, told, name != "partly", f"{folder}/{state} {name}"))
        found[state] = runs
    return found


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("world", "precision", "states"),
    [
        (1, "fp32", STATES),
        (1, "bf16", ("cpu",)),
        (1, "bf16 masters", ("none",)),
        (3, "fp32", ("none",)),
        (3, "bf16", ("nvme",)),
        pytest.param(1, "bf16", ("none", "nvme"), marks=pytest.mark.slow),
        pytest.param(3, "bf16", ("none", "cpu"), marks=pytest.mark.slow),
    ],
)
def test_parameters_elsewhere_change_no_bit(
    world: int, precision: str, states: tuple[str, ...], tmp_path: Path
) -> None:
    for ranks in POOL.run(everywhere, world, precision, states, str(tmp_path)):
        for state, (here, *others) in ranks.items():
            for place, away in zip(PLACES, others, strict=True):
                assert here.keys() == away.keys()
                for name, value in here.items():
                    assert torch.equal(away[name], value), f"state {state}, {place}: {name}"


@pytest.mark.parametrize(
    ("stage", "section", "message"),
    [
        (3, {"device": "nvme"}, "offload_param.nvme_path: required"),
        (2, {"device": "cpu"}, "offload_param.device: stage 2 keeps"),
        (0, {"device": "nvme", "nvme_path": "/x"}, "stage 0 keeps"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_an_error(stage: int, section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(config(stage, zero_optimization={"offload_param": section}), 1)


def test_the_old_key_is_refused_with_the_new_one() -> None:
    with pytest.raises(ConfigError, match=r'deprecated; write "offload_param": \{"device": "cpu"\}'):
        resolve(config(3, zero_optimization={"cpu_offload_param": True}), 1)


def test_what_only_a_file_needs_is_idle_elsewhere() -> None:
    keys = {"nvme_path": "/x", "buffer_count": 4, "buffer_size": 10, "max_in_cpu": 1}
    for device in ("none", "cpu"):
        told = config(3, zero_optimization={"offload_param": {"device": device, **keys}})
        warnings = resolve(told, 2).warnings
        for key in keys:
            assert sum(f"offload_param.{key} = " in line for line in warnings) == 1, key
    told = config(3, zero_optimization={"offload_param": {"device": "nvme", **keys}})
    assert not any("offload_param" in line for line in resolve(told, 2).warnings)
    tier = settings_of(resolve(told, 2).config).param_tier
    assert isinstance(tier, BlockTier)
    assert (tier.path, tier.buffer_numel, tier.memory_numel) == ("/x", 40, 1)


def test_whole_parameters_have_no_tier() -> None:
    with pytest.raises(ValueError, match="param_tier: stage"):
        Settings(stage=2, param_tier=HostTier())
    with pytest.raises(TypeError, match="param_tier must be a tier"):
        Settings(stage=3, param_tier="cpu")  # type: ignore[arg-type]


def test_on_a_cpu_host_memory_is_where_parameters_are(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is released by a single rank, and nothing is copied."""
    caplog.set_level("INFO", "zero_full")
    for place in ({"device": "cpu"}, {"device": "nvme"}):
        engine = zero_full.initialize(model=seeded(Tall), config=keys_of(place, "none"))[0]
        assert not any(p.isnan().any() for p in engine.module.parameters())
        assert "disk" not in engine.optimizer.holdings() and "host" not in engine.optimizer.holdings()
        engine.destroy()
    assert caplog.text.count("its parameters are in host memory") == 1


@pytest.mark.parametrize("threshold", [0, 10**6])
@pytest.mark.parametrize(
    ("place", "takes"),
    [
        ({"device": "cpu"}, True),
        ({"device": "nvme"}, False),
        ({"device": "nvme", "max_in_cpu": 8 * 1072}, False),
        ({"device": "nvme", "max_in_cpu": 8 * 1072 - 1}, True),
        ({"device": "nvme", "max_in_cpu": 0}, True),
    ],
    ids=str,
)
def test_parameters_that_do_not_wait_where_they_were_to_are_told(
    place: dict[str, Any], takes: bool, threshold: int, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of(place, "none")
    keys["zero_optimization"]["stage3_param_persistence_threshold"] = threshold
    with host_apart():
        engine = zero_full.initialize(model=seeded(Tower), config=keys)[0]
        engine.destroy()
    told = caplog.text.count("offload_param has no effect")
    assert told == (not takes or bool(threshold))
    if threshold:
        assert "stage3_param_persistence_threshold" in caplog.text
    elif told:
        number = place.get("max_in_cpu", 10**9)
        assert f"max_in_cpu is {number:,}" in caplog.text


def bytes_kept(comm: Any, keys: dict[str, Any]) -> dict[str, int]:
    engine = zero_full.initialize(model=seeded(Tower), config=keys)[0]
    engine.backward(engine(data(0, 0, comm.rank, engine.optimizer.sharded.flats[0].dtype)))
    engine.step()
    held = {kind: sum(t.nbytes for t in some) for kind, some in engine.optimizer.holdings().items()}
    held["file"] = engine.optimizer.sharded.param_store.file.size
    engine.destroy()
    return held


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("state", ["none", "nvme"])
def test_a_plan_counts_parameters_where_they_wait(world: int, state: str) -> None:
    keys = keys_of(PLACES["disk"], state, bf16={"enabled": True})
    planned = plan(Tower(), keys, world, device="cpu")
    held = POOL.run(bytes_kept, world, keys)[0]
    assert planned.parameters == held["parameters"] == 0
    assert planned.master + planned.moments == held.get("optimizer", 0)
    beside = plan(Tower(), keys_of(None, state, bf16={"enabled": True}), world, device="cpu")
    if state == "none" or world > 1:  # alone, other parts pass through the buffers
        assert planned.disk == beside.disk + held["file"] and held["file"] % PAGE == 0
    assert planned.disk >= held["disk"] > 0, "in whole pages"


def test_a_plan_for_a_gpu_counts_files_buffers_and_what_stays_in_memory() -> None:
    """Blocks of 1,072 elements: two pages in fp32, of which the file has those that memory does not take."""
    blocks, size, pages = 8, 4 * 1072, 2 * PAGE
    for taken in range(blocks + 1):
        keys = keys_of({"device": "nvme", "max_in_cpu": taken * 1072}, "none")
        planned = plan(Tower(), keys, 1)
        waiting = (blocks - taken) * pages
        assert planned.parameters == 0 and planned.disk == waiting == planned.written
        assert planned.read == 2 * waiting, "in forward and in backward"
        assert planned.host == taken * size + waiting, "a buffer for each"
    few = {"device": "nvme", "max_in_cpu": 0, "buffer_count": 1, "buffer_size": 2048}
    assert plan(Tower(), keys_of(few, "none"), 1).host == 3 * pages, "this unit and the next two"
    assert plan(Tower(), keys_of({"device": "cpu"}, "none"), 1).host == blocks * size
