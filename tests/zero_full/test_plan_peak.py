"""The peak of a plan with a batch is what a real step needs, with activations as large as the rest."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_full
from tests.bench.shapes import gpt
from tests.worlds import run_in
from tests.zero_full.planned import BF16, STAGES
from tests.zero_full.runs import config
from zero_full._compat import TorchDispatchMode, identity_of
from zero_full.nested import tensors_in
from zero_full.plan import Plan, plan, side_by_side
from zero_min.gpt import GPTConfig

CPU = torch.device("cpu")
SHAPE = GPTConfig(vocabulary=300, context=128, layers=4, heads=4, width=64)
TOKENS = torch.zeros(4, 128, dtype=torch.int64)


class Backwards(nn.Module):
    """Layers that forward calls in another order than that of registration, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(6))
        self.layers[2].requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(96))
        self.first = nn.Embedding(300, 96)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean square of what comes out."""
        x = self.first(tokens)
        for layer in reversed(self.layers):
            x = x + torch.tanh(layer(x))
        return (x * self.scale).float().square().mean()


class Reentrant(nn.Module):
    """Recomputed blocks, each in a backward of its own, and scores as outputs besides the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = gpt(SHAPE, CPU)

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The loss and the scores."""
        x = self.model.characters(tokens) + self.model.positions.weight
        for block in self.model.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        scores = self.model.head(self.model.norm(x))
        return {"loss": scores.float().square().mean(), "scores": scores}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: gpt(SHAPE, CPU),
    "recomputed": lambda: gpt(SHAPE, CPU, recompute=True),
    "backwards": Backwards,
    "reentrant": Reentrant,
}
Case = tuple[str, int, int, dict[str, Any]]  # model, stage, micro-batches, precision


def given(stage: int, micro_batches: int, keys: dict[str, Any]) -> dict[str, Any]:
    zero = {
        "reduce_bucket_size": 60_000,
        "overlap_comm": False,
        "stage3_param_persistence_threshold": 100,
        "stage3_max_reuse_distance": 0,
    }
    return config(stage, gradient_accumulation_steps=micro_batches, zero_optimization=zero, **keys)


class Alive(TorchDispatchMode):
    """Bytes of all storages made by this thread, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.resized: list[torch.UntypedStorage] = []  # grow and shrink, and are not counted in `now`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_window = func is torch.ops.aten.from_file.default  # shared memory of ranks on a CPU
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            key, size = identity_of(storage), 0 if is_window else storage.nbytes()
            if key not in self.storages:
                self.storages[key] = weakref.ref(storage, partial(self.freed, key, size))
                self.now += size
        self.peak = max(self.peak, self.now + sum(storage.nbytes() for storage in self.resized))
        return result

    def resizes(self, tensor: Tensor) -> None:
        """Ask a tensor's storage for its size from now on. It is empty, and was counted in full."""
        storage = tensor.untyped_storage()
        key = identity_of(storage)
        self.now -= tensor.nbytes if key in self.storages else 0
        self.storages[key] = weakref.ref(storage, partial(self.freed, key, 0))
        self.resized.append(storage)

    def freed(self, key: int, size: int, _: object) -> None:
        """Subtract a storage that is gone."""
        del self.storages[key]
        self.now -= size


def peaks(comm: Any, cases: Sequence[Case]) -> list[int]:
    """The most that was alive at one time in the third step, if gradients are freed as on an accelerator."""
    return [peak(*case) for case in cases]


def peak(name: str, stage: int, micro_batches: int, keys: dict[str, Any]) -> int:
    with Alive() as alive:
        engine, optimizer, _, _ = zero_full.initialize(
            model=MODELS[name](), config=given(stage, micro_batches, keys)
        )
        for group in optimizer.trained:
            group.gradients.reuses_memory = False
        for flat in optimizer.sharded.flats:
            if flat.released_at_rest:
                alive.resizes(flat.full)
        for _ in range(3):
            alive.peak = 0
            for _ in range(micro_batches):
                tokens = TOKENS.clone()
                outputs = engine(tokens, tokens)
                engine.backward(outputs["loss"] if isinstance(outputs, dict) else outputs)
                del outputs
                engine.step()
        engine.destroy()
    return alive.peak


FOR_ONE: list[Case] = [
    *((name, 0, 1, BF16) for name in MODELS),
    *((name, 2, 3, BF16) for name in MODELS),
    ("gpt", 1, 1, {}),
    ("gpt", 3, 3, {}),
]
FOR_TWO: list[Case] = [("gpt", stage, times, BF16) for stage in STAGES for times in (1, 3)]


def planned(name: str, stage: int, micro_batches: int, keys: dict[str, Any], world: int) -> Plan:
    return plan(MODELS[name](), given(stage, micro_batches, keys), world, inputs=[TOKENS, TOKENS])


@pytest.mark.rotates
@pytest.mark.parametrize("world", [1, 2])
def test_the_peak_with_activations_is_what_a_step_needs(world: int) -> None:
    cases = FOR_ONE if world == 1 else FOR_TWO
    ranks = run_in("processes", peaks, world, cases)
    for case, *found in zip(cases, *ranks, strict=True):
        each = planned(*case, world)
        assert each.passes is not None and "at most" not in each.table()
        assert max(found) == pytest.approx(each.peak, rel=0.02), case
        summed = each.between_steps + each.gathered + each.buckets + (each.activations or 0)
        assert case[0] != "gpt" or case[2] == 1 or summed < each.peak, "gradients of activations are missing"


class _Looks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same values."""
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The gradient, if it has values."""
        return grad if grad.sum().item() > 0 else grad * 0


class Looks(nn.Linear):
    """A layer whose backward depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        """Forward does not."""
        return _Looks.apply(super().forward(x))  # type: ignore[no-any-return, no-untyped-call]


def test_a_backward_that_needs_values_has_an_upper_bound() -> None:
    each = plan(Looks(8, 8), config(1), 2, inputs=[torch.ones(5, 8)])
    assert each.passes is None and each.activations is not None
    assert each.peak == each.between_steps + each.gathered + each.buckets + each.activations
    assert "\npeak, at most" in each.table() and "\npeak, at most" in side_by_side([each])
    known = plan(nn.Linear(8, 8), config(1), 2, inputs=[torch.ones(5, 8)])
    assert known.activations == each.activations and "at most" not in side_by_side([known])
