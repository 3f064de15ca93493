"""Lesson 10's tasks, one claim at a time; run on zero_min or on a learner's file in its place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lessons.evidence import same
from zero_min import activations
from zero_min.activations import Checkpoint, Meter, OffloadActivations
from zero_min.ledger import Ledger, tensors_in
from zero_min.offload import Host


def scaled(*values: float) -> nn.Linear:
    """A layer without bias that multiplies each number by its own weight."""
    layer = nn.Linear(len(values), len(values), bias=False)
    layer.weight.data.copy_(torch.diag(torch.tensor(values)))
    return layer


def packed_by(meter: Meter, tensors: list[Tensor]) -> Any:
    """What the last `pack` returns."""
    returned = None
    for tensor in tensors:
        returned = meter.pack(tensor)
    return returned


def test_meter_returns_what_autograd_is_to_keep() -> None:
    returned = packed_by(Meter(scaled(2.0)), [torch.tensor([3.0, 4.0])])
    same("what `pack` returns for [3, 4]", returned, [3.0, 4.0])


def test_meter_counts_the_memory_behind_views_once() -> None:
    meter, thirds = Meter(scaled(2.0)), torch.zeros(3, 8).unbind()
    packed_by(meter, [thirds[0], thirds[1], thirds[0], thirds[1]])
    known = {
        "every view adds the memory behind it, which is the same: count by its address": 4 * 96,
        "every view is taken for a memory of its own: count by the address of the storage": 2 * 96,
        "the bytes of the views are counted; they keep all of the memory alive": 64,
        "whatever is packed is added, although it is the same memory": 128,
        "only the last view's bytes are counted: take the size of the storage": 32,
    }
    same("bytes kept of two thirds of one tensor of 96 bytes", meter.total(), 96, lookalikes=known)


def test_meter_adds_up_what_has_memory_of_its_own() -> None:
    meter = Meter(scaled(2.0))
    packed_by(meter, alive := [torch.zeros(4), torch.zeros(6), torch.zeros(10)])
    assert len(alive) == 3
    known = {"the last storage counts, and should be added": 40, "elements are counted, not bytes": 20}
    same("bytes kept of three tensors of 16, 24 and 40 bytes", meter.total(), 80, lookalikes=known)


def test_meter_leaves_parameters_out() -> None:
    layer = nn.Linear(8, 2, bias=False)
    meter, x = Meter(layer), torch.ones(3, 8)
    packed_by(meter, [x, layer.weight.t(), layer.weight.detach()])
    known = {
        "the parameters are counted; they are there anyway": 96 + 64,
        "only the parameters are counted, and should be left out": 64,
    }
    same("bytes kept of an input of 96 bytes and a weight of 64", meter.total(), 96, lookalikes=known)


def noisy(x: Tensor) -> Tensor:
    """Dropout, in which half of the numbers survive."""
    return x * (torch.rand(x.shape) < 0.5)


def applied(run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """The output of a checkpoint, before any backward."""
    result: Tensor = Checkpoint.apply(run, torch.empty(0, requires_grad=True), *inputs)  # type: ignore[no-untyped-call]
    return result


def context(run: Callable[..., Tensor], *inputs: Tensor) -> Any:
    """The context of a checkpoint's forward. The output stays: torch 2.11 frees what is saved with it."""
    output = applied(run, *inputs)
    ctx: Any = output.grad_fn
    ctx.output = output
    return ctx


def drawn(state: Any) -> list[float] | None:
    """The next two numbers of a generator in this state."""
    if not isinstance(state, Tensor):
        return None
    generator = torch.Generator()
    generator.set_state(state)
    return [float(x) for x in torch.rand(2, generator=generator)]


def test_forward_returns_what_the_run_returns() -> None:
    x = torch.tensor([3.0, 5.0], requires_grad=True)
    same("2 x + y", applied(lambda x, y: 2 * x + y, x, torch.tensor([1.0, 1.0])), [7.0, 11.0])


