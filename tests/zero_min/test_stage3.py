"""What only stage 3 does: gather, release, and notice when ranks part ways."""

import gc
import math

import pytest
import torch
from torch import Tensor, nn

from tests.cases import Case, sizes, train
from tests.trainers import Subject
from tests.worlds import POOL, RankError
from zero_min import DistComm, Stage3, run_world
from zero_min.comm import Comm, WorldError
from zero_min.formula import padded
from zero_min.gpt import GPT, GPTConfig, batch, load_text
from zero_min.ledger import held
from zero_min.stage3 import Sliced

SUBJECT = Subject("min", 3)


def seeded(model: nn.Module) -> nn.Module:
    """The same values on every rank: rank threads share torch's global generator."""
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.4, generator=generator)
    return model


def chain(width: int = 6, depth: int = 4) -> nn.Sequential:
    layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    return seeded(layers)


def test_a_released_parameter_keeps_its_shape_and_reads_nan() -> None:
    def body(comm: Comm) -> None:
        model = chain()
        Stage3(model, comm)
        for p in model.parameters():
            assert p.shape in [(6, 6), (6,)] and p.numel() in (36, 6)
            assert p.isnan().all()
            assert p.untyped_storage().nbytes() == 4  # one NaN, whatever the shape

    run_world(body, 3)


def test_a_parameter_used_outside_its_module_is_loudly_nan() -> None:
    def body(comm: Comm) -> float:
        model = chain()
        Stage3(model, comm)
        return float(nn.functional.linear(torch.ones(1, 6), model[0].weight.detach()).sum())

    assert all(math.isnan(value) for value in run_world(body, 2))


def whole_now(stage: Stage3) -> list[str]:
    return [s.name for s in stage.sliced.values() if s.is_whole]


def test_only_one_module_is_whole_at_a_time_in_forward() -> None:
    def body(comm: Comm) -> list[list[str]]:
        model = chain()
        stage = Stage3(model, comm)
        seen: list[list[str]] = []
        for layer in model:
            layer.register_forward_hook(lambda *_: seen.append(whole_now(stage)), prepend=True)
        model(torch.ones(1, 6))
        seen.append(whole_now(stage))
        return seen

    expected = [[f"{i}.weight", f"{i}.bias"] for i in range(4)] + [[]]
    assert run_world(body, 2) == [expected] * 2


def test_the_working_set_is_one_module() -> None:
    def body(comm: Comm) -> int:
        model = chain(depth=6)
        stage = Stage3(model, comm)
        most = 0
        gather = Sliced.gather

        def watched(s: Sliced) -> None:
            nonlocal most
            gather(s)
            most = max(most, sum(t.flat.untyped_storage().nbytes() for t in stage.sliced.values()))

        for s in stage.sliced.values():
            s.gather = lambda s=s: watched(s)
        for _ in range(3):
            stage.backward(model(torch.ones(2, 6)).sum())
            stage.step()
            stage.zero_grad()
        assert whole_now(stage) == []
        return most

    assert run_world(body, 4) == [4 * padded([36, 6], 4)] * 4


class Skips(nn.Module):
    """Three equal layers; the rank given may leave out the second."""

    def __init__(self, skips: tuple[int, ...]) -> None:
        super().__init__()
        self.skips = skips
        self.layers = nn.ModuleList(chain(4, 3))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != 1 or rank not in self.skips:
                x = layer(x)
        return x.sum()


def one_step(comm: Comm, skips: tuple[int, ...]) -> list[str]:
    model = Skips(skips)
    stage = Stage3(model, comm)
    stage.backward(model(torch.ones(1, 4), comm.rank))
    stage.step()
    return whole_now(stage)


def test_a_module_that_one_rank_skips_is_named_with_both_positions() -> None:
    with pytest.raises(WorldError, match="made different calls") as caught:
        run_world(one_step, 2, (1,))
    message = str(caught.value)
    assert "rank 0: all_gather([8] float32) of layers.1.weight at stage3.py" in message
    assert "rank 1: all_gather([8] float32) of layers.2.weight at stage3.py" in message


def test_a_module_that_all_ranks_skip_is_neither_gathered_nor_missed() -> None:
    assert run_world(one_step, 2, (0, 1)) == [[], []]


def one_step_checked(comm: Comm, skips: tuple[int, ...]) -> list[str]:
    return one_step(DistComm(check=True), skips)


def test_processes_that_part_ways_say_so_instead_of_mixing_layers() -> None:
    assert POOL.run(one_step_checked, 2, ()) == [[], []]
    with pytest.raises(RankError) as caught:
        POOL.run(one_step_checked, 2, (1,), collective=5)
    message = str(caught.value)
    assert "the ranks made different calls" in message
    assert "rank 0: call 9, all_gather([8] float32) of layers.1.weight" in message
    assert "rank 1: call 9, all_gather([8] float32) of layers.2.weight" in message


@pytest.mark.parametrize("N", [2, 3])
def test_what_is_not_used_is_not_sent(N: int) -> None:
    case = Case("unused", dtype=torch.float32)
    spare = 4 * (N - 1) * padded([11], N)
    usual = 4 * (N - 1) * 3 * padded(sizes(case, 3), N)
    sent = sum(run.sent for run in run_world(train, N, SUBJECT, case))
    assert sent == usual - spare  # gathered with its owner, the root module, but never reduced


