"""What people do with a model between `Init` and `initialize`: cells of a table for `test_init_edits`."""

import copy
import io
import pickle
from collections.abc import Callable
from inspect import getsource
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init

from zero_full import GatheredParameters

Edit = Callable[["Model"], Any]
# As it would with a model that is constructed plainly, errors included.
WORKS: dict[str, Edit] = {"leave_it": lambda model: None}
REFUSED: dict[str, tuple[Edit, str]] = {}  # with these words


def works(edit: Edit) -> Edit:
    WORKS[edit.__name__] = edit
    return edit


def refused(words: str) -> Callable[[Edit], Edit]:
    def note(edit: Edit) -> Edit:
        REFUSED[edit.__name__] = edit, words
        return edit

    return note


class Model(nn.Module):
    """Parameters that are tied, frozen, empty, no floats; buffers of both kinds; attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight
        self.rnn = nn.LSTM(6, 3)  # keeps weak references to its weights
        self.count = nn.Parameter(torch.arange(5), requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.old = nn.Parameter(torch.Tensor(3, 4))
        self.old.data.uniform_(-1, 1)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6))
        self.register_buffer("shift", torch.randn(6), persistent=False)
        self.register_buffer("mask", torch.ones(4, 4).tril().bool().to("cpu"))
        self.noise, self.tables = torch.randn(3).cpu(), {"a": [torch.arange(3.0)]}

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.shift
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).sum()


def others_state() -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return {name: tensor.clone() for name, tensor in Model().state_dict().items()}


# Values ----------------------------------------------------------------------------------------------


@works
def initialise_by_function(model: Model) -> None:
    init.normal_(model.layers[0].weight)
    init.trunc_normal_(model.layers[1].weight, std=0.3)
    init.orthogonal_(model.layers[2].weight)
    if "is_meta" in getsource(init.sparse_):  # in torch before 2.13 it draws where only a warning sees it
        init.sparse_(model.embed.weight, 0.5)
    init.eye_(model.rnn.weight_hh_l0)
    init.kaiming_uniform_(model.old)


@works
def apply(model: Model) -> None:
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=0.02)
            if module.bias is not None:
                init.zeros_(module.bias)

    model.apply(initialise)


@works
def write_in_place(model: Model) -> None:
    with torch.no_grad():
        model.layers[0].weight.mul_(2)
        model.embed.weight[3].zero_()
        model.layers[1].weight[:, 2] += 1
        model.layers[1].bias[[0, 2]] = 7
        model.layers[2].weight[model.layers[2].weight > 0] = 5
        model.layers[2].bias.copy_(torch.ones(6))
        for row in model.old:
            row.add_(1)
        torch._foreach_mul_([p.data for p in model.layers.parameters()], 3)
        torch.mul(model.old, 2, out=model.old)
    model.frozen.data.clamp_(-0.1, 0.1)


@works
def write_to_a_leaf(model: Model) -> None:  # without no_grad: torch's own error
    model.layers[0].weight.mul_(2)


@works
def give_other_data(model: Model) -> None:
    model.layers[0].weight.data = torch.full((6, 6), 3.0)
    model.layers[1].weight.data = model.layers[2].weight.data.t() * 2
    model.layers[2].weight.data.t_()
    model.embed.weight.data = torch.cat([model.embed.weight.data, torch.zeros(1, 6)])


@refused(r"more.weight: .*nn.Parameter\(recorded\)")
def give_its_data_to_another(model: Model) -> None:
    model.more = nn.Linear(6, 6)
    model.more.weight.data = model.layers[0].weight.data


@works
def change_buffers(model: Model) -> None:
    model.scale.mul_(2)
    model.shift.normal_()
    model.norm.running_mean.fill_(3)
    model.mask = torch.ones(4, 4, dtype=torch.bool)
    model.register_buffer("more", model.shift * 2)
    model.noise.add_(1)
    model.tables["a"][0].mul_(3)


@works
def seed_and_draw(model: Model) -> None:
    torch.manual_seed(5)
    model.layers[0].weight.data.normal_()
    torch.manual_seed(5)
    model.layers[1].weight.data.normal_()


@works
def seed_as_before(model: Model) -> None:
    torch.manual_seed(11)  # to the state that it seems to have anyway
    model.layers[0].weight.data.normal_()


@works
def draw_in_a_fork(model: Model) -> None:
    with torch.random.fork_rng(devices=[]):
        model.layers[0].weight.data.normal_()
    model.layers[1].weight.data.normal_()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        torch.rand(3)
    model.layers[2].weight.data.normal_()


@works
def draw_from_a_generator(model: Model) -> None:
    generator = torch.Generator().manual_seed(4)
    model.layers[0].weight.data.normal_(generator=generator)
    generator.manual_seed(4)
    model.layers[1].weight.data.normal_(generator=generator)


@refused(r"normal_ of layers.0.weight .* torch.manual_seed")
def draw_after_others_have(model: Model) -> None:
    torch.rand(3)
    model.layers[0].weight.data.normal_()


# Other models, other parameters ----------------------------------------------------------------------


@works
def load(model: Model) -> None:
    model.load_state_dict(others_state())


@works
def load_a_part(model: Model) -> None:
    state = {name: tensor for name, tensor in others_state().items() if "layers" in name}
    assert "embed.weight" in model.load_state_dict(state, strict=False).missing_keys
    model.norm.load_state_dict(model.norm.state_dict())


@works
def load_by_assignment(model: Model) -> None:
    model.load_state_dict(others_state(), assign=True)
    model.head.weight = model.embed.weight


@works
def load_what_does_not_fit(model: Model) -> None:  # torch's own error
    model.load_state_dict({"embed.weight": torch.zeros(12, 7)})


@works
def load_what_it_has(model: Model) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


@refused(r"layers.0.weight was made from a tensor of shape \(6, 6\) that has changed since")
def load_from_memory_that_is_used_again(model: Model) -> None:
    room = torch.zeros(6, 6)
    for layer in model.layers:
        room.data.add_(1)  # which torch does not count as a change
        layer.weight.data.copy_(room)


@works
def change_modules(model: Model) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        outside, model.more = nn.Linear(6, 6), nn.Linear(6, 6)
    model.layers[0].weight = model.layers[1].weight
    model.layers[2] = outside
    model.more.weight = nn.Parameter(model.layers[1].weight.data + 1)
    model.more.bias = nn.Parameter(outside.bias.detach() * 2)
    model.frozen.requires_grad_(True)
    model.embed.weight.requires_grad = False


@works
def copy_it(model: Model) -> Model:
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model.layers[0].weight.zero_()
        copied.layers[1].weight.zero_()
    return copied


@works
def parametrize(model: Model) -> None:
    nn.utils.parametrizations.weight_norm(model.layers[0])
    nn.utils.parametrizations.spectral_norm(model.layers[1])
    vector = nn.utils.parameters_to_vector(model.layers[2].parameters())
    nn.utils.vector_to_parameters(vector * 2, model.layers[2].parameters())


@works
def ask_about_it(model: Model) -> None:
    weight = model.layers[0].weight
    assert "values come in zero_full.initialize" in repr(weight) or type(weight) is nn.Parameter
    assert str(model.scale) and f"{weight.sum()}" and repr(model)
    assert isinstance(weight, nn.Parameter) and weight.shape == (6, 6) and weight.is_contiguous()
    assert weight.device.type == "cpu" and not weight.is_meta and weight.is_leaf and weight.grad is None
    assert sum(p.numel() for p in model.parameters()) > 100 and len(set(model.parameters())) > 10
    torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True).zero_grad()


# Types and places ------------------------------------------------------------------------------------


@works
def convert_there_and_back(model: Model) -> None:
    model.half().double().to(torch.float32)


@works
def convert_a_layer(model: Model) -> None:
    model.layers[0].to("cpu", torch.float64)
    for parameter in model.layers[1].parameters():
        parameter.data = parameter.data.half()


@works
def move(model: Model) -> None:
    model.to("cpu").cpu().to(torch.device("cpu"), torch.bfloat16)
    weight = model.layers[0].weight
    weight.data.to("cpu").zero_()  # no copy
    model.layers[1].weight.data.to("cpu", copy=True).zero_()


@refused(r"embed.weight .* to_empty")
def drop_values(model: Model) -> None:
    model.to_empty(device="cpu")


@refused(r"to\('meta'\) needs values of embed.weight")
def go_nowhere(model: Model) -> None:
    model.to("meta")


# Reading ---------------------------------------------------------------------------------------------


@refused(r"_local_scalar_dense.* needs values of something made from frozen.*GatheredParameters")
def read_a_number(model: Model) -> None:
    model.frozen.sum().item()


@refused(r"needs values of something made from scale.*GatheredParameters")
def decide(model: Model) -> None:
    if model.scale.max() > 1:
        model.scale.zero_()


@refused(r"Tensor.numpy needs values of frozen.*GatheredParameters")
def make_an_array(model: Model) -> None:
    model.frozen.numpy()


@refused(r"copy_.* into a tensor of device='cpu' needs values of frozen")
def copy_out(model: Model) -> None:
    torch.zeros(7).copy_(model.frozen)


@refused(r"pickling needs values of count")
def save_it(model: Model) -> None:
    torch.save(model.state_dict(), io.BytesIO())


@refused(r"Tensor.data_ptr needs values of embed.weight")
def take_its_address(model: Model) -> None:
    model.embed.weight.data_ptr()


@refused(r"Tensor.backward needs values of something made from")
def train_it(model: Model) -> None:
    model(torch.zeros(2, 3, dtype=torch.long)).backward()


# GatheredParameters ----------------------------------------------------------------------------------


@works
def gather_and_read(model: Model) -> None:
    with GatheredParameters(model.parameters()):
        assert all(bool(p.isfinite().all()) for p in model.parameters())
        assert type(model.frozen) is nn.Parameter and model.frozen.sum().item() == model.frozen.sum().item()
        pickle.dumps(list(model.parameters()))
    with GatheredParameters([model.scale]):
        assert model.scale.sum() == 6


@works
def gather_and_write(model: Model) -> None:
    with GatheredParameters(model.parameters(), modifier_rank=0):
        init.normal_(model.embed.weight)
        model.layers[0].weight.data.zero_()
        model.layers[1].weight.data.copy_(model.layers[1].weight.data.flip(0))
    with GatheredParameters(model.layers[0].weight, modifier_rank=0):
        model.layers[0].weight.data.add_(1)
    model.layers[0].weight.data.mul_(3)
    init.normal_(model.layers[2].weight)


@works
def gather_and_load(model: Model) -> None:
    with GatheredParameters(model.parameters(), modifier_rank=0):
        model.load_state_dict(others_state())
    model.bfloat16()


@works
def gather_and_load_module_by_module(model: Model) -> None:  # as transformers do
    state = others_state()
    for name, module in model.named_modules():
        with GatheredParameters(list(module.parameters(recurse=False)), modifier_rank=0):
            prefix = f"{name}." if name else ""
            module._load_from_state_dict(state, prefix, {}, True, [], [], [])


@works
def gather_in_nests(model: Model) -> None:
    with GatheredParameters(model.parameters(), modifier_rank=0):
        with GatheredParameters(model.layers[0].weight, modifier_rank=0):
            model.layers[0].weight.data.zero_()
        with GatheredParameters(model.layers[0].weight):
            assert model.layers[0].weight.sum().item() == 0
        model.layers[1].weight.data.zero_()
    outer = GatheredParameters(model.parameters())
    with outer, GatheredParameters(model.layers[2].weight, modifier_rank=0):
        model.layers[2].weight.data.zero_()


@works
def gather_and_resize(model: Model) -> None:
    with GatheredParameters(model.embed.weight, modifier_rank=0):
        model.embed.weight.data = torch.cat([model.embed.weight.data, torch.zeros(2, 6)])


@refused(r"layers.0.weight changed inside GatheredParameters.* modifier_rank")
def gather_and_write_without_saying_so(model: Model) -> None:
    with GatheredParameters(model.parameters()):
        model.layers[0].weight.data.copy_(model.layers[0].weight.data.flip(0))


@refused(r"modifier_rank 9 is not one of the \d ranks")
def gather_for_a_stranger(model: Model) -> None:
    with GatheredParameters(model.frozen, modifier_rank=9):
        pass
