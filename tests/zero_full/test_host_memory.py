"""Memory on the host: one piece of the size that was foreseen, asked for first, and given back."""

import gc
import mmap
from collections.abc import Iterable
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.hostile.lasting import left, steps
from tests.worlds import POOL, new_pool
from tests.zero_full.planned import BF16, Odd
from tests.zero_full.runs import WIDTH, Net, config, data
from zero_full import assemble
from zero_full.offload import HostTier
from zero_full.offload.arena import LINE, Arena, Places
from zero_full.optim import build_optimizer
from zero_full.optim.state_size import state_bytes
from zero_full.precision import Dtypes
from zero_full.shard.deal.host_memory import host_memory

PAGE, CUDA = mmap.PAGESIZE, torch.device("cuda")
SIZES = [100, 64, 5000, 100, 1, 3 * PAGE, 7]
HOST = {"offload_optimizer": {"device": "cpu"}}


class Cuda:
    """Registers memory as CUDA does: never the same twice, and perhaps not all of it."""

    def __init__(self, most: float = float("inf")) -> None:
        self.most, self.registered = most, dict[int, int]()
        self.cudaHostRegister, self.cudaHostUnregister = self.register, self.unregister

    def register(self, pointer: int, size: int, flags: int) -> int:
        """An error's number, or 0."""
        assert pointer % PAGE == size % PAGE == 0 and flags == 1
        overlaps = any(p < pointer + size and pointer < p + s for p, s in self.registered.items())
        if overlaps or size + sum(self.registered.values()) > self.most:
            return 2
        self.registered[pointer] = size
        return 0

    def unregister(self, pointer: int) -> int:
        """Of one that is registered."""
        del self.registered[pointer]
        return 0


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def spans(rooms: Iterable[Tensor]) -> list[tuple[int, int]]:
    return sorted((room.data_ptr(), room.data_ptr() + room.nbytes) for room in rooms)


@pytest.mark.parametrize("chunk", [1, PAGE, 2 * PAGE, 100 * PAGE])
def test_rooms_lie_apart_and_each_in_one_registration(chunk: int) -> None:
    cuda = Cuda()
    arena = Arena(SIZES, cuda, chunk)
    rooms = [arena.take(size, torch.uint8) for size in reversed(SIZES)]
    assert all(room is not None and room.data_ptr() % LINE == 0 and not room.any() for room in rooms)
    taken = spans(room for room in rooms if room is not None)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(taken))
    chunks = [(p, p + size) for p, size in cuda.registered.items()]
    assert all(sum(low <= start and stop <= high for low, high in chunks) == 1 for start, stop in taken)
    assert arena.locked == sum(cuda.registered.values()) == arena.size == Places(SIZES, chunk).size
    padding = (LINE + (PAGE if chunk < 100 * PAGE else 0)) * len(SIZES) + PAGE
    assert sum(SIZES) <= arena.size <= sum(SIZES) + padding
    assert all(size <= max(chunk, max(SIZES)) + PAGE for size in cuda.registered.values())
    arena.close()
    assert not cuda.registered and arena.locked == 0


def test_there_is_no_room_that_was_not_foreseen() -> None:
    arena = Arena([64, 0, 64])
    first, second = arena.take(16, torch.float32), arena.take(32, torch.bfloat16)
    assert first is not None and second is not None and arena.size == PAGE
    assert arena.take(16, torch.float32) is None and arena.take(0, torch.float32) is None
    opened = HostTier().open([64], torch.device("cpu"))
    rooms = [opened.allocate(16, torch.float32, torch.device("cpu")) for _ in range(2)]
    assert [room.untyped_storage().resizable() for room in rooms] == [False, True]
    assert Arena([]).size == 0


def test_a_room_outlives_its_arena_and_nothing_stays_registered() -> None:
    for close in (True, False):
        cuda = Cuda()
        arena = Arena([400], cuda)
        room = arena.take(100, torch.float32)
        assert room is not None and cuda.registered
        if close:
            arena.close()
        del arena
        gc.collect()
        assert not cuda.registered
        assert room.fill_(3.0).sum() == 300.0