def test_forward_keeps_the_inputs_and_nothing_from_inside() -> None:
    ledger, x = Ledger(), torch.ones(64, requires_grad=True)
    with ledger.watch():
        before = ledger.live()
        y = applied(lambda x: x.exp().exp().exp().exp(), x)
        kept = ledger.live() - before - y.nbytes
    states = torch.get_rng_state().nbytes
    kept = kept - states if kept >= states else kept  # the generator's state may be kept
    known = {
        "the graph of the run is kept: autograd has followed it, and nothing is saved": 3 * 256,
        "the input is kept a second time, as a copy": 256,
    }
    same("bytes that stay from the inside of a run", kept, 0, about="kept", lookalikes=known)


def test_forward_leaves_the_inputs_to_autograd() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2)
    saved = context(torch.add, x, y).saved_tensors
    known = {
        "nothing is kept by autograd: with save_for_backward it notices if a tensor changes meanwhile": 0,
        "more is kept than the inputs": 3,
        "one input of two is kept": 1,
    }
    same("how many tensors autograd keeps of two inputs", len(saved), 2, lookalikes=known)
    shared = [one.data_ptr() == other.data_ptr() for one, other in zip(saved, (x, y), strict=True)]
    same("whether these are the inputs' own memory", all(shared), True, about="memory")


def test_forward_notes_the_generator_before_the_run() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    ctx = context(noisy, torch.ones(8, requires_grad=True))
    known = {"the state is taken after the run, so the second run draws other numbers": torch.get_rng_state()}
    what = "what a generator in the state `ctx.random` draws next"
    known_draws = {cause: drawn(state) for cause, state in known.items()}
    same(what, drawn(getattr(ctx, "random", None)), drawn(before), lookalikes=known_draws)


def rerun(run: Callable[..., Tensor], *inputs: Tensor) -> tuple[list[Tensor], Tensor]:
    """What `again` returns, after other random numbers have been drawn."""
    ctx = context(run, *inputs)
    torch.rand(3)
    with torch.no_grad():  # as inside a backward
        return Checkpoint.again(ctx)


def test_again_gives_new_leaves_that_ask_for_gradients_where_the_inputs_did() -> None:
    x = torch.ones(2, requires_grad=True) * 3
    frozen, numbers = torch.full((2,), 4.0), torch.tensor([0, 1])
    inputs, _ = rerun(lambda x, frozen, numbers: (x * frozen)[numbers], x, frozen, numbers)
    same("the inputs of the second run", inputs, [[3.0, 3.0], [4.0, 4.0], [0, 1]])
    known = {
        "the first input has its history still: detach it, or backward runs on into what was before": [
            [False, True],
            [True, False],
            [True, False],
        ],
        "no input asks for a gradient": [[True, False]] * 3,
    }
    got = [[one.is_leaf, one.requires_grad] for one in inputs]
    expected = [[True, True], [True, False], [True, False]]
    same("whether each of 3 inputs is a leaf, and asks for a gradient", got, expected, lookalikes=known)


def test_again_runs_with_autograd() -> None:
    _, y = rerun(lambda x: 2 * x, torch.ones(2, requires_grad=True))
    known = {"autograd does not follow the second run: it is off in here until you enable it": False}
    same("whether the second output has a history", y.requires_grad, True, lookalikes=known)


def test_again_draws_the_numbers_that_the_first_run_drew() -> None:
    torch.manual_seed(5)
    ctx = context(noisy, torch.ones(12, requires_grad=True))
    first = [
        0.0 if draw >= 0.5 else 1.0 for draw in torch.rand(12, generator=torch.Generator().manual_seed(5))
    ]
    state = torch.get_rng_state()
    other = noisy(torch.ones(12)).tolist()
    torch.set_rng_state(state)
    _, second = Checkpoint.again(ctx)
    known = {"the second run drops other numbers than the first: its mask differs": other}
    same("12 ones after the dropout of the second run", second, first, lookalikes=known)


