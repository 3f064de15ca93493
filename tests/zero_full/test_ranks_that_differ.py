"""What must be the same on every rank is compared at `initialize`: the error names what, and where."""

import logging
import re
from collections.abc import Callable
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL
from tests.zero_full.runs import Net, config
from zero_full import assemble
from zero_full.kernels.load import Loaded

Given = dict[str, Any]
ODD = 1  # the rank that is given something else


def net() -> Given:
    return {"model": Net(), "config": config(1)}


def with_keys(**keys: Any) -> Callable[[], Given]:
    return lambda: {"model": Net(), "config": config(1, **keys)}


def lr_of(lr: float) -> Callable[[], Given]:
    return with_keys(optimizer={"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.1}})


def own_optimizer(groups: int, lr: float = 0.01) -> Callable[[], Given]:
    def make() -> Given:
        model, keys = Net(), config(1)
        del keys["optimizer"]
        listed = list(model.parameters())
        cut = len(listed) if groups == 1 else 2
        parts = [{"params": part} for part in (listed[:cut], listed[cut:]) if part]
        return {"model": model, "config": keys, "optimizer": torch.optim.SGD(parts, lr=lr)}

    return make


class Renamed(Net):
    """The same parameters by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = self.layers
        del self.layers

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        return self.tower(x).float().square().mean()


class Two(nn.Module):
    """Two layers, in an order of one's own."""

    def __init__(self, order: str) -> None:
        super().__init__()
        for name in order:
            self.add_module(name, nn.Linear(4, 4))


def frozen() -> Given:
    given = net()
    given["model"].layers[0].bias.requires_grad_(False)
    return given


def named(make: Callable[[], nn.Module]) -> Callable[[], Given]:
    return lambda: {"model": make(), "config": config(1)}


DIFFERENCES: dict[str, tuple[Callable[[], Given], Callable[[], Given], str]] = {
    "lr": (lr_of(0.01), lr_of(0.02), r"lr\b.*0\.01 on rank(s 0, 2| 0); 0\.02 on rank 1"),
    "lr of an instance": (own_optimizer(1), own_optimizer(1, 0.5), "lr of parameter group 0: 0.01 on rank"),
    "optimizer": (net, with_keys(optimizer={"type": "SGD", "params": {"lr": 0.01}}), "AdamW on rank.*SGD on"),
    "clipping": (net, with_keys(gradient_clipping=0.5), "gradient_clipping: 0.0 on rank.*0.5 on rank 1"),
    "groups": (own_optimizer(1), own_optimizer(2), "group 0 on rank.*group 1 on rank 1"),
    "accumulation": (net, with_keys(gradient_accumulation_steps=2), "gradient_accumulation_steps: 1 on rank"),
    "sum or mean": (net, with_keys(gradient_predivide_factor=2.0), "gradient_predivide_factor: 1.0 on rank"),
    "who divides": (net, with_keys(plain_backward_divides=True), "plain_backward_divides: None on rank"),
    "names": (net, named(Renamed), r"layers\.0\.weight.* on rank.*tower\.0\.weight.* on rank 1"),
    "order": (
        named(lambda: Two("ab")),
        named(lambda: Two("ba")),
        r"a\.weight.* on rank.*b\.weight.* on rank 1",
    ),
    "frozen on one": (net, frozen, r"layers\.0\.bias.*trained.* on rank.*frozen.* on rank 1"),
    "dtype": (net, named(lambda: Net().bfloat16()), r"float32 .* on rank.*bfloat16 .* on rank 1"),
    "stage": (net, lambda: {"model": Net(), "config": config(2)}, r"zero_optimization\.stage: 1 on rank"),
}


def start(comm: Any, name: str) -> str:
    """What `initialize` says to this rank."""
    usual, odd, _ = DIFFERENCES[name]
    try:
        zero_full.initialize(**(odd if comm.rank == ODD else usual)())
    except zero_full.DisagreementError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("name", DIFFERENCES)
def test_every_rank_hears_what_differs_and_where(name: str) -> None:
    answers = POOL.run(start, 3 if name == "lr" else 2, name)
    assert len(set(answers)) == 1
    assert re.search(DIFFERENCES[name][2], answers[0]), answers[0]


def start_with_other_operators(comm: Any, differ: bool) -> list[str]:
    """What the log says of it on this rank."""
    found = Loaded(None, "no C++ compiler") if differ and comm.rank == ODD else Loaded(Path("zf_cpu.so"))
    handler = BufferingHandler(1000)
    logger = logging.getLogger("zero_full")
    logger.addHandler(handler)
    try:
        with mock.patch.object(assemble, "load", lambda device: found):
            zero_full.initialize(**net())
            model = Net()
            assemble.shard(model, torch.optim.Adam(model.parameters()))
    finally:
        logger.removeHandler(handler)
    return [record.getMessage() for record in handler.buffer if "operators" in record.getMessage()]


def test_ranks_with_other_operators_are_a_warning_on_the_first_rank() -> None:
    told, *others = POOL.run(start_with_other_operators, 3, True)
    warning = (
        "the ranks have different operators:\n"
        "  on cpu: compiled on ranks 0, 2; torch's own (no C++ compiler) on rank 1"
    )
    assert told == [warning, warning]  # of `initialize` and of `shard`
    assert others == [[], []]
    assert POOL.run(start_with_other_operators, 2, False) == [[], []]


def fail_alone(comm: Any, how: str) -> str:
    """One rank cannot even begin; the others must not wait."""
    odd = comm.rank == ODD
    keys: Any = "missing.json" if odd and how == "config" else config(1)
    model: nn.Module = nn.LazyLinear(3) if odd and how == "lazy" else Net()
    try:
        zero_full.initialize(model=model, config=keys)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(("how", "reason"), [("config", "missing.json"), ("lazy", "weight has no shape yet")])
def test_a_rank_that_fails_in_initialize_fails_everybody_with_its_reason(how: str, reason: str) -> None:
    answers = POOL.run(fail_alone, 3, how)
    assert all(reason in answer for answer in answers)
    assert "initialize failed on rank 1" in answers[0] and "initialize failed on rank 1" in answers[2]