def test_what_cannot_be_page_locked_is_an_error_with_the_key_and_leaves_nothing() -> None:
    cuda = Cuda(most=2 * PAGE)
    with pytest.raises(RuntimeError, match=r'pin_memory: .* ulimit -l .* "pin_memory": false'):
        Arena([PAGE] * 3, cuda, chunk=PAGE)
    gc.collect()
    assert not cuda.registered


def test_a_tier_locks_only_if_asked_and_only_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    for pin, device, locked in ((True, "cuda", PAGE), (False, "cuda", 0), (True, "cpu", 0)):
        opened = HostTier(pin).open([64], torch.device(device))
        assert sum(cuda.registered.values()) == locked
        opened.close()
    assert not cuda.registered


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_a_ratio_is_a_share(ratio: float) -> None:
    with pytest.raises(ValueError, match="ratio must be from 0 to 1"):
        HostTier(ratio=ratio)


# A run -------------------------------------------------------------------------------------------


RULES: list[tuple[str, dict[str, Any], int]] = [
    ("AdamW", {}, 8),
    ("Adam", {"amsgrad": True}, 12),
    ("SGD", {}, 0),
    ("SGD", {"momentum": 0.9}, 4),
    ("RMSprop", {"centered": True}, 8),
    ("Lion", {}, 4),
    ("Lamb", {}, 8),
    ("Muon", {}, 4),
]


@pytest.mark.parametrize(("kind", "options", "size"), RULES)
def test_what_a_rule_keeps_is_known_before_its_first_step(
    kind: str, options: dict[str, Any], size: int
) -> None:
    model = nn.Linear(4, 4, bias=False)
    groups = [{"params": list(model.parameters())}]
    base = build_optimizer(kind, {"lr": 0.1, **options}, groups, model)
    calls = []
    base.register_step_post_hook(lambda *_: calls.append(1))
    assert state_bytes(base, 0, torch.float32, Dtypes()) == size
    assert not calls and not base.state and base.param_groups[0]["params"] == [model.weight]
    model.weight.grad = torch.ones(4, 4)
    base.step()
    assert sum(v.nbytes for v in base.state[model.weight].values() if v.dim()) == 16 * size


def test_what_a_rule_of_a_users_keeps_nobody_knows() -> None:
    class Mine(torch.optim.SGD):
        """Somebody's."""

    base = Mine([nn.Parameter(torch.ones(2))], lr=0.1)
    assert state_bytes(base, 0, torch.float32, Dtypes()) is None


def needed_and_held(comm: Any, keys: dict[str, Any]) -> tuple[int, int, int]:
    """What was asked for before, what is held after a step, and what the arena is of it."""
    asked: list[int] = []

    def note(*given: Any) -> Any:
        memory = host_memory(*given)
        asked.append(memory.total)
        return memory

    with mock.patch.object(assemble, "host_memory", note):
        engine, optimizer, _, _ = zero_full.initialize(model=Odd(), config=keys)
    engine.backward(engine(torch.randn(5, WIDTH)))
    optimizer.step()
    held = sum(t.nbytes for t in optimizer.holdings()["host"])
    size = optimizer.settings.tier.arena.size
    engine.destroy()
    return asked[0], held, size


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", ["AdamW", "Lion", "Muon"])
def test_as_much_is_asked_for_as_is_held(stage: int, kind: str) -> None:
    keys = config(stage, zero_optimization=HOST, optimizer={"type": kind, "params": {}}, **BF16)
    for asked, held, size in POOL.run(needed_and_held, 2, keys):
        assert asked == held and 0 < size < held + 8 * PAGE


class Wide(nn.Module):
    """40 MiB of parameters, nearly all in one matrix: what is so large goes back to the system at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2560, 4096)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        return self.layer(x).square().mean()


def resident(comm: Any) -> tuple[int, int, str]:
    """MiB while an engine runs, and after destroy, with everything still in somebody's hands."""
    engine, optimizer, _, _ = zero_full.initialize(model=Wide(), config=config(2, zero_optimization=HOST))
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 2560)))
        engine.step()
    before = left()[2]
    engine.destroy()
    try:
        optimizer.state_dict()
    except RuntimeError as error:
        return before, left()[2], str(error)
    return before, left()[2], ""


