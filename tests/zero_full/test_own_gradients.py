"""Rules that see a rank's own gradient before anybody averages it: buckets, norm and overflow then."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import zero_full
from tests.worlds import run_each
from tests.zero_full.runs import Net, config, data
from zero_full.optim import Peers, Piece, Stepper


class SignOfOwn(torch.optim.Optimizer):
    """Plain descent. In every second step it averages by itself, at one bit an element."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def zero_full_stepper(self) -> Stepper:
        return SignOfOwnStep()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError


class SignOfOwnStep(Stepper):
    fuses = True

    def __init__(self) -> None:
        self.steps, self.errors, self.seen = 0, None, list[torch.Tensor]()

    @property
    def averages(self) -> bool:
        return self.steps % 2 == 0

    @property
    def takes_parts(self) -> bool:
        return False

    def attach(self, pieces: Sequence[Piece], peers: Peers) -> None:
        self.by = peers.compressed(sum(piece.master.numel() for piece in pieces))
        self.errors = self.by.new_errors()

    def step(self, pieces: Sequence[Piece], factor: float, peers: Peers) -> None:
        grads = torch.cat([piece.gradient.reshape(-1) for piece in pieces if piece.gradient is not None])
        self.seen.append(grads * factor)
        if not self.averages:
            self.by.average(grads.mul_(factor), grads, self.errors, "gradients")
        for piece, gradient in zip(pieces, grads.split([p.master.numel() for p in pieces]), strict=True):
            piece.master.sub_(gradient.view(piece.master.shape), alpha=0.1)
        self.steps += 1


def own_gradients(comm: Any, keys: dict[str, Any], poisoned: int | None) -> dict[str, Any]:
    """Four steps; and for each what every rank's gradient was by itself."""
    model = Net()
    engine, *_ = zero_full.initialize(
        model=model, optimizer=SignOfOwn(model.parameters()), config=config(0, **keys)
    )
    found: dict[str, Any] = {"own": [], "norms": [], "applied": []}
    for step in range(4):
        total: Any = 0
        for micro in range(engine.gradient_accumulation_steps()):
            x = data(step, micro, comm.rank, next(model.parameters()).dtype)
            grads = torch.autograd.grad(model(x), list(model.parameters()))
            total = total + torch.cat([g.reshape(-1).float() for g in grads])
            x[0, 0] = float("inf") if poisoned == step and comm.rank == 1 else x[0, 0]
            engine.backward(engine(x))
            engine.step()
        found["own"].append(total / engine.gradient_accumulation_steps())
        found["norms"].append(engine.get_global_grad_norm())
        found["applied"].append(engine.was_step_applied())
    stepper = engine.optimizer.steppers.own
    found |= {"seen": stepper.seen, "sent": stepper.by.sent, "traffic": engine.traffic()}
    found["parameters"] = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    engine.destroy()
    return found


KEYS: list[dict[str, Any]] = [
    {},
    {"gradient_clipping": 0.05, "gradient_accumulation_steps": 2},
    {"gradient_predivide_factor": 2.0},
    {"zero_optimization": {"overlap_comm": True}},
    {"bf16": {"enabled": True}},
    {"communication_data_type": "bf16"},
]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_rule_sees_its_own_ranks_gradient_and_all_ranks_agree_on_the_norm(world: int) -> None:
    for keys, ranks in zip(
        KEYS, run_each(own_gradients, world, [(keys, None) for keys in KEYS]), strict=True
    ):
        clip, low = keys.get("gradient_clipping", 0.0), "bf16" in str(keys)
        for step in range(4):
            own = torch.stack([each["own"][step] for each in ranks])
            mean = own.mean(0)
            averaged = step % 2 == 0
            norm = float(mean.norm()) if averaged else float(own.square().sum(1).mean().sqrt())
            near = {"rtol": 2e-2, "atol": 2e-3} if low else {"rtol": 1e-5, "atol": 1e-6}
            asked = clip > 0 or keys.get("bf16") or not averaged
            for rank, each in enumerate(ranks):
                told = pytest.approx(norm, rel=2e-2 if low else 1e-5) if asked else None
                assert each["norms"][step] == told
                assert each["norms"][step] == ranks[0]["norms"][step], "one number on all ranks"
                want = mean if averaged else own[rank]
                factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
                # Pieces come in the order of buckets: the last parameters first.
                got, want = each["seen"][step].float().sort().values, (want * factor).sort().values
                torch.testing.assert_close(got, want, **near)
        for each in ranks:
            assert torch.equal(each["parameters"], ranks[0]["parameters"])


@pytest.mark.parametrize("poisoned", [0, 1])
def test_what_is_not_finite_on_one_rank_skips_the_step_on_all(poisoned: int) -> None:
    unchecked = {"bf16": {"enabled": True, "check_grad_overflow": False}}
    for keys in ({}, unchecked) if poisoned else ({"bf16": {"enabled": True}},):  # averages may go unchecked
        (ranks,) = run_each(own_gradients, 2, [(keys, poisoned)])
        for each in ranks:
            # The schedule of the rule stays where it is, too: the next step is of the same kind.
            assert each["applied"] == [step != poisoned for step in range(4)]
            assert torch.equal(each["parameters"], ranks[0]["parameters"]) and len(each["seen"]) == 3


def left_behind(comm: Any) -> list[str]:
    """What a loop hears that lets go of no gradients."""
    model, said = Net(), list[str]()
    optimizer = zero_full.assemble.shard(model, SignOfOwn(model.parameters()), zero_full.Settings(stage=0))
    for step in range(3):
        try:
            model(data(step, 0, comm.rank)).backward()
            optimizer.step()
        except RuntimeError as error:
            said.append(f"{step}: {error}")
    optimizer.close(gather=False)
    return said


def test_gradients_of_one_rank_are_not_taken_for_averages() -> None:
    for said in run_each(left_behind, 2, [()])[0]:
        assert len(said) == 1 and said[0].startswith("2: ") and "Call zero_grad after every step" in said[0]
