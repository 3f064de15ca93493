"""One bit a value: what is sent, what is remembered, when ranks meet, and that nothing is lost."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.worlds import POOL, run_in
from zero_min import OneBitAdam, ZeroOneAdam, run_world
from zero_min.comm import Comm, WorldError
from zero_min.compression import CompressedMean, compress, pack_signs, unpack_signs
from zero_min.formula import compressed_round, padded
from zero_min.zero_one_adam import Interval


def noise(n: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("k", range(7))
def test_packing_signs_and_back(k: int) -> None:
    x = noise(8 * k, seed=k)
    x[::3] = 0.0
    packed = pack_signs(x)
    assert packed.numel() == k
    assert torch.equal(unpack_signs(packed, x.dtype), torch.where(x >= 0, 1.0, -1.0).to(x.dtype))


def test_zero_counts_as_plus_and_bits_are_little_endian() -> None:
    x = torch.tensor([0.0, -0.0, -1, -1, -1, -1, -1, 1])
    assert pack_signs(x).tolist() == [1 + 2 + 128]


@pytest.mark.parametrize("l1", [False, True])
@pytest.mark.parametrize(
    "sizes", [[0], [1], [20], [8, 8], [0, 7, 0], [3, 5], [20, 0, 1, 19], [2, 9, 13, 1]], ids=str
)
def test_what_is_sent_and_what_is_remembered_add_up(sizes: list[int], l1: bool) -> None:
    real, seed = sum(sizes), len(sizes)
    size = -(-real // 8) * 8 + 8
    x, error = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    x[:real], error[:real] = noise(real, seed), noise(real, seed + 1)
    wanted = x + error
    packed, scales = compress(x, error, sizes, l1)
    assert scales.dtype == torch.float32 and len(scales) == len(sizes)
    pieces = unpack_signs(packed, x.dtype).split([*sizes, size - real])
    said = torch.cat([scale * piece for scale, piece in zip([*scales.tolist(), 0], pieces, strict=True)])
    assert torch.allclose((said + error)[:real], wanted[:real], rtol=1e-12, atol=1e-12)
    assert not error[real:].any()  # padding owes nothing


def test_the_two_scales() -> None:
    x = torch.tensor([3.0, -4, 0, 0, 0, 0, 0, 0])
    assert compress(x, torch.zeros(8), [8])[1].tolist() == pytest.approx([1.767767])
    assert compress(x, torch.zeros(8), [8], l1=True)[1].tolist() == pytest.approx([0.875])
    assert compress(x, torch.zeros(8), [2])[1].tolist() == pytest.approx(
        [3.535534]
    )  # padding does not dilute
    assert compress(x, torch.zeros(8), [1, 1])[1].tolist() == [3, 4]  # each piece has its own


def mean_of(comm: Comm, sizes: list[int], rounds: int, l1: bool) -> dict[str, Any]:
    numel = sum(sizes)
    compressed = CompressedMean(comm, sizes, torch.zeros(1, dtype=torch.float64), l1)
    inputs, outputs = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for step in range(rounds):
        x = noise(numel, 10 * step + comm.rank) + 1
        inputs += x
        before = x.clone()
        outputs += compressed(x)
        assert torch.equal(x, before)  # the input is left alone
    server = torch.zeros(compressed.worker_error.numel(), dtype=torch.float64)
    server[comm.rank * compressed.chunk : (comm.rank + 1) * compressed.chunk] = compressed.server_error
    worker = compressed.worker_error[:numel]
    return {
        "in": inputs,
        "out": outputs,
        "errors": (worker, server[:numel]),
        "sent": comm.ledger.total_sent(),
    }


@pytest.mark.rotates
@pytest.mark.parametrize("place", ["threads", "processes"])
@pytest.mark.parametrize("N", [1, 2, 3, 4])
@pytest.mark.parametrize("sizes", [[1], [30, 0, 7], [64]], ids=str)
def test_nothing_is_lost_only_late(place: str, N: int, sizes: list[int]) -> None:
    """Sum of means = sum of what was said + what every rank still remembers, divided fairly."""
    for l1 in (False, True):
        answers = run_in(place, mean_of, N, sizes, 5, l1)
        mean_in = sum(a["in"] for a in answers) / N
        remembered = sum(a["errors"][0] for a in answers) / N + sum(a["errors"][1] for a in answers)
        for answer in answers:
            torch.testing.assert_close(answer["out"] + remembered, mean_in, rtol=0, atol=1e-5)
            assert torch.equal(answer["out"], answers[0]["out"])  # every rank hears the same
        assert sum(a["sent"] for a in answers) == 5 * compressed_round(sizes, N)


def test_one_bit_twice_is_a_thirty_second_of_fp32() -> None:
    numel, N = 2**20, 4
    all_reduce = 2 * (N - 1) * numel * 4
    assert all_reduce / compressed_round([numel], N) == pytest.approx(32, rel=1e-3)


class Line(nn.Module):
    """A small regression; `spare` never gets a gradient."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3, dtype=dtype)
        self.spare = nn.Parameter(torch.ones(4, dtype=dtype))
        with torch.no_grad():
            self.layer.weight.copy_(noise(15, 1).view(3, 5))
            self.layer.bias.zero_()

    def forward(self, step: int, rank: int) -> Tensor:
        x = noise(20, 100 * step + rank).view(4, 5).to(self.layer.weight.dtype)
        return (self.layer(x) - x[:, :3]).square().mean()


