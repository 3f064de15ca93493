"""1-bit and 0/1 Adam in the hands of people: schedules, frozen parameters, other options at a load."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL
from tests.zero_full.runs import config, said_by

ZERO_ONE = {"lr": 0.02, "var_freeze_step": 6, "local_step_scaler": 2, "local_step_clipper": 4}
KINDS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"lr": 0.02, "freeze_step": 6},
    "OneBitLamb": {"lr": 0.02, "freeze_step": 6},
    "ZeroOneAdam": ZERO_ONE,
}


class Two(nn.Module):
    """A loss that every rank's data pull elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(x))) - x
        return out.square().mean()


def engine_of(kind: str, **options: Any) -> Any:
    chosen = {"type": kind, "params": {**KINDS[kind], **options}}
    return zero_full.initialize(model=Two(), config=config(0, optimizer=chosen))[0]


def train(engine: Any, rank: int, steps: range, lr: float | None = None) -> float:
    for step in steps:
        if lr is not None:
            engine.optimizer.param_groups[0]["lr"] = lr
        generator = torch.Generator().manual_seed(100 * step + rank)
        loss = engine(torch.randn(8, 6, generator=generator))
        engine.backward(loss)
        engine.step()
    return float(loss.detach())


def momenta(engine: Any) -> list[Tensor]:
    state = engine.optimizer.base.state
    return [each["exp_avg"].clone() for each in state.values()]


def everyones(mine: Tensor) -> list[Tensor]:
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return found


def with_rates(comm: Any, folder: Path) -> tuple[float, bool, bool]:
    """By how much momenta grow when the rate falls; whether they are common after rates of zero."""
    engine = engine_of("ZeroOneAdam")
    train(engine, comm.rank, range(30))
    engine.optimizer.meet()
    before = torch.cat([m.flatten() for m in momenta(engine)]).norm()
    train(engine, comm.rank, range(30, 42), lr=2e-4)
    engine.optimizer.meet()
    after = torch.cat([m.flatten() for m in momenta(engine)]).norm()
    train(engine, comm.rank, range(42, 47), lr=0.0)
    engine.optimizer.meet()
    mine = torch.cat([m.flatten() for m in momenta(engine)])
    alike = all(torch.equal(each, mine) for each in everyones(mine))
    train(engine, comm.rank, range(47, 50), lr=0.0)
    engine.save_checkpoint(folder, "zero")
    other = engine_of("ZeroOneAdam")
    other.load_checkpoint(folder, "zero")
    for each in (engine, other):
        train(each, comm.rank, range(50, 60), lr=0.01)
    same = zip(engine.module.parameters(), other.module.parameters(), strict=True)
    return float(after / before), alike, all(torch.equal(one, two) for one, two in same)


def test_the_momentum_stays_what_it_is_when_the_rate_falls_or_is_zero(tmp_path: Path) -> None:
    for grown, alike, resumed in POOL.run(with_rates, 2, tmp_path):
        assert grown < 3  # and not a hundred times
        assert alike and resumed


APART = ("fp32", "state", "set state", "set own state", "set fp32", "set own fp32", "gather")


def with_early_meetings(comm: Any, folder: Path) -> list[float]:
    """By how much momenta grow when somebody meets after one step of 16; when intervals become shorter."""
    engine = engine_of("ZeroOneAdam", local_step_clipper=16)
    train(engine, comm.rank, range(160))
    usual = torch.cat([m.flatten() for m in momenta(engine)]).norm()
    engine.save_checkpoint(folder)
    train(engine, comm.rank, range(160, 161))
    engine.optimizer.meet()
    grown = [float(torch.cat([m.flatten() for m in momenta(engine)]).norm() / usual)]
    engine = engine_of("ZeroOneAdam", local_step_clipper=1)
    engine.load_checkpoint(folder)
    train(engine, comm.rank, range(160, 161))
    return [*grown, float(torch.cat([m.flatten() for m in momenta(engine)]).norm() / usual)]


def test_the_momentum_stays_what_it_is_when_a_walk_is_cut_short(tmp_path: Path) -> None:
    for grown in POOL.run(with_early_meetings, 2, tmp_path):
        assert max(grown) < 3, grown  # and not sixteen times


def told(comm: Any, folder: Path) -> dict[str, str]:
    found = {}
    for kind in KINDS:
        for steps in (3, 9):
            engine = engine_of(kind)
            train(engine, comm.rank, range(steps))
            engine.module.a.weight.requires_grad_(False)
            found[f"{kind} frozen at {steps}"] = said_by(lambda e=engine: train(e, comm.rank, range(1)))
        engine = engine_of(kind)
        train(engine, comm.rank, range(9))
        engine.save_checkpoint(folder, kind)
        name = "var_freeze_step" if kind == "ZeroOneAdam" else "freeze_step"
        later = engine_of(kind, **{name: 20})
        found[f"{kind} later"] = said_by(lambda e=later, k=kind: e.load_checkpoint(folder, k))
    weight = engine.module.a.weight
    assert engine.optimizer.contents.stepper.ranks_differ
    value = weight.detach().clone()
    for name, call in (
        ("fp32", lambda: zero_full.safe_get_full_fp32_param(weight)),
        ("state", lambda: zero_full.safe_get_full_optimizer_state(weight, "exp_avg")),
        ("set state", lambda: zero_full.safe_set_full_optimizer_state(weight, value, "exp_avg")),
        ("set own state", lambda: zero_full.safe_set_local_optimizer_state(weight, value, "exp_avg")),
        ("set fp32", lambda: zero_full.safe_set_full_fp32_param(weight, value)),
        ("set own fp32", lambda: zero_full.safe_set_local_fp32_param(weight, value)),
        ("gather", lambda: zero_full.GatheredParameters(weight).__enter__()),
    ):
        found[name] = said_by(call)
    return found


