"""Constructors for `test_deferred`: the ways in which models make and change their parameters and buffers."""

import copy
import io
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

BUILDERS: dict[str, Callable[[], nn.Module]] = {}


def builder(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    BUILDERS[build.__name__] = build
    return build


class Holder(nn.Module):
    """A module with these parameters and, if their names start with b_, buffers."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if name.startswith("b_"):
                self.register_buffer(name, tensor, persistent=name.endswith("saved"))
            else:
                self.register_parameter(name, nn.Parameter(tensor, tensor.is_floating_point()))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)).view(1, 1, 8, 8), persistent=False)


class GPT(nn.Module):
    """Initialised three times over, as GPT-2 is: by default, by `apply`, and by name."""

    def __init__(self, width: int = 16, layers: int = 3, vocabulary: int = 40) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.head.weight
        self.apply(self.initialise)
        for name, parameter in self.named_parameters():
            if name.endswith(("proj.weight", "down.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))

    def initialise(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data.zero_()


builder(GPT)


@builder
def linears() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 30), nn.ReLU(), nn.Linear(30, 3), nn.Bilinear(3, 4, 2))


@builder
def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ConvTranspose1d(4, 2, 3), nn.GroupNorm(2, 4)
    )


@builder
def every_init() -> nn.Module:
    init, made = (
        nn.init,
        Holder(**{f"w{i}": torch.empty(6, 20) for i in range(12)}, conv=torch.empty(4, 4, 3)),
    )
    w = list(made.parameters())
    init.uniform_(w[0], -1, 2), init.normal_(w[1], 1, 3), init.constant_(w[2], 0.3), init.ones_(w[3])
    init.xavier_uniform_(w[4]), init.xavier_normal_(w[5], 2), init.kaiming_uniform_(w[6], math.sqrt(5))
    init.kaiming_normal_(w[7], mode="fan_out"), init.orthogonal_(w[8], 2), init.sparse_(w[9], 0.3)
    init.eye_(w[10]), init.dirac_(made.conv), init.trunc_normal_(w[11], std=0.7, a=-0.5, b=1)
    return made


@builder
def truncated_normals() -> nn.Module:
    made = Holder(a=torch.empty(50, 7), b=torch.zeros(400), c=torch.empty(30, dtype=torch.bfloat16))
    nn.init.trunc_normal_(made.a)
    nn.init.trunc_normal_(made.b[100:300], 1, 2, 1.5, 2)  # its other way to draw
    nn.init.trunc_normal_(made.c, std=0.02, generator=torch.Generator().manual_seed(3))
    return made


@builder
def embedding_with_padding() -> nn.Module:
    made = nn.Embedding(10, 4, padding_idx=2)
    made.weight.data.normal_(std=0.02)
    made.weight.data[made.padding_idx].zero_()
    return made


@builder
def attention() -> nn.Module:
    return nn.ModuleList(
        [nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2, kdim=3, vdim=5, add_bias_kv=True)]
    )


@builder
def cloned_layers() -> nn.Module:
    return nn.Transformer(8, 2, 2, 2, 16, batch_first=True)


@builder
def copied_modules() -> nn.Module:
    first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    second = copy.deepcopy(first)
    first[0].weight.data.add_(1)
    return nn.ModuleList([first, second, copy.deepcopy(second)])


@builder
def recurrent() -> nn.Module:
    return nn.ModuleList([nn.LSTM(5, 6, 2, bidirectional=True, proj_size=3), nn.GRU(4, 4), nn.LSTMCell(2, 3)])


@builder
def tables() -> nn.Module:
    frequencies = 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8)
    angles = torch.outer(torch.arange(12), frequencies)
    position, width = torch.arange(10).unsqueeze(1), torch.exp(torch.arange(0, 6, 2) * (-math.log(1e4) / 6))
    sines = torch.zeros(10, 6)
    sines[:, 0::2], sines[:, 1::2] = torch.sin(position * width), torch.cos(position * width)
    mask = torch.full((4, 4), -math.inf).triu(1)
    return Holder(
        b_cos=torch.cat([angles, angles], -1).cos(),
        b_turns_saved=torch.polar(torch.ones_like(angles), angles),
        b_sines=sines.unsqueeze(0),
        b_mask=mask,
        b_positions_saved=torch.arange(7).expand((1, -1)),
        b_windows=torch.stack(torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij")).flatten(1),
    )


@builder
def changes_of_data() -> nn.Module:
    made = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    for parameter in made.parameters():
        parameter.data.mul_(0.5)
    made[0].weight.data = torch.randn(6, 6) / 3
    with torch.no_grad():
        made[1].weight[0].zero_()
        made[1].weight[2:4, ::2].normal_()
        made[1].weight[[0, 5], 1] = 7
        made[1].bias[[1, 3]] = made[1].weight[[2, 3], 1]
        for part in made[2].weight.chunk(3):
            nn.init.xavier_uniform_(part)
        made[2].bias.copy_(made[1].bias.flip(0))
        made[3].weight.copy_(made[3].weight.t().clone())
        made[3].weight.copy_(made[3].weight)
        made[3].weight.t_().tril_().t_()
        torch.mul(made[0].weight, 2, out=made[1].weight.data)
        torch._foreach_add_([made[2].bias, made[3].bias], 1)
    return made


@builder
def one_storage() -> nn.Module:
    flat = torch.randn(40)
    flat[30:].fill_(2)
    made = Holder(a=flat[:10].view(2, 5), b=flat[10:30].view(4, 5), c=flat[30:])
    made.b.data.uniform_()
    return made


@builder
def given_values() -> nn.Module:
    pretrained = torch.linspace(0, 1, 6, device="cpu").view(2, 3)
    made = Holder(
        a=torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        d=torch.Tensor(2, 3),
        e=torch.empty(2, 3).new_tensor([1, 2]),
        f=torch.Tensor([5, 6]),
        g=torch.asarray([1.0, 2.0]),
        b_scalar=torch.tensor(3),
        b_there=torch.tensor([1.0, 2.0], device=torch.empty(1).device),
    )
    made.d.data.copy_(pretrained)
    made.a.data.mul_(pretrained[:, :2]).add_(torch.tensor(0.5, device="cpu"))
    nn.init.normal_(made.e)
    return made


@builder
def arrays() -> nn.Module:
    np = pytest.importorskip("numpy")
    made = Holder(
        a=torch.as_tensor(np.arange(4.0), dtype=torch.float32),
        b=torch.from_numpy(np.ones((2, 3), dtype=np.float32)),
        c=torch.empty(2, 3),
    )
    made.c.data.copy_(torch.from_numpy(np.full((2, 3), 0.3)))
    made.a.data[np.array([1, 3])] = made.c[0, 0]
    return made


@builder
def loaded() -> nn.Module:
    made = nn.ModuleList([nn.Linear(3, 3), nn.Linear(2, 2), nn.Linear(2, 2)])
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        file = io.BytesIO()
        torch.save({"weight": torch.ones(2, 2), "bias": torch.arange(2.0)}, file)
    file.seek(0)
    made[1].load_state_dict(torch.load(file))
    file.seek(0)
    made[2].load_state_dict(torch.load(file, mmap=False), assign=True)
    return made


@builder
def on_the_cpu_by_name() -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 3, device="cpu"), nn.BatchNorm1d(3, device="cpu"))
    made.extra = nn.Parameter(torch.randn(5, device="cpu"))
    made.drop_rates = [x.item() for x in torch.linspace(0, 0.1, 4, device="cpu")]
    return made.append(nn.Linear(3, 3))


@builder
def moved() -> nn.Module:
    made = nn.ModuleList([nn.Linear(3, 3).cpu(), nn.Linear(3, 3).to("cpu").to(torch.bfloat16).float()])
    made[0].weight.data.cpu().zero_()  # no copy
    made[1].weight.data.to("cpu", copy=True).zero_()
    x = torch.arange(3).to(torch.device("cpu"), torch.float32)
    made.append(
        Holder(a=torch.randn(3).cpu(), b_x=x.to(made[1].weight), b_y=x.to("cpu", torch.half, True, True))
    )
    return made


@builder
def batch_norms_that_have_run() -> nn.Module:
    made = nn.ModuleList([nn.BatchNorm1d(3), nn.BatchNorm2d(2), nn.InstanceNorm1d(2, 0.1)])
    made.append(nn.InstanceNorm1d(2, track_running_stats=True))
    for norm, shape in zip(made, [(4, 3), (2, 2, 3, 3), (2, 2, 5), (2, 2, 5)], strict=True):
        norm(torch.randn(shape))
    made[0].eval()(torch.ones(4, 3))
    return made


@builder
def legacy_constructors() -> nn.Module:
    made = Holder(a=torch.Tensor(4, 3), b=torch.FloatTensor(5), c=torch.empty(2, 2))
    made.a.data.uniform_(-1, 1)
    made.b.data.fill_(2)
    made.c.data.copy_(torch.empty_like(made.a, device="cpu").fill_(3)[:2, :2])
    return made


@builder
def other_dtypes() -> nn.Module:
    made = nn.ModuleList([nn.Linear(4, 4).to(torch.bfloat16), nn.Linear(3, 3, dtype=torch.float64)])
    made.append(nn.Linear(20, 4).half())
    return made


@builder
def another_default_dtype() -> nn.Module:
    made = nn.ModuleList()
    try:
        for dtype in (torch.bfloat16, torch.float64):
            torch.set_default_dtype(dtype)
            made.extend([nn.Linear(4, 9), Holder(b_x=torch.arange(5) / 3, b_y=torch.ones(2) * 0.1)])
        return made
    finally:
        torch.set_default_dtype(torch.float32)


@builder
def parametrized() -> nn.Module:
    made = nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 4)), nn.Linear(4, 3))
    parametrizations.spectral_norm(made[1])
    return made


@builder
def every_kind_of_draw() -> nn.Module:
    p = torch.full((3, 4), 0.3)
    nn.functional.dropout(p, 0.5)
    draws = [
        torch.randn(3),
        torch.rand(2, 2),
        torch.randint(0, 9, (4,)),
        torch.randperm(6),
        torch.bernoulli(p),
    ]
    draws += [
        torch.normal(0.0, 1.0, (20,)),
        torch.normal(p, 2.0),
        torch.multinomial(p, 2),
        torch.poisson(p * 9),
    ]
    draws += [
        torch.randn_like(p),
        torch.rand_like(p),
        torch.empty(9).exponential_(),
        torch.empty(9).cauchy_(),
    ]
    draws += [torch.empty(4).bernoulli_(0.4), torch.empty(4, dtype=torch.long).random_(5), torch.randn(3)]
    return Holder(**{f"d{i}": draw for i, draw in enumerate(draws)})


@builder
def seeded_inside() -> nn.Module:
    first = nn.Linear(3, 3)
    torch.manual_seed(5)
    second = nn.Linear(3, 3)
    torch.manual_seed(5)  # to the very state it had
    third = nn.Linear(3, 3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        fourth = nn.Linear(3, 3)
    return nn.ModuleList([first, second, third, fourth, nn.Linear(3, 3)])


@builder
def seeded_last() -> nn.Module:
    made = nn.Linear(3, 3)
    torch.manual_seed(5)
    return made


@builder
def returned_to_the_start() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        first = nn.Linear(3, 3)
    return nn.ModuleList([first, nn.Linear(3, 3)])


@builder
def generator_of_its_own() -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    made = Holder(a=torch.randn(20, generator=generator), b=torch.empty(5), c=torch.randn(3))
    nn.init.normal_(made.b, generator=generator)
    real = torch.randn(5, generator=torch.Generator().manual_seed(2), device="cpu")
    made.c.data += real[:3]
    return made


@builder
def nothing_written() -> nn.Module:
    return Holder(a=torch.empty(0), b_x=torch.zeros(()))


@builder
def asks_where_tensors_are_made() -> nn.Module:
    """As transformers: on the meta device, it leaves its own initialisation out."""
    made = nn.Linear(3, 3)
    if torch.tensor([]).device != torch.device("meta"):
        nn.init.normal_(made.weight, std=0.02)
    return nn.ModuleList([made, Holder(a=torch.cat([torch.tensor([]), torch.ones(2)]))])
