"""Learning-rate schedules: DeepSpeed's five, and torch's by their names.

A schedule is stepped after an optimizer step that was applied, so the *second* optimizer step uses the rate
of iteration 0. The first one uses the rate that the constructor writes, that of iteration -1: the lower end
of a warm-up, a cycle or a range test. A step skipped for overflow does not advance the schedule.

[Note: torch's schedules] Their constructors check few arguments, so a mistake shows when the schedule is
stepped: after the first optimizer step, after a thousand, or never. So arguments are checked here, and the
schedule is stepped once with a dummy optimizer.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from zero_full.formatting import shown
from zero_full.optim.arguments import (
    BELOW_1,
    LARGEST,
    as_call,
    at_least,
    check_signature,
    checked_options,
    classes_in,
    finite_number,
    flag,
    nearest,
)

Rates = float | list[float] | tuple[float, ...]  # one for all parameter groups, or one for each
BETA2_OF_ONE_CYCLE = 0.99

COMPOSITE = ("ChainedScheduler", "SequentialLR")  # their schedules are of another optimizer than the dummy


def warmup_gain(it: int, steps: int, kind: str) -> float:
    """Return the gain of a warm-up: from 0 to 1 during `steps` iterations, logarithmic or linear; then 1."""
    if it < 0:
        return 0.0
    if it >= steps:
        return 1.0
    return math.log(it + 1) / math.log(steps) if kind == "log" else it / steps


class Schedule:
    """Writes `lr_at(iteration)` into an optimizer's parameter groups, one step at a time."""

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = at_least("last_batch_iteration", last_batch_iteration, -1)
        self._last_lr: list[float] = []
        self._write()

    def lr_at(self, it: int) -> list[float]:
        """Return the learning rate of each parameter group after `it` + 1 steps of the schedule."""
        raise NotImplementedError

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group at the present iteration."""
        return self.lr_at(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """Return the learning rates that were last written, one per parameter group."""
        return list(self._last_lr)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance to the next iteration, or to the given one, and write its learning rates."""
        following = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self.last_batch_iteration = at_least("last_batch_iteration", following, -1)
        self._write()

    def state_dict(self) -> dict[str, int]:
        """Return the present iteration. Options are not saved: the configuration has them."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state_dict`, and write the learning rates at once."""
        if "last_batch_iteration" not in state:
            raise ValueError(
                f"the state of a {type(self).__name__} must have last_batch_iteration, and this one has "
                f"{', '.join(state) or 'nothing'}. Load it into a schedule of the class that saved it"
            )
        self.last_batch_iteration = at_least("last_batch_iteration", state["last_batch_iteration"], -1)
        self._write()

    def _write(self) -> None:
        groups, rates = self.optimizer.param_groups, self.get_lr()
        if len(groups) != len(rates):
            raise ValueError(
                f"{type(self).__name__} was made for {len(rates)} parameter groups, and the optimizer has "
                f"{len(groups)}. Make the schedule after the last add_param_group"
            )
        for group, rate in zip(groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)  # compiled and captured steps hold on to this tensor
            else:
                group["lr"] = rate
        self._last_lr = rates


