"""What the default costs on an accelerator, where compiled operators are off: operations and bytes of a step.

Stages 1 and 2 must notice what a user has written to the 16-bit parameters. That costs 4 bytes an element,
two sums of the slice, and not the 38 of a comparison with the masters. With that comparison a step in bf16
took 84 bytes an element (19 operations), with clipping 92 (20); the two copies of a step's
vector between host and device, which are counted here, were not counted there.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest

from tests.order.costs import cost_of_a_step

BF16: dict[str, Any] = {"bf16": {"enabled": True}}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}


@pytest.fixture(autouse=True)
def as_by_default_on_cuda() -> Iterator[None]:
    """No compiled operators, no ways for CPUs, and few sums beside a slice, as on a device it has."""
    with ExitStack() as stack:
        for user in ("optim.fused_adam", "precision.norms", "shard.group.master"):
            stack.enter_context(mock.patch(f"zero_full.{user}.compiled_for", lambda device: False))
        stack.enter_context(mock.patch("zero_full.precision.norms.leaves_overflow", lambda device: True))
        stack.enter_context(mock.patch("zero_full.shard.group.checksum.COLUMNS", 61))
        yield


@pytest.mark.parametrize(
    ("stage", "keys", "operations", "nbytes"),
    [
        (1, {}, 6, 40),
        (2, {}, 6, 40),
        (1, BF16, 25, 50),
        (2, BF16, 25, 50),
        (3, BF16, 28, 42),
        (2, BF16 | {"gradient_clipping": 1e-3}, 26, 58),
        (2, BF16 | SGD, 26, 50),
    ],
)
def test_a_step(stage: int, keys: dict[str, Any], operations: int, nbytes: int) -> None:
    assert cost_of_a_step(stage, keys) == (operations, nbytes)
