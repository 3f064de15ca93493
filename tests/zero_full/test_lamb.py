"""LAMB: DeepSpeed's rule, with the norms of whole parameters at every stage and in every precision."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import run_each
from tests.zero_full.plain_lamb import OPTIONS, PlainLamb
from tests.zero_full.runs import Net, config, data
from tests.zero_full.test_steppers import CUT, Rare
from zero_full.optim import Lamb, build_optimizer

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCALE, CLIP = 256.0, 0.1


class Shifted(Net):
    """With parameters that are zero at first, without dimensions, unused and frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.factor = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.tensor(1.5))
        self.idle, self.fixed = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        return ((self.layers(x) + self.shift) * self.factor).float().square().mean()


@dataclass(frozen=True)
class Run:
    """A precision, options of all groups, and those of the second one, which has what is no matrix."""

    precision: str = "fp32"
    options: dict[str, Any] = field(default_factory=dict)
    second: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    poisoned: int | None = None  # a step in which the last rank's data have an inf

    def keys(self, stage: int) -> dict[str, Any]:
        """The configuration."""
        named = {**OPTIONS, "betas": list(OPTIONS["betas"]), **self.options}
        precisions: dict[str, dict[str, Any]] = {
            "fp32": {},
            "bf16": {"bf16": {"enabled": True}},
            "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}},
        }
        return config(
            stage,
            optimizer={"type": "FusedLamb" if stage % 2 else "Lamb", "params": named},
            zero_optimization={"stage": stage, **(CUT if stage == 3 else {})},
            gradient_accumulation_steps=self.micro_batches,
            gradient_clipping=CLIP,
            **precisions[self.precision],
        )


def in_groups(model: nn.Module, second: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Matrices, and the rest."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": matrices}, {"params": [p for p in model.parameters() if p.dim() < 2], **second}]


def batch(run: Run, step: int, micro: int, rank: int, world: int) -> Tensor:
    """A micro-batch, poisoned or not."""
    x = data(step, micro, rank, LOW.get(run.precision, torch.float32))
    if step == run.poisoned and rank == world - 1:
        x[0, 0] = float("inf")
    return x


Told = tuple[dict[str, Tensor], list[list[float]], list[bool], float]


def trained(comm: Any, run: Run, stage: int) -> Told:
    """Parameters and the loss scale at the end; coefficients and whether it was applied, by step."""
    model = Shifted()
    engine, *_ = zero_full.initialize(
        model=model, model_parameters=in_groups(model, run.second), config=run.keys(stage)
    )
    coeffs, applied = [], []
    for step in range(4):
        for micro in range(run.micro_batches):
            engine.backward(engine(batch(run, step, micro, comm.rank, comm.world_size)))
            engine.step()
        lamb = engine.basic_optimizer
        assert isinstance(lamb, Lamb)
        coeffs.append(lamb.get_lamb_coeffs())
        assert list(lamb.lamb_coeffs.values()) == coeffs[-1]
        assert not any(p is model.idle or p is model.fixed for p in lamb.lamb_coeffs)
        applied.append(engine.was_step_applied())
    found = engine.module_state_dict()
    scale = engine.loss_scale()
    engine.destroy()
    return found, coeffs, applied, scale


def plain(run: Run, world: int) -> tuple[dict[str, Tensor], list[list[float]]]:
    """The same on one process: 16-bit parameters are rounded from fp32 ones after every step."""
    dtype = LOW.get(run.precision, torch.float32)
    model, kept = Shifted().to(dtype), Shifted()
    masters, coeffs = dict(kept.named_parameters()), list[list[float]]()
    lamb = PlainLamb(in_groups(kept, run.second), **run.options)
    for step in range(4):
        sums: dict[str, Any] = {}
        for rank in range(world):
            for micro in range(run.micro_batches):
                model.zero_grad()
                loss = model(batch(run, step, micro, rank, world))
                (loss * (SCALE if run.precision == "fp16" else 1.0) / run.micro_batches).backward()
                for name, p in model.named_parameters():
                    if p.grad is not None:
                        sums[name] = sums.get(name, 0.0) + p.grad.double() / world
        scale = SCALE if run.precision == "fp16" else 1.0
        norm = torch.stack([(g / scale).norm() for g in sums.values()]).norm()
        if norm.isfinite():
            for name, total in sums.items():
                masters[name].grad = (total / scale * min(1.0, CLIP / (float(norm) + 1e-6))).float()
            lamb.step()
            for name, p in model.named_parameters():
                p.data.copy_(masters[name].data)
        coeffs.append(lamb.coeffs)
    return {name: p.detach().clone() for name, p in model.named_parameters()}, coeffs


