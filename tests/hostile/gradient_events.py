"""What may happen to gradients, to the optimizer, and on one rank alone."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import zero_full
from tests.hostile.event import EVENTS, Event, always, event, in_fp16, weight_of

NO_VALUES = r"layers\.\d\.\w+\.grad has no values"
UNSCALED = r"the grad of layers.*loss scale"

# Gradients ---------------------------------------------------------------------------------------


class ModuleZeroGrad(Event):
    """The module's own zero_grad."""

    def __init__(self, set_to_none: bool) -> None:
        self.set_to_none = set_to_none

    def zero_grad(self, player: Any) -> bool:
        player.module.zero_grad(set_to_none=self.set_to_none)
        return True


class OptimizersZeroGrad(Event):
    """The optimizer's, which leaves zeros."""

    def zero_grad(self, player: Any) -> bool:
        # Beside masters, plain torch's optimizer does not see the gradients of 16-bit parameters.
        whose = player.module if player.stage is None else player.optimizer
        whose.zero_grad(set_to_none=False)
        return True


EVENTS["optimizer.zero_grad(set_to_none=False)"] = OptimizersZeroGrad()
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


@event("clip_grad_norm_ of optimizer.param_groups", "after_backward", always(NO_VALUES))
def clipped_by_group(player: Any) -> None:
    for group in player.optimizer.param_groups:
        nn.utils.clip_grad_norm_(group["params"], 0.01)


@event("clip_grad_value_", "after_backward", always(NO_VALUES))
def clipped_by_value(player: Any) -> None:
    nn.utils.clip_grad_value_(player.module.parameters(), 0.01)


@event("p.grad.mul_", "after_backward", always(NO_VALUES))
def scaled_by_hand(player: Any) -> None:
    weight_of(player).grad.mul_(2)


@event("log p.grad.norm()", "after_backward", always(NO_VALUES))
def logged(player: Any) -> None:
    sum(p.grad.norm() for p in player.module.parameters() if p.grad is not None)


@event("p.grad put back after another backward", "after_backward", always(f"{NO_VALUES}|{UNSCALED}"))
def put_back(player: Any) -> None:
    kept = weight_of(player).grad
    player.module.zero_grad()
    player.backward(player.call(torch.ones(5, 16, dtype=weight_of(player).dtype)))
    weight_of(player).grad = kept


@event("safe_get_full_grad", "after_backward")
def looked_at(player: Any) -> None:
    if player.stage is not None:
        found = zero_full.safe_get_full_grad(weight_of(player))
        assert found is not None and bool(found.abs().max() > 0)


@event("torch.autograd.grad", "after_backward", in_fp16("multiplied by the loss scale"))
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


@event("optimizer.state.clear()", "between")
def without_state(player: Any) -> None:
    player.optimizer.state.clear()


@event("optimizer.state = {}", "between")
def other_state(player: Any) -> None:
    player.optimizer.state = defaultdict(dict)


@event("optimizer.state.pop(p)", "between")
def without_the_state_of_one(player: Any) -> None:
    weight = weight_of(player)
    player.optimizer.state.pop(weight if player.stage is not None else player.masters[weight], None)


@dataclass
class WritesBeforeSteps(Event):
    """A hook before the step writes a gradient, from the second step on."""

    whose: str
    refused = staticmethod(in_fp16(UNSCALED))

    def between(self, player: Any) -> None:
        weight = weight_of(player)
        stepped = weight if player.stage is not None else player.masters[weight]
        optimizer = player.optimizer if player.stage is None else getattr(player, self.whose)
        gradient = torch.full((13, 13), 0.5, dtype=stepped.dtype)
        optimizer.register_step_pre_hook(lambda *_: setattr(stepped, "grad", gradient.clone()))


EVENTS["a hook on step writes p.grad"] = WritesBeforeSteps("wrapped")
EVENTS["a hook on the passed-in optimizer's step writes p.grad"] = WritesBeforeSteps("given")


# Clipping of one step, and the norm before it ----------------------------------------------------


def clip(player: Any, *norms: float) -> None:
    for norm in norms:
        if player.stage is None:
            nn.utils.clip_grad_norm_(player.module.parameters(), norm)
        else:
            player.optimizer.clip_next_step(norm)


@event("clip_next_step twice", "after_backward")
def clipped_twice(player: Any) -> None:
    clip(player, 0.01, 0.02)


@dataclass
class ClipsWithoutStep(Event):
    """Chooses a norm, and discards the gradients: the third step has its own."""

    whose: str

    def step(self, player: Any) -> bool:
        clip(player, 0.01)
        discards = player.module if player.stage is None else getattr(player, self.whose)
        discards.zero_grad()
        return True


EVENTS["clip_next_step, then optimizer.zero_grad()"] = ClipsWithoutStep("optimizer")
EVENTS["clip_next_step, then module.zero_grad()"] = ClipsWithoutStep("module")


class ClipsInAdvance(Event):
    """Chooses a norm before the gradients of the last step are discarded: it is of those to come."""

    def between(self, player: Any) -> None:
        if player.stage is not None:
            clip(player, 0.01)
            player.module.zero_grad()

    def after_backward(self, player: Any) -> None:
        if player.stage is None:
            clip(player, 0.01)


EVENTS["clip_next_step, then zero_grad() and backward"] = ClipsInAdvance()


@event("optimizer.grad_norm() between micro-batches", "call")
def norm_between(player: Any, x: Tensor) -> Tensor:
    if player.stage is not None:
        assert player.optimizer.grad_norm() >= 0
    return player.call(x)


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
        elif self.what == "clip":
            clip(player, 0.01)
        elif self.what == "norm":
            player.optimizer.grad_norm()
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
EVENTS["rank 0: p.grad = x"] = OnOneRank("grad", DIFFERENT + "gradient of .*weight, by hand: |" + UNSCALED)
EVENTS["rank 0: clip_next_step"] = OnOneRank(
    "clip", DIFFERENT + "gradient clipping: 0.01 .rank 0., 0.0 .rank 1"
)
EVENTS["rank 0: optimizer.grad_norm()"] = OnOneRank(
    "norm", DIFFERENT + r"call of grad_norm: \d .rank 0., nothing"
)
for each in ("rank 0: p.grad = x", "rank 0: clip_next_step", "rank 0: optimizer.grad_norm()"):
    EVENTS[each].moment = "after_backward"  # type: ignore[attr-defined]
