"""A model that is constructed without memory gets, later and in parts, the values of plain construction."""

import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.zero_full.deferred_models import BUILDERS, GPT, Holder
from zero_full.construct.recorded_tensor import twin_of
from zero_full.construct.recording import Recording
from zero_full.construct.session import recorder

SEED = 11


# Equal to plain construction ---------------------------------------------------------------------------


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


def twins(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What a recording knows of these tensors. (A few are real from the beginning.)"""
    return [twin for tensor in tensors if (twin := twin_of(tensor)) is not None]


def replayed(recording: Recording, model: nn.Module, **arguments: Any) -> dict[str, Tensor]:
    values: dict[int, Tensor] = {}

    def deliver(twin: Tensor, real: Tensor) -> None:
        assert id(twin) not in values and real.device.type == "cpu" and not real.requires_grad
        values[id(twin)] = real

    tensors = tensors_of(model)
    recording.replay(deliver, twins(tensors.values()), **arguments)
    return {name: values.get(id(twin_of(tensor)), tensor) for name, tensor in tensors.items()}


def assert_equal(plain: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    assert list(plain) == list(values)
    for name, tensor in plain.items():
        assert (tensor.dtype, tensor.shape) == (values[name].dtype, values[name].shape), name
        assert tensor.stride() == values[name].stride(), name
        assert torch.equal(tensor, values[name]), name


def assert_as_plain(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(SEED)
    plain = build()
    state = torch.get_rng_state()
    torch.manual_seed(SEED)
    with recorder() as recording:
        model = build()
    assert [type(m).__name__ for m in model.modules()] == [type(m).__name__ for m in plain.modules()]
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in plain.parameters()]
    values = replayed(recording, model)
    assert_equal(tensors_of(plain), values)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_values_and_random_state_are_those_of_plain_construction(name: str) -> None:
    assert_as_plain(BUILDERS[name])


def steps(choose: random.Random) -> Iterator[Callable[[list[Tensor]], Any]]:
    """Random operations on a list of 4 x 6 tensors: whole and in part, random or not, on one or on two."""
    for _ in range(40):
        i, j, row = choose.randrange(5), choose.randrange(5), choose.randrange(4)
        yield choose.choice(
            [
                lambda t, i=i: t[i].normal_(),
                lambda t, i=i: t[i].zero_(),
                lambda t, i=i: t[i].mul_(0.5),
                lambda t, i=i, row=row: t[i][row].uniform_(),
                lambda t, i=i, row=row: t[i][:, row].fill_(row),
                lambda t, i=i, j=j: t[i].copy_(t[j]),
                lambda t, i=i, j=j: t[i].add_(t[j]),
                lambda t, i=i, j=j, row=row: t[i][row].copy_(t[j][0].clone()),
                lambda t, i=i, j=j: t.__setitem__(i, t[j] * 2),
                lambda t, i=i, j=j: t.__setitem__(i, t[j][:]),
                lambda t, i=i: t.__setitem__(i, torch.bernoulli(t[i].sigmoid())),
                lambda t, i=i: t.__setitem__(i, torch.randn(4, 6)),
            ]
        )


@pytest.mark.parametrize("seed", range(40))
def test_any_order_of_operations_gives_the_same_values(seed: int) -> None:
    def build() -> nn.Module:
        tensors = [torch.ones(4, 6) for _ in range(5)]
        for step in steps(random.Random(seed)):
            step(tensors)
        return Holder(**{f"b_{i}": tensor for i, tensor in enumerate(tensors)})

    assert_as_plain(build)


# Random state ------------------------------------------------------------------------------------------


def test_another_ranks_state_gives_its_values_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(SEED)
    state, plain = torch.get_rng_state(), tensors_of(GPT())
    torch.manual_seed(SEED + 1)
    own = torch.get_rng_state()
    with recorder() as recording:
        model = GPT()
    recording.rng_state_before = state
    assert_equal(plain, replayed(recording, model))
    assert torch.equal(torch.get_rng_state(), own)


def test_a_generator_that_was_used_since_construction_is_left_alone() -> None:
    with recorder() as recording:
        model = GPT()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    replayed(recording, model)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_delivery_may_draw_and_replay_can_be_repeated() -> None:
    with recorder() as recording:
        model = GPT()
    seen: list[list[Tensor]] = []
    for _ in range(2):
        seen.append([])
        recording.replay(
            lambda _, real: seen[-1].append(real + torch.rand(()) * 0), twins(model.parameters())
        )
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_ranks_that_are_threads_can_construct_at_the_same_time() -> None:
    torch.manual_seed(SEED)
    state, plain = torch.get_rng_state(), tensors_of(BUILDERS["every_kind_of_draw"]())
    results: list[dict[str, Tensor]] = []

    def rank() -> None:
        with recorder() as recording:
            model = BUILDERS["every_kind_of_draw"]()
        recording.rng_state_before = state
        results.append(replayed(recording, model))

    threads = [threading.Thread(target=rank) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for values in results:
        assert_equal(plain, values)


# Memory ------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Counts the real bytes of every storage that an operation returns, until the storage is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self.count(tensor.untyped_storage())
        return out

    def count(self, storage: torch.UntypedStorage) -> None:
        if id(storage) in self.known:
            return
        self.known.add(id(storage))
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.forget, id(storage), storage.nbytes())

    def forget(self, identity: int, nbytes: int) -> None:
        self.known.discard(identity)
        self.now -= nbytes


def halved_afterwards() -> nn.Module:
    made = nn.ModuleList(GPT(32, 8, 100) for _ in range(2))
    for parameter in made.parameters():
        parameter.data.mul_(0.5)
    return made


@pytest.mark.parametrize("build", [lambda: GPT(32, 8, 100), halved_afterwards], ids=["GPT", "halved"])
def test_replay_holds_no_more_than_two_parameters(build: Callable[[], nn.Module]) -> None:
    with recorder() as recording:
        model = build()
    sizes = [parameter.nbytes for parameter in model.parameters()]
    with LiveBytes() as live:
        recording.replay(lambda tensor, real: None, twins(tensors_of(model).values()))
    assert max(sizes) <= live.peak <= 2 * max(sizes)
    assert sum(sizes) > 10 * live.peak and live.now == 0


def test_recording_makes_no_real_tensor() -> None:
    with LiveBytes() as live, recorder():
        GPT(32, 8, 100)
    assert live.peak < 6000  # a generator's state


LARGER_THAN_MEMORY = """
import resource
import torch
from tests.zero_full.test_deferred import GPT, recorder, tensors_of, twins

torch.set_num_threads(1)
with recorder() as recording:  # torch imports much when it first asks for shapes
    small = GPT()
recording.replay(lambda tensor, real: real.sum(), twins(tensors_of(small).values()))
with open("/proc/self/status") as status:
    used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
limit = used + 48 * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
with recorder() as recording:
    model = GPT(512, 20, 1000)
print("wanted", sum(p.nbytes for p in model.parameters()) / 2**20, "MiB")
sums = []
recording.replay(lambda tensor, real: sums.append(real.sum().item()), twins(tensors_of(model).values()))
print("delivered", len(sums))
try:
    GPT(512, 20, 1000)
except (MemoryError, RuntimeError):
    print("plain construction failed")
"""


@pytest.mark.rotates
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is one of Linux")
def test_a_model_larger_than_memory_is_constructed() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", LARGER_THAN_MEMORY]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    wanted = float(done.stdout.split()[1])
    assert wanted > 4 * 48
    assert "delivered" in done.stdout and "plain construction failed" in done.stdout


# What cannot be recorded -------------------------------------------------------------------------------

READS: dict[str, tuple[Callable[[], Any], str]] = {
    "item": (lambda: torch.linspace(0, 0.1, 4)[1].item(), "_local_scalar_dense"),
    "if": (lambda: 1 if torch.ones(1) > 0 else 0, "_local_scalar_dense"),
    "tolist": (lambda: torch.ones(3).tolist(), "Tensor.tolist"),
    "numpy": (lambda: torch.ones(3).numpy(), "Tensor.numpy"),
    "address": (lambda: torch.ones(3).data_ptr(), "Tensor.data_ptr"),
    "equal": (lambda: torch.equal(torch.ones(1), torch.ones(1)), "aten.equal"),
    "allclose": (lambda: torch.allclose(torch.ones(1), torch.ones(1)), "aten.allclose"),
    "nonzero": (lambda: torch.ones(3).nonzero(), "aten.nonzero"),
    "mask": (lambda: torch.ones(3)[torch.ones(3) > 0], "aten.index"),
    "into real": (lambda: torch.zeros(3, device="cpu").copy_(torch.ones(3)), "aten.copy_"),
}


@pytest.mark.parametrize("name", READS)
def test_reading_values_inside_is_an_error_that_names_the_operation(name: str) -> None:
    read, operation = READS[name]
    with pytest.raises(RuntimeError, match=f"({operation}).* needs values.*GatheredParameters"), recorder():
        nn.Linear(2, 2)
        read()


def test_a_users_own_mistake_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="same reduction dim"), recorder():
        torch.ones(2, 3) @ torch.ones(2, 3)


def test_a_tensor_from_elsewhere_is_refused() -> None:
    stranger = torch.empty(3, device="meta")
    with recorder() as recording:
        with pytest.raises(ValueError, match=r"shape \(3,\) has no values"):
            stranger * 2
        with pytest.raises(ValueError, match=r"has no values"):
            torch.tensor([torch.ones(()), torch.ones(())]) * 2
    with pytest.raises(ValueError, match=r"shape \(3,\) has no values"):
        recording.replay(lambda tensor, real: None, [stranger])


def test_a_source_that_changes_before_replay_is_an_error() -> None:
    source = torch.ones(3)
    with recorder() as recording:
        parameter = nn.Parameter(torch.empty(3))
        parameter.data.copy_(source)
    source.add_(1)
    with pytest.raises(RuntimeError, match=r"shape \(3,\) that has changed since"):
        recording.replay(lambda tensor, real: None, twins([parameter]))


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays_changed(fails: bool) -> None:
    state, functions = torch.get_rng_state(), (torch.empty, torch.tensor, nn.init.normal_)
    try:
        with recorder():
            GPT()
            if fails:
                raise KeyError("a constructor's")
    except KeyError:
        assert fails
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().set_state(state)))
    assert (torch.empty, torch.tensor, nn.init.normal_) == functions
    assert torch.get_default_device().type == torch.randn(2).device.type == "cpu"
    assert torch.empty(1, device="meta").is_meta
    with recorder() as recording:
        parameter = nn.Parameter(torch.ones(2))
    recording.replay(lambda tensor, real: None, twins([parameter]))
