"""Optimizers by their names in a configuration, and which of them may step on cut tensors."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero_full.optim import Lion, Stepper, build_optimizer, check_elementwise, parameter_groups
from zero_full.optim.elementwise import ELEMENTWISE


def walk(optimizer: Any, params: list[nn.Parameter], steps: int = 8) -> list[Tensor]:
    """A few steps down a bumpy function."""
    for step in range(steps):
        for i, p in enumerate(params):
            wide = p.detach().double()
            p.grad = ((step + 1 + i) * wide.cos() + 2 * wide).to(p.dtype)
        optimizer.step()
    return [p.detach().clone() for p in params]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(5, 3), (37,), (0,)]
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def grouped(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups, the second with a rate of its own."""
    return [{"params": params[:1]}, {"params": params[1:], "lr": 0.003}]


# Type and parameters in the configuration; the class of torch's and the arguments that it must be given.
NESTEROV = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
SAME: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    (
        "Adam",
        {"lr": 0.01, "betas": [0.8, 0.99]},
        "AdamW",
        {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.0},
    ),
    ("AdamW", {}, "AdamW", {"weight_decay": 0.0}),
    ("adamw", {"weight_decay": 0.1, "eps": 1e-6}, "AdamW", {"weight_decay": 0.1, "eps": 1e-6}),
    ("Adam", {"weight_decay": 0.1}, "AdamW", {"weight_decay": 0.1}),
    ("Adam", {"weight_decay": 0.1, "adam_w_mode": False}, "Adam", {"weight_decay": 0.1}),
    ("AdamW", {"weight_decay": 0.1, "adam_w_mode": False}, "AdamW", {"weight_decay": 0.1}),
    ("Adam", {"torch_adam": True}, "AdamW", {}),
    ("Adam", {"amsgrad": True, "bias_correction": True}, "AdamW", {"amsgrad": True, "weight_decay": 0.0}),
    ("Adam", {"betas": [0, 0.9]}, "AdamW", {"betas": (0.0, 0.9), "weight_decay": 0.0}),
    ("Adam", {"fp32_optimizer_states": True}, "AdamW", {"weight_decay": 0.0}),
    ("SGD", NESTEROV, "SGD", NESTEROV),
    ("Adagrad", {"lr": 0.1}, "Adagrad", {"lr": 0.1}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.5}, "RMSprop", {"lr": 0.01, "momentum": 0.5}),
    ("nadam", {}, "NAdam", {}),
]


@pytest.mark.parametrize(("name", "params", "theirs", "options"), SAME, ids=lambda value: str(value))
def test_updates_equal_torchs_class(name: str, params: Any, theirs: str, options: Any) -> None:
    mine, other = parameters(), parameters()
    ours = build_optimizer(name, params, grouped(mine))
    oracle = getattr(torch.optim, theirs)(grouped(other), **options, foreach=False)
    assert type(ours) is type(oracle)
    for got, want in zip(walk(ours, mine), walk(oracle, other), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_adam_without_a_decay_has_none_and_with_torch_adam_has_torchs() -> None:
    def decay(params: dict[str, Any]) -> float:
        return float(build_optimizer("AdamW", params, grouped(parameters())).defaults["weight_decay"])

    assert decay({}) == 0
    assert decay({"torch_adam": True}) == 0.01
    assert decay({"torch_adam": True, "weight_decay": 0.3}) == 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["Adam", "SGD", "Adagrad"])
def test_the_fused_kernel_runs_where_it_is_right(name: str, dtype: torch.dtype) -> None:
    mine, other = parameters(dtype), parameters(dtype)
    ours = build_optimizer(name, {"lr": 0.01}, grouped(mine))
    # On CPU it skips 16-bit elements of SGD: pytorch issue 191763.
    assert bool(ours.defaults["fused"]) is (name != "SGD" or dtype.itemsize > 2)
    plain = build_optimizer(name, {"lr": 0.01, "fused": False}, grouped(other))
    assert plain.defaults["fused"] is False
    # One step: later ones drift apart, because the fused kernel rounds once and the plain loop often.
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": torch.finfo(dtype).eps / 8}
    for got, want in zip(walk(ours, mine, 1), walk(plain, other, 1), strict=True):
        torch.testing.assert_close(got, want, **tolerance)


