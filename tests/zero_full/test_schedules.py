"""The learning-rate schedules against closed forms, torch's schedules and themselves after a restart."""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR, StepLR

import zero_full
from tests.zero_full.runs import config
from zero_full.optim import OneCycle, Schedule, WarmupCosineLR, WarmupDecayLR, WarmupLR, build_scheduler
from zero_full.optim.schedules import OURS

STEPS = 60
RATES = (0.3, 0.07)  # of the two groups


def optimizer(kind: Any = torch.optim.AdamW, rates: tuple[float, ...] = RATES) -> Any:
    return kind([{"params": [nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates])


def trace(name: str, params: dict[str, Any]) -> list[list[float]]:
    """What each optimizer step uses; entry k is the rates after k steps of the schedule."""
    made = optimizer()
    schedule = build_scheduler(name, params, made)
    seen = []
    for _ in range(STEPS):
        seen.append([group["lr"] for group in made.param_groups])
        assert schedule.get_last_lr() == seen[-1] == schedule.get_lr()
        made.step()
        schedule.step()
    return seen


def log_warmup(k: int) -> float:
    return 0.0 if k <= 1 else min(1.0, math.log(k) / math.log(10))


def line_warmup(k: int) -> float:
    return min(1.0, max(0, k - 1) / 10)


def cosine(k: int) -> float:
    if k == 0:
        return 0.0
    if k <= 10:
        return 0.1 + 0.9 * line_warmup(k)
    along = min(1.0, (k - 10) / 40)
    return 0.02 + 0.98 * math.cos(along * math.pi / 2) ** 2


def cycle(k: int) -> float:
    if k <= 8:
        return 0.01 + 0.09 * k / 8
    return 0.01 + 0.09 * (20 - k) / 12 if k <= 20 else 0.01 / (1 + 0.5 * (k - 20) / 4)


def staircase_cycle(k: int) -> float:
    height = (k // 2) / 4 if k <= 8 else ((20 - k) // 6) / 2
    return 0.01 + 0.09 * height if k <= 20 else 0.01


# Name, parameters, and the rate of the first group after k steps of the schedule.
CASES: list[tuple[str, dict[str, Any], Callable[[int], float]]] = [
    ("LRRangeTest", {}, lambda k: 1e-3 * (1 + k / 2000)),
    (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": 0.1,
            "lr_range_test_step_size": 7,
            "lr_range_test_step_rate": 0.5,
            "lr_range_test_staircase": True,
        },
        lambda k: 0.1 * (1 + 0.5 * (k // 7)),
    ),
    ("WarmupLR", {"warmup_num_steps": 10}, lambda k: 0.3 * log_warmup(k)),
    (
        "WarmupLR",
        {"warmup_min_lr": 0.1, "warmup_max_lr": 0.2, "warmup_num_steps": 10, "warmup_type": "linear"},
        lambda k: 0.1 + 0.1 * line_warmup(k),
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 50, "warmup_num_steps": 10},
        lambda k: 0.001 * (log_warmup(k) if k <= 10 else max(0.0, (51 - k) / 40)),
    ),
    (
        "WarmupCosineLR",
        {
            "total_num_steps": 50,
            "warmup_num_steps": 10,
            "warmup_type": "linear",
            "warmup_min_ratio": 0.1,
            "cos_min_ratio": 0.02,
        },
        lambda k: 0.3 * cosine(k),
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.01,
            "cycle_max_lr": 0.1,
            "cycle_first_step_size": 8,
            "cycle_second_step_size": 12,
            "decay_step_size": 4,
            "decay_lr_rate": 0.5,
        },
        cycle,
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.01,
            "cycle_max_lr": 0.1,
            "cycle_first_step_size": 8,
            "cycle_second_step_size": 12,
            "cycle_first_stair_count": 4,
            "cycle_second_stair_count": 2,
        },
        staircase_cycle,
    ),
]
IDS = [f"{name}-{i}" for i, (name, _, _) in enumerate(CASES)]


@pytest.mark.parametrize(("name", "params", "formula"), CASES, ids=IDS)
def test_each_step_uses_the_formula(
    name: str, params: dict[str, Any], formula: Callable[[int], float]
) -> None:
    got = [rates[0] for rates in trace(name, params)]
    assert got == pytest.approx([formula(k) for k in range(STEPS)], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(("name", "params", "formula"), CASES, ids=IDS)
@pytest.mark.parametrize("stop", [0, 1, 9, 25, 55])
def test_resumed_equals_uninterrupted(name: str, params: dict[str, Any], formula: Any, stop: int) -> None:
    straight = trace(name, params)
    saved = build_scheduler(name, params, optimizer())
    for _ in range(stop):
        saved.step()
    state = saved.state_dict()
    assert state == {"last_batch_iteration": stop - 1}

    made = optimizer()
    resumed = build_scheduler(name, params, made)
    resumed.load_state_dict(state)
    told = build_scheduler(name, {**params, "last_batch_iteration": stop - 1}, optimizer())
    for k in range(stop, STEPS):
        assert [group["lr"] for group in made.param_groups] == straight[k] == told.get_last_lr()
        resumed.step()
        told.step()


def test_equals_torchs_lambda_schedule_one_step_late() -> None:
    """torch writes iteration 0 when the schedule is made; here the first step of the schedule does."""
    ours, theirs = optimizer(), optimizer()
    schedule = WarmupLR(ours, warmup_num_steps=10, warmup_type="linear")
    schedule.step()
    oracle = LambdaLR(theirs, lambda it: min(1.0, it / 10))
    for _ in range(STEPS):
        assert schedule.get_last_lr() == pytest.approx(oracle.get_last_lr(), rel=1e-12, abs=0)
        theirs.step()
        schedule.step()
        oracle.step()


def test_each_group_has_its_own_rates() -> None:
    made = optimizer()
    schedule = WarmupLR(made, warmup_num_steps=4)
    schedule.step(100)
    assert schedule.get_last_lr() == list(RATES)
    assert WarmupCosineLR(optimizer(), 100, warmup_num_steps=9).lr_at(1000) == pytest.approx(
        [rate * 1e-4 for rate in RATES]
    )
    listed = WarmupDecayLR(optimizer(), 2000, warmup_min_lr=[0.1, 0.2], warmup_max_lr=[1.0, 2.0])
    assert listed.get_lr() == [0.1, 0.2]


def test_one_cycle_moves_beta1_against_the_learning_rate() -> None:
    made = optimizer()
    schedule = OneCycle(made, 0.01, 0.1, cycle_first_step_size=10, decay_step_size=5, decay_mom_rate=0.1)
    seen = []
    for _ in range(25):
        seen.append(made.param_groups[1]["betas"])
        schedule.step()
    assert {beta2 for _, beta2 in seen} == {0.99}
    rising = [0.9 - 0.1 * k / 10 for k in range(1, 11)]
    falling = [0.8 + 0.1 * k / 10 for k in range(1, 11)]
    decaying = [0.9 * (1 + 0.1 * k / 5) for k in range(1, 5)]
    assert [beta1 for beta1, _ in seen] == pytest.approx([0.8, *rising, *falling, *decaying])


def test_deepspeeds_names_for_momentum_and_ratio() -> None:
    made = optimizer()
    cycle = OneCycle(made, 0.01, 0.1, cycle_first_step_size=10)
    cosine = WarmupCosineLR(optimizer(), 50, warmup_num_steps=10)
    for _ in range(STEPS):
        cycle.step()
        cosine.step()
        assert cycle.get_mom() == [group["betas"] for group in made.param_groups]
        assert cosine.get_lr() == [rate * cosine.get_lr_ratio() for rate in RATES]


def test_momentum_that_grows_to_1_is_refused() -> None:
    schedule = OneCycle(
        optimizer(), 0.01, 0.1, cycle_first_step_size=2, decay_step_size=1, decay_mom_rate=0.05
    )
    with pytest.raises(ValueError, match=r"decay_mom_rate 0.05 .* at iteration 6"):
        for _ in range(STEPS):
            schedule.step()


def test_a_bad_rate_of_a_group_is_named() -> None:
    with pytest.raises(ValueError, match='"lr" of parameter group 1 must be a number of 0 or more, not inf'):
        WarmupLR(optimizer(torch.optim.SGD, (0.1, math.inf)))


def test_one_cycle_leaves_betas_alone_when_told() -> None:
    made = optimizer()
    schedule = OneCycle(made, 0.01, 0.1, cycle_momentum=False)
    assert schedule.get_mom() is None
    schedule.step()
    assert made.param_groups[0]["betas"] == (0.9, 0.999)


def test_one_cycle_says_when_there_are_no_betas() -> None:
    with pytest.warns(UserWarning, match="SGD has no betas.*cycle_momentum"):
        OneCycle(optimizer(torch.optim.SGD), 0.01, 0.1).step()


def test_a_rate_that_is_a_tensor_stays_that_tensor() -> None:
    rate = torch.tensor(0.5)
    made = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=rate)
    schedule = WarmupLR(made, warmup_num_steps=2)
    assert made.param_groups[0]["lr"] is rate and rate == 0
    schedule.step(5)
    assert rate == 0.5


def test_a_warmup_of_no_steps_is_one_of_two() -> None:
    assert [rates[0] for rates in trace("WarmupLR", {"warmup_num_steps": 0})][:4] == [0.0, 0.0, 0.3, 0.3]


def test_whole_floats_of_a_json_file_are_whole_numbers() -> None:
    assert trace("WarmupLR", {"warmup_num_steps": 1e1}) == trace("WarmupLR", {"warmup_num_steps": 10})


def test_a_schedule_that_ends_inside_its_warmup_is_told() -> None:
    with pytest.warns(UserWarning, match="total_num_steps 5 is less than warmup_num_steps 10"):
        WarmupDecayLR(optimizer(), 5, warmup_num_steps=10)


BAD = [
    ("WarmupLR", {"warmup_type": "cubic"}, "warmup_type must be 'log' or 'linear', not 'cubic'"),
    ("WarmupLR", {"warmup_num_steps": -1}, "warmup_num_steps must be a whole number of at least 0"),
    ("WarmupLR", {"warmup_num_steps": 2.5}, "warmup_num_steps must be a whole number"),
    ("WarmupLR", {"warmup_num_steps": "auto"}, "warmup_num_steps must be a whole number.*'auto'"),
    ("WarmupLR", {"warmup_max_lr": "auto"}, "warmup_max_lr must be a number.*'auto'"),
    ("WarmupLR", {"warmup_max_lr": [1.0]}, "warmup_max_lr lists 1 values for 2 parameter groups"),
    ("WarmupLR", {"warmup_num_step": 3}, r"scheduler\.params\.warmup_num_step: .*mean warmup_num_steps"),
    ("WarmupDecayLR", {}, r"scheduler\.params\.total_num_steps is missing"),
    ("WarmupDecayLR", {"total_num_steps": 0}, "total_num_steps must be a whole number of at least 1"),
    ("OneCycle", {"cycle_min_lr": 0.1}, r"scheduler\.params\.cycle_max_lr is missing"),
    ("OneCycle", {"cycle_min_lr": 1, "cycle_max_lr": 2, "cycle_first_step_size": 0}, "cycle_first_step_size"),
    ("OneCycle", {"cycle_min_lr": 1, "cycle_max_lr": 2, "optimizer": 3}, r"params\.optimizer: OneCycle"),
    ("LRRangeTest", {"lr_range_test_step_size": 0}, "lr_range_test_step_size"),
    ("StepLR", {"step_sise": 3}, "did you mean step_size"),
    ("StepLR", {"step_size": 0}, r"params: StepLR\(step_size=0\) cannot be stepped: ZeroDivisionError"),
    ("ExponentialLR", {"gamma": math.nan}, r"scheduler\.params\.gamma must be a number, not nan"),
    ("LambdaLR", {"lr_lambda": lambda it: math.nan}, "stepped: ValueError: the learning rate becomes nan"),
    ("StepLR", {"step_size": 99, "gamma": None}, r"scheduler\.params\.gamma must be a number, not None"),
    (
        "CyclicLR",
        {"base_lr": 0.1, "max_lr": 1, "max_momentum": 1.0},
        "max_momentum must be a number from 0 up",
    ),
    ("ReduceLROnPlateau", {}, "cannot be stepped: TypeError: .*metrics"),
    ("WarmupLR", {"warmup_num_steps": 1e30}, "warmup_num_steps must be a whole number of at most 10000"),
    ("WarmupLR", {"warmup_min_lr": math.nan}, "warmup_min_lr must be a number of 0 or more, not nan"),
    (
        "WarmupLR",
        {"warmup_max_lr": [0.1, -1.0]},
        r"warmup_max_lr\[1\] must be a number of 0 or more, not -1.0",
    ),
    ("WarmupLR", {"last_batch_iteration": -2}, "last_batch_iteration must be a whole number of at least -1"),
    (
        "WarmupDecayLR",
        {"total_num_steps": 9, "warmup_num_steps": "9"},
        "warmup_num_steps must be a whole num",
    ),
    ("WarmupCosineLR", {"total_num_steps": 5000, "cos_min_ratio": "x"}, "cos_min_ratio must be a number"),
    ("LRRangeTest", {"lr_range_test_step_rate": -1}, "lr_range_test_step_rate must be a number of 0 or more"),
    ("LRRangeTest", {"lr_range_test_staircase": "no"}, "lr_range_test_staircase must be true or false"),
    ("OneCycle", {"cycle_min_lr": 1, "cycle_max_lr": 2, "decay_lr_rate": -1}, "decay_lr_rate must be a num"),
    (
        "OneCycle",
        {"cycle_min_lr": 1, "cycle_max_lr": 2, "cycle_max_mom": 1},
        "cycle_max_mom must be a number",
    ),
    (3, {}, "scheduler.type must be the name of a schedule, not 3"),
    ("warmuplr", {}, r"scheduler\.type: .*'warmuplr'; did you mean WarmupLR\?"),
    ("LRScheduler", {}, r"scheduler\.type"),
    (
        "zzz",
        {},
        "there are LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR and those of torch",
    ),
]


@pytest.mark.parametrize(("name", "params", "message"), BAD)
def test_mistakes_name_the_key_and_the_remedy(name: str, params: dict[str, Any], message: str) -> None:
    made = optimizer()
    with pytest.raises(ValueError, match=message):
        build_scheduler(name, params, made)
    assert [group["lr"] for group in made.param_groups] == list(RATES), "a refused schedule wrote something"


def test_the_state_of_another_kind_of_schedule_is_refused() -> None:
    other = StepLR(optimizer(), 3).state_dict()
    with pytest.raises(ValueError, match=r"WarmupLR must have last_batch_iteration.*last_epoch"):
        WarmupLR(optimizer()).load_state_dict(other)


def test_a_group_added_afterwards_is_refused() -> None:
    made = optimizer()
    schedule = WarmupLR(made)
    made.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(ValueError, match=r"made for 2 parameter groups.* has 3"):
        schedule.step()


def test_torchs_schedules_come_by_name() -> None:
    made = build_scheduler("StepLR", {"step_size": 3, "gamma": 0.5}, optimizer())
    assert isinstance(made, StepLR) and made.step_size == 3
    short = optimizer(torch.optim.SGD)
    made = build_scheduler("OneCycleLR", {"max_lr": [1.0, 2.0], "total_steps": 1, "cycle_momentum": 0}, short)
    short.step()
    made.step()


def test_those_of_a_momentum_move_the_rates_of_muon_only_and_want_to_be_told() -> None:
    params: dict[str, Any] = {"max_lr": 0.4, "total_steps": 90}

    def engine() -> Any:
        chosen = {"type": "Muon", "params": {"momentum": 0.8}}
        keys = config(0, optimizer=chosen, scheduler={"type": "OneCycleLR", "params": params})
        return zero_full.initialize(model=nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), config=keys)[0]

    with pytest.raises(ValueError, match=r"params: OneCycleLR.* cannot be stepped: .*cycle_momentum"):
        engine()
    params["cycle_momentum"] = False
    made, seen = engine(), []
    for _ in range(4):
        made.backward(made(torch.ones(2, 4)).square().sum())
        made.step()
        seen.append(made.get_lr()[0])
    assert seen == sorted(seen) and seen[0] < seen[-1]
    copied = copy.deepcopy(made.optimizer.base)
    copied.add_param_group({"params": [nn.Parameter(torch.ones(3, 3))], "use_muon": True})
    assert [group.get("momentum") for group in copied.param_groups] == [0.8, None, 0.8]
    for used in (made.optimizer, copied):
        for kind in (OneCycleLR, CyclicLR):
            with pytest.raises(ValueError, match="cycle_momentum"):
                kind(used, 0.1, 10)


def test_the_factory_knows_ours_by_their_names() -> None:
    required = {"total_num_steps": 2000, "cycle_min_lr": 0.1, "cycle_max_lr": 0.2}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, kind in OURS.items():
            keys = [key for key in required if key.startswith("cycle") == (name == "OneCycle")]
            params = {key: required[key] for key in keys} if name not in ("WarmupLR", "LRRangeTest") else {}
            assert type(build_scheduler(name, params, optimizer())) is kind
            assert issubclass(kind, Schedule)
