"""How often the host waits for the device in a training step: once, for the numbers that all ranks must know.

`Recorder` notes every value that the host reads, and every exchange of objects, for which it waits, too.
"""

import ast
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import zero_full
from tests.order.runs import Case, recorded
from zero_full.flight.rank_files import folder_of
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
    places = [item.stack[0].split()[-1] for item in recorded(case, overlap).items if item.kind == "read"]
    return {place: n / case.steps for place, n in Counter(places).items() if place != "recorded"}


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
    assert any(folder_of(file).iterdir())  # it was recorded


def test_whoever_refuses_unused_parameters_waits_once_more() -> None:
    assert reads(Case(2, zero={"ignore_unused_parameters": False})) == {"_add_up": 1, "gather_messages": 1}


@pytest.mark.parametrize("depth", [4, 8])
def test_an_overflow_costs_two_more_whatever_the_number_of_parameters(depth: int) -> None:
    for stage in range(4):
        found = reads(Case(stage, keys=OVERFLOWING, depth=depth))
        assert found == {"_add_up": 1, "_look_here": 1, "gather_objects": 1}


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
