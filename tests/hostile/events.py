"""What may happen to a model, its gradients or its optimizer in the middle of a run.

An event does the same to plain torch and to zero_full. Where zero_full refuses, `refused` is what the error
must say; everywhere else the result must be plain torch's.
"""

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import zero_full

WEIGHT = "layers.2.weight"
Refusal = Callable[[int, str], str | None]  # (stage, numbers) -> what the error says; None: there is none


def never(stage: int, numbers: str) -> str | None:
    return None


def always(text: str) -> Refusal:
    return lambda stage, numbers: text


def at_stage_3(text: str) -> Refusal:
    return lambda stage, numbers: text if stage == 3 else None


def in_fp16(text: str) -> Refusal:
    return lambda stage, numbers: text if numbers == "fp16" else None


def weight_of(player: Any) -> nn.Parameter:
    return player.module.layers[2].weight


class Event:
    """Nothing happens."""

    refused: Refusal = staticmethod(never)

    def construct(self, model: nn.Module) -> None:
        """Before initialize."""

    def between(self, player: Any) -> None:
        """Between two steps."""

    def zero_grad(self, player: Any) -> bool:
        """In the place of zero_grad; True: it was."""
        return False

    def before(self, player: Any) -> None:
        """Between zero_grad and forward."""

    def call(self, player: Any, x: Tensor) -> Tensor:
        """The forward."""
        return player.call(x)

    def after_backward(self, player: Any) -> None:
        """Between backward and step."""

    def step(self, player: Any) -> bool:
        """In the place of step; True: it was."""
        return False


EVENTS: dict[str, Event] = {"nothing": Event()}


def event(name: str, moment: str, refused: Refusal = never) -> Callable[[Any], Any]:
    """Add an event that is one function at one moment."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        made = Event()
        made.refused = refused  # type: ignore[method-assign]
        setattr(made, moment, function)
        EVENTS[name] = made
        return function

    return add


MOVED = r"layers\.\d\.\w+ was given other values while it was sharded|was written while it was sharded"
# The last is torch's own, if the model is called by itself: the inputs are not converted.
CONVERTED = r"layers\.\d\.\w+ was \w+ of shape|layers\.\d\.\w+ was given other values|same dtype, but got"
NEW = r"layers\.\d\.weight.* came into the model after initialize"
NO_VALUES = r"layers\.\d\.\w+\.grad has no values here"
UNSCALED = r"written into the grad of layers.*loss scale"

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


@event("load_state_dict(assign=True)", "between", lambda s, n: "load_state_dict" if s == 3 else NEW)
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


@event("safe_set_full_fp32_param", "between")
def set_safely(player: Any) -> None:
    if player.stage is None:
        with torch.no_grad():
            weight_of(player).fill_(0.2)
            player.masters[weight_of(player)].fill_(0.2)
    else:
        zero_full.safe_set_full_fp32_param(weight_of(player), torch.full((13, 13), 0.2))


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


@event("module.float()", "between", lambda s, n: None if n == "fp32" else CONVERTED)
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


@event("forward without backward", "before")
def unused_forward(player: Any) -> None:
    player.call(torch.ones(5, 16, dtype=weight_of(player).dtype))


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

# Gradients ---------------------------------------------------------------------------------------


class ModuleZeroGrad(Event):
    """The module's own zero_grad."""

    def __init__(self, set_to_none: bool) -> None:
        self.set_to_none = set_to_none

    def zero_grad(self, player: Any) -> bool:
        player.module.zero_grad(set_to_none=self.set_to_none)
        return True


EVENTS["module.zero_grad()"] = ModuleZeroGrad(True)
EVENTS["module.zero_grad(set_to_none=False)"] = ModuleZeroGrad(False)


@event("p.grad = x before backward", "before", in_fp16(UNSCALED))
def preset(player: Any) -> None:
    weight_of(player).grad = torch.full((13, 13), 0.5, dtype=weight_of(player).dtype)


@event("p.grad = x before step", "after_backward", in_fp16(UNSCALED))
def replaced(player: Any) -> None:
    weight_of(player).grad = torch.full((13, 13), 0.5, dtype=weight_of(player).dtype)


