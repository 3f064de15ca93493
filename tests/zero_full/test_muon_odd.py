"""Muon where something is unusual: models, groups, marks, schedules, edits, and no zero_full at all."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL, run_each
from tests.zero_full.runs import WIDTH, config, data, said_by
from zero_full.optim.build import build_optimizer
from zero_full.optim.schedules import WarmupLR

STEPS, LR, OTHER_LR = 4, 0.05, 0.02
Keys = dict[str, Any]


def keys_of(stage: int, **more: Any) -> Keys:
    return config(stage, optimizer={"type": "Muon", "params": {"muon_lr": LR, "adam_lr": 0.01}}, **more)


class Two(nn.Module):
    """Two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        for seed, p in enumerate(self.parameters()):
            p.data.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)))

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        return self.b(torch.tanh(self.a(x))).square().mean()


@dataclass(frozen=True)
class Odd:
    """What is unusual."""

    stage: int
    zero: Keys = field(default_factory=dict, hash=False)
    own_lr: bool = False  # the second matrix has a group and a rate of its own
    trained_from: int = 0  # before this step the second one is frozen
    cleared_at: int | None = None  # in this step somebody clears the first one's gradient
    written_at: int | None = None  # in this step somebody has doubled the first one
    schedule: bool = False
    compiled: bool = False


def train(comm: Any, odd: Odd) -> list[Tensor]:
    """Both matrices in the end."""
    model = Two()
    first, second = model.parameters()
    second.requires_grad_(odd.trained_from == 0)
    groups: Any = (
        [{"params": [first]}, {"params": [second], "lr": OTHER_LR}] if odd.own_lr else [first, second]
    )
    warm_up = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": None}}}
    keys = keys_of(odd.stage, zero_optimization=odd.zero, **(warm_up if odd.schedule else {}))
    seen = torch.compile(model, backend="eager") if odd.compiled else model
    engine = zero_full.initialize(model=seen, model_parameters=groups, config=keys)[0]
    for step in range(STEPS):
        second.requires_grad_(step >= odd.trained_from)
        engine.backward(engine(data(step, 0, comm.rank)))
        if odd.cleared_at == step:
            first.grad = None
        if odd.written_at == step:
            with zero_full.GatheredParameters([first], modifier_rank=0):
                first.data.mul_(2.0)
        engine.step()
    found = list(engine.module_state_dict().values())
    engine.destroy()
    return found


def expected(odd: Odd, world: int) -> list[Tensor]:
    """By torch's Muon on one process. Two ranks' gradients are added up in one order only."""
    model = Two()
    first, second = model.parameters()
    groups = [{"params": [first]}, {"params": [second], "lr": OTHER_LR if odd.own_lr else LR}]
    muon = torch.optim.Muon(groups, lr=LR, weight_decay=0.0, momentum=0.95)
    schedule = WarmupLR(muon, warmup_max_lr=None, warmup_num_steps=3) if odd.schedule else None
    for step in range(STEPS):
        second.requires_grad_(step >= odd.trained_from)
        muon.zero_grad()
        for rank in range(world):
            (model(data(step, 0, rank)) / world).backward()
        if odd.cleared_at == step:
            first.grad = None
        if odd.written_at == step:
            first.data.mul_(2.0)
        muon.step()
        if schedule is not None:
            schedule.step()
    return [p.detach() for p in model.parameters()]


HOST = {"offload_optimizer": {"device": "cpu"}}
PARTS = {"sub_group_size": 10, "stage3_param_persistence_threshold": 0}
KINDS: list[Keys] = [
    {"own_lr": True},
    {"trained_from": 2},
    {"cleared_at": 2},
    {"written_at": 2},
    {"schedule": True, "own_lr": True},
    {"compiled": True},
]
ODDS = [
    Odd(stage, zero, **kind)
    for stage, zero in [(0, {}), (1, HOST), (2, {}), (3, {}), (3, {**HOST, **PARTS})]
    for kind in KINDS
]


@pytest.mark.rotates
def test_unusual_runs_end_as_torchs_muon_does() -> None:
    for odd, ranks in zip(ODDS, run_each(train, 2, [(odd,) for odd in ODDS]), strict=True):
        for got in ranks:
            for mine, theirs in zip(got, expected(odd, 2), strict=True):
                assert torch.equal(mine, theirs), odd


# Few matrices, and none ---------------------------------------------------------------------------