def test_who_asks_for_the_fused_kernel_that_skips_elements_is_told() -> None:
    with pytest.warns(UserWarning, match=r"optimizer\.params\.fused: .*16-bit"):
        made = build_optimizer("SGD", {"fused": True}, grouped(parameters(torch.bfloat16)))
    assert made.defaults["fused"] is True


@pytest.mark.parametrize("params", [{"fused": False}, {"foreach": True}, {"differentiable": True}], ids=str)
def test_fused_gives_way_to_what_the_user_says(params: dict[str, Any]) -> None:
    assert not build_optimizer("Adam", params, grouped(parameters())).defaults["fused"]


def test_parameters_without_a_fused_kernel_get_none() -> None:
    meta = [{"params": [nn.Parameter(torch.empty(3, device="meta"))]}]
    assert not build_optimizer("Adam", {}, meta).defaults["fused"]
    numbers = [{"params": [nn.Parameter(torch.zeros(3, dtype=torch.complex64))]}]
    assert not build_optimizer("Adam", {}, numbers).defaults["fused"]


def lion_by_hand(
    p: Tensor, grads: list[Tensor], lr: float, betas: tuple[float, float], decay: float
) -> Tensor:
    """The paper's formula, in double precision."""
    p, m = p.double(), torch.zeros_like(p, dtype=torch.float64)
    for g in grads:
        direction = torch.sign(betas[0] * m + (1 - betas[0]) * g)
        p = p - lr * (direction + decay * p)
        m = betas[1] * m + (1 - betas[1]) * g
    return p


