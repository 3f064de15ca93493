"""`Init` in `Init`, several in turn, `initialize` and `GatheredParameters` inside; what it leaves behind."""

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torchs_hooks

import zero_full
from tests.zero_full.init_edits import Model
from tests.zero_full.test_init_edits import config, unlike, values_of
from zero_full import GatheredParameters, Init

Block = Callable[[bool], list[nn.Module]]
BLOCKS: dict[str, Block] = {}


def block(build: Block) -> Block:
    """Returns the models that are to be initialized, in turn."""
    BLOCKS[build.__name__] = build
    return build


@block
def one_in_another(on: bool) -> list[nn.Module]:
    first = Init(enabled=on)
    with first:
        a = nn.Linear(3, 3)
        with first, Init(enabled=on):
            b = nn.Linear(3, 3)
        with Init(enabled=on, dtype=torch.float64), Init(enabled=False):
            c = nn.Linear(3, 3)
        d = nn.Linear(3, 3)
    return [nn.Sequential(a, b, c, d)]


@block
def in_turn_for_one_model(on: bool) -> list[nn.Module]:
    with Init(enabled=on):
        a = nn.Linear(3, 3)
    with Init(enabled=on):
        b = nn.Linear(3, 3)
    b.weight.data.add_(a.weight)
    return [nn.Sequential(a, b)]


@block
def in_turn_for_two_models(on: bool) -> list[nn.Module]:
    with Init(enabled=on):
        a = nn.Linear(3, 3)
    with Init(enabled=on):
        b = nn.Linear(3, 3)
    b.load_state_dict(a.state_dict())
    nn.init.normal_(a.weight)
    return [b, a, copy.deepcopy(b)]


@block
def initialized_inside(on: bool) -> list[nn.Module]:
    with Init(enabled=on):
        a, other = nn.Linear(3, 3), nn.Linear(3, 3, device="cpu")
        values_of(a, 0)
        b = nn.Linear(3, 3)  # recorded no longer
        assert type(b.weight) is nn.Parameter
        with Init(enabled=on):
            c = nn.Linear(3, 3)
    return [nn.Sequential(b, c), other]


@block
def something_else_initialized_inside(on: bool) -> list[nn.Module]:
    other = nn.Linear(3, 3)
    with Init(enabled=on):
        a = nn.Linear(3, 3)
        values_of(other, 0)
        b = nn.Linear(3, 3)
    return [nn.Sequential(a, b)]


@block
def gathered_inside(on: bool) -> list[nn.Module]:
    with Init(enabled=on):
        a = Model()
        with GatheredParameters(a.parameters(), modifier_rank=0):
            a.frozen.data.normal_()
            assert a.old.sum().item() == a.old.sum().item()
        b = nn.Linear(3, 3)
        nn.init.normal_(a.layers[0].weight)
    return [nn.ModuleList([a, b])]


