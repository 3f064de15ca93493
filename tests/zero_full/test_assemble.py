"""`assemble.shard`: the typed way in does what `initialize` does with the same choices, and says no."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL
from tests.zero_full.runs import Net, assert_close, assert_same, config, data, reference, said_by
from zero_full.assemble import SWITCH, shard
from zero_full.offload import HostTier
from zero_full.precision import Dtypes, StaticScale
from zero_full.settings import Gathering, Settings

STAGES = [0, 1, 2, 3]
TYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
CUT = Gathering(keep_numel=0, max_live=100)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def settings_of(stage: int, precision: str) -> Settings:
    return Settings(stage, Dtypes(TYPES[precision]), bucket_numel=100, gathering=CUT, overlap=stage == 3)


def typed(comm: Any, way: str) -> dict[str, dict[str, Tensor]]:
    """Parameters by stage and precision, with a plain loop."""
    found = {}
    for stage in STAGES:
        for precision, dtype in TYPES.items():
            model, fp16 = Net(), precision == "fp16"
            settings = settings_of(stage, precision)
            if way == "host" and stage:
                settings = replace(settings, tier=HostTier())
            scaler = StaticScale(2.0**10) if fp16 else None
            optimizer = shard(model, adamw(model), settings, scaler=scaler)
            for step in range(3):
                loss = model(data(step, 0, comm.rank, dtype or torch.float32))
                (optimizer.scale(loss) if fp16 and step else loss).backward()
                optimizer.step()
                optimizer.zero_grad()
                assert optimizer.last is not None and optimizer.last.applied
            with zero_full.GatheredParameters(list(model.parameters())):
                key = f"stage {stage}, {precision}"
                found[key] = {name: p.detach().clone() for name, p in model.named_parameters()}
            optimizer.close(gather=False)
    return found


def from_a_file(comm: Any) -> dict[str, dict[str, Tensor]]:
    found = {}
    for stage in STAGES:
        for precision in TYPES:
            zero = {
                "stage": stage,
                "stage3_param_persistence_threshold": 0,
                "stage3_max_live_parameters": 100,
            }
            keys: dict[str, Any] = {"zero_optimization": {"stage": stage, **zero}}
            if precision != "fp32":
                keys[precision] = {"enabled": True}
            if precision == "fp16":
                keys[precision]["loss_scale"] = 2.0**10
            engine, *_ = zero_full.initialize(model=Net(), config=config(stage, **keys))
            for step in range(3):
                engine.backward(engine(data(step, 0, comm.rank, TYPES[precision] or torch.float32)))
                engine.step()
            found[f"stage {stage}, {precision}"] = engine.module_state_dict()
            engine.destroy()
    return found


@pytest.mark.rotates
@pytest.mark.parametrize("way", ["beside", "host"])
@pytest.mark.parametrize("world", [1, 3])
def test_a_plain_loop_is_the_engines(world: int, way: str) -> None:
    for mine, theirs in zip(POOL.run(typed, world, way), POOL.run(from_a_file, world), strict=True):
        for key, want in theirs.items():
            assert_same(mine[key], want)
    assert_close(mine["stage 2, fp32"], reference(world, 3))


def accumulated(comm: Any, stage: int, divisor: float) -> dict[str, Tensor]:
    model = Net()
    optimizer = shard(
        model, adamw(model), replace(settings_of(stage, "fp32"), plain_divisor=divisor, clip=0.1)
    )
    for step in range(4):
        for micro in range(2):
            (model(data(step, micro, comm.rank)) * divisor / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    with zero_full.GatheredParameters(list(model.parameters())):
        found = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.close(gather=False)
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_several_passes_add_up_until_the_step(stage: int) -> None:
    want = reference(2, micro_batches=2, clip=0.1)
    for divisor in (1.0, 2.0):
        for got in POOL.run(accumulated, 2, stage, divisor):
            assert_close(got, want)


def served(comm: Any) -> tuple[Tensor, str]:
    """The loss; and what is said when nobody has kept what `shard` returned."""
    model = Net()
    optimizer = shard(model, None, settings_of(3, "fp32"))
    with torch.no_grad():
        loss = model(data(0, 0, 0))
        del optimizer
        gc.collect()
        try:
            model(data(0, 0, 0))
        except RuntimeError as error:
            return loss, str(error)
    return loss, "nothing was said"


def test_without_an_optimizer_the_model_serves() -> None:
    for loss, said in POOL.run(served, 2):
        torch.testing.assert_close(loss, Net()(data(0, 0, 0)).detach())
        assert "as long as the model is used" in said


# Mistakes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Settings(stage=4), "stage must be 0, 1, 2 or 3, not 4"),
        (lambda: Settings(bucket_numel=0), "bucket_numel must be above 0"),
        (lambda: Settings(clip=float("nan")), "clip must be a finite norm"),
        (lambda: Settings(stage=0, tier=HostTier()), "tier: stage 0"),
        (lambda: shard(Net(), adamw(Net()), Settings()), "none of this model's parameters"),
        (lambda: shard(adamw(Net()), adamw(Net())), "model must be an nn.Module"),  # type: ignore[arg-type]
    ],
)
def test_a_mistake_is_told(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_under_a_launcher_ranks_do_not_train_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    model = Net()
    with pytest.raises(RuntimeError, match="WORLD_SIZE"):
        shard(model, adamw(model))


def differs(comm: Any, how: str) -> str:
    model = Net()
    settings = Settings(stage=2, clip=0.1 * comm.rank) if how == "clip" else Settings(stage=2)
    if how == "raises" and comm.rank == 1:
        model.layers[0] = nn.LazyLinear(13)  # type: ignore[assignment]
    return said_by(lambda: shard(model, adamw(model), settings))


def test_ranks_that_differ_hear_of_it_together() -> None:
    for said in POOL.run(differs, 2, "clip"):
        assert "settings.clip" in said and "on rank 0" in said
    first, second = POOL.run(differs, 2, "raises")
    assert "failed on rank 1" in first and "has no shape yet" in second


def half_precision_without_scale(comm: Any) -> str:
    """Gradients that bypass the model's gate."""
    model = Net()
    optimizer = shard(model, adamw(model), settings_of(2, "fp16"))
    try:
        model.layers(data(0, 0, comm.rank, torch.float16)).float().square().mean().backward()
    except RuntimeError as error:
        return str(error)
    finally:
        optimizer.close(gather=False)
    return "nothing was said"