@pytest.mark.parametrize("params", [{}, {"lr": 0.1, "betas": [0.9, 0.99], "weight_decay": 0.2}], ids=str)
def test_lion_is_the_papers_formula(params: dict[str, Any]) -> None:
    p = nn.Parameter(torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    start = p.detach().clone()
    optimizer = build_optimizer("Lion", params, [{"params": [p]}])
    grads = [torch.linspace(-1, 1, 50, dtype=torch.float64).roll(7 * k) for k in range(6)]
    for grad in grads:
        p.grad = grad
        optimizer.step()
    values = (
        params.get("lr", 1e-3),
        tuple(params.get("betas", (0.9, 0.999))),
        params.get("weight_decay", 0.0),
    )
    torch.testing.assert_close(p.detach(), lion_by_hand(start, grads, *values), rtol=1e-12, atol=1e-12)


def test_lion_leaves_padding_alone_and_keeps_one_number_an_element() -> None:
    p = nn.Parameter(torch.zeros(4))
    optimizer = Lion([p])
    p.grad = torch.zeros(4)
    assert optimizer.step(lambda: 3.0) == 3.0
    assert p.detach().abs().sum() == 0
    assert [t.shape for t in optimizer.state[p].values()] == [p.shape]
    again = Lion([p])
    again.load_state_dict(optimizer.state_dict())
    again.step()


@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"weight_decay": -0.1}], ids=str)
def test_lion_refuses_senseless_numbers(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Lion([nn.Parameter(torch.zeros(1))], **bad)


BAD = [
    ("Adam", {"max_grad_norm": 1.0}, r"optimizer\.params\.max_grad_norm: .*gradient_clipping"),
    ("Lion", {"bias_correction": False}, r"optimizer\.params\.bias_correction cannot be False"),
    ("Adam", {"bias_correction": "no"}, r"optimizer\.params\.bias_correction must be true or false"),
    ("Adam", {"bias_correction": 0, "torch_adam": True}, "bias_correction cannot be false with torch_adam"),
    ("Adam", {"bias_correction": False, "amsgrad": True}, "amsgrad cannot be True: use torch.optim.Adam"),
    ("AdamW", {"fp32_optimizer_states": False}, r"optimizer\.params\.fp32_optimizer_states"),
    ("Adam", {"weight_decy": 1}, r"optimizer\.params\.weight_decy: AdamW .*did you mean weight_decay\?"),
    ("SGD", {"zzz": 1}, r"optimizer\.params\.zzz: SGD .*takes lr, momentum"),
    ("Adam", {"params": []}, r"optimizer\.params\.params"),
    ("MuAdam", {}, "not have MuAdam yet. The nearest is Adam"),
    ("OneBitAdam", {"max_grad_norm": 1.0}, "gradient_clipping"),
    ("ZeroOneAdam", {"amsgrad": True}, "amsgrad cannot be True"),
    ("Muon", {"ns_method": "grams"}, r"ns_method must be .standard. or .gram., not .grams."),
    ("Muon", {"adam_w_mode": False}, r"optimizer\.params\.adam_w_mode cannot be False"),
    ("Muon", {"per_head_muon": True}, r"optimizer\.params\.per_head_muon cannot be True"),
    ("Muon", {"muon_lr": -1}, r"optimizer\.params\.muon_lr must be a number of 0 or more, not -1"),
    ("Muon", {"lr": "fast"}, r"optimizer\.params\.lr must be a number of 0 or more, not 'fast'"),
    ("Muon", {"momentum": 1.0}, "momentum must be a number from 0 up to, but not including, 1"),
    ("Muon", {"ns_steps": 2.5}, "ns_steps must be a whole number of at least 0, not 2.5"),
    ("Muon", {"ns_steps": 100}, "ns_steps must be at most 99"),
    ("Muon", {"ns_coefficients": [1, 2]}, r"params\.ns_coefficients must be a list of 3 numbers"),
    ("Muon", {"adjust_lr_fn": "mine"}, "adjust_lr_fn must be 'original' or 'match_rms_adamw', not 'mine'"),
    ("Muon", {"nesterov": "yes"}, r"params\.nesterov must be true or false, not 'yes'"),
    ("Muon", {"use_muon": "all"}, "use_muon must be true, false or a function"),
    ("Muon", {}, r"shape \(5, 3\) may be a hidden matrix, .*zero_full\.muon_groups\(model\)"),
    ("MuAdamW", {}, "nearest is AdamW"),
    ("MuSGD", {}, "nearest is SGD"),
    ("AdamX", {}, r"no optimizer is named 'AdamX'; did you mean Adam"),
    ("Optimizer", {}, "no optimizer is named"),
    ("qqq", {}, "there are Lion, "),
    (None, {}, r"optimizer\.type must be the name of an optimizer, not None"),
    ("Adam", {"lr": "1e-3"}, r"optimizer\.params\.lr must be a number of 0 or more, not '1e-3'"),
    ("Adam", {"lr": None}, r"optimizer\.params\.lr must be a number of 0 or more, not None"),
    ("SGD", {"lr": float("nan")}, r"optimizer\.params\.lr must be a number of 0 or more, not nan"),
    ("Lion", {"lr": float("inf")}, r"optimizer\.params\.lr must be a number of 0 or more, not inf"),
    ("Adam", {"betas": [0.9]}, r"optimizer\.params\.betas must be a list of 2 numbers, not \[0.9\]"),
    ("Adam", {"betas": [0.9, 0.99, 0.5]}, r"optimizer\.params\.betas must be a list of 2 numbers"),
    (
        "Lion",
        {"betas": [0.9, 1]},
        r"optimizer\.params\.betas\[1\] must be a number from 0 up to, but not incl",
    ),
    ("Adam", {"weight_decay": -1}, r"optimizer\.params\.weight_decay must be a number of 0 or more, not -1"),
    ("AdamW", {"adam_w_mode": "false"}, r"optimizer\.params\.adam_w_mode must be true or false, not 'false'"),
    ("Adam", {"fused": "yes"}, r"optimizer\.params\.fused must be true or false, not 'yes'"),
    ("SGD", {"nesterov": True}, r"optimizer\.params: SGD\(nesterov=True\) is invalid: Nesterov"),
]


@pytest.mark.parametrize(("name", "params", "message"), BAD)
def test_mistakes_name_the_key_and_the_remedy(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_optimizer(name, params, grouped(parameters()))


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"lr": -1.0}, '"lr" of parameter group 1 must be a number of 0 or more, not -1.0'),
        ({"betas": [0.9]}, '"betas" of parameter group 1 must be a list of 2 numbers'),
        ({"params": {1}}, "parameter group 1 is a set"),
    ],
)
def test_what_a_group_brings_is_checked_too(group: dict[str, Any], message: str) -> None:
    groups = [{"params": parameters()[:1]}, {"params": parameters()[1:], "name": "rest", **group}]
    with pytest.raises(ValueError, match=message):
        build_optimizer("Adam", {}, groups)
    with pytest.raises(ValueError, match='parameter group 0 must be a dictionary with a key "params"'):
        parameter_groups([{"lr": 1}])
    with pytest.raises(TypeError, match="model_parameters must have parameters"):
        parameter_groups(torch.nn.Linear(1, 1).named_parameters())