@block
def gathered_after_a_fork(on: bool) -> list[nn.Module]:
    with Init(enabled=on):
        a = nn.Linear(3, 3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        nn.init.normal_(a.weight)
    with GatheredParameters(a.weight):
        pass
    nn.init.normal_(a.bias)
    return [a]


@block
def thrown_away(on: bool) -> list[nn.Module]:
    try:
        with Init(enabled=on):
            a = nn.Linear(3, 3)
            raise KeyError("a constructor's")
    except KeyError:
        assert torch.empty(1).device.type == "cpu"
    with Init(enabled=on):
        b = nn.Linear(3, 3)
    return [nn.Sequential(b, a)]


@pytest.mark.parametrize("name", BLOCKS)
def test_values_and_random_numbers_are_those_of_plain_construction(name: str) -> None:
    found: list[list[dict[str, Tensor]]] = []
    for on in (False, True):
        torch.manual_seed(11)
        models = BLOCKS[name](on)
        found.append([values_of(model, 0) for model in models] + [{"numbers": torch.rand(3)}])
        assert torch.initial_seed() == 11 and torch.get_default_dtype() == torch.float32
    assert [unlike(*pair) for pair in zip(*found, strict=True)] == [[]] * len(found[0])


# What is left behind ---------------------------------------------------------------------------------


def test_nothing_of_it_is_left_in_torch_or_in_memory() -> None:
    with Init():
        model = Model()
    assert not torchs_hooks._global_parameter_registration_hooks
    assert not torchs_hooks._global_buffer_registration_hooks
    assert not torchs_hooks._global_module_registration_hooks
    recorder = weakref.ref(model.frozen._record.recorder)
    values_of(model, 0)
    gc.collect()
    assert recorder() is None
    assert not any(module._state_dict_pre_hooks for module in model.modules())


def test_hooks_and_marks_on_a_parameter_stay() -> None:
    called: list[str] = []
    with Init():
        model = nn.Linear(2, 2)
    model.weight.register_hook(lambda grad: called.append("hook"))
    model.weight.register_post_accumulate_grad_hook(lambda p: called.append("after"))
    model.weight.mark = 3  # type: ignore[assignment]
    engine, _, _, _ = zero_full.initialize(model=model, config=config(0))
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.destroy()
    assert called.count("hook") == 1 and "after" in called and model.weight.mark == 3


def test_a_write_to_one_is_no_write_to_another() -> None:
    with Init():
        model = Model()
    engine, _, _, _ = zero_full.initialize(model=model, config=config(0))
    weight, version = model.layers[0].weight, model.layers[0].weight._version
    model.scale.add_(1)
    model.frozen.data.add_(1)
    assert weight._version == version
    loss = engine(torch.zeros(1, 2, dtype=torch.long))
    model.shift.zero_()
    engine.backward(loss)
    engine.destroy()


class Marked(nn.Parameter):
    def __new__(cls, data: Tensor, mark: int) -> "Marked":
        return super().__new__(cls, data)

    def __init__(self, data: Tensor, mark: int) -> None:
        self.mark = mark


def test_a_subclass_of_parameter_stays_one() -> None:
    with Init():
        model = nn.Linear(2, 2)
        model.weight = Marked(torch.ones(2, 2), 7)
    assert isinstance(model.weight, Marked) and model.weight.mark == 7
    engine, _, _, _ = zero_full.initialize(model=model, config=config(0))
    assert type(model.weight) is Marked and bool(model.weight.eq(1).all())
    engine.destroy()


def test_after_a_failure_initialize_can_be_called_again() -> None:
    torch.manual_seed(11)
    plain = values_of(Model(), 0)
    torch.manual_seed(11)
    with Init():
        model = Model()
    with pytest.raises(ValueError, match="nothing to train"):
        zero_full.initialize(model=model, model_parameters=[], config=config(0))
    model.layers[0].weight.data.mul_(2)
    plain["layers.0.weight"].mul_(2)
    assert unlike(plain, values_of(model, 0)) == []


# Refusals --------------------------------------------------------------------------------------------


def initialize_inside_gathered(model: nn.Module) -> None:
    with GatheredParameters(model.parameters()):
        zero_full.initialize(model=model, config=config(0))


def init_inside_gathered(model: nn.Module) -> None:
    with GatheredParameters(model.parameters()), Init():
        pass


def change_of_rank(model: nn.Module) -> None:
    with GatheredParameters(model.parameters(), modifier_rank=1):
        pass


def parameter_of_nobody(model: nn.Module) -> None:
    with Init():
        optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)
    zero_full.initialize(model=model, optimizer=optimizer, config=config(0))


def shared_memory(model: nn.Module) -> None:
    model.other = nn.Parameter(model.weight.data[1:])
    zero_full.initialize(model=model, config=config(0))


def a_lazy_part(model: nn.Module) -> None:
    zero_full.initialize(model=nn.Sequential(model, nn.LazyLinear(3)), config=config(0))


def lazy_inside(model: nn.Module) -> None:
    with Init():
        nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False))


def made_by_vmap(model: nn.Module) -> None:
    with Init():
        model.other = nn.Parameter(torch.vmap(lambda row: row * 2)(torch.randn(3, 3)))
    zero_full.initialize(model=model, config=config(0))


