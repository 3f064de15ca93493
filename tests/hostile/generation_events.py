"""What may happen around generation and the weights for an inference server, and DTensors that come late."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zero_full
from tests.hostile.event import EVENTS, Event, always, event, weight_of
from tests.zero_full.runs import Net, config

WAITS = r"rank 0 waits in {}.* for ranks"


def receive(received: dict[str, Tensor], items: Any) -> None:
    """Apply what `weights(delta=True)` hands over, as a server does."""
    for name, indices, values in items:
        if indices is None:
            received[name] = values.clone()
        else:
            received[name].view(-1)[indices.long()] = values


def check_received(player: Any, received: dict[str, Tensor]) -> None:
    whole = player.engine.module_state_dict()
    assert received.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.equal(received[name], value), f"the receiver has other values of {name}"


def generate(player: Any) -> None:
    with player.engine.generation() as module:
        x = torch.ones(5, 16, dtype=weight_of(player).dtype)
        assert bool(module(x).isfinite())


def train(player: Any) -> None:
    player.backward(player.call(torch.ones(5, 16, dtype=weight_of(player).dtype)))


# Generation ---------------------------------------------------------------------------------------


@event("generation()", "between")
def generated(player: Any) -> None:
    if player.stage is not None:
        generate(player)


@event("generation() twice, one in the other", "between")
def generated_twice(player: Any) -> None:
    if player.stage is not None:
        with player.engine.generation():
            generate(player)
        generate(player)


@event("generation() of two engines", "between")
def two_engines(player: Any) -> None:
    """As with a model and its frozen reference. Each chooses memory from what is free when it begins."""
    if player.stage is None:
        return
    other = zero_full.initialize(model=Net(), config=config(player.stage))[0]
    x = torch.ones(5, 16)
    with player.engine.generation() as first:
        with other.generation() as second:
            assert bool(second(x).isfinite()) and bool(first(x.to(weight_of(player).dtype)).isfinite())
        generate(player)
    other.destroy()


@event("generation() that fails", "between")
def generation_failed(player: Any) -> None:
    if player.stage is not None:
        try:
            with player.engine.generation():
                raise ArithmeticError
        except ArithmeticError:
            generate(player)


class InForward(Event):
    """A hook of the second layer does it in the middle of the second step's first forward."""

    def __init__(self, act: Any) -> None:
        self.act, self.is_done = act, False

    def before(self, player: Any) -> None:
        self.is_done = player.stage is None

    def call(self, player: Any, x: Tensor) -> Tensor:
        if self.is_done:
            return player.call(x)

        def once(*_: Any) -> None:
            if not self.is_done:
                self.is_done = True
                self.act(player)

        hook = player.module.layers[2].register_forward_hook(once)
        try:
            return player.call(x)
        finally:
            hook.remove()


EVENTS["generation() in a forward"] = InForward(generate)
EVENTS["weights() in a forward"] = InForward(lambda player: list(player.engine.weights()))


class InBackward(Event):
    """A hook on a gradient does it in the middle of the backward pass."""

    def __init__(self, act: Any, refusal: str) -> None:
        self.act, self.refused = act, always(refusal)  # type: ignore[method-assign]

    def before(self, player: Any) -> None:
        if player.stage is not None:
            weight_of(player).register_hook(lambda grad: self.act(player))


EVENTS["generation() in a backward"] = InBackward(generate, r"in the middle of a step|inside a backward pass")
EVENTS["weights() in a backward"] = InBackward(
    lambda player: list(player.engine.weights()), r"inside a backward pass"
)


@event("generation() between backward and step", "after_backward", always(r"in the middle of a step"))
def generated_in_a_step(player: Any) -> None:
    if player.stage is not None:
        generate(player)


@event("training in generation()", "between", always(r"training inside engine.generation\(\)"))
def trained_in_generation(player: Any) -> None:
    if player.stage is not None:
        with player.engine.generation(), torch.enable_grad():
            train(player)


@event("a graph of generation()", "between", always(r"training inside engine.generation\(\)"))
def graph_of_generation(player: Any) -> None:
    if player.stage is not None:
        with player.engine.generation(), torch.enable_grad():
            loss = player.call(torch.ones(5, 16, dtype=weight_of(player).dtype))
        player.backward(loss)


@event("a load in generation()", "between")
def loaded_in_generation(player: Any) -> None:
    state = {name: torch.full(p.shape, 0.2) for name, p in player.module.named_parameters()}
    if player.stage is None:
        player.module.load_state_dict(state)
        return
    with player.engine.generation():
        player.engine.load_module_state_dict(state)
        generated = player.module.layers[2].weight
        assert bool((generated == generated.flatten()[0]).all()), "the block has the values from before"


# Weights ------------------------------------------------------------------------------------------


