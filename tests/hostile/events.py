"""What may happen to parameters and to the model."""

import copy
import io
import sys
from contextlib import suppress
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import zero_full
from tests.hostile.event import EVENTS, Event, always, at_stage_3, event, weight_of
from zero_full.integrations.deepspeed import install

WEIGHT = "layers.2.weight"
MOVED = r"layers\.\d\.\w+ was assigned a tensor while it was sharded|layers\.\d\.\w+ is sharded"
# The last is torch's own, if the model is called by itself: the inputs are not converted.
CONVERTED = r"layers\.\d\.\w+ was \w+ of shape|layers\.\d\.\w+ was assigned a tensor|same dtype, but got"
NEW_OR_NONE = r"came into the model after initialize|reached no parameter"
UNGATHERED = r"layers\.0\.weight is sharded and has no values here, but layers\.0 \(Linear\) uses it"
NEW = r"layers\.\d\.weight.* came into the model after initialize"

# Values of parameters ----------------------------------------------------------------------------


@event("p.mul_ under no_grad", "between", at_stage_3(MOVED))
def in_place(player: Any) -> None:
    with torch.no_grad():
        for p in player.module.parameters():
            p.fill_(0.3) if player.stage == 3 else p.mul_(0.5)


@event("p.data.mul_", "between", at_stage_3(MOVED))
def in_place_data(player: Any) -> None:
    for p in player.module.parameters():
        p.data.fill_(0.3) if player.stage == 3 else p.data.mul_(0.5)


@event("p.data = x", "between", at_stage_3(MOVED))
def other_data(player: Any) -> None:
    for p in player.module.parameters():
        p.data = p.data * 0.5


@event("vector_to_parameters", "between", at_stage_3(MOVED))
def from_a_vector(player: Any) -> None:
    params = list(player.module.parameters())
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(params).detach() * 0.5, params)


@event("load_state_dict", "between", at_stage_3(r"load_state_dict\(...\) of a Linear whose weight"))
def loaded(player: Any) -> None:
    state = {name: torch.full(p.shape, 0.2) for name, p in player.module.named_parameters()}
    player.module.load_state_dict(state)


@event("load_state_dict(assign=True)", "between", lambda s, n: "load_state_dict" if s == 3 else NEW_OR_NONE)
def assigned(player: Any) -> None:
    state = {name: torch.full_like(p, 0.2) for name, p in player.module.named_parameters()}
    player.module.load_state_dict(state, assign=True)


@event("edit in GatheredParameters", "between")
def edited(player: Any) -> None:
    with player.editing(0), torch.no_grad():
        for p in player.module.parameters():
            p.mul_(0.5)


@event("p.data = x in GatheredParameters", "between")
def edited_data(player: Any) -> None:
    with player.editing(0):
        for p in player.module.parameters():
            p.data = p.data * 0.5


@event("load_state_dict in GatheredParameters", "between")
def loaded_gathered(player: Any) -> None:
    with player.editing(0):
        loaded(player)


@event("read in GatheredParameters", "between")
def read(player: Any) -> None:
    with player.editing(None):
        assert all(bool(p.isfinite().all()) for p in player.module.parameters())


@event("engine.load_module_state_dict", "between")
def loaded_by_the_engine(player: Any) -> None:
    state = {name: torch.full(p.shape, 0.2) for name, p in player.module.named_parameters()}
    load = player.module.load_state_dict if player.stage is None else player.engine.load_module_state_dict
    load(state)


@event("rank 0: engine.load_module_state_dict of another shape", "between", at_stage_3(f"{WEIGHT} has shape"))
def loaded_another_shape(player: Any) -> None:
    """Below stage 3 no rank needs another one to load, and one that raises ends the run."""
    if player.stage != 3:
        return
    state = {name: torch.full(p.shape, 0.2) for name, p in player.module.named_parameters()}
    if player.engine.global_rank == 0:
        state[WEIGHT] = torch.zeros(3, 13)
    player.engine.load_module_state_dict(state)


@event("safe_set_full_fp32_param", "between")
def set_safely(player: Any) -> None:
    if player.stage is None:
        with torch.no_grad():
            weight_of(player).fill_(0.2)
            player.masters[weight_of(player)].fill_(0.2)
    else:
        zero_full.safe_set_full_fp32_param(weight_of(player), torch.full((13, 13), 0.2))


class OnPurposeError(Exception):
    pass


