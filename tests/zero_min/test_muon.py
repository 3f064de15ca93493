"""Muon at stage 2: whole matrices from slices, in the bytes of the formula."""

from copy import deepcopy
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.worlds import run_in
from zero_min import Stage2Muon, run_world
from zero_min.comm import Comm
from zero_min.formula import muon_held, muon_sent
from zero_min.ledger import held
from zero_min.muon import choose_owners, hidden_matrices, orthogonalize, work

LR, ADAM_LR = 0.05, 0.01
SHAPES = [(24, 5), (5, 24), (9, 9), (1, 9), (7, 1), (1, 1), (40, 33), (0, 3)]


class Dot(nn.Module):
    """Matrices, an embedding, a bias and an unused matrix. Gradients are exact in any order."""

    def __init__(self, shapes: list[tuple[int, ...]] = SHAPES) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrices = nn.ParameterList([torch.randn(shape, generator=generator) for shape in shapes])
        self.embedding, self.bias = nn.Embedding(3, 2), nn.Parameter(torch.ones(7))
        nn.init.ones_(self.embedding.weight)
        self.unused = nn.Parameter(torch.ones(3, 4))

    def forward(self, step: int, rank: int) -> Tensor:
        """The sum of all elements, each times a number."""
        generator = torch.Generator().manual_seed(100 * step + rank)
        used = [*self.matrices, self.embedding.weight, self.bias]
        drawn = [torch.randint(-8, 9, p.shape, generator=generator) / 4 for p in used]
        parts = [(p * numbers.to(p.dtype)).float().sum() for p, numbers in zip(used, drawn, strict=True)]
        return torch.stack(parts).sum()


def train(
    comm: Comm, steps: int, resume: Any = None, shapes: Any = SHAPES, dtype: Any = torch.float32
) -> Any:
    with comm.ledger.watch():
        model = Dot(shapes).to(dtype)
        trainer = Stage2Muon(model, comm, lr=LR, adam_lr=ADAM_LR)
        first = 0
        if resume is not None:
            trainer.load_state_dict(resume[comm.rank])
            first = 2
        state = None
        for step in range(first, steps):
            comm.ledger.clear_traffic()
            trainer.zero_grad()
            trainer.backward(model(step, comm.rank))
            trainer.step()
            if step == 1:
                state = deepcopy(trainer.state_dict())
        bytes_held = {kind: held(tensors) for kind, tensors in trainer.holdings().items()}
        sent = comm.ledger.total_sent()
        parameters = [p.detach().clone() for p in model.parameters()]
        return parameters, bytes_held, state, sent


def expected(world: int, steps: int, shapes: Any = SHAPES) -> list[Tensor]:
    """By torch's own optimizers, on one process. No gradient counts as zero, as in all of zero_min."""
    model = Dot(shapes)
    matrices = hidden_matrices(model)
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    muon = torch.optim.Muon(matrices, lr=LR, momentum=0.95, weight_decay=0.0)
    adam = torch.optim.AdamW(others, lr=ADAM_LR, weight_decay=0.0)
    for step in range(steps):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for rank in range(world):
            (model(step, rank) / world).backward()
        muon.step()
        adam.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("place", ["threads", "processes"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_ends_where_torchs_muon_ends(place: str, world: int) -> None:
    runs = run_in(place, train, world, 3)
    want = expected(world, 3)
    for rank, (got, *_) in enumerate(runs):
        for number, (mine, theirs) in enumerate(zip(got, want, strict=True)):
            # Orthogonalizing rounds to bf16 in any order: plain `+` and `@` differ by LR * 0.12.
            worst = float((mine - theirs).abs().max()) if mine.numel() else 0.0
            assert worst <= LR * 0.25, f"rank {rank}, parameter {number} is off by {worst:.3g}"
            assert torch.equal(mine, runs[0][0][number]), f"parameter {number} differs on rank {rank}"


def test_the_number_of_ranks_changes_no_bit() -> None:
    alike = [run_world(train_alike, world)[0] for world in (1, 2, 3, 4, 7)]
    for got in alike[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, alike[0], strict=True))


def train_alike(comm: Comm) -> list[Tensor]:
    """All ranks have the same numbers: their mean is exact, however many they are."""
    model = Dot()
    trainer = Stage2Muon(model, comm, lr=LR)
    for step in range(2):
        trainer.zero_grad()
        trainer.backward(model(step, 0))
        trainer.step()
    return [p.detach().clone() for p in hidden_matrices(model)]


def dealt(shapes: list[tuple[int, ...]], world: int) -> list[tuple[int, ...]]:
    """The hidden matrices in the order of the flat tensor; the unused one is the first of the model's."""
    everything = [(3, 4), *shapes]
    return [shape for start in range(world) for shape in everything[start::world]]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("shapes", [SHAPES, [(8, 8)]], ids=["many", "few"])
def test_holds_and_sends_exactly_the_formula(world: int, shapes: Any) -> None:
    runs = run_world(train, world, 2, None, shapes)
    matrices = dealt(shapes, world)
    sizes, others = [prod(shape) for shape in matrices], 6 + 7
    for rank, (_, got, *_) in enumerate(runs):
        want = muon_held(sum(sizes), others, world)
        assert got == want, f"rank {rank} holds {got} bytes, the formula says {want}"
    sent = sum(run[-1] for run in runs)
    want_sent = muon_sent(sizes, choose_owners(matrices, world), others, world)
    assert sent == want_sent, f"the ranks sent {sent} bytes, the formula says {want_sent}"


def test_real_processes_send_exactly_the_formula() -> None:
    matrices = dealt(SHAPES, 3)
    want = muon_sent([prod(shape) for shape in matrices], choose_owners(matrices, 3), 13, 3)
    assert sum(run[-1] for run in run_in("processes", train, 3, 2)) == want


def test_resumes_bit_for_bit() -> None:
    whole = run_world(train, 3, 4)
    continued = run_world(train, 3, 4, [run[2] for run in whole])
    for one, other in zip(whole, continued, strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(one[0], other[0], strict=True))


def test_a_model_of_16_bits_is_stepped_in_its_masters() -> None:
    runs = run_world(train, 3, 3, None, SHAPES, torch.bfloat16)
    fine = expected(3, 3)
    for got, *_ in runs:
        for mine, theirs in zip(got, fine, strict=True):
            assert mine.dtype == torch.bfloat16
            torch.testing.assert_close(mine.float(), theirs, rtol=0.02, atol=LR * 0.2)


def test_a_model_without_hidden_matrices_is_refused() -> None:
    def start(comm: Comm) -> None:
        Stage2Muon(nn.Sequential(nn.Embedding(4, 2), nn.LayerNorm(2)), comm)

    with pytest.raises(RuntimeError, match="no hidden matrix, so there is nothing for Muon: use Stage2"):
        run_world(start, 2)


@pytest.mark.parametrize("shape", [(30, 8), (8, 30), (16, 16)])
def test_singular_values_become_about_1(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    made = orthogonalize(matrix).float()
    values = torch.linalg.svdvals(made)
    assert float(values.min()) > 0.5 and float(values.max()) < 1.3
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    assert float((made - left @ right).norm() / (left @ right).norm()) < 0.35


def test_nobody_has_much_more_to_do_than_others() -> None:
    shapes = [(rows, columns) for rows in range(1, 12) for columns in (5, 30)]
    for world in (1, 2, 3, 4, 30):
        loads = [0] * world
        for shape, owner in zip(shapes, choose_owners(shapes, world), strict=True):
            loads[owner] += work(shape)
        assert max(loads) <= sum(loads) / world + max(map(work, shapes))