class One(nn.Module):
    """One matrix, and nothing else."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(float(rows * columns)).view(rows, columns) / 8 - 0.3)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        return (self.weight * x[0, 0]).square().sum()


def one_matrix(comm: Any, stage: int, rows: int, columns: int) -> Tensor:
    model = One(rows, columns)
    engine = zero_full.initialize(model=model, config=keys_of(stage))[0]
    for step in range(2):
        engine.backward(engine(data(step, 0, 0)))
        engine.step()
    found = engine.module_state_dict()["weight"].clone()
    engine.destroy()
    return found


@pytest.mark.rotates
@pytest.mark.parametrize("world", [1, 4])
def test_ranks_without_a_piece_and_without_a_matrix_take_part(world: int) -> None:
    cases = [(stage, *shape) for shape in ((1, 1), (3, 2), (1, 30), (50, 3)) for stage in range(4)]
    for case, ranks in zip(cases, run_each(one_matrix, world, cases), strict=True):
        model = One(*case[1:])
        muon = torch.optim.Muon(model.parameters(), lr=LR, weight_decay=0.0, momentum=0.95)
        for step in range(2):
            muon.zero_grad()
            model(data(step, 0, 0)).backward()
            muon.step()
        for got in ranks:
            assert torch.equal(got, model.weight), case


class NoMatrix(nn.Module):
    """An embedding and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(10, 4), nn.LayerNorm(4)
        self.embedding.weight.data.copy_(torch.arange(40.0).view(10, 4).sin())

    def forward(self, words: Tensor) -> Tensor:
        """The loss."""
        return self.norm(self.embedding(words)).square().sum() + self.norm.weight.sum()


def no_matrix(comm: Any, stage: int, kind: str) -> tuple[dict[str, Tensor], dict[str, int]]:
    params = {"adam_lr": 0.01} if kind == "Muon" else {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-10}
    keys = config(stage, optimizer={"type": kind, "params": {**params, "weight_decay": 0.0}})
    engine = zero_full.initialize(model=NoMatrix(), config=keys)[0]
    for _ in range(2):
        engine.backward(engine(torch.tensor([1, 2, 3])))
        engine.step()
    found = (
        {name: value.clone() for name, value in engine.module_state_dict().items()},
        dict(engine.traffic()),
    )
    engine.destroy()
    return found


