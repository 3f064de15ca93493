"""`Init`: the model that plain construction makes, without the memory; `offload_states`; `synced`."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL, RankError
from zero_full.engine.loader import synced


class Model(nn.Module):
    """Tied, re-initialised, with buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))
        self.register_buffer("shift", torch.randn(8), persistent=False)
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.shift
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens.flatten())


def config(stage: int, **keys: Any) -> dict[str, Any]:
    if "bf16" in keys:
        keys["data_types"] = {"buffer_dtype": "bf16"}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
        **keys,
    }


def tokens(rank: int, step: int) -> Tensor:
    return torch.randint(0, 30, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))


def built(
    comm: Any, deferred: bool, stage: int, keys: dict[str, Any]
) -> tuple[dict[str, Tensor], list[float]]:
    """State at the start, and losses. Each rank has a seed of its own: the first one's counts."""
    torch.manual_seed(comm.rank)
    with zero_full.Init(enabled=deferred, config_dict_or_path={}):
        model = Model()
    if deferred:
        assert all("values come in zero_full.initialize" in repr(p) for p in model.parameters())
    engine, _, _, _ = zero_full.initialize(model=model, config=config(stage, **keys))
    state = engine.module_state_dict()
    state["shift"] = model.shift.clone()
    losses = []
    for step in range(3):
        loss = engine(tokens(comm.rank, step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return state, losses


@pytest.mark.pairwise
@pytest.mark.parametrize("keys", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 3])
def test_the_model_is_the_one_that_plain_construction_makes(world: int, stage: int, keys: Any) -> None:
    plain = POOL.run(built, world, False, stage, keys)
    deferred = POOL.run(built, world, True, stage, keys)
    for (state, losses), (want, expected) in zip(deferred, plain, strict=True):
        assert losses == expected
        assert list(state) == list(want) and all(torch.equal(state[name], want[name]) for name in want)


def an_optimizer_that_knew_the_parameters(comm: Any) -> bool:
    with zero_full.Init():
        model = Model()
    before = list(model.parameters())
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, _, _, _ = zero_full.initialize(model=model, optimizer=given, config=config(3))
    engine.backward(engine(tokens(comm.rank, 0)))
    engine.step()
    engine.destroy()
    return all(one is other for one, other in zip(before, model.parameters(), strict=True))


def test_parameters_stay_the_same_objects() -> None:
    assert POOL.run(an_optimizer_that_knew_the_parameters, 2) == [True, True]


def from_weights(comm: Any, directory: str) -> bool:
    torch.manual_seed(1)
    engine, _, _, _ = zero_full.initialize(model=Model(), config=config(2))
    engine.save_weights(directory)
    saved = engine.module_state_dict()
    engine.destroy()
    torch.manual_seed(2)
    with zero_full.Init(weights=directory):
        model = Model()
    engine, _, _, _ = zero_full.initialize(model=model, config=config(3))
    loaded = engine.module_state_dict()
    engine.destroy()
    return all(torch.equal(loaded[name], saved[name]) for name in saved)


def test_pretrained_weights_take_the_place_of_initial_ones(tmp_path: Path) -> None:
    assert POOL.run(from_weights, 2, str(tmp_path)) == [True, True]


def test_what_nobody_recorded_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"weight is on the meta device.*inside zero_full.Init"):
        zero_full.initialize(model=model, config=config(0))


def test_arguments_of_deepspeed_are_known_and_others_refused(caplog: pytest.LogCaptureFixture) -> None:
    with zero_full.Init(module=nn.Linear(2, 2), pin_memory=True):
        assert not nn.Linear(2, 2).weight.is_meta
    assert "Init(pin_memory=...) has no effect" in caplog.text
    with pytest.raises(TypeError, match="Init has no argument colour"):
        zero_full.Init(colour=1)


def test_a_dtype_holds_inside_and_not_after() -> None:
    with zero_full.Init(enabled=False, dtype=torch.bfloat16):
        assert nn.Linear(2, 2).weight.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True])
