"""Steps on a guess, beside backward: bit for bit what would have been, whatever happens in between."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_full
from tests.slow_copies import slow_copies
from tests.worlds import POOL
from tests.zero_full.runs import Net, config, data
from zero_full.assemble import shard
from zero_full.offload import HostTier

STEPS = 14
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3, "hysteresis": 1}},
}


def engine_of(stage: int, early: bool, **keys: Any) -> Any:
    torch.manual_seed(0)
    zero = {"stage": stage, "reduce_bucket_size": 150, "sub_group_size": 60}
    zero |= {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 100} if stage == 3 else {}
    zero["offload_optimizer"] = {"device": "cpu", "super_offload": early}
    return zero_full.initialize(model=Net(), config=config(stage, zero_optimization=zero, **keys))[0]


BETWEEN = ("lr", "state", "master", "weight", "")  # one step and the next
BEFORE = (*BETWEEN, "gradient", "anew", "read", "", "")  # a step and after its backward pass


def something(engine: Any, chance: random.Random, rank: int, choices: tuple[str, ...]) -> None:
    """What people do at that time; the same on all ranks."""
    weight, optimizer = engine.module.layers[0].weight, engine.optimizer
    what = chance.choice(choices)
    if what == "lr":
        optimizer.param_groups[0]["lr"] *= 0.9
    elif what == "gradient":
        zero_full.safe_set_full_grad(weight, torch.full(weight.shape, 0.01))
    elif what == "state" and engine.global_steps:
        zero_full.safe_set_full_optimizer_state(weight, torch.full(weight.shape, 0.02), "exp_avg")
    elif what == "master":
        zero_full.safe_set_full_fp32_param(weight, torch.full(weight.shape, 0.03))
    elif what == "weight":
        with zero_full.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
            weight.mul_(0.5)
    elif what == "anew":
        engine.optimizer.zero_grad()
        engine.backward(engine(data(99, 0, rank, weight.dtype)))
    elif what == "read":
        zero_full.safe_get_full_grad(weight)


def a_run(
    rank: int, stage: int, early: bool, seed: int, keys: dict[str, Any]
) -> tuple[list[Tensor], int, int]:
    """A loop with clipping, overflow and writes by hand at random; the state after it, and the guesses."""
    chance, engine = random.Random(seed), engine_of(stage, early, **keys)
    dtype = next(engine.parameters()).dtype
    for step in range(STEPS):
        overflows = chance.random() < 0.2 and bool(keys.keys() & {"bf16", "fp16"})  # else nobody looks
        for micro in range(engine.gradient_accumulation_steps()):
            x = data(step, micro, rank, dtype)
            scale = chance.choice((0.01, 1, 50))
            here = overflows and rank == 0 and micro == 0
            engine.backward(engine(x) * (float("inf") if here else scale))
            if micro + 1 == engine.gradient_accumulation_steps() and chance.random() < 0.5:
                something(engine, chance, rank, BEFORE)
            engine.step()
        if chance.random() < 0.2:
            something(engine, chance, rank, BETWEEN)
        if step == STEPS // 2:
            saved = engine.state_dict()
            engine.load_state_dict(saved)
    steps = engine.optimizer.steppers.early
    state = engine.optimizer.state_dict()["tensors"]
    found = [*engine.module_state_dict().values(), *(state[key]["values"] for key in sorted(state))]
    engine.destroy()
    return (found, 0, 0) if steps is None else (found, steps.right, steps.wrong)


def both(comm: Any, stage: int, seed: int) -> list[tuple[str, bool, int, int]]:
    """For each precision, with and without clipping: whether bits are the same; right and wrong guesses."""
    told = []
    for name, keys in PRECISIONS.items():
        for clip in (0.0, 0.05):
            more = {**keys, "gradient_clipping": clip, "gradient_accumulation_steps": 1 + seed % 2}
            with slow_copies(1e7):
                plain, none, _ = a_run(comm.rank, stage, False, seed, more)
                early, right, wrong = a_run(comm.rank, stage, True, seed, more)
            assert none == 0
            same = all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(plain, early, strict=True))
            told.append((f"{name}, clipping {clip}", same, right, wrong))
    return told


CASES = [(1, 1), (1, 2), (2, 2), (3, 3), (3, 1)]  # world, stage


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("world", "stage", "seed"),
    [
        *((world, stage, 7 * stage + world) for world, stage in CASES[:-1]),
        pytest.param(3, 1, 10, marks=pytest.mark.slow),
        *(pytest.param(w, s, seed, marks=pytest.mark.slow) for w, s in CASES for seed in range(100, 106)),
    ],
)
def test_early_steps_change_no_bit(world: int, stage: int, seed: int) -> None:
    for told in POOL.run(both, world, stage, seed):
        for name, same, _, _ in told:
            assert same, name
        assert sum(right for _, _, right, _ in told) > 0, told
        assert sum(wrong for _, _, _, wrong in told) > 0, told


# What it may cost ----------------------------------------------------------------------------------


def with_limit(most: int | None) -> tuple[list[int], int, list[Tensor]]:
    """Right guesses so far after each step, the most bytes at a time, and the parameters."""
    settings = zero_full.Settings(stage=1, bucket_numel=150, tier=HostTier(step_early=True, early_bytes=most))
    torch.manual_seed(0)
    model, found, held = Net(), [], 0
    with slow_copies(1e7):
        optimizer = shard(model, torch.optim.AdamW(model.parameters(), lr=0.01), settings)
        early = optimizer.steppers.early
        for step in range(8):
            model(data(step, 0, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(early.right)
            held = max(held, 2 * sum(each.nbytes for each in early.held()))  # as much is the slices' own
        weights = [p.detach().clone() for p in model.parameters()]
        optimizer.close(gather=False)
    return found, held, weights


def test_within_a_limit_as_many_as_have_room_are_stepped_early_again_and_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    free, most, weights = with_limit(None)
    assert free[-1] > 0 and not caplog.text
    for part in (1.0, 0.7, 0.5):
        found, held, same = with_limit(int(most * part))
        assert 0 < held <= most * part
        assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
        assert found[-1] > found[3] > 0, f"they end: {found}"
    assert not caplog.text
    found, held, same = with_limit(most // 1000)
    assert found[-1] == held == 0
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
    assert caplog.text.count(f"early_bytes of HostTier is {most // 1000:,}: layers.") == 1