def test_a_module_called_twice_is_gathered_for_each_call() -> None:
    case = Case("twice", dtype=torch.float32)
    middle = 4 * padded([25, 5], 2)
    usual = 4 * 3 * padded(sizes(case, 3), 2)
    assert sum(run.sent for run in run_world(train, 2, SUBJECT, case)) == usual + middle


def test_a_tied_weight_is_gathered_once_by_the_module_around_its_users() -> None:
    def body(comm: Comm) -> tuple[int, list[int]]:
        config = GPTConfig(context=8, layers=1, width=8, heads=2)
        model = GPT(config)
        numels = [p.numel() for p in model.parameters()]
        stage = Stage3(model, comm)
        comm.ledger.clear_traffic()
        generator = torch.Generator().manual_seed(comm.rank)
        stage.backward(model(*batch(load_text(), 2, 8, generator)))
        stage.step()
        return comm.ledger.total_sent(), numels

    answers = run_world(body, 2)
    assert sum(sent for sent, _ in answers) == 4 * 3 * padded(answers[0][1], 2)


def test_fifty_steps_leak_nothing() -> None:
    def body(comm: Comm) -> tuple[int, int]:
        live = []
        with comm.ledger.watch():
            model = chain()
            stage = Stage3(model, comm)
            for step in range(50):
                stage.zero_grad()
                stage.backward(model(torch.ones(2, 6)).sum())
                stage.step()
                if step in (5, 49):
                    gc.collect()
                    live.append(comm.ledger.live())
        return live[0], live[1]

    for early, late in run_world(body, 2):
        assert early == late


def test_evaluation_gathers_and_releases_too() -> None:
    def body(comm: Comm) -> tuple[float, list[str]]:
        model = chain()
        with torch.no_grad():
            want = float(model(torch.ones(1, 6)).sum())
        stage = Stage3(model, comm)
        with torch.no_grad():
            got = float(model(torch.ones(1, 6)).sum())
        return got - want, whole_now(stage)

    assert run_world(body, 3) == [(0.0, [])] * 3


def test_a_failing_backward_can_be_followed_by_a_good_one() -> None:
    def body(comm: Comm) -> list[str]:
        model = chain()
        stage = Stage3(model, comm)
        y = model(torch.ones(1, 6))
        y.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            stage.backward(y.sum())
        stage.zero_grad()
        stage.backward(model(torch.ones(1, 6)).sum())
        return whole_now(stage)

    assert run_world(body, 2) == [[], []]


class Returns(nn.Module):
    """A module that hands its parameter out, as it is or as a copy."""

    def __init__(self, copy: bool) -> None:
        super().__init__()
        self.copy = copy
        self.table = nn.Parameter(torch.ones(4, 3))

    def forward(self, rows: int) -> Tensor:
        return self.table[:rows].clone() if self.copy else self.table[:rows]


class UsesIt(nn.Module):
    def __init__(self, copy: bool) -> None:
        super().__init__()
        self.inner = Returns(copy)

    def forward(self) -> Tensor:
        return self.inner(2).square().sum()


def test_a_module_that_returns_its_parameter_is_refused_by_name() -> None:
    def body(comm: Comm, copy: bool) -> float:
        model = UsesIt(copy)
        stage = Stage3(model, comm)
        loss = model()
        stage.backward(loss)
        return float(loss.detach())

    assert run_world(body, 2, True) == [6.0, 6.0]
    with pytest.raises(WorldError, match=r"returns inner.table itself or a view of it: return a clone"):
        run_world(body, 2, False)


def test_writing_to_a_released_parameter_is_refused_at_the_next_gather() -> None:
    def body(comm: Comm) -> None:
        model = chain()
        Stage3(model, comm)
        model[0].weight.data.zero_()
        model(torch.ones(1, 6))

    with pytest.raises(WorldError, match=r"a released parameter was written to; gather first"):
        run_world(body, 1)
    assert run_world(lambda comm: whole_now(Stage3(chain(), comm)), 1) == [[]]  # and nobody else suffers


def test_loading_after_a_failed_forward_uses_the_loaded_weights() -> None:
    def body(comm: Comm) -> bool:
        model = chain()
        stage = Stage3(model, comm)
        saved = stage.state_dict()
        stage.backward(model(torch.ones(1, 6)).sum())
        stage.step()
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 5))  # too narrow: the first layer stays whole
        stage.load_state_dict(saved)
        with torch.no_grad():
            return torch.equal(model(torch.ones(1, 6)), chain()(torch.ones(1, 6)))

    assert run_world(body, 2) == [True, True]


def test_frozen_16_bit_parameters_have_no_hidden_copy() -> None:
    def body(comm: Comm) -> tuple[int, int]:
        with comm.ledger.watch():
            model = chain().bfloat16()
            model[1].requires_grad_(False)
            stage = Stage3(model, comm)
            return comm.ledger.live(), sum(held(tensors) for tensors in stage.holdings().values())

    for live, admitted in run_world(body, 2):
        assert live == admitted