def test_a_model_larger_than_the_memory_of_its_processes(plain: bool) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += ["-m", "zero_full.examples.larger_than_memory", *(["--plain"] if plain else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    if plain:
        assert done.returncode != 0 and "can't allocate memory" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        model, room = map(int, re.findall(r"(\d+) MiB", done.stdout))
        assert room < model and "step 1: loss" in done.stdout


# offload_states ----------------------------------------------------------------------------------


def parked(comm: Any, stage: int, include: list[str] | None) -> tuple[list[float], list[int]]:
    torch.manual_seed(0)
    engine, optimizer, _, _ = zero_full.initialize(
        model=Model(), config=config(stage, bf16={"enabled": True})
    )
    losses, held = [], []
    for step in range(4):
        loss = engine(tokens(comm.rank, step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if step == 1:
            held.append(on_the_device(optimizer))
            engine.offload_states(include)
            engine.offload_states(include)  # once is enough
            held.append(on_the_device(optimizer))
            with pytest.raises(RuntimeError, match="reload_states first"):
                engine(tokens(comm.rank, step))
            engine.reload_states()
            held.append(on_the_device(optimizer))
    engine.destroy()
    return losses, held


def on_the_device(optimizer: Any) -> int:
    """Bytes, counters not included."""
    tensors = [t for kind, ts in optimizer.holdings().items() if kind != "counters" for t in ts]
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("include", [None, ["optim_states"], ["lp_params", "hp_params"]])
@pytest.mark.parametrize("stage", [1, 3])
def test_offloaded_states_come_back_bit_for_bit(stage: int, include: list[str] | None) -> None:
    undisturbed = POOL.run(built, 2, False, stage, {"bf16": {"enabled": True}})
    for (losses, held), (_, expected) in zip(POOL.run(parked, 2, stage, include), undisturbed, strict=True):
        before, without, after = held
        assert losses[:3] == expected and before == after
        assert without == 0 if include is None else 0 < without < before


def test_an_unknown_kind_is_refused() -> None:
    engine, _, _, _ = zero_full.initialize(model=nn.Linear(2, 2), config=config(0))
    with pytest.raises(ValueError, match=r"colours.*optim_states"):
        engine.offload_states(["colours"])
    engine.destroy()


# synced ------------------------------------------------------------------------------------------


def uneven(comm: Any, lengths: list[int]) -> list[tuple[int, bool]]:
    return list(synced(range(lengths[comm.rank])))


def test_loops_of_different_lengths_end_together() -> None:
    first, second = POOL.run(uneven, 2, [3, 1])
    assert first == [(0, True), (1, True), (2, True)]
    assert second == [(0, True), (0, False), (0, False)]


def test_a_rank_without_any_batch_is_named_everywhere() -> None:
    with pytest.raises(RankError, match=r"rank 0: ValueError: rank 1 has no batch at all"):
        POOL.run(uneven, 2, [2, 0])
    assert POOL.run(uneven, 2, [0, 0]) == [[], []]


def test_alone_every_batch_counts() -> None:
    assert list(synced("ab")) == [("a", True), ("b", True)]


# Units -------------------------------------------------------------------------------------------


def unit_names(comm: Any, **arguments: Any) -> list[str]:
    halves = (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))
    engine, optimizer, _, _ = zero_full.initialize(
        model=nn.Sequential(*halves), config=config(3), **arguments
    )
    names = sorted(site.name for site in optimizer.gatherer.sites.values() if site.groups)
    engine.destroy()
    return names


def named_in_three_ways(comm: Any) -> list[list[str]]:
    by_function = unit_names(comm, wrap=lambda name, module: name == "1")
    leaf = config(3)
    leaf["zero_optimization"]["leaf_module"] = {"names": ["0"]}
    with mock.patch(f"{__name__}.config", lambda stage: leaf):
        by_config = unit_names(comm)
    return [unit_names(comm), by_function, by_config]


def test_units_are_chosen_by_size_unless_a_function_or_the_config_names_them() -> None:
    by_size, by_function, by_config = POOL.run(named_in_three_ways, 2)[0]
    assert by_size == ["0.0", "0.1", "1.0", "1.1"]
    assert by_function == ["0.0", "0.1", "1"]
    assert by_config == ["0", "1.0", "1.1"]