class LRRangeTest(Schedule):
    """A learning rate that grows without end, to find the one at which training diverges."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = _per_group(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self.size = at_least("lr_range_test_step_size", lr_range_test_step_size, 1)
        self.rate = float(finite_number("lr_range_test_step_rate", lr_range_test_step_rate))
        self.staircase = flag("lr_range_test_staircase", lr_range_test_staircase)
        super().__init__(optimizer, last_batch_iteration)

    def lr_at(self, it: int) -> list[float]:
        """Return the lower end of each group times a factor that grows by `rate` every `size` iterations."""
        intervals = (it + 1) / self.size
        gain = 1 + self.rate * (math.floor(intervals) if self.staircase else intervals)
        return [low * gain for low in self.min_lrs]


class WarmupLR(Schedule):
    """A warm-up from `warmup_min_lr` to `warmup_max_lr` (None: each group's own rate); then constant."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        top: Rates = _own_rates(optimizer) if warmup_max_lr is None else warmup_max_lr
        self.min_lrs = _per_group(optimizer, "warmup_min_lr", warmup_min_lr)
        self.max_lrs = _per_group(optimizer, "warmup_max_lr", top)
        self.warmup_steps, self.warmup_type = _warmup(warmup_num_steps, warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def gain(self, it: int) -> float:
        """Return the position between the lower end, 0, and the upper end, 1."""
        return warmup_gain(it, self.warmup_steps, self.warmup_type)

    def lr_at(self, it: int) -> list[float]:
        """Return the learning rates between the two ends, by `gain`."""
        gain = self.gain(it)
        return [low + (high - low) * gain for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]


class WarmupDecayLR(WarmupLR):
    """A warm-up, then a linear decay to `warmup_min_lr` at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_steps = _total(total_num_steps, warmup_num_steps)
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration
        )

    def gain(self, it: int) -> float:
        """Return the position between the ends: up to 1, then down to 0."""
        if it < self.warmup_steps:
            return super().gain(it)
        return max(0.0, (self.total_steps - it) / max(1.0, self.total_steps - self.warmup_steps))


class WarmupCosineLR(Schedule):
    """A factor on each group's own rate: a warm-up to 1, then a cosine decay to `cos_min_ratio`.

    As in DeepSpeed, the first optimizer step has a rate of 0, regardless of `warmup_min_ratio`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.base_lrs = _own_rates(optimizer)
        self.total_steps = _total(total_num_steps, warmup_num_steps)
        self.warmup_steps, self.warmup_type = _warmup(warmup_num_steps, warmup_type)
        self.warmup_min_ratio = float(finite_number("warmup_min_ratio", warmup_min_ratio))
        self.cos_min_ratio = float(finite_number("cos_min_ratio", cos_min_ratio))
        super().__init__(optimizer, last_batch_iteration)

    def ratio(self, it: int) -> float:
        """Return the factor on each group's own rate. The cosine begins with the warm-up's last iteration."""
        if it < 0:
            return 0.0
        start, floor = self.warmup_steps, self.cos_min_ratio
        if it < start:
            gain = warmup_gain(it, start, self.warmup_type)
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * gain
        progress = min(1.0, (it - start + 1) / max(1, self.total_steps - start))
        return max(0.0, floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)

    def get_lr_ratio(self) -> float:
        """Return the present `ratio`, under DeepSpeed's name."""
        return self.ratio(self.last_batch_iteration)

    def lr_at(self, it: int) -> list[float]:
        """Return each group's own rate times `ratio`."""
        ratio = self.ratio(it)
        return [base * ratio for base in self.base_lrs]


@dataclass(eq=False, repr=False)  # in place of an __init__ with fourteen arguments
class OneCycle(Schedule):
    """A cycle up to `cycle_max_lr` and back, while beta1 goes down and back; then both decay.

    As in DeepSpeed, beta2 is 0.99 throughout, and the first optimizer step has `cycle_min_mom`. Betas do not
    change if `cycle_momentum` is false or the optimizer has none. Without `decay_step_size` nothing decays.
    """

    optimizer: Optimizer
    cycle_min_lr: Rates
    cycle_max_lr: Rates
    decay_lr_rate: float = 0.0
    cycle_first_step_size: int = 2000
    cycle_second_step_size: int | None = None  # None: as long as the first
    cycle_first_stair_count: int = 0  # 0: no stairs
    cycle_second_stair_count: int | None = None  # None: as many as in the first half
    decay_step_size: int = 0
    cycle_momentum: bool = True
    cycle_min_mom: Rates = 0.8
    cycle_max_mom: Rates = 0.9
    decay_mom_rate: float = 0.0
    last_batch_iteration: int = -1

    def __post_init__(self) -> None:
        second, stairs = self.cycle_second_step_size, self.cycle_second_stair_count
        self.first = at_least("cycle_first_step_size", self.cycle_first_step_size, 1)
        self.second = self.first if second is None else at_least("cycle_second_step_size", second, 0)
        first_stairs = at_least("cycle_first_stair_count", self.cycle_first_stair_count, 0)
        second_stairs = first_stairs if stairs is None else at_least("cycle_second_stair_count", stairs, 0)
        self.stairs = first_stairs, second_stairs
        self.decay_every = at_least("decay_step_size", self.decay_step_size, 0)
        self.decay_lr_rate = float(finite_number("decay_lr_rate", self.decay_lr_rate))
        self.decay_mom_rate = float(finite_number("decay_mom_rate", self.decay_mom_rate))
        self.lrs = self._pairs("cycle_min_lr", "cycle_max_lr")
        self.moms = self._pairs("cycle_min_mom", "cycle_max_mom", most=BELOW_1)
        self.cycle_momentum = flag("cycle_momentum", self.cycle_momentum)
        if self.cycle_momentum and not all("betas" in group for group in self.optimizer.param_groups):
            warnings.warn(
                f"OneCycle changes the learning rate only: {type(self.optimizer).__name__} has no betas. "
                "Set cycle_momentum to false",
                stacklevel=3,
            )
            self.cycle_momentum = False
        super().__init__(self.optimizer, self.last_batch_iteration)

    def lr_at(self, it: int) -> list[float]:
        """Return the learning rates: the cycle, then the lower end divided by a growing factor."""
        if it < self.first + self.second:
            height = self._height(it)
            return [low + (high - low) * height for low, high in self.lrs]
        return [low / self._decay(it, self.decay_lr_rate) for low, _ in self.lrs]

    def mom_at(self, it: int) -> list[float]:
        """Return beta1 of each group: the inverted cycle, then the upper end times a growing factor."""
        if it < 0:
            return [low for low, _ in self.moms]
        if it < self.first + self.second:
            height = self._height(it)
            return [high - (high - low) * height for low, high in self.moms]
        return [high * self._decay(it, self.decay_mom_rate) for _, high in self.moms]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the present betas of each group, or None if they do not change; DeepSpeed's name."""
        moms = self.mom_at(self.last_batch_iteration)
        return [(mom, BETA2_OF_ONE_CYCLE) for mom in moms] if self.cycle_momentum else None

    def _height(self, it: int) -> float:
        """Return the position in the cycle between its lower end, 0, and its upper end, 1."""
        position = (it + 1) % (self.first + self.second)
        rising = position <= self.first
        done, size = (position, self.first) if rising else (self.first + self.second - position, self.second)
        stairs = self.stairs[0 if rising else 1]
        return math.floor(done * stairs / size) / stairs if stairs else done / size

    def _decay(self, it: int, rate: float) -> float:
        since = it - (self.first + self.second) + 1
        return 1 + rate * since / self.decay_every if self.decay_every else 1.0

    def _pairs(self, low: str, high: str, most: float = LARGEST) -> list[tuple[float, float]]:
        ends = [_per_group(self.optimizer, key, getattr(self, key), most) for key in (low, high)]
        return list(zip(*ends, strict=True))

    def _write(self) -> None:
        super()._write()
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or (), strict=False):
            if betas[0] > BELOW_1:
                raise ValueError(
                    f"decay_mom_rate {self.decay_mom_rate} makes beta1 grow to {betas[0]:g} at iteration "
                    f"{self.last_batch_iteration}. From 1 on the momentum ignores new gradients. "
                    "Use a smaller decay_mom_rate, or 0"
                )
            group["betas"] = betas


OURS: dict[str, type[Schedule]] = {
    each.__name__: each for each in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def build_scheduler(type: str, params: Mapping[str, Any], optimizer: Optimizer) -> Any:
    """Build the schedule of a configuration's `scheduler` section, DeepSpeed's or torch's."""
    known = {**schedules_of_torch(), **OURS}
    if not isinstance(type, str):
        raise ValueError(f"scheduler.type must be the name of a schedule, not {shown(type)}")
    if type not in known:
        hint = nearest(type, known) or f"; there are {', '.join(OURS)} and those of torch.optim.lr_scheduler"
        raise ValueError(f"scheduler.type: no schedule is named {type!r}{hint}")
    check_signature("scheduler.params", known[type], params)
    if type not in OURS:
        params = checked_options(known[type], params, "scheduler.params.{}".format)
        check_steppable(known[type], params, optimizer)
    return known[type](optimizer, **params)


def _own_rates(optimizer: Optimizer) -> list[float]:
    rates = [group["lr"] for group in optimizer.param_groups]
    return [
        float(finite_number(f'"lr" of parameter group {place}', rate)) for place, rate in enumerate(rates)
    ]


def _per_group(optimizer: Optimizer, key: str, value: Rates, most: float = LARGEST) -> list[float]:
    groups = len(optimizer.param_groups)
    if not isinstance(value, list | tuple):
        return [float(finite_number(key, value, most=most))] * groups
    if len(value) != groups:
        raise ValueError(f"{key} lists {len(value)} values for {groups} parameter groups: pass 1 or {groups}")
    return [float(finite_number(f"{key}[{place}]", each, most=most)) for place, each in enumerate(value)]


def _warmup(steps: int, kind: str) -> tuple[int, str]:
    if kind not in ("log", "linear"):
        raise ValueError(f"warmup_type must be 'log' or 'linear', not {shown(kind)}")
    # At least 2, because the gain divides by the logarithm of the steps.
    return max(2, at_least("warmup_num_steps", steps, 0)), kind


def _total(total: int, warmup: int) -> int:
    steps = at_least("total_num_steps", total, 1)
    if steps < at_least("warmup_num_steps", warmup, 0):
        warnings.warn(
            f"total_num_steps {total} is less than warmup_num_steps {warmup}: the warm-up will not end",
            stacklevel=3,
        )
    return steps


# Schedules of torch: see [Note: torch's schedules] -----------------------------------------------------


def schedules_of_torch() -> dict[str, Any]:
    """Return the classes of torch's schedules, by name."""
    found = classes_in(lr_scheduler, lr_scheduler.LRScheduler)
    return {name: each for name, each in found.items() if not name.endswith("LRScheduler")}


def check_steppable(kind: Any, params: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Raise ValueError if a schedule with these arguments cannot be stepped."""
    if kind.__name__ in COMPOSITE:
        return
    dummy = _DummyOptimizer(optimizer)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = kind(dummy, **params)
            dummy.step()
            made.step()  # once: some schedules raise after their last step
        rates = [float(group["lr"]) for group in dummy.param_groups]
        if not all(map(math.isfinite, rates)):
            raise ValueError(f"the learning rate becomes {rates[0]}")
    except Exception as error:  # of any kind: it comes from these arguments
        raise ValueError(
            f"scheduler.params: {as_call(kind.__name__, params)} cannot be stepped: "
            f"{type(error).__name__}: {error}"
        ) from error


class _DummyOptimizer(Optimizer):
    """A dummy optimizer with the options of another one's groups."""

    def __init__(self, other: Optimizer) -> None:
        groups = [
            {
                **{k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()},
                "params": [nn.Parameter(torch.zeros(1))],
            }
            for group in other.param_groups
        ]
        super().__init__(groups, dict(other.defaults))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""