@event("weights(), half of them", "between")
def half_of_the_weights(player: Any) -> None:
    if player.stage is not None:
        items = player.engine.weights(bucket_bytes=400)
        next(items), next(items)
        assert len(list(player.engine.weights())) == 6


@event("weights() around a step", "step", always(r"a step or a load while engine\.weights"))
def weights_around_a_step(player: Any) -> bool:
    if player.stage is None:
        return False
    items = player.engine.weights(bucket_bytes=1)
    next(items)
    player.step()
    list(items)
    return True


@event("weights() around a load", "between", always(r"a step or a load while engine\.weights"))
def weights_around_a_load(player: Any) -> None:
    if player.stage is None:
        return
    state = {name: torch.full(p.shape, 0.2) for name, p in player.module.named_parameters()}
    items = player.engine.weights(bucket_bytes=1)
    next(items)
    player.engine.load_module_state_dict(state)
    list(items)


class StopsEarly(Event):
    """The consumer of changes stops in the middle. The next changes are all since the last complete ones."""

    def __init__(self, loads: bool) -> None:
        self.loads = loads

    def between(self, player: Any) -> None:
        if player.stage is None:
            if self.loads:
                player.module.load_state_dict(
                    {n: torch.full(p.shape, 0.2) for n, p in player.module.named_parameters()}
                )
            return
        self.received: dict[str, Tensor] = {}
        next(player.engine.weights(delta=True))
        receive(self.received, player.engine.weights(delta=True))
        if self.loads:
            state = {name: torch.full(p.shape, 0.2) for name, p in player.module.named_parameters()}
            player.engine.load_module_state_dict(state)
        for _ in range(2):  # nothing or everything has changed
            next(player.engine.weights(delta=True), None)

    def step(self, player: Any) -> bool:
        player.step()
        if player.stage is not None:
            next(player.engine.weights(bucket_bytes=1, delta=True), None)
            receive(self.received, player.engine.weights(bucket_bytes=400, delta=True))
            check_received(player, self.received)
        return True


EVENTS["weights(delta=True), stopped in the middle"] = StopsEarly(loads=False)
EVENTS["weights(delta=True), stopped around a load"] = StopsEarly(loads=True)


# One rank only, and after the end -----------------------------------------------------------------


class RankZero(Event):
    """Rank 0 alone does it, while the others go on to their forward."""

    def __init__(self, act: Any, call: str) -> None:
        self.act = act
        self.refused = always(WAITS.format(call))  # type: ignore[method-assign]

    def between(self, player: Any) -> None:
        if player.stage is not None and player.engine.global_rank == 0:
            self.act(player)


EVENTS["rank 0: generation()"] = RankZero(generate, r"engine\.generation")
EVENTS["rank 0: weights()"] = RankZero(lambda p: list(p.engine.weights()), r"engine\.weights")
EVENTS["rank 0: weights(delta=True)"] = RankZero(
    lambda p: list(p.engine.weights(delta=True)), r"engine\.weights"
)


class AfterTheEnd(Event):
    """The engine has ended."""

    def __init__(self, act: Any) -> None:
        self.act = act
        self.refused = always(r"after destroy")  # type: ignore[method-assign]

    def between(self, player: Any) -> None:
        if player.stage is not None:
            player.engine.destroy()
            self.act(player)


EVENTS["generation() after destroy"] = AfterTheEnd(generate)
EVENTS["weights() after destroy"] = AfterTheEnd(lambda player: list(player.engine.weights()))
EVENTS["weights(delta=True) after destroy"] = AfterTheEnd(
    lambda player: list(player.engine.weights(delta=True))
)

# DTensors -----------------------------------------------------------------------------------------


def cut_over_all(tensor: Tensor) -> Any:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return distribute_tensor(tensor, mesh, [Shard(0)])


# If the model is called by itself, the error is torch's own.
@event(
    "a DTensor as a parameter",
    "between",
    always(r"layers\.2\.weight.* came into the model after|mixed torch.Tensor and DTensor"),
)
def dtensor_as_parameter(player: Any) -> None:
    if player.stage is not None:
        whole = torch.zeros(13, 13, dtype=weight_of(player).dtype)
        player.module.layers[2].weight = nn.Parameter(cut_over_all(whole))


@event("p.data = a DTensor", "between", always(r"layers\.2\.weight was assigned|data is not allocated"))
def dtensor_as_data(player: Any) -> None:
    if player.stage is not None:
        weight_of(player).data = cut_over_all(torch.zeros(13, 13, dtype=weight_of(player).dtype))


@event("parallelize_module after initialize", "between", always(r"layers\.\d\.\w+|mat1 and mat2 shapes"))
def parallelized_late(player: Any) -> None:
    if player.stage is not None:
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        parallelize_module(player.module, mesh, {"layers.2": ColwiseParallel()})