def test_what_they_would_do_without_a_word_is_refused(tmp_path: Path) -> None:
    for found in POOL.run(told, 2, tmp_path):
        for kind in KINDS:
            for steps in (3, 9):
                assert "a.weight was frozen after it was trained" in found[f"{kind} frozen at {steps}"]
            assert f"{kind} had frozen its variance after 6 steps" in found[f"{kind} later"]
        for name in APART:
            assert "Call meet()" in found[name], name


def with_other_scales(comm: Any, folder: Path) -> list[str]:
    """What a load says, of two optimizers: LAMB's errors are in other units then, Adam's are not."""
    said = []
    for kind in ("OneBitLamb", "OneBitAdam"):
        engine, other = engine_of(kind), engine_of(kind, per_tensor_scales=False)
        train(engine, comm.rank, range(9))
        engine.save_checkpoint(folder, kind)
        said.append(said_by(lambda other=other, kind=kind: other.load_checkpoint(folder, kind)))
    other = engine_of("OneBitLamb", per_tensor_scales=False)
    other.load_checkpoint(folder, "OneBitLamb", drop_errors=True)
    train(other, comm.rank, range(9, 12))
    return said


def test_errors_in_other_units_are_refused(tmp_path: Path) -> None:
    for lamb, adam in POOL.run(with_other_scales, 2, tmp_path):
        assert "per_tensor_scales" in lamb and "drop_errors=True" in lamb
        assert adam == "nothing was said"


def as_copied(comm: Any, kind: str) -> list[Tensor]:
    """Parameters after steps of a copy of model and optimizer, and of what comes out of a pickle."""
    found = []
    for copied in (copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))):
        model = Two()
        model, optimizer = copied((model, getattr(zero_full, kind)(model.parameters(), **KINDS[kind])))
        engine = zero_full.initialize(model=model, optimizer=optimizer, config=config(0, optimizer=None))[0]
        train(engine, comm.rank, range(9))
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    engine = engine_of(kind)
    train(engine, comm.rank, range(9))
    return [*found, torch.cat([p.detach().flatten() for p in engine.module.parameters()])]


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_steps_as_the_original(kind: str) -> None:
    for copied, pickled, plain in POOL.run(as_copied, 2, kind):
        assert torch.equal(copied, plain) and torch.equal(pickled, plain)


MASK = [torch.ones(8, 6), None, None, None]
EDITED: list[tuple[str, Any, str]] = [
    ("max_grad_norm", 1.0, "gradient_clipping"),
    ("amsgrad", True, "amsgrad cannot be True"),
    ("freeze_step", 20, "freeze_step is an option of the whole model"),
    ("exp_avg_mask", [None], "exp_avg_mask must be a list .* 4 parameters"),
    ("exp_avg_mask", MASK, "exp_avg_mask of parameter group 0 was changed"),
]


@pytest.mark.parametrize(("name", "value", "reason"), EDITED)
def test_options_that_would_have_no_effect_are_refused(name: str, value: Any, reason: str) -> None:
    for steps in (3, 9):
        engine = engine_of("OneBitAdam")
        train(engine, 0, range(steps))
        engine.optimizer.param_groups[0][name] = value
        if value is MASK and steps == 3:
            train(engine, 0, range(steps, 9))  # in time
        else:
            with pytest.raises((ValueError, RuntimeError), match=reason if steps == 3 else name):
                train(engine, 0, range(1))
    if value is not MASK and "mask" not in name:
        with pytest.raises(ValueError, match=reason):
            zero_full.OneBitAdam([{"params": [nn.Parameter(torch.ones(2))], name: value}])
    with pytest.raises(TypeError):
        engine.optimizer.base.model_options["freeze_step"] = 20


def with_masks(comm: Any, folder: Path) -> str:
    def made(masked: bool) -> Any:
        model = Two()
        mask = [torch.ones(8, 6), *[None] * 3]
        mask[0][2] = 0
        groups = [{"params": list(model.parameters()), **({"exp_avg_mask": mask} if masked else {})}]
        optimizer = zero_full.OneBitAdam(groups, **KINDS["OneBitAdam"])
        return zero_full.initialize(model=model, optimizer=optimizer, config=config(0, optimizer=None))[0]

    engine = made(True)
    train(engine, comm.rank, range(9))
    engine.save_checkpoint(folder, "masked")
    return said_by(lambda: made(False).load_checkpoint(folder, "masked"))


def test_errors_under_another_mask_are_refused(tmp_path: Path) -> None:
    for said in POOL.run(with_masks, 2, tmp_path):
        assert "another exp_avg_mask" in said and "Nothing was loaded" in said


@pytest.mark.parametrize("kind", KINDS)
def test_before_its_second_phase_the_length_of_the_first_may_change(kind: str, tmp_path: Path) -> None:
    engine = engine_of(kind)
    train(engine, 0, range(3))
    engine.save_checkpoint(tmp_path)
    name = "var_freeze_step" if kind == "ZeroOneAdam" else "freeze_step"
    later = engine_of(kind, **{name: 20})
    later.load_checkpoint(tmp_path)
    train(later, 0, range(3, 12))
    assert not later.optimizer.contents.stepper.ranks_differ