def test_a_model_without_a_hidden_matrix_is_adamws_and_nothing_more_travels(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cases = [(stage, kind) for stage in range(4) for kind in ("Muon", "AdamW")]
    found = run_each(no_matrix, 2, cases)
    for by_muon, by_adam in zip(found[::2], found[1::2], strict=True):
        for (mine, sent), (theirs, as_much) in zip(by_muon, by_adam, strict=True):
            assert sent == as_much
            for name, value in theirs.items():
                assert torch.equal(mine[name], value), name
    with caplog.at_level(logging.WARNING, logger="zero_full"):
        zero_full.Muon(zero_full.muon_groups(NoMatrix()))
        assert "Muon has no hidden matrix here: AdamW steps all parameters" in caplog.text
        caplog.clear()
        zero_full.Muon(zero_full.muon_groups(Two()))
        assert not caplog.text


# By itself ----------------------------------------------------------------------------------------


def by_itself(optimizer: Callable[[nn.Module], Any], with_closure: bool) -> list[Tensor]:
    model = Two()
    used, steps = optimizer(model), iter(range(3))

    def closure() -> Tensor:
        used.zero_grad()
        loss: Tensor = model(data(next(steps), 0, 0))
        loss.backward()
        return loss.detach()

    for _ in range(3):
        if with_closure:
            assert used.step(closure) is not None
        else:
            closure()
            assert used.step() is None
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("with_closure", [False, True])
def test_without_zero_full_a_step_is_torchs(with_closure: bool) -> None:
    def mine(model: nn.Module) -> Any:
        return zero_full.Muon(model.named_parameters(), muon_lr=LR, use_muon=lambda name, p: True)

    def torchs(model: nn.Module) -> Any:
        return torch.optim.Muon(model.parameters(), lr=LR, weight_decay=0.0, momentum=0.95)

    for got, want in zip(by_itself(mine, with_closure), by_itself(torchs, with_closure), strict=True):
        assert torch.equal(got, want)


# Whose update is which ----------------------------------------------------------------------------


class Kinds(nn.Module):
    """Something of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.lm_head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9)
        self.filter = nn.Conv1d(4, 4, 3)
        self.tied = nn.Linear(4, 9, bias=False)
        self.tied.weight = self.embedding.weight
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)


def muons(groups: list[Keys], model: nn.Module) -> set[str]:
    names = {p: name for name, p in model.named_parameters()}
    return {names[p] for group in groups if group["use_muon"] for p in group["params"]}


def test_a_rule_marks_or_groups_say_which_matrices_are_muons() -> None:
    model = Kinds()
    assert muons(zero_full.muon_groups(model), model) == {"layer.weight"}
    model.lm_head.weight.use_muon, model.layer.weight.use_muon = True, False  # type: ignore[assignment]
    assert muons(zero_full.muon_groups(model), model) == {"lm_head.weight"}
    model = Kinds()
    made = build_optimizer("Muon", {"muon_lr": 0.5, "adam_lr": 0.1}, [{"params": model.parameters()}], model)
    assert muons(made.param_groups, model) == {"layer.weight", "frozen.weight"}
    assert {group["lr"] for group in made.param_groups} == {0.5, 0.1}
    groups = [
        {"params": [model.layer.weight], "use_muon": False, "lr": 0.3},
        {"params": [model.lm_head.weight, model.lm_head.bias, model.filter.bias], "lr": 0.2},
    ]
    made = build_optimizer("Muon", {"muon_lr": 0.5, "adam_lr": 0.1}, groups, model)
    assert not muons(made.param_groups, model) and [g["lr"] for g in made.param_groups] == [0.3, 0.2]
    named = [(name, p) for name, p in model.named_parameters() if p.dim() < 3]
    picked = zero_full.Muon(named, use_muon=lambda name, p: "lm_head" in name)
    assert muons(picked.param_groups, model) == {"lm_head.weight"}


def marked(name: str, mark: bool = True) -> Callable[[], Any]:
    def make() -> Any:
        model = Kinds()
        model.get_parameter(name).use_muon = mark  # type: ignore[attr-defined]
        return build_optimizer("Muon", {}, [{"params": list(model.parameters())}], model)

    return make


def in_group(name: str) -> Callable[[], Any]:
    def make() -> Any:
        model = Kinds()
        group = {"params": [model.get_parameter(name)], "use_muon": True}
        return build_optimizer("Muon", {}, [group], model)

    return make


def complex_one() -> Any:
    return zero_full.Muon([{"params": [nn.Parameter(torch.zeros(2, 2) + 0j)], "use_muon": True}])


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a vector, by its mark": (marked("layer.bias"), r"layer\.bias of shape \(4,\) is assigned to Muon"),
    "a filter, by its mark": (
        marked("filter.weight"),
        r"filter\.weight of shape \(4, 4, 3\) is assigned to Muon",
    ),
    "a vector, by its group": (in_group("layer.bias"), r"layer\.bias of shape \(4,\) is assigned to Muon"),
    "a filter, by its group": (in_group("filter.weight"), r"\(4, 4, 3\) .* needs two dimensions"),
    "a filter, by a function": (
        lambda: zero_full.Muon(Kinds().named_parameters(), use_muon=lambda name, p: "filter" in name),
        r"filter\.weight of shape \(4, 4, 3\) is assigned to Muon",
    ),
    "complex": (complex_one, "is complex"),
    "nobody has said": (
        lambda: zero_full.Muon(Two().parameters()),
        "may be a hidden matrix",
    ),
    "a function without names": (
        lambda: zero_full.Muon(Two().parameters(), use_muon=lambda name, p: True),
        r"use_muon .* pass model\.named_parameters\(\)",
    ),
    "a rate of a group": (
        lambda: zero_full.Muon([{"params": [nn.Parameter(torch.ones(2))], "adam_lr": 0.1}]),
        "cannot have adam_lr",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_muon_cannot_take_is_refused_by_its_name(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        make()


def disagreeing(comm: Any, only_one: bool) -> str:
    model = Two()
    marks = [True, only_one and comm.rank == 0]
    for p, mark in zip(model.parameters(), marks if only_one or comm.rank else marks[::-1], strict=True):
        p.use_muon = mark  # type: ignore[attr-defined]
    return said_by(lambda: zero_full.initialize(model=model, config=keys_of(2)))


@pytest.mark.parametrize("only_one", [True, False])
def test_ranks_must_agree_on_which_matrices_are_muons(only_one: bool) -> None:
    for said in POOL.run(disagreeing, 2, only_one):
        assert said.startswith("DisagreementError") and "b.weight" in said, said


def edited(comm: Any, edit: Keys) -> tuple[str, bool]:
    """What is said to an edited group, and whether the parameters are as they were."""
    engine = zero_full.initialize(model=Two(), config=keys_of(2))[0]
    engine.backward(engine(data(0, 0, comm.rank)))
    before = [p.detach().clone() for p in engine.module.parameters()]
    engine.optimizer.param_groups[0].update(edit)
    said = said_by(engine.step)
    same = all(torch.equal(p, old) for p, old in zip(engine.module.parameters(), before, strict=True))
    engine.destroy()
    return said, same


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"use_muon": False}, "use_muon of parameter group 0"),
        ({"adam_lr": 1.0}, "adam_lr in parameter group 0 has no effect: set its lr"),
        ({"momentum": 2.0}, "momentum must be a number from 0 up to"),
    ],
    ids=str,
)
def test_a_group_that_is_edited_in_vain_is_refused_before_anything_moves(edit: Keys, message: str) -> None:
    for said, same in POOL.run(edited, 2, edit):
        assert message in said and same, said


def in_autocast(comm: Any, enabled: bool) -> Tensor:
    """A matrix after two steps that were taken inside `torch.autocast`, or not."""
    options = {"lr": 0.1, "ns_method": "gram"}
    torch.manual_seed(0)
    made = config(1, optimizer={"type": "Muon", "params": options})
    model = nn.Sequential(nn.Linear(WIDTH, 60), nn.Tanh(), nn.Linear(60, 8))
    engine, *_ = zero_full.initialize(model=model, config=made)
    for step in range(2):
        engine.backward(engine(data(step, 0, comm.rank)).square().mean())
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            engine.step()
    weight: Tensor = model[0].weight.detach().clone()
    engine.destroy()
    return weight


def test_a_step_inside_autocast_has_the_same_bits() -> None:
    (plain, _), (inside, _) = run_each(in_autocast, 2, [(False,), (True,)])
    assert torch.equal(plain, inside)