def test_destroy_gives_the_memory_back() -> None:
    with new_pool(1) as pool:
        [(before, after, told)] = pool.run(resident, 1)
    assert before - after >= 3 * 40, f"a master and two moments: {before} and {after} MiB"
    assert "state_dict after destroy" in told


@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_many_steps_leave_nothing_behind(ratio: float, count: int) -> None:
    zero = {"offload_optimizer": {"device": "cpu", "ratio": ratio}}
    for early, late in POOL.run(steps, 2, 2, zero, count):
        assert late[0] <= early[0] and late[1] <= early[1] and late[2] - early[2] <= 4, "files, threads, MiB"


def steps_in_part(comm: Any, stage: int, ratio: float) -> tuple[list[set[bool]], list[tuple[str, bool]]]:
    """Whether the state of what is stepped together is away; and of each weight."""
    zero = {"offload_optimizer": {"device": "cpu", "ratio": ratio}, "stage3_param_persistence_threshold": 0}
    engine, optimizer, _, _ = zero_full.initialize(
        model=Net(), config=config(stage, zero_optimization={**zero, "reduce_bucket_size": 1})
    )
    found: list[set[bool]] = []
    step_part = optimizer.steppers._step_part

    def note(stepper: Any, part: Any, *rest: Any) -> None:
        found.append({group.master.tier.is_offloaded for group in part})
        step_part(stepper, part, *rest)

    with mock.patch.object(optimizer.steppers, "_step_part", note):
        engine.backward(engine(data(0, 0, comm.rank)))
        engine.step()
    away = {m.name: group.master.tier.is_offloaded for group in optimizer.trained for m in group.members}
    engine.destroy()
    return found, sorted(away.items())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_first_layers_stay_on_the_device_and_each_place_steps_alone(stage: int) -> None:
    """Of 445 elements the first layer has 221, the second 182 and the third 42."""
    for ratio, first_away in ((0.0, 3), (0.1, 2), (0.5, 1), (0.99, 0)):
        for parts, away in POOL.run(steps_in_part, 2, stage, ratio):
            assert all(len(places) == 1 for places in parts)
            assert set().union(*parts) == {*([True] if ratio else []), *([False] if first_away else [])}
            weights = [(name, there) for name, there in away if name.endswith("weight")]
            assert [there for _, there in weights] == [first_away <= place for place in range(3)], ratio


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("bucket", [1, 200, 10**6])
def test_a_share_that_is_far_from_the_ratio_is_told(
    stage: int, bucket: int, caplog: pytest.LogCaptureFixture
) -> None:
    for ratio in (0.0, 0.2, 0.4, 0.5, 0.8, 1.0):
        zero = {"offload_optimizer": {"device": "cpu", "ratio": ratio}, "reduce_bucket_size": bucket}
        caplog.clear()
        optimizer = zero_full.initialize(model=Net(), config=config(stage, zero_optimization=zero))[1]
        sizes = [
            (sum(m.param.numel() for m in group.members), group.master.tier.is_offloaded)
            for group in optimizer.trained
        ]
        away = sum(size for size, there in sizes if there) / sum(size for size, _ in sizes)
        told = f"ratio is {ratio:g}, but {away:.2f} of" in caplog.text
        assert told == ("offload_optimizer.ratio" in caplog.text) == (abs(away - ratio) > 0.1), (ratio, away)
        if bucket > 445:
            assert away == (ratio >= 0.5)
        optimizer.close(gather=False)


def moved_and_back(comm: Any) -> list[bool]:
    """Whether what may leave the device comes back as it was, beside state that is on the host already."""
    engine, optimizer, _, _ = zero_full.initialize(model=Net(), config=config(2, zero_optimization=HOST))
    engine.backward(engine(data(0, 0, comm.rank)))
    engine.step()
    before = [group.master.values.clone() for group in optimizer.trained]
    engine.offload_states()
    gone = [group.parameters.full.untyped_storage().nbytes() == 0 for group in optimizer.trained]
    engine.reload_states()
    engine.backward(engine(data(1, 0, comm.rank)))
    same = [torch.equal(a, group.master.values) for a, group in zip(before, optimizer.trained, strict=True)]
    engine.step()
    engine.destroy()
    return gone + same


def test_state_in_the_arena_stays_there_when_states_are_offloaded() -> None:
    assert all(POOL.run(moved_and_back, 1)[0])
