"""What the reference does not do: wait for the device that its tensors are on."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import BF16, FP32, normal
from tests.kernels.optimizing import lists
from zero_full._compat import TorchDispatchMode
from zero_full.kernels import reference

ASKS = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "unique", "masked_select"}


class Asked(TorchDispatchMode):
    """Notes what needs a device's values on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        self.found += [name] if name in ASKS else []
        return func(*args, **(kwargs or {}))


def adam() -> None:
    reference.adam_step(*lists([9, 5], moments=BF16), 1e-2, 0.9, 0.95, 1e-8, 0.1, True, 0.5)


def stochastic() -> None:
    masters, grads, exp_avgs, exp_avg_sqs, steps, _ = lists([9, 5], master=BF16, moments=BF16, copy=None)
    given = (masters, grads, exp_avgs, exp_avg_sqs, steps, [3, -4], [0, 100])
    reference.adam_step_stochastic(*given, 1e-2, 0.9, 0.95, 1e-8, 0.1, True, 0.5)


def lamb() -> None:
    masters, grads, exp_avgs, exp_avg_sqs, steps, copies = lists([9, 5])
    norms = reference.lamb_norms(masters, grads, exp_avgs, exp_avg_sqs, 0.9, 0.95, 1e-6, 0.1, False, 0.5)
    moments = (exp_avgs, exp_avg_sqs)
    options = (1e-2, 0.9, 0.95, 1e-6, 0.1, True, False, 0.01, 10.0)
    reference.lamb_step(masters, *moments, steps, copies, norms, *options)


def unscale() -> None:
    reference.unscale_norm_check([normal(9), normal(5)], 0.5)


def integers() -> None:
    payload, out = torch.zeros(reference.payload_bytes(21, 4, 8), dtype=torch.uint8), torch.zeros(21)
    reference.quantize_blocks(normal(21), payload, 4, 8)
    reference.dequantize_blocks(payload, out, 4, 8, True)


@pytest.mark.parametrize("call", [adam, stochastic, lamb, unscale, integers])
def test_nothing_is_read_from_the_device(call: Callable[[], None]) -> None:
    with Asked() as asked:
        call()
    assert asked.found == []
    with asked:
        float(torch.ones(()))
    assert asked.found == ["_local_scalar_dense"]


@pytest.mark.parametrize("step", [1.0, 2.0, 1000.0, 1e6])
def test_a_steps_number_gives_the_bits_that_python_computes(step: float) -> None:
    def by_python(master: Tensor, m: Tensor, v: Tensor) -> Tensor:
        root = v.sqrt() * (1 / (1 - 0.95**step) ** 0.5) + 1e-8
        return master - 1e-2 / (1 - 0.9**step) * m / root

    masters, grads, exp_avgs, exp_avg_sqs, steps, _ = lists([1000], copy=None)
    steps[0].fill_(step)
    before = masters[0].clone()
    reference.adam_step(masters, grads, exp_avgs, exp_avg_sqs, steps, [], 1e-2, 0.9, 0.95, 1e-8, 0, True, 1.0)
    assert masters[0].dtype == FP32
    assert torch.equal(masters[0], by_python(before, exp_avgs[0], exp_avg_sqs[0]))
