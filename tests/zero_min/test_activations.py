"""Activations that are recomputed or offloaded: gradients equal to the bit, in the formula's bytes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zero_min import STAGES, Meter, OffloadActivations, checkpoint, in_segments, run_world
from zero_min.activations import best_interval
from zero_min.comm import Comm
from zero_min.formula import kept_by_block, kept_for_recomputing, kept_while_recomputing, offloaded
from zero_min.gpt import GPT, GPTConfig, batch, load_text
from zero_min.ledger import Ledger
from zero_min.offload import Host

CONFIG = GPTConfig(context=8, layers=4, width=16)
ROWS = 2
TOKENS, BOUNDARY = ROWS * CONFIG.context, 4 * ROWS * CONFIG.context * CONFIG.width


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Some rows of the text."""
    return batch(load_text(), ROWS, CONFIG.context, torch.Generator().manual_seed(seed))


def model(interval: int = 0) -> GPT:
    """A GPT that recomputes so many blocks at a time; 0 recomputes nothing."""
    return in_segments(GPT(CONFIG), interval) if interval else GPT(CONFIG)


def kept(interval: int, config: GPTConfig = CONFIG) -> int:
    """Bytes that a forward of the whole GPT keeps."""
    gpt = in_segments(GPT(config), interval) if interval else GPT(config)
    meter = Meter(gpt)
    with meter:
        gpt(*data())
    return meter.total()


@pytest.mark.parametrize("interval", [1, 2, 3, 4])
def test_recomputing_changes_no_bit_and_keeps_the_inputs_of_segments(interval: int) -> None:
    plain, again = model(), model(interval)
    losses = []
    for gpt in (plain, again):
        losses.append(loss := gpt(*data()))
        loss.backward()
    assert torch.equal(*losses)
    for p, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert p.grad is not None and other.grad is not None and torch.equal(p.grad, other.grad)
    saved = CONFIG.layers * kept_by_block(TOKENS, CONFIG.width, CONFIG.heads)
    assert kept(0) - kept(interval) == saved - kept_for_recomputing(CONFIG.layers, interval, BOUNDARY)


def test_what_a_block_keeps_is_the_formula_s() -> None:
    for width, heads in ((16, 4), (24, 2), (32, 8)):
        few, more = (kept(0, GPTConfig(context=8, layers=n, width=width, heads=heads)) for n in (1, 3))
        assert more - few == 2 * kept_by_block(TOKENS, width, heads)


def sharded(comm: Comm, stage: int, interval: int) -> tuple[list[float], int, int]:
    """Losses of two steps, what the last forward keeps, and what both steps send."""
    gpt = model(interval)
    trainer, losses = STAGES[stage](gpt, comm, lr=0.01), []
    for step in range(2):
        trainer.zero_grad()
        meter = Meter(gpt)
        with meter:
            loss = trainer.model(*data(10 * step + comm.rank))
        trainer.backward(loss)
        trainer.step()
        losses.append(float(loss.detach()))
    return losses, meter.total(), comm.ledger.total_sent()


@pytest.mark.parametrize("stage", STAGES)
def test_no_stage_cuts_activations_and_each_works_with_recomputation(stage: int) -> None:
    plain, again = (run_world(sharded, 2, stage, interval) for interval in (0, 2))
    for before, after in zip(plain, again, strict=True):
        assert before[0] == after[0] and before[2] == after[2]  # losses to the bit, and as many bytes sent
        assert (before[1], after[1]) == (kept(0), kept(2))  # as on one rank


class Unusual(nn.Module):
    """Dropout, a module that is called twice, an input that is frozen, and whole numbers to begin with."""

    def __init__(self, around: Callable[..., Tensor]) -> None:
        super().__init__()
        self.around = around
        torch.manual_seed(0)
        self.table, self.twice = nn.Embedding(5, 6), nn.Linear(6, 6)

    def noisy(self, x: Tensor, scale: Tensor) -> Tensor:
        """A piece that draws random numbers."""
        return F.dropout(self.twice(x).tanh() * scale, 0.5)

    def forward(self, numbers: Tensor, scale: Tensor) -> Tensor:
        """Three pieces."""
        x = self.around(self.table, numbers)
        return self.around(self.noisy, self.around(self.noisy, x, scale), scale).sum()


def directly(run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """No checkpoint."""
    return run(*inputs)


def test_dropout_and_shared_modules_and_frozen_inputs_are_as_without() -> None:
    found: list[list[Any]] = []
    for how in (directly, checkpoint):
        module = Unusual(how)
        torch.manual_seed(1)
        loss = module(torch.tensor([3, 0, 3]), torch.full((6,), 2.0))
        torch.rand(3)
        loss.backward()
        found.append([loss.detach(), torch.rand(2), *(p.grad for p in module.parameters())])
    assert all(map(torch.equal, *found))  # also what is drawn afterwards


def test_an_input_that_changes_before_backward_is_noticed() -> None:
    x = torch.ones(3, requires_grad=True) * 1
    y = checkpoint(torch.sin, x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_no_equal_segments_keep_less_than_the_best_interval() -> None:
    for layers in (1, 6, 12, 24):
        for sizes in ((1, 1), (1, 16), (4, 9), (16, 1)):
            most = {m: kept_while_recomputing(layers, m, *sizes) for m in range(1, layers + 1)}
            best = best_interval(layers, *sizes)
            assert most[best] <= min(most[m] for m in most if layers % m == 0)


@pytest.mark.parametrize("interval", [0, 1])
def test_offloading_changes_no_bit_and_moves_the_formula_s_bytes(interval: int) -> None:
    found, moved = [], []
    for layers in (1, 3):
        config = GPTConfig(context=8, layers=layers, width=32)
        for offload in (False, True):
            gpt, ledger = GPT(config), Ledger()
            gpt = in_segments(gpt, interval) if interval else gpt
            hooks = OffloadActivations(gpt, Host(torch.device("cpu"), ledger))
            if offload:
                with hooks:
                    loss = gpt(*data())
            else:
                loss = gpt(*data())
            down = ledger.moved["device to host"]
            loss.backward()
            found.append([p.grad for p in gpt.parameters()])
        assert all(map(torch.equal, *found[-2:]))
        assert ledger.moved["device to host"] == down == ledger.moved["host to device"]
        moved.append(down)
    each = 4 * TOKENS * 32 if interval else offloaded(TOKENS, 32)
    assert moved[1] - moved[0] == 2 * each


def test_a_copy_on_the_host_is_served_to_several_backwards() -> None:
    x, ledger = torch.linspace(0, 1, 512).requires_grad_(), Ledger()
    with OffloadActivations(nn.Linear(1, 1), Host(torch.device("cpu"), ledger)):
        y = x.exp().sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()  # type: ignore[union-attr]
    y.backward()
    assert torch.equal(x.grad, 2 * first) and torch.equal(first, x.detach().exp())  # type: ignore[arg-type]