def test_again_leaves_the_generator_as_it_was() -> None:
    torch.manual_seed(7)
    ctx = context(noisy, torch.ones(4, requires_grad=True))
    expected, before = drawn(torch.get_rng_state()), drawn(torch.Generator().manual_seed(7).get_state())
    torch.rand(2)
    later = drawn(torch.get_rng_state())
    Checkpoint.again(ctx)
    known = {
        "the generator is left where the first run left it, so numbers repeat: put it back": expected,
        "the generator is left where it was before the first run": before,
    }
    got = drawn(torch.get_rng_state())
    same("what is drawn after `again`", got, later, lookalikes=known)


def gradients(run: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor | None]:
    """Of the inputs, if each element of the output has the gradient 1, 10, 100, ..."""
    y = applied(run, *inputs)
    y.backward(10.0 ** torch.arange(y.numel()))
    return [x.grad for x in inputs]


def test_backward_returns_an_entry_for_each_argument_of_forward() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2)
    returned = Checkpoint.backward(context(torch.add, x, y), torch.ones(2))
    count = len(returned) if isinstance(returned, tuple) else None
    known = {
        "entries for `run` and the handle are missing: each is None": 2,
        "one entry is missing: forward has `run`, the handle and the inputs": 3,
    }
    same("entries of `backward` for `run`, the handle and 2 inputs", count, 4, lookalikes=known)


def test_backward_gives_the_inputs_their_gradients() -> None:
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    frozen = torch.tensor([5.0, 6.0])
    got = gradients(lambda x, frozen: x * x * frozen, x, frozen)
    known = {
        "the gradient that came from behind is not used: ones were": [[30.0, 48.0], None],
        "no gradient comes out: everything before this learns nothing": [None, None],
        "the gradient that came is passed on, and not that of the inputs": [[1.0, 10.0], None],
    }
    same("gradients of x x y at [3, 4] and [5, 6], frozen", got, [[30.0, 480.0], None], lookalikes=known)


def test_backward_adds_to_the_parameters_of_a_module_that_is_called_twice() -> None:
    layer, x = scaled(2.0, 3.0), torch.tensor([1.0, 1.0], requires_grad=True)
    y = applied(layer, applied(layer, x))
    y.sum().backward()
    grad = None if layer.weight.grad is None else layer.weight.grad.diagonal()
    known = {
        "only one of the two calls has added its gradient": [2.0, 3.0],
        "both calls were recomputed from the same input": [2.0, 2.0],
        "each call has added its gradient twice": [8.0, 12.0],
    }
    same("the gradient of the weights 2 and 3", grad, [4.0, 6.0], lookalikes=known)
    same("the gradient of the input of both calls", x.grad, [4.0, 9.0])


def test_backward_reaches_parameters_behind_an_input_that_asks_for_nothing() -> None:
    table = nn.Embedding(3, 1)
    applied(table, torch.tensor([2, 0, 2])).sum().backward()
    same("the gradient of a table whose rows 2, 0 and 2 were read", table.weight.grad, [[1.0], [0.0], [2.0]])


INTERVALS = {  # of (layers, bytes of a boundary, bytes of a layer)
    (16, 4, 4): 4,
    (100, 1, 1): 10,
    (16, 1, 16): 1,
    (64, 1, 16): 2,
    (9, 16, 1): 9,
    (10, 3, 2): 5,
    (7, 2, 2): 2,
    (6, 5, 5): 2,
    (1, 8, 8): 1,
}