def test_parameters_may_come_from_a_generator_and_0_and_1_are_booleans() -> None:
    group = {"params": (p for p in parameters()), "lr": 0.5, "betas": [0.5, 0.5], "name": "all"}
    made = build_optimizer("Adam", {"amsgrad": 1, "adam_w_mode": 0}, [group])
    assert type(made) is torch.optim.Adam and made.defaults["amsgrad"] is True
    (mine,) = made.param_groups
    assert len(mine["params"]) == 3 and mine["betas"] == (0.5, 0.5) and mine["name"] == "all"


def test_the_users_dictionary_is_left_as_it_was() -> None:
    params = {"torch_adam": False, "adam_w_mode": True, "betas": [0.9, 0.99], "bias_correction": True}
    before = dict(params)
    build_optimizer("Adam", params, grouped(parameters()))
    assert params == before


class OnlyDefaults(torch.optim.AdamW):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.5)


class OtherStep(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None: ...


class Declared(OtherStep):
    zero_full_elementwise = True


class DeclaredAndThenChanged(Declared):
    def step(self, closure: Any = None) -> None: ...


class ChangedLion(Lion):
    def step(self, closure: Any = None) -> None: ...


class Withdrawn(Declared):
    zero_full_elementwise = False


class WholeVectors(torch.optim.LBFGS):
    def zero_full_stepper(self) -> Stepper:
        return Stepper()


@pytest.mark.parametrize("name", [*(kind.__name__ for kind in ELEMENTWISE), "Lion"])
def test_elementwise_optimizers_do_the_same_to_a_tensor_and_to_its_pieces(name: str) -> None:
    params = {"centered": True, "momentum": 0.9} if name == "RMSprop" else {}
    whole = nn.Parameter(parameters()[0].detach().clone())
    pieces = [nn.Parameter(piece.clone()) for piece in whole.detach().flatten().split([4, 1, 10])]
    on_whole = build_optimizer(name, params, [{"params": [whole]}])
    on_pieces = build_optimizer(name, params, [{"params": pieces}])
    check_elementwise(on_whole)
    for step in range(4):
        whole.grad = whole.detach().sin() * (step + 1)
        for p in pieces:
            p.grad = p.detach().sin() * (step + 1)
        on_whole.step()
        on_pieces.step()
    joined = torch.cat([p.detach() for p in pieces])
    torch.testing.assert_close(joined, whole.detach().flatten(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", [OnlyDefaults, Declared, WholeVectors], ids=lambda kind: kind.__name__)
def test_inherited_steps_and_declarations_are_believed(kind: Any) -> None:
    check_elementwise(kind([nn.Parameter(torch.zeros(2))]))


@pytest.mark.parametrize(
    "kind", [OtherStep, DeclaredAndThenChanged, ChangedLion, Withdrawn], ids=lambda kind: kind.__name__
)
def test_an_unknown_step_is_refused_unless_the_user_insists(kind: Any) -> None:
    optimizer = kind([nn.Parameter(torch.zeros(2))])
    message = "zero_full_elementwise = True.*zero_full_stepper.*zero_allow_untested_optimizer"
    with pytest.raises(TypeError, match=message):
        check_elementwise(optimizer)
    check_elementwise(optimizer, allow_untested=True)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("LBFGS", "inner products"),
        ("Adafactor", "rows and columns"),
        ("Muon", "matri"),
        ("SparseAdam", "sparse"),
    ],
)
@pytest.mark.parametrize("insist", [False, True])
def test_what_is_known_to_look_at_whole_tensors_is_refused(name: str, reason: str, insist: bool) -> None:
    optimizer = getattr(torch.optim, name)([nn.Parameter(torch.zeros(2, 2))])
    with pytest.raises(TypeError, match=f"{name} cannot step on pieces of parameters: .*{reason}"):
        check_elementwise(optimizer, allow_untested=insist)
