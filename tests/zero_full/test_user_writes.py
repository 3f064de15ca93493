"""Writes of user code to 16-bit parameters between steps, however they are made: the masters adopt them.

A step sums this rank's slice, and only if the sums differ are elements compared (`master.py`). The compiled
operator of Adam compares elements itself, so these runs are without it, as on CUDA by default.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import zero_full
from tests.slow_copies import slow_copies
from tests.worlds import POOL, run_each
from tests.zero_full.runs import Net, config, data
from zero_full.offload import CopyThreads
from zero_full.shard.group import checksum, master
from zero_full.shard.group.checksum import column_sums

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "SGD": {"lr": 0.01, "momentum": 0.9},
    "Lamb": {"lr": 0.01},
    "Muon": {"muon_lr": 0.02, "adam_lr": 0.01},
}


def by_counter(param: Tensor, values: Tensor) -> None:
    param.copy_(values)


def by_data(param: Tensor, values: Tensor) -> None:
    param.data.copy_(values)


def by_other_memory(param: Tensor, values: Tensor) -> None:
    param.data = values.clone()


def by_numpy(param: Tensor, values: Tensor) -> None:
    param.detach().view(torch.int16).numpy()[...] = values.view(torch.int16).numpy()


WAYS = (by_counter, by_data, by_other_memory, by_numpy)
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "one element": lambda values: values.index_fill(-1, torch.tensor([5]), 0.25),
    "all": lambda values: values * 0.5,
    "signs": torch.neg,
    "order": lambda values: values.flip(0),
    "two elements change places": lambda values: values.index_select(
        -1, torch.tensor([1, 0, *range(2, values.shape[-1])])
    ),
}


def exchanged(values: Tensor) -> Tensor:
    """Let words change places that stand in one column of the table of sums, whose width is 7 here."""
    elements = values.reshape(-1).clone()
    elements[:28], elements[28:56] = elements[28:56].clone(), elements[:28].clone()
    return elements.view(values.shape)


CANCELLING = {"words of one column change places": exchanged}  # which the sums do not show


def trained(
    comm: Any, stage: int, kind: str, change: str, way: Callable[[Tensor, Tensor], None], tier: str
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Parameters and masters after a write between steps, and the groups that looked at elements for it."""
    looked: list[str] = []
    adopt, fetch = master.Master._adopt_slice, master.Master.adopt_device_writes

    def adopted(self: master.Master) -> None:
        looked.append(self.parameters.name)
        adopt(self)

    def fetched(self: master.Master) -> None:
        if self.synced_sums is None:
            looked.append(self.parameters.name)
        fetch(self)

    zero = {"offload_optimizer": {"device": "cpu"}} if tier == "host" else {}
    keys = {"bf16": {"enabled": True}, "optimizer": {"type": kind, "params": OPTIMIZERS[kind]}}
    with (
        slow_copies(),
        mock.patch("zero_full.shard.group.master.compiled_for", lambda device: False),
        mock.patch("zero_full.optim.fused_adam.compiled_for", lambda device: False),
        mock.patch.object(checksum, "COLUMNS", 7),
        mock.patch.object(master.Master, "_adopt_slice", adopted),
        mock.patch.object(master.Master, "adopt_device_writes", fetched),
    ):
        engine, *_ = zero_full.initialize(model=Net(), config=config(stage, zero_optimization=zero, **keys))
        for step in range(4):
            if step == 2:
                looked.clear()
                weight = engine.module.layers[2].weight
                with torch.no_grad():
                    way(weight, (CHANGES | CANCELLING)[change](weight.detach().clone()))
            engine.backward(engine(data(step, 0, comm.rank, torch.bfloat16)))
            engine.step()
        found = looked[:]
        masters = {
            name: value.clone()
            for name, p in engine.module.named_parameters()
            if (value := zero_full.safe_get_full_fp32_param(p)) is not None
        }
        parameters = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        engine.destroy()
    return parameters, masters, found


@pytest.mark.pairwise
@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("stage", [1, 2])
def test_a_write_is_adopted_however_it_is_made(
    stage: int, kind: str, change: str, way: Callable[[Tensor, Tensor], None], tier: str
) -> None:
    cases = [(stage, kind, change, each, tier) for each in (by_counter, way)]
    (plain, plain_masters, _), (parameters, masters, looked) = (
        ranks[0] for ranks in run_each(trained, 2, cases)
    )
    for name, value in plain.items():
        assert torch.equal(parameters[name], value), name
        assert torch.equal(masters[name], plain_masters[name]), name
        assert torch.equal(masters[name].bfloat16(), value), name
    assert len(looked) < 4, "groups without a write were compared, too"


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_write_that_cancels_in_the_sums_is_adopted_by_its_version_counter(tier: str) -> None:
    (change,) = CANCELLING
    for parameters, masters, looked in POOL.run(trained, 2, 1, "AdamW", change, by_counter, tier):
        assert looked
        for name, value in parameters.items():
            assert torch.equal(masters[name].bfloat16(), value), name


def broken(comm: Any, stage: int) -> tuple[str, bool]:
    """What a step says if one rank cannot copy what was written, and whether the next one adopts it."""
    keys = {"bf16": {"enabled": True}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    with slow_copies():
        engine, *_ = zero_full.initialize(model=Net(), config=config(stage, **keys))
        weight, said = engine.module.layers[2].weight, ""
        for step in range(4):
            if step == 2:
                weight.data.fill_(8)
            engine.backward(engine(data(step, 0, comm.rank, torch.bfloat16)))
            fails = mock.Mock(side_effect=OSError("no cable"))
            with (
                mock.patch.object(CopyThreads, "fetch", fails)
                if step == 2 and comm.rank == 1
                else nullcontext()
            ):
                try:
                    engine.step()
                except RuntimeError as error:
                    said = str(error)
                    engine.optimizer.zero_grad()
        adopted = bool((weight > 7).all())
        engine.destroy()
    return said, adopted


@pytest.mark.parametrize("stage", [1, 2])
def test_a_write_that_one_rank_cannot_copy_is_told_on_every_rank_and_not_lost(stage: int) -> None:
    for said, adopted in POOL.run(broken, 2, stage):
        assert "rank 1 could not copy to the host what was written" in said and "no cable" in said
        assert adopted


def unwritten(comm: Any, stage: int, tier: str) -> list[str]:
    return trained(comm, stage, "AdamW", "all", lambda param, values: None, tier)[2]


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("stage", [1, 2])
def test_without_a_write_no_element_is_compared(stage: int, tier: str) -> None:
    assert run_each(unwritten, 2, [(stage, tier)]) == [[[], []]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("columns", [7, 61, 8191])
def test_sums_by_column_tell_of_every_change(
    columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksum, "COLUMNS", columns)
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    known = column_sums(values)
    assert torch.equal(column_sums(values.clone()), known) and len(known) <= max(columns, 1000)
    for place in range(0, 1000, 7):
        changed, swapped = values.clone(), values.clone()
        changed[place] += 1
        swapped[[place, place - 1]] = values[[place - 1, place]]
        assert not torch.equal(column_sums(changed), known)
        assert torch.equal(swapped, values) or not torch.equal(column_sums(swapped), known)
    for other in (-values, values * 2, values.flip(0), *(values.roll(2**n) for n in range(9))):
        assert not torch.equal(column_sums(other), known)
    for start in (1, 3, 8):  # at any place in memory, the same way every time
        assert torch.equal(column_sums(values[start:]), column_sums(values[start:]))