def draws_for_a_real_tensor(model: nn.Module) -> None:
    real = torch.empty(3)
    with Init():
        model.other = nn.Linear(2, 2)
        real.normal_(generator=torch.Generator())
        real.normal_()


def meets_a_stranger(model: nn.Module) -> None:
    with Init():
        first = nn.Linear(3, 3)
    state = first.state_dict()
    values_of(nn.Sequential(first, model), 0)
    with Init():
        second = nn.Linear(3, 3)
    second.weight.data.copy_(state["weight"])


MESSAGES: dict[Callable[[nn.Module], None], str] = {
    initialize_inside_gathered: "weight is inside GatheredParameters",
    init_inside_gathered: "Init was entered inside GatheredParameters",
    change_of_rank: r"modifier_rank=1 .* zero_full.init_distributed\(\)",
    parameter_of_nobody: r"shape \(3,\) .* not in the model",
    shared_memory: "weight and other share memory but are two parameters.|other and weight share memory",
    a_lazy_part: "1.weight has no shape yet, because its module is lazy",
    lazy_inside: "running_mean of LazyBatchNorm1d has no shape yet",
    made_by_vmap: "other has no values",
    draws_for_a_real_tensor: "normal_.* with values would draw .* recorded for zero_full.initialize",
    meets_a_stranger: "constructed in another zero_full.Init",
}


@pytest.mark.parametrize("act", MESSAGES, ids=lambda act: act.__name__)
def test_what_cannot_work_says_what_to_do(act: Callable[[nn.Module], None]) -> None:
    with Init():
        model = nn.Linear(3, 3)
    with pytest.raises((RuntimeError, ValueError), match=MESSAGES[act]):
        act(model)


def test_inside_torchs_meta_device_it_is_refused() -> None:
    refused = pytest.raises(RuntimeError, match=r"inside torch.device")
    with torch.device("meta"), refused, Init():
        pass


# Weights from a file ---------------------------------------------------------------------------------


def assign(model: nn.Linear) -> None:
    model.load_state_dict({"weight": torch.ones(3, 3)}, strict=False, assign=True)


def gather(model: nn.Linear) -> None:
    with GatheredParameters(model.weight, modifier_rank=0):
        pass


LOST: dict[str, Callable[[Any], Any]] = {
    "in place": lambda model: model.weight.data.mul_(2),
    "overwritten": lambda model: model.weight.data.zero_(),
    "read": lambda model: model.bias.data.copy_(model.weight[0]),
    "other data": lambda model: setattr(model.weight, "data", torch.ones(3, 3)),
    "loaded": lambda model: model.load_state_dict({"weight": torch.ones(3, 3)}, strict=False),
    "assigned": assign,
    "gathered": gather,
    "another parameter": lambda model: setattr(model, "weight", nn.Parameter(torch.ones(3, 3))),
    "a buffer": lambda model: model.real.fill_(3),
}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    model = nn.Linear(3, 3)
    model.register_buffer("real", torch.zeros(2))
    engine, _, _, _ = zero_full.initialize(model=model, config=config(0))
    engine.save_weights(str(tmp_path))
    engine.destroy()
    return tmp_path


def from_file(weights: Path) -> nn.Linear:
    with Init(weights=weights):
        model = nn.Linear(3, 3)
        model.register_buffer("real", torch.zeros(2, device="cpu"))
    return model


@pytest.mark.parametrize("how", LOST)
def test_what_a_file_would_undo_is_refused(weights: Path, how: str) -> None:
    model = from_file(weights)
    with pytest.raises(
        (RuntimeError, ValueError), match=r"(weight|real)\b.*Init\(weights=...\).*after initialize"
    ):
        LOST[how](model)
        zero_full.initialize(model=model, config=config(0))


def test_a_file_is_read_into_converted_and_moved_parameters(weights: Path) -> None:
    expected, model = values_of(from_file(weights), 0), from_file(weights)
    converted = values_of(model.cpu().bfloat16(), 0)
    assert unlike(converted, {name: value.bfloat16() for name, value in expected.items()}) == []
    with pytest.raises(ValueError, match="inside another Init"), Init(), Init(weights=weights):
        pass
