"""How often the host waits for the device in a training step: once, for the numbers that all ranks must know.

`Recorder` notes every value that the host reads, every index that it copies from a list, and every exchange
of objects, for which it waits, too.
"""

import ast
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import zero_full
from tests.order.device import DEVICE
from tests.order.runs import Case, one_step, recorded
from zero_full.optim.step import Peers, Piece
from zero_full.shard.step.agreement import numbers_on

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
}
OVERFLOWING = {"fp16": {"enabled": True, "initial_scale_power": 30}}
STEPS = 3


def reads(case: Case, overlap: bool = True) -> dict[str, float]:
    """How often in a step, by the function that reads."""
    places = [item.stack[0].split()[-1] for item in recorded(case, overlap).items if item.stops_host]
    return {place: n / case.steps for place, n in Counter(places).items() if place != "recorded"}


@pytest.mark.rotates
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", range(4))
def test_a_step_waits_for_one_answer(stage: int, precision: str) -> None:
    keys = {**PRECISIONS[precision], "gradient_clipping": 0.1, "gradient_accumulation_steps": 2}
    for overlap in (True, False):
        assert list(reads(Case(stage, keys=keys), overlap).values()) == [1]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_recording_makes_the_host_wait_for_nothing_more(stage: int, tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    keys = {"debug": {"record": str(file)}, "gradient_clipping": 0.1}
    assert list(reads(Case(stage, keys=keys)).values()) == [1]
    assert file.exists()  # it was recorded


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("every", [1, 10**9])
def test_a_monitor_reads_the_loss_of_the_steps_that_it_writes(
    stage: int, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 0)
    monitor = {"enabled": True, "output_path": str(tmp_path)}
    keys = {"jsonl_monitor": monitor, "steps_per_monitor": every, "gradient_clipping": 0.1}
    assert reads(Case(stage, keys=keys)) == {"_add_up": 1, **({"loss": 1} if every == 1 else {})}


def test_whoever_refuses_unused_parameters_waits_once_more() -> None:
    assert reads(Case(2, zero={"ignore_unused_parameters": False})) == {"_add_up": 1, "gather_messages": 1}


@pytest.mark.parametrize("depth", [4, 8])
def test_an_overflow_costs_three_more_whatever_the_number_of_parameters(depth: int) -> None:
    for stage in range(4):
        found = reads(Case(stage, keys=OVERFLOWING, depth=depth))
        # The squares are added up in fp32, and once more in fp64: they may overflow where gradients do not.
        assert found == {"_add_up": 2, "_look_here": 1, "gather_objects": 1}


# Every rule and every tier -----------------------------------------------------------------------


def counted(engine: zero_full.Engine, step: int) -> None:
    """A step, and a value that is read behind it, so that steps can be told apart."""
    one_step(engine, step)
    torch.ones((), device=DEVICE).item()


def reads_of_each_step(case: Case) -> list[dict[str, int]]:
    """How often in each step, by the function that reads."""
    steps = [Counter[str]()]
    for place in [item.stack[0].split()[-1] for item in recorded(case).items if item.stops_host]:
        if place == "counted":
            steps.append(Counter())
        else:
            steps[-1][place] += 1
    return list(map(dict, steps[:-1]))


class Normalized(torch.optim.SGD):
    """A user's own: every tensor moves by lr along its gradient, whose norm becomes 1."""

    def zero_full_stepper(self) -> zero_full.Stepper:
        """Its rule."""
        return NormalizedStep(self)


class NormalizedStep(zero_full.Stepper):
    """Its update."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, pieces: Sequence[Piece], factor: float, peers: Peers) -> None:
        """Without reading the norms."""
        gradients = [piece.gradient for piece in pieces if piece.gradient is not None]
        squares = torch.stack([gradient.double().square().sum() for gradient in gradients])[:, None]
        for row, piece, gradient in zip(peers.add_up(pieces, squares), pieces, gradients, strict=True):
            lr = self.optimizer.param_groups[piece.group]["lr"]
            piece.master.addcdiv_(gradient, row.sqrt().to(piece.master.dtype), value=-lr)


BF16 = PRECISIONS["bf16"]
RULES = ("Adam", "AdamW", "SGD", "Lion", "Lamb", "Muon", "a user's")
HOST = {"device": "cpu"}
TIERS: dict[str, dict[str, Any]] = {
    "none": {},
    "host": {"offload_optimizer": HOST},
    "half": {"offload_optimizer": {**HOST, "ratio": 0.5}},
    "NVMe": {"offload_optimizer": {"device": "nvme"}},
    "parameters": {"offload_optimizer": HOST, "offload_param": HOST},
    "parameters on NVMe": {"offload_param": {"device": "nvme", "max_in_cpu": 0}},
}
# Where something may fail on one rank within a step, all ranks ask for it in a second exchange.
MAY_FAIL = {"none": 0, "NVMe": 2}
# With state on the host a rule that needs other ranks' values moves them to the device and back: sums once
# for all parameters, Muon's matrices one by one.
EXCHANGES = {
    "Lamb": {"totals": 1},
    "a user's": {"totals": 1},
    "Muon": {"leave": 2, "_work_on": 4, "come_back": 2},
}


def case_of(rule: str, stage: int, steps: int = STEPS, **zero: Any) -> Case:
    """Training in bf16, clipped, by a rule."""
    keys = {**BF16, "gradient_clipping": 0.1}
    if rule == "a user's":
        own = {"optimizer": lambda params: Normalized(params, lr=0.01)}
        return Case(stage, keys=keys, zero=zero, drive=counted, steps=steps, **own)
    params = {"lr": 0.01, **OPTIONS.get(rule, {})}
    keys["optimizer"] = {"type": rule, "params": params}
    return Case(stage, keys=keys, zero=zero, drive=counted, steps=steps)


WALKS = {"var_freeze_step": 3, "var_update_scaler": 1, "local_step_scaler": 1, "local_step_clipper": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "OneBitAdam": {"freeze_step": 2},
    "OneBitLamb": {"freeze_step": 2},
    "ZeroOneAdam": WALKS,
}


@pytest.mark.rotates
@pytest.mark.pairwise
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("rule", RULES)
def test_a_step_of_every_rule_on_every_tier(rule: str, tier: str, stage: int, tmp_path: Path) -> None:
    zero = {key: dict(section) for key, section in TIERS[tier].items()}
    for section in zero.values():
        if section["device"] == "nvme":
            section["nvme_path"] = str(tmp_path)
    asks = MAY_FAIL.get(tier, 1)
    steady = {"_add_up": 1} | ({"gather_messages": asks} if asks else {})
    if "offload_optimizer" in zero:
        half = tier == "half" and rule == "Muon"  # half of the matrices
        steady |= {place: n // 2 if half else n for place, n in EXCHANGES.get(rule, {}).items()}
    case = case_of(rule, 3 if "offload_param" in zero else stage, **zero)
    first, *rest = reads_of_each_step(case)
    assert rest == [steady] * (STEPS - 1)
    assert {**first, "_rounds_to": 0} == {**steady, "_rounds_to": 0}  # that one is the CPU's


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_whose_update_is_delayed(stage: int) -> None:
    zero = {"offload_optimizer": {**HOST, "delay_update_after": 1}}
    *_, second, third, fourth = reads_of_each_step(case_of("AdamW", stage, 4, **zero))
    assert second == {"_add_up": 1}  # begins one, and completes none
    assert third == fourth == {"_add_up": 1, "written": 1, "gather_messages": 2}


@pytest.mark.parametrize(
    ("rule", "stage", "averages"),
    [
        ("OneBitAdam", 0, {"average": 1}),
        ("OneBitLamb", 0, {"average": 1, "_to_host": 1}),
        ("ZeroOneAdam", 0, {"average": 1}),
        ("ZeroOneAdam", 1, {"average": 1}),
    ],
)
def test_a_step_of_a_rule_that_averages_itself(rule: str, stage: int, averages: dict[str, int]) -> None:
    """The second answer is of the average: whether all that was sent is finite."""
    steps = reads_of_each_step(case_of(rule, stage, 6))
    local = [{"_add_up": 1}] if rule == "ZeroOneAdam" else []
    assert steps[1] == {"_add_up": 1} | ({"_coefficients": 1} if rule == "OneBitLamb" else {})
    for found in steps[3:]:
        assert found == {"_add_up": 1, **averages} or found in local
    assert local == [] or local[0] in steps[3:]


def copies_of_python_numbers(path: Path) -> list[str]:
    """Places where `torch.tensor` is told a device: on an accelerator the host waits until all is copied."""
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return [
        f"{path.name}:{call.lineno}"
        for call in calls
        if ast.unparse(call.func) in ("torch.tensor", "torch.as_tensor")
        and any(k.arg == "device" and ast.unparse(k.value) != "'cpu'" for k in call.keywords)
    ]


def test_no_number_is_copied_to_the_device_by_a_copy_that_the_host_waits_for() -> None:
    rooms = [Path(zero_full.__file__).parent / room for room in ("shard", "comm", "precision", "optim")]
    found = [
        place
        for room in rooms
        for file in sorted(room.rglob("*.py"))
        for place in copies_of_python_numbers(file)
    ]
    files = [place.partition(":")[0] for place in found]
    # Not in a step; in a step whose gradients came late; once, when it is made.
    assert files == ["gathered_parameters.py", "reduce.py", "compressed.py"]
    with (
        mock.patch.object(Tensor, "pin_memory", lambda self: self),
        mock.patch.object(Tensor, "to", lambda self, *place, **how: (self.tolist(), place, how)),
    ):
        there = torch.device("cuda", 0)
        assert numbers_on(there, [1, 2]) == ([1.0, 2.0], (there,), {"non_blocking": True})