@event("p.grad = None before step", "after_backward")
def cleared(player: Any) -> None:
    weight_of(player).grad = None


@event("all gradients by hand", "after_backward", in_fp16(UNSCALED))
def all_by_hand(player: Any) -> None:
    for p in player.module.parameters():
        p.grad = torch.full(p.shape, 0.5, dtype=p.dtype)


@event("clip_grad_norm_", "after_backward", always(NO_VALUES))
def clipped(player: Any) -> None:
    nn.utils.clip_grad_norm_(player.module.parameters(), 0.01)


@event("clip_grad_value_", "after_backward", always(NO_VALUES))
def clipped_by_value(player: Any) -> None:
    nn.utils.clip_grad_value_(player.module.parameters(), 0.01)


@event("p.grad.mul_", "after_backward", always(NO_VALUES))
def scaled_by_hand(player: Any) -> None:
    weight_of(player).grad.mul_(2)


@event("log p.grad.norm()", "after_backward", always(NO_VALUES))
def logged(player: Any) -> None:
    sum(p.grad.norm() for p in player.module.parameters() if p.grad is not None)


@event("safe_get_full_grad", "after_backward")
def looked_at(player: Any) -> None:
    if player.stage is not None:
        found = zero_full.safe_get_full_grad(weight_of(player))
        assert found is not None and bool(found.abs().max() > 0)


@event("torch.autograd.grad", "after_backward")
def gradients_aside(player: Any) -> None:
    loss = player.call(torch.ones(5, 16, dtype=weight_of(player).dtype))
    torch.autograd.grad(loss, [player.module.layers[4].bias])


def sees_a_gradient(param: Tensor) -> None:
    assert param.grad is not None and param.grad.shape == param.shape and bool(param.grad.isfinite().all())


class Hooked(Event):
    """A hook of the user's on a gradient, registered after initialize, for the second step."""

    def __init__(self, how: str) -> None:
        self.how = how

    def between(self, player: Any) -> None:
        weight = weight_of(player)
        if self.how == "tensor":
            weight.register_hook(lambda grad: grad * 3)
        else:
            weight.register_post_accumulate_grad_hook(sees_a_gradient)


EVENTS["register_hook"] = Hooked("tensor")
EVENTS["register_post_accumulate_grad_hook"] = Hooked("accumulated")

# Steps -------------------------------------------------------------------------------------------


@event("another learning rate", "between")
def other_lr(player: Any) -> None:
    for group in player.optimizer.param_groups:
        group["lr"] *= 3


@event("add_param_group", "between", always("parameter groups cannot be added after initialize"))
def another_group(player: Any) -> None:
    if player.stage is not None:
        player.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


@event("a schedule made late", "between")
def scheduled(player: Any) -> None:
    torch.optim.lr_scheduler.StepLR(player.optimizer, 1, 0.1).step()


@dataclass
class OnOneRank(Event):
    """Rank 0 alone does it: never equal, always refused."""

    what: str
    text: str
    moment: str = "between"

    def __post_init__(self) -> None:
        self.refused = always(self.text)  # type: ignore[method-assign]

    def _act(self, player: Any) -> None:
        if player.stage is None or player.engine.global_rank != 0:
            return
        if self.what == "lr":
            player.optimizer.param_groups[0]["lr"] *= 2
        elif self.what == "write":
            with torch.no_grad():
                player.module.layers[2].bias.mul_(2)
        else:
            weight_of(player).grad = torch.ones(13, 13, dtype=weight_of(player).dtype)

    def between(self, player: Any) -> None:
        if self.moment == "between":
            self._act(player)

    def after_backward(self, player: Any) -> None:
        if self.moment == "after_backward":
            self._act(player)


DIFFERENT = "the ranks would not take the same step: "
EVENTS["rank 0: another learning rate"] = OnOneRank("lr", DIFFERENT + "lr of group 0")
EVENTS["rank 0: a parameter written"] = OnOneRank("write", "layers.2.bias differ between ranks")
EVENTS["rank 0: p.grad = x"] = OnOneRank(
    "grad", DIFFERENT + "gradients written by hand: .*weight|" + UNSCALED
)
EVENTS["rank 0: p.grad = x"].moment = "after_backward"  # type: ignore[attr-defined]