RUNS = [
    Run(options={"bias_correction": False, "eps_inside_sqrt": True}),
    Run(options={"min_coeff": 0.9, "max_coeff": 1.2}),
    Run(second={"min_coeff": 0.5, "max_coeff": 0.6, "weight_decay": 0.0, "lr": 0.01}),
    Run("bf16", micro_batches=2),
    Run("bf16", second={"max_coeff": 0.2}, poisoned=1),
    Run("fp16", micro_batches=2),
    Run("fp16", options={"min_coeff": 0.3}, poisoned=2),
]


@pytest.mark.rotates
@pytest.mark.parametrize("world", [1, 4])
def test_every_stage_and_precision_is_the_formula_on_whole_parameters(world: int) -> None:
    """Coefficients, too, of all parameters on every rank; a step that overflows leaves both as they were."""
    cases = [(run, stage) for run in RUNS for stage in range(4)]
    for (run, stage), ranks in zip(cases, run_each(trained, world, cases), strict=True):
        want, coeffs = plain(run, world)
        low = torch.finfo(LOW.get(run.precision, torch.float32)).eps
        rough = 1e-5 if run.precision == "fp32" else 8 * low
        for got, mine, applied, scale in ranks:
            assert applied == [step != run.poisoned for step in range(4)], (run, stage)
            assert scale == {"fp16": SCALE / 2 if run.poisoned else SCALE}.get(run.precision, 1.0)
            assert mine == ranks[0][1], "every rank has the same coefficients"
            for one, other in zip(mine, coeffs, strict=True):
                assert one == pytest.approx(other, rel=max(rough, 1e-4)), (run, stage)
            for name, value in got.items():
                close = torch.allclose(value, want[name], rtol=rough, atol=rough / 2)
                assert close, (run, stage, name, value, want[name])


@pytest.mark.parametrize("kind", ["contiguous", "transposed", "fp64", "fp16"])
def test_lamb_by_itself_is_an_optimizer_of_torch(kind: str) -> None:
    start = torch.linspace(-1, 1, 12).view(3, 4)
    start = {"transposed": start.t(), "fp64": start.double(), "fp16": start.half()}.get(kind, start)
    mine, plain = (nn.Parameter(start.clone(memory_format=torch.preserve_format)) for _ in range(2))
    ours, theirs = Lamb([mine], **OPTIONS), PlainLamb([{"params": [plain]}])
    for step in range(3):
        for p in (mine, plain):
            p.grad = (p.detach() * 3).sin() * (step + 1)
        ours.step()
        theirs.step()
        assert ours.lamb_coeffs == pytest.approx({mine: theirs.coeffs[0]}, rel=1e-3)
    tolerance = {"fp64": 1e-12, "fp16": 2e-3}.get(kind, 2e-6)
    torch.testing.assert_close(mine, plain, rtol=tolerance, atol=tolerance)


def test_lambs_options_are_checked_and_deepspeeds_names_taken() -> None:
    params = [{"params": [nn.Parameter(torch.ones(2))]}]
    made = build_optimizer("FusedLamb", {"amsgrad": False, "max_coeff": 5, "eps_inside_sqrt": True}, params)
    assert isinstance(made, Lamb) and made.defaults["max_coeff"] == 5
    for name, value in (
        ("amsgrad", True),
        ("max_grad_norm", 1.0),
        ("min_coeff", 11.0),
        ("min_coeff", -1.0),
        ("betas", [1.0, 0.9]),
    ):
        with pytest.raises(ValueError, match=name):
            build_optimizer("Lamb", {name: value}, params)


@pytest.mark.parametrize(
    "option",
    [{"min_coeff": 11.0}, {"betas": (0.9, 1.0)}, {"lr": -1.0}, {"max_grad_norm": 1.0}, {"amsgrad": True}],
    ids=str,
)
def test_lambs_options_are_checked_in_a_group_and_when_they_are_edited(option: dict[str, Any]) -> None:
    weight, (name, value) = nn.Parameter(torch.ones(2)), next(iter(option.items()))
    with pytest.raises(ValueError, match=name):
        Lamb([{"params": [weight], **option}])
    plain, model = Lamb([{"params": [weight], "min_coeff": 0.1}]), Net()
    given = Lamb(model.parameters())
    engine, *_ = zero_full.initialize(model=model, optimizer=given, config=config(2))
    engine.backward(engine(data(0, 0, 0)))
    weight.grad = torch.ones(2)
    plain.step()
    for each, step in ((plain, plain.step), (given, engine.step)):
        each.param_groups[0][name] = value
        with pytest.raises(ValueError, match=name):
            step()
    engine.destroy()


def test_lamb_by_itself_refuses_a_sparse_gradient() -> None:
    model = Rare()
    model(torch.tensor([1])).backward()
    with pytest.raises(RuntimeError, match="Lamb needs dense gradients"):
        Lamb(model.parameters()).step()
