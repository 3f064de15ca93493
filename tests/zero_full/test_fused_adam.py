"""Adam in one sweep: what torch computes in passes, and torch's own step wherever somebody could tell."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.slow_copies import slow_copies
from tests.worlds import POOL, run_each
from tests.zero_full.runs import Net, config, data, fragments
from zero_full.optim.fused_adam import FusedAdam, FusedAdamStep, is_plain_adam

STAGES = (0, 1, 2, 3)
BF16 = {"bf16": {"enabled": True}}
KEYS: dict[str, dict[str, Any]] = {
    "fp32, clipped": {"gradient_clipping": 0.1},
    "bf16": BF16,
    "bf16, clipped, bf16 gradients": {
        **BF16,
        "gradient_clipping": 0.1,
        "data_types": {"grad_accum_dtype": "bf16"},
    },
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "bf16 masters": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def trained(
    comm: Any, stage: int, keys: dict[str, Any], swept: bool, kind: str = "AdamW", steps: int = 4
) -> tuple[dict[str, Tensor], dict[str, Any], list[float]]:
    """Parameters, this rank's state and the norms; counts that the sweep ran, or did not."""
    optimizer = {"type": kind, "params": {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": kind == "AdamW"}}
    calls: list[float] = []
    step = FusedAdamStep.step

    def counted(self: FusedAdamStep, pieces: Any, factor: float, peers: Any) -> None:
        calls.append(factor)
        step(self, pieces, factor, peers)

    FusedAdamStep.step = counted  # type: ignore[method-assign]
    try:
        engine, _, _, _ = zero_full.initialize(model=Net(), config=config(stage, optimizer=optimizer, **keys))
        if not swept:
            engine.optimizer.base.param_groups[0]["foreach"] = True
        dtype, norms = next(engine.parameters()).dtype, []
        for number in range(steps):
            engine.backward(engine(data(number, 0, comm.rank, dtype)))
            engine.step()
            norms.append(engine.get_global_grad_norm() or 0.0)
    finally:
        FusedAdamStep.step = step  # type: ignore[method-assign]
    assert len(calls) == (steps if swept else 0)
    parameters = {name: p.clone() for name, p in engine.module_state_dict().items()}
    state = fragments(engine)
    engine.destroy()
    return parameters, state, norms


@pytest.mark.rotates
@pytest.mark.pairwise
@pytest.mark.parametrize("keys", [k for k in KEYS if k != "bf16 masters"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_sweep_does_what_torch_does_in_passes(world_size: int, stage: int, keys: str) -> None:
    once = POOL.run(trained, world_size, stage, KEYS[keys], True)
    passes = POOL.run(trained, world_size, stage, KEYS[keys], False)
    for (mine, state, norms), (theirs, wanted, their_norms) in zip(once, passes, strict=True):
        low = next(iter(mine.values())).dtype != torch.float32
        assert norms == pytest.approx(their_norms, rel=0.02 if low else 1e-5)
        torch.testing.assert_close(mine, theirs, rtol=2**-7 if low else 1e-4, atol=1e-2 if low else 1e-5)
        assert state.keys() == wanted.keys()
        for name in state:
            assert state[name]["state"].keys() == wanted[name]["state"].keys()
            for key, value in state[name]["state"].items():
                assert (value.shape, value.dtype) == (wanted[name]["state"][key].shape, torch.float32)


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_both_ways_of_weight_decay(kind: str) -> None:
    (mine, _, _), (theirs, _, _) = (POOL.run(trained, 1, 1, {}, swept, kind)[0] for swept in (True, False))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


LOW_STATE = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
LOW_FP16 = {"enabled": True, "fp16_master_weights_and_grads": True}


@pytest.mark.parametrize(
    ("keys", "kind", "beta2", "warns"),
    [
        ({"bf16": LOW_STATE}, "Adam", 0.999, True),
        ({"bf16": LOW_STATE}, "AdamW", 0.997, True),
        ({"bf16": LOW_STATE}, "AdamW", 0.996, False),
        ({"bf16": LOW_STATE}, "SGD", None, False),
        ({"bf16": {**LOW_STATE, "bf16_optimizer_states": False}}, "AdamW", 0.999, False),
        (BF16, "AdamW", 0.9999, False),
        ({}, "AdamW", 0.999, False),
        ({"fp16": LOW_FP16}, "AdamW", 0.999, False),
        ({"fp16": LOW_FP16}, "AdamW", 0.9996, True),
    ],
)
def test_second_moments_with_too_few_bits_to_become_smaller_are_warned_of(
    keys: dict[str, Any], kind: str, beta2: float | None, warns: bool
) -> None:
    params = {"lr": 0.01, **({} if beta2 is None else {"betas": [0.9, beta2]})}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine, _, _, _ = zero_full.initialize(
            model=Net(), config=config(1, optimizer={"type": kind, "params": params}, **keys)
        )
        engine.destroy()
    said = [str(each.message) for each in caught if "second moments" in str(each.message)]
    assert len(said) == warns
    for text in said:
        assert f"beta2 = {beta2}" in text and "Use a beta2 of" in text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_warning_is_right(dtype: torch.dtype) -> None:
    """From the beta2 that it names a moment dies down; a little above it stays."""
    least = torch.finfo(dtype).eps / 2
    after: list[float] = []
    for beta2 in (1 - least, 1 - least * 0.99):
        moment = torch.tensor(1.99, dtype=dtype)
        for _ in range(3000):
            moment = (moment.float() * beta2).to(dtype)
        after.append(float(moment))
    assert after[0] < 0.3 and after[1] >= 1


@pytest.mark.parametrize("low_state", [False, True])
def test_bf16_masters_keep_their_moments_in_what_is_asked_for(low_state: bool) -> None:
    section = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": low_state}
    for _, state, _ in POOL.run(trained, 2, 2, {"bf16": section}, True):
        moments = {each["state"][key].dtype for each in state.values() for key in ("exp_avg", "exp_avg_sq")}
        assert moments == {torch.bfloat16 if low_state else torch.float32}


def copied(comm: Any, stage: int, precision: str) -> bool:
    engine, _, _, _ = zero_full.initialize(
        model=Net(), config=config(stage, **{precision: {"enabled": True}})
    )
    for number in range(3):
        engine.backward(engine(data(number, 0, comm.rank, TYPES[precision])))
        engine.step()
    same = [
        torch.equal(group.parameters.shard, group.master.values.to(group.parameters.dtype))
        for group in engine.optimizer.trained
    ]
    engine.destroy()
    return all(same)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_are_their_masters_rounded_padding_too(stage: int, precision: str) -> None:
    assert all(POOL.run(copied, 3, stage, precision))


class Own(torch.optim.AdamW):
    """Somebody's own."""


def patched(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(params)
    optimizer.step = lambda: None  # type: ignore[method-assign, assignment, misc]
    return optimizer


@pytest.mark.parametrize(
    "make",
    [
        Own,
        patched,
        torch.optim.SGD,
        torch.optim.NAdam,
        lambda params: torch.optim.AdamW(params, amsgrad=True),
        lambda params: torch.optim.AdamW(params, maximize=True),
        lambda params: torch.optim.AdamW(params, foreach=True),
        lambda params: torch.optim.AdamW(params, fused=False),
        lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1), capturable=True),
    ],
)
def test_who_could_tell_the_difference_gets_torchs_own_step(make: Callable[[Any], Any]) -> None:
    assert not is_plain_adam(make([nn.Parameter(torch.ones(3))]))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, FusedAdam])
def test_torchs_own_are_swept(kind: type[torch.optim.Optimizer]) -> None:
    assert is_plain_adam(kind([nn.Parameter(torch.ones(3))]))


def engine_of(**keys: Any) -> Any:
    return zero_full.initialize(model=Net(), config=config(2, **keys))[0]


def test_a_scheduler_on_the_wrapped_optimizer_does_not_complain() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    assert is_plain_adam(optimizer)
    engine, _, _, _ = zero_full.initialize(
        model=model, optimizer=optimizer, config={**config(1), "optimizer": None}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.backward(engine(data(0, 0, 0)))
        engine.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_gradients_can_be_read_unscaled_before_and_after_a_step() -> None:
    engine = engine_of(fp16={"enabled": True, "initial_scale_power": 8, "loss_scale_window": 1})
    weight = engine.module.layers[0].weight
    for number in range(3):  # the scale grows on the way
        engine.backward(engine(data(number, 0, 0, torch.float16)))
        before = zero_full.safe_get_full_grad(weight)
        engine.optimizer.step()
        after = zero_full.safe_get_full_grad(weight)
        assert before is not None and after is not None and 0 < float(before.abs().max()) < 10
        torch.testing.assert_close(after, before)
        engine.optimizer.zero_grad()


def test_steps_on_the_same_gradients_repeat_though_the_scale_grows_in_between() -> None:
    keys = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 1}}
    engine = engine_of(**keys)
    engine.backward(engine(data(0, 0, 0, torch.float16)))
    norms = []
    for _ in range(4):
        engine.optimizer.step()
        norms.append(engine.optimizer.last.grad_norm)
    assert engine.loss_scale() > 2**8 and norms == [norms[0]] * 4
    engine.backward(engine(data(1, 0, 0, torch.float16)))
    with pytest.raises(RuntimeError, match="Call zero_grad after every step"):
        engine.optimizer.step()


