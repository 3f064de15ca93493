"""Rules that move what a rank owns: sparse gradients, rules of users, and one begin and end a step."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL
from tests.zero_full.runs import Net, assert_close, config, data, reference, train
from zero_full.optim import Lamb, Peers, Piece, Stepper

STAGES = [0, 1, 2, 3]
CUT = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 100,
    "sub_group_size": 60,
}


class Rare(nn.Module):
    """Most of its rows get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(10, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        return self.rows(x).float().sum()


@pytest.mark.parametrize("kind", ["AdamW", "Lamb"])
@pytest.mark.parametrize("keys", [{}, {"gradient_clipping": 1.0}, {"bf16": {"enabled": True}}], ids=str)
def test_a_sparse_gradient_is_an_error_with_a_remedy(kind: str, keys: dict[str, Any]) -> None:
    chosen = {"type": kind, "params": {"lr": 0.1}}
    for stage in STAGES:
        engine, *_ = zero_full.initialize(model=Rare(), config=config(stage, optimizer=chosen, **keys))
        with pytest.raises(
            TypeError, match=r"rows.weight has a sparse gradient, .*nn.Embedding\(sparse=False\)"
        ):
            engine.backward(engine(torch.tensor([1, 2])))
            engine.step()
        engine.destroy()


class Lookahead(Lamb):
    def step(self, closure: Any = None) -> None: ...  # type: ignore[override]


def test_a_step_that_would_never_be_called_is_an_error() -> None:
    for stage in (0, 2):
        model = Net()
        with pytest.raises(TypeError, match="Lookahead overrides step"):
            zero_full.initialize(model=model, optimizer=Lookahead(model.parameters()), config=config(stage))


# A rule of the user's ----------------------------------------------------------------------------


class ByNorm(torch.optim.Optimizer):
    """Moves each tensor by `lr` along its gradient, whose norm becomes 1."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    def zero_full_stepper(self) -> Stepper:
        return ByNormStep(self)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(p.grad / p.grad.norm(), alpha=0.01)


class ByNormStep(Stepper):
    def __init__(self, optimizer: ByNorm) -> None:
        self.optimizer, self.told = optimizer, list[str]()

    def begin(self, pieces: Sequence[Piece]) -> None:
        self.told.append("begin")

    def step(self, pieces: Sequence[Piece], factor: float, peers: Peers) -> None:
        self.told.append("step")
        rows = torch.zeros(len(pieces), 1, dtype=torch.float64)
        for number, piece in enumerate(pieces):
            assert piece.gradient is not None and piece.gradient.dtype == piece.master.dtype
            rows[number] = piece.gradient.double().square().sum()
        for piece, (square,) in zip(pieces, peers.add_up(pieces, rows).tolist(), strict=True):
            assert piece.gradient is not None
            piece.master.sub_(piece.gradient / square**0.5, alpha=0.01)
            piece.state["steps"] = piece.state.get("steps", 0) + 1

    def end(self) -> None:
        self.told.append("end")


def noted(said: list[str], what: str, *_: Any) -> None:
    said.append(what)


def by_norm(comm: Any) -> list[tuple[dict[str, Tensor], list[str], list[str]]]:
    """Parameters, what the stepper was told and what hooks were, by stage."""
    found = []
    for stage in STAGES:
        model, hooked = Net(), list[str]()
        base = ByNorm(model.parameters())
        base.register_step_pre_hook(partial(noted, hooked, "before"))
        base.register_step_post_hook(partial(noted, hooked, "after"))
        zero = {"stage": stage, **(CUT if stage == 3 else {})}
        engine, *_ = zero_full.initialize(
            model=model, optimizer=base, config=config(stage, zero_optimization=zero)
        )
        for step in range(2):
            engine.backward(engine(data(step, 0, comm.rank)))
            engine.step()
        found.append((engine.module_state_dict(), engine.optimizer.steppers.own.told, hooked))
        engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 3])
def test_a_stepper_of_the_users_steps_pieces(world: int) -> None:
    want = reference(world, steps=2, make=ByNorm)
    for stages in POOL.run(by_norm, world):
        for stage, (got, told, hooked) in enumerate(stages):
            assert_close(got, want)
            assert told[0] == "begin" and told[-1] == "end" and told.count("begin") == told.count("end") == 2
            assert (told.count("step") > 2) == (stage == 3), "parts of a step"
            assert hooked == ["before", "after"] * 2


# One step is one step ----------------------------------------------------------------------------


class Counting(torch.optim.SGD):
    zero_full_elementwise = True
    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        super().step()


def counted(comm: Any, hooked: bool) -> tuple[int, dict[str, Tensor]]:
    """How often a step was counted, in 3 steps of many sub-groups each; and the parameters."""
    model, calls = Net(), list[int]()
    base = torch.optim.SGD(model.parameters(), lr=0.01) if hooked else Counting(model.parameters(), lr=0.01)
    if hooked:
        base.register_step_pre_hook(lambda *_: calls.append(1))
    zero = {"stage": 3, **CUT}
    engine, *_ = zero_full.initialize(model=model, optimizer=base, config=config(3, zero_optimization=zero))
    for step in range(3):
        engine.backward(engine(data(step, 0, comm.rank)))
        engine.step()
    got = engine.module_state_dict()
    engine.destroy()
    return (len(calls) if hooked else base.steps), got  # type: ignore[attr-defined]


@pytest.mark.parametrize("hooked", [False, True])
def test_however_many_sub_groups_a_step_is_counted_once(hooked: bool) -> None:
    want = reference(2, 3, make=lambda params: torch.optim.SGD(params, lr=0.01))
    for count, got in POOL.run(counted, 2, hooked):
        assert count == 3
        assert_close(got, want)


def note_sums(comm: Any, check: bool) -> int:
    """How often the extremes of a bucket's own gradients have been computed in two steps."""
    calls, real = list[int](), torch.aminmax
    torch.aminmax = lambda *given: (calls.append(1), real(*given))[1]  # type: ignore[assignment]
    try:
        train(comm, config(2, bf16={"enabled": True, "check_grad_overflow": check}), steps=2)
    finally:
        torch.aminmax = real  # type: ignore[assignment]
    return len(calls)


def test_own_gradients_are_looked_at_only_where_somebody_asks_for_a_norm() -> None:
    assert POOL.run(note_sums, 2, False) == [0, 0]
    assert all(count > 0 for count in POOL.run(note_sums, 2, True))