@event("a forward that fails, then safe_set_full_fp32_param", "between")
def set_after_a_failure(player: Any) -> None:
    """With overlap, what comes behind the failure is on its way already, with its old values."""

    def fail(*_: Any) -> None:
        raise OnPurposeError

    hook = player.module.layers[1].register_forward_pre_hook(fail)
    with suppress(OnPurposeError):
        player.call(torch.ones(5, 16, dtype=weight_of(player).dtype))
    hook.remove()
    set_safely(player)


@event("state_dict and back", "between")
def there_and_back(player: Any) -> None:
    if player.stage is not None:
        player.engine.load_state_dict(player.engine.state_dict())


# The model ---------------------------------------------------------------------------------------


@event("module.double()", "between", always(CONVERTED))
def double(player: Any) -> None:
    player.module.double()


@event("module.bfloat16()", "between", lambda s, n: None if n.startswith("bf16") else CONVERTED)
def bfloat16(player: Any) -> None:
    if player.stage is not None:
        player.module.bfloat16()


@event("module.float()", "between", lambda s, n: None if n.startswith("fp32") else CONVERTED)
def to_float(player: Any) -> None:
    if player.stage is not None:
        player.module.float()


@event("module.to(device)", "between")
def to_device(player: Any) -> None:
    player.module.to("cpu")


@event("a new nn.Parameter", "between", always(NEW))
def new_parameter(player: Any) -> None:
    dtype = weight_of(player).dtype
    player.module.layers[2].weight = nn.Parameter(torch.full((13, 13), 0.1, dtype=dtype))


@event("a new module", "between", always(NEW))
def new_module(player: Any) -> None:
    player.module.layers[2] = nn.Linear(13, 13).to(weight_of(player).dtype)


@event("copy.deepcopy(module)", "between", at_stage_3("cannot be copied or pickled while layers"))
def copied(player: Any) -> None:
    other = copy.deepcopy(player.module)
    assert bool(other(torch.ones(5, 16, dtype=weight_of(player).dtype)).isfinite())


@event("torch.save(module)", "between", at_stage_3("cannot be copied or pickled while layers"))
def saved(player: Any) -> None:
    torch.save(player.module, io.BytesIO())


@event("eval() and forward", "between")
def evaluated(player: Any) -> None:
    player.module.eval()
    with torch.no_grad():
        player.call(torch.ones(5, 16, dtype=weight_of(player).dtype))
    player.module.train()


@event("a layer called by itself", "between")
def layer_alone(player: Any) -> None:
    out = player.module.layers[2](torch.ones(5, 13, dtype=weight_of(player).dtype))
    assert bool(out.isfinite().all())


@event("a layer's forward()", "between", at_stage_3(UNGATHERED))
def forward_without_hooks(player: Any) -> None:
    layer = player.module.layers[0]
    layer.forward(torch.ones(2, 16, dtype=layer.weight.dtype))


@event("forward without backward", "before")
def unused_forward(player: Any) -> None:
    player.call(torch.ones(5, 16, dtype=weight_of(player).dtype))


@event("engine.metrics() in a forward", "call")
def measured(player: Any, x: Tensor) -> Tensor:
    if player.stage is None:
        return player.call(x)
    hook = player.module.layers[2].register_forward_hook(lambda *_: player.engine.metrics() and None)
    try:
        return player.call(x)
    finally:
        hook.remove()


@event(
    "install() of deepspeed after accelerate was imported",
    "between",
    always("accelerate was imported before"),
)
def installed_late(player: Any) -> None:
    if player.stage is None:
        return
    real = sys.modules.get("accelerate")
    sys.modules["accelerate"] = real or ModuleType("accelerate")
    try:
        install()
    finally:
        if real is None:
            del sys.modules["accelerate"]


@event("a layer is skipped", "call", lambda s, n: None)
def skipping(player: Any, x: Tensor) -> Tensor:
    layers = player.module.layers
    whole, layers[2] = layers[2], nn.Identity()
    try:
        return player.call(x)
    finally:
        layers[2] = whole


@event("frozen", "between")
def frozen(player: Any) -> None:
    weight_of(player).requires_grad_(False)


class ThereAndBack(Event):
    """Frozen for one step."""

    def between(self, player: Any) -> None:
        weight_of(player).requires_grad_(False)

    def step(self, player: Any) -> bool:
        player.step()
        weight_of(player).requires_grad_(True)
        return True


EVENTS["frozen for a step"] = ThereAndBack()


class Thawing(Event):
    """Frozen at first, and in the optimizer."""

    def construct(self, model: nn.Module) -> None:
        model.get_parameter(WEIGHT).requires_grad_(False)

    def between(self, player: Any) -> None:
        weight_of(player).requires_grad_(True)


EVENTS["unfrozen"] = Thawing()
