"""What prefetch leaves as it is in stage 3: numbers, bytes, and nothing whole between steps."""

import pytest
import torch
from torch import Tensor, nn

from tests.worlds import POOL
from tests.zero_min.test_stage3 import chain, seeded, whole_now
from zero_min import DistComm, Stage3, Stage3Prefetch, run_world
from zero_min.comm import Comm
from zero_min.formula import padded


def trained(comm: Comm, stage_class: type, micro_batches: int = 1) -> tuple[list[Tensor], int]:
    """The parameters after three steps, and the bytes that this rank has sent in the last."""
    model = chain()
    stage = stage_class(model, comm)
    for _ in range(3):
        comm.ledger.clear_traffic()
        with torch.no_grad():
            model(torch.ones(2, 6))  # an evaluation in between is not part of the order
        stage.zero_grad()
        for _ in range(micro_batches):
            stage.backward(model(torch.ones(2, 6) * (comm.rank + 1)).square().sum())
        assert whole_now(stage) == [] and not getattr(stage, "coming", None)
        stage.step()
    sent = comm.ledger.total_sent()
    with stage.gathered():
        return [p.detach().clone() for p in model.parameters()], sent


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_prefetch_changes_not_one_bit_and_no_byte(micro_batches: int) -> None:
    plain, ahead = (run_world(trained, 3, each, micro_batches) for each in (Stage3, Stage3Prefetch))
    for (params, sent), (others, bytes_too) in zip(plain, ahead, strict=True):
        assert sent == bytes_too
        assert all(map(torch.equal, params, others))


def trained_in_a_process(comm: Comm, stage_class: type) -> list[Tensor]:
    return trained(DistComm(check=True), stage_class)[0]


def test_processes_have_the_same_bits() -> None:
    (threads, _), processes = (
        run_world(trained, 2, Stage3)[0],
        POOL.run(trained_in_a_process, 2, Stage3Prefetch),
    )
    for params in processes:
        assert all(map(torch.equal, params, threads))


def test_two_modules_have_memory_at_a_time() -> None:
    def body(comm: Comm) -> int:
        model = chain(depth=6)
        stage = Stage3Prefetch(model, comm)
        most = 0

        def look(*_: object) -> None:
            nonlocal most
            most = max(most, sum(s.flat.untyped_storage().nbytes() for s in stage.sliced.values()))

        for layer in model:
            layer.register_forward_hook(look, prepend=True)
        for s in stage.sliced.values():
            s.param.register_hook(look)
        for _ in range(3):
            stage.backward(model(torch.ones(2, 6)).sum())
            stage.step()
            stage.zero_grad()
        return most

    assert run_world(body, 4) == [2 * 4 * padded([36, 6], 4)] * 4


def test_prefetch_follows_a_model_that_changes_its_mind() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x: Tensor, left: bool) -> Tensor:
            return self.c(self.a(x) if left else self.b(x)).sum()

    def body(comm: Comm, stage_class: type) -> list[Tensor]:
        model = seeded(Fork())
        stage = stage_class(model, comm, lr=0.1)
        for step in range(6):
            stage.zero_grad()
            stage.backward(model(torch.ones(1, 3) + comm.rank, left=step in (0, 1, 4)))
            assert whole_now(stage) == [] and not getattr(stage, "coming", None)
            stage.step()
        with stage.gathered():
            return [p.detach().clone() for p in model.parameters()]

    plain, ahead = run_world(body, 2, Stage3), run_world(body, 2, Stage3Prefetch)
    for p, q in zip(plain[0], ahead[0], strict=True):
        assert torch.equal(p, q)


def test_a_failing_backward_leaves_nothing_on_its_way() -> None:
    def body(comm: Comm) -> list[str]:
        model = chain()
        stage = Stage3Prefetch(model, comm)
        stage.backward(model(torch.ones(1, 6)).sum())
        x = torch.ones(1, 6)
        for number, layer in enumerate(model):
            x = layer(x)
            if number == 2:
                x.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            stage.backward(x.sum())
        left = whole_now(stage) + [s.name for s in stage.coming]
        stage.zero_grad()
        stage.backward(model(torch.ones(1, 6)).sum())
        return left + whole_now(stage) + [s.name for s in stage.coming]

    assert run_world(body, 2) == [[], []]