@pytest.mark.parametrize(("layers", "boundary", "block"), INTERVALS)
def test_interval_keeps_the_fewest_bytes_at_once(layers: int, boundary: int, block: int) -> None:
    right = INTERVALS[layers, boundary, block]
    root, sizes = round(layers**0.5), (layers, boundary, block)
    known = {
        "of two that are as good the larger is taken": {(7, 2, 2): 4, (6, 5, 5): 3}.get(sizes),
        "the last, smaller segment is not counted: round up": {(16, 4, 4): 3, (100, 1, 1): 9}.get(sizes),
        "that is the number of segments, and the number of layers in one was asked": -(-layers // right),
        "the root of the number of layers: right only if a layer keeps as much as its input": root,
        "all layers at once: while they are recomputed all of their activations are kept": layers,
        "one at a time: that keeps the input of every layer": 1,
    }
    known = {cause: value for cause, value in known.items() if value not in (None, right)}
    got = activations.best_interval(layers, boundary, block)
    what = f"layers at a time, of {layers}, which keep {block} bytes each, and their inputs {boundary}"
    same(what, got, right, lookalikes=known)


def offload(smallest: int = 16) -> tuple[OffloadActivations, Ledger, nn.Linear]:
    """Hooks for a layer whose weight has 256 bytes."""
    layer, ledger = nn.Linear(8, 8, bias=False), Ledger()
    return OffloadActivations(layer, Host(torch.device("cpu"), ledger), smallest), ledger, layer


def test_to_host_copies_what_is_large_and_no_parameter() -> None:
    hooks, ledger, layer = offload()
    moved = []
    for tensor in (torch.ones(8), torch.ones(3), torch.ones(4), layer.weight.t(), layer.weight.detach()[1]):
        before = ledger.moved["device to host"]
        hooks.pack(tensor)
        moved.append(ledger.moved["device to host"] - before)
    known = {
        "parameters are copied, too; they stay on the device anyway": [32, 0, 16, 256, 32],
        "small tensors are copied, too": [32, 12, 16, 0, 0],
        "nothing is copied": [0] * 5,
        "16 bytes are not fewer than 16: they go": [32, 0, 0, 0, 0],
        "everything is copied": [32, 12, 16, 256, 32],
        "small tensors are copied, and large ones stay": [0, 12, 0, 0, 0],
    }
    what = "bytes to the host, of tensors of 32, 12 and 16 bytes, a weight turned over, and a row of it"
    same(what, moved, [32, 0, 16, 0, 0], lookalikes=known)


def test_to_host_lets_the_device_s_memory_go() -> None:
    hooks, _, _ = offload()
    tensor, second = torch.ones(8), torch.ones(8)
    packed = hooks.pack(tensor)
    hooks.pack(second)  # by now the first copy has landed
    inside = packed.values() if isinstance(packed, dict) else packed
    kept = [t for t in tensors_in((inside,)) if t.numel() and t.data_ptr() == tensor.data_ptr()]
    known = {"the tensor on the device is kept beside its copy": 1}
    same(
        "tensors on the device that are kept of one that is offloaded",
        len(kept),
        0,
        about="kept",
        lookalikes=known,
    )


def test_from_host_gives_back_the_same_tensor() -> None:
    hooks, ledger, _ = offload()
    for what, tensor in (
        ("a matrix", torch.arange(6.0).view(2, 3)),
        ("a matrix turned over", torch.arange(6.0).view(3, 2).t()),
        ("whole numbers", torch.arange(6).view(3, 2)),
        ("half of a tensor", torch.arange(12.0)[6:]),
    ):
        got, count = hooks.unpack(hooks.pack(tensor)), tensor.numel()
        known = {"it comes back in one row: it should have its shape": [count]}
        same(f"the shape of {what}", list(got.shape), list(tensor.shape), lookalikes=known)
        same(f"{what}, there and back", got, tensor)
        same(f"the type of {what}", str(got.dtype), str(tensor.dtype), about="dtype")
    up, down = ledger.moved["host to device"], ledger.moved["device to host"]
    same("bytes up, of so many down", up, down, about="bytes")


def test_from_host_gives_back_what_has_stayed() -> None:
    hooks, ledger, layer = offload()
    small = torch.ones(3)
    for what, tensor in (("a small tensor", small), ("a parameter", layer.weight.detach())):
        got = hooks.unpack(hooks.pack(tensor))
        same(f"whether {what} comes back itself", got.data_ptr() == tensor.data_ptr(), True, about="memory")
    same("bytes that were moved for both", sum(ledger.moved.values()), 0, about="bytes")


def test_from_host_serves_a_backward() -> None:
    hooks, _, layer = offload()
    x = torch.linspace(-1, 1, 16).view(2, 8).requires_grad_()
    with hooks:
        y = layer(x).exp().sin().sum()
    y.backward()
    got = x.grad
    x.grad = None
    layer(x).exp().sin().sum().backward()
    same("the gradient of an input, with activations on the host", got, x.grad, near=1e-7)