def test_gradients_in_other_memory_formats_are_read_in_order() -> None:
    """A rank alone reads `param.grad` itself, and autograd may leave that transposed."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(6.0).view(2, 3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x).sum()

    engine = zero_full.initialize(model=Turned(), config=config(1, gradient_clipping=1e9))[0]
    weight = engine.module.weight
    expected = torch.optim.AdamW([nn.Parameter(weight.detach().clone())], lr=0.01, weight_decay=0.1)
    mine = expected.param_groups[0]["params"][0]
    for number in range(3):
        x = torch.arange(6.0).view(2, 3) * (-1) ** number + number
        engine.backward(engine(x))
        weight.grad = weight.grad.t().contiguous().t()
        mine.grad = x
        engine.step()
        expected.step()
    torch.testing.assert_close(weight.detach(), mine.detach())


# Without bias correction ------------------------------------------------------------------------

LR, BETAS, EPS, DECAY = 0.01, (0.9, 0.99), 1e-6, 0.1
CPU_OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
STOCHASTIC = {**LOW_STATE, "stochastic_rounding": True, "stochastic_rounding_seed": 3}
IN_ALL: list[tuple[int, dict[str, Any]]] = [
    (0, KEYS["fp32, clipped"]),
    (1, {"fp16": {"enabled": True, "initial_scale_power": 8}}),
    (1, {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}),
    (2, KEYS["bf16, clipped, bf16 gradients"]),
    (2, {"bf16": STOCHASTIC}),
    (2, {"zero_optimization": {"offload_optimizer": {"device": "cpu", "delay_update_after": 1}}}),
    (3, {"bf16": LOW_STATE}),
    (3, {**BF16, "zero_optimization": CPU_OFFLOAD}),
]


def uncorrected(comm: Any, keys: dict[str, Any], stage: int, by_switch: bool) -> dict[str, Tensor]:
    """By the switch, or by options of each step that undo the correction of torch's AdamW."""
    params = {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY}
    optimizer = {"type": "AdamW", "params": {**params, "bias_correction": not by_switch}}
    engine, _, _, _ = zero_full.initialize(model=Net(), config=config(stage, optimizer=optimizer, **keys))
    assert (type(engine.optimizer.base) is FusedAdam) == by_switch
    for step in range(1, 4):
        if not by_switch:
            first, root = 1 - BETAS[0] ** step, (1 - BETAS[1] ** step) ** 0.5
            options = {"lr": LR * first / root, "eps": EPS / root, "weight_decay": DECAY * root / first}
            engine.optimizer.param_groups[0].update(options)
        engine.backward(engine(data(step, 0, comm.rank, next(engine.parameters()).dtype)))
        engine.step()
    parameters = {name: p.clone() for name, p in engine.module_state_dict().items()}
    engine.destroy()
    return parameters