FAST = {"lr": 0.02, "betas": (0.9, 0.99), "kappa": 2, "freeze_step": 9, "local_kappa": 4, "local_clip": 4}


def walk(comm: Comm, optimizer_class: type, steps: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    model = Line()
    optimizer = optimizer_class(model, comm, **options)
    log = []
    for step in range(steps):
        comm.ledger.clear_traffic()
        optimizer.zero_grad()
        optimizer.backward(model(step, comm.rank))
        optimizer.step()
        flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        log.append({"x": flat.clone(), "m": optimizer.m.clone(), "sent": comm.ledger.total_sent()})
    return log


def test_one_rank_remembers_every_gradient() -> None:
    """Between exact rounds the momentum must go on moving, also with nobody to talk to."""
    (log,) = run_world(walk, 1, ZeroOneAdam, 9, {**FAST, "kappa": 1})
    for before, after in itertools.pairwise(log):
        assert not torch.equal(before["m"], after["m"])
    model = Line()
    assert not torch.equal(log[0]["x"], torch.cat([p.detach().reshape(-1) for p in model.parameters()]))


@pytest.mark.parametrize("N", [2, 3])
@pytest.mark.parametrize("optimizer_class", [OneBitAdam, ZeroOneAdam])
def test_before_anything_is_compressed_it_is_adam(optimizer_class: type, N: int) -> None:
    options = {"lr": 0.02, "betas": (0.9, 0.99), "freeze_step": 100, "weight_decay": 0.1}
    if optimizer_class is ZeroOneAdam:
        options["kappa"] = 1000
    logs = run_world(walk, N, optimizer_class, 6, options)
    model = Line()
    adam = torch.optim.AdamW(model.parameters(), lr=0.02, betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(6):
        model.zero_grad()
        sum(model(step, rank) / N for rank in range(N)).backward()
        model.spare.grad = torch.zeros_like(model.spare)
        adam.step()
        want = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        for log in logs:
            torch.testing.assert_close(log[step]["x"], want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("place", ["threads", "processes"])
@pytest.mark.parametrize("N", [2, 3, 4])
def test_ranks_are_bitwise_equal_whenever_they_meet(place: str, N: int) -> None:
    steps = 40
    logs = run_in(place, walk, N, ZeroOneAdam, steps, {**FAST, "weight_decay": 0.1})
    equal = [all(torch.equal(log[step]["x"], logs[0][step]["x"]) for log in logs) for step in range(steps)]
    sent = [logs[0][step]["sent"] > 0 for step in range(steps)]
    assert equal == sent  # before the freeze always; afterwards exactly when they talked
    assert not all(equal)


@pytest.mark.parametrize("N", [2, 4])
def test_a_parameter_without_gradient_stays_although_one_bit_cannot_say_zero(N: int) -> None:
    for optimizer_class, options in ((ZeroOneAdam, FAST), (OneBitAdam, {"freeze_step": 3, "lr": 0.02})):
        for log in run_world(walk, N, optimizer_class, 40, options):
            assert torch.equal(log[-1]["x"][:4], torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize("N", [1, 2])
def test_weight_decay_never_enters_the_momentum(N: int) -> None:
    """Gradients are zero: the weights shrink and the momentum stays zero, also at a meeting."""

    def body(comm: Comm) -> tuple[float, float]:
        model = nn.Linear(4, 1, bias=False, dtype=torch.float64)
        nn.init.ones_(model.weight)
        optimizer = ZeroOneAdam(model, comm, **FAST, weight_decay=0.5)
        for _ in range(20):
            optimizer.zero_grad()
            optimizer.backward(model(torch.ones(1, 4, dtype=torch.float64)).sum() * 0)
            optimizer.step()
        return float(optimizer.m.abs().max()), float(model.weight.detach()[0, 0])

    for momentum, weight in run_world(body, N):
        assert momentum == 0
        assert weight == pytest.approx((1 - 0.02 * 0.5) ** 20)


@pytest.mark.parametrize("N", [1, 3])
def test_a_step_leaves_the_gradients_as_they_were(N: int) -> None:
    def body(comm: Comm) -> bool:
        model = Line()
        optimizer = ZeroOneAdam(model, comm, **FAST)
        kept = []
        for step in range(14):
            optimizer.zero_grad()
            optimizer.backward(model(step, comm.rank))
            before = model.layer.weight.grad.clone()
            optimizer.step()
            kept.append(torch.equal(model.layer.weight.grad, before))
        return all(kept)

    assert all(run_world(body, N))


@pytest.mark.parametrize(("steps", "exact"), [(1000, 96), (10_000, 148), (100_000, 201)])
def test_exact_rounds_grow_with_the_logarithm(steps: int, exact: int) -> None:
    interval, count = Interval(16), 0
    for step in range(1, steps + 1):
        if interval.due(step):
            count += 1
            interval.count()
    assert count == exact


def test_an_interval_stops_growing_at_its_longest() -> None:
    interval = Interval(patience=3, longest=4)
    lengths = []
    for _ in range(12):
        interval.count()
        lengths.append(interval.length)
    assert lengths == [1, 1, 2, 2, 2, 4, 4, 4, 4, 4, 4, 4]


@pytest.mark.parametrize("N", [2, 3])
def test_volume_is_the_number_of_rounds_times_their_size(N: int) -> None:
    def body(comm: Comm) -> tuple[int, dict[str, int], list[int]]:
        model = Line(torch.float32)
        optimizer = ZeroOneAdam(model, comm, **FAST)
        comm.ledger.clear_traffic()
        for step in range(40):
            optimizer.zero_grad()
            optimizer.backward(model(step, comm.rank))
            optimizer.step()
        return comm.ledger.total_sent(), optimizer.rounds, [p.numel() for p in model.parameters()]

    answers = run_world(body, N)
    rounds, sizes = answers[0][1], answers[0][2]
    assert sum(rounds.values()) == 40 and all(rounds.values())
    exact = 2 * (N - 1) * padded([sum(sizes)], N) * 4
    expected = rounds["exact"] * exact + rounds["one bit"] * compressed_round(sizes, N)
    assert sum(sent for sent, *_ in answers) == expected


@pytest.mark.parametrize("freeze_step", [1, 10])
@pytest.mark.parametrize("optimizer_class", [OneBitAdam, ZeroOneAdam])
def test_a_non_finite_gradient_names_its_rank(optimizer_class: type, freeze_step: int) -> None:
    def body(comm: Comm) -> None:
        model = Line(torch.float32)
        optimizer = optimizer_class(model, comm, freeze_step=freeze_step)
        for step in range(4):
            optimizer.zero_grad()
            loss = model(step, comm.rank)
            optimizer.backward(loss * float("nan") if step == 3 and comm.rank == 1 else loss)
            optimizer.step()

    with pytest.raises(WorldError, match="rank 1: its gradient contains inf or NaN"):
        run_world(body, 2)


def resumed(comm: Comm, at: int, optimizer_class: type, options: dict[str, Any]) -> bool:
    def run(model: nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            optimizer.backward(model(step, comm.rank))
            optimizer.step()

    whole = Line()
    straight = optimizer_class(whole, comm, **options)
    run(whole, straight, range(at))
    saved = straight.state_dict()
    run(whole, straight, range(at, 44))
    model = Line()
    fresh = optimizer_class(model, comm, **options)
    fresh.load_state_dict(saved)
    run(model, fresh, range(at, 44))
    same = [torch.equal(p, q) for p, q in zip(whole.parameters(), model.parameters(), strict=True)]
    return all(same) and fresh.rounds == straight.rounds if optimizer_class is ZeroOneAdam else all(same)


@pytest.mark.rotates
@pytest.mark.parametrize("at", [1, 3, 8, 9, 10, 15, 30, 31, 33])
def test_resuming_in_any_phase_continues_bit_for_bit(at: int) -> None:
    assert all(run_world(resumed, 3, at, ZeroOneAdam, {**FAST, "weight_decay": 0.1}))


@pytest.mark.parametrize("at", [2, 9, 20])
def test_one_bit_adam_resumes_too(at: int) -> None:
    assert all(run_world(resumed, 2, at, OneBitAdam, {"freeze_step": 9, "lr": 0.02}))


def test_resuming_on_real_processes() -> None:
    assert all(POOL.run(resumed, 3, 31, ZeroOneAdam, FAST))


@pytest.mark.parametrize("wrong", [{"freeze_step": 0}, {"local_clip": 0}, {"kappa": 0}], ids=str)
def test_schedules_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(WorldError, match="must be at least 1"):
        run_world(lambda comm: ZeroOneAdam(Line(), comm, **wrong), 1)


def test_a_16_bit_model_is_refused() -> None:
    with pytest.raises(WorldError, match="keep the model in fp32"):
        run_world(lambda comm: OneBitAdam(Line().half(), comm), 1)


def test_meeting_by_hand_makes_ranks_equal_for_saving() -> None:
    def body(comm: Comm) -> list[float]:
        model = Line()
        optimizer = ZeroOneAdam(model, comm, **FAST)
        for step in range(31):
            optimizer.zero_grad()
            optimizer.backward(model(step, comm.rank))
            optimizer.step()
        optimizer.meet()
        optimizer.meet()  # again is harmless
        return model.layer.weight.detach().flatten().tolist()

    answers = run_world(body, 3)
    assert answers[0] == answers[1] == answers[2]
