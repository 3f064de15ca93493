"""Tensor parallelism: the loss and the gradients of the plain model, in the bytes of the formula."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worlds import run_in
from zero_min import Adam, run_world
from zero_min.adam import clip_by_global_norm
from zero_min.comm import Comm
from zero_min.formula import tensor_parallel_held, tensor_parallel_sent
from zero_min.gpt import GPT, GPTConfig, batch, load_text
from zero_min.ledger import held
from zero_min.tensor_parallel import TensorAttention, TensorParallel, cut_parameters, part_of, rank_by_rank

CONFIG = GPTConfig(context=8, layers=2, width=16)
ROWS, STEPS, LIMIT = 2, 3, 0.5


def data(step: int) -> tuple[Tensor, Tensor]:
    """The same on every rank."""
    return batch(load_text(), ROWS, CONFIG.context, torch.Generator().manual_seed(step))


def model_of() -> GPT:
    """In fp64, so that only the order of sums differs; biases that are not zero."""
    model = GPT(CONFIG).double()
    generator = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(p, std=0.1, generator=generator)
    return model


@cache
def plain() -> tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, norms, first gradients and last parameters of the model that nobody has cut."""
    model = model_of()
    adam = Adam([{"params": list(model.parameters())}], lr=0.01)
    losses, norms, first = [], [], {}
    for step in range(STEPS):
        model.zero_grad()
        loss = model(*data(step))
        loss.backward()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norms.append(clip_by_global_norm([p.grad for p in model.parameters() if p.grad is not None], LIMIT))
        adam.step()
        losses.append(float(loss.detach()))
    return losses, norms, first, {name: p.detach() for name, p in model.named_parameters()}


def train(comm: Comm) -> dict[str, Any]:
    """The same on ranks."""
    trainer = TensorParallel(model_of(), comm, max_grad_norm=LIMIT, lr=0.01)
    losses, norms, first, sent, kinds = [], [], {}, 0, {}
    for step in range(STEPS):
        trainer.zero_grad()
        comm.ledger.clear_traffic()
        loss = trainer.model(*data(step))
        trainer.backward(loss)
        sent = comm.ledger.total_sent()
        named = trainer.model.named_parameters()
        first = first or {name: p.grad.clone() for name, p in named if p.grad is not None}
        norms.append(trainer.step())
        losses.append(float(loss.detach()))
        kinds = {kind: held(tensors) for kind, tensors in trainer.holdings().items()}
    cut = set(cut_parameters(trainer.model))
    return {
        "losses": losses,
        "norms": norms,
        "gradients": first,
        "parameters": {name: p.detach() for name, p in trainer.model.named_parameters()},
        "cut": [name for name, p in trainer.model.named_parameters() if p in cut],
        "sent": sent,
        "held": kinds,
    }


def part(name: str, whole: Tensor, rank: int, ranks: int) -> Tensor:
    """What a rank has of a tensor of the plain model, said once more without the code that is tested."""
    if ".qkv." in name:
        return torch.cat([each.chunk(ranks)[rank] for each in whole.chunk(3)])
    if ".up." in name:
        return whole.chunk(ranks)[rank]
    if name.endswith((".out.weight", ".down.weight")):
        return whole.chunk(ranks, 1)[rank]
    return whole


@pytest.mark.parametrize(
    ("place", "world"), [("threads", 1), ("threads", 2), ("threads", 4), ("processes", 2)]
)
def test_losses_gradients_and_training_are_the_plain_model_s(place: str, world: int) -> None:
    losses, norms, gradients, parameters = plain()
    for rank, run in enumerate(run_in(place, train, world)):
        assert run["losses"] == pytest.approx(losses, rel=1e-6)
        assert run["norms"] == pytest.approx(norms, rel=1e-6)
        for what, want in (("gradients", gradients), ("parameters", parameters)):
            assert list(run[what]) == list(want)
            for name, got in run[what].items():
                mine = part(name, want[name], rank, world)
                torch.testing.assert_close(
                    got, mine, rtol=1e-5, atol=1e-8, msg=f"{what} of {name}, rank {rank}"
                )


def test_what_is_whole_has_the_same_bits_on_every_rank() -> None:
    runs = run_world(train, 4)
    whole = [name for name in runs[0]["parameters"] if name not in runs[0]["cut"]]
    assert "blocks.0.down.bias" in whole and "norm.weight" in whole
    for run in runs[1:]:
        assert all(torch.equal(run["parameters"][name], runs[0]["parameters"][name]) for name in whole)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_holds_and_sends_exactly_the_formula(world: int) -> None:
    sizes = {name: p.numel() for name, p in GPT(CONFIG).named_parameters()}
    runs = run_world(train, world)
    cut = sum(sizes[name] for name in runs[0]["cut"])
    want = tensor_parallel_held(cut, sum(sizes.values()) - cut, world)
    for run in runs:
        assert run["held"] == {kind: 2 * nbytes for kind, nbytes in want.items()}  # fp64
    tokens = ROWS * CONFIG.context
    assert sum(run["sent"] for run in runs) == tensor_parallel_sent(2, tokens, CONFIG.width, world, value=8)


def test_what_cannot_be_cut_evenly_is_refused() -> None:
    def heads(comm: Comm) -> None:
        TensorAttention(GPT(CONFIG).blocks[0].attention, comm)

    def layer(comm: Comm) -> None:
        part_of(torch.zeros(7, 2), 0, comm)

    with pytest.raises(RuntimeError, match="3 ranks cannot share 4 heads"):
        run_world(heads, 3)
    with pytest.raises(RuntimeError, match="2 ranks cannot cut 7 rows or columns evenly"):
        run_world(layer, 2)


def test_ranks_get_whole_heads() -> None:
    rows = torch.arange(24)
    for rank, mine in enumerate(rank_by_rank(rows, 4).chunk(4)):
        assert mine.tolist() == [8 * part + 2 * rank + i for part in range(3) for i in range(2)]