@pytest.mark.parametrize(("stage", "keys"), IN_ALL)
def test_without_bias_correction_in_every_precision_and_place(stage: int, keys: dict[str, Any]) -> None:
    mine, theirs = (POOL.run(uncorrected, 2, keys, stage, by_switch) for by_switch in (True, False))
    low = next(iter(mine[0].values())).dtype != torch.float32
    torch.testing.assert_close(mine, theirs, rtol=2**-7 if low else 1e-5, atol=1e-3 if low else 1e-6)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_class_of_a_script_steps_without_an_engine(decoupled: bool, dtype: torch.dtype) -> None:
    """As torch. Without correction the first step is 0.1 / sqrt(0.01) = 1 of the rate."""
    theirs = torch.optim.AdamW if decoupled else torch.optim.Adam
    ones = [nn.Parameter(torch.linspace(-1, 1, 7, dtype=dtype)) for _ in range(3)]
    optimizers = [
        FusedAdam(ones[:1], lr=LR, betas=BETAS, adam_w_mode=decoupled, weight_decay=DECAY),
        theirs(ones[1:2], lr=LR, betas=BETAS, weight_decay=DECAY),
        FusedAdam([{"params": ones[2:], "bias_correction": False}], lr=LR, betas=BETAS, eps=0.0),
    ]
    before = ones[2].detach().clone()
    for step in range(3):
        for p, optimizer in zip(ones, optimizers, strict=True):
            p.grad = torch.linspace(-2, 3 + step, 7).to(dtype)
            assert optimizer.step(lambda: 1.5) == 1.5
        if step == 0:
            torch.testing.assert_close(ones[2].detach(), before - LR * ones[2].grad.sign())  # type: ignore[union-attr]
    torch.testing.assert_close(ones[0], ones[1])
    with pytest.raises(ValueError, match="amsgrad cannot be True: use torch"):
        FusedAdam(ones, amsgrad=True)


