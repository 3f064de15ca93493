"""Loss scale, overflow, masters: the rules, on every stage."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.worlds import POOL
from zero_min import STAGES, DynamicScale, MixedPrecision, StaticScale, run_world
from zero_min.comm import Comm, WorldError
from zero_min.formula import BF16, FP32, MIXED, Bytes, flag, held, sent
from zero_min.gpt import GPT, GPTConfig, batch, load_text
from zero_min.ledger import held as bytes_of

CONFIG = GPTConfig(context=8, layers=1, heads=2, width=8)
TEXT = load_text()


def trace(scaler: DynamicScale, overflows: list[int]) -> tuple[list[float], list[int]]:
    scales, left = [], []
    for overflow in overflows:
        scaler.update(bool(overflow))
        scales.append(scaler.scale)
        left.append(scaler.forgiven_left)
    return scales, left


def test_the_known_trace_of_the_dynamic_scale() -> None:
    scales, left = trace(DynamicScale(16, window=2, hysteresis=2), [1, 1, 1, 0, 0, 0, 0, 1, 1])
    assert scales == [16, 8, 4, 4, 4, 8, 8, 8, 4]
    assert left == [1, 1, 1, 1, 1, 2, 2, 1, 1]


def test_without_hysteresis_every_overflow_halves() -> None:
    assert trace(DynamicScale(16, hysteresis=1), [1, 0, 1])[0] == [8, 8, 4]


def test_consecutive_hysteresis_forgives_anew_after_each_good_step() -> None:
    overflows = [1, 0, 1, 0, 1, 1]
    assert trace(DynamicScale(16, hysteresis=2), overflows)[0] == [16, 16, 8, 8, 4, 2]
    assert trace(DynamicScale(16, hysteresis=2, consecutive_hysteresis=True), overflows)[0] == [16] * 5 + [8]


def test_a_window_of_good_steps_doubles_without_limit() -> None:
    scaler = DynamicScale(1, window=3)
    assert [trace(scaler, [0])[0][0] for _ in range(10)] == [1, 1, 1, 2, 2, 2, 4, 4, 4, 8]


def test_at_the_minimum_an_overflow_is_an_error() -> None:
    scaler = DynamicScale(3, minimum=2, hysteresis=1)
    scaler.update(True)
    assert scaler.scale == 2  # never below
    with pytest.raises(OverflowError):  # a learner chooses the words
        scaler.update(True)


def test_a_static_scale_stays_and_must_be_positive() -> None:
    scaler = StaticScale(128)
    scaler.update(True)
    assert scaler.scale == 128
    with pytest.raises(ValueError, match="must be positive, not 0"):
        StaticScale(0)


def make(comm: Comm, stage: int, dtype: torch.dtype, scale: StaticScale | None = None, **options: Any) -> Any:
    model = GPT(CONFIG).to(dtype)
    accumulate = options.pop("accumulate", None)
    return MixedPrecision(STAGES[stage](model, comm, lr=1e-2, **options), scale, accumulate)


def one_step(trainer: Any, step: int, poison: float | None = None) -> Any:
    generator = torch.Generator().manual_seed(100 * step + trainer.comm.rank)
    trainer.zero_grad()
    loss = trainer.model(*batch(TEXT, 2, CONFIG.context, generator))
    if poison is not None:
        loss = loss * poison
    trainer.backward(loss)
    return trainer.step()


def masters(trainer: Any) -> list[Tensor]:
    return [shard.detach().clone() for group in trainer.stage.optimizer.groups for shard in group["params"]]


@pytest.mark.parametrize("poison", [math.inf, math.nan])
@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_on_one_rank_skips_everywhere_and_touches_nothing(stage: int, poison: float) -> None:
    def body(comm: Comm) -> list[tuple[bool, float]]:
        trainer = make(comm, stage, torch.float16, DynamicScale(8, hysteresis=1))
        one_step(trainer, 0)
        before = [*masters(trainer), *(t.clone() for t in trainer.stage.optimizer.state())]
        report = one_step(trainer, 1, poison if comm.rank == 1 else None)
        after = [*masters(trainer), *trainer.stage.optimizer.state()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert trainer.stage.optimizer.steps == 1
        again = one_step(trainer, 2)
        return [(report.applied, report.scale), (again.applied, again.scale), (trainer.skipped, 0)]

    assert run_world(body, 3) == [[(False, 8.0), (True, 4.0), (1, 0)]] * 3


@pytest.mark.parametrize("stage", STAGES)
def test_the_scale_that_multiplied_is_the_scale_that_divides(stage: int) -> None:
    """The step in which the scale doubles must not halve its gradients."""

    def body(comm: Comm) -> list[float]:
        model = nn.Linear(1, 1, bias=False).half()
        nn.init.zeros_(model.weight)
        trainer = MixedPrecision(STAGES[stage](model, comm, max_grad_norm=1e9), DynamicScale(8, window=1))
        norms = []
        for _ in range(4):
            trainer.zero_grad()
            trainer.backward(model(torch.full((1, 1), 0.5, dtype=torch.float16)).float().sum())
            norms.append(trainer.step().grad_norm)
        assert trainer.scaler.scale > 8
        return norms

    for norms in run_world(body, 2):
        assert norms == pytest.approx([0.5] * 4)


@pytest.mark.parametrize("stage", STAGES)
def test_building_the_optimizer_moves_no_weight(stage: int) -> None:
    def body(comm: Comm) -> float:
        want = GPT(CONFIG).half().head.weight.detach().clone()
        trainer = make(comm, stage, torch.float16, weight_decay=0.5)
        assert trainer.stage.optimizer.steps == 0
        assert all(not t.any() for t in trainer.stage.optimizer.state())
        with getattr(trainer.stage, "gathered", torch.no_grad)():
            return float((trainer.model.head.weight.detach() - want).abs().max())

    assert run_world(body, 2) == [0.0] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_all_stages_walk_the_same_way_in_16_bits(stage: int, dtype: torch.dtype) -> None:
    def body(comm: Comm, number: int) -> list[Tensor]:
        trainer = make(comm, number, dtype, StaticScale(64))
        for step in range(3):
            assert one_step(trainer, step).applied
        with getattr(trainer.stage, "gathered", torch.no_grad)():
            return [p.detach().float().clone() for p in trainer.model.parameters()]

    want, got = run_world(body, 3, 0), run_world(body, 3, stage)
    for rank in range(3):
        for p, q in zip(want[rank], got[rank], strict=True):
            assert torch.equal(p, q)


@pytest.mark.rotates
@pytest.mark.parametrize("N", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("dtype", "accumulate", "each"),
    [
        (torch.float16, None, MIXED),
        (torch.bfloat16, torch.float32, BF16),
        (torch.float32, None, FP32),
    ],
)
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_are_the_paper_s(stage: int, dtype: torch.dtype, accumulate: Any, each: Bytes, N: int) -> None:
    def body(comm: Comm) -> tuple[dict[str, int], int, int]:
        with comm.ledger.watch():
            trainer = make(comm, stage, dtype, StaticScale(8), accumulate=accumulate)
            for step in range(2):
                comm.ledger.clear_traffic()
                one_step(trainer, step)
            kinds = {kind: bytes_of(tensors) for kind, tensors in trainer.holdings().items()}
            return kinds, comm.ledger.live(), comm.ledger.total_sent()

    numels = [p.numel() for p in GPT(CONFIG).parameters()]
    sizes = numels if stage == 3 else [sum(numels)]
    expected = held(stage, sizes, N, each)
    answers = run_world(body, N)
    for kinds, live, _ in answers:
        assert kinds == expected
        assert live == sum(expected.values())
    assert sum(s for *_, s in answers) == sent(stage, sizes, N, each=each) + flag(N)


def test_bf16_accumulation_loses_what_fp32_keeps() -> None:
    def body(comm: Comm, accumulate: torch.dtype | None) -> float:
        model = nn.Linear(1, 1, bias=False).bfloat16()
        stage = STAGES[2](model, comm)
        trainer = MixedPrecision(stage, accumulate=accumulate)
        for micro in range(257):  # one large gradient, then many that bf16 cannot add to it
            size = 1.0 if micro == 0 else 1 / 512
            trainer.backward(model(torch.full((1, 1), size, dtype=torch.bfloat16)).float().sum())
        return float(stage.flats[0].grad[0]) if comm.rank == 0 else 1.5

    assert run_world(body, 2, torch.float32)[0] == 1.5
    assert run_world(body, 2, None)[0] == 1.0


def test_the_minimum_is_an_error_on_every_rank() -> None:
    def body(comm: Comm) -> None:
        trainer = make(comm, 2, torch.float16, DynamicScale(1, hysteresis=1))
        one_step(trainer, 0, math.inf if comm.rank == 0 else None)

    with pytest.raises(WorldError, match="OverflowError"):
        run_world(body, 2)


def resumed(comm: Comm, stage: int) -> list[Tensor]:
    """Steps 0-5 with an overflow at 1 and 4, straight through and through a checkpoint after step 2."""

    def run(trainer: Any, steps: range) -> None:
        for step in steps:
            one_step(trainer, step, math.inf if step in (1, 4) and comm.rank == 0 else None)

    whole = make(comm, stage, torch.float16, DynamicScale(2.0**10, window=1))
    run(whole, range(3))
    saved = whole.state_dict()
    run(whole, range(3, 6))
    fresh = make(comm, stage, torch.float16, DynamicScale(2.0, window=1))
    fresh.load_state_dict(saved)
    run(fresh, range(3, 6))
    assert fresh.skipped == whole.skipped == 2
    assert fresh.scaler.scale == whole.scaler.scale
    return [a - b for a, b in zip(masters(whole), masters(fresh), strict=True)]


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_continues_bit_for_bit_with_its_scale(stage: int) -> None:
    for differences in run_world(resumed, 2, stage):
        assert all(not difference.any() for difference in differences)


def test_sixteen_bits_on_real_processes() -> None:
    for differences in POOL.run(resumed, 2, 3):
        assert all(not difference.any() for difference in differences)