def test_fp16_gradients_without_a_loss_scale_are_an_error() -> None:
    for said in POOL.run(half_precision_without_scale, 2):
        assert "optimizer.scale(loss).backward()" in said


# Without batch sizes -----------------------------------------------------------------------------


def without_batch_sizes(comm: Any, stage: int) -> tuple[dict[str, Tensor], Any, str]:
    keys = config(stage)
    del keys["train_micro_batch_size_per_gpu"]
    engine, *_ = zero_full.initialize(model=Net(), config=keys)
    for step in range(4):
        engine.backward(engine(data(step, 0, comm.rank)))
        engine.step()
    try:
        said = str(engine.train_batch_size())
    except RuntimeError as error:
        said = str(error)
    got, samples = engine.module_state_dict(), engine.global_samples
    engine.destroy()
    return got, samples, said


def test_a_loop_that_brings_its_own_batches_needs_no_batch_size() -> None:
    for got, samples, said in POOL.run(without_batch_sizes, 2, 2):
        assert_close(got, reference(2))
        assert samples is None and "set train_micro_batch_size_per_gpu" in said


def test_a_loader_needs_one() -> None:
    keys = config(1)
    del keys["train_micro_batch_size_per_gpu"]
    with pytest.raises(zero_full.ConfigError, match="training_data needs a batch size"):
        zero_full.initialize(model=Net(), config=keys, training_data=[torch.zeros(16)])


# Shared memory -----------------------------------------------------------------------------------


def by_which(comm: Any, off: str) -> tuple[list[str], dict[str, Tensor]]:
    """The transports in use, with the switch off in nothing, the settings, or one rank's environment."""
    import os

    model = Net()
    if off == "environment" and comm.rank == 1:
        os.environ[SWITCH] = "off"
    try:
        settings = replace(settings_of(3, "fp32"), shared_memory=off != "settings")
        optimizer = shard(model, adamw(model), settings)
    finally:
        os.environ.pop(SWITCH, None)
    for step in range(2):
        model(data(step, 0, comm.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    names = [c.transport.name for c in optimizer.communicators.all if c.transport is not None]
    with zero_full.GatheredParameters(list(model.parameters())):
        found = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.close(gather=False)
    return names, found


def test_shared_memory_can_be_switched_off_and_changes_no_bit() -> None:
    shared = POOL.run(by_which, 2, "nothing")
    assert all(name == "shared memory" for names, _ in shared for name in names)
    for off in ("settings", "environment"):  # of one rank: then all send messages
        for (names, mine), (_, want) in zip(POOL.run(by_which, 2, off), shared, strict=True):
            assert names and all(name == "exchange" for name in names)
            assert_same(mine, want)


def test_a_switch_that_says_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "perhaps")
    model = Net()
    with pytest.raises(ValueError, match="set it to on or off"):
        shard(model, adamw(model))