# Without bias correction -------------------------------------------------------------------------


def by_formula(
    ranks: int, steps: int, lr: float, decay: float, betas: tuple[float, float]
) -> dict[str, Tensor]:
    """AdamW without bias correction, in plain torch."""
    model = Net()
    moments = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()}
    for step in range(steps):
        model.zero_grad()
        for rank in range(ranks):
            (model(data(step, 0, rank)) / ranks).backward()
        with torch.no_grad():
            for p, (mean, square) in moments.items():
                assert p.grad is not None
                mean.mul_(betas[0]).add_(p.grad, alpha=1 - betas[0])
                square.mul_(betas[1]).addcmul_(p.grad, p.grad, value=1 - betas[1])
                p.mul_(1 - lr * decay).sub_(lr * mean / (square.sqrt() + 1e-8))
    return {name: p.detach() for name, p in model.named_parameters()}


def placed(comm: Any, stage: int, offload: dict[str, Any]) -> dict[str, Tensor]:
    """Parameters after four steps."""
    params = {"lr": 0.01, "weight_decay": 0.1, "bias_correction": False}
    keys = config(
        stage,
        optimizer={"type": "AdamW", "params": params},
        zero_optimization={"offload_optimizer": offload},
    )
    with slow_copies(1e7) if offload["device"] == "cpu" else nullcontext():
        engine = zero_full.initialize(model=Net(), config=keys)[0]
        for number in range(4):
            engine.backward(engine(data(number, 0, comm.rank)))
            engine.step()
        found = {name: p.clone() for name, p in engine.module_state_dict().items()}
        engine.destroy()
    return found


def test_moments_count_as_they_are_wherever_the_state_is(tmp_path: Path) -> None:
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    cases = [(stage, place) for stage in (1, 2, 3) for place in (disk, {"device": "cpu"})]
    wanted = by_formula(2, 4, 0.01, 0.1, (0.9, 0.999))
    for by_rank in run_each(placed, 2, cases):
        for found in by_rank:
            assert max(float((found[name] - wanted[name]).abs().max()) for name in wanted) < 1e-6


def test_a_checkpoint_is_loaded_by_the_adam_that_corrects_as_it_did(tmp_path: Path) -> None:
    def engine_of(corrects: bool) -> zero_full.Engine:
        params = {"lr": 0.01, "bias_correction": corrects}
        return zero_full.initialize(
            model=Net(), config=config(1, optimizer={"type": "AdamW", "params": params})
        )[0]

    for saved in (True, False):
        first, folder = engine_of(saved), tmp_path / str(saved)
        first.backward(first(data(0, 0, 0)))
        first.step()
        first.save_checkpoint(folder)
        first.destroy()
        other = engine_of(not saved)
        said = f"bias_correction {saved}.* with bias_correction {not saved}.* to {str(saved).lower()}"
        with pytest.raises(zero_full.CheckpointError, match=said):
            other.load_checkpoint(folder)
        other.load_checkpoint(folder, load_optimizer_states=False)
        other.destroy()
        same = engine_of(saved)
        same.load_checkpoint(folder)
        same.destroy()
